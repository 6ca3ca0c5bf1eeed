"""Attack: ask the kernel for its machinery: bpf, perf, io_uring, userfaultfd, keys, modules, kexec, quotas, swap,
accounting, reboot, the log, ports, another's terminal, the host's pool of huge pages; by their own numbers, by those of
a 32-bit program (int 0x80) and by x32 numbers.

Must hold: each answers EPERM, a 32-bit call kills its process, an x32 call does not exist; and harmless calls stay
allowed. Without the filter the calls that need no right reach the kernel: that is the control. Those that need a right
of the host are then refused by the kernel itself, the second lock.
"""

from __future__ import annotations

import platform
import signal

import pytest

from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, no_filter

PROMISE = "system call filter"

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 has these ways into the kernel")

# Each with arguments that would do something, were it allowed; none of them harms a host that answers.
FREE = (
    CALL
    + """
import struct
word = ctypes.create_string_buffer(256)
span = struct.pack("QQ", ctypes.addressof(word), 8)
say("io_uring_setup", call("io_uring_setup", 8, ctypes.create_string_buffer(120)))
say("userfaultfd", call("userfaultfd", 1))
say("add_key", call("add_key", b"user", b"name", b"payload", 7, -2))
say("request_key", call("request_key", b"user", b"other", None, -2))
say("keyctl", call("keyctl", 0, -2, 1))
say("ptrace", call("ptrace", 0, 0, 0, 0))
say("process_vm_readv", call("process_vm_readv", os.getpid(), span, 1, span, 1, 0))
say("process_vm_writev", call("process_vm_writev", os.getpid(), span, 1, span, 1, 0))
say("kcmp", call("kcmp", os.getpid(), os.getpid(), 1, 0, 0))
say("vmsplice", call("vmsplice", os.pipe()[1], span, 1, 0))
say("pidfd_getfd", call("pidfd_getfd", os.pidfd_open(os.getpid()), 0, 0))
say("adjtimex", call("adjtimex", ctypes.create_string_buffer(208)))
say("name_to_handle_at", call("name_to_handle_at", -100, b"/usr", word, ctypes.byref(ctypes.c_int()), 0))
say("set_mempolicy", call("set_mempolicy", 0, None, 0))
say("move_pages", call("move_pages", 0, 0, None, None, None, 0))
say("quotactl_fd", call("quotactl_fd", -1, 0, 0, None))
say("huge_pages", call("mmap", 0, 1 << 21, 3, 0x22 | 0x40000 | 0x4000, -1, 0))
say("huge_memfd", call("memfd_create", b"huge", 4))
say("bpf", call("bpf", 0, word, 4))
event = ctypes.create_string_buffer(struct.pack("IIQQQQQ", 1, 128, 0, 0, 0, 0, 0b1100001), 128)
say("perf_event_open", call("perf_event_open", event, 0, -1, -1, 0))
say("fanotify_init", call("fanotify_init", 0x200, 0))
"""
)
RIGHTS = (
    CALL
    + """
open("/tmp/swap", "w").write("x" * 8192)
say("kexec_load", call("kexec_load", 0, 0, None, 0))
say("init_module", call("init_module", b"", 0, b""))
say("finit_module", call("finit_module", os.open("/tmp/swap", os.O_RDONLY), b"", 0))
say("delete_module", call("delete_module", b"sandlot_none", 0o4000))
say("swapon", call("swapon", b"/tmp/swap", 0))
say("acct", call("acct", b"/tmp/swap"))
say("reboot", call("reboot", 0xfee1dead, 672274793, 0xcdef0123, None))
say("syslog", call("syslog", 4, ctypes.create_string_buffer(100), 0))
say("settimeofday", call("settimeofday", None, None))
say("open_by_handle_at", call("open_by_handle_at", -100, ctypes.create_string_buffer(b"\\4\\0\\0\\0\\1", 128), 0))
if "iopl" in NUMBERS:
    say("iopl", call("iopl", 3))
    say("ioperm", call("ioperm", 0x80, 1, 1))
"""
)


async def test_calls_that_need_no_right_are_refused(arena: Arena) -> None:
    said = answers((await arena.python(FREE)).stdout)
    assert set(said.values()) == {"EPERM"}, said
    assert len(said) == 21


@pytest.mark.control
async def test_control_without_the_filter_they_reach_the_kernel(arena: Arena) -> None:
    said = answers((await arena.python(FREE, without=no_filter)).stdout)
    # These a host may refuse to all but its root, by a setting of its own or by its age.
    host = {"bpf", "io_uring_setup", "userfaultfd", "fanotify_init"}
    assert {word for word, answer in said.items() if answer == "EPERM"} <= host, said
    for word in ("ptrace", "process_vm_readv", "vmsplice", "adjtimex"):
        assert said[word] == "ok", said


async def test_calls_that_need_a_right_of_the_host_are_refused_twice(arena: Arena) -> None:
    said = answers((await arena.python(RIGHTS)).stdout)
    assert set(said.values()) == {"EPERM"}, said
    said = answers((await arena.python(RIGHTS, without=no_filter)).stdout)
    assert "ok" not in said.values(), said
    assert said["settimeofday"] == "EPERM"


