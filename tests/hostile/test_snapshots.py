"""Attack: leave in a snapshot what outlives the box on the host's disk: a set-id program of root's for another user of
this host to run from there; links to directories of the host, for the node to follow when it is asked what a box on
top of the snapshot has changed, or when it writes the snapshot out as a tar.

Must hold: no other user of the host gets as far as the program, whatever the mode of the state directory; neither the
list of changes nor the tar tells a name, a kind or a byte of what lies where the links lead.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.node.node import Node
from sandlot.sandbox import Sandbox
from tests.support.hostile import Arena

PROMISE = "files"

SET_ID = "cp /bin/bash /srv/evil; chmod 4755 /srv/evil; chmod 755 /srv /"
NOBODY = 65534


@pytest.fixture
def open_state() -> Iterator[Path]:
    """A state directory that anybody may enter, as one below /var/lib is."""
    with tempfile.TemporaryDirectory(prefix="sandlot-open") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def program_on_disk(node: Node, box: Sandbox) -> Path:
    """Where the set-id program lies once a snapshot of its box was made."""
    assert (await box.run(SET_ID)).ok
    await node.snapshot(box.id, "evil")
    (found,) = _images(node).glob("layers/*/srv/evil")
    assert found.stat().st_mode & stat.S_ISUID
    return found


def _images(node: Node) -> Path:
    return node.driver._layers.directory  # type: ignore[attr-defined]


def reach(program: Path) -> str:
    """What becomes of another user who runs it: "effective" and "real" id, or nothing. Who is not root cannot become
    another user, and looks whether each directory on the way would let one through."""
    if os.geteuid() != 0:
        open_to_all = all(each.stat().st_mode & 0o001 for each in (program, *program.parents))
        return f"{os.geteuid()} {NOBODY}" if open_to_all else ""
    argv = [str(program), "-p", "-c", "echo $EUID $UID"]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
    except PermissionError:
        return ""
    return ran.stdout.strip()


async def test_nobody_else_runs_a_set_id_program_of_a_snapshot(arena: Arena, open_state: Path) -> None:
    _move(arena, open_state)
    program = await program_on_disk(arena.node, await arena.box())
    assert reach(program) == ""
    for directory in (_images(arena.node), program.parents[2]):
        directory.chmod(0o755)  # an older version made them so; they are shut before anybody stands on them again
    await arena.box(image="evil")
    assert reach(program) == ""


@pytest.mark.control
async def test_control_in_open_directories_another_user_runs_it(arena: Arena, open_state: Path) -> None:
    if os.statvfs(open_state).f_flag & os.ST_NOSUID:
        pytest.skip("set-id programs count nowhere in the directory for temporary files")
    _move(arena, open_state)
    program = await program_on_disk(arena.node, await arena.box())
    for directory in (_images(arena.node), program.parents[2]):
        directory.chmod(0o755)
    assert reach(program) == f"{os.geteuid()} {NOBODY}"


def _move(arena: Arena, state: Path) -> None:
    """Keep the images of this node in another state directory."""
    arena.driver._layers = type(arena.driver._layers)(state / "images")


async def link(arena: Arena, victim: Path) -> Sandbox:
    """A box over a snapshot, `linked`, with links to `victim`."""
    (victim / "secret").mkdir(parents=True)
    (victim / "secret" / "key").write_text("attacked")
    first = await arena.box()
    assert (await first.run(["ln", "-s", str(victim), "/srv/a"])).ok
    assert (await first.run(["ln", "-s", str(victim), "/srv/b"])).ok
    await arena.node.snapshot(first.id, "linked")
    return await arena.box(image="linked")


async def linked(arena: Arena, victim: Path) -> Sandbox:
    """The same, and the links are directories now."""
    box = await link(arena, victim)
    if not arena.driver.facts.directories_replaced:
        assert any(loss.startswith("image directories: ") for loss in box.losses)
        pytest.skip("named loss: image directories")
    assert (await box.run("cd /srv; rm a b; mkdir a b; mkdir a/secret b/secret; touch a/secret/key b/no")).ok
    return box


async def test_the_list_of_changes_tells_nothing_of_where_a_link_leads(arena: Arena, tmp_path: Path) -> None:
    box = await linked(arena, tmp_path / "victim")
    found = {(change.path, change.kind) for change in await arena.node.diff(box.id)}
    assert found == {
        ("/srv/a", "changed"),
        ("/srv/a/secret", "added"),  # "changed" would say that there is one where the link leads
        ("/srv/a/secret/key", "added"),
        ("/srv/b", "changed"),
        ("/srv/b/no", "added"),
        ("/srv/b/secret", "added"),
    }


async def test_an_export_holds_nothing_of_where_a_link_leads(arena: Arena, tmp_path: Path) -> None:
    box = await linked(arena, tmp_path / "victim")
    await arena.node.snapshot(box.id, "over")
    for image, kind in (("linked", tarfile.SYMTYPE), ("over", tarfile.DIRTYPE)):
        written = b"".join([chunk async for chunk in arena.node.export_image(image)])
        assert b"attacked" not in written
        with tarfile.open(fileobj=io.BytesIO(written)) as tar:
            assert tar.getmember("srv/a").type == kind


@pytest.mark.control
async def test_control_a_path_that_is_looked_up_as_usual_leads_out(arena: Arena, tmp_path: Path) -> None:
    await link(arena, tmp_path / "victim")
    paths = [path / "srv/a" for path in _images(arena.node).glob("layers/*") if path.is_dir()]
    assert [each.name for path in paths for each in path.iterdir()] == ["secret"]
    assert [(path / "secret/key").read_text() for path in paths] == ["attacked"]
