"""A server that the tests of one file share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.cli import Server


@pytest.fixture(scope="module")
def served(native_reason: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if native_reason:
        pytest.skip(native_reason)
    server = Server("--state-dir", str(tmp_path_factory.mktemp("state")))
    yield server
    assert server.stop(signal.SIGTERM) == (0, "")


@pytest.fixture
def box(served: Server) -> Iterator[str]:
    """The id of a sandbox of that server."""
    made = served.sandlot("create")
    assert (made.returncode, made.stderr) == (0, "")
    yield made.stdout.strip()
    served.sandlot("rm", made.stdout.strip())
