"""Promises of what a native box keeps:
1. A snapshot is an image: a box made from it sees the files, owners, modes, times, links, holes, deletions.
2. A snapshot of a box that stands on snapshots works, and past the most layers it is one layer.
3. While it is copied nothing of the box runs.
4. `changes` tells what was added, changed and deleted.
5. A deleted snapshot's files stay as long as a box stands on them, and go then; a snapshot's as long as it has a name,
   whatever ends while it is given. What a kill leaves half done in the store goes too.
6. Nothing of a box leads the copy out of it.
7. An export over the base is what a box made from the image sees; each path is in it once.
8. What the node may not read is refused with its name: nothing is left out, nothing is told wrong.
9. A list of changes that is too long for a node is refused; an export is as long as what is in the files.
10. Layers are their user's alone; a damaged image is in nobody's way.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Spawn
from sandlot.drivers.layers import MOST_LAYERS
from sandlot.drivers.native.box import Copied, NativeBox
from sandlot.drivers.native.promises import promises
from sandlot.drivers.native.trees import kernel
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, Unsupported
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


def replaces(boxes: Boxes) -> None:
    """What is tried here replaces a directory of the image, which this kernel may not keep: then it must say so."""
    if not boxes.driver.facts.directories_replaced:
        assert any(loss.startswith("image directories: ") for loss in boxes.made[-1].losses)
        pytest.skip("named loss: image directories")


async def show(box: object) -> str:
    return (await sh(box, SHOW))[1]  # type: ignore[arg-type]


async def test_a_box_made_from_a_snapshot_sees_what_the_first_one_saw(boxes: Boxes) -> None:
    box = await boxes()
    replaces(boxes)
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


@pytest.mark.parametrize("frozen", [True, False])
async def test_what_had_been_stopped_before_goes_on_only_where_that_is_said(boxes: Boxes, frozen: bool) -> None:
    box = await boxes()
    if not frozen:
        box.group.runs = None  # as on a host without cgroup v2
    facts = replace(boxes.driver.facts, kill_groups=box.group.runs is not None)
    line = next(line for line in promises(facts) if line.name == "standing still")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    process = await box.spawn(Spawn(("sh", "-c", "kill -STOP $$; sleep 600"), ENV, "/"), null, null, null)
    os.close(null)
    state = f"cut -d' ' -f3 /proc/{process.pid}/stat"
    assert (await sh(box, f"while [ $({state}) != T ]; do sleep 0.01; done; {state}"))[1] == "T\n"
    await box.changes()
    await asyncio.sleep(0.05)
    if line.state == "kept":
        assert (await sh(box, state))[1] == "T\n"
    else:
        assert (await sh(box, state))[1] == "S\n"
        assert "what had been stopped before goes on" in line.found
    await process.kill_tree()
    await process.wait()
    await process.release()


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


async def test_changes_are_told_over_what_the_layers_show_together(boxes: Boxes) -> None:
    image = "host"
    for text in (
        "cd /srv; mkdir -p gone/in old/sub; touch gone/in/f old/a old/sub/b file; mkdir dir; touch dir/x",
        "cd /srv; rm -r gone old; mkdir old; touch old/c; rm file; mkdir file; rm -r dir; touch dir",
    ):
        box = await boxes(SandboxSpec(image=image))
        replaces(boxes)
        await sh(box, text)
        image = (await boxes.driver.snapshot(box, f"told-{len(boxes.made)}")).name
    box = await boxes(SandboxSpec(image=image))
    await sh(box, "cd /srv; mkdir -p gone/in; touch gone/in/f; touch old/a; rm old/c; rm -r file; touch file; rm dir")
    await sh(box, "cd /srv; mkdir dir; touch dir/x")
    found = {(each.path, each.kind, each.directory) for each in await box.changes()}
    assert found == {
        ("/srv/gone", "added", True),
        ("/srv/gone/in", "added", True),
        ("/srv/gone/in/f", "added", False),
        ("/srv/old/a", "added", False),
        ("/srv/old/c", "deleted", False),
        ("/srv/file", "changed", False),
        ("/srv/dir", "changed", True),
        ("/srv/dir/x", "added", False),
    }
    second = await boxes(SandboxSpec(image="told-1"))
    await sh(second, "cd /srv; rm -r old; mkdir -p old/sub; touch old/new")
    found = {(each.path, each.kind, each.directory) for each in await second.changes()}
    assert found == {
        ("/srv/old", "changed", True),
        ("/srv/old/a", "deleted", False),
        ("/srv/old/new", "added", False),
        ("/srv/old/sub", "changed", True),
        ("/srv/old/sub/b", "deleted", False),
    }


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


async def test_a_snapshot_is_whole_when_its_box_and_what_is_below_go_before_it_has_a_name(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = await boxes()
    await sh(maker, "echo base > /root/base")
    await boxes.driver.snapshot(maker, "base")
    box = await boxes(SandboxSpec(image="base"))
    await sh(box, "echo top > /root/top")
    await boxes.driver.forget("base")
    copy = NativeBox.copy_upper

    async def copy_and_end(box: NativeBox, target: Path, below: Sequence[Path]) -> Copied:
        copied = await copy(box, target, below)
        await box.destroy(Ending.EXIT)
        await boxes.driver.prune()
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(NativeBox, "copy_upper", copy_and_end)
        await boxes.driver.snapshot(box, "top")
    made = await boxes(SandboxSpec(image="top"))
    assert (await sh(made, "cat /root/base /root/top"))[1] == "base\ntop\n"


async def test_what_a_kill_leaves_of_the_naming_of_an_image_is_removed(boxes: Boxes) -> None:
    await boxes.driver.snapshot(await boxes(), "named")
    store = boxes.driver._layers.directory
    old, young, other = store / f".{'0' * 16}", store / f".{'1' * 16}", store / ".mine"
    for path in (old, young, other):
        path.write_text("{")
    for path in (old, other):
        os.utime(path, (time.time() - 100,) * 2)
    await boxes.driver.prune()
    assert [path.exists() for path in (old, young, other)] == [False, True, True]
    assert [each.name for each in await boxes.driver.images()] == ["named"]


async def test_an_export_is_a_tar_with_the_marks_of_a_container_layer(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    replaces(boxes)
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


# Three layers: each takes back or replaces something of the base and of those before it.
OVER = (
    """
