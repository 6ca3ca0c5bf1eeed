"""Attack: take all memory: by one process, by many that each take little, as files, or in the kernel, through pipes
and sockets; and be the last to be killed for it, by changing OOM scores.

Must hold: it ends at the box's own limit, the kill is reported as one for memory (exit 137, `oom`), no score can be
made better than it was, the box and its neighbour go on.
"""

from __future__ import annotations

import asyncio
import platform
import re
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from sandlot.api import Limits, RunResult
from sandlot.errors import SandboxEnded
from tests.support.hostile import PYTHON, Arena

PROMISE = "memory limit"

EAT = "b = []\nwhile True: b.append(bytearray(10 << 20))"
# Each child takes 5 MB and says so; when the first one is killed the parent gives up, as the kernel would have it.
EAT_BY_MANY = """
import os, signal
def killed(*_):
    os.kill(0, signal.SIGKILL)
signal.signal(signal.SIGCHLD, killed)
taken, say = os.pipe()
for _ in range(90):
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        block = bytearray(5 << 20)
        os.write(say, b"x")
        signal.pause()
for count in range(90): os.read(taken, 1)
os.write(1, b"all")
killed()
"""
PROTECT = """
for who in ("self", "1"):
    for score in ("-1000", "-1", "1000"):
        try:
            with open(f"/proc/{who}/oom_score_adj", "w") as file: file.write(score)
        except OSError: continue
        print(who, score, end="; ", flush=True)
"""


