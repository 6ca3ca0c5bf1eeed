/* What happens at a path, or below it, told through a pipe as it happens. By a child that goes on until somebody ends it:
 * a reader who is slow makes it wait, and the kernel's own queue is the bound; what that could not hold is told as lost.
 *
 * inotify tells of a directory's own entries only, so below it each directory is watched by itself. What is in a new one
 * when its watch is there is found by looking, and may be told twice: made there, or moved with it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "box.h"

#define DEPTH_MAX 400
/* Some hundred events at once, then a rest in which the kernel puts equal ones together: a program that writes a byte
 * at a time is no more than some ten thousand events a second for whoever listens. */
#define BATCH_BYTES 8192
#define REST_NS 20000000

enum kind { EVENT_WATCHING = 1, EVENT_CREATED, EVENT_CHANGED, EVENT_ATTRIBUTES, EVENT_DELETED, EVENT_LOST };

struct event_head {
	uint32_t kind, path; /* length */
	uint32_t directory, unused;
};

#define ENTRIES (IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_EXCL_UNLINK)
#define ITSELF (IN_DELETE_SELF | IN_MOVE_SELF)

static struct look *look;
static int events;	 /* nothing else is held open: while somebody has a directory, the kernel does not tell of its end */
static const char *only; /* where a file is watched, in its directory: its name */
static char **paths;	 /* by the kernel's numbers of watches, below what is watched; NULL: none */
static int path_count;

static int say(enum kind kind, const char *path, int directory)
{
	struct event_head head = {kind, (uint32_t)strlen(path), (uint32_t)directory, 0};

	return tell(look->pipe, &head, sizeof head, path, "");
}

static int remember_path(int watch, const char *path)
{
	if (watch >= path_count) {
		int room = watch < 64 ? 64 : watch * 2;
		char **more = realloc(paths, sizeof *more * (size_t)room);
		if (!more)
			return -1;
		memset(more + path_count, 0, sizeof *more * (size_t)(room - path_count));
		paths = more;
		path_count = room;
	}
	free(paths[watch]);
	return (paths[watch] = strdup(path)) ? 0 : -1;
}

static void forget_path(int watch)
{
	if (watch >= 0 && watch < path_count) {
		free(paths[watch]);
		paths[watch] = NULL;
	}
}

/* It is not there any more, or root inside may not look at it. */
static int is_passed_over(int error)
{
	return error == ENOENT || error == ENOTDIR || error == ELOOP || error == EACCES || error == EXDEV;
}

static int watch_directory(int directory, const char *path, uint32_t more)
{
	char self[32];

	snprintf(self, sizeof self, "/proc/self/fd/%d", directory);
	int watch = inotify_add_watch(events, self, ENTRIES | more);
	return watch < 0 ? -1 : remember_path(watch, path);
}

static int watch_below(int directory, const char *path, int told, int depth);

static int watch_entry(int directory, const char *path, const struct dirent *entry, int told, int depth)
{
	char below[PATH_MAX];

	if (snprintf(below, sizeof below, "%s%s%s", path, *path ? "/" : "", entry->d_name) >= (int)sizeof below)
		return 0; /* no program could name it either */
	int inner = entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN
			    ? openat(directory, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
			    : -1;
	int failed = told && say(EVENT_CREATED, below, inner >= 0) < 0;
	if (inner < 0)
		return failed ? -1 : 0;
	if (!failed && depth < DEPTH_MAX && !is_of_kernel(inner))
		failed = (watch_directory(inner, below, 0) < 0 || watch_below(inner, below, told, depth + 1) < 0) &&
			 !is_passed_over(errno);
	int error = errno;
	close(inner);
	errno = error;
	return failed ? -1 : 0;
}

/* Every directory in this one; `told`: and everything that is there as made. */
static int watch_below(int directory, const char *path, int told, int depth)
{
	int again = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), failed = 0;
	DIR *entries = again < 0 ? NULL : fdopendir(again);
	struct dirent *entry;

	if (!entries)
		return -1;
	while (!failed && (entry = readdir(entries)))
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			failed = watch_entry(directory, path, entry, told, depth) < 0;
	int error = errno;
	closedir(entries);
	errno = error;
	return failed ? -1 : 0;
}

/* A directory has come, or all of them are to be looked for again (""). No link is followed on the way. */
static int watch_new(const char *path, int told)
{
	struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH};
	int root = open_path(AT_FDCWD, look->path, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	int directory = root < 0 ? -1 : (int)syscall(SYS_openat2, root, *path ? path : ".", &how, sizeof how);
	int failed = directory < 0 ||
		     (!is_of_kernel(directory) && ((*path && watch_directory(directory, path, 0) < 0) ||
						   watch_below(directory, path, told, 0) < 0));

	failed = failed && !is_passed_over(errno);
	int error = errno;
	if (directory >= 0)
		close(directory);
	if (root >= 0)
		close(root);
	errno = error;
	return failed ? -1 : 0;
}

