"""Attack: load and reach seldom used network code by a socket: of every family, type and protocol, by socketpair, by
netlink, by the options through which netfilter's tables are written.

Must hold: Unix, IPv4, IPv6 and netlink's routes, statistics and device events can be had, and nothing else. The control
opens some of the others by the same program without the filter.
"""

from __future__ import annotations

import pytest

from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, no_filter

PROMISE = "system call filter"

# Stream and datagram protocols that a socket of the internet's can be by its third word: SMC, MPTCP, UDP-Lite, and a
# number whose half that the kernel reads is SMC's.
OTHERS = ((1, 256), (1, 262), (2, 136), (2, 256), (1, 1 << 32 | 256))
EVERY = (
    CALL
    + f"OTHERS = {OTHERS}"
    + """
for family in range(64):
    for kind in range(1, 11):
        say(f"{family}_{kind}_0", call("socket", family, kind, 0))
        if last >= 0: os.close(last)
        pair = (ctypes.c_int * 2)()
        say(f"pair_{family}_{kind}", call("socketpair", family, kind, 0, pair))
        for fd in pair if last >= 0 else (): os.close(fd)
for family in (2, 10):
    for kind, protocol in ((1, 132), (5, 132), (6, 33), (1, 33), (2, 115), (1, 6), (2, 17), *OTHERS):
        say(f"{family}_{kind}_{protocol}", call("socket", family, kind, protocol))
        if last >= 0: os.close(last)
for protocol in range(32):
    say(f"netlink_{protocol}", call("socket", 16, 3, protocol))
    if last >= 0: os.close(last)
call("socket", 2, 1, 0)
sock = last
for level in (0, 41):
    for option in (64, 96, 128):
        say(f"option_{level}_{option}", call("setsockopt", sock, level, option, b"\\0" * 100, 100))
"""
)
ALLOWED = {
    *(f"1_{kind}_0" for kind in (1, 2, 3, 5)),
    *(f"pair_1_{kind}" for kind in (1, 2, 3, 5)),
    *("2_1_0", "2_2_0", "10_1_0", "10_2_0", "2_1_6", "2_2_17", "10_1_6", "10_2_17"),
    *(f"16_{kind}_0" for kind in (2, 3)),
    *(f"netlink_{protocol}" for protocol in (0, 4, 15)),
}


async def test_only_the_usual_sockets_can_be_had(arena: Arena) -> None:
    said = answers((await arena.python(EVERY)).stdout)
    assert {word for word, answer in said.items() if answer == "ok"} <= ALLOWED
    assert {said[word] for word in ("1_1_0", "2_1_0", "2_2_0", "16_3_0", "netlink_0", "pair_1_1")} == {"ok"}
    kinds = {word for word in said if word.split("_")[0].isdigit() and int(word.split("_")[0]) not in (1, 2, 10, 16)}
    assert {said[word] for word in kinds} == {"EAFNOSUPPORT"}
    assert {said[f"netlink_{protocol}"] for protocol in range(32) if protocol not in (0, 4, 15)} == {"EPROTONOSUPPORT"}
    assert {answer for word, answer in said.items() if word.startswith("option")} == {"EPERM"}
    others = {f"{family}_{kind}_{protocol}" for family in (2, 10) for kind, protocol in OTHERS}
    assert {said[word] for word in others} == {"EPROTONOSUPPORT"}


async def test_every_profile_keeps_to_that(arena: Arena) -> None:
    for words in ({"profile": "strict"}, {"profile": "debug"}, {"nested": True}):
        said = answers((await arena.python(EVERY, **words)).stdout)
        assert {word for word, answer in said.items() if answer == "ok"} <= ALLOWED, words


@pytest.mark.control
async def test_control_without_the_filter_others_are_had(arena: Arena) -> None:
    said = answers((await arena.python(EVERY, without=no_filter)).stdout)
    assert said["netlink_16"] == "ok"  # every kernel has the generic family
    assert said["option_0_64"] in ("EPERM", "ENOPROTOOPT")
    assert said["2_2_136"] == "ok"  # UDP-Lite comes with IPv4 (SMC and MPTCP only where they were built)
    said = answers((await arena.python(EVERY, without=all_capabilities)).stdout)
    assert (said["17_3_0"], said["2_10_0"]) == ("ok", "ok")  # AF_PACKET, under its name and under the old one
