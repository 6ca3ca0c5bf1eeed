"""Attack: change the clock: settimeofday, clock_settime, adjtimex, clock_adjtime, a time namespace, /dev/rtc.

Must hold: the host's clock is read and never set, and the box has no clock of its own. The filter is one lock; the
other is a capability in the host's own user namespace, which nothing inside ever has: the control shows it alone.
"""

from __future__ import annotations

import pytest

from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, no_filter

PROMISE = "privileges"

SET = (
    CALL
    + """
import struct, time
now = struct.pack("qq", int(time.time()), 0)  # were it taken, the clock would be right to a second
say("settimeofday", call("settimeofday", now, None))
say("clock_settime", call("clock_settime", 0, now))
nothing = ctypes.create_string_buffer(struct.pack("I", 0x4000), 208)  # ADJ_TICK with a tick of zero: never valid
say("adjtimex", call("adjtimex", nothing))
say("clock_adjtime", call("clock_adjtime", 0, nothing))
say("time_namespace", call("unshare", 0x80))
say("offsets", attempt(os.open, "/proc/self/timens_offsets", os.O_WRONLY))
say("rtc", attempt(os.open, "/dev/rtc0", os.O_RDONLY))
"""
)
CLOCKS = ("settimeofday", "clock_settime", "adjtimex", "clock_adjtime")


async def test_the_clock_cannot_be_set(arena: Arena) -> None:
    said = answers((await arena.python(SET)).stdout)
    assert {said[way] for way in (*CLOCKS, "time_namespace")} == {"EPERM"}
    assert said["rtc"] == "ENOENT"


@pytest.mark.control
@pytest.mark.parametrize("removed", ["the filter", "filter and missing capabilities"])
async def test_control_without_the_filter_the_host_still_refuses(arena: Arena, removed: str) -> None:
    without = no_filter if removed == "the filter" else all_capabilities
    said = answers((await arena.python(SET, without=without)).stdout)
    assert {said[way] for way in CLOCKS} == {"EPERM"}
    opened = ("ok", "EINVAL")  # the second: this kernel has no time namespaces
    assert (said["time_namespace"] in opened) is (removed == "filter and missing capabilities")
    read = CALL + "say('read', call('adjtimex', ctypes.create_string_buffer(208)))"
    assert (await arena.python(read, without=without)).stdout == "read ok\n"  # and the call itself is there
