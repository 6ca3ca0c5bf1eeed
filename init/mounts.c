/* One function per kind of step, in the order in which a plan uses them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "box.h"
#include "say.h"

#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif
#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 4
#endif
#ifndef MOVE_MOUNT_T_EMPTY_PATH
#define MOVE_MOUNT_T_EMPTY_PATH 0x40
#endif

/* struct mount_attr of linux/mount.h, which clashes with sys/mount.h in older headers. */
struct attributes {
	uint64_t set, clear, propagation, userns_fd;
};
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_NOEXEC = 8 };

/* How the kernel shows an owner that has no id here. */
#define NOBODY 65534u

static char old_root[32]; /* where the host is until STEP_DETACH */
static struct timespec root_times[2]; /* as they were before it came there */

static int clone_tree(const char *source)
{
	return (int)syscall(SYS_open_tree, AT_FDCWD, source, OPEN_TREE_CLONE | AT_RECURSIVE | O_CLOEXEC);
}

/* A path of the image, as a place. */
static int place(const char *path, int flags)
{
	return open_path(AT_FDCWD, path, O_PATH | O_CLOEXEC | flags, 0);
}

/* The same, made with what leads to it where it is missing: of the same kind as `mode` says. With O_NOFOLLOW a link is
 * the place itself, wherever it may lead. */
static int make_place(const char *path, mode_t mode, int flags)
{
	char parent[4096];
	const char *name = strrchr(path, '/');
	int fd = place(path, flags), at;

	if (fd >= 0 || errno != ENOENT || !name)
		return fd;
	if ((size_t)(name - path) >= sizeof parent) {
		errno = ENAMETOOLONG;
		return -1;
	}
	snprintf(parent, sizeof parent, "%.*s", name == path ? 1 : (int)(name - path), path);
	at = make_place(parent, S_IFDIR, 0);
	if (at < 0)
		return -1;
	if (S_ISDIR(mode))
		fd = mkdirat(at, name + 1, 0755);
	else if ((fd = openat(at, name + 1, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) >= 0)
		close(fd);
	close(at);
	return fd < 0 && errno != EEXIST ? -1 : place(path, flags);
}

/* Kernels before 5.12 have no mount_setattr: there the same flags go on by remounting, not below the top mount. */
static void restrict_old(const char *target, uint64_t flags)
{
	unsigned long ms = 0;

	ms |= flags & ATTACH_READ_ONLY ? MS_RDONLY : 0;
	ms |= flags & ATTACH_NODEV ? MS_NODEV : 0;
	ms |= flags & ATTACH_NOSUID ? MS_NOSUID : 0;
	ms |= flags & ATTACH_NOEXEC ? MS_NOEXEC : 0;
	if (mount(NULL, target, NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    (ms && mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | ms, NULL) < 0))
		die(errno, "mount", target);
}

/* As a private mount, always: one that was shared on the host would bring inside what is mounted below it later, without
 * any of the flags, and take the box's own mounts out. */
static void attach(int tree, const char *target, uint64_t flags)
{
	struct attributes attributes = {.propagation = MS_PRIVATE};
	struct stat what;
	int old_kernel = 0, at;

	attributes.set |= flags & ATTACH_READ_ONLY ? ATTR_RDONLY : 0;
	attributes.set |= flags & ATTACH_NODEV ? ATTR_NODEV : 0;
	attributes.set |= flags & ATTACH_NOSUID ? ATTR_NOSUID : 0;
	attributes.set |= flags & ATTACH_NOEXEC ? ATTR_NOEXEC : 0;
	if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes, sizeof attributes) < 0) {
		if (errno != ENOSYS)
			die(errno, "mount flags", target);
		old_kernel = 1;
	}
	if (fstat(tree, &what) < 0)
		die(errno, "stat", target);
	at = make_place(target, what.st_mode, O_NOFOLLOW);
	if (at < 0)
		die(errno, "mount point", target);
	if (syscall(SYS_move_mount, tree, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0)
		die(errno, "mount", target);
	close(at);
	if (old_kernel)
		restrict_old(target, flags);
}

static void bind_step(const struct step *step)
{
	int tree;

	if (step->head.flags & ATTACH_IF_PRESENT && access(step->target, F_OK) < 0)
		return;
	tree = clone_tree(step->source);
	if (tree < 0) {
		if (errno == ENOENT && step->head.flags & ATTACH_OPTIONAL)
			return;
		die(errno, "open", step->source);
	}
	attach(tree, step->target, step->head.flags);
	close(tree);
}

static int *slot_of(struct plan *plan, const struct step *step)
{
	if (step->head.slot < 0 || step->head.slot >= plan->slot_count)
		die(EBADMSG, "plan", "names a slot that is empty");
	return &plan->slots[step->head.slot];
}

static void write_step(const struct step *step)
{
	size_t length = strlen(step->source);
	int fd = open(step->target, O_WRONLY | O_CLOEXEC);

	if (fd < 0 && errno == ENOENT && step->head.flags & ATTACH_OPTIONAL)
		return;
	if (fd < 0 || write(fd, step->source, length) != (ssize_t)length)
		die(errno, "write", step->target);
	close(fd);
}

