"""Attack: use what the host mounts below a volume, or below /usr, after the box was made: on most hosts each mount is
shared, and what is mounted in one place comes to all its copies, as it is, writable and with devices. And the other way
round: mount something inside that comes to the host.

Must hold: no mount of a box is shared or the follower of one outside, nothing of what is mounted later is seen inside,
nor anything of the box's outside. The controls use a copy of the mount that is left shared.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandlot.api import Volume
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities

PROMISE = "files"

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts anything on a host")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host that is a shared mount, as all are where systemd runs."""
    path = tmp_path / "shared"
    (path / "sub").mkdir(parents=True)
    (path / "other").mkdir()
    for words in (("--bind", path, path), ("--make-shared", path)):
        subprocess.run(["mount", *words], check=True)
    yield path
    subprocess.run(["umount", "-R", "-l", path], check=True)


@pytest.fixture
def copy(shared: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, such as the helper would attach without making it private."""
    path = tmp_path / "copy"
    path.mkdir()
    subprocess.run(["mount", "--bind", shared, path], check=True)
    yield path
    subprocess.run(["umount", "-R", "-l", path], check=True)


@contextmanager
def mounted_below(path: Path) -> Iterator[None]:
    """Something that the host mounts there now."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "sandlot-test", path / "sub"], check=True)
    try:
        (path / "sub" / "secret").write_text("of the host")
        os.mknod(path / "sub" / "zero", 0o20666, os.makedev(1, 5))
        yield
    finally:
        subprocess.run(["umount", "-l", path / "sub"], check=True)


def volume(path: Path, read_only: bool = True) -> tuple[Volume, ...]:
    return (Volume(source=str(path), target="/data", read_only=read_only),)


@root
async def test_nothing_comes_in_that_is_mounted_later(arena: Arena, shared: Path) -> None:
    for read_only in (True, False):
        box = await arena.box(volumes=volume(shared, read_only))
        with mounted_below(shared):
            assert (await arena.sh("ls -A /data/sub", box=box)).stdout == ""
            assert not (await arena.sh("head -c 1 /data/sub/zero", box=box)).ok
        await box.close()


@pytest.mark.control
@root
def test_control_into_a_copy_that_is_left_shared_it_comes(shared: Path, copy: Path) -> None:
    with mounted_below(shared):
        assert (copy / "sub" / "secret").read_text() == "of the host"


async def test_no_mount_of_a_box_is_shared(arena: Arena, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = request.getfixturevalue("shared") if os.geteuid() == 0 else tmp_path
    table = (await arena.sh("cat /proc/self/mountinfo", volumes=volume(path))).stdout
    assert "/data" in table and "/usr" in table
    assert not re.findall(r"(shared|master|propagate_from):\d+", table), table


# With every capability in its own namespaces root inside may mount; where that appears is another matter.
MOUNT = CALL + 'say("mount", call("mount", b"inside", b"/data/other", b"tmpfs", 0, None))'


@root
async def test_what_a_box_mounts_does_not_come_out(arena: Arena, shared: Path) -> None:
    box = await arena.box(volumes=volume(shared, read_only=False), without=all_capabilities)
    assert answers((await arena.python(MOUNT, box=box)).stdout) == {"mount": "ok"}
    assert not os.path.ismount(shared / "other")


@pytest.mark.control
@root
def test_control_mounted_in_a_copy_that_is_left_shared_it_does(shared: Path, copy: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "inside", copy / "other"], check=True)
    assert os.path.ismount(shared / "other")
