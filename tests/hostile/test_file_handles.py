"""Attack: open a file of the host by its handle, past every path: open_by_handle_at on the file system of /usr, with
the handle of its root directory guessed (inode 2), as "shocker" did.

Must hold: no handle is made or opened. The filter is one lock; without it the kernel asks for a right of the host, or
for a handle below the mount: the control shows that handles are made and that a guessed one still opens nothing.
"""

from __future__ import annotations

import pytest

from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, no_filter

PROMISE = "files"

HANDLES = (
    CALL
    + """
import struct
where = os.open("/usr", os.O_RDONLY)
own = os.open("/tmp", os.O_RDONLY)
buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + b"\\0" * 128)
mount = ctypes.c_int()
say("name", call("name_to_handle_at", -100, b"/usr/bin", buffer, ctypes.byref(mount), 0))
if last == 0:
    say("open_named", call("open_by_handle_at", where, buffer, os.O_RDONLY))
for inode in (1, 2, 5, 32, 64, 96, 128, 256, 1024, 2048):
    for generation in (0, 1):
        for kind, body in ((1, struct.pack("II", inode, generation)), (0x81, struct.pack("QI", inode, generation))):
            guess = ctypes.create_string_buffer(struct.pack("Ii", len(body), kind) + body)
            say(f"guess_{inode}_{generation}_{kind}", call("open_by_handle_at", where, guess, os.O_RDONLY))
            if last >= 0: print("found", os.listdir(last))
"""
)


async def test_no_handle_is_made_or_opened(arena: Arena) -> None:
    said = answers((await arena.python(HANDLES)).stdout)
    assert set(said.values()) == {"EPERM"}
    assert len(said) == 41


@pytest.mark.control
@pytest.mark.parametrize("removed", ["the filter", "filter and missing capabilities"])
async def test_control_without_the_filter_handles_are_made_and_guesses_still_fail(arena: Arena, removed: str) -> None:
    without = no_filter if removed == "the filter" else all_capabilities
    result = await arena.python(HANDLES, without=without)
    said = answers(result.stdout)
    assert said["name"] == "ok"
    assert said["open_named"] == "EPERM" if removed == "the filter" else "open_named" in said
    assert "ok" not in {answer for word, answer in said.items() if word.startswith("guess")}, result.stdout
