/* sandlot-init: makes one box and stays in it as PID 1.
 *
 * This file reads as the checklist for making a box. It holds no policy: what to mount, limit and deny comes in the
 * plan. The node starts it with the control socket as descriptor 3 and nothing else.
 *
 * Failure rule: before "ready" any failure dies naming step, path and meaning; after it nothing exits on a request.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "box.h"
#include "say.h"
#include "wire.h"

#define NAMESPACES \
	(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

static struct plan plan = {.host_id = UINT32_MAX, .listener = -1, .record = -1, .upper = -1, .score = -1};

static _Noreturn void bad_plan(const char *what)
{
	die(EBADMSG, "plan", what);
}

static void parse_step(const struct view *field)
{
	struct step *step = &plan.steps[plan.step_count];
	const char **strings[] = {&step->source, &step->target, &step->text, &step->data};
	const char *at = field->payload + sizeof step->head;
	const char *end = field->payload + field->length;

	if (plan.step_count == STEPS_MAX)
		bad_plan("has too many steps");
	if (field->length < sizeof step->head)
		bad_plan("has a short step");
	memcpy(&step->head, field->payload, sizeof step->head);
	for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
		const char *nul = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
		if (!nul)
			bad_plan("has a step without its strings");
		*strings[i] = at;
		at = nul + 1;
	}
	plan.step_count++;
}

static int passed(const struct view *field, const struct message *message)
{
	uint32_t index;

	if (field_u32(field, &index) < 0 || index >= (uint32_t)message->fd_count)
		bad_plan("names a descriptor that was not passed");
	return message->fds[index];
}

/* The whole plan is parsed before the first namespace call. It points into the message, which stays. */
static void parse_plan(struct message *message)
{
	struct view field;
	uint32_t offset = 0;
	int more, bad = 0;

	while ((more = field_next(message, &offset, &field)) > 0) {
		switch (field.key) {
		case FIELD_HOST_ID: bad = field_u32(&field, &plan.host_id); break;
		case FIELD_CAPS: bad = field_u64(&field, &plan.caps); break;
		case FIELD_SETUID: bad = field_u32(&field, &plan.setuid); break;
		case FIELD_NETWORK: bad = field_u32(&field, &plan.host_network); break;
		case FIELD_LIFETIME: bad = field_u64(&field, &plan.lifetime_ms); break;
		case FIELD_STEP: parse_step(&field); break;
		case FIELD_JOIN:
			if (plan.join_count == JOINS_MAX)
				bad_plan("joins too many cgroups");
			plan.joins[plan.join_count++] = passed(&field, message);
			break;
		case FIELD_KEEP:
			if (plan.keep_count == KEEPS_MAX)
				bad_plan("keeps too many descriptors");
			plan.keeps[plan.keep_count++] = passed(&field, message);
			break;
		case FIELD_LISTENER: plan.listener = passed(&field, message); break;
		case FIELD_RECORD: plan.record = passed(&field, message); break;
		case FIELD_GRACE: bad = field_u64(&field, &plan.grace_ms); break;
		case FIELD_RLIMIT:
			if (plan.limit_count == LIMITS_MAX || field.length != sizeof(struct limit))
				bad_plan("has a malformed limit");
			memcpy(&plan.limits[plan.limit_count++], field.payload, sizeof(struct limit));
			break;
		case FIELD_SECCOMP:
			if (field.length % sizeof(struct sock_filter) || field.length / sizeof(struct sock_filter) > 4096)
				bad_plan("has a malformed seccomp filter");
			plan.filter.len = (unsigned short)(field.length / sizeof(struct sock_filter));
			plan.filter.filter = malloc(field.length); /* aligned, unlike the field */
			if (!plan.filter.filter)
				die(ENOMEM, "plan", "");
			memcpy(plan.filter.filter, field.payload, field.length);
			break;
		default: bad_plan("has a field that this helper does not know (node and helper differ in version)");
		}
		if (bad)
			bad_plan("has a malformed field");
	}
	if (more < 0)
		bad_plan("is malformed");
	for (int i = 0; i < message->fd_count; i++) {
		int fd = message->fds[i], named = fd == plan.listener || fd == plan.record;
		for (int j = 0; j < plan.join_count; j++)
			named |= plan.joins[j] == fd;
		for (int j = 0; j < plan.keep_count; j++)
			named |= plan.keeps[j] == fd;
		if (!named)
			plan.slots[plan.slot_count++] = fd;
	}
}

