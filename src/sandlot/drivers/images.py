"""Images that are directories of this host: `host`, and those that are named by their path.

Owns `images/` in a node's directory, where `host` is: a bare root of a few files over which this machine's /usr and the
interpreter that runs sandlot are mounted read-only. Nothing of the host's /home, /root, /var, /run or /tmp is in it.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sandlot.api import NO_CONFIG, ImageConfig
from sandlot.errors import HostFault, NotFound


@dataclass(frozen=True, slots=True)
class Image:
    """`root` is a directory that becomes the lowest layer; `binds` are host trees mounted over it, (source, target).
    `directories` are made anew in each box, (path, mode), so that they belong to its root even where the kernel cannot
    map the owners of `root` (before 6.3 on a tmpfs, before 5.19 on any file system), parents first."""

    name: str
    root: str
    binds: tuple[tuple[str, str], ...] = ()
    directories: tuple[tuple[str, int], ...] = ()
    networked: tuple[tuple[str, str], ...] = ()  # as `binds`, for boxes that have the host's network
    layers: tuple[str, ...] = ()  # what boxes wrote over `root`, one over the other, the last on top
    base: str = "host"  # the name of the image that `root` is
    config: ImageConfig = NO_CONFIG
    losses: tuple[str, ...] = ()  # of the image's own, for every box that is made from it

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        # Not by asdict, which copies whatever is in it: 0.2 ms in each create.
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        return facts | {"config": self.config.model_dump(exclude_defaults=True)}

    @classmethod
    def restored(cls, facts: dict[str, Any]) -> Image:
        config = ImageConfig.model_validate(facts["config"])
        return cls(**{name: _tuples(value) for name, value in facts.items() if name != "config"}, config=config)


def _tuples(value: Any) -> Any:
    """Lists, which JSON makes of tuples, back into tuples."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandlot\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/resolv.conf": "",
    "etc/profile": "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n",
    # Without it `su`, `runuser` and `adduser` fail for root; nobody else may become somebody.
    "etc/pam.d/other": "auth sufficient pam_rootok.so\nauth required pam_deny.so\naccount required pam_permit.so\n"
    "password required pam_deny.so\nsession required pam_permit.so\n",
}
_DIRECTORIES = {
    "etc": 0o755,
    "var": 0o755,
    "home": 0o755,
    "root": 0o700,
    "var/tmp": 0o1777,
    "tmp": 0o1777,
    "run": 0o755,
    "usr": 0o755,
    "opt": 0o755,
    "mnt": 0o755,
    "srv": 0o755,
}
# Host files that programs of the host's /usr need: the linker's cache, and where `awk`, `editor` and so on lead.
_COPIES = ("etc/ld.so.cache", "etc/ld.so.conf", "etc/alternatives", "etc/localtime")
# Whom programs trust on a network. Nothing private is in there.
_CERTIFICATES = ("/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted")
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def interpreter_prefix() -> str:
    """Where the interpreter that runs sandlot is installed: the base of its virtual environment, if it is in one."""
    return os.path.realpath(sys.base_prefix)


class Images:
    """The images of one node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host: Image | None = None

    def resolve(self, name: str) -> Image:
        """`host`, made ready on first use, or the directory of that path. Raises NotFound, HostFault (disk)."""
        if name != "host":
            return _of_directory(name)
        if self._host is None:
            try:
                self._host = _make_host_image(self._directory / "host")
            except OSError as error:
                shutil.rmtree(self._directory / "host", ignore_errors=True)
                raise HostFault(
                    f"the image `host` could not be written to {self._directory}: {error.strerror}",
                    "free some space there, or choose another state directory with `--state-dir`",
                ) from error
        return self._host


def _of_directory(name: str) -> Image:
    """A root file system where it lies. What every program expects and it lacks is made in each box."""
    root = Path(os.path.realpath(name.replace("\0", "")))
    if not root.is_dir() or "\0" in name:
        raise NotFound(f"there is no directory {name} on this host", "the path of an image leads to its root")
    missing = [each for each in ("root", "tmp") if not os.path.lexists(root / each)]
    return Image(name, str(root), directories=tuple((each, _DIRECTORIES[each]) for each in missing), base=name)


def _manuals(directory: str, names: list[str]) -> list[str]:
    """Links to pages of manuals: four of five alternatives, and each a file to make and to delete for every node."""
    links = (path for name in names if (path := Path(directory, name)).is_symlink())
    return [path.name for path in links if "man" in path.readlink().parts]


def _make_host_image(final: Path) -> Image:
    root = final.with_name(f"{final.name}.partial")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    root.chmod(0o755)
    # The other directories are made in each box and are not here, so that nothing has to be merged with them: before
    # Linux 6.6 a box cannot move a new directory into a merged one, as dpkg does.
    for name in (
        "etc",
        "etc/pam.d",
        "etc/skel",
    ):  # the last is what `adduser` copies into a new home, and stops without
        (root / name).mkdir()
        (root / name).chmod(0o755)
    for name, text in _FILES.items():
        (root / name).write_text(text)
    for name in _COPIES:
        source = Path("/", name)
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True, ignore=_manuals)
        elif source.exists():
            shutil.copyfile(source.resolve(), root / name)
    binds = [("/usr", "/usr")]
    for name in _TOP:
        top = Path("/", name)
        if top.is_symlink():
            (root / name).symlink_to(top.readlink())
        elif top.is_dir():  # a host whose /bin is not merged into /usr
            binds.append((str(top), str(top)))
    os_release = Path("/usr/lib/os-release")
    if os_release.exists():
        (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    prefix = interpreter_prefix()
    if prefix != "/usr" and not prefix.startswith("/usr/"):
        binds.append((prefix, prefix))
    if final.exists():  # boxes that this node adopted stand on it
        shutil.rmtree(root)
    else:
        root.rename(final)
    networked = tuple((path, path) for path in _CERTIFICATES if Path(path).is_dir())
    return Image("host", str(final), tuple(binds), tuple(_DIRECTORIES.items()), networked)
