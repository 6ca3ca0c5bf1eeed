"""What sandlot-init shall do for one box, as an ordered list of steps. Pure: decides, touches nothing.

A plan is computed from the spec, the image and what this host allows (`Host`); `box.py` sends it. The order matters and
is explained where it is not obvious; the kinds of step are those of init/box.h.
"""

from __future__ import annotations

import resource
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from sandlot.api import Profile, SandboxSpec
from sandlot.drivers.base import PTYS
from sandlot.drivers.images import Image
from sandlot.drivers.native import seccomp
from sandlot.drivers.native.wire import Key, Value


class Do(IntEnum):
    """Kinds of step: enum step_kind in init/box.h."""

    MOUNT = 1
    MKDIR = 2
    SYMLINK = 3
    WRITE = 4
    CLONE = 5
    ATTACH = 6
    PIVOT = 7
    DETACH = 8
    LOOPBACK = 9
    HOSTNAME = 10
    BIND = 11
    UPPER = 12


_MOUNTS = (Do.MOUNT, Do.ATTACH, Do.BIND)
READ_ONLY, NODEV, NOSUID, NOEXEC, OPTIONAL, IF_PRESENT = 1, 2, 4, 8, 16, 32
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8

# Inside, root keeps what package managers and services need within the box's own user namespace. Left out on purpose:
# sys_admin, sys_ptrace, mknod, net_raw, net_admin, sys_module, sys_time, dac_read_search.
CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "sys_chroot": 18,
    "setfcap": 31,
}

# Where programs read who resolves names.
RESOLVER = "/etc/resolv.conf"

# Devices that programs expect. mknod is impossible in a user namespace, so the host's own are bound.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Where the kernel's own file systems are mounted.
_KERNEL_S = (("proc", 0o555), ("sys", 0o555), ("dev", 0o755))
# Parts of /proc that tell about, or reach, the host. Hidden files show /dev/null; the rest becomes read-only.
_PROC_HIDDEN = (
    "kcore",
    "keys",
    "key-users",
    "timer_list",
    "sched_debug",
    "latency_stats",
    "kmsg",
    "kallsyms",
    "config.gz",
)
_PROC_READ_ONLY = ("sys", "bus", "fs", "irq", "asound", "acpi", "scsi", "pressure", "sysrq-trigger")


@dataclass(frozen=True, slots=True)
class Host:
    """What this host allows, as `box.py` found it."""

    root: bool  # the node is root: a host id per box, trees are opened and passed by the node
    stage: str  # a directory that exists on the host; the box is put together on a private mount over it
    pids_by_cgroup: bool
    memory_by_cgroup: bool = True
    resolver: str = ""  # the file that RESOLVER leads to; "": there is none
    disk: bool = False  # a file system of the box's own is passed, after the trees, for its upper directory


@dataclass(frozen=True, slots=True)
class Step:
    kind: Do
    source: str = ""
    target: str = ""
    text: str = ""
    data: str = ""
    flags: int = 0
    slot: int = -1

    @lru_cache(maxsize=1024)  # noqa: B019  (steps are values, and most are those of every box)
    def pack(self) -> bytes:
        strings = (self.source, self.target, self.text, self.data)
        return struct.pack("=IiQ", self.kind, self.slot, self.flags) + b"".join(s.encode() + b"\0" for s in strings)


@dataclass(frozen=True, slots=True)
class Plan:
    """`sources` are host paths whose trees fill the slots 0, 1, … in this order: passed as descriptors by a root node,
    else opened by the helper itself (the steps then begin with one CLONE for each)."""

    sources: tuple[str, ...]
    steps: tuple[Step, ...]
    rlimits: tuple[tuple[int, int], ...]
    caps: int
    setuid: bool
    host_network: bool
    lifetime_ms: int
    seccomp: bytes

    @property
    def mount_points(self) -> tuple[str, ...]:
        """Where something is mounted inside, so that what is there in the upper directory is nobody's work."""
        after = [step.kind for step in self.steps].index(Do.PIVOT)
        return tuple(step.target for step in self.steps[after + 1 :] if step.kind in _MOUNTS)

    def fields(self, host_id: int | None, joins: range, keeps: range = range(0)) -> list[tuple[Key, Value]]:
        """The plan as the fields of its frame. `joins` are the indices of cgroup.procs among the descriptors, `keeps`
        those of locks that PID 1 holds for life."""
        fields: list[tuple[Key, Value]] = [(Key.JOIN, index) for index in joins]
        fields += [(Key.KEEP, index) for index in keeps]
        if host_id is not None:
            fields.append((Key.HOST_ID, host_id))
        fields += [(Key.STEP, step.pack()) for step in self.steps]
        fields += [(Key.RLIMIT, struct.pack("=IIQQ", kind, 0, value, value)) for kind, value in self.rlimits]
        fields += [(Key.CAPS, self.caps), (Key.SETUID, int(self.setuid)), (Key.LIFETIME, self.lifetime_ms)]
        fields.append((Key.NETWORK, int(self.host_network)))
        if self.seccomp:
            fields.append((Key.SECCOMP, self.seccomp))
        return fields


