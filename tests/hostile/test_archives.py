"""Attack: have an archive extracted inside that names files by absolute paths and through `..`, goes through symbolic
links and a hard link to one, holds devices, or unpacks to more than there is room for. Written in and extracted there
by GNU tar and by Python's tarfile, both told to trust it; and unpacked by `upload`, which trusts none.

Must hold: nothing outside the box is written, no device is made, a bomb ends at the disk limit, the box goes on.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Limits, Volume
from sandlot.errors import InvalidRequest, SandlotError
from sandlot.sandbox import Sandbox
from tests.support.hostile import PYTHON, Arena

PROMISE = "files"

BY_TAR = "tar --absolute-names --extract --overwrite --file $1"
BY_PYTHON = """
import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    for member in archive:
        trust = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        try: archive.extract(member, **trust)
        except (OSError, tarfile.TarError) as error: print(error, file=sys.stderr)
"""
EXTRACTORS = {"tar": ["sh", "-c", BY_TAR, "sh", "archive"], "python": [PYTHON, "-I", "-c", BY_PYTHON, "archive"]}


def archive(*members: tuple[str, bytes, str, bytes]) -> bytes:
    """Name, type, link target, content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as writer:
        for name, kind, target, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(content)
            if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                member.devmajor, member.devminor, member.mode = 1, 3, 0o666
            writer.addfile(member, io.BytesIO(content))
    return out.getvalue()


def leading_out(victim: Path) -> bytes:
    """An archive that overwrites `victim`'s files `absolute`, `dots`, `through` and `hard`, each by another way."""
    file, link, hard = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    return archive(
        (f"{victim}/absolute", file, "", b"attacked"),
        (f"{'../' * 20}{str(victim)[1:]}/dots", file, "", b"attacked"),
        ("way", link, str(victim), b""),
        ("way/through", file, "", b"attacked"),
        ("first", link, f"{victim}/hard", b""),
        ("second", hard, "first", b""),
        ("second", file, "", b"attacked"),
    )


async def extract(box: Sandbox, extractor: str, data: bytes) -> str:
    await box.write_file("/root/in/archive", data)
    return (await box.run(EXTRACTORS[extractor], cwd="/root/in", timeout=60)).stderr


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the host with files that the archive aims at."""
    directory = tmp_path / "victim"
    directory.mkdir()
    directory.chmod(0o777)
    for name in ("absolute", "dots", "through", "hard"):
        (directory / name).write_text("intact")
        (directory / name).chmod(0o666)
    return directory


def attacked(victim: Path) -> set[str]:
    return {path.name for path in victim.iterdir() if path.read_text() != "intact"}


async def test_no_way_in_an_archive_leads_out(arena: Arena, victim: Path) -> None:
    for extractor in EXTRACTORS:
        box = await arena.box()
        assert (await box.run(["mkdir", "-p", str(victim)])).ok  # so that only the box stands in the way
        await extract(box, extractor, leading_out(victim))
        assert not attacked(victim), extractor
        assert await box.read_file(f"{victim}/absolute") == b"attacked", extractor  # it is there: inside
        assert await box.read_file(f"{victim}/dots") == b"attacked", extractor


async def bits(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1 << 20):
        yield data[at : at + (1 << 20)]


async def test_no_way_in_an_upload_leads_out_of_its_directory(arena: Arena, victim: Path) -> None:
    box = await arena.box()
    with tarfile.open(fileobj=io.BytesIO(leading_out(victim))) as whole:
        ways = [(info.name, info.type, info.linkname, b"attacked" * bool(info.size)) for info in whole]
    # A refusal ends an upload, so each way is also tried alone.
    for members in (ways, ways[:1], ways[1:2], ways[2:4], ways[4:6], ways[4:]):
        with suppress(SandlotError):
            await arena.node.upload(box.id, "/root/in", bits(archive(*members)))
    assert not attacked(victim)
    assert (await box.run(f"find / -xdev -newer /etc/hostname -name hard -o -path '{victim}/*'")).stdout == ""
    assert await box.read_file(f"/root/in{victim}/absolute") == b"attacked"  # below its directory, like all


async def test_an_upload_brings_no_device_and_ends_at_the_disk_limit(arena: Arena, bomb: bytes) -> None:
    box = await arena.box()
    with pytest.raises(InvalidRequest, match="neither a file, a directory nor a link"):
        await arena.node.upload(box.id, "/root/in", bits(DEVICES))
    with pytest.raises(InvalidRequest, match="disk is full"):
        await arena.node.upload(box.id, "/root/in", bits(gzip.decompress(bomb)))
    assert (await box.run("find in -type c -o -type b -o -type p")).stdout == ""
    assert (await box.run("echo lives > file; cat file")).stdout == "lives\n"


@pytest.mark.control
async def test_control_where_the_files_are_a_volume_the_same_archive_writes_them(arena: Arena, victim: Path) -> None:
    for extractor in EXTRACTORS:
        box = await arena.box(volumes=(Volume(source=str(victim), target=str(victim), read_only=False),))
        await extract(box, extractor, leading_out(victim))
        assert attacked(victim) >= {"absolute", "dots", "through"}, extractor
        for path in victim.iterdir():
            path.write_text("intact")


DEVICES = archive(
    ("character", tarfile.CHRTYPE, "", b""), ("block", tarfile.BLKTYPE, "", b""), ("fifo", tarfile.FIFOTYPE, "", b"")
)


async def test_no_device_comes_out_of_one(arena: Arena) -> None:
    for extractor in EXTRACTORS:
        box = await arena.box()
        assert "not permitted" in await extract(box, extractor, DEVICES), extractor
        assert (await box.run("find in -type c -o -type b -o -type p")).stdout == "in/fifo\n", extractor


@pytest.mark.control
def test_control_outside_root_gets_devices(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for extractor, command in EXTRACTORS.items():
        place = tmp_path / extractor
        place.mkdir()
        (place / "archive").write_bytes(DEVICES)
        subprocess.run(command, cwd=place, check=True, capture_output=True)
        assert (place / "character").is_char_device(), extractor
        assert (place / "block").is_block_device(), extractor


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """100 MB of zeros in half a megabyte: more than a box here may write."""
    out = io.BytesIO()
    with gzip.open(out, "wb", compresslevel=1) as packed:
        member = tarfile.TarInfo("zeros")
        member.size = 50 << 20
        for n in range(2):
            member.name = f"zeros{n}"
            packed.write(member.tobuf())
            for _ in range(50):
                packed.write(bytes(1 << 20))
        packed.write(bytes(1024))
    return out.getvalue()


@pytest.mark.promise("disk limit")
async def test_a_bomb_ends_at_the_disk_limit(arena: Arena, bomb: bytes) -> None:
    for extractor in EXTRACTORS:
        box = await arena.box()
        errors = await extract(box, extractor, bomb)
        assert "No space left" in errors or "Wrote only" in errors, extractor
        assert (await box.stats()).disk <= arena.limits.disk, extractor
        assert (await box.run("rm -rf in; echo lives > file; cat file")).stdout == "lives\n", extractor


@pytest.mark.control
@pytest.mark.promise("disk limit")
async def test_control_with_more_disk_it_goes_off(arena: Arena, bomb: bytes) -> None:
    for extractor in EXTRACTORS:
        box = await arena.box(limits=Limits(disk="200M"))
        assert await extract(box, extractor, bomb) == "", extractor
        assert (await box.stats()).disk >= 100 << 20, extractor
        await box.close()
