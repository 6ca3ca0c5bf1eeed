#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

uint64_t wire_until;

uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

uint64_t moment_after(uint64_t ms)
{
	uint64_t now = now_ms();

	return ms < UINT64_MAX - now ? now + ms : UINT64_MAX;
}

int wait_ms(uint64_t first, uint64_t second)
{
	uint64_t moment = !first || (second && second < first) ? second : first, now = now_ms();

	if (!moment)
		return -1;
	return moment <= now ? 0 : moment - now > 60000 ? 60000 : (int)(moment - now);
}

/* After a call that did not wait: 0 when it is to be made again. */
static int wait_for(int sock, short what)
{
	struct pollfd wait = {sock, what, 0};

	if (errno == EINTR)
		return 0;
	if (errno != EAGAIN)
		return -1;
	if (wire_until && now_ms() >= wire_until) {
		errno = ETIMEDOUT;
		return -1;
	}
	return poll(&wait, 1, wait_ms(wire_until, 0)) < 0 && errno != EINTR ? -1 : 0;
}

static int read_all(int sock, char *into, size_t length)
{
	while (length > 0) {
		ssize_t got = recv(sock, into, length, MSG_DONTWAIT);
		if (got < 0 && wait_for(sock, POLLIN) == 0)
			continue;
		if (got <= 0)
			return got == 0 ? 0 : -1;
		into += got;
		length -= (size_t)got;
	}
	return 1;
}

/* The next frame begins after it. -1 with `error`, or as `read_all` failed. */
static int pass_over(int sock, size_t length, int error)
{
	char piece[4096];

	while (length > 0) {
		size_t part = length < sizeof piece ? length : sizeof piece;
		int rest = read_all(sock, piece, part);
		if (rest <= 0)
			return rest;
		length -= part;
	}
	errno = error;
	return -1;
}

/* Descriptors ride on the first byte of a frame, so the header is read with recvmsg and the body with recv. */
int wire_receive(int sock, struct message *out)
{
	union {
		char space[CMSG_SPACE(sizeof(int) * FDS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec io = {&out->head, sizeof out->head};
	struct msghdr msg = {
		.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
	ssize_t got;

	out->body = NULL;
	out->fd_count = 0;
	do
		got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	while (got < 0 && wait_for(sock, POLLIN) == 0);
	if (got <= 0)
		return got == 0 ? 0 : -1;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(out->fds, CMSG_DATA(c), sizeof(int) * (size_t)count);
		out->fd_count = count;
	}
	if ((size_t)got < sizeof out->head) {
		int rest = read_all(sock, (char *)&out->head + got, sizeof out->head - (size_t)got);
		if (rest <= 0) {
			message_free(out);
			return rest;
		}
	}
	if (out->head.length <= FRAME_MAX)
		out->body = malloc(out->head.length ? out->head.length : 1);
	if (!out->body) {
		message_free(out);
		return pass_over(sock, out->head.length, out->head.length > FRAME_MAX ? EMSGSIZE : ENOMEM);
	}
	if (out->head.length > 0) {
		int rest = read_all(sock, out->body, out->head.length);
		if (rest <= 0) {
			message_free(out);
			return rest;
		}
	}
	return 1;
}

void message_free(struct message *message)
{
	for (int i = 0; i < message->fd_count; i++)
		if (message->fds[i] >= 0)
			close(message->fds[i]);
	message->fd_count = 0;
	free(message->body);
	message->body = NULL;
}

int field_next(const struct message *message, uint32_t *offset, struct view *out)
{
	struct field_head head;
	uint32_t left = message->head.length - *offset;

	if (left == 0)
		return 0;
	if (left < sizeof head)
		return -1;
	memcpy(&head, message->body + *offset, sizeof head);
	left -= (uint32_t)sizeof head;
	if (head.length > left)
		return -1;
	out->key = head.key;
	out->length = head.length;
	out->payload = message->body + *offset + sizeof head;
	*offset += (uint32_t)sizeof head + head.length;
	return 1;
}

int field_u32(const struct view *field, uint32_t *out)
{
	if (field->length != sizeof *out)
		return -1;
	memcpy(out, field->payload, sizeof *out);
	return 0;
}

int field_u64(const struct view *field, uint64_t *out)
{
	if (field->length != sizeof *out)
		return -1;
	memcpy(out, field->payload, sizeof *out);
	return 0;
}

int field_string(const struct view *field, const char **out)
{
	if (field->length == 0 || memchr(field->payload, 0, field->length) != field->payload + field->length - 1)
		return -1;
	*out = field->payload;
	return 0;
}

void reply_start(struct reply *reply, uint32_t type, uint32_t id)
{
	reply->head = (struct header){type, id, 0};
}

static void reply_bytes(struct reply *reply, uint16_t key, const void *value, uint32_t length)
{
	struct field_head head = {key, 0, length};

	if (reply->head.length + sizeof head + length > sizeof reply->body)
		return; /* only over-long words could come here, and those are cut by reply_string */
	memcpy(reply->body + reply->head.length, &head, sizeof head);
	memcpy(reply->body + reply->head.length + sizeof head, value, length);
	reply->head.length += (uint32_t)sizeof head + length;
}

void reply_u32(struct reply *reply, uint16_t key, uint32_t value)
{
	reply_bytes(reply, key, &value, sizeof value);
}

void reply_u64(struct reply *reply, uint16_t key, uint64_t value)
{
	reply_bytes(reply, key, &value, sizeof value);
}

void reply_string(struct reply *reply, uint16_t key, const char *value)
{
	char cut[1024];
	size_t length = strnlen(value, sizeof cut - 1);

	memcpy(cut, value, length);
	cut[length] = 0;
	reply_bytes(reply, key, cut, (uint32_t)length + 1);
}

int reply_send(int sock, const struct reply *reply, int fd)
{
	return reply_send_all(sock, reply, &fd, fd >= 0);
}

int reply_send_all(int sock, const struct reply *reply, const int *fds, int count)
{
	union {
		char space[CMSG_SPACE(sizeof(int) * HOLDS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec io[2] = {{(void *)&reply->head, sizeof reply->head}, {(void *)reply->body, reply->head.length}};
	struct msghdr msg = {.msg_iov = io, .msg_iovlen = 2};
	size_t size = sizeof reply->head + reply->head.length;
	ssize_t sent;

	if (count > 0) {
		memset(&control, 0, sizeof control);
		msg.msg_control = control.space;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)count);
	}
	do
		sent = sendmsg(sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (sent < 0 && wait_for(sock, POLLOUT) == 0);
	if (sent < 0)
		return -1;
	if ((size_t)sent != size) { /* a frame of this size is one socket buffer: the kernel takes it whole or not at all */
		errno = EIO;
		return -1;
	}
	return 0;
}
