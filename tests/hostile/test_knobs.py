"""Attack: turn a knob of the host through /proc or /sys: sysrq, core_pattern, modprobe, uevent_helper, binfmt_misc,
release_agent of a cgroup, memory and power settings.

Must hold: no file of /proc/sys, /sys or the rest of /proc outside of processes opens for writing, except those that
show /dev/null; no cgroup file system is inside. Opened is counted as turned, so that a hole does no harm. The first
lock are read-only mounts; without them the ids hold: the host's knobs belong to a user who does not exist inside.
release_agent (CVE-2022-0492) is kept by the kernel; its control is the host's root, who may open it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandlot.drivers.native.plan import Plan
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, open_proc

PROMISE = "privileges"

OPEN_ALL = """
import os
seen = 0
null = os.stat("/dev/null").st_rdev
for top in ("/proc", "/sys"):
    for directory, names, files in os.walk(top):
        if directory == "/proc":
            names[:] = [name for name in names if not name.isdigit() and name not in ("self", "thread-self")]
        for path in (f"{directory}/{file}" for file in files):
            seen += 1
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            if os.fstat(fd).st_rdev != null and not os.path.islink(path):
                print(path)
            os.close(fd)
print(seen)
"""


def all_open(plan: Plan) -> Plan:
    return open_proc(all_capabilities(plan))


# What a box's own namespaces keep for themselves, and what anybody may open though not use.
OWN = ("/proc/sys/net/", "/proc/sys/user/", "/proc/sys/kernel/", "/proc/sys/fs/mqueue/", "/proc/pressure/")
HOSTS = ("core_pattern", "modprobe", "hotplug", "poweroff_cmd", "core_pipe_limit", "panic", "sysrq", "kptr_restrict")


async def test_no_file_of_proc_or_sys_opens_for_writing(arena: Arena) -> None:
    *opened, seen = (await arena.python(OPEN_ALL)).stdout.split()
    assert opened == []
    assert int(seen) > 1000


@pytest.mark.control
async def test_control_with_proc_open_a_box_turns_its_own_knobs_only(arena: Arena) -> None:
    *opened, _ = (await arena.python(OPEN_ALL, without=all_open)).stdout.split()
    assert "/proc/sys/net/ipv4/ip_forward" in opened
    assert all(path.startswith(OWN) for path in opened), opened
    assert not [path for path in opened if Path(path).name in HOSTS]


KNOBS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj",
    "/sys/kernel/uevent_helper",
    "/sys/power/state",
)


async def test_the_well_known_ones_stay_shut_whatever_is_removed(arena: Arena) -> None:
    program = CALL + "for path in sys.argv[1:]: say(path, attempt(os.open, path, os.O_WRONLY))"
    for without in (None, open_proc, all_open):
        said = answers((await arena.python(program, *KNOBS, without=without)).stdout)
        assert said.keys() == set(KNOBS)
        assert set(said.values()) <= {"EROFS", "EACCES", "ENOENT"}, said


# Looks for a cgroup that can be told which program of the host to start.
RELEASE_AGENT = (
    CALL
    + """
import ctypes
say("unshare", call("unshare", 0x10000000 | 0x00020000 | 0x02000000))  # user, mount, cgroup
try:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {sys.argv[1]} 1")
    open("/proc/self/gid_map", "w").write(f"0 {sys.argv[1]} 1")
except OSError:
    pass
def lift(path):
    with open(path, "w") as file: file.write("max")
os.makedirs("/tmp/cg", exist_ok=True)
for word in ("memory", "pids", "cpu", "cpu,cpuacct", "rdma", "devices", "freezer", "blkio", "none,name=sandlot-test"):
    for kind, data in (("cgroup", word), ("cgroup", word + ",release_agent=/bin/true"), ("cgroup2", "")):
        answer = call("mount", b"none", b"/tmp/cg", kind.encode(), 0, data.encode())
        say(f"mount_{kind}_{data}", answer)
        if answer == "ok":
            for directory, _, files in os.walk("/tmp/cg"):
                for name in set(files) & {"release_agent", "devices.allow"}:
                    say(f"open_{kind}_{directory}/{name}", attempt(os.open, f"{directory}/{name}", os.O_WRONLY))
                for name in set(files) & {"memory.max", "pids.max", "cpu.max"}:
                    say(f"open_{kind}_{directory}/{name}", attempt(lift, f"{directory}/{name}"))
            call("umount2", b"/tmp/cg", 2)
"""
)


async def test_no_cgroup_file_system_is_inside(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.sh("ls -A /sys/fs/cgroup", box=box)).stdout == ""
    said = answers((await arena.python(RELEASE_AGENT, "0", box=box)).stdout)
    assert set(said.values()) == {"EPERM"}


async def test_a_nested_namespace_does_not_get_at_release_agent(arena: Arena) -> None:
    said = answers((await arena.python(RELEASE_AGENT, "0", nested=True)).stdout)
    assert said.pop("unshare") == "ok"
    assert not [word for word, answer in said.items() if word.startswith("open") and answer == "ok"]
    assert not [word for word, answer in said.items() if "release_agent=" in word and answer == "ok"]


@pytest.mark.control
@pytest.mark.skipif(os.geteuid() != 0, reason="the host's root is who may")
async def test_control_the_hosts_root_may_open_it(arena: Arena) -> None:
    agents = list(Path("/sys/fs/cgroup").glob("*/release_agent"))
    if not agents:
        pytest.skip("this host has no cgroup v1")
    for agent in agents:
        os.close(os.open(agent, os.O_WRONLY))
