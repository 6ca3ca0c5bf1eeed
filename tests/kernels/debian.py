"""Kernels and a root file system for guests, out of Debian's packages.

Owns build/kernels: what is downloaded stays there, the guest's disk is made anew from this tree each time. Packages
come from the mirror that this machine's apt knows, by settings of our own: the machine's sources are not touched. A
release that the mirror does not have is said (`Unreachable`), and its guests are left out.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from importlib.metadata import distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

TOP = Path(__file__).resolve().parents[2]
WORK = TOP / "build" / "kernels"
NEEDED = ("qemu-system-x86_64", "mmdebstrap", "busybox", "mke2fs", "cpio", "dpkg-deb", "apt-get", "zstd")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ROOT_RELEASE = "bookworm"
ROOT_PACKAGES = "python3,busybox-static,procps,iproute2,util-linux,passwd,hostname,bsdutils,uidmap"
# For the guests' Python, which is older than 3.14.
PYTHON_PACKAGES = (
    "pydantic",
    "pytest",
    "pytest-asyncio",
    "uvicorn",
    "httptools",
    "aiohttp",
    "httpx2",
    "backports-zstd",
)
# What a guest needs, where it is not part of the kernel: the disk, its file system (which asks for crc32c by name), and
# what nobody in the guest could load later.
MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "overlay", "loop")


class Unreachable(Exception):
    """A release that the mirror does not have."""


@dataclass(frozen=True)
class Kernel:
    """A kernel package: `title` is what the table calls it."""

    title: str
    release: str
    package: str


KERNELS = {
    "cloud": Kernel("Debian 12's kernel for virtual machines", "bookworm", "linux-image-cloud-amd64"),
    "stock": Kernel("Debian 12's stock kernel", "bookworm", "linux-image-amd64"),
    "old": Kernel("Debian 11's", "bullseye", "linux-image-cloud-amd64"),
    "new": Kernel("Debian 13's", "trixie", "linux-image-cloud-amd64"),
}


def run(*argv: str | Path, cwd: Path | None = None) -> str:
    """A command that must work: what it printed."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode != 0:
        raise SystemExit(f"error: {' '.join(str(word) for word in argv)}\n{done.stderr[-2000:]}")
    return done.stdout


def mirror() -> str:
    """The address of Debian's archive, as this machine's apt has it."""
    for line in run("apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages").splitlines():
        label, _, address = line.partition("|")
        if label == "Debian":
            return address
    raise SystemExit("error: apt knows no Debian mirror here\n\nhint: run this on Debian")


