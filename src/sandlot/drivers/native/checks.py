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
from sandlot.errors import SandlotError

if TYPE_CHECKING:
    from sandlot.drivers.native.box import NativeBox, NativeDriver

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
        return [kernel, *_look(driver, box)]
    finally:
        await box.destroy(Ending.EXIT)


def _look(driver: NativeDriver, box: NativeBox) -> list[Capability]:
    as_root = "run the node as root"
    lines = [
        Capability(
            name="sandboxes", state="kept", found="made one: user, mount, pid, net, ipc, uts, cgroup namespaces"
        ),
        Capability(name="network", state="kept", found="none but the ports that are routed"),
    ]

    def line(name: str, kept: bool, found: str, lost: str, fix: str | None) -> None:
        state = "kept" if kept else "loss"
        lines.append(Capability(name=name, state=state, found=found if kept else lost, fix=None if kept else fix))  # type: ignore[arg-type]

    line("user ids", driver.has_root, "65,536 of its own per sandbox", "one id inside, the node's own outside", as_root)
    mapped = not any("belong to nobody" in loss for loss in box.losses)
    line("file owners", mapped, "kept inside", "files of the image belong to nobody inside", "use Linux 5.19 or newer")
    controllers = driver.controllers
    for name, controller, lost in (
        ("memory limit", "memory", "not kept: one sandbox may use the memory of all"),
        ("pids limit", "pids", ""),
        ("cpu limit", "cpu", "not kept: a quota is refused when asked for by name"),
    ):
        version = controllers.get(controller)
        if version is None and controller == "pids":
            lines.append(Capability(name=name, state="kept", found="by RLIMIT_NPROC, counted in the user namespace"))
        else:
            line(name, version is not None, f"by a cgroup {version}", lost, as_root)
    lines.append(Capability(name="disk limit", state="kept", found="by a tmpfs of its own, in bytes and inodes"))
    found, lost = "by cgroup.kill", "by a walk over the process tree"
    lines.append(Capability(name="killing a command's tree", state="kept", found=found if driver.kill_groups else lost))
    line("system call filter", driver.filtered, "a deny list", "none for this processor", "use x86_64 or aarch64")
    return lines