/* A directory has gone somewhere else, and with it what is in it: if it comes back into view it is a new one. */
static void unwatch_below(const char *path)
{
	size_t length = strlen(path);

	for (int watch = 0; watch < path_count; watch++) {
		const char *other = paths[watch];
		if (other && !strncmp(other, path, length) && (!other[length] || other[length] == '/')) {
			inotify_rm_watch(events, watch);
			forget_path(watch);
		}
	}
}

static enum kind kind_of(uint32_t mask)
{
	return mask & (IN_CREATE | IN_MOVED_TO)	    ? EVENT_CREATED
	       : mask & (IN_DELETE | IN_MOVED_FROM) ? EVENT_DELETED
	       : mask & IN_MODIFY		    ? EVENT_CHANGED
						    : EVENT_ATTRIBUTES;
}

/* 1: the end, for what was watched is gone. */
static int heard(const struct inotify_event *event, int deep)
{
	static char path[PATH_MAX];
	int directory = (event->mask & IN_ISDIR) != 0;

	if (event->mask & IN_Q_OVERFLOW) { /* directories were made, too, perhaps */
		if (say(EVENT_LOST, "", 0) < 0)
			return -1;
		return deep ? watch_new("", 0) : 0;
	}
	const char *where = event->wd >= 0 && event->wd < path_count ? paths[event->wd] : NULL;
	if (!where)
		return 0;
	int is_root = !*where;
	if (event->mask & (ITSELF | IN_UNMOUNT) && is_root)
		return say(EVENT_DELETED, "", !only) < 0 ? -1 : 1;
	if (event->mask & IN_IGNORED)
		forget_path(event->wd);
	if (event->mask & (ITSELF | IN_UNMOUNT | IN_IGNORED))
		return 0;
	if (!event->len && !is_root)
		return 0; /* its own directory tells of it, too */
	if (only && (!event->len || strcmp(event->name, only)))
		return 0;
	if (event->len && !strncmp(event->name, UNFINISHED, sizeof UNFINISHED - 1))
		return 0; /* what we write ourselves, on its way to its place */
	if (snprintf(path, sizeof path, "%s%s%s", where, is_root ? "" : "/", event->len && !only ? event->name : "") >=
	    (int)sizeof path)
		return 0;
	enum kind kind = kind_of(event->mask);
	if (say(kind, path, directory) < 0)
		return -1;
	if (!deep || !directory || !event->len)
		return 0;
	if (event->mask & IN_MOVED_FROM)
		unwatch_below(path);
	return kind == EVENT_CREATED ? watch_new(path, 1) : 0;
}

/* The same once more at once says nothing new. */
static int is_again(const struct inotify_event *event, const struct inotify_event *before)
{
	return before && event->wd == before->wd && event->mask == before->mask && event->mask & (IN_MODIFY | IN_ATTRIB) &&
	       event->len == before->len && !strcmp(event->len ? event->name : "", before->len ? before->name : "");
}

static int go_on(int deep)
{
	static char batch[BATCH_BYTES] __attribute__((aligned(__alignof__(struct inotify_event))));
	const struct timespec rest = {0, REST_NS};

	for (;;) {
		const struct inotify_event *before = NULL;
		ssize_t got = read(events, batch, sizeof batch);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -1;
		for (ssize_t at = 0; at < got;) {
			const struct inotify_event *event = (const struct inotify_event *)(const void *)(batch + at);
			int end = is_again(event, before) ? 0 : heard(event, deep);
			if (end)
				return end < 0 ? -1 : tell_rest(look->pipe);
			before = event;
			at += (ssize_t)sizeof *event + event->len;
		}
		if (tell_rest(look->pipe) < 0)
			return -1;
		nanosleep(&rest, NULL);
	}
}

int watch_inside(struct look *what)
{
	static struct place place;
	struct stat kind;
	int deep = (what->flags & FILES_DEEP) != 0, root;

	look = what;
	if (find_place(look->path, 1, &place) < 0 ||
	    fstatat(place.directory, place.name, &kind, AT_SYMLINK_NOFOLLOW) < 0 ||
	    (events = inotify_init1(IN_CLOEXEC)) < 0)
		return -1;
	if (S_ISDIR(kind.st_mode)) {
		root = openat(place.directory, place.name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	} else { /* through its directory: whoever replaces a file puts another one in its place */
		root = place.directory;
		only = place.name;
		deep = 0;
	}
	if (root < 0 || watch_directory(root, "", ITSELF) < 0 || (deep && watch_below(root, "", 0, 0) < 0) ||
	    say(EVENT_WATCHING, "", !only) < 0 || tell_rest(look->pipe) < 0)
		return -1;
	close(root);
	if (!only)
		close(place.directory);
	return go_on(deep);
}
