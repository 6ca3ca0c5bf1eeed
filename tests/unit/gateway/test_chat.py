"""Promises:
1. Requests that mean the same are parsed alike: text parts are joined, null is empty, developer is system.
2. Unknown fields are accepted; what cannot be done is refused by name, with status 400.
3. Answers, streams and errors have OpenAI's shape.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandlot.gateway import chat
from sandlot.gateway.chat import ChatAnswer
from sandlot.gateway.engine import Refusal

USER = {"role": "user", "content": "find w7"}
ANSWER = ChatAnswer("chatcmpl-1", 17, "policy", "submit f3", "stop", 4, ["submit", "f3", ""], [-0.5, -0.25, 0.0])


def ask(**fields: Any) -> chat.ChatRequest:
    return chat.parse(json.dumps({"model": "any", "messages": [USER], **fields}).encode())


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        chat.parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user", "content": "ab", "cache_control": {"type": "ephemeral"}}, "ab"),
    ],
)
def test_messages_that_mean_the_same_are_parsed_alike(message: dict[str, Any], normal: str) -> None:
    assert ask(messages=[message]).messages == [{"role": "user", "content": normal}]


def test_a_developer_message_is_a_system_message() -> None:
    assert ask(messages=[{"role": "developer", "content": "x"}]).messages[0]["role"] == "system"


def test_tool_calls_and_results_in_the_history_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    told = [{"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}]
    told.append({"role": "tool", "tool_call_id": "1", "content": "done"})
    assistant, tool = ask(messages=told).messages
    assert assistant == {"role": "assistant", "content": "", "tool_calls": [{k: call[k] for k in list(call)[:3]}]}
    assert tool == {"role": "tool", "content": "done", "tool_call_id": "1"}


def test_unknown_fields_are_accepted() -> None:
    assert ask(reasoning_effort="high", metadata={"a": 1}, store=True, user="u", n=1).max_tokens is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"{}", "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}', "image_url"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n is 2"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0.5}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "stop"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
            "json_object",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: bytes, named: str) -> None:
    no = refused(body)
    assert no.status == 400
    assert named in no.message
    error = json.loads(chat.refusal(no))["error"]
    assert error == {"message": no.message, "type": "invalid_request_error", "param": None, "code": None}


def test_a_completion_has_openais_shape_with_usage_and_the_logprobs_asked_for() -> None:
    body = json.loads(chat.completion(ANSWER, ask()))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "submit f3", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
    }
    told = json.loads(chat.completion(ANSWER, ask(logprobs=True, top_logprobs=1)))["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in told] == [-0.5, -0.25, 0.0]
    assert [one["token"] for one in told[0]["top_logprobs"]] == ["submit"]


def test_a_stream_is_role_text_finish_usage_and_done() -> None:
    events = chat.stream(ANSWER, ask(stream=True, stream_options={"include_usage": True})).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "submit f3"}, {}]
    assert chunks[2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[3]["choices"] == [] and chunks[3]["usage"]["total_tokens"] == 7
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
