/* PID 1 of the box: one poll over signals and the control socket. It reaps, reports, starts what it is asked to start,
 * and never exits because of a request. It ends the box when its lifetime is over, or when the node has been away for
 * longer than the grace; a node that comes back in time is told what is held for it. */
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
#include <sys/socket.h>
#include <sys/statvfs.h>
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
		if (children[i].pid == pid && !children[i].exit)
			return &children[i];
	return NULL;
}

static struct child *child_by_id(uint32_t id)
{
	for (int i = 0; id && i < child_count; i++)
		if (children[i].id == id)
			return &children[i];
	return NULL;
}

static void forget(struct child *child)
{
	let_go(child->held);
	free(child->exit);
	*child = children[--child_count];
}

/* The node going away shows as an error here and as a hang-up in the poll, which ends the box: nothing to do. */
static void answer(uint32_t id, int error, int fd)
{
	struct reply reply;

	if (!id) /* whoever asked is gone */
		return;
	reply_start(&reply, FRAME_DONE, id);
	reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
	(void)reply_send(CONTROL_FD, &reply, fd);
}

/* The one place where a wait status becomes words for the node. */
static void word_exit(const struct child *child, int status, const struct rusage *usage, struct reply *words)
{
	struct failure failure = {0};
	struct reply reply;

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
	*words = reply;
}

/* It is over: the node is told, at once and, if it wants the run held, again whenever a node comes back. */
static void report(struct child *child, int status, const struct rusage *usage)
{
	struct reply words;

	if (child->kind == CHILD_OPEN) {
		struct message opened;
		int got = wire_receive(child->error_fd, &opened);
		uint32_t offset = 0, error = EIO;
		struct view field;
		if (got > 0 && field_next(&opened, &offset, &field) > 0)
			(void)field_u32(&field, &error);
		close(child->error_fd);
		answer(child->id, (int)error, got > 0 && opened.fd_count ? opened.fds[0] : -1);
		if (got > 0)
			message_free(&opened);
		forget(child);
		return;
	}
	if (child->kind == CHILD_WORK) {
		if (status != 0) /* it died before it could answer */
			answer(child->id, EIO, -1);
		forget(child);
		return;
	}
	word_exit(child, status, usage, &words);
	close(child->error_fd);
	child->error_fd = -1;
	if (child->id)
		(void)reply_send(CONTROL_FD, &words, -1);
	if (!child->held || !(child->exit = malloc(sizeof words))) {
		forget(child);
		return;
	}
	*child->exit = words;
	child->pid = 0;
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

/* The numbers of a request, by their keys. 0, or EBADMSG: it is malformed, or says more than that. */
struct wanted {
	uint16_t key;
	uint32_t *into;
};

static int read_numbers(const struct message *message, const struct wanted *wanted, int count)
{
	struct view field;
	uint32_t offset = 0;
	int more;

	while ((more = field_next(message, &offset, &field)) > 0) {
		int i = 0;
		while (i < count && wanted[i].key != field.key)
			i++;
		if (i == count || field_u32(&field, wanted[i].into) < 0)
			return EBADMSG;
	}
	return more < 0 ? EBADMSG : 0;
}

static void kill_request(const struct message *message)
{
	uint32_t run = 0, flags = 0;
	int error = read_numbers(message, (struct wanted[]){{FIELD_RUN, &run}, {FIELD_FLAGS, &flags}}, 2);
	struct child *child = error ? NULL : child_by_id(run);

	if (!error && (!child || child->exit)) /* over already */
		error = ESRCH;
	if (!error && flags & KILL_ONLY_ITSELF)
		kill(child->pid, SIGKILL);
	else if (!error && !child->killed) { /* a second time, its death would look like a descendant's doing */
		child->killed = 1;
		kill_tree(child->pid);
	}
	answer(message->head.id, error, -1);
}

static void socket_request(const struct message *message)
{
	uint32_t port = 0, held = 0;
	int error = read_numbers(message, (struct wanted[]){{FIELD_PORT, &port}, {FIELD_HOLD, &held}}, 2), sock = -1;

	if (!error) {
		sock = message->head.type == FRAME_LISTEN ? listen_inside(port) : connect_inside(port);
		error = sock < 0 ? errno : 0;
	}
	if (!error && held && hold_listener(message->head.id, sock, port) < 0)
		error = errno;
	answer(message->head.id, error, error ? -1 : sock);
	if (sock >= 0)
		close(sock);
}

static void release_request(const struct message *message)
{
	uint32_t run = 0;

	if (read_numbers(message, (struct wanted[]){{FIELD_RUN, &run}}, 1))
		return;
	struct child *child = child_by_id(run);
	if (child && child->exit) {
		forget(child);
	} else if (child) { /* the node gives it up before its end: nothing is held any more */
		let_go(child->held);
		child->held = NULL;
	}
	for (int i = 0; !child && i < child_count; i++)
		if (let_go_added(children[i].held, run))
			return;
	release_listener(run);
}

static void hold_request(struct message *message)
{
	struct view field;
	const char *note = "";
	uint32_t offset = 0, run = 0;
	int more, bad = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_RUN: bad |= field_u32(&field, &run); break;
		case FIELD_NOTE: bad |= field_string(&field, &note); break;
		default: bad = 1;
		}
	}
	struct child *child = child_by_id(run);
	int error = more < 0 || bad ? EBADMSG : !child || !child->held ? ESRCH : hold_more(message, child->held, note);
	answer(message->head.id, error, -1);
}