async def test_memory_ends_with_an_oom_kill_that_is_reported(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    eating = asyncio.create_task(arena.python(EAT, box=box))
    assert (await neighbour.run("echo lives")).stdout == "lives\n"
    result = await eating
    assert (result.exit_code, result.oom) == (128 + signal.SIGKILL, True)
    peak = (await box.stats()).memory_peak
    assert peak is None or peak <= 256 << 20  # None: a kernel that does not count it
    assert (await box.run("echo lives")).stdout == "lives\n"
    assert (await neighbour.run("echo lives")).stdout == "lives\n"


@pytest.mark.control
async def test_control_a_larger_limit_lets_the_same_amount_through(arena: Arena) -> None:
    some = "b = [bytearray(10 << 20) for _ in range(40)]; print(len(b))"
    assert (await arena.python(some)).oom
    assert (await arena.python(some, limits=Limits(memory="1G"))).stdout == "40\n"


async def test_many_processes_have_one_limit(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.python(EAT_BY_MANY, box=box)
    assert (result.stdout, result.oom) == ("", True)
    assert (await box.run("echo lives")).stdout == "lives\n"


@pytest.mark.control
async def test_control_with_a_larger_limit_the_many_have_it_all(arena: Arena) -> None:
    result = await arena.python(EAT_BY_MANY, limits=Limits(memory="1G", pids=100))
    assert (result.stdout, result.oom) == ("all", False)


# A program of one page that forks 480 times, and each of them waits: smaller than the first process of the box.
_CODE = bytes.fromhex("bbe0010000 b839000000 0f05 85c0 7406 7804 ffcb 75ef b822000000 0f05 ebf7")
_SIZE, _AT = 120 + len(_CODE), 0x400000
_HEAD = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, _AT + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
SMALL = _HEAD + struct.pack("<IIQQQQQQ", 1, 5, 0, _AT, _AT, _SIZE, _SIZE, 4096) + _CODE


async def many_small(arena: Arena) -> RunResult:
    """What becomes of many processes that need next to nothing, where files have taken what there is."""
    box = await arena.box(limits=Limits(memory="32M", pids=512))
    await box.write_file("/tmp/small", SMALL, mode=0o755)
    await box.run("head -c 100M /dev/zero > /dev/shm/f")
    result = await box.run(["/tmp/small"], timeout=3)
    assert (await box.run("echo lives")).stdout == "lives\n"
    return result


@pytest.mark.promise("processes")
async def test_a_command_has_a_higher_score_than_the_first_process_and_cannot_get_below_its(arena: Arena) -> None:
    assert (await arena.sh("cat /proc/1/oom_score_adj /proc/self/oom_score_adj")).stdout == "0\n100\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is one for x86")
async def test_commands_are_killed_before_the_first_process_however_small_they_are(arena: Arena) -> None:
    assert (await many_small(arena)).oom


@pytest.mark.control
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is one for x86")
async def test_control_with_the_same_score_the_first_process_is(arena: Arena) -> None:
    box = await arena.box(limits=Limits(memory="32M", pids=512))
    await box.write_file("/tmp/small", SMALL, mode=0o755)
    same = "echo 0 > /proc/self/oom_score_adj; head -c 100M /dev/zero > /dev/shm/f; exec /tmp/small"
    with pytest.raises(SandboxEnded, match="ran out of memory"):
        await box.run(same, timeout=9)
        await box.run("true")


# A command whose child is killed, and which goes on for a while.
CHILD = f"{PYTHON} -I -S -c 'b = []\nwhile True: b.append(bytearray(10 << 20))'; touch /tmp/killed; exec sleep 9"


async def test_the_kill_is_charged_to_the_command_that_it_was_in(arena: Arena) -> None:
    """Not to the one that happens to end first."""
    box = await arena.box(limits=Limits(memory="96M"))  # which it has eaten long before its time is over
    eating = asyncio.create_task(box.run(f"{CHILD} & wait", timeout=4))
    async with asyncio.timeout(4):
        while not (await box.glob_files("/tmp/killed")).files:  # noqa: ASYNC110  (which is no command)
            await asyncio.sleep(0.05)
    assert not (await box.run("true")).oom
    guilty = await eating
    assert (guilty.oom, guilty.timed_out) == (True, True)
    assert not (await box.run("true")).oom


async def test_of_two_at_a_time_it_is_charged_to_the_one_that_ends_by_it(arena: Arena) -> None:
    box = await arena.box()
    beside = asyncio.create_task(box.run("until test -e /tmp/stop; do sleep 0.05; done; exit 3", timeout=30))
    assert (await arena.python(EAT, box=box)).oom
    await box.write_file("/tmp/stop", b"")
    innocent = await beside
    assert (innocent.exit_code, innocent.oom) == (3, False)


@pytest.mark.promise("processes")
async def test_nobody_inside_is_harder_to_kill_than_before(arena: Arena) -> None:
    result = await arena.python(PROTECT)
    assert result.stdout == "self 1000; "  # easier is allowed, of one's own; the first process is out of reach


@pytest.mark.control
@pytest.mark.promise("processes")
def test_control_outside_root_protects_itself() -> None:
    capabilities = re.search("CapEff:\\s*(\\w+)", Path("/proc/self/status").read_text())
    if capabilities is None or not int(capabilities[1], 16) >> 24 & 1:
        pytest.skip("needs CAP_SYS_RESOURCE")
    program = PROTECT.replace('("self", "1")', '("self",)')
    outside = subprocess.run([PYTHON, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert outside.stdout == "self -1000; self -1; self 1000; "


async def test_a_protected_eater_is_killed_and_the_box_lives(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.python(PROTECT + EAT, box=box)).oom
    assert (await box.run("echo lives")).stdout == "lives\n"


async def test_files_end_before_the_memory_does(arena: Arena) -> None:
    """Nobody asked for a disk larger than the memory: files are in it, and leave enough for the next command."""
    box = await arena.box(limits=Limits(memory="64M"))
    result = await box.run("exec head -c 200M /dev/zero > big")
    assert "No space" in result.stderr
    assert not result.oom
    used = await box.stats()
    assert 50 << 20 <= used.disk <= 56 << 20
    assert used.memory is not None and used.memory >= used.disk  # and are counted
    for _ in range(20):
        assert (await box.run("cat /etc/passwd | wc -l")).ok


@pytest.mark.control
async def test_control_with_more_memory_the_same_file_is_written(arena: Arena) -> None:
    box = await arena.box(limits=Limits(memory="500M"))
    assert (await box.run("exec head -c 200M /dev/zero > big")).ok


# Each takes what it can, up to 96 MB, of memory that belongs to the kernel, and says how many MB it has.
_TAKE = """
import fcntl, socket
taken, kept = 0, []
def fill(end, write, block):
    global taken
    try:
        while taken < 96 << 20: taken += write(end, block)
    except BlockingIOError: pass
"""
KERNEL = {
    "pipes": """
import os
for _ in range(1024):
    kept += os.pipe()
    os.set_blocking(kept[-1], False)
    fill(kept[-1], os.write, b"x" * 65536)
""",
    "unix sockets": """
while taken < 96 << 20 and len(kept) < 4000:
    kept += socket.socketpair()
    kept[-1].setblocking(False)
    fill(kept[-1], socket.socket.send, b"x" * 65536)
""",
    "tcp sockets": """
listener = socket.create_server(("127.0.0.1", 0))
for _ in range(150):
    if taken >= 96 << 20: break
    kept.append(socket.socket())
    kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    kept[-1].settimeout(5)
    try: kept[-1].connect(listener.getsockname())
    except OSError: break
    kept.append(listener.accept()[0])
    kept[-2].setblocking(False)
    fill(kept[-2], socket.socket.send, b"x" * 65536)
""",
    "udp sockets": """
for _ in range(1000):
    kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    kept[-1].bind(("127.0.0.1", 0))
    kept[-1].setblocking(False)
    kept[-1].connect(kept[-1].getsockname())
    for _ in range(8):  # what finds no room is dropped: ask how much is there
        try: kept[-1].send(b"x" * 60000)
        except OSError: break
for each in kept:
    try:
        while True: taken += len(each.recv(65536, socket.MSG_DONTWAIT))
    except OSError: pass
""",
}
_SAY = "\nprint(taken >> 20)"
# Counted with the rest by cgroup v2 only.
APART = ("tcp sockets", "udp sockets")


async def test_kernel_memory_counts(arena: Arena) -> None:
    await _kernel_memory(arena, [by for by in KERNEL if by not in APART])


@pytest.mark.promise("socket memory")
async def test_memory_of_sockets_counts(arena: Arena) -> None:
    await _kernel_memory(arena, list(APART))


async def test_memory_of_tcp_sockets_ends_even_where_it_is_counted_apart(arena: Arena) -> None:
    await _kernel_memory(arena, ["tcp sockets"], most=2 * 44)


async def _kernel_memory(arena: Arena, ways: list[str], most: int = 44) -> None:
    for by in ways:
        box = await arena.box(limits=Limits(memory="40M", pids=100))
        result = await arena.python(_TAKE + KERNEL[by] + _SAY, box=box)
        assert result.oom or int(result.stdout) <= most, by  # killed, or told that there is no more
        try:
            assert (await box.run("echo lives")).stdout == "lives\n", by
        except SandboxEnded as ended:
            # What a killed process had in datagrams goes a moment later than it does. Until then there may be nobody
            # else to kill than the first process, and the box ends with its reason.
            assert by == "udp sockets" and "ran out of memory" in str(ended)
        await box.close()


@pytest.mark.control
async def test_control_with_more_memory_the_kernel_gives_more(arena: Arena) -> None:
    box = await arena.box(limits=Limits(memory="1G", pids=100))
    for by, program in KERNEL.items():
        assert int((await arena.python(_TAKE + program + _SAY, box=box)).stdout) > 50, by
