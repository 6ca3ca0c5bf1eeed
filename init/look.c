/* What is in the box, told through a pipe: one thing, a directory, what a pattern names below it, what is in the files,
 * or which lines of them hold a text. By a child that is root in the box's user namespace: it sees what root inside sees,
 * a pattern that takes for ever is the box's own time, and no link is followed below where it begins.
 *
 * A directory comes before what is in it, and names in the order of their bytes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <locale.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "box.h"

/* A descriptor a level; a deeper tree is no program's honest work. */
#define DEPTH_MAX 400
/* One bit for each part of a pattern, and one for having matched them all. */
#define PARTS_MAX 63
/* Of a file: what is looked at together. A longer line is several, with one number. */
#define PIECE_MAX (1u << 20)
#define FIRST_MAX (1u << 15)
/* Of a line that is told: so much around what was found. */
#define LINE_MAX_TOLD 1000
#define BEFORE_MAX 200
/* Of memory, for an expression that wants all there is: it would be other programs of the box that are killed. */
#define MEMORY_MAX (128u << 20)

struct entry_head {
	uint32_t path, target; /* lengths of what follows, without a NUL */
	uint32_t mode, user, group, links;
	uint64_t device, inode, size;
	int64_t seconds;
	uint32_t nanoseconds;
	uint32_t contents; /* 1: `size` bytes follow as well */
};

struct hit_head {
	uint32_t path, text;
	uint32_t line, column; /* from 1 */
};

struct name {
	unsigned char type;
	char text[];
};

static struct look *look;
static char path[PATH_MAX]; /* of what is looked at, below where it began */
static const char *parts[PARTS_MAX];
static int part_count, begins_in_kernel;
static regex_t regex;

static char buffer[1 << 16];
static size_t buffered;

static int write_all(int to, const char *bytes, size_t size)
{
	while (size > 0) {
		ssize_t put = write(to, bytes, size);
		if (put < 0 && errno != EINTR)
			return -1;
		bytes += put > 0 ? put : 0;
		size -= put > 0 ? (size_t)put : 0;
	}
	return 0;
}

int tell_rest(int pipe)
{
	size_t size = buffered;

	buffered = 0;
	return write_all(pipe, buffer, size);
}

int tell_bytes(int pipe, const void *bytes, size_t size)
{
	if (size > sizeof buffer - buffered && tell_rest(pipe) < 0)
		return -1;
	if (size > sizeof buffer)
		return write_all(pipe, bytes, size);
	memcpy(buffer + buffered, bytes, size);
	buffered += size;
	return 0;
}

int tell(int pipe, const void *head, size_t size, const char *first, const char *second)
{
	return tell_bytes(pipe, head, size) < 0 || tell_bytes(pipe, first, strlen(first)) < 0 ||
			       tell_bytes(pipe, second, strlen(second)) < 0
		       ? -1
		       : 0;
}

/* The pattern's parts that a path may go on with, one bit each. `**` stands for any number of directories, none too. */
static uint64_t also_none(uint64_t may)
{
	for (int i = 0; i < part_count; i++)
		if (may >> i & 1 && !strcmp(parts[i], "**"))
			may |= (uint64_t)1 << (i + 1);
	return may;
}

static uint64_t after(uint64_t may, const char *name)
{
	uint64_t next = 0;

	for (int i = 0; i < part_count; i++) {
		if (!(may >> i & 1))
			continue;
		if (!strcmp(parts[i], "**"))
			next |= (uint64_t)1 << i;
		else if (fnmatch(parts[i], name, 0) == 0)
			next |= (uint64_t)1 << (i + 1);
	}
	return also_none(next);
}

static int is_whole(uint64_t may)
{
	return may >> part_count & 1;
}

static int goes_on(uint64_t may)
{
	return (may & (((uint64_t)1 << part_count) - 1)) != 0;
}

/* It was there a moment ago. Or root inside may not look at it, which is no reason not to tell of the rest, unless the
 * rest is to be a whole copy. */
static int is_passed_over(int error)
{
	return error == ENOENT || error == ENOTDIR || error == ELOOP ||
	       ((error == EACCES || error == EPERM) && !(look->flags & FILES_CONTENTS));
}

/* Exactly so many bytes: of a file that became shorter, zeros for the rest, as tar does it. */
static int tell_contents(int from, uint64_t size)
{
	static char piece[1 << 16];

	while (size > 0) {
		size_t most = size < sizeof piece ? (size_t)size : sizeof piece;
		ssize_t got = read(from, piece, most);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -1;
		if (got == 0)
			memset(piece, 0, (size_t)(got = (ssize_t)most));
		if (tell_bytes(look->pipe, piece, (size_t)got) < 0)
			return -1;
		size -= (uint64_t)got;
	}
	return 0;
}

