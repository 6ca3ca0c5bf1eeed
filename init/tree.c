/* The upper directory of the box, copied out or listed, by a child that is root in the box's user namespace: owners go
 * through the same maps as everywhere, and nothing of the box is opened with more rights than the box has.
 *
 * A copy of several trees, lowest first, is one tree that means the same as all of them over one another. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "box.h"

/* Two descriptors a level; a deeper tree is no program's honest work. */
#define DEPTH_MAX 400
#define OPAQUE "user.overlay.opaque"

struct link { /* a file with several names, by its first; a free place in the table has none */
	dev_t device;
	ino_t inode;
	char *path;
};

struct walk {
	int top; /* of the copy; hard links are made from it */
	char path[PATH_MAX];
	struct link *links; /* a hash table: the box stands still while a hundred thousand of them are looked up */
	size_t link_count, link_room; /* the room is zero or a power of two, and at least half of it is free */
	uint64_t bytes;
	uint32_t files;
	FILE *list; /* LIST: entries go here and nothing is copied */
};

static int is_whiteout(const struct stat *what)
{
	return S_ISCHR(what->st_mode) && what->st_rdev == makedev(0, 0);
}

static int is_opaque(int directory)
{
	char value;

	return fgetxattr(directory, OPAQUE, &value, 1) == 1 && value == 'y';
}

/* What the overlay keeps for itself about where a file came from means nothing in another overlay. */
static int is_worth_copying(const char *name)
{
	return strcmp(name, "user.overlay.origin") != 0 && strcmp(name, "user.overlay.uuid") != 0 &&
	       strcmp(name, "user.overlay.impure") != 0;
}

/* The file system of the copy has no room for a value that its own in the box had room for: ext4 gives one block to all
 * values of a file, and says that the disk is full. */
static int set_attribute(int to, const char *name, const void *value, size_t length)
{
	struct statvfs disk;

	if (fsetxattr(to, name, value, length, 0) == 0)
		return 0;
	if (errno == ERANGE || (errno == ENOSPC && fstatvfs(to, &disk) == 0 && disk.f_bavail > 0))
		errno = E2BIG;
	return -1;
}

static char names[XATTR_LIST_MAX]; /* the most that the kernel gives */

/* Whether it is not the box's to set or remove: a security module's label, or what this file system does not have. */
static int is_not_ours(int error)
{
	return error == ENOTSUP || error == EPERM || error == EACCES || error == ENODATA;
}

/* A directory that a lower tree brought gets those of the higher one instead, before anything is made in it: a default
 * access list goes over to whatever is. That it is opaque stays: what it hides is below both trees. */
static int clear_attributes(int directory)
{
	ssize_t size = flistxattr(directory, names, sizeof names);

	if (size < 0)
		return errno == ENOTSUP ? 0 : -1;
	for (const char *name = names; name < names + size; name += strlen(name) + 1)
		if (strcmp(name, OPAQUE) != 0 && fremovexattr(directory, name) < 0 && !is_not_ours(errno))
			return -1;
	return 0;
}

static int copy_attributes(int from, int to)
{
	static char value[XATTR_SIZE_MAX];
	ssize_t size = flistxattr(from, names, sizeof names);

	if (size < 0)
		return errno == ENOTSUP ? 0 : -1;
	for (const char *name = names; name < names + size; name += strlen(name) + 1) {
		if (!is_worth_copying(name))
			continue;
		ssize_t length = fgetxattr(from, name, value, sizeof value);
		if (length < 0 && errno == ENODATA)
			continue;
		if (length < 0 || (set_attribute(to, name, value, (size_t)length) < 0 && !is_not_ours(errno)))
			return -1;
	}
	return 0;
}

int look_like(int from, int to, const struct stat *what)
{
	struct timespec times[2] = {what->st_atim, what->st_mtim};

	/* The mode after the owner, which takes set-id bits away; the access list after the mode, which changes it. */
	return fchown(to, what->st_uid, what->st_gid) < 0 || fchmod(to, what->st_mode & 07777) < 0 ||
			       copy_attributes(from, to) < 0 || futimens(to, times) < 0
		       ? -1
		       : 0;
}

