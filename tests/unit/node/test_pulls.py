"""Promises of images on their way to a node, over a real registry and real boxes:

1. All who want one image share one download, other nodes of the same store too; a create pulls what is missing, before
   its own deadline begins.
2. When the last who wants it gives up, it ends and leaves nothing; when one of several does, it goes on.
3. A node that is closed gives it up; one that is killed in the middle leaves nothing that the next one keeps.
4. A sandbox of a pulled image is reset, forked, compared, snapshotted, and found again by a server that was killed.
5. A server that is asked over HTTP does the same, tells how far it is, and takes archives that are sent to it; what it
   must not show or ask it refuses.
6. A bare word is never pulled.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Ending, PullProgress, Run, SandboxSpec, Warm
from sandlot.errors import BadImage, Conflict, Denied, HostFault, InvalidRequest, NotFound, Unsupported
from sandlot.node.node import Node, local_node
from tests.support import images
from tests.support.images import Built, Front, Registry, Said
from tests.support.server import Server

Roots = dict[str, Built]


def sh(text: str, **more: Any) -> Run:
    return Run(argv=("sh", "-c", text), **more)


@pytest.fixture
async def node(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    node = local_node(tmp_path / "state")
    await node.start()
    yield node
    await node.close()


def store(tmp_path: Path) -> list[str]:
    top = tmp_path / "state/images"
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path != top / "layers")


def layers_in(tmp_path: Path) -> list[str]:
    return [line for line in store(tmp_path) if line.startswith("layers/")]


class Held:
    """Lets the manifest of an image through at once, and its layers only when it is opened."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.opened = False
        self.passed: list[str] = []
        self._loop = asyncio.get_running_loop()

    def __call__(self, path: str, _: Message) -> Said | None:
        if "/blobs/" not in path or self.opened:
            self.passed.append(path)
            return None
        self._loop.call_soon_threadsafe(self.asked.set)
        return Said(429, {"Retry-After": "0"}, b"{}")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandlot.drivers.oci import registry as client

    monkeypatch.setattr(client, "_TRIES", 10_000)
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(client, "_LONGEST_WAIT", 0.02)


async def follow(node: Any, reference: str) -> list[PullProgress]:
    return [progress async for progress in node.pull_image(reference)]


@pytest.mark.usefixtures("patient")
async def test_all_who_want_an_image_share_one_download(
    node: Node, registry: Registry, roots: Roots, tmp_path: Path
) -> None:
    name = registry.push(roots["glibc"].path, "shared/x:1").partition("/")[2]
    held = Held()
    other = local_node(tmp_path / "state")
    await other.start()
    try:
        with Front(registry.host, held) as front:
            reference = f"{front.host}/{name}"
            wanted = [asyncio.create_task(follow(node, reference)) for _ in range(3)]
            wanted.append(asyncio.create_task(follow(other, reference)))
            creates = [asyncio.create_task(node.create(SandboxSpec(image=reference))) for _ in range(3)]
            await asyncio.wait_for(held.asked.wait(), 20)
            wanted[0].cancel()  # one of several
            held.opened = True
            creates[0].cancel()
            told = await asyncio.gather(*wanted[1:])
            infos = await asyncio.gather(*creates[1:])
        for layer in roots["glibc"].layers:
            assert len([path for path in held.passed if path.endswith(layer)]) == 1
        for progress in told:
            last = progress[-1]
            assert last.image is not None
            assert last.image.digest == roots["glibc"].manifest
            assert all(layer.fetched == layer.size for layer in last.layers)
        assert len([line for line in store(tmp_path) if line.count("/") == 1 and not line.endswith(".lock")]) == 1
        for info in infos:
            assert (await node.run(info.id, sh("cat one; id -u"))).stdout.split()[:3] == ["of", "the", "image"]
    finally:
        await other.close()


@pytest.mark.usefixtures("patient")
async def test_a_pull_that_nobody_wants_any_more_leaves_nothing(
    node: Node, registry: Registry, roots: Roots, tmp_path: Path
) -> None:
    name = registry.push(roots["glibc"].path, "unwanted/x:1").partition("/")[2]
    before = store(tmp_path)
    for closing in (False, True):
        held = Held()
        with Front(registry.host, held) as front:
            wanted = [asyncio.create_task(follow(node, f"{front.host}/{name}")) for _ in range(2)]
            wanted.append(asyncio.create_task(node.create(SandboxSpec(image=f"{front.host}/{name}"))))  # type: ignore[arg-type]
            await asyncio.wait_for(held.asked.wait(), 20)
            if closing:
                await node.close()
                for each in wanted:
                    with pytest.raises(HostFault, match="shut down"):
                        await each
            else:
                for each in wanted:
                    each.cancel()
                await asyncio.wait(wanted)
        assert store(tmp_path) == before
    assert (await node.counts())["created"] == 0


