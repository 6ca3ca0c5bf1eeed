"""Promises of the real sandlot-init on its socket:
1. Before "ready" a bad plan ends it with words that name what is wrong; no namespace was made for it.
2. After "ready" a bad request is answered with an error, and the box lives on.
3. It is static and carries nothing that an image would have to bring.
4. The end of its socket is the end of the box.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterator

import pytest

from sandlot.drivers.native.driver import HELPER
from sandlot.drivers.native.plan import Do, Step
from sandlot.drivers.native.wire import Frame, Key, Operation, Value, pack
from tests.support.native import Boxes, sh


class Helper:
    """The real binary with a blocking socket in our hands."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(10)
        with theirs:
            actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
            self.pid = os.posix_spawn(HELPER, ["sandlot-init"], {}, file_actions=actions)

    def say(self, kind: Frame, *fields: tuple[Key, Value]) -> None:
        self.sock.sendall(pack(kind, 0, fields))

    def hear(self) -> tuple[int, bytes]:
        head = self.sock.recv(12, socket.MSG_WAITALL)
        kind, _, length = struct.unpack("=III", head)
        return kind, self.sock.recv(length, socket.MSG_WAITALL)


@pytest.fixture
def helper() -> Iterator[Helper]:
    made = Helper()
    yield made
    made.sock.close()
    os.waitpid(made.pid, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([(Key.STEP, b"short")], "has a short step"),
        ([(Key.STEP, struct.pack("=IiQ", 1, -1, 0) + b"no end")], "has a step without its strings"),
        ([(Key.JOIN, 3)], "names a descriptor that was not passed"),
        ([(Key.RLIMIT, b"1234")], "has a malformed limit"),
        ([(Key.SECCOMP, b"123")], "has a malformed seccomp filter"),
        ([(Key.ARG, "ls")], "has a field that this helper does not know"),
        ([(Key.HOST_ID, b"")], "has a malformed field"),
        ([(Key.STEP, Step(Do.MKDIR, target="/x").pack())] * 300, "has too many steps"),
    ],
)
def test_a_bad_plan_is_refused_with_what_is_wrong(helper: Helper, fields: list[tuple[Key, Value]], words: str) -> None:
    helper.say(Frame.PLAN, *fields)
    kind, body = helper.hear()
    assert kind == Frame.FAILED
    assert words in body.decode(errors="replace")


def test_a_frame_that_is_no_plan_is_refused(helper: Helper) -> None:
    helper.say(Frame.SPAWN, (Key.ARG, "ls"))
    kind, body = helper.hear()
    assert kind == Frame.FAILED
    assert "unexpected frame" in body.decode(errors="replace")


def test_a_hang_up_before_the_plan_ends_it(helper: Helper) -> None:
    helper.sock.shutdown(socket.SHUT_WR)
    assert helper.sock.recv(1) == b""


async def test_a_bad_request_is_answered_and_the_box_lives_on(boxes: Boxes) -> None:
    box = await boxes()
    channel = box._channel
    assert channel is not None
    bad: list[tuple[Frame, list[tuple[Key, Value]], int]] = [
        (Frame.SPAWN, [], errno.EBADMSG),
        (Frame.SPAWN, [(Key.ARG, b"no end")], errno.EBADMSG),
        (Frame.SPAWN, [(Key.ARG, "true")], errno.EBADMSG),  # without descriptors
        (Frame.OPEN, [(Key.FLAGS, 0)], errno.EBADMSG),
        (Frame.OPEN, [(Key.PATH, "/etc/passwd"), (Key.PORT, 1)], errno.EBADMSG),
        (Frame.LISTEN, [(Key.PORT, 70_000)], errno.EINVAL),
        (Frame.KILL, [(Key.RUN, 12_345)], errno.ESRCH),
        (Frame.FILES, [], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.REMOVE)], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.REMOVE), (Key.PATH, "tmp")], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, 99), (Key.PATH, "/tmp")], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.MOVE), (Key.PATH, "/tmp")], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.LOOK), (Key.PATH, "/tmp")], errno.EBADMSG),  # without a pipe
        (Frame.FILES, [(Key.OPERATION, Operation.STORE), (Key.PATH, "/tmp")], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.WATCH), (Key.PATH, "/tmp")], errno.EBADMSG),
        (Frame.FILES, [(Key.OPERATION, Operation.MAKE), (Key.PATH, "/tmp/" + "x" * 5000)], errno.ENAMETOOLONG),
        (Frame.FILES, [(Key.OPERATION, Operation.MAKE), (Key.PATH, "/tmp"), (Key.PORT, 1)], errno.EBADMSG),
        (Frame.PLAN, [], errno.EBADMSG),
        (Frame.EXITED, [(Key.STATUS, 1)], errno.EBADMSG),
    ]
    for kind, fields, expected in bad:
        answer = await channel.ask(kind, fields)
        assert answer.number(Key.ERRNO) == expected, kind
    ended, output = await sh(box, "echo alive")
    assert (ended.code, output) == (0, "alive\n")


def test_it_is_static() -> None:
    shown = subprocess.run(["ldd", HELPER], capture_output=True, text=True, check=False)
    assert "not a dynamic executable" in shown.stdout + shown.stderr or "statically linked" in shown.stdout
