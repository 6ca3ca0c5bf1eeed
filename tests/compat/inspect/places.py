"""Where sandboxes of tests in Inspect's environment are: a real server, samples, an image of nothing but busybox; and
what of them is left."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sandlot.integrations.inspect import SandlotConfig, SandlotEnvironment
from sandlot.sandbox import open_node
from tests.support.images import need
from tests.support.server import SANDLOT

# Alpine's busybox has the command, Debian's has not.
ADDUSER = """#!/bin/sh
if [ "$1" = -D ]; then echo "$2:x:1000:1000::/home/$2:/bin/sh" >>/etc/passwd
else echo "BusyBox has: adduser -D NAME"; fi
"""


def busybox_root(root: Path) -> Path:
    """A root file system of busybox, with all of its commands, as Alpine has it."""
    need("busybox")
    program = shutil.which("busybox") or ""
    for each in ("bin", "usr/bin", "etc", "home"):
        (root / each).mkdir(parents=True)
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in {*names} - {"busybox"}:
        (root / "bin" / name).symlink_to("busybox")
    shutil.copy(program, root / "bin/busybox")
    if "adduser" not in names:
        (root / "bin/adduser").write_text(ADDUSER)
        (root / "bin/adduser").chmod(0o755)
    (root / "usr/bin/env").symlink_to("/bin/busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnobody:x:65534:\n")
    return root


@contextmanager
def serving(state: Path, *words: str) -> Iterator[str]:
    """The URL of a real `sandlot serve`, which is told to stop at the end."""
    argv = (*SANDLOT, "serve", "--port", "0", "--state-dir", str(state), *words)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("listening on "), said
        yield said.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@asynccontextmanager
async def sample(config: SandlotConfig | str | None = None) -> AsyncIterator[dict[str, SandlotEnvironment]]:
    """The sandboxes of a sample, as Inspect makes and ends them."""
    made = await SandlotEnvironment.sample_init("task", config, {"__sample_id__": 1})
    try:
        yield {name: environment.as_type(SandlotEnvironment) for name, environment in made.items()}
    finally:
        await SandlotEnvironment.sample_cleanup("task", config, made, False)


# The self-check asks for a user who is not root: what root is not allowed to read cannot be seen otherwise.
NOBODY = SandlotConfig(user="nobody", cwd="/work")


def running(url: str) -> list[str]:
    """The ids of the sandboxes that live there."""

    async def ask() -> list[str]:
        node = await open_node(url)
        try:
            return [info.id for info in await node.list()]
        finally:
            await node.close()

    return asyncio.run(ask())


def processes(mark: str) -> list[int]:
    """Those of this host, inside any sandbox too, that have the mark among their arguments."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (each / "cmdline").read_bytes().split(b"\0"):
                found.append(int(each.name))
        except OSError:
            continue
    return found
