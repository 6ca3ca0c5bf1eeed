"""Attack: learn about the host what helps to attack it: the kernel's memory and symbols, its keys and log, processes of
others, the node's environment and paths, other boxes.

Must hold: these are hidden. Not hidden: the kernel's version and command line, how busy the host is, how much memory it
has, what its /usr holds, where a volume lies on the host (/proc/self/mountinfo).
"""

from __future__ import annotations

import os
import platform

import pytest

from tests.support.hostile import Arena, open_proc

PROMISE = "files"

HIDDEN = ("kcore", "kallsyms", "keys", "key-users", "timer_list", "sched_debug", "kmsg", "config.gz", "latency_stats")
READ = """
import sys
for path in sys.argv[1:]:
    try:
        with open(path, "rb") as file: print(path, len(file.read(4096)))
    except OSError as error:
        print(path, 0)
"""


async def test_what_proc_tells_of_the_kernel_is_hidden(arena: Arena) -> None:
    result = await arena.python(READ, *(f"/proc/{name}" for name in HIDDEN))
    assert {line.split()[1] for line in result.stdout.splitlines()} == {"0"}


@pytest.mark.control
async def test_control_with_proc_open_some_of_it_is_read(arena: Arena) -> None:
    result = await arena.python(READ, "/proc/keys", "/proc/kallsyms", "/proc/kcore", "/proc/kmsg", without=open_proc)
    lengths = {line.split()[0].rpartition("/")[2]: int(line.split()[1]) for line in result.stdout.splitlines()}
    assert lengths["kallsyms"] > 0
    assert (lengths["kcore"], lengths["kmsg"]) == (0, 0)  # these belong to the host's root


async def test_files_of_the_host_that_only_its_root_reads_are_not_read(arena: Arena) -> None:
    paths = (
        "/sys/class/dmi/id/product_uuid",
        "/sys/class/dmi/id/board_serial",
        "/sys/firmware/acpi/tables/DSDT",
        "/sys/kernel/debug/x86/pti_enabled",
        "/sys/kernel/tracing/trace",
        "/sys/devices/virtual/powercap/intel-rapl/intel-rapl:0/energy_uj",
        "/proc/slabinfo",
        "/proc/vmallocinfo",
        "/proc/kpageflags",
        "/proc/pagetypeinfo",
        "/etc/shadow",
        "/etc/machine-id",
        "/usr/../etc/shadow",
    )
    result = await arena.python(READ, *paths)
    assert {line.split()[1] for line in result.stdout.splitlines()} == {"0"}, result.stdout


async def test_no_name_of_the_node_or_of_another_box_is_seen(arena: Arena) -> None:
    os.environ["SANDLOT_TEST_SECRET"] = "of-the-node"
    try:
        neighbour = await arena.box(hostname="neighbour", env={"SECRET": "of-the-neighbour"})
        await arena.sh("echo of-the-neighbour > /tmp/of-the-neighbour", box=neighbour)
        box = await arena.box()
        await neighbour.run("echo of-the-neighbour > /dev/shm/of-the-neighbour")
        search = "env; hostname; cat /proc/*/cmdline /proc/*/environ; ls / /tmp /dev/shm /run; cat /proc/self/mountinfo"
        seen = (await arena.sh(search, box=box)).stdout
    finally:
        del os.environ["SANDLOT_TEST_SECRET"]
    for word in ("of-the-node", "of-the-neighbour", "neighbour", neighbour.id):
        assert word not in seen, word
    assert f"\n{platform.node()}\n" not in seen


async def test_its_cgroups_show_no_path_of_the_host(arena: Arena) -> None:
    shown = [line.split(":")[2] for line in (await arena.sh("cat /proc/self/cgroup")).stdout.splitlines()]
    # In a hierarchy in which the node may make nothing the box is where the node is, seen from there: `/`.
    assert all(path == "/" or path.startswith("/runs/run-") for path in shown), shown
