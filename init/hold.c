/* What PID 1 keeps for a node that is killed and comes back: duplicates of the descriptors of runs and listeners, and the
 * node's own notes about runs. PID 1 never reads from any of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "box.h"

struct listener {
	uint32_t id, port;
	int sock;
	struct listener *next;
};
static struct listener *listeners;

struct held *hold(struct message *message, uint32_t count, const char *note)
{
	struct held *held;

	if (count > HOLDS_MAX || (int)count > message->fd_count) {
		errno = EBADMSG;
		return NULL;
	}
	held = calloc(1, sizeof *held);
	if (!held)
		return NULL;
	for (int i = message->fd_count - (int)count; i < message->fd_count; i++)
		held->fds[held->count++] = message->fds[i];
	message->fd_count -= (int)count; /* they are ours now */
	held->id = message->head.id;
	strncpy(held->note, note ? note : "", sizeof held->note - 1);
	return held;
}

int hold_more(struct message *message, struct held *held, const char *note)
{
	while (held->next)
		held = held->next;
	held->next = hold(message, (uint32_t)message->fd_count, note);
	return held->next ? 0 : errno;
}

void let_go(struct held *held)
{
	while (held) {
		struct held *next = held->next;
		for (int i = 0; i < held->count; i++)
			close(held->fds[i]);
		free(held);
		held = next;
	}
}

int let_go_added(struct held *held, uint32_t id)
{
	for (struct held *gone; held && (gone = held->next); held = gone) {
		if (gone->id != id)
			continue;
		held->next = gone->next;
		gone->next = NULL;
		let_go(gone);
		return 1;
	}
	return 0;
}

int hold_listener(uint32_t id, int sock, uint32_t port)
{
	struct listener *listener = calloc(1, sizeof *listener);
	int copy = fcntl(sock, F_DUPFD_CLOEXEC, CONTROL_FD + 1);

	if (!listener || copy < 0) {
		if (copy >= 0)
			close(copy);
		free(listener);
		return -1;
	}
	*listener = (struct listener){id, port, copy, listeners};
	listeners = listener;
	return 0;
}

void release_listener(uint32_t id)
{
	for (struct listener **at = &listeners; *at; at = &(*at)->next) {
		struct listener *gone = *at;
		if (gone->id != id)
			continue;
		*at = gone->next;
		close(gone->sock);
		free(gone);
		return;
	}
}

void tell_listeners(void)
{
	for (struct listener *each = listeners; each; each = each->next) {
		struct reply reply;
		reply_start(&reply, FRAME_HELD, each->id);
		reply_u32(&reply, FIELD_PORT, each->port);
		(void)reply_send(CONTROL_FD, &reply, each->sock);
	}
}

void last_word(const struct plan *plan, const char *word)
{
	if (plan->record >= 0 && lseek(plan->record, 0, SEEK_END) >= 0 &&
	    write(plan->record, word, strlen(word)) != (ssize_t)strlen(word))
		return; /* a full disk: whoever reads it will say that PID 1 died */
}
