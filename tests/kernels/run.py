"""The helper's tests, conformance and the hostile suite on other kernels, in QEMU guests.

    python tests/kernels/run.py              every guest, a line each; --json for the table
    python tests/kernels/run.py v2-root      one of them

Kernel and root file system are Debian's packages (apt-get download, mmdebstrap), kept in build/kernels. A guest gets
this tree and the Python packages that its tests need, and boots straight into them; what they print is kept beside it.
Without --kvm the processor is emulated: slow, and the same everywhere. Needs root, for owners in the image.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution, requires
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
WORK = TOP / "build" / "kernels"
KERNEL = "linux-image-cloud-amd64"
NEEDED = ("qemu-system-x86_64", "mmdebstrap", "busybox", "mke2fs", "cpio", "dpkg-deb")
# In the order in which the kernel can load them.
MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "overlay",
)
SECONDS = 900


@dataclass(frozen=True)
class Guest:
    """One row of the table."""

    name: str
    cgroups: str  # "v2", "v1" or "none"
    user: str  # who runs the tests
    user_namespaces: bool = True
    tests: tuple[str, ...] = ("tests/unit/drivers/native", "tests/conformance", "tests/hostile")


GUESTS = (
    Guest("v2-root", "v2", "root"),
    Guest("v2-user", "v2", "user"),
    Guest("v1-root", "v1", "root"),
    Guest("none-root", "none", "root"),
    Guest("no-userns-root", "v2", "root", user_namespaces=False, tests=("tests/kernels/refused.py",)),
    Guest("no-userns-user", "v2", "user", user_namespaces=False, tests=("tests/kernels/refused.py",)),
)

INIT = r"""#!/bin/bash
# The guest's first process: mounts what a host has, runs the tests, says how they ended, turns the machine off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run -o mode=755
ip link set lo up; hostname guest
for word in $(cat /proc/cmdline); do case $word in sandlot.*) declare "${word#sandlot.}";; esac; done
case $cgroups in
  v2) mount -t cgroup2 cgroup2 /sys/fs/cgroup ;;
  v1) mount -t tmpfs cgroup /sys/fs/cgroup
      for c in memory pids cpu; do mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c cgroup /sys/fs/cgroup/$c; done ;;
