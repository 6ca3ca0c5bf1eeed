"""How long a box takes: create to the first command's result, one command, destroy; a hundred at once; 50 MB of output;
and the memory of one.

Method: one box at a time, in process (no HTTP), native driver, image `host`, default limits; medians over --rounds
after a warm-up. Every peer that is installed does the same in the same run, in turns with ours, so that a slow moment
hits all. Caveats: a peer's figure holds the start of its command line program, which is how its users pay for
it; `unshare` and `bwrap` have no command in an existing box and nothing to destroy; memory is the fall of MemAvailable
over many boxes, kernel memory included.

    python bench/box.py            a table
    python bench/box.py --json     one object
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandlot.api import NodeAPI, Run, SandboxSpec, Warm
from sandlot.node.node import local_node
from sandlot.sandbox import open_node

TRUE = Run(argv=("true",))
Figures = dict[str, list[float]]
BURST = 100
NULL = subprocess.DEVNULL


def summary(values: list[float]) -> dict[str, float | int]:
    """p50 and p99 in milliseconds and the count."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "n": len(ordered),
    }


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def command(*argv: str, cwd: str | None = None) -> None:
    null = subprocess.DEVNULL
    subprocess.run(argv, check=True, stdin=null, stdout=null, stderr=null, cwd=cwd)


def at_once(commands: list[tuple[str, ...]]) -> float:
    """Start them all, wait for them all: seconds. Raises if one fails."""
    started = time.perf_counter()
    running = [subprocess.Popen(c, stdin=NULL, stdout=NULL, stderr=NULL) for c in commands]
    failed = [process.args for process in running if process.wait() != 0]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(commands)} failed, the first: {failed[0]}")
    return time.perf_counter() - started


def drained(*argv: str) -> float:
    """Read all that a command writes: seconds."""
    started = time.perf_counter()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - started


FLOOD = ("head", "-c", str(50 << 20), "/dev/zero")

# Each peer: why it cannot run here, or None; a round that adds to the figures; a hundred at once and 50 MB in seconds.


class Unshare:
    """util-linux: a bare command in new namespaces, no root file system of its own. A floor."""

    def missing(self) -> str | None:
        return None if shutil.which("unshare") else "not installed"

    def round(self, figures: Figures) -> None:
        figures["create_cold_ms"].append(timed(lambda: command(*self.prefix, "true")))

    prefix = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--net",
        "--ipc",
        "--uts",
        "--cgroup",
        "--fork",
    )

    def burst(self, count: int) -> float:
        return at_once([(*self.prefix, "true")] * count)

    def output(self) -> float:
        return drained(*self.prefix, *FLOOD)

    def close(self) -> None: ...


class Bubblewrap:
    """bwrap with the same file system as our `host` image."""

    def missing(self) -> str | None:
        return None if shutil.which("bwrap") else "not installed"

    def round(self, figures: Figures) -> None:
        figures["create_cold_ms"].append(timed(lambda: command(*self.prefix, "true")))

    prefix = (
        *("bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
        *("--tmpfs", "/tmp"),
    )

    def burst(self, count: int) -> float:
        return at_once([(*self.prefix, "true")] * count)

    def output(self) -> float:
        return drained(*self.prefix, *FLOOD)

    def close(self) -> None: ...


class Runc:
    """runc: `run --detach` of a sleeping container and `exec true`; `exec true` again; `delete --force`."""

    def __init__(self, memory: int | None = None) -> None:
        self._bundle = tempfile.mkdtemp(prefix="sandlot-bench-")
        self._count = 0
        self._memory = memory

    def missing(self) -> str | None:
        if not shutil.which("runc"):
            return "not installed"
        if os.geteuid() != 0:
            return "needs root here"
        root = Path(self._bundle, "rootfs")
        for name in ("usr", "proc", "dev", "sys", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "lib", "lib64"):
            if not (root / name).is_symlink():
                (root / name).symlink_to(f"usr/{name}")
        if not Path(self._bundle, "config.json").exists():
            command("runc", "spec", cwd=self._bundle)
            spec = json.loads(Path(self._bundle, "config.json").read_text())
            spec["process"] |= {"terminal": False, "args": ["sleep", "1000"]}
            spec["mounts"].append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]})
            if self._memory:
                spec["linux"].setdefault("resources", {})["memory"] = {"limit": self._memory}
            Path(self._bundle, "config.json").write_text(json.dumps(spec))
        try:
            self.round({name: [] for name in ("create_cold_ms", "run_ms", "destroy_ms")})
        except subprocess.CalledProcessError as error:
            return f"fails here: {' '.join(error.cmd)}"
        return None

    def round(self, figures: Figures) -> None:
        self._count += 1
        name = f"sandlot-bench-{os.getpid()}-{self._count}"

        def create() -> None:
            command("runc", "run", "--detach", "--bundle", self._bundle, name)
            command("runc", "exec", name, "true")

        try:
            figures["create_cold_ms"].append(timed(create))
            figures["run_ms"].append(timed(lambda: command("runc", "exec", name, "true")))
        finally:
            figures["destroy_ms"].append(timed(lambda: command("runc", "delete", "--force", name)))

    def burst(self, count: int) -> float:
        with self.living(count) as seconds:
            return seconds

    @contextmanager
    def living(self, count: int) -> Iterator[float]:
        """That many containers, and the seconds it took to start them at once."""
        names = [f"sandlot-bench-{os.getpid()}-burst-{n}" for n in range(count)]
        try:
            yield at_once([("runc", "run", "--detach", "--bundle", self._bundle, name) for name in names])
        finally:
            for name in names:
                subprocess.run(["runc", "delete", "--force", name], capture_output=True, check=False)

    def output(self) -> float:
        name = f"sandlot-bench-{os.getpid()}-output"
        command("runc", "run", "--detach", "--bundle", self._bundle, name)
        try:
            return drained("runc", "exec", name, *FLOOD)
        finally:
            command("runc", "delete", "--force", name)

    def close(self) -> None:
        shutil.rmtree(self._bundle, ignore_errors=True)


