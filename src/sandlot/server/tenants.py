"""What one tenant sees of a node that it shares with others: its own sandboxes and images, and none of anybody else's.

It promises that another tenant's sandbox is as if it were not there, in whatever route: each route with a `sandbox_id`
is looked at by `own_sandbox` before it does anything; that names of images are each tenant's own; and that whose a
sandbox is cannot be changed by anybody. It holds nothing: whose a sandbox is stands in its spec, and so in the node's
notes and ledger; whose an image is, in its name. Images with the name of a registry's are everybody's, and only the
operator can put one there that no registry gave.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import HTTPConnection

from sandlot.api import (
    EVERY,
    STEP,
    Ending,
    Fault,
    Filter,
    ImageConfig,
    ImageInfo,
    Info,
    Made,
    NodeAPI,
    Page,
    PoolInfo,
    SandboxSpec,
    is_reference,
)
from sandlot.drivers.layers import check_name
from sandlot.errors import Forbidden, InvalidRequest, SandlotError, Unauthorized, no_sandbox
from sandlot.server.keys import ANYBODY, Caller, Keys
from sandlot.server.observe import with_id

T = TypeVar("T")


def caller_of(connection: HTTPConnection) -> Caller:
    """On whose behalf it is made: as the guard found."""
    found: Caller = connection.scope.get("state", {}).get("caller", ANYBODY)
    return found


def still_let_in(connection: HTTPConnection) -> None:
    """Of what goes on, before each piece of it. Raises Unauthorized (its key was revoked meanwhile), HostFault."""
    keys: Keys = connection.app.state.keys
    if not keys.holds(caller_of(connection)):
        raise Unauthorized("the key that this was asked for with is good no more", "ask with another")


async def while_let_in(connection: HTTPConnection, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """What comes, for as long as the caller would be let in. Raises as `still_let_in`. It closes nothing."""
    async for item in items:
        still_let_in(connection)
        yield item


def node_of(connection: HTTPConnection) -> NodeAPI:
    """The node as the caller sees it."""
    node: NodeAPI = connection.app.state.node
    tenant = caller_of(connection).tenant
    return node if tenant is None else cast(NodeAPI, TenantNode(node, tenant))


async def own_sandbox(connection: HTTPConnection) -> None:
    """Raises NotFound when the sandbox that a route is about is another tenant's."""
    tenant = caller_of(connection).tenant
    sandbox_id = connection.path_params.get("sandbox_id")
    if tenant is not None and sandbox_id is not None:
        node: NodeAPI = connection.app.state.node
        if (await node.info(sandbox_id)).tenant != tenant:
            raise no_sandbox(sandbox_id)


def prefix(tenant: str) -> str:
    """How the names of a tenant's images begin, in the node."""
    return f"t-{tenant}.."


def told(error: SandlotError, connection: HTTPConnection) -> dict[str, dict[str, str | None]]:
    """An error's words for the caller, with the id that the log has."""
    wire = with_id(error, connection.scope)["error"]
    tenant = caller_of(connection).tenant
    return {"error": wire if tenant is None else {name: _own_words(text, tenant) for name, text in wire.items()}}


def _own_words(text: str | None, tenant: str) -> str | None:
    """The names of a tenant's images are without it for itself."""
    return text and text.replace(prefix(tenant), "")


# What is the same for every tenant: what is about one sandbox, at which `own_sandbox` has looked, pulls, and the host.
_PASSED_ON = frozenset(
    """
    stats run launch commands wait follow signal write_stdin diff route
    open_shell shells run_in_shell shell_output interrupt_shell close_shell
    open_terminal terminals attach_terminal close_terminal
    read_file open_file write_file stat_file list_files glob_files find_text make_directory move_file remove_file
    change_file watch_files download upload
    pull_image capabilities
    """.split()  # noqa: SIM905  (a line each would hide what they have in common)
)


