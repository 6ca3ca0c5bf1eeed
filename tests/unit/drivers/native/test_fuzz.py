"""Promises of the real sandlot-init, whatever is said to it; the seed is in SANDLOT_FUZZ_SEED, how much in _ROUNDS:

1. Frames that are malformed, cut off, too long, of no kind, with wrong descriptors or with wrong words do not end the
   first process of a box: afterwards it starts a command, has the descriptors that it had, and no more memory.
2. Tars that are damaged in any way end an upload with an error, or unpack: below the directory that was named, and
   nowhere else.
3. Before "ready" no plan, however malformed, hangs it or is begun without a word.
4. Nobody but the node has its control socket: no program in the box reaches it, root neither.
"""

from __future__ import annotations

import array
import asyncio
import errno
import io
import os
import random
import secrets
import socket
import struct
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Keeping
from sandlot.drivers.native.box import NativeBox
from sandlot.drivers.native.driver import HELPER, NativeDriver
from sandlot.drivers.native.keep import Record, records
from sandlot.drivers.native.wire import FRAME_MAX, Frame, Key, Value, pack
from tests.support.native import PYTHON, Boxes, sh

SEED = int(os.environ.get("SANDLOT_FUZZ_SEED", "20261130"))
ROUNDS = int(os.environ.get("SANDLOT_FUZZ_ROUNDS", "3000"))

# What its heap may be larger by (KiB): requests leave lists of what was started, of a few bytes each.
MORE_MEMORY = 2048

_HEADER = struct.Struct("=III")


