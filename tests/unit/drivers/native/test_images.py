"""Promises of images from elsewhere:
1. A box made from a pulled image sees its files, owners, modes, links, marks of deletion, and runs as it says.
2. An image is one directory for all its boxes; two names of one digest are two names of one directory.
3. Boxes of such images are reset, snapshotted, forked, compared and exported as others are, and adopted after a kill.
4. OCI layouts, `docker save`, root file systems: from a directory or a file, packed or not.
5. A directory of the host is an image where it lies, and is never written.
6. An image with nothing but busybox runs.
7. Links, holes, attributes, times, and all that later layers say of earlier ones, are kept; from a tar, from a
   directory, and by an export that is imported again. A directory that cannot be packed whole is no image.
8. What of an image is not as it says is named by its sandboxes.
9. An image leaves room on the disk for others, and is on the disk before it has its name.
10. A malformed file is said to be one. A node that has no descriptor left says so.
11. Who looks whether an image is in use is in nobody's way; what a killed node left is removed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Ending, ImageInfo, Run, SandboxSpec, ShellRun, ShellSpec
from sandlot.drivers.base import Progress
from sandlot.drivers.layers import MOST_LAYERS, Room, Snapshot
from sandlot.drivers.native.trees import kernel
from sandlot.drivers.oci import archive
from sandlot.errors import BadImage, Conflict, HostFault, InvalidRequest, NotFound, Unsupported
from sandlot.node.node import local_node
from tests.support import images
from tests.support.images import Built, Registry
from tests.support.native import Boxes, python, sh

ROOT = os.geteuid() == 0
Roots = dict[str, Built]


def layer_directories(boxes: Boxes) -> list[Path]:
    return sorted(path for path in boxes.driver._layers._layers.iterdir() if path.is_dir())


async def pulled(boxes: Boxes, registry: Registry, built: Built, name: str) -> str:
    reference = registry.push(built.path, name)
    await boxes.driver.pull(reference, Progress())
    return reference


async def test_a_pulled_image_is_what_it_says(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = await pulled(boxes, registry, roots["glibc"], "says/glibc:1")
    info = await boxes.driver.image(reference)
    assert (info.kind, info.base, info.layers) == ("pulled", reference, 0)
    assert info.digest == roots["glibc"].manifest
    assert (info.config.workdir, info.config.user, info.config.home) == ("/srv", 1000, "/home/app")
    assert info.config.env == {"GREETING": "hello", "PATH": "/bin"}
    assert info.config.cmd == ("bash",)
    box = await boxes(SandboxSpec(image=reference))
    told = (await sh(box, "cat /srv/one; ls /etc; stat -c '%n %a' /srv/set /tmp /root /home/app; cat /etc/hosts"))[1]
    assert told.splitlines() == [
        "of the image",
        "hosts",
        "passwd",
        "/srv/set 4755",
        "/tmp 1777",
        "/root 700",
        "/home/app 700",
        "127.0.0.1 localhost",
        "::1 localhost",
    ]
    if boxes.driver.facts.ids != "one":
        assert (await sh(box, "stat -c %u:%g /srv/set /home/app /etc"))[1] == "1000:7\n1000:1000\n0:0\n"
        assert box.config.user == 1000
    await sh(box, "echo more >> /srv/one; rm /etc/passwd")
    kinds = {change.path: change.kind for change in await box.changes()}
    assert kinds == {"/srv/one": "changed", "/etc/passwd": "deleted"}
    assert (await sh(await boxes(SandboxSpec(image=reference)), "cat /srv/one"))[1] == "of the image\n"


async def test_an_image_of_busybox_alone_runs(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = await pulled(boxes, registry, roots["busybox"], "alone/busybox:1")
    box = await boxes(SandboxSpec(image=reference))
    assert (await sh(box, "echo hello; ls /bin | wc -l"))[1].split() == ["hello", "15"]
    assert await box.changes() == []


async def test_two_names_of_a_digest_are_one_directory(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    first = await pulled(boxes, registry, roots["busybox"], "twice/one:1")
    second = await pulled(boxes, registry, roots["busybox"], "twice/two:1")
    third = f"{first.rpartition(':')[0]}@{roots['busybox'].manifest}"
    assert (await boxes.driver.pull(third, Progress())).name == third
    assert len(layer_directories(boxes)) == 1
    assert {info.base for info in await boxes.driver.images()} == {first, second, third}
    box = await boxes(SandboxSpec(image=second))
    await boxes.driver.forget(first)
    await boxes.driver.forget(third)
    await boxes.driver.forget(second)
    assert (await sh(box, "echo lives"))[1] == "lives\n"
    await box.destroy(Ending.EXIT)
    await boxes.driver.prune()
    assert layer_directories(boxes) == []


async def test_a_tag_that_has_moved_is_pulled_again(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = await pulled(boxes, registry, roots["busybox"], "moved/x:1")
    before = await boxes(SandboxSpec(image=reference))
    assert (await boxes.driver.pull(reference, Progress())).digest == roots["busybox"].manifest
    await pulled(boxes, registry, roots["glibc"], "moved/x:1")
    after = await boxes(SandboxSpec(image=reference))
    assert (await sh(after, "cat /srv/one"))[1] == "of the image\n"
    assert (await sh(before, "cat /srv/one; echo lives"))[1].endswith("lives\n")
    snapshot = await boxes.driver.snapshot(before, "of-the-old-one")
    assert (snapshot.base, snapshot.layers) == (reference, 1)
    await before.destroy(Ending.EXIT)
    await boxes.driver.forget("of-the-old-one")
    assert len(layer_directories(boxes)) == 1


async def test_snapshots_over_a_pulled_image(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = await pulled(boxes, registry, roots["glibc"], "over/x:1")
    box = await boxes(SandboxSpec(image=reference))
    await sh(box, "echo two > /srv/two; rm /srv/one; mkdir /etc/new")
    first = await boxes.driver.snapshot(box, "first")
    assert (first.base, first.layers, first.config.workdir) == (reference, 1, "/srv")
    assert first.files < 10
    second = await boxes(SandboxSpec(image="first"))
    assert (await sh(second, "ls /srv; cat /srv/two"))[1] == "set\ntwo\ntwo\n"
    assert await second.changes() == []
    await sh(second, "echo three > /srv/three")
    info = await boxes.driver.snapshot(second, None)
    assert (info.base, info.layers) == (reference, 2)
    fork = await boxes(SandboxSpec(image=info.name))
    assert (await sh(fork, "ls /srv"))[1] == "set\nthree\ntwo\n"
    await boxes.driver.forget(reference)  # the root layer stays as long as a snapshot names it
    assert (await sh(await boxes(SandboxSpec(image="first")), "echo yes"))[1] == "yes\n"


async def test_many_snapshots_are_made_one_and_the_root_is_not_copied(
    boxes: Boxes, registry: Registry, roots: Roots
) -> None:
    image = await pulled(boxes, registry, roots["busybox"], "many/x:1")
    size = (await boxes.driver.image(image)).bytes
    for number in range(MOST_LAYERS + 1):
        box = await boxes(SandboxSpec(image=image))
        await sh(box, f"touch /f{number}")
        image = (await boxes.driver.snapshot(box, f"many-{number}")).name
        await box.destroy(Ending.EXIT)
    info = await boxes.driver.image(image)
    assert info.layers == 1
    assert info.bytes < size / 10
    seen = (await sh(await boxes(SandboxSpec(image=image)), "ls -d /f* | wc -l; echo root"))[1]
    assert seen.split() == [str(MOST_LAYERS + 1), "root"]


async def exported(boxes: Boxes, image: str, file: Path) -> tarfile.TarFile:
    with file.open("wb") as out:
        await boxes.driver.export(image, out.fileno())
    return tarfile.open(file)


async def test_a_pulled_image_exports_whole_and_a_snapshot_what_it_adds(
    boxes: Boxes, registry: Registry, roots: Roots, tmp_path: Path
) -> None:
    reference = await pulled(boxes, registry, roots["glibc"], "exported/x:1")
    if boxes.driver.facts.ids == "shared":
        pytest.skip("the node may not read files of lent ids, and says so")
    with await exported(boxes, reference, tmp_path / "whole.tar") as tar:
        names = set(tar.getnames())
        assert {"usr/bin/bash", "srv/one", "bin", "home/app"} <= names
        assert tar.getmember("srv/set").mode == 0o4755
        assert tar.getmember("srv/set").uid == (1000 if ROOT else 0)
    again = await boxes.driver.import_("again", tmp_path / "whole.tar", Progress())
    assert (again.kind, again.base) == ("imported", "again")
    box = await boxes(SandboxSpec(image="again"))
    assert (await sh(box, "cat /srv/one; rm /srv/one; echo 2 > /srv/two"))[1] == "of the image\n"
    await boxes.driver.snapshot(box, "adds")
    with await exported(boxes, "adds", tmp_path / "adds.tar") as tar:
        assert {name for name in tar.getnames() if name.startswith("srv/")} == {"srv/.wh.one", "srv/two"}
        assert "usr/bin/bash" not in tar.getnames()


def skopeo(*words: str) -> None:
    images.need("skopeo")
    done = subprocess.run(["skopeo", "--insecure-policy", "copy", "--quiet", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_every_form_is_imported(boxes: Boxes, roots: Roots, tmp_path: Path) -> None:
    built = roots["glibc"]
    skopeo(f"oci:{built.path}", f"oci-archive:{tmp_path}/oci.tar")
    skopeo(f"oci:{built.path}", f"docker-archive:{tmp_path}/docker.tar:a/b:1")
    rootfs = images.busybox_root()
    for name, data in (("plain", rootfs), ("gzip", images.compressed(rootfs, "gzip"))):
        (tmp_path / f"{name}.tar").write_bytes(data)
    (tmp_path / "zstd.tar").write_bytes(images.compressed(rootfs, "zstd"))
    for name, pack in (("oci", "gzip"), ("docker", "zstd")):
        (tmp_path / f"{name}.{pack}").write_bytes(images.compressed((tmp_path / f"{name}.tar").read_bytes(), pack))
    with tarfile.open(fileobj=io.BytesIO(rootfs)) as tar:
        trust = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        tar.extractall(tmp_path / "directory", **trust)
    forms = {
        "layout": built.path,
        "oci": tmp_path / "oci.tar",
        "docker": tmp_path / "docker.tar",
        "oci-gzip": tmp_path / "oci.gzip",
        "docker-zstd": tmp_path / "docker.zstd",
        "plain": tmp_path / "plain.tar",
        "gzip": tmp_path / "gzip.tar",
        "zstd": tmp_path / "zstd.tar",
        "directory": tmp_path / "directory",
        "link": tmp_path / "link",
    }
    (tmp_path / "link").symlink_to("directory")
    for name, path in forms.items():
        info = await boxes.driver.import_(name, path, Progress())
        assert info.kind == "imported"
        box = await boxes(SandboxSpec(image=name))
        whole = name.partition("-")[0] in ("layout", "oci", "docker")
        text = "cat /srv/one; echo $HOME" if whole else "ls -d /root; echo x"
        assert (await sh(box, text))[1].splitlines()[0] == ("of the image" if whole else "/root"), name
        assert info.config.workdir == ("/srv" if whole else None)
    with pytest.raises(Conflict, match="plain"):
        await boxes.driver.import_("plain", tmp_path / "plain.tar", Progress())
    reference = await boxes.driver.import_("busybox:test", tmp_path / "plain.tar", Progress())
    assert reference.name == "docker.io/library/busybox:test"
    assert (await sh(await boxes(SandboxSpec(image="busybox:test")), "echo yes"))[1] == "yes\n"


async def test_a_packed_image_is_inflated_as_far_as_there_is_room(
    boxes: Boxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = archive.opened
    monkeypatch.setattr(archive, "opened", lambda path, spool: opened(path, replace(spool, most=1 << 20)))
    layer = images.packed(images.directory("etc"), images.entry("etc/f", bytes(4 << 20)))
    config = {"rootfs": {"diff_ids": [images.digest(layer)]}}
    said = [{"Config": "c.json", "Layers": ["layer.tar"]}]
    tar_of(tmp_path / "image.tar", ("manifest.json", said), ("c.json", config), ("layer.tar", layer))
    for name in ("image", "root"):
        data = (tmp_path / "image.tar").read_bytes() if name == "image" else layer
        (tmp_path / f"{name}.gz").write_bytes(images.compressed(data, "gzip"))
    with pytest.raises(HostFault, match="no space left to inflate"):
        await boxes.driver.import_("image", tmp_path / "image.gz", Progress())
    assert layer_directories(boxes) == []
    await boxes.driver.import_("root", tmp_path / "root.gz", Progress())  # it is inflated on its way


async def test_a_packed_image_that_is_given_up_is_inflated_no_further(tmp_path: Path) -> None:
    tar_of(tmp_path / "image.tar", ("oci-layout", {}), ("index.json", {}), ("layer.tar", os.urandom(4 << 20)))
    packed = images.compressed((tmp_path / "image.tar").read_bytes(), "gzip")
    (tmp_path / "image.gz").write_bytes(packed)
    spool = archive.Spool(tmp_path)
    spool.given_up.set()
    with pytest.raises(BadImage, match="names no manifests"):
        archive.opened(tmp_path / "image.gz", archive.Spool(tmp_path))
    assert archive.opened(tmp_path / "image.gz", spool).blobs[0].size == len(packed)


async def test_who_gives_an_import_up_ends_its_inflating(
    boxes: Boxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def opened(_: Path, spool: archive.Spool) -> None:
        begun.set()
        if spool.given_up.wait(20):
            ended.set()

    monkeypatch.setattr(archive, "opened", opened)
    importing = asyncio.create_task(boxes.driver.import_("x", tmp_path, Progress()))
    assert await asyncio.to_thread(begun.wait, 20)
    importing.cancel()
    await asyncio.wait((importing,))
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_directory_that_cannot_be_packed_whole_is_no_image(boxes: Boxes, tmp_path: Path) -> None:
    root_with_everything(tmp_path / "root")
    os.setxattr(os.fsencode(tmp_path / "root/etc/file"), b"user.\xff", b"v")
    with pytest.raises(Unsupported, match="etc/file has an attribute"):
        await boxes.driver.import_("x", tmp_path / "root", Progress())
    assert layer_directories(boxes) == []


async def test_an_export_that_no_tar_can_say_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    box = await boxes()
    program = "import os; open('/a', 'w'); os.setxattr(b'/a', b'user.\\xff', b'v'); print('done')"
    if (await python(box, program))[1] != "done\n":
        pytest.skip("sandboxes keep no attributes here")
    await boxes.driver.snapshot(box, "said")
    if boxes.driver.facts.ids == "shared":
        return  # the node may not read files of lent ids, and says so
    with pytest.raises(Unsupported, match="has an attribute"):
        await exported(boxes, "said", tmp_path / "said.tar")


async def test_what_is_no_image_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, path, error in (
        ("x", tmp_path / "none", NotFound),
        ("x", tmp_path / "empty", InvalidRequest),
        ("Not A Name", tmp_path, InvalidRequest),
        ("host", tmp_path, InvalidRequest),
        ("a@sha256:" + "0" * 64, tmp_path, InvalidRequest),
    ):
        with pytest.raises(error):
            await boxes.driver.import_(name, path, Progress())
    assert await boxes.driver.images() == []


async def test_a_directory_is_an_image_where_it_lies(boxes: Boxes, tmp_path: Path, roots: Roots) -> None:
    root = tmp_path / "root"
    for folder in (tmp_path, root):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    with tarfile.open(fileobj=io.BytesIO(images.busybox_root())) as tar:
        tar.extractall(root, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
    before = sorted(str(path) for path in root.rglob("*"))
    box = await boxes(SandboxSpec(image=str(root)))
    assert (await sh(box, "ls -d /root /tmp; touch /new /bin/x; rm /bin/wc; echo done"))[1] == "/root\n/tmp\ndone\n"
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert {change.path for change in await box.changes()} == {"/new", "/bin/x", "/bin/wc"}
    info = await boxes.driver.snapshot(box, "over-directory")
    assert (info.base, info.layers) == (str(root), 1)
    second = await boxes(SandboxSpec(image="over-directory"))
    assert (await sh(second, "ls -d /new /root; ls /bin/wc || echo gone"))[1].endswith("gone\n")
    with pytest.raises(NotFound, match="no directory"):
        await boxes(SandboxSpec(image=str(tmp_path / "none")))


async def test_pruning_takes_what_is_pulled_and_nobody_uses(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    used = await pulled(boxes, registry, roots["glibc"], "pruned/used:1")
    based = await pulled(boxes, registry, roots["busybox"], "pruned/based:1")
    box = await boxes(SandboxSpec(image=used))
    other = await boxes(SandboxSpec(image=based))
    assert await boxes.driver.idle_images() == []
    await boxes.driver.snapshot(other, "kept")
    await other.destroy(Ending.EXIT)
    assert await boxes.driver.idle_images() == []  # a snapshot stands on it
    await boxes.driver.forget("kept")
    assert [each.name for each in await boxes.driver.idle_images()] == [based]
    await box.destroy(Ending.EXIT)
    assert {each.name for each in await boxes.driver.idle_images()} == {used, based}


async def test_what_only_an_ended_fork_stood_on_is_pruned_at_once(
    boxes: Boxes, registry: Registry, roots: Roots
) -> None:
    reference = await pulled(boxes, registry, roots["glibc"], "pruned/forked:1")
    box = await boxes(SandboxSpec(image=reference))
    fork = await boxes.driver.snapshot(box, None)
    forked = await boxes(SandboxSpec(image=fork.name))
    await boxes.driver.forget(fork.name)
    await box.destroy(Ending.EXIT)
    assert await boxes.driver.idle_images() == []
    await forked.destroy(Ending.EXIT)
    assert [each.name for each in await boxes.driver.idle_images()] == [reference]


async def test_what_a_tar_says_of_files_is_kept(boxes: Boxes, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "one").write_text("data")
    os.link(root / "one", root / "two")
    (root / "sym").symlink_to("one")
    os.mkfifo(root / "fifo")
    with (root / "holes").open("wb") as file:
        for place in range(5, 130, 5):  # more than a header has room for
            file.seek(place << 20)
            file.write(b"end%03d" % place)
        file.truncate(150 << 20)
    os.setxattr(root / "one", "user.mine", b"\xff=\n")
    os.utime(root / "one", ns=(1, 1_500_000_000_123_456_789))
    os.utime(root / "bin", ns=(1, 1_400_000_000_000_000_000))
    long = root / ("x" * 200) / ("y" * 200)
    long.mkdir(parents=True)
    (long / "z").write_text("long")
    for form in ("gnu", "posix"):
        words = ["--xattrs"] if form == "posix" else []
        words += ["--sparse", "-C", str(root), "-cf", str(tmp_path / f"{form}.tar"), "."]
        subprocess.run(["tar", f"--format={form}", *words], check=True)
        await boxes.driver.import_(form, tmp_path / f"{form}.tar", Progress())
        (layer,) = layer_directories(boxes)
        assert (layer / "one").stat().st_ino == (layer / "two").stat().st_ino
        assert os.readlink(layer / "sym") == "one"
        assert (layer / "fifo").is_fifo()
        assert (layer / "holes").read_bytes() == (root / "holes").read_bytes()
        assert (layer / "holes").stat().st_blocks * 512 < 30 << 20
        assert (layer / long.relative_to(root) / "z").read_text() == "long"
        exact = form == "posix"
        assert (layer / "one").stat().st_mtime_ns == 1_500_000_000_123_456_789 // (1 if exact else 10**9) * (
            1 if exact else 10**9
        )
        assert (layer / "bin").stat().st_mtime_ns == 1_400_000_000_000_000_000
        if exact:
            assert os.getxattr(layer / "one", "user.mine") == b"\xff=\n"
        await boxes.driver.forget(form)


async def test_later_layers_lie_over_earlier_ones(boxes: Boxes, tmp_path: Path) -> None:
    d, f, hard = images.directory, images.entry, tarfile.LNKTYPE
    layers = [
        images.packed(
            *(d(name) for name in ("etc", "a", "a/b", "gone", "replaced", "usr", "usr/lib")),
            *(f(name, b"1") for name in ("a/one", "a/b/two", "gone/x", "replaced/x", "file", "set")),
            images.link("lib", "usr/lib"),
            images.link("late", "usr/late"),
        ),
        images.packed(
            f(".wh.gone"),
            f("a/.wh.one"),
            f("replaced", b"2"),
            d("file"),
            f("file/inner", b"2"),
            f("lib/through", b"2"),
            f("late/made", b"2"),
            f("linked", kind=hard, linkname="set"),
            d("a", 0o700),
        ),
        images.packed(
            f("a/b/.wh..wh..opq"),
            f("a/b/three", b"3"),
            f("set", b"3"),
            f(".wh..wh.plnk"),
            f("./deep/er/x", b"3"),
        ),
    ]
    built = images.write_layout(tmp_path / "layout", layers)
    await boxes.driver.import_("over", built.path, Progress())
    (made,) = layer_directories(boxes)
    found = {str(path.relative_to(made)): path.read_text() for path in made.rglob("*") if path.is_file()}
    found.pop("etc/hosts")
    assert found == {
        "replaced": "2",
        "file/inner": "2",
        "usr/lib/through": "2",
        "usr/late/made": "2",
        "linked": "1",
        "set": "3",
        "a/b/three": "3",
        "deep/er/x": "3",
    }
    assert (made / "a").stat().st_mode & 0o777 == 0o700
    assert (made / "lib").is_symlink()
    assert not (made / "gone").exists()


async def test_a_layers_own_files_are_its_own_however_they_are_spelt(boxes: Boxes, tmp_path: Path) -> None:
    d, f, hard = images.directory, images.entry, tarfile.LNKTYPE
    merged = [d("usr"), d("usr/lib"), images.link("lib", "usr/lib")]
    layers = [
        images.packed(
            *merged, f("usr/lib/old", b"1"), f("usr/lib/same", b"1"), f("lib/same", kind=hard, linkname="usr/lib/same")
        ),
        images.packed(f("lib/new", b"2"), f("usr/lib/.wh..wh..opq"), f("lib/again", b"2"), f("usr/lib/.wh.again")),
    ]
    await boxes.driver.import_("lower", images.write_layout(tmp_path / "lower", layers[:1]).path, Progress())
    (made,) = layer_directories(boxes)
    assert (made / "usr/lib/same").read_text() == "1"
    await boxes.driver.forget("lower")
    await boxes.driver.import_("both", images.write_layout(tmp_path / "both", layers).path, Progress())
    (made,) = layer_directories(boxes)
    assert sorted(path.name for path in (made / "usr/lib").iterdir()) == ["again", "new"]


def root_with_everything(root: Path) -> None:
    """Files whose every word is easily lost."""
    (root / "etc").mkdir(parents=True)
    root.chmod(0o711)
    (root / "etc/file").write_text("x")
    os.utime(root / "etc/file", ns=(1, 1_500_000_000_123_456_789))
    os.setxattr(root / "etc/file", "user.mine", b"\xff=\n\0")
    os.setxattr(root / "etc/file", "user.a=%3D%b", b"=")
    with (root / "hole").open("wb") as file:
        file.truncate(300 << 20)
    with (root / "start").open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(10 << 20)
    os.utime(root / "start", ns=(1, -1_500_000_003))
    os.utime(root / "hole", ns=(1, -2_000_000_000))
    if ROOT:
        # cap_net_raw+ep, in the kernel's second version of it
        os.setxattr(
            root / "etc/file", "security.capability", bytes.fromhex("01000002002000000000000000000000 00000000")
        )


def is_as_it_was(made: Path, original: Path) -> None:
    for name in ("hole", "start", "etc/file"):
        assert (made / name).stat().st_size == (original / name).stat().st_size
        assert (made / name).stat().st_mtime_ns == (original / name).stat().st_mtime_ns
    assert (made / "hole").stat().st_blocks * 512 < 1 << 20
    assert (made / "start").read_bytes() == (original / "start").read_bytes()
    assert os.getxattr(made / "etc/file", "user.mine") == b"\xff=\n\0"
    assert os.getxattr(made / "etc/file", "user.a=%3D%b") == b"="
    if ROOT:
        assert os.getxattr(made / "etc/file", "security.capability")[4:8] == b"\x00\x20\x00\x00"
    assert made.stat().st_mode & 0o777 == 0o711


async def test_nothing_is_lost_on_any_way(boxes: Boxes, tmp_path: Path) -> None:
    root_with_everything(tmp_path / "root")
    for form in ("gnu", "posix"):
        words = ["--sparse", "-C", str(tmp_path / "root"), "-cf", str(tmp_path / f"{form}.tar"), "."]
        words += ["--xattrs"] if form == "posix" else []
        subprocess.run(["tar", f"--format={form}", *words], check=True)
        await boxes.driver.import_(form, tmp_path / f"{form}.tar", Progress())
        (made,) = layer_directories(boxes)
        assert (made / "hole").stat().st_size == 300 << 20, form
        if form == "posix":
            assert os.getxattr(made / "etc/file", "user.a=%3D%b") == b"="
            assert (made / "start").stat().st_mtime_ns == -1_500_000_003
        await boxes.driver.forget(form)
    await boxes.driver.import_("directory", tmp_path / "root", Progress())
    (made,) = layer_directories(boxes)
    is_as_it_was(made, tmp_path / "root")
    if boxes.driver.facts.ids == "shared":
        return  # the node may not read files of lent ids, and says so
    with (tmp_path / "exported.tar").open("wb") as out:
        await boxes.driver.export("directory", out.fileno())
    await boxes.driver.forget("directory")
    await boxes.driver.import_("again", tmp_path / "exported.tar", Progress())
    (made,) = layer_directories(boxes)
    is_as_it_was(made, tmp_path / "root")


async def test_owners_and_groups_that_are_not_kept_are_named(boxes: Boxes, tmp_path: Path) -> None:
    async def losses(name: str, user: str, **owner: int) -> list[str]:
        passwd = images.entry("etc/passwd", b"app:x:1000:7::/:/bin/sh\nown:x:8:8::/:/bin/sh\n")
        layer = images.packed(images.directory("etc"), passwd, images.entry("f", **owner))
        built = images.write_layout(tmp_path / name, [layer], {"User": user})
        await boxes.driver.import_(name, built.path, Progress())
        box = await boxes(SandboxSpec(image=name))
        return [loss for loss in box.losses if loss.startswith(("user: the image gives", "file owners: 1 files"))]

    assert await losses("none", "own") == []
    if boxes.driver.facts.ids == "one":
        pytest.skip("all is root's here, which is a loss of its own")
    for number, user in enumerate(("app", "1000:7", "0:7", "1234:0", "1234")):
        (loss,) = await losses(f"group-{number}", user)
        group = 0 if "1234" in user else 7
        assert f"the group {group}," in loss
    (loss,) = await losses("owner", "", uid=70_000)
    assert "above 65535" in loss
    box = await boxes(SandboxSpec(image="owner"))
    await boxes.driver.snapshot(box, "over")  # its files are still nobody's
    assert loss in (await boxes(SandboxSpec(image="over"))).losses


@contextmanager
def mounted(tmp_path: Path, *words: str) -> Iterator[Path]:
    """A file system of the test's own."""
    if not ROOT:
        pytest.skip("only root can mount one")
    place = tmp_path / "mounted"
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", *words, str(place)], check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def least_free(place: Path) -> Iterator[dict[str, float]]:
    """The least parts of a file system's blocks and files that are free meanwhile."""
    least = {"blocks": 1.0, "files": 1.0}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            now = os.statvfs(place)
            least["blocks"] = min(least["blocks"], now.f_bavail / now.f_blocks)
            least["files"] = min(least["files"], now.f_favail / now.f_files)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield least
    finally:
        done.set()
        looking.join()


