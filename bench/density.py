"""How many boxes one host holds: creates N, runs a command in each while all live, ends them, looks for what is left.

Method: native driver, image `host`, in process; 8 creates at a time. Memory is the fall of MemAvailable, kernel memory
included. `mb_per_box` is of boxes without a memory limit (all N); `mb_per_box_limited` of a tenth as many with the
default limit, made while another tenth live, which costs a memory cgroup each. While those live: `mb_per_memory_cgroup`
is of memory cgroups with nothing in them, the floor; `mb_per_runc` of runc's containers with a limit and a `sleep`.
Caveat: a kernel keeps 16 bytes in each memory cgroup for each file system ever mounted at once (a box has six),
so limited boxes grow dearer with the most boxes that have lived at once since the host started: after ten thousand, an
empty cgroup alone costs 0.9 MB.

    python bench/density.py --boxes 10000 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from box import Runc, available_mb

from sandlot.api import Limits, NodeAPI, Run, SandboxSpec
from sandlot.drivers.native.cgroup import mounts
from sandlot.sandbox import open_node

AT_ONCE = 8
CONTAINERS = 200  # of runc
ECHO = Run(argv=("sh", "-c", "echo $((6 * 7))"))
T = TypeVar("T")


def host() -> dict[str, int]:
    """What boxes leave behind if they leave anything: counts before and after must be equal."""
    return {
        "processes": sum(1 for path in Path("/proc").iterdir() if path.name.isdigit() and _is_helper(path)),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "cgroups": sum(1 for _ in Path("/sys/fs/cgroup").glob("**/sandlot-*")),
        "directories": sum(1 for root in ("/var/lib/sandlot", "/tmp") for _ in Path(root).glob("node-*")),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
    }


def _is_helper(process: Path) -> bool:
    try:
        return (process / "comm").read_text() == "sandlot-init\n"
    except OSError:
        return False


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do it for every item, AT_ONCE at a time."""
    todo = iter(items)

    async def worker() -> None:
        for item in todo:
            await work(item)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def fill(node: NodeAPI, boxes: int, limits: Limits) -> tuple[list[str], float, float]:
    """Create boxes: their ids, seconds, MB each."""
    ids: list[str] = []

    async def create(_: int) -> None:
        ids.append((await node.create(SandboxSpec(limits=limits))).id)

    before, started = available_mb(), time.perf_counter()
    await each(range(boxes), create)
    return ids, time.perf_counter() - started, (before - available_mb()) / boxes


async def empty(node: NodeAPI, ids: list[str]) -> float:
    """End them: seconds."""
    started = time.perf_counter()

    async def destroy(box: str) -> None:
        await node.destroy(box)

    await each(ids, destroy)
    return time.perf_counter() - started


def runc_mb(count: int) -> float | None:
    """MB of a container of runc's that sleeps under a memory limit; None where runc cannot make one."""
    runc = Runc(memory=1 << 30)
    try:
        if runc.missing():
            return None
        before = available_mb()
        with runc.living(count):
            return (before - available_mb()) / count
    finally:
        runc.close()


def floor_mb(count: int) -> float | None:
    """MB of a memory cgroup with nothing in it; None where none can be made."""
    v2, v1 = mounts()
    root = Path(v1.get("memory") or v2 or "/nonexistent")
    before, made = available_mb(), [root / f"sandlot-floor-{n}" for n in range(count)]
    try:
        for path in made:
            path.mkdir()
        holds_memory = any(made[0].glob("memory.*"))
        return (before - available_mb()) / count if holds_memory else None
    except OSError:
        return None
    finally:
        for path in made:
            if path.exists():
                path.rmdir()


async def measure(boxes: int) -> dict[str, Any]:
    before = host()
    node = await open_node(None)
    answered = 0

    async def ask(box: str) -> None:
        nonlocal answered
        result = await node.run(box, ECHO)
        answered += result.stdout == "42\n"

    try:
        # The first use up what the kernel has kept of cgroups that have gone; those after them cost what they cost.
        first, _, _ = await fill(node, max(1, boxes // 10), Limits())
        limited, _, mb_limited = await fill(node, len(first), Limits())
        floor, peer = floor_mb(len(limited)), runc_mb(CONTAINERS)
        await empty(node, first + limited)
        ids, create_s, mb = await fill(node, boxes, Limits(memory=None))
        await each(ids, ask)
        destroy_s = await empty(node, ids)
    finally:
        await node.close()
    after = host()
    return {
        "boxes": boxes,
        "create_s": round(create_s, 1),
        "mb_per_box": round(mb, 2),
        "mb_per_box_limited": round(mb_limited, 2),
        "mb_per_memory_cgroup": None if floor is None else round(floor, 2),
        "mb_per_runc": None if peer is None else round(peer, 2),
        "answered": answered,
        "destroy_s": round(destroy_s, 1),
        "left_behind": sum(max(0, after[name] - before[name]) for name in before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=1000, help="live boxes (default 1000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = asyncio.run(measure(args.boxes))
    print(json.dumps(result) if args.json else "\n".join(f"{name:20} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
