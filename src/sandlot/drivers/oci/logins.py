"""Who this node is at a registry: what `docker login`, `podman login` and `skopeo login` have written down.

Reads, in this order, and takes the first that knows the registry: $REGISTRY_AUTH_FILE alone where it is set;
`containers/auth.json` of the runtime and the configuration directory; `config.json` of $DOCKER_CONFIG or ~/.docker.
Blocks: a credential helper is a program.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.errors import Denied, InvalidRequest

# It asks a keyring, which may ask a person: nobody is there to answer.
HELPER_SECONDS = 20.0

_DOCKER_HOSTS = ("registry-1.docker.io", "docker.io", "index.docker.io")
_NOT_FOUND = "credentials not found"


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """A name with a password, or a token with which others can be had."""

    name: str
    secret: str
    token: bool = False


def find(host: str, path: str) -> Login | None:
    """For a repository at a registry. Raises InvalidRequest (a file is damaged), Denied (a helper fails)."""
    hosts = _DOCKER_HOSTS if host in _DOCKER_HOSTS else (host,)
    for file in _files():
        try:
            found = json.loads(file.read_text())
            if login := _in_file(found, hosts, path):
                return login
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the logins in {file} cannot be read: {type(error).__name__}", f"`docker login {host}` writes it anew"
            ) from error
    return None


def _files() -> Iterator[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
        return
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (there may be none)
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/containers/{os.geteuid()}")
    yield runtime / "containers/auth.json" if "XDG_RUNTIME_DIR" in os.environ else runtime / "auth.json"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"


def _in_file(found: dict[str, Any], hosts: tuple[str, ...], path: str) -> Login | None:
    helpers, logins = found.get("credHelpers") or {}, found.get("auths") or {}
    for host in hosts:
        if host in helpers:
            return _of_helper(helpers[host], host)
        parts = path.split("/")
        keys = ["/".join((host, *parts[:count])) for count in range(len(parts), -1, -1)]  # the closest first
        for key in (*keys, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/"):
            entry = logins.get(key)
            if entry and (login := _of_entry(entry)):
                return login
    if "credsStore" in found:
        for host in hosts:
            key = "https://index.docker.io/v1/" if host == "index.docker.io" else host
            if login := _of_helper(found["credsStore"], key):
                return login
    return None


def _of_entry(entry: dict[str, str]) -> Login | None:
    if entry.get("identitytoken"):
        return Login("", entry["identitytoken"], token=True)
    if entry.get("auth"):
        name, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
        return Login(name, secret.strip("\0"))
    return Login(entry["username"], entry["password"]) if entry.get("username") else None


def _of_helper(name: str, server: str) -> Login | None:
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"], input=server, capture_output=True, text=True, timeout=HELPER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Denied(
            f"the login of {server} is kept by {program}, which did not answer: {type(error).__name__}",
            f"install it, or `docker login {server}` without it",
        ) from error
    if done.returncode != 0:
        if _NOT_FOUND in done.stdout + done.stderr:
            return None
        raise Denied(f"{program} does not give the login of {server}: {(done.stdout or done.stderr).strip()[:200]}")
    says = json.loads(done.stdout)
    return Login(says["Username"], says["Secret"], token=says["Username"] == "<token>")
