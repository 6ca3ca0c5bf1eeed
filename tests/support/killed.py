"""A node that does something and is killed: what its boxes then wait for is another one on the same directory."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from pathlib import Path

KILLED = """
import asyncio, errno, json, os, signal, sys
from pathlib import Path
from sandlot.api import Limits, Run, SandboxSpec, ShellRun, ShellSpec, Upstream
from sandlot.drivers.native.box import NativeBox
from sandlot.drivers.native.keep import Record
from sandlot.errors import HostFault, Unsupported
from sandlot.node import node as module
from sandlot.node.node import Node, local_node

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def sh(text, **more):
    return Run(argv=("sh", "-c", text), **more)

def say(*words):
    print(*words, flush=True)

async def main():
    BEFORE
    async with local_node(Path(sys.argv[1]), name="test", orphan_grace=float(sys.argv[2])) as node:
        await what(node)
        die()

async def what(node):
"""


async def killed(state: Path, text: str, grace: float = 60, before: str = "pass") -> list[str]:
    """Run a node that does what `text` says, with `node`, and is killed then at the latest: the words it said."""
    program = (
        KILLED.replace("BEFORE", before) + textwrap.indent(textwrap.dedent(text), "    ") + "\nasyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(state), str(grace), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    return said.decode().splitlines()
