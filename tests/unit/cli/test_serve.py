"""Promises of `sandlot serve` as a service, over real processes and sandboxes:

1. Its log has a line for each request, as JSON or for a person, and never what was sent, nor a key.
2. With a certificate it speaks HTTPS, and clients that trust it use it like any other.
3. Told to stop, it finishes what runs, for as long as it was allowed to, and then ends.
4. Told to start anew, it keeps its sandboxes, their commands and its address, and nobody who asks meanwhile is refused.
   Where it cannot, no sandbox ends by it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from sandlot.api import Run, SandboxSpec, ShellRun
from sandlot.client import HttpNode
from sandlot.errors import SandboxEnded, SandlotError
from tests.support.images import need
from tests.support.server import SANDLOT, Server, leftovers, note_nodes


@pytest.fixture
def state(tmp_path: Path, native_reason: str | None) -> Iterator[Path]:
    if native_reason:
        pytest.skip(native_reason)
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    yield directory


def certificate(directory: Path) -> tuple[Path, Path]:
    """For this machine, signed by itself."""
    need("openssl")
    cert, key = directory / "cert.pem", directory / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=sandlot"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert))
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("form", ["json", "text"])
async def test_its_log_tells_of_each_request_and_never_what_was_sent(form: str, state: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *SANDLOT,
        *("serve", "--port", "0", "--state-dir", str(state), "--api-key", "PLANTED-key", "--log-format", form),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    node = HttpNode(url, "PLANTED-key")
    box = await node.create(SandboxSpec(env={"A": "PLANTED-env"}, labels={"a": "PLANTED-label"}))
    run = Run(argv=("sh", "-c", "cat; echo PLANTED-output; exit 3"), stdin=b"PLANTED-stdin", env={"B": "PLANTED-env"})
    assert (await node.run(box.id, run)).exit_code == 3
    shell = await node.open_shell(box.id)
    await node.run_in_shell(box.id, shell.id, ShellRun(command="echo PLANTED-text"))
    await node.write_file(box.id, "/root/PLANTED-path", b"PLANTED-file")
    async with httpx2.AsyncClient(base_url=url) as client:
        headers = {"authorization": "Bearer PLANTED-wrong", "x-other": "PLANTED-header"}
        assert (await client.get("/v1/sandboxes?token=PLANTED-query", headers=headers)).status_code == 401
        headers["authorization"] = "Bearer PLANTED-key"
        bad = await client.post("/v1/sandboxes", json={"PLANTED-field": "PLANTED-value"}, headers=headers)
        assert bad.status_code == 400
        broken = await client.post("/v1/sandboxes", content=b'{"PLANTED', headers=headers)
        assert broken.status_code == 400
        assert (await client.get("/PLANTED-place", headers=headers)).status_code == 404
        assert (await client.get("/v1/sandboxes/sb-no/files?path=PLANTED", headers=headers)).status_code == 404
    await node.close()
    process.send_signal(signal.SIGTERM)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    lines = err.decode().splitlines()
    assert b"PLANTED" not in out + err
    assert len(lines) >= 9
    if form == "json":
        told = [json.loads(line) for line in lines]
        runs = [each for each in told if each["route"] == "/v1/sandboxes/{sandbox_id}/run"]
        assert [(each["status"], each["sandbox"]) for each in runs] == [(200, box.id)]
        assert runs[0]["ms"] > 0 and runs[0]["sent"] > 0
    else:
        assert any("route=/v1/sandboxes/{sandbox_id}/run status=200" in line for line in lines)


async def test_with_a_certificate_it_speaks_https(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path)
    async with Server(state, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        url = server.url.replace("http:", "https:")
        stranger = HttpNode(url)
        with pytest.raises(SandlotError):
            await stranger.list()
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        node = HttpNode(url)
        box = await node.create(SandboxSpec())
        data = os.urandom(5 << 20)
        await node.write_file(box.id, "/root/f", data)
        assert await node.read_file(box.id, "/root/f") == data
        plain = HttpNode(server.url)
        with pytest.raises(SandlotError):
            await plain.list()
        for each in (node, plain):
            await each.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tls-key", "x"], "--tls-key is of no use without a certificate"),
        (["--tls-cert", "/no/such"], "--tls-cert /no/such: No such file"),
        (["--tls-cert", "/etc/hostname"], "--tls-cert /etc/hostname: "),
    ],
)
async def test_a_certificate_that_is_none_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *SANDLOT, "serve", "--port", "0", "--state-dir", str(tmp_path), *words, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert said in err.decode()
    assert "hint:" in err.decode()


async def test_told_to_stop_it_finishes_what_runs(state: Path) -> None:
    server = Server(state, "--drain-seconds", "20")
    await server.start()
    note_nodes(state)
    node, other = server.node(), server.node()
    box = (await node.create(SandboxSpec())).id
    working = asyncio.ensure_future(node.run(box, Run(argv=("sh", "-c", "sleep 1.5; echo done"))))
    looking = asyncio.ensure_future(other.wait_ended(box))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    assert (await working).stdout == "done\n"
    assert (await looking).ending == "drained"
    await asyncio.wait_for(server.process.wait(), 30)
    assert server.process.returncode == 0
    assert time.monotonic() - began < 15
    assert leftovers(state) == []
    for each in (node, other):
        await each.close()


async def test_told_to_stop_it_does_not_wait_for_ever(state: Path) -> None:
    server = Server(state, "--drain-seconds", "0.5")
    await server.start()
    node = server.node()
    box = (await node.create(SandboxSpec())).id
    working = asyncio.ensure_future(node.run(box, Run(argv=("sleep", "600"))))
    await asyncio.sleep(0.5)
    await server.stop()
    with pytest.raises(SandboxEnded, match="shut down"):
        await working
    await node.close()


async def test_told_to_start_anew_it_keeps_its_sandboxes_and_refuses_nobody(state: Path) -> None:
    async with Server(state, "--orphan-grace", "60", "--drain-seconds", "5") as server:
        note_nodes(state)
        assert server.process is not None and server.process.stdout is not None
        node = server.node()
        box = (await node.create(SandboxSpec(key="k", env={"A": "b"}))).id
        text = "for i in $(seq 40); do echo $i; sleep 0.1; done"
        keyed = asyncio.ensure_future(node.run(box, Run(argv=("sh", "-c", text), key="long")))
        short = asyncio.ensure_future(node.run(box, Run(argv=("sh", "-c", "sleep 1; echo short"))))
        await asyncio.sleep(0.4)
        server.process.send_signal(signal.SIGUSR2)
        answers = []

        async def ask() -> None:  # without asking again: whoever is not let in yet waits
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
                answers.append((await client.get(f"/v1/sandboxes/{box}")).status_code)

        asking = []
        for _ in range(20):
            asking.append(asyncio.ensure_future(ask()))
            await asyncio.sleep(0.1)
        assert (await short).stdout == "short\n"
        line = await asyncio.wait_for(server.process.stdout.readline(), 60)
        assert line.decode().split()[-1] == server.url
        await asyncio.gather(*asking)
        assert answers == [200] * 20
        assert (await keyed).stdout == "".join(f"{i}\n" for i in range(1, 41))
        assert (await node.create(SandboxSpec(key="k", env={"A": "b"}))).id == box
        assert server.process.returncode is None
        await node.close()
    assert leftovers(state) == []


def zombies(parent: int) -> list[str]:
    """Children that ended and were not waited for."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            stats.append(path.read_text())
    return [each for each in stats if each.rsplit(")", 1)[1].split()[:2] == ["Z", str(parent)]]