cd /srv; mkdir -p d/b o; touch d/a d/b/c keep file gone h1 o/1 o/2; ln h1 h2; ln -s keep link; echo one > both
rm /etc/hosts; rm -r /etc/alternatives; mkdir /etc/alternatives; touch /etc/alternatives/mine; rm /etc/nsswitch.conf
""",
    """
cd /srv; rm gone file; mkdir file; touch file/x; rm -r d; echo file > d; ln h2 h3; echo two >> both
echo back > /etc/hosts; rm -r /etc/alternatives; mkdir /etc/nsswitch.conf; touch /etc/nsswitch.conf/inner
""",
    """
cd /srv; rm d; mkdir -p d/b; touch d/b/new; rm -r o; mkdir -m 700 o; touch o/3; rm h1; chmod 600 keep; rm link
mkdir /etc/alternatives; touch /etc/alternatives/other; echo >> /etc/passwd; rm /etc/profile; ln -s hosts /etc/profile
mkfifo p; rm /etc/ld.so.conf
""",
)
# Everything in the two directories of a tree that a box can write and that hold no mount.
TELL = """
import os, stat, sys
for top in ("etc", "srv"):
    for here, dirs, files in os.walk(os.path.join(sys.argv[1], top)):
        for name in [".", *files, *(each for each in dirs if os.path.islink(os.path.join(here, each)))]:
            path = os.path.normpath(os.path.join(here, name))
            what = os.lstat(path)
            word = os.readlink(path) if stat.S_ISLNK(what.st_mode) else ""
            if stat.S_ISREG(what.st_mode):
                with open(path, "rb") as file: word = f"{what.st_nlink} {hash_of(file.read())}"
            mode = 0 if stat.S_ISLNK(what.st_mode) else what.st_mode
            print(os.path.relpath(path, sys.argv[1]), oct(mode), word)
