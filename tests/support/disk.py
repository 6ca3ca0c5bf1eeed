"""A real disk that becomes full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of the test's own, of so many bytes."""
    place.mkdir(mode=0o700, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """A file that takes all the room there is: when it is removed there is room again."""
    file = place / "filling"
    with file.open("wb", buffering=0) as opened:
        try:
            while opened.write(bytes(4096)):
                pass
        except OSError:
            return file
    raise AssertionError("unreachable")