def spans() -> bytes:
    """A file of two bytes here and there, each over the end of a block."""
    places = [(8192 * number + 4095, 2) for number in range(9000)]
    table = f"{len(places)}\n" + "".join(f"{place}\n{size}\n" for place, size in places)
    data = table.encode() + bytes(-len(table) % 512) + b"ab" * len(places)
    info = tarfile.TarInfo("x")
    info.size = len(data)
    info.pax_headers = {f"GNU.sparse.{word}": said for word, said in (("major", "1"), ("minor", "0"), ("name", "x"))}
    info.pax_headers["GNU.sparse.realsize"] = str(8192 * (len(places) + 1))
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


on_tmpfs = pytest.mark.skipif(kernel() < (6, 3), reason="a tmpfs maps no owners with this kernel")


@on_tmpfs
@pytest.mark.parametrize("lack", ["blocks", "files", "spans"])
async def test_many_small_files_leave_room_for_others(boxes: Boxes, tmp_path: Path, lack: str) -> None:
    with (tmp_path / "many.tar").open("wb") as file:
        file.write(spans() if lack == "spans" else b"")
        for number in range(20_000):
            info = tarfile.TarInfo(f"f{number}")
            info.size = int(lack == "blocks")
            file.write(info.tobuf() + (b"x" + bytes(511) if info.size else b""))
        file.write(bytes(1024))
    option = "size=1G,nr_inodes=10k" if lack == "files" else "size=64M"
    with mounted(tmp_path, "-t", "tmpfs", "-o", option, "none") as small:
        boxes.driver._layers = type(boxes.driver._layers)(small / "images")
        with least_free(small) as least, pytest.raises(HostFault, match="no space left"):
            await boxes.driver.import_("many", tmp_path / "many.tar", Progress())
    assert min(least.values()) > 0.03


