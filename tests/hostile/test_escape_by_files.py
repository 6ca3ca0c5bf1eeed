"""Attack: use descriptors, /proc, set-id files, symlinks and uploads to reach the host or to gain rights.

Must hold: no descriptor of the node or the helper is inside; no program gains an id; no path leads out, even when it is
swapped while the node uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.drivers.native.plan import Plan
from sandlot.errors import SandlotError
from tests.support.hostile import ROOT, Arena, Removal


async def test_a_command_has_three_descriptors_and_no_more(arena: Arena) -> None:
    result = await arena.python("import os; print(sorted(os.listdir('/proc/self/fd')))")
    assert result.stdout == "['0', '1', '2', '3']\n"  # 3 is the listing's own


async def test_the_first_process_gives_nothing_away(arena: Arena) -> None:
    box = await arena.box()
    for path in ("fd", "root/", "cwd/", "map_files", "ns/mnt", "environ", "mem", "maps", "exe"):
        result = await arena.sh(f"ls -lL /proc/1/{path} && cat /proc/1/{path}", box=box)
        assert not result.ok, path
    assert not (await arena.sh("echo > /proc/1/exe", box=box)).ok
    assert not (await arena.sh("echo > /proc/1/mem", box=box)).ok


SETID = "cp /usr/bin/id /tmp/id; chown 0:0 /tmp/id; chmod 6755 /tmp/id"


@pytest.mark.skipif(not ROOT, reason="there is only one user inside")
async def test_a_setuid_file_gains_nothing(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.sh(SETID, box=box)).ok
    assert "euid" not in (await box.run(["/tmp/id"], user=1000, cwd="/")).stdout


@pytest.mark.control
@pytest.mark.skipif(not ROOT, reason="there is only one user inside")
async def test_control_with_setuid_allowed_it_does(arena: Arena) -> None:
    box = await arena.box(setuid=True)
    assert (await arena.sh(SETID, box=box)).ok
    assert "euid=0(root)" in (await box.run(["/tmp/id"], user=1000, cwd="/")).stdout


@pytest.mark.skipif(not ROOT, reason="the volume's files belong to the node's user")
async def test_a_setuid_file_in_a_volume_is_no_way_to_the_hosts_root(arena: Arena, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    box = await arena.box(volumes=(Volume(source=str(shared), target="/out", read_only=False),))
    await arena.sh("cp /usr/bin/id /out/id; chmod 4755 /out/id", box=box)
    assert (shared / "id").stat().st_mode & 0o4000 == 0 or "nosuid" in (
        await arena.sh("grep /out /proc/mounts", box=box)
    ).stdout


SWAP = """
import os, time
end = time.monotonic() + 3
while time.monotonic() < end:
    for target in ("/tmp/real", "/proc/1/root/etc", "/../../../../../../etc", "/proc/self/root/tmp"):
        os.symlink(target, "/tmp/new")
        os.rename("/tmp/new", "/tmp/way")
"""


async def test_a_path_that_is_swapped_during_an_upload_stays_inside(arena: Arena) -> None:
    box = await arena.box()
    name = "sandlot-escaped"
    assert (await box.run("mkdir /tmp/real; ln -s /tmp/real /tmp/way")).ok
    swapping = asyncio.create_task(arena.python(SWAP, box=box))
    done = 0
    while not swapping.done():
        try:
            await box.write_file(f"/tmp/way/{name}", b"caught")
            done += 1
        except SandlotError:
            pass
    assert (await swapping).ok
    assert done
    for folder in ("/tmp", "/etc", "/"):
        assert not Path(folder, name).exists()


def volume_elsewhere(target: str) -> Removal:
    """A plan whose volume goes to a path that the API would refuse."""

    def change(plan: Plan) -> Plan:
        return replace(plan, steps=tuple(replace(s, target=target) if s.target == "/out" else s for s in plan.steps))

    return change


@pytest.mark.parametrize("way", ["/..", "/../..", "/proc/1/root", "/proc/self/root/.."])
async def test_no_path_of_a_plan_leads_out(arena: Arena, tmp_path: Path, way: str) -> None:
    target = tmp_path / "escaped"
    tmp_path.chmod(0o777)
    volumes = (Volume(source="/etc", target="/out"),)
    with contextlib.suppress(SandlotError):
        await arena.box(without=volume_elsewhere(f"{way}{target}"), volumes=volumes)
    assert not target.exists()


async def test_a_special_file_does_not_hang_the_node(arena: Arena) -> None:
    box = await arena.box()
    await arena.sh("mkfifo /tmp/fifo; ln -s /dev/zero /tmp/zero; ln -s /tmp/loop /tmp/loop", box=box)
    async with asyncio.timeout(10):
        for path in ("/tmp/fifo", "/tmp/zero", "/tmp/loop", "/tmp", "/dev/ptmx"):
            with pytest.raises(SandlotError):
                await box.read_file(path)
