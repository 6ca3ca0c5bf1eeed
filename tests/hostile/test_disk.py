"""Attack: write more than the box may: one big file, a file with holes that are filled later, files that are deleted
but open, many directories, extended attributes, mapped pages; spread over every place that can be written.

Must hold: all of it together ends at the box's disk limit, with "no space left" (SIGBUS for mapped pages); it comes
back when it is deleted, and the box goes on.
"""

from __future__ import annotations

import signal

import pytest
from pydantic import ValidationError

from sandlot.api import Limits
from sandlot.errors import Unsupported
from tests.support.hostile import Arena, no_disk_limit

PROMISE = "disk limit"

_ROUND = "block = b'x' * (1 << 20)\ntaken = 0\nimport errno, mmap, os\n"
# Each tries to write 100 MB where 64 are allowed, and says how many it wrote.
WRITES = {
    "one file": """
file = os.open("/root/big", os.O_CREAT | os.O_WRONLY)
while taken < 100 << 20: taken += os.write(file, block)
""",
    "allocated": """
file = os.open("/root/big", os.O_CREAT | os.O_WRONLY)
while taken < 100 << 20:
    os.posix_fallocate(file, taken, 10 << 20)
    taken += 10 << 20
""",
    "holes": """
file = os.open("/root/big", os.O_CREAT | os.O_WRONLY)
os.truncate(file, 8 << 30)
while taken < 100 << 20: taken += os.pwrite(file, block, taken * 10)
""",
    "deleted but open": """
while taken < 100 << 20:
    file = os.open("/root/big", os.O_CREAT | os.O_WRONLY)
    os.unlink("/root/big")
    for _ in range(10): taken += os.write(file, block)
""",
    "without a name": """
while taken < 100 << 20:
    file = os.open("/root", os.O_TMPFILE | os.O_WRONLY)
    for _ in range(10): taken += os.write(file, block)
""",
    "many places": """
while taken < 100 << 20:
    for place in ("/root", "/tmp", "/var", "/dev/shm", "/home", "/etc", "/dev"):
        file = os.open(f"{place}/big", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        taken += os.write(file, block)
        os.close(file)
""",
}
_END = """
except OSError as error:
    print(errno.errorcode[error.errno], end=" ")
print(taken)
"""


def program(way: str) -> str:
    return _ROUND + "try:" + WRITES[way].replace("\n", "\n    ") + _END


async def fill(arena: Arena, limits: Limits, most: int) -> None:
    for way in WRITES:
        box = await arena.box(limits=limits)
        error, taken = (await arena.python(program(way), box=box)).stdout.split()
        # A file without a name cannot be had at all: overlayfs before Linux 6.3.
        assert error == "ENOSPC" or (way, error) == ("without a name", "ENOTSUP"), way
        assert int(taken) <= most, way
        assert (await box.stats()).disk <= limits.disk, way
        clean = "rm -f /root/big /tmp/big /var/big /dev/shm/big /home/big /etc/big /dev/big"
        again = f"{clean}; head -c 40M /dev/zero > again && echo lives"
        assert (await box.run(again)).stdout == "lives\n", way
        await box.close()


async def test_it_ends_at_the_limit(arena: Arena) -> None:
    await fill(arena, arena.limits, arena.limits.disk)


async def test_on_the_hosts_disk_it_ends_at_the_limit_too(arena: Arena) -> None:
    """A disk larger than the memory is another kind of disk, which not every host can give: then it is refused."""
    larger = Limits(memory="48M", disk="64M", inodes=5000)
    if arena.keeps("disk beyond memory") and arena.keeps("memory limit"):
        await fill(arena, larger, (64 + 24) << 20)  # beside it half the memory is for /dev/shm, as on any Linux
    else:
        with pytest.raises(Unsupported):
            await arena.box(limits=larger)


async def test_the_least_limit_is_one_and_none_can_be_asked_for(arena: Arena) -> None:
    for words in ({"disk": 0}, {"inodes": 0}, {"disk": 1 << 64}, {"inodes": 1 << 64}, {"inodes": 1 << 70}):
        with pytest.raises(ValidationError):
            Limits.model_validate(words)
    box = await arena.box(limits=Limits(disk="4K"))
    for way in WRITES:
        *_, taken = (await arena.python(program(way), box=box)).stdout.split()
        assert int(taken) <= 4096, way


@pytest.mark.control
async def test_control_zero_would_be_none(arena: Arena) -> None:
    box = await arena.box(limits=Limits(disk="4K"), without=no_disk_limit)
    *_, taken = (await arena.python(program("one file"), box=box)).stdout.split()
    assert int(taken) >= 100 << 20


@pytest.mark.control
async def test_control_a_larger_disk_takes_it(arena: Arena) -> None:
    for way in WRITES:
        box = await arena.box(limits=Limits(disk="200M"))
        *error, taken = (await arena.python(program(way), box=box)).stdout.split()
        assert int(taken) >= 100 << 20 or (way, error) == ("without a name", ["ENOTSUP"]), way
        await box.close()


MAPPED = """
import mmap, os
file = os.open("/root/big", os.O_CREAT | os.O_RDWR)
os.truncate(file, 100 << 20)
pages = mmap.mmap(file, 100 << 20)
for at in range(0, 100 << 20, 4096): pages[at] = 1
print("all")
"""


async def test_mapped_pages_end_at_the_limit(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.python(MAPPED, box=box)).signal == signal.SIGBUS
    assert (await box.stats()).disk <= arena.limits.disk


@pytest.mark.control
async def test_control_a_larger_disk_takes_mapped_pages(arena: Arena) -> None:
    assert (await arena.python(MAPPED, limits=Limits(disk="200M"))).stdout == "all\n"


# A kernel that keeps no attributes of users on such a file system (before Linux 6.6) gives none: 0.
ATTRIBUTES = """
import os
taken = 0
for number in range(int(__import__("sys").argv[1])):
    try:
        open(f"/root/{number}", "w").close()
        for name in range(4):
            os.setxattr(f"/root/{number}", f"user.{name}", b"x" * 60000)
            taken += 60000
    except OSError: pass
print(taken)
"""


async def test_attributes_have_a_limit_too(arena: Arena) -> None:
    box = await arena.box()
    taken = int((await arena.python(ATTRIBUTES, "800", box=box)).stdout)
    assert taken <= arena.limits.inodes * 1024  # a kilobyte for each file that may be made, says the kernel
    assert (await box.run("rm -f ./*; echo lives > small; cat small")).stdout == "lives\n"


@pytest.mark.control
async def test_control_with_more_inodes_attributes_take_more(arena: Arena) -> None:
    few = int((await arena.python(ATTRIBUTES, "800")).stdout)
    more = int((await arena.python(ATTRIBUTES, "800", limits=Limits(inodes=20_000))).stdout)
    if not few == more == 0:
        assert few < more
