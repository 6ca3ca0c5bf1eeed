"""Promises of the node's directory and ledger:

1. A node's directory is locked as long as the node lives, however it dies; only then is it called abandoned.
2. A directory that others could have written is refused, and so is one that is not ours; root of a user namespace only
   has the place of the user that it is.
3. created = running + the sum of the endings, at every moment.
4. A full disk refuses a create with a hint and counts nothing; an ending is counted all the same.
5. Images are beside the nodes that were given a place, and by default where a reboot leaves them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandlot.api import Ending
from sandlot.errors import HostFault
from sandlot.node import ledger
from sandlot.node.ledger import Ledger, NodeDirectory, image_store


def test_directories_of_living_nodes_are_not_abandoned(tmp_path: Path) -> None:
    one, other = NodeDirectory.claim(tmp_path), NodeDirectory.claim(tmp_path)
    assert one.path != other.path
    assert list(one.abandoned()) == []
    other.release()
    (found,) = one.abandoned()
    assert found.path == other.path
    found.remove()
    assert not other.path.exists()
    one.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_node_leaves_an_abandoned_directory(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from sandlot.node.ledger import NodeDirectory as N\n"
        "n = N.claim(pathlib.Path(sys.argv[1])); print(n.short_id, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        short_id = node.stdout.readline().strip()
        mine = NodeDirectory.claim(tmp_path)
        assert list(mine.abandoned()) == []
        node.send_signal(signal.SIGKILL)
    (found,) = mine.abandoned()
    assert found.short_id == short_id
    # While one node looks at it, it is nobody else's to sweep.
    assert list(NodeDirectory.claim(tmp_path).abandoned()) == []


def test_what_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(HostFault, match="can be written by other users") as refusal:
        NodeDirectory.claim(tmp_path)
    assert "--state-dir" in (refusal.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_called_that() -> None:
    # In a process of its own, which becomes root of a user namespace as `unshare -r` makes one.
    program = """
import ctypes, os, sys
from pathlib import Path
from sandlot.errors import HostFault
from sandlot.node.ledger import NodeDirectory, default_state_dir
user = os.geteuid() or 65534
if os.geteuid() == 0:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
os.environ.pop("XDG_RUNTIME_DIR", None)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)  # dumpable again, or its own files in /proc stay root's
if libc.unshare(0x10000000):
    sys.exit(77)
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
assert os.geteuid() == 0
assert default_state_dir() == Path(f"/tmp/sandlot-{user}"), default_state_dir()
try:
    NodeDirectory.claim(Path("/usr"))
except HostFault as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("no user namespaces for ordinary users here")
    assert done.stdout == "/usr belongs to user 65534, not to us (user 0)\n", done.stderr


def test_counts_add_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for i in range(5):
        ledger.begin(f"sb-{i}", "host", {})
    ledger.end("sb-0", Ending.EXIT, None)
    ledger.end("sb-1", Ending.OOM, "out of memory")
    counts = ledger.counts()
    assert (counts["created"], counts["running"], counts["exit"], counts["oom"]) == (5, 3, 1, 1)
    assert counts["created"] == counts["running"] + sum(counts[ending] for ending in Ending)
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["create"] * 5 + ["end"] * 2
    assert lines[-1] | {"id": "sb-1", "ending": "oom", "detail": "out of memory"} == lines[-1]
    ledger.close()


def test_a_full_disk_refuses_a_create_and_never_an_ending(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "ledger.jsonl")
    ledger = Ledger(tmp_path)
    with pytest.raises(HostFault, match="No space left") as fault:
        ledger.begin("sb-0", "host", {})
    assert "free some space" in (fault.value.hint or "")
    assert ledger.counts()["created"] == 0
    ledger.end("sb-0", Ending.EXIT, None)
    assert ledger.counts()["exit"] == 1
    ledger.close()


def test_images_are_where_a_reboot_leaves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_store(tmp_path) == tmp_path / "images"
    monkeypatch.chdir(tmp_path)
    assert image_store(Path("here")) == tmp_path / "here/images"
    assert NodeDirectory.claim(Path("here")).path.parent == tmp_path / "here"
    monkeypatch.setattr(ledger, "default_state_dir", lambda: Path("/var/lib/sandlot"))
    assert image_store() == Path("/var/lib/sandlot/images")
    monkeypatch.setattr(ledger, "default_state_dir", lambda: tmp_path / "runtime/sandlot")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert image_store() == tmp_path / ".local/share/sandlot/images"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert image_store() == tmp_path / "data/sandlot/images"
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/nowhere")
    if os.geteuid() != 0:  # who may write everywhere
        assert image_store() == tmp_path / "runtime/sandlot/images"


def test_a_dead_server_s_directory_is_awaited_for_an_hour_and_nobody_else_s(tmp_path: Path) -> None:
    named, other = NodeDirectory.claim(tmp_path, "server"), NodeDirectory.claim(tmp_path)
    assert (named.is_awaited(3600), other.is_awaited(3600)) == (True, False)
    os.utime(named.path, (time.time() - 4000,) * 2)
    assert not named.is_awaited(3600)
    Ledger(named.path).end("sb-0", Ending.EXIT, None)
    assert named.is_awaited(3600)
    for each in (named, other):
        each.remove()
        each.release()  # again: it has none by now
