"""What a sandbox costs over HTTP: create, one command, one text of a shell, 1 MB up and down, 50 MB of output; a
thousand creates at once, and five hundred sandboxes that run twenty commands each.

Method: `sandlot serve` in a process of its own on loopback, this process its client by the package's own HttpNode, one
call at a time over a connection that is kept; medians over --rounds after a warm-up. Floors in the same run, in turns:
`floor_ms` is the same client asking the same server for /healthz, so what HTTP itself costs here; `in_process_ms` is
the same command without a server. Caveat: client and server share the machine's processors.

    python bench/http.py            a table
    python bench/http.py --json     one object
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.pop(0)  # the folder of this file, in which it would be taken for Python's own `http`

from sandlot.client import HttpNode
from sandlot.sandbox import Sandbox, open_node

MB = os.urandom(1 << 20)
FLEET, EACH = 500, 20


@contextlib.contextmanager
def server(state: Path) -> Iterator[str]:
    """`sandlot serve` on a free port: its URL."""
    command = (
        sys.executable,
        "-c",
        "from sandlot.cli.main import main; main()",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(state),
    )
    with (state / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 20
        while not (found := re.search(r"http://[\d.:]+", (state / "serve.log").read_text())):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((state / "serve.log").read_text())
            time.sleep(0.05)
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def summary(seconds: list[float]) -> dict[str, float | int]:
    """p50 and p99 in milliseconds and the count."""
    ordered = sorted(each * 1000 for each in seconds)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(last, 2), "n": len(ordered)}


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def singles(node: HttpNode, rounds: int) -> dict[str, Any]:
    local = await open_node(state_dir=Path(tempfile.mkdtemp()))
    figures: dict[str, list[float]] = {}
    here = await Sandbox.create(node=local)
    box = await Sandbox.create(node=node)
    shell = await box.shell()

    async def created() -> None:
        async with contextlib.AsyncExitStack() as stack:
            began = time.perf_counter()
            fresh = await Sandbox.create(node=node)
            stack.push_async_callback(fresh.close)
            await fresh.run(["true"])
            figures.setdefault("create_ms", []).append(time.perf_counter() - began)

    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "run_ms": lambda: box.run(["true"]),
        "shell_ms": lambda: shell.run(":"),
        "upload_1mb_ms": lambda: box.write_file("/root/mb", MB),
        "download_1mb_ms": lambda: box.read_file("/root/mb"),
        "floor_ms": lambda: node._send("GET", "/healthz", "asking for health"),
        "in_process_ms": lambda: here.run(["true"]),
    }
    for number in range(rounds + 5):
        for name, call in steps.items():
            seconds = await timed(call)
            if number >= 5:
                figures.setdefault(name, []).append(seconds)
        await created()
    flood = await box.start(["head", "-c", str(50 << 20), "/dev/zero"], output_cap=64 << 20)
    began, total = time.perf_counter(), 0
    async for chunk in flood.output():
        total += len(chunk.data)
    stream = time.perf_counter() - began
    assert total == 50 << 20, total
    await box.close()
    await local.close()
    return {name: summary(each[-rounds:]) for name, each in figures.items()} | {"stream_50mb_s": round(stream, 3)}


async def creates(node: HttpNode, count: int) -> dict[str, Any]:
    """So many at once, each answering a command: how long each took, from the moment when all were asked for."""
    began = time.perf_counter()
    boxes: list[Sandbox] = []

    async def one() -> float:
        box = await Sandbox.create(node=node)
        boxes.append(box)
        await box.run(["true"])
        return time.perf_counter() - began

    outcomes = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    seconds = sorted(each for each in outcomes if isinstance(each, float))
    await asyncio.gather(*(box.close() for box in boxes))
    p99 = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]
    failed = count - len(seconds)
    return {"p50_s": round(statistics.median(seconds), 2), "p99_s": round(p99, 2), "failed": failed}


async def fleet(node: HttpNode, count: int, each: int) -> dict[str, Any]:
    boxes = await asyncio.gather(*(Sandbox.create(node=node) for _ in range(count)))
    seconds: list[float] = []
    failed = 0

    async def work(box: Sandbox) -> None:
        nonlocal failed
        for _ in range(each):
            began = time.perf_counter()
            result = await box.run(["true"], timeout=120)
            seconds.append(time.perf_counter() - began)
            failed += not result.ok

    began = time.perf_counter()
    await asyncio.gather(*(work(box) for box in boxes))
    took = time.perf_counter() - began
    await asyncio.gather(*(box.close() for box in boxes))
    found = summary(seconds)
    return {
        "commands_per_s": round(count * each / took),
        "p50_ms": found["p50"],
        "p99_ms": found["p99"],
        "failed": failed,
    }


async def measure(url: str, rounds: int, at_once: int, boxes: int) -> dict[str, Any]:
    node = HttpNode(url)
    try:
        found = await singles(node, rounds)
        found["creates_1000"] = await creates(node, at_once) | ({} if at_once == 1000 else {"of": at_once})
        found["fleet_500x20"] = await fleet(node, boxes, EACH) | ({} if boxes == FLEET else {"of": boxes})
    finally:
        await node.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=1000, help="creates at once")
    parser.add_argument("--boxes", type=int, default=FLEET, help="sandboxes that run commands at once")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as state, server(Path(state)) as url:
        found = asyncio.run(measure(url, args.rounds, args.at_once, args.boxes))
    if args.json:
        print(json.dumps(found))
        return 0
    for name, figure in found.items():
        words = ", ".join(f"{key} {value}" for key, value in figure.items()) if isinstance(figure, dict) else figure
        print(f"{name:18} {words}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
