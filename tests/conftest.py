"""What all tests share: whether this host can make native boxes, a registry, and images to put into it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec
from sandlot.errors import SandlotError
from tests.support import images
from tests.support.images import Registry

# Where it is set every program that a test starts would compile sandlot anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nodes that are told of no directory make theirs here: not among this user's own, nor those of tests beside these.
STATE = os.environ["SANDLOT_STATE_DIR"] = tempfile.mkdtemp(prefix="sandlot-tests-")


def pytest_sessionfinish() -> None:
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture(scope="session")
def native_reason(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """None where native boxes can be made, else why not, as the driver says it. Found by making one."""
    from sandlot.drivers.native.driver import NativeDriver

    async def one_box(directory: Path) -> None:
        driver = NativeDriver(directory)
        box = await driver.create("sb-probe", SandboxSpec(), frozenset())
        await box.destroy()
        await driver.close()

    try:
        asyncio.run(one_box(tmp_path_factory.mktemp(f"node-{os.getpid()}-")))
    except SandlotError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A real registry on loopback. Tests push under names of their own."""
    with images.Registry(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, images.Built]:
    """OCI layouts of root file systems of this host's files: `busybox`, which has nothing else, and `glibc`, of two
    layers, with bash and a user."""
    top = tmp_path_factory.mktemp("layouts")
    second = images.packed(
        images.directory("srv"),
        images.entry("srv/one", b"of the image\n"),
        images.entry("etc/.wh.motd"),
        images.entry("srv/set", b"#!/bin/sh\n", mode=0o4755, uid=1000, gid=7),
    )
    glibc = {"User": "app:app", "WorkingDir": "/srv", "Env": ["GREETING=hello", "PATH=/bin"], "Cmd": ["bash"]}
    return {
        "busybox": images.write_layout(top / "busybox", [images.busybox_root()]),
        "glibc": images.write_layout(top / "glibc", [images.glibc_root(), second], glibc, index=True),
    }
