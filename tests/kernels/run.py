"""The helper's tests, conformance and the hostile suite on other kernels, in QEMU guests.

    python tests/kernels/run.py              every guest, a line each
    python tests/kernels/run.py v2-root      one of them
    python tests/kernels/run.py --write      every guest, and docs/concepts/what-holds-where.md from what they say; with
                                             names, from those and from what the others said when they ran last

Kernel and root file system are Debian's packages (debian.py), kept in build/kernels. A guest gets this tree and the
Python packages that its tests need, boots straight into them (guest.sh), and leaves on a second disk what they print,
what it says that it keeps (look.py), and a row for each attack. Where KVM does not carry a guest its processor is
emulated: slow, and the same everywhere. Needs root, for owners in the image.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from debian import KERNELS, NEEDED, TOP, WORK, Unreachable, disk, kernel
from table import page, verdicts

SUITES = ("tests/unit/drivers/native", "tests/conformance", "tests/hostile")
REFUSED = ("tests/kernels/refused.py",)
# Before 5.11 a user namespace may mount overlayfs only if Debian's own switch allows it.
PERMIT, PERMITTED = "overlay.permit_mounts_in_userns=1", "overlayfs permitted in user namespaces"
# For booting, and for leaving the results, on top of what the tests are given.
MARGIN = 120
# A guest under KVM is up in two seconds; one that is not by then is stuck in the kernel's early code.
KVM_SECONDS = 20
Files = tuple[Path, Path, str]  # what `kernel` returns


@dataclass(frozen=True)
class Guest:
    """One column of the table."""

    name: str
    about: str
    kernel: str = "cloud"
    cgroups: str = "v2"  # "v2", "delegated" (v2, a part of it given to the user), "v1", "hybrid", "none"
    user: str = "user"  # who runs the tests
    subids: bool = False  # whether the user has subordinate ids and newuidmap to use them
    user_namespaces: bool = True
    words: str = ""  # more for the kernel's command line
    refused: str = ""  # why no sandbox can be made there: see refused.py
    controls: bool = False  # run the attacks' controls as well, which double the time: on a few guests is enough
    tests: tuple[str, ...] = SUITES


GUESTS = (
    Guest("v2-root", "root, pure cgroup v2", user="root", controls=True),
    Guest("v2-user", "an ordinary user, pure cgroup v2", controls=True),
    Guest("v2-delegated", "an ordinary user in a cgroup v2 that is delegated to it", cgroups="delegated"),
    Guest("v2-subids", "an ordinary user with subordinate ids", subids=True),
    Guest("v1-root", "root, cgroup v1", cgroups="v1", user="root"),
    Guest("v1-user", "an ordinary user, cgroup v1", cgroups="v1"),
    Guest("hybrid-root", "root, cgroup v1 with a bare v2 beside it", cgroups="hybrid", user="root"),
    Guest("none-root", "root, no cgroups mounted", cgroups="none", user="root"),
    Guest("none-user", "an ordinary user, no cgroups mounted", cgroups="none"),
    Guest(
        "no-userns-root",
        "root, user namespaces off",
        user="root",
        user_namespaces=False,
        refused="namespaces",
        tests=REFUSED,
    ),
    Guest(
        "no-userns-user",
        "an ordinary user, user namespaces off",
        user_namespaces=False,
        refused="namespaces",
        tests=REFUSED,
    ),
    Guest("stock-root", "root, pure cgroup v2", kernel="stock", user="root"),
    Guest("old-root", "root, pure cgroup v2", kernel="old", user="root", refused="owners", tests=REFUSED),
    Guest("old-user", "an ordinary user, pure cgroup v2", kernel="old", refused="overlay", tests=REFUSED),
    Guest("old-permitted-user", f"an ordinary user, pure cgroup v2, {PERMITTED}", kernel="old", words=PERMIT),
    Guest("new-root", "root, pure cgroup v2", kernel="new", user="root", controls=True),
)


def command(accelerator: tuple[str, ...], vmlinuz: Path, ramdisk: Path, line: str) -> list[str]:
    machine = ("-m", "3072", "-smp", "2", "-nographic", "-no-reboot", "-net", "none")
    # Mitigations cost an emulated processor much and change nothing that these tests look at.
    line = f"console=ttyS0 quiet panic=-1 mitigations=off {line}"
    return [
        *("qemu-system-x86_64", *accelerator, *machine),
        *("-kernel", str(vmlinuz), "-initrd", str(ramdisk), "-append", line),
    ]


def accelerator(vmlinuz: Path, ramdisk: Path) -> tuple[str, ...]:
    """KVM if a kernel really runs under it: it may open and then refuse the processor, or stall, where the machine is a
    guest itself. Found out with a kernel that is asked to do nothing but end."""
    kvm = ("-enable-kvm", "-cpu", "host")
    if Path("/dev/kvm").exists():
        trial = command(kvm, vmlinuz, ramdisk, "rdinit=/bin/poweroff -- -f")
        try:
            subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, timeout=KVM_SECONDS, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            print("KVM does not carry a guest here: its processor is emulated", file=sys.stderr, flush=True)
        else:
            return kvm
    # The plainest processor that the packages run on: wide vector instructions are dear to emulate (a quarter slower).
    return ("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem")


def boot(guest: Guest, files: Files, accelerator: tuple[str, ...], image: Path, seconds: int) -> dict[str, Any]:
    """Run one guest: what it left, and how it went."""
    vmlinuz, ramdisk, version = files
    words = {
        "cgroups": guest.cgroups,
        "user": guest.user,
        "subids": "on" if guest.subids else "off",
        "userns": "on" if guest.user_namespaces else "off",
        "tests": ",".join(guest.tests),
        "refused": guest.refused,
        "controls": "on" if guest.controls else "off",
        "seconds": seconds,
    }
    line = " ".join(f"sandlot.{name}={value}" for name, value in words.items())
    log, left = WORK / f"{guest.name}.log", WORK / f"{guest.name}.tar"
    with left.open("wb") as empty:
        empty.truncate(16 << 20)
    argv = command(accelerator, vmlinuz, ramdisk, f"{line} {guest.words}".strip())
    argv += ["-drive", f"file={image},if=virtio,format=raw,snapshot=on"]
    argv += ["-drive", f"file={left},if=virtio,format=raw"]
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=seconds + MARGIN, check=False
            )
        except subprocess.TimeoutExpired:
            output.write(b"\nsandlot-guest: ran out of time\n")
    row: dict[str, Any] = {
        "guest": guest.name,
        "about": guest.about,
        "kernel": f"{KERNELS[guest.kernel].title} ({version})",
        "processor": "KVM" if "-enable-kvm" in accelerator else "emulated",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "ok": False,
        "tests": "did not finish",
        "seconds": round(time.monotonic() - began),
        "log": str(log.relative_to(TOP)),
        "promises": [],
        "attacks": {},
    }
    try:
        with tarfile.open(left) as found:
            left_files = {
                member.name.removeprefix("./"): found.extractfile(member) for member in found if member.isfile()
            }
            texts = {name: file.read().decode(errors="replace") for name, file in left_files.items() if file}
    except tarfile.TarError:
        texts = {}
    left.unlink()
    summary = re.findall(
        r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s)", texts.get("pytest.txt", ""), re.M
    )
    row["ok"] = texts.get("status", "").strip() == "0"
    row["tests"] = summary[-1] if summary else row["tests"]
    row["promises"] = json.loads(texts.get("promises.json") or "[]")
    row["attacks"] = json.loads(texts.get("attacks.json") or "{}")
    return row


def kept() -> list[dict[str, Any]]:
    """What each guest said when it ran last."""
    files = [WORK / f"{guest.name}.json" for guest in GUESTS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def show(row: dict[str, Any]) -> None:
    """One guest's line, and why it failed."""
    state = "ok  " if row["ok"] else "FAIL"
    print(f"{state} {row['guest']:15} {row['tests']}, {row['seconds']} s", file=sys.stderr, flush=True)
    if row["ok"]:
        return
    lines = (TOP / row["log"]).read_text(errors="replace").splitlines()
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    for line in failed or lines[-15:]:
        print(f"     {line}", file=sys.stderr, flush=True)
    print(f"     all of it: {row['log']}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guests", nargs="*", help=f"which: {', '.join(guest.name for guest in GUESTS)}")
    parser.add_argument("--seconds", type=int, default=1500, help="how long a guest's tests may take")
    parser.add_argument("--tests", help="others than the suite, with commas between")
    parser.add_argument("--at-once", type=int, default=1, help="how many guests, of two processors each")
    parser.add_argument("--json", action="store_true", help="print everything that the guests said as JSON")
    parser.add_argument("--write", action="store_true", help="write docs/concepts/what-holds-where.md")
    args = parser.parse_args()
    unknown = set(args.guests) - {guest.name for guest in GUESTS}
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if unknown:
        parser.error(f"there is no guest {', '.join(sorted(unknown))}")
    if missing:
        print(f"error: this needs {', '.join(missing)}\n", file=sys.stderr)
        print("hint: `apt install qemu-system-x86 mmdebstrap busybox-static e2fsprogs cpio zstd`", file=sys.stderr)
        return 1
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = [guest for guest in GUESTS if not args.guests or guest.name in args.guests]
    if args.tests:
        others = tuple(args.tests.split(","))
        chosen = [guest if guest.refused else replace(guest, tests=others) for guest in chosen]
    rows, out = [], []
    kernels: dict[str, Files] = {}
    for name in dict.fromkeys(guest.kernel for guest in chosen):
        try:
            kernels[name] = kernel(name)
        except Unreachable as reason:
            gone = [guest for guest in chosen if guest.kernel == name]
            out += [f"{guest.name}: {reason}" for guest in gone]
            chosen = [guest for guest in chosen if guest.kernel != name]
            print(f"left out {', '.join(guest.name for guest in gone)}: {reason}", file=sys.stderr, flush=True)
    carrier = accelerator(*next(iter(kernels.values()))[:2]) if kernels else ()
    image = disk()
    try:
        with ThreadPoolExecutor(args.at_once) as pool:
            for row in pool.map(lambda guest: boot(guest, kernels[guest.kernel], carrier, image, args.seconds), chosen):
                rows.append(row)
                show(row)
                (WORK / f"{row['guest']}.json").write_text(json.dumps(row, indent=1) + "\n")
    finally:
        image.unlink()
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print(verdicts(rows))
    if args.write:
        target = TOP / "docs" / "concepts" / "what-holds-where.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(kept(), out))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