/* Trees and cgroup files have done their work; what stays moves down to the lowest numbers and the rest is closed. */
static void keep_descriptors(void)
{
	int *stay[KEEPS_MAX + 4] = {&plan.listener, &plan.record, &plan.upper, &plan.score};
	int count = 4;

	for (int i = 0; i < plan.keep_count; i++)
		stay[count++] = &plan.keeps[i];
	for (int i = 0; i < count; i++)
		if (*stay[i] >= 0 && (*stay[i] = fcntl(*stay[i], F_DUPFD_CLOEXEC, 256)) < 0)
			die(errno, "descriptors", "");
	for (int i = 0; i < count; i++) {
		if (*stay[i] >= 0 && dup3(*stay[i], CONTROL_FD + 1 + i, O_CLOEXEC) < 0)
			die(errno, "descriptors", "");
		if (*stay[i] >= 0)
			*stay[i] = CONTROL_FD + 1 + i;
		else
			close(CONTROL_FD + 1 + i);
	}
	syscall(SYS_close_range, CONTROL_FD + 1 + count, ~0u, 0);
}

static void receive(struct message *message, uint32_t type)
{
	int got = wire_receive(CONTROL_FD, message);

	if (got == 0)
		_exit(1); /* the node went away: nobody is left to tell */
	if (got < 0)
		die(errno, "plan", "could not be read");
	if (message->head.type != type)
		bad_plan("came in an unexpected frame");
}

/* PID 1 is the box: when memory ends, it is the last that the kernel shall kill. Its own score is what it raises for the
 * moment in which a command is forked (spawn.c), through this descriptor: its files in /proc belong to the host's root
 * while it is not dumpable, as do those of a child of its. Nobody is inside yet who could make use of the moment. */
static void open_score(void)
{
	char text[16] = "";

	if (prctl(PR_SET_DUMPABLE, 1) < 0)
		die(errno, "dumpable", "");
	plan.score = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
	if (plan.score >= 0 && read(plan.score, text, sizeof text - 1) > 0)
		plan.own_score = atoi(text);
	if (prctl(PR_SET_DUMPABLE, 0) < 0)
		die(errno, "dumpable", "");
}

/* From here on in the new namespaces. */
static _Noreturn void inside(void)
{
	struct message mapped;
	struct reply ready;

	/* The parent leaves at once; the node, whose child this is (CLONE_PARENT), writes the id maps and says so. */
	receive(&mapped, FRAME_MAPPED);
	message_free(&mapped);
	if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
		die(errno, "ids", "root inside is not mapped");
	/* A fresh dumpable flag would let the payload read our descriptors through /proc/1. */
	if (prctl(PR_SET_DUMPABLE, 0) < 0)
		die(errno, "dumpable", "");
	umask(0);
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		die(errno, "mount", "/ as private");
	for (int i = 0; i < plan.step_count; i++)
		step_do(&plan, &plan.steps[i]);
	umask(022);
	open_score();
	keep_descriptors();
	confine(&plan);

	reply_start(&ready, FRAME_READY, 0);
	if (reply_send(CONTROL_FD, &ready, -1) < 0)
		_exit(1);
	pid1(&plan);
}

/* A node that is shielded from the kernel's killer for memory must not hand that on to a box. Where the node is root
 * this comes before the box's id is taken: then nobody inside gets below 0 again. */