class Docker:
    """docker: `run -d` of a sleeping container and `exec true`; `exec true` again; `rm -f`. Needs an engine and an
    image named in SANDLOT_BENCH_DOCKER_IMAGE (default `sandlot-bench`, made with `docker import`)."""

    image = os.environ.get("SANDLOT_BENCH_DOCKER_IMAGE", "sandlot-bench")

    def missing(self) -> str | None:
        if not shutil.which("docker"):
            return "not installed"
        if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
            return "no engine is running"
        if subprocess.run(["docker", "image", "inspect", self.image], capture_output=True, check=False).returncode != 0:
            return f"there is no image {self.image}"
        return None

    def round(self, figures: Figures) -> None:
        name = f"sandlot-bench-{os.getpid()}"

        def create() -> None:
            command(*self._run(name))
            command("docker", "exec", name, "true")

        try:
            figures["create_cold_ms"].append(timed(create))
            figures["run_ms"].append(timed(lambda: command("docker", "exec", name, "true")))
        finally:
            figures["destroy_ms"].append(timed(lambda: command("docker", "rm", "--force", name)))

    def _run(self, name: str) -> tuple[str, ...]:
        return ("docker", "run", "--detach", "--network=none", "--name", name, self.image, "sleep", "1000")

    def burst(self, count: int) -> float:
        names = [f"sandlot-bench-{os.getpid()}-burst-{n}" for n in range(count)]
        try:
            return at_once([self._run(name) for name in names])
        finally:
            subprocess.run(["docker", "rm", "--force", *names], capture_output=True, check=False)

    def output(self) -> float:
        name = f"sandlot-bench-{os.getpid()}-output"
        command(*self._run(name))
        try:
            return drained("docker", "exec", name, *FLOOD)
        finally:
            command("docker", "rm", "--force", name)

    def close(self) -> None: ...


PEERS = {"unshare": Unshare, "bwrap": Bubblewrap, "runc": Runc, "docker": Docker}


