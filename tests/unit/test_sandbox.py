"""Promises of what users hold, blocking and not:

1. The public names are those listed; importing them loads no heavy library, in little time.
2. Words are checked before anything starts, and the error names the field.
3. Without a node or a URL nothing has to be started or stopped: the loop's end, or the interpreter's, leaves nothing.
4. The blocking twin is exactly what the generator writes, and does what the original does.
5. A route is in the environment of later runs.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import sandlot
from sandlot import Command, Limits, Sandbox, Shell, SyncCommand, SyncSandbox, SyncShell
from sandlot.drivers.base import NOT_KEPT, Keeping
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import InvalidRequest, NotFound, SandboxEnded
from sandlot.node.node import Node

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


def python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_the_public_names_are_those_listed() -> None:
    public = {
        name for name in dir(sandlot) if not name.startswith("_") and not inspect.ismodule(getattr(sandlot, name))
    }
    assert public | {"__version__"} == set(sandlot.__all__)
    assert sandlot.__version__ == version("sandlot")


def test_importing_it_loads_nothing_heavy() -> None:
    done = python("import sys, sandlot; print(*sorted(m for m in sys.modules if '.' not in m))")
    heavy = {
        "torch",
        "numpy",
        "ray",
        "fastapi",
        "starlette",
        "uvicorn",
        "aiohttp",
        "httpx2",
        "typer",
        "rich",
        "transformers",
    }
    assert done.returncode == 0, done.stderr
    assert heavy.isdisjoint(done.stdout.split())


async def test_words_are_checked_before_anything_starts(node: Node) -> None:
    for wrong, named in (
        ({"limits": {"memory": "lots"}}, "limits.memory: 'lots' is not a size"),
        ({"limits": {"memroy": 1}}, "limits.memroy"),
        ({"hostname": "-"}, "hostname"),
        ({"volumes": [{"source": "/tmp", "target": "relative"}]}, "volumes.0.target"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            await Sandbox.create(node=node, **wrong)
    assert (await node.counts())["created"] == 0
    async with await Sandbox.create(node=node) as box:
        with pytest.raises(InvalidRequest, match="timeout"):
            await box.run("true", timeout=-1)
        with pytest.raises(InvalidRequest, match="argv"):
            await box.run([])


async def test_only_limits_that_were_given_are_named(tmp_path: Path) -> None:
    seen: list[frozenset[str]] = []

    class Noting(FakeDriver):
        async def create(
            self, box_id: str, spec: Any, named: frozenset[str], keeping: Keeping = NOT_KEPT, *more: Any
        ) -> Any:
            seen.append(named)
            return await super().create(box_id, spec, named, keeping, *more)

    async with Node(Noting(), tmp_path) as node:
        await Sandbox.create(node=node)
        await Sandbox.create(node=node, limits={"memory": "1G"})
        await Sandbox.create(node=node, limits=Limits(pids=10, disk=1 << 20))
    assert seen == [frozenset(), {"memory"}, {"pids", "disk"}]


async def test_a_sandbox_ends_with_its_block(node: Node) -> None:
    async with await Sandbox.create(node=node) as box:
        assert (await box.run(["echo", "hi"])).stdout == "hi\n"
        await box.write_file("/root/a", "text")
        assert await box.read_file("/root/a") == b"text"
        again = await Sandbox.attach(box.id, node=node)
        assert (await again.run(["cat", "a"])).stdout == "text"
    assert (await box.info()).state == "ended"
    with pytest.raises(SandboxEnded):
        await box.run(["true"])
    with pytest.raises(NotFound):
        await Sandbox.attach("sb-never", node=node)


async def test_a_route_is_in_the_environment_of_later_runs(node: Node) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    async with await Sandbox.create(node=node) as box:
        await box.route(8484, app)
        seen = (await box.run(["env"])).stdout.splitlines()
        assert {"OPENAI_BASE_URL=http://127.0.0.1:8484/v1", "ANTHROPIC_BASE_URL=http://127.0.0.1:8484"} <= set(seen)
        assert "OPENAI_BASE_URL=mine" in (await box.run(["env"], env={"OPENAI_BASE_URL": "mine"})).stdout


def test_the_blocking_twin_is_what_the_generator_writes() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/make_sync.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for pair in ((Sandbox, SyncSandbox), (Command, SyncCommand), (Shell, SyncShell)):
        names, twins = ({name for name in vars(kind) if not name.startswith("_")} for kind in pair)
        assert names == twins
        for name in names:
            original, twin = (inspect.signature(getattr(kind, name)) for kind in pair)
            assert original.parameters == twin.parameters


def test_the_readme_example_prints_what_it_should(native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    done = python(
        "from sandlot import SyncSandbox\n"
        'with SyncSandbox.create() as box: print(box.run("uname -s; id -un").stdout, end="")'
    )
    assert (done.stdout, done.stderr, done.returncode) == ("Linux\nroot\n", "", 0)


@pytest.mark.parametrize(
    "program",
    [
        "from sandlot import SyncSandbox; box = SyncSandbox.create(); print(box.id)",
        "import asyncio; from sandlot import Sandbox\n"
        "async def main(): print((await Sandbox.create()).id)\nasyncio.run(main())",
    ],
    ids=["blocking", "async"],
)
def test_a_sandbox_that_nobody_closes_ends_with_the_program(native_reason: str | None, program: str) -> None:
    if native_reason:
        pytest.skip(native_reason)
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    short_id = done.stdout.strip()[3:9]
    from sandlot.node.ledger import default_state_dir

    assert not (default_state_dir() / f"node-{short_id}").exists()


async def test_sandboxes_of_a_loop_share_a_node(native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    one, two = await asyncio.gather(Sandbox.create(), Sandbox.create())
    assert one.id[:9] == two.id[:9]
    await one.close()
    await two.close()


def test_a_loop_that_ended_is_not_remembered(native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)

    async def hello() -> str:
        return (await (await Sandbox.create()).run(["echo", "hello"])).stdout

    for _ in range(2):
        assert asyncio.run(hello()) == "hello\n"
    assert sandlot.sandbox._shared == {}
