"""Attack: use up memory, /dev/shm, disk, inodes, descriptors, terminals, inotify instances, IPC objects.

Must hold: each ends at the box's own limit, with an error or an OOM kill that is reported as one; a neighbour goes on.
"""

from __future__ import annotations

import signal

import pytest

from sandlot.api import Limits
from sandlot.errors import Unsupported
from tests.support.hostile import LIMITS, ROOT, Arena

needs_memory_cgroup = pytest.mark.skipif(not ROOT, reason="contained with a named loss: no memory cgroup here")

EAT = "b = []\nwhile True: b.append(bytearray(10 << 20))"


@needs_memory_cgroup
async def test_memory_ends_with_an_oom_kill_that_is_reported(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.python(EAT, box=box)
    assert (result.exit_code, result.oom) == (128 + signal.SIGKILL, True)
    peak = (await box.stats()).memory_peak
    assert peak is not None and peak <= 256 << 20
    assert (await box.run("echo lives")).stdout == "lives\n"


@pytest.mark.control
@needs_memory_cgroup
async def test_control_a_larger_limit_lets_the_same_amount_through(arena: Arena) -> None:
    some = "b = [bytearray(10 << 20) for _ in range(40)]; print(len(b))"
    assert (await arena.python(some)).oom
    assert (await arena.python(some, limits=Limits(memory="1G"))).stdout == "40\n"


async def test_shared_memory_counts_as_disk(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.sh("head -c 200M /dev/zero > /dev/shm/big; wc -c < /dev/shm/big", box=box)
    assert "No space" in result.stderr
    assert int(result.stdout) <= LIMITS.disk
    assert (await box.stats()).disk <= LIMITS.disk


@pytest.mark.control
async def test_control_a_larger_disk_takes_it(arena: Arena) -> None:
    result = await arena.sh("head -c 200M /dev/zero > /dev/shm/big; wc -c < /dev/shm/big", limits=Limits(disk="500M"))
    assert int(result.stdout) == 200 << 20


INODES = "import os\nfor n in range(20000):\n  open(f'/tmp/{n}', 'w').close()"


async def test_inodes_end(arena: Arena) -> None:
    result = await arena.python(INODES)
    assert "No space left" in result.stderr


@pytest.mark.control
async def test_control_with_more_inodes_it_goes_on(arena: Arena) -> None:
    assert (await arena.python(INODES, limits=Limits(inodes=30_000))).ok


DESCRIPTORS = """
import os
fds = []
try:
    while len(fds) < 20000: fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error.errno, end=" ")
print(len(fds))
"""


async def test_descriptors_end(arena: Arena) -> None:
    error, count = (await arena.python(DESCRIPTORS)).stdout.split()
    assert (error, int(count)) == ("24", LIMITS.open_files - 3)


@pytest.mark.control
async def test_control_with_a_higher_limit_descriptors_go_on(arena: Arena) -> None:
    error, count = (await arena.python(DESCRIPTORS, limits=Limits(open_files=8000))).stdout.split()
    assert (error, int(count)) == ("24", 8000 - 3)


async def test_more_descriptors_than_the_host_gives_are_refused_before_anything_starts(arena: Arena) -> None:
    with pytest.raises(Unsupported, match="open files"):
        await arena.box(limits=Limits(open_files=1 << 30))


TERMINALS = """
import os
pairs = []
try:
    while len(pairs) < 500: pairs.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error:
    print(error.errno, end=" ")
print(len(pairs))
"""


async def test_terminals_end_far_below_the_hosts(arena: Arena) -> None:
    error, count = (await arena.python(TERMINALS)).stdout.split()
    assert error == "28"
    assert int(count) <= 64
    neighbour = await arena.python("import os; print(os.open('/dev/ptmx', os.O_RDWR) > 0)")
    assert neighbour.stdout == "True\n"


INOTIFY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
count = 0
while count < 1000 and libc.inotify_init() >= 0: count += 1
print(count, ctypes.get_errno())
import sys; sys.stdout.flush()
import time; time.sleep(float(__import__("sys").argv[1]))
"""


async def test_inotify_instances_end_and_a_neighbour_has_its_own(arena: Arena) -> None:
    first, second = await arena.python(INOTIFY, "0"), await arena.python(INOTIFY, "0")
    assert int(first.stdout.split()[0]) <= 128
    assert first.stdout == second.stdout


IPC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
ids = [libc.shmget(0, 1 << 20, 0o1600) for _ in range(5)]
print(all(i >= 0 for i in ids))
"""


async def test_ipc_objects_are_the_boxes_own(arena: Arena) -> None:
    first = await arena.box()
    assert (await arena.python(IPC, box=first)).stdout == "True\n"
    assert len((await first.run("tail -n +2 /proc/sysvipc/shm")).stdout.splitlines()) == 5
    assert (await arena.sh("tail -n +2 /proc/sysvipc/shm | wc -l")).stdout == "0\n"


async def test_strange_names_are_only_names(arena: Arena) -> None:
    box = await arena.box()
    names = r"(b'a\nb', b'\xff\xfe', b'-rf', b' ', b'$(id)', b'x' * 255)"
    make = f"for n in {names}: open(b'/root/' + n, 'w').write('1')"
    assert (await arena.python(make, box=box)).ok
    assert await box.read_file("/root/a\nb") == b"1"
    assert await box.read_file("/root/$(id)") == b"1"
    assert await box.read_file("/root/" + "x" * 255) == b"1"