class Said:
    """A control connection on which anything can be said, without waiting for what is answered."""

    def __init__(self, record: Record) -> None:
        for _ in range(200):  # until the first process has seen that its node is gone
            try:
                self.sock = record.connect()
                break
            except OSError:
                time.sleep(0.02)
        else:
            raise AssertionError("nobody is let in")
        self.sock.setblocking(False)

    def say(self, data: bytes, fds: list[int] | None = None) -> bool:
        """False: it is not listened to any more."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        until = time.monotonic() + 20
        while data:
            self.hear()
            try:
                sent = self.sock.sendmsg([data], rights)
            except BlockingIOError:
                assert time.monotonic() < until, "it does not read on"
                time.sleep(0.001)
                continue
            except OSError:
                return False
            data, rights = data[sent:], []
        return True

    def hear(self) -> None:
        """Let go of all that it answered."""
        with suppress(OSError):
            while True:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
                for _, _, payload in ancillary:
                    for (fd,) in struct.iter_unpack("i", payload[: len(payload) // 4 * 4]):
                        os.close(fd)
                if not data:
                    return

    def close(self) -> None:
        self.hear()
        self.sock.close()


class Maker:
    """Makes what is said, from a seed."""

    def __init__(self, chance: random.Random, fds: list[int]) -> None:
        self.chance = chance
        self.fds = fds

    def frame(self) -> tuple[bytes, list[int]]:
        """A frame of a right length; whatever is in it."""
        chance = self.chance
        kind, fields, fds = self.request()
        parts = bytearray(pack(kind, chance.randrange(200), fields)[_HEADER.size :])
        if chance.random() < 0.5:
            self.damage(parts)
        if chance.random() < 0.01:
            parts += self.field(chance.choice(list(Key)), b"x" * chance.randrange(1 << 21))
        number = (
            kind.value if chance.random() < 0.95 else chance.choice((0, 16, 99, 103, 1 << 31, chance.getrandbits(32)))
        )
        if chance.random() < 0.2:
            fds = chance.choices(self.fds, k=chance.choice((0, 1, 2, 3, 9, 64, 200)))
        if number == Frame.CLAIM and not self.lasts(parts):
            number = Frame.DISK
        return _HEADER.pack(number, chance.randrange(200), len(parts)) + bytes(parts), fds

    def request(self) -> tuple[Frame, list[tuple[Key, Value]], list[int]]:
        """A request as the node might make it."""
        chance = self.chance
        path = chance.choice(
            ("/tmp/f", "/tmp", "/", "/dev/null", "/dev/ptmx", "/proc/self/mem", "relative", "", "/tmp/a/b")
        )
        run = chance.randrange(200)
        some = chance.choices(self.fds, k=chance.choice((0, 1, 3, 4, 8)))
        requests: dict[Frame, list[tuple[Key, Value]]] = {
            Frame.SPAWN: [
                *(
                    (Key.ARG, word)
                    for word in chance.choice((["true"], ["sh", "-c", "exit 3"], ["nothing"], [""], ["x"] * 50))
                ),
                *((Key.ENV, word) for word in ["PATH=/usr/bin:/bin"] * chance.randrange(3)),
                (Key.CWD, chance.choice(("/", "/tmp", "/nowhere"))),
                (Key.USER, chance.choice((0, 0, 1000, 65_535, 1 << 31))),
                (Key.TTY, chance.randrange(2)),
                (Key.HOLD, chance.choice((0, 1, 2, 8, 9, 64, 1 << 31))),
                (Key.NOTE, "n" * chance.choice((0, 10, 1023, 1024, 5000))),
            ],
            Frame.KILL: [(Key.RUN, run), (Key.FLAGS, chance.randrange(3))],
            Frame.LISTEN: [
                (Key.PORT, chance.choice((0, 80, 8080, 65_535, 65_536, 1 << 31))),
                (Key.HOLD, chance.randrange(2)),
            ],
            Frame.CONNECT: [(Key.PORT, chance.choice((0, 1, 8080, 70_000)))],
            Frame.OPEN: [
                (Key.PATH, path),
                (Key.FLAGS, chance.choice((0, os.O_RDWR | os.O_CREAT, os.O_PATH, chance.getrandbits(32)))),
                (Key.MODE, chance.choice((0o644, 0o10666, chance.getrandbits(32)))),
                (Key.USER, chance.choice((0, 1000, 1 << 31))),
                (Key.PARENTS, chance.randrange(2)),
            ],
            Frame.RELEASE: [(Key.RUN, run)],
            Frame.HOLD: [(Key.RUN, run), (Key.NOTE, "more")],
            Frame.SIGNAL: [(Key.SIGNAL, chance.choice((0, 1, 9, 15, 19, 18, 64, 65, 1 << 31))), (Key.RUN, run)],
            Frame.COPY: [],
            Frame.LIST: [],
            Frame.CLAIM: [
                (Key.LIFETIME, chance.choice((0, 1 << 40, (1 << 64) - 1))),
                (Key.GRACE, chance.choice((1 << 30, (1 << 64) - 1))),
            ],
            Frame.DISK: [],
            Frame.UNPACK: [(Key.PATH, path), (Key.USER, chance.choice((0, 1000)))],
            Frame.PLAN: [(Key.CAPS, 0)],
            Frame.MAPPED: [],
            Frame.EXITED: [(Key.STATUS, 0)],
        }
        kind = chance.choice(list(requests))
        return kind, requests[kind], some

    def damage(self, parts: bytearray) -> None:
        chance = self.chance
        for _ in range(chance.choice((1, 1, 2, 5))):
            if not parts:
                return
            at = chance.randrange(len(parts))
            what = chance.randrange(5)
            if what == 0:
                parts[at] ^= 1 << chance.randrange(8)
            elif what == 1:
                del parts[at:]
            elif what == 2:
                parts[at:at] = chance.randbytes(chance.randrange(20))
            elif what == 3 and len(parts) >= 8:
                parts[4:8] = struct.pack("=I", chance.choice((0, 1, 1 << 16, (1 << 32) - 1, (1 << 31) - 8)))
            else:
                parts[:2] = struct.pack("=H", chance.choice((0, 40, 65_535, *Key)))

    @staticmethod
    def field(key: Key, payload: bytes) -> bytes:
        return struct.pack("=HHI", key, 0, len(payload)) + payload

    @staticmethod
    def lasts(parts: bytearray) -> bool:
        """Whether a claim that this would be leaves the box the time for this test: a right one may end it at once."""
        at, fields = 0, []
        while at + 8 <= len(parts):
            key, _, length = struct.unpack_from("=HHI", parts, at)
            payload = bytes(parts[at + 8 : at + 8 + length])
            if key in (Key.LIFETIME, Key.GRACE) and len(payload) == 8:
                fields.append((key, int.from_bytes(payload, "little")))
            at += 8 + length
        return all(value >= 1 << 30 or (key == Key.LIFETIME and value == 0) for key, value in fields)


def open_of(pid: int) -> dict[str, str]:
    """Its descriptors; none where a user may not look at a process that changed its user."""
    try:
        return {name: os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    except PermissionError:
        assert os.geteuid() != 0
        return {}


def memory_of(pid: int) -> int:
    """Of its own, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


