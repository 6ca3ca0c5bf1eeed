"""What a native box promises, and which of it this host keeps. Pure: facts about the host in, a line per promise out.

The same lines are what `GET /v1/capabilities` and `sandlot doctor` print, what `Info.losses` names, and what each
attack in tests/hostile refers to: a promise has one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sandlot.api import NO_CONFIG, Capability, ImageConfig, SandboxSpec

# Which controller keeps which limits of a spec, and under which promise.
LIMITED_BY = {
    "memory": ("memory", "memory limit"),
    "pids": ("pids", "pids limit"),
    "cpus": ("cpu", "cpu limit"),
    "cpu_weight": ("cpu", "cpu limit"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What `box.py` found out about this host by trying."""

    ids: Literal["own", "shared", "one"]  # a range per box; one range for all boxes of this user; a single id
    ids_reason: str = ""  # why there is no more than that
    owners_mapped: bool = True
    unmapped: str = ""  # where the files lie whose owners cannot be mapped; "": it is the kernel's age
    limits_namespaces: bool = True  # RLIMIT_NPROC holds for all users of a user namespace together: Linux 5.14
    directories_replaced: bool = True  # whether a directory of the image can be removed, and made anew
    controllers: Mapping[str, str] = field(default_factory=dict)  # memory, pids, cpu → "v1" or "v2"
    kill_groups: bool = False
    filtered: bool = True
    restricts_below: bool = True  # what is mounted below a read-only tree is made read-only too: Linux 5.12
    disk_fix: str | None = None  # what it takes to give a box a disk larger than its memory; None: it can be had
    disk_failure: str = "no loop file can be mounted"
    copies_unmapped: str = ""  # where snapshots lie, if owners cannot be written there as a box sees them
    shown: tuple[str, ...] = ("/usr",)  # trees of the host that are in the image `host`


