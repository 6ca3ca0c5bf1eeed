/* Open a path as a user, inside, in a child of its own: the kernel resolves it in the box's root with that user's
 * rights, so no symlink leads out and no check can be raced; and a path that hangs holds up nobody. Links of /proc to
 * open files are not followed: this process has some of the node's.
 *
 * The descriptor goes to PID 1, which passes it on when the child is gone: a program that was just written cannot be
 * started while somebody still has it open for writing. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "box.h"

struct request {
	const char *path;
	uint32_t flags, mode, user, parents;
};

static int parse(const struct message *message, struct request *request)
{
	struct view field;
	uint32_t offset = 0;
	int more, bad = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_PATH: bad |= field_string(&field, &request->path); break;
		case FIELD_FLAGS: bad |= field_u32(&field, &request->flags); break;
		case FIELD_MODE: bad |= field_u32(&field, &request->mode); break;
		case FIELD_USER: bad |= field_u32(&field, &request->user); break;
		case FIELD_PARENTS: bad |= field_u32(&field, &request->parents); break;
		default: bad = 1;
		}
	}
	return more < 0 || bad || !request->path ? EBADMSG : 0;
}

static int open_as(const struct request *request)
{
	if (request->user) {
		if (setgroups(0, NULL) < 0 && errno != EPERM)
			return -1;
		if (setresgid(request->user, request->user, request->user) < 0 ||
		    setresuid(request->user, request->user, request->user) < 0)
			return -1;
	}
	if (request->parents && make_parents(request->path) < 0)
		return -1;
	if (S_ISFIFO(request->mode)) {
		umask(0);
		if (mkfifo(request->path, request->mode & 07777) < 0 && errno != EEXIST)
			return -1;
	}
	int fd = open_path(AT_FDCWD, request->path, (int)request->flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
			   (mode_t)request->mode & 07777);
	/* The node writes, and the kernel asks of some of its files who does: the node may what nobody inside may. */
	if (fd >= 0 && (request->flags & O_ACCMODE) != O_RDONLY && is_of_kernel(fd)) {
		errno = EOPNOTSUPP;
		return -1;
	}
	return fd;
}

int open_inside(const struct message *message, struct child *out)
{
	struct request request = {0};
	int error = parse(message, &request);

	int ends[2];
	if (error)
		return error;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
		return errno;
	pid_t pid = fork();
	if (pid < 0)
		error = errno;
	if (pid == 0) {
		struct reply reply;
		int fd = open_as(&request);
		error = fd < 0 ? errno : 0;
		reply_start(&reply, FRAME_DONE, message->head.id);
		reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
		_exit(reply_send(ends[1], &reply, fd) < 0 ? 1 : 0);
	}
	close(ends[1]);
	if (error) {
		close(ends[0]);
		return error;
	}
	*out = (struct child){.pid = pid, .id = message->head.id, .kind = CHILD_OPEN, .error_fd = ends[0]};
	return 0;
}
