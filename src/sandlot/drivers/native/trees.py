"""Detached mounts, as descriptors: what the node, where it is root, hands to a helper that could not open it itself.

The kernel's calls, and which kernel it is; each raises OSError."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

# The numbers are the same on x86_64 and aarch64.
_OPEN_TREE, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 430, 431, 432, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOUNT_ATTR_IDMAP = 1, 0x00100000
_CLOEXEC, _SET_STRING, _CREATE = 1, 1, 6
_NOSUID, _NODEV, _PRIVATE = 2, 4, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _call(number: int, *arguments: object, path: str | None = None) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return result


def kernel() -> tuple[int, int]:
    """The running kernel's version."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)) or 0)


def file_system(path: str) -> str:
    """What `path` lies on, as words: "the overlay file system of /x". Raises OSError."""
    found, kind, wanted = "", "", os.path.realpath(path)
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        _, point, its_kind, *_ = line.split(" ")
        if len(point) >= len(found) and (wanted + "/").startswith(point.rstrip("/") + "/"):
            found, kind = point, its_kind
    return f"the {kind} file system of {path}"


def open_tree(path: str) -> int:
    """A copy of the mounts at `path`. Only root may."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags, path=path)


def map_owners(tree: int, user_namespace: int) -> None:
    """Show the tree's owners through the namespace's id map: host root's files belong to root inside, and what root
    inside makes there belongs to the host's root."""
    # Private, so that nothing that is mounted later comes into the copy without that map.
    attributes = _MountAttributes(set=_MOUNT_ATTR_IDMAP, propagation=_PRIVATE, userns_fd=user_namespace)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _call(_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(attributes), ctypes.sizeof(attributes))


def mount_device(kind: str, device: str) -> int:
    """A new mount of the file system on a block device."""
    context = _call(_FSOPEN, kind.encode(), _CLOEXEC)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"source", device.encode(), 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, _NOSUID | _NODEV)
    finally:
        os.close(context)
