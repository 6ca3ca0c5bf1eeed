"""Attack: fill the kernel's keyrings until there is no quota left, or read keys that are not one's own: those of the
node's session, of its user, of everybody in /proc/keys.

Must hold: no key call is answered, no key is listed.
"""

from __future__ import annotations

import pytest

from tests.support.hostile import Arena, no_filter

PROMISE = "system call filter"

# Into this process's own keyring, which ends with it.
TAKE = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
add = {"x86_64": 248, "aarch64": 217}[platform.machine()]
count = 0
while count < 5000 and libc.syscall(add, b"user", b"key%d" % count, b"x" * 8, 8, -2) >= 0: count += 1
hold(count, errno.errorcode[ctypes.get_errno()])
"""
READ = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
_, request, keyctl = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
buffer = ctypes.create_string_buffer(4096)
for ring in (-1, -2, -3, -4, -5):  # thread, process, session, user, user session: describe it, read what it holds
    for operation in (6, 11):
        answer = libc.syscall(keyctl, operation, ring, buffer, 4096)
        print("read" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
print("found" if libc.syscall(request, b"user", b"any", None, 0) >= 0 else errno.errorcode[ctypes.get_errno()])
"""


async def test_no_key_is_made(arena: Arena) -> None:
    async with arena.holding(TAKE, box=await arena.box()) as said:
        assert said == "0 EPERM"


async def test_no_keyring_is_read(arena: Arena) -> None:
    assert set((await arena.python(READ)).stdout.split()) == {"EPERM"}


async def test_none_is_listed(arena: Arena) -> None:
    assert (await arena.sh("cat /proc/keys /proc/key-users | wc -c")).stdout == "0\n"


@pytest.mark.control
async def test_control_without_the_filter_keyrings_are_read(arena: Arena) -> None:
    assert "read" in (await arena.python(READ, without=no_filter)).stdout.split()


@pytest.mark.control
async def test_control_without_the_filter_keys_are_made(arena: Arena) -> None:
    async with arena.holding(TAKE, box=await arena.box(without=no_filter)) as said:
        count, error = said.split()
        assert (error, int(count) > 0) == ("EDQUOT", True)
        if arena.keeps("kernel objects"):  # the second lock: the quota is the box's own user's
            async with arena.holding(TAKE, box=await arena.box(without=no_filter)) as neighbour:
                # Not to the key: the kernel gives back those of processes that ended when it comes to it.
                assert int(neighbour.split()[0]) > int(count) // 2