async def test_told_to_start_anew_over_and_over_it_lives_and_leaves_no_zombies(state: Path) -> None:
    async with Server(state, "--orphan-grace", "60", "--drain-seconds", "0", "--warm", "host=3") as server:
        assert server.process is not None
        node = server.node()
        box = (await node.create(SandboxSpec())).id
        for _ in range(60):  # at every moment of its start
            if server.process.returncode is None:
                server.process.send_signal(signal.SIGUSR2)
            await asyncio.sleep(0.05)
        assert (await node.info(box)).state == "running"
        assert server.process.returncode is None
        async with asyncio.timeout(20):  # what makes a box is one for a moment
            while zombies(server.process.pid):  # noqa: ASYNC110  (nobody tells of that)
                await asyncio.sleep(0.1)
        await node.close()


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter of servers, under a name of its own."""
    name = tmp_path / "python"
    name.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setattr("tests.support.server.SANDLOT", (str(name), *SANDLOT[1:]))
    return name


async def test_without_an_interpreter_it_is_not_started_anew_and_serves_on(
    state: Path, python: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Server(state, "--orphan-grace", "60") as server:
        assert server.process is not None and server.process.stdout is not None
        node = server.node()
        box = (await node.create(SandboxSpec())).id
        moved = python.rename(python.with_name("moved"))
        server.process.send_signal(signal.SIGUSR2)
        said = ""
        async with asyncio.timeout(30):
            while "not started anew" not in said:
                await asyncio.sleep(0.05)
                said += capfd.readouterr().err
        assert (await node.run(box, Run(argv=("echo", "hi")))).stdout == "hi\n"
        moved.rename(python)  # as it is once the new version is there
        server.process.send_signal(signal.SIGUSR2)
        assert (await asyncio.wait_for(server.process.stdout.readline(), 60)).startswith(b"listening")
        assert (await node.info(box)).state == "running"
        await node.close()


async def test_an_interpreter_that_cannot_be_run_costs_no_sandbox(
    state: Path, python: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Server(state, "--orphan-grace", "60") as server:
        assert server.process is not None
        node = server.node()
        box = (await node.create(SandboxSpec())).id
        moved = python.rename(python.with_name("moved"))
        python.write_text("half of it")
        python.chmod(0o755)
        server.process.send_signal(signal.SIGUSR2)
        assert await asyncio.wait_for(server.process.wait(), 60) == 1
        assert "cannot be run: Exec format error" in capfd.readouterr().err
        moved.rename(python)
        await server.start()
        assert (await node.run(box, Run(argv=("echo", "hi")))).stdout == "hi\n"
        await node.close()


async def test_without_a_grace_it_is_not_started_anew(state: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *SANDLOT,
        *("serve", "--port", "0", "--state-dir", str(state), "--orphan-grace", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    node = HttpNode((await process.stdout.readline()).decode().split()[-1])
    box = (await node.create(SandboxSpec())).id
    process.send_signal(signal.SIGUSR2)
    assert b"not started anew" in await asyncio.wait_for(process.stderr.readline(), 30)
    assert (await node.info(box)).state == "running"
    await node.close()
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
