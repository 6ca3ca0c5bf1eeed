"""Limits and kill switches of boxes, through whatever this host lets us make of cgroup v2, v1 or nothing.

Owns one directory per node in each hierarchy that it may write, `sandlot-NODE`, a directory per box in it, and in
cgroup v2 (which may be bare: a hybrid host keeps the controllers in v1) a directory per run, for its `cgroup.kill`.
The directories of a node are listed in its own directory before they are made, so that a later node can remove them
after a crash. Never decides what to do about a limit that cannot be kept: it says which can.

What has a box's name in it is a string here, not a Path, of which each part is interned: 3.11 tidies that up by the
ten thousand, and Python 3.12 never does.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandlot.api import Limits
from sandlot.errors import HostFault, StartFailed

_CONTROLLERS = ("memory", "pids", "cpu")
_LIST = "cgroups"  # the file in a node's directory
_RUN = "run-"
_ROOM = 8
_ASIDE = "aside-"  # the leaf in which a node's own process waits, see _step_aside
# For the processes of a dead node to end: they are killed, so only a hanging kernel takes longer than a moment.
SWEEP_SECONDS = 10.0
# For processes to stop where they are: a moment, unless one sits in a system call that cannot be interrupted.
FREEZE_SECONDS = 10.0


def mounts(table: str = "/proc/self/mounts") -> tuple[str | None, dict[str, str]]:
    """Where cgroup v2 is mounted (None: nowhere), and for each v1 controller its mount point."""
    v2: str | None = None
    v1: dict[str, str] = {}
    for line in Path(table).read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            v2 = v2 or point
        elif kind == "cgroup":
            v1 |= {name: point for name in options.split(",") if name in _CONTROLLERS}
    return v2, v1


def own_paths(table: str = "/proc/self/cgroup") -> dict[str, str]:
    """This process's cgroup in each hierarchy: "" is v2's, else by controller."""
    found: dict[str, str] = {}
    for line in Path(table).read_text().splitlines():
        _, names, path = line.split(":", 2)
        found |= dict.fromkeys(names.split(","), path)
    return found


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123
        return file.read()


def _write(path: Path | str, value: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)  # a third of what a file object costs
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def _hand_down(base: Path, names: list[str]) -> None:
    """Let children of `base` have these controllers, as far as the kernel lets it."""
    for name in names:
        _write(base / "cgroup.subtree_control", f"+{name}")


# Files that count: the field of api.Stats and how many of their unit make one of ours. A bare v2 cgroup has cpu.stat.
_COUNTERS = {
    "memory.current": ("memory", 1),
    "memory.usage_in_bytes": ("memory", 1),
    "memory.peak": ("memory_peak", 1),
    "memory.max_usage_in_bytes": ("memory_peak", 1),
    "pids.current": ("pids", 1),
    "cpu.stat": ("cpu_seconds", 1_000_000),
}


@dataclass(slots=True)
class BoxGroup:
    """The cgroups of one box. `kept` names the limits that are in force."""

    directories: list[str] = field(default_factory=list)
    runs: str | None = None  # in cgroup v2: the parent of a directory per run, without PID 1, so that it can be frozen
    kept: frozenset[str] = frozenset()
    oom_file: int = -1  # descriptor of the file that counts OOM kills
    oom_path: str = ""
    limits: Limits = field(default_factory=Limits)  # what was asked for
    _oom_key: bytes = b"oom_kill "
    _runs: int = 0
    _left: list[RunGroup] = field(default_factory=list)  # of runs that are over, in which something still lived

    def procs(self) -> list[int]:
        """Descriptors of the cgroup.procs files that a process writes "0" to in order to join. Caller closes."""
        return [os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for path in self.directories]

    def oom_kills(self) -> int:
        """How many processes of the box the kernel has killed for memory; 0 where nobody counts."""
        if self.oom_file < 0:
            return 0
        for line in os.pread(self.oom_file, 4096, 0).splitlines():
            if line.startswith(self._oom_key):
                return int(line[len(self._oom_key) :])
        return 0

    def usage(self) -> dict[str, int | float | None]:
        """What the box uses, as fields of api.Stats; None for what is not counted here."""
        found: dict[str, int | float | None] = {}
        for directory in self.directories:
            for name, (field_name, unit) in _COUNTERS.items():
                try:
                    text = _read(f"{directory}/{name}")
                except OSError:
                    continue
                if name == "cpu.stat":
                    text = next((line.split()[1] for line in text.splitlines() if line.startswith("usage_usec")), "")
                if text.strip().isdigit():
                    found[field_name] = int(text) if unit == 1 else int(text) / unit
        return found

    def outlived(self) -> bool:
        """Whether something lives on of runs that are over, as far as one can tell."""
        self._left = [left for left in self._left if not left.remove()]
        return bool(self._left)

    def make_run(self) -> RunGroup | None:
        """A cgroup for one run, where v2 offers `cgroup.kill`."""
        if self.runs is None:
            return None
        self._left = [left for left in self._left if not left.remove()]
        self._runs += 1
        path = f"{self.runs}/{_RUN}{self._runs}"
        try:
            os.mkdir(path)  # noqa: PTH102  (hot path: a string is enough)
            return RunGroup(path, os.open(path + "/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC), self._left)
        except OSError as error:
            raise HostFault(f"a cgroup for a run could not be made: {error.strerror}") from error

    def freeze(self, frozen: bool) -> None:
        """Stop everything in the runs where it is, or let it go on. Blocks until it is so; raises HostFault."""
        assert self.runs is not None
        with open(f"{self.runs}/cgroup.freeze", "w") as file:  # noqa: PTH123
            file.write(str(int(frozen)))
        if not _await_event(self.runs, b"frozen %d" % frozen, time.monotonic() + FREEZE_SECONDS):
            raise HostFault("the sandbox's processes could not be stopped", "one of them hangs in the kernel")

    def facts(self) -> dict[str, Any]:
        """What `restored` needs."""
        return {
            "directories": self.directories,
            "runs": self.runs,
            "kept": sorted(self.kept),
            "oom": self.oom_path,
        }

    @classmethod
    def restored(cls, facts: dict[str, Any]) -> BoxGroup:
        """Those of a box that another node made. Raises OSError when they are gone."""
        group = cls(list(facts["directories"]), kept=frozenset(facts["kept"]))
        group.count_oom(facts["oom"])
        if facts["runs"]:
            group.runs = str(facts["runs"])
            names = os.listdir(group.runs)  # noqa: PTH208
            runs = [int(name.removeprefix(_RUN)) for name in names if name.startswith(_RUN)]
            group._runs = max(runs, default=0)
        return group

    def count_oom(self, path: str) -> None:
        """Read the kernel's count from this file; "": nobody counts."""
        self.oom_path = path
        if path:
            self.oom_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._oom_key = b"oom_kill "

    def restored_run(self, name: str) -> RunGroup | None:
        if not name or self.runs is None or not os.path.isdir(f"{self.runs}/{name}"):  # noqa: PTH112
            return None
        return RunGroup(f"{self.runs}/{name}", -1, self._left)

    def close(self) -> None:
        if self.oom_file >= 0:
            os.close(self.oom_file)
            self.oom_file = -1

    def remove(self) -> bool:
        """Remove the directories; False if something still lives in one."""
        self.close()
        return all([_remove_tree(path) for path in self.directories])  # noqa: C419  (remove each)


