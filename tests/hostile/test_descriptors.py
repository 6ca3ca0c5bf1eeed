"""Attack: open files until there are no descriptors left, in the process or in the host; hoard them where they are no
process's own: in flight, in the queues of sockets.

Must hold: both end at the box's own limit; nobody gets more than the node itself may have; a neighbour's files can be
read meanwhile, which takes descriptors in flight too.
"""

from __future__ import annotations

import pytest

from sandlot.api import Limits
from sandlot.errors import Unsupported
from tests.support.hostile import Arena

PROMISE = "open files limit"

OPEN = """
import os
fds = []
try:
    while len(fds) < 20000: fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error.errno, end=" ")
print(len(fds))
"""


async def test_descriptors_end_at_the_limit(arena: Arena) -> None:
    error, count = (await arena.python(OPEN)).stdout.split()
    assert (error, int(count)) == ("24", arena.limits.open_files - 3)


@pytest.mark.control
async def test_control_with_a_higher_limit_descriptors_go_on(arena: Arena) -> None:
    error, count = (await arena.python(OPEN, limits=Limits(open_files=8000))).stdout.split()
    assert (error, int(count)) == ("24", 8000 - 3)


async def test_more_descriptors_than_the_host_gives_are_refused_before_anything_starts(arena: Arena) -> None:
    with pytest.raises(Unsupported, match="open files"):
        await arena.box(limits=Limits(open_files=1 << 30))


async def test_nobody_raises_the_limit(arena: Arena) -> None:
    raised = await arena.python("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9000, 9000))")
    assert "ValueError" in raised.stderr  # python's word for EPERM here


# 200 at a time into the queues of many sockets, of which this process keeps two descriptors each.
HOARD = """
import array, errno, os, socket
null = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200)
kept, count, error = [], 0, None
while error is None and count < 20000:
    kept += socket.socketpair()
    kept[-1].setblocking(False)
    for _ in range(20):
        try:
            kept[-1].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, null)])
            count += 200
        except BlockingIOError: break
        except OSError as failed:
            error = errno.errorcode[failed.errno]
            break
hold(count, error)
"""


@pytest.mark.promise("kernel objects")
async def test_descriptors_in_flight_end_and_a_neighbours_files_still_come_out(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    await neighbour.write_file("/root/file", b"lives")
    async with arena.holding(HOARD, box=box) as said:
        count, error = said.split()
        assert (error, int(count) <= arena.limits.open_files + 200) == ("ETOOMANYREFS", True)
        assert await neighbour.read_file("/root/file") == b"lives"
        async with arena.holding(HOARD, box=neighbour) as same:
            assert same == said
    assert (await box.run("echo lives")).stdout == "lives\n"
    await box.write_file("/root/file", b"lives")
    assert await box.read_file("/root/file") == b"lives"


@pytest.mark.control
@pytest.mark.promise("kernel objects")
async def test_control_with_a_higher_limit_more_are_in_flight(arena: Arena) -> None:
    async with arena.holding(HOARD, box=await arena.box(limits=Limits(open_files=8000))) as said:
        assert int(said.split()[0]) > 7000
