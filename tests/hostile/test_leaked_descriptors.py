"""Attack: find something of the node's or the helper's in the box: open descriptors, the root, directory, memory and
program of the first process, of each new process before it runs its command, and of each process that opens a file for
the node; overwrite the helper's program through /proc/PID/exe of a command that is `/proc/self/exe` (CVE-2019-5736).

Must hold: a command has its three descriptors. Of the helper's processes nothing can be opened: none of them is
dumpable, which no plan can take away, so the control watches an ordinary process by the same program. The helper's file
keeps its bytes and its mode, and boxes can still be made.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import RunResult
from sandlot.drivers.native.driver import HELPER, Helper
from sandlot.errors import SandlotError
from tests.support.hostile import PYTHON, Arena, Sandbox

PROMISE = "processes"

SECONDS = 20.0  # of patience, on a slow machine


async def until_seen(box: Sandbox, rounds: int) -> AsyncIterator[None]:
    """Some rounds, fewer on a slow machine, and more until the program inside has had a look; then it is told to
    stop."""
    clock = asyncio.get_running_loop().time
    enough = clock() + SECONDS / 2
    async with asyncio.timeout(SECONDS):
        while (rounds > 0 and clock() < enough) or not (await box.run("test -e /tmp/seen")).ok:
            yield
            rounds -= 1
    await box.write_file("/tmp/stop", b"")


async def said(watching: asyncio.Task[RunResult]) -> str:
    result = await watching
    assert result.ok, result.stderr
    return result.stdout


async def test_a_command_has_three_descriptors_and_no_more(arena: Arena) -> None:
    box = await arena.box()
    program = (
        "import os; print(sorted(os.listdir('/proc/self/fd')), [os.readlink(f'/proc/self/fd/{n}') for n in range(3)])"
    )
    fds, _, links = (await arena.python(program, box=box)).stdout.partition("] ")
    assert fds == "['0', '1', '2', '3'"  # 3 is the listing's own
    assert links.count("pipe:") == 2
    assert "/dev/null" in links
    # And after many others have come and gone, some with input, some cut short.
    await asyncio.gather(*(box.run("cat", stdin="x") for _ in range(10)))
    await box.run("sleep 100", timeout=0.01)
    assert (await arena.python(program, box=box)).stdout.startswith("['0', '1', '2', '3']")


async def test_the_first_process_gives_nothing_away(arena: Arena) -> None:
    box = await arena.box()
    for path in ("fd", "fdinfo", "root/", "cwd/", "map_files", "ns/mnt", "environ", "mem", "maps", "exe", "auxv", "io"):
        result = await arena.sh(f"ls -lL /proc/1/{path} && cat /proc/1/{path}", box=box)
        assert not result.ok, path
        result = await arena.sh(f"cd /proc/1/task/1 && ls -lL {path} && cat {path}", box=box)
        assert not result.ok, path
    for path in ("exe", "mem", "oom_score_adj", "uid_map", "clear_refs", "comm"):
        assert not (await arena.sh(f": > /proc/1/{path}", box=box)).ok, path


# Watches all processes of one name until /tmp/stop is there; says what it could open and how often it looked. A process
# that becomes its command is open to its kind a moment before it has its new name, but by then it has closed what it
# does not pass on: so what counts is a descriptor above 2, or the program's own file or memory, and the name after it.
# (Which numbers are in use the kernel lists to root inside in that moment; where they lead it does not say.)
WATCH = """
import os, sys
wanted, looked, opened = sys.argv[1], 0, set()
def name(pid):
    with open(f"/proc/{pid}/comm") as file: return file.read().strip()
def any_of(pid, attempt):
    for number in range(3, 16):
        try: attempt(f"/proc/{pid}/fd/{number}")
        except OSError: continue
        return True
