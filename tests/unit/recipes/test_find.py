"""Promises:
1. A task is a pure function of split and index; no task is in two splits; exactly one file holds the word.
2. The answer is nowhere in the box: not in the files, the environment or the arguments.
3. Everything that a dialogue consists of is in the vocabulary, and commands survive the tokenizer.
4. About 38 % of the demonstrations succeed, a fifth because they look; each is the same for the same seed.
5. Only what the agent printed counts, and only if it ended well.
6. The agent program, unmodified and in its own interpreter, solves a task against any OpenAI-compatible endpoint, in
   plain and chunked answers, and says what is wrong when it cannot.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import AsgiApp, Output, RunResult
from sandlot.envs.boxed import BoxTask
from sandlot.errors import RecipeError
from sandlot.gateway.engine import Sampling
from sandlot.gateway.render import FileTokenizer, Renderer
from sandlot.gateway.server import Gateway
from sandlot.rl.engines.scripted import ScriptedEngine

AGENT = Path(__file__).parents[3] / "recipes" / "find" / "agent.py"
Serve = Callable[[AsgiApp], Awaitable[str]]


def tasks(find: Any, split: str = "train", count: int = 300) -> list[BoxTask]:
    return [find.task(split, index) for index in range(count)]


async def command(task: BoxTask, text: str, folder: Path) -> str:
    """What the task's shell command prints, in a folder that holds the task's files."""
    for path, data in task.files.items():
        (folder / Path(path).name).write_bytes(data)
    process = await asyncio.create_subprocess_exec("sh", "-c", text, cwd=folder, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


def test_a_task_is_a_function_of_split_and_index(find: Any) -> None:
    assert tasks(find) == tasks(find)
    seeds = [task.seed for split in ("train", "heldout", "demos") for task in tasks(find, split)]
    assert len(set(seeds)) == len(seeds)
    worlds = [str((task.files, task.env)) for split in ("train", "heldout", "demos") for task in tasks(find, split)]
    assert len(set(worlds)) == len(worlds)
    with pytest.raises(RecipeError, match="no split"):
        find.task("test", 0)


def test_exactly_one_file_holds_the_word_for_grep_too(find: Any) -> None:
    for task in tasks(find):
        held = [Path(path).name for path, data in task.files.items() if task.secret["word"].encode() in data]
        assert held == [task.secret["file"]]
        assert task.env["TASK"] == f"find {task.secret['word']}"


def test_the_answer_is_nowhere_in_the_box(find: Any) -> None:
    for task in tasks(find, count=50):
        seen = b" ".join([*task.files.values(), *(f"{k}={v}".encode() for k, v in task.env.items())])
        assert task.secret["file"].encode() not in seen
        assert not any(task.secret["file"] in word for word in task.argv)
    assert [volume.read_only for volume in find.volumes] == [True]


async def test_every_word_of_a_dialogue_is_in_the_vocabulary(
    find: Any, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    unknown = tokenizer.encode("<unk>")[0]
    task = find.task("train", 3)
    word = task.secret["word"]
    for text in ("ls", "cat f3", f"grep {word} *", f"submit {task.secret['file']}"):
        assert unknown not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text  # the shell gets what the model meant
    for text in ("ls", "cat f3", f"grep {word} *"):
        seen = await command(task, text, tmp_path)
        assert seen
        assert unknown not in tokenizer.encode(seen)
    assert unknown not in tokenizer.encode(task.env["TASK"] + " (empty)")
    assert tokenizer.decode(tokenizer.encode("f3:w1 w7\n")) == "f3 : w1 w7"


async def test_a_word_found_is_copied_to_the_answer(find: Any, tmp_path: Path) -> None:
    task = find.task("train", 11)
    seen = await command(task, f"grep {task.secret['word']} *", tmp_path)
    assert seen.split(":")[0] == task.secret["file"]


def test_about_two_in_five_demonstrations_succeed_and_a_fifth_look(find: Any) -> None:
    right = looked = 0
    for number, task in enumerate(tasks(find, "demos", 3000)):
        script = find.demonstrator(task, number)
        again = find.demonstrator(task, number)
        told = [{"role": "user", "content": task.env["TASK"]}]
        while not (said := script(told)).startswith("submit"):
            assert said == again(told)
            looked += said.startswith("grep")
            seen = f"{task.secret['file']}:{task.secret['word']}" if said.startswith("grep") else "f0\nf1\nf2\nf3\nf4\n"
            told += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]
        right += said == f"submit {task.secret['file']}"
    assert 0.33 < right / 3000 < 0.41
    assert 0.18 < looked / 3000 < 0.22


@pytest.mark.parametrize(
    ("printed", "code", "reward"),
    [("{file}\n", 0, 1.0), ("{file}", 1, 0.0), ("f9\n", 0, 0.0), ("", 0, 0.0), ("{file} {file}\n", 0, 0.0)],
)
async def test_only_what_was_printed_before_a_good_end_counts(
    find: Any, printed: str, code: int, reward: float
) -> None:
    task = find.task("train", 5)
    out = Output(data=printed.format(**task.secret).encode())
    grade = await find.grade(task, None, RunResult(exit_code=code, out=out))
    assert grade.reward == reward


class Program:
    """The agent, as it would run in a box."""

    def __init__(self, task: BoxTask, folder: Path) -> None:
        self.task, self.folder = task, folder
        for path, data in task.files.items():
            (folder / Path(path).name).write_bytes(data)

    async def run(self, url: str | None, **env: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        known = {"PATH": os.environ["PATH"], **self.task.env, **({"OPENAI_BASE_URL": url} if url else {}), **env}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(AGENT), cwd=self.folder, env=known, stdout=-1, stderr=-1
        )
        async with asyncio.timeout(20):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
def program(find: Any, tmp_path: Path) -> Program:
    return Program(find.task("train", 2), tmp_path)


async def test_the_agent_solves_the_task_against_the_gateway(
    find: Any, program: Program, tokenizer: FileTokenizer, serve: Serve
) -> None:
    good = type(find)(shots_good=1.0)
    engine = ScriptedEngine(tokenizer, good.demonstrator(program.task, 0), keep_log=True)
    session = Gateway(engine, Renderer(tokenizer)).open("e", Sampling(max_tokens=16))
    code, out, err = await program.run(f"{await serve(session.handler)}/v1")
    assert (code, out, err) == (0, f"{program.task.secret['file']}\n", "")
    said = [message["content"] for message in session.trace.messages]
    assert said[1] == f"grep {program.task.secret['word']} *"
    assert said[2].startswith(f"{program.task.secret['file']}:")
    (path,) = session.trace.paths()
    log = await engine.take_log()
    assert path.tokens == log[-1][1] + log[-1][2]
    assert (session.trace.drift, session.trace.forks) == (0, 0)


class OtherServer:
    """An endpoint that is not ours: chunked answers, its own framing."""

    def __init__(self, texts: list[str], chunked: bool) -> None:
        self.texts, self.chunked, self.asked = texts, chunked, []  # type: ignore[var-annotated]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            body = json.loads(await reader.readexactly(int(fields[b"Content-Length"])))
            self.asked.append((head.split(b"\r\n")[0].decode(), fields, body))
            answer = json.dumps({"choices": [{"message": {"content": self.texts.pop(0)}}]}).encode()
            if self.chunked:
                parts = [answer[:7], answer[7:]]
                sized = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts)
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(sized + b"0\r\nX-Trailer: 1\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
                break
        writer.close()


@pytest.mark.parametrize("chunked", [True, False])
async def test_the_agent_works_against_a_foreign_endpoint(program: Program, chunked: bool) -> None:
    other = OtherServer(["echo one; echo two >&2", "true", "submit  f4 "], chunked)
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/some/base/"
    code, out, err = await program.run(url, OPENAI_API_KEY="sk-1", MODEL="m", MAX_TOKENS="9")
    server.close()
    assert (code, out, err) == (0, "f4\n", "")
    line, fields, body = other.asked[-1]
    assert line == "POST /some/base/chat/completions HTTP/1.1"
    assert fields[b"Authorization"] == b"Bearer sk-1"
    assert (body["model"], body["max_tokens"]) == ("m", 9)
    assert [message["content"] for message in body["messages"][1:]] == [
        "echo one; echo two >&2",
        "one\ntwo\n",
        "true",
        "(empty)",
    ]


async def test_the_agent_gives_up_when_its_turns_ran_out(program: Program) -> None:
    other = OtherServer(["ls"] * 5, chunked=True)
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    assert await program.run(url) == (0, "", "")
    server.close()
    assert len(other.asked) == 4


async def test_the_agent_bounds_a_commands_output(program: Program) -> None:
    other = OtherServer(["seq 100000; echo end", "submit"], chunked=True)
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    assert await program.run(url) == (0, "\n", "")
    server.close()
    assert len(other.asked[-1][2]["messages"][-1]["content"]) == 4096


@pytest.mark.parametrize(
    ("url", "env", "said"),
    [
        ("https://models.example/v1", {}, "plain http only"),
        ("http://127.0.0.1:1/v1", {}, "refused"),
        ("http://127.0.0.1:port/v1", {}, "must look like"),
        (None, {}, "set OPENAI_BASE_URL"),
        ("http://127.0.0.1:1/v1", {"MAX_TURNS": "many"}, "MAX_TURNS"),
    ],
)
async def test_the_agent_says_what_is_wrong(program: Program, url: str | None, env: dict[str, str], said: str) -> None:
    code, out, err = await program.run(url, **env)
    assert (code, out) == (1, "")
    assert said in err
    assert "Traceback" not in err


async def test_the_agent_reports_an_endpoints_error(program: Program, tokenizer: FileTokenizer, serve: Serve) -> None:
    gateway = Gateway(ScriptedEngine(tokenizer, lambda messages: "ls"), Renderer(tokenizer))
    session = gateway.open("e", Sampling(max_tokens=8), max_calls=1)
    code, out, err = await program.run(f"{await serve(session.handler)}/v1")
    assert (code, out) == (1, "")
    assert "answered 429" in err and "budget_exhausted" in err


def test_the_agent_imports_only_json_os_and_socket() -> None:
    lines = [line for line in AGENT.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert lines == ["import json", "import os", "import socket"]