@pytest.fixture
async def orphan(tmp_path: Path, native_reason: str | None) -> AsyncIterator[tuple[Record, int]]:
    """The record of a box whose node is gone, and its first process as this host sees it."""
    if native_reason:
        pytest.skip(native_reason)
    directory = tmp_path / f"node-{secrets.token_hex(3)}"
    directory.mkdir()
    driver = NativeDriver(directory)
    box = await driver.create("fuzzed", SandboxSpec(), frozenset(), Keeping(600, "note"))
    await sh(box, "mkfifo /tmp/p; echo kept > /root/kept")
    assert box._channel is not None
    pid = box._pid
    box._channel.close()
    (record,) = records(directory / "boxes")
    yield record, pid
    driver = NativeDriver(directory)
    for adopted in (await driver.adopt())[0]:
        adopted.close()
        await adopted.box.destroy(Ending.KILLED)
    await driver.close()


async def adopted(record: Record) -> NativeBox:
    """The box in the hands of a node."""
    driver = NativeDriver(record.directory.parent)
    (found,), _ = await driver.adopt()
    found.close()
    assert isinstance(found.box, NativeBox)
    return found.box


def kept_open() -> list[int]:
    """Descriptors of all kinds to pass along."""
    pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    master, slave = os.openpty()
    return [
        os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC),
        os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        os.memfd_create("fuzz", os.MFD_CLOEXEC),
        master,
        slave,
        *pipe,
    ]


def say_everything(record: Record, pid: int, chance: random.Random, rounds: int) -> None:
    fds = kept_open()
    maker = Maker(chance, fds)
    said = Said(record)
    try:
        for _ in range(rounds):
            data, passed = maker.frame()
            how = chance.random()
            if how < 0.947:
                open_still = said.say(data, passed[:250])
            elif how < 0.9485:  # longer than anything may be, and that is said in full
                length = FRAME_MAX + chance.choice((1, 1000, 1 << 20))
                open_still = said.say(_HEADER.pack(Frame.SPAWN, 1, length) + bytes(length), passed[:3])
            elif how < 0.95:
                open_still = said.say(_HEADER.pack(Frame.SPAWN, 1, 15 << 20) + chance.randbytes(1 << 10) * (15 << 10))
            else:  # from here on nothing of this connection makes sense to it
                words = {
                    0: data[: chance.randrange(len(data))],
                    1: chance.randbytes(chance.randrange(1, 100)),
                    2: b"\xff" * 12,
                }
                said.say(words[chance.randrange(3)], passed[:3])
                open_still = False
            if not open_still:
                said.close()
                said = Said(record)
        for number in range(200):  # what is held is let go of, as each node does
            said.say(pack(Frame.RELEASE, 0, [(Key.RUN, number)]))
        said.say(pack(Frame.SIGNAL, 0, [(Key.SIGNAL, 9)]))
    finally:
        said.close()
        for fd in fds:
            os.close(fd)


async def test_nothing_that_is_said_ends_the_first_process(orphan: tuple[Record, int]) -> None:
    record, pid = orphan
    before, memory = open_of(pid), memory_of(pid)
    # Once beforehand: what the C library and the kernel keep after the first requests is not counted as growth.
    await asyncio.to_thread(say_everything, record, pid, random.Random(SEED), ROUNDS)
    box = await adopted(record)
    ended, output = await sh(box, "cat /root/kept; echo alive")
    assert (ended.code, output) == (0, "kept\nalive\n")
    for _ in range(100):  # children that were killed are still being told of
        now = open_of(pid)
        if now.keys() == before.keys():
            break
        await asyncio.sleep(0.05)
    assert now.keys() == before.keys(), {name: now[name] for name in now.keys() - before.keys()}
    assert memory_of(pid) <= memory + MORE_MEMORY
    assert (await box.destroy(Ending.KILLED)).ending == Ending.KILLED


