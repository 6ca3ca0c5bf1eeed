/* One request about files, done by a child that is root in the box's user namespace: what is made belongs to the box, is
 * charged to it, and every path is resolved in its root. A node that is no root on its host may not touch these files
 * from outside, and what a root node's ids make there the box's file system does not know. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "box.h"

#define LINKS_MAX 40
/* Names for what is not finished. */
#define TRIES_MAX 1000

struct request {
	struct look look;
	const char *to;
	uint32_t operation, mode, user, group;
};

int open_path(int directory, const char *path, int flags, mode_t mode)
{
	if (flags & O_PATH) /* where open passes over the others, openat2 refuses them */
		flags &= O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	struct open_how how = {
		.flags = (uint64_t)(unsigned)flags, .mode = flags & O_CREAT ? mode : 0, .resolve = RESOLVE_NO_MAGICLINKS};

	return (int)syscall(SYS_openat2, directory, path, &how, sizeof how);
}

int make_parents(const char *path)
{
	char *copy = strdup(path);

	if (!copy)
		return -1;
	for (char *at = copy + 1; *at && (at = strchr(at, '/')); at++) {
		*at = 0;
		if (mkdir(copy, 0755) < 0 && errno != EEXIST)
			return -1;
		*at = '/';
	}
	return 0;
}

/* File systems whose files are not data but the kernel's own words. */
int is_of_kernel(int fd)
{
	static const uint32_t kinds[] = {
		0x9fa0,	    /* proc */
		0x62656572, /* sysfs */
		0x27e0eb,   /* cgroup */
		0x63677270, /* cgroup2 */
		0x64626720, /* debugfs */
		0x74726163, /* tracefs */
		0x73636673, /* securityfs */
		0xf97cff8c, /* selinux */
		0x62656570, /* configfs */
		0xcafe4a11, /* bpf */
		0x19800202, /* mqueue */
		0x6165676c, /* pstore */
		0xde5e81e4, /* efivarfs */
		0x65735543, /* fusectl */
		0x42494e4d, /* binfmt_misc */
	};
	struct statfs system;

	if (fstatfs(fd, &system) < 0)
		return 1;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if ((uint32_t)system.f_type == kinds[i])
			return 1;
	return 0;
}

int is_mount(int directory, const char *name)
{
	struct statx what;

	return statx(directory, name, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_TYPE, &what) == 0 &&
	       what.stx_attributes & STATX_ATTR_MOUNT_ROOT;
}

