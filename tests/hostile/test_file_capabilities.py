"""Attack: gain capabilities from a file: write `security.capability` on a program, inside and in a volume.

Must hold: nobody inside gains any, unless `setuid = true` was asked for, and then none beyond the box's eleven; in a
volume not even then. Outside: from an ordinary user's box the attribute names that user's id as its root and gives
nothing to anybody else; from a root node's box it would, so SECURITY.md asks for a file system mounted nosuid, where it
gives nothing.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from sandlot.drivers.native.plan import CAPABILITIES, NODEV
from tests.support.calls import CALL
from tests.support.hostile import Arena, as_a_stranger, out, volumes_with

PROMISE = "privileges"

OURS = sum(1 << bit for bit in CAPABILITIES.values())
EVERYTHING, READ_ALL = (1 << 41) - 1, 1 << 2  # the second: dac_read_search
# argv: a path and which capabilities a copy of `cat` there shall have, permitted and, unless told otherwise, effective
# (then the kernel runs it with all of them or not at all). The form names no root (version 2): the kernel does.
SMUGGLE = (
    CALL
    + """
import shutil, struct
path, wanted, effective = sys.argv[1], int(sys.argv[2]), len(sys.argv) == 3
shutil.copy("/usr/bin/cat", path)
os.chmod(path, 0o755)
words = (0x02000000 | effective, wanted & 0xffffffff, 0, wanted >> 32, 0)
say("set", attempt(os.setxattr, path, "security.capability", struct.pack("<IIIII", *words)))
"""
)


def capabilities(status: str, kind: str = "CapEff") -> int:
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(kind))


async def gained(arena: Arena, path: str, **spec: object) -> int:
    """What a program at `path`, made by root inside, has when another user runs it."""
    if not arena.users:
        pytest.skip("there is only one user inside")
    box = await arena.box(**spec)
    assert (await arena.python(SMUGGLE, path, str(OURS), box=box)).stdout == "set ok\n"
    result = await box.run([path, "/proc/self/status"], user=1000, cwd="/")
    assert result.ok, result.stderr
    return capabilities(result.stdout)


async def test_file_capabilities_give_nothing(arena: Arena) -> None:
    assert await gained(arena, "/tmp/tool") == 0


@pytest.mark.control
async def test_control_with_setuid_allowed_they_give_the_boxes_own_and_no_more(arena: Arena) -> None:
    found = await gained(arena, "/tmp/tool", setuid=True)
    assert found == OURS


async def test_nobody_gets_more_than_the_boxes_own(arena: Arena) -> None:
    box = await arena.box(setuid=True)
    for user in (0, 1000) if arena.users else (0,):
        assert (await arena.python(SMUGGLE, "/tmp/tool", str(EVERYTHING), box=box)).stdout == "set ok\n"
        assert not (await box.run(["/tmp/tool", "/proc/self/status"], user=user, cwd="/")).ok
        assert (await arena.python(SMUGGLE, "/tmp/tool", str(EVERYTHING), "permitted", box=box)).stdout == "set ok\n"
        result = await box.run(["/tmp/tool", "/proc/self/status"], user=user, cwd="/")
        assert capabilities(result.stdout, "CapPrm") == OURS


async def test_in_a_volume_they_give_nothing_even_then(arena: Arena, tmp_path: Path) -> None:
    assert await gained(arena, "/out/tool", setuid=True, volumes=out(tmp_path)) == 0


@pytest.mark.control
async def test_control_with_a_volume_mounted_suid_they_do(arena: Arena, tmp_path: Path) -> None:
    spec = {"setuid": True, "volumes": out(tmp_path), "without": volumes_with(NODEV)}
    assert await gained(arena, "/out/tool", **spec) == OURS


@pytest.mark.skipif(os.geteuid() == 0, reason="an ordinary user's boxes")
async def test_what_an_ordinary_users_box_leaves_outside_is_that_users(arena: Arena, tmp_path: Path) -> None:
    box = await arena.box(volumes=out(tmp_path))
    assert (await arena.python(SMUGGLE, "/out/tool", str(READ_ALL), box=box)).stdout == "set ok\n"
    head, *_, root = struct.unpack("<IIIIII", os.getxattr(tmp_path / "tool", "security.capability"))
    assert (head >> 24, root) == (3, os.geteuid())
    # Only in a user namespace whose root is this user would it count; the host's is not one.
    result = subprocess.run([tmp_path / "tool", "/proc/self/status"], capture_output=True, text=True, check=True)
    assert capabilities(result.stdout) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a root node's boxes")
async def test_left_on_a_file_system_without_suid_they_give_nothing_outside(nosuid: Path, arena: Arena) -> None:
    box = await arena.box(volumes=out(nosuid))
    assert (await arena.python(SMUGGLE, "/out/tool", str(READ_ALL), box=box)).stdout == "set ok\n"
    assert capabilities(as_a_stranger(nosuid / "tool", "/proc/self/status")) == 0
    await box.close()


@pytest.mark.control
@pytest.mark.skipif(os.geteuid() != 0, reason="a root node's boxes")
async def test_control_on_another_file_system_they_would(arena: Arena, tmp_path: Path) -> None:
    if not arena.keeps("file owners"):
        pytest.skip("without mapped owners nothing of a box belongs to the host's root")
    box = await arena.box(volumes=out(tmp_path))
    assert (await arena.python(SMUGGLE, "/out/tool", str(READ_ALL), box=box)).stdout == "set ok\n"
    assert capabilities(as_a_stranger(tmp_path / "tool", "/proc/self/status")) == READ_ALL
