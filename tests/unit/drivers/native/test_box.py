"""Promises of a native box:
1. All seven namespaces are its own, and its root is nobody's root outside.
2. Its root directory is the image; nothing of the host's /home, /root, /var, /run is there.
3. No capability beyond the list, no new privileges, a system call filter; each denied call is denied.
4. With no network it reaches neither the host's ports nor its addresses nor the outside; a routed port it does.
5. A limit on memory, processes and disk holds; past it the program gets an error or is killed, with the reason.
6. Whatever dies (helper, node, program), nothing is left: no process, mount, cgroup or id range.
7. Orphans are reaped, and a killed command takes its whole tree along.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.api import Ending, Limits, Profile, SandboxSpec, Volume
from sandlot.drivers.base import Spawn
from sandlot.drivers.images import Image
from sandlot.drivers.native import ids, seccomp
from sandlot.drivers.native.box import NativeBox, NativeProcess
from sandlot.drivers.native.cgroup import Cgroups
from sandlot.drivers.native.ids import SubIds
from sandlot.drivers.native.plan import CAPABILITIES, Host, Plan, make_plan
from sandlot.errors import InvalidRequest, NotFound, StartFailed, Unsupported
from tests.support.native import ENV, PYTHON, Boxes, first_line, python, sh

ROOT = os.geteuid() == 0


def status(text: str) -> dict[str, str]:
    return {line.split(":", 1)[0]: line.split(":", 1)[1].strip() for line in text.splitlines() if ":" in line}


def unfiltered(spec: SandboxSpec, image: Image, host: Host) -> Plan:
    return replace(make_plan(spec, image, host), seccomp=b"")


async def test_all_seven_namespaces_are_its_own(boxes: Boxes) -> None:
    _, inside = await sh(
        await boxes(), "cd /proc/self/ns; for n in user mnt pid net ipc uts cgroup; do readlink $n; done"
    )
    outside = {os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")}
    assert len(inside.split()) == 7
    assert not outside & set(inside.split())


async def test_root_inside_is_nobodys_root_outside(boxes: Boxes) -> None:
    box = await boxes()
    _, inside = await sh(box, "id -u")
    outside = status(Path(f"/proc/{box._pid}/status").read_text())["Uid"].split()[0]
    assert inside.strip() == "0"
    assert int(outside) >= 0x7000_0000 if ROOT else int(outside) == os.geteuid()


@pytest.mark.skipif(not ROOT, reason="only a root node has more than one id to give")
async def test_two_boxes_never_share_an_id(boxes: Boxes) -> None:
    first, second = await boxes(), await boxes()
    assert first._base != second._base
    _, ids = await sh(first, "id -u; id -g", user=1000)
    assert ids.split() == ["1000", "1000"]


@pytest.mark.skipif(ROOT, reason="a root node has other ids")
async def test_another_user_without_root_is_one_of_the_lent_ids_or_refused_with_a_hint(boxes: Boxes) -> None:
    box = await boxes()
    if boxes.driver.facts.ids == "shared":
        _, ids = await sh(box, "id -u; id -g; touch /tmp/mine; stat -c %u /tmp/mine", user=1000)
        assert ids.split() == ["1000", "1000", "1000"]
        return
    with pytest.raises(Unsupported, match="user 1000") as refused:
        await sh(box, "true", user=1000)
    assert refused.value.hint


@pytest.mark.skipif(ROOT, reason="a root node has other ids")
async def test_lent_ids_that_cannot_be_had_are_a_named_loss_and_the_box_works(boxes: Boxes, tmp_path: Path) -> None:
    await boxes()
    refusing = tmp_path / "newuidmap"
    refusing.write_text("#!/bin/sh\necho 'not today' >&2; exit 1\n")
    refusing.chmod(0o755)
    ours = (os.geteuid(), os.getegid())
    boxes.driver.facts = replace(boxes.driver.facts, ids="shared")  # also where none are lent to this user
    boxes.driver._sub_ids = SubIds((str(refusing), str(refusing)), (100_000, 100_000), ours)
    box = await boxes()
    assert (await sh(box, "id -u"))[1] == "0\n"
    assert any(loss.startswith("user ids: ") and "not today" in loss for loss in box.losses)
    assert boxes.driver.facts.ids == "one"  # and it is not tried again


LENT = "somebody:1000:65536\nuser:1:10\nuser:x:y\nuser:100000:65536\n"


def test_a_lent_range_is_found_by_name_or_number_if_it_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text(LENT)
    assert ids._lent(file, "user", 7) == 100_000
    assert ids._lent(file, "nobody", 7) is None
    file.write_text("7:200000:65535")
    assert ids._lent(file, "user", 7) == 200_000
    assert ids._lent(tmp_path / "none", "user", 7) is None


async def test_nothing_of_the_hosts_own_files_is_inside(boxes: Boxes) -> None:
    _, listing = await sh(
        await boxes(), "ls -A /home /var /run /tmp /srv /mnt; ls /usr/bin/env; touch /etc/new && echo wrote"
    )
    assert listing.split() == ["/home:", "/mnt:", "/run:", "/srv:", "/tmp:", "/var:", "tmp", "/usr/bin/env", "wrote"]


async def test_the_hosts_programs_cannot_be_changed_from_inside(boxes: Boxes) -> None:
    box = await boxes()
    before = os.stat("/usr/bin/env").st_mtime_ns
    ended, output = await sh(box, "touch /usr/bin/env")
    assert ended.code != 0
    assert "Read-only" in output or "denied" in output  # an ordinary user's may be refused by its owner already
    _, output = await sh(box, "grep ' /usr ' /proc/mounts")
    assert " ro," in output
    assert os.stat("/usr/bin/env").st_mtime_ns == before


async def test_a_directory_of_the_image_is_replaced_or_the_loss_is_named(boxes: Boxes) -> None:
    box = await boxes()
    move = "import os; os.mkdir('/opt/new'); os.rename('/opt/new', '/opt/x'); os.rmdir('/srv'); os.mkdir('/srv')"
    ended, output = await python(box, move)  # not of the image: on any kernel
    assert ended.code == 0, output
    ended, output = await sh(box, "rm -r /etc/alternatives && mkdir /etc/alternatives && ls -A /etc/alternatives")
    if any(loss.startswith("image directories: ") for loss in box.losses):
        assert "Input/output error" in output
    else:
        assert (ended.code, output) == (0, "")


async def test_a_volume_is_read_only_unless_asked_for(boxes: Boxes, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("from the host")
    spec = SandboxSpec(volumes=(Volume(source=str(shared), target="/data/in"),))
    ended, output = await sh(await boxes(spec), "cat /data/in/file; touch /data/in/new")
    assert output.startswith("from the host")
    assert ended.code != 0
    assert "Read-only" in output
    writable = SandboxSpec(volumes=(Volume(source=str(shared), target="/out", read_only=False),))
    box = await boxes(writable)
    ended, output = await sh(box, "echo result > /out/new")
    if not box.owners_mapped and any(loss.startswith("file owners: ") for loss in box.losses):
        return  # the volume is its owner's, and that is nobody inside
    assert ended.code == 0, output
    assert (shared / "new").read_text() == "result\n"
    assert (shared / "new").stat().st_uid == os.geteuid()


async def test_a_volume_that_does_not_exist_is_refused_before_anything_starts(boxes: Boxes) -> None:
    with pytest.raises(InvalidRequest, match="/nowhere"):
        await boxes(SandboxSpec(volumes=(Volume(source="/nowhere", target="/data"),)))


async def test_an_unknown_image_is_refused_with_those_that_exist(boxes: Boxes) -> None:
    with pytest.raises(NotFound, match="alpine") as refused:
        await boxes(SandboxSpec(image="alpine"))
    assert "`host`" in str(refused.value.hint)


async def test_no_capability_beyond_the_list_and_no_new_privileges(boxes: Boxes) -> None:
    _, text = await sh(await boxes(), "cat /proc/self/status")
    found = status(text)
    assert int(found["CapBnd"], 16) == int(found["CapEff"], 16) == sum(1 << bit for bit in CAPABILITIES.values())
    assert found["CapAmb"] == "0" * 16
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    _, text = await sh(await boxes(SandboxSpec(setuid=True)), "cat /proc/self/status")
    assert status(text)["NoNewPrivs"] == "0"  # the control: it is the setting that does it


# Calls each denied number with arguments that are wrong for it, and prints those that did not answer EPERM.
TRY_CALLS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
for word in sys.argv[1:]:
    name, number = word.split("=")
    ctypes.set_errno(0)
    if libc.syscall(int(number), -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
"""