int find_place(const char *path, int follow, struct place *out)
{
	char now[PATH_MAX], next[PATH_MAX];
	int from = AT_FDCWD;

	if (strlen(path) >= sizeof now) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(now, path);
	for (int links = 0; links < LINKS_MAX; links++) {
		size_t length = strlen(now);
		while (length > 1 && now[length - 1] == '/')
			now[--length] = 0;
		char *slash = strrchr(now, '/');
		const char *name = slash ? slash + 1 : now, *way = !slash ? "." : slash == now ? "/" : now;
		if (!*name || !strcmp(name, ".") || !strcmp(name, "..")) { /* a directory by another name than its own */
			way = now;
			name = ".";
			slash = NULL;
		}
		if (strlen(name) > NAME_MAX) {
			errno = ENAMETOOLONG;
			return -1;
		}
		strcpy(out->name, name);
		if (slash)
			*slash = 0; /* "/" is a string of its own */
		out->directory = open_path(from, way, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
		int error = errno;
		if (from >= 0)
			close(from);
		errno = error;
		if (out->directory < 0)
			return -1;
		ssize_t size = follow ? readlinkat(out->directory, out->name, next, sizeof next - 1) : -1;
		if (size < 0)
			return 0; /* no link, or nothing at all */
		int end = open_path(out->directory, out->name, O_PATH | O_CLOEXEC, 0);
		if (end < 0 && errno == ELOOP) /* one of the kernel's, whose text is no path */
			return -1;
		if (end >= 0)
			close(end);
		next[size] = 0;
		memcpy(now, next, (size_t)size + 1);
		from = out->directory;
	}
	errno = ELOOP;
	return -1;
}

/* Of the pipe: pieces, each with its length before it. The last is empty: what breaks off is not whole. 1: one more. */
static int take(int source, void *into, size_t size)
{
	for (size_t have = 0; have < size;) {
		ssize_t got = read(source, (char *)into + have, size - have);
		if (got < 0 && errno == EINTR)
			continue;
		if (got == 0)
			errno = EBADMSG;
		if (got <= 0)
			return -1;
		have += (size_t)got;
	}
	return 0;
}

static int store_pieces(int source, int to)
{
	static char piece[1 << 18];
	uint32_t left;

	for (;;) {
		if (take(source, &left, sizeof left) < 0)
			return -1;
		if (left == 0)
			return 0;
		while (left > 0) {
			size_t part = left < sizeof piece ? left : sizeof piece;
			if (take(source, piece, part) < 0)
				return -1;
			for (size_t at = 0; at < part;) {
				ssize_t put = write(to, piece + at, part - at);
				if (put < 0 && errno != EINTR)
					return -1;
				at += put > 0 ? (size_t)put : 0;
			}
			left -= (uint32_t)part;
		}
	}
}

/* One that nobody has: this process's number is in it. Whoever takes it all the same makes us fail, and no more. */
static int unfinished_name(int directory, char *name, size_t size)
{
	struct stat there;

	for (int i = 0; i < TRIES_MAX; i++) {
		snprintf(name, size, UNFINISHED "%d-%d", getpid(), i);
		if (fstatat(directory, name, &there, AT_SYMLINK_NOFOLLOW) < 0)
			return errno == ENOENT;
	}
	errno = EEXIST;
	return 0;
}

/* A file in the directory that has no name yet, where its file system can make such a one, so that nothing is left of it
 * whoever is killed; else, and to be moved to its place, under a name of ours. */
static int make_unfinished(int directory, char *name, size_t size, mode_t mode)
{
	int file = openat(directory, ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, mode);

	*name = 0;
	if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
		return file;
	if (!unfinished_name(directory, name, size))
		return -1;
	if ((file = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode)) < 0)
		*name = 0;
	return file;
}

static int give_name(int file, int directory, char *name, size_t size)
{
	char self[32];

	snprintf(self, sizeof self, "/proc/self/fd/%d", file);
	if (unfinished_name(directory, name, size) &&
	    linkat(AT_FDCWD, self, directory, name, AT_SYMLINK_FOLLOW) == 0)
		return 0;
	*name = 0;
	return -1;
}

/* Nobody sees half of it: it takes the place of what is there when it is whole, with that one's owner. */
static int replace(const struct place *place, int source, mode_t mode, const struct stat *before)
{
	char name[64];
	int file = make_unfinished(place->directory, name, sizeof name, mode);
	int has_owner = before && (before->st_uid != 0 || before->st_gid != 0);

	if (file < 0)
		return -1;
	int failed = store_pieces(source, file) < 0 ||
		     (has_owner && fchown(file, before->st_uid, before->st_gid) < 0 && errno != EPERM && errno != EINVAL) ||
		     (!*name && give_name(file, place->directory, name, sizeof name) < 0);
	int error = errno;
	close(file); /* before the answer: a program that was just written can be started */
	errno = error;
	if (!failed && renameat(place->directory, name, place->directory, place->name) == 0)
		return 0;
	error = errno;
	if (*name)
		unlinkat(place->directory, name, 0);
	errno = error;
	return -1;
}

/* A file that is a mount cannot be replaced, and one that is added to is not to be. */
static int write_in_place(const struct place *place, int source, mode_t mode, int append)
{
	int flags = O_WRONLY | (append ? O_APPEND | O_CREAT : 0) | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	int file = openat(place->directory, place->name, flags, mode);
	struct stat what;

	if (file < 0 || fstat(file, &what) < 0)
		return -1;
	if (!S_ISREG(what.st_mode) || is_of_kernel(file)) {
		errno = S_ISREG(what.st_mode) ? EOPNOTSUPP : ENXIO;
		return -1;
	}
	if (!append && ftruncate(file, 0) < 0)
		return -1;
	int failed = store_pieces(source, file) < 0 || (!append && fchmod(file, mode) < 0);
	int error = errno;
	close(file);
	errno = error;
	return failed ? -1 : 0;
}

