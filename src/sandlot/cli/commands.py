"""The commands of `sandlot`: a table, each loaded only when it is the one that was called.

It promises that `sandlot --help` needs neither torch nor a web server, and that whatever goes wrong ends in one clear
message and a fitting exit status. To add a command: a function in a module of this package, a line in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sandlot.cli import say

# name → where its function is, what it does in one line.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("sandlot.cli.box:run", "Run a command in a fresh sandbox and exit with its status."),
    "train": ("sandlot.cli.train:train", "Train an agent by a recipe."),
    "show": ("sandlot.cli.show:show", "Show a training run: its table and its curve."),
    "serve": ("sandlot.cli.serve:serve", "Serve sandboxes of this host over HTTP."),
    "image": ("sandlot.cli.image:image", "Pull, import, build, list, delete or export images."),
    "doctor": ("sandlot.cli.doctor:doctor", "Say what this host can and cannot do, and what fixes it."),
    "version": ("sandlot.cli.commands:version", "Print the version."),
}


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
    # No option of `sandlot` itself takes a value, so the first word that is not an option is the command.
    called = next((word for word in words if not word.startswith("-")), None)
    try:
        status = _app(called)(words, prog_name="sandlot", standalone_mode=False)
    except typer.TyperException as error:
        if not words:  # only `sandlot`: not a mistake, a question
            say.note(str(error))
        else:
            where = getattr(error, "ctx", None)  # of a mistake in the use of a command: that command
            name = where.command_path if where is not None else "sandlot"
            say.error(error.format_message(), f"`{name} --help`")
        return 2
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

    for name, (target, line) in COMMANDS.items():
        function = _load(target) if name == called else _not_called
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, short_help=line)
            continue
        # Options come before the first positional word: what follows belongs to the command that is to be run.
        settings = {"allow_interspersed_args": False} if name == "run" else {}
        app.command(name, help=None if name == called else line, short_help=line, context_settings=settings)(function)
    return app


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _not_called() -> None:
    """Stands in the table for a command whose module is not loaded: for its line in `sandlot --help`."""
