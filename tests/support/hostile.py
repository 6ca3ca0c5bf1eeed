"""An arena for attacks: real boxes of a real node, a look at the host before and after, and ways to take one
protection away, so that a control can show the same program succeeding.

Every program runs in a box with limits on time, memory and processes, so that a hole it finds stays small.

Each attack is a file that names the promise it tries, one of those of `GET /v1/capabilities`, as PROMISE. Where this
host does not keep that promise, its attacks are not run (`needs` in conftest.py): instead it is shown that a sandbox
says so in `Info.losses`, and that who asks for it by name is refused.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sandlot.api import Capability, Limits, RunResult, SandboxSpec, Volume
from sandlot.drivers.images import Image, interpreter_prefix
from sandlot.drivers.native import seccomp
from sandlot.drivers.native.driver import NativeDriver
from sandlot.drivers.native.plan import NOSUID, Do, Host, Plan, make_plan
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox

PYTHON = f"{interpreter_prefix()}/bin/python3"
Removal = Callable[[Plan], Plan]

# "none" hides the cgroups of this host, as one that gives no rights to them.
CGROUPS = os.environ.get("SANDLOT_HOSTILE_CGROUPS", "")


@dataclass
class Arena:
    """Makes boxes for attacks and runs programs in them."""

    node: Node
    driver: NativeDriver
    promises: dict[str, Capability]  # what this host keeps, by name
    kept: list[Sandbox] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)  # of the boxes that it made, as far as this user may know them

    def _look_at_namespaces(self) -> None:
        ours = set(namespaces_of("self"))
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            self.namespaces |= set(namespaces_of(child)) - ours

    def keeps(self, promise: str) -> bool:
        return self.promises[promise].state == "kept"

    @cached_property
    def limits(self) -> Limits:
        """Small ones, of those that this host can keep: what is named and cannot be kept is refused."""
        memory = {"memory": "256M"} if self.keeps("memory limit") else {}
        pids = {"pids": 100} if self.keeps("pids limit") else {}
        return Limits.model_validate({"disk": "64M", "inodes": 5000} | pids | memory)

    @property
    def users(self) -> bool:
        """Whether there is another user than root inside."""
        return self.driver.facts.ids != "one"

    async def box(self, without: Removal | None = None, **spec: Any) -> Sandbox:
        """A box; `without` takes protections away from its plan."""

        def planner(wanted: SandboxSpec, image: Image, host: Host) -> Plan:
            plan = make_plan(wanted, image, host)
            return without(plan) if without else plan

        self.driver.planner = planner
        info = await self.node.create(SandboxSpec(**({"limits": self.limits, "lifetime": 120.0} | spec)))
        self.driver.planner = make_plan
        self._look_at_namespaces()
        sandbox = Sandbox(self.node, info)
        self.kept.append(sandbox)
        return sandbox

    async def python(self, program: str, *arguments: str, box: Sandbox | None = None, **spec: Any) -> RunResult:
        """Run a Python program in a fresh box, or in `box`."""
        user = spec.pop("user", 0)
        box = box or await self.box(**spec)
        return await box.run([PYTHON, "-I", "-S", "-c", program, *arguments], timeout=30, user=user)

    async def sh(self, text: str, box: Sandbox | None = None, **spec: Any) -> RunResult:
        """Run shell text in a fresh box, or in `box`."""
        user, timeout = spec.pop("user", 0), spec.pop("timeout", 30)
        box = box or await self.box(**spec)
        return await box.run(text, timeout=timeout, user=user)

    @asynccontextmanager
    async def holding(self, program: str, *arguments: str, box: Sandbox) -> AsyncIterator[str]:
        """Run a program that takes something and calls `hold(…)`: what it says, while it goes on holding it."""
        assert (await box.run("mkfifo /root/held")).ok
        saying = asyncio.create_task(box.run("head -n 1 /root/held", timeout=60))
        running = asyncio.create_task(box.run([PYTHON, "-I", "-S", "-c", HOLD + program, *arguments], timeout=60))
        try:
            await asyncio.wait((saying, running), return_when=asyncio.FIRST_COMPLETED)
            assert saying.done(), running.result()
            yield saying.result().stdout.rstrip("\n")
        finally:
            saying.cancel()
            running.cancel()  # kills it with all its descendants
            await asyncio.gather(saying, running, return_exceptions=True)


# Opened before anything is taken: afterwards there may be no room for a descriptor. Waits for its reader.
HOLD = """
import os, signal
_held = os.open("/root/held", os.O_WRONLY)
def hold(*words):
    os.write(_held, (" ".join(map(str, words)) + "\\n").encode())
    signal.pause()
"""


async def into_timeout(box: Sandbox, command: str | list[str], enough: int = 1) -> RunResult:
    """Run a command that has written `enough` bytes once it is what it wants to be, and never ends, into its timeout: a
    longer one where the machine was too slow for it to come that far."""
    for seconds in (0.3, 3, 30):
        result = await box.run(command, timeout=seconds)
        if result.out.total >= enough or not result.timed_out:
            break
    assert result.out.total >= enough, result
    return result


def seen_from_outside(text: str) -> list[int]:
    """The processes of the host with `text` in their command line."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path("/proc", name, "cmdline").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if text.encode() in words:
            found.append(int(name))
    return found


async def alive_inside(box: Sandbox, text: str) -> int:
    """How many processes of the box have `text` in their command line."""
    return int((await box.run(f"{_named(text)} | wc -l")).stdout)


