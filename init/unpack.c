/* A tar that comes through a pipe, unpacked by a child that is root in the box's user namespace: what is made belongs to
 * the box, is charged to it and ends at its limits, and every path is resolved in its root. Here and not in the node,
 * which has no id that may make a file in the box.
 *
 * Links are made last, so that no entry goes through one that the tar brought: nothing is written but below PATH. Links
 * that are there already are the box's own affair and are followed, as /bin is on most systems. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "box.h"

#define BLOCK 512
/* Of an extended header: paths, and attributes of which nothing is kept. */
#define EXTENDED_MAX (1u << 20)

struct block { /* a header: POSIX 1003.1 ustar */
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[6], version[2], user[32],
		group[32], major[8], minor[8], prefix[155], rest[12];
};
_Static_assert(sizeof(struct block) == BLOCK, "a header is one block");

struct entry {
	char name[PATH_MAX], link[PATH_MAX];
	char type;
	mode_t mode;
	uint64_t size;
	time_t mtime;
	int has_name, has_link, has_size; /* given by the extended headers before it */
};

struct link {
	struct link *next;
	time_t mtime;
	char *name, to[];
};

static int source;
static uid_t owner; /* and group; 0: the box's root */
static struct entry entry;
static struct link *links, **last_link = &links;

static int bad(int error)
{
	errno = error;
	return -1;
}

/* So many bytes of the source, which has them: a whole tar says where it ends. */
static int take(void *into, size_t length)
{
	for (size_t have = 0; have < length;) {
		ssize_t got = read(source, (char *)into + have, length - have);
		if (got == 0)
			return bad(EBADMSG);
		if (got < 0 && errno != EINTR)
			return -1;
		have += got > 0 ? (size_t)got : 0;
	}
	return 0;
}

/* The next bytes of an entry, and what fills up their last block, to a file (-1: nowhere). */
static int pass(uint64_t length, int to)
{
	static char buffer[1 << 18];
	uint64_t padded = length + (BLOCK - length % BLOCK) % BLOCK;

	while (padded > 0) {
		size_t part = padded < sizeof buffer ? (size_t)padded : sizeof buffer;
		size_t useful = part < length ? part : (size_t)length;
		if (take(buffer, part) < 0)
			return -1;
		for (size_t at = 0; to >= 0 && at < useful;) {
			ssize_t put = write(to, buffer + at, useful - at);
			if (put < 0 && errno != EINTR)
				return -1;
			at += put > 0 ? (size_t)put : 0;
		}
		padded -= part;
		length -= useful;
	}
	return 0;
}

/* Octal digits, or the two's complement that GNU tar writes for what they cannot hold. */
static int number(const char *field, size_t width, uint64_t *out)
{
	uint64_t value = 0;
	size_t at = 0;

	if ((unsigned char)field[0] & 0x80) {
		value = (unsigned char)field[0] & 0x40 ? ~(uint64_t)0 : 0; /* negative: a time before 1970 */
		for (at = width - 8; at < width; at++)
			value = value << 8 | (unsigned char)field[at];
		*out = value;
		return 0;
	}
	while (at < width && field[at] == ' ')
		at++;
	for (; at < width && field[at] >= '0' && field[at] <= '7'; at++)
		value = value << 3 | (uint64_t)(field[at] - '0');
	*out = value;
	return at < width && field[at] && field[at] != ' ' ? bad(EBADMSG) : 0;
}

static int is_sound(const struct block *header)
{
	const unsigned char *bytes = (const unsigned char *)header;
	uint64_t said, sum = 0;

	for (size_t i = 0; i < BLOCK; i++)
		sum += i >= offsetof(struct block, sum) && i < offsetof(struct block, type) ? ' ' : bytes[i];
	return number(header->sum, sizeof header->sum, &said) == 0 && said == sum;
}

/* A path of the tar as one below the directory that we are in; "." for the directory itself. */
static int clean(char *path)
{
	char *from = path, *to = path;

	while (*from) {
		size_t length = strcspn(from, "/");
		if (length == 2 && !strncmp(from, "..", 2))
			return bad(EINVAL);
		if (length && !(length == 1 && *from == '.')) {
			if (to > path)
				*to++ = '/';
			memmove(to, from, length);
			to += length;
		}
		from += length + (from[length] == '/');
	}
	if (to == path)
		*to++ = '.';
	*to = 0;
	return 0;
}

static int copy_path(char *into, const char *from, size_t length)
{
	length = strnlen(from, length);
	if (length == 0 || length >= PATH_MAX)
		return bad(length ? ENAMETOOLONG : EBADMSG);
	memcpy(into, from, length);
	into[length] = 0;
	return 1;
}

