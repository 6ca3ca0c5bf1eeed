"""Promises of the table of promises (pure: facts in, lines out):
1. What is called kept is kept: what only root's own ids, an old kernel or a file system give is a loss without them.
2. A loss says what is the case, and what to do about it.
3. A box on the host's disk has the losses of that, and not those of a box in memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from sandlot.api import SandboxSpec, Volume
from sandlot.drivers.native.promises import Facts, losses, promises

SPEC = SandboxSpec()


def line(name: str, **facts: Any) -> tuple[str, str, str | None]:
    found = {each.name: each for each in promises(Facts(**{"ids": "own", **facts}))}[name]
    return found.state, found.found, found.fix


@pytest.mark.parametrize("ids", ["shared", "one"])
def test_without_ids_of_its_own_a_box_sees_nobody_where_the_host_has_its_root(ids: str) -> None:
    state, found, fix = line("file owners", ids=ids)
    assert (state, fix) == ("loss", "run the node as root")
    assert "nobody inside" in found
    assert line("file owners")[0] == "kept"


def test_a_file_system_that_cannot_map_owners_is_named() -> None:
    state, found, fix = line("file owners", owners_mapped=False, unmapped="the overlay file system of /state")
    assert state == "loss"
    assert "the overlay file system of /state" in found
    assert "ext4" in str(fix)
    assert "5.19" in str(line("file owners", owners_mapped=False)[2])
    state, found, fix = line("snapshots", copies_unmapped="the overlay file system of /state")
    assert (state, "overlay" in found, "ext4" in str(fix)) == ("loss", True, True)
    assert not any(loss.startswith("snapshots") for loss in losses(Facts(ids="own", copies_unmapped="x"), SPEC))


def test_what_is_shown_of_the_host_is_named() -> None:
    assert "nothing of the host but /usr and /opt/python," in line("files", shown=("/usr", "/opt/python"))[1]


def test_what_was_tried_and_failed_is_said() -> None:
    state, found, fix = line("disk beyond memory", disk_fix="do this", disk_failure="Operation not permitted")
    assert (state, found, fix) == ("loss", "refused: Operation not permitted", "do this")


def test_a_box_on_the_hosts_disk_has_the_losses_of_that() -> None:
    facts = Facts(ids="own", directories_replaced=False)
    in_memory, on_disk = losses(facts, SPEC), losses(facts, SPEC, on_disk=True)
    assert [loss.partition(":")[0] for loss in in_memory if "director" in loss or "disk" in loss] == [
        "image directories"
    ]
    assert [loss.partition(":")[0] for loss in on_disk if "director" in loss or "disk" in loss] == ["disk bandwidth"]
    writable = SandboxSpec(volumes=(Volume(source="/x", target="/x", read_only=False),))
    assert any(loss.startswith("disk bandwidth: writes to a volume") for loss in losses(facts, writable))