async def gone_inside(box: Sandbox, text: str) -> bool:
    """Whether no process of the box has `text` in its command line: those that were killed get a moment to die."""
    return (await box.run(f"while {_named(text)} > /dev/null; do sleep 0.01; done", timeout=10)).ok


def _named(text: str) -> str:
    assert re.fullmatch(r"\w+", text), "a plain word"
    return f"grep -als '[{text[0]}]{text[1:]}' /proc/[0-9]*/cmdline"  # in brackets it does not find itself


def out(path: Path) -> tuple[Volume, ...]:
    """A directory of the host as a volume at /out, in which any id may write."""
    path.chmod(0o777)
    return (Volume(source=str(path), target="/out", read_only=False),)


def as_a_stranger(*command: str | Path, uid: int = 65_534) -> str:
    """What another user of the host gets from a program that was left there."""
    for parent in list(Path(command[0]).parents)[:4]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o111)
    return subprocess.run(
        command, user=uid, group=uid, extra_groups=[], capture_output=True, text=True, check=True
    ).stdout


def no_filter(plan: Plan) -> Plan:
    """Without the system call filter."""
    return replace(plan, seccomp=b"")


def leases(plan: Plan) -> Plan:
    """With a filter that lets leases on files be taken."""
    return replace(plan, seccomp=seccomp.program(allow=frozenset({"fcntl"})))


def nested_namespaces(plan: Plan) -> Plan:
    """Without the filter and the limit of zero nested user namespaces."""
    steps = tuple(step for step in plan.steps if not step.target.endswith("max_user_namespaces"))
    return replace(plan, steps=steps, seccomp=b"")


def all_capabilities(plan: Plan) -> Plan:
    """Without the filter and with every capability in the box's user namespace."""
    return replace(plan, caps=(1 << 41) - 1, seccomp=b"")


def no_priority_limits(plan: Plan) -> Plan:
    """With the node's own limits on priorities."""
    kept = (limit for limit in plan.rlimits if limit[0] not in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE))
    return replace(plan, rlimits=tuple(kept))


def open_proc(plan: Plan) -> Plan:
    """With a /proc in which nothing is hidden or read-only."""
    steps = tuple(s for s in plan.steps if not (s.kind is Do.BIND and s.target.startswith("/proc/")))
    return replace(plan, steps=steps)


def no_disk_limit(plan: Plan) -> Plan:
    """With a tmpfs of the size that the kernel takes for no limit."""
    steps = (replace(s, data=re.sub("size=[0-9]+", "size=0", s.data)) if s.text == "tmpfs" else s for s in plan.steps)
    return replace(plan, steps=tuple(steps))


def many_terminals(plan: Plan) -> Plan:
    """With a devpts that gives as many terminals as the host has."""
    steps = tuple(replace(s, data=re.sub(",max=[0-9]+", "", s.data)) if s.text == "devpts" else s for s in plan.steps)
    return replace(plan, steps=steps)


def unlimited_inotify(plan: Plan) -> Plan:
    """Without the box's own limits on inotify; the host's remain."""
    return replace(plan, steps=tuple(step for step in plan.steps if "max_inotify" not in step.target))


def no_deadline(plan: Plan) -> Plan:
    """Without a lifetime that the helper itself keeps; the node's timer remains."""
    return replace(plan, lifetime_ms=0)


def volumes_with(flags: int) -> Removal:
    """With volumes whose mounts forbid no more than `flags`."""

    def change(plan: Plan) -> Plan:
        # Slot 0 is the image, and its own trees are read-only.
        steps = (replace(s, flags=flags) if s.kind is Do.ATTACH and s.flags & NOSUID else s for s in plan.steps)
        return replace(plan, steps=tuple(steps))

    return change


def volume_at(target: str) -> Removal:
    """With the volume of /out at a path that the API would refuse."""

    def change(plan: Plan) -> Plan:
        return replace(plan, steps=tuple(replace(s, target=target) if s.target == "/out" else s for s in plan.steps))

    return change


def namespaces_of(process: str) -> list[str]:
    """The namespaces that a process is in, or holds a descriptor of: "net:[…]". None where this user may not look."""
    found = []
    for directory in (f"/proc/{process}/ns", f"/proc/{process}/fd"):
        with suppress(OSError):
            for name in os.listdir(directory):
                with suppress(OSError):
                    found.append(os.readlink(f"{directory}/{name}"))
    return [
        name for name in found if re.fullmatch(r"[a-z_]+:\[\d+\]", name) and not name.startswith(("pipe", "socket"))
    ]


def host_state(driver: NativeDriver, namespaces: set[str]) -> dict[str, Any]:
    """What an attack must leave as it was: the host's mounts, this process's children and descriptors, the node's
    cgroups and directory, and that nothing of ours is in one of these namespaces, or holds it: they were boxes'."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        # Others mount things too while this runs, tests of this suite among them: ours would be named after us, or lie
        # where boxes are put together.
        "mounts": [
            line
            for line in mounts
            if ("sandlot" in line and not line.startswith("sandlot-test "))
            or line.split()[1] in ("/tmp", "/run", "/mnt")
        ],
        "children": sorted(children),
        "namespaces": sorted(
            f"{name} of {process}"
            for process in ("self", *children)  # in those of others there may be others' by now: numbers are used again
            for name in namespaces_of(process)
            if name in namespaces
        ),
        "directory": sorted(str(path) for path in driver._directory.glob("*")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cgroups": [path for parent in driver.cgroups._parents.values() for path in parent.glob("sb-*")],
    }