"""
TELL = "import zlib\nhash_of = zlib.crc32" + TELL


def extract_over(base: Path, tar: tarfile.TarFile) -> None:
    """As whoever puts container layers over one another does."""
    for member in tar:
        path = base / member.name
        if path.name == ".wh..wh..opq":
            for inner in path.parent.iterdir():
                shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
            continue
        hidden = path.with_name(path.name.removeprefix(".wh."))
        if os.path.lexists(hidden) and not (hidden.is_dir() and not hidden.is_symlink() and member.isdir()):
            shutil.rmtree(hidden) if hidden.is_dir() and not hidden.is_symlink() else hidden.unlink()
        if path == hidden:
            tar.extract(member, base, **({"filter": "fully_trusted"} if hasattr(tarfile, "tar_filter") else {}))


async def test_an_export_of_layers_over_the_base_is_what_a_box_sees(boxes: Boxes, tmp_path: Path) -> None:
    image = "host"
    for number, text in enumerate(OVER):
        box = await boxes(SandboxSpec(image=image))
        replaces(boxes)
        assert (await sh(box, text))[1] == ""
        image = (await boxes.driver.snapshot(box, f"over-{number}")).name
    with (tmp_path / "layers.tar").open("wb") as file:
        await boxes.driver.export(image, file.fileno())
    base = tmp_path / "base"
    shutil.copytree(boxes.driver._images.resolve("host").root, base, symlinks=True)
    with tarfile.open(tmp_path / "layers.tar") as tar:
        names = [name for name in tar.getnames() if name.startswith(("etc", "srv"))]
        extract_over(base, tar)
    assert len(names) == len(set(names))
    marks = {name for name in names if ".wh." in name}
    # Not of what only a lower layer had (srv/gone, srv/o), nor of what is there again (etc/hosts).
    assert marks == {"etc/alternatives/.wh..wh..opq", "etc/.wh.ld.so.conf"}
    told = subprocess.run([PYTHON, "-I", "-S", "-c", TELL, str(base)], capture_output=True, text=True, check=True)
    seen = await python(await boxes(SandboxSpec(image=image)), TELL, "/")
    assert "srv/d/b/new" in seen[1]
    assert sorted(told.stdout.splitlines()) == sorted(seen[1].splitlines())


async def test_a_name_that_a_container_layer_would_take_for_a_deletion_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    await sh(box, "touch /srv/.wh.passwd")
    await boxes.driver.snapshot(box, "forged")
    with (tmp_path / "layer.tar").open("wb") as file, pytest.raises(Unsupported, match=r"/srv/\.wh\.passwd"):
        await boxes.driver.export("forged", file.fileno())


async def test_users_inside_have_their_files_of_a_layer_and_no_others(boxes: Boxes) -> None:
    box = await boxes()
    if boxes.driver.facts.ids == "one":
        pytest.skip("there is one user inside")
    await sh(box, "cd /srv; mkdir -m 700 u; echo mine > u/f; chmod 600 u/f; chown -R 1000:1000 u; echo all > /srv/all")
    image = (await boxes.driver.snapshot(box, "users")).name
    second = await boxes(SandboxSpec(image=image))
    assert (await sh(second, "cat /srv/all /srv/u/f; echo more >> /srv/u/f; cat /srv/u/f", user=1000))[1] == (
        "all\nmine\nmine\nmore\n"
    )
    assert "Permission denied" in (await sh(second, "cat /srv/u/f", user=1001))[1]
    assert "Permission denied" in (await sh(second, "echo x >> /srv/all", user=1000))[1]


async def test_files_of_lent_ids_are_refused_by_name(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    if boxes.driver.facts.ids != "shared":
        pytest.skip("no ids are lent to this user")
    await sh(box, "cd /srv; mkdir u; echo s > u/s; chown -R 1000:1001 u; chmod 700 u")
    await boxes.driver.snapshot(box, "short")
    await boxes.driver.forget("short")
    assert list(boxes.driver._layers._layers.iterdir()) == []  # a box removed what the node may not
    for name in ("lent", "lent-again"):
        await boxes.driver.snapshot(box, name)
        with (tmp_path / "layer.tar").open("wb") as file, pytest.raises(Unsupported, match="/srv/u"):
            await boxes.driver.export(name, file.fileno())
        assert (tmp_path / "layer.tar").stat().st_size == 0  # nothing that could be taken for an archive
        second = await boxes(SandboxSpec(image="lent"))
        await sh(second, "echo more >> /srv/u/s")
        with pytest.raises(Unsupported, match="/srv/u"):
            await second.changes()
        await sh(box, "chmod 755 /srv/u; chmod 644 /srv/u/s; chown 0:7 /srv/u")  # readable, of a group that is lent


async def test_layers_are_their_users_alone(boxes: Boxes) -> None:
    box = await boxes()
    directory = boxes.driver._layers.directory
    await boxes.driver.snapshot(box, "private")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (directory, directory / "layers")] == [0o700, 0o700]
    (directory / "layers").chmod(0o755)
    directory.chmod(0o755)  # as an older version made them
    await boxes(SandboxSpec(image="private"))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (directory, directory / "layers")] == [0o700, 0o700]
    if ROOT:
        os.chown(directory / "layers", 65534, 65534)
        with pytest.raises(HostFault, match="layers is not this user's alone"):
            await boxes(SandboxSpec(image="private"))
        with pytest.raises(HostFault, match="layers is not this user's alone"):
            await boxes.driver.snapshot(box, "more")
        os.chown(directory / "layers", 0, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"info": {}}', '{"info": {"name": "x"}, "layers": ["../../etc"]}'])
async def test_a_damaged_image_is_named_and_can_be_deleted(boxes: Boxes, text: str) -> None:
    box = await boxes()
    await boxes.driver.snapshot(box, "whole")
    (boxes.driver._layers.directory / "broken.json").write_text(text)
    assert [each.name for each in await boxes.driver.images()] == ["whole"]
    with pytest.raises(NotFound, match=r"the image broken is damaged: .*/broken.json") as caught:
        await boxes(SandboxSpec(image="broken"))
    assert "sandlot image rm broken" in str(caught.value.hint)
    await boxes.driver.forget("broken")
    with pytest.raises(NotFound, match="there is no image 'broken'"):
        await boxes.driver.forget("broken")
    await boxes(SandboxSpec(image="whole"))


ATTRIBUTES = """
import os
os.chdir("/srv")
open("many", "w").close()
for n in range(300): os.setxattr("many", f"user.{'n' * 40}{n}", b"v")
"""


async def test_extended_attributes_are_kept_or_named(boxes: Boxes) -> None:
    box = await boxes()
    if (await python(box, ATTRIBUTES))[0].code != 0:
        pytest.skip("files in memory have no attributes of users here")
    where = boxes.driver._layers.directory.parent / "file"
    where.touch()
    try:
        for number in range(300):
            os.setxattr(where, f"user.{'n' * 40}{number}", b"v")
    except OSError:  # ext4 and others have a block for all attributes of a file
        with pytest.raises(HostFault, match="at /srv/many: an extended attribute is larger than this disk can hold"):
            await boxes.driver.snapshot(box, "many")
        await python(box, "import os\nfor name in os.listxattr('/srv/many')[60:]: os.removexattr('/srv/many', name)")
    await boxes.driver.snapshot(box, "some")
    second = await boxes(SandboxSpec(image="some"))
    count = "import os; print(len(os.listxattr('/srv/many')))"
    assert (await python(second, count))[1] == (await python(box, count))[1] != "0\n"


# A list that lets user 1000 and nobody else in; argv: what to do with it, and the directory.
ACCESS = """
import os, struct, sys
NOBODY = 0xffffffff
ENTRIES = [(1, 7, NOBODY), (2, 7, 1000), (4, 0, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)]
LIST = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ENTRIES)
for name in sys.argv[2:]:
    if sys.argv[1] == "give": os.setxattr("/srv/d", name, LIST if name.startswith("system") else b"v")
    else: os.removexattr("/srv/d", name)
