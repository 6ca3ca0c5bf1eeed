"""How many boxes one host holds: creates N, runs a command in each while all live, ends them, looks for what is left.

Method: native driver, image `host`, in process; 8 creates at a time. Memory is the fall of MemAvailable, kernel memory
included. `mb_per_box` is of boxes without a memory limit (all N); `mb_per_box_limited` of a tenth as many with the
default limit, which costs a memory cgroup each. Caveat: a cgroup v1 kernel pays for each memory cgroup on each mounted
file system, so limited boxes grow dearer the more there are.

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

from sandlot.api import Limits, NodeAPI, Run, SandboxSpec
from sandlot.sandbox import open_node

AT_ONCE = 8
ECHO = Run(argv=("sh", "-c", "echo $((6 * 7))"))
T = TypeVar("T")


def available_mb() -> float:
    """MemAvailable in MB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))


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


async def measure(boxes: int) -> dict[str, Any]:
    before = host()
    node = await open_node(None)
    answered = 0

    async def ask(box: str) -> None:
        nonlocal answered
        result = await node.run(box, ECHO)
        answered += result.stdout == "42\n"

    try:
        limited, _, mb_limited = await fill(node, max(1, boxes // 10), Limits())
        await empty(node, limited)
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
