/* Frames on the control socket, and the descriptors that ride on them. PROTOCOL.md is the specification. */
#ifndef SANDLOT_WIRE_H
#define SANDLOT_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum frame {
	/* node to box */
	FRAME_PLAN = 1,
	FRAME_MAPPED = 2,
	FRAME_SPAWN = 3,
	FRAME_KILL = 4,
	FRAME_LISTEN = 5,
	FRAME_CONNECT = 6,
	FRAME_OPEN = 7,
	FRAME_RELEASE = 8, /* let go of what is held for a run or a listener; no answer */
	FRAME_SIGNAL = 9,  /* send a signal to everything in the box but PID 1 */
	FRAME_COPY = 10,   /* copy the upper directory */
	FRAME_LIST = 11,   /* list it */
	FRAME_CLAIM = 12,  /* a parked box gets its lifetime and grace */
	FRAME_DISK = 13,   /* how much the file system of the upper directory holds */
	FRAME_UNPACK = 14, /* unpack a tar that comes through a passed pipe */
	FRAME_FILES = 15,  /* one of FILES_*, by a child that is root in the box */
	FRAME_HOLD = 16,   /* hold more for a run of which something is held */
	/* box to node */
	FRAME_PID = 100,
	FRAME_READY = 101,
	FRAME_DONE = 102,
	FRAME_EXITED = 103,
	FRAME_FAILED = 104,
	FRAME_HELD = 105, /* to a node that adopts the box: a run or a listener, with its descriptors */
};

enum field {
	FIELD_HOST_ID = 1, /* u32: become this uid and gid before the user namespace is made */
	FIELD_JOIN = 2,    /* u32: write "0" to this passed descriptor (a cgroup.procs) first of all */
	FIELD_STEP = 3,    /* one step of making the root: struct step_head, then its strings */
	FIELD_RLIMIT = 4,  /* u32 resource, u32 unused, u64 soft, u64 hard */
	FIELD_CAPS = 5,    /* u64: the bounding set that stays */
	FIELD_SETUID = 6,  /* u32: 1 leaves no_new_privs off */
	FIELD_SECCOMP = 7, /* struct sock_filter[] */
	FIELD_LIFETIME = 8, /* u64 milliseconds after which the box ends itself */
	FIELD_KEEP = 9,    /* u32: index of a passed descriptor that PID 1 shall hold for life, a lock */
	FIELD_ARG = 10,    /* string: argv */
	FIELD_ENV = 11,    /* string: environment */
	FIELD_CWD = 12,    /* string */
	FIELD_USER = 13,   /* u32: uid and gid inside */
	FIELD_RUN = 14,    /* u32: id of the spawn request that is meant */
	FIELD_PORT = 15,   /* u32 */
	FIELD_PATH = 16,   /* string */
	FIELD_FLAGS = 17,  /* u32: open(2) flags; of KILL: KILL_ONLY_ITSELF */
	FIELD_MODE = 18,   /* u32 */
	FIELD_PARENTS = 19, /* u32: 1 makes missing directories */
	FIELD_LISTENER = 20, /* u32: index of a passed listening socket, on which a new node may come */
	FIELD_RECORD = 21, /* u32: index of a passed file whose end gets PID 1's last word */
	FIELD_GRACE = 22,  /* u64 milliseconds that the box outlives its node */
	FIELD_HOLD = 23,   /* u32: how many of the last descriptors PID 1 keeps until RELEASE; of LISTEN: 1 keeps the listener */
	FIELD_NOTE = 24,   /* string: the node's own, told again with HELD */
	FIELD_NETWORK = 25, /* u32: 1 leaves the box in the node's own network namespace */
	FIELD_TTY = 26,    /* u32: 1 makes standard input, a terminal, the process's controlling one */
	/* answers */
	FIELD_ERRNO = 30,  /* u32 */
	FIELD_WORDS = 31,  /* string: which step failed, on what, and what that means here */
	FIELD_STATUS = 32, /* u32: exit code */
	FIELD_SIGNAL = 33, /* u32: ended by this signal */
	FIELD_CPU_US = 34, /* u64: user and system time, with the children it waited for */
	FIELD_PID = 35,    /* u32 */
	FIELD_BYTES = 36,  /* u64: of files that were copied */
	FIELD_FILES = 37,  /* u32: how many entries were copied */
	/* of FILES */
	FIELD_OPERATION = 38, /* u32: FILES_* */
	FIELD_TO = 39,     /* string: where to move it */
	FIELD_GROUP = 40,  /* u32 */
	FIELD_PATTERN = 41, /* string: which names below PATH */
	FIELD_TEXT = 42,   /* string: what to look for in files */
};

