"""OpenAI's chat completions: the words of one dialect, translated both ways.

Owns how a request body becomes messages and wishes, and how a sampled answer, a stream of it, or a refusal is worded.
It is pure: no clock, no socket, no episode. Unknown fields are accepted and ignored; what would change the meaning of
an answer and cannot be done is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sandlot.gateway.engine import ChatMessage, Refusal

INVALID = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asked for. `messages` are in normal form: two that mean the same are equal."""

    messages: list[ChatMessage]
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    max_tokens: int | None = None  # None: whatever the episode allows
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What there is to say. `logprobs[i]` is of sampled token i, `pieces[i]` its text; these only if they were asked
    for."""

    id: str
    created: int
    model: str
    text: str
    finish: str
    prompt_tokens: int
    pieces: list[str]
    logprobs: list[float]


def parse(body: bytes) -> ChatRequest:
    """The request in `body`. Raises Refusal."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, INVALID, f"the request body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal(400, INVALID, "the request body must be a JSON object")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, INVALID, "`messages` must be a list of at least one message")
    if fields.get("n") not in (None, 1):
        raise Refusal(400, INVALID, f"n is {fields['n']!r}: this endpoint gives one choice a request; send n requests")
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise Refusal(400, INVALID, "`tools` cannot be offered to this model; put what it may do into a message")
    wish = fields.get("response_format")
    if isinstance(wish, dict) and wish.get("type", "text") != "text":
        raise Refusal(400, INVALID, f"response_format {wish['type']!r} cannot be enforced here; only text can")
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise Refusal(400, INVALID, f"max_tokens is {limit!r}: it must be a whole number of at least 1")
    stop = fields.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise Refusal(400, INVALID, "`stop` must be a text or a list of texts")
    options = fields.get("stream_options")
    top = fields.get("top_logprobs")
    return ChatRequest(
        messages=[normal(message, place) for place, message in enumerate(messages)],
        model=str(fields.get("model") or ""),
        stream=bool(fields.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(fields.get("logprobs")),
        top_logprobs=top if isinstance(top, int) else 0,
        max_tokens=limit,
        stop=tuple(stop),
    )


def normal(message: Any, place: int = 0) -> ChatMessage:
    """A message with its content as one text and nothing but what a template reads. Raises Refusal."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, INVALID, f"messages[{place}] must be an object with a `role`")
    role = message["role"]
    plain: ChatMessage = {
        "role": "system" if role == "developer" else role,  # the same thing, renamed in newer clients
        "content": _text(message.get("content"), place),
    }
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refusal(400, INVALID, f"messages[{place}].tool_calls must be a list of objects")
        plain["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": call.get("function")} for call in calls
        ]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            plain[key] = message[key]
    return plain


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, INVALID, f"messages[{place}].content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise Refusal(400, INVALID, f"messages[{place}] holds a part of type {kind!r}: this model reads text only")
        texts.append(text)
    return "".join(texts)


def completion(answer: ChatAnswer, request: ChatRequest) -> bytes:
    """The whole answer as one JSON body."""
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": _logprobs(answer, request), "finish_reason": answer.finish}
    return _json({**_frame(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)})


def stream(answer: ChatAnswer, request: ChatRequest) -> bytes:
    """The whole answer as the events of a stream: role, text, finish, usage if it was asked for, end."""
    frame = _frame(answer, "chat.completion.chunk")
    if request.include_usage:
        frame["usage"] = None

    def chunk(delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**frame, "choices": [choice]}

    chunks = [chunk({"role": "assistant", "content": ""})]
    if answer.text or request.logprobs:
        chunks.append(chunk({"content": answer.text}, _logprobs(answer, request)))
    chunks.append(chunk({}, finish=answer.finish))
    if request.include_usage:
        chunks.append({**frame, "choices": [], "usage": _usage(answer)})
    return b"".join(b"data: " + _json(one) + b"\n\n" for one in chunks) + b"data: [DONE]\n\n"


def refusal(no: Refusal) -> bytes:
    """The body of an error."""
    error = {"message": no.message, "type": no.kind, "param": None, "code": no.details.get("code")}
    return _json({"error": error})


def models(name: str, created: int) -> dict[str, Any]:
    """The list of models: the policy."""
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "sandlot"}


def _frame(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    sampled = len(answer.logprobs)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _logprobs(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any] | None:
    """Of every sampled token; as alternatives only the sampled one itself is known."""
    if not request.logprobs:
        return None
    content = []
    for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True):
        token = {"token": piece, "bytes": list(piece.encode()), "logprob": logprob}
        content.append({**token, "top_logprobs": [token] if request.top_logprobs else []})
    return {"content": content, "refusal": None}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
