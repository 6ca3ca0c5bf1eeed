"""`sandlot train`: run a recipe, and say how it goes.

On a terminal one live line shows the stage that runs; elsewhere, plain lines come now and then. Both go to stderr, the
table at the end to stdout.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.cli import interrupt, say
from sandlot.errors import Unsupported

if TYPE_CHECKING:
    from sandlot.rl.report import Line, Report
    from sandlot.rl.types import Episode

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "matplotlib", "tomli_w")
QUIET_SECONDS = 5.0  # between two plain lines of one stage


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes: `run_dir=PATH`, `seed=1`, `phase.rl.lr=1e-3`."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(envvar="SANDLOT_URL", help="Server for the boxes; without one they run in this process."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in run_dir, from its last checkpoint.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> int:
    """Train an agent by a recipe. Ctrl-C or SIGTERM ends it so that it can be resumed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Unsupported(f"training needs {', '.join(missing)}, which is missing", "`pip install 'sandlot[train]'`")
    from sandlot.cli.show import table
    from sandlot.rl.launch import launch
    from sandlot.rl.recipe import load_recipe, resume_command

    checked = load_recipe(recipe, changes or ())
    watcher = Progress()
    try:
        work = launch(checked, url=url, api_key=api_key, resume=resume, watcher=watcher)
        result = interrupt.run(work, interrupt.fast_loop())
    except interrupt.Interrupted as stopped:
        watcher.close()
        run = None if watcher.report is None else watcher.report.run
        if run is not None and (run / "recipe.toml").is_file():
            say.note(f"interrupted; all boxes have ended\n\nhint: go on with `{resume_command(run, url)}`")
        else:
            say.note("interrupted before the run had begun; nothing is left of it")
        return stopped.code
    finally:
        watcher.close()
    if json:
        say.data(result)
    else:
        say.out(table(result))
    return 0


class Progress:
    """A `report.Watcher` for people."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self._live: Any = None
        self._title = ""
        self._unit = ""
        self._done = self._total = 0
        self._began = self._said = 0.0
        self._episodes = self._tokens = 0
        self._success: list[float] = []
        self._line: Line = {}

    # --- what a run tells ----------------------------------------------------------------------------------------

    def started(self, report: Report) -> None:
        self.report = report
        say.note(f"run folder {report.run}")
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

            # rich draws four times a second by itself, so that time and boxes move while nothing is told.
            def line() -> Text:
                return Text(self._text(), no_wrap=True, overflow="ellipsis")

            self._live = Live(get_renderable=line, console=Console(stderr=True), transient=True)
            self._live.start()

    def stage(self, name: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = name.replace("_", " "), total, unit
        self._done = self._episodes = 0
        self._began = self._said = time.monotonic()
        self._tokens = self.report.tokens if self.report else 0
        self._success, self._line = [], {}

    def episode(self, episode: Episode) -> None:
        self._episodes += 1
        if episode.reward is not None:
            self._success.append(episode.reward)
        if self._unit == "episodes":
            self._advance()

    def step(self, line: Line) -> None:
        self._line = line
        self._advance()

    def evaluated(self, name: str, success: float) -> None:
        self._say(f"{say.painted(f'{success:.3f}', '1', sys.stderr)} held-out success, {_stage(name)}")

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # --- how it is said --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done == self._total or (self._live is None and now - self._said >= QUIET_SECONDS):
            self._said = now
            self._say(self._text())

    def _text(self) -> str:
        if self.report is None or not self._title:
            return "starting engine and trainer"
        seconds = max(1e-3, time.monotonic() - self._began)
        parts = [f"{self._title:<22} {self._done}/{self._total} {self._unit}"]
        if "success" in self._line:
            parts.append(f"success {self._line['success']:.2f}")
        elif self._success:
            parts.append(f"success {sum(self._success) / len(self._success):.2f}")
        elif "loss" in self._line:
            parts.append(f"loss {self._line['loss']:.3f}")
        if self._episodes:
            parts.append(f"{self._episodes / seconds:.1f} episodes/s")
            parts.append(f"{self.report.boxes()} boxes")
        if tokens := self.report.tokens - self._tokens:
            parts.append(f"{tokens / seconds:.0f} tokens/s")
        if "staleness_mean" in self._line:
            parts.append(f"staleness {self._line['staleness_mean']:.1f}")
        if 0 < self._done < self._total:
            parts.append(f"{_duration(seconds / self._done * (self._total - self._done))} left")
        elif not self._done and seconds > 2 * QUIET_SECONDS:
            parts.append(f"waiting for the first of its {self._unit} for {_duration(seconds)}")
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            say.note(text)


def _stage(name: str) -> str:
    return "at random start" if name == "start" else f"after {name}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