def promises(facts: Facts) -> list[Capability]:
    """A line for each promise, in the order in which `doctor` shows them."""
    own = facts.ids == "own"
    as_root = "run the node as root"
    lines: list[Capability] = []

    def kept(name: str, found: str) -> None:
        lines.append(Capability(name=name, state="kept", found=found))

    def loss(name: str, found: str, fix: str | None) -> None:
        lines.append(Capability(name=name, state="loss", found=found, fix=fix))

    kept("network", "none but the ports that are routed")
    if own:
        kept("user ids", "65,536 per sandbox, that no other of the nodes with this /run has")
    elif facts.ids == "shared":
        loss("user ids", "65,536, the same for all sandboxes of this user; root inside is the user outside", as_root)
    else:
        loss("user ids", f"one inside, which is the node's own outside: {facts.ids_reason}", as_root)
    if not own:
        loss("file owners", "what belongs to others than the node's user outside belongs to nobody inside", as_root)
    elif facts.owners_mapped:
        kept("file owners", "as in the image and as written, inside; the node's own outside")
    elif facts.unmapped:
        loss(
            "file owners",
            f"files of the image belong to nobody inside: {facts.unmapped} cannot map owners",
            "keep the state directory on ext4, xfs or btrfs",
        )
    else:
        loss("file owners", "files of the image and of volumes belong to nobody inside", "use Linux 5.19 or newer")
    if facts.copies_unmapped:
        loss(
            "snapshots",
            f"refused: {facts.copies_unmapped} cannot map owners",
            "use Linux 5.12 or newer and a state directory on ext4, xfs or btrfs",
        )
    else:
        kept("snapshots", "files with their owners, as images to start from and to export")
    if facts.directories_replaced:
        kept("image directories", "can be moved, removed and made anew, like those of any disk")
    else:
        loss(
            "image directories",
            "none can be removed and made anew, and no new one moved into one (EIO, EXDEV)",
            "use Linux 6.6 or newer, or ask for a disk larger than the memory",
        )
    kept("files", f"nothing of the host but {' and '.join(facts.shown)}, read-only; no path leads out")
    kept(
        "processes",
        "only its own are listed, signalled or traced; that others open or lock files of the host's /usr or of the "
        "same volume can be seen",
    )
    kept("privileges", "eleven capabilities in its own user namespace; none gained from files")
    if facts.filtered:
        kept("system call filter", "a deny list")
    else:
        loss("system call filter", "none: this processor's calls are not known here", "use x86_64 or aarch64")
    memory, cpu, pids = (facts.controllers.get(name) for name in ("memory", "cpu", "pids"))
    cgroups = (
        "run the node as root, or in a cgroup v2 that is delegated to it (`systemd-run --user --scope -p Delegate=yes`)"
    )
    if memory:
        kept(
            "memory limit", f"by a cgroup {memory}, files included that are written inside, not those that are uploaded"
        )
    else:
        loss("memory limit", "kept only for each process's own data: no memory cgroup can be made", cgroups)
    if memory == "v2":
        kept("socket memory", "counted as the sandbox's memory")
    else:
        found = "only of TCP, and apart from other memory" if memory else "not limited"
        loss("socket memory", f"what waits in sockets is {found}", "boot the host with cgroup v2 alone")
    if pids or (facts.ids != "shared" and facts.limits_namespaces):
        kept("pids limit", f"by a cgroup {pids}" if pids else "by RLIMIT_NPROC of the user namespace")
    else:
        fix = cgroups if facts.ids == "shared" else "use Linux 5.14 or newer"
        counted = "counted with all else that the user runs" if facts.ids == "one" else "kept for each user inside"
        loss("pids limit", f"{counted}, not for the sandbox alone", fix)
    if cpu:
        kept("cpu limit", f"quota and weight by a cgroup {cpu}")
    else:
        loss("cpu limit", "no quota and no weight: no cpu cgroup can be made", cgroups)
    kept("disk limit", "by a tmpfs of its own, in bytes and inodes")
    if facts.disk_fix is None:
        kept("disk beyond memory", "by a loop file with a file system of its own, which is not set aside beforehand")
    else:
        loss("disk beyond memory", f"refused: {facts.disk_failure}", facts.disk_fix)
    kept(
        "open files limit",
        "by RLIMIT_NOFILE for each process, terminals by a devpts of its own; the host's table, fs.file-max, is all's",
    )
    if own:
        kept("kernel objects", "inotify, message queues, pending signals are counted per sandbox")
    else:
        loss(
            "kernel objects",
            "inotify, message queues, pending signals are counted with the user's other programs",
            as_root,
        )
    kept("output limit", "cut to its cap, head and tail kept, before it reaches memory")
    kept("command trees", f"killed whole by {'cgroup.kill' if facts.kill_groups else 'a walk over the process tree'}")
    if facts.kill_groups:
        kept("standing still", "paused and copied boxes are frozen by cgroup v2")
    else:
        loss(
            "standing still",
            "processes are stopped by a signal: what is started while a snapshot is made is not, and what had been "
            "stopped before goes on afterwards",
            cgroups,
        )
    kept("clean end", "everything ends with the first process; nothing stays behind")
    return lines


def losses(facts: Facts, spec: SandboxSpec, config: ImageConfig = NO_CONFIG, on_disk: bool = False) -> tuple[str, ...]:
    """What a box made from `spec` and an image of that `config` does not get, as `Info.losses` says it: "promise: what
    is the case". `on_disk`: its files are not in its memory."""
    without = {"disk beyond memory", "snapshots"}  # refused when it is asked for, never a loss of a box that exists
    if on_disk:
        without.add("image directories")  # a matter of tmpfs
    found = [
        f"{line.name}: {line.found}" for line in promises(facts) if line.state == "loss" and line.name not in without
    ]
    if spec.network == "host":
        found.append("network: the host's own, with its loopback addresses and abstract sockets; no sysfs")
    if spec.limits.memory is None:
        found = [loss for loss in found if not loss.startswith("memory limit:")]
    if any(not volume.read_only for volume in spec.volumes):
        found.append("disk bandwidth: writes to a volume are neither attributed nor shared out between sandboxes")
        if facts.ids == "own":
            found.append(
                "privileges: set-id programs and file capabilities that it makes in a writable volume count on the "
                "host, unless that file system is mounted nosuid"
            )
    if on_disk:
        found.append("disk bandwidth: writes to its disk are neither attributed nor shared out between sandboxes")
    if not facts.restricts_below and any(volume.read_only for volume in spec.volumes):
        found.append("files: what is mounted below a read-only volume can be written (Linux before 5.12)")
    if config.user and facts.ids == "one":
        found.append(f"user: the image's user is {config.user}, and commands run as 0, the only one that there is")
    elif config.group not in (None, config.user or 0):
        found.append(
            f"user: the image gives its user {config.user or 0} the group {config.group}, and commands run with the "
            f"group {config.user or 0}"
        )
    return tuple(found)
