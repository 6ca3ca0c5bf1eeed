"""The native HTTP API: one short function per route, the models of `api.py` as they are.

It decides nothing: each function calls the node's method of the same meaning and returns what it returns. What of the
host may be mounted is asked of `volumes.py`.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import IO, Annotated, Any, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect

from sandlot.api import (
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    ImageConfig,
    ImageInfo,
    Info,
    NodeAPI,
    PoolInfo,
    Run,
    RunResult,
    SandboxSpec,
    ShellInfo,
    ShellOutput,
    ShellResult,
    ShellRun,
    ShellSpec,
    Stats,
    Upstream,
    is_reference,
    to_json,
)
from sandlot.drivers.layers import Room, no_room, taken
from sandlot.drivers.oci.archive import kept_as
from sandlot.errors import NotFound, SandlotError, Unsupported, host_fault
from sandlot.server.volumes import AllowedVolumes

router = APIRouter(prefix="/v1")

T = TypeVar("T")

_PIECE = 1 << 20  # bytes that are worth a thread's while

_INFO = TypeAdapter(Info)
_INFOS = TypeAdapter(list[Info])
_STATS = TypeAdapter(Stats)
_RESULT = TypeAdapter(RunResult)
_IMAGE = TypeAdapter(ImageInfo)
_IMAGES = TypeAdapter(list[ImageInfo])
_CHANGES = TypeAdapter(list[Change])
_COMMAND = TypeAdapter(CommandInfo)
_COMMANDS = TypeAdapter(list[CommandInfo])
_CHUNK = TypeAdapter(Chunk)
_SHELL = TypeAdapter(ShellInfo)
_SHELLS = TypeAdapter(list[ShellInfo])
_SHELL_RESULT = TypeAdapter(ShellResult)
_SHELL_OUTPUT = TypeAdapter(ShellOutput)


async def _node(request: Request) -> NodeAPI:
    node: NodeAPI = request.app.state.node
    return node


Node = Annotated[NodeAPI, Depends(_node)]
Id = Annotated[str, Path(description="a sandbox's id", examples=["sb-0a1b2c3d4e5f60"])]
CommandId = Annotated[str, Path(description="a command's id", examples=["c-0a1b2c3d4e5f"])]
ShellId = Annotated[str, Path(description="a shell's id", examples=["sh-0a1b2c3d"])]
Name = Annotated[str, Path(description="an image's name", examples=["solved"])]


async def _image(request: Request, node: NodeAPI, name: str) -> str:
    """The same, with links followed, unless it shows what callers may not see: a directory of this host, or a snapshot
    that lies over one."""
    volumes: AllowedVolumes = request.app.state.volumes
    if name != "host" and not name.startswith("/") and not is_reference(name):
        with suppress(NotFound):  # as who makes the sandbox says better
            volumes.image((await node.image(name)).base)
    return volumes.image(name)


async def _file_path(
    request: Request, path: Annotated[str, Query(description="absolute path inside", examples=["/root/notes.txt"])]
) -> str:
    # The framework replaces bytes that are not UTF-8; a file's name may have some.
    query: bytes = request.scope["query_string"]
    return parse_qs(query.decode("ascii", "surrogateescape"), True, errors="surrogateescape").get("path", [path])[-1]


FilePath = Annotated[str, Depends(_file_path)]


def _json(kind: TypeAdapter[T], answer: T, status: int = 200) -> Response:
    """As it is: without the second validation that a returned model would go through."""
    return Response(to_json(kind, answer), status, media_type="application/json")


async def _while_heard(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns. When the caller hangs up first it is cancelled, as it would be in the caller's own process,
    and the result is None."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        listening.cancel()
        working.cancel()
        await asyncio.wait((working, listening))
    return None if working.cancelled() else working.result()


def _check_network(request: Request, spec: SandboxSpec) -> None:
    if spec.network not in request.app.state.networks:
        raise Unsupported(
            f"this server gives no sandbox the network {spec.network!r}",
            f"who runs the server can allow it: `sandlot serve --allow-network {spec.network}`",
        )


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.post("/sandboxes", status_code=201, response_model=Info)
async def create(request: Request, node: Node, spec: SandboxSpec) -> Response:
    """Make a sandbox; answers when a command can run in it."""
    _check_network(request, spec)
    spec = request.app.state.volumes.checked(spec)
    info = await node.create(spec.model_copy(update={"image": await _image(request, node, spec.image)}))
    if await request.is_disconnected():  # nobody would ever know its id
        info = await node.destroy(info.id, Ending.KILLED)
    return _json(_INFO, info, 201)


@router.get("/sandboxes", response_model=list[Info])
async def list_running(node: Node) -> Response:
    """The running sandboxes."""
    return _json(_INFOS, await node.list())


@router.get("/sandboxes/{sandbox_id}", response_model=Info)
async def info(node: Node, sandbox_id: Id) -> Response:
    """What is known of a sandbox, for an hour after its end too."""
    return _json(_INFO, await node.info(sandbox_id))


@router.get("/sandboxes/{sandbox_id}/stats", response_model=Stats)
async def stats(node: Node, sandbox_id: Id) -> Response:
    """What a sandbox uses now; null where this host does not count it."""
    return _json(_STATS, await node.stats(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/reset", response_model=Info)
async def reset(
    request: Request,
    node: Node,
    sandbox_id: Id,
    image: Annotated[str | None, Body(embed=True, description="null: the image that it has")] = None,
) -> Response:
    """Back to its image, or to another one: its processes and files are gone; id, limits, labels and routes stay."""
    return _json(_INFO, await node.reset(sandbox_id, image and await _image(request, node, image)))


@router.post("/sandboxes/{sandbox_id}/snapshot", status_code=201, response_model=ImageInfo)
async def snapshot(
    node: Node,
    sandbox_id: Id,
    name: Annotated[str, Body(embed=True, description="of the new image")],
    config: Annotated[ImageConfig | None, Body(embed=True, description="null: its image's")] = None,
) -> Response:
    """Make an image of its files as they are now."""
    return _json(_IMAGE, await node.snapshot(sandbox_id, name, config), 201)


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201, response_model=list[Info])
async def fork(
    request: Request, node: Node, sandbox_id: Id, count: Annotated[int, Body(embed=True, ge=1)] = 1
) -> Response:
    """So many new sandboxes like this one, with its files as they are now and none of its processes."""
    made = await node.fork(sandbox_id, count)
    if await request.is_disconnected():  # nobody would ever know their ids
        made = [await node.destroy(info.id, Ending.KILLED) for info in made]
    return _json(_INFOS, made, 201)


@router.get("/sandboxes/{sandbox_id}/diff", response_model=list[Change])
async def diff(node: Node, sandbox_id: Id) -> Response:
    """What differs from its image."""
    return _json(_CHANGES, await node.diff(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/pause", response_model=Info)
async def pause(node: Node, sandbox_id: Id) -> Response:
    """Stop every process where it is."""
    return _json(_INFO, await node.pause(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/resume", response_model=Info)
async def resume(node: Node, sandbox_id: Id) -> Response:
    """Let them go on."""
    return _json(_INFO, await node.resume(sandbox_id))


@router.get("/images", response_model=list[ImageInfo])
async def images(node: Node) -> Response:
    """The images that are here, without `host`."""
    return _json(_IMAGES, await node.images())


@router.post("/images/{image:path}/tag", response_model=ImageInfo)
async def tag_image(
    node: Node,
    image: Annotated[str, Path(description="an image's name")],
    name: Annotated[str, Body(description="of the image that is made")],
    config: Annotated[ImageConfig | None, Body(description="null: the same")] = None,
) -> Response:
    """Give what a build made its name; a built image of that name is replaced."""
    return _json(_IMAGE, await node.tag_image(image, name, config))


@router.post("/images/pull", response_class=StreamingResponse)
async def pull_image(node: Node, reference: Annotated[str, Body(embed=True, examples=["debian:12"])]) -> Response:
    """Fetch an image from its registry. A line of JSON a few times a second says how far it is; the last one carries
    the image, or is an error."""
    lines = node.pull_image(reference)
    first = await anext(lines)  # an error is an answer, as long as nothing was said

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first.model_dump_json().encode() + b"\n"
            async for line in lines:
                yield line.model_dump_json().encode() + b"\n"
        except SandlotError as error:
            yield json.dumps(error.to_wire()).encode() + b"\n"
        finally:
            await lines.aclose()  # at once: whoever hung up wants it no more

    return StreamingResponse(body(), media_type="application/x-ndjson")


@router.post("/images/prune")
async def prune_images(node: Node) -> list[ImageInfo]:
    """Delete the pulled images and the steps of builds that no sandbox stands on, and no snapshot or build: which they
    were."""
    return await node.prune_images()


@router.get("/images/{name:path}/tar", response_class=StreamingResponse)
async def export_image(request: Request, node: Node, name: Name) -> Response:
    """What an image holds over its base, as a tar in the form of an OCI layer. `…%2Ftar` is no export: it is the image
    of that name."""
    if request.scope.get("raw_path", b"").lower().endswith(b"%2ftar"):
        return await image(node, f"{name}/tar")
    chunks = node.export_image(name)
    first = await anext(chunks)  # an error is an answer, not a broken stream

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(body(), media_type="application/x-tar")


@router.get("/images/{name:path}", response_model=ImageInfo)
async def image(node: Node, name: Name) -> Response:
    """One image."""
    return _json(_IMAGE, await node.image(name))


@router.put("/images/{name:path}", status_code=201, response_model=ImageInfo)
async def import_image(request: Request, node: Node, name: Name) -> Response:
    """Make an image of the request's body: a tar of an OCI layout, what `docker save` writes, a tar of a root file
    system."""
    kept_as(name)
    with suppress(NotFound):  # before all of it is sent
        await node.image(name)
        raise taken(name)
    try:
        with tempfile.TemporaryFile(dir=request.app.state.spool) as file:
            await _keep(request, file)
            return _json(_IMAGE, await node.import_image(name, pathlib.Path(f"/proc/self/fd/{file.fileno()}")), 201)
    except OSError as error:
        raise host_fault(error, "keep what was sent") from error


async def _keep(request: Request, file: IO[bytes]) -> None:
    """Write what is sent to a file, and leave room on its disk for others."""
    place = request.app.state.spool or tempfile.gettempdir()
    room = Room.of(place)
    waiting = bytearray()

    async def write() -> None:
        if not room.lasts(place, len(waiting)):
            raise no_room("keep the image that is sent")
        await asyncio.to_thread(file.write, bytes(waiting))
        waiting.clear()

    async for piece in request.stream():
        waiting += piece
        if len(waiting) >= _PIECE:
            await write()
    await write()
    await asyncio.to_thread(file.flush)


@router.delete("/images/{name:path}", status_code=204)
async def delete_image(node: Node, name: Name) -> Response:
    """Delete an image; sandboxes made from it live on."""
    await node.delete_image(name)
    return Response(status_code=204)


@router.get("/pools")
async def pools(node: Node) -> list[PoolInfo]:
    """The warm sandboxes that wait to be handed out."""
    return await node.pools()


@router.delete("/sandboxes/{sandbox_id}", response_model=Info)
async def destroy(node: Node, sandbox_id: Id, ending: Ending = Ending.EXIT) -> Response:
    """End a sandbox; idempotent. When it answers no process of it is left."""
    return _json(_INFO, await node.destroy(sandbox_id, ending))


@router.post("/sandboxes/{sandbox_id}/run", response_model=RunResult)
async def run(request: Request, node: Node, sandbox_id: Id, run: Run) -> Response:
    """Run a command to its end. A failure of the command is a result, not an error. When the caller hangs up, the
    command is killed."""
    result = await _while_heard(request, node.run(sandbox_id, run))
    return _json(_RESULT, result) if result is not None else Response(status_code=499)  # which nobody reads


@router.post("/sandboxes/{sandbox_id}/commands", status_code=201, response_model=CommandInfo)
async def launch(node: Node, sandbox_id: Id, run: Run) -> Response:
    """Start a command and leave it to itself; its id is its key, or one that is made up."""
    return _json(_COMMAND, await node.launch(sandbox_id, run), 201)


@router.get("/sandboxes/{sandbox_id}/commands", response_model=list[CommandInfo])
async def commands(node: Node, sandbox_id: Id) -> Response:
    """Those that run, and those whose result can still be had."""
    return _json(_COMMANDS, await node.commands(sandbox_id))


@router.get("/sandboxes/{sandbox_id}/commands/{command_id}/wait", response_model=RunResult)
async def wait(request: Request, node: Node, sandbox_id: Id, command_id: CommandId) -> Response:
    """How a command ended; answers when it has. When the caller hangs up, it goes on."""
    result = await _while_heard(request, node.wait(sandbox_id, command_id))
    return _json(_RESULT, result) if result is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes/{sandbox_id}/commands/{command_id}/output", response_class=StreamingResponse)
async def follow(
    node: Node,
    sandbox_id: Id,
    command_id: CommandId,
    out: Annotated[int, Query(ge=0, description="where to begin in standard output")] = 0,
    err: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """What a command writes, as it comes: a `Chunk` in JSON on each line, until the command has ended. An error that
    comes in the middle is the last line."""
    chunks = node.follow(sandbox_id, command_id, out, err)
    first = await anext(chunks, None)  # an error is an answer, not a broken stream

    async def body() -> AsyncIterator[bytes]:
        if first is not None:
            yield to_json(_CHUNK, first) + b"\n"
        try:
            async for chunk in chunks:
                yield to_json(_CHUNK, chunk) + b"\n"
        except SandlotError as error:
            yield json.dumps(error.to_wire()).encode() + b"\n"

    return StreamingResponse(body(), media_type="application/x-ndjson")


@router.post("/sandboxes/{sandbox_id}/commands/{command_id}/signal", status_code=204)
async def signal(
    node: Node,
    sandbox_id: Id,
    command_id: CommandId,
    number: Annotated[int, Body(embed=True, ge=1, le=64, description="15 asks a program to end, 9 ends it")],
) -> Response:
    """Send a signal to a command and its process group; no error when it has ended."""
    await node.signal(sandbox_id, command_id, number)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/commands/{command_id}/stdin", status_code=204)
async def write_stdin(
    request: Request,
    node: Node,
    sandbox_id: Id,
    command_id: CommandId,
    end: Annotated[bool, Query(description="nothing comes after this")] = False,
) -> Response:
    """More for the standard input of a command that was started with `stdin_open`; answers when it has been taken."""
    await _while_heard(request, node.write_stdin(sandbox_id, command_id, await request.body(), end))
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/shells", status_code=201, response_model=ShellInfo)
async def open_shell(node: Node, sandbox_id: Id, spec: ShellSpec) -> Response:
    """A bash that lives on between commands; `sh` where the image has none. A reset ends it, and the server's end."""
    return _json(_SHELL, await node.open_shell(sandbox_id, spec), 201)