static int tell_entry(const struct stat *what, const char *target, int contents)
{
	struct entry_head head = {
		.path = (uint32_t)strlen(path),
		.target = (uint32_t)strlen(target),
		.mode = what->st_mode,
		.user = what->st_uid,
		.group = what->st_gid,
		.links = (uint32_t)what->st_nlink,
		.device = what->st_dev,
		.inode = what->st_ino,
		.size = (uint64_t)what->st_size,
		.seconds = what->st_mtim.tv_sec,
		.nanoseconds = (uint32_t)what->st_mtim.tv_nsec,
		.contents = contents >= 0,
	};

	if (tell(look->pipe, &head, sizeof head, path, target) < 0)
		return -1;
	return contents >= 0 ? tell_contents(contents, head.size) : 0;
}

static int tell_hit(const char *line, size_t length, size_t at, uint32_t number)
{
	size_t from = length > LINE_MAX_TOLD && at > BEFORE_MAX ? at - BEFORE_MAX : 0;
	size_t size = length - from < LINE_MAX_TOLD ? length - from : LINE_MAX_TOLD;
	struct hit_head head = {(uint32_t)strlen(path), (uint32_t)size, number, (uint32_t)at + 1};

	return tell(look->pipe, &head, sizeof head, path, "") < 0 ? -1 : tell_bytes(look->pipe, line + from, size);
}

/* Lines, each with its end; and how many there are before what comes next. */
static int search_lines(char *at, const char *end, uint32_t *number)
{
	size_t size = strlen(look->text);

	while (at < end) {
		regmatch_t match = {0, 0};
		char *line_end = memchr(at, '\n', (size_t)(end - at));
		if (look->flags & FILES_REGEX) {
			*line_end = 0;
			int failed = regexec(&regex, at, 1, &match, 0);
			if (failed && failed != REG_NOMATCH) {
				errno = ENOMEM;
				return -1;
			}
			if (!failed && tell_hit(at, (size_t)(line_end - at), (size_t)match.rm_so, *number) < 0)
				return -1;
		} else {
			/* Most files hold it nowhere: they are looked through at once, and then only counted. */
			const char *found = memmem(at, (size_t)(end - at), look->text, size);
			for (const char *until = found ? found : end - 1; line_end < until; (*number)++) {
				at = line_end + 1;
				line_end = memchr(at, '\n', (size_t)(end - at));
			}
			if (found && tell_hit(at, (size_t)(line_end - at), (size_t)(found - at), *number) < 0)
				return -1;
		}
		at = line_end + 1;
		(*number)++;
	}
	return 0;
}

/* What holds a NUL is no text: it ends there, mostly before its first line. */
static int search(int file)
{
	static char piece[PIECE_MAX + 1];
	size_t have = 0, room = FIRST_MAX; /* programs and pictures are seen to be none by their beginning */
	uint32_t number = 1;

	for (;; room = PIECE_MAX) {
		ssize_t got = read(file, piece + have, room - have);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 || (got > 0 && memchr(piece + have, 0, (size_t)got)))
			return 0;
		have += (size_t)got;
		char *last = memrchr(piece, '\n', have);
		size_t whole = last ? (size_t)(last + 1 - piece) : 0;
		if (whole < have && (got == 0 || have == PIECE_MAX)) { /* a last line without its end, or half a long one */
			piece[whole = have] = '\n';
			whole++;
		}
		if (search_lines(piece, piece + whole, &number) < 0)
			return -1;
		if (got == 0)
			return 0;
		if (whole > have) { /* its other half has the same number */
			whole = have;
			number--;
		}
		memmove(piece, piece + whole, have -= whole);
	}
}

/* A regular file is opened before it is told of, so that what is told is what is read. */
static int look_into(int directory, const char *name, struct stat *what)
{
	int file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	int failed = file < 0 || fstat(file, what) < 0;

	if (!failed && S_ISREG(what->st_mode)) {
		int words = is_of_kernel(file); /* they say nothing of their length, and need not end */
		if (look->text)
			failed = (!words || begins_in_kernel) && search(file) < 0;
		else
			failed = tell_entry(what, "", words ? -1 : file) < 0;
	}
	int error = errno;
	if (file >= 0)
		close(file);
	errno = error;
	return failed ? -1 : 0;
}

static int by_name(const void *left, const void *right)
{
	return strcmp((*(struct name *const *)left)->text, (*(struct name *const *)right)->text);
}

static void free_names(struct name **names, size_t count)
{
	for (size_t i = 0; i < count; i++)
		free(names[i]);
	free(names);
}

/* The names in a directory, sorted; NULL with errno, and the descriptor is closed either way. */
static struct name **names_in(int directory, size_t *count)
{
	DIR *entries = fdopendir(directory);
	struct name **names = malloc(sizeof *names);
	size_t room = 1;
	struct dirent *entry;

