/* What PID 1 and everything below it gives up for good. Capabilities of PID 1 itself stay: it must change ids and
 * kill; its children lose theirs at exec, bounded by the bounding set that is cut here. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "box.h"
#include "say.h"

void confine(const struct plan *plan)
{
	for (int i = 0; i < plan->limit_count; i++) {
		struct rlimit limit = {plan->limits[i].soft, plan->limits[i].hard};
		if (plan->limits[i].resource == RLIMIT_NOFILE)
			continue; /* of commands, not of PID 1: see spawn.c */
		if (setrlimit((__rlimit_resource_t)plan->limits[i].resource, &limit) < 0)
			die(errno, "rlimit", "");
	}
	for (unsigned long cap = 0; cap < 64; cap++) {
		if (plan->caps >> cap & 1)
			continue;
		if (prctl(PR_CAPBSET_DROP, cap) < 0) {
			if (errno == EINVAL)
				break; /* past the last capability of this kernel */
			die(errno, "capabilities", "");
		}
	}
	/* Ambient ones would survive exec of a plain program. A kernel without them (before 4.3) has none to clear. */
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (!plan->setuid && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die(errno, "no_new_privs", "");
	/* Last: the filter forbids some of what was needed above. Loaded once here (about 1 ms) and inherited. */
	if (plan->filter.len && prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &plan->filter) < 0)
		die(errno, "seccomp", "");
}