static int store(const struct request *request)
{
	int append = (request->look.flags & FILES_APPEND) != 0, found;
	struct place place;
	struct stat what;

	if (make_parents(request->look.path) < 0 || find_place(request->look.path, 1, &place) < 0)
		return -1;
	found = fstatat(place.directory, place.name, &what, AT_SYMLINK_NOFOLLOW) == 0;
	if (is_of_kernel(place.directory) || (found && !S_ISREG(what.st_mode))) {
		errno = found && S_ISDIR(what.st_mode) ? EISDIR : found && !S_ISREG(what.st_mode) ? ENXIO : EOPNOTSUPP;
		return -1;
	}
	if (append || (found && is_mount(place.directory, place.name)))
		return write_in_place(&place, request->look.pipe, request->mode, append);
	return replace(&place, request->look.pipe, request->mode, found ? &what : NULL);
}

static int make_directory(const struct request *request)
{
	int deep = (request->look.flags & FILES_DEEP) != 0;
	struct place place;
	struct stat what;

	if ((deep && make_parents(request->look.path) < 0) || find_place(request->look.path, 0, &place) < 0)
		return -1;
	if (mkdirat(place.directory, place.name, request->mode) == 0)
		return 0;
	if (errno != EEXIST || !deep)
		return -1;
	if (fstatat(place.directory, place.name, &what, 0) < 0 || !S_ISDIR(what.st_mode)) {
		errno = EEXIST;
		return -1;
	}
	return 0;
}

static int rename_to(int from, const char *name, const struct place *to, int replace_it)
{
	struct stat there;

	if (renameat2(from, name, to->directory, to->name, replace_it ? 0 : RENAME_NOREPLACE) == 0)
		return 0;
	if (errno != EINVAL || replace_it)
		return -1;
	/* A file system that cannot promise that nothing is there in that very moment. */
	if (fstatat(to->directory, to->name, &there, AT_SYMLINK_NOFOLLOW) == 0) {
		errno = EEXIST;
		return -1;
	}
	return renameat(from, name, to->directory, to->name);
}