HARMLESS = (
    CALL
    + """
pipe, other = os.pipe(), os.pipe()
os.write(pipe[1], b"x" * 100)
word = ctypes.create_string_buffer(4096)
say("getpid", call("getpid"))
say("memfd_create", call("memfd_create", b"x", 3))
say("eventfd2", call("eventfd2", 0, 0))
say("signalfd4", call("signalfd4", -1, word, 8, 0))
say("epoll_create1", call("epoll_create1", 0))
say("timerfd_create", call("timerfd_create", 1, 0))
say("inotify_init1", call("inotify_init1", 0))
say("tee", call("tee", pipe[0], other[1], 10, 0))
say("splice", call("splice", pipe[0], None, other[1], None, 10, 0))
say("getrandom", call("getrandom", word, 16, 0))
say("pidfd_open", call("pidfd_open", os.getpid(), 0))
say("personality", call("personality", 0xffffffff))
say("seccomp", call("seccomp", 2, 0, ctypes.byref(ctypes.c_uint32(0x7fff0000))))
say("landlock", call("landlock_create_ruleset", None, 0, 1))
say("membarrier", call("membarrier", 0, 0))
say("get_mempolicy", call("get_mempolicy", None, None, 0, None, 0))
say("sched_getaffinity", call("sched_getaffinity", 0, 4096, word))
say("prlimit64", call("prlimit64", 0, 7, None, word))
say("chroot", call("chroot", b"/"))
say("mlock", call("mlock", word, 64))
say("statx", call("statx", -100, b"/usr", 0, 0x7ff, word))
say("mmap", call("mmap", 0, 4096, 7, 0x22, -1, 0))
say("shmget", call("shmget", 0, 4096, 0o1600))
"""
)


async def test_harmless_calls_stay_allowed(arena: Arena) -> None:
    said = answers((await arena.python(HARMLESS)).stdout)
    # A kernel may lack landlock (5.13), membarrier, or NUMA; the filter never says ENOSYS or EOPNOTSUPP to these.
    assert set(said.values()) <= {"ok", "ENOSYS", "EOPNOTSUPP"}, said
    assert {word for word, answer in said.items() if answer != "ok"} <= {"landlock", "membarrier", "get_mempolicy"}
    assert len(said) == 23


# The process is its session's first, so the terminal it opens becomes its own, as it must be for TIOCSTI.
TERMINAL = (
    CALL
    + """
import pty
master, slave = os.openpty()
own = os.open(os.ttyname(slave), os.O_RDWR)
for name, request, argument in (("TIOCSTI", 0x5412, b"x"), ("TIOCSETD", 0x5423, ctypes.byref(ctypes.c_int(0)))):
    say(name, call("ioctl", own, request, argument))
    say(name + "_high", call("ioctl", own, request | 1 << 32, argument))  # the kernel reads the low half only
say("TIOCLINUX", call("ioctl", own, 0x541C, b"\\2"))
say("TIOCGWINSZ", call("ioctl", own, 0x5413, ctypes.create_string_buffer(8)))
"""
)


async def test_nothing_is_typed_into_a_terminal_and_no_line_discipline_is_loaded(arena: Arena) -> None:
    said = answers((await arena.python(TERMINAL)).stdout)
    assert said.pop("TIOCGWINSZ") == "ok"
    assert set(said.values()) == {"EPERM"}


@pytest.mark.control
async def test_control_without_the_filter_it_is(arena: Arena) -> None:
    said = answers((await arena.python(TERMINAL, without=no_filter)).stdout)
    assert said["TIOCSTI"] in ("ok", "EIO")  # EIO: since Linux 6.2 a host can switch it off by itself
    assert (said["TIOCSETD"], said["TIOCSETD_high"]) == ("ok", "ok")


# Machine code, called as function(number, a, b, c): what a 32-bit program does to make a call.
INT80 = (
    CALL
    + """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("53 89f8 89f3 89d7 89ca 89f9 cd80 4863c0 5b c3"))
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
enter = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)(at)
number = {"getpid": 20, "mount": 21, "unshare": 310, "ptrace": 26, "socketcall": 102}[sys.argv[1]]
result = enter(number, 0x10000000 if sys.argv[1] == "unshare" else 0, 0, 0)
print("mine" if result == os.getpid() else result)
"""
)


@X86
async def test_a_32_bit_call_kills_its_process(arena: Arena) -> None:
    box = await arena.box()
    for name in ("getpid", "mount", "unshare", "ptrace", "socketcall"):
        result = await arena.python(INT80, name, box=box)
        assert (result.signal, result.stdout) == (signal.SIGSYS, ""), name


@X86
@pytest.mark.control
async def test_control_without_the_filter_32_bit_calls_work(arena: Arena) -> None:
    result = await arena.python(INT80, "getpid", without=no_filter)
    if result.signal == signal.SIGSEGV:
        pytest.skip("this kernel has no 32-bit calls")
    assert result.stdout == "mine\n"
    assert (await arena.python(INT80, "ptrace", without=no_filter)).stdout == "0\n"  # PTRACE_TRACEME


X32 = CALL + "for name, number in NUMBERS.items(): say(name, call(0x40000000 | number, -1, -1, -1, -1, -1, -1))"


@X86
async def test_an_x32_call_does_not_exist(arena: Arena) -> None:
    said = answers((await arena.python(X32)).stdout)
    assert set(said.values()) == {"ENOSYS"}
    assert len(said) > 80


@X86
@pytest.mark.control
async def test_control_without_the_filter_x32_calls_are_the_kernels_own_business(arena: Arena) -> None:
    program = CALL + "say('x32', call(0x40000000 | NUMBERS['getpid']))"
    result = await arena.python(program, without=no_filter)
    if result.stdout == "x32 ENOSYS\n":
        pytest.skip("this kernel has no x32 calls")
    assert result.stdout == "x32 ok\n"
