"""Attack: use up System V segments, semaphores and queues, POSIX message queues, and signals that wait to be
delivered; look for those of others.

Must hold: each ends with an error; while a box holds all it can get a neighbour gets as much, and sees nothing of it.
"""

from __future__ import annotations

import re

import pytest

from tests.support.hostile import Arena

PROMISE = "kernel objects"

_LIBC = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\ncount = 0\n"
_SAY = "\nhold(count, errno.errorcode.get(ctypes.get_errno(), 0))"
TAKE = {
    "segments": "while count < 5000 and libc.shmget(0, 4096, 0o1600) >= 0: count += 1",
    "semaphores": "while count < 40000 and libc.semget(0, 1, 0o1600) >= 0: count += 1",
    "queues": "while count < 40000 and libc.msgget(0, 0o1600) >= 0: count += 1",
    "POSIX queues": """
queues = libc if hasattr(libc, "mq_open") else ctypes.CDLL("librt.so.1", use_errno=True)
while count < 300 and queues.mq_open(b"/%d" % count, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0: count += 1
""",
    # What is counted is the user's, whatever limit the caller has: a large host would take millions.
    "signals": """
import resource
most = min(100_000, resource.getrlimit(resource.RLIMIT_SIGPENDING)[1])
resource.setrlimit(resource.RLIMIT_SIGPENDING, (most, most))
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
class Value(ctypes.Union): _fields_ = [("number", ctypes.c_int), ("pointer", ctypes.c_void_p)]
libc.sigqueue.argtypes = (ctypes.c_int, ctypes.c_int, Value)
while count < 200_000 and libc.sigqueue(os.getpid(), 40, Value()) == 0: count += 1
""",
}


def few(take: str) -> str:
    """The same program, content with five."""
    less = re.sub("count < [0-9_]+", "count < 5", take).replace('b"/%d"', 'b"/more%d"')
    return "import os, signal\ndef hold(*words): print(*words)\n" + _LIBC + less + _SAY


ENDS = {"segments": "ENOSPC", "semaphores": "ENOSPC", "queues": "ENOSPC", "POSIX queues": "EMFILE", "signals": "EAGAIN"}


async def test_each_ends_and_a_neighbour_gets_some_meanwhile(arena: Arena) -> None:
    neighbour = await arena.box()
    for kind, take in TAKE.items():
        box = await arena.box()
        async with arena.holding(_LIBC + take + _SAY, box=box) as said:
            count, error = said.split()
            assert (error, int(count) > 0) == (ENDS[kind], True), kind
            assert (await arena.python(few(take), box=neighbour)).stdout.split()[0] == "5", kind
        await box.close()


@pytest.mark.control
async def test_control_in_the_same_box_there_is_none_left(arena: Arena) -> None:
    for kind, take in TAKE.items():
        box = await arena.box()
        async with arena.holding(_LIBC + take + _SAY, box=box):
            assert (await arena.python(few(take), box=box)).stdout.split() == ["0", ENDS[kind]], kind
        await box.close()


SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.shmget(7000 + n, 1 << 20, 0o1600) >= 0 for n in range(5)])
"""


@pytest.mark.promise("processes")
async def test_nothing_of_it_is_seen_by_a_neighbour(arena: Arena) -> None:
    first, neighbour = await arena.box(), await arena.box()
    assert (await arena.python(SEGMENTS, box=first)).stdout == f"{[True] * 5}\n"
    assert len((await first.run("tail -n +2 /proc/sysvipc/shm")).stdout.splitlines()) == 5
    assert (await neighbour.run("tail -n +2 /proc/sysvipc/shm | wc -l")).stdout == "0\n"
    find = SEGMENTS.replace("0o1600", "0o600")  # only what exists
    assert (await arena.python(find, box=neighbour)).stdout == f"{[False] * 5}\n"


@pytest.mark.control
@pytest.mark.promise("processes")
async def test_control_in_its_own_box_it_is_seen(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.python(SEGMENTS, box=box)).ok
    assert (await arena.python(SEGMENTS.replace("0o1600", "0o600"), box=box)).stdout == f"{[True] * 5}\n"
