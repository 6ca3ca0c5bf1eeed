"""Promises of a pull, against a real registry:
1. A download that breaks off goes on where it was; what fails in passing is tried again, a bounded number of times.
2. What is wrong is said with what to do: a missing tag, a wrong digest, a truncated blob, a layer that is no tar, an
   image for another processor, of the first schema, with a foreign layer; no space; nobody there.
3. A pull that fails or is given up leaves the store as it was.
4. Logins are found where Docker and the containers tools write them; a token that has run out is renewed once.
5. `registries.conf` says what is blocked, mirrored, moved.
6. A server asks no address that is not public, unless it is named; and then no other registry.
7. Layers are gzip of several members, zstd, or plain; an index leads to the image for this processor.
8. What is pulled is what its manifest says, whoever gave the same layers another name and config; and it replaces
   nothing but what was pulled, of which nothing stays.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest

from sandlot.api import ImageConfig, SandboxSpec
from sandlot.drivers.base import Progress
from sandlot.drivers.native.driver import NativeDriver
from sandlot.drivers.oci import registry as client
from sandlot.errors import BadImage, Conflict, Denied, HostFault, NotFound, SandlotError, Unreachable, Unsupported
from tests.support import images
from tests.support.images import Built, Front, Registry, Said
from tests.support.native import Boxes, sh

Roots = dict[str, Built]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little patience, and no settings of whoever runs the tests."""
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.01)
    (tmp_path / "none").touch()
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "no-logins"))


def contents(boxes: Boxes) -> list[str]:
    """Everything in the store."""
    return sorted(str(path) for path in boxes.driver._layers.directory.rglob("*"))


async def pull(boxes: Boxes, reference: str) -> str:
    return (await boxes.driver.pull(reference, Progress())).name


async def fails(boxes: Boxes, reference: str, error: type[SandlotError], said: str) -> SandlotError:
    """The pull fails in that way, and leaves nothing."""
    (boxes.driver._layers.directory / "layers").mkdir(parents=True, exist_ok=True)
    before = contents(boxes)
    with pytest.raises(error, match=said) as caught:
        await pull(boxes, reference)
    assert contents(boxes) == before
    return caught.value


def blob_is(built: Built) -> Callable[[str], bool]:
    return lambda path: path.endswith(f"/blobs/{built.layers[0]}")