@dataclass(slots=True)
class RunGroup:
    """The cgroup of one run."""

    path: str
    procs: int
    left: list[RunGroup]
    closed: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def kill(self) -> None:
        """SIGKILL everything in it, at once and without a race."""
        with suppress(FileNotFoundError), open(f"{self.path}/cgroup.kill", "w") as file:  # noqa: PTH123
            file.write("1")

    def joined(self) -> None:
        """Its first process is in it: nobody else joins."""
        if self.procs >= 0:
            os.close(self.procs)
            self.procs = -1

    def close(self) -> None:
        """Let go of it; while background children live in it, it stays, and is tried again with each next run."""
        if self.closed:
            return
        self.closed = True
        self.joined()
        if not self.remove():
            self.left.append(self)

    def remove(self) -> bool:
        """Whether it is gone now."""
        try:
            os.rmdir(self.path)  # noqa: PTH106  (hot path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _remove_tree(path: Path | str) -> bool:
    try:
        with os.scandir(path) as entries:
            children = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return True
    for child in children:
        _remove_tree(child)
    try:
        os.rmdir(path)  # noqa: PTH106
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class Cgroups:
    """What one node may do with cgroups. `controllers` maps memory, pids, cpu to "v1" or "v2"."""

    def __init__(self, node: str, directory: Path) -> None:
        self._name = f"sandlot-{node}"
        self._list = directory / _LIST
        self._parents: dict[str, Path] = {}  # controller, or "" for v2, → the node's directory
        self.controllers: dict[str, str] = {}
        self.v2_kill = False
        self._aside: Path | None = None
        self.hidden = False  # leave them alone, as on a host that gives no rights to them

    def start(self) -> None:
        """Find out by trying. Makes the node's directories."""
        if self.hidden:
            return
        v2, v1 = mounts()
        own = own_paths()
        if v2 is not None:
            self._start_v2(v2, own.get("", "/"))
        for name, point in v1.items():
            for base in (point + own.get(name, "/"), point):
                if self._make(name, Path(base)):
                    self.controllers[name] = "v1"
                    break

    def _start_v2(self, point: str, own: str) -> None:
        # Below the root if we may, else below our own cgroup, if that was delegated to us.
        if Path(own).name.startswith(_ASIDE):
            own = str(Path(own).parent)  # another node of this process stepped aside before
        for base in dict.fromkeys((Path(point), Path(point + own))):
            if not base.is_dir() or not self._make("", base):
                continue
            available = (base / "cgroup.controllers").read_text().split()
            wanted = [name for name in _CONTROLLERS if name in available]
            # A cgroup other than the root that holds processes cannot hand memory to its children. To try is no way:
            # cpu and pids it may, and is then the root of a threaded tree, whose children nobody can join.
            root = not (base / "cgroup.type").exists()
            if root or not (base / "cgroup.procs").read_text().split() or self._step_aside(base):
                _hand_down(base, wanted)
            parent = self._parents[""]
            given = (parent / "cgroup.controllers").read_text().split()
            for name in wanted:
                if name in given and _write(parent / "cgroup.subtree_control", f"+{name}"):
                    self.controllers[name] = "v2"
            self.v2_kill = (parent / "cgroup.kill").exists()
            return

    def _step_aside(self, base: Path) -> bool:
        """Move this process to a leaf below `base`, if nobody else is in there: others are not ours to move."""
        leaf = base / f"{_ASIDE}{self._name}"
        try:
            if (base / "cgroup.procs").read_text().split() != [str(os.getpid())]:
                return False
            self._note(leaf)
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text("0")
        except OSError:
            return False
        self._aside = leaf
        return True

    def _step_back(self, leaf: Path) -> None:
        """The undoing of _step_aside. Whoever was started meanwhile stays in the leaf, and the leaf with it."""
        for name in _CONTROLLERS:
            _write(leaf.parent / "cgroup.subtree_control", f"-{name}")
        if _write(leaf.parent / "cgroup.procs", "0"):
            _remove_tree(leaf)

    def _note(self, path: Path) -> None:
        """Before it is made: a crash in between leaves a name, not a cgroup."""
        with self._list.open("a") as listing:
            listing.write(f"{path}\n")

    def _make(self, key: str, base: Path) -> bool:
        path = base / self._name
        try:
            self._note(path)
            path.mkdir(exist_ok=True)
        except OSError:
            return False
        self._parents[key] = path
        return True

    def make(self, box_id: str, limits: Limits) -> BoxGroup:
        """The cgroups of a new box, limits in force. Raises StartFailed when the kernel refuses now what it gave
        before."""
        group = BoxGroup(limits=limits)
        kept = set()
        try:
            for key, parent in self._parents.items():
                if key == "memory" and limits.memory is None:
                    continue  # no such limit asked for: one directory less to make and remove
                path = f"{parent}/{box_id}"
                if path not in group.directories:  # a v1 host may mount several controllers in one place
                    os.mkdir(path)  # noqa: PTH102
                    group.directories.append(path)
                if key == "" and self.v2_kill:
                    group.runs = f"{path}/runs"
                    os.mkdir(group.runs)  # noqa: PTH102
                kept |= self._limit(key, path, limits)
                if self.controllers.get("memory") == ("v1" if key else "v2") and key in ("", "memory"):
                    group.count_oom(f"{path}/{'memory.oom_control' if key else 'memory.events'}")
        except BaseException as error:
            group.remove()
            if not isinstance(error, OSError):
                raise
            raise StartFailed(
                f"a cgroup for the sandbox could not be made at {error.filename}: {error.strerror}",
                "see `cgroup.max.descendants` there, and whether the disk or memory is full",
            ) from error
        group.kept = frozenset(kept)
        return group

    def _limit(self, key: str, path: str, limits: Limits) -> set[str]:
        """Write the limits that belong into this directory: the controllers that keep theirs."""
        kept = set()
        settings = _v1_settings(limits) if key else _v2_settings(limits)
        for controller, files in settings.items():
            if self.controllers.get(controller) != ("v1" if key else "v2") or (key and key != controller):
                continue
            written = [_write(f"{path}/{name}", value) or optional for name, value, optional in files]
            if all(written):
                kept.add(controller)
        return kept

    @contextmanager
    def room(self, group: BoxGroup) -> Iterator[None]:
        """A few processes more than its limit, for work of ours in a box that stands still."""
        files = [f"{path}/pids.max" for path in group.directories if os.path.exists(f"{path}/pids.max")]  # noqa: PTH110
        before = [(file, _read(file).strip()) for file in files]
        for file, value in before:
            if value.isdigit():
                _write(file, str(int(value) + _ROOM))
        try:
            yield
        finally:
            for file, value in before:
                _write(file, value)

    def set(self, group: BoxGroup, limits: Limits) -> None:
        """Other limits for a box that lives."""
        kept: set[str] = set()
        for key, parent in self._parents.items():
            for path in group.directories:
                if path.startswith(f"{parent}/"):
                    kept |= self._limit(key, path, limits)
        group.kept = frozenset(kept)
        group.limits = limits

    def close(self) -> None:
        """Remove the node's own directories, and those that one before it had elsewhere. Raises HostFault when
        something lives in one: then the node's list must stay for whoever sweeps."""
        own = [path for path in _listed(self._list) if not path.name.startswith(_ASIDE)]
        left = [path for path in own if not _remove_tree(path)]
        self._parents.clear()
        if self._aside is not None:
            self._step_back(self._aside)
        if left:
            raise HostFault(f"the cgroup {left[0]} cannot be removed", "a process of it hangs in the kernel")


