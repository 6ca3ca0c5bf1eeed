"""The whole error tree on one page: what each means, its wire code, and the hint a person gets.

The rule: a failure is charged to one boundary and raised once, there. What a program in a box does (a non-zero exit,
a timeout, an out-of-memory kill) is a *result* with fields, never an exception; an exception means that a promise of
Sandlot was broken or that the caller asked for something that cannot be had.

    SandlotError
    ├── InvalidRequest     400 invalid        the caller's words are wrong; nothing was started
    │   └── RecipeError    400 recipe         a recipe key, value or combination is wrong
    ├── Unauthorized       401 unauthorized   the request carries no key, or none of this server's
    ├── Forbidden          403 forbidden      this key may not do that
    ├── NotFound           404 not_found      no such sandbox, image, file or run
    ├── Conflict           409 conflict       the name, key or port is taken
    ├── SandboxEnded       410 ended          the sandbox is gone; the message says why and when
    ├── QuotaExceeded      429 quota          a tenant's quota, or a key's rate of requests, is used up
    ├── Unsupported        422 unsupported    this host cannot keep what was asked for by name
    ├── BadImage           422 bad_image      an image is damaged, hostile, or not what its digest says
    ├── Denied             403 denied         a registry does not give this node what it asks for
    ├── StartFailed        500 start_failed   a sandbox could not be made; the step and errno are named
    ├── HostFault          507 host_fault     disk full, out of descriptors, a dead helper: the host's trouble
    ├── BuildFailed        422 build          a command of a build failed
    ├── DeadlineExceeded   504 deadline       a named wait ran out
    ├── Unreachable        503 unreachable    no server answers at that address
    └── TrainingFault      500 training       engine and trainer disagree, NaN, a dead part: the run must stop

Messages say what happened and to what; `hint` says what to do next and may hold a command in backticks.
To add one: subclass below, give it `code` and `status`, add the line above. The server and the client find it by code.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class SandlotError(Exception):
    """Base of every error that Sandlot raises. `str(error)` is one sentence; `hint` is what to do, or None."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def to_wire(self) -> dict[str, dict[str, str | None]]:
        """The body of an HTTP error: `{"error": {"code", "message", "hint"}}`."""
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}


class InvalidRequest(SandlotError):
    """The caller's words are wrong; nothing was started."""

    code = "invalid"
    status = 400


class RecipeError(InvalidRequest):
    """A recipe has an unknown key, a wrong value, or parts that cannot work together."""

    code = "recipe"


def invalid(error: ValidationError) -> InvalidRequest:
    """What pydantic found wrong, as one sentence that names the field: `limits.memory: Input should be …`."""
    found = [
        f"{'.'.join(map(str, each['loc'])) or 'value'}: {each['msg'].removeprefix('Value error, ')}"
        for each in error.errors()
    ]
    return InvalidRequest("; ".join(found))


class Unauthorized(SandlotError):
    """The request does not carry a key of this server."""

    code = "unauthorized"
    status = 401


class Forbidden(SandlotError):
    """The key that a request carries is not good for that."""

    code = "forbidden"
    status = 403


class NotFound(SandlotError):
    """There is no sandbox, image, file or run of that name."""

    code = "not_found"
    status = 404


def no_sandbox(sandbox_id: str) -> NotFound:
    """Of an id that never was, or is another tenant's: nobody may tell which."""
    return NotFound(
        f"there is no sandbox {sandbox_id or repr(sandbox_id)}",
        "`sandlot ls` or `GET /v1/sandboxes` lists those that run",
    )


class Conflict(SandlotError):
    """The name, key or port is already in use."""

    code = "conflict"
    status = 409


class SandboxEnded(SandlotError):
    """The sandbox has ended; the message says for which reason and how long ago."""

    code = "ended"
    status = 410


class QuotaExceeded(SandlotError):
    """As much as may be in use at once is in use, or as many requests were made as may be made in a second; then
    `retry_after` is how many seconds to wait."""

    code = "quota"
    status = 429

    def __init__(self, message: str, hint: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, hint)
        self.retry_after = retry_after


class Unsupported(SandlotError):
    """This host cannot keep something that was asked for by name."""

    code = "unsupported"
    status = 422


class BadImage(SandlotError):
    """An image is damaged, breaks off, does more than an image may, or is not what its digest says."""

    code = "bad_image"
    status = 422


class Denied(SandlotError):
    """A registry does not let this node have an image: no login, a wrong one, or one that has run out."""

    code = "denied"
    status = 403


class StartFailed(SandlotError):
    """A sandbox could not be made. The message names the step and what its errno means here."""

    code = "start_failed"
    status = 500


class HostFault(SandlotError):
    """The host is in trouble: disk full, no descriptors left, a helper that died."""

    code = "host_fault"
    status = 507


def host_fault(error: OSError, doing: str) -> HostFault:
    """A failed system call of this process as a HostFault. `doing` reads on from "could not": `write /run/x`."""
    elsewhere = "name a directory that this user may write with `--state-dir`"
    space = "free some space there, or name another directory with `--state-dir`"
    hint = {
        errno.ENOSPC: space,
        errno.EDQUOT: space,
        errno.EACCES: elsewhere,
        errno.EPERM: elsewhere,
        errno.EROFS: elsewhere,
        errno.ENOENT: elsewhere,
        errno.ENOTDIR: elsewhere,
        errno.EMFILE: "raise the limit of open files of this process: `ulimit -n 65536`",
        errno.ENFILE: "raise the limit of open files of this host: `sysctl fs.file-max=1000000`",
        errno.ENOMEM: "fewer sandboxes, or smaller ones, fit this host",
    }.get(error.errno or 0)
    return HostFault(f"could not {doing}: {os.strerror(error.errno) if error.errno else error}", hint)


class BuildFailed(SandlotError):
    """A command of an image's build failed; the message names its line and holds the end of its output."""

    code = "build"
    status = 422


class DeadlineExceeded(SandlotError):
    """A named wait ran out of time."""

    code = "deadline"
    status = 504


class Unreachable(SandlotError):
    """No server answers at that address."""

    code = "unreachable"
    status = 503


class TrainingFault(SandlotError):
    """Engine and trainer disagree, a loss is not a number, or a part of the run died."""

    code = "training"
    status = 500


def _tree(root: type[SandlotError]) -> dict[str, type[SandlotError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_wire(body: object, status: int) -> SandlotError:
    """The error that a server answered with: `body` is its decoded JSON, which may be anything at all."""
    fields = body.get("error") if isinstance(body, dict) else None
    if not isinstance(fields, dict):
        return SandlotError(f"the server answered {status} without an explanation")
    hint = fields.get("hint")
    kind = _tree(SandlotError).get(str(fields.get("code")), SandlotError)
    return kind(str(fields.get("message")), None if hint is None else str(hint))
