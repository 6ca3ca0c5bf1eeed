"""The words that everyone shares: what a sandbox is asked to be, what a command is, what comes back.

SDK, HTTP server, node and drivers use these very models; nothing is renamed on the way. They are frozen values: a
change is a new one. The file ends with `NodeAPI`, the one interface behind which a sandbox lives, whether in this
process, behind HTTP or on a cluster.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import reprlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticSerializationError

T = TypeVar("T")

# What a server's in-process handler is: an ASGI application. The node serves it on a listener inside the box.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: object) -> object:
    """`"512M"`, `"1.5 GiB"` or a plain number, in bytes. Anything but text is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    if not match:
        raise ValueError(f"{value!r} is not a size; write it as `512M` or `2G`")
    return int(float(match[1]) * _UNITS[match[2]])


# Past any machine's, and far from where the kernel's numbers wrap around to none.
MOST_BYTES, MOST_FILES = 1 << 50, 1 << 32

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=MOST_BYTES)]

# Of a byte in a file or a stream: the kernel counts no further.
MOST_OFFSET = (1 << 63) - 1

# A timer takes no more: ten years.
MOST_SECONDS = 10 * 365 * 86_400
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]

# Less memory than this and not even the first process of a sandbox starts (its own pages and page tables, with room).
LEAST_MEMORY = 8 << 20
# The kernel shares out CPU time by the millisecond in each tenth of a second.
LEAST_CPUS = 0.01
# The kernel counts files in pages, and takes 0 for "no limit".
LEAST_DISK = 4096

# What a node is willing to hold of one stream of a command: what is larger belongs in a file.
MOST_OUTPUT = 64 << 20

# Bytes of text that a shell takes at once; what is longer is a file to be sourced.
MOST_TEXT = 16 << 20

# Bytes of a program's environment and arguments, by Linux's usual limit on its stack.
MOST_ENV = 2 << 20

# Where programs are looked for, unless an image or a user says otherwise.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A sandbox has users 0 to this one. A name is looked up in its own /etc/passwd, whenever it is used.
MOST_USER = 65_535


def _one_sentence(value: object, read: Callable[[object], T]) -> T:
    try:
        return read(value)
    except ValidationError:  # a sentence for each of the two that it may be, in words of Python
        said = reprlib.repr(value) if isinstance(value, str) else value
        raise ValueError(f"{said} is no user: a number from 0 to {MOST_USER}, or a name as in /etc/passwd") from None


User = Annotated[
    Annotated[int, Field(ge=0, le=MOST_USER)] | Annotated[str, Field(pattern=r"^[A-Za-z_][^:\s\x00]{0,255}$")],
    WrapValidator(_one_sentence),
]

# Steps of a build are images whose names begin with this; nobody lists them.
STEP = "step-"

# A tenant's name.
TENANT = r"^[a-z0-9][a-z0-9-]{0,39}$"

# Each volume is a mount that every start of a box makes; a spec that asks for more than this is a mistake.
MOST_VOLUMES = 32

# Where the kernel's own file systems are inside: a volume over them would break what they promise.
_KERNEL_S = ("/proc", "/sys", "/dev")

# Raw bytes in Python, base64 in JSON. (pydantic's own Base64Bytes would decode bytes given in Python too.)
Binary = Annotated[
    bytes,
    BeforeValidator(lambda value: base64.b64decode(value, validate=True) if isinstance(value, str) else value),
    PlainSerializer(lambda value: base64.b64encode(value).decode("ascii"), return_type=str, when_used="json"),
]


def to_json(kind: TypeAdapter[T], value: T, *, only_set: bool = False) -> bytes:
    """`value` as JSON. File names, and the words of a command, are any bytes: one that is not UTF-8 is in Python as
    `os.fsdecode` gives it and in JSON the escape of the same letter, `\\udcXX`; in a URL the byte is `%XX` like any."""
    try:
        return kind.dump_json(value, exclude_unset=only_set)
    except PydanticSerializationError:  # it writes no such letter; the standard library escapes it
        found = kind.dump_python(value, exclude_unset=only_set)
        return json.dumps(found, default=_as_base64, separators=(",", ":")).encode()


def from_json(kind: TypeAdapter[T], text: bytes) -> T:
    """The other way. Raises ValidationError."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        if error.errors()[0]["type"] != "json_invalid":
            raise
        try:
            return kind.validate_python(json.loads(text))
        except ValueError:  # it is not JSON at all
            raise error from None


def _as_base64(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return base64.b64encode(value).decode("ascii")


def _passed_on(env: dict[str, str]) -> dict[str, str]:
    size = sum(len(name) + len(value) + 2 for name, value in env.items())
    if size > MOST_ENV:
        raise ValueError(f"{size} bytes are more than the {MOST_ENV} that Linux passes to a program; use a file")
    return env


Env = Annotated[dict[str, str], AfterValidator(_passed_on)]


class Model(BaseModel):
    """A frozen value that refuses unknown keys, and numbers that are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _a_file_s(name: str) -> str:
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} holds half a character, and no file is called that") from None
    return name


