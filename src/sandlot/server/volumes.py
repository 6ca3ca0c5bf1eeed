"""Which of the host's files a server's callers may see inside their sandboxes: what was named at its start, by default
nothing.

It promises that no caller gets anything else: links are followed before a path is compared, the driver is given the
path they led to, and where another user or a sandbox could put a link in its place meanwhile, it is refused. It mounts
nothing itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandlot.api import SandboxSpec, Volume
from sandlot.errors import InvalidRequest, Unsupported


@dataclass(frozen=True)
class AllowedVolumes:
    """Path without links → whether sandboxes may write there."""

    paths: dict[Path, bool]

    @classmethod
    def named(cls, words: Iterable[str] = ()) -> AllowedVolumes:
        """Of the words of `--allow-volumes`, `DIR` or `DIR:rw`. Raises InvalidRequest."""
        paths = {}
        for word in words:
            path = Path(os.path.realpath(word.removesuffix(":rw").removesuffix(":ro")))
            if not path.exists():
                raise InvalidRequest(f"--allow-volumes {word}: there is no {path} on this host")
            if changer := _changer(path):
                raise InvalidRequest(
                    f"--allow-volumes {word}: {changer}, and could put a link to any other file there",
                    "name a directory that only the server's user can move",
                )
            paths[path] = word.endswith(":rw")
        return cls(paths)

    def checked(self, spec: SandboxSpec) -> SandboxSpec:
        """The same with links followed in its volumes' sources. Raises Unsupported for what is not allowed."""
        if not spec.volumes:
            return spec
        return spec.model_copy(update={"volumes": tuple(self._checked(volume) for volume in spec.volumes)})

    def image(self, name: str) -> str:
        """An image's name. A directory counts as a volume that is only read. Raises Unsupported."""
        if not name.startswith("/") or "\0" in name:  # which is no directory, and then said to be none
            return name
        return self._checked(Volume(source=name, target="/image")).source

    def _checked(self, volume: Volume) -> Volume:
        path = Path(os.path.realpath(volume.source))
        entry = next((each for each in (path, *path.parents) if each in self.paths), None)
        if entry is None:
            raise Unsupported(
                f"this server does not allow the volume {volume.source}",
                f"who runs the server can allow it: `sandlot serve --allow-volumes {volume.source}`",
            )
        writable = self.paths[entry]
        if not volume.read_only and not writable:
            raise Unsupported(
                f"this server allows the volume {volume.source} read-only",
                f"leave out `rw`, or let who runs the server allow it: `sandlot serve --allow-volumes {entry}:rw`",
            )
        # Sandboxes may write in there, so what is below is theirs to turn into links while it is being mounted.
        changer = f"sandboxes may write in {entry}" if writable and path != entry else _changer(path)
        if changer:
            raise Unsupported(
                f"this server does not allow the volume {volume.source}: {changer}",
                f"mount {entry} as a whole" if writable else "let who runs the server look at its owner and mode",
            )
        return volume.model_copy(update={"source": str(path)})


def _changer(path: Path) -> str | None:
    """Who else could put something in the place of this path, as a clause; None: only root and this user could."""
    for part in (path, *path.parents):
        found = part.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"user {found.st_uid} owns {part}"
        others = found.st_mode & stat.S_IWOTH or (
            found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid())
        )
        if part != path and others and not found.st_mode & stat.S_ISVTX:
            return f"other users may write in {part}"
    return None