async def test_an_import_is_given_up_with_its_caller_and_with_its_node(node: Node, tmp_path: Path) -> None:
    (tmp_path / "slow.tar").write_bytes(images.packed(*(images.entry(f"d/{n}", b"x") for n in range(20_000))))
    for closing in (False, True):
        importing = asyncio.create_task(node.import_image("x", tmp_path / "slow.tar"))
        async with asyncio.timeout(30):
            while not layers_in(tmp_path):  # noqa: ASYNC110  (a thread makes it)
                await asyncio.sleep(0.01)
        if closing:
            await node.close()
            with pytest.raises(HostFault, match="shut down"):
                await importing
        else:
            importing.cancel()
            await asyncio.wait((importing,))
            assert importing.cancelled()
        assert layers_in(tmp_path) == []


async def test_a_state_directory_may_be_a_relative_one(
    tmp_path: Path, native_reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    (tmp_path / "root.tar").write_bytes(images.packed(images.directory("etc")))
    monkeypatch.chdir(tmp_path)
    async with local_node(Path("state")) as node:
        await node.import_image("x", Path("root.tar"))
        box = await node.create(SandboxSpec())
        await node.snapshot(box.id, "y")
        assert {image.name for image in await node.images()} == {"x", "y"}
    assert layers_in(tmp_path)


async def test_a_bare_word_is_never_pulled(node: Node) -> None:
    with pytest.raises(NotFound, match="no image 'debian'") as raised:
        await node.create(SandboxSpec(image="debian"))
    assert "`debian:latest`" in str(raised.value.hint)
    with pytest.raises(Exception, match="names no image of a registry"):
        await follow(node, "debian")


async def test_what_becomes_of_a_sandbox_of_a_pulled_image(node: Node, registry: Registry, roots: Roots) -> None:
    reference = registry.push(roots["glibc"].path, "becomes/x:1")
    box = (await node.create(SandboxSpec(image=reference))).id
    many = node.driver.facts.ids != "one"  # type: ignore[attr-defined]
    seen = await node.run(box, sh("id -u; pwd; echo $GREETING $HOME"))
    assert seen.stdout.split() == (["1000", "/srv", "hello", "/home/app"] if many else ["0", "/srv", "hello", "/root"])
    assert (await node.run(box, sh("echo changed > one", user=0))).ok
    assert [change.path for change in await node.diff(box)] == ["/srv/one"]
    (fork,) = await node.fork(box)
    assert (await node.run(fork.id, sh("cat one"))).stdout == "changed\n"
    await node.snapshot(box, "becomes")
    await node.reset(box)
    assert (await node.run(box, sh("cat one; id -u"))).stdout.startswith("of the image\n")
    await node.reset(box, "becomes")
    assert (await node.run(box, sh("cat one"))).stdout == "changed\n"
    assert (await node.info(box)).image == "becomes"
    await node.delete_image("becomes")
    await node.reset(box, reference)
    assert [image.name for image in await node.images()] == [reference]
    assert await node.prune_images() == []
    for each in (box, fork.id):
        await node.destroy(each)
    pruned = await node.prune_images()
    assert [image.name for image in pruned] == [reference]
    with pytest.raises(NotFound):
        await node.image(reference)


async def test_a_warm_pool_of_a_reference_pulls_it(
    registry: Registry, roots: Roots, tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    reference = registry.push(roots["busybox"].path, "warm/x:1")
    node = local_node(tmp_path / "state", warm=(Warm(image=reference, size=1),))
    await node.start()
    try:
        async with asyncio.timeout(30):
            while not (await node.pools())[0].ready:  # noqa: ASYNC110  (nothing tells)
                await asyncio.sleep(0.05)
        box = await node.create(SandboxSpec(image=reference))
        assert (await node.run(box.id, sh("echo warm"))).stdout == "warm\n"
        assert (await node.pools())[0].hits == 1
    finally:
        await node.close()


@pytest.fixture
async def server(tmp_path: Path, registry: Registry, native_reason: str | None) -> AsyncIterator[Server]:
    if native_reason:
        pytest.skip(native_reason)
    async with Server(tmp_path / "state", "--allow-registry", registry.host) as server:
        yield server


async def test_a_killed_server_finds_sandboxes_of_pulled_images(
    server: Server, registry: Registry, roots: Roots
) -> None:
    reference = registry.push(roots["glibc"].path, "killed/x:1")
    node = server.node()
    try:
        box = (await node.create(SandboxSpec(image=reference))).id
        await node.run(box, sh("echo kept > /srv/kept", user=0))
        await server.kill()
        await server.start()
        assert (await node.run(box, sh("cat /srv/kept one", key="k"))).stdout == "kept\nof the image\n"
        assert [change.path for change in await node.diff(box)] == ["/srv/kept"]
        await node.delete_image(reference)
        assert (await node.run(box, sh("cat one"))).stdout == "of the image\n"
        await node.snapshot(box, "after")
        again = await node.create(SandboxSpec(image="after"))
        assert (await node.run(again.id, sh("cat /srv/kept"))).stdout == "kept\n"
        assert (await node.image("after")).base == reference
        await node.reset(box)  # pulled again
        assert (await node.run(box, sh("cat one"))).stdout == "of the image\n"
    finally:
        await node.close()


async def test_a_server_that_is_killed_in_a_pull_leaves_nothing(
    server: Server, registry: Registry, tmp_path: Path
) -> None:
    built = images.write_layout(
        tmp_path / "slow", [images.packed(*(images.entry(f"d/{n}", os.urandom(100)) for n in range(20_000)))]
    )
    reference = registry.push(built.path, "killed/slow:1")
    node = server.node()
    try:
        pulling = asyncio.create_task(follow(node, reference))
        async with asyncio.timeout(30):
            while not layers_in(tmp_path):  # noqa: ASYNC110  (another process makes it)
                await asyncio.sleep(0.01)
        await server.kill()
        await asyncio.wait((pulling,))
        await server.start()
        async with asyncio.timeout(30):
            while layers_in(tmp_path):  # noqa: ASYNC110  (another process removes it)
                await asyncio.sleep(0.05)
        assert await node.images() == []
        assert (await follow(node, reference))[-1].image is not None
    finally:
        await node.close()


async def test_images_over_http(server: Server, registry: Registry, roots: Roots, tmp_path: Path) -> None:
    reference = registry.push(roots["busybox"].path, "http/x:1")
    node = server.node()
    try:
        told = await follow(node, reference)
        assert told[-1].image == await node.image(reference) == (await node.images())[0]
        with pytest.raises(NotFound, match="http/x:2"):
            await follow(node, reference.replace(":1", ":2"))
        with pytest.raises(Denied, match="does not pull from") as raised:
            await follow(node, "debian:12")
        assert "--allow-registry docker.io" in str(raised.value.hint)
        data = b"".join([chunk async for chunk in node.export_image(reference)])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert "bin/busybox" in tar.getnames()
        (tmp_path / "root.tar").write_bytes(data)
        made = await node.import_image("mine", tmp_path / "root.tar")
        assert (made.kind, made.name) == ("imported", "mine")
        with pytest.raises(Conflict):
            await node.import_image("mine", tmp_path / "root.tar")
        with (tmp_path / "endless.tar").open("wb") as file:
            file.truncate(60 << 30)
        async with asyncio.timeout(60):  # it is refused by its name, before it is sent
            with pytest.raises(Conflict, match="an image mine already"):
                await node.import_image("mine", tmp_path / "endless.tar")
            with pytest.raises(InvalidRequest, match="cannot be the name"):
                await node.import_image("Not A Name", tmp_path / "endless.tar")
        (tmp_path / "wrong").write_bytes(b"no image" * 1000)
        with pytest.raises(BadImage, match="it is no tar"):
            await node.import_image("wrong", tmp_path / "wrong")
        with pytest.raises(NotFound, match="cannot be read"):
            await node.import_image("wrong", tmp_path / "nothing")
        sent = tmp_path / "directory"
        (sent / "etc").mkdir(parents=True)
        sent.chmod(0o711)
        with (sent / "hole").open("wb") as file:
            file.truncate(1 << 40)
        (tmp_path / "link").symlink_to(sent)
        assert (await node.import_image("sent", tmp_path / "link")).files == 3
        (layer,) = (path for path in (tmp_path / "state/images/layers").glob("*/hole"))
        assert layer.stat().st_size == 1 << 40
        assert layer.parent.stat().st_mode & 0o777 == 0o711
        os.setxattr(os.fsencode(sent / "etc"), b"user.\xff", b"v")
        with pytest.raises(Unsupported, match="etc has an attribute"):
            await node.import_image("part", sent)
        (tmp_path / "any").mkdir()
        with pytest.raises(InvalidRequest, match="no root file system and no image"):
            await node.import_image("any", tmp_path / "any")
        assert (await node.import_image("layout:1", roots["glibc"].path)).digest == roots["glibc"].manifest
        box = await node.create(SandboxSpec(image="layout:1"))
        assert (await node.run(box.id, sh("echo yes"))).stdout == "yes\n"
        await node.destroy(box.id, Ending.EXIT)
        assert [image.name for image in await node.prune_images()] == [reference]
    finally:
        await node.close()


async def test_a_server_shows_no_directory_as_an_image(server: Server, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    owner = local_node(tmp_path / "state")
    await owner.start()
    box = await owner.create(SandboxSpec(image=str(tmp_path / "root")))
    await owner.snapshot(box.id, "over-a-directory")
    await owner.close()
    node = server.node()
    try:
        made = await node.create(SandboxSpec())
        for image in (str(tmp_path / "root"), "/etc", "over-a-directory"):
            with pytest.raises(Unsupported, match="does not allow the volume"):
                await node.create(SandboxSpec(image=image))
            with pytest.raises(Unsupported, match="does not allow the volume"):
                await node.reset(made.id, image)
    finally:
        await node.close()
