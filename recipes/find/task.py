"""The find task: five small files in a box; say which of them holds a given word.

Owns what a task looks like, how an answer is graded and what the scripted demonstrator says. The box holds the files
and the agent program, never the answer; grading happens outside, on what the agent printed, after it has ended.

    find w7  →  grep w7 *  →  f3:w12 w7 w25  →  submit f3

Copying is all it takes: `grep` copies the word of the question, `submit` the first word of what grep printed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandlot.api import RunResult, Volume
from sandlot.envs.boxed import BoxTask, Grade
from sandlot.errors import RecipeError

if TYPE_CHECKING:
    from sandlot.sandbox import Sandbox

FILES = tuple(f"f{i}" for i in range(5))
WORDS = tuple(f"w{i}" for i in range(24))  # few enough that 120 good demonstrations show each one some times
WORDS_PER_FILE = 3
FOLDER = "/find"  # holds the files and nothing else, so that `ls` and `*` mean them
AGENT = "/opt/find/agent.py"

# Where each split's seeds begin. Ranges of a milliard seeds never meet, so no task is in two splits.
SPLITS = {"train": 0, "heldout": 10**9, "demos": 2 * 10**9}


def vocabulary() -> list[str]:
    """Every word that a prompt, a command or its output is made of, special tokens of a chat template not included.

    The split rule: text is split at whitespace, newlines included, which is dropped; and `:` is a word of its own
    wherever it stands. So "f3:w12 w7\\n" is [f3 : w12 w7]; joined by single spaces, a command is what it was. What else
    a shell may print (its complaint about a command that makes no sense) is the unknown word.
    """
    return ["find", "ls", "cat", "grep", "submit", "*", ":", "(empty)", *FILES, *WORDS]


class Find:
    """`shots_good`: the share of demonstrations that solve the task; the others guess. `turns`: what the agent gets."""

    def __init__(self, shots_good: float = 0.2, turns: int = 4, timeout: float = 60.0) -> None:
        if not 0.0 <= shots_good <= 1.0:
            raise RecipeError(f"shots_good is {shots_good}: it is a share, from 0 to 1", "`env.options.shots_good=0.2`")
        if turns < 1:
            raise RecipeError(f"turns is {turns}: the agent needs at least one", "`env.options.turns=4`")
        self.shots_good = shots_good
        self.turns = turns
        self.timeout = timeout
        agent = Path(__file__).resolve().with_name("agent.py")
        self.volumes = (Volume(source=str(agent), target=AGENT),)
        # The interpreter itself and not a virtual environment's link to it: the environment is not in the box.
        self.python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    def task(self, split: str, index: int) -> BoxTask:
        """The task of that number; always the same one."""
        if split not in SPLITS:
            raise RecipeError(f"the find task has no split {split!r}", f"it has {', '.join(SPLITS)}")
        seed = SPLITS[split] + index
        chance = random.Random(seed)
        word, answer = chance.choice(WORDS), chance.choice(FILES)
        # grep finds w1 in w12 too: such neighbours are left out, so that exactly one line matches.
        others = [other for other in WORDS if word not in other]
        held = {name: chance.sample(others, WORDS_PER_FILE) for name in FILES}
        held[answer][chance.randrange(WORDS_PER_FILE)] = word
        return BoxTask(
            id=f"{split}-{index}",
            seed=seed,
            files={f"{FOLDER}/{name}": (" ".join(words) + "\n").encode() for name, words in held.items()},
            argv=(self.python, "-I", "-S", AGENT),
            cwd=FOLDER,
            env={"TASK": f"find {word}", "MAX_TURNS": str(self.turns)},
            timeout=self.timeout,
            secret={"file": answer, "word": word},
        )

    async def grade(self, task: BoxTask, box: Sandbox, result: RunResult) -> Grade:
        """1 if the agent ended well and printed the file's name, else 0."""
        said = result.stdout.strip() if result.ok else ""
        return Grade(reward=float(said == task.secret["file"]), metrics={"submitted": float(bool(said))})

    def demonstrator(self, task: BoxTask, seed: int) -> Callable[[list[dict[str, Any]]], str]:
        """A scripted agent's part of the dialogue: a few solve the task, the others look around at most and guess."""
        chance = random.Random(f"{task.id}/{seed}")
        good, looks, guess = chance.random() < self.shots_good, chance.random() < 0.5, chance.choice(FILES)

        def answer(messages: list[dict[str, Any]]) -> str:
            first = messages[-1]["content"] == task.env["TASK"]
            if good:
                return f"grep {task.secret['word']} *" if first else f"submit {messages[-1]['content'].split(':')[0]}"
            return "ls" if first and looks else f"submit {guess}"

        return answer
