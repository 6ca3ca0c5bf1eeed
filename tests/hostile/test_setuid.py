"""Attack: gain an id from a file: setuid and setgid by chmod, by an upload, by a hard link, in a volume, by a
program of the host's /usr.

Must hold: nobody inside gains an id, unless `setuid = true` was asked for; then inside a volume still nobody does. What
a box of a root node writes into a writable volume belongs to the host's root, set-id bits included, which is why
SECURITY.md asks for a file system of its own, mounted nosuid: there the bits give nothing to anybody outside either.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandlot.drivers.native.plan import NODEV
from sandlot.errors import InvalidRequest
from tests.support.hostile import Arena, as_a_stranger, out, volumes_with

PROMISE = "privileges"

MAKE = "cp /usr/bin/id {0}/id; chown 0:0 {0}/id; chmod 6755 {0}/id; chmod 711 /root"


@pytest.fixture
def users(arena: Arena) -> None:
    if not arena.users:
        pytest.skip("there is only one user inside")


@pytest.mark.usefixtures("users")
async def test_a_setuid_file_gains_nothing(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.sh(MAKE.format("/root") + "; ln /root/id /tmp/link", box=box)).ok
    for path in ("/root/id", "/tmp/link"):
        result = await box.run([path], user=1000, cwd="/")
        assert result.ok
        assert "euid" not in result.stdout and "egid" not in result.stdout
    for program in ("su", "mount", "passwd", "sudo", "newgrp"):
        result = await arena.sh(f"test -u /usr/bin/{program} && /usr/bin/{program} -h; id -u", user=1000, box=box)
        assert result.stdout.endswith("1000\n")


@pytest.mark.control
@pytest.mark.usefixtures("users")
async def test_control_with_setuid_allowed_it_does(arena: Arena) -> None:
    box = await arena.box(setuid=True)
    assert (await arena.sh(MAKE.format("/root"), box=box)).ok
    assert "euid=0(root)" in (await box.run(["/root/id"], user=1000, cwd="/")).stdout


async def test_an_upload_brings_no_set_id_bits(arena: Arena) -> None:
    box = await arena.box()
    for mode in (0o4755, 0o2755, 0o6755):
        with pytest.raises(InvalidRequest, match="mode"):
            await box.write_file("/tmp/tool", b"#!/bin/sh\n", mode=mode)
    assert (await arena.sh("cp /usr/bin/id /tmp/tool; chmod 6755 /tmp/tool", box=box)).ok
    await box.write_file("/tmp/tool", b"#!/bin/sh\n", mode=0o755)  # over a file that has them
    assert (await arena.sh("stat -c %a /tmp/tool", box=box)).stdout == "755\n"


@pytest.mark.usefixtures("users")
async def test_a_volume_gains_nothing_even_with_setuid_allowed(arena: Arena, tmp_path: Path) -> None:
    box = await arena.box(setuid=True, volumes=out(tmp_path))
    assert (await arena.sh(MAKE.format("/out"), box=box)).ok
    result = await box.run(["/out/id"], user=1000, cwd="/")
    assert result.ok
    assert "euid" not in result.stdout and "egid" not in result.stdout


@pytest.mark.control
@pytest.mark.usefixtures("users")
async def test_control_with_a_volume_mounted_suid_it_does(arena: Arena, tmp_path: Path) -> None:
    box = await arena.box(setuid=True, volumes=out(tmp_path), without=volumes_with(NODEV))
    assert (await arena.sh(MAKE.format("/out"), box=box)).ok
    assert "euid=0(root)" in (await box.run(["/out/id"], user=1000, cwd="/")).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's boxes write as that user")
async def test_left_on_a_file_system_without_suid_it_gives_nothing_outside(nosuid: Path, arena: Arena) -> None:
    box = await arena.box(volumes=out(nosuid))
    assert (await arena.sh(MAKE.format("/out"), box=box)).ok
    assert "euid" not in as_a_stranger(nosuid / "id")
    await box.close()


@pytest.mark.control
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's boxes write as that user")
async def test_control_on_another_file_system_it_would(arena: Arena, tmp_path: Path) -> None:
    if not arena.keeps("file owners"):
        pytest.skip("without mapped owners nothing of a box belongs to the host's root")
    box = await arena.box(volumes=out(tmp_path))
    assert (await arena.sh(MAKE.format("/out"), box=box)).ok
    assert "euid=0(root)" in as_a_stranger(tmp_path / "id")