# What may become the name of a file on the host. JSON can spell half of a surrogate pair, which is no byte of any name.
FileName = Annotated[str, AfterValidator(_a_file_s)]


def is_reference(image: str) -> bool:
    """Whether the name of an image is one that a registry has: not `host`, a snapshot's or a directory's."""
    return not image.startswith("/") and not {"/", ":", "@"}.isdisjoint(image)


class Limits(Model):
    """What one sandbox may use. A limit named by the user is refused where the host cannot keep it; a default is kept
    as far as the host can, and `Info.losses` names what is not kept."""

    memory: Bytes | None = Field(
        default=2 << 30,
        description="bytes of memory, its private files included, 8M or more; None: no limit, and no count of its use",
    )
    pids: int = Field(default=512, ge=2, le=1 << 30, description="processes and threads")
    cpus: float | None = Field(
        default=None,
        ge=LEAST_CPUS,
        le=100_000,
        description="CPU seconds per second, 0.01 or more; None: no quota",
    )
    cpu_weight: int = Field(default=100, ge=1, le=10_000, description="share of a busy CPU beside others, default 100")
    disk: Bytes = Field(
        default=1 << 30,
        ge=LEAST_DISK,
        description="bytes of files that the sandbox may write, 4K or more; by default they are in its memory, and "
        "then at most seven eighths of that; one that is named and larger is on the host's disk",
    )
    inodes: int = Field(default=100_000, ge=64, le=MOST_FILES, description="files that the sandbox may make")
    open_files: int = Field(default=4096, ge=16, le=1 << 30, description="descriptors per process")
    output: Bytes = Field(
        default=1 << 20,
        le=MOST_OUTPUT,
        description="bytes kept of each stream of a command that names no `output_cap`: its head and its tail",
    )

    @field_validator("memory")
    @classmethod
    def _enough(cls, memory: int | None) -> int | None:
        if memory is not None and memory < LEAST_MEMORY:
            raise ValueError(f"no sandbox starts with {memory} bytes of memory; give it 8M or more")
        return memory


class Volume(Model):
    """A host directory or file that is seen inside. A server shows only what its `--allow-volumes` names."""

    source: FileName = Field(description="absolute path on the host")
    target: FileName = Field(
        description="absolute path inside, without `.`, `..` or `//`; not / and not in /proc, /sys or /dev"
    )
    read_only: bool = True

    @field_validator("source", "target")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"{path!r} is not an absolute path")
        return path

    @field_validator("target")
    @classmethod
    def _a_place(cls, target: str) -> str:
        plain = "/" + posixpath.normpath(target).lstrip("/")
        if target != plain:
            raise ValueError(f"{target} has `.`, `..` or a `/` too many in it; write it as {plain}")
        if target == "/" or any(target == each or target.startswith(each + "/") for each in _KERNEL_S):
            raise ValueError(f"{target} cannot be replaced: a volume is not at /, nor in {', '.join(_KERNEL_S)}")
        return target


class Profile(StrEnum):
    """How much of the kernel a sandbox sees."""

    STRICT = "strict"  # no capability at all, and no system call that ordinary programs do without
    DEFAULT = "default"  # what package managers and services need
    DEBUG = "debug"  # the default, and tracing of its own processes, for gdb and strace


