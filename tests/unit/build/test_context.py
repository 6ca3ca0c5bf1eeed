"""Promises of the files beside a build:

1. Paths and patterns name files; a directory is what is in it; links stay links, and a link as a source is followed.
2. `.dockerignore`: the last pattern that matches decides, `!` takes back; the list of the build file itself, where it
   has one, is heeded instead; what is no pattern is said.
3. Nothing outside the context is read: neither by `..` nor through a link.
4. An archive is told by how it begins, and only where it is itself what is copied.
5. The hash tells content, names and modes apart, and not times; the tar is what Python's own reader finds in it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandlot.build.context import Context, Ignored, check_unpacked, hashed, pack
from sandlot.errors import InvalidRequest, NotFound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small context."""
    top = tmp_path / "context"
    (top / "src/deep").mkdir(parents=True)
    (top / "a.txt").write_text("a")
    (top / "b.txt").write_text("b")
    (top / "src/c").write_text("c")
    (top / "src/deep/d").write_text("d")
    (top / "src/link").symlink_to("deep/d")
    (top / "near").symlink_to("a.txt")
    (top / "far").symlink_to("/etc/passwd")
    return top


def names(folder: Path, *sources: str) -> list[str]:
    return [entry.name for entry in Context(folder).find(sources).entries]


def test_paths_and_patterns_name_files(folder: Path) -> None:
    assert names(folder, "*.txt") == ["a.txt", "b.txt"]
    assert names(folder, "./src/") == ["c", "deep", "deep/d", "link"]
    assert names(folder, "s?c/deep", "[ab].txt") == ["d", "a.txt", "b.txt"]
    assert names(folder, "src/../a.txt") == ["a.txt"]
    assert names(folder, ".") == ["a.txt", "b.txt", "far", "near", "src", "src/c", "src/deep", "src/deep/d", "src/link"]
    assert Context(folder).find(["near"]).entries[0].path == folder / "a.txt"
    assert [Context(folder).find(each).alone for each in (["a.txt"], ["near"], ["*.txt"], ["src"])] == [
        "a.txt",
        "near",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("patterns", "ignored", "seen"),
    [
        (["*.md"], ["a.md"], ["d/a.md", "a.txt"]),
        (["**/*.md"], ["a.md", "d/e/a.md"], ["a.txt"]),
        (["/d", "# x", ""], ["d", "d/a"], ["e/d", "x"]),
        (["d/*", "!d/keep"], ["d/a"], ["d", "d/keep"]),
        (["!d/keep", "d"], ["d/keep"], []),
        (["a?c", "[x-z]1", "[^x]2"], ["abc", "y1", "a2"], ["abbc", "a1", "x2", "a/c"]),
        (["d/**"], ["d/a", "d/a/b"], ["d"]),
        ([r"\*"], ["*"], ["a"]),
        (["a.b"], ["a.b"], ["aXb"]),
    ],
)
def test_the_last_pattern_that_matches_decides(patterns: list[str], ignored: list[str], seen: list[str]) -> None:
    found = Ignored(patterns)
    assert [path for path in (*ignored, *seen) if found.matches(path)] == ignored


def test_what_is_ignored_is_not_seen(folder: Path) -> None:
    (folder / ".dockerignore").write_text("src\n!src/deep\nb.*\n")
    assert names(folder, "src") == ["deep", "deep/d"]
    assert names(folder, "*.txt") == ["a.txt"]
    with pytest.raises(NotFound, match=r"there is no `b\.txt`") as caught:
        names(folder, "b.txt")
    assert ".dockerignore" in (caught.value.hint or "")


def test_the_list_of_the_build_file_itself_is_heeded(folder: Path) -> None:
    (folder / ".dockerignore").write_text("a.txt\n")
    (folder / "Dockerfile.dockerignore").write_text("b.txt\n")
    for file, seen in (("Dockerfile", "a.txt"), ("other", "b.txt")):
        context = Context(folder, folder / file)
        assert [entry.name for entry in context.find(["?.txt"]).entries] == [seen]
    with pytest.raises(NotFound) as caught:
        Context(folder, folder / "Dockerfile").find(["b.txt"])
    assert "in Dockerfile.dockerignore" in (caught.value.hint or "")


def test_a_mark_at_the_beginning_is_no_part_of_a_pattern(folder: Path) -> None:
    (folder / ".dockerignore").write_bytes(b"\xef\xbb\xbfa.txt\r\nb.txt\r\n")
    with pytest.raises(NotFound):
        names(folder, "?.txt")