"""
LISTS = ("system.posix_acl_access", "system.posix_acl_default")


async def one_layer_over(boxes: Boxes, monkeypatch: pytest.MonkeyPatch, first: NativeBox, *change: str) -> NativeBox:
    """A box over one layer, made of that of `first` and of one in which a program was run."""
    monkeypatch.setattr("sandlot.drivers.native.driver.MOST_LAYERS", 2)
    image = (await boxes.driver.snapshot(first, "first")).name
    for name in ("second", "third"):
        box = await boxes(SandboxSpec(image=image))
        if name == "second":
            ended, said = await python(box, *change)
            assert ended.code == 0, said
        info = await boxes.driver.snapshot(box, name)
        image = info.name
    assert info.layers == 1
    return await boxes(SandboxSpec(image=image))


async def test_who_was_shut_out_of_a_directory_stays_out_when_layers_are_made_one(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await boxes()
    if boxes.driver.facts.ids == "one":
        pytest.skip("there is one user inside")
    await sh(box, "mkdir -m 700 /srv/d; touch /srv/d/secret")
    ended, _ = await python(box, ACCESS, "give", *LISTS)
    if ended.code != 0:
        pytest.skip("files in memory have no access lists here")
    assert (await sh(box, "cat /srv/d/secret", user=1000))[0].code == 0
    take = f"{ACCESS}\nos.chmod('/srv/d', 0o770); open('/srv/d/later', 'w').close(); os.mkdir('/srv/d/e')"
    try:
        over = await one_layer_over(boxes, monkeypatch, box, take, "take", *LISTS)
    except HostFault as error:
        assert "at /srv/d: its access list" in str(error)
        assert kernel() < (6, 2)
        return
    assert (await sh(over, "cat /srv/d/secret", user=1000))[0].code != 0
    tell = "import os; print([os.listxattr('/srv/d' + each) for each in ('', '/later', '/e')])"
    assert (await python(over, tell))[1] == "[[], [], []]\n"


async def test_what_hides_the_image_below_stays_when_layers_are_made_one(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await boxes()
    replaces(boxes)
    await sh(box, "rm -r /etc/alternatives; mkdir /etc/alternatives; touch /etc/alternatives/mine")
    over = await one_layer_over(boxes, monkeypatch, box, "open('/etc/alternatives/more', 'w').close()")
    assert (await sh(over, "ls /etc/alternatives"))[1] == "mine\nmore\n"


async def test_the_root_itself_is_as_it_was(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await boxes()
    await python(box, "import os\ntry: os.setxattr('/', 'user.name', b'v')\nexcept OSError: pass\nos.chmod('/', 0o751)")
    await sh(box, "touch /new; touch -d @1000000 /")
    tell = "import os; print(oct(os.stat('/').st_mode), os.stat('/').st_mtime, os.listxattr('/'))"
    before = (await python(box, tell))[1]
    assert before.startswith("0o40751 1000000.0 ")
    over = await one_layer_over(boxes, monkeypatch, box, "pass")
    assert (await python(over, tell))[1] == before


LINKS = """
import os
os.chdir("/srv")
for n in range(5000): open(str(n), "w").close(); os.link(str(n), f"{n}.again")
"""
PAIRS = """
import os
os.chdir("/srv")
print(sum(os.path.samefile(str(n), f"{n}.again") for n in range(5000)))
"""


async def test_files_with_several_names_stay_one_file_each(boxes: Boxes) -> None:
    box = await boxes()
    await python(box, LINKS)
    await boxes.driver.snapshot(box, "pairs")
    assert (await python(await boxes(SandboxSpec(image="pairs")), PAIRS))[1] == "5000\n"


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


async def test_an_export_of_a_file_with_holes_is_as_long_as_what_is_in_it(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    text = """cd /srv; truncate -s 3G hole; ln hole hole2; truncate -s 1M 'näme with a hole'
    dd if=/dev/urandom of=middle bs=4096 count=3 seek=1000 status=none; truncate -s 100M middle
    dd if=/dev/urandom of=start bs=5000 count=1 status=none; truncate -s 40M start
    dd if=/dev/urandom of=end bs=777 count=1 seek=90000 status=none; echo plain > plain
    chmod 640 middle; touch -d @1000000 middle; sha256sum middle start end plain näme*"""
    said = (await sh(box, text))[1]
    sums = {line.split("  ")[1]: line.split("  ")[0] for line in said.splitlines()}
    assert len(sums) == 5
    await boxes.driver.snapshot(box, "holes")
    with (tmp_path / "tar").open("wb") as file:
        await boxes.driver.export("holes", file.fileno())
    assert (tmp_path / "tar").stat().st_size < 1 << 20
    extracted = {"python": tmp_path / "python", "tar": tmp_path / "gnu"}
    for path in extracted.values():
        path.mkdir()
    with tarfile.open(tmp_path / "tar") as tar:
        tar.extractall(extracted["python"])
    subprocess.run(["tar", "-xf", tmp_path / "tar", "-C", extracted["tar"]], check=True)
    for top in extracted.values():
        srv = top / "srv"
        assert {name: hashlib.sha256((srv / name).read_bytes()).hexdigest() for name in sums} == sums
        assert ((srv / "hole").stat().st_size, (srv / "hole2").stat().st_size) == (3 << 30, 3 << 30)
        assert (srv / "hole").stat().st_ino == (srv / "hole2").stat().st_ino
        middle = (srv / "middle").stat()
        assert (stat.S_IMODE(middle.st_mode), middle.st_mtime, middle.st_blocks < 100) == (0o640, 1_000_000, True)
        assert not list(top.glob("GNUSparse*"))


async def test_more_changes_than_a_node_can_hold_are_refused(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await boxes()
    await sh(box, "cd /srv; for i in $(seq 2000); do : > file-$i; done")
    assert len(await box.changes()) == 2000
    for name, most in (("MOST_LISTED", 10_000), ("MOST_CHANGES", 1000)):
        with monkeypatch.context() as smaller, pytest.raises(InvalidRequest, match="too many to list"):
            smaller.setattr(f"sandlot.drivers.native.box.{name}", most)
            await box.changes()
    await sh(box, "rm /srv/file-*")
    assert await box.changes() == []
