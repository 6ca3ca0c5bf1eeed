"""Warm boxes: made ahead, parked, handed out when somebody asks for one like them.

It keeps each pool at its size and never hands out a box that does not answer. It never decides how long a box may live,
and a box in it is nobody's sandbox: it has no id that anybody knows, is in no count, and dies with its node.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sandlot.aio import deadline
from sandlot.api import Ending, PoolInfo, SandboxSpec, Warm
from sandlot.drivers.base import Box, Death, Driver, Keeping
from sandlot.errors import SandlotError, Unsupported

# A refill that fails (host out of memory, image gone) is tried again after this many seconds, not at once.
_AGAIN_SECONDS = 5.0
_MAKE_SECONDS = 60.0
# Making a box takes a processor for some milliseconds: not the very next ones after a claim, while there are others.
_LULL_SECONDS = 0.02


@dataclass(slots=True)
class _Kind:
    """One pool."""

    warm: Warm
    spec: SandboxSpec
    ready: deque[Box] = field(default_factory=deque)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    hits: int = 0
    misses: int = 0


class Pool:
    """The warm boxes of one node."""

    def __init__(
        self, driver: Driver, warm: Sequence[Warm], grace: float, have: Callable[[str], Awaitable[None]]
    ) -> None:
        """`grace` is the node's `orphan_grace`: what is claimed will have it. `have` pulls an image that is missing."""
        self._driver = driver
        self._have = have
        self._keeping = Keeping(grace, parked=True)
        self._kinds = [_Kind(each, SandboxSpec(image=each.image, profile=each.profile)) for each in warm]
        self._filling: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._filling = [loop.create_task(self._fill(kind)) for kind in self._kinds]

    async def claim(
        self, spec: SandboxSpec, named: frozenset[str], keeping: Keeping, like: Box | None = None
    ) -> Box | None:
        """A warm box made into what `spec` says (and from what `like` was made from); None when no pool fits, or none
        is ready. Raises Unsupported. Whatever goes wrong costs one box: it may not be the box's fault."""
        for kind in self._kinds:
            if not self._driver.fits(kind.spec, spec, named, like):
                continue
            if kind.ready:
                box = kind.ready.popleft()
                kind.wanted.set()
                try:
                    await self._driver.claim(box, spec, named, keeping)
                except BaseException as error:
                    self._discard(box)
                    if isinstance(error, Unsupported) or not isinstance(error, (OSError, SandlotError)):
                        raise
                else:
                    kind.hits += 1
                    return box
            kind.misses += 1
        return None

    def infos(self) -> list[PoolInfo]:
        return [
            PoolInfo(**kind.warm.model_dump(), ready=len(kind.ready), hits=kind.hits, misses=kind.misses)
            for kind in self._kinds
        ]

    async def close(self) -> None:
        """End what is parked."""
        for task in self._filling:
            task.cancel()
        if self._filling:
            await asyncio.wait(self._filling)
        parked = [box for kind in self._kinds for box in kind.ready]
        for kind in self._kinds:
            kind.ready.clear()
        await asyncio.gather(*(box.destroy(Ending.DRAINED) for box in parked), return_exceptions=True)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _fill(self, kind: _Kind) -> None:
        """Keep one pool at its size, one box at a time: those who ask for others go first."""
        while True:
            if len(kind.ready) > kind.warm.size // 2:
                await asyncio.sleep(_LULL_SECONDS)  # whoever took one is about to use it
            while len(kind.ready) < kind.warm.size:
                try:
                    await self._have(kind.spec.image)
                    async with deadline(_MAKE_SECONDS, "making a warm box"):
                        box = await self._driver.create(
                            f"warm-{secrets.token_hex(6)}", kind.spec, frozenset(), self._keeping
                        )
                except (OSError, SandlotError):
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                kind.ready.append(box)
                box.death.add_done_callback(partial(self._lost, kind, box))
            kind.wanted.clear()
            await kind.wanted.wait()

    def _lost(self, kind: _Kind, box: Box, _: asyncio.Future[Death]) -> None:
        """One that died while it was parked."""
        if box in kind.ready:
            kind.ready.remove(box)
            kind.wanted.set()
            self._discard(box)

    def _discard(self, box: Box) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(box.destroy(Ending.HELPER_DIED))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
