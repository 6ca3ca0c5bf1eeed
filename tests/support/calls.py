"""System calls by name, for programs that attack: what each answers, without the C library between."""

from __future__ import annotations

import platform

from sandlot.drivers.native import seccomp

_MORE = {
    "getpid": (39, 172),
    "signalfd4": (289, 74),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "timerfd_create": (283, 85),
    "splice": (275, 76),
    "tee": (276, 77),
    "getrandom": (318, 278),
    "pidfd_open": (434, 434),
    "landlock_create_ruleset": (444, 444),
    "membarrier": (324, 283),
    "sched_getaffinity": (204, 123),
    "get_mempolicy": (239, 236),
    "statx": (332, 291),
    "copy_file_range": (326, 285),
    "mlock": (149, 228),
}
_LOOKED_AT = {name: numbers for name, (numbers, _) in seccomp._LOOKED_AT.items()}
_ALL = seccomp._CALLS | seccomp._STRICT | _LOOKED_AT | _MORE
_COLUMN = 0 if platform.machine() == "x86_64" else 1
NUMBERS = {name: numbers[_COLUMN] for name, numbers in _ALL.items() if numbers[_COLUMN] is not None}

# `call(name, …)` is "ok" or the name of an errno; `say` prints it as a line "word answer".
CALL = f"""
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = {NUMBERS!r}
last = 0
def call(name, *arguments):
    global last
    ctypes.set_errno(0)
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    last = libc.syscall(ctypes.c_long(NUMBERS.get(name, name)), *words, *[ctypes.c_long(0)] * (6 - len(words)))
    return "ok" if last >= 0 else errno.errorcode[ctypes.get_errno()]
def say(word, answer):
    print(word.replace(" ", "_"), answer, flush=True)
def attempt(function, *arguments, **words):
    try:
        function(*arguments, **words)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
"""


def answers(output: str) -> dict[str, str]:
    """What a program said: word → "ok" or the name of an errno."""
    return {line.split()[0]: line.split()[1] for line in output.splitlines()}
