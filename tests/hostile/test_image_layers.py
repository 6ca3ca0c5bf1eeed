"""Attack: have an image unpacked whose layers name files by absolute paths and through `..`, go through links of their
own, delete what is above them, hold devices, unpack to more than there is room for, go deeper than who removes them can
follow, say more in their headers than a node has memory for, hold what an overlay would take for
its own marks, set-id programs, names that are none; and start a box from one whose /proc, /sys, /dev and /etc are links
to elsewhere.

Must hold: nothing of the host is written, deleted or read, neither while it is unpacked nor by a box that stands on
it; no device is made; what is too much ends at its bound and leaves nothing.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import ImageInfo, Volume
from sandlot.drivers.native import extract
from sandlot.drivers.native.extract import Bounds
from sandlot.drivers.native.plan import Do, Plan
from sandlot.errors import BadImage, SandlotError
from tests.support import images
from tests.support.hostile import Arena
from tests.support.images import directory, entry, link, packed

PROMISE = "files"

# Neither a box nor another root: the program as it is, without its new root and its look at names.
OUTSIDE = (
    extract._PROGRAM.replace("os.chroot(sys.argv[1])", "pass")
    .replace('os.chdir("/")', "os.chdir(sys.argv[1])")
    .replace('".." in parts', "False")
    .replace('options["owners"] = ', 'options["owners"] = False and ')
)


async def unpacked(arena: Arena, tmp_path: Path, *layers: bytes, name: str = "hostile") -> Path:
    """The directory that an image of these layers became."""
    before = set(directories(arena))
    built = images.write_layout(tmp_path / f"layout-{name}", [*layers])
    await arena.node.import_image(name, built.path)
    (made,) = set(directories(arena)) - before
    return made


def directories(arena: Arena) -> list[Path]:
    return [path for path in arena.driver._layers.directory.glob("layers/*") if path.is_dir()]


async def refused(arena: Arena, tmp_path: Path, said: str, *layers: bytes) -> None:
    """It is refused in those words, and nothing is left."""
    with pytest.raises(BadImage, match=said):
        await unpacked(arena, tmp_path, *layers)
    left = [str(path) for path in arena.driver._layers.directory.rglob("*") if path.name != "layers"]
    assert left == []


def outside(tmp_path: Path, *layers: bytes) -> None:
    """The same layers where only the program itself stands between them and the host."""
    root = tmp_path / "outside"
    root.mkdir(exist_ok=True)
    for number, layer in enumerate(layers):
        options = json.dumps({"entries": 1000, "bytes": 1 << 30, "block": 4096, "first": number == 0})
        words = [sys.executable, "-I", "-S", "-X", "utf8", "-c", OUTSIDE, str(root), options]
        subprocess.run(words, input=layer, check=True, capture_output=True)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the host with files that layers aim at."""
    place = tmp_path / "victim"
    place.mkdir()
    place.chmod(0o777)
    for name in ("file", "linked"):
        (place / name).write_text("intact")
        (place / name).chmod(0o666)
    return place


def intact(victim: Path) -> bool:
    found = {path.name: path.read_text() if path.is_file() else "directory" for path in victim.iterdir()}
    return found == {"file": "intact", "linked": "intact"} and (victim / "linked").stat().st_nlink == 1


def ways_out(victim: Path) -> dict[str, list[bytes]]:
    """Layers that write or delete the victim's files, each in another way."""
    deep = "/".join([".."] * 20)
    return {
        "through a link": [packed(link("way", str(victim)), entry("way/file", b"attacked"))],
        "through a link of a layer below": [packed(link("way", str(victim))), packed(entry("way/file", b"attacked"))],
        "a link of dots": [packed(link("way", f"{deep}{victim}"), entry("way/file", b"attacked"))],
        "a hard link": [
            packed(link("way", str(victim)), entry("mine", kind=tarfile.LNKTYPE, linkname="way/linked")),
        ],
        "a mark of deletion": [packed(link("way", str(victim))), packed(entry("way/.wh.file"))],
        "a mark for a directory": [
            packed(directory("d"), link("d/way", str(victim))),
            packed(entry("d/way/.wh.linked"), entry("d/way/.wh..wh..opq")),
        ],
        "a directory's mode": [packed(link("way", str(victim.parent)), directory("way/victim/new"))],
    }


