"""Tasks that `inspect eval tasks.py@NAME` runs, with a model that says what is written here."""

from __future__ import annotations

import os
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, includes, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash, bash_session, python, text_editor
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from sandlot.integrations.inspect import SandlotConfig, SandlotSandbox


def scripted(*calls: tuple[str, dict[str, Any]]) -> Model:
    """A model that calls these tools, one after another, and then says what the last one answered."""

    def answer(messages: list[ChatMessage], *_: object) -> ModelOutput:
        told = [message.text for message in messages if message.role == "tool"]
        if len(told) < len(calls):
            output = ModelOutput.for_tool_call("mockllm/model", *calls[len(told)])
        else:
            output = ModelOutput.from_content("mockllm/model", told[-1] or "nothing")
        output.usage = ModelUsage()  # else it is counted with a table that has to be downloaded
        return output

    return get_model("mockllm/model", custom_outputs=answer, memoize=False)


@scorer(metrics=[accuracy()])
def wrote(file: str) -> Scorer:
    """Whether the sandbox has the target in a file."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=CORRECT if await sandbox().read_file(file) == target.text else INCORRECT)

    return score


@task
def product() -> Task:
    """Files and a setup script go in, tools work on them, the scorer looks at what is there then."""
    sample = Sample(
        input="What is the product of the numbers?",
        target="42\n",
        files={"numbers": "6 7\n", "other:numbers": "2 3\n"},
        setup="tr ' ' '*' <numbers >prepared",
    )
    calls = (
        ("bash", {"command": "echo $(($(cat prepared))) >answer; nohup sleep 1000 >/dev/null 2>&1 & ls /root"}),
        ("python", {"code": "print(open('answer').read())"}),
    )
    config = SandlotConfig(user="nobody", cwd="/work", others={"other": SandlotSandbox()})
    return Task(
        dataset=[sample],
        solver=[use_tools(bash(timeout=30), python(timeout=30)), other(), generate()],
        scorer=[includes(), wrote("answer")],
        sandbox=SandboxEnvironmentSpec("sandlot", config),
        model=scripted(*calls),
    )


@solver
def other() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert await sandbox("other").read_file("numbers") == "2 3\n"
        return state

    return solve


@task
def injected() -> Task:
    """Tools that Inspect brings into the sandbox as a program of its own, and asks by polling."""
    calls = (
        ("text_editor", {"command": "create", "path": "/tmp/made", "file_text": "six\n"}),
        ("text_editor", {"command": "str_replace", "path": "/tmp/made", "old_str": "six", "new_str": "seven"}),
        ("bash_session", {"action": "type_submit", "input": "cat /tmp/made"}),
    )
    return Task(
        dataset=[Sample(input="Write.", target="seven")],
        solver=[use_tools(text_editor(timeout=60), bash_session()), generate()],
        scorer=[includes(), wrote_seven()],
        sandbox="sandlot",
        model=scripted(*calls),
    )


@scorer(metrics=[accuracy()])
def wrote_seven() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=CORRECT if await sandbox().read_file("/tmp/made") == "seven\n" else INCORRECT)

    return score


@solver
def sleeping() -> Solver:
    """Two commands that never end, one of them in the background, told apart from others by MARK."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        mark = os.environ["MARK"]
        await sandbox().exec(["sh", "-c", f"sleep {mark} >/dev/null 2>&1 & exec setsid sleep {mark} >/dev/null 2>&1 &"])
        if os.environ.get("BREAKS"):
            raise ValueError("a solver that breaks")
        await sandbox().exec(["sleep", mark])
        return state

    return solve


@task
def stuck() -> Task:
    idle = float(os.environ["IDLE"]) if "IDLE" in os.environ else None
    return Task(
        dataset=[Sample(input="Sleep.", target="never")],
        solver=[sleeping()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("sandlot", SandlotConfig(idle_timeout=idle) if idle else None),
        model=get_model("mockllm/model"),
    )