/* Records of the form "LENGTH KEY=VALUE\n". */
static int read_extended(char *body, size_t length)
{
	for (char *at = body, *end = body + length; at < end && *at;) {
		char *digits, *key, *value;
		size_t size = strtoul(at, &digits, 10);
		if (*digits != ' ' || size > (size_t)(end - at) || at + size <= digits + 1 || at[size - 1] != '\n')
			return bad(EBADMSG);
		key = digits + 1;
		at[size - 1] = 0;
		if ((value = strchr(key, '='))) {
			*value++ = 0;
			size_t long_ = (size_t)(at + size - value);
			if (!strcmp(key, "path") && (entry.has_name = copy_path(entry.name, value, long_)) < 0)
				return -1;
			if (!strcmp(key, "linkpath") && (entry.has_link = copy_path(entry.link, value, long_)) < 0)
				return -1;
			if (!strcmp(key, "size")) {
				entry.size = strtoull(value, NULL, 10);
				entry.has_size = 1;
			}
			if (!strncmp(key, "GNU.sparse", 10))
				return bad(ENOTSUP);
		}
		at += size;
	}
	return 0;
}

/* A header that says something of the next one. 1: it was one; 0: it is an entry. */
static int extended(const struct block *header, uint64_t size)
{
	static char body[EXTENDED_MAX + BLOCK + 1];
	size_t padded = (size_t)((size + BLOCK - 1) / BLOCK * BLOCK);

	if (!strchr("xgLK", header->type) || !header->type)
		return 0;
	if (size > EXTENDED_MAX)
		return bad(E2BIG);
	if (take(body, padded) < 0)
		return -1;
	body[size] = 0;
	switch (header->type) {
	case 'x': return read_extended(body, (size_t)size) < 0 ? -1 : 1;
	case 'L': return (entry.has_name = copy_path(entry.name, body, (size_t)size)) < 0 ? -1 : 1;
	case 'K': return (entry.has_link = copy_path(entry.link, body, (size_t)size)) < 0 ? -1 : 1;
	default: return 1; /* of all that follow: a comment, mostly */
	}
}

static int read_header(const struct block *header, uint64_t size)
{
	uint64_t mode, mtime;
	size_t prefix = memcmp(header->magic, "ustar", 6) ? 0 : strnlen(header->prefix, sizeof header->prefix);
	size_t name = strnlen(header->name, sizeof header->name);

	if (number(header->mode, sizeof header->mode, &mode) < 0 ||
	    number(header->mtime, sizeof header->mtime, &mtime) < 0)
		return -1;
	if (!entry.has_name) {
		memcpy(entry.name, header->prefix, prefix);
		if (prefix)
			entry.name[prefix++] = '/';
		memcpy(entry.name + prefix, header->name, name);
		entry.name[prefix + name] = 0;
	}
	if (!entry.has_link) {
		memcpy(entry.link, header->link, sizeof header->link);
		entry.link[sizeof header->link] = 0;
	}
	entry.type = header->type && header->type != '7' ? header->type : '0';
	if (entry.type == '0' && *entry.name && entry.name[strlen(entry.name) - 1] == '/')
		entry.type = '5'; /* as tars before POSIX say it */
	entry.mode = (mode_t)(mode & 07777);
	entry.mtime = (time_t)mtime;
	if (!entry.has_size)
		entry.size = size;
	return clean(entry.name);
}

static int belongs(const char *path)
{
	return owner ? lchown(path, owner, owner) : 0;
}

static int make_directory(const char *path)
{
	if (mkdir(path, 0755) < 0)
		return errno == EEXIST ? 0 : -1;
	return belongs(path);
}

static int make_way(char *path)
{
	for (char *at = path + 1; *path && (at = strchr(at, '/')); at++) {
		*at = 0;
		int failed = make_directory(path);
		*at = '/';
		if (failed)
			return -1;
	}
	return 0;
}

/* What was there goes; a directory does not, for whatever is in it was not asked for. */
static int make_room(const char *path)
{
	return unlink(path) < 0 && errno != ENOENT ? -1 : 0;
}