async def test_no_layer_leads_out(arena: Arena, tmp_path: Path, victim: Path) -> None:
    for number, (way, layers) in enumerate(ways_out(victim).items()):
        try:
            await unpacked(arena, tmp_path, *layers, name=f"way-{number}")
        except BadImage as error:
            assert "hard" in way, error  # inside there is nothing that it could be linked to
        assert intact(victim), way


@pytest.mark.control
def test_control_outside_a_box_each_of_them_does(tmp_path: Path, victim: Path) -> None:
    for number, (way, layers) in enumerate(ways_out(victim).items()):
        place = tmp_path / str(number)
        place.mkdir()
        outside(place, *layers)
        assert not intact(victim), way
        for path in [*victim.iterdir(), place / "outside/mine"]:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        for name in ("file", "linked"):
            (victim / name).write_text("intact")


DOTS = ("../x", "a/../../x", "./../x", "..", "a/..")


async def test_names_with_dots_are_refused_and_absolute_ones_are_inside(
    arena: Arena, tmp_path: Path, victim: Path
) -> None:
    for number, name in enumerate(DOTS):
        await refused(arena, tmp_path / str(number), "leads out of it", packed(entry(name, b"attacked")))
        hard = packed(entry("a", b"x"), entry("b", kind=tarfile.LNKTYPE, linkname=name))
        await refused(arena, tmp_path / f"hard-{number}", "leads out of it", hard)
    made = await unpacked(arena, tmp_path, packed(entry(f"{victim}/file", b"attacked")))
    assert intact(victim)
    assert (made / str(victim)[1:] / "file").read_text() == "attacked"


@pytest.mark.control
def test_control_outside_a_name_with_dots_leads_out(tmp_path: Path) -> None:
    outside(tmp_path, packed(entry("../x", b"attacked")))
    assert (tmp_path / "x").read_text() == "attacked"


@pytest.mark.parametrize("mark", [".wh.", ".wh..", ".wh...", "a/.wh..", "a/.wh..."])
async def test_a_mark_that_deletes_nothing_is_refused(arena: Arena, tmp_path: Path, mark: str) -> None:
    await refused(arena, tmp_path, "nothing is deleted", packed(directory("a")), packed(entry(mark)))


async def test_a_mark_takes_what_is_below_and_nothing_else(arena: Arena, tmp_path: Path) -> None:
    below = packed(directory("a"), entry("a/one", b"1"), entry("a/two", b"2"), directory("b"), entry("b/three", b"3"))
    # What the layer itself has stays, whichever comes first.
    over = packed(entry("a/new", b"n"), entry("a/.wh..wh..opq"), entry("a/two", b"own"), entry(".wh.b"))
    made = await unpacked(arena, tmp_path, below, over)
    found = {str(path.relative_to(made)): path.read_text() for path in made.rglob("*") if path.is_file()}
    assert {name: text for name, text in found.items() if name != "etc/hosts"} == {"a/new": "n", "a/two": "own"}
    assert not (made / "b").exists()


DEVICES = packed(
    *(
        entry(name, kind=kind, devmajor=1, devminor=3)
        for name, kind in (("c", tarfile.CHRTYPE), ("b", tarfile.BLKTYPE))
    ),
    entry("whiteout", kind=tarfile.CHRTYPE, devmajor=0, devminor=0),
    entry("p", kind=tarfile.FIFOTYPE),
)


async def test_no_device_comes_out_of_one(arena: Arena, tmp_path: Path) -> None:
    made = await unpacked(arena, tmp_path, DEVICES)
    assert {path.name for path in made.iterdir()} == {"p", "etc", "root", "tmp"}
    assert (made / "p").is_fifo()


