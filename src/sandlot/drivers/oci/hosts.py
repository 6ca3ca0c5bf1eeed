"""Where images of a registry are really fetched: `registries.conf`, the file that podman, skopeo and buildah read.

Of it these count: `prefix`, `location`, `insecure`, `blocked`, and mirrors. Short names are not looked up in it: they
are Docker's, wherever this runs.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.drivers.oci.reference import DOCKER, Reference
from sandlot.errors import InvalidRequest, Unsupported


@dataclass(frozen=True, slots=True)
class Place:
    """A repository at a registry that is asked. `insecure`: with a certificate that nobody signed, or plain HTTP."""

    host: str
    path: str
    insecure: bool = False
    named_here: bool = False  # by this host's `registries.conf`, not by who asks

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"


def split(host: str) -> tuple[str, int | None]:
    """A host's name in the one form in which two are compared, and its port where it has one."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdecimal() or (":" in name and not name.endswith("]")):
        name, port = host, ""
    name = name.strip("[]").lower()
    with suppress(ValueError):
        name = str(ipaddress.ip_address(name))
    return name, int(port) if port else None


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name, _ = split(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def read() -> list[dict[str, Any]]:
    """The entries of this user's files, else of the system's. Raises InvalidRequest for one that cannot be read."""
    if named := os.environ.get("CONTAINERS_REGISTRIES_CONF"):
        return _entries([Path(named)])
    config = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # noqa: PTH111  (may be none)
    for folder in (config / "containers", Path("/etc/containers")):
        main, more = folder / "registries.conf", sorted((folder / "registries.conf.d").glob("*.conf"))
        if main.exists() or more:
            return _entries([*([main] if main.exists() else []), *more])
    return []


def _entries(files: Sequence[Path]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            entries = tomllib.loads(file.read_text()).get("registry", [])
            for entry in entries if isinstance(entries, list) else []:
                _check(entry)
                found[entry.get("prefix") or entry["location"]] = entry  # a later file replaces it
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"{file} cannot be read: {error}", "`man containers-registries.conf`") from error
    return list(found.values())


def _check(entry: Any) -> None:
    """Raises ValueError for an entry that does not say where something is."""
    mirrors = entry.get("mirror", []) if isinstance(entry, dict) else None
    if not isinstance(mirrors, list) or not all(isinstance(each, dict) for each in (entry, *mirrors)):
        raise ValueError("a `registry` or a `mirror` is no table")
    for word in ("prefix", "location"):
        if not isinstance(entry.get(word, ""), str):
            raise ValueError(f"the `{word}` of a registry is no text")
    if not entry.get("prefix") and not entry.get("location"):
        raise ValueError("a registry has neither a `prefix` nor a `location`")
    if not all(isinstance(each.get("location"), str) and each["location"] for each in mirrors):
        raise ValueError(f"a mirror of {entry.get('prefix') or entry['location']} has no `location`")


def places(reference: Reference, entries: Sequence[dict[str, Any]]) -> list[Place]:
    """Where to ask, one after another: mirrors, then the registry. Raises Unsupported for one that is blocked. Pure."""
    name = reference.repository
    fitting = [(len(rest), entry, rest) for entry in entries if (rest := _rest(name, entry)) is not None]
    if not fitting:
        return [_place(name)]
    _, entry, rest = min(fitting, key=lambda each: each[0])  # the longest prefix
    if entry.get("blocked"):
        raise Unsupported(
            f"the registry of {reference} is blocked on this host",
            "who runs this host can allow it in `registries.conf` (`man containers-registries.conf`)",
        )
    found = []
    for mirror in entry.get("mirror", []):
        only = "digest-only" if entry.get("mirror-by-digest-only") else mirror.get("pull-from-mirror", "all")
        if only in ("all", "digest-only" if reference.digest else "tag-only"):
            found.append(_place(mirror["location"] + rest, bool(mirror.get("insecure")), True))
    location = entry.get("location")
    found.append(_place(location + rest if location else name, bool(entry.get("insecure")), bool(location)))
    return found


def _rest(name: str, entry: dict[str, Any]) -> str | None:
    """What follows the entry's prefix in a repository's name; None: it is not about that one."""
    prefix = str(entry.get("prefix") or entry.get("location"))
    host, slash, path = name.partition("/")
    if prefix.startswith("*."):
        return slash + path if host.endswith(prefix[1:]) else None
    rest = name.removeprefix(prefix)
    return rest if name.startswith(prefix) and rest[:1] in ("", "/") else None


def _place(name: str, insecure: bool = False, named_here: bool = False) -> Place:
    host, _, path = name.partition("/")
    if host == DOCKER:
        host = "registry-1.docker.io"
    return Place(host, path, insecure or is_loopback(host), named_here)
