/* PID 1 of the box: one poll over signals and the control socket. It reaps, reports, starts what it is asked to start,
 * and never exits because of a request. It ends the box when the node goes away or the lifetime is over. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "box.h"
#include "wire.h"

static struct child *children;
static int child_count, child_room;

static int remember(struct child child)
{
	if (child_count == child_room) {
		int room = child_room ? child_room * 2 : 16;
		struct child *more = realloc(children, sizeof *more * (size_t)room);
		if (!more)
			return ENOMEM;
		children = more;
		child_room = room;
	}
	children[child_count++] = child;
	return 0;
}

static struct child *child_by_pid(pid_t pid)
{
	for (int i = 0; i < child_count; i++)
		if (children[i].pid == pid)
			return &children[i];
	return NULL;
}

static struct child *child_by_run(uint32_t id)
{
	for (int i = 0; i < child_count; i++)
		if (children[i].id == id && children[i].kind == CHILD_RUN)
			return &children[i];
	return NULL;
}

/* The node going away shows as an error here and as a hang-up in the poll, which ends the box: nothing to do. */
static void answer(uint32_t id, int error, int fd)
{
	struct reply reply;

	reply_start(&reply, FRAME_DONE, id);
	reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
	(void)reply_send(CONTROL_FD, &reply, fd);
}

/* The one place where a wait status becomes words for the node. */
static void report(const struct child *child, int status, const struct rusage *usage)
{
	struct failure failure = {0};
	struct reply reply;

	if (child->kind == CHILD_OPEN) {
		if (status != 0) /* it died before it could answer */
			answer(child->id, EIO, -1);
		return;
	}
	reply_start(&reply, FRAME_EXITED, child->id);
	if (read(child->error_fd, &failure, sizeof failure) == (ssize_t)sizeof failure) {
		failure.step[sizeof failure.step - 1] = 0;
		reply_u32(&reply, FIELD_ERRNO, (uint32_t)failure.error);
		reply_string(&reply, FIELD_WORDS, failure.step);
	} else if (WIFSIGNALED(status)) {
		reply_u32(&reply, FIELD_SIGNAL, (uint32_t)WTERMSIG(status));
	} else {
		reply_u32(&reply, FIELD_STATUS, (uint32_t)WEXITSTATUS(status));
	}
	reply_u64(&reply, FIELD_CPU_US,
		  (uint64_t)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000u +
			  (uint64_t)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec));
	(void)reply_send(CONTROL_FD, &reply, -1);
	close(child->error_fd);
}

static void reap(void)
{
	struct rusage usage;
	int status;
	pid_t pid;

	while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
		struct child *child = child_by_pid(pid);
		if (!child)
			continue; /* an orphan that was adopted */
		report(child, status, &usage);
		*child = children[--child_count];
	}
}

/* The parent of a living process; 0 for one that is gone or a zombie. */
static pid_t parent_of(pid_t pid)
{
	char path[64], text[512], *at, state;
	int fd, parent = 0;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t got = read(fd, text, sizeof text - 1);
	close(fd);
	if (got <= 0)
		return 0;
	text[got] = 0;
	at = strrchr(text, ')'); /* a name may hold anything, parentheses too */
	return at && sscanf(at + 1, " %c %d", &state, &parent) == 2 && state != 'Z' ? parent : 0;
}

static int descends(pid_t pid, pid_t from)
{
	for (int depth = 0; pid > 1 && depth < 4096; depth++, pid = parent_of(pid))
		if (pid == from)
			return 1;
	return 0;
}

/* Walks of /proc before a tree counts as one that outruns them; each takes about a millisecond. */
#define ROUNDS 64

static void setrlimit_of(pid_t pid)
{
	const struct rlimit none = {0, 0};

	(void)prlimit(pid, RLIMIT_NPROC, &none, NULL);
}

/* Without a cgroup to kill: kill every descendant until a walk finds none alive, the root last. The root is stopped,
 * not dead, meanwhile: it is the subreaper of its tree, so no descendant leaves the tree; and a process with SIGKILL
 * pending cannot fork, so each round leaves fewer, unless they outrun it. */
