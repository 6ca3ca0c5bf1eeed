/* What the parts of sandlot-init share: the parsed plan, and one function per part. */
#ifndef SANDLOT_BOX_H
#define SANDLOT_BOX_H

#include <limits.h>
#include <linux/filter.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "wire.h"

/* The control socket, where the node puts it. */
#define CONTROL_FD 3

enum step_kind {
	STEP_MOUNT = 1,  /* mount(source, target, text = fstype, data, flags) */
	STEP_MKDIR = 2,  /* mkdir(target, flags = mode), an existing directory is fine; the mode is set either way */
	STEP_SYMLINK = 3, /* symlink(source, target) */
	STEP_WRITE = 4,  /* write `source` to the file target */
	STEP_CLONE = 5,  /* slot = open_tree(source), with what is mounted below it */
	STEP_ATTACH = 6, /* move the tree in slot to target, made if missing; flags: ATTACH_* */
	STEP_PIVOT = 7,  /* target becomes the root; the old one stays mounted for the mounts that need it */
	STEP_DETACH = 8, /* the old root goes away */
	STEP_LOOPBACK = 9, /* bring 127.0.0.1 up */
	STEP_HOSTNAME = 10, /* sethostname(source) */
	STEP_BIND = 11,  /* clone source and attach it to target, for what is visible on both sides */
	STEP_UPPER = 12, /* target is the upper directory, made like `source`: PID 1 keeps it open for COPY and LIST */
};

#define ATTACH_READ_ONLY 1
#define ATTACH_NODEV 2
#define ATTACH_NOSUID 4
#define ATTACH_NOEXEC 8
#define ATTACH_OPTIONAL 16 /* a source that does not exist is passed over */
#define ATTACH_IF_PRESENT 32 /* so is a target that does not exist, instead of being made */

struct step_head {
	uint32_t kind;
	int32_t slot; /* index among the plan's descriptors, then of trees made by STEP_CLONE; -1: none */
	uint64_t flags;
};

struct step {
	struct step_head head;
	const char *source, *target, *text, *data;
};

struct limit {
	uint32_t resource, unused;
	uint64_t soft, hard;
};

#define STEPS_MAX 256
#define SLOTS_MAX 128
#define LIMITS_MAX 16
#define JOINS_MAX 8
#define KEEPS_MAX 40

struct plan {
	uint32_t host_id; /* UINT32_MAX: stay who you are */
	int joins[JOINS_MAX];
	int join_count;
	int keeps[KEEPS_MAX]; /* locks, held for life */
	int keep_count;
	int listener, record, upper; /* -1: none */
	int score, own_score;	     /* oom_score_adj of PID 1 as a descriptor, -1: none; and what it is */
	uint64_t grace_ms;	     /* after the node has gone away */
	struct step steps[STEPS_MAX];
	int step_count;
	struct limit limits[LIMITS_MAX];
	int limit_count;
	uint64_t caps;
	uint32_t setuid;
	uint32_t host_network; /* 1: no network namespace is made */
	uint64_t lifetime_ms; /* 0: none */
	struct sock_fprog filter;
	int slots[SLOTS_MAX]; /* trees: those passed, then those made by STEP_CLONE */
	int slot_count;
};

/* mounts.c: carry out one step; dies on failure. */
void step_do(struct plan *plan, const struct step *step);

/* confine.c: in PID 1, once, after the mounts. Dies on failure. */
void confine(const struct plan *plan);

/* pid1.c: serve requests until the node has been away for too long or the lifetime ends; never returns. */
_Noreturn void pid1(struct plan *plan);

/* A child of PID 1 that is not reaped yet; then, a run whose exit the node has not taken note of. */
struct child {
	pid_t pid;     /* 0: reaped, `exit` says how it ended */
	uint32_t id;   /* of the request that made it; 0: of a node that is gone, and nobody is told */
	int kind;      /* CHILD_* */
	int error_fd;  /* CHILD_RUN: exec's errno comes here, CHILD_OPEN: the answer; -1 otherwise */
	struct held *held; /* what is kept until RELEASE, the spawn's own first; NULL: nothing */
	struct reply *exit;
	int killed; /* with its tree, by us */
};
enum { CHILD_RUN = 1, CHILD_WORK = 2, CHILD_OPEN = 3 }; /* WORK answers for itself, OPEN through PID 1 */

