"""Sandlot: sandboxes by the thousand, a trainer for LLM agents, and the model gateway between them.

The public names are these; what is not listed here may change. Each is loaded when it is first used: importing this
loads nothing, so that `sandlot` is there at once to answer Ctrl-C, and neither torch nor a web server comes with it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from sandlot.api import (
        Ending,
        FileEvent,
        FileInfo,
        FilesFound,
        Info,
        Limits,
        NodeAPI,
        Output,
        Run,
        RunResult,
        SandboxSpec,
        ShellResult,
        TextFound,
        TextHit,
        Upstream,
        Volume,
    )
    from sandlot.errors import SandlotError
    from sandlot.sandbox import Command, Sandbox, Shell, Terminal, open_node
    from sandlot.sync import SyncCommand, SyncSandbox, SyncShell, SyncTerminal
else:
    _HOMES = {
        "api": "Ending FileEvent FileInfo FilesFound Info Limits NodeAPI Output Run RunResult SandboxSpec ShellResult "
        "TextFound TextHit Upstream Volume",
        "errors": "SandlotError",
        "sandbox": "Command Sandbox Shell Terminal open_node",
        "sync": "SyncCommand SyncSandbox SyncShell SyncTerminal",
    }

    def __getattr__(name):
        for home, names in _HOMES.items():
            if name in names.split():
                globals()[name] = getattr(importlib.import_module(f"sandlot.{home}"), name)
                return globals()[name]
        raise AttributeError(f"module 'sandlot' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "Command",
    "Ending",
    "FileEvent",
    "FileInfo",
    "FilesFound",
    "Info",
    "Limits",
    "NodeAPI",
    "Output",
    "Run",
    "RunResult",
    "Sandbox",
    "SandboxSpec",
    "SandlotError",
    "Shell",
    "ShellResult",
    "SyncCommand",
    "SyncSandbox",
    "SyncShell",
    "SyncTerminal",
    "Terminal",
    "TextFound",
    "TextHit",
    "Upstream",
    "Volume",
    "__version__",
    "open_node",
]
