"""Promises of the `sandlot` command, run as a person runs it:

1. `sandlot run` prints the command's output and exits with its status; 127 not found, 128 + signal; the box is gone.
2. Data is on stdout, words are on stderr; an error is one sentence and a hint, never a traceback; 2 for wrong words.
3. Ctrl-C ends the box and exits with 130.
4. `sandlot serve --port 0` prints its address; SIGTERM ends boxes and server and leaves nothing; with no key it binds
   to this machine only. Of its host it shows what `--allow-volumes` names, and by default nothing.
5. `sandlot doctor` has a line for each need and says by its status whether a box can be made.
6. `--help` needs no heavy library; the same commands work against a server.
7. `sandlot image` lists, exports and deletes what was snapshotted, of a server and of this host.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec
from sandlot.cli.commands import COMMANDS
from sandlot.client import HttpNode
from sandlot.node.ledger import default_state_dir
from tests.support.cli import CLEAN, COMMAND, Server, has_process, sandlot, wait_for


def nodes() -> set[str]:
    root = default_state_dir()
    return {path.name for path in root.glob("node-*")} if root.exists() else set()


@pytest.fixture
def native(native_reason: str | None) -> Iterator[None]:
    if native_reason:
        pytest.skip(native_reason)
    yield


@pytest.mark.usefixtures("native")
def test_run_is_the_command_itself() -> None:
    done = sandlot("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    # Options after the program are the program's.
    assert sandlot("run", "-e", "A=b", "--cwd", "/tmp", "sh", "-c", "echo $A $PWD").stdout == "b /tmp\n"
    assert sandlot("run", "-i", "--", "cat", input="typed").stdout == "typed"
    assert sandlot("run", "--", "sh", "-c", "kill -9 $$").returncode == 137


@pytest.mark.usefixtures("native")
def test_run_says_what_went_wrong_inside() -> None:
    missing = sandlot("run", "--", "nope")
    assert (missing.returncode, missing.stderr) == (127, "sandlot: nope: command not found\n")
    late = sandlot("run", "--timeout", "0.2", "--", "sh", "-c", "echo begun; sleep 60")
    assert (late.returncode, late.stdout, late.stderr) == (137, "begun\n", "(killed: it ran longer than 0.2 s)\n")


@pytest.mark.usefixtures("native")
def test_run_in_json_is_one_object() -> None:
    done = sandlot("run", "--json", "--", "sh", "-c", "echo hi; exit 3")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 3
    assert (found["stdout"], found["stderr"], found["timed_out"], found["truncated"]) == ("hi\n", "", False, False)
    assert found["sandbox"].startswith("sb-")


@pytest.mark.usefixtures("native")
def test_run_shows_volumes_and_keeps_limits(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "f").write_text("from the host")
    assert sandlot("run", "-v", f"{tmp_path}:/mnt", "--", "cat", "/mnt/f").stdout == "from the host"
    full = sandlot("run", "--disk", "4M", "--", "sh", "-c", "head -c 9m /dev/zero > /root/x")
    assert full.returncode != 0
    assert "No space left" in full.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run", "--memory", "lots", "true"], 2, ["limits.memory: 'lots' is not a size", "512M"]),
        (["run", "--memroy", "1G", "true"], 2, ["--memroy", "hint: `sandlot run --help`"]),
        (["run", "--memory", "4096", "true"], 2, ["limits.memory: no sandbox starts with 4096 bytes", "8M or more"]),
        (["run", "--volume", "x", "true"], 2, ["--volume x is not HOST:INSIDE"]),
        (["run", "--volume", "/tmp:/proc/x", "true"], 2, ["volumes.0.target: /proc/x cannot be replaced"]),
        (["run", "--env", "NO_SUCH_VARIABLE", "true"], 2, ["no such variable", "NAME=VALUE"]),
        (["run"], 2, ["COMMAND", "hint: `sandlot run --help`"]),
        (["rum"], 2, ["rum", "hint: `sandlot --help`"]),
        (["run", "--image", "nope", "true"], 1, ["nope", "hint:"]),
        (["run", "--url", "http://127.0.0.1:9", "true"], 1, ["no server answers", "hint: `sandlot serve` starts one"]),
        (["serve", "--allow-volumes", "/no/such"], 2, ["--allow-volumes /no/such: there is no /no/such"]),
        (["serve", "--host", "0.0.0.0"], 2, ["can be reached by others", "hint:", "--api-key"]),
        (["serve", "--host", "192.0.2.1", "--api-key", "k"], 1, ["cannot listen on 192.0.2.1", "hint:"]),
        (["serve", "--port", "0", "--state-dir", "/proc/nowhere"], 1, ["/proc/nowhere", "hint:"]),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_an_error_is_a_sentence_and_a_hint(words: list[str], status: int, said: list[str]) -> None:
    done = sandlot(*words)
    assert done.returncode == status, done
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for words_said in said:
        assert words_said in done.stderr


@pytest.mark.usefixtures("native")
def test_ctrl_c_ends_the_box() -> None:
    before = nodes()
    command = [*COMMAND, "run", "--", "sleep", "6047"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_for(lambda: has_process("sleep\x006047"))
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (130, "", "")
    assert not has_process("sleep\x006047")
    assert nodes() <= before


@pytest.mark.usefixtures("native")
def test_serve_ends_its_boxes_and_leaves_nothing(tmp_path: Path) -> None:
    server = Server("--state-dir", str(tmp_path), "--drain-seconds", "0")
    assert len(list(tmp_path.glob("node-*"))) == 1
    done = sandlot("run", "--", "sh", "-c", "echo through http; exit 5", env={"SANDLOT_URL": server.url})
    assert (done.returncode, done.stdout) == (5, "through http\n")
    doctor = sandlot("doctor", "--json", "--url", server.url)
    assert doctor.returncode == 0
    command = [*COMMAND, "run", "--url", server.url, "--", "sh", "-c", "echo begun; exec sleep 6048"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=CLEAN) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == "begun\n"  # so it is followed: who comes after the stop asks for a minute
        wait_for(lambda: has_process("sleep\x006048"))
        assert server.stop(signal.SIGTERM) == (0, "")
        _, err = left.communicate(timeout=20)
    assert left.returncode == 3
    assert err.startswith("error: sandbox ")
    assert not has_process("sleep\x006048")
    assert list(tmp_path.glob("node-*")) == []


@pytest.mark.usefixtures("native")
def test_serve_shows_of_its_host_what_it_was_told_to(tmp_path: Path) -> None:
    data, state = tmp_path / "data", tmp_path / "state"
    for directory in (data, state):
        directory.mkdir(mode=0o755)
    (data / "f").write_text("from the host")
    (data / "f").chmod(0o644)
    tmp_path.chmod(0o755)
    for words, seen in (((), False), (("--allow-volumes", str(data)), True)):
        server = Server("--state-dir", str(state), *words)
        env = {"SANDLOT_URL": server.url}
        asked = sandlot("run", "-v", f"{data}:/mnt", "--", "cat", "/mnt/f", env=env)
        stolen = sandlot("run", "-v", "/etc:/mnt:rw", "--", "cat", "/mnt/hostname", env=env)
        assert (asked.returncode, asked.stdout) == ((0, "from the host") if seen else (1, ""))
        for refused in [stolen] if seen else [asked, stolen]:
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "this server does not allow the volume" in refused.stderr
            assert "sandlot serve --allow-volumes" in refused.stderr
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(os.geteuid() != 0, reason="there is one user id inside where the node is not root")
def test_run_as_another_user_just_works() -> None:
    done = sandlot("run", "--user", "1000", "--", "sh", "-c", "id -u; pwd")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1000\n/\n", "")


@pytest.mark.usefixtures("native")
def test_serve_wants_its_key(tmp_path: Path) -> None:
    server = Server("--state-dir", str(tmp_path), "--api-key", "sesame")
    refused = sandlot("run", "--url", server.url, "--", "true")
    assert refused.returncode == 1
    assert "wants its API key" in refused.stderr
    keyed = sandlot("run", "--url", server.url, "--", "true", env={"SANDLOT_API_KEY": "sesame"})
    assert keyed.returncode == 0
    assert server.stop(signal.SIGINT) == (130, "")


@pytest.mark.usefixtures("native")
def test_images_are_listed_exported_and_deleted_on_a_server_and_on_this_host(tmp_path: Path) -> None:
    state = tmp_path / "state"
    server = Server("--state-dir", str(state))

    async def snapshots() -> None:
        node = HttpNode(server.url)
        box = (await node.create(SandboxSpec())).id
        await node.write_file(box, "/root/answer", b"solved\n")
        for name in ("solved", "other"):
            await node.snapshot(box, name)
        await node.destroy(box)
        await node.close()

    asyncio.run(snapshots())
    for where in (["--url", server.url], ["--state-dir", str(state)]):
        listed = sandlot("image", "list", *where)
        assert (listed.returncode, listed.stderr) == (0, "")
        name, *columns = listed.stdout.splitlines()
        assert name.split() == ["name", "kind", "base", "size", "files", "layers", "made"]
        assert [line.split()[:3] for line in columns] == [[name, "snapshot", "host"] for name in ("other", "solved")]
        found = json.loads(sandlot("image", "list", "--json", *where).stdout)
        assert [each["name"] for each in found] == ["other", "solved"]
        with (tmp_path / "solved.tar").open("wb") as file:
            words = [*COMMAND, "image", "export", "solved", *where]
            subprocess.run(words, stdout=file, timeout=60, check=True, env=CLEAN)
        with tarfile.open(tmp_path / "solved.tar") as tar:
            assert tar.extractfile("root/answer").read() == b"solved\n"  # type: ignore[union-attr]
        missing = sandlot("image", "export", "missing", *where)
        assert (missing.returncode, missing.stdout) == (1, "")
        assert missing.stderr.startswith("error: there is no image 'missing'")
    assert sandlot("image", "rm", "solved", "--url", server.url).stderr == "deleted solved\n"
    again = sandlot("image", "rm", "solved", "--url", server.url)
    assert (again.returncode, again.stderr.split("\n")[0]) == (1, "error: there is no image 'solved' on this node")
    assert server.stop(signal.SIGTERM) == (0, "")
    assert sandlot("image", "rm", "other", "--state-dir", str(state)).returncode == 0
    assert json.loads(sandlot("image", "list", "--json", "--state-dir", str(state)).stdout) == []
    assert list((state / "images/layers").iterdir()) == []
    for words in (["image", "rm"], ["image", "list", "solved"]):
        assert sandlot(*words).returncode == 2


@pytest.mark.usefixtures("native")
def test_doctor_has_a_line_for_each_need() -> None:
    done = sandlot("doctor")
    assert done.returncode == 0
    assert done.stderr == ""
    listed = json.loads(sandlot("doctor", "--json").stdout)
    for need in listed:
        assert set(need) == {"name", "state", "found", "fix"}
        assert any(need["name"] in line and need["found"] in line for line in done.stdout.splitlines())


def test_help_needs_no_heavy_library() -> None:
    program = (
        "import sys; sys.argv = ['sandlot', '--help']\n"
        "from sandlot.cli.main import main\n"
        "try: main()\n"
        "finally: print(*sorted(m for m in sys.modules if '.' not in m), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert {"torch", "numpy", "fastapi", "uvicorn", "transformers"}.isdisjoint(done.stderr.split())
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    assert sandlot("version").stdout == sandlot("--version").stdout == "sandlot 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = sandlot(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: sandlot" in done.stdout
    assert f"Example: {COMMANDS[command].example}" in " ".join(done.stdout.split())
    assert "sandlot " + command in COMMANDS[command].example