/* To another file system: a copy takes its place when it is whole, then the original goes. */
static int move_across(const struct place *from, const struct place *to, int replace_it)
{
	char name[64];
	int inner = -1;

	if (!unfinished_name(to->directory, name, sizeof name) || mkdirat(to->directory, name, 0700) < 0)
		return -1;
	int failed = (inner = openat(to->directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0 ||
		     copy_named(from->directory, inner, from->name) < 0 ||
		     rename_to(inner, from->name, to, replace_it) < 0;
	int error = errno;
	if (inner >= 0)
		close(inner);
	remove_at(to->directory, name, 0);
	errno = error;
	return failed ? -1 : remove_at(from->directory, from->name, 0);
}

/* Neither is a directory by another name than its own. */
static int is_named(const struct place *place)
{
	if (strcmp(place->name, "."))
		return 1;
	errno = EINVAL;
	return 0;
}

static int move(struct request *request)
{
	int replace_it = (request->look.flags & FILES_REPLACE) != 0;
	struct place from, to;
	struct stat what;

	if (find_place(request->look.path, 0, &from) < 0 || !is_named(&from) ||
	    fstatat(from.directory, from.name, &what, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	if (find_place(request->to, 0, &to) < 0 || !is_named(&to)) {
		int error = errno;
		snprintf(request->look.where, sizeof request->look.where, "%s", request->to);
		errno = error;
		return -1;
	}
	if (rename_to(from.directory, from.name, &to, replace_it) == 0)
		return 0;
	if (errno != EXDEV || is_mount(from.directory, from.name))
		return -1;
	if (!replace_it && fstatat(to.directory, to.name, &what, AT_SYMLINK_NOFOLLOW) == 0) {
		errno = EEXIST;
		return -1;
	}
	return move_across(&from, &to, replace_it);
}

static int remove_it(const struct request *request)
{
	struct place place;
	struct stat what;

	if (find_place(request->look.path, 0, &place) < 0 || !is_named(&place) ||
	    fstatat(place.directory, place.name, &what, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	if (S_ISDIR(what.st_mode) && !(request->look.flags & FILES_DEEP))
		return unlinkat(place.directory, place.name, AT_REMOVEDIR);
	return remove_at(place.directory, place.name, 0);
}

static int change(const struct request *request)
{
	struct place place;
	char self[32];
	int file;

	if (find_place(request->look.path, 1, &place) < 0 ||
	    (file = openat(place.directory, place.name, O_PATH | O_NOFOLLOW | O_CLOEXEC)) < 0)
		return -1;
	if (is_of_kernel(file)) {
		errno = EOPNOTSUPP;
		return -1;
	}
	/* The mode after the owner, which takes set-id bits away. */
	if ((request->user != UINT32_MAX || request->group != UINT32_MAX) &&
	    fchownat(file, "", request->user, request->group, AT_EMPTY_PATH) < 0)
		return -1;
	snprintf(self, sizeof self, "/proc/self/fd/%d", file);
	return request->mode == UINT32_MAX ? 0 : chmod(self, request->mode);
}

static int parse(const struct message *message, struct request *request)
{
	struct view field;
	uint32_t offset = 0;
	int more, bad = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_OPERATION: bad |= field_u32(&field, &request->operation); break;
		case FIELD_PATH: bad |= field_string(&field, &request->look.path); break;
		case FIELD_TO: bad |= field_string(&field, &request->to); break;
		case FIELD_PATTERN: bad |= field_string(&field, &request->look.pattern); break;
		case FIELD_TEXT: bad |= field_string(&field, &request->look.text); break;
		case FIELD_FLAGS: bad |= field_u32(&field, &request->look.flags); break;
		case FIELD_MODE: bad |= field_u32(&field, &request->mode); break;
		case FIELD_USER: bad |= field_u32(&field, &request->user); break;
		case FIELD_GROUP: bad |= field_u32(&field, &request->group); break;
		default: bad = 1;
		}
	}
	if (more < 0 || bad || !request->look.path || *request->look.path != '/')
		return EBADMSG;
	request->look.pipe = message->fd_count > 0 ? message->fds[0] : -1;
	switch (request->operation) {
	case FILES_LOOK:
	case FILES_STORE:
	case FILES_WATCH: return request->look.pipe < 0 ? EBADMSG : 0;
	case FILES_MOVE: return !request->to || *request->to != '/' ? EBADMSG : 0;
	case FILES_MAKE:
	case FILES_REMOVE:
	case FILES_CHANGE: return 0;
	default: return EBADMSG;
	}
}

static int carry_out(struct request *request)
{
	switch (request->operation) {
	case FILES_LOOK: return look_inside(&request->look);
	case FILES_STORE: return store(request);
	case FILES_MAKE: return make_directory(request);
	case FILES_MOVE: return move(request);
	case FILES_REMOVE: return remove_it(request);
	case FILES_CHANGE: return change(request);
	default: return watch_inside(&request->look);
	}
}

int files_inside(const struct message *message, struct child *out)
{
	static struct request request;
	struct reply reply;
	int error;

	request = (struct request){.mode = UINT32_MAX, .user = UINT32_MAX, .group = UINT32_MAX};
	if ((error = parse(message, &request)))
		return error;
	pid_t pid = fork();
	if (pid < 0)
		return errno;
	if (pid > 0) {
		*out = (struct child){.pid = pid, .id = message->head.id, .kind = CHILD_WORK, .error_fd = -1};
		return 0;
	}
	umask(0);
	int failed = carry_out(&request) < 0;
	error = errno ? errno : EIO;
	reply_start(&reply, FRAME_DONE, message->head.id);
	reply_u32(&reply, FIELD_ERRNO, failed ? (uint32_t)error : 0);
	if (failed)
		reply_string(&reply, FIELD_WORDS, request.look.where);
	_exit(reply_send(CONTROL_FD, &reply, -1) < 0 ? 1 : 0);
}
