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
from contextlib import AsyncExitStack, suppress
from typing import IO, Annotated, Any, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, HTTPConnection

from sandlot.api import (
    EVERY,
    MOST_FOUND,
    MOST_OFFSET,
    MOST_USER,
    REPLAY,
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    FileEvent,
    FileInfo,
    FileName,
    FilesFound,
    Filter,
    ImageConfig,
    ImageInfo,
    Info,
    Made,
    NodeAPI,
    PoolInfo,
    Run,
    RunResult,
    SandboxSpec,
    Seconds,
    ShellInfo,
    ShellOutput,
    ShellResult,
    ShellRun,
    ShellSpec,
    State,
    Stats,
    TerminalInfo,
    TerminalSpec,
    TextFound,
    Upstream,
    is_reference,
    to_json,
)
from sandlot.drivers.layers import Room, no_room, taken
from sandlot.drivers.oci.archive import kept_as
from sandlot.errors import Forbidden, NotFound, SandlotError, Unsupported, host_fault
from sandlot.server import contents
from sandlot.server import terminals as sockets
from sandlot.server.tenants import caller_of, node_of, own_sandbox, still_let_in, told, while_let_in
from sandlot.server.volumes import AllowedVolumes

router = APIRouter(prefix="/v1", dependencies=[Depends(own_sandbox)])

T = TypeVar("T")

_PIECE = 1 << 20  # bytes that are worth a thread's while

_INFO = TypeAdapter(Info)
_INFOS = TypeAdapter(list[Info])
_MADE = TypeAdapter(list[Made])
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
_FILE = TypeAdapter(FileInfo)
_FILES = TypeAdapter(list[FileInfo])
_FILES_FOUND = TypeAdapter(FilesFound)
_TEXT_FOUND = TypeAdapter(TextFound)
_FILE_EVENT = TypeAdapter(FileEvent)

# Bytes of a body that is taken in one piece.
_SHORT_BODY = 1 << 20
_TERMINAL = TypeAdapter(TerminalInfo)
_TERMINALS = TypeAdapter(list[TerminalInfo])


async def _node(connection: HTTPConnection) -> NodeAPI:
    return node_of(connection)


Node = Annotated[NodeAPI, Depends(_node)]
Id = Annotated[str, Path(description="a sandbox's id", examples=["sb-0a1b2c3d4e5f60"])]
CommandId = Annotated[str, Path(description="a command's id", examples=["c-0a1b2c3d4e5f"])]
ShellId = Annotated[str, Path(description="a shell's id", examples=["sh-0a1b2c3d"])]
TerminalId = Annotated[str, Path(description="a terminal's id", examples=["t-0a1b2c3d"])]
Name = Annotated[str, Path(description="an image's name", examples=["solved"])]


async def _image(request: Request, node: NodeAPI, name: str) -> str:
    """The same, with links followed, unless it shows what callers may not see: a directory of this host, or a snapshot
    that lies over one."""
    volumes: AllowedVolumes = request.app.state.volumes
    if name != "host" and not name.startswith("/") and not is_reference(name):
        with suppress(NotFound):  # as who makes the sandbox says better
            volumes.image((await node.image(name)).base)
    return volumes.image(name)


def _as_sent(name: str, description: str, example: str, default: Any = ...) -> Any:
    """A word of the query, byte for byte: the framework replaces those that are not UTF-8, and a file's name may have
    some."""
    given = Query(default, alias=name, description=description, examples=[example])

    async def found(request: Request, word: str = given) -> str:
        query: bytes = request.scope["query_string"]
        return parse_qs(query.decode("ascii", "surrogateescape"), True, errors="surrogateescape").get(name, [word])[-1]

    return Depends(found)


FilePath = Annotated[str, _as_sent("path", "absolute path inside", "/root/notes.txt")]


async def _filter(
    state: Annotated[list[State] | None, Query(description="may be repeated; without one those that live")] = None,
    label: Annotated[list[str] | None, Query(description="NAME=VALUE, or NAME for any value", max_length=100)] = None,
    image: Annotated[str | None, Query(description="as their specs name it")] = None,
    tenant: Annotated[str | None, Query(description="whose they are")] = None,
) -> Filter:
    pairs = (words.partition("=") for words in label or ())
    labels = {name: value if equals else None for name, equals, value in pairs}
    return Filter(states=tuple(state or EVERY.states), labels=labels, image=image, tenant=tenant)


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


