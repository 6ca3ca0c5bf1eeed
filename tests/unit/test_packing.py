"""Promises of a directory that is packed:
1. Whoever reads it is told at its end when the rest could not be packed, whatever the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandlot import packing
from sandlot.errors import Unsupported


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """More than fits into the pipe before somebody reads, and files after it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/a").write_bytes(os.urandom(4 << 20))
    (tmp_path / "bin/b").write_bytes(b"x")
    (tmp_path / "usr").mkdir()
    return tmp_path


def test_a_file_that_goes_meanwhile_is_said(root: Path) -> None:
    with packing.packed(root) as tar:
        tar.read(1)
        (root / "bin/b").unlink()
        with pytest.raises(FileNotFoundError, match="bin/b"):
            tar.read()


def test_a_file_that_shrinks_meanwhile_is_said(root: Path) -> None:
    with packing.packed(root) as tar:
        tar.read(1)
        os.truncate(root / "bin/a", 1)
        with pytest.raises(OSError, match="unexpected end"):
            tar.read()


def test_what_no_tar_can_say_is_said(root: Path) -> None:
    os.setxattr(os.fsencode(root / "bin/b"), b"user.\xff", b"v")
    with packing.packed(root) as tar, pytest.raises(Unsupported, match=r"bin/b has an attribute .*b'user.\\xff'"):
        tar.read()