/* hold.c: what PID 1 keeps so that a node that comes back finds it again. */
struct held {
	struct held *next; /* what HOLD added */
	uint32_t id;	   /* of the request that brought it */
	int fds[HOLDS_MAX];
	int count;
	char note[NOTE_MAX];
};
/* Keep the last `count` descriptors of the message. NULL with errno when there are not as many, or no memory. */
struct held *hold(struct message *message, uint32_t count, const char *note);
/* Keep all descriptors of the message beside what is `held`. 0, or an errno. */
int hold_more(struct message *message, struct held *held, const char *note);
/* With all that was added to it. */
void let_go(struct held *held);
/* Whether one of those that were added to it was brought by `id`: then that is let go. */
int let_go_added(struct held *held, uint32_t id);
/* Listeners that are kept, by the request that made them. */
int hold_listener(uint32_t id, int sock, uint32_t port);
void release_listener(uint32_t id);
void tell_listeners(void);
/* The last word of PID 1 in its record: why it leaves. */
void last_word(const struct plan *plan, const char *word);

/* What a child could not do before exec: sent through error_fd as it stands. */
struct failure {
	int error;
	char step[16];
};

/* spawn.c: fork and exec what the message asks for. 0 and *out, or an errno. Takes the message's descriptors. */
int spawn(struct message *message, const struct plan *plan, struct child *out);
/* open.c: fork a child that opens a path. 0 and *out, or an errno. */
int open_inside(const struct message *message, struct child *out);
/* tree.c: fork a child that copies the upper directory, or lists it, and answers by itself. 0 and *out, or an errno. */
int copy_upper(const struct message *message, int upper, struct child *out);
int list_upper(const struct message *message, int upper, struct child *out);
/* Remove it with whatever is in it, but for what is mounted there (EBUSY). What is gone already is no error. */
int remove_at(int directory, const char *name, int depth);
/* A copy, in the directory `to`, of what has this name in the directory `from`. */
int copy_named(int from, int to, const char *name);
/* files.c: fork a child that does one of FILES_*, and answers by itself. 0 and *out, or an errno. */
int files_inside(const struct message *message, struct child *out);
/* Where the last part of a path is: in which directory (O_PATH), under which name; "." for the root, and where the
 * path ends so. */
struct place {
	int directory;
	char name[NAME_MAX + 1];
};
/* Links on the way, and where `follow` at the end, are followed, but for the kernel's own in /proc: they lead to what
 * this process has open. 0, or -1 with errno. */
int find_place(const char *path, int follow, struct place *out);
/* As openat(2), but for the links of /proc to open files: they lead past every root to what this process holds, which is
 * some of the node's descriptors, and the trees of volumes. */
int open_path(int directory, const char *path, int flags, mode_t mode);
int make_parents(const char *path);
/* Whether its files are not data but the kernel's own words; errors are a yes. */
int is_of_kernel(int fd);
/* How the names of what is not finished begin. */
#define UNFINISHED ".sandlot-"
/* Whether something is mounted there. */
int is_mount(int directory, const char *name);
/* One part of what FILES tells, with two names behind it, through a pipe that is written in large pieces. 0, or -1. */
int tell(int pipe, const void *head, size_t size, const char *first, const char *second);
int tell_bytes(int pipe, const void *bytes, size_t size);
int tell_rest(int pipe);
/* look.c and watch.c: what they say. 0, or -1 with errno, and where it failed in `where`. */
struct look {
	const char *path, *pattern, *text;
	uint32_t flags;
	int pipe;
	char where[PATH_MAX];
};
int look_inside(struct look *look);
int watch_inside(struct look *look);
/* unpack.c: fork a child that unpacks a tar, and answers by itself. 0 and *out, or an errno. */
int unpack_inside(const struct message *message, struct child *out);
/* Owner, mode, extended attributes and times, as `what` and the file `from` have them. 0, or -1 with errno. */
int look_like(int from, int to, const struct stat *what);
/* listen.c: a socket inside the box's network. A descriptor, or -1 with errno. */
int listen_inside(uint32_t port);
int connect_inside(uint32_t port);

#endif