class SandboxSpec(Model):
    """What a sandbox is asked to be."""

    image: FileName = Field(
        default="host",
        description="`host`, which is this machine's /usr over a bare root; the name of a snapshot or an import; one "
        "of a registry, as `debian:12`, which is pulled where it is missing; or a directory of the host, as `/srv/x`",
    )
    env: Env = Field(default_factory=dict, description="environment of every command")
    cwd: str | None = Field(
        default=None,
        description="working directory of a command that names none; None: the image's, else /root for user 0 and / "
        "for any other, to whom /root is closed",
    )
    hostname: str = Field(default="sandlot", pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,62}$")
    limits: Limits = Limits()
    volumes: tuple[Volume, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    profile: Profile = Profile.DEFAULT
    network: Literal["none", "host"] = Field(
        default="none",
        description="`host`: this machine's own, its loopback addresses and abstract sockets too, for installing what "
        "an image needs; no port can be routed then. A server refuses it without `--allow-network host`",
    )
    setuid: bool = Field(default=False, description="let setuid programs gain ids inside (turns no_new_privs off)")
    nested: bool = Field(
        default=False, description="allow user namespaces and mounts inside, for sandboxes in sandboxes"
    )
    lifetime: Seconds | None = Field(default=None, description="seconds until the sandbox ends by itself")
    idle_timeout: Seconds | None = Field(default=None, description="seconds without work until it ends")
    key: str | None = Field(
        default=None,
        pattern=r"^[!-~]{1,100}$",
        description="a create with a key is made once, however often it is asked for: who asks again gets the same "
        "sandbox, from a server that was killed and started again too. One that nobody came for is ended",
    )
    tenant: str | None = Field(
        default=None, pattern=TENANT, description="whose it is: by itself that of the caller's API key"
    )

    @field_validator("volumes")
    @classmethod
    def _places(cls, volumes: tuple[Volume, ...]) -> tuple[Volume, ...]:
        if len(volumes) > MOST_VOLUMES:
            raise ValueError(f"{len(volumes)} volumes are more than the {MOST_VOLUMES} that a sandbox may have")
        targets = [volume.target for volume in volumes]
        if twice := next((target for target in targets if targets.count(target) > 1), None):
            raise ValueError(f"two volumes are at {twice}")
        return volumes


class Run(Model):
    """One command: a program with its arguments, not shell text. `Sandbox.run` wraps shell text as `sh -c TEXT`."""

    argv: tuple[str, ...] = Field(min_length=1)
    env: Env = Field(default_factory=dict, description="added to the sandbox's environment")
    cwd: str | None = Field(default=None, description="None: the sandbox's")
    user: User | None = Field(
        default=None,
        description="number of the user and group inside, or the user's name there; None: the image's, else 0",
    )
    stdin: Binary = Field(default=b"", description="bytes on standard input; base64 in JSON")
    stdin_open: bool = Field(default=False, description="more comes by `write_stdin`, until that ends it")
    timeout: Seconds | None = Field(default=300.0, description="seconds; at the end the whole tree is killed")
    output_cap: Bytes | None = Field(
        default=None,
        le=MOST_OUTPUT,
        description="bytes kept of each stream: its head and its tail; None: as the sandbox's `limits.output` says",
    )
    lossless: bool = Field(
        default=False,
        description="when who follows its output is slow it waits, as a program does before a full pipe, so that they "
        "miss nothing; it waits a minute for the first of them, with a server that was started again too, and ten "
        "seconds for one to come back when the last has gone",
    )
    key: str | None = Field(
        default=None,
        pattern=r"^[!-~]{1,100}$",
        description="a run with a key is started once, however often it is asked for: who asks again gets the first "
        "one's result, from a server that was killed and started again too. It goes on when its caller goes away",
    )
    kill_on_disconnect: bool = Field(
        default=False,
        description="of a run with a key, or one that is left to itself: its tree is killed when the last of those who "
        "wait for it or follow it goes away before its end, or nobody comes within a minute of its start, or of "
        "that of a server that found it. Any other is killed when its caller goes away",
    )


class CommandInfo(Model):
    """A command that has a key, or was started in the background."""

    id: str = Field(description="its key")
    argv0: str = Field(description="the program, its first hundred letters")
    pid: int | None = Field(default=None, description="inside; null: it has ended, or has not begun")
    running: bool
    out_total: int = Field(default=0, description="bytes that it wrote so far to standard output")
    err_total: int = 0


class Chunk(Model):
    """A piece of what a command wrote, in the order in which it came of each stream."""

    stream: Literal["out", "err"]
    offset: int = Field(description="of the first byte of `data` in the whole stream")
    data: Binary
    lost: int = Field(
        default=0, description="bytes just before it that were not kept, because nobody took them in time"
    )


class Output(Model):
    """One stream of a finished command. `data` is at most `output_cap` long; `total` is what the command wrote."""

    data: Binary = b""
    total: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.data)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class RunResult(Model):
    """How a command went. Never an exception: a failure of the command is a value here."""

    exit_code: int = Field(description="the program's own, 128 + signal, 127 not found, 126 not executable")
    signal: int | None = None
    timed_out: bool = False
    oom: bool = Field(
        default=False,
        description="the kernel killed it, or one of its children, for memory; of commands that run at the same time "
        "only the one that ends by it can tell",
    )
    out: Output = Output()
    err: Output = Output()
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def stdout(self) -> str:
        return self.out.text

    @property
    def stderr(self) -> str:
        return self.err.text


class ShellSpec(Model):
    """A shell that is asked for."""

    cwd: str | None = Field(default=None, description="None: the sandbox's")
    env: Env = Field(default_factory=dict, description="added to the sandbox's environment")
    user: User | None = Field(default=None, description="as for a run")


class ShellInfo(Model):
    """A shell of a sandbox."""

    id: str
    cwd: str = Field(description="where it was after its last command")
    running: str | None = Field(default=None, description="the id of the command that runs in it")
    ended: bool = False
    exit_code: int | None = Field(default=None, description="once it has ended; 128 + the signal that ended it")
    lacks: tuple[str, ...] = Field(default=(), description="what it cannot do here, a sentence each")


class ShellRun(Model):
    """A text for a shell, as a person would type it."""

    command: str = Field(max_length=MOST_TEXT, description="sourced as it is: nothing is quoted, nothing is expanded")
    stdin: Binary = Field(default=b"", description="bytes on standard input; base64 in JSON")
    timeout: Seconds | None = Field(default=300.0, description="seconds; at the end it is interrupted, then killed")
    output_cap: Bytes | None = Field(default=None, le=MOST_OUTPUT, description="as for a run")
    queue: bool = Field(default=False, description="wait for a command that runs there, instead of being refused")
    restart: bool = Field(
        default=False,
        description="where the shell has ended, put another one in its place first, as new as when it was opened",
    )
    key: str | None = Field(
        default=None,
        pattern=r"^[!-~]{1,100}$",
        description="a text with a key is run once, however often it is asked for: who asks again gets the first one's "
        "result, from a server that was killed and started again too. It goes on when its caller goes away",
    )

    @field_validator("command")
    @classmethod
    def _a_text(cls, text: str) -> str:
        if "\0" in text:
            raise ValueError("a shell's text cannot hold a NUL byte")
        return text