async def measure(rounds: int, peer_rounds: int, boxes: int) -> dict[str, Any]:
    node = await open_node(None)
    peers = {name: make() for name, make in PEERS.items()}
    missing = {name: reason for name, peer in peers.items() if (reason := peer.missing())}
    running = {name: peer for name, peer in peers.items() if name not in missing}
    ours: Figures = {"create_cold_ms": [], "run_ms": [], "destroy_ms": []}
    theirs: dict[str, Figures] = {name: {key: [] for key in ours} for name in running}
    try:
        for number in range(rounds + 5):
            started = time.perf_counter()
            info = await node.create(SandboxSpec())
            assert (await node.run(info.id, TRUE)).ok
            created = time.perf_counter()
            assert (await node.run(info.id, TRUE)).ok
            ran = time.perf_counter()
            await node.destroy(info.id)
            ended = time.perf_counter()
            if number >= 5:  # the first ones warm caches
                ours["create_cold_ms"].append((created - started) * 1000)
                ours["run_ms"].append((ran - created) * 1000)
                ours["destroy_ms"].append((ended - ran) * 1000)
            if number % max(1, rounds // peer_rounds) == 0:
                for name, peer in running.items():
                    peer.round(theirs[name])
        state = await state_of(node, rounds)
        burst = await burst_of(node, BURST)
        output = await output_of(node)
        once = {
            name: {"burst_100_s": peer.burst(BURST), "output_50mb_s": peer.output()} for name, peer in running.items()
        }
        memory = await memory_per_box(node, boxes)
    finally:
        await node.close()
        for peer in peers.values():
            peer.close()
    return {
        **{name: summary(values) for name, values in (ours | state).items()},
        "burst_100_s": round(burst, 2),
        "output_50mb_s": round(output, 3),
        "mb_per_box": memory,
        "peers": {
            **{
                name: {key: summary(v) for key, v in figures.items() if v}
                | {key: round(value, 3) for key, value in once[name].items()}
                for name, figures in theirs.items()
            },
            **{name: {"missing": reason} for name, reason in missing.items()},
        },
    }


WRITE_1MB = Run(argv=("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do head -c 100000 /dev/zero > /root/f$i; done"))


async def state_of(node: NodeAPI, rounds: int) -> Figures:
    """From a warm pool; of a reset; of a snapshot and of a fork of 1 MB in ten files: each to the result of its first
    command, but the snapshot, which is over when it is over."""
    figures: Figures = {name: [] for name in ("create_warm_ms", "reset_ms", "snapshot_1mb_ms", "fork_1mb_ms")}
    async with local_node(warm=[Warm(size=4)]) as warm:
        for _ in range(rounds):
            while (await warm.pools())[0].ready < 4:  # noqa: ASYNC110  (a pool tells nobody)
                await asyncio.sleep(0.001)
            started = time.perf_counter()
            info = await warm.create(SandboxSpec())
            assert (await warm.run(info.id, TRUE)).ok
            figures["create_warm_ms"].append((time.perf_counter() - started) * 1000)
            await warm.destroy(info.id)
        assert (await warm.pools())[0].hits == rounds
    box = (await node.create(SandboxSpec())).id
    for number in range(rounds):
        assert (await node.run(box, WRITE_1MB)).ok
        started = time.perf_counter()
        await node.snapshot(box, f"bench-{os.getpid()}-{number}")
        copied = time.perf_counter()
        (fork,) = await node.fork(box)
        assert (await node.run(fork.id, TRUE)).ok
        forked = time.perf_counter()
        await node.destroy(fork.id)
        await node.delete_image(f"bench-{os.getpid()}-{number}")
        again = time.perf_counter()
        await node.reset(box)
        assert (await node.run(box, TRUE)).ok
        figures["snapshot_1mb_ms"].append((copied - started) * 1000)
        figures["fork_1mb_ms"].append((forked - copied) * 1000)
        figures["reset_ms"].append((time.perf_counter() - again) * 1000)
    await node.destroy(box)
    return figures


async def burst_of(node: NodeAPI, count: int) -> float:
    """`count` creates at once, each to the result of its first command: seconds."""

    async def one() -> str:
        info = await node.create(SandboxSpec())
        assert (await node.run(info.id, TRUE)).ok
        return info.id

    started = time.perf_counter()
    ids = await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - started
    await asyncio.gather(*(node.destroy(box) for box in ids))
    return seconds


async def output_of(node: NodeAPI) -> float:
    """A command that writes 50 MB: seconds to its result."""
    info = await node.create(SandboxSpec())
    result = await node.run(info.id, Run(argv=FLOOD))
    assert result.out.total == 50 << 20
    await node.destroy(info.id)
    return result.seconds


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable")


async def memory_per_box(node: NodeAPI, boxes: int) -> float:
    """Fall of MemAvailable over `boxes` idle boxes, in MB each, user and kernel memory."""
    before = available_mb()
    infos = [await node.create(SandboxSpec()) for _ in range(boxes)]
    after = available_mb()
    await asyncio.gather(*(node.destroy(info.id) for info in infos))
    return round((before - after) / boxes, 2)


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':10} {'create_cold':>20} {'run':>20} {'destroy':>20}   (ms: p50 / p99)"]
    for name, row in {"sandlot": result, **result["peers"]}.items():
        if "missing" in row:
            lines.append(f"{name:10} {row['missing']}")
            continue
        cells = [row.get(key) for key in ("create_cold_ms", "run_ms", "destroy_ms")]
        lines.append(f"{name:10}" + "".join(f" {c['p50']:>9} / {c['p99']:>8}" if c else f" {'-':>20}" for c in cells))
    for key, words in (("burst_100_s", "100 at once"), ("output_50mb_s", "50 MB of output")):
        cells = {name: row[key] for name, row in {"sandlot": result, **result["peers"]}.items() if key in row}
        lines.append(f"{words}: " + ", ".join(f"{name} {value} s" for name, value in cells.items()))
    for key, words in (
        ("create_warm_ms", "create from a warm pool"),
        ("reset_ms", "reset"),
        ("snapshot_1mb_ms", "snapshot of 1 MB"),
        ("fork_1mb_ms", "fork with 1 MB"),
    ):
        lines.append(f"{words}: {result[key]['p50']} / {result[key]['p99']} ms")
    return "\n".join([*lines, f"memory: {result['mb_per_box']} MB a box"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=200, help="boxes of ours (default 200)")
    parser.add_argument("--peer-rounds", type=int, default=20, help="boxes of each peer (default 20)")
    parser.add_argument("--boxes", type=int, default=200, help="live boxes for the memory figure (default 200)")
    args = parser.parse_args()
    result = asyncio.run(measure(args.rounds, args.peer_rounds, args.boxes))
    print(json.dumps(result) if args.json else table(result), file=sys.stdout)


if __name__ == "__main__":
    main()
