"""Promises of `registries.conf` and of hosts' names:
1. A file that does not say where something is, is named, with what is wrong in it.
2. Two names of one host are one: small letters or not, an address however it is written, with brackets or without.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.drivers.oci import hosts
from sandlot.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('location = "a.b"\n[[registry.mirror]]\ninsecure = true', "a mirror of a.b has no `location`"),
        ('location = "a.b"\nmirror = ["c.d"]', "no table"),
        ('location = "a.b"\nmirror = "c.d"', "no table"),
        ("location = 5", "`location` of a registry is no text"),
        ('prefix = 5\nlocation = "a.b"', "`prefix` of a registry is no text"),
        ("blocked = true", "neither a `prefix` nor a `location`"),
    ],
)
def test_a_file_that_says_not_where_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registries.conf").write_text(f"[[registry]]\n{text}\n")
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
    with pytest.raises(InvalidRequest, match=r"registries\.conf cannot be read: .*" + said):
        hosts.read()
    (tmp_path / "registries.conf").write_text('registry = ["a.b"]')
    with pytest.raises(InvalidRequest, match="no table"):
        hosts.read()


@pytest.mark.parametrize(
    ("host", "name", "port"),
    [
        ("GHCR.io", "ghcr.io", None),
        ("ghcr.io:443", "ghcr.io", 443),
        ("[::1]", "::1", None),
        ("[0:0::1]:5000", "::1", 5000),
        ("::1", "::1", None),
        ("127.0.0.1:5000", "127.0.0.1", 5000),
        ("a:", "a:", None),
        ("5000", "5000", None),
    ],
)
def test_names_of_one_host_are_one(host: str, name: str, port: int | None) -> None:
    assert hosts.split(host) == (name, port)


def test_this_machine_is_known() -> None:
    assert all(map(hosts.is_loopback, ("localhost", "LocalHost:5000", "127.9.9.9:1", "[::1]:5", "[::1]")))
    assert not any(map(hosts.is_loopback, ("localhost.evil.example", "10.0.0.1:5000", "[::2]:1")))
