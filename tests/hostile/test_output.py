"""Attack: flood the node with output: `yes` until the timeout, one line of a gigabyte, both streams at once, a child
that writes on after its command; forge what a terminal or the node would take for its own.

Must hold: the node's memory is bounded by the cap, the flood is counted whole and ends with its timeout, and bytes of
any kind come out as they went in.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sandlot.api import Limits
from tests.support.hostile import Arena, into_timeout

PROMISE = "output limit"

GIGABYTE = "head -c 1000000000 /dev/zero | tr '\\0' x"
CAP = 64 << 20


class Growth:
    """How many MB this process grew at most since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before = self.read("VmRSS")

    def read(self, field: str) -> float:
        found = re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) / 1024

    def peak(self) -> float:
        return self.read("VmHWM") - self.before


async def test_an_endless_flood_ends_with_its_timeout_in_bounded_memory(arena: Arena) -> None:
    box = await arena.box()
    growth = Growth()
    result = await into_timeout(box, "yes | tee /dev/stderr", enough=2 << 20)
    assert result.timed_out
    assert len(result.out.data) == len(result.err.data) == 1 << 20
    assert min(result.out.total, result.err.total) > 1 << 20
    assert growth.peak() < 30


async def test_one_line_of_a_gigabyte_is_counted_and_capped(arena: Arena) -> None:
    box = await arena.box()
    growth = Growth()
    result = await box.run(GIGABYTE, timeout=300)
    assert result.out.total == 1_000_000_000
    assert (len(result.out.data), set(result.out.data)) == (1 << 20, {ord("x")})
    assert growth.peak() < 30


@pytest.mark.control
async def test_control_with_the_largest_cap_it_does_take_that_much_memory(arena: Arena) -> None:
    box = await arena.box(limits=Limits(output=CAP))
    growth = Growth()
    result = await box.run("head -c 100000000 /dev/zero | tr '\\0' x", timeout=60)
    assert (len(result.out.data), result.out.total) == (CAP, 100_000_000)
    assert growth.peak() > CAP >> 20


async def test_a_child_that_writes_on_does_not_hold_up_its_command(arena: Arena) -> None:
    box = await arena.box()
    result = await box.run("yes & echo done >&2", timeout=60)
    assert (result.ok, result.timed_out, result.stderr) == (True, False, "done\n")
    assert len(result.out.data) <= 1 << 20
    assert (await box.run("echo lives")).stdout == "lives\n"


async def test_bytes_come_out_as_they_went_in(arena: Arena) -> None:
    forged = b"\x1b]0;title\x07\x1b]52;c;AAAA\x07\x1b[2J\x1b[31m\x1b[6n\r\n\0\xff\xfe\x9b31m\x90q\x9c\xe2\x80\xae"
    data = bytes(range(256)) * 16 + forged
    box = await arena.box()
    await box.write_file("/tmp/data", data)
    result = await box.run("cat /tmp/data; cat /tmp/data >&2")
    assert (result.out.data, result.err.data) == (data, data)
    assert type(result).model_validate_json(result.model_dump_json()) == result  # over HTTP too
