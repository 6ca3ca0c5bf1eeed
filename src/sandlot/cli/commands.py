"""The commands of `sandlot`: a table, each loaded only when it is the one that was called.

It promises that `sandlot --help` needs neither torch nor a web server, and that whatever goes wrong ends in one clear
message and a fitting exit status. To add a command: a function in a module of this package, a line in the table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from sandlot.cli import completion, say


class Entry(NamedTuple):
    """A line of the table."""

    kind: str
    target: str  # where its function is
    line: str
    example: str


_BOXES, _INSIDE, _ABOUT = "Sandboxes", "In a sandbox", "Learning, and this host"

COMMANDS: dict[str, Entry] = {
    "run": Entry(
        _BOXES,
        "sandlot.cli.exec:run",
        "Run a command in a fresh sandbox and exit with its status.",
        "sandlot run --image debian:12 -- cat /etc/os-release",
    ),
    "create": Entry(
        _BOXES,
        "sandlot.cli.box:create",
        "Make a sandbox on a server and print its id.",
        "box=$(sandlot create --label job=7 --limit memory=512M)",
    ),
    "ls": Entry(_BOXES, "sandlot.cli.box:ls", "Show the sandboxes of a server.", "sandlot ls --label job=7"),
    "snapshot": Entry(
        _BOXES,
        "sandlot.cli.box:snapshot",
        "Make an image of a sandbox's files.",
        "sandlot snapshot $box solved && sandlot create solved",
    ),
    "fork": Entry(
        _BOXES, "sandlot.cli.box:fork", "Make sandboxes with the same files as another.", "sandlot fork $box -n 4"
    ),
    "reset": Entry(_BOXES, "sandlot.cli.box:reset", "Take a sandbox back to its image.", "sandlot reset $box"),
    "pause": Entry(
        _BOXES, "sandlot.cli.box:pause", "Stop every process of sandboxes where it is.", "sandlot pause $box"
    ),
    "resume": Entry(_BOXES, "sandlot.cli.box:resume", "Let paused sandboxes go on.", "sandlot resume $box"),
    "wait": Entry(
        _BOXES,
        "sandlot.cli.box:wait",
        "Wait for the end of a sandbox, or of a command in it.",
        "sandlot wait $box $command",
    ),
    "rm": Entry(_BOXES, "sandlot.cli.box:rm", "End sandboxes.", "sandlot rm --label job=7"),
    "exec": Entry(
        _INSIDE,
        "sandlot.cli.exec:execute",
        "Run a command in a sandbox and exit with its status.",
        "sandlot exec $box -w /srv -- make -j8",
    ),
    "cp": Entry(
        _INSIDE,
        "sandlot.cli.cp:cp",
        "Copy files and directories into a sandbox and out of it.",
        "sandlot cp src/. $box:/srv && sandlot cp $box:/srv/report.txt .",
    ),
    "shell": Entry(
        _INSIDE,
        "sandlot.cli.shell:shell",
        "Open a terminal in a sandbox, or in a fresh one.",
        "sandlot shell debian:12",
    ),
    "terminals": Entry(
        _INSIDE, "sandlot.cli.shell:terminals", "Show the terminals of a sandbox.", "sandlot terminals $box"
    ),
    "diff": Entry(_INSIDE, "sandlot.cli.box:diff", "Show what differs from its image.", "sandlot diff $box"),
    "commands": Entry(
        _INSIDE, "sandlot.cli.exec:commands", "Show the commands that were left to themselves.", "sandlot commands $box"
    ),
    "logs": Entry(
        _INSIDE,
        "sandlot.cli.exec:logs",
        "Print what a command has written.",
        "command=$(sandlot exec -d $box -- make); sandlot logs -f $box $command",
    ),
    "kill": Entry(
        _INSIDE, "sandlot.cli.exec:kill", "Send a signal to a command.", "sandlot kill $box $command --signal INT"
    ),
    "image": Entry(
        _BOXES,
        "sandlot.cli.image:image",
        "Pull, import, build, list, delete or export images.",
        "sandlot image pull debian:12",
    ),
    "train": Entry(
        _ABOUT,
        "sandlot.cli.train:train",
        "Train an agent by a recipe.",
        "sandlot train recipes/find/demo.toml seed=1",
    ),
    "show": Entry(
        _ABOUT,
        "sandlot.cli.show:show",
        "Show a training run: its table and its curve.",
        "sandlot show runs/demo-1",
    ),
    "serve": Entry(
        _ABOUT, "sandlot.cli.serve:serve", "Serve sandboxes of this host over HTTP.", "sandlot serve --warm host=20 &"
    ),
    "doctor": Entry(
        _ABOUT,
        "sandlot.cli.doctor:doctor",
        "Say what this host can and cannot do, and what fixes it.",
        "sandlot doctor",
    ),
    "completion": Entry(
        _ABOUT,
        "sandlot.cli.completion:completion",
        "Print the script that lets a shell complete these words.",
        'eval "$(sandlot completion bash)"',
    ),
    "version": Entry(_ABOUT, "sandlot.cli.commands:version", "Print the version.", "sandlot version"),
    "keys": Entry(
        _ABOUT,
        "sandlot.cli.keys:keys",
        "Make, list and revoke the API keys of servers.",
        "sandlot keys create --tenant lab --boxes 20",
    ),
}

# Of these, what comes after the first word that is not an option belongs to the command that is to be run.
_RUNS = ("run", "exec", "shell")


def version() -> None:
    """Print the version."""
    from sandlot import __version__

    say.out(f"sandlot {__version__}")


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


def run(words: list[str]) -> int:
    """The exit status of the command that `words` call."""
    line = completion.asked()
    # No option of `sandlot` itself takes a value, so the first word that is not an option is the command.
    called = next((word for word in (words if line is None else line.split()[1:]) if not word.startswith("-")), None)
    try:
        status = _app(called)(words, prog_name="sandlot", standalone_mode=False)
    except typer.TyperException as error:
        if not words:  # only `sandlot`: not a mistake, a question
            say.note(str(error))
        else:
            where = getattr(error, "ctx", None)  # of a mistake in the use of a command: that command
            name = where.command_path if where is not None else "sandlot"
            say.error(error.format_message(), f"`{name} --help`")
        return say.WRONG
    except typer.Abort:
        return say.INTERRUPTED
    return status if isinstance(status, int) else 0


def _app(called: str | None) -> typer.Typer:
    app = typer.Typer(
        name="sandlot",
        help="Train LLM agents in real sandboxes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        show: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None: ...

    for name, entry in COMMANDS.items():
        function = _load(entry.target) if name == called else _not_called
        example = f"Example: {entry.example}"
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, short_help=entry.line, epilog=example, rich_help_panel=entry.kind)
            continue
        app.command(
            name,
            help=_flowed(function) if name == called else entry.line,
            short_help=entry.line,
            epilog=example,
            rich_help_panel=entry.kind,
            context_settings={"allow_interspersed_args": name not in _RUNS},
            cls=AfterItsId if name in ("exec", "shell") else None,
        )(function)
    return app


class AfterItsId(TyperCommand):
    """A command whose options may stand before and after its first word, which is a sandbox's id."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            first = self._options(ctx, args)
            second = first + 1 + self._options(ctx, args[first + 1 :])
        except typer.TyperException:  # it is said when they are read
            return super().parse_args(ctx, args)
        return super().parse_args(
            ctx, [*args[:first], *args[first + 1 : second], *args[first : first + 1], *args[second:]]
        )

    def _options(self, ctx: Any, args: list[str]) -> int:
        """How many words there are before the first that is not an option's."""
        given = self.make_parser(ctx).parse_args(args=list(args))[0]
        left = 0
        for each in self.params:
            value = given.get(each.name) if each.param_type_name == "argument" else None
            left += len(value) if isinstance(value, list | tuple) else isinstance(value, str)
        return len(args) - left


def _flowed(function: Callable[..., Any]) -> str:
    """What it says of itself, a line for each paragraph: where lines break is for the terminal to say."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _not_called() -> None:
    """Stands in the table for a command whose module is not loaded: for its line in `sandlot --help`."""
