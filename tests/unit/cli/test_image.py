"""Promises of `sandlot image`, run as a person runs it, on this host and against a server:

1. `pull` says on stderr how far it is, a line a layer where that is no terminal; with `--json` the image is on stdout.
2. `import`, `list`, `inspect`, `rm`, `export`, `prune` do what they say; an error is a sentence and a hint.
3. `serve --warm` takes the name of an image with its tag.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.api import Profile
from sandlot.cli.serve import _warm
from sandlot.errors import InvalidRequest
from tests.support import images
from tests.support.images import Built, Registry
from tests.support.server import SANDLOT, Server

Roots = dict[str, Built]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SANDLOT_")}


@pytest.fixture(params=["here", "server"])
async def where(
    request: pytest.FixtureRequest, tmp_path: Path, registry: Registry, native_reason: str | None
) -> AsyncIterator[list[str]]:
    """The words that say on which images a command works."""
    if native_reason:
        pytest.skip(native_reason)
    if request.param == "here":
        yield ["--state-dir", str(tmp_path / "state")]
    else:
        async with Server(tmp_path / "state", "--allow-registry", registry.host) as server:
            yield ["--url", server.url]


def sandlot(*words: str, binary: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SANDLOT, *words], capture_output=True, text=not binary, timeout=60, check=False, env=CLEAN)


async def test_images_from_the_command_line(where: list[str], registry: Registry, roots: Roots, tmp_path: Path) -> None:
    reference = registry.push(roots["glibc"].path, "cli/x:1")
    done = sandlot("image", "pull", reference, *where)
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines[:2]] == [each[7:19] for each in roots["glibc"].layers]
    assert lines[0].endswith("1 of 2")
    assert lines[2].startswith(f"pulled {reference}: ")
    done = sandlot("image", "pull", reference, "--json", *where)
    assert json.loads(done.stdout)["digest"] == roots["glibc"].manifest

    done = sandlot("run", "--image", reference, *where, "--", "cat", "/srv/one")
    assert (done.returncode, done.stdout) == (0, "of the image\n"), done.stderr

    (listed,) = json.loads(sandlot("image", "list", "--json", *where).stdout)
    assert (listed["name"], listed["kind"]) == (reference, "pulled")
    head, row = sandlot("image", "list", *where).stdout.splitlines()
    assert head.split() == ["name", "kind", "base", "size", "files", "layers", "made"]
    assert row.split()[:2] == [reference, "pulled"]
    told = sandlot("image", "inspect", reference, *where).stdout
    assert "workdir     /srv" in told
    assert "env         GREETING=hello" in told
    assert "config" not in told
    assert json.loads(sandlot("image", "inspect", reference, "--json", *where).stdout) == listed

    exported = sandlot("image", "export", reference, *where, binary=True)
    archive = tmp_path / "root.tar"
    archive.write_bytes(exported.stdout)  # type: ignore[arg-type]
    if b"only lent" in exported.stderr:  # type: ignore[operator]  (a named loss)
        archive = roots["glibc"].path
    done = sandlot("image", "import", "mine", str(archive), *where)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("imported mine: ")
    done = sandlot("run", "--image", "mine", *where, "--", "cat", "/srv/one")
    assert (done.returncode, done.stdout) == (0, "of the image\n"), done.stderr

    done = sandlot("image", "prune", *where)
    assert f"deleted {reference}: " in done.stderr
    assert "nothing to delete" in sandlot("image", "prune", *where).stderr
    assert sandlot("image", "rm", "mine", *where).stderr == "deleted mine\n"
    assert sandlot("image", "list", *where).stderr == "there are none\n"

    layout = images.write_layout(tmp_path / "loud", [images.packed()], {"Labels": {"a": "\x1b]0;me\x07"}})
    assert sandlot("image", "import", "loud", str(layout.path), *where).returncode == 0
    told = sandlot("image", "inspect", "loud", *where).stdout
    assert ("\x1b" in told, "labels      a=\\x1b]0;me\\x07" in told) == (False, True)

    for words, status, said in (
        (["image", "pull", "debian"], 2, "`debian:latest`"),
        (["image", "pull", "Debian:12"], 2, "small letters"),
        (["image", "pull", f"{registry.host}/cli/x:2"], 1, "no image"),
        (["image", "rm", "mine"], 1, "no image 'mine'"),
        (["image", "inspect", "mine"], 1, "no image 'mine'"),
        (["image", "import", "mine", str(tmp_path / "nothing")], 1, "nothing"),
    ):
        done = sandlot(*words, *where)
        assert (done.returncode, done.stdout) == (status, ""), done
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


async def test_an_image_that_is_missing_is_pulled_and_how_far_that_is_is_said(
    where: list[str], registry: Registry, roots: Roots
) -> None:
    reference = registry.push(roots["glibc"].path, "cli/missing:1")
    done = sandlot("run", "--image", reference, *where, "--", "cat", "/srv/one")
    assert (done.returncode, done.stdout) == (0, "of the image\n"), done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == [each[7:19] for each in roots["glibc"].layers]
    again = sandlot("run", "--image", reference, *where, "--", "cat", "/srv/one")
    assert (again.returncode, again.stderr) == (0, "")


def test_on_a_terminal_there_is_a_bar_for_each_layer(
    registry: Registry, roots: Roots, tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    reference = registry.push(roots["glibc"].path, "cli/bars:1")
    ours, theirs = pty.openpty()
    words = [*SANDLOT, "image", "pull", reference, "--state-dir", str(tmp_path / "state")]
    running = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=CLEAN)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # all of the other end is closed
            break
    os.close(ours)
    out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, b"")
    for layer in roots["glibc"].layers:
        assert layer[7:19].encode() in shown
    assert b"unpacked" in shown


@pytest.mark.parametrize("command", ["pull", "import", "list", "inspect", "rm", "export", "prune"])
def test_every_command_has_help(command: str) -> None:
    done = sandlot("image", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: sandlot image {command}" in done.stdout


def test_a_tar_is_not_for_a_terminal() -> None:
    program = "import os, pty, sys; pty.spawn([*sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", program, *SANDLOT, "image", "export", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=CLEAN,
        stdin=subprocess.DEVNULL,
    )
    assert "a tar is not for a terminal" in done.stdout


@pytest.mark.parametrize(("words", "said"), [(["image"], "Missing command"), (["image", "pul"], "Did you mean 'pull'")])
def test_a_wrong_word_is_said(words: list[str], said: str) -> None:
    done = sandlot(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "hint: `sandlot image --help`" in done.stderr


def test_a_pool_is_of_an_image_with_its_tag() -> None:
    for words, image, profile in (
        ("host=2", "host", Profile.DEFAULT),
        ("=2", "host", Profile.DEFAULT),
        ("host:strict=2", "host", Profile.STRICT),
        ("debian:12=2", "debian:12", Profile.DEFAULT),
        ("127.0.0.1:5000/a/b:12:debug=2", "127.0.0.1:5000/a/b:12", Profile.DEBUG),
    ):
        assert (_warm(words).image, _warm(words).profile, _warm(words).size) == (image, profile, 2)
    with pytest.raises(InvalidRequest):
        _warm("debian:12")
