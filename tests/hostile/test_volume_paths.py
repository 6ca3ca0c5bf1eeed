"""Attack: put a volume's target where it leads out of the box, or over what the box's own walls are made of.

Must hold: the API refuses /, /proc, /sys, /dev and paths with `.`, `..` or `//`; and were one to get through, the
helper follows it in the box's own root, after the host is gone from there, so that it lands nowhere else. The control
shows that a plan changed in this way is carried out.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandlot.api import Volume
from sandlot.errors import SandlotError
from tests.support.hostile import Arena, volume_at

PROMISE = "files"


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "//",
        "/..",
        "/a/../proc",
        "/proc",
        "/proc/1/root",
        "/proc/sys",
        "/sys",
        "/sys/kernel",
        "/dev",
        "/dev/shm",
        "/./x",
        "//x",
        "x",
        "/x/",
        "/x\0y",
    ],
)
def test_such_a_target_is_refused_before_anything_starts(target: str) -> None:
    with pytest.raises(ValidationError):
        Volume(source="/etc", target=target)


WAYS = ("/..", "/../..", "/proc/1/root", "/proc/self/root/..", "/proc/self/cwd/..", "/dev/fd/3/..")


async def test_no_path_of_a_plan_leads_out(arena: Arena, tmp_path: Path) -> None:
    target = tmp_path / "escaped"
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(folder.stat().st_mode | 0o777)
    volumes = (Volume(source="/etc", target="/out"),)
    for way in WAYS:
        with contextlib.suppress(SandlotError):
            await arena.box(without=volume_at(f"{way}{target}"), volumes=volumes)
        assert not target.exists(), way


@pytest.mark.control
async def test_control_a_plan_that_is_changed_is_carried_out(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    tmp_path.chmod(0o755)
    volumes = (Volume(source=str(tmp_path), target="/out"),)
    box = await arena.box(without=volume_at("/../elsewhere"), volumes=volumes)
    assert "mark" in (await arena.sh("ls /elsewhere", box=box)).stdout


async def test_a_volume_shows_what_it_names_and_not_what_is_around(arena: Arena, tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        folder.chmod(folder.stat().st_mode | 0o777)
    (hidden / "secret").write_text("x")
    (shown / "link").symlink_to(hidden / "secret")
    (shown / "up").symlink_to("../hidden/secret")
    box = await arena.box(volumes=(Volume(source=str(shown), target="/out"),))
    for path in ("/out/link", "/out/up", "/out/../hidden/secret", "/out/..//..//hidden/secret"):
        assert not (await arena.sh(f"cat {path}", box=box)).ok, path
        with pytest.raises(SandlotError):
            await box.read_file(path)
    assert not (await arena.sh("touch /out/new", box=box)).ok