def most_files(memory: int) -> int:
    """Bytes of files that a box holds in so much memory."""
    return memory - memory // 8


def make_plan(spec: SandboxSpec, image: Image, host: Host) -> Plan:
    """The plan for one box."""
    stage = host.stage
    # Slot 0 is the image, then its layers, then its extra trees, then the volumes.
    binds = [(source, target, READ_ONLY | NODEV) for source, target in image.binds]
    binds += [
        (volume.source, volume.target, (READ_ONLY if volume.read_only else 0) | NODEV | NOSUID)
        for volume in spec.volumes
    ]
    on_host_network = spec.network == "host"
    if on_host_network:  # the resolver last: see `box.py`
        networked = [*image.networked, *([(host.resolver, RESOLVER)] if host.resolver else [])]
        binds += [(source, target, READ_ONLY | NODEV | NOSUID) for source, target in networked]
    sources = (image.root, *image.layers, *(source for source, _, _ in binds))
    steps: list[Step] = []
    if not host.root:
        steps += [Step(Do.CLONE, source) for source in sources]

    # One tmpfs, sized in bytes and inodes and charged to the box's memory, carries the upper directory, /dev and
    # /dev/shm: few superblocks a box. It is private to the box's mount namespace, so nothing is left on the host.
    # A disk of its own carries the upper directory alone; then half the memory is left for /dev/shm, as on any Linux.
    # Files must not fill the memory to the last page: the next process would find none and take PID 1 along.
    memory = spec.limits.memory
    most = spec.limits.disk if memory is None else min(spec.limits.disk, most_files(memory))
    if host.disk:
        most = (memory or most) // 2
    size = f"size={most},nr_inodes={spec.limits.inodes},mode=0755"
    steps.append(
        Step(Do.MOUNT, "sandlot", stage, "tmpfs", size, _MS_NOSUID | _MS_NODEV if not spec.setuid else _MS_NODEV)
    )
    files = f"{stage}/disk" if host.disk else stage
    lowers = [f"{stage}/lower{index}" for index in range(1 + len(image.layers))]
    steps += [Step(Do.MKDIR, target=path, flags=0o755) for path in lowers]
    steps += [Step(Do.MKDIR, target=f"{stage}/{name}", flags=0o755) for name in ("root", "dev", "disk")]
    if host.disk:
        steps.append(Step(Do.ATTACH, target=files, flags=NODEV, slot=len(sources)))
    steps += [Step(Do.MKDIR, target=f"{files}/{name}", flags=0o755) for name in ("upper", "work")]
    # An image's own /proc may be a link to anywhere: the upper directory's hides it.
    steps += [Step(Do.MKDIR, target=f"{files}/upper/{name}", flags=mode) for name, mode in _KERNEL_S]
    if not image.layers:  # else they are in the lowest layer, as the box that it was copied from left them
        steps += [Step(Do.MKDIR, target=f"{files}/upper/{name}", flags=mode) for name, mode in image.directories]
    steps += [Step(Do.ATTACH, target=path, flags=READ_ONLY | NODEV, slot=slot) for slot, path in enumerate(lowers)]
    steps += [
        Step(Do.MKDIR, target=f"{stage}/dev/pts", flags=0o755),
        Step(Do.MKDIR, target=f"{stage}/dev/shm", flags=0o1777),
        Step(Do.UPPER, lowers[-1] if image.layers else "", f"{files}/upper"),
        Step(
            Do.MOUNT,
            "overlay",
            f"{stage}/root",
            "overlay",
            f"lowerdir={':'.join(reversed(lowers))},upperdir={files}/upper,workdir={files}/work,userxattr",
            _MS_NODEV if spec.setuid else _MS_NODEV | _MS_NOSUID,
        ),
    ]
    steps += [Step(Do.BIND, f"/dev/{name}", f"{stage}/dev/{name}", flags=OPTIONAL) for name in _DEVICES]
    steps += [
        Step(
            Do.MOUNT,
            "devpts",
            f"{stage}/dev/pts",
            "devpts",
            f"newinstance,ptmxmode=0666,mode=0620,max={PTYS}",
            _MS_NOSUID | _MS_NOEXEC,
        ),
        Step(Do.SYMLINK, "pts/ptmx", f"{stage}/dev/ptmx"),
        Step(Do.SYMLINK, "/proc/self/fd", f"{stage}/dev/fd"),
        Step(Do.SYMLINK, "/proc/self/fd/0", f"{stage}/dev/stdin"),
        Step(Do.SYMLINK, "/proc/self/fd/1", f"{stage}/dev/stdout"),
        Step(Do.SYMLINK, "/proc/self/fd/2", f"{stage}/dev/stderr"),
        # Cloned before the pivot, attached after it: paths of the image are only ever resolved in the image.
        Step(Do.CLONE, f"{stage}/dev"),
        Step(Do.PIVOT, target=f"{stage}/root"),
    ]
    dev_slot = len(sources) + host.disk  # the next after what was passed
    steps += [
        Step(Do.MOUNT, "proc", "/proc", "proc", "", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC),
        # A sysfs shows the devices of a network, so the kernel gives it to none but the network's owner: it is empty on
        # the host's, which programs take for a container's.
        Step(Do.BIND, "/sys", "/sys", flags=READ_ONLY)
        if on_host_network
        else Step(Do.MOUNT, "sysfs", "/sys", "sysfs", "", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RDONLY),
        Step(Do.ATTACH, target="/dev", slot=dev_slot),
    ]
    # Written in the box's own user namespace: the host's settings are untouched. Nested user namespaces multiply what
    # a kernel hole can reach; inotify is counted per user of the host as well, which an ordinary node's boxes share.
    settings = {"max_inotify_instances": 128, "max_inotify_watches": 65_536}
    if not spec.nested:
        settings["max_user_namespaces"] = 0
    steps += [Step(Do.WRITE, str(value), f"/proc/sys/user/{name}", flags=OPTIONAL) for name, value in settings.items()]
    steps += [Step(Do.BIND, f"/proc/{name}", f"/proc/{name}", flags=READ_ONLY | OPTIONAL) for name in _PROC_READ_ONLY]
    steps += [Step(Do.BIND, "/dev/null", f"/proc/{name}", flags=IF_PRESENT) for name in _PROC_HIDDEN]
    # Nothing of the host is reachable any more when a path that a user or an image chose is followed.
    steps.append(Step(Do.DETACH))
    steps += [
        Step(Do.ATTACH, target=target, flags=flags, slot=index + len(lowers))
        for index, (_, target, flags) in enumerate(binds)
    ]
    if not on_host_network:
        steps.append(Step(Do.LOOPBACK))
    steps.append(Step(Do.HOSTNAME, spec.hostname))

    rlimits = [(resource.RLIMIT_NOFILE, spec.limits.open_files), (resource.RLIMIT_CORE, 0)]
    # Of a node that may run at a better priority, or in real time, a box must not inherit that.
    rlimits += [(kind, 0) for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)]
    if not host.pids_by_cgroup:
        # Counted per user *namespace* by the kernel, so it holds for the box alone.
        rlimits.append((resource.RLIMIT_NPROC, spec.limits.pids))
    if not host.memory_by_cgroup and spec.limits.memory is not None:
        # Of each process, not of all together: the one that runs away is stopped. Not RLIMIT_AS: some language runtimes
        # reserve far more addresses than they ever use.
        rlimits.append((resource.RLIMIT_DATA, spec.limits.memory))
    return Plan(
        sources=sources,
        steps=tuple(steps),
        rlimits=tuple(rlimits),
        caps=0 if spec.profile is Profile.STRICT else sum(1 << bit for bit in CAPABILITIES.values()),
        setuid=spec.setuid,
        host_network=on_host_network,
        seccomp=seccomp.program(profile=spec.profile, nested=spec.nested),
        lifetime_ms=0 if spec.lifetime is None else max(1, int(spec.lifetime * 1000)),
    )
