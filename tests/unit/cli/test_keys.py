"""Promises of `sandlot keys`, run as a person runs it:

1. `create` prints the key and nothing else on stdout; `list` shows which there are and what they may do, never a key.
2. A server of the same state directory that runs lets a new key in, and a revoked one not; the last one's end opens
   nothing, after a new start neither.
3. A key is a tenant's or the operator's, which has to be said; what cannot be is an error and a hint.
4. With keys in its directory a server listens on other addresses than this machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from sandlot.api import Quota
from sandlot.server.keys import Keys, Scope
from tests.support.server import Server

COMMAND = [sys.executable, "-c", "from sandlot.cli.main import main; main()"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SANDLOT_")}


def keys(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "keys", *words, "--state-dir", str(state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=CLEAN)


def test_a_key_is_printed_once(tmp_path: Path) -> None:
    made = keys(tmp_path, "create", "--tenant", "acme", "--boxes", "2", "--memory", "4G", "--rate", "50")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("sandlot-") and len(key) > 50
    assert "acme" in made.stderr
    operator = json.loads(keys(tmp_path, "create", "--operator", "--scope", "read", "--json").stdout)
    assert (operator["tenant"], operator["scope"]) == (None, "read")
    shown = keys(tmp_path, "list")
    assert key not in shown.stdout and operator["key"] not in shown.stdout
    acme, other = shown.stdout.splitlines()[1:]
    assert acme.split()[1:7] == ["acme", "run", "2", "-", "4G", "50.0"]
    assert other.split()[1:3] == ["(operator)", "read"]
    found = json.loads(keys(tmp_path, "list", "--json").stdout)
    assert [each["id"] for each in found] == [acme.split()[0], operator["id"]]
    assert not any("hash" in each or "key" in each for each in found)
    assert keys(tmp_path, "revoke", operator["id"]).returncode == 0
    assert len(json.loads(keys(tmp_path, "list", "--json").stdout)) == 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["create"], 2, ["either of one tenant or the operator's", "hint: `sandlot keys create --tenant NAME`"]),
        (["create", "--tenant", "a", "--operator"], 2, ["either of one tenant"]),
        (["create", "--tenant", "A b"], 2, ["tenant"]),
        (["create", "--operator", "--boxes", "2"], 2, ["a quota is a tenant's"]),
        (["create", "--tenant", "a", "--memory", "lots"], 2, ["memory: 'lots' is not a size"]),
        (["create", "--tenant", "a", "--boxes", "-1"], 2, ["boxes"]),
        (["create", "--tenant", "a", "--rate", "0"], 2, ["rate"]),
        (["revoke", "k-none"], 1, ["there is no key k-none", "hint: `sandlot keys list`"]),
    ],
)
def test_what_cannot_be_is_an_error_and_a_hint(words: list[str], status: int, said: list[str], tmp_path: Path) -> None:
    done = keys(tmp_path, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert all(each in done.stderr for each in said), done.stderr
    assert json.loads(keys(tmp_path, "list", "--json").stdout) == []


async def test_a_server_that_runs_knows_at_once(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    key = keys(state, "create", "--tenant", "acme").stdout.strip()
    async with Server(state, "--host", "0.0.0.0") as server, httpx2.AsyncClient(base_url=server.url) as client:
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/v1/sandboxes")).status_code == 401
        made = await client.post("/v1/sandboxes", json={}, headers=headers)
        assert made.json()["tenant"] == "acme"
        (found,) = json.loads(keys(state, "list", "--json").stdout)
        keys(state, "revoke", found["id"])
        assert (await client.get("/v1/sandboxes", headers=headers)).status_code == 401


async def test_a_server_whose_last_key_was_revoked_lets_nobody_in_when_it_starts_anew(
    tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    key = keys(state, "create", "--operator").stdout.strip()
    (found,) = json.loads(keys(state, "list", "--json").stdout)
    async with Server(state, "--orphan-grace", "60") as server, httpx2.AsyncClient(base_url=server.url) as client:
        assert server.process is not None and server.process.stdout is not None
        keys(state, "revoke", found["id"])
        server.process.send_signal(signal.SIGUSR2)
        assert (await asyncio.wait_for(server.process.stdout.readline(), 60)).startswith(b"listening")
        for headers in ({}, {"authorization": f"Bearer {key}"}):
            assert (await client.get("/v1/sandboxes", headers=headers)).status_code == 401
    there = Keys(state / "keys.json")
    assert there.let_nobody_in
    there.create(None, Scope.RUN, Quota(), None)
    assert there.required and not there.let_nobody_in
