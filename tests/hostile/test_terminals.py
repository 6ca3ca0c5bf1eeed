"""Attack: open every pseudo terminal of the host, of which there are 4,096; by one process, by many, through either
name.

Must hold: it ends far below that, with an error, and a neighbour opens one meanwhile.
"""

from __future__ import annotations

import pytest

from sandlot.drivers.base import PTYS
from tests.support.hostile import Arena, many_terminals

PROMISE = "open files limit"

OPEN = """
import errno, os
names = ("/dev/ptmx", "/dev/pts/ptmx")
def take(most):
    count = 0
    try:
        while count < most:
            os.open(names[count % 2], os.O_RDWR | os.O_NOCTTY)
            count += 1
    except OSError as error:
        return count, errno.errorcode[error.errno]
    return count, None
count, error = take(400)
if os.fork() == 0:  # another process, with descriptors of its own
    hold(count + take(400)[0], error)
os.wait()
"""


async def test_terminals_end_far_below_the_hosts(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    async with arena.holding(OPEN, box=box) as said:
        count, error = said.split()
        assert PTYS <= 4096 // 10
        assert (error, int(count) <= PTYS) == ("ENOSPC", True)
        opened = await arena.python("import os; print(os.open('/dev/ptmx', os.O_RDWR) > 0)", box=neighbour)
        assert opened.stdout == "True\n"
    assert (await arena.python("import os; print(os.open('/dev/ptmx', os.O_RDWR) > 0)", box=box)).stdout == "True\n"


@pytest.mark.control
async def test_control_without_the_limit_there_are_more(arena: Arena) -> None:
    async with arena.holding(OPEN, box=await arena.box(without=many_terminals)) as said:
        assert said == "800 None"
