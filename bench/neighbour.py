"""What a storm in one box costs the commands of another: latency of `true` in a quiet box, while a second one is busy.

Method: native driver, image `host`, in process; one box runs `true` again and again for a few seconds while another
runs nothing; four busy shells, with the default weight, with a quota of half a CPU, with a tenth of the weight; a loop
of writes and syncs in its own files, and in a volume on this host's disk that it may write. The storm runs for a
second before the first command is timed. Caveats: this process itself is no box and competes with the storm as any
program of the host does, so its own share of the delay is in the numbers; where this host keeps no cpu limit, the
cases that need one are left out; what a busy disk costs depends on what else waits for it, and nothing limits it
(`Info.losses` says so).

    python bench/neighbour.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from sandlot.aio import shielded
from sandlot.api import Limits, NodeAPI, Run, SandboxSpec, Volume
from sandlot.errors import Unsupported
from sandlot.sandbox import open_node

SECONDS = 4.0  # of timed commands in each of the six cases
WARM = 1.0  # seconds of the storm before them
TRUE = Run(argv=("true",))
CPU = "for _ in 1 2 3 4; do while :; do :; done & done; wait"
IO = "cd {place}; while :; do dd if=/dev/zero of=storm bs=1M count=32 conv=fsync 2> /dev/null; done"


def cases(shared: str) -> dict[str, tuple[str, SandboxSpec]]:
    """The storms by name: shell text, and the box in which it runs."""
    volume = Volume(source=shared, target="/shared", read_only=False)
    return {
        "nothing": ("sleep 1000", SandboxSpec()),
        "cpu": (CPU, SandboxSpec()),
        "cpu_quota_half": (CPU, SandboxSpec(limits=Limits(cpus=0.5))),
        "cpu_weight_10": (CPU, SandboxSpec(limits=Limits(cpu_weight=10))),
        "io_own_files": (IO.format(place="/root"), SandboxSpec()),
        "io_volume": (IO.format(place="/shared"), SandboxSpec(volumes=(volume,))),
    }


async def latencies(node: NodeAPI, box: str, seconds: float) -> list[float]:
    """Milliseconds of each command, one after another."""
    found = []
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        result = await node.run(box, TRUE)
        if not result.ok:
            raise SystemExit(f"`true` failed beside the storm: {result}")
        found.append((time.perf_counter() - started) * 1000)
    return found


def percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
        "n": len(ordered),
    }


async def beside(node: NodeAPI, neighbour: str, text: str, spec: SandboxSpec, seconds: float) -> dict[str, float]:
    """Latency in `neighbour` while the storm goes on in a box of its own."""
    stormy = await node.create(spec)
    storm = asyncio.create_task(node.run(stormy.id, Run(argv=("sh", "-c", text), timeout=None)))
    try:
        await asyncio.wait((storm,), timeout=WARM)
        times = await latencies(node, neighbour, seconds)
        if storm.done():
            raise SystemExit(f"the storm ended early: {storm.result().stderr}")
        return percentiles(times)
    finally:
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
        await shielded(_end(node, stormy.id))


async def _end(node: NodeAPI, box: str) -> None:
    await node.destroy(box)


async def measure(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    node = await open_node(None)
    # Beside the script: /tmp may be in memory, and then there would be no disk to be busy.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix="storm-") as shared:
        os.chmod(shared, 0o777)  # noqa: PTH101  (the box's root is somebody else outside)
        try:
            neighbour = (await node.create(SandboxSpec())).id
            await latencies(node, neighbour, 0.2)  # the first ones load what the others find
            for name, (text, spec) in cases(shared).items():
                try:
                    found[name] = await beside(node, neighbour, text, spec, seconds)
                except Unsupported:
                    found[name] = None
        finally:
            await node.close()
    return {"neighbour_ms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of commands in each case (default {SECONDS:g})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = asyncio.run(measure(args.seconds))
    if args.json:
        print(json.dumps(result))
        return
    for name, case in result["neighbour_ms"].items():
        words = (
            "not possible here" if case is None else f"p50 {case['p50']:8} ms   p99 {case['p99']:8} ms   n {case['n']}"
        )
        print(f"{name:16} {words}")


if __name__ == "__main__":
    main()
