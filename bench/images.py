"""An image from a registry to a directory that boxes stand on, beside `skopeo copy` and `umoci unpack`; and what a
thousand boxes of one image take of the disk.

Method: an image of 4 gzip layers (half of its bytes random, half text; files of 1 kB to 4 MB, most of them small) is
pushed to a registry on loopback. Then three times in turn: ours, `pull` into a new store (fetched, checked, inflated,
unpacked in a box, named); and theirs, `skopeo copy` into a layout and `umoci unpack` of it. The disk is synced before
each (ours syncs once more, so that a name outlives a power cut); nothing is deleted before the end, for ext4 is slow to
use an inode again that was freed a moment ago; the registry's files are in the page cache for both. Caveats: the
registry and both clients share the processors, and a real line is slower than loopback, where fetching hides behind
unpacking; theirs keeps the packed layers beside the unpacked ones, ours does not; ours unpacks while it fetches, theirs
one after the other.

    python bench/images.py --json              (2,000 MB, and 20 GB of disk meanwhile; --mb for less)

Needs `apt install docker-registry skopeo umoci busybox-static`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # the folder of this file, in which `http` would be taken for Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sandlot.aio import shielded
from sandlot.api import NodeAPI, Run, SandboxSpec
from sandlot.sandbox import open_node
from tests.support import images

LAYERS = 4
FILES_PER_MB = 25
RUNS = 3
WORDS = [word.encode() for word in ("the", "quick", "import", "return", "sandbox", "0x7f", "def", "self", "\n    ")]


def contents(size: int, seed: random.Random) -> bytes:
    """Text or random bytes."""
    if seed.random() < 0.5:
        return seed.randbytes(size)
    return b" ".join(seed.choices(WORDS, k=size // 5 + 1))[:size].ljust(size, b" ")


def sizes(total: int, count: int, seed: random.Random) -> list[int]:
    """So many file sizes that make so many bytes, most of them small."""
    found = [min(4 << 20, int(1024 * seed.paretovariate(0.7))) for _ in range(count)]
    scale = total / sum(found)
    return [max(1, int(size * scale)) for size in found]


def layer(number: int, megabytes: int) -> bytes:
    """A tar with files of its own, and a few of the layer below replaced or deleted."""
    seed = random.Random(number)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for index, size in enumerate(sizes(megabytes << 20, megabytes * FILES_PER_MB, seed)):
            folder = f"data/layer{number}/{index % 200}"
            if index < 200:
                tar.addfile(*_member(images.directory(folder)))
            tar.addfile(*_member(images.entry(f"{folder}/file{index}", contents(size, seed))))
        if number:
            for index in range(100):
                tar.addfile(*_member(images.entry(f"data/layer{number - 1}/{index}/.wh.file{index}")))
    return out.getvalue()


def _member(each: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, io.BytesIO]:
    return each[0], io.BytesIO(each[1])


def build(folder: Path, megabytes: int) -> images.Built:
    tars = [images.busybox_root(), *(layer(number, megabytes // LAYERS) for number in range(LAYERS))]
    images.compressed = lambda data, pack: gzip.compress(data, 5, mtime=0)  # type: ignore[assignment]
    return images.write_layout(folder / "layout", tars)


async def ours(reference: str, folder: Path) -> float:
    """Seconds of a pull into a new store."""
    node = await open_node(None, state_dir=folder)
    try:
        started = time.perf_counter()
        async for _ in node.pull_image(reference):
            pass
        return time.perf_counter() - started
    finally:
        await node.close()


def theirs(reference: str, folder: Path) -> float:
    """Seconds of `skopeo copy` and `umoci unpack`."""
    started = time.perf_counter()
    copy = [*images.SKOPEO, "--src-tls-verify=false", f"docker://{reference}", f"oci:{folder}/layout:x"]
    subprocess.run(copy, check=True, stdin=subprocess.DEVNULL)
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    unpack = ["umoci", "unpack", *rootless, "--image", f"{folder}/layout:x", f"{folder}/bundle"]
    subprocess.run(unpack, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - started


def disk_use(folder: Path) -> int:
    """Bytes that files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


async def boxes(reference: str, folder: Path, count: int) -> dict[str, Any]:
    """So many boxes of one image."""
    node = await open_node(None, state_dir=folder)
    try:
        async for _ in node.pull_image(reference):
            pass
        store = folder / "images"
        before, started = disk_use(store), time.perf_counter()
        turn = asyncio.Semaphore(16)
        answers = await asyncio.gather(*(_box(node, reference, number, turn) for number in range(count)))
        seconds = time.perf_counter() - started
        return {
            "boxes": count,
            "answered": sum(answers),
            "create_and_answer_s": round(seconds, 2),
            "store_mb": round(before / 1e6, 1),
            "store_grew_bytes": disk_use(store) - before,
            "live": len(await node.list()),
        }
    finally:
        await shielded(node.close())


async def _box(node: NodeAPI, image: str, number: int, turn: asyncio.Semaphore) -> bool:
    async with turn:
        box = await node.create(SandboxSpec(image=image))
        result = await node.run(box.id, Run(argv=("sh", "-c", f"echo {number} > /own; cat /own")))
        return result.stdout == f"{number}\n"


def measure(megabytes: int, count: int, runs: int) -> dict[str, Any]:
    # Beside the script: /tmp may be in memory.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix="images-") as name:
        folder = Path(name)
        built = build(folder, megabytes)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        with images.Registry(folder / "registry") as registry:
            reference = registry.push(built.path, "bench/image:1")
            size = sum(path.stat().st_size for path in built.path.rglob("*") if path.is_file())
            shutil.rmtree(built.path)
            for run in range(runs):
                for who in ("ours", "theirs"):
                    place = folder / f"{who}-{run}"
                    place.mkdir(mode=0o700)
                    os.sync()
                    times[who].append(
                        asyncio.run(ours(reference, place)) if who == "ours" else theirs(reference, place)
                    )
                    shutil.rmtree(place)
            (folder / "boxes").mkdir(mode=0o700)
            many = asyncio.run(boxes(reference, folder / "boxes", count)) if count else {}
    medians = {who: round(statistics.median(each), 2) for who, each in times.items()}
    return {
        "image": {
            "mb": megabytes,
            "packed_mb": round(size / 1e6),
            "layers": LAYERS + 1,
            "files": megabytes * FILES_PER_MB,
        },
        "pull_s": {who: [round(each, 2) for each in times[who]] for who in times},
        "median_s": medians,
        "ratio": round(medians["ours"] / medians["theirs"], 2),
        "boxes_of_one_image": many,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mb", type=int, default=2000, help="size of the image, unpacked")
    parser.add_argument("--boxes", type=int, default=1000, help="how many boxes of it; 0: none")
    parser.add_argument("--runs", type=int, default=RUNS)
    words = parser.parse_args()
    if reason := images.missing():
        raise SystemExit(f"error: tools are missing\n\nhint: {reason}")
    found = measure(words.mb, words.boxes, words.runs)
    if words.json:
        print(json.dumps(found, indent=1))
        return
    about = found["image"]
    print(f"an image of {about['mb']} MB in {about['files']} files, {about['packed_mb']} MB packed")
    for who, seconds in found["median_s"].items():
        print(f"{who:8} {seconds:8.2f} s   {found['pull_s'][who]}")
    print(f"ratio    {found['ratio']:8.2f}")
    if found["boxes_of_one_image"]:
        many = found["boxes_of_one_image"]
        print(f"{many['boxes']} boxes: {many['answered']} answered, the store grew by {many['store_grew_bytes']} bytes")


if __name__ == "__main__":
    main()