@pytest.mark.control
def test_control_outside_root_gets_devices(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tarfile.open(fileobj=io.BytesIO(DEVICES)) as tar:
        tar.extractall(tmp_path, **({"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}))
    assert (tmp_path / "c").is_char_device()


def zeros(megabytes: int) -> bytes:
    """A packed tar of one file of zeros: members one after another, so that a bomb takes no time to make."""
    info = tarfile.TarInfo("zeros")
    info.size = megabytes << 20
    piece = gzip.compress(bytes(16 << 20), 9, mtime=0)
    return gzip.compress(info.tobuf(), mtime=0) + piece * (megabytes // 16) + gzip.compress(bytes(1024), mtime=0)


async def bomb(arena: Arena, tmp_path: Path, data: bytes, bounds: Bounds) -> Path:
    (tmp_path / "bomb.tar").write_bytes(data)
    arena.driver.bounds = bounds
    await arena.node.import_image("bomb", tmp_path / "bomb.tar")
    (made,) = directories(arena)
    return made


async def test_a_bomb_ends_at_its_bound(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="unpacks to more than"):
        await bomb(arena, tmp_path, zeros(10_240), Bounds(bytes=64 << 20))
    assert directories(arena) == []


@pytest.mark.control
async def test_control_with_a_larger_bound_it_goes_off(arena: Arena, tmp_path: Path) -> None:
    made = await bomb(arena, tmp_path, zeros(128), Bounds(bytes=1 << 30))
    assert (made / "zeros").stat().st_size == 128 << 20


def many(count: int) -> bytes:
    return gzip.compress(b"".join(tarfile.TarInfo(f"f{n}").tobuf() for n in range(count)) + bytes(1024), 1)


async def test_entries_end_at_their_bound(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="more than 1000 entries"):
        await bomb(arena, tmp_path, many(1001), Bounds(entries=1000))
    assert directories(arena) == []


@pytest.mark.control
async def test_control_with_a_larger_bound_there_are_as_many(arena: Arena, tmp_path: Path) -> None:
    made = await bomb(arena, tmp_path, many(1001), Bounds(entries=2000))
    assert len([path for path in made.iterdir() if path.name.startswith("f")]) == 1001


async def test_directories_are_no_deeper_than_who_removes_them_can_go(arena: Arena, tmp_path: Path) -> None:
    for number, depth in enumerate((300, 5_000, 100_000)):
        deep = packed(directory("d/" * depth))
        await refused(arena, tmp_path / str(number), "longer than 4095 bytes or 256 directories", deep)


def hops() -> bytes:
    """Each name is within the bound, and begins with a link to where the last one ended: 2,010 directories."""
    entries, before = [directory("base")], "base"
    for number in range(8):
        place = f"{before}/{'d/' * 250}d"
        entries += [directory(place), link(f"l{number}", place)]
        before = f"l{number}"
    return packed(*entries)


async def test_links_lead_no_deeper(arena: Arena, tmp_path: Path) -> None:
    await refused(arena, tmp_path, "leads to more than 4095 bytes or 256 directories", hops())
    # A path that is longer than the kernel takes one, too: what is there could be neither looked at nor counted.
    long, entries, before = "n" * 250, [directory("base")], "base"
    for number in range(3):
        place = "/".join([before, *[long] * 10])
        entries += [directory(place), link(f"l{number}", place)]
        before = f"l{number}"
    await refused(arena, tmp_path / "long", "leads to more than 4095 bytes", packed(*entries))


@pytest.mark.control
async def test_control_without_the_bound_they_are(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "_PROGRAM", extract._PROGRAM.replace("4095, 256", "40950, 4000"))
    made = await unpacked(arena, tmp_path, hops())
    deepest = subprocess.run(["find", made, "-printf", "%d\\n"], capture_output=True, text=True, check=True).stdout
    subprocess.run(["rm", "-rf", made / "base"], check=True)
    assert max(map(int, deepest.split())) > 2000


async def test_what_is_deeper_all_the_same_is_removed_and_in_nobodys_way(arena: Arena, tmp_path: Path) -> None:
    store = arena.driver._layers
    layer = store.begin()
    place = os.open(layer.path, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", 0o700, dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    store.name(ImageInfo(name="deep", base="deep", created_at=1.0), (layer.id,))
    layer.close()
    with pytest.raises(SandlotError, match="too deep to be exported"):
        async for _ in arena.node.export_image("deep"):
            pass
    await arena.node.delete_image("deep")
    await unpacked(arena, tmp_path, packed(directory("etc")), name="next")
    await arena.node.delete_image("next")
    left = [str(path) for path in store.directory.rglob("*") if path.name != "layers"]
    assert left == []


async def test_what_is_said_about_one_entry_is_bounded(arena: Arena, tmp_path: Path) -> None:
    for number, kind in enumerate((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)):
        layer = _header(type=kind, size=b"77777777777\0")  # 8 GB
        await refused(arena, tmp_path / str(number), "bytes about one entry", layer)


async def test_what_is_said_about_all_entries_is_bounded(arena: Arena, tmp_path: Path) -> None:
    words = tarfile.TarInfo.create_pax_global_header({f"comment{n}": "x" * 30_000 for n in range(2)})
    await refused(arena, tmp_path, "about all its entries", words + words + bytes(1024))


# What the node itself reads, where an image lies in a tar: as a program of its own, whose memory shows it.
OPENED = """
import resource, sys
from pathlib import Path
from sandlot.drivers.oci import archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    archive.opened(Path(sys.argv[1]), archive.Spool(Path(sys.argv[1]).parent))
except Exception as error:
    print(type(error).__name__)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def opened(file: Path) -> list[str]:
    """What is wrong with a tar (nothing: it is taken for a root file system), and how many megabytes it took to see."""
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(file)], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_the_headers_of_a_tar_that_is_sent_take_little_of_the_node(tmp_path: Path) -> None:
    comment = 200 << 20
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, comment
    with (tmp_path / "words.tar").open("wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT) + b"%d comment=" % comment)
        file.truncate(512 + comment + 1536)
    assert int(opened(tmp_path / "words.tar")[-1]) < 30
    with (tmp_path / "members.tar").open("wb") as file:
        file.write(LAYOUT[: 4 * 512])
        file.writelines(tarfile.TarInfo(f"f{number}").tobuf() for number in range(200_000))
        file.write(bytes(1024))
    *said, megabytes = opened(tmp_path / "members.tar")
    assert said == ["BadImage"]
    assert int(megabytes) < 30


# It is an image, and a malformed one.
LAYOUT = packed(*(entry(name, b"{}") for name in ("oci-layout", "index.json")))


@pytest.mark.parametrize("kind", ["members of one name", "members", "words", "words about nothing"])
def test_nobody_looks_far_into_a_tar_for_an_image(tmp_path: Path, kind: str) -> None:
    words = tarfile.TarInfo("x")
    words.type = tarfile.XHDTYPE
    if kind == "words":
        words.size = 1 << 20
    comment = b"%d comment=" % words.size
    about = words.tobuf() + (comment.ljust(words.size - 1, b"x") + b"\n" if words.size else b"")

    def begun(count: int) -> bytes:
        if kind == "members of one name":
            return tarfile.TarInfo("f").tobuf() * count
        if kind == "members":
            return b"".join(tarfile.TarInfo(f"f{number}").tobuf() for number in range(count))
        return about * count

    few, many = (4, 5) if kind == "words" else (3990, 10_000)
    for pack in ("plain", "gzip"):
        (tmp_path / "few.tar").write_bytes(images.compressed(begun(few - 2) + LAYOUT, pack))
        (tmp_path / "many.tar").write_bytes(images.compressed(begun(many) + LAYOUT, pack))
        assert opened(tmp_path / "few.tar")[:-1] == ["BadImage"]
        assert opened(tmp_path / "many.tar")[:-1] == []


def said(**words: str) -> bytes:
    """A layer with a directory and a file of which a pax header says so."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/f", tarfile.REGTYPE)):
            info, data = entry(name, b"" if kind == tarfile.DIRTYPE else b"x", kind)
            info.pax_headers = words
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


OVERLAY = {
    f"SCHILY.xattr.{kind}.overlay.{word}": value
    for kind in ("user", "trusted")
    for word, value in (("opaque", "y"), ("redirect", "/etc"), ("metacopy", ""), ("whiteout", "y"))
}


def attributes(made: Path) -> set[str]:
    return {name for path in (made / "d", made / "d/f") for name in os.listxattr(path)}


async def test_marks_of_an_overlay_are_left_out(arena: Arena, tmp_path: Path) -> None:
    made = await unpacked(arena, tmp_path, said(**OVERLAY, **{"SCHILY.xattr.user.mine": "kept"}))
    if "user.mine" not in attributes(made):
        pytest.skip("the file system of temporary files keeps no attributes")
    assert attributes(made) == {"user.mine"}


@pytest.mark.control
async def test_control_a_program_that_trusts_them_writes_them(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = extract._PROGRAM.replace('and not name.startswith("user.overlay.")', "")
    monkeypatch.setattr(extract, "_PROGRAM", program)
    made = await unpacked(arena, tmp_path, said(**OVERLAY, **{"SCHILY.xattr.user.mine": "kept"}))
    if "user.mine" not in attributes(made):
        pytest.skip("the file system of temporary files keeps no attributes")
    assert "user.overlay.opaque" in attributes(made)


async def test_names_are_only_names(arena: Arena, tmp_path: Path) -> None:
    names = ("a\nb", "-rf", "$(touch owned)", "\x1b]0;title\x07", "\udcff\udcfe", "x" * 255, "*", " ", '"}')
    made = await unpacked(
        arena, tmp_path, packed(*(entry(name, name.encode("utf-8", "surrogateescape")) for name in names))
    )
    for name in names:
        assert (made / name).read_bytes() == name.encode("utf-8", "surrogateescape")
    for number, words in enumerate(({"path": "a\0b"}, {"linkpath": "a\0b"}, {"path": "x" * 256})):
        layer = said(**words) if "path" in words else _link_with(words)
        await _refused_beside(arena, tmp_path / str(number), layer)


def _link_with(words: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info, _ = link("l", "x")
        info.pax_headers = words
        tar.addfile(info)
    return out.getvalue()


async def _refused_beside(arena: Arena, tmp_path: Path, layer: bytes) -> None:
    before = directories(arena)
    with pytest.raises(BadImage):
        await unpacked(arena, tmp_path, layer, name="refused")
    assert directories(arena) == before


def _header(**fields: Any) -> bytes:
    """A header in which tarfile would not write such numbers."""
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    for name, value in fields.items():
        at, length = {"size": (124, 12), "mode": (100, 8), "uid": (108, 8), "mtime": (136, 12), "type": (156, 1)}[name]
        block[at : at + length] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(1024)


async def test_numbers_that_make_no_sense_are_refused(arena: Arena, tmp_path: Path) -> None:
    negative = b"\xff" * 12
    for number, layer in enumerate(
        (
            _header(size=negative),
            _header(size=b"\x80" + b"\xff" * 11),
            _header(size=b"zzzzzzzzzzz\0"),
            _header(type=b"?"),
            said(size="-5"),
            said(size="1e9"),
            said(mtime="soon"),
            said(**{"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 62)}),
            said(**{"GNU.sparse.map": "0,99999999999", "GNU.sparse.size": "99999999999"}),
            said(**{"GNU.sparse.map": "0,1", "GNU.sparse.size": "9" * 20}),
            said(**{"GNU.sparse.map": f"{'9' * 20},1", "GNU.sparse.size": "9" * 21}),
        )
    ):
        await refused(arena, tmp_path / str(number), "layer 1 of 1", layer)
    made = await unpacked(arena, tmp_path, _header(mtime=negative, uid=b"\x80" + b"\xff" * 7, mode=b"0177777\0"))
    assert stat.S_IMODE((made / "x").stat().st_mode) == 0o7777


def evil() -> bytes:
    """`id` as a set-id program."""
    return packed(entry("evil", Path("/usr/bin/id").read_bytes(), mode=0o6755))


@pytest.mark.promise("privileges")
async def test_a_set_id_program_of_an_image_gains_nothing(arena: Arena, tmp_path: Path) -> None:
    made = await unpacked(arena, tmp_path, images.glibc_root(), evil())
    assert (made / "evil").stat().st_mode & stat.S_ISUID
    for path in (made.parent, made.parents[1]):  # nobody else of this host gets as far as the program
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    if not arena.users:
        return
    box = await arena.box(image="hostile")
    assert (await box.run(["/evil", "-u"], user=1000)).stdout == "1000\n"


@pytest.mark.control
@pytest.mark.promise("privileges")
async def test_control_with_setuid_it_does(arena: Arena, tmp_path: Path) -> None:
    if not arena.users:
        pytest.skip("there is one user inside")
    await unpacked(arena, tmp_path, images.glibc_root(), evil())
    box = await arena.box(image="hostile", setuid=True)
    assert (await box.run(["/evil", "-u"], user=1000)).stdout == "0\n"


LOOK = (
    "cat /proc/self/comm /proc/sys/user/max_user_namespaces; ls /dev/null; cat /proc/kcore | wc -c; "
    "echo x > /proc/sys/kernel/hostname || echo no; ls /sys/class"
)


def elsewhere(victim: Path) -> list[bytes]:
    """Root file systems whose own places are links."""
    deep = "/".join([".."] * 20)
    targets = (f"{deep}{victim}", str(victim), "bin", "/proc/self/fd", "/proc/1/root", "dev", "missing")
    names = ("proc", "sys", "dev", "etc", "tmp", "root", "mnt")
    return [packed(*(link(name, target) for name in names)) for target in targets]


async def test_a_box_whose_own_places_are_links_is_a_box(arena: Arena, tmp_path: Path, victim: Path) -> None:
    for number, layer in enumerate(elsewhere(victim)):
        await unpacked(arena, tmp_path, images.busybox_root(), layer, name=f"links-{number}")
        box = await arena.box(image=f"links-{number}")
        told = await box.run(
            "cat /proc/self/comm /proc/sys/user/max_user_namespaces; ls /dev/null; ls /sys/class", cwd="/"
        )
        assert told.stdout.splitlines()[:3] == ["cat", "0", "/dev/null"], (number, told)
        assert (
            await box.run("cat /proc/kcore | wc -c; echo x > /proc/sys/kernel/hostname || echo no", cwd="/")
        ).stdout == ("0\nno\n")
        assert intact(victim)
        with pytest.raises(SandlotError):
            await box.read_file("/etc/shadow")
        await box.close()


def without_the_own_places(plan: Plan) -> Plan:
    own = ("/upper/proc", "/upper/sys", "/upper/dev")
    return replace(plan, steps=tuple(s for s in plan.steps if not (s.kind is Do.MKDIR and s.target.endswith(own))))


@pytest.mark.control
async def test_control_without_places_of_its_own_they_lead_elsewhere(arena: Arena, tmp_path: Path) -> None:
    await unpacked(
        arena,
        tmp_path,
        images.busybox_root(),
        packed(link("proc", "a"), directory("a"), directory("sys"), directory("dev")),
    )
    box = await arena.box(image="hostile", without=without_the_own_places)
    assert (await box.run(["readlink", "/proc"], cwd="/")).stdout == "a\n"


async def test_no_link_of_an_image_leads_a_volume_into_another(arena: Arena, tmp_path: Path, victim: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    numbers = range(3, 24)  # descriptors of the helper while it makes the box
    await unpacked(arena, tmp_path, packed(*(link(f"mnt{number}", f"/proc/self/fd/{number}") for number in numbers)))
    for number in numbers:
        volumes = (
            Volume(source=str(other), target=f"/mnt{number}/made"),
            Volume(source=str(victim), target="/volume"),
        )
        with suppress(SandlotError):
            await (await arena.box(image="hostile", volumes=volumes)).close()
        assert intact(victim), number
        assert list(other.iterdir()) == [], number


@pytest.mark.parametrize("user", ["\u00b2", "9" * 5000, "1:\u00b2"])
async def test_a_user_that_is_none_is_said(arena: Arena, tmp_path: Path, user: str) -> None:
    built = images.write_layout(tmp_path / "x", [packed(directory("etc"))], {"User": user})
    with pytest.raises(BadImage, match="does not know"):
        await arena.node.import_image("x", built.path)


async def test_a_malformed_config_and_a_pipe_in_its_place_are_said_at_once(arena: Arena, tmp_path: Path) -> None:
    built = images.write_layout(tmp_path / "nul", [packed(directory("etc"))], {"WorkingDir": "/a\0b"})
    with pytest.raises(BadImage, match="a NUL in what programs are to be given"):
        await arena.node.import_image("nul", built.path)
    pipe = packed(directory("etc"), entry("etc/passwd", kind=tarfile.FIFOTYPE))
    built = images.write_layout(tmp_path / "pipe", [pipe], {"User": "app"})
    with pytest.raises(BadImage, match="'app', whom its /etc/passwd does not know"):
        await arena.node.import_image("pipe", built.path)


async def test_the_user_of_an_image_is_looked_up_in_the_image(arena: Arena, tmp_path: Path) -> None:
    for number, way in enumerate(("/etc/passwd", "../../../../etc/passwd", "/proc/self/root/etc/passwd")):
        layer = packed(directory("etc"), link("etc/passwd", way))
        built = images.write_layout(tmp_path / str(number), [layer], {"User": "daemon"})
        with pytest.raises(BadImage, match="'daemon', whom its /etc/passwd does not know"):
            await arena.node.import_image("x", built.path)
