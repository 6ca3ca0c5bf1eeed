"""What this host keeps of what the native driver promises, found by making a box and looking at it.

`probe` tries; `advice` (pure) turns what failed and a few kernel settings into the command that fixes it. Reading a
setting alone would not do: a container's seccomp filter or an AppArmor profile refuses without any setting saying so.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sandlot.api import Capability, Ending, SandboxSpec
from sandlot.drivers.native.promises import promises
from sandlot.errors import SandlotError

if TYPE_CHECKING:
    from sandlot.drivers.native.driver import NativeDriver

# Kernel settings that refuse what a box needs.
_SETTINGS = (
    "user/max_user_namespaces",
    "user/max_net_namespaces",
    "user/max_mnt_namespaces",
    "user/max_pid_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)


def read_settings(root: Path = Path("/proc/sys")) -> dict[str, str]:
    """The settings above that this kernel has."""
    return {name: (root / name).read_text().strip() for name in _SETTINGS if (root / name).exists()}


def in_container() -> bool:
    """Whether this process seems to run in somebody's container."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ


def advice(failure: str, settings: Mapping[str, str], root: bool, container: bool) -> str:
    """The command that most likely makes the step in `failure` (the helper's words) work on this host."""
    for name, value in settings.items():
        if name.startswith("user/max_") and value == "0":
            return f"`sysctl -w {name.replace('/', '.')}=65536` (as root; it is 0)"
    if not root and settings.get("kernel/unprivileged_userns_clone") == "0":
        return "`sysctl -w kernel.unprivileged_userns_clone=1` (as root), or run the node as root"
    if not root and settings.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (as root), or give sandlot-init an AppArmor "
            "profile with `userns,`, or run the node as root"
        )
    if "overlay" in failure and "nobody" in failure:
        return "use Linux 5.19 or newer (5.11 will do, with a loss), or run the node as an ordinary user"
    if "overlay" in failure and "5.11" in failure:
        return (
            "use Linux 5.11 or newer; an older kernel of Debian's allows it after "
            "`modprobe -r overlay && modprobe overlay permit_mounts_in_userns=1` (as root)"
        )
    if "mount /proc" in failure or "mount /sys" in failure:
        return "an outer container masks /proc: start it with `--security-opt systempaths=unconfined`"
    if "user namespaces are refused" in failure or "mount" in failure:
        if container:
            return (
                "start the outer container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
            )
        return "a security module or seccomp filter refuses user namespaces here: allow them, or run elsewhere"
    if "cgroup" in failure:
        return "check that /sys/fs/cgroup is writable and not at its limit of descendants"
    return "see the kernel log (`dmesg | tail`) for the reason"


async def probe(driver: NativeDriver) -> list[Capability]:
    """Make a box with this driver, look, end it; a line per promise."""
    kernel = Capability(name="kernel", state="kept", found=f"Linux {platform.release()} {platform.machine()}")
    try:
        box = await driver.create("probe", SandboxSpec())
    except SandlotError as error:
        fix = advice(error.message, read_settings(), driver.has_root, in_container())
        if "sandlot-init" in error.message and error.hint:
            fix = error.hint
        return [kernel, Capability(name="sandboxes", state="impossible", found=error.message, fix=fix)]
    try:
        await driver.try_out(box)
    finally:
        await box.destroy(Ending.EXIT)
    made = "made one: user, mount, pid, net, ipc, uts, cgroup namespaces"
    return [kernel, Capability(name="sandboxes", state="kept", found=made), *promises(driver.facts)]