class ShellOutput(Model):
    """What a command of a shell and its children in the background have written so far."""

    exit_code: int | None = Field(default=None, description="null: it runs")
    out: Output
    err: Output


class ShellResult(RunResult):
    """How a text went that a shell ran. What its children in the background write later is not in it."""

    id: str = Field(description="of the command, for what is written later")
    cwd: str = Field(description="where the shell is now")
    interrupted: bool = False
    ended: bool = Field(default=False, description="the shell is gone: `exit`, `exec`, or it was killed")
    restarted: bool = Field(default=False, description="the shell had ended before, and another one took its place")


# Of a terminal's output, what is replayed to who attaches, at most (bytes). Who is attached may be so far behind before
# the program waits, as on a real terminal.
MOST_REPLAY = 256 << 10
REPLAY = 64 << 10

# Of one message on a WebSocket, either way (bytes): what a person pastes into a terminal.
MOST_FRAME_BYTES = 1 << 20

_Cells = Annotated[int, Field(ge=1, le=9999)]


class TerminalSize(Model):
    """In letters."""

    rows: _Cells = 24
    columns: _Cells = 80


class TerminalSpec(TerminalSize):
    """A terminal that is asked for, and the program on it."""

    command: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="a program and its arguments; null: a login shell"
    )
    cwd: str | None = Field(default=None, description="None: the sandbox's")
    env: Env = Field(default_factory=dict, description="added to the sandbox's environment; TERM has a default")
    user: User | None = Field(default=None, description="as for a run")


class TerminalInfo(TerminalSize):
    """A terminal of a sandbox."""

    id: str
    command: tuple[str, ...]
    attached: bool = Field(description="somebody types there; who only watches does not count")
    ended: bool = False
    exit_code: int | None = Field(
        default=None, description="once its program has ended; 128 + the signal that ended it"
    )


class TerminalEnd(Model):
    """Why somebody is attached to a terminal no more."""

    reason: Literal["exit", "taken", "closed"] = Field(
        description="its program has ended; another one was attached in the place of this one; the terminal was "
        "closed, or its sandbox was reset or has ended"
    )
    exit_code: int | None = Field(default=None, description="of `exit`")


class Ending(StrEnum):
    """Why a sandbox ended: exactly one of these, once."""

    EXIT = "exit"  # its owner closed it
    KILLED = "killed"  # somebody else asked for its end
    OOM = "oom"  # the helper itself was killed for memory
    IDLE = "idle"  # nothing was run for `idle_timeout`
    LIFETIME = "lifetime"  # its `lifetime` ran out
    ORPHANED = "orphaned"  # its node died and did not come back in time
    HELPER_DIED = "helper_died"  # sandlot-init was killed or crashed
    PREEMPTED = "preempted"  # made room for something more urgent
    DRAINED = "drained"  # its host is being taken out of service
    NODE_LOST = "node_lost"  # its host vanished
    START_FAILED = "start_failed"  # it never came to be


State = Literal["running", "paused", "ended"]


class Info(Model):
    """What is known of a sandbox; can be asked for an hour after its end."""

    id: str
    image: str
    state: State
    created_at: float = Field(description="Unix time, seconds")
    ended_at: float | None = None
    ending: Ending | None = None
    detail: str | None = Field(default=None, description="one sentence about the ending, where there is more to say")
    labels: dict[str, str] = Field(default_factory=dict)
    losses: tuple[str, ...] = Field(default=(), description="defaults that this host does not keep, one sentence each")
    tenant: str | None = Field(default=None, description="whose it is, on a server that has tenants")


class Filter(Model):
    """Which sandboxes are asked for: those that fit all of it."""

    states: tuple[State, ...] = ("running", "paused")
    labels: dict[str, str | None] = Field(default_factory=dict, description="None: whatever the label says")
    image: str | None = Field(default=None, description="as its spec names it")
    tenant: str | None = None


EVERY = Filter()


class Quota(Model):
    """What a tenant's sandboxes may have at once, all together. None: as much as there is."""

    boxes: int | None = Field(default=None, ge=0)
    cpus: float | None = Field(default=None, ge=0, le=1_000_000, description="the sum of their limits, as of `memory`")
    memory: Bytes | None = None


class Page(Model):
    """Some sandboxes, in the order in which they were created."""

    sandboxes: tuple[Info, ...]
    next: str | None = Field(default=None, description="the cursor of what comes after them; None: nothing does")


class Fault(Model):
    """An error as it is told."""

    code: str
    message: str
    hint: str | None = None


class Made(Model):
    """One of the sandboxes that were asked for together: it, or why there is none."""

    sandbox: Info | None = None
    error: Fault | None = None


