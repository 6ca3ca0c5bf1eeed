"""The OpenAPI document: what FastAPI makes of the routes, with how each can fail and an example of what it is sent.

How a route fails follows from what it is about, so that nobody has to say it at each: whatever is about a sandbox can
meet its end, whatever is asked by a key can be refused.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

ERRORS = {
    "400": "The words of the request are wrong; nothing was started.",
    "401": "The request carries no key, or none of this server's.",
    "403": "The key is not good for that, or a registry gives this server no such image.",
    "404": "There is no such sandbox, image, file, shell or command.",
    "409": "A name, key or port is taken, or something else is being done there just now.",
    "410": "The sandbox has ended; the message says why and when.",
    "422": "This host cannot keep what was asked for by name, or an image is damaged.",
    "429": "A tenant's quota, or the key's rate of requests, is used up; for the latter `Retry-After` says how long.",
    "500": "The server failed; its log has the reason at the request's id.",
    "503": "The server is about to stop or is not ready, or what it would have to ask cannot be reached.",
    "504": "A named wait ran out of time.",
    "507": "The host is in trouble: its disk is full, or it has no descriptors left.",
}
# What any route can meet, and what those meet that are about a sandbox or an image.
_ANY = ("400", "401", "403", "429", "500", "503", "504", "507")
_THING = ("404", "409", "422")
_SANDBOX = (*_THING, "410")

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint", "request_id"],
            "properties": {
                "code": {"type": "string", "description": "which error it is, in a word"},
                "message": {"type": "string", "description": "what happened, and to what"},
                "hint": {"type": ["string", "null"], "description": "what to do about it"},
                "request_id": {"type": ["string", "null"], "description": "as in `X-Request-Id` and the server's log"},
            },
        }
    },
    "examples": [
        {
            "error": {
                "code": "not_found",
                "message": "there is no sandbox sb-0a1b2c",
                "hint": "the ids of those that run: `GET /v1/sandboxes`",
                "request_id": "7c0de5a1b2c3d4e5",
            }
        }
    ],
}

# What is sent, by what it is sent to.
EXAMPLES: dict[tuple[str, str], Any] = {
    ("post", "/v1/sandboxes"): {
        "image": "host",
        "env": {"LANG": "C.UTF-8"},
        "labels": {"episode": "42"},
        "limits": {"memory": 536870912, "pids": 256},
        "lifetime": 3600,
        "key": "episode-42",
    },
    ("post", "/v1/sandboxes/batch"): {"spec": {"labels": {"group": "7"}, "lifetime": 600}, "count": 8},
    ("post", "/v1/sandboxes/{sandbox_id}/run"): {"argv": ["sh", "-c", "echo hello; exit 3"], "timeout": 60},
    ("post", "/v1/sandboxes/{sandbox_id}/commands"): {"argv": ["make", "-j8"], "cwd": "/root", "key": "build"},
    ("post", "/v1/sandboxes/{sandbox_id}/commands/{command_id}/signal"): {"number": 15},
    ("post", "/v1/sandboxes/{sandbox_id}/shells"): {"cwd": "/tmp", "env": {"PAGER": "cat"}},
    ("post", "/v1/sandboxes/{sandbox_id}/shells/{shell_id}/run"): {"command": "cd /tmp && pwd", "timeout": 30},
    ("post", "/v1/sandboxes/{sandbox_id}/routes/{port}"): {
        "url": "http://127.0.0.1:8000",
        "headers": {"Authorization": "Bearer of-the-upstream"},
    },
    ("post", "/v1/sandboxes/{sandbox_id}/reset"): {"image": "solved"},
    ("post", "/v1/sandboxes/{sandbox_id}/snapshot"): {"name": "solved"},
    ("post", "/v1/sandboxes/{sandbox_id}/fork"): {"count": 4},
    ("post", "/v1/images/pull"): {"reference": "debian:12"},
    ("post", "/v1/images/{image}/tag"): {"name": "mine"},
}


class Api(FastAPI):
    """FastAPI with that document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _described(super().openapi())
        return self.openapi_schema


def _described(document: dict[str, Any]) -> dict[str, Any]:
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for framework_s in ("HTTPValidationError", "ValidationError"):
        schemas.pop(framework_s, None)
    schemas["Error"] = _ERROR
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "`sandlot keys create`"}}
    document["security"] = [{"key": []}, {}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            answers.pop("422", None)  # the framework's own, which is never sent
            for status in _statuses(path):
                content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
                answers.setdefault(status, {"description": ERRORS[status], "content": content})
            example = EXAMPLES.get((method, path))
            if example is not None:
                operation["requestBody"]["content"]["application/json"]["example"] = example
    return document


def _statuses(path: str) -> tuple[str, ...]:
    if path == "/healthz":
        return ()
    if path == "/readyz":
        return ("503",)
    if path.startswith("/v1/sandboxes"):
        return (*_ANY, *_SANDBOX)
    return (*_ANY, *_THING) if path.startswith("/v1/images") else _ANY
