"""Creates with a key: each is made once, and whoever asks for it again gets the same sandbox, from a node that adopted
it too. One that could not be made, or that ended before anybody heard of it, is as if it had never been asked for.

Owns which key leads to which sandbox, as long as that is made or lives; of those that ended the ledger knows it. It
promises that a sandbox of which nobody heard, because whoever asked for it was gone by then, does not stay: when nobody
came back for it in time it is ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from sandlot.api import Info, SandboxSpec
from sandlot.errors import Conflict
from sandlot.node.keyed import AWAY_SECONDS


def fingerprint(spec: SandboxSpec, named: frozenset[str]) -> str:
    """Tells two creates apart."""
    words = json.dumps((spec.model_dump(mode="json", exclude={"key"}), sorted(named)), sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def derived(key: str, number: int) -> str:
    """The key of one of those that were asked for together."""
    made = f"{key}#{number}"
    return made if len(made) <= 100 else hashlib.sha256(made.encode()).hexdigest()


_Key = tuple[str | None, str]  # whose, and which


@dataclass(slots=True)
class _Create:
    what: str
    making: asyncio.Task[Info] | None = None
    id: str | None = None  # once it is made
    waiting: int = 0
    told: bool = False
    timer: asyncio.TimerHandle | None = None  # while nobody who could hear of it is there

    def rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Creates:
    """Those of one node."""

    def __init__(
        self,
        begin: Callable[[Coroutine[Any, Any, Info]], asyncio.Task[Info]],
        tell: Callable[[str], None],
        end: Callable[[str], None],
        before: Callable[[str | None, str], tuple[str, str] | None],
    ) -> None:
        """`begin` starts a task that the node waits for; `tell` is called once for each, before anybody hears of it;
        `end` ends a sandbox that nobody came for; `before` says which one somebody heard of that was made with a key,
        and its fingerprint, though it has ended."""
        self._begin = begin
        self._tell = tell
        self._end = end
        self._before = before
        self._creates: dict[_Key, _Create] = {}
        self._keys: dict[str, _Key] = {}  # by sandbox

    async def made(self, tenant: str | None, key: str, what: str, make: Callable[[], Coroutine[Any, Any, Info]]) -> str:
        """The id of the sandbox that was made with the key, which is the tenant's own; `make` makes it, if none was.
        Raises what that raises, and Conflict: it was another that was made."""
        create = self._creates.get((tenant, key))
        if create is None:
            before = self._before(tenant, key)
            if before is not None:
                sandbox_id, was = before
                _check(key, was, what)
                return sandbox_id
            create = self._creates[tenant, key] = _Create(what)
            create.making = self._begin(self._made((tenant, key), create, make))
            create.making.add_done_callback(partial(self._done, (tenant, key), create))
        _check(key, create.what, what)
        create.rest()
        create.waiting += 1
        try:
            sandbox_id = create.id or (await asyncio.shield(self._making(create))).id
            if not create.told:
                create.told = True
                self._tell(sandbox_id)
            return sandbox_id
        finally:
            create.waiting -= 1
            if not create.waiting and not create.told and self._creates.get((tenant, key)) is create:
                self._wait_for_somebody(create)

    def restore(self, tenant: str | None, key: str, what: str, sandbox_id: str, told: bool) -> None:
        """What a node before this one made. If nobody is known to have heard of it, its time to be asked for begins."""
        create = self._creates[tenant, key] = _Create(what, id=sandbox_id, told=told)
        self._keys[sandbox_id] = tenant, key
        if not told:
            self._wait_for_somebody(create)

    def ended(self, sandbox_id: str) -> None:
        """If nobody has heard of it, it is as if it had not been asked for."""
        key = self._keys.pop(sandbox_id, None)
        if key is not None:
            self._creates.pop(key).rest()

    def close(self) -> None:
        for create in self._creates.values():
            create.rest()

    def _making(self, create: _Create) -> asyncio.Task[Info]:
        assert create.making is not None
        return create.making

    async def _made(self, key: _Key, create: _Create, make: Callable[[], Coroutine[Any, Any, Info]]) -> Info:
        info = await make()
        create.id = info.id  # in the step in which it began to live: before anybody can be told that it ended
        self._keys[create.id] = key
        return info

    def _done(self, key: _Key, create: _Create, making: asyncio.Task[Info]) -> None:
        create.making = None
        if making.cancelled() or making.exception() is not None:
            create.rest()
            del self._creates[key]

    def _wait_for_somebody(self, create: _Create) -> None:
        create.timer = asyncio.get_running_loop().call_later(AWAY_SECONDS, self._nobody_came, create)

    def _nobody_came(self, create: _Create) -> None:
        create.timer = None
        if create.id is not None:
            self._end(create.id)
        elif create.making is not None:
            create.making.cancel()


def _check(key: str, was: str, what: str) -> None:
    if was != what:
        raise Conflict(f"another sandbox was made with the key {key}", "take a new key for each sandbox")
