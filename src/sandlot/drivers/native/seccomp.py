"""What a program in a box may not ask of the kernel, as bytes for the plan.

A deny list: everything else is allowed, so ordinary software runs. It is the second lock on each door: namespaces,
capabilities and ids are the first. Denied calls answer EPERM, as a kernel without the right would; `clone3` answers
ENOSYS, so that libc falls back to `clone`, whose flags can be read by a filter.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

from sandlot.api import Profile

# Calls by name with their numbers on (x86_64, aarch64); None where the architecture has none.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # mounts and roots
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # namespaces
    "setns": (308, 268),
    "unshare": (272, 97),
    # files by handle: a way around path checks
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # kernel machinery with a long history of holes
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "vmsplice": (278, 75),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "lookup_dcookie": (212, 18),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy": (238, 237),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_SOCKET = (41, 198)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_X32_BIT = 0x40000000

# CLONE_NEW* for time, mount, cgroup, uts, ipc, user, pid, net.
_NAMESPACE_FLAGS = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# Ways to type into somebody else's terminal.
_TERMINAL_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# Socket families that reach kernel code which a box has no use for.
_FAMILIES = (17, 38, 40, 44)  # AF_PACKET, AF_ALG, AF_VSOCK, AF_XDP

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low halves, little-endian


# What gdb and strace need, for processes of the box itself: its pid namespace holds no others.
_TRACING = frozenset({"ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"})
# What a sandbox in the sandbox needs: user namespaces and mounts in them.
_NESTING = frozenset(
    {"mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"}
    | {"mount_setattr", "setns", "unshare", "clone", "clone3"}
)
# What the strict profile denies on top: ways to leave a root, to lock memory, to make executable anonymous files, to
# watch other processes' memory use, and old interfaces.
_STRICT: dict[str, tuple[int | None, int | None]] = {
    "chroot": (161, 51),
    "personality": (135, 92),
    "mlockall": (151, 230),
    "memfd_secret": (447, 447),
    "mincore": (27, 232),
    "seccomp": (317, 277),
    "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "remap_file_pages": (216, 234),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "inotify_init1": (294, 26),
}


@functools.cache
def program(
    machine: str | None = None,
    allow: frozenset[str] = frozenset(),
    profile: Profile = Profile.DEFAULT,
    nested: bool = False,
) -> bytes:
    """The filter as an array of struct sock_filter; empty where this machine's calls are not known here.

    `allow` names calls to leave out. Tests use it for their controls.
    """
    calls = _CALLS | _STRICT if profile is Profile.STRICT else _CALLS
    allow |= _TRACING if profile is Profile.DEBUG else frozenset()
    allow |= _NESTING if nested else frozenset()
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        return b""
    column = _COLUMN[machine]
    out: list[tuple[int, int, int, int]] = []  # code, jump if true, jump if false, value

    def load(offset: int) -> None:
        out.append((_LD, 0, 0, offset))

    def answer(value: int) -> None:
        out.append((_RET, 0, 0, value))

    def refuse_if_equal(value: int, error: int) -> None:
        out.append((_JEQ, 0, 1, value))
        answer(_ERRNO | error)

    load(_ARCH)
    out.append((_JEQ, 1, 0, _AUDIT_ARCH[machine]))
    answer(_KILL_PROCESS)  # another architecture's calls have other numbers: none is checked here, so none is let in
    load(_NR)
    if machine == "x86_64":
        out.append((_JGE, 0, 1, _X32_BIT))
        answer(_ERRNO | errno.ENOSYS)

    # Few ordinary calls match: a jump past each pair costs two instructions, about 60 for the common case.
    numbers = sorted(number[column] or -1 for name, number in calls.items() if name not in allow)
    for number in numbers:
        if number >= 0:
            refuse_if_equal(number, errno.EPERM)
    if "clone3" not in allow:
        refuse_if_equal(_CLONE3[column], errno.ENOSYS)
    if "clone" not in allow:
        out.append((_JEQ, 0, 4, _CLONE[column]))
        load(_ARG0)
        out.append((_JSET, 0, 1, _NAMESPACE_FLAGS))
        answer(_ERRNO | errno.EPERM)
        answer(_ALLOW)
    if "ioctl" not in allow:
        out.append((_JEQ, 0, 2 + 2 * len(_TERMINAL_IOCTLS), _IOCTL[column]))
        load(_ARG1)
        for request in _TERMINAL_IOCTLS:
            refuse_if_equal(request, errno.EPERM)
        answer(_ALLOW)
    if "socket" not in allow:
        out.append((_JEQ, 0, 1 + 2 * len(_FAMILIES), _SOCKET[column]))
        load(_ARG0)
        for family in _FAMILIES:
            refuse_if_equal(family, errno.EAFNOSUPPORT)
    answer(_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in out)
