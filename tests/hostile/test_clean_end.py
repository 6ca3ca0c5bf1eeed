"""Attack: end a box while its programs hold on to everything: thousands of open files, stopped, ignoring, orphaned,
vforked and traced processes, openers of pipes that never open, nested namespaces with mounts, files in volumes, sockets
in flight that hold each other, a process of the helper's that was stopped.

Must hold: the box ends at once, in its own named way, and leaves nothing: no process, mount, cgroup, descriptor or
child (conftest.py compares the host before and after each test). The control shows that all of it is held until then.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.errors import SandlotError
from tests.support.calls import CALL
from tests.support.hostile import Arena, Sandbox

PROMISE = "clean end"

SECONDS = 30.0  # of patience, on a slow machine

HOLD = (
    CALL
    + """
import array, fcntl, mmap, resource, signal, socket
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def child(function):
    if os.fork() == 0:
        os.setsid()
        function()
        while True: signal.pause()
def files():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(soft - 100): os.open("/tmp/many", os.O_CREAT | os.O_RDWR)
def in_flight():
    for _ in range(20):  # each pair is in the queue of the other: nobody closes them but the kernel's collector
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for one, other in ((a, b), (b, a)):
            fds = array.array("i", [one.fileno(), other.fileno(), os.open("/", os.O_RDONLY)])
            one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
def stopped(): os.kill(os.getpid(), signal.SIGSTOP)
def fifo():
    os.mkfifo("/tmp/fifo")
    os.open("/tmp/fifo", os.O_RDONLY)
def vforked():  # the parent sleeps in the kernel, not to be interrupted, until its child has gone
    libc.syscall(NUMBERS["clone"], ctypes.c_long(0x4000 | 17), 0, 0, 0, 0) or signal.pause()
def locked():
    file = open("/out/locked", "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    space = mmap.mmap(os.open("/out/mapped", os.O_CREAT | os.O_RDWR), 0) if os.path.getsize("/out/mapped") else None
    os.chdir("/out")
def traced():
    victim = os.fork()
    if victim == 0:
        call("ptrace", 0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: signal.pause()
    os.waitpid(victim, os.WUNTRACED)
    call("ptrace", 0x4200, victim, 0, 0x100000)  # PTRACE_O_EXITKILL, or not: it stays stopped
def nested():
    if call("unshare", 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000) != "ok": return
    os.makedirs("/tmp/mounted", exist_ok=True)
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write("0 0 1")
    for _ in range(20): call("mount", b"none", b"/tmp/mounted", b"tmpfs", 0, None)
    os.chdir("/tmp/mounted")
    if os.fork() == 0:
        while True: signal.pause()
def memory():
    call("memfd_create", b"held", 0)
    os.ftruncate(last, 1 << 20)
    mmap.mmap(last, 1 << 20)
    call("shmget", 7, 1 << 20, 0o1600)
for function in (files, in_flight, stopped, fifo, vforked, locked, traced, nested, memory): child(function)
if os.fork() == 0:
    while True: signal.pause()  # an orphan
for fd in range(3): os.close(fd)
os._exit(0)
"""
)
COUNT = "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1 | sort | uniq -c | tr -s ' \\n' '  '"


async def holding(arena: Arena, tmp_path: Path, **spec: object) -> tuple[Sandbox, set[int]]:
    """A box whose programs hold on to everything, and the numbers outside of all its processes."""
    tmp_path.chmod(0o777)
    (tmp_path / "mapped").write_bytes(b"x" * 4096)
    (tmp_path / "mapped").chmod(0o666)
    box = await arena.box(volumes=(Volume(source=str(tmp_path), target="/out", read_only=False),), **spec)
    assert (await arena.python(HOLD, box=box)).ok
    async with asyncio.timeout(SECONDS):
        # The last that they do: a lock, a pipe that waits, a stopped process.
        while not (await box.run("test -e /tmp/fifo && test -e /out/locked && grep -q '^State:.T' /proc/*/status")).ok:
            pass
    return box, descendants(os.getpid())


def descendants(pid: int) -> set[int]:
    """This node's children are the first processes of its boxes, and what is in a box gets no parent outside."""
    found: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                found |= {child} | descendants(child)
    return found


@pytest.mark.parametrize("words", [{}, {"profile": "debug"}, {"nested": True}], ids=["default", "debug", "nested"])
async def test_a_box_that_holds_on_to_everything_ends_and_leaves_nothing(
    arena: Arena, tmp_path: Path, words: dict[str, object]
) -> None:
    box, outside = await holding(arena, tmp_path, **words)
    assert len(outside) >= 9  # the control: all of them are there, outside too
    async with asyncio.timeout(SECONDS):
        info = await box.close()
    assert info.ending == "exit"
    assert not [pid for pid in outside if os.path.exists(f"/proc/{pid}")]


@pytest.mark.control
async def test_control_without_an_end_all_of_it_stays(arena: Arena, tmp_path: Path) -> None:
    box, outside = await holding(arena, tmp_path, profile="debug")
    states = (await box.run(COUNT)).stdout
    assert "T" in states.upper()
    assert not [pid for pid in outside if not os.path.exists(f"/proc/{pid}")]
    assert (await box.run("echo lives")).stdout == "lives\n"


# Stops each process of the helper's that opens a file for the node, before it does.
STOP_HELPERS = """
import os, signal
print("ready", flush=True)
while not os.path.exists("/tmp/stop"):
    for pid in os.listdir("/proc"):
        try:
            if pid.isdigit() and pid != "1" and open(f"/proc/{pid}/comm").read() == "sandlot-init\\n":
                os.kill(int(pid), signal.SIGSTOP)
        except OSError: pass
"""


async def test_a_helper_that_is_stopped_inside_holds_up_its_own_box_only(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    stopping = asyncio.create_task(arena.python(STOP_HELPERS, box=box))
    await neighbour.write_file("/tmp/file", b"text")
    hung = False
    async with asyncio.timeout(SECONDS):
        while not hung:
            try:
                async with asyncio.timeout(0.5):
                    await box.write_file("/tmp/x", b"x")
            except (TimeoutError, SandlotError):
                hung = True
    assert await neighbour.read_file("/tmp/file") == b"text"
    async with asyncio.timeout(SECONDS):
        await box.close()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_many_boxes_that_hold_on_end_together(arena: Arena) -> None:
    boxes = [await arena.box() for _ in range(20)]
    program = "import os, signal\nfor _ in range(5): os.fork()\nsignal.pause()"
    running = [asyncio.create_task(arena.python(program, box=box)) for box in boxes]
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(box.run("true") for box in boxes))
        await asyncio.gather(*(box.close() for box in boxes))
        await asyncio.gather(*running, return_exceptions=True)