class Stats(Model):
    """What a sandbox uses now. None: this host does not count it."""

    memory: int | None = Field(default=None, description="bytes, its private files included")
    memory_peak: int | None = None
    cpu_seconds: float | None = None
    pids: int | None = None
    disk: int = Field(default=0, description="bytes of files it wrote and still has")
    inodes: int = 0


class ImageConfig(Model):
    """What an image says of commands in it: their defaults, which a sandbox or a run may replace one by one."""

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = Field(default=None, pattern=r"^/", description="absolute path inside")
    user: int | None = Field(default=None, ge=0, le=MOST_USER, description="numeric; None: 0")
    group: int | None = Field(default=None, ge=0, description="that the image gives it; it has its own number's here")
    home: str | None = Field(default=None, description="of that user; None: /root for user 0 and / for any other")
    entrypoint: tuple[str, ...] = Field(default=(), description="kept for who asks: a sandbox starts nothing by itself")
    cmd: tuple[str, ...] = Field(default=(), description="as `entrypoint`")
    labels: dict[str, str] = Field(default_factory=dict)
    shell: tuple[str, ...] = Field(default=(), description="of a Dockerfile's commands over it; (): `/bin/sh -c`")
    on_build: tuple[str, ...] = Field(default=(), description="what it asks of builds over it: they refuse it")


NO_CONFIG = ImageConfig()


class ImageInfo(Model):
    """An image that boxes start from."""

    name: str
    base: str = Field(description="the image that it lies over; its own name for one that lies over nothing")
    created_at: float = Field(description="Unix time, seconds")
    kind: Literal["snapshot", "pulled", "imported", "built"] = "snapshot"
    digest: str | None = Field(default=None, description="of a pulled image's manifest, `sha256:…`")
    config: ImageConfig = NO_CONFIG
    bytes: int = Field(
        default=0,
        description="of the files in its own layers; of a pulled or imported image, as its layers were packed in tars",
    )
    files: int = Field(default=0, description="entries in its own layers, directories included")
    layers: int = Field(default=0, description="how many layers lie over the base")
    losses: tuple[str, ...] = Field(default=(), description="what is not as it says, as a sandbox's `losses` say it")


class LayerProgress(Model):
    """How far one layer of an image is on its way here."""

    digest: str
    size: int = Field(description="bytes, packed")
    fetched: int = 0
    unpacked: bool = False


class PullProgress(Model):
    """How far an image is on its way here. The last one of a pull carries the image."""

    layers: tuple[LayerProgress, ...] = ()
    image: ImageInfo | None = None


class Warm(Model):
    """Sandboxes that are kept ready: `create` of such a one takes a quarter of the time."""

    image: FileName = "host"
    profile: Profile = Profile.DEFAULT
    size: int = Field(ge=1, le=1000, description="how many wait")


class PoolInfo(Warm):
    """How a pool of warm sandboxes does."""

    ready: int
    hits: int = Field(description="creates that it served")
    misses: int = Field(description="creates that fit it and found none ready")


class Change(Model):
    """One path that differs from the image."""

    path: str = Field(description="absolute; a byte that is not UTF-8 is `\\udcXX`, as `os.fsdecode` has it")
    kind: Literal["added", "changed", "deleted"]
    directory: bool = False


# How much of a file one call carries: what a node is willing to hold in memory for it. More comes in pieces.
MOST_READ = 64 << 20

# How many things one call tells of.
MOST_FOUND = 100_000


FileKind = Literal["file", "directory", "link", "pipe", "socket", "device"]
EventKind = Literal["watching", "created", "changed", "attributes", "deleted", "lost"]


class FileInfo(Model):
    """One thing in the file system of a sandbox, as root inside sees it; of a link, the link itself."""

    path: str = Field(description="absolute; a byte that is not UTF-8 is `\\udcXX`, as `os.fsdecode` has it")
    kind: FileKind
    size: int = Field(description="bytes")
    mode: int = Field(description="permission bits, set-id and sticky ones too, as a number")
    user: int = Field(description="inside; 65534 for one that is nobody there")
    group: int
    modified_at: float = Field(description="Unix time, seconds")
    target: str | None = Field(default=None, description="where a link leads, as it says itself")
    etag: str = Field(description="another one when what it holds has changed")


class FilesFound(Model):
    """What a pattern names: a directory before what is in it, names in the order of their bytes."""

    files: tuple[FileInfo, ...]
    more: bool = Field(default=False, description="there are more than were asked for")


class TextHit(Model):
    """A line that holds what was looked for."""

    path: str
    line: int = Field(description="its number, from 1")
    column: int = Field(description="the byte of the line where what was found begins, from 1")
    text: str = Field(description="the line; of one that is longer than a thousand bytes, so much around the place")


class TextFound(Model):
    """The lines of files that hold a text, file by file in the order of `FilesFound`."""

    hits: tuple[TextHit, ...]
    more: bool = Field(default=False, description="there are more than were asked for")


class FileEvent(Model):
    """Something that happened to a file. What is moved or replaced is `deleted` here and `created` there."""

    kind: EventKind = Field(
        description="`watching` is the first, from which on all is told; `lost`: too much happened at once, and some "
        "of it is not told: look yourself"
    )
    path: str
    directory: bool = False


