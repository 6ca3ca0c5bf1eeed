"""Sandlot: sandboxes by the thousand, a trainer for LLM agents, and the model gateway between them.

The public names are these; what is not listed here may change. Importing this loads neither torch nor a web server.
"""

from sandlot.api import (
    Ending,
    Info,
    Limits,
    NodeAPI,
    Output,
    Run,
    RunResult,
    SandboxSpec,
    Upstream,
    Volume,
)
from sandlot.errors import SandlotError
from sandlot.sandbox import Sandbox, open_node
from sandlot.sync import SyncSandbox

__version__ = "0.1.0"

__all__ = [
    "Ending",
    "Info",
    "Limits",
    "NodeAPI",
    "Output",
    "Run",
    "RunResult",
    "Sandbox",
    "SandboxSpec",
    "SandlotError",
    "SyncSandbox",
    "Upstream",
    "Volume",
    "__version__",
    "open_node",
]
