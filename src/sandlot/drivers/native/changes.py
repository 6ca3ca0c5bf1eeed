"""What a box has changed, from the list of what lies in its upper directory and a look at the layers below.

Boxes wrote the layers and are not trusted: `Tree` follows no link of theirs. Nothing inside is asked here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from sandlot.api import Change
from sandlot.drivers.layers import Tree, is_whiteout


def changes_over(listed: bytes, below: Sequence[Path], mounts: Sequence[str]) -> list[Change]:
    """What the entries of an upper directory (`Frame.LIST`) mean over the layers `below`, the lowest first. What only
    leads to a mount point is nobody's change. Raises Unsupported for layers that the node may not read."""
    leads = {str(path)[1:] for mount in mounts for path in (Path(mount), *Path(mount).parents)}
    entries = {os.fsdecode(entry[1:]): chr(entry[0]) for entry in filter(None, listed.split(b"\0"))}
    found: dict[str, Change] = {}
    with ExitStack() as until_done:
        trees = [until_done.enter_context(closing(Tree(layer))) for layer in reversed(below)]
        replaced: set[str] = set()  # directories through which nothing of the layers is seen
        for path, kind in sorted(entries.items()):  # a directory before what is in it
            if kind == "o" or (kind == "d" and path.rpartition("/")[0] in replaced):
                replaced.add(path)
                for name in {name for tree in trees for name in tree.names(path)}:
                    gone = f"{path}/{name}"
                    was = None if gone in entries else _seen_below(trees, gone)
                    if was is not None:
                        found[gone] = _change(gone, "deleted", was)
            before = None if path in leads else _seen_below(trees, path)
            if kind == "w":
                if before is not None:
                    found[path] = _change(path, "deleted", before)
            elif path not in leads:
                if before is None:
                    found[path] = Change(path=f"/{path}", kind="added", directory=kind in "do")
                elif path in replaced or kind == "f" or not stat.S_ISDIR(before.st_mode):
                    # Another directory only leads to what has changed.
                    found[path] = Change(path=f"/{path}", kind="changed", directory=kind in "do")
    return [found[path] for path in sorted(found)]


def _change(path: str, kind: str, what: os.stat_result) -> Change:
    return Change.model_validate({"path": f"/{path}", "kind": kind, "directory": stat.S_ISDIR(what.st_mode)})


def _seen_below(trees: Sequence[Tree], path: str) -> os.stat_result | None:
    """What the layers, the highest first, show at this path; None: nothing."""
    for tree in trees:
        what, hides = tree.look(path)
        if what is not None:
            return None if is_whiteout(what) else what
        if hides:
            return None
    return None