def denied_calls() -> list[str]:
    column = 0 if os.uname().machine == "x86_64" else 1
    return [f"{name}={numbers[column]}" for name, numbers in seccomp._CALLS.items() if numbers[column] is not None]


async def test_each_call_of_the_deny_list_is_denied(boxes: Boxes) -> None:
    ended, output = await python(await boxes(), TRY_CALLS, *denied_calls())
    assert ended.code == 0, output
    assert output == ""


async def test_without_the_filter_most_of_these_calls_reach_the_kernel(boxes: Boxes) -> None:
    boxes.driver.planner = unfiltered  # the control
    calls = [call for call in denied_calls() if not call.startswith(("vhangup", "reboot"))]
    _, output = await python(await boxes(), TRY_CALLS, *calls)
    assert len(output.splitlines()) > 20


async def test_new_namespaces_are_refused_inside(boxes: Boxes) -> None:
    ended, _ = await sh(await boxes(), "unshare --user true")
    assert ended.code != 0
    boxes.driver.planner = unfiltered  # and, without the filter, by the limit on nested user namespaces
    ended, output = await sh(await boxes(), "unshare --user true")
    assert ended.code != 0
    assert "No space" in output


async def test_the_first_process_hides_its_descriptors_and_memory(boxes: Boxes) -> None:
    _, output = await sh(await boxes(), "ls /proc/1/fd/ 2>&1; cat /proc/1/environ 2>&1; cat /proc/1/maps 2>&1")
    assert output.count("ermission denied") == 3


CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.socket(family).connect((host, int(port)))
        print("reached", address)
    except OSError as error:
        print("failed", address, error.errno)
"""


def host_addresses() -> list[str]:
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [address for address in found if ":" not in address]


async def test_a_box_reaches_its_routed_port_and_nothing_else(boxes: Boxes) -> None:
    box = await boxes()
    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    here = [f"{address}:{port}" for address in ("127.0.0.1", *host_addresses())]
    outside = ["192.0.2.1:80", "169.254.169.254:80", "8.8.8.8:53", "2001:db8::1:80", f"::1:{port}"]
    routed = await box.listen(17_017)
    with listener, routed:
        _, output = await python(box, CONNECT, *here, *outside, "127.0.0.1:17017")
        lines = output.splitlines()
        assert lines[-1] == "reached 127.0.0.1:17017"
        assert len(lines) == len(here) + len(outside) + 1
        assert all(line.startswith("failed") for line in lines[:-1]), output
        # The control: the same program outside reaches the host's port.
        control = subprocess.run([sys.executable, "-c", CONNECT, *here], capture_output=True, text=True, check=True)
        assert control.stdout.splitlines() == [f"reached {address}" for address in here]


async def test_a_port_inside_can_be_reached_from_the_node_only(boxes: Boxes) -> None:
    box = await boxes()
    serve = (
        "import os, socket; s = socket.create_server(('127.0.0.1', 80)); os.write(1, b'1'); s.accept()[0].send(b'hi')"
    )
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    process = await box.spawn(Spawn((PYTHON, "-I", "-S", "-c", serve), ENV, "/"), null, write, write)
    assert await asyncio.to_thread(os.read, read, 1) == b"1"
    with await box.connect(80) as sock:
        assert await asyncio.get_running_loop().sock_recv(sock, 10) == b"hi"
    assert (await process.wait()).code == 0
    for fd in (read, write, null):
        os.close(fd)
    with pytest.raises(NotFound, match="port 81"):
        await box.connect(81)


async def memory_is_limited(boxes: Boxes) -> bool:
    await boxes()  # the driver finds out with its first box
    return "memory" in boxes.driver.cgroups.controllers


async def test_too_much_memory_is_an_oom_kill_with_its_reason(boxes: Boxes) -> None:
    if not await memory_is_limited(boxes):
        pytest.skip("this node may make no memory cgroup here")
    box = await boxes(SandboxSpec(limits=Limits(memory="64M")), frozenset({"memory"}))
    ended, _ = await python(box, "b = bytearray(200 << 20); print(len(b))")
    assert (ended.signal, ended.oom) == (signal.SIGKILL, True)
    ended, _ = await python(box, "b = bytearray(10 << 20)")  # the box lives on, and a small one is no OOM
    assert (ended.code, ended.oom) == (0, False)
    larger = await boxes(SandboxSpec(limits=Limits(memory="400M")), frozenset({"memory"}))
    ended, output = await python(larger, "b = bytearray(200 << 20); print(len(b))")  # the control
    assert (ended.code, output) == (0, f"{200 << 20}\n")


async def test_files_count_as_the_boxes_memory(boxes: Boxes) -> None:
    if not await memory_is_limited(boxes):
        pytest.skip("this node may make no memory cgroup here")
    box = await boxes(SandboxSpec(limits=Limits(memory="64M")))
    ended, _ = await sh(box, "head -c 200M /dev/zero > /tmp/big")
    assert ended.code != 0 or ended.signal


async def test_a_memory_limit_named_by_the_user_is_refused_where_it_cannot_be_kept(boxes: Boxes) -> None:
    if await memory_is_limited(boxes):
        pytest.skip("this node can keep it")
    with pytest.raises(Unsupported, match="memory"):
        await boxes(SandboxSpec(limits=Limits(memory="64M")), frozenset({"memory"}))
    assert any("memory" in loss for loss in (await boxes()).losses)


FORKS = """
import os, signal, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            signal.pause()
        made += 1
    print(made, "all", flush=True)