async def test_a_frame_that_is_too_long_is_answered_and_passed_over(boxes: Boxes) -> None:
    box = await boxes()
    channel = box._channel
    assert channel is not None
    request, answer = channel.ask_soon()
    size = FRAME_MAX + 4097
    channel._unsent.append((memoryview(_HEADER.pack(Frame.SPAWN, request, size) + bytes(size)), []))
    channel._loop.add_writer(channel._sock, channel._writable)
    async with asyncio.timeout(60):
        assert (await answer).number(Key.ERRNO) == errno.EMSGSIZE
    assert (await sh(box, "echo alive"))[1] == "alive\n"


async def test_a_claim_is_taken_as_a_whole_or_not_at_all(boxes: Boxes) -> None:
    box = await boxes(SandboxSpec(lifetime=600))
    channel = box._channel
    assert channel is not None
    lifetime = (Key.LIFETIME, 1)
    for fields in ([(Key.GRACE, 1)], [lifetime, (Key.GRACE, b"1")], [lifetime, (Key.PORT, 1)], [(Key.LIFETIME, b"1")]):
        assert (await channel.ask(Frame.CLAIM, fields)).number(Key.ERRNO) == errno.EBADMSG
    most = (1 << 64) - 1
    assert (await channel.ask(Frame.CLAIM, [(Key.LIFETIME, most), (Key.GRACE, most)])).number(Key.ERRNO) == 0
    assert (await sh(box, "echo alive"))[1] == "alive\n"


# -- before it is ready -------------------------------------------------------------------------------------------


def children() -> set[int]:
    """Of this process, in all its threads."""
    lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
    return {int(pid) for each in lists for pid in each.read_text().split()}