int remove_at(int directory, const char *name, int depth)
{
	if (unlinkat(directory, name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR && errno != EPERM)
		return -1;
	if (depth == DEPTH_MAX) {
		errno = ELOOP;
		return -1;
	}
	if (is_mount(directory, name)) {
		errno = EBUSY;
		return -1;
	}
	int inner = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *entries = inner < 0 ? NULL : fdopendir(inner);
	struct dirent *entry;
	int failed = entries ? 0 : -1;
	while (!failed && (entry = readdir(entries)))
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			failed = remove_at(inner, entry->d_name, depth + 1);
	int error = errno;
	if (entries)
		closedir(entries);
	errno = error;
	return failed || unlinkat(directory, name, AT_REMOVEDIR) < 0 ? -1 : 0;
}

/* Holes stay holes. The file system shares blocks where it can. */
static int copy_bytes(int from, int to, off_t size)
{
	off_t at = 0;

	if (size == 0 || ioctl(to, FICLONE, from) == 0)
		return 0;
	while (at < size) {
		off_t data = lseek(from, at, SEEK_DATA), end;
		if (data < 0 && errno == ENXIO)
			break; /* only a hole is left */
		if (data < 0)
			data = at;
		end = lseek(from, data, SEEK_HOLE);
		if (end < 0)
			end = size;
		if (lseek(to, data, SEEK_SET) < 0)
			return -1;
		for (at = data; at < end;) {
			ssize_t sent = sendfile(to, from, &at, (size_t)(end - at));
			if (sent < 0 && errno == EINTR)
				continue;
			if (sent < 0)
				return -1;
			if (sent == 0)
				return 0; /* it became shorter */
		}
	}
	return ftruncate(to, size);
}

static struct link *find_link(struct link *links, size_t room, dev_t device, ino_t inode)
{
	uint64_t hash = ((uint64_t)inode ^ (uint64_t)device << 32) * 0x9E3779B97F4A7C15u; /* 2^64 / golden ratio */
	size_t at = (size_t)(hash >> 32) & (room - 1);

	while (links[at].path && (links[at].inode != inode || links[at].device != device))
		at = (at + 1) & (room - 1);
	return &links[at];
}

static int grow_links(struct walk *walk)
{
	size_t room = walk->link_room ? walk->link_room * 2 : 256;
	struct link *more = calloc(room, sizeof *more);

	if (!more)
		return -1;
	for (size_t i = 0; i < walk->link_room; i++)
		if (walk->links[i].path)
			*find_link(more, room, walk->links[i].device, walk->links[i].inode) = walk->links[i];
	free(walk->links);
	walk->links = more;
	walk->link_room = room;
	return 0;
}

static void forget_links(struct walk *walk)
{
	for (size_t i = 0; i < walk->link_room; i++)
		free(walk->links[i].path);
	free(walk->links);
	walk->links = NULL;
	walk->link_count = walk->link_room = 0;
}

/* The name under which the file was copied already. NULL: it has none yet, and from now on it is the current path. */
static const char *first_name(struct walk *walk, const struct stat *what)
{
	if (walk->link_count * 2 >= walk->link_room && grow_links(walk) < 0)
		return NULL; /* no memory to remember it: a copy of its own, then */
	struct link *link = find_link(walk->links, walk->link_room, what->st_dev, what->st_ino);
	if (link->path)
		return link->path;
	char *path = strdup(walk->path);
	if (path) {
		*link = (struct link){what->st_dev, what->st_ino, path};
		walk->link_count++;
	}
	return NULL;
}

static int copy_file(struct walk *walk, int from, int to, const char *name, const struct stat *what)
{
	const char *other = what->st_nlink > 1 ? first_name(walk, what) : NULL;

	if (other)
		return linkat(walk->top, other, to, name, 0);
	int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	int out = in < 0 ? -1 : openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	int failed = out < 0 || copy_bytes(in, out, what->st_size) < 0 || look_like(in, out, what) < 0;
	int error = errno;
	if (in >= 0)
		close(in);
	if (out >= 0)
		close(out);
	errno = error;
	walk->bytes += (uint64_t)what->st_blocks * 512u;
	return failed ? -1 : 0;
}

static int copy_special(int from, int to, const char *name, const struct stat *what)
{
	struct timespec times[2] = {what->st_atim, what->st_mtim};
	char target[PATH_MAX + 1];

	if (S_ISLNK(what->st_mode)) {
		ssize_t length = readlinkat(from, name, target, sizeof target - 1);
		if (length < 0)
			return -1;
		target[length] = 0;
		if (symlinkat(target, to, name) < 0)
			return -1;
	} else if (mknodat(to, name, what->st_mode & (S_IFMT | 07777), is_whiteout(what) ? makedev(0, 0) : 0) < 0) {
		return -1;
	}
	if (is_whiteout(what))
		return 0;
	if (fchownat(to, name, what->st_uid, what->st_gid, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	return utimensat(to, name, times, AT_SYMLINK_NOFOLLOW);
}

static int walk_directory(struct walk *walk, int from, int to, size_t length, int depth);

static int walk_inner(struct walk *walk, int from, int to, const char *name, const struct stat *what, size_t length,
		      int depth)
{
	int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), out = -1, failed = in < 0;

	if (!failed && walk->list) {
		fprintf(walk->list, "%c%s", is_opaque(in) ? 'o' : 'd', walk->path);
		putc(0, walk->list);
		failed = walk_directory(walk, in, -1, length, depth + 1) < 0;
	} else if (!failed) {
		/* What lies below an opaque directory is not seen through it. */
		failed = (is_opaque(in) && remove_at(to, name, 0) < 0) || (mkdirat(to, name, 0700) < 0 && errno != EEXIST) ||
			 (out = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0 ||
			 clear_attributes(out) < 0 || walk_directory(walk, in, out, length, depth + 1) < 0 ||
			 look_like(in, out, what) < 0;
	}
	int error = errno;
	if (in >= 0)
		close(in);
	if (out >= 0)
		close(out);
	errno = error;
	return failed ? -1 : 0;
}

static int walk_entry(struct walk *walk, int from, int to, const char *name, size_t length, int depth)
{
	struct stat what, there;

	if (fstatat(from, name, &what, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	walk->files++;
	if (S_ISDIR(what.st_mode)) {
		if (!walk->list && fstatat(to, name, &there, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(there.st_mode) &&
		    unlinkat(to, name, 0) < 0)
			return -1;
		return walk_inner(walk, from, to, name, &what, length, depth);
	}
	if (walk->list) {
		fprintf(walk->list, "%c%s", is_whiteout(&what) ? 'w' : 'f', walk->path);
		return putc(0, walk->list) < 0 ? -1 : 0;
	}
	if (remove_at(to, name, 0) < 0) /* of a tree further down */
		return -1;
	return S_ISREG(what.st_mode) ? copy_file(walk, from, to, name, &what) : copy_special(from, to, name, &what);
}

/* Everything in the directory `from`, whose path is the first `length` bytes of walk->path. */
static int walk_directory(struct walk *walk, int from, int to, size_t length, int depth)
{
	int failed = 0, again = dup(from);
	DIR *entries = again < 0 ? NULL : fdopendir(again);
	struct dirent *entry;

	if (!entries)
		return -1;
	rewinddir(entries); /* the duplicate shares its position, which an earlier walk left at the end */
	while (!failed && (errno = 0, entry = readdir(entries))) {
		size_t more = strlen(entry->d_name);
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (depth == DEPTH_MAX || length + more + 2 > sizeof walk->path) {
			errno = ELOOP;
			failed = 1;
			break;
		}
		size_t at = length;
		if (at)
			walk->path[at++] = '/';
		memcpy(walk->path + at, entry->d_name, more + 1);
		failed = walk_entry(walk, from, to, entry->d_name, at + more, depth) < 0;
	}
	if (!failed && errno)
		failed = 1;
	int error = errno;
	closedir(entries);
	errno = error;
	if (!failed)
		walk->path[length] = 0;
	return failed ? -1 : 0;
}

int copy_named(int from, int to, const char *name)
{
	static struct walk walk;

	walk.top = to;
	return snprintf(walk.path, sizeof walk.path, "%s", name) < 0 ||
			       walk_entry(&walk, from, to, name, strlen(name), 0) < 0
		       ? -1
		       : 0;
}

/* A path of its own: a child that fails tells which file it was. */
static _Noreturn void finish(uint32_t id, const struct walk *walk, int failed)
{
	struct reply reply;

	reply_start(&reply, FRAME_DONE, id);
	reply_u32(&reply, FIELD_ERRNO, failed ? (uint32_t)(errno ? errno : EIO) : 0);
	if (failed)
		reply_string(&reply, FIELD_WORDS, walk->path);
	reply_u64(&reply, FIELD_BYTES, walk->bytes);
	reply_u32(&reply, FIELD_FILES, walk->files);
	_exit(reply_send(CONTROL_FD, &reply, -1) < 0 ? 1 : 0);
}

static int begin(uint32_t id, int upper, int fds, int needed, pid_t *pid, struct child *out)
{
	if (upper < 0 || fds < needed)
		return upper < 0 ? ENOTSUP : EBADMSG;
	if ((*pid = fork()) < 0)
		return errno;
	*out = (struct child){.pid = *pid, .id = id, .kind = CHILD_WORK, .error_fd = -1};
	return 0;
}

/* Descriptors: the directory to copy into, then the trees below the upper one that shall be in the copy, lowest first. */
int copy_upper(const struct message *message, int upper, struct child *out)
{
	static struct walk walk;
	pid_t pid;
	int failed = 0, error = begin(message->head.id, upper, message->fd_count, 1, &pid, out);

	if (error || pid > 0)
		return error;
	umask(0);
	walk.top = message->fds[0];
	for (int i = 1; i <= message->fd_count && !failed; i++) {
		int from = i < message->fd_count ? message->fds[i] : upper;
		forget_links(&walk);
		struct stat what;
		failed = clear_attributes(walk.top) < 0 || walk_directory(&walk, from, walk.top, 0, 0) < 0 ||
			 fstat(from, &what) < 0 || look_like(from, walk.top, &what) < 0;
	}
	finish(message->head.id, &walk, failed);
}

/* Descriptor: a pipe that takes the entries, each a letter (d, o: opaque directory, f, w: whiteout), a path, a NUL. */
int list_upper(const struct message *message, int upper, struct child *out)
{
	static struct walk walk;
	pid_t pid;
	int error = begin(message->head.id, upper, message->fd_count, 1, &pid, out);

	if (error || pid > 0)
		return error;
	walk.list = fdopen(message->fds[0], "w");
	finish(message->head.id, &walk, !walk.list || walk_directory(&walk, upper, -1, 0, 0) < 0 || fflush(walk.list) != 0);
}
