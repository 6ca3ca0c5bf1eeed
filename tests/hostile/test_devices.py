"""Attack: reach a device of the host: /dev/mem, kmsg, kvm, fuse, loop, disks, tun; by name, by mknod, by a file that is
uploaded, by one that lies in a volume.

Must hold: /dev has the usual harmless ones and no other; none can be made; one in a volume opens as nothing. mknod is
refused by the kernel in every user namespace, with all capabilities too; of the volume the mount's `nodev` is the lock,
and without it the same device opens.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.drivers.native.plan import NOSUID
from sandlot.errors import InvalidRequest
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities, volumes_with

PROMISE = "privileges"

USUAL = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr"}
LINKS = {"fd", "stdin", "stdout", "stderr"}
DEVICES = {
    "mem": ("c", 1, 1),
    "port": ("c", 1, 4),
    "kmsg": ("c", 1, 11),
    "console": ("c", 5, 1),
    "tty0": ("c", 4, 0),
    "rtc": ("c", 10, 135),
    "misc": ("c", 10, 1),
    "fuse": ("c", 10, 229),
    "tun": ("c", 10, 200),
    "kvm": ("c", 10, 232),
    "loop-control": ("c", 10, 237),
    "vhost-net": ("c", 10, 238),
    "userfaultfd": ("c", 10, 126),
    "dri": ("c", 226, 0),
    "loop0": ("b", 7, 0),
    "sda": ("b", 8, 0),
    "vda": ("b", 254, 0),
    "nvme": ("b", 259, 0),
}
MAKE = (
    CALL
    + f"DEVICES = {DEVICES!r}\n"
    + """
import stat
for place in ("/root", "/dev", "/dev/shm", *sys.argv[1:]):
    for name, (kind, major, minor) in DEVICES.items():
        mode = 0o666 | (stat.S_IFCHR if kind == "c" else stat.S_IFBLK)
        say(f"{place}_{name}", attempt(os.mknod, f"{place}/made-{name}", mode, os.makedev(major, minor)))
for name in DEVICES:
    say(name, attempt(os.open, f"/dev/{name}", os.O_RDONLY))
"""
)


async def test_the_usual_devices_are_there_and_no_other(arena: Arena) -> None:
    box = await arena.box()
    assert set((await arena.sh("ls /dev", box=box)).stdout.split()) == USUAL
    for name in USUAL - LINKS:
        assert (await arena.sh(f"test -e /dev/{name}", box=box)).ok, name
    assert (await arena.sh("head -c 3 /dev/urandom | wc -c; echo x > /dev/null; echo x > /dev/full", box=box)).stdout
    pseudo = "import os; a, b = os.openpty(); os.write(a, b'x\\n'); print(os.read(b, 9))"
    assert (await arena.python(pseudo, box=box)).stdout == "b'x\\n'\n"


async def test_no_device_can_be_made(arena: Arena, tmp_path: Path) -> None:
    volumes = (Volume(source=str(tmp_path), target="/out", read_only=False),)
    for without in (None, all_capabilities):
        said = answers((await arena.python(MAKE, "/out", volumes=volumes, without=without)).stdout)
        assert {answer for word, answer in said.items() if word.startswith("/")} == {"EPERM"}
        assert {said[name] for name in DEVICES} == {"ENOENT"}
    assert not any(
        stat.S_ISCHR(path.lstat().st_mode) or stat.S_ISBLK(path.lstat().st_mode) for path in tmp_path.iterdir()
    )


async def test_an_upload_makes_plain_files_only(arena: Arena) -> None:
    box = await arena.box()
    for mode in (0o20666, 0o60666, 0o4755, 0o2755, 0o1777):
        with pytest.raises(InvalidRequest, match="mode"):
            await box.write_file("/root/device", b"x", mode=mode)
    await box.write_file("/dev/mem", b"x")
    assert (await arena.sh("stat -c %F /dev/mem", box=box)).stdout == "regular file\n"
    with pytest.raises(InvalidRequest, match="not a regular file"):
        await box.write_file("/dev/null", b"x")


OPEN = CALL + "say('open', attempt(os.open, '/out/zero', os.O_RDONLY))"


@pytest.mark.skipif(os.geteuid() != 0, reason="only the host's root can put a device into a volume")
async def test_a_device_in_a_volume_does_not_open(arena: Arena, tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    os.chmod(tmp_path / "zero", 0o666)
    volumes = (Volume(source=str(tmp_path), target="/out"),)
    assert (await arena.python(OPEN, volumes=volumes)).stdout == "open EACCES\n"


@pytest.mark.control
@pytest.mark.skipif(os.geteuid() != 0, reason="only the host's root can put a device into a volume")
async def test_control_without_nodev_it_opens(arena: Arena, tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    os.chmod(tmp_path / "zero", 0o666)
    volumes = (Volume(source=str(tmp_path), target="/out"),)
    assert (await arena.python(OPEN, volumes=volumes, without=volumes_with(NOSUID))).stdout == "open ok\n"