static void protect(void)
{
	int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
	char text[16] = "";

	if (fd >= 0 && read(fd, text, sizeof text - 1) > 0 && atoi(text) < 0 && pwrite(fd, "0", 1, 0) < 0)
		die(errno, "oom_score_adj", "");
	if (fd >= 0)
		close(fd);
}

/* A limit on processes counts those of one user. But a user namespace remembers its maker's limit, as it was at that
 * moment, and holds all users in it together to it, by counting its maker's processes (from Linux 5.14 on). So where the
 * box has a maker of its own its user namespace is made under the limit, and the limit lifted again. Returns what was
 * made. */
static int limit_namespace(void)
{
	if (plan.host_id == UINT32_MAX)
		return 0; /* the maker is an ordinary user, with other boxes and a desktop perhaps */
	for (int i = 0; i < plan.limit_count; i++) {
		struct rlimit before, limit;
		if (plan.limits[i].resource != RLIMIT_NPROC || getrlimit(RLIMIT_NPROC, &before) < 0)
			continue;
		limit = (struct rlimit){plan.limits[i].soft, before.rlim_max};
		if (limit.rlim_cur > limit.rlim_max)
			limit.rlim_cur = limit.rlim_max;
		if (setrlimit(RLIMIT_NPROC, &limit) < 0 || unshare(CLONE_NEWUSER) < 0 || setrlimit(RLIMIT_NPROC, &before) < 0)
			die(errno, "namespaces", "");
		return CLONE_NEWUSER;
	}
	return 0;
}

int main(void)
{
	static struct message message;
	struct reply reply;
	sigset_t all;

	prctl(PR_SET_NAME, "sandlot-init"); /* it may be run from a descriptor, and is called after its number then */
	/* A large request's memory goes back to the kernel with it: by default the C library learns to keep that much. */
	mallopt(M_MMAP_THRESHOLD, 128 << 10);
	say_socket = CONTROL_FD;
	/* Anything inherited beyond the control socket would keep other boxes' sockets open and them alive. */
	if (syscall(SYS_close_range, CONTROL_FD + 1, ~0u, 0) < 0)
		for (int fd = CONTROL_FD + 1; fd < 65536; fd++)
			close(fd);
	fcntl(CONTROL_FD, F_SETFD, FD_CLOEXEC);
	receive(&message, FRAME_PLAN);
	parse_plan(&message);

	/* Signals are blocked first and read from one descriptor; faults keep their default and end the box. */
	sigfillset(&all);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGILL);
	sigdelset(&all, SIGFPE);
	sigdelset(&all, SIGABRT);
	sigprocmask(SIG_SETMASK, &all, NULL);
	setsid();

	protect();
	for (int i = 0; i < plan.join_count; i++)
		if (write(plan.joins[i], "0", 1) < 0)
			die(errno, "cgroup", "could not be joined");
	if (plan.host_id != UINT32_MAX) {
		/* The box's own id is taken *before* the user namespace is made: per-user kernel quotas (inotify, mqueue,
		 * pending signals, namespaces) are charged to its creator, and one box must not exhaust them for all. */
		if (setgroups(0, NULL) < 0 || setresgid(plan.host_id, plan.host_id, plan.host_id) < 0 ||
		    setresuid(plan.host_id, plan.host_id, plan.host_id) < 0)
			die(errno, "ids", "the box's own host id could not be taken");
	}

	int made = limit_namespace();
	if (plan.host_network)
		made |= CLONE_NEWNET; /* by somebody else */

	/* clone, not unshare: a pid namespace holds children only. CLONE_PARENT makes the new PID 1 the node's child,
	 * so that this process can leave and costs no memory. */
	long pid = syscall(SYS_clone, (unsigned long)((NAMESPACES & ~made) | CLONE_PARENT | SIGCHLD), 0, 0, 0, 0);
	if (pid < 0)
		die(errno, "namespaces", "");
	if (pid == 0)
		inside();
	reply_start(&reply, FRAME_PID, 0);
	reply_u32(&reply, FIELD_PID, (uint32_t)pid);
	return reply_send(CONTROL_FD, &reply, -1) < 0;
}
