"""Promises of `sandlot doctor` for the native driver:
1. On a host that can make boxes it says so, having made one.
2. Where user namespaces are refused it finds out by trying and names the command that fixes it.
3. The advice fits the cause: a sysctl, AppArmor, a container's filter, a masked /proc, an old kernel.
4. What a box in memory does not show is tried as well: a disk on the host's disk, a place for snapshots.
5. Without the helper it says how to get one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandlot
from sandlot.api import SandboxSpec, Volume
from sandlot.drivers.native import disk, ids
from sandlot.drivers.native.checks import advice, probe
from sandlot.drivers.native.driver import NativeDriver
from sandlot.errors import HostFault, Unsupported
from tests.support.native import Boxes, python

REFUSED = "namespaces: user namespaces are refused on this host (run `sandlot doctor`)"


async def test_on_this_host_a_box_was_made(boxes: Boxes) -> None:
    found = {line.name: line for line in await probe(boxes.driver)}
    assert found["sandboxes"].state == "kept"
    assert found["network"].state == "kept"
    assert (found["user ids"].state == "kept") is (os.geteuid() == 0)
    assert all(line.fix for line in found.values() if line.state != "kept")


async def test_a_disk_that_cannot_be_had_after_all_is_a_loss(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> int:
        raise HostFault("a disk for the sandbox could not be mounted: Operation not permitted")

    monkeypatch.setattr(disk, "make", fails)
    monkeypatch.setattr(disk, "why_not", lambda: None)
    found = {line.name: line for line in await probe(boxes.driver)}["disk beyond memory"]
    assert found.state == "loss"
    assert ("not permitted" in found.found) is (os.geteuid() == 0)


@pytest.fixture
def unmappable(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that cannot map owners."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts anything")
    for name in ("lower", "upper", "work", "state"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mounted = subprocess.run(["mount", "-t", "overlay", "-o", options, "sandlot-test", tmp_path / "state"], check=False)
    if mounted.returncode != 0:
        pytest.skip("there is no overlay on this file system")
    yield tmp_path / "state"
    subprocess.run(["umount", "-l", tmp_path / "state"], check=True)


async def test_a_volume_that_cannot_map_owners_is_named_for_the_box_that_has_it(boxes: Boxes, unmappable: Path) -> None:
    await boxes()
    if not boxes.driver.facts.owners_mapped:
        pytest.skip("no owners are mapped here")
    box = await boxes(SandboxSpec(volumes=(Volume(source=str(unmappable), target="/data"),)))
    (loss,) = (loss for loss in box.losses if loss.startswith("file owners: "))
    assert "the overlay file system of " in loss
    assert not any(loss.startswith("file owners: ") for loss in (await boxes()).losses)


async def test_a_state_directory_that_cannot_map_owners_is_named(unmappable: Path) -> None:
    (unmappable / "node").mkdir()
    driver = NativeDriver(unmappable / "node")
    found = {line.name: line for line in await probe(driver)}
    await driver.close()
    for name in ("file owners", "snapshots"):
        assert found[name].state == "loss"
        assert "the overlay file system of " in found[name].found
        assert "ext4" in str(found[name].fix)


# A box refuses nested user namespaces as a hardened host or a container does: there doctor looks at a real refusal.
DOCTOR = """
import asyncio, sys
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from sandlot.drivers.native.driver import NativeDriver
async def main():
    for line in await NativeDriver(Path("/tmp")).capabilities():
        print(line.name, line.state, line.found, line.fix, sep="|")
asyncio.run(main())
"""


async def test_where_user_namespaces_are_refused_it_finds_out_by_trying(boxes: Boxes) -> None:
    source = str(Path(sandlot.__file__).parents[1])
    packages = str(Path(pytest.__file__).parents[1])
    spec = SandboxSpec(volumes=(Volume(source=source, target="/src"), Volume(source=packages, target="/packages")))
    ended, output = await python(await boxes(spec), DOCTOR, "/src", "/packages")
    assert ended.code == 0, output
    kernel, sandboxes = (line.split("|") for line in output.splitlines())
    assert kernel[1] == "kept"
    assert sandboxes[:2] == ["sandboxes", "impossible"]
    assert "a sandbox could not be made: namespaces:" in sandboxes[2]
    assert "sysctl -w user.max_user_namespaces=" in sandboxes[3]  # 0 inside a box: that is the cause


@pytest.mark.parametrize(
    ("failure", "settings", "root", "container", "expected"),
    [
        (REFUSED, {"user/max_user_namespaces": "0"}, True, False, "sysctl -w user.max_user_namespaces="),
        (REFUSED, {"kernel/unprivileged_userns_clone": "0"}, False, False, "kernel.unprivileged_userns_clone=1"),
        (
            "mount / as private",
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            False,
            False,
            "apparmor_restrict",
        ),
        (REFUSED, {}, False, True, "seccomp=unconfined"),
        (REFUSED, {}, True, False, "security module"),
        ("mount /proc: the kernel refuses", {"user/max_user_namespaces": "9"}, True, True, "systempaths=unconfined"),
        ("overlay /tmp/root: Linux does since 5.11", {}, True, False, "permit_mounts_in_userns=1"),
        ("overlay: before Linux 5.11 … owner is nobody inside", {}, True, False, "as an ordinary user"),
        ("cgroup: no space", {}, True, False, "/sys/fs/cgroup"),
        ("ids: strange", {}, True, False, "dmesg"),
    ],
)
def test_the_advice_fits_the_cause(
    failure: str, settings: dict[str, str], root: bool, container: bool, expected: str
) -> None:
    assert expected in advice(failure, settings, root, container)


@pytest.mark.parametrize(
    ("uid_map", "expected"),
    [("0 0 4294967295\n", True), ("0 1000 1\n", False), ("0 100000 65536\n", False), ("0 0 1\n1 1 4294967294\n", True)],
)
def test_root_of_a_user_namespace_has_ids_to_give_only_if_they_are_mapped(uid_map: str, expected: bool) -> None:
    assert ids.mapped(uid_map) is expected


async def test_without_the_helper_it_says_how_to_get_one(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    driver = NativeDriver(directory, helper=tmp_path / "none")
    with pytest.raises(Unsupported, match="no sandlot-init"):
        await driver.create("box", SandboxSpec())
    _, sandboxes = await probe(driver)
    assert sandboxes.state == "impossible"
    assert "gcc" in str(sandboxes.fix)
    await driver.close()