def test_no_plan_hangs_it(native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    chance = random.Random(SEED)
    for _ in range(max(20, ROUNDS // 30)):
        fields: list[tuple[Key, Value]] = [
            (chance.choice(list(Key)), chance.choice((0, 1, chance.randbytes(chance.randrange(100)))))
            for _ in range(chance.randrange(10))
        ]
        body = bytearray(pack(Frame.PLAN, 0, fields))
        for _ in range(chance.randrange(1, 4)):
            body[chance.randrange(_HEADER.size, len(body)) if len(body) > _HEADER.size else 0] ^= 1 << chance.randrange(
                8
            )
        before = children()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
            pid = os.posix_spawn(HELPER, ["sandlot-init"], {}, file_actions=actions)
            theirs.close()
            ours.settimeout(30)
            with suppress(OSError):
                ours.sendmsg([bytes(body)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
            with suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while ours.recv(1 << 16):
                    pass
        for made in (pid, *children() - before - {pid}):  # and what it may have begun
            _, status = os.waitpid(made, 0)
            assert not os.WIFSIGNALED(status), os.WTERMSIG(status)


# -- tars ---------------------------------------------------------------------------------------------------------


def tars(chance: random.Random) -> Iterator[bytes]:
    """Tars of all that there is in one, each damaged in some places."""
    made = []
    for form, trap in (
        (tarfile.USTAR_FORMAT, 0),
        (tarfile.GNU_FORMAT, 0),
        (tarfile.PAX_FORMAT, 0),
        (tarfile.GNU_FORMAT, 1),
    ):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            for name, kind, link in (
                ("d", tarfile.DIRTYPE, ""),
                ("d/file", tarfile.REGTYPE, ""),
                ("d/" + "long" * 40 + "/" + "name" * 15, tarfile.REGTYPE, ""),
                ("link", tarfile.SYMTYPE, "/etc"),
                *([("link/through", tarfile.REGTYPE, "")] if trap else []),
                ("hard", tarfile.LNKTYPE, "d/file"),
                ("up", tarfile.SYMTYPE, "../" * 30),
                ("d/" + "deep/" * 20, tarfile.DIRTYPE, ""),
            ):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, link
                info.size = 700 if kind == tarfile.REGTYPE else 0
                with suppress(ValueError):  # a name that this form has no room for
                    tar.addfile(info, io.BytesIO(b"x" * info.size))
        made.append(out.getvalue())
    while True:
        tar = bytearray(chance.choice(made))
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            block = 512 * chance.randrange(len(tar) // 512)
            at = block + chance.choice((chance.randrange(512), chance.randrange(157), 124, 156, 345))
            what = chance.choices(range(4), (5, 4, 4, 1))[0]
            if what == 0:
                tar[at] = chance.randrange(256)
            elif what == 1:
                tar[at : at + 12] = chance.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"0" * 12))
            elif what == 2:
                words = (
                    b"../../x\0",
                    b"/root/x\0",
                    b"..\0",
                    b"a/../b\0",
                    b"\0\0",
                    b"30 path=../../../root/x\n",
                    b"9999999 p=",
                )
                word = chance.choice(words)
                tar[at : at + len(word)] = word
            else:
                del tar[block : block + chance.choice((1, 512))]
                break
            if chance.random() < 0.95:  # so that the header is believed
                head = tar[block : block + 512]
                head[148:156] = b" " * 8
                tar[block + 148 : block + 156] = b"%06o\0 " % sum(head)
        yield bytes(tar)


async def test_damaged_tars_are_unpacked_below_their_directory_or_not_at_all(boxes: Boxes) -> None:
    box = await boxes()
    await sh(box, "echo kept > /root/kept; ln -s /root /srv")
    before, memory = open_of(box._pid), memory_of(box._pid)
    outside = {change.path for change in await box.changes()}
    chance = random.Random(SEED)
    failed = 0
    made = tars(chance)
    for number in range(max(30, ROUNDS // 10)):
        read, write = os.pipe2(os.O_CLOEXEC)
        feeding = asyncio.create_task(asyncio.to_thread(feed, write, next(made)))
        try:
            async with asyncio.timeout(60):
                await box.unpack(f"/home/u/{number}", read, chance.choice((0, 0, 1000)) if box._many_ids else 0)
        except OSError:
            failed += 1
        finally:
            os.close(read)
            await feeding
    assert 0 < failed < number
    strays = [each.path for each in await box.changes() if not each.path.startswith("/home/u")]
    assert set(strays) - outside - {"/home"} == set()
    assert (await sh(box, "cat /root/kept; ls /root"))[1] == "kept\nkept\n"
    assert open_of(box._pid).keys() == before.keys()
    assert memory_of(box._pid) <= memory + MORE_MEMORY


def feed(fd: int, data: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(fd, "wb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) or 0 :]


# -- who can say anything -----------------------------------------------------------------------------------------

REACH = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def say(word, function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        print(word, "refused")
    else:
        print(word, "REACHED")
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def sockets(path):
    if not [line for line in open(path).read().splitlines()[1:]]:
        raise OSError
for number in range(64):
    say("descriptor", os.open, f"/proc/1/fd/{number}", os.O_RDWR)
say("list", os.listdir, "/proc/1/fd")
say("memory", os.open, "/proc/1/mem", os.O_RDWR)
pidfd = os.pidfd_open(1)
say("pidfd_getfd", call, 438, pidfd, 3, 0)
say("ptrace", call, 101 if os.uname().machine == "x86_64" else 117, 16, 1, 0, 0)
say("sockets of this network", sockets, "/proc/net/unix")
for fd in os.listdir("/proc/self/fd"):
    def peer():
        socket.socket(fileno=os.dup(int(fd))).getpeername()
    say("inherited", peer)
say("kill", os.kill, 1, 15) if os.getuid() else os.kill(1, 9)  # which a first process does not hear from inside
print("done")
"""


@pytest.mark.parametrize("user", [0, 1000])
async def test_no_program_in_the_box_reaches_its_socket(boxes: Boxes, user: int) -> None:
    box = await boxes()
    if user and not box._many_ids:
        pytest.skip("there is only root inside")
    interpreter = "/usr/bin/python3" if user else PYTHON  # /root, where ours may be, is closed to any other
    ended, output = await sh(box, interpreter, "-I", "-S", "-c", REACH, user=user)
    if ended.error:
        pytest.skip(f"there is no {interpreter}")
    words = output.splitlines()
    assert words[-1] == "done", output
    assert len(words) > 60 and not [word for word in words if "REACHED" in word]
    assert (await sh(box, "echo alive"))[1] == "alive\n"