@on_tmpfs
async def test_two_at_once_leave_room_for_others(boxes: Boxes, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(images.packed(images.entry("f", os.urandom(80 << 20))))
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=150M", "none") as small:
        boxes.driver._layers = type(boxes.driver._layers)(small / "images")
        with least_free(small) as least:
            imports = (boxes.driver.import_(name, tmp_path / f"{name}.tar", Progress()) for name in "ab")
            ends = await asyncio.gather(*imports, return_exceptions=True)
    faults = [end for end in ends if not isinstance(end, ImageInfo)]
    assert faults
    assert all("no space left" in str(fault) for fault in faults)
    assert least["blocks"] > 0.01


async def test_a_packed_image_that_is_inflated_leaves_room_for_others(boxes: Boxes, tmp_path: Path) -> None:
    said = [{"Config": "c.json", "Layers": ["layer.tar"]}]
    tar_of(tmp_path / "image.tar", ("manifest.json", said), ("layer.tar", os.urandom(40 << 20)))
    (tmp_path / "image.gz").write_bytes(images.compressed((tmp_path / "image.tar").read_bytes(), "gzip"))
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=32M", "none") as small:
        boxes.driver._layers = type(boxes.driver._layers)(small / "images")
        with least_free(small) as least, pytest.raises(HostFault, match="no space left to inflate"):
            await boxes.driver.import_("x", tmp_path / "image.gz", Progress())
    assert least["blocks"] > 0.01


@pytest.mark.parametrize("lack", ["blocks", "files"])
def test_room_that_others_take_does_not_last(tmp_path: Path, lack: str) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=32M,nr_inodes=1000", "none") as small:
        room = Room.of(small)
        (small / "large").write_bytes(bytes((30 << 20) * (lack == "blocks")))
        for number in range(930 * (lack == "files")):
            (small / str(number)).touch()
        assert room.lasts(small, 0)
        (small / "more").write_bytes(bytes((1 << 20) * (lack == "blocks")))
        for number in range(930, 960 * (lack == "files")):
            (small / str(number)).touch()
        assert not room.lasts(small, 0)


async def test_what_is_still_to_be_fetched_is_left_room_for(boxes: Boxes, tmp_path: Path) -> None:
    from sandlot.api import LayerProgress
    from sandlot.drivers.native.extract import Bounds, _Left

    layer = boxes.driver._layers.begin()
    try:
        progress = Progress()
        whole = _Left.of(Bounds(), layer, progress).bytes
        progress.begin([LayerProgress(digest="", size=1 << 40, fetched=1 << 39)])
        assert whole > 0
        assert _Left.of(Bounds(), layer, progress).bytes == max(0, whole - (1 << 39))
    finally:
        layer.close()


@pytest.mark.parametrize("made", ["imported", "snapshot"])
async def test_an_image_with_a_name_has_its_files_when_power_is_lost(boxes: Boxes, tmp_path: Path, made: str) -> None:
    if shutil.which("mke2fs") is None:
        pytest.skip("`apt install e2fsprogs`")
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", str(disk)], check=True)
    (tmp_path / "root.tar").write_bytes(images.packed(images.entry("f", b"whole" * 10_000)))
    with mounted(tmp_path, "-o", "loop", str(disk)) as place:
        boxes.driver._layers = type(boxes.driver._layers)(place / "images")
        if made == "imported":
            await boxes.driver.import_("kept", tmp_path / "root.tar", Progress())
        else:
            box = await boxes()
            await sh(box, "for n in $(seq 10000); do printf whole; done > /f")
            await boxes.driver.snapshot(box, "kept")
        journal = os.open(place / "images", os.O_RDONLY)
        os.fsync(journal)  # names go to the disk every few seconds, and what is in files may not
        os.close(journal)
        shutil.copyfile(disk, tmp_path / "copy")  # what the disk has at that moment
    shutil.move(tmp_path / "copy", disk)
    with mounted(tmp_path, "-o", "loop", str(disk)) as place:
        (text,) = (path.read_text() for path in (place / "images").glob("*.json"))
        assert (place / "images/layers" / json.loads(text)["layers"][0] / "f").read_bytes() == b"whole" * 10_000


def tar_of(path: Path, *entries: tuple[str, object]) -> Path:
    data = (each if isinstance(each, bytes) else json.dumps(each).encode() for _, each in entries)
    path.write_bytes(images.packed(*(images.entry(name, each) for (name, _), each in zip(entries, data, strict=True))))
    return path


NO_DIGESTS = {"rootfs": {"diff_ids": []}}
ONE = {"rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}


@pytest.mark.parametrize(
    "entries",
    [
        (("oci-layout", {}), ("index.json", {})),
        (("oci-layout", {}), ("index.json", {"manifests": [1, 2]})),
        (("oci-layout", {}), ("index.json", {"manifests": {"a": 1}})),
        (("oci-layout", {}), ("index.json", b"{")),
        (("manifest.json", [{"Config": "c", "Layers": ["gone"]}]), ("c", ONE)),
        (("manifest.json", [{"Config": "gone", "Layers": []}]),),
        (("manifest.json", [{"Config": "c", "Layers": ["l"]}]), ("c", NO_DIGESTS), ("l", b"")),
    ],
)
async def test_a_malformed_archive_is_said(
    boxes: Boxes, tmp_path: Path, entries: tuple[tuple[str, object], ...]
) -> None:
    with pytest.raises((BadImage, Unsupported)):
        await boxes.driver.import_("x", tar_of(tmp_path / "x.tar", *entries), Progress())
    (tmp_path / "cut.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:700])
    with pytest.raises(BadImage):
        await boxes.driver.import_("x", tmp_path / "cut.tar", Progress())


async def test_a_layer_that_no_digest_names_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    built = images.write_layout(tmp_path / "layout", [images.packed(images.directory("etc"))])
    blobs = built.path / "blobs/sha256"
    index = json.loads((built.path / "index.json").read_text())
    document = json.loads((blobs / built.manifest.removeprefix("sha256:")).read_text())
    for what, where, new in (
        ({"rootfs": {"type": "layers", "diff_ids": []}}, document, "config"),
        (document, index, "manifests"),
    ):
        data = json.dumps(what).encode()
        (blobs / images.digest(data).removeprefix("sha256:")).write_bytes(data)
        said = {"digest": images.digest(data), "size": len(data)}
        where[new] = said if new == "config" else [said]
    (built.path / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadImage, match="1 layers, and its config names 0"):
        await boxes.driver.import_("x", built.path, Progress())


async def test_an_archive_of_too_many_layers_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    layer = images.packed(images.directory("etc"))
    config = {"rootfs": {"diff_ids": [images.digest(layer)] * 501}}
    said = [{"Config": "c.json", "Layers": ["layer.tar"] * 501}]
    tar_of(tmp_path / "x.tar", ("manifest.json", said), ("c.json", config), ("layer.tar", layer))
    with pytest.raises(BadImage, match="501 layers, more than 500"):
        await boxes.driver.import_("x", tmp_path / "x.tar", Progress())


async def test_a_root_file_system_with_an_index_is_one(boxes: Boxes, tmp_path: Path) -> None:
    for number, name in enumerate(("index.json", "manifest.json")):
        tar_of(tmp_path / "root.tar", (name, {}), ("etc/passwd", b"x"))
        info = await boxes.driver.import_(f"root-{number}", tmp_path / "root.tar", Progress())
        assert (info.digest, info.files) == (None, 3)


async def test_a_member_that_is_a_link_to_another_is_found(boxes: Boxes, tmp_path: Path) -> None:
    layer = images.packed(images.entry("f", b"x"))
    config = {"rootfs": {"diff_ids": [images.digest(layer)] * 2}}
    said = [{"Config": "c.json", "Layers": ["a/layer.tar", "b/layer.tar"]}]
    (tmp_path / "docker.tar").write_bytes(
        images.packed(
            images.entry("manifest.json", json.dumps(said).encode()),
            images.entry("c.json", json.dumps(config).encode()),
            images.entry("a/layer.tar", layer),
            images.link("b/layer.tar", "../a/layer.tar"),
        )
    )
    assert (await boxes.driver.import_("linked", tmp_path / "docker.tar", Progress())).files == 2


async def test_a_node_without_descriptors_says_so(
    boxes: Boxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.tar").write_bytes(images.packed(images.entry("f", os.urandom(8 << 20))))
    real = os.memfd_create

    def none_left(name: str, *more: Any) -> int:
        if name == "unpack":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, *more)

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(HostFault, match="Too many open files"):
        await asyncio.wait_for(boxes.driver.import_("x", tmp_path / "big.tar", Progress()), 60)
    assert layer_directories(boxes) == []


async def test_who_looks_whether_an_image_is_in_use_is_in_nobodys_way(boxes: Boxes, tmp_path: Path) -> None:
    tar_of(tmp_path / "root.tar", ("etc/passwd", b"x"))
    await boxes.driver.import_("looked-at", tmp_path / "root.tar", Progress())
    store = boxes.driver._layers
    snapshot = store.find("looked-at")
    lock = store.lock(snapshot.layers[0], fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, (lock,)).start()
    await boxes(SandboxSpec(image="looked-at"))
    gone = Snapshot(ImageInfo(name="gone", base="gone", created_at=0.0), (store.begin().id,))
    with pytest.raises(NotFound, match="deleted a moment ago"):
        store.use(gone)


async def test_what_a_killed_node_left_is_removed(boxes: Boxes, tmp_path: Path) -> None:
    tar_of(tmp_path / "root.tar", ("etc/passwd", b"x"))
    await boxes.driver.import_("whole", tmp_path / "root.tar", Progress())
    store = boxes.driver._layers
    (store.directory / "killed.lock").touch()
    fetching = await store.only_one("being-fetched")
    await boxes.driver.prune()
    assert [path.name for path in store.directory.glob("*.lock")] == ["being-fetched.lock"]
    store.let_go("being-fetched", fetching)


async def test_no_room_for_the_name_is_said(boxes: Boxes, tmp_path: Path) -> None:
    tar_of(tmp_path / "root.tar", ("etc/passwd", b"x"))
    store = boxes.driver._layers
    await boxes.driver.import_("there", tmp_path / "root.tar", Progress())
    found = store.find("there")
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=4k", "none") as full:
        (full / "filled").write_bytes(bytes(4096))
        full.chmod(0o700)
        with pytest.raises(HostFault, match="No space left"):
            type(store)(full).name(found.info.model_copy(update={"name": "x"}), found.layers)
        with suppress(FileNotFoundError):
            (full / "filled").unlink()


MIRROR = ["apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages"]


async def test_an_image_that_mmdebstrap_made_is_kept_whole(boxes: Boxes, tmp_path: Path) -> None:
    if not ROOT or shutil.which("mmdebstrap") is None or shutil.which("setcap") is None:
        pytest.skip("needs root, and `apt install mmdebstrap libcap2-bin`")
    told = subprocess.run(MIRROR, capture_output=True, text=True, check=False).stdout.splitlines()
    mirror = next((line.partition("|")[2] for line in told if line.startswith("Debian|")), None)
    if mirror is None:
        pytest.skip("apt knows no Debian mirror here")
    # Unpacked and not set up: no program of it has to run, and what would set a capability is set by hand.
    words = ["--variant=extract", "--include=busybox-static", "--quiet", "bookworm", str(tmp_path / "root.tar"), mirror]
    capable = "--extract-hook=cd $1/bin && cp busybox ping && setcap cap_net_raw+ep ping && ln -s busybox sh"
    done = subprocess.run(["mmdebstrap", capable, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mmdebstrap cannot make one here: {done.stderr[-200:]}")
    await boxes.driver.import_("debian", tmp_path / "root.tar", Progress())
    (made,) = layer_directories(boxes)
    assert os.getxattr(made / "bin/ping", "security.capability")[4:8] == b"\x00\x20\x00\x00"
    box = await boxes(SandboxSpec(image="debian"))
    assert (await sh(box, "/bin/busybox stat -c %u:%g /bin/busybox"))[1] == "0:0\n"


async def test_a_shell_of_busybox_is_sh_and_says_what_it_lacks(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    (tmp_path / "root.tar").write_bytes(images.busybox_root())
    async with local_node(tmp_path / "state") as node:
        await node.import_image("busybox", tmp_path / "root.tar")
        box = await node.create(SandboxSpec(image="busybox"))
        shell = await node.open_shell(box.id, ShellSpec())
        assert any("bash" in lack for lack in shell.lacks)
        await node.run_in_shell(box.id, shell.id, ShellRun(command="cd /bin; x=1"))
        assert (await node.run_in_shell(box.id, shell.id, ShellRun(command="echo $x $(pwd)"))).stdout == "1 /bin\n"
        assert (await node.run(box.id, Run(argv=("sh", "-c", "echo yes")))).stdout == "yes\n"
