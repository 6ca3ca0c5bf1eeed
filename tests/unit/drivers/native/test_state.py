"""Promises of what a native box keeps:
1. A snapshot is an image: a box made from it sees the files, owners, modes, times, links, holes, deletions.
2. A snapshot of a box that stands on snapshots works, and past the most layers it is one layer.
3. While it is copied nothing of the box runs.
4. `changes` tells what was added, changed and deleted.
5. A deleted snapshot's files stay as long as a box stands on them, and go then.
6. Nothing of a box leads the copy out of it.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Spawn
from sandlot.drivers.layers import MOST_LAYERS
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound
from tests.support.native import ENV, PYTHON, Boxes, python, sh

ROOT = os.geteuid() == 0

MAKE = """
cd /root; echo one > file; ln file hard; ln -s /nowhere link; mkdir -p d/e; chmod 1750 d; mkfifo fifo
chmod 4711 hard; touch -d @1000000 file; truncate -s 50M holes; echo end >> holes
rm /etc/hosts; rm -r /etc/alternatives; mkdir /etc/alternatives; echo new > /etc/alternatives/mine
echo x >> /etc/passwd
"""
SHOW = """
cd /root; stat -c '%n %a %h %Y %s' file hard; readlink link; stat -c '%a' d d/e; stat -c '%F' fifo
stat -c '%s' holes; [ $(stat -c %b holes) -lt 100 ] && echo sparse; tail -n1 holes
ls /etc/alternatives; ls /etc/hosts 2>&1; tail -n1 /etc/passwd; stat -c '%u %g %a' /root /tmp /etc
"""


async def show(box: object) -> str:
    return (await sh(box, SHOW))[1]  # type: ignore[arg-type]


async def test_a_box_made_from_a_snapshot_sees_what_the_first_one_saw(boxes: Boxes) -> None:
    box = await boxes()
    assert (await sh(box, MAKE))[1] == ""
    before = await show(box)
    info = await boxes.driver.snapshot(box, "made")
    assert (info.name, info.base, info.layers) == ("made", "host", 1)
    assert info.files > 10
    second = await boxes(SandboxSpec(image="made"))
    assert await show(second) == before
    assert "sparse" in before
    assert "cannot access" in before
    assert (await sh(second, "echo more >> /root/file; cat /root/file"))[1] == "one\nmore\n"
    assert await show(box) == before  # a copy: what the second does, the first does not see
    assert [each.name for each in await boxes.driver.images()] == ["made"]
    with pytest.raises(Conflict, match="made"):
        await boxes.driver.snapshot(box, "made")
    with pytest.raises(InvalidRequest):
        await boxes.driver.snapshot(box, "../x")


@pytest.mark.skipif(not ROOT, reason="there may be one user inside")
async def test_owners_are_those_that_the_box_saw(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "touch /tmp/f; chown 1000:7 /tmp/f; mkdir /tmp/d; chown 65534 /tmp/d")
    info = await boxes.driver.snapshot(box, "owners")
    second = await boxes(SandboxSpec(image=info.name))
    assert (await sh(second, "stat -c %u:%g /tmp/f /tmp/d"))[1] == "1000:7\n65534:0\n"
    (layer,) = (path for path in boxes.driver._layers._layers.iterdir() if path.is_dir())
    assert (layer / "tmp/f").stat().st_uid == 1000  # on disk as inside, not as some box's range


async def test_layers_lie_over_one_another_and_are_made_one_when_there_are_too_many(boxes: Boxes) -> None:
    image = "host"
    for number in range(MOST_LAYERS + 2):
        box = await boxes(SandboxSpec(image=image))
        text = (
            f"cd /root; echo {number} > f{number}; rm -f f{number - 2}; rm -rf d; mkdir d; echo {number} > d/{number}"
        )
        await sh(box, text)
        image = f"layer-{number}"
        info = await boxes.driver.snapshot(box, image)
        await box.destroy(Ending.EXIT)
    assert info.layers == 2  # one of all that were too many, one more
    last = MOST_LAYERS + 1
    top = await boxes(SandboxSpec(image=image))
    assert (await sh(top, "cd /root; echo *; ls d"))[1] == f"d f{last - 1} f{last}\n{last}\n"


# Writes a byte every millisecond.
TICK = "import sys, time\nwhile True: sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.001)"


async def test_nothing_runs_while_a_box_is_paused(boxes: Boxes) -> None:
    box = await boxes()
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR)
    process = await box.spawn(Spawn((PYTHON, "-I", "-S", "-c", TICK), ENV, "/"), null, write, write)
    os.close(null)
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1) == b"x"
    await box.pause()
    os.set_blocking(read, False)
    with suppress(BlockingIOError):
        os.read(read, 1 << 16)
    await asyncio.sleep(0.05)  # in which it would write fifty
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    with pytest.raises(Conflict, match="paused"):
        await sh(box, "true")
    fd = await box.open("/etc/passwd", os.O_RDONLY)  # files can be read meanwhile
    os.close(fd)
    await box.resume()
    os.set_blocking(read, True)
    assert await asyncio.to_thread(os.read, read, 1) == b"x"
    await process.kill_tree()
    await process.wait()
    os.close(read)


async def test_changes_are_told(boxes: Boxes) -> None:
    box = await boxes()
    assert await box.changes() == []
    await sh(box, "mkdir -p /root/a/b; touch /root/a/b/c; rm /etc/hosts; echo >> /etc/passwd; rm -r /etc/alternatives")
    await sh(box, "mkdir /etc/alternatives; touch /etc/alternatives/awk /etc/alternatives/mine; echo > /root/'x\ny'")
    found = {change.path: change.kind for change in await box.changes()}
    assert found["/root/a"] == found["/root/a/b/c"] == found["/root/x\ny"] == "added"
    assert found["/etc/hosts"] == "deleted"
    assert found["/etc/passwd"] == "changed"
    assert found["/etc/alternatives/mine"] == "added"
    assert found["/etc/alternatives/awk"] == "changed"
    assert found["/etc/alternatives/pager"] == "deleted"
    assert "/root" not in found
    assert "/etc" not in found
    image = (await boxes.driver.snapshot(box, "changes")).name
    second = await boxes(SandboxSpec(image=image))
    assert await second.changes() == []
    await sh(second, "rm /root/a/b/c; touch /etc/hosts; rm /root/x*")
    kinds = {change.path: change.kind for change in await second.changes()}
    assert kinds == {"/root/a/b/c": "deleted", "/etc/hosts": "added", "/root/x\ny": "deleted"}


async def test_a_deleted_snapshot_stays_as_long_as_a_box_stands_on_it(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "echo kept > /root/f")
    await boxes.driver.snapshot(box, "short")
    second = await boxes(SandboxSpec(image="short"))
    await boxes.driver.forget("short")
    assert await boxes.driver.images() == []
    with pytest.raises(NotFound, match="short"):
        await boxes(SandboxSpec(image="short"))
    assert (await sh(second, "cat /root/f"))[1] == "kept\n"
    await boxes.driver.snapshot(second, "again")  # of a box whose image has no name any more
    layers = boxes.driver._layers._layers
    assert len([path for path in layers.iterdir() if path.is_dir()]) == 2
    await boxes.driver.forget("again")
    await second.destroy(Ending.EXIT)
    await boxes.driver.prune()
    assert list(layers.iterdir()) == []


async def test_an_export_is_a_tar_with_the_marks_of_a_container_layer(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    await sh(box, MAKE)
    await boxes.driver.snapshot(box, "tar")
    with (tmp_path / "layer.tar").open("wb") as file:
        await boxes.driver.export("tar", file.fileno())
    with tarfile.open(tmp_path / "layer.tar") as tar:
        names = tar.getnames()
        assert {"root/file", "root/hard", "etc/.wh.hosts", "etc/alternatives/.wh..wh..opq"} <= set(names)
        assert len(names) == len(set(names))
        assert {member.uid for member in tar.getmembers()} == {0}
        assert tar.extractfile("root/file").read() == b"one\n"  # type: ignore[union-attr]


DEEP = """
import os
os.chdir("/root")
for n in range(1000):
    os.mkdir("d"); os.chdir("d")
"""


async def test_a_tree_that_is_too_deep_is_an_error_that_names_it_and_leaves_nothing(boxes: Boxes) -> None:
    box = await boxes()
    await python(box, DEEP)
    with pytest.raises(HostFault, match="d/d/d"):
        await boxes.driver.snapshot(box, "deep")
    assert await boxes.driver.images() == []
    assert list(boxes.driver._layers._layers.iterdir()) == []
    assert (await sh(box, "echo goes on"))[1] == "goes on\n"


async def test_links_and_special_files_lead_the_copy_nowhere(boxes: Boxes) -> None:
    box = await boxes()
    await sh(
        box,
        "ln -s /proc/1/root /root/out; ln -s /etc /root/etc; mkfifo /root/p; cp /dev/null /root/n; mkdir -m 0 /root/no",
    )
    info = await boxes.driver.snapshot(box, "links")
    second = await boxes(SandboxSpec(image=info.name))
    assert (await sh(second, "readlink /root/out /root/etc"))[1] == "/proc/1/root\n/etc\n"
