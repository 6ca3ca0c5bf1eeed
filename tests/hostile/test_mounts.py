"""Attack: change the mounts: mount, bind, remount, move, unmount a mask, pivot_root, the newer calls, and a chroot that
is left again by the old trick.

Must hold: root inside may do none of it. The filter is one lock, the missing capability the other; each control shows
which of them remains. A chroot is allowed and leads nowhere: what is above it is the box's own root.
"""

from __future__ import annotations

import pytest

from sandlot.drivers.native import seccomp
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, no_filter

PROMISE = "files"

needs_filter = pytest.mark.skipif(not seccomp.program(), reason="there is no filter here")

CHANGE = (
    CALL
    + """
for name in ("a", "a/b", "c"): os.makedirs(f"/tmp/{name}", exist_ok=True)
RDONLY, REMOUNT, BIND, REC, MOVE, DETACH = 1, 32, 4096, 16384, 8192, 2
say("tmpfs", call("mount", b"none", b"/tmp/a", b"tmpfs", 0, None))
say("bind", call("mount", b"/tmp/c", b"/tmp/a", None, BIND, None))
say("remount_usr", call("mount", None, b"/usr", None, REMOUNT | BIND, None))
say("remount_proc_sys", call("mount", None, b"/proc/sys", None, REMOUNT | BIND, None))
say("propagation", call("mount", None, b"/", None, REC | (1 << 18), None))
say("unmask", call("umount2", b"/proc/kallsyms", DETACH))
say("unmount_proc_sys", call("umount2", b"/proc/sys", DETACH))
say("proc", call("mount", b"proc", b"/tmp/c", b"proc", 0, None))
say("open_tree", call("open_tree", -100, b"/tmp", 1))
tree = last
say("move_mount", call("move_mount", tree, b"", -100, b"/tmp/c", 4))
class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]
say("mount_setattr", call("mount_setattr", -100, b"/usr", 0, ctypes.byref(Attributes(clear=RDONLY)), 32))
say("fsopen", call("fsopen", b"tmpfs", 0))
context = last
say("fsconfig", call("fsconfig", context, 6, None, None, 0))
say("fsmount", call("fsmount", context, 0, 0))
say("fspick", call("fspick", -100, b"/", 0))
say("pivot_root", call("pivot_root", b"/tmp/a", b"/tmp/a/b"))
"""
)


async def test_no_mount_is_changed(arena: Arena) -> None:
    box = await arena.box()
    before = (await arena.sh("cat /proc/self/mountinfo", box=box)).stdout
    said = answers((await arena.python(CHANGE, box=box)).stdout)
    assert set(said.values()) == {"EPERM"}
    assert len(said) == 16
    assert (await arena.sh("cat /proc/self/mountinfo", box=box)).stdout == before


@needs_filter
async def test_without_the_filter_the_missing_capability_holds(arena: Arena) -> None:
    box = await arena.box(without=no_filter)
    before = (await arena.sh("cat /proc/self/mountinfo", box=box)).stdout
    said = answers((await arena.python(CHANGE, box=box)).stdout)
    # What depends on a descriptor that was not given answers EBADF or EINVAL, a call of a newer kernel ENOSYS.
    assert set(said.values()) <= {"EPERM", "EBADF", "EINVAL", "ENOSYS", "EACCES"}
    assert (await arena.sh("cat /proc/self/mountinfo", box=box)).stdout == before


@pytest.mark.control
async def test_control_with_both_locks_open_mounts_change(arena: Arena) -> None:
    said = answers((await arena.python(CHANGE, without=all_capabilities)).stdout)
    for way in ("tmpfs", "bind", "unmask", "unmount_proc_sys", "open_tree", "move_mount", "fsopen", "fsconfig"):
        assert said[way] == "ok", (way, said)
    assert said["mount_setattr"] in ("ok", "ENOSYS")


# In a chroot, open the directory above before going deeper, then climb: the classic way out.
CLIMB = """
import os
os.makedirs("/root/jail/deeper", exist_ok=True)
open("/root/top", "w").write("the box's own")
above = os.open("/", os.O_RDONLY)
os.chroot("/root/jail")
os.chroot("/deeper")
os.fchdir(above)
for _ in range(100): os.chdir("..")
os.chroot(".")
print(sorted(os.listdir("/")))
print(open("/root/top").read())
"""


async def test_a_chroot_that_is_left_again_leads_to_the_boxes_own_root(arena: Arena) -> None:
    box = await arena.box()
    listing = (await arena.python("import os; print(sorted(os.listdir('/')))", box=box)).stdout
    assert (await arena.python(CLIMB, box=box)).stdout == f"{listing}the box's own\n"
