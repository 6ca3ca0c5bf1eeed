"""Attack: keep the host's disk busy: write and sync without end, in the box's own files and in a volume that it may
write.

Must hold: the box's own files never reach the host's disk, so a neighbour has nothing to wait for; a volume's do,
which is said in `Info.losses`; in both a neighbour's commands and files complete, and the storm dies with its command.
(What it costs a neighbour: bench/neighbour.py.)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.sandbox import Sandbox
from tests.support.hostile import PYTHON, Arena, into_timeout

PROMISE = "disk limit"

STORM = "cd $1; echo ready; while :; do dd if=/dev/zero of=storm bs=64k count=64 conv=fsync 2> /dev/null; done"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return Volume(source=str(shared), target="/shared", read_only=False)


async def storm(arena: Arena, box: Sandbox, place: str) -> None:
    neighbour = await arena.box()
    storming = asyncio.create_task(into_timeout(box, ["sh", "-c", STORM, "sh", place]))
    while not storming.done():
        await neighbour.write_file("/root/file", b"lives")
        assert (await neighbour.run("cat file && sync file")).stdout == "lives"
    assert (await storming).timed_out


async def to_disk(box: Sandbox, place: str) -> int:
    """How many of 4 MB written there the kernel counts as written to a disk."""
    program = "import os, sys\nfd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
    program += "for _ in range(64): os.write(fd, bytes(65536))\n"
    program += "os.fsync(fd)\nprint(open('/proc/self/io').read())"
    result = await box.run([PYTHON, "-I", "-S", "-c", program, f"{place}/storm"])
    return int(next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("write_bytes")))


async def test_a_storm_in_the_boxes_own_files(arena: Arena) -> None:
    box = await arena.box()
    assert not any(loss.startswith("disk bandwidth") for loss in box.losses)
    await storm(arena, box, "/root")
    assert await to_disk(box, "/root") == 0


async def test_a_storm_in_a_volume_is_a_named_loss(arena: Arena, volume: Volume) -> None:
    box = await arena.box(volumes=(volume,))
    assert any(loss.startswith("disk bandwidth: ") for loss in box.losses)
    await storm(arena, box, volume.target)


@pytest.mark.control
async def test_control_in_a_volume_the_same_writes_do_reach_the_disk(arena: Arena, volume: Volume) -> None:
    box = await arena.box(volumes=(volume,))
    written = await to_disk(box, volume.target)
    if (await box.run(f"stat -f -c %T {volume.target}")).stdout == "tmpfs\n":
        pytest.skip("where this test keeps its files is no disk")
    assert written >= 64 * 65536


async def test_a_volume_that_is_read_only_takes_no_storm(arena: Arena, volume: Volume) -> None:
    box = await arena.box(volumes=(volume.model_copy(update={"read_only": True}),))
    assert not any(loss.startswith("disk bandwidth") for loss in box.losses)
    assert "Read-only file system" in (await box.run(f"touch {volume.target}/storm")).stderr