	*count = 0;
	while (names && entries && (errno = 0, entry = readdir(entries))) {
		size_t size = strlen(entry->d_name) + 1;
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (*count == room) {
			struct name **more = realloc(names, sizeof *names * (room *= 2));
			if (!more)
				break;
			names = more;
		}
		if (!(names[*count] = malloc(sizeof(struct name) + size)))
			break;
		names[*count]->type = entry->d_type;
		memcpy(names[(*count)++]->text, entry->d_name, size);
	}
	int error = !names ? ENOMEM : errno;
	if (entries)
		closedir(entries);
	else
		close(directory);
	if (names && !error) {
		qsort(names, *count, sizeof *names, by_name);
		return names;
	}
	free_names(names, names ? *count : 0);
	errno = error;
	return NULL;
}

static int visit(int directory, const char *name, size_t length, uint64_t may, int depth);

static int visit_inner(int directory, size_t length, uint64_t may, int depth)
{
	size_t count = 0;
	int again = fcntl(directory, F_DUPFD_CLOEXEC, 0), failed = 0;
	struct name **names = again < 0 ? NULL : names_in(again, &count);

	if (!names)
		return -1;
	for (size_t i = 0; i < count && !failed; i++) {
		const char *text = names[i]->text;
		unsigned char type = names[i]->type;
		uint64_t next = after(may, text);
		if (!is_whole(next) && (!goes_on(next) || (type != DT_DIR && type != DT_UNKNOWN)))
			continue;
		size_t at = length, more = strlen(text);
		if (depth == DEPTH_MAX || length + more + 2 > sizeof path) {
			errno = ELOOP;
			failed = 1;
			break;
		}
		if (at)
			path[at++] = '/';
		memcpy(path + at, text, more + 1);
		failed = visit(directory, text, at + more, next, depth + 1) < 0;
		if (!failed)
			path[length] = 0;
	}
	int error = errno;
	free_names(names, count);
	errno = error;
	return failed ? -1 : 0;
}

/* What has this name in the directory, and what is in it, as far as the pattern may go on with it. */
static int visit(int directory, const char *name, size_t length, uint64_t may, int depth)
{
	static char target[PATH_MAX];
	struct stat what;
	int inner, failed = 0, told = is_whole(may);

	if (fstatat(directory, name, &what, AT_SYMLINK_NOFOLLOW) < 0)
		return depth && is_passed_over(errno) ? 0 : -1;
	if (told && S_ISREG(what.st_mode) && (look->text || look->flags & FILES_CONTENTS)) {
		failed = look_into(directory, name, &what) < 0;
	} else if (told && !look->text) {
		ssize_t size = S_ISLNK(what.st_mode) ? readlinkat(directory, name, target, sizeof target - 1) : 0;
		target[size < 0 ? 0 : size] = 0;
		failed = size < 0 || tell_entry(&what, target, -1) < 0;
	}
	if (failed)
		return depth && is_passed_over(errno) ? 0 : -1;
	if (!S_ISDIR(what.st_mode) || !goes_on(may))
		return 0;
	if ((inner = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0)
		return depth && is_passed_over(errno) ? 0 : -1;
	if (!depth && is_of_kernel(inner))
		begins_in_kernel = 1;
	if (begins_in_kernel || !is_of_kernel(inner)) /* who looks through / does not mean /proc */
		failed = visit_inner(inner, length, may, depth) < 0;
	int error = errno;
	close(inner);
	errno = error;
	return failed ? -1 : 0;
}

static int read_pattern(const char *pattern)
{
	char *at = pattern ? strdup(pattern) : NULL;

	if (pattern && !at)
		return -1;
	for (char *part; at && (part = strsep(&at, "/"));) {
		if (!*part || (part_count && !strcmp(part, "**") && !strcmp(parts[part_count - 1], "**")))
			continue;
		if (part_count == PARTS_MAX) {
			errno = ENAMETOOLONG;
			return -1;
		}
		parts[part_count++] = part;
	}
	return 0;
}

static int read_text(void)
{
	const struct rlimit memory = {MEMORY_MAX, MEMORY_MAX};
	int flags = REG_EXTENDED | (look->flags & FILES_ANY_CASE ? REG_ICASE : 0), failed;

	if (!look->text || !(look->flags & FILES_REGEX))
		return 0;
	(void)setrlimit(RLIMIT_AS, &memory);
	if ((failed = regcomp(&regex, look->text, flags)) == 0)
		return 0;
	regerror(failed, &regex, look->where, sizeof look->where);
	errno = EINVAL;
	return -1;
}

int look_inside(struct look *what)
{
	struct place place;

	look = what;
	setlocale(LC_CTYPE, "C.UTF-8"); /* `?` and `.` are letters, not bytes; a libc without it knows bytes */
	if (read_pattern(look->pattern) < 0 || read_text() < 0 ||
	    find_place(look->path, look->flags & FILES_FOLLOW, &place) < 0)
		return -1;
	begins_in_kernel = is_of_kernel(place.directory);
	if (visit(place.directory, place.name, 0, also_none(1), 0) < 0) {
		int error = errno;
		strcpy(look->where, path);
		errno = error;
		return -1;
	}
	return tell_rest(look->pipe);
}