static int unpack_file(void)
{
	struct timespec times[2] = {{entry.mtime, 0}, {entry.mtime, 0}};
	struct stat what;
	int to, failed;

	if (stat(entry.name, &what) == 0 && S_ISDIR(what.st_mode))
		return bad(EISDIR); /* nor does a link that leads to one: without /bin nothing runs any more */
	if (make_room(entry.name) < 0 ||
	    (to = open(entry.name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) < 0)
		return -1;
	failed = pass(entry.size, to) < 0 || (owner && fchown(to, owner, owner) < 0) ||
		 fchmod(to, entry.mode) < 0; /* last: a new owner takes set-id bits away */
	futimens(to, times); /* a time that this file system does not know is no reason to have no file */
	int error = errno;
	close(to);
	if (failed)
		unlink(entry.name); /* half of it is worse than none */
	errno = error;
	return failed ? -1 : 0;
}

static int unpack_directory(void)
{
	struct stat what, itself;

	if (!strcmp(entry.name, "."))
		return 0; /* where to unpack is the caller's, not the tar's */
	if (stat(entry.name, &what) < 0 || !S_ISDIR(what.st_mode)) {
		if (make_room(entry.name) < 0 || mkdir(entry.name, 0700) < 0)
			return -1;
	} else if (lstat(entry.name, &itself) < 0 || S_ISLNK(itself.st_mode)) {
		return 0; /* a way to somewhere else, which has an owner and a mode already */
	}
	return belongs(entry.name) < 0 || chmod(entry.name, entry.mode) < 0 ? -1 : 0;
}

static int keep_link(void)
{
	size_t to = strlen(entry.link) + 1, name = strlen(entry.name) + 1;
	struct link *link = malloc(sizeof *link + to + name);

	if (!link)
		return -1;
	link->next = NULL;
	link->mtime = entry.mtime;
	link->name = link->to + to;
	memcpy(link->to, entry.link, to);
	memcpy(link->name, entry.name, name);
	*last_link = link;
	last_link = &link->next;
	return 0;
}

static int make_links(void)
{
	for (; links; links = links->next) {
		struct timespec times[2] = {{links->mtime, 0}, {links->mtime, 0}};
		strcpy(entry.name, links->name);
		if (make_room(links->name) < 0 || symlink(links->to, links->name) < 0 || belongs(links->name) < 0)
			return -1;
		utimensat(AT_FDCWD, links->name, times, AT_SYMLINK_NOFOLLOW);
	}
	return 0;
}

static int unpack_entry(void)
{
	if (make_way(entry.name) < 0)
		return -1;
	switch (entry.type) {
	case '0': return unpack_file();
	case '5': return unpack_directory() < 0 || pass(entry.size, -1) < 0 ? -1 : 0;
	case '2': return keep_link();
	case '1':
		if (clean(entry.link) < 0 || make_room(entry.name) < 0)
			return -1;
		return link(entry.link, entry.name);
	default: return bad(ENOTSUP);
	}
}

/* 0: unpacked to the end. */
static int unpack(void)
{
	static const struct block zero;
	struct block header;
	uint64_t size;
	int more;

	for (;;) {
		if (take(&header, sizeof header) < 0)
			return -1;
		if (!memcmp(&header, &zero, sizeof zero))
			break;
		if (!is_sound(&header) || number(header.size, sizeof header.size, &size) < 0)
			return bad(EBADMSG);
		if ((more = extended(&header, size)) < 0)
			return -1;
		if (more)
			continue;
		if (read_header(&header, size) < 0 || unpack_entry() < 0)
			return -1;
		memset(&entry, 0, sizeof entry);
	}
	if (make_links() < 0)
		return -1;
	*entry.name = 0;
	while (read(source, &header, sizeof header) > 0)
		; /* what fills up the last record: whoever writes it waits */
	return 0;
}

static int enter(const char *path)
{
	char *copy = strdup(path);

	return !copy || make_way(copy) < 0 || make_directory(copy) < 0 ? -1 : chdir(copy);
}

int unpack_inside(const struct message *message, struct child *out)
{
	struct view field;
	struct reply reply;
	const char *path = NULL;
	uint32_t offset = 0, user = 0;
	int more, wrong = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_PATH: wrong |= field_string(&field, &path); break;
		case FIELD_USER: wrong |= field_u32(&field, &user); break;
		default: wrong = 1;
		}
	}
	if (more < 0 || wrong || !path || *path != '/' || message->fd_count < 1)
		return EBADMSG;
	pid_t pid = fork();
	if (pid < 0)
		return errno;
	if (pid > 0) {
		*out = (struct child){.pid = pid, .id = message->head.id, .kind = CHILD_WORK, .error_fd = -1};
		return 0;
	}
	source = message->fds[0];
	owner = user;
	umask(0);
	int failed = enter(path) < 0 || unpack() < 0;
	int error = errno ? errno : EIO;
	reply_start(&reply, FRAME_DONE, message->head.id);
	reply_u32(&reply, FIELD_ERRNO, failed ? (uint32_t)error : 0);
	if (failed)
		reply_string(&reply, FIELD_WORDS, entry.name);
	_exit(reply_send(CONTROL_FD, &reply, -1) < 0 ? 1 : 0);
}