async def test_a_download_goes_on_where_it_broke_off(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    name = registry.push(roots["glibc"].path, "resumed/x:1").partition("/")[2]
    ours = blob_is(roots["glibc"])
    cuts = iter([200_000, 300_000, 1])

    def act(path: str, _: Message) -> Said | None:
        return Said(cut=next(cuts, None)) if ours(path) else None

    with Front(registry.host, act) as front:
        reference = await pull(boxes, f"{front.host}/{name}")
    ranges = [asked for path, asked in front.asked if ours(path)]
    assert ranges == [None, "bytes=200000-", "bytes=500000-", "bytes=500001-"]
    assert (await sh(await boxes(SandboxSpec(image=reference)), "cat /srv/one"))[1] == "of the image\n"


async def test_one_that_cannot_go_on_begins_again(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    name = registry.push(roots["glibc"].path, "again/x:1").partition("/")[2]
    ours = blob_is(roots["glibc"])
    data = registry.blob(roots["glibc"].layers[0]).read_bytes()
    cuts = iter([200_000])

    def act(path: str, _: Message) -> Said | None:  # a server that knows of no ranges
        return Said(body=data, cut=next(cuts, None)) if ours(path) else None

    with Front(registry.host, act) as front:
        await pull(boxes, f"{front.host}/{name}")


async def test_what_fails_in_passing_is_tried_again_and_not_for_ever(
    boxes: Boxes, registry: Registry, roots: Roots
) -> None:
    name = registry.push(roots["busybox"].path, "passing/x:1").partition("/")[2]
    troubles = iter([503, 429, 500])

    def act(path: str, _: Message) -> Said | None:
        status = next(troubles, 0) if path != "/v2/" else 0
        return Said(status, {"Retry-After": "0"}, b"{}") if status else None

    with Front(registry.host, act) as front:
        await pull(boxes, f"{front.host}/{name}")
    with Front(registry.host, lambda path, _: Said(503, {}, b"{}") if "blobs" in path else None) as front:
        await fails(boxes, f"{front.host}/{name}@{roots['glibc'].manifest}", NotFound, "no image")
        await fails(boxes, f"{front.host}/passing/x:2", NotFound, "no image")
        registry.push(roots["glibc"].path, "passing/y:1")
        await fails(boxes, f"{front.host}/passing/y:1", Unreachable, "answered 503")
    assert len([path for path, _ in front.asked if "blobs" in path]) == 5


async def test_a_connection_that_is_always_cut_ends(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    name = registry.push(roots["glibc"].path, "cut/x:1").partition("/")[2]
    ours = blob_is(roots["glibc"])
    with Front(registry.host, lambda path, _: Said(cut=1000) if ours(path) else None) as front:
        await fails(boxes, f"{front.host}/{name}", Unreachable, "broke while fetching")


async def test_another_config_of_the_same_layers_is_not_what_is_pulled(
    boxes: Boxes, registry: Registry, roots: Roots
) -> None:
    reference = registry.push(roots["glibc"].path, "poisoned/x:1")
    clean = await boxes.driver.pull(reference, Progress())
    tagged = await boxes.driver.tag(reference, "0tagged", ImageConfig(env={"LD_PRELOAD": "/evil.so"}))
    assert (tagged.kind, tagged.digest) == ("built", None)
    for name in (reference, f"{reference.rpartition(':')[0]}@{roots['glibc'].manifest}"):
        again = await boxes.driver.pull(name, Progress())
        assert (again.kind, again.config, again.digest) == ("pulled", clean.config, roots["glibc"].manifest)
    await boxes.driver.forget(reference)
    await boxes.driver.forget(f"{reference.rpartition(':')[0]}@{roots['glibc'].manifest}")
    assert (await boxes.driver.pull(reference, Progress())).config == clean.config  # and so when it alone is here


async def test_what_was_imported_has_a_pulled_name_too(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = registry.push(roots["glibc"].path, "imported/x:1")
    layout = await boxes.driver.import_("mine", roots["glibc"].path, Progress())
    pulled = await boxes.driver.pull(reference, Progress())
    assert (pulled.name, pulled.base, pulled.kind, pulled.config) == (reference, reference, "pulled", layout.config)
    assert (await boxes.driver.image("mine")).kind == "imported"
    await boxes.driver.forget("mine")
    assert [each.name for each in await boxes.driver.idle_images()] == [reference]


async def test_a_pull_replaces_nothing_that_was_imported(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = registry.push(roots["busybox"].path, "kept/x:1")
    mine = await boxes.driver.import_(reference, roots["glibc"].path, Progress())
    error = await fails(boxes, reference, Conflict, "was imported here")
    assert f"sandlot image rm {reference}" in str(error.hint)
    assert await boxes.driver.image(reference) == mine
    await boxes.driver.forget(reference)
    assert (await boxes.driver.pull(reference, Progress())).digest == roots["busybox"].manifest  # the control


async def test_of_a_tag_that_moved_to_what_is_here_nothing_old_stays(
    boxes: Boxes, registry: Registry, roots: Roots
) -> None:
    def layers() -> int:
        return len([path for path in (boxes.driver._layers.directory / "layers").iterdir() if path.is_dir()])

    moves = registry.push(roots["busybox"].path, "moves/x:1")
    await pull(boxes, moves)
    await pull(boxes, registry.push(roots["glibc"].path, "moves/y:1"))
    assert layers() == 2
    registry.push(roots["glibc"].path, "moves/x:1")
    assert (await boxes.driver.pull(moves, Progress())).digest == roots["glibc"].manifest
    assert layers() == 1


async def test_a_missing_tag_is_said(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = registry.push(roots["busybox"].path, "missing/x:1")
    error = await fails(boxes, reference.replace(":1", ":2"), NotFound, "missing/x:2")
    assert "skopeo list-tags" in str(error.hint)
    await fails(boxes, f"{registry.host}/nobody/has:it", NotFound, "nobody/has:it")


@pytest.mark.parametrize("what", ["changed", "truncated", "missing"])
async def test_a_damaged_blob_is_said(
    boxes: Boxes, roots: Roots, tmp_path: Path, registry: Registry, what: str
) -> None:
    with Registry(tmp_path / "registry") as own:
        reference = own.push(roots["glibc"].path, "damaged/x:1")
        blob = own.blob(roots["glibc"].layers[1])
        data = blob.read_bytes()
        if what == "missing":
            blob.unlink()
        else:
            blob.write_bytes(data[:-20] if what == "truncated" else data[:-1] + b"?")
        said = {"changed": "another digest", "truncated": "ends after", "missing": "has no blob"}[what]
        error = await fails(boxes, reference, BadImage, said)
        assert roots["glibc"].layers[1] in error.message


async def test_a_manifest_of_another_digest_is_refused(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    registry.push(roots["busybox"].path, "wrong/x:1")
    manifest = registry.blob(roots["busybox"].manifest).read_bytes() + b" "
    with Front(registry.host, lambda path, _: Said(body=manifest) if "manifests" in path else None) as front:
        await fails(boxes, f"{front.host}/wrong/x@{roots['busybox'].manifest}", BadImage, "has the digest")


async def test_a_layer_that_is_no_tar_is_said(boxes: Boxes, registry: Registry, tmp_path: Path) -> None:
    cases = {
        "text": (b"hello" * 400, "it is no tar"),
        "cut": (images.busybox_root()[:5000], "breaks off"),
        "header": (images.packed(images.entry("a", b"x" * 10))[:1024] + b"\1" * 512, "a header of it is damaged"),
    }
    for name, (layer, said) in cases.items():
        built = images.write_layout(tmp_path / name, [images.packed(images.directory("etc")), layer])
        reference = registry.push(built.path, f"notar/{name}:1")
        await fails(boxes, reference, BadImage, f"layer 2 of 2 .*{said}")


async def test_a_layer_that_unpacks_to_something_else_is_said(
    boxes: Boxes, registry: Registry, roots: Roots, tmp_path: Path
) -> None:
    built = images.write_layout(tmp_path / "x", [images.packed(images.directory("etc"))])
    config = json.loads((built.path / "index.json").read_text())
    manifest = json.loads(_blob(built, config["manifests"][0]["digest"]))
    about = json.loads(_blob(built, manifest["config"]["digest"]))
    about["rootfs"]["diff_ids"] = ["sha256:" + "0" * 64]
    data = json.dumps(about).encode()
    manifest["config"] |= {"digest": images.digest(data), "size": len(data)}
    (built.path / f"blobs/sha256/{images.digest(data)[7:]}").write_bytes(data)
    data = json.dumps(manifest).encode()
    (built.path / f"blobs/sha256/{images.digest(data)[7:]}").write_bytes(data)
    config["manifests"][0] |= {"digest": images.digest(data), "size": len(data)}
    (built.path / "index.json").write_text(json.dumps(config))
    (boxes.driver._layers.directory / "layers").mkdir(parents=True)
    before = contents(boxes)
    with pytest.raises(BadImage, match="has the digest"):
        await boxes.driver.import_("x", built.path, Progress())
    assert contents(boxes) == before


async def test_an_image_with_more_layers_than_digests_is_refused(
    boxes: Boxes, registry: Registry, tmp_path: Path
) -> None:
    layers = [images.packed(images.directory("etc")), images.packed(images.entry("etc/f", b"x"))]
    built = images.write_layout(tmp_path / "x", layers)
    name = registry.push(built.path, "counted/x:1").partition("/")[2]
    digest = json.loads((built.path / "index.json").read_text())["manifests"][0]["digest"]
    manifest = json.loads(_blob(built, digest))
    config = json.loads(_blob(built, manifest["config"]["digest"]))
    config["rootfs"]["diff_ids"].pop()
    data = json.dumps(config).encode()
    manifest["config"] |= {"digest": images.digest(data), "size": len(data)}

    def act(path: str, _: Message) -> Said | None:
        if "/manifests/" in path:
            return Said(body=json.dumps(manifest).encode())
        return Said(body=data) if images.digest(data) in path else None

    with Front(registry.host, act) as front:
        await fails(boxes, f"{front.host}/{name}", BadImage, "2 layers, and its config names 1")


def _blob(built: Built, digest: str) -> bytes:
    return (built.path / f"blobs/sha256/{digest.removeprefix('sha256:')}").read_bytes()


async def test_an_image_for_another_processor_is_said(boxes: Boxes, registry: Registry, tmp_path: Path) -> None:
    root = images.busybox_root()
    built = images.write_layout(tmp_path / "one", [root], machine="s390x")
    reference = registry.push(built.path, "other/one:1", "--override-arch=s390x")
    error = await fails(boxes, reference, Unsupported, "linux/s390x")
    assert images.architecture() in str(error.hint)
    built = images.write_layout(tmp_path / "many", [root], machine="s390x", index=True)
    reference = registry.push(built.path, "other/many:1", "--all")
    await fails(boxes, reference, Unsupported, "is for linux/s390x")


async def test_an_index_leads_to_the_image_for_this_processor(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    reference = registry.push(roots["glibc"].path, "index/x:1", "--all")
    with Front(registry.host, lambda path, headers: None) as front:
        await pull(boxes, f"{front.host}/index/x:1")
    assert len([path for path, _ in front.asked if "manifests" in path]) == 2
    assert (await boxes.driver.pull(reference, Progress())).digest == roots["glibc"].manifest


@pytest.mark.parametrize("pack", ["zstd", "plain"])
async def test_other_packings(boxes: Boxes, registry: Registry, tmp_path: Path, pack: str) -> None:
    built = images.write_layout(tmp_path / pack, [images.busybox_root()], pack=pack)
    reference = registry.push(built.path, f"packed/{pack}:1")
    await pull(boxes, reference)
    assert (await sh(await boxes(SandboxSpec(image=reference)), "echo yes"))[1] == "yes\n"


async def test_members_and_frames_one_after_another(boxes: Boxes, tmp_path: Path) -> None:
    root = images.busybox_root()
    for pack in ("gzip", "zstd"):
        parts = [images.compressed(root[at : at + 700_000], pack) for at in range(0, len(root), 700_000)]
        (tmp_path / f"{pack}.tar").write_bytes(b"".join(parts))
        await boxes.driver.import_(pack, tmp_path / f"{pack}.tar", Progress())
        (tmp_path / "cut.tar").write_bytes(b"".join(parts)[:-3])
        with pytest.raises(BadImage, match="breaks off"):
            await boxes.driver.import_("cut", tmp_path / "cut.tar", Progress())
        (tmp_path / "bad.tar").write_bytes(parts[0][:100] + b"\0" * 200 + parts[0][300:])
        with pytest.raises(BadImage):
            await boxes.driver.import_("bad", tmp_path / "bad.tar", Progress())


SCHEMA_1 = json.dumps({"schemaVersion": 1, "name": "x", "tag": "1", "fsLayers": [], "history": []}).encode()


async def test_old_and_foreign_images_are_said(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    registry.push(roots["busybox"].path, "old/x:1")
    with Front(registry.host, lambda path, _: Said(body=SCHEMA_1) if "manifests" in path else None) as front:
        error = await fails(boxes, f"{front.host}/old/x:1", Unsupported, "first schema")
        assert "push it again" in str(error.hint)
    found = json.loads(registry.blob(roots["busybox"].manifest).read_bytes())
    found["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
    foreign = json.dumps(found).encode()
    with Front(registry.host, lambda path, _: Said(body=foreign) if "manifests" in path else None) as front:
        await fails(boxes, f"{front.host}/old/x:1", Unsupported, "does not hold")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"{", b'{"layers": 1}', b'{"layers": [], "config": {}}', b"[" * 99999]
)
async def test_a_manifest_that_is_none_is_said(boxes: Boxes, registry: Registry, body: bytes) -> None:
    with Front(registry.host, lambda path, _: Said(body=body) if "manifests" in path else None) as front:
        await fails(boxes, f"{front.host}/none/x:1", BadImage, "none/x:1")


async def test_nobody_there_is_said(boxes: Boxes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    error = await fails(boxes, f"127.0.0.1:{free}/a/b:1", Unreachable, "cannot be reached")
    assert error.hint
    await fails(boxes, "no-such-host.invalid/a/b:1", Unreachable, "cannot be reached")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount one")
    (tmp_path / "small").mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "none", str(tmp_path / "small")], check=False)
    if done.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield tmp_path / "small"
    subprocess.run(["umount", str(tmp_path / "small")], check=True)


async def test_no_space_is_said(boxes: Boxes, registry: Registry, roots: Roots, small: Path, tmp_path: Path) -> None:
    boxes.driver._layers = type(boxes.driver._layers)(small / "images")
    glibc = registry.push(roots["glibc"].path, "space/glibc:1")
    error = await fails(boxes, glibc, HostFault, "no space left")
    assert "sandlot image prune" in str(error.hint)
    large = images.write_layout(tmp_path / "large", [images.packed(images.entry("x", os.urandom(4 << 20)))])
    await fails(boxes, registry.push(large.path, "space/large:1"), HostFault, "has room for")
    (small / "filled").write_bytes(bytes(2 << 20))
    await fails(boxes, registry.push(roots["busybox"].path, "space/busybox:1"), HostFault, "room for|space left")
    (small / "filled").unlink()
    assert await pull(boxes, f"{registry.host}/space/busybox:1")  # there is room for this one


async def test_a_pull_that_is_given_up_leaves_nothing(boxes: Boxes, registry: Registry, roots: Roots) -> None:
    registry.push(roots["glibc"].path, "given/x:1")
    (boxes.driver._layers.directory / "layers").mkdir(parents=True)
    before = contents(boxes)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def act(path: str, _: Message) -> Said | None:
        if "blobs" in path and roots["glibc"].layers[1] in path:
            loop.call_soon_threadsafe(asked.set)
            return Said(200, {"Content-Length": "9999"}, b"x")  # and then nothing
        return None

    with Front(registry.host, act) as front:
        pulling = asyncio.create_task(pull(boxes, f"{front.host}/given/x:1"))
        await asyncio.wait_for(asked.wait(), 20)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
    assert contents(boxes) == before


# The password is U*U: a known example of the form.
PASSWORD = "u:$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW\n"


def logins(file: Path, host: str, secret: str = "u:U*U") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"auths": {host: {"auth": base64.b64encode(secret.encode()).decode()}}}))
    return file


async def test_logins_are_found(
    boxes: Boxes, registry: Registry, roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passwords").write_text(PASSWORD)
    with Registry(tmp_path / "closed", f"auth: {{htpasswd: {{realm: x, path: {tmp_path}/passwords}}}}") as closed:
        reference = closed.push(roots["busybox"].path, "closed/x:1", login="u:U*U")
        error = await fails(boxes, reference, Denied, "wants a login")
        assert f"docker login {closed.host}" in str(error.hint)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(logins(tmp_path / "wrong.json", closed.host, "u:wrong")))
        await fails(boxes, reference, Denied, "does not let us have")
        (tmp_path / "broken.json").write_text("{")
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "broken.json"))
        with pytest.raises(SandlotError, match="cannot be read"):
            await pull(boxes, reference)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(logins(tmp_path / "right.json", f"{closed.host}/closed")))
        await pull(boxes, reference)
        await boxes.driver.forget(reference)
        monkeypatch.delenv("REGISTRY_AUTH_FILE")
        for word, file in (("XDG_RUNTIME_DIR", "containers/auth.json"), ("DOCKER_CONFIG", "config.json")):
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
            monkeypatch.setenv(word, str(tmp_path / word))
            logins(tmp_path / word / file, closed.host)
            await pull(boxes, reference)
            await boxes.driver.forget(reference)
        helper = tmp_path / "bin/docker-credential-tests"
        helper.parent.mkdir()
        helper.write_text('#!/bin/sh\nread server\necho "{\\"Username\\":\\"u\\",\\"Secret\\":\\"U*U\\"}"\n')
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
        (tmp_path / "DOCKER_CONFIG/config.json").write_text(json.dumps({"credHelpers": {closed.host: "tests"}}))
        await pull(boxes, reference)
        await boxes.driver.forget(reference)
        helper.write_text("#!/bin/sh\necho no keyring; exit 1\n")
        await fails(boxes, reference, Denied, "no keyring")


async def test_a_token_that_has_run_out_is_renewed_once(
    boxes: Boxes, roots: Roots, registry: Registry, tmp_path: Path
) -> None:
    tokens = images.Tokens(tmp_path / "tokens")
    ages = iter([600.0, 600.0, -600.0])  # of skopeo, then of us
    given: list[str] = []

    def act(path: str, _: Message) -> Said | None:
        if not path.startswith("/token"):
            return None
        given.append(path)
        return Said(body=json.dumps({"token": tokens.make("tokens/x", next(ages, age))}).encode())

    age = 600.0
    with Front("", act) as realm, Registry(tmp_path / "closed", tokens.auth(f"http://{realm.host}/token")) as closed:
        reference = closed.push(roots["busybox"].path, "tokens/x:1")
        ages = iter([-600.0])
        given.clear()
        await pull(boxes, reference)
        assert len(given) == 2
        assert "scope=repository%3Atokens%2Fx%3Apull" in given[0]
        await boxes.driver.forget(reference)
        age = -600.0
        error = await fails(boxes, reference, Denied, "does not let us have")
        assert "docker login" in str(error.hint)


async def test_a_registry_of_this_machine_may_have_a_certificate_of_its_own(
    boxes: Boxes, roots: Roots, tmp_path: Path
) -> None:
    with Registry(tmp_path / "own", tls=images.Tokens(tmp_path / "certificate")) as own:
        await pull(boxes, own.push(roots["busybox"].path, "tls/x:1"))


AWAY = """
import asyncio, http.server, ssl, sys, threading
from pathlib import Path
from sandlot.node.node import local_node

folder = Path(sys.argv[1])
server = http.server.ThreadingHTTPServer(("192.0.2.7", 0), http.server.BaseHTTPRequestHandler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
host = f"192.0.2.7:{server.server_port}"

async def main():
    for registries in None, (host,):
        async with local_node(folder / "state", registries=registries) as node:
            try:
                async for _ in node.pull_image(f"{host}/x:1"):
                    pass
            except Exception as error:
                print(type(error).__name__, error, getattr(error, "hint", None))

asyncio.run(main())
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_a_registry_elsewhere_needs_a_certificate_that_is_trusted(trusted: bool, tmp_path: Path) -> None:
    images.need("ip", "unshare")
    key = images.Tokens(tmp_path / "tls", "-addext subjectAltName=IP:192.0.2.7")
    other = images.Tokens(tmp_path / "other")
    env = {**os.environ, "SSL_CERT_FILE": str((key if trusted else other).certificate)}
    elsewhere = 'ip link set lo up && ip address add 192.0.2.7/32 dev lo && exec "$@"'
    words = ("unshare", "--map-root-user", "--net", "sh", "-c", elsewhere, "-", sys.executable, "-c", AWAY)
    found = subprocess.run([*words, key.key.parent], env=env, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    said = found.stdout.splitlines()
    assert len(said) == 2
    wanted = "answered 501" if trusted else "not trusted"  # it knows no GET
    assert all(wanted in line and ("SSL_CERT_FILE" in line) != trusted for line in said), said


def settings(monkeypatch: pytest.MonkeyPatch, file: Path, text: str) -> None:
    file.write_text(text)
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(file))


async def test_registries_conf_is_heeded(
    boxes: Boxes, registry: Registry, roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push(roots["busybox"].path, "mirrored/library/busybox:1")
    registry.push(roots["busybox"].path, "moved/team/x:1")
    text = f"""
unqualified-search-registries = ["example.com"]
[[registry]]
prefix = "docker.io"
location = "docker.io"
[[registry.mirror]]
location = "127.0.0.1:1/dead"
[[registry.mirror]]
location = "{registry.host}/mirrored"
[[registry]]
prefix = "*.example.com/team"
location = "nowhere.invalid"
[[registry]]
prefix = "moved.example.com/team"
location = "{registry.host}/moved/team"
[[registry]]
location = "blocked.example.com"
blocked = true
"""
    settings(monkeypatch, tmp_path / "registries.conf", text)
    assert await pull(boxes, "busybox:1") == "docker.io/library/busybox:1"
    assert await pull(boxes, "moved.example.com/team/x:1") == "moved.example.com/team/x:1"
    error = await fails(boxes, "blocked.example.com/a:1", Unsupported, "is blocked")
    assert "registries.conf" in str(error.hint)
    settings(monkeypatch, tmp_path / "registries.conf", "registry = 1[")
    with pytest.raises(SandlotError, match=r"registries\.conf cannot be read"):
        await pull(boxes, "busybox:2")


async def test_a_server_asks_only_who_is_public_or_named(
    boxes: Boxes, registry: Registry, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = registry.push(roots["busybox"].path, "public/x:1")
    driver: NativeDriver = boxes.driver
    driver._registries = ()
    error = await fails(boxes, reference, Denied, "not public")
    assert "--allow-registry" in str(error.hint)
    for address in (
        "localhost",
        "[::1]",
        "10.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "[::ffff:a00:1]",
        "0.0.0.0",
        "[fec0::1]",
    ):
        await fails(boxes, f"{address}:80/a/b:1", Denied, "not public")
    driver._registries = ("ghcr.io",)
    await fails(boxes, reference, Denied, "does not pull from")
    driver._registries = (registry.host,)
    await pull(boxes, reference)
    await boxes.driver.forget(reference)

    def elsewhere(path: str, _: Message) -> Said | None:
        return Said(307, {"Location": f"http://{registry.host}{path}"}, b"") if "blobs" in path else None

    with Front(registry.host, elsewhere) as front:  # the one that is named leads to one that is not
        driver._registries = (front.host,)
        await fails(boxes, f"{front.host}/public/x:1", Denied, "not public")
        driver._registries = None
        await pull(boxes, f"{front.host}/public/x:1")


async def test_a_login_is_not_shown_to_who_a_registry_leads_to(
    boxes: Boxes, registry: Registry, roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = registry.push(roots["busybox"].path, "led/x:1").partition("/")[2]
    seen: list[str | None] = []

    def look(path: str, headers: Message) -> None:
        seen.append(headers["Authorization"])

    with Front(registry.host, look) as other:

        def act(path: str, headers: Message) -> Said | None:
            if headers["Authorization"] is None:
                return Said(401, {"WWW-Authenticate": 'Basic realm="x"'}, b"")
            return Said(307, {"Location": f"http://{other.host}{path}"}, b"") if "blobs" in path else None

        with Front(registry.host, act) as front:
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(logins(tmp_path / "logins.json", front.host)))
            await pull(boxes, f"{front.host}/{name}")
    assert seen
    assert set(seen) == {None}
