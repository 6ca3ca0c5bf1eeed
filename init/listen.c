/* A socket made here keeps the box's network namespace after its descriptor is handed out: that is how a box without
 * any network reaches the one endpoint that the node serves, and how the node reaches a port in the box. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "box.h"

/* Connections that may wait while the node is busy; the kernel caps it at net.core.somaxconn. */
#define BACKLOG 512

static int loopback_socket(uint32_t port, struct sockaddr_in *address)
{
	if (port == 0 || port > 65535) {
		errno = EINVAL;
		return -1;
	}
	*address = (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

static int fail(int sock)
{
	int error = errno;

	if (sock >= 0)
		close(sock);
	errno = error;
	return -1;
}

int listen_inside(uint32_t port)
{
	struct sockaddr_in address;
	int on = 1, sock = loopback_socket(port, &address);

	if (sock < 0 || setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0 ||
	    bind(sock, (struct sockaddr *)&address, sizeof address) < 0 || listen(sock, BACKLOG) < 0)
		return fail(sock);
	return sock;
}

/* On loopback connect answers at once, unless the backlog is full: then the node waits for the descriptor. */
int connect_inside(uint32_t port)
{
	struct sockaddr_in address;
	int sock = loopback_socket(port, &address);

	if (sock < 0 || (connect(sock, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS))
		return fail(sock);
	return sock;
}
