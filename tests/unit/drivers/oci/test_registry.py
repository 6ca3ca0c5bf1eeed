"""Promises of one who speaks to a registry, when that answers as no registry should:
1. What it leads to that can be no URL, and a token that no request can carry, is an error of the registry.
2. Of several ways to log in that it offers, the one that we know is gone.
3. A host that a server may ask is found however it is written; and no address leads around that.
4. A blob that is always sent from its beginning ends; one that is too long is said to be.
5. A mirror whose name nobody can tell, and one that is named twice, does not keep us from the next place.
"""

from __future__ import annotations

import ipaddress
import json
from email.message import Message
from pathlib import Path

import pytest

from sandlot.api import LayerProgress
from sandlot.drivers import public
from sandlot.drivers.base import Progress
from sandlot.drivers.oci import registry as client
from sandlot.drivers.oci.manifest import Blob
from sandlot.drivers.oci.reference import Reference
from sandlot.errors import BadImage, Denied, NotFound, SandlotError, Unreachable
from tests.support import images
from tests.support.images import Front, Said

DIGEST = "sha256:" + "0123456789abcdef" * 4
MANIFEST = json.dumps({"layers": [], "config": {"digest": DIGEST, "size": 1}}).encode()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little patience, and no settings of whoever runs the tests."""
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    (tmp_path / "none").touch()
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "no-logins"))


async def ask(host: str, folder: Path, allowed: tuple[str, ...] | None = None) -> None:
    """For the manifest of an image there."""
    asked = client.Registry(Reference.parse(f"{host}/a/b:1"), folder, allowed)
    try:
        await asked.manifest()
    finally:
        await asked.close()


@pytest.mark.parametrize(
    "where", ["https://[x/", "//[", "https://", "http://127.0.0.1:99999999/", "http://" + "a" * 70 + "/"]
)
async def test_to_be_led_to_what_is_no_url_is_said(where: str, tmp_path: Path) -> None:
    def challenge(path: str, _: Message) -> Said:
        return Said(401, {"WWW-Authenticate": f'Bearer realm="{where}"'}, b"")

    for act in (lambda path, _: Said(307, {"Location": where}, b""), challenge):
        with Front("", act) as front:
            for allowed in (None, (front.host,)):
                with pytest.raises((Unreachable, Denied), match=r"no URL|cannot be|no host|not public"):
                    await ask(front.host, tmp_path, allowed)


async def test_a_registry_that_nobody_can_ask_is_said(tmp_path: Path) -> None:
    for host in ("127.0.0.1:99999", "a" * 70 + ".example"):
        with pytest.raises(Unreachable, match=r"cannot be (asked|reached)"):
            await ask(host, tmp_path)
        with pytest.raises((Unreachable, Denied), match=r"cannot be asked|not public"):
            await ask(host, tmp_path, ())


async def test_a_token_that_no_request_can_carry_is_said(tmp_path: Path) -> None:
    def act(path: str, headers: Message) -> Said:
        if path.startswith("/token"):
            return Said(body=json.dumps({"token": "é"}).encode())
        return Said(401, {"WWW-Authenticate": 'Bearer realm="/token"'}, b"")

    with Front("", act) as front, pytest.raises(Unreachable, match="cannot be asked"):
        await ask(front.host, tmp_path)


async def test_a_time_to_wait_that_is_no_number_is_passed_over(tmp_path: Path) -> None:
    def act(path: str, _: Message) -> Said:
        return Said(503 if "manifests" in path else 200, {"Retry-After": "²"}, b"")

    with Front("", act) as front, pytest.raises(Unreachable, match="answered 503"):
        await ask(front.host, tmp_path)


async def test_of_several_ways_to_log_in_the_one_is_gone_that_we_know(tmp_path: Path) -> None:
    """As registries answer that take passwords and tokens."""

    def act(path: str, headers: Message) -> Said:
        if path.startswith("/token"):
            asked.append(path)
            return Said(body=b'{"token": "good"}')
        if headers["Authorization"] != "Bearer good":
            return Said(401, {"WWW-Authenticate": offer}, b"")
        return Said(body=MANIFEST)

    for words in (
        'Basic realm="all, of it", Bearer realm="/token",service="s, \\"t\\"",scope=x',
        'Bearer realm="/token",scope=,service="s, \\"t\\""',
        'Negotiate, Bearer Realm = "/token" , service="s, \\"t\\"", Basic realm="x"',
        'Negotiate dG9rZW4=, bearer service="s, \\"t\\"", realm="/token"',
    ):
        asked: list[str] = []
        offer = words
        with Front("", act) as front:
            await ask(front.host, tmp_path)
        assert "service=s%2C+%22t%22" in asked[0].replace("%20", "+")
    offer = 'Negotiate, Digest realm="x"'
    with Front("", act) as front, pytest.raises(Denied, match="wants a login"):
        await ask(front.host, tmp_path)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("[::1]:1", "[::1]:1"),
        ("[::1]:1", "[0:0::1]:1"),
        ("localhost:443", "localhost:443"),
        ("LOCALHOST:1", "localhost:1"),
        ("localhost:1", "LocalHost:1"),
        ("localhost", "LOCALHOST"),
    ],
)
async def test_a_host_that_may_be_asked_is_found_however_it_is_written(host: str, allowed: str, tmp_path: Path) -> None:
    with pytest.raises((Unreachable, NotFound, BadImage)):  # it was asked; there is nobody, or no image
        await ask(host, tmp_path, (allowed,))
    with pytest.raises(Denied, match="does not pull from"):
        await ask(host, tmp_path, ("localhost:2",))


def test_a_registry_is_the_same_with_its_usual_port(tmp_path: Path) -> None:
    for host, allowed in (("ghcr.io", "ghcr.io:443"), ("ghcr.io:443", "GHCR.io")):
        client.Registry(Reference.parse(f"{host}/a/b:1"), tmp_path, (allowed,))
    with pytest.raises(Denied, match="does not pull from"):
        client.Registry(Reference.parse("ghcr.io:444/a/b:1"), tmp_path, ("ghcr.io",))


async def test_one_port_of_a_host_is_not_another(tmp_path: Path) -> None:
    with Front("", lambda path, _: Said(body=MANIFEST)) as other:
        port = other.host.rpartition(":")[2]
        leads = {"Location": f"http://127.0.0.1:{port}/x"}
        with Front("", lambda path, _: Said(307, leads, b"")) as front:
            with pytest.raises(Denied, match="not public"):
                await ask(front.host, tmp_path, (front.host,))
            await ask(front.host, tmp_path, (front.host, other.host))


def test_no_address_leads_around_to_one_that_is_not_public() -> None:
    for address in ("fec0::1", "64:ff9b::a00:1", "2002:a00:1::", "::ffff:10.0.0.1", "fc00::1", "fe80::1", "224.0.0.1"):
        assert not public.is_public(ipaddress.ip_address(address)), address
    for address in ("1.1.1.1", "2606:4700::1111", "64:ff9b::101:101"):
        assert public.is_public(ipaddress.ip_address(address)), address


async def fetch(host: str, blob: Blob, folder: Path) -> bytes:
    found = client.Registry(Reference.parse(f"{host}/a/b:1"), folder)
    found.blobs = (blob,)
    progress = Progress()
    progress.begin([LayerProgress(digest=blob.digest, size=blob.size)])
    found.start(progress)
    try:
        with await found.layer(0) as file:
            return file.read()
    finally:
        await found.close()


async def test_a_blob_that_is_always_sent_from_its_beginning_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROGRESS", 1000)
    data = bytes(10_000)
    asked = 0

    def act(path: str, _: Message) -> Said:
        nonlocal asked
        if "blobs" not in path:
            return Said(body=b"")
        asked += 1
        return Said(body=data, cut=5000 if asked % 2 else 1) if asked < 50 else Said(body=data)

    blob = Blob(images.digest(data), len(data))
    with Front("", act) as front:
        with pytest.raises(Unreachable, match="broke while fetching"):
            await fetch(front.host, blob, tmp_path)
        assert asked < 10
        asked = 50  # the control
        assert await fetch(front.host, blob, tmp_path) == data


async def test_a_blob_that_is_too_long_is_said_to_be(tmp_path: Path) -> None:
    data = bytes(10_000)
    blob = Blob(images.digest(data[:9000]), 9000)
    with Front("", lambda path, _: Said(body=data)) as front:
        with pytest.raises(BadImage, match="is longer than the 9000 bytes"):
            await fetch(front.host, blob, tmp_path)
        assert await fetch(front.host, Blob(images.digest(data), len(data)), tmp_path) == data  # the control


def settings(monkeypatch: pytest.MonkeyPatch, file: Path, location: str, *mirrors: str) -> None:
    named = "".join(f'[[registry.mirror]]\nlocation = "{each}"\n' for each in mirrors)
    file.write_text(f'[[registry]]\nprefix = "r.example"\nlocation = "{location}"\n{named}')
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(file))


async def test_a_mirror_whose_name_takes_too_long_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "_LOOKUP_SECONDS", 0.0)
    with Front("", lambda path, _: Said(body=MANIFEST)) as front:
        redirects = {"Location": "https://slow.invalid/x"}
        with Front("", lambda path, _: Said(307, redirects, b"")) as mirror:
            settings(monkeypatch, tmp_path / "registries.conf", front.host, mirror.host)
            await ask("r.example", tmp_path, ())
            settings(monkeypatch, tmp_path / "registries.conf", mirror.host)
            with pytest.raises(SandlotError, match=r"looking up slow\.invalid"):  # the control
                await ask("r.example", tmp_path, ())


async def test_a_mirror_that_is_the_registry_itself_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(path: str, _: Message) -> Said:
        return Said(404 if "manifests" in path else 200, {}, b"")

    with Front("", lambda path, _: Said(body=MANIFEST)) as good, Front("", nothing) as bad:
        settings(monkeypatch, tmp_path / "registries.conf", bad.host, bad.host, good.host)
        await ask("r.example", tmp_path)