def fd(pid): return any_of(pid, lambda path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
def link(pid): return any_of(pid, os.readlink)
def exe(pid): return wanted in os.readlink(f"/proc/{pid}/exe")
def maps(pid): return wanted in open(f"/proc/{pid}/maps").read()
def environ(pid): return wanted in open(f"/proc/{pid}/environ").read()
while not os.path.exists("/tmp/stop"):
    for pid in os.listdir("/proc"):
        try:
            if not pid.isdigit() or pid == "1" or name(pid) != wanted: continue
        except OSError: continue
        looked += 1
        for attempt in (fd, link, exe, maps, environ):
            try:
                if attempt(pid) and name(pid) == wanted: opened.add(attempt.__name__)
            except OSError: pass
        open("/tmp/seen", "w").close()
print(looked, *sorted(opened))
"""


@pytest.mark.parametrize("user", [0, 1000])
async def test_no_process_of_the_helper_gives_anything_away(arena: Arena, user: int) -> None:
    if user and not arena.users:
        pytest.skip("there is only one user inside")
    box = await arena.box()
    assert (await box.run("chmod 711 /root")).ok  # the interpreter may lie in there
    watching = asyncio.create_task(arena.python(WATCH, "sandlot-init", box=box, user=user))
    await box.write_file("/tmp/file", b"text")
    async for _ in until_seen(box, 150):
        await asyncio.gather(box.run(["true"], user=user, cwd="/"), box.read_file("/tmp/file"))
        await box.write_file("/tmp/written", b"x")
    looked, *opened = (await said(watching)).split()
    assert opened == []
    assert int(looked) > 0


@pytest.mark.control
async def test_control_an_ordinary_process_of_the_box_is_open_to_the_same_program(arena: Arena) -> None:
    box = await arena.box()
    sleeping = asyncio.create_task(box.run("exec 5< /etc/passwd; sleep=1 exec sleep 100", timeout=SECONDS))
    watching = asyncio.create_task(arena.python(WATCH, "sleep", box=box))
    async with asyncio.timeout(SECONDS):
        while not (await box.run("grep -x sleep /proc/[0-9]*/comm")).ok:
            pass
    async for _ in until_seen(box, 1):
        await box.run(["true"])
    _, *opened = (await said(watching)).split()
    assert set(opened) == {"environ", "exe", "fd", "link", "maps"}
    await box.run("kill $(pidof sleep) || kill -9 -1")
    await sleeping


# Whatever process runs the program named in argv, or a script whose interpreter is its caller's own program: change
# that program's file. Until /tmp/stop is there.
OVERWRITE = """
import os, sys
seen = changed = 0
while not os.path.exists("/tmp/stop"):
    for pid in os.listdir("/proc"):
        path = f"/proc/{pid}/exe"
        try:
            if not pid.isdigit() or sys.argv[1] not in os.readlink(path): continue
        except OSError: continue
        seen += 1
        for attempt in (
            lambda: os.chmod(path, 0o700),
            lambda: os.truncate(path, 0),
            lambda: os.close(os.open(path, os.O_WRONLY)),
            lambda: os.utime(path, (1, 1)),
            lambda: os.setxattr(path, "user.mark", b"x"),
        ):
            try:
                attempt()
                changed += 1
            except OSError: pass
        open("/tmp/seen", "w").close()
print(seen, changed)
"""


def print_of(path: Path) -> tuple[object, ...]:
    found = path.stat()
    return found.st_mode, found.st_size, found.st_mtime, hashlib.sha256(path.read_bytes()).hexdigest()


def another_helper(arena: Arena, tmp_path: Path, kind: type[Helper]) -> Path:
    """Run boxes from a copy of the helper, which may be spoilt."""
    helper = Path(shutil.copy(HELPER, tmp_path / "sandlot-init"))
    helper.chmod(0o755)
    arena.driver._helper.close()
    arena.driver._helper = kind(helper)
    return helper


async def test_the_helpers_file_cannot_be_changed(arena: Arena, tmp_path: Path) -> None:
    helper = another_helper(arena, tmp_path, Helper)
    before = print_of(helper)
    box = await arena.box()
    await box.write_file("/root/tool", b"#!/proc/self/exe\n", mode=0o755)
    watching = asyncio.create_task(arena.python(OVERWRITE, "sandlot-init", box=box))
    async for _ in until_seen(box, 150):
        await box.run(["/root/tool"])
        with suppress(SandlotError):
            await box.run(["/proc/self/exe"])
            await box.write_file("/proc/self/exe", b"x")
    seen, _ = (await said(watching)).split()
    assert int(seen) > 0
    assert print_of(helper) == before
    assert (await arena.sh("echo lives")).stdout == "lives\n"  # what was run was a copy, which is made anew


class Bare(Helper):
    """Run from the file itself."""

    def runnable(self) -> str:
        super().runnable()  # as many descriptors
        return str(self.path)


@pytest.mark.control
@pytest.mark.skipif(os.geteuid() == 0, reason="the file belongs to the host's root, who is nobody inside")
async def test_control_run_from_the_file_itself_it_is_changed(arena: Arena, tmp_path: Path) -> None:
    helper = another_helper(arena, tmp_path, Bare)
    box = await arena.box()
    await box.write_file("/root/tool", b"#!/proc/self/exe\n", mode=0o755)
    watching = asyncio.create_task(arena.python(OVERWRITE, "sandlot-init", box=box))
    async with asyncio.timeout(SECONDS):
        while helper.stat().st_mode & 0o777 == 0o755:
            await box.run(["/root/tool"])
    await box.write_file("/tmp/stop", b"")
    await said(watching)


@pytest.mark.control
async def test_control_a_file_of_the_box_is_changed_by_the_same_program(arena: Arena) -> None:
    box = await arena.box()
    assert (await box.run("cp /usr/bin/sleep /root/own-sleep")).ok
    sleeping = asyncio.create_task(box.run(["/root/own-sleep", "100"], timeout=SECONDS))
    watching = asyncio.create_task(arena.python(OVERWRITE, "own-sleep", box=box))
    async with asyncio.timeout(SECONDS):
        while (await box.run("stat -c %a /root/own-sleep")).stdout != "700\n":
            pass
    await box.write_file("/tmp/stop", b"")
    assert int((await said(watching)).split()[1]) > 0
    await box.run("kill -9 -1")
    await sleeping


async def test_what_one_command_opened_the_next_does_not_have(arena: Arena) -> None:
    box = await arena.box()
    hold = f"exec 9> /tmp/held; {PYTHON} -c 'import os; print(sorted(os.listdir(\"/proc/self/fd\")))'"
    assert "'9'" in (await box.run(hold)).stdout
    assert "'9'" not in (await arena.python("import os; print(os.listdir('/proc/self/fd'))", box=box)).stdout
