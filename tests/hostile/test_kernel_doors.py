"""Attack: reach the kernel's machinery: mounts, namespaces, devices, bpf, perf, io_uring, keys, tracing, the clock.

Must hold: every door is shut for root inside. Each control opens one lock and shows the same program getting further.
"""

from __future__ import annotations

import pytest

from tests.support.hostile import ROOT, Arena, all_capabilities, nested_namespaces, no_filter, open_proc

CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return f"ok {result}" if result >= 0 else f"error {ctypes.get_errno()}"
"""
X86 = pytest.mark.skipif("x86_64" not in __import__("platform").machine(), reason="call numbers are of x86_64")

MOUNT = CALL + "print(call(165, b'none', b'/mnt', b'tmpfs', 0, None))"
REMOUNT = CALL + "print(call(165, None, b'/usr', None, 32 | 4096, None))"
PIVOT = CALL + "os.makedirs('/tmp/a/b'); print(call(155, b'/tmp/a', b'/tmp/a/b'))"
USERNS = CALL + "print(call(272, 0x10000000))"
NETNS_BY_CLONE = CALL + "print(call(56, 0x40000000 | 17, 0, 0, 0, 0))"
FSOPEN = CALL + "print(call(430, b'overlay', 0))"
HANDLE = (
    CALL
    + """
buffer = ctypes.create_string_buffer(b"\\x80\\0\\0\\0" + b"\\0" * 132)
print(call(303, -100, b"/usr", buffer, ctypes.byref(ctypes.c_int()), 0))"""
)
BPF = CALL + "print(call(321, 0, ctypes.create_string_buffer(128), 128))"
PERF = CALL + "print(call(298, ctypes.create_string_buffer(b'\\0\\0\\0\\0\\x80', 128), 0, -1, -1, 0))"
URING = CALL + "print(call(425, 8, ctypes.create_string_buffer(120)))"
UFFD = CALL + "print(call(323, 1))"
KEYS = CALL + "print(call(248, b'user', b'name', b'payload', 7, -4))"
PTRACE = CALL + "print(call(101, 0, 0, 0, 0))"
KEXEC = CALL + "print(call(246, 0, 0, None, 0))"
CLOCK = CALL + "print(call(227, 0, ctypes.create_string_buffer(16)))"
TIOCSTI = (
    CALL
    + """
import fcntl, pty
master, slave = pty.openpty()
print(call(16, slave, 0x5412, b'x'))"""
)

DOORS = {
    "mount": MOUNT,
    "remount": REMOUNT,
    "pivot_root": PIVOT,
    "user namespace": USERNS,
    "net namespace": NETNS_BY_CLONE,
    "fsopen": FSOPEN,
    "file handles": HANDLE,
    "bpf": BPF,
    "perf": PERF,
    "io_uring": URING,
    "userfaultfd": UFFD,
    "keys": KEYS,
    "ptrace": PTRACE,
    "kexec": KEXEC,
    "clock": CLOCK,
    "TIOCSTI": TIOCSTI,
}


@X86
@pytest.mark.parametrize("door", DOORS)
async def test_the_door_is_shut(arena: Arena, door: str) -> None:
    result = await arena.python(DOORS[door])
    assert result.stdout == "error 1\n", result.stderr


@X86
@pytest.mark.control
@pytest.mark.parametrize("door", ["file handles", "io_uring", "userfaultfd", "keys", "ptrace"])
async def test_control_without_the_filter_it_opens(arena: Arena, door: str) -> None:
    result = await arena.python(DOORS[door], without=no_filter)
    assert result.stdout != "error 1\n", "the host itself denies it: this control proves nothing here"


@X86
@pytest.mark.control
@pytest.mark.parametrize("door", ["mount", "pivot_root", "fsopen", "net namespace"])
async def test_control_with_capabilities_and_no_filter_it_opens(arena: Arena, door: str) -> None:
    result = await arena.python(DOORS[door], without=all_capabilities)
    assert result.stdout != "error 1\n", result.stderr


@X86
@pytest.mark.control
async def test_control_without_limit_and_filter_a_user_namespace_opens(arena: Arena) -> None:
    assert (await arena.python(USERNS, without=nested_namespaces)).stdout == "ok 0\n"
    assert (await arena.python(USERNS, without=no_filter)).stdout == "error 28\n"  # the second lock: none are left


async def test_nested_opens_user_namespaces_when_asked_for(arena: Arena) -> None:
    result = await arena.sh(
        "unshare --user --map-root-user --mount sh -c 'mount -t tmpfs none /mnt && echo in'", nested=True
    )
    assert result.stdout == "in\n", result.stderr


async def test_debug_lets_a_box_trace_its_own_processes(arena: Arena) -> None:
    assert (await arena.python(PTRACE, profile="debug")).stdout == "ok 0\n"


async def test_strict_leaves_no_capability(arena: Arena) -> None:
    result = await arena.sh("grep CapEff /proc/self/status; chown 1 /root", profile="strict")
    assert result.stdout.split()[1].strip("0") == ""
    assert not result.ok


@pytest.mark.parametrize(
    "path",
    ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr"],
)
async def test_the_usual_devices_are_there(arena: Arena, path: str) -> None:
    assert (await arena.sh(f"ls -d /dev/{path}")).ok


async def test_no_other_device_is_there_or_can_be_made(arena: Arena) -> None:
    box = await arena.box()
    listed = (await arena.sh("ls /dev", box=box)).stdout.split()
    assert set(listed) <= {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "ptmx",
        "pts",
        "shm",
        "fd",
        "stdin",
        "stdout",
        "stderr",
    }
    for kind, major, minor in (
        ("c", 1, 1),
        ("c", 1, 11),
        ("c", 10, 232),
        ("c", 10, 229),
        ("b", 8, 0),
    ):  # mem kmsg kvm fuse sda
        assert not (await arena.sh(f"mknod /tmp/d{major}-{minor} {kind} {major} {minor}", box=box)).ok


KNOBS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sysrq-trigger",
    "/sys/kernel/uevent_helper",
    "/sys/power/state",
    "/proc/1/oom_score_adj",
)


async def test_no_knob_of_the_host_can_be_turned(arena: Arena) -> None:
    box = await arena.box()
    for knob in KNOBS:
        result = await arena.sh(f"echo 1 > {knob}", box=box)
        assert not result.ok, knob
    assert (await arena.sh("ls /sys/fs/cgroup", box=box)).stdout == ""


@pytest.mark.control
@pytest.mark.skipif(not ROOT, reason="the id outside is the user's own")
async def test_control_proc_is_shut_twice(arena: Arena) -> None:
    """With everything of /proc writable the ids still hold: the knobs belong to the host's root."""
    result = await arena.sh(
        "grep ' /proc/sys ' /proc/mounts | wc -l; echo x > /proc/sys/kernel/core_pattern", without=open_proc
    )
    assert result.stdout == "0\n"
    assert not result.ok


async def test_what_proc_tells_of_the_host_is_hidden(arena: Arena) -> None:
    result = await arena.sh("cat /proc/keys /proc/kcore /proc/timer_list /proc/kallsyms 2>/dev/null | wc -c")
    assert result.stdout == "0\n"
