"""What the tests in Inspect's environment share: sandboxes on a server and in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from sandlot.integrations.inspect import SandlotEnvironment
from tests.compat.inspect.places import NOBODY, busybox_root, sample, serving


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of that image, here and on the server."""
    return str(busybox_root(tmp_path_factory.mktemp("images") / "busybox"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    images = tmp_path_factory.getbasetemp()  # below which `busybox` is
    with serving(tmp_path_factory.mktemp("server"), "--allow-volumes", str(images)) as url:
        yield url


@pytest.fixture(params=["server", "process"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Where the sandboxes of a test are: on this server; None: in the process that makes them."""
    if request.param == "process":
        monkeypatch.delenv("SANDLOT_URL", raising=False)
        return None
    url: str = request.getfixturevalue("server")
    monkeypatch.setenv("SANDLOT_URL", url)
    return url


@pytest.fixture
async def environment(place: str | None) -> AsyncIterator[SandlotEnvironment]:
    async with sample(NOBODY) as environments:
        yield environments["default"]