static void signal_request(const struct message *message)
{
	uint32_t number = 0, run = 0;
	int error = read_numbers(message, (struct wanted[]){{FIELD_SIGNAL, &number}, {FIELD_RUN, &run}}, 2);
	pid_t whom = -1;

	if (!error && (number < 1 || number > 64))
		error = EINVAL;
	if (!error && run) { /* for a command: it leads a group of its own */
		struct child *child = child_by_id(run);
		if (child && !child->exit)
			whom = child->pid;
		else
			error = ESRCH;
	}
	/* With a terminal it is for those in its foreground, who are asked for here: their number means something here. */
	if (!error && message->fd_count > 0 && (whom = tcgetpgrp(message->fds[0])) <= 1)
		error = ESRCH;
	if (!error && kill(whom == -1 ? -1 : -whom, (int)number) < 0 &&
	    /* A command that was started a moment ago leads no group yet. */
	    (errno != ESRCH || (run && kill(whom, (int)number) < 0)) && errno != ESRCH)
		error = errno;
	answer(message->head.id, error, -1);
}

static void start_request(struct message *message, const struct plan *plan)
{
	struct child child = {0};
	int spawned = message->head.type == FRAME_SPAWN, error;

	switch (message->head.type) {
	case FRAME_SPAWN: error = spawn(message, plan, &child); break;
	case FRAME_COPY: error = copy_upper(message, plan->upper, &child); break;
	case FRAME_LIST: error = list_upper(message, plan->upper, &child); break;
	case FRAME_UNPACK: error = unpack_inside(message, &child); break;
	case FRAME_FILES: error = files_inside(message, &child); break;
	default: error = open_inside(message, &child);
	}
	if (!error && (error = remember(child))) {
		kill(child.pid, SIGKILL);
		if (child.error_fd >= 0)
			close(child.error_fd);
		let_go(child.held);
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

static void claim_request(const struct message *message, struct plan *plan, uint64_t *end)
{
	struct view field;
	uint64_t lifetime = 0, grace = plan->grace_ms;
	uint32_t offset = 0;
	int more, bad = 0, given = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_LIFETIME:
			bad |= field_u64(&field, &lifetime);
			given = 1;
			break;
		case FIELD_GRACE: bad |= field_u64(&field, &grace); break;
		default: bad = 1;
		}
	}
	bad |= more < 0 || !given;
	if (!bad) { /* all of it, or nothing */
		*end = wire_until = lifetime ? moment_after(lifetime) : 0;
		plan->grace_ms = grace;
	}
	answer(message->head.id, bad ? EBADMSG : 0, -1);
}

/* Answered here and not by a child: a box at its limit of processes can be asked too. */
static void disk_request(const struct message *message, int upper)
{
	struct reply reply;
	struct statvfs found;
	int error = fstatvfs(upper, &found) < 0 ? errno : 0;

	reply_start(&reply, FRAME_DONE, message->head.id);
	reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
	if (!error) {
		reply_u64(&reply, FIELD_BYTES, (uint64_t)(found.f_blocks - found.f_bfree) * found.f_frsize);
		reply_u32(&reply, FIELD_FILES, (uint32_t)(found.f_files - found.f_ffree));
	}
	(void)reply_send(CONTROL_FD, &reply, -1);
}

static void serve(struct message *message, struct plan *plan, uint64_t *end)
{
	switch (message->head.type) {
	case FRAME_SPAWN:
	case FRAME_COPY:
	case FRAME_LIST:
	case FRAME_UNPACK:
	case FRAME_FILES:
	case FRAME_OPEN: start_request(message, plan); break;
	case FRAME_KILL: kill_request(message); break;
	case FRAME_RELEASE: release_request(message); break;
	case FRAME_HOLD: hold_request(message); break;
	case FRAME_SIGNAL: signal_request(message); break;
	case FRAME_DISK: disk_request(message, plan->upper); break;
	case FRAME_CLAIM: claim_request(message, plan, end); break;
	case FRAME_LISTEN:
	case FRAME_CONNECT: socket_request(message); break;
	default: answer(message->head.id, EBADMSG, -1);
	}
}