@pytest.mark.parametrize("pattern", ["[z-a].txt", "[\\]x"])
def test_what_is_no_pattern_is_said(folder: Path, pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        names(folder, pattern)
    assert caught.value.message.startswith(f"`{pattern}` is no pattern")
    (folder / ".dockerignore").write_text(pattern)
    with pytest.raises(InvalidRequest) as caught:
        Context(folder)
    assert caught.value.message.startswith(f"{folder}/.dockerignore: `{pattern}` is no pattern")


def archives() -> dict[str, bytes]:
    """By what they are called; the headers of old tars have no word `ustar`."""
    ustar = tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT)
    old = bytearray(ustar)
    old[257:265] = bytes(8)
    old[148:156] = b" " * 8
    old[148:156] = f"{sum(old):06o}\0 ".encode()
    packed = {"gzip": gzip.compress(ustar), "bzip2": bz2.compress(ustar), "xz": lzma.compress(ustar)}
    return {"tar": ustar, "old": bytes(old), "zstd": bytes.fromhex("28b52ffd2000010000"), **packed}


def test_an_archive_is_told_by_how_it_begins(folder: Path) -> None:
    for name, content in archives().items():
        (folder / "src" / name).write_bytes(content)
        with pytest.raises(InvalidRequest, match=f"ADD does not unpack {name}"):
            check_unpacked(Context(folder).find([f"src/{name}", "a.txt"]).named)
    (folder / "empty").write_bytes(b"")
    (folder / "zeros").write_bytes(bytes(2048))
    os.mkfifo(folder / "pipe")
    tree = Context(folder).find(["a.txt", "near", "empty", "zeros", "pipe", "src"])
    assert {"gzip", "a.txt", "deep/d"} <= {entry.name for entry in tree.entries}
    check_unpacked(tree.named)  # of `src` they stay as they are, as elsewhere


def test_nothing_outside_is_read(folder: Path) -> None:
    (folder / "out").symlink_to("..")
    for source in ("../x", "src/../../x", "far", "out/context/a.txt/../../x", "out"):
        with pytest.raises((InvalidRequest, NotFound)):
            names(folder, source)
    with pytest.raises(NotFound, match="there is no directory"):
        Context(folder / "none")


def test_the_hash_tells_content_names_and_modes_apart(folder: Path) -> None:
    def now() -> str:
        return hashed(Context(folder).find(["src"]).entries, None)

    first = now()
    os.utime(folder / "src/c", (0, 0))
    assert now() == first
    seen = {first}
    for change in (
        lambda: (folder / "src/c").write_text("C"),
        lambda: (folder / "src/c").chmod(0o755),
        lambda: (folder / "src/c").rename(folder / "src/e"),
        lambda: (folder / "src/link").unlink(),
        lambda: (folder / "src/deep").chmod(0o700),
    ):
        change()
        assert now() not in seen
        seen.add(now())


def test_the_tar_is_what_was_found(folder: Path) -> None:
    (folder / "src" / ("long" * 50)).write_bytes(os.urandom(3 << 20))
    os.mkfifo(folder / "pipe")
    entries = Context(folder).find(["src"]).entries
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(entries, None, hashlib.sha256())))) as tar:
        assert tar.getnames() == [entry.name for entry in entries]
        found = tar.extractfile("long" * 50)
        assert found is not None
        assert found.read() == (folder / "src" / ("long" * 50)).read_bytes()
        assert tar.getmember("link").linkname == "deep/d"
    with pytest.raises(InvalidRequest, match="neither a file"):
        hashed(Context(folder).find(["pipe"]).entries, None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cannot_be_read_is_said(folder: Path) -> None:
    (folder / "a.txt").chmod(0)
    with pytest.raises(InvalidRequest, match=r"a\.txt cannot be read: Permission denied"):
        hashed(Context(folder).find(["a.txt"]).entries, None)
    (folder / "src/deep").chmod(0)
    with pytest.raises(InvalidRequest, match="deep cannot be read"):
        Context(folder).find(["src"])
    (folder / "src/deep").chmod(0o755)


def test_a_context_may_be_as_deep_as_a_path_is_long(tmp_path: Path) -> None:
    deep = tmp_path / ("d/" * 1200)
    subprocess.run(["mkdir", "-p", deep], check=True)  # Python's is recursive
    found = Context(tmp_path).find(["."])
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # pytest's is, too
    assert len(found.entries) == 1200
