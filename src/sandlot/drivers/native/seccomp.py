"""What a program in a box may not ask of the kernel, as bytes for the plan.

A deny list: everything else is allowed, so ordinary software runs. It is the second lock on each door: namespaces,
capabilities and ids are the first. Denied calls answer EPERM, as a kernel without the right would; `clone3` answers
ENOSYS, so that libc falls back to `clone`, whose flags can be read by a filter. Of sockets there is a list of the kinds
that programs use: each other kind reaches, and on some hosts loads, a part of the kernel that few have looked at. It
holds in every profile, for in a nested namespace the first lock is open.
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
    "set_mempolicy_home_node": (450, 450),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
}
# Calls that are looked at with their arguments.
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_SETSOCKOPT = (54, 208)
_MMAP = (9, 222)
_MEMFD_CREATE = (319, 279)
_PRLIMIT64 = (302, 261)
_FCNTL = (72, 25)
_IO_SETUP = (206, 0)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_X32_BIT = 0x40000000

# CLONE_NEW* for time, mount, cgroup, uts, ipc, user, pid, net.
_NAMESPACE_FLAGS = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# TIOCSTI and TIOCLINUX type into somebody else's terminal, TIOCSETD loads a line discipline.
_TERMINAL_IOCTLS = (0x5412, 0x541C, 0x5423)
# F_SETLEASE, F_SETDELEG: whoever has a lease on a file stops everybody who opens or runs it, for as long as the host's
# lease-break-time, again and again; and for one on a file of the host's /usr it is enough to be root inside. File
# servers ask for them, and do without where they are refused.
_LEASES = (1024, 1040)

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
# Not AF_PACKET, AF_ALG, AF_VSOCK, AF_XDP, AF_KEY, AF_CAN, AF_TIPC, AF_BLUETOOTH, AF_RDS, AF_SMC and thirty others.
_FAMILIES = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
# Netlink to routes, to socket statistics and of device events; not to netfilter, audit, xfrm, generic families.
_NETLINK = (0, 4, 15)
# Of internet sockets: stream, datagram, raw. Not SOCK_DCCP, not SOCK_SEQPACKET (SCTP), and not SOCK_PACKET, an old name
# by which AF_INET becomes AF_PACKET.
_INET_TYPES, _TYPE_BITS = (1, 2, 3), 0xF
# The usual one of a type, ICMP, TCP, UDP, ICMPv6. Not SMC, which turns a stream into another family's, MPTCP, UDP-Lite,
# DCCP, L2TP, SCTP.
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
# IPT_SO_SET_REPLACE (and IP6T_…), ARPT_SO_SET_REPLACE, EBT_SO_SET_ENTRIES at the levels of IPv4 and IPv6: tables of
# netfilter are written through these, once more for every nested network namespace.
_IP_LEVELS, _TABLE_OPTIONS = (0, 41), (64, 96, 128)
# Huge pages come out of a pool of the host's that no limit of a box counts. (shmget asks for a right of the host.)
_MAP_HUGETLB, _MFD_HUGETLB = 0x40000, 4

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH = 0, 4  # offsets in struct seccomp_data

_Code = list[tuple[int, int, int, int]]  # of struct sock_filter: code, jump if true, jump if false, value


def _argument(index: int) -> _Code:
    """Load the low half, which is all that the kernel reads of an int. (Comparing both would let 1 << 32 | n pass.)"""
    return [(_LD, 0, 0, 16 + 8 * index)]


def _answer(value: int) -> _Code:
    return [(_RET, 0, 0, value)]


def _refuse(error: int) -> _Code:
    return _answer(_ERRNO | error)


def _if_equal(value: int, then: _Code) -> _Code:
    return [(_JEQ, 0, len(then), value), *then]


def _if_any(bits: int, then: _Code) -> _Code:
    return [(_JSET, 0, len(then), bits), *then]


def _if_in(values: tuple[int, ...], then: _Code) -> _Code:
    """Each but the last jumps over those that follow it."""
    last = len(values) - 1
    jumps = [(_JEQ, last - at, 0 if at < last else len(then), value) for at, value in enumerate(values)]
    return [*jumps, *then]


def _unless_in(values: tuple[int, ...], then: _Code) -> _Code:
    last = len(values) - 1
    return [*((_JEQ, last - at + len(then), 0, value) for at, value in enumerate(values)), *then]


def _socket() -> _Code:
    """What `socket` may make."""
    netlink = [
        *_argument(2),
        *_unless_in(_NETLINK, _refuse(errno.EPROTONOSUPPORT)),  # what a kernel without audit says, and `su` understands
        *_answer(_ALLOW),
    ]
    return [
        *_argument(0),
        *_unless_in(_FAMILIES, _refuse(errno.EAFNOSUPPORT)),
        *_if_equal(_AF_UNIX, _answer(_ALLOW)),
        *_if_equal(_AF_NETLINK, netlink),
        *_argument(1),
        (_AND, 0, 0, _TYPE_BITS),
        *_unless_in(_INET_TYPES, _refuse(errno.ESOCKTNOSUPPORT)),
        *_argument(2),
        *_unless_in(_INET_PROTOCOLS, _refuse(errno.EPROTONOSUPPORT)),  # upon which programs take TCP instead of MPTCP
    ]


# By name, so that a profile can leave one out: what is looked at, and refused. What is not refused is allowed.
_LOOKED_AT: dict[str, tuple[tuple[int, int], _Code]] = {
    "mmap": (_MMAP, [*_argument(3), *_if_any(_MAP_HUGETLB, _refuse(errno.EPERM))]),
    "clone": (_CLONE, [*_argument(0), *_if_any(_NAMESPACE_FLAGS, _refuse(errno.EPERM))]),
    "fcntl": (_FCNTL, [*_argument(1), *_if_in(_LEASES, _refuse(errno.EPERM))]),
    "ioctl": (_IOCTL, [*_argument(1), *_if_in(_TERMINAL_IOCTLS, _refuse(errno.EPERM))]),
    "socket": (_SOCKET, _socket()),
    "socketpair": (_SOCKETPAIR, [*_argument(0), *_unless_in((_AF_UNIX,), _refuse(errno.EAFNOSUPPORT))]),
    "setsockopt": (
        _SETSOCKOPT,
        [
            *_argument(1),
            *_if_in(_IP_LEVELS, [*_argument(2), *_if_in(_TABLE_OPTIONS, _refuse(errno.EPERM))]),
        ],
    ),
    "memfd_create": (_MEMFD_CREATE, [*_argument(1), *_if_any(_MFD_HUGETLB, _refuse(errno.EPERM))]),
    # The first process is of the same user as root inside, who could otherwise leave it without descriptors.
    "prlimit64": (_PRLIMIT64, [*_argument(0), *_if_equal(1, _refuse(errno.EPERM))]),
    "clone3": (_CLONE3, _refuse(errno.ENOSYS)),
    # The host has so many of these requests for all (fs.aio-max-nr), and one box could take them. ENOSYS is what a
    # kernel without them says, and what databases take for an order to use threads.
    "io_setup": (_IO_SETUP, _refuse(errno.ENOSYS)),
}


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
    out: _Code = [
        (_LD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        # Another architecture's calls have other numbers: none is checked here, so none is let in.
        *_answer(_KILL_PROCESS),
        (_LD, 0, 0, _NR),
    ]
    if machine == "x86_64":
        out += [(_JGE, 0, 1, _X32_BIT), *_refuse(errno.ENOSYS)]

    # A call whose number alone decides costs nothing: since Linux 5.11 the kernel remembers the answer. For the others
    # the filter runs each time, so they come first; `mmap` is the hot one.
    for name, (number, checks) in _LOOKED_AT.items():
        if name not in allow:
            out += _if_equal(number[column], [*checks, *_answer(_ALLOW)])
    numbers = (number[column] for name, number in calls.items() if name not in allow)
    for denied in sorted(number for number in numbers if number is not None):
        out += _if_equal(denied, _refuse(errno.EPERM))
    out += _answer(_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in out)
