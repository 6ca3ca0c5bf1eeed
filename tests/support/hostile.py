"""An arena for attacks: real boxes of a real node, a look at the host before and after, and ways to take one
protection away, so that a control can show the same program succeeding.

Every program runs in a box with limits on time, memory and processes, so that a hole it finds stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandlot.api import Limits, RunResult, SandboxSpec
from sandlot.drivers.images import Image, interpreter_prefix
from sandlot.drivers.native.box import NativeDriver
from sandlot.drivers.native.plan import Do, Host, Plan, make_plan
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox

PYTHON = f"{interpreter_prefix()}/bin/python3"
ROOT = os.geteuid() == 0
Removal = Callable[[Plan], Plan]

# An ordinary user's node refuses a limit on memory that is asked for by name.
MEMORY = {"memory": "256M"} if ROOT else {}
LIMITS = Limits.model_validate({"pids": 100, "disk": "64M", "inodes": 5000} | MEMORY)


@dataclass
class Arena:
    """Makes boxes for attacks and runs programs in them."""

    node: Node
    driver: NativeDriver
    kept: list[Sandbox] = field(default_factory=list)

    async def box(self, without: Removal | None = None, **spec: Any) -> Sandbox:
        """A box; `without` takes protections away from its plan."""

        def planner(wanted: SandboxSpec, image: Image, host: Host) -> Plan:
            plan = make_plan(wanted, image, host)
            return without(plan) if without else plan

        self.driver.planner = planner
        info = await self.node.create(SandboxSpec(**({"limits": LIMITS, "lifetime": 120.0} | spec)))
        self.driver.planner = make_plan
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


def no_filter(plan: Plan) -> Plan:
    """Without the system call filter."""
    return replace(plan, seccomp=b"")


def nested_namespaces(plan: Plan) -> Plan:
    """Without the filter and the limit of zero nested user namespaces."""
    steps = tuple(step for step in plan.steps if not step.target.endswith("max_user_namespaces"))
    return replace(plan, steps=steps, seccomp=b"")


def all_capabilities(plan: Plan) -> Plan:
    """Without the filter and with every capability in the box's user namespace."""
    return replace(plan, caps=(1 << 41) - 1, seccomp=b"")


def open_proc(plan: Plan) -> Plan:
    """With a /proc in which nothing is hidden or read-only."""
    steps = tuple(s for s in plan.steps if not (s.kind is Do.BIND and s.target.startswith("/proc/")))
    return replace(plan, steps=steps)


def host_state(driver: NativeDriver) -> dict[str, Any]:
    """What an attack must leave as it was: this process's mounts, children and descriptors, the node's cgroups."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "children": sorted(children),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cgroups": [path for parent in driver._cgroups._parents.values() for path in parent.glob("sb-*")],
    }
