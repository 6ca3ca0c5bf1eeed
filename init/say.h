/* Words for failures: which step, on what, and what the errno means here. */
#ifndef SANDLOT_SAY_H
#define SANDLOT_SAY_H

/* Where failures before "ready" are reported: the control socket. */
extern int say_socket;

/* Before "ready" any failure ends the box: send FRAME_FAILED with "step path: meaning" and exit. `error` is an errno. */
_Noreturn void die(int error, const char *step, const char *path);

/* What this errno means when this step failed; falls back to strerror. */
const char *meaning(int error, const char *step);

#endif