static void mkdir_step(const struct step *step)
{
	if (mkdir(step->target, (mode_t)step->head.flags) < 0 && errno != EEXIST)
		die(errno, "mkdir", step->target);
}

/* The old root stays mounted for a while, because a new proc may be mounted only while another one is fully visible. It
 * goes to a directory with a random name: an image could hold a symlink to one it knows. pivot_root(".", ".") would need
 * no directory, but stacks the old root on the new one, and then "/.." leads out. */
static void pivot_step(const struct step *step)
{
	unsigned char random[12];
	char path[4096 + sizeof old_root];
	size_t at = (size_t)snprintf(old_root, sizeof old_root, "/.");

	if (getrandom(random, sizeof random, 0) != sizeof random)
		die(errno, "random", "");
	for (size_t i = 0; i < sizeof random; i++)
		at += (size_t)snprintf(old_root + at, sizeof old_root - at, "%02x", random[i]);
	snprintf(path, sizeof path, "%.4000s%s", step->target, old_root);
	struct stat root;
	if (stat(step->target, &root) < 0)
		die(errno, "stat", step->target);
	root_times[0] = root.st_atim;
	root_times[1] = root.st_mtim;
	if (mkdir(path, 0700) < 0)
		die(errno, "mkdir", path);
	if (syscall(SYS_pivot_root, step->target, path) < 0 || chdir("/") < 0)
		die(errno, "pivot_root", step->target);
}

static void detach_step(void)
{
	if (umount2(old_root, MNT_DETACH) < 0 || rmdir(old_root) < 0 || utimensat(AT_FDCWD, "/", root_times, 0) < 0)
		die(errno, "unmount", "the old root");
}

static void loopback_step(void)
{
	struct ifreq request = {.ifr_name = "lo"};
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	request.ifr_flags = IFF_UP | IFF_RUNNING;
	if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &request) < 0)
		die(errno, "loopback", "");
	close(sock);
}

/* Overlayfs knows "userxattr" since 5.11. Kernels before that which let a user namespace mount it at all (a patch of
 * Debian and Ubuntu) keep no attributes of its own there: the mount works, see `promises.py` for what is lost. */
static void mount_step(const struct step *step)
{
	static const char option[] = ",userxattr";
	size_t length = strlen(step->data), cut = sizeof option - 1;
	unsigned long flags = (unsigned long)step->head.flags;
	char shorter[4096];

	if (mount(step->source, step->target, step->text, flags, *step->data ? step->data : NULL) == 0)
		return;
	if (errno == EINVAL && length > cut && length < sizeof shorter && !strcmp(step->data + length - cut, option)) {
		snprintf(shorter, sizeof shorter, "%.*s", (int)(length - cut), step->data);
		if (mount(step->source, step->target, step->text, flags, shorter) == 0)
			return;
	}
	die(errno, strcmp(step->text, "overlay") ? "mount" : "overlay", step->target);
}

/* The root of the box is the upper directory itself, and looks like that of the topmost layer. */
static void upper_step(struct plan *plan, const struct step *step)
{
	struct stat what;

	if ((plan->upper = open(step->target, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
		die(errno, "open", step->target);
	if (!*step->source)
		return;
	int layer = open(step->source, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (layer < 0 || fstat(layer, &what) < 0)
		die(errno, "open", step->source);
	if (what.st_uid == NOBODY) /* Linux before 5.19 shows no owners of a layer */
		what.st_uid = what.st_gid = 0;
	if (look_like(layer, plan->upper, &what) < 0)
		die(errno, "attributes", step->source);
	close(layer);
}

void step_do(struct plan *plan, const struct step *step)
{
	switch (step->head.kind) {
	case STEP_MOUNT: mount_step(step); break;
	case STEP_MKDIR: mkdir_step(step); break;
	case STEP_SYMLINK:
		if (symlink(step->source, step->target) < 0 && errno != EEXIST)
			die(errno, "symlink", step->target);
		break;
	case STEP_WRITE: write_step(step); break;
	case STEP_CLONE: {
		int tree = clone_tree(step->source);
		if (tree < 0)
			die(errno, "open", step->source);
		if (plan->slot_count == SLOTS_MAX)
			die(EBADMSG, "plan", "has too many trees");
		plan->slots[plan->slot_count++] = tree;
		break;
	}
	case STEP_ATTACH: attach(*slot_of(plan, step), step->target, step->head.flags); break;
	case STEP_BIND: bind_step(step); break;
	case STEP_UPPER: upper_step(plan, step); break;
	case STEP_PIVOT: pivot_step(step); break;
	case STEP_DETACH: detach_step(); break;
	case STEP_LOOPBACK: loopback_step(); break;
	case STEP_HOSTNAME:
		if (sethostname(step->source, strlen(step->source)) < 0)
			die(errno, "hostname", step->source);
		break;
	default: die(EBADMSG, "plan", "has a step that this helper does not know");
	}
}