async def _waited(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The same of what may take for ever: who is not let in any more when it is there does not get it."""
    found = await _while_heard(request, work)
    still_let_in(request)
    return found


async def _first(items: AsyncIterator[T]) -> list[T]:
    """The first of them, if there is one."""
    async for item in items:
        return [item]
    return []


def _last_line(request: Request, error: SandlotError) -> bytes:
    """Of a stream that an error ends."""
    return json.dumps(told(error, request)).encode() + b"\n"


def _check_network(request: Request, spec: SandboxSpec) -> None:
    if spec.network not in request.app.state.networks:
        raise Unsupported(
            f"this server gives no sandbox the network {spec.network!r}",
            f"who runs the server can allow it: `sandlot serve --allow-network {spec.network}`",
        )


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _allowed(request: Request, node: NodeAPI, spec: SandboxSpec) -> SandboxSpec:
    """The same, with links followed. Raises Unsupported for what this server gives nobody."""
    _check_network(request, spec)
    spec = request.app.state.volumes.checked(spec)
    return spec.model_copy(update={"image": await _image(request, node, spec.image)})


@router.post("/sandboxes", status_code=201, response_model=Info)
async def create(request: Request, node: Node, spec: SandboxSpec) -> Response:
    """Make a sandbox; answers when a command can run in it. With a `key` it can be asked again, after whatever
    happened, and is made once."""
    spec = await _allowed(request, node, spec)
    if spec.key is not None:  # whoever hangs up may come back for it
        found = await _while_heard(request, node.create(spec))
        return _json(_INFO, found, 201) if found is not None else Response(status_code=499)  # which nobody reads
    info = await node.create(spec)
    if await request.is_disconnected():  # nobody would ever know its id
        info = await node.destroy(info.id, Ending.KILLED)
    return _json(_INFO, info, 201)


@router.post("/sandboxes/batch", status_code=201, response_model=list[Made])
async def create_many(
    request: Request,
    node: Node,
    spec: Annotated[SandboxSpec, Body()],
    count: Annotated[int, Body(ge=1, le=1000)],
) -> Response:
    """Make so many sandboxes; answers when a command can run in each, or it is known why there is none."""
    made = await _while_heard(request, node.create_many(await _allowed(request, node, spec), count))
    return _json(_MADE, made, 201) if made is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes", response_model=list[Info])
async def sandboxes(
    request: Request,
    node: Node,
    wanted: Annotated[Filter, Depends(_filter)],
    cursor: Annotated[str | None, Query(description="from the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The running sandboxes, or those that fit, the oldest first. Where there are more, the header `Link` has the path
    of the next page, as `rel="next"`."""
    page = await node.page(wanted, cursor, limit)
    answer = _json(_INFOS, list(page.sandboxes))
    if page.next is not None:
        there = request.url.include_query_params(cursor=page.next)
        answer.headers["link"] = f'<{there.path}?{there.query}>; rel="next"'
    return answer


@router.get("/sandboxes/{sandbox_id}/wait", response_model=Info)
async def wait_ended(
    request: Request,
    node: Node,
    sandbox_id: Id,
    timeout: Annotated[Seconds | None, Query(description="seconds, and then it answers as it is")] = None,
) -> Response:
    """How a sandbox ended; answers when it has."""
    found = await _waited(request, node.wait_ended(sandbox_id, timeout))
    return _json(_INFO, found) if found is not None else Response(status_code=499)  # which nobody reads


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
    image: Annotated[FileName | None, Body(embed=True, description="null: the image that it has")] = None,
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
async def pull_image(
    request: Request, node: Node, reference: Annotated[str, Body(embed=True, examples=["debian:12"])]
) -> Response:
    """Fetch an image from its registry. A line of JSON a few times a second says how far it is; the last one carries
    the image, or is an error."""
    lines = node.pull_image(reference)
    first = await anext(lines)  # an error is an answer, as long as nothing was said

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first.model_dump_json().encode() + b"\n"
            async for line in while_let_in(request, lines):
                yield line.model_dump_json().encode() + b"\n"
        except SandlotError as error:
            yield _last_line(request, error)
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
        async for chunk in while_let_in(request, chunks):
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
    result = await _waited(request, node.run(sandbox_id, run))
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
    """How a command ended; answers when it has. When the caller hangs up, it goes on, unless it was started with
    `kill_on_disconnect`."""
    result = await _waited(request, node.wait(sandbox_id, command_id))
    return _json(_RESULT, result) if result is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes/{sandbox_id}/commands/{command_id}/output", response_class=StreamingResponse)
async def follow(
    request: Request,
    node: Node,
    sandbox_id: Id,
    command_id: CommandId,
    out: Annotated[int, Query(ge=0, le=MOST_OFFSET, description="where to begin in standard output")] = 0,
    err: Annotated[int, Query(ge=0, le=MOST_OFFSET)] = 0,
) -> Response:
    """What a command writes, as it comes: a `Chunk` in JSON on each line, until the command has ended. An error that
    comes in the middle is the last line."""
    chunks = node.follow(sandbox_id, command_id, out, err)
    first = await _while_heard(request, _first(chunks))  # an error is an answer, not a broken stream
    if first is None:
        return Response(status_code=499)  # which nobody reads

    async def body() -> AsyncIterator[bytes]:
        try:
            still_let_in(request)  # the first may have been long in coming
            for chunk in first:
                yield to_json(_CHUNK, chunk) + b"\n"
            async for chunk in while_let_in(request, chunks):
                yield to_json(_CHUNK, chunk) + b"\n"
        except SandlotError as error:
            yield _last_line(request, error)
        finally:
            await chunks.aclose()  # at once: a command may have to be killed that nobody follows any more

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
    """A bash that lives on between commands; `sh` where the image has none. A reset ends it."""
    return _json(_SHELL, await node.open_shell(sandbox_id, spec), 201)


@router.get("/sandboxes/{sandbox_id}/shells", response_model=list[ShellInfo])
async def shells(node: Node, sandbox_id: Id) -> Response:
    """The shells of a sandbox, those that have ended and were not closed too."""
    return _json(_SHELLS, await node.shells(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/shells/{shell_id}/run", response_model=ShellResult)
async def run_in_shell(request: Request, node: Node, sandbox_id: Id, shell_id: ShellId, run: ShellRun) -> Response:
    """Run a text to its end. A shell that is busy answers 409. When the caller hangs up, a text without a key is cut
    short."""
    result = await _waited(request, node.run_in_shell(sandbox_id, shell_id, run))
    return _json(_SHELL_RESULT, result) if result is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes/{sandbox_id}/shells/{shell_id}/commands/{command_id}", response_model=ShellOutput)
async def shell_output(node: Node, sandbox_id: Id, shell_id: ShellId, command_id: str) -> Response:
    """What a command has written so far that runs, has children in the background, or has a key."""
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


@router.post("/sandboxes/{sandbox_id}/terminals", status_code=201, response_model=TerminalInfo)
async def open_terminal(node: Node, sandbox_id: Id, spec: TerminalSpec) -> Response:
    """Start a program on a terminal of its own. A WebSocket to `/v1/sandboxes/{id}/terminals/{terminal}` attaches to
    it: see docs/guides/commands-and-shells.md."""
    return _json(_TERMINAL, await node.open_terminal(sandbox_id, spec), 201)


@router.get("/sandboxes/{sandbox_id}/terminals", response_model=list[TerminalInfo])
async def terminals(node: Node, sandbox_id: Id) -> Response:
    """The terminals of a sandbox, those whose program has ended and that were not closed too."""
    return _json(_TERMINALS, await node.terminals(sandbox_id))


@router.websocket("/sandboxes/{sandbox_id}/terminals/{terminal_id}")
async def attach_terminal(
    socket: WebSocket, sandbox_id: str, terminal_id: str, replay: int = REPLAY, watch: bool = False
) -> None:
    """A terminal's bytes in binary frames, both ways; sizes and its end in JSON in text frames."""
    caller = caller_of(socket)
    if not caller.may_run and not watch:
        raise Forbidden("this key may watch a terminal, and not type there", "attach with `watch=true`")
    attaching = node_of(socket).attach_terminal(sandbox_id, terminal_id, replay=replay, watch=watch)
    await sockets.serve(socket, attaching)


@router.delete("/sandboxes/{sandbox_id}/terminals/{terminal_id}", status_code=204)
async def close_terminal(node: Node, sandbox_id: Id, terminal_id: TerminalId) -> Response:
    """End a terminal with all that runs on it; idempotent."""
    await node.close_terminal(sandbox_id, terminal_id)
    return Response(status_code=204)


@router.get(
    "/sandboxes/{sandbox_id}/files",
    response_class=Response,
    responses={
        206: {"description": "The `Range` that was asked for"},
        304: {"description": "The caller has it: `If-None-Match` names it"},
        416: {"description": "The file has none of the `Range`"},
    },
)
async def read_file(request: Request, node: Node, sandbox_id: Id, path: FilePath) -> Response:
    """The bytes of a regular file, of any size; `Range`, `If-Range` and `If-None-Match` are heeded."""
    async with AsyncExitStack() as held:
        file = await held.enter_async_context(node.open_file(sandbox_id, path))
        return await contents.answer(request, file, held.pop_all().aclose)


FileMode = Annotated[int, Query(ge=0, le=0o777, description="permission bits, as a decimal number")]


@router.put("/sandboxes/{sandbox_id}/files", status_code=204)
async def write_file(node: Node, sandbox_id: Id, path: FilePath, request: Request, mode: FileMode = 0o644) -> Response:
    """Make a file of the request's body, which may be of any size, or replace it at once when all of it has come;
    missing parents are made."""
    return await _written(request, node.write_file(sandbox_id, path, await _body(request), mode))


@router.post("/sandboxes/{sandbox_id}/files", status_code=204)
async def append_file(node: Node, sandbox_id: Id, path: FilePath, request: Request, mode: FileMode = 0o644) -> Response:
    """Add the request's body to the end of a file, which is made with this mode if it is missing."""
    return await _written(request, node.write_file(sandbox_id, path, await _body(request), mode, True))


async def _body(request: Request) -> bytes | AsyncIterator[bytes]:
    """A short one as it is: it has come already, most likely, and takes no pipe."""
    length = request.headers.get("content-length", "")
    return await request.body() if length.isdigit() and int(length) <= _SHORT_BODY else request.stream()


async def _written(request: Request, work: Coroutine[Any, Any, None]) -> Response:
    try:
        await work
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    return Response(status_code=204)


@router.delete("/sandboxes/{sandbox_id}/files", status_code=204)
async def remove_file(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    recursive: Annotated[bool, Query(description="a directory with all that is in it, unless a volume is")] = False,
) -> Response:
    """Remove a file, a link, an empty directory."""
    await node.remove_file(sandbox_id, path, recursive)
    return Response(status_code=204)


@router.patch("/sandboxes/{sandbox_id}/files", status_code=204)
async def change_file(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    mode: Annotated[int | None, Query(ge=0, le=0o7777, description="as a decimal number")] = None,
    user: Annotated[int | None, Query(ge=0, le=MOST_USER)] = None,
    group: Annotated[int | None, Query(ge=0, le=MOST_USER)] = None,
) -> Response:
    """Give a file another mode, owner or group."""
    await node.change_file(sandbox_id, path, mode, user, group)
    return Response(status_code=204)


@router.get("/sandboxes/{sandbox_id}/files/stat", response_model=FileInfo)
async def stat_file(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    follow: Annotated[bool, Query(description="what a link leads to, instead of the link")] = False,
) -> Response:
    """What is at a path."""
    return _json(_FILE, await node.stat_file(sandbox_id, path, follow))


@router.get("/sandboxes/{sandbox_id}/files/list", response_model=list[FileInfo])
async def list_files(node: Node, sandbox_id: Id, path: FilePath) -> Response:
    """What is in a directory, sorted by name."""
    return _json(_FILES, await node.list_files(sandbox_id, path))


Limit = Annotated[int, Query(ge=1, le=MOST_FOUND, description="how many at most; `more` says whether there are")]


@router.get("/sandboxes/{sandbox_id}/files/glob", response_model=FilesFound)
async def glob_files(
    request: Request,
    node: Node,
    sandbox_id: Id,
    pattern: Annotated[str, _as_sent("pattern", "absolute; `**` is any number of directories", "/root/**/*.py")],
    limit: Limit = 10_000,
) -> Response:
    """What a pattern names."""
    found = await _while_heard(request, node.glob_files(sandbox_id, pattern, limit))
    return _json(_FILES_FOUND, found) if found is not None else Response(status_code=499)  # which nobody reads


@router.get("/sandboxes/{sandbox_id}/files/find", response_model=TextFound)
async def find_text(
    request: Request,
    node: Node,
    sandbox_id: Id,
    text: Annotated[str, _as_sent("text", "what to look for in lines", "TODO")],
    path: Annotated[str, _as_sent("path", "a file, or a directory to look through", "/root", "/")],
    names: Annotated[str, _as_sent("names", "which files below it, as a pattern", "**/*.py", "**")],
    regex: Annotated[bool, Query(description="`text` is an extended regular expression")] = False,
    ignore_case: bool = False,
    limit: Limit = 1000,
) -> Response:
    """The lines of files that hold a text."""
    work = node.find_text(sandbox_id, text, path, names=names, regex=regex, ignore_case=ignore_case, limit=limit)
    found = await _while_heard(request, work)
    return _json(_TEXT_FOUND, found) if found is not None else Response(status_code=499)  # which nobody reads


@router.put("/sandboxes/{sandbox_id}/files/directory", status_code=204)
async def make_directory(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    mode: Annotated[int, Query(ge=0, le=0o7777, description="as a decimal number")] = 0o755,
    parents: Annotated[bool, Query(description="the missing ones too; and one that is there is fine")] = True,
) -> Response:
    """Make a directory."""
    await node.make_directory(sandbox_id, path, mode, parents)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/files/move", status_code=204)
async def move_file(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    to: Annotated[str, _as_sent("to", "its new path, absolute", "/root/old.txt")],
    replace: Annotated[bool, Query(description="what is there")] = False,
) -> Response:
    """Give a file, link or directory another path."""
    await node.move_file(sandbox_id, path, to, replace)
    return Response(status_code=204)


@router.get("/sandboxes/{sandbox_id}/files/watch", response_class=StreamingResponse)
async def watch_files(
    request: Request,
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    recursive: Annotated[bool, Query(description="in the directories below it, too")] = False,
) -> Response:
    """What happens to a file, or in a directory, until the caller hangs up: a `FileEvent` in JSON on each line, the
    first of which is `watching`. An error that comes in the middle is the last line."""
    events = node.watch_files(sandbox_id, path, recursive)
    first = await anext(events)  # an error is an answer, not a broken stream

    async def body() -> AsyncIterator[bytes]:
        try:
            yield to_json(_FILE_EVENT, first) + b"\n"
            async for event in while_let_in(request, events):
                yield to_json(_FILE_EVENT, event) + b"\n"
        except SandlotError as error:
            yield _last_line(request, error)
        finally:
            await events.aclose()  # at once: whoever hung up hears no more

    return StreamingResponse(body(), media_type="application/x-ndjson")


@router.get("/sandboxes/{sandbox_id}/tree", response_class=StreamingResponse)
async def download(request: Request, node: Node, sandbox_id: Id, path: FilePath) -> Response:
    """What is in a directory, or a single file, as a tar. An answer that breaks off is no whole one."""
    chunks = node.download(sandbox_id, path)
    first = await anext(chunks)  # an error is an answer, as long as nothing was said

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in while_let_in(request, chunks):
                yield chunk
        finally:
            await chunks.aclose()

    return StreamingResponse(body(), media_type="application/x-tar")


@router.put("/sandboxes/{sandbox_id}/tree", status_code=204)
async def upload(
    node: Node,
    sandbox_id: Id,
    path: FilePath,
    request: Request,
    user: Annotated[int, Query(ge=0, le=MOST_USER, description="whose what is made becomes")] = 0,
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


# The hot path. Routes are tried in their order, a few microseconds each: what is asked for most comes first.
_OFTEN = ("/v1/sandboxes/{sandbox_id}/run", "/v1/sandboxes", "/v1/sandboxes/{sandbox_id}/shells/{shell_id}/run")
router.routes.sort(key=lambda route: getattr(route, "path", "") not in _OFTEN)