/* Of FILES. Those that say `pipe` write to a passed one, or read it. */
enum operation {
	FILES_LOOK = 1,	  /* tell what is at PATH, or of what is below it what PATTERN names; with TEXT: its lines; pipe */
	FILES_STORE = 2,  /* the file at PATH becomes what comes; pipe */
	FILES_MAKE = 3,	  /* a directory */
	FILES_MOVE = 4,
	FILES_REMOVE = 5,
	FILES_CHANGE = 6, /* MODE, USER, GROUP, those of them that are given */
	FILES_WATCH = 7,  /* tell what happens at or in PATH, until somebody ends the child; pipe */
};
#define FILES_FOLLOW 1u	    /* LOOK: a link at the end of PATH */
#define FILES_CONTENTS 2u   /* LOOK: what is in files, too */
#define FILES_REGEX 4u	    /* LOOK: TEXT is an extended regular expression */
#define FILES_ANY_CASE 8u   /* LOOK: in TEXT, capitals and small letters are the same */
#define FILES_APPEND 16u    /* STORE: at the end of what is there */
#define FILES_REPLACE 32u   /* MOVE: what is there */
#define FILES_DEEP 64u	    /* MAKE: missing parents, and one that is there is fine; REMOVE: what is in it; WATCH: below it */

struct header {
	uint32_t type;
	uint32_t id; /* chosen by the asker; the answer carries it back */
	uint32_t length; /* of the fields that follow */
};

struct field_head {
	uint16_t key;
	uint16_t unused;
	uint32_t length; /* of the payload; a string includes its closing NUL */
};

/* Of KILL: leave the descendants to the node, which has a cgroup that holds them. */
#define KILL_ONLY_ITSELF 1u

/* Longest body that is accepted: 10 MB of environment and some room. */
#define FRAME_MAX (16u << 20)
/* Descriptors on one frame. */
#define FDS_MAX 64
/* Of them, those that PID 1 keeps for a run: what its output comes from and goes to. */
#define HOLDS_MAX 8
/* Longest note that is kept. */
#define NOTE_MAX 1024

struct message {
	struct header head;
	char *body; /* malloc'ed; message_free */
	int fds[FDS_MAX];
	int fd_count;
};

struct view { /* one field of a message; payload points into its body */
	uint16_t key;
	uint32_t length;
	const char *payload;
};

/* Milliseconds of a clock that counts a suspended host's sleep too. */
uint64_t now_ms(void);
/* The moment so many milliseconds from now; the last one there is, if that is past it. */
uint64_t moment_after(uint64_t ms);
/* How long to wait, at most a minute: until the sooner of two moments, of which 0 is none; -1 without any. */
int wait_ms(uint64_t first, uint64_t second);
/* Past this moment nothing here waits for the other side any more (ETIMEDOUT), which may have stopped in the middle of
 * a frame, or read none. 0: never. */
extern uint64_t wire_until;

/* Read one whole frame, blocking. 1: got it; 0: the peer closed; -1: errno (EMSGSIZE, ENOMEM: it is too large, or there
 * is no room for it; it has been passed over, and its header is there). */
int wire_receive(int sock, struct message *out);
void message_free(struct message *message);

/* Iterate over the fields: `*offset` starts at 0. 1: a field; 0: the end; -1: malformed. */
int field_next(const struct message *message, uint32_t *offset, struct view *out);
/* Payload readers: 0 on success, -1 when the length does not fit the kind. */
int field_u32(const struct view *field, uint32_t *out);
int field_u64(const struct view *field, uint64_t *out);
int field_string(const struct view *field, const char **out);

/* An answer under construction: always small, so it goes out in one piece even when several processes answer. */
struct reply {
	struct header head;
	char body[2048];
};
void reply_start(struct reply *reply, uint32_t type, uint32_t id);
void reply_u32(struct reply *reply, uint16_t key, uint32_t value);
void reply_u64(struct reply *reply, uint16_t key, uint64_t value);
void reply_string(struct reply *reply, uint16_t key, const char *value);
/* fd < 0: none. 0 on success, -1 with errno. */
int reply_send(int sock, const struct reply *reply, int fd);
/* The same with several, at most HOLDS_MAX. */
int reply_send_all(int sock, const struct reply *reply, const int *fds, int count);

#endif
