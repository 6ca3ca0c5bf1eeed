"""Promises of `sandlot cp`, a process of its own against a real server:

1. A file or a directory gets where `cp -r` would put it: into a directory that is there, else under the name given;
   `FROM/.` is what is in it. Bytes, modes and links are the same on the other side.
2. On a stream a file is its bytes and a directory a tar, both ways, so that two of them copy from box to box.
3. What cannot be copied is said before anything is sent, and nothing of it is left. A link that a sandbox left here
   leads nothing that comes later out of the directory that was named.
4. A terminal shows how far it is; a script is shown the end only.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.cli import CLEAN, COMMAND, Server
from tests.support.person import Person


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "program").write_text("#!/bin/sh\necho it runs\n")
    (top / "program").chmod(0o755)
    (top / "sub/data").write_bytes(bytes(range(256)) * 5000)
    (top / "link").symlink_to("sub/data")
    return top


def same(one: Path, other: Path) -> None:
    listed = sorted(path.relative_to(one) for path in one.rglob("*"))
    assert listed == sorted(path.relative_to(other) for path in other.rglob("*"))
    for path in listed:
        assert (one / path).lstat().st_mode == (other / path).lstat().st_mode, path
        if (one / path).is_symlink():
            assert (one / path).readlink() == (other / path).readlink()
        elif (one / path).is_file():
            assert (one / path).read_bytes() == (other / path).read_bytes()


def test_a_tree_goes_in_and_comes_back_as_it_was(served: Server, box: str, tree: Path, tmp_path: Path) -> None:
    for source, target, where in (
        (str(tree), "/srv", "/srv/tree"),
        (str(tree), "/srv/new", "/srv/new"),
        (f"{tree}/.", "/opt", "/opt"),
    ):
        done = served.sandlot("cp", source, f"{box}:{target}")
        assert (done.returncode, done.stdout) == (0, ""), done
        assert done.stderr == f"copied 1.3 MB to {box}:{target}\n"
        assert served.sandlot("exec", box, f"{where}/program").stdout == "it runs\n"
    (tmp_path / "there").mkdir()
    for words, where in (
        ((f"{box}:/srv/new", "there"), "there/new"),
        ((f"{box}:/srv/new", "fresh"), "fresh"),
        ((f"{box}:/srv/new/.", "there/new"), "there/new"),
    ):
        assert served.sandlot("cp", *words, cwd=tmp_path).returncode == 0
        same(tree, tmp_path / where)


def test_a_sandbox_writes_nowhere_but_in_the_directory_that_was_named(served: Server, box: str, tmp_path: Path) -> None:
    ssh, out = tmp_path / "home/.ssh", tmp_path / "out"
    ssh.mkdir(parents=True)
    out.mkdir()
    assert served.sandlot("exec", box, "--", "sh", "-c", f"mkdir -p /srv; ln -s {ssh} /srv/t").returncode == 0
    assert served.sandlot("cp", f"{box}:/srv/.", str(out)).returncode == 0
    assert (out / "t").readlink() == ssh
    text = "rm /srv/t; mkdir /srv/t; echo theirs >/srv/t/authorized_keys"
    assert served.sandlot("exec", box, "--", "sh", "-c", text).returncode == 0
    done = served.sandlot("cp", f"{box}:/srv/t", str(out))
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith(f"error: {out}/t is a link, perhaps one that a sandbox made")
    assert list(ssh.iterdir()) == []
    (tmp_path / "mine").symlink_to(out)  # a link that was typed is followed, as by `cp -r`
    (out / "t").unlink()
    assert served.sandlot("cp", f"{box}:/srv/t", "mine", cwd=tmp_path).returncode == 0
    assert (out / "t/authorized_keys").read_text() == "theirs\n"


def test_a_file_goes_in_and_comes_back(served: Server, box: str, tree: Path, tmp_path: Path) -> None:
    data = tree / "sub/data"
    for target in ("/srv", "/srv/", "/srv/data", "/new/way/data"):
        assert served.sandlot("cp", str(data), f"{box}:{target}").returncode == 0
    assert served.sandlot("cp", "-u", "1000", str(data), f"{box}:/srv/theirs").returncode in (0, 2)  # one id inside
    for target in (tmp_path, tmp_path / "renamed"):
        assert served.sandlot("cp", f"{box}:/new/way/data", str(target)).returncode == 0
    assert (tmp_path / "data").read_bytes() == (tmp_path / "renamed").read_bytes() == data.read_bytes()


def test_a_stream_is_a_file_s_bytes(served: Server, box: str, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "in").write_bytes(data)
    with (tmp_path / "in").open() as stdin:
        assert served.started("cp", "-", f"{box}:/root/data", stdin=stdin).wait(60) == 0
    with (tmp_path / "out").open("w") as stdout:
        assert served.started("cp", f"{box}:/root/data", "-", stdout=stdout).wait(60) == 0
    assert (tmp_path / "out").read_bytes() == data


def test_a_stream_is_a_directory_s_tar(served: Server, box: str, tree: Path, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(tree, ".")
    (tmp_path / "in.tar").write_bytes(packed.getvalue())
    with (tmp_path / "in.tar").open() as stdin:
        assert served.started("cp", "-", f"{box}:/root/made/", stdin=stdin).wait(60) == 0
    other = served.sandlot("create").stdout.strip()
    environment = {**CLEAN, "SANDLOT_URL": served.url}
    text = f'"$@" cp {box}:/root/made - 2>/dev/null | "$@" cp - {other}:/srv'
    subprocess.run(["sh", "-c", text, "sh", *COMMAND], check=True, timeout=60, env=environment, capture_output=True)
    assert served.sandlot("cp", f"{other}:/srv", str(tmp_path / "back")).returncode == 0
    same(tree, tmp_path / "back")
    served.sandlot("rm", other)


def test_a_terminal_shows_how_far_it_is(served: Server, box: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(30 << 20))
    environment = {**CLEAN, "SANDLOT_URL": served.url, "TERM": "xterm"}
    person = Person([*COMMAND, "cp", str(tmp_path / "large"), f"{box}:/root"], environment)
    assert person.leaves() == 0
    person.close()
    assert re.search(rb"[\d.]+/[\d.]+ MB.*MB/s", person.seen), person.seen
    assert person.seen.endswith(f"copied 31.5 MB to {box}:/root\r\n".encode())


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("/no/such", "{box}:/root/x"), 1, "there is no /no/such"),
        (("{box}:/no/such", "."), 1, "/no/such"),
        (("{box}:/etc/hosts", "no/such/x"), 1, "no/such"),
        (("{box}:/etc/hosts", "missing/"), 1, "missing"),
        (("here", "there"), 2, "neither place is in a sandbox"),
        (("sb-1:/a", "sb-2:/b"), 2, "`sandlot cp sb-1:/a - | sandlot cp - sb-2:/b`"),
        (("here", "{box}:notes"), 2, "begins with `/`"),
        (("./a:b", "{box}:/root/x"), 1, "there is no a:b"),
        (("{here}", "{box}:/etc/hosts/x"), 1, "/etc/hosts"),
        (("{here}", "{box}:/etc/hosts"), 1, "/etc/hosts"),
        (("{here}", "sb-nope:/root"), 1, "there is no sandbox sb-nope"),
        (("-", "{box}:/root/"), 2, "not a whole tar"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_copied_is_said(
    served: Server, box: str, tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/x").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    asked = [word.format(box=box, here=tmp_path / "folder") for word in words]
    done = served.sandlot("cp", *asked, cwd=tmp_path, input="no tar\n" * 1000)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
