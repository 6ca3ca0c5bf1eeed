"""Promises of what a server's callers may see of its host:

1. Nothing, unless it was named at the start; the refusal says how, and is the same whether or not the path exists.
2. What was named, and what is below it, is shown read-only; with `rw` it may be written, and is shown as a whole only.
3. No link leads out: links are followed before the comparison, and the driver is given the path they led to.
4. What somebody else could turn into a link while it is mounted is refused, at the start and later.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sandlot import asgi
from sandlot.api import SandboxSpec, Volume
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import InvalidRequest, Unsupported
from sandlot.node.node import Node
from sandlot.server.app import create_app
from sandlot.server.volumes import AllowedVolumes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with another below it and a link that leads out."""
    (tmp_path / "data" / "below").mkdir(parents=True)
    (tmp_path / "data" / "link").symlink_to("/etc")
    (tmp_path / "other").mkdir()
    return tmp_path / "data"


def asking(source: Path | str, read_only: bool = True) -> SandboxSpec:
    return SandboxSpec(volumes=(Volume(source=str(source), target="/mnt", read_only=read_only),))


def test_nothing_is_allowed_unless_it_was_named(data: Path) -> None:
    said = set()
    for source in ("/etc", "/no/such/path", "/", data):
        with pytest.raises(Unsupported) as refused:
            AllowedVolumes.named().checked(asking(source))
        assert f"--allow-volumes {source}" in (refused.value.hint or "")
        said.add(refused.value.message.replace(str(source), "…"))
    assert said == {"this server does not allow the volume …"}
    assert AllowedVolumes.named().checked(SandboxSpec()) == SandboxSpec()


def test_what_was_named_is_shown_read_only_and_rw_as_a_whole(data: Path) -> None:
    allowed = AllowedVolumes.named([str(data)])
    assert allowed.checked(asking(data / "below")) == asking(data / "below")
    with pytest.raises(Unsupported, match=r"allows the volume .* read-only"):
        allowed.checked(asking(data, read_only=False))
    writable = AllowedVolumes.named([str(data.parent), f"{data}:rw"])
    assert writable.checked(asking(data, read_only=False)) == asking(data, read_only=False)
    assert writable.checked(asking(data.parent / "other"))
    with pytest.raises(Unsupported, match="sandboxes may write in") as refused:
        writable.checked(asking(data / "below"))
    assert "as a whole" in (refused.value.hint or "")


def test_no_link_leads_out(data: Path) -> None:
    allowed = AllowedVolumes.named([str(data)])
    for source in (data / "link", data / "link/passwd", data / "../other", f"{data}x", data / "below/../../other"):
        with pytest.raises(Unsupported):
            allowed.checked(asking(source))
    (data / "near").symlink_to("below")
    assert allowed.checked(asking(data / "near")) == asking(data / "below")
    (data.parent / "name").symlink_to(data)
    assert AllowedVolumes.named([str(data.parent / "name")]).checked(asking(data)) == asking(data)


def test_what_others_could_replace_is_refused(data: Path) -> None:
    allowed = AllowedVolumes.named([str(data)])
    data.chmod(0o777)
    with pytest.raises(Unsupported, match="other users may write in"):
        allowed.checked(asking(data / "below"))
    with pytest.raises(InvalidRequest, match="other users may write in"):
        AllowedVolumes.named([str(data / "below")])
    data.chmod(0o1777)  # as /tmp: what is ours in there stays ours
    assert allowed.checked(asking(data / "below"))
    if os.geteuid() == 0:
        os.chown(data / "below", 1000, 1000)
        with pytest.raises(Unsupported, match="user 1000 owns"):
            allowed.checked(asking(data / "below"))
    with pytest.raises(InvalidRequest, match="there is no"):
        AllowedVolumes.named([str(data / "missing")])


async def test_a_server_asks_before_anything_is_made(data: Path, tmp_path: Path) -> None:
    driver = FakeDriver()
    async with Node(driver, tmp_path / "state") as node:
        for volumes, allowed in ((None, False), (AllowedVolumes.named([str(data)]), True)):
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            served = await asgi.serve(listener, create_app(node, volumes=volumes))
            remote = HttpNode(f"http://127.0.0.1:{port}")
            if allowed:
                made = await remote.create(asking(data))
                assert driver.boxes[made.id].spec.volumes == asking(data).volumes
            else:
                with pytest.raises(Unsupported, match="does not allow the volume"):
                    await remote.create(asking(data))
                assert (await node.counts())["created"] == 0
            await remote.close()
            served.close()