class TenantNode:
    """NodeAPI for one tenant: what is here, and what is passed on. A method of which nobody has decided is neither."""

    def __init__(self, node: NodeAPI, tenant: str) -> None:
        self._node = node
        self._tenant = tenant
        self._prefix = prefix(tenant)

    def __getattr__(self, name: str) -> Any:
        if name not in _PASSED_ON:
            raise AttributeError(name)
        return getattr(self._node, name)

    async def create(self, spec: SandboxSpec) -> Info:
        return self._shown(await self._node.create(self._mine(spec)))

    async def create_many(self, spec: SandboxSpec, count: int) -> list[Made]:
        made = await self._node.create_many(self._mine(spec), count)
        return [
            each.model_copy(
                update={
                    "sandbox": each.sandbox and self._shown(each.sandbox),
                    "error": each.error and self._said(each.error),
                }
            )
            for each in made
        ]

    async def page(self, wanted: Filter = EVERY, cursor: str | None = None, limit: int = 100) -> Page:
        if wanted.tenant not in (None, self._tenant):
            raise Forbidden(f"this key is of tenant {self._tenant}, and sees nobody else's sandboxes")
        image = None if wanted.image is None else self._inner(wanted.image)
        page = await self._node.page(wanted.model_copy(update={"tenant": self._tenant, "image": image}), cursor, limit)
        return page.model_copy(update={"sandboxes": tuple(map(self._shown, page.sandboxes))})

    async def info(self, sandbox_id: str) -> Info:
        return self._shown(await self._node.info(sandbox_id))

    async def wait_ended(self, sandbox_id: str, timeout: float | None = None) -> Info:
        return self._shown(await self._node.wait_ended(sandbox_id, timeout))

    async def reset(self, sandbox_id: str, image: str | None = None) -> Info:
        return self._shown(await self._node.reset(sandbox_id, None if image is None else self._inner(image)))

    async def fork(self, sandbox_id: str, count: int = 1) -> list[Info]:
        return [self._shown(info) for info in await self._node.fork(sandbox_id, count)]

    async def pause(self, sandbox_id: str) -> Info:
        return self._shown(await self._node.pause(sandbox_id))

    async def resume(self, sandbox_id: str) -> Info:
        return self._shown(await self._node.resume(sandbox_id))

    async def destroy(self, sandbox_id: str, ending: Ending = Ending.EXIT) -> Info:
        return self._shown(await self._node.destroy(sandbox_id, ending))

    async def snapshot(self, sandbox_id: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        check_name(name)
        return self._named(await self._node.snapshot(sandbox_id, self._inner(name), config), name)

    async def images(self) -> list[ImageInfo]:
        found = await self._node.images()
        seen = [each for each in found if is_reference(each.name) or each.name.startswith(self._prefix)]
        return [self._named(each, self._outer(each.name)) for each in seen]

    async def image(self, name: str) -> ImageInfo:
        return self._named(await self._node.image(self._inner(name)), name)

    async def import_image(self, name: str, path: Path) -> ImageInfo:
        check_name(name)
        return self._named(await self._node.import_image(self._inner(name), path), name)

    async def tag_image(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        check_name(name)
        return self._named(await self._node.tag_image(self._inner(image), self._inner(name), config), name)

    async def delete_image(self, name: str) -> None:
        if is_reference(name):
            raise Forbidden(f"the image {name} is every tenant's", "who runs the server can delete it")
        await self._node.delete_image(self._inner(name))

    def export_image(self, name: str) -> AsyncIterator[bytes]:
        return self._node.export_image(self._inner(name))

    async def prune_images(self) -> list[ImageInfo]:
        raise Forbidden("pulled images are every tenant's", "who runs the server can delete them")

    async def counts(self) -> dict[str, int]:
        raise Forbidden("the ledger is about every tenant's sandboxes", "who runs the server can read it")

    async def pools(self) -> list[PoolInfo]:
        raise Forbidden("the warm pools tell of every tenant's creates", "who runs the server can look at them")

    def _mine(self, spec: SandboxSpec) -> SandboxSpec:
        if spec.tenant not in (None, self._tenant):
            raise InvalidRequest(f"this key is of tenant {self._tenant}, not of {spec.tenant}", "leave `tenant` out")
        return spec.model_copy(update={"tenant": self._tenant, "image": self._inner(spec.image)})

    def _shown(self, info: Info) -> Info:
        return info.model_copy(update={"image": self._outer(info.image)})

    def _said(self, fault: Fault) -> Fault:
        words = {name: _own_words(text, self._tenant) for name, text in fault.model_dump().items()}
        return fault.model_copy(update=words)

    def _named(self, image: ImageInfo, name: str) -> ImageInfo:
        return image.model_copy(update={"name": name, "base": self._outer(image.base)})

    def _inner(self, name: str) -> str:
        """An image's name in the node."""
        if name == "host" or name.startswith("/") or is_reference(name):
            return name
        if name.startswith(STEP):  # of what, its name must not say to anybody else, and it must stay a step
            return STEP + hashlib.sha256(f"{self._tenant} {name}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self._prefix + name

    def _outer(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    # The last one, because below it in a class body `list` is this method and no longer the type.
    async def list(self) -> list[Info]:
        return [info for info in map(self._shown, await self._node.list()) if info.tenant == self._tenant]
