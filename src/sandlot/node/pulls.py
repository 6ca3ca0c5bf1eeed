"""Images on their way to this node: one task for each name, however many wait for it.

It promises that all who want one image share one pull; that the pull ends when the last of them gives up, and is over,
with nothing left of it, when that one returns. What a pull does, and what other nodes do meanwhile, is the driver's
business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from sandlot.aio import deadline, shielded
from sandlot.api import ImageInfo, PullProgress, is_reference
from sandlot.drivers.base import Driver, Progress
from sandlot.drivers.oci.reference import full
from sandlot.errors import HostFault, NotFound

# A pull of tens of gigabytes over a slow line (seconds).
PULL_SECONDS = 4 * 3600.0
IMPORT_SECONDS = 3600.0
# How often who waits is told how far it is (seconds): as often as a person sees; and how often when nothing has moved,
# so that a caller far away knows that somebody is there.
_TELL_SECONDS, _STILL_SECONDS = 0.2, 10.0


@dataclass(slots=True)
class _Pull:
    progress: Progress
    task: asyncio.Task[ImageInfo]
    waiting: int = 0


class Pulls:
    """Those of one node."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pulls: dict[str, _Pull] = {}
        self._imports: set[asyncio.Task[ImageInfo]] = set()

    async def have(self, image: str) -> None:
        """Pull an image that is missing here, if it is one of a registry. Raises what `follow` does."""
        if not is_reference(image):
            return  # what else is missing is told by who makes the box
        try:
            await self._driver.image(image)
        except NotFound:
            async for _ in self.follow(image):
                pass

    async def follow(self, reference: str) -> AsyncGenerator[PullProgress, None]:
        """See `NodeAPI.pull_image`."""
        name = full(reference)
        pull = self._pulls.get(name)
        if pull is None or pull.task.done() or pull.task.cancelling():
            progress = Progress()
            task = asyncio.get_running_loop().create_task(self._pull(reference, progress))
            pull = self._pulls[name] = _Pull(progress, task)
        pull.waiting += 1
        loop = asyncio.get_running_loop()
        last, told = PullProgress(), loop.time()
        try:
            while not pull.task.done():
                await asyncio.wait((pull.task,), timeout=_TELL_SECONDS)
                seen = pull.progress.seen()
                if seen != last or loop.time() - told > _STILL_SECONDS:
                    last, told = seen, loop.time()
                    yield seen
            if pull.task.cancelled():
                raise HostFault(f"the node was shut down while it pulled {name}")
            yield pull.progress.seen().model_copy(update={"image": pull.task.result()})
        finally:
            pull.waiting -= 1
            if not pull.waiting:
                if self._pulls.get(name) is pull:
                    del self._pulls[name]
                pull.task.cancel()
                await shielded(_over(pull.task))

    async def _pull(self, reference: str, progress: Progress) -> ImageInfo:
        async with deadline(PULL_SECONDS, f"pulling {reference}", "is its registry slow, or this host's disk full?"):
            return await self._driver.pull(reference, progress)

    async def import_(self, name: str, path: Path) -> ImageInfo:
        """See `NodeAPI.import_image`."""
        task = asyncio.get_running_loop().create_task(self._import(name, path))
        self._imports.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._imports:  # else it was the node, not the caller, who gave it up
                raise
            raise HostFault(f"the node was shut down while it imported {name}") from None
        finally:
            self._imports.discard(task)

    async def _import(self, name: str, path: Path) -> ImageInfo:
        async with deadline(IMPORT_SECONDS, f"importing {path}"):
            return await self._driver.import_(name, path, Progress())

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks = [*self._imports, *(pull.task for pull in self._pulls.values())]
        self._imports.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _over(task: asyncio.Task[ImageInfo]) -> None:
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen: who waited has it