class OpenFile(Protocol):
    """A file of a sandbox that is being read: the same one, whatever is put in its place meanwhile."""

    size: int
    etag: str | None  # None: a file of the kernel, which is another one each time

    def chunks(self, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes from there on, so many of them (None: all). Raises Conflict: it became shorter."""
        ...


# Told while files are copied: how many bytes so far, and of how many; None: that is not known.
Progress = Callable[[int, int | None], None]


class Capability(Model):
    """One promise on this host. `doctor` prints one line for each."""

    name: str
    state: Literal["kept", "loss", "impossible"]
    found: str = Field(description="what was tried and what came back")
    fix: str | None = Field(default=None, description="a command or setting that would help")


class Upstream(Model):
    """A URL that answers what a box asks on a routed port, with headers that the box never sees."""

    url: str = Field(pattern=r"^https?://", description="requests go to url + their own path")
    headers: dict[str, str] = Field(default_factory=dict)

    @field_validator("headers")
    @classmethod
    def _sent_as_they_are(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[\t -~\x80-\xff]*", value):
                raise ValueError(f"{name!r} is not the name of a header, or what it says cannot be sent in one")
        return headers


# Who answers on a routed port: an application in this process, or a URL.
Target = AsgiApp | Upstream


class TerminalLink(Protocol):
    """Somebody who is attached to a terminal."""

    end: TerminalEnd | None  # why no more comes

    async def read(self) -> bytes:
        """What comes next, as soon as there is some; b"": no more comes, and `end` says why. Raises Unreachable."""
        ...

    async def write(self, data: bytes) -> None:
        """As if it was typed. Returns when the terminal has taken it, or is on the way there. Raises Conflict: it takes
        no more from here, and `read` says why; InvalidRequest: this one only watches."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """The program is told by SIGWINCH. Raises as `write`."""
        ...

    async def close(self) -> None:
        """Be attached no more: the program goes on. Idempotent."""
        ...


class NodeAPI(Protocol):
    """Where sandboxes live. Implemented by `node.Node` (this host) and `client.HttpNode` (a server).

    Every method raises NotFound for an id that never was, SandboxEnded for one that has ended, HostFault when the
    host is in trouble; and has a deadline of its own.
    """

    async def create(self, spec: SandboxSpec) -> Info:
        """Make a sandbox and return when a command can run in it. Raises InvalidRequest, NotFound (image),
        Unsupported, StartFailed."""
        ...

    async def create_many(self, spec: SandboxSpec, count: int) -> list[Made]:
        """So many at once, each as `create` makes it; one that cannot be made is told in its place, and costs the
        others nothing. With a key they are the same ones whenever they are asked for."""
        ...

    async def page(self, wanted: Filter = EVERY, cursor: str | None = None, limit: int = 100) -> Page:
        """Some of the sandboxes that fit, ended ones too if it says so, from the place that a page before named. Who
        takes one page after the other sees each exactly once that is there all the time, whatever comes and goes."""
        ...

    async def wait_ended(self, sandbox_id: str, timeout: float | None = None) -> Info:
        """What is known of it once it has ended; after `timeout` seconds as it is. Does not renew its idle time."""
        ...

    async def info(self, sandbox_id: str) -> Info:
        """What is known of it, running or ended. Does not renew its idle time; never raises SandboxEnded."""
        ...

    async def stats(self, sandbox_id: str) -> Stats:
        """What it uses now. Does not renew its idle time."""
        ...

    async def run(self, sandbox_id: str, run: Run) -> RunResult:
        """Run a command to its end. If the sandbox ends meanwhile, SandboxEnded."""
        ...

    async def launch(self, sandbox_id: str, run: Run) -> CommandInfo:
        """Start a command and leave it to itself. Its id is the run's key, or one that is made up; started twice with
        one key it is one command. Its result waits for `wait` as that of any run with a key does."""
        ...

    async def commands(self, sandbox_id: str) -> list[CommandInfo]:
        """Those that run, and those whose result can still be had, the oldest first."""
        ...

    async def wait(self, sandbox_id: str, command_id: str) -> RunResult:
        """How it ended, once it has. Raises NotFound."""
        ...

    def follow(self, sandbox_id: str, command_id: str, out: int = 0, err: int = 0) -> AsyncGenerator[Chunk, None]:
        """What it writes, as it comes, from these offsets on; ends when it has ended and all was told. Raises
        NotFound, InvalidRequest (an offset that is none)."""
        ...

    async def signal(self, sandbox_id: str, command_id: str, number: int) -> None:
        """Send a signal to it and its process group; 9 ends its whole tree. No error when it has ended."""
        ...

    async def write_stdin(self, sandbox_id: str, command_id: str, data: bytes, end: bool = False) -> None:
        """More for the standard input of a command that was started with `stdin_open`; `end` closes it. Returns when
        the command's pipe has taken it. Raises Conflict: it takes no more."""
        ...

    async def open_shell(self, sandbox_id: str, spec: ShellSpec = ShellSpec()) -> ShellInfo:  # noqa: B008
        """A bash that lives on between commands, with its directory, variables, functions and jobs; `sh` where there is
        none. Raises InvalidRequest (no such directory, no shell in the image)."""
        ...

    async def shells(self, sandbox_id: str) -> list[ShellInfo]:
        """Its shells, the ended ones that nobody has closed too."""
        ...

    async def run_in_shell(self, sandbox_id: str, shell_id: str, run: ShellRun) -> ShellResult:
        """Run a text to its end. Raises Conflict: a command runs there already, the shell has ended, or the key is
        another text's; NotFound."""
        ...

    async def shell_output(self, sandbox_id: str, shell_id: str, command_id: str) -> ShellOutput:
        """What a command has written so far that runs, has children in the background, has a key, or ran when a server
        died. Raises NotFound: it has ended and was none of these, or that was too long ago."""
        ...

    async def interrupt_shell(self, sandbox_id: str, shell_id: str) -> bool:
        """End what runs there as ^C does, then less politely; the shell goes on. False: nothing ran."""
        ...

    async def close_shell(self, sandbox_id: str, shell_id: str) -> None:
        """End it with all that runs in it. Idempotent."""
        ...

    async def open_terminal(self, sandbox_id: str, spec: TerminalSpec = TerminalSpec()) -> TerminalInfo:  # noqa: B008
        """Start a program on a terminal of its own. It goes on by itself: `attach_terminal` leads there. One that
        cannot be started says why on the terminal, and ends with 126 or 127. Raises Conflict (there are too many)."""
        ...

    async def terminals(self, sandbox_id: str) -> list[TerminalInfo]:
        """Its terminals, those whose program has ended and that nobody has closed too."""
        ...

    async def attach_terminal(
        self, sandbox_id: str, terminal_id: str, *, replay: int = REPLAY, watch: bool = False
    ) -> TerminalLink:
        """Read and write a terminal, beginning with the last `replay` bytes. Who was attached before is told that it
        was taken, unless this one only `watch`es, as many may. Raises NotFound, InvalidRequest, Conflict (too many)."""
        ...

    async def close_terminal(self, sandbox_id: str, terminal_id: str) -> None:
        """End a terminal with all that runs on it. Idempotent."""
        ...

    # Files. Paths are absolute and resolved inside, as its root sees them: no link leads out. Looking does not renew
    # the idle time, changing does. All of them raise InvalidRequest for a path that is none, a full disk, a read-only
    # volume; work while the sandbox is paused; and a change that was begun is finished, whoever goes away.

    async def read_file(self, sandbox_id: str, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a regular file, or so many of them from an offset on; at its end there are fewer. Raises
        NotFound, InvalidRequest (not a regular file; more than 64 MiB)."""
        ...

    def open_file(self, sandbox_id: str, path: str) -> AbstractAsyncContextManager[OpenFile]:
        """A regular file of any size, to be read piece by piece. Raises as `read_file` does."""
        ...

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        data: bytes | AsyncIterator[bytes],
        mode: int = 0o644,
        append: bool = False,
    ) -> None:
        """Make a file, or replace it at once: a reader sees the old one or the new one, and of two writers one whole.
        It keeps its owner and gets `mode`; a link is followed; missing parents are made. What comes in pieces may be of
        any size. With `append` it comes to the end of what is there, whose mode stays. Raises InvalidRequest (not a
        regular file), Conflict (a file is where a directory is to be)."""
        ...

    async def stat_file(self, sandbox_id: str, path: str, follow: bool = False) -> FileInfo:
        """What is at a path: of a link the link itself, unless it is to `follow` it. Raises NotFound."""
        ...

    async def list_files(self, sandbox_id: str, path: str) -> list[FileInfo]:
        """What is in a directory, sorted by name. Raises NotFound, InvalidRequest (no directory; more than MOST_FOUND
        names)."""
        ...

    async def glob_files(self, sandbox_id: str, pattern: str, limit: int = 10_000) -> FilesFound:
        """What an absolute pattern names: `*`, `?` and `[a-z]` in names, hidden ones too, and `**` for any number of
        directories. Links are followed before the first such sign, not behind it; nor is /proc or /sys gone into from
        elsewhere. What cannot be looked at is passed over."""
        ...

    async def find_text(
        self,
        sandbox_id: str,
        text: str,
        path: str = "/",
        *,
        names: str = "**",
        regex: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
    ) -> TextFound:
        """The lines with a text in the file `path`, or in those below it that the pattern `names` does. `regex`: as
        `grep -E` takes it. Files with a NUL in them are passed over. Raises NotFound, InvalidRequest."""
        ...

    async def make_directory(self, sandbox_id: str, path: str, mode: int = 0o755, parents: bool = True) -> None:
        """Make a directory. With `parents` the missing ones on the way too, and one that is there already is fine.
        Raises NotFound (its parent), Conflict (something is there)."""
        ...

    async def move_file(self, sandbox_id: str, path: str, to: str, replace: bool = False) -> None:
        """Give a file, link or directory another path, at once; to another file system it is copied first. Raises
        NotFound, Conflict (something is there, and it is not to be replaced or cannot)."""
        ...

    async def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        """Remove a file, a link (not what it leads to), an empty directory; `recursive`: one with all that is in it,
        unless a volume is. Raises NotFound, Conflict (not empty, a volume)."""
        ...

    async def change_file(
        self, sandbox_id: str, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        """Give what a path leads to another mode, owner or group; None: as it is. Raises NotFound."""
        ...

    def watch_files(self, sandbox_id: str, path: str, recursive: bool = False) -> AsyncGenerator[FileEvent, None]:
        """What happens to a file, or in a directory and, if asked, in those below it, as it happens. Ends when that
        directory, or the file's, is gone. Raises NotFound, Conflict (the sandbox watches too much already)."""
        ...

    def download(self, sandbox_id: str, path: str) -> AsyncGenerator[bytes, None]:
        """What is in a directory, or a single file, as a tar: files, directories and links with their owners, modes and
        times; other things are left out. Raises NotFound."""
        ...

    async def upload(self, sandbox_id: str, path: str, tar: AsyncIterator[bytes], user: int = 0) -> None:
        """Unpack a tar (uncompressed; files, directories, links) below the directory `path`, which is made if it is
        missing. What is made belongs to `user`. Files are replaced, directories are added to; nothing of the tar is
        written elsewhere, and files from before an error stay. Raises InvalidRequest (the tar, no room),
        Conflict (a directory is where a file is to be)."""
        ...

    async def route(self, sandbox_id: str, port: int, target: Target) -> None:
        """Serve `target` on 127.0.0.1:port inside the sandbox, which needs no network for it. Raises Conflict."""
        ...

    async def reset(self, sandbox_id: str, image: str | None = None) -> Info:
        """Back to its image, or to another one such as a snapshot: every process ends, every file that was written is
        gone; id, limits, labels and routes stay. Raises NotFound (image), and then nothing has changed."""
        ...

    async def snapshot(self, sandbox_id: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        """Make an image of its files as they are now; nothing runs meanwhile. `config` None: that of the image it was
        made from. Raises Conflict: the name is taken."""
        ...

    async def fork(self, sandbox_id: str, count: int = 1) -> list[Info]:
        """So many new sandboxes like this one, with its files as they are now and none of its processes."""
        ...

    async def diff(self, sandbox_id: str) -> list[Change]:
        """What differs from its image. Does not renew its idle time."""
        ...

    async def pause(self, sandbox_id: str) -> Info:
        """Stop every process where it is; files can be read and written, nothing can be run. Idempotent."""
        ...

    async def resume(self, sandbox_id: str) -> Info:
        """Let them go on. Idempotent."""
        ...

    async def images(self) -> list[ImageInfo]:
        """The images that are here, without `host`."""
        ...

    async def image(self, name: str) -> ImageInfo:
        """One image, a build's hidden step too. Raises NotFound."""
        ...

    def pull_image(self, reference: str) -> AsyncGenerator[PullProgress, None]:
        """Fetch an image from its registry, or what has changed there since; how far it is comes a few times a second.
        All who want one image share one pull, which ends when the last of them gives up and then leaves nothing. Raises
        InvalidRequest, NotFound (in the registry), Denied, Unreachable, BadImage, Unsupported."""
        ...

    async def import_image(self, name: str, path: Path) -> ImageInfo:
        """Make an image out of a directory or file of the caller's host: an OCI layout (or a tar of one), what
        `docker save` writes, or a root file system (or a tar of one). Raises Conflict (the name is taken), NotFound
        (nothing is there), BadImage."""
        ...

    async def tag_image(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        """Give what a build made its name: a `built` image of the same layers, with a config of its own (None: the
        same). It takes the place of a built one of that name. Raises NotFound, Conflict (any other has the name)."""
        ...

    async def delete_image(self, name: str) -> None:
        """Delete an image; sandboxes made from it live on. Raises NotFound."""
        ...

    def export_image(self, name: str) -> AsyncIterator[bytes]:
        """What an image holds over its base, as a tar in the form of an OCI layer. Raises NotFound."""
        ...

    async def prune_images(self) -> list[ImageInfo]:
        """Delete what can be had again and nothing stands on: which they were. Pulled images on which no sandbox, no
        snapshot and no build stands; and steps of builds on which no sandbox stands, so that the next build of them
        begins from the start. Images that were built or imported stay."""
        ...

    async def pools(self) -> list[PoolInfo]:
        """The warm sandboxes that wait to be handed out."""
        ...

    async def destroy(self, sandbox_id: str, ending: Ending = Ending.EXIT) -> Info:
        """End it; idempotent. When this returns no process of it is left."""
        ...

    async def capabilities(self) -> list[Capability]:
        """What this host keeps of what Sandlot promises."""
        ...

    async def counts(self) -> dict[str, int]:
        """How many creates were begun ("created"), how many sandboxes live or are being made ("running"), and how
        many ended in each way (the values of `Ending`). created = running + the sum of the endings, always."""
        ...

    async def close(self) -> None:
        """End what this object owns: an embedded node ends its sandboxes, a client only its connections."""
        ...

    # The last one, because below it in a class body `list` is this method and no longer the type.
    async def list(self) -> list[Info]:
        """The running sandboxes."""
        ...
