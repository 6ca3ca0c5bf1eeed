"""Attack: take all of the host's asynchronous requests (io_setup), of which it has so many for everybody.

Must hold: a box gets none, is told that there are none, as a kernel without them says, and programs that ask fall back;
the host's count stays where it was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.drivers.native import seccomp
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, no_filter

PROMISE = "system call filter"

# So many of those that are left, so that a hole does no harm to the databases of this host.
SOME = 1000
TAKE = (
    CALL
    + """
context = ctypes.c_ulong(0)
say("io_setup", call("io_setup", int(sys.argv[1]), ctypes.byref(context)))
hold(*(f"{name}={answer}" for name, answer in [("io_setup", "ok" if context.value else "none")]))
"""
)


def taken() -> int:
    return int(Path("/proc/sys/fs/aio-nr").read_text())


async def test_none_are_had(arena: Arena) -> None:
    program = CALL + 'say("io_setup", call("io_setup", 1000, ctypes.byref(ctypes.c_ulong(0))))'
    for words in ({}, {"profile": "debug"}, {"nested": True}):
        assert answers((await arena.python(program, **words)).stdout) == {"io_setup": "ENOSYS"}, words
    async with arena.holding(TAKE, str(SOME), box=await arena.box()) as said:
        assert said == "io_setup=none"


@pytest.mark.control
@pytest.mark.skipif(not seccomp.program(), reason="there is no filter here")
async def test_control_without_the_filter_they_are_the_hosts(arena: Arena) -> None:
    before = taken()
    async with arena.holding(TAKE, str(SOME), box=await arena.box(without=no_filter)) as said:
        if said == "io_setup=none":
            pytest.skip("this kernel has no io_setup, or none left")
        assert taken() >= before + SOME
