"""Attack: stop, read, write and copy from other processes: the box's first one, one of the same box, one of the host.

Must hold: by default no process is traced and no memory or descriptor of another is taken. The first process is never
reached, whatever the profile: it is not dumpable, which belongs to the host's user namespace and which no plan can
take away; the controls open everything around it, and it stays closed. Processes of the host and of other boxes have no
number inside.
"""

from __future__ import annotations

import os

import pytest

from sandlot.drivers.native import seccomp
from sandlot.errors import SandboxEnded
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, no_filter

PROMISE = "processes"

# Tries each way on the first process and on a child of its own.
REACH = (
    CALL
    + """
import signal
child = os.fork()
if child == 0:
    while True: signal.pause()
class Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
here = ctypes.create_string_buffer(8)
local = Span(ctypes.addressof(here), 8)
for name, pid in (("first", 1), ("child", child)):
    # The child has our addresses; the first process has none of them, and would answer EFAULT if it were reached.
    remote = Span(ctypes.addressof(here), 8)
    say(f"{name}_readv", call("process_vm_readv", pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
    say(f"{name}_writev", call("process_vm_writev", pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
    say(f"{name}_kcmp", call("kcmp", pid, os.getpid(), 1, 0, 0))
    say(f"{name}_getfd", call("pidfd_getfd", os.pidfd_open(pid), 0, 0))
    say(f"{name}_mem", attempt(os.open, f"/proc/{pid}/mem", os.O_RDWR))
    say(f"{name}_seize", call("ptrace", 0x4206, pid, 0, 0))
    say(f"{name}_attach", call("ptrace", 16, pid, 0, 0) if name == "first" else "ok")
os.kill(child, signal.SIGKILL)
"""
)
WAYS = ("readv", "writev", "kcmp", "getfd", "seize")


async def test_no_process_is_traced(arena: Arena) -> None:
    said = answers((await arena.python(REACH)).stdout)
    for way in (*WAYS, "attach"):
        assert said[f"first_{way}"] == "EPERM", way
    for way in WAYS:
        assert said[f"child_{way}"] == "EPERM", way
    assert said["first_mem"] == "EACCES"


@pytest.mark.control
async def test_control_with_it_open_a_box_traces_its_own_but_not_the_first(arena: Arena) -> None:
    for words in ({"profile": "debug"}, {"without": no_filter}, {"without": all_capabilities}):
        said = answers((await arena.python(REACH, **words)).stdout)
        for way in WAYS:
            assert said[f"child_{way}"] in ("ok", "ENOSYS"), way
            assert said[f"first_{way}"] in ("EPERM", "EACCES", "ENOSYS"), way
        assert (said["first_mem"], said["first_attach"]) == ("EACCES", "EPERM")


async def test_processes_of_the_host_and_of_others_have_no_number_inside(arena: Arena) -> None:
    neighbour = await arena.box()
    box = await arena.box()
    program = CALL + (
        "seen = {int(name) for name in os.listdir('/proc') if name.isdigit()} - {1, os.getpid()}\n"
        "say('host', attempt(os.kill, int(sys.argv[1]), 0))\n"
        "print('seen', *seen)"
    )
    # The number of a process that lives outside and is larger than any inside.
    result = await arena.python(program, str(max(int(n) for n in os.listdir("/proc") if n.isdigit())), box=box)
    assert result.stdout.splitlines() == ["host ESRCH", "seen"]
    assert (await neighbour.run("echo lives")).stdout == "lives\n"


# The limits of the first process, through which it could be left without descriptors and so without commands.
STARVE = CALL + (
    "limit = (ctypes.c_uint64 * 2)(0, 0)\n"
    "for kind in range(16): say(f'limit{kind}', call('prlimit64', 1, kind, ctypes.byref(limit), 0))"
)


async def test_the_first_process_keeps_its_limits(arena: Arena) -> None:
    box = await arena.box()
    said = answers((await arena.python(STARVE, box=box)).stdout)
    assert set(said.values()) == {"EPERM"}
    assert (await box.run("echo lives")).stdout == "lives\n"


@pytest.mark.control
@pytest.mark.skipif(not seccomp.program(), reason="there is no filter here")
async def test_control_without_the_filter_its_limits_are_lowered(arena: Arena) -> None:
    try:
        said = answers((await arena.python(STARVE, without=no_filter)).stdout)
    except SandboxEnded:
        return  # by this: its first process had no processor time left to answer
    assert set(said.values()) == {"ok"}