/* The node is gone. Nobody waits for what it asked for last, and its numbers for what is not held mean nothing: the
 * next node counts anew, and would take an answer to them for one of its own. */
static void forget_node(void)
{
	for (int i = 0; i < child_count; i++) {
		if (children[i].held)
			continue;
		children[i].id = 0;
		if (children[i].kind != CHILD_RUN)
			kill(children[i].pid, SIGKILL);
	}
}

/* A node has come: it takes the place of the one that is gone, and is told what is held. */
static void welcome(const struct plan *plan)
{
	struct reply ready;
	int node = accept4(plan->listener, NULL, NULL, SOCK_CLOEXEC);

	if (node < 0)
		return;
	dup3(node, CONTROL_FD, O_CLOEXEC);
	close(node);
	for (int i = 0; i < child_count; i++) {
		struct child *child = &children[i];
		struct reply reply;
		if (!child->held)
			continue;
		reply_start(&reply, FRAME_HELD, child->id);
		reply_u32(&reply, FIELD_PID, (uint32_t)child->pid);
		reply_string(&reply, FIELD_NOTE, child->held->note);
		(void)reply_send_all(CONTROL_FD, &reply, child->held->fds, child->held->count);
		for (struct held *more = child->held->next; more; more = more->next) {
			reply_start(&reply, FRAME_HELD, more->id);
			reply_u32(&reply, FIELD_RUN, child->id);
			reply_string(&reply, FIELD_NOTE, more->note);
			(void)reply_send_all(CONTROL_FD, &reply, more->fds, more->count);
		}
		if (child->exit)
			(void)reply_send(CONTROL_FD, child->exit, -1);
	}
	tell_listeners();
	reply_start(&ready, FRAME_READY, 0);
	(void)reply_send(CONTROL_FD, &ready, -1);
}

/* PID 1's death is the box's death: the kernel kills the rest. It exits with 0 at the end of its lifetime only. */
static _Noreturn void leave(const struct plan *plan, const char *word, int status)
{
	last_word(plan, word);
	_exit(status);
}

_Noreturn void pid1(struct plan *plan)
{
	sigset_t child_signal;
	uint64_t end = plan->lifetime_ms ? moment_after(plan->lifetime_ms) : 0, alone_until = 0;

	wire_until = end; /* a node that hangs keeps nothing alive */
	sigemptyset(&child_signal);
	sigaddset(&child_signal, SIGCHLD);
	int signals = signalfd(-1, &child_signal, SFD_CLOEXEC | SFD_NONBLOCK);
	/* While a node is there nobody else is let in. The dead one's socket stays where it is: what is said goes nowhere. */
	struct pollfd waits[3] = {{CONTROL_FD, POLLIN, 0}, {signals, POLLIN, 0}, {-1, POLLIN, 0}};

	for (;;) {
		if (poll(waits, 3, wait_ms(end, alone_until)) < 0 && errno != EINTR)
			_exit(1);
		if (end && now_ms() >= end)
			leave(plan, "lifetime\n", 0);
		if (alone_until && now_ms() >= alone_until)
			leave(plan, "orphaned\n", 1);
		if (waits[1].revents) {
			struct signalfd_siginfo info[8];
			while (read(signals, info, sizeof info) > 0)
				;
			reap();
		}
		if (waits[2].revents) {
			welcome(plan);
			alone_until = 0;
			waits[0].fd = CONTROL_FD;
			waits[2].fd = -1;
			continue;
		}
		if (waits[0].fd >= 0 && waits[0].revents) {
			struct message message;
			int got = wire_receive(CONTROL_FD, &message);
			if (got > 0) {
				serve(&message, plan, &end);
				message_free(&message);
			} else if (got < 0 && (errno == ENOMEM || errno == EMSGSIZE)) {
				answer(message.head.id, errno, -1);
			} else if (got == 0 || errno != ETIMEDOUT) { /* gone, or speaks no frames */
				if (!plan->grace_ms || plan->listener < 0)
					leave(plan, "orphaned\n", 1);
				forget_node();
				alone_until = moment_after(plan->grace_ms);
				waits[0].fd = -1;
				waits[2].fd = plan->listener;
			}
		}
	}
}
