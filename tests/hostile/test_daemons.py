"""Attack: outlive the command, or the box: fork twice, leave the session and the group, close every descriptor, ignore
every signal that can be ignored, under another name.

Must hold: the daemon dies with its command at a timeout, with a reset, and with its box in any case.
"""

from __future__ import annotations

import os

import pytest

from sandlot.drivers.native.box import NativeBox
from tests.support.hostile import PYTHON, Arena, alive_inside, gone_inside, into_timeout, seen_from_outside

PROMISE = "command trees"

# `stay` keeps the command itself running until its timeout. The two pipes say when the daemon is what it wants to be.
DAEMON = """
import os, signal, sys
ready, done = os.pipe()
if os.fork():
    os.close(done)
    os.read(ready, 1)
    if sys.argv[1] == "stay":
        os.write(1, b"ready")
        signal.pause()
    os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for fd in range(3): os.close(fd)
os.close(ready)
os.write(done, b"x"); os.close(done)
while True: signal.sigtimedwait([], 60)
"""


def command(mark: str, how: str) -> list[str]:
    return [PYTHON, "-I", "-S", "-c", DAEMON, how, mark]


async def test_a_daemon_dies_with_its_command_at_a_timeout(arena: Arena) -> None:
    box = await arena.box()
    assert (await into_timeout(box, command("demon", "stay"))).timed_out
    assert await gone_inside(box, "demon")


@pytest.mark.control
async def test_control_a_command_that_ends_by_itself_leaves_the_daemon_alive(arena: Arena) -> None:
    box = await arena.box()
    assert (await box.run(command("demon", "leave"))).ok
    assert await alive_inside(box, "demon") == 1


@pytest.mark.promise("clean end")
async def test_a_daemon_dies_with_its_box(arena: Arena) -> None:
    box = await arena.box()
    mark = f"demon_{box.id.replace('-', '_')}"
    assert (await box.run(command(mark, "leave"))).ok
    assert (await box.run(f"pkill -TERM -f '[d]{mark[1:]}'")).ok
    outside = seen_from_outside(mark)
    assert len(outside) == 1  # it took no notice of the signal
    await box.close()
    assert not os.path.exists(f"/proc/{outside[0]}")


async def daemon_and_reset(arena: Arena) -> list[int]:
    """The processes outside of a daemon whose box is reset, those that are left of them."""
    box = await arena.box()
    mark = f"demon_{box.id.replace('-', '_')}"
    assert (await box.run([*command(mark, "leave")])).ok
    assert (await box.run("touch /root/left")).ok
    assert len(seen_from_outside(mark)) == 1
    await arena.node.reset(box.id)
    assert not (await box.run("test -e /root/left")).ok
    assert await alive_inside(box, mark) == 0
    return seen_from_outside(mark)


@pytest.mark.promise("clean end")
async def test_a_daemon_does_not_outlive_a_reset(arena: Arena) -> None:
    assert await daemon_and_reset(arena) == []


@pytest.mark.control
@pytest.mark.promise("clean end")
async def test_control_where_a_reset_only_makes_another_box_it_does(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[NativeBox] = []

    async def stays(box: NativeBox, *_: object) -> None:
        left.append(box)

    with monkeypatch.context() as without:
        without.setattr(NativeBox, "destroy", stays)
        assert len(await daemon_and_reset(arena)) == 1
    for box in left:
        await box.destroy()
