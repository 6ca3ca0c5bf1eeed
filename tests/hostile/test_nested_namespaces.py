"""Attack: make a user namespace, in which one has every capability, and use them on overlayfs, the mount calls and
netfilter: by unshare, clone, clone3, setns.

Must hold: by default no namespace is made or entered; the filter refuses it, and where it did not, the box's own limit
of zero user namespaces does. `nested = true` opens that door and no further: masks and read-only mounts stay, netfilter
stays shut, and nothing of the host can be mounted or written.
"""

from __future__ import annotations

import pytest

from sandlot.drivers.native import seccomp
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, nested_namespaces, no_filter

PROMISE = "privileges"

needs_filter = pytest.mark.skipif(not seccomp.program(), reason="there is no filter here")

FLAGS = {
    "user": 0x10000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
}
MAKE = (
    CALL
    + f"FLAGS = {FLAGS!r}\n"
    + """
def apart(function):
    \"""What a child says, so that one success does not help the next try.\"""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, function().encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 100).decode()
    os.waitpid(child, 0)
    return answer
def by_clone(flags):
    answer = call("clone", flags | 17, 0, 0, 0, 0)
    if last == 0: os._exit(0)
    if last > 0: os.waitpid(last, 0)
    return answer
def by_clone3(flags):
    arguments = (ctypes.c_uint64 * 8)(flags, 0, 0, 0, 17)
    answer = call("clone3", arguments, ctypes.sizeof(arguments))
    if last == 0: os._exit(0)
    if last > 0: os.waitpid(last, 0)
    return answer
for name, flag in FLAGS.items():
    user = 0 if name == "user" else FLAGS["user"]
    for extra in {0, user}:
        word = name + ("+user" if extra else "")
        say(f"unshare_{word}", apart(lambda: call("unshare", flag | extra)))
        say(f"clone_{word}", apart(lambda: by_clone(flag | extra)))
        say(f"clone3_{word}", apart(lambda: by_clone3(flag | extra)))
    say(f"setns_{name}", apart(lambda: call("setns", os.open(f"/proc/self/ns/{name}", os.O_RDONLY), flag)))
say("open_first", attempt(os.open, "/proc/1/ns/mnt", os.O_RDONLY))
"""
)


async def test_no_namespace_is_made_or_entered(arena: Arena) -> None:
    said = answers((await arena.python(MAKE)).stdout)
    assert said.pop("open_first") == "EACCES"
    assert {answer for word, answer in said.items() if not word.startswith("clone3")} == {"EPERM"}
    assert {answer for word, answer in said.items() if word.startswith("clone3")} == {"ENOSYS"}
    assert len(said) == 3 * 13 + 7


@needs_filter
async def test_without_the_filter_there_are_none_left_to_make(arena: Arena) -> None:
    said = answers((await arena.python(MAKE, without=no_filter)).stdout)
    assert "ok" not in {answer for word, answer in said.items() if not word.startswith("setns")}
    assert {said["unshare_user"], said["clone_user"], said["clone3_user"], said["unshare_net+user"]} == {"ENOSPC"}


@pytest.mark.control
@pytest.mark.parametrize("removed", ["both locks", "nested"])
async def test_control_with_both_locks_open_namespaces_are_made(arena: Arena, removed: str) -> None:
    words = {"without": nested_namespaces} if removed == "both locks" else {"nested": True}
    said = answers((await arena.python(MAKE, **words)).stdout)
    for way in ("unshare", "clone", "clone3"):
        for kind in ("user", "mnt+user", "pid+user", "net+user", "ipc+user", "uts+user", "cgroup+user"):
            assert said[f"{way}_{kind}"] == "ok", (way, kind)


