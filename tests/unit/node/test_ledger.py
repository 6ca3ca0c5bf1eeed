"""Promises of the node's directory and ledger:

1. A node's directory is locked as long as the node lives, however it dies; only then is it called abandoned.
2. A directory that others could have written is refused, and so is one that is not ours; root of a user namespace only
   has the place of the user that it is.
3. created = running + the sum of the endings, at every moment.
4. A full disk refuses a create with a hint and counts nothing; an ending is counted and told all the same, and written
   when there is room.
5. Images are beside the nodes that were given a place, and by default where a reboot leaves them.
6. What was written is there after a process that was killed. A damaged database is said to be, and put aside.
7. One that ended can be asked about, listed, and found by its key, for an hour, of so many; it costs no memory, and no
   question keeps others waiting.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.api import Ending, Filter, Info
from sandlot.errors import HostFault
from sandlot.node import ledger
from sandlot.node.ledger import Begun, Ledger, NodeDirectory, image_store
from tests.support.disk import fill, small_disk


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
for name in ("SANDLOT_STATE_DIR", "XDG_RUNTIME_DIR"):
    os.environ.pop(name, None)
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


def begun(sandbox_id: str, created_at: float | None = None, **known: object) -> Info:
    at = time.time() if created_at is None else created_at
    return Info.model_validate({"id": sandbox_id, "image": "host", "state": "running", "created_at": at, **known})


def gone(info: Info, ending: Ending = Ending.EXIT, **known: object) -> Info:
    return info.model_copy(update={"state": "ended", "ended_at": time.time(), "ending": ending, **known})


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.close()


def test_counts_add_up(book: Ledger) -> None:
    infos = [begun(f"sb-{i}") for i in range(5)]
    for info in infos:
        book.begin(info)
    book.end(gone(infos[0]))
    book.end(gone(infos[1], Ending.OOM, detail="out of memory"))
    counts = book.counts()
    assert (counts["created"], counts["running"], counts["exit"], counts["oom"]) == (5, 3, 1, 1)
    assert counts["created"] == counts["running"] + sum(counts[ending] for ending in Ending)


def test_the_next_one_knows_what_this_one_wrote(tmp_path: Path) -> None:
    lives = begun("sb-0", labels={"a": 'b "\n\\ \ud7ff'}, tenant="t")
    ended = gone(begun("sb-1"), Ending.OOM, detail="no \udcff here", losses=("one", "two"), image="other")
    first = Ledger(tmp_path)
    first.begin(lives, "k", "what")
    first.begin(begun("sb-1", ended.created_at), "k", "what")
    first.told("sb-0")
    first.end(ended)
    assert first.ended("sb-1") == ended
    first.close()
    assert first.ended("sb-1") == ended  # who waited for it may ask a moment later
    second = Ledger(tmp_path)
    assert second.past() == [Begun(lives, True)]
    assert second.ended("sb-1") == ended
    assert second.ended("sb-0") is None
    second.close()


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from sandlot.api import Ending, Info
from sandlot.node.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for number in range(1_000_000):
    info = Info(id=f"sb-{number}", image="host", state="running", created_at=time.time(), labels={"n": str(number)})
    ledger.begin(info)
    print("begun", number, flush=True)
    if number % 2:
        ledger.end(info.model_copy(update={"state": "ended", "ended_at": time.time(), "ending": Ending.EXIT}))
        print("ended", number, flush=True)
"""
    for enough in (1, 40, 3000):  # before the log is copied for the first time, and after that
        place = tmp_path / str(enough)
        place.mkdir()
        with subprocess.Popen([sys.executable, "-c", program, str(place)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline().split() for _ in range(enough)]
            writer.kill()
            said += [line.split() for line in writer.stdout if line.endswith("\n")]
        told = {(word, f"sb-{number}") for word, number in said}
        book = Ledger(place)
        left = {each.info.id for each in book.past()}
        for word, sandbox_id in told:
            if word == "ended":
                assert book.ended(sandbox_id)
            elif ("ended", sandbox_id) not in told:
                assert sandbox_id in left or book.ended(sandbox_id)
        book.close()


def test_a_forked_child_that_exits_takes_nothing_along(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
from pathlib import Path
from sandlot.api import Info
from sandlot.node.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
def begin(name):
    ledger.begin(Info(id=name, image="host", state="running", created_at=time.time()))
begin("sb-before")
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
begin("sb-after")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    book = Ledger(tmp_path)
    assert {each.info.id for each in book.past()} == {"sb-before", "sb-after"}
    book.close()


def test_a_full_disk_refuses_a_create_and_never_an_ending(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        book = Ledger(disk)
        infos = [begun(f"sb-{i}") for i in range(50)]
        for info in infos:
            book.begin(info, f"k{info.id}", "what")
        filling = fill(disk)
        with pytest.raises(HostFault, match="No space left") as fault:
            book.begin(begun("sb-more"))
        assert "free some space" in (fault.value.hint or "")
        for info in infos:
            book.told(info.id)
            book.end(gone(info))
            assert book.ended(info.id) is not None
        book.note(event="fault")
        assert (book.counts()["created"], book.counts()["exit"]) == (50, 50)
        assert len(book.owed()) == 50
        filling.unlink()
        book.begin(begun("sb-more"))
        assert book.owed() == []
        assert book.made(None, "ksb-7") == ("sb-7", "what")
        book.close()
        book = Ledger(disk)
        assert [each.info.id for each in book.past()] == ["sb-more"]
        assert book.ended("sb-0") is not None
        book.close()


def test_what_can_never_be_written_holds_up_nothing(book: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    info = begun("sb-1")
    book.begin(info)
    book.told("sb-\ud800")
    assert "cannot be written" in caplog.text
    book.begin(begun("sb-2"))
    book.end(gone(info))
    assert book.owed() == []
    assert book.ended("sb-1") is not None
    assert book.ended("sb-\ud800") is None


def test_a_full_disk_keeps_nobody_from_taking_over(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom sandlot.api import Info\n"
        "from sandlot.node.ledger import Ledger\n"
        "Ledger(Path(sys.argv[1])).begin(Info(id='sb-0', image='host', state='running', created_at=time.time()))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        subprocess.run([sys.executable, "-c", program, str(disk)], check=False, timeout=60)
        filling = fill(disk)
        book = Ledger(disk)
        (left,) = book.past()
        book.adopt(left.info)
        book.end(gone(left.info, Ending.ORPHANED))
        assert book.ended("sb-0") is not None
        filling.unlink()
        book.close()


@pytest.mark.parametrize("damage", ["cut short", "written over", "no database"])
def test_a_damaged_ledger_is_said_to_be_and_put_aside(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = Ledger(tmp_path)
    for number in range(2000):
        info = begun(f"sb-{number}")
        book.begin(info)
        book.end(gone(info))
    book.close()
    size = book.path.stat().st_size
    if damage == "cut short":
        os.truncate(book.path, size // 2)
    else:
        with book.path.open("r+b") as file:
            file.seek(0 if damage == "no database" else size // 3)
            file.write(b"?" * (size // 3))
    assert caplog.messages == []
    book = Ledger(tmp_path)
    (said,) = caplog.messages
    assert f"{book.path} is damaged" in said
    assert "\n" not in said  # a log has its first line only
    assert "kept as ledger.db.damaged" in said
    assert (tmp_path / "ledger.db.damaged").stat().st_size > 0
    info = begun("sb-live")  # of which the driver knows
    book.adopt(info, "k", "what")
    assert book.past() == [Begun(info, True)]
    book.end(gone(info))
    assert book.ended("sb-live") is not None
    assert book.ended("sb-0") is None
    assert book.made(None, "k") == ("sb-live", "what")
    book.close()


def test_a_key_leads_to_what_somebody_heard_of(book: Ledger) -> None:
    infos = [begun(f"sb-{i}", i + 1.0) for i in range(4)]
    book.begin(infos[0], "k", "a")
    assert book.made(None, "k") is None
    book.end(gone(infos[0]))
    book.told("sb-0")  # too late: nobody heard of it while it lived
    assert book.made(None, "k") is None
    book.begin(infos[1], "k", "b")
    book.told("sb-1")
    book.end(gone(infos[1]))
    assert book.made(None, "k") == ("sb-1", "b")
    assert book.made("t", "k") is None
    book.begin(infos[2].model_copy(update={"tenant": "t"}), "k", "c")
    book.told("sb-2")
    assert (book.made("t", "k"), book.made(None, "k")) == (("sb-2", "c"), ("sb-1", "b"))


def test_after_an_hour_it_is_forgotten_and_so_are_more_than_so_many(
    book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> int:
        infos, _ = book.later(Filter(), (0.0, ""), 1000)
        return len(infos)

    hour_ago = {"ended_at": time.time() - ledger.ENDED_SECONDS - 1}
    for number in range(100):
        info = begun(f"sb-{number}")
        book.begin(info, f"k{number}", "what")
        book.told(info.id)
        book.end(gone(info, **(hour_ago if number < 50 else {})))
    assert [bool(book.ended(f"sb-{number}")) for number in (0, 49, 50, 99)] == [False, False, True, True]
    assert [bool(book.made(None, f"k{number}")) for number in (0, 49, 50, 99)] == [False, False, True, True]
    assert kept() == 50
    monkeypatch.setattr(ledger, "ENDED_KEPT", 20)
    for number in range(100, 200):
        info = begun(f"sb-{number}")
        book.begin(info)
        book.end(gone(info))
    assert 20 <= kept() < 20 + 32
    assert book.ended("sb-100") is None
    assert book.ended("sb-199") is not None
    live = begun("sb-live", 1.0)
    book.begin(live)
    assert book.past() == [Begun(live, False)]  # what lives is never too old


LABELS: list[dict[str, str]] = [
    {},
    {"a": "1"},
    {"a": "1", "b": "2"},
    {"a": "2", 'b"': "1"},
    {'"a"': "1", "": ""},
    {"b": 'a":"1'},
    {"\n": '\n"a":"1"', "é": "ü"},
    {"a": '1"', "A": "1"},
    {"xa": "1", "a\\": "\\"},
]


def test_what_is_listed_fits(book: Ledger) -> None:
    infos = [
        begun(f"sb-{i}", float(i + 1), labels=labels, image=f"i{i % 2}", tenant=f"t{i % 3}")
        for i, labels in enumerate(LABELS)
    ]
    for info in reversed(infos):
        book.begin(info)
        book.end(gone(info))
    wanted: list[dict[str, str | None]] = [{}, *({n: v} for each in LABELS for n, v in each.items())]
    wanted += [{name: None} for each in LABELS for name in each]
    wanted += [{"a": "1", "b": None}, {"c": None}, {str(number): None for number in range(3000)}]
    for labels in wanted:
        for image, tenant in ((None, None), ("i0", None), (None, "t1"), ("i1", "t2")):
            found, _ = book.later(Filter(labels=labels, image=image, tenant=tenant), (0.0, ""), 1000)
            assert [each.id for each in found] == [
                info.id
                for info in infos
                if all(name in info.labels and value in (None, info.labels[name]) for name, value in labels.items())
                and image in (None, info.image)
                and tenant in (None, info.tenant)
            ], labels


def test_however_many_ended_they_cost_no_memory_and_are_looked_at_a_few_at_a_time(book: Ledger) -> None:
    count = 6000
    before = 0
    for number in range(count):
        info = begun(f"sb-{secrets.token_hex(7)}", labels={"n": str(number)})
        book.begin(info, f"k-{number}", "what")
        book.told(info.id)
        book.end(gone(info))
        if number == count // 3:
            before = memory()
    assert memory() - before < 1 << 20  # 2 kB each would be eight
    at: tuple[float, str] | None = (0.0, "")
    seen = 0
    while at is not None:
        infos, at = book.later(Filter(), at, 1000)
        assert len(infos) <= 250  # three milliseconds
        seen += len(infos)
    assert seen == count


def memory() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_images_are_where_a_reboot_leaves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_store(tmp_path) == tmp_path / "images"
    monkeypatch.delenv("SANDLOT_STATE_DIR")
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
    book = Ledger(named.path)
    os.utime(named.path, (time.time() - 4000,) * 2)
    assert named.is_awaited(3600)
    for path in named.path.glob("ledger*"):
        os.utime(path, (time.time() - 4000,) * 2)
    assert not named.is_awaited(3600)
    book.begin(begun("sb-0"))
    assert named.is_awaited(3600)
    book.close()
    for each in (named, other):
        each.remove()
        each.release()  # again: it has none by now


def test_a_directory_that_is_being_removed_is_nobody_s_to_sweep(tmp_path: Path) -> None:
    stop = threading.Event()
    swept: list[Path] = []

    def sweep() -> None:
        ours = NodeDirectory.claim(tmp_path)
        while not stop.is_set():
            for dead in ours.abandoned():
                swept.append(dead.path)
                dead.release()
        ours.remove()

    sweeping = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in sweeping:
        thread.start()
    try:
        for _ in range(300):
            directory = NodeDirectory.claim(tmp_path)
            for number in range(20):
                (directory.path / f"f{number}").touch()
            directory.remove()
    finally:
        stop.set()
        for thread in sweeping:
            thread.join()
    assert swept == []
    assert list(tmp_path.iterdir()) == []