# Microseconds of the clock in which a quota may be used. The least quota is one millisecond of them: api.LEAST_CPUS.
_PERIOD = 100_000


# (file, value, whether the limit stands without it). Swap is off: what is over the limit is killed, not paged.
_Settings = dict[str, list[tuple[str, str, bool]]]


def _v2_settings(limits: Limits) -> _Settings:
    settings: _Settings = {
        "memory": [
            ("memory.max", "max" if limits.memory is None else str(limits.memory), False),
            ("memory.swap.max", "0", True),
            ("memory.oom.group", "0", True),
        ],
        "pids": [("pids.max", str(limits.pids), False)],
    }
    settings["cpu"] = [("cpu.weight", str(limits.cpu_weight), False)]
    if limits.cpus is not None:
        settings["cpu"] += [("cpu.max", f"{int(limits.cpus * _PERIOD)} {_PERIOD}", False)]
    return settings


def _v1_settings(limits: Limits) -> _Settings:
    memory = "-1" if limits.memory is None else str(limits.memory)
    settings: _Settings = {
        "memory": [
            ("memory.memsw.limit_in_bytes", "-1", True),  # never below the other one: out of the way of a larger one
            ("memory.limit_in_bytes", memory, False),
            ("memory.memsw.limit_in_bytes", memory, True),
            ("memory.kmem.tcp.limit_in_bytes", memory, True),
            ("memory.swappiness", "0", True),
        ],
        "pids": [("pids.max", str(limits.pids), False)],
    }
    # v1 counts shares of 1,024 where v2 counts weights of 100.
    settings["cpu"] = [("cpu.shares", str(max(2, limits.cpu_weight * 1024 // 100)), False)]
    if limits.cpus is not None:
        quota = str(int(limits.cpus * _PERIOD))
        settings["cpu"] += [("cpu.cfs_period_us", str(_PERIOD), False), ("cpu.cfs_quota_us", quota, False)]
    return settings


def sweep(directory: Path, kept: Collection[str] | None = None) -> None:
    """Remove the cgroups listed in a dead node's directory, and what may still live in them: its boxes end when they
    see that it is gone, which may be a moment from now. With `kept`, of a directory that is in use again: those of
    boxes other than these. Blocks; raises HostFault when something will not end."""
    until = time.monotonic() + SWEEP_SECONDS
    for path in _listed(directory / _LIST):
        if path.name.startswith(_ASIDE):  # a node's own, and whoever that started: not boxes
            _remove_tree(path)
        elif kept is None:
            _clear(path, until)
        elif path.is_dir():
            for box in path.iterdir():
                if box.is_dir() and str(box) not in kept:
                    _clear(box, until)
    if kept is None:
        (directory / _LIST).unlink(missing_ok=True)


def _listed(listing: Path) -> list[Path]:
    """The cgroups that a node's file names."""
    return [Path(line) for line in dict.fromkeys(listing.read_text().splitlines())] if listing.exists() else []


def _clear(path: Path, until: float) -> None:
    """End what lives in a cgroup, and remove it."""
    while not _remove_tree(path):
        if time.monotonic() > until:
            raise HostFault(
                f"the cgroup {path} of a dead node cannot be removed", "a process of it hangs in the kernel"
            )
        if not _kill_members(path, until):
            _await_empty(path, until)


def _await_empty(path: Path, until: float) -> None:
    """A process that exits is not listed any more a moment before its cgroup can be removed. v2 says when; v1 does not,
    so there it is looked at again a little later."""
    try:
        _await_event(path, b"populated 0", until)
    except OSError:
        time.sleep(0.01)


def _await_event(path: Path | str, wanted: bytes, until: float) -> bool:
    """Wait until a cgroup's events say so. False: `until` came first. Raises OSError where there are no events."""
    events = os.open(f"{path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        change = select.poll()
        change.register(events, select.POLLPRI)
        while wanted not in os.pread(events, 4096, 0):
            left = until - time.monotonic()
            if left <= 0:
                return False
            change.poll(left * 1000)
        return True
    finally:
        os.close(events)


def _kill_members(path: Path, until: float) -> bool:
    """SIGKILL the processes below `path` and wait until they are gone. False: there were none to kill."""
    found = {int(pid) for procs in path.rglob("cgroup.procs") for pid in procs.read_text().split()}
    watched = select.poll()
    watches = []
    for pid in found:
        with suppress(ProcessLookupError):
            try:
                watch = os.pidfd_open(pid)
            except OSError as error:
                if error.errno != errno.EINVAL:  # between its end and that of its number
                    raise
                continue
            watches.append(watch)
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            watched.register(watch, select.POLLIN)
    left = len(watches)
    while left and time.monotonic() < until:
        for watch, _ in watched.poll(max(0, until - time.monotonic()) * 1000):
            watched.unregister(watch)
            left -= 1
    for watch in watches:
        os.close(watch)
    return bool(found)
