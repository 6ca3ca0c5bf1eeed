/* One request: fork, place the passed descriptors, exec. Exec's errno travels back through a pipe that exec closes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "box.h"

struct request {
	char **argv, **env;
	const char *cwd, *note;
	uint32_t user, holds, tty;
};

/* 0, or EBADMSG / ENOMEM. The vectors point into the message. */
static int parse(const struct message *message, struct request *request)
{
	struct view field;
	uint32_t offset = 0;
	size_t args = 0, envs = 0;
	int more;

	while ((more = field_next(message, &offset, &field)) > 0) {
		args += field.key == FIELD_ARG;
		envs += field.key == FIELD_ENV;
	}
	if (more < 0 || args == 0)
		return EBADMSG;
	request->argv = calloc(args + 1, sizeof(char *));
	request->env = calloc(envs + 1, sizeof(char *));
	if (!request->argv || !request->env)
		return ENOMEM;
	args = envs = 0;
	offset = 0;
	while (field_next(message, &offset, &field) > 0) {
		const char *text;
		switch (field.key) {
		case FIELD_ARG:
			if (field_string(&field, &text) < 0)
				return EBADMSG;
			request->argv[args++] = (char *)text;
			break;
		case FIELD_ENV:
			if (field_string(&field, &text) < 0)
				return EBADMSG;
			request->env[envs++] = (char *)text;
			break;
		case FIELD_CWD:
			if (field_string(&field, &request->cwd) < 0)
				return EBADMSG;
			break;
		case FIELD_HOLD:
			if (field_u32(&field, &request->holds) < 0)
				return EBADMSG;
			break;
		case FIELD_NOTE:
			if (field_string(&field, &request->note) < 0)
				return EBADMSG;
			break;
		case FIELD_USER:
			if (field_u32(&field, &request->user) < 0)
				return EBADMSG;
			break;
		case FIELD_TTY:
			if (field_u32(&field, &request->tty) < 0)
				return EBADMSG;
			break;
		default: return EBADMSG;
		}
	}
	return 0;
}

static _Noreturn void give_up(int error_fd, const char *step)
{
	struct failure failure = {.error = errno};

	strncpy(failure.step, step, sizeof failure.step - 1);
	while (write(error_fd, &failure, sizeof failure) < 0 && errno == EINTR)
		;
	_exit(127);
}

static _Noreturn void child(const struct message *message, const struct request *request, const struct plan *plan,
			    int error_fd)
{
	sigset_t none;
	int top;

	setsid();
	/* Extra descriptors are cgroup.procs files: joined before exec, so that nothing the program does escapes them. */
	for (int i = 3; i < message->fd_count; i++)
		if (write(message->fds[i], "0", 1) < 0)
			give_up(error_fd, "cgroup");
	/* With a parent that adopts, a helper without cgroup rights still finds every descendant of a run. */
	prctl(PR_SET_CHILD_SUBREAPER, 1);

	/* Move what is needed out of the way of 0..2 first: a passed descriptor may itself be one of them. */
	int moved[3];
	for (int i = 0; i < 3; i++)
		if ((moved[i] = fcntl(message->fds[i], F_DUPFD_CLOEXEC, 10)) < 0)
			give_up(error_fd, "descriptors");
	if ((top = fcntl(error_fd, F_DUPFD_CLOEXEC, 10)) < 0)
		give_up(error_fd, "descriptors");
	for (int i = 0; i < 3; i++)
		if (dup2(moved[i], i) < 0)
			give_up(top, "descriptors");
	/* Everything else is close-on-exec already. */
	if (request->tty && ioctl(0, TIOCSCTTY, 0) < 0)
		give_up(top, "terminal");
	if (setgroups(0, NULL) < 0 && errno != EPERM) /* EPERM: single-id map, where setgroups is denied */
		give_up(top, "groups");
	if (request->user && (setresgid(request->user, request->user, request->user) < 0 ||
			      setresuid(request->user, request->user, request->user) < 0))
		give_up(top, "user");
	/* Not PID 1's own limit: it holds descriptors for every command. */
	for (int i = 0; i < plan->limit_count; i++) {
		struct rlimit limit = {plan->limits[i].soft, plan->limits[i].hard};
		if (plan->limits[i].resource == RLIMIT_NOFILE && setrlimit(RLIMIT_NOFILE, &limit) < 0)
			give_up(top, "rlimit");
	}
	if (request->cwd && chdir(request->cwd) < 0)
		give_up(top, "chdir");
	for (int sig = 1; sig < 65; sig++)
		signal(sig, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	environ = request->env; /* execvp searches the PATH of the request, not ours */
	execvp(request->argv[0], request->argv);
	give_up(top, "exec");
}

/* A command is to be killed for memory before PID 1 is: it inherits the score of this moment. A program may lower its
 * own again, to that of PID 1 and no further. */
static void score(const struct plan *plan, int value)
{
	char text[16];
	int length = snprintf(text, sizeof text, "%d", value > 1000 ? 1000 : value);

	if (plan->score >= 0 && pwrite(plan->score, text, (size_t)length, 0) < 0)
		return; /* a kernel that refuses gives them the same, which is no reason to run nothing */
}

int spawn(struct message *message, const struct plan *plan, struct child *out)
{
	struct request request = {0};
	struct held *held = NULL;
	int pipes[2], error = parse(message, &request);

	if (!error && request.holds && !(held = hold(message, request.holds, request.note)))
		error = errno;
	if (!error && message->fd_count < 3)
		error = EBADMSG;
	if (!error && pipe2(pipes, O_CLOEXEC | O_NONBLOCK) < 0)
		error = errno;
	if (!error) {
		score(plan, plan->own_score + 100);
		pid_t pid = fork();
		if (pid == 0)
			child(message, &request, plan, pipes[1]);
		int failed = errno;
		score(plan, plan->own_score);
		errno = failed;
		if (pid < 0) {
			error = errno;
			close(pipes[0]);
		}
		close(pipes[1]);
		*out = (struct child){
			.pid = pid, .id = message->head.id, .kind = CHILD_RUN, .error_fd = pipes[0], .held = held};
	}
	if (error)
		let_go(held);
	free(request.argv);
	free(request.env);
	return error;
}
