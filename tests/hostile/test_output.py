"""Attack: flood the node with output, or forge what it would take for its own.

Must hold: memory of the node is bounded by the cap, the flood is counted whole, ends with its timeout, and bytes of any
kind come out as they went in.
"""

from __future__ import annotations

import resource

from tests.support.hostile import Arena


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def test_an_endless_flood_ends_with_its_timeout_in_bounded_memory(arena: Arena) -> None:
    box = await arena.box()
    before = peak_mb()
    result = await box.run("yes", timeout=2)
    assert result.timed_out
    assert len(result.out.data) <= 1 << 20
    assert result.out.total > 10 << 20
    assert peak_mb() - before < 50


async def test_one_line_of_a_gigabyte_is_counted_and_capped(arena: Arena) -> None:
    box = await arena.box()
    before = peak_mb()
    result = await box.run("head -c 1000000000 /dev/zero | tr '\\0' x", timeout=60)
    assert result.out.total == 1_000_000_000
    assert result.out.truncated
    assert peak_mb() - before < 50


async def test_bytes_come_out_as_they_went_in(arena: Arena) -> None:
    data = bytes(range(256)) * 16 + b"\x1b]0;title\x07\x1b[2J\x1b[31m\r\n\0"
    box = await arena.box()
    await box.write_file("/tmp/data", data)
    result = await box.run("cat /tmp/data; cat /tmp/data >&2")
    assert (result.out.data, result.err.data) == (data, data)