static void kill_tree(pid_t root)
{
	int found = 1;

	setrlimit_of(root); /* it may be continued by a descendant, but never forks again */
	kill(root, SIGSTOP);
	for (int round = 0; found && round < ROUNDS; round++) {
		DIR *proc = opendir("/proc");
		struct dirent *entry;
		found = 0;
		while (proc && (entry = readdir(proc))) {
			pid_t pid = atoi(entry->d_name);
			if (pid > 1 && pid != root && descends(pid, root)) {
				kill(pid, SIGKILL);
				found = 1;
			}
		}
		if (proc)
			closedir(proc);
		if (found)
			sched_yield(); /* the killed need a moment to die */
	}
	/* A descendant may have killed the root: then the rest of its tree is ours now, and no walk finds it. */
	siginfo_t dead = {0};
	if (waitid(P_PID, (id_t)root, &dead, WEXITED | WNOHANG | WNOWAIT) == 0 && dead.si_pid == root)
		found = 1;
	kill(root, SIGKILL);
	/* Something that forks and exits faster than /proc can be read has no pid to kill. One call that the kernel makes
	 * atomic ends everything in the box: other commands too, which is the price where there is no cgroup. */
	if (found)
		kill(-1, SIGKILL);
}

static void kill_request(const struct message *message)
{
	struct view field;
	struct child *child = NULL;
	uint32_t offset = 0, run = 0, flags = 0;
	int more;

	while ((more = field_next(message, &offset, &field)) > 0) {
		if (field.key == FIELD_RUN && field_u32(&field, &run) == 0)
			child = child_by_run(run);
		if (field.key == FIELD_FLAGS && field_u32(&field, &flags) < 0)
			flags = 0;
	}
	if (child && flags & KILL_ONLY_ITSELF)
		kill(child->pid, SIGKILL);
	else if (child)
		kill_tree(child->pid);
	answer(message->head.id, more < 0 ? EBADMSG : child ? 0 : ESRCH, -1);
}

static void socket_request(const struct message *message)
{
	struct view field;
	uint32_t offset = 0, port = 0;

	while (field_next(message, &offset, &field) > 0)
		if (field.key == FIELD_PORT && field_u32(&field, &port) < 0)
			port = 0;
	int sock = message->head.type == FRAME_LISTEN ? listen_inside(port) : connect_inside(port);
	answer(message->head.id, sock < 0 ? errno : 0, sock);
	if (sock >= 0)
		close(sock);
}

static void start_request(struct message *message)
{
	struct child child;
	int spawned = message->head.type == FRAME_SPAWN;
	int error = spawned ? spawn(message, &child) : open_inside(message, &child);

	if (!error && (error = remember(child))) {
		kill(child.pid, SIGKILL);
		if (child.error_fd >= 0)
			close(child.error_fd);
	}
	if (error || spawned) {
		struct reply reply;
		reply_start(&reply, FRAME_DONE, message->head.id);
		reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
		if (!error)
			reply_u32(&reply, FIELD_PID, (uint32_t)child.pid);
		(void)reply_send(CONTROL_FD, &reply, -1);
	}
}

static void serve(struct message *message)
{
	switch (message->head.type) {
	case FRAME_SPAWN:
	case FRAME_OPEN: start_request(message); break;
	case FRAME_KILL: kill_request(message); break;
	case FRAME_LISTEN:
	case FRAME_CONNECT: socket_request(message); break;
	default: answer(message->head.id, EBADMSG, -1);
	}
}

static uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now); /* counts a suspended host's sleep too */
	return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

_Noreturn void pid1(const struct plan *plan)
{
	sigset_t child_signal;
	uint64_t end = plan->lifetime_ms ? now_ms() + plan->lifetime_ms : 0;

	sigemptyset(&child_signal);
	sigaddset(&child_signal, SIGCHLD);
	int signals = signalfd(-1, &child_signal, SFD_CLOEXEC | SFD_NONBLOCK);
	struct pollfd waits[2] = {{CONTROL_FD, POLLIN, 0}, {signals, POLLIN, 0}};

	for (;;) {
		int timeout = -1;
		if (end) {
			uint64_t now = now_ms();
			if (now >= end)
				_exit(0); /* PID 1's death is the box's death: the kernel kills the rest. Only here is it 0 */
			timeout = end - now > 60000 ? 60000 : (int)(end - now);
		}
		if (poll(waits, 2, timeout) < 0 && errno != EINTR)
			_exit(1);
		if (waits[1].revents) {
			struct signalfd_siginfo info[8];
			while (read(signals, info, sizeof info) > 0)
				;
			reap();
		}
		if (waits[0].revents) {
			struct message message;
			int got = wire_receive(CONTROL_FD, &message);
			if (got == 0 || (got < 0 && errno != ENOMEM))
				_exit(1); /* the node is gone, or speaks no frames: nobody will ask again */
			if (got > 0) {
				serve(&message);
				message_free(&message);
			}
		}
	}
}
