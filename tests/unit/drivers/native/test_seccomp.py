"""Promises of the filter (pure: its bytes are run here, by the rules of the kernel's classic BPF):
1. Each call of the deny list answers EPERM, on both architectures, whatever its arguments.
2. Another architecture's calls kill the process; the x32 numbers of any call do not exist.
3. Of an argument only the half that the kernel reads counts: a set high bit opens nothing.
4. A profile changes what it says it does, and no more.
"""

from __future__ import annotations

import errno
import struct

import pytest

from sandlot.api import Profile
from sandlot.drivers.native import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
I386, ARM = 0x40000003, 0x40000028
MACHINES = pytest.mark.parametrize("machine", ARCH)


def answer(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the filter answers to one call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    at = register = 0
    while True:
        kind, yes, no, value = code[at]
        at += 1
        if kind == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif kind == 0x54:
            register &= value
        elif kind == 0x06:
            return int(value)
        else:
            found = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[kind]
            at += yes if found else no


def error(number: int) -> int:
    return 0x00050000 | number


@MACHINES
@pytest.mark.parametrize("profile", [Profile.DEFAULT, Profile.STRICT])
def test_each_denied_call_answers_eperm_and_others_pass(machine: str, profile: Profile) -> None:
    program = seccomp.program(machine, profile=profile)
    calls = seccomp._CALLS | (seccomp._STRICT if profile is Profile.STRICT else {})
    denied = {numbers[COLUMN[machine]] for numbers in calls.values()} - {None}
    looked_at = {numbers[COLUMN[machine]] for numbers, _ in seccomp._LOOKED_AT.values()}
    for number in range(512):
        if number in denied:
            assert answer(program, ARCH[machine], number, *[(1 << 64) - 1] * 6) == error(errno.EPERM), number
            assert answer(program, ARCH[machine], number) == error(errno.EPERM), number
        elif number not in looked_at:
            assert answer(program, ARCH[machine], number, *[(1 << 64) - 1] * 6) == ALLOW, number


@MACHINES
def test_numbers_of_another_kind_are_not_let_in(machine: str) -> None:
    program = seccomp.program(machine)
    for number in range(512):
        for arch in {I386, ARM, *ARCH.values()} - {ARCH[machine]}:
            assert answer(program, arch, number) == KILL
        if machine == "x86_64":
            assert answer(program, ARCH[machine], number | 0x40000000) == error(errno.ENOSYS)
    if machine == "x86_64":
        assert answer(program, ARCH[machine], -1) == error(errno.ENOSYS)


HIGH = 1 << 32
REFUSED: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "clone": [(errno.EPERM, (flag | 17,)) for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000, 0x2000000)],
    "clone3": [(errno.ENOSYS, ())],
    "ioctl": [(errno.EPERM, (0, request)) for request in (0x5412, 0x541C, 0x5423)],
    "socket": [
        *((errno.EAFNOSUPPORT, (family, 1)) for family in (0, 3, 15, 17, 29, 30, 31, 38, 40, 44, 45)),
        *((errno.EPROTONOSUPPORT, (16, 3, protocol)) for protocol in (6, 9, 12, 16)),
        *((errno.ESOCKTNOSUPPORT, (family, kind | 0o2004000)) for family in (2, 10) for kind in (4, 5, 6, 10)),
        *((errno.EPROTONOSUPPORT, (2, 1, protocol)) for protocol in (33, 115, 132, 256, 262, 255)),
        *((errno.EPROTONOSUPPORT, (family, 2, protocol)) for family in (2, 10) for protocol in (136, 256)),
    ],
    "socketpair": [(errno.EAFNOSUPPORT, (family, 1)) for family in (2, 30, 40)],
    "setsockopt": [(errno.EPERM, (0, level, option)) for level in (0, 41) for option in (64, 96, 128)],
    "mmap": [(errno.EPERM, (0, 4096, 3, 0x40022))],
    "memfd_create": [(errno.EPERM, (0, 4))],
    "prlimit64": [(errno.EPERM, (1,))],
    "fcntl": [(errno.EPERM, (0, 1024, kind)) for kind in (0, 1, 2)] + [(errno.EPERM, (0, 1040))],
    "io_setup": [(errno.ENOSYS, (128,))],
}
ALLOWED: dict[str, list[tuple[int, ...]]] = {
    "clone": [(17,), (0x3D0F00,)],
    "ioctl": [(0, 0x5401), (0, 0x5413)],
    "socket": [
        *((family, kind | 0o2004000, 0) for family in (1, 2, 10) for kind in (1, 2)),
        (1, 5),
        (2, 3, 1),
        (2, 1, 6),
        (2, 2, 17),
        (2, 2, 1),
        (10, 2, 58),
        (10, 1, 6),
        (16, 3, 0),
        (16, 2, 4),
        (16, 3, 15),
    ],
    "socketpair": [(1, 1), (1, 5)],
    "setsockopt": [(0, 1, 64), (0, 6, 1), (0, 0, 1), (0, 41, 26)],
    "mmap": [(0, 4096, 3, 0x22)],
    "memfd_create": [(0, 3)],
    "prlimit64": [(0,), (7,)],
    "fcntl": [(0, request) for request in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1025, 1030, 1031, 1032, 1033)],
}


@MACHINES
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_by_its_arguments(machine: str, name: str) -> None:
    program = seccomp.program(machine)
    number = seccomp._LOOKED_AT[name][0][COLUMN[machine]]
    for reason, arguments in REFUSED[name]:
        assert answer(program, ARCH[machine], number, *arguments) == error(reason), arguments
        high = [argument | HIGH for argument in arguments]
        assert answer(program, ARCH[machine], number, *high) == error(reason), arguments
    for arguments in ALLOWED.get(name, []):
        assert answer(program, ARCH[machine], number, *arguments) == ALLOW, arguments


def test_what_is_looked_at_is_tried_here() -> None:
    assert REFUSED.keys() == seccomp._LOOKED_AT.keys()


@MACHINES
def test_profiles_open_what_they_say(machine: str) -> None:
    def opened(profile: Profile, nested: bool) -> set[str]:
        program = seccomp.program(machine, profile=profile, nested=nested)
        numbers = {name: each[COLUMN[machine]] for name, each in seccomp._CALLS.items()}
        return {
            name
            for name, number in numbers.items()
            if number is not None and answer(program, ARCH[machine], number) == ALLOW
        }

    assert opened(Profile.DEFAULT, False) == set()
    assert opened(Profile.DEBUG, False) == {
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "kcmp",
        "pidfd_getfd",
    }
    assert opened(Profile.DEFAULT, True) == {
        "mount",
        "umount2",
        "pivot_root",
        "open_tree",
        "move_mount",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
        "setns",
        "unshare",
    }


def test_a_machine_whose_calls_are_not_known_has_no_filter() -> None:
    assert seccomp.program("riscv64") == b""
