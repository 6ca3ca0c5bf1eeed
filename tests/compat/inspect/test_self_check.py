"""The independent judge: every check of Inspect's own portable suite, on a real server and in this process, in the
image `host` and in one of nothing but busybox. None is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403  (as it asks to be taken)

from tests.compat.inspect.places import NOBODY, sample


@pytest.fixture(params=["server-host", "server-busybox", "process-host"])
async def sandbox_env(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SandboxEnvironment]:
    where, image = request.param.split("-")
    if where == "server":
        monkeypatch.setenv("SANDLOT_URL", request.getfixturevalue("server"))
    else:
        monkeypatch.delenv("SANDLOT_URL", raising=False)
    if image == "busybox":
        image = request.getfixturevalue("busybox")
    async with sample(NOBODY.model_copy(update={"image": image})) as environments:
        yield environments["default"]
