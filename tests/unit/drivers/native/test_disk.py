"""Promises of a disk that is larger than the box's memory:
1. It holds more than the memory, ends at its limit in bytes and files, and is counted.
2. Files that leave memory for the disk are no reason for an OOM kill.
3. When the box is gone, however it went, its file and its loop device are too.
4. Where it cannot be had it is refused before anything starts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.api import Ending, Limits, SandboxSpec
from sandlot.drivers.native import disk
from sandlot.errors import Unsupported
from tests.support.native import Boxes, sh

SPEC = SandboxSpec(limits=Limits(memory=32 << 20, disk=128 << 20, inodes=2000))
NAMED = frozenset({"disk", "inodes"})  # memory is not: it need not be limited here
possible = pytest.mark.skipif(disk.why_not() is not None, reason=f"not here: {disk.why_not()}")


def backing_files() -> set[str]:
    return {
        path.read_text().strip()
        for path in Path("/sys/block").glob("loop*/loop/backing_file")
        if ".ext4" in path.read_text()
    }


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    before = backing_files()
    yield
    assert backing_files() == before


@possible
async def test_it_holds_more_than_the_memory_and_ends_at_its_limit(boxes: Boxes, leaves_nothing: None) -> None:
    box = await boxes(SPEC, NAMED)
    ended, _ = await sh(box, "head -c 100M /dev/zero > /root/big")
    assert (ended.code, ended.oom) == (0, False)
    used = await box.stats()
    assert 100 << 20 <= used.disk <= 128 << 20
    ended, output = await sh(box, "head -c 100M /dev/zero > /root/more")
    assert "No space left" in output
    assert not ended.oom
    ended, output = await sh(box, "rm /root/*; i=0; while true > /tmp/f$i; do i=$((i+1)); done; echo $i")
    assert "No space left" in output
    assert int(output.split()[-1]) <= 2000
    await box.destroy(Ending.EXIT)


@possible
async def test_owners_renames_and_removals_behave_as_on_any_disk(boxes: Boxes, leaves_nothing: None) -> None:
    box = await boxes(SPEC, NAMED)
    if not box.owners_mapped:
        pytest.skip("the image's files belong to nobody here, so they cannot be removed")
    text = "touch f; chown 1000:7 f; stat -c %u:%g f; mv f g; ls; rm -r /etc; ls -d /etc; mkdir -p d/e; mv d D; ls D"
    _, output = await sh(box, text)
    assert output.splitlines() == ["1000:7", "g", "ls: cannot access '/etc': No such file or directory", "e"]
    await box.destroy(Ending.EXIT)


@possible
async def test_a_killed_helper_takes_file_and_device_along(boxes: Boxes, leaves_nothing: None) -> None:
    box = await boxes(SPEC, NAMED)
    assert len(backing_files()) >= 1
    os.kill(box._pid, signal.SIGKILL)
    assert (await box.death).ending == Ending.HELPER_DIED
    assert not list(boxes.driver._directory.glob("*.ext4"))


async def test_it_is_refused_where_it_cannot_be_had(boxes: Boxes) -> None:
    await boxes()
    if boxes.driver.facts.disk_fix is None:
        pytest.skip("this host can")
    with pytest.raises(Unsupported, match="disk") as refused:
        await boxes(SPEC.model_copy(update={"limits": Limits(disk=4 << 30)}), frozenset({"disk"}))
    assert refused.value.hint


async def test_a_default_disk_stays_in_memory_however_little_that_is(boxes: Boxes, leaves_nothing: None) -> None:
    before = backing_files()
    await boxes(SandboxSpec(limits=Limits(memory=32 << 20)))
    assert backing_files() == before


@possible
async def test_a_limit_on_files_that_its_size_does_not_allow_is_refused_if_it_was_asked_for(boxes: Boxes) -> None:
    few = SandboxSpec(limits=Limits(memory=32 << 20, disk=1 << 30, inodes=64))
    with pytest.raises(Unsupported, match="more than the limit of 64"):
        await boxes(few, NAMED)
    box = await boxes(few, frozenset({"disk"}))
    assert any(loss.startswith("disk limit: it holds ") for loss in box.losses)


@possible
async def test_more_than_the_host_has_is_refused(boxes: Boxes, leaves_nothing: None) -> None:
    with pytest.raises(Unsupported, match="free"):
        await boxes(SandboxSpec(limits=Limits(memory=32 << 20, disk=1 << 49)), frozenset({"disk"}))


@possible
async def test_what_is_not_kept_of_such_a_disk_is_named(boxes: Boxes) -> None:
    box = await boxes(SPEC, NAMED)
    assert any(loss.startswith("disk bandwidth: writes to its disk ") for loss in box.losses)
    assert not any(loss.startswith("image directories: ") for loss in box.losses)
    box = await boxes()
    assert not any(loss.startswith("disk bandwidth: ") for loss in box.losses)