def apt(release: str) -> tuple[str, ...]:
    """Options that point apt at one release and at directories of ours."""
    place = WORK / "apt" / release
    (place / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (place / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} {release} main\n")
    settings = {
        "Dir::Etc::SourceList": place / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": place / "lists",
        "Dir::Cache": place,
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


def kernel(name: str) -> tuple[Path, Path, str]:
    """(kernel image, initial RAM disk, version), downloaded once."""
    wanted, place = KERNELS[name], WORK / name
    if not (place / "version").exists():
        options = apt(wanted.release)
        update = subprocess.run(
            ["apt-get", *options, "--error-on=any", "update"], capture_output=True, text=True, check=False
        )
        if update.returncode != 0:
            raise Unreachable(f"the mirror has no {wanted.release}")
        real = re.search(r"Depends: (linux-image-\S+)", run("apt-cache", *options, "depends", wanted.package))
        if not real:
            raise Unreachable(f"{wanted.release} has no {wanted.package}")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=WORK) as scratch:
            run("apt-get", *options, "download", real[1], cwd=Path(scratch))
            (package,) = Path(scratch).glob("*.deb")
            run("dpkg-deb", "-x", package, Path(scratch) / "files")
            (image,) = (Path(scratch) / "files" / "boot").glob("vmlinuz-*")
            shutil.copy(image, place / "vmlinuz")
            collect(Path(scratch) / "files", place / "modules")
        shutil.rmtree(WORK / "apt" / wanted.release)
        (place / "version").write_text(image.name.removeprefix("vmlinuz-"))
    return place / "vmlinuz", first(place), (place / "version").read_text()


def collect(files: Path, target: Path) -> None:
    """Put the modules that guests need into `target`, unpacked, with the order in which they load."""
    found = {path.name.partition(".")[0].replace("-", "_"): path for path in files.rglob("*.ko*")}
    target.mkdir()
    order: list[str] = []

    def add(name: str) -> None:
        if name in order or name not in found:  # not found: part of the kernel itself
            return
        module = unpacked(found[name])
        for needed in filter(None, re.search(rb"\0depends=([^\0]*)\0", module)[1].split(b",")):  # type: ignore[index]
            add(needed.decode().replace("-", "_"))
        order.append(name)
        (target / f"{name}.ko").write_bytes(module)

    for name in MODULES:
        add(name)
    (target / "order").write_text("".join(f"{name}\n" for name in order))


def unpacked(module: Path) -> bytes:
    if module.suffix == ".xz":
        return lzma.decompress(module.read_bytes())
    if module.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", module], capture_output=True, check=True).stdout
    return module.read_bytes()


def first(place: Path) -> Path:
    """The initial RAM disk of the kernel in `place`: busybox, the modules, first.sh."""
    ramdisk = place / "first.cpio"
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        tree = Path(scratch)
        for name in ("bin", "proc", "dev", "root"):
            (tree / name).mkdir()
        shutil.copy(str(shutil.which("busybox")), tree / "bin" / "busybox")
        for name in ("sh", "cat", "mount", "insmod", "switch_root", "poweroff"):
            (tree / "bin" / name).symlink_to("busybox")
        shutil.copytree(place / "modules", tree / "modules")
        shutil.copy(Path(__file__).with_name("first.sh"), tree / "init")
        (tree / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        with ramdisk.open("wb") as output:
            command = ["cpio", "-o", "-H", "newc", "--quiet"]
            subprocess.run(command, input=names.encode(), stdout=output, cwd=tree, check=True)
    return ramdisk


def packages(*names: str) -> set[str]:
    """The distributions that these need, themselves included; extras and markers that do not hold are left out."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        needed = [Requirement(line) for line in requires(name) or ()]
        holding = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
        todo += [each.name.replace("_", "-").lower() for each in holding]
    return found


def disk() -> Path:
    """The guests' disk: Debian, this tree, the Python packages that its tests need. Guests write to copies of
    it; the caller removes it."""
    rootfs, image = WORK / f"rootfs-{zlib.crc32(ROOT_PACKAGES.encode()):x}.tar", WORK / f"disk-{os.getpid()}.img"
    if not rootfs.exists():
        partial = WORK / "rootfs.partial.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={ROOT_PACKAGES}", ROOT_RELEASE, partial, mirror())
        partial.rename(rootfs)
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        run("tar", "-xf", rootfs, "-C", tree)
        (tree / "results").mkdir()
        tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=TOP).split("\0")
        for name in [*filter(None, tracked), "src/sandlot/drivers/native/bin/sandlot-init"]:
            if (TOP / name).is_file():
                (tree / "sandlot" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(TOP / name, tree / "sandlot" / name)
        for name in packages(*PYTHON_PACKAGES):
            found = distribution(name)
            for file in found.files or ():
                source = Path(str(found.locate_file(file)))
                if source.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                    target = tree / "packages" / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)
        shutil.copy(Path(__file__).with_name("guest.sh"), tree / "sbin" / "sandlot-guest")
        (tree / "sbin" / "sandlot-guest").chmod(0o755)
        run("chroot", tree, "useradd", "--create-home", "user")
        # An emulated processor compiles Python slowly, and each of the suite's many programs would do it again.
        compiling = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/sandlot/src", "/packages")
        run("chroot", tree, "python3", *compiling)
        # ext3, for it has nothing that an older kernel does not know.
        run("mke2fs", "-q", "-t", "ext3", "-d", tree, image, "1500M")
    return image
