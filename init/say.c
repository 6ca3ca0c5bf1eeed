#include "say.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "wire.h"

int say_socket = -1;

/* The kernel's word misleads in a few places. Each line names the real cause and where to look. */
const char *meaning(int error, const char *step)
{
	if (!strcmp(step, "namespaces")) {
		if (error == ENOSPC || error == EUSERS)
			return "no namespaces left: raise the limits under /proc/sys/user/max_*_namespaces (this is not a full disk)";
		if (error == EPERM || error == EACCES)
			return "user namespaces are refused on this host (run `sandlot doctor`)";
		if (error == EINVAL)
			return "the kernel lacks one of the namespaces mnt, pid, net, ipc, uts, cgroup, user";
		if (error == EAGAIN)
			return "no processes left: raise the limit of processes (ulimit -u, pids cgroup)";
	}
	if (!strcmp(step, "mount")) {
		if (error == ENOSPC)
			return "too many mounts: raise /proc/sys/fs/mount-max (this is not a full disk)";
		if (error == EPERM)
			return "the kernel refuses this mount in a user namespace (an outer container may mask /proc or /sys)";
		if (error == ENODEV)
			return "the kernel does not know this file system";
	}
	if (!strcmp(step, "overlay") && error == EPERM)
		return "this kernel lets no user namespace mount an overlay file system (Linux does since 5.11)";
	return strerror(error);
}

_Noreturn void die(int error, const char *step, const char *path)
{
	struct reply reply;
	char words[1024];

	snprintf(words, sizeof words, "%s%s%s: %s", step, *path ? " " : "", path, meaning(error, step));
	reply_start(&reply, FRAME_FAILED, 0);
	reply_u32(&reply, FIELD_ERRNO, (uint32_t)error);
	reply_string(&reply, FIELD_WORDS, words);
	if (reply_send(say_socket, &reply, -1) < 0)
		dprintf(2, "sandlot-init: %s\n", words);
	_exit(1);
}