esac
[ "$userns" = off ] && echo 0 > /proc/sys/user/max_user_namespaces
cd /sandlot
python="/usr/bin/python3 -m pytest -q -p no:cacheprovider --tb=short --color=no $options"
export PYTHONPATH=/sandlot/src:/packages
if [ "$user" = root ]; then $python ${tests//,/ }; else su user -c "cd /sandlot; $python ${tests//,/ }"; fi
echo "sandlot-guest: status $?"
echo o > /proc/sysrq-trigger; sleep 60
"""

FIRST = """#!/bin/sh
mount -t proc proc /proc; mount -t devtmpfs dev /dev
for m in {modules}; do insmod /$m.ko; done
mount -t ext4 /dev/vda /root
mount -t proc proc /root/proc
exec switch_root /root /sbin/sandlot-guest
"""


def run(*argv: str | Path, **options: object) -> str:
    """A command that must work: what it printed."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise SystemExit(f"error: {' '.join(str(word) for word in argv)}\n{done.stderr[-2000:]}")
    return str(done.stdout)


def packages(*names: str) -> set[str]:
    """The distributions that these need, themselves included; extras and markers that do not hold are left out."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        plain = [line for line in requires(name) or () if ";" not in line]
        todo += [re.split(r"[ <>=!~\[(]", line)[0].replace("_", "-").lower() for line in plain]
    return found


def fetch() -> tuple[Path, Path]:
    """The kernel's files and the root file system's tar, downloaded once."""
    kernel, rootfs = WORK / "kernel", WORK / "rootfs.tar"
    if not kernel.exists():
        depends = run("apt-cache", "depends", KERNEL)
        real = re.search(r"Depends: (linux-image-\S+)", depends)
        assert real, depends
        run("apt-get", "download", real[1], cwd=WORK)
        (package,) = WORK.glob(f"{real[1]}_*.deb")
        run("dpkg-deb", "-x", package, kernel)
    if not rootfs.exists():
        include = "python3,procps,iproute2,util-linux,passwd,hostname,bsdutils"
        run("mmdebstrap", "--variant=minbase", f"--include={include}", "bookworm", f"{rootfs}.partial.tar")
        Path(f"{rootfs}.partial.tar").rename(rootfs)
    return kernel, rootfs


def build(kernel: Path, rootfs: Path) -> tuple[Path, Path]:
    """Disk image and initial RAM disk, made anew from this tree."""
    tree, disk = WORK / "tree", WORK / "disk.img"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    run("tar", "-xf", rootfs, "-C", tree)
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=TOP).split("\0")
    for name in [*filter(None, tracked), "src/sandlot/drivers/native/bin/sandlot-init"]:
        if (TOP / name).is_file():
            (tree / "sandlot" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, tree / "sandlot" / name)
    for name in packages("pydantic", "pytest", "pytest-asyncio", "uvicorn", "httptools", "httpx2"):
        found = distribution(name)
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if source.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                target = tree / "packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    (tree / "sbin" / "sandlot-guest").write_text(INIT)
    (tree / "sbin" / "sandlot-guest").chmod(0o755)
    run("chroot", tree, "useradd", "--create-home", "user")
    disk.unlink(missing_ok=True)
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, disk, "1500M")

    first = WORK / "first"
    shutil.rmtree(first, ignore_errors=True)
    for name in ("bin", "proc", "dev", "root"):
        (first / name).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), first / "bin" / "busybox")
    for name in ("sh", "mount", "insmod", "switch_root"):
        (first / "bin" / name).symlink_to("busybox")
    for name in MODULES:
        (module,) = kernel.rglob(f"{name}.ko")
        shutil.copy(module, first / f"{name}.ko")
    (first / "init").write_text(FIRST.format(modules=" ".join(MODULES)))
    (first / "init").chmod(0o755)
    ramdisk = WORK / "first.cpio"
    names = "\n".join(str(path.relative_to(first)) for path in sorted(first.rglob("*")))
    with ramdisk.open("wb") as output:
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=output, cwd=first, check=True
        )
    return disk, ramdisk


def boot(guest: Guest, kernel: Path, disk: Path, ramdisk: Path, kvm: bool) -> dict[str, object]:
    """Run one guest: its row of the table."""
    (vmlinuz,) = (kernel / "boot").glob("vmlinuz-*")
    words = {
        "cgroups": guest.cgroups,
        "user": guest.user,
        "userns": "on" if guest.user_namespaces else "off",
        "tests": ",".join(guest.tests),
    }
    line = "console=ttyS0 quiet panic=-1 " + " ".join(f"sandlot.{name}={value}" for name, value in words.items())
    accelerator = ("-enable-kvm", "-cpu", "host") if kvm else ("-accel", "tcg,thread=multi", "-cpu", "max")
    log = WORK / f"{guest.name}.log"
    with log.open("wb") as output:
        try:
            subprocess.run(
                [
                    *("qemu-system-x86_64", *accelerator, "-m", "2048", "-smp", "2", "-nographic", "-no-reboot"),
                    *("-kernel", str(vmlinuz), "-initrd", str(ramdisk), "-append", line),
                    *("-drive", f"file={disk},if=virtio,format=raw,snapshot=on", "-net", "none"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output.write(b"\nsandlot-guest: ran out of time\n")
    text = log.read_text(errors="replace")
    status = re.search(r"sandlot-guest: status (\d+)", text)
    summary = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*? in [\d.]+s)", text, re.MULTILINE)
    return {
        "guest": guest.name,
        "ok": bool(status and status[1] == "0"),
        "tests": summary[-1] if summary else "did not finish",
        "kernel": vmlinuz.name.removeprefix("vmlinuz-"),
        "log": str(log.relative_to(TOP)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guests", nargs="*", help=f"which: {', '.join(guest.name for guest in GUESTS)}")
    parser.add_argument("--kvm", action="store_true", help="use KVM: faster, where it works")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        print(f"error: this needs {', '.join(missing)}\n", file=sys.stderr)
        print("hint: `apt install qemu-system-x86 mmdebstrap busybox-static e2fsprogs cpio`", file=sys.stderr)
        return 1
    WORK.mkdir(parents=True, exist_ok=True)
    kernel, rootfs = fetch()
    disk, ramdisk = build(kernel, rootfs)
    rows = []
    for guest in GUESTS:
        if args.guests and guest.name not in args.guests:
            continue
        rows.append(boot(guest, kernel, disk, ramdisk, args.kvm))
        print(
            f"{'ok  ' if rows[-1]['ok'] else 'FAIL'} {guest.name:16} {rows[-1]['tests']}", file=sys.stderr, flush=True
        )
    if args.json:
        print(json.dumps(rows))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