except OSError as error:
    print(made, error.errno, flush=True)
signal.pause()
"""


async def test_a_fork_bomb_stops_at_the_limit_and_is_killed_whole(boxes: Boxes) -> None:
    box = await boxes(SandboxSpec(limits=Limits(pids=40)))
    made, error = (await first_line(box, PYTHON, "-I", "-S", "-c", FORKS)).split()
    assert 20 < int(made) < 40
    assert int(error) == errno.EAGAIN
    ended, count = await sh(box, "ls -d /proc/[0-9]* | wc -l")
    assert ended.code == 0
    assert int(count) <= 4  # its children were killed with it
    roomy = await boxes(SandboxSpec(limits=Limits(pids=400)))
    assert (await first_line(roomy, PYTHON, "-I", "-S", "-c", FORKS)) == "200 all\n"  # the control


async def test_the_disk_stops_at_its_limit_in_bytes_and_files(boxes: Boxes) -> None:
    box = await boxes(SandboxSpec(limits=Limits(disk="8M", inodes=200)))
    _, output = await sh(
        box, "head -c 20M /dev/zero > /root/big; rm /root/big; head -c 4M /dev/zero > /root/ok && echo fits"
    )
    assert "No space left" in output
    assert output.rstrip().endswith("fits")
    _, output = await sh(box, "cd /root && touch $(seq 1000) 2>&1 | tail -n 1; ls | wc -l")
    assert "No space left" in output
    assert int(output.split()[-1]) < 200


async def test_orphans_are_reaped(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "for i in 1 2 3 4 5; do (sleep 0.05 &) ; done; sleep 0.2")
    _, output = await sh(box, "cat /proc/[0-9]*/stat | cut -d' ' -f3 | sort | uniq -c")
    assert "Z" not in output


@pytest.mark.parametrize("by_cgroup", [True, False])
async def test_killing_a_command_takes_its_whole_tree(boxes: Boxes, by_cgroup: bool) -> None:
    box = await boxes()
    if not by_cgroup:
        box.group.runs = None  # a host without cgroup.kill: the helper walks the tree
    elif box.group.runs is None:
        pytest.skip("this node may make no cgroup here")
    null = os.open(os.devnull, os.O_RDWR)
    tree = "(setsid sh -c 'sleep 600 & sleep 600' &) ; sleep 600 & nohup sleep 600"
    process = await box.spawn(Spawn(("sh", "-c", tree), ENV, "/"), null, null, null)
    os.close(null)
    sleepers = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c '^sleep$'"
    async with asyncio.timeout(10):
        while (await sh(box, sleepers))[1] != "4\n":
            pass
    await process.kill_tree()
    async with asyncio.timeout(10):
        assert (await process.wait()).signal == signal.SIGKILL
        while (await sh(box, sleepers))[1] != "0\n":  # PID 1 reaps what it adopted a moment later
            pass
    await process.release()


# Forks and leaves, again and again, faster than /proc can be read, and wakes its stopped ancestor.
CHASE = """
import os, signal
first = os.getpid()
os.write(1, b"1\\n")
while True:
    if os.fork():
        if os.getpid() == first:
            while True: signal.pause()
        os._exit(0)
    os.kill(first, signal.SIGCONT)
