"""Promises of images from elsewhere:
1. A box made from a pulled image sees its files, owners, modes, links, marks of deletion, and runs as it says.
2. An image is one directory for all its boxes; two names of one digest are two names of one directory.
3. Boxes of such images are reset, snapshotted, forked, compared and exported as others are, and adopted after a kill.
4. OCI layouts, `docker save`, root file systems: from a directory or a file, packed or not.
5. A directory of the host is an image where it lies, and is never written.
6. An image with nothing but busybox runs.
7. Links, holes, attributes, times, and all that later layers say of earlier ones, are kept.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Progress
from sandlot.drivers.layers import MOST_LAYERS
from sandlot.errors import Conflict, InvalidRequest, NotFound
from tests.support import images
from tests.support.images import Built, Registry
from tests.support.native import Boxes, sh

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
    with tarfile.open(fileobj=io.BytesIO(rootfs)) as tar:
        trust = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        tar.extractall(tmp_path / "directory", **trust)
    forms = {
        "layout": built.path,
        "oci": tmp_path / "oci.tar",
        "docker": tmp_path / "docker.tar",
        "plain": tmp_path / "plain.tar",
        "gzip": tmp_path / "gzip.tar",
        "zstd": tmp_path / "zstd.tar",
        "directory": tmp_path / "directory",
    }
    for name, path in forms.items():
        info = await boxes.driver.import_(name, path, Progress())
        assert info.kind == "imported"
        box = await boxes(SandboxSpec(image=name))
        whole = name in ("layout", "oci", "docker")
        text = "cat /srv/one; echo $HOME" if whole else "ls -d /root; echo x"
        assert (await sh(box, text))[1].splitlines()[0] == ("of the image" if whole else "/root"), name
        assert info.config.workdir == ("/srv" if whole else None)
    with pytest.raises(Conflict, match="plain"):
        await boxes.driver.import_("plain", tmp_path / "plain.tar", Progress())
    reference = await boxes.driver.import_("busybox:test", tmp_path / "plain.tar", Progress())
    assert reference.name == "docker.io/library/busybox:test"
    assert (await sh(await boxes(SandboxSpec(image="busybox:test")), "echo yes"))[1] == "yes\n"


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