# With every capability of a namespace of its own: what has been used for holes in the kernel, and ways back out.
USE = (
    CALL
    + """
import socket
say("unshare", call("unshare", 0x10000000 | 0x00020000 | 0x40000000))
if last == 0:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write("0 0 1")
    open("/proc/self/gid_map", "w").write("0 0 1")
for name in ("l", "u", "w", "m"): os.makedirs(f"/tmp/{name}", exist_ok=True)
say("tmpfs", call("mount", b"none", b"/tmp/m", b"tmpfs", 0, None))
say("overlay", call("mount", b"o", b"/tmp/m", b"overlay", 0, b"lowerdir=/tmp/l:/tmp/w,userxattr"))
say("fsopen", call("fsopen", b"tmpfs", 0))
say("fsconfig", call("fsconfig", last, 1, b"size", b"1M", 0))
def netlink(protocol): socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).bind((0, 0))
say("route", attempt(netlink, 0))
for name, protocol in (("netfilter", 12), ("xfrm", 6), ("generic", 16), ("audit", 9)):
    say(name, attempt(netlink, protocol))
say("packet", attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW))
say("old_packet", attempt(socket.socket, socket.AF_INET, 10))
raw = lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).setsockopt(0, 64, b"\\0" * 200)
say("iptables", attempt(raw))
say("unmask", call("umount2", b"/proc/kallsyms", 2))
say("unmask_sys", call("umount2", b"/proc/sys", 2))
say("remount_usr", call("mount", None, b"/usr", None, 32 | 4096, None))
say("remount_proc_sys", call("mount", None, b"/proc/sys", None, 32 | 4096, None))
say("fresh_sys", call("mount", b"sysfs", b"/tmp/m", b"sysfs", 0, None))
say("device", attempt(os.mknod, "/tmp/device", 0o20666, os.makedev(1, 1)))
say("block", call("mount", b"/dev/vda", b"/tmp/m", b"ext4", 0, None))
child = os.fork()
if call("unshare", 0x20000000) == "ok" and os.fork() == 0:  # a proc of its own needs a pid namespace of its own
    say("fresh_proc", call("mount", b"proc", b"/tmp/m", b"proc", 0, None))
while attempt(os.wait) == "ok": pass  # what they say comes before the end
"""
)
BACK_OUT = ("unmask", "unmask_sys", "remount_usr", "remount_proc_sys", "fresh_sys", "fresh_proc", "device", "block")
SHUT = ("netfilter", "xfrm", "generic", "audit", "packet", "old_packet", "iptables")


async def test_by_default_there_is_nothing_to_use(arena: Arena) -> None:
    said = answers((await arena.python(USE)).stdout)
    assert said.pop("route") == "ok"
    assert "ok" not in said.values(), said


async def test_nested_opens_mounts_and_no_way_back_out(arena: Arena) -> None:
    result = await arena.python(USE, nested=True)
    said = answers(result.stdout)
    assert (said["unshare"], said["tmpfs"], said["fsopen"], said["fsconfig"]) == ("ok",) * 4, result.stderr
    assert {said[way] for way in BACK_OUT} <= {"EPERM", "EINVAL", "EACCES", "ENOENT"}, said
    assert "ok" not in {said[way] for way in SHUT}, said


@pytest.mark.control
@needs_filter
async def test_control_without_the_filter_a_nested_root_reaches_netfilter(arena: Arena) -> None:
    said = answers((await arena.python(USE, nested=True, without=no_filter)).stdout)
    assert (said["generic"], said["packet"]) == ("ok", "ok")
    assert said["netfilter"] in ("ok", "EPROTONOSUPPORT")  # the second: this kernel has none
    assert {said[way] for way in BACK_OUT} <= {"EPERM", "EINVAL", "EACCES", "ENOENT"}, said


async def test_nested_lets_the_usual_tool_work(arena: Arena) -> None:
    result = await arena.sh(
        "unshare --user --map-root-user --mount sh -c 'mount -t tmpfs none /mnt && echo in'", nested=True
    )
    assert result.stdout == "in\n", result.stderr