@router.get("/sandboxes/{sandbox_id}/shells", response_model=list[ShellInfo])
async def shells(node: Node, sandbox_id: Id) -> Response:
    """The shells of a sandbox, those that have ended and were not closed too."""
    return _json(_SHELLS, await node.shells(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/shells/{shell_id}/run", response_model=ShellResult)
async def run_in_shell(request: Request, node: Node, sandbox_id: Id, shell_id: ShellId, run: ShellRun) -> Response:
    """Run a text to its end. A shell that is busy answers 409. When the caller hangs up, the text is cut short."""
    result = await _while_heard(request, node.run_in_shell(sandbox_id, shell_id, run))
    return _json(_SHELL_RESULT, result) if result is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes/{sandbox_id}/shells/{shell_id}/commands/{command_id}", response_model=ShellOutput)
async def shell_output(node: Node, sandbox_id: Id, shell_id: ShellId, command_id: str) -> Response:
    """What a finished command and its children in the background have written so far."""
    return _json(_SHELL_OUTPUT, await node.shell_output(sandbox_id, shell_id, command_id))


@router.post("/sandboxes/{sandbox_id}/shells/{shell_id}/interrupt")
async def interrupt_shell(node: Node, sandbox_id: Id, shell_id: ShellId) -> bool:
    """End what runs there as ^C does, then less politely; false: nothing ran."""
    return await node.interrupt_shell(sandbox_id, shell_id)


@router.delete("/sandboxes/{sandbox_id}/shells/{shell_id}", status_code=204)
async def close_shell(node: Node, sandbox_id: Id, shell_id: ShellId) -> Response:
    """End a shell with all that runs in it; idempotent."""
    await node.close_shell(sandbox_id, shell_id)
    return Response(status_code=204)


@router.get("/sandboxes/{sandbox_id}/files", response_class=Response)
async def read_file(node: Node, sandbox_id: Id, path: FilePath) -> Response:
    """The bytes of a regular file."""
    return Response(await node.read_file(sandbox_id, path), media_type="application/octet-stream")


@router.put("/sandboxes/{sandbox_id}/files", status_code=204)
async def write_file(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    request: Request,
    mode: Annotated[int, Query(ge=0, le=0o777, description="permission bits, as a decimal number")] = 0o644,
) -> Response:
    """Make or replace a file with the request's body; missing parents are made."""
    await node.write_file(sandbox_id, path, await request.body(), mode)
    return Response(status_code=204)


@router.put("/sandboxes/{sandbox_id}/tree", status_code=204)
async def upload(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    request: Request,
    user: Annotated[int, Query(ge=0, le=65_535, description="whose what is made becomes")] = 0,
) -> Response:
    """Unpack the request's body, a tar, below a directory. It may be of any size: it is passed on as it comes."""
    try:
        await node.upload(sandbox_id, path, request.stream(), user)
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/routes/{port}", status_code=204)
async def route(
    node: Node,
    sandbox_id: Id,
    port: Annotated[int, Path(ge=1, le=65_535)],
    upstream: Annotated[Upstream, Body()],
) -> Response:
    """Let a URL answer on 127.0.0.1:port inside; the headers given here are added where the sandbox cannot see them."""
    await node.route(sandbox_id, port, upstream)
    return Response(status_code=204)


@router.get("/capabilities")
async def capabilities(node: Node) -> list[Capability]:
    """What this host keeps of what Sandlot promises."""
    return await node.capabilities()


@router.get("/ledger")
async def ledger(node: Node) -> dict[str, int]:
    """How many creates were begun, how many sandboxes run, how many ended in each way."""
    return await node.counts()