"""


async def test_a_tree_that_outruns_the_walk_is_killed_all_the_same(boxes: Boxes) -> None:
    box = await boxes(SandboxSpec(limits=Limits(pids=60)))
    box.group.runs = None  # a host without cgroup.kill
    async with asyncio.timeout(20):
        assert await first_line(box, PYTHON, "-I", "-S", "-c", CHASE) == "1\n"  # waits for the end of its output
    _, count = await sh(box, "ls -d /proc/[0-9]* | wc -l")
    assert int(count) <= 4


async def test_runs_that_are_cut_short_leave_no_cgroup_behind(boxes: Boxes) -> None:
    box = await boxes()
    if box.group.runs is None:
        pytest.skip("this node may make no cgroup here")
    for delay in (0.0, 0.0005, 0.001, 0.002, 0.004) * 6:
        running = asyncio.create_task(sh(box, "sleep 600"))
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await sh(box, "true")
    await sh(box, "true")
    assert len(list(Path(box.group.runs).glob("run-*"))) <= 1


async def test_a_value_that_the_kernel_does_not_take_is_refused_if_it_was_asked_for(boxes: Boxes) -> None:
    await boxes()
    if "pids" not in boxes.driver.facts.controllers:
        pytest.skip("this node may make no pids cgroup here")
    spec = SandboxSpec(limits=Limits(pids=100_000_000))
    with pytest.raises(Unsupported, match="100000000 as a limit on pids"):
        await boxes(spec, frozenset({"pids"}))
    assert any("pids" in loss for loss in (await boxes(spec)).losses)


async def test_a_create_that_fails_in_any_way_leaves_no_cgroup(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    await boxes()

    def fails(*_: object) -> None:
        raise OverflowError("a number that is none")

    groups = boxes.driver.cgroups
    before = sorted(path for parent in groups._parents.values() for path in parent.rglob("*") if path.is_dir())
    with monkeypatch.context() as failing:
        failing.setattr("sandlot.drivers.native.cgroup._v1_settings", fails)
        failing.setattr("sandlot.drivers.native.cgroup._v2_settings", fails)
        if groups._parents:
            with pytest.raises(OverflowError):
                await boxes()
    assert sorted(path for parent in groups._parents.values() for path in parent.rglob("*") if path.is_dir()) == before


async def test_a_profile_that_is_a_filter_is_refused_where_there_is_none(boxes: Boxes) -> None:
    await boxes()
    boxes.driver.facts = replace(boxes.driver.facts, filtered=False)
    with pytest.raises(Unsupported, match="strict"):
        await boxes(SandboxSpec(profile=Profile.STRICT))
    assert any(loss.startswith("system call filter: ") for loss in (await boxes()).losses)


def test_controllers_that_are_mounted_in_one_place_share_a_directory(tmp_path: Path) -> None:
    groups = Cgroups("node", tmp_path)
    groups._parents = {"cpu": tmp_path, "pids": tmp_path}
    groups.controllers = {"cpu": "v1", "pids": "v1"}
    made = groups.make("box", Limits(pids=50))
    assert made.directories == [str(tmp_path / "box")]
    assert (tmp_path / "box" / "pids.max").read_text() == "50"
    assert made.kept == {"cpu", "pids"}


async def test_without_descriptors_left_an_open_fails_as_such(boxes: Boxes) -> None:
    box = await boxes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with pytest.raises(OSError) as refused:
            while True:
                taken.append(await box.open("/etc/passwd", os.O_RDONLY))
        assert refused.value.errno == errno.EMFILE
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_cgroups_what_is_killed_again_takes_no_neighbour_along(boxes: Boxes) -> None:
    box = await boxes()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    async def sleeping() -> NativeProcess:
        process = await box.spawn(Spawn(("sleep", "600"), ENV, "/"), null, null, null)
        process._group = None
        return process

    try:
        neighbour = await sleeping()
        for _ in range(20):
            process = await sleeping()
            await asyncio.gather(*(process.kill_tree() for _ in range(9)))
            assert (await process.wait()).signal == signal.SIGKILL
            await process.release()
        assert not neighbour.exit.done()
    finally:
        os.close(null)


async def test_no_link_leads_to_what_the_helper_has_open(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "for i in $(seq 0 40); do ln -s /proc/self/fd/$i /root/$i; done; ln -s /etc/passwd /root/plain")
    told = set()
    for number in range(41):
        with pytest.raises(OSError) as refused:
            os.close(await box.open(f"/root/{number}", os.O_RDONLY))
        told.add(refused.value.errno)
    assert told == {errno.ELOOP, errno.ENOENT}  # open there, or not
    os.close(await box.open("/root/plain", os.O_PATH))


def cgroup_directories() -> list[str]:
    # os.walk and not glob: others' cgroups may vanish while it looks.
    return [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"/sandlot-test{os.getpid()}" in os.path.dirname(path)]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_a_killed_helper_ends_the_box_and_leaves_nothing(boxes: Boxes) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    before = children()
    box = await boxes()
    running = asyncio.create_task(sh(box, "sleep 600"))
    await asyncio.sleep(0.1)
    os.kill(box._pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        death = await box.death
        ended, _ = await running
    assert death.ending is Ending.HELPER_DIED
    assert ended.signal == signal.SIGKILL
    assert cgroup_directories() == []
    assert children() == before
    assert Path("/proc/self/mounts").read_text() == mounts


async def test_a_hundred_boxes_at_once_leave_nothing(boxes: Boxes) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    made: list[NativeBox] = await asyncio.gather(*(boxes() for _ in range(100)))
    results = await asyncio.gather(*(sh(box, "true") for box in made[:20]))
    assert all(ended.code == 0 for ended, _ in results)
    await asyncio.gather(*(box.destroy() for box in made))
    assert cgroup_directories() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # the driver's own: an id block, no box's


NODE = """
import asyncio, os, sys
from pathlib import Path
from sandlot.api import SandboxSpec
from sandlot.drivers.base import Spawn
from sandlot.drivers.native.driver import NativeDriver
async def main():
    driver = NativeDriver(Path(sys.argv[1]))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        box = await driver.create(f"box{number}", SandboxSpec())
        await box.spawn(Spawn(("sleep", "600"), {"PATH": "/usr/bin:/bin"}, "/"), null, null, null)
        print(box._pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_node_leaves_no_process_and_a_sweep_removes_the_rest(boxes: Boxes, tmp_path: Path) -> None:
    directory = tmp_path / f"test{os.getpid()}dead"
    directory.mkdir()
    node = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NODE), str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    pids = [int(await asyncio.to_thread(node.stdout.readline)) for _ in range(3)]
    watches = [os.pidfd_open(pid) for pid in pids]
    node.kill()
    node.wait()
    # At once, as a node does that is started again: the boxes may not have noticed yet.
    await boxes.driver.sweep(directory)
    async with asyncio.timeout(10):  # without cgroups nothing has waited for them
        await asyncio.gather(*(asyncio.to_thread(select.select, [watch], [], []) for watch in watches))
    for watch in watches:
        os.close(watch)
    assert not [path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/sandlot-{directory.name}")]
    node.stdout.close()


async def test_a_lifetime_is_kept_by_the_box_itself(boxes: Boxes) -> None:
    box = await boxes(SandboxSpec(lifetime=0.2))
    async with asyncio.timeout(10):
        assert (await box.death).ending is Ending.LIFETIME


async def test_a_cancelled_start_leaves_nothing(boxes: Boxes) -> None:
    before = children()
    for delay in (0, 0.0005, 0.001, 0.002, 0.004):
        start = asyncio.create_task(boxes())
        await asyncio.sleep(delay)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    for box in boxes.made:
        await box.destroy()
    assert cgroup_directories() == []
    assert children() == before


async def test_a_step_that_fails_is_named_with_its_path(boxes: Boxes) -> None:
    await boxes()  # finds out about the host
    boxes.driver._host = type(boxes.driver._host)(root=ROOT, stage="/no/such/stage", pids_by_cgroup=True)
    with pytest.raises(StartFailed, match="mount /no/such/stage: No such file"):
        await boxes()


async def test_a_symlink_inside_does_not_lead_out(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "ln -s /etc/hostname /tmp/out; ln -s / /tmp/root; echo inside > /etc/hostname")
    fd = await box.open("/tmp/out", os.O_RDONLY)
    with os.fdopen(fd) as file:
        assert file.read() == "inside\n"
    with pytest.raises(FileNotFoundError):
        await box.open("/tmp/root/../../../../work/pyproject.toml", os.O_RDONLY)
