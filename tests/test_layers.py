"""Promises:
1. A package imports only what its level allows (the table below; STYLE 3.3 in words).
2. `import sandlot` loads neither torch, ray, numpy nor a web server.
3. Heavy libraries are imported where the table says and nowhere else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# What each package may import of sandlot. The longest matching prefix of a module's name counts.
BASE = ("errors", "api", "config", "aio")
CUSTOMER = (*BASE, "local", "client", "sandbox", "sync")
TABLE: dict[str, tuple[str, ...]] = {
    "errors": (),
    "api": (),
    "aio": ("errors",),
    "local": ("errors",),
    "packing": ("errors",),
    "config": ("errors",),
    "asgi": ("errors", "api"),
    "drivers": (*BASE, "drivers", "packing"),
    "node": (*BASE, "drivers", "node", "asgi"),
    "links": ("errors", "api"),
    "client": (*BASE, "client", "links", "asgi", "packing"),
    "sandbox": (*BASE, "local", "client", "node", "drivers"),
    "sync": (*BASE, "sandbox"),
    "envs": (*CUSTOMER, "envs", "gateway.engine"),
    "gateway": (*CUSTOMER, "gateway"),
    "build": (*CUSTOMER, "build"),
    "integrations": (*CUSTOMER, "integrations"),
    "server": (*CUSTOMER, "asgi", "node", "drivers", "envs", "gateway", "server"),
    "rl.types": (*BASE, "gateway"),
    "rl.engines": (*BASE, "gateway", "rl.types", "rl.engines"),
    "rl.algos": (*BASE, "gateway", "rl.types", "rl.algos"),
    "rl.rollout": (*CUSTOMER, "envs", "gateway", "rl.types", "rl.engines", "rl.algos", "rl.rollout"),
    "rl.train": (*BASE, "gateway", "rl.types", "rl.engines", "rl.algos", "rl.train"),
    "rl": (*CUSTOMER, "envs", "gateway", "rl"),
    "cli": ("",),
}
ROOT = (*CUSTOMER, "")  # sandlot/__init__.py itself
# Where a heavy library may be imported, at any depth of the file.
HEAVY: dict[str, tuple[str, ...]] = {
    "torch": ("rl.engines.local", "rl.train"),
    "vllm": ("rl.engines.vllm",),
    "ray": ("cluster.ray_host", "rl.launch"),
    "fastapi": ("server",),
    "prometheus_client": ("server",),
    "opentelemetry": ("server.spans",),
    "numpy": ("rl",),
    "matplotlib": ("rl.report",),
    "transformers": ("rl.engines.local", "rl.train", "rl.launch"),
    "uvicorn": ("asgi",),
    "inspect_ai": ("integrations.inspect",),
    "aiohttp": ("client", "links"),
    "httpx2": ("node.relay", "node.node", "drivers.oci.registry"),
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((SOURCE / "sandlot").rglob("*.py")):
        parts = path.relative_to(SOURCE / "sandlot").with_suffix("").parts
        found.append((".".join(part for part in parts if part != "__init__"), path))
    return found


def under(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}:{node.lineno}: a relative import hides its layer"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_imports_only_what_its_level_allows(name: str, path: Path) -> None:
    levels = [prefix for prefix in TABLE if under(name, prefix)]
    assert levels or not name, f"{name} has no level: give its package a line in the table"
    allowed = TABLE[max(levels, key=len)] if name else ROOT
    for imported in imports(path):
        if imported.startswith("sandlot."):
            target = imported.removeprefix("sandlot.")
            assert any(under(target, prefix) for prefix in allowed), f"{name} must not import {imported}"
        library = imported.split(".")[0]
        if library in HEAVY:
            assert any(under(name, prefix) for prefix in HEAVY[library]), f"{name} must not import {library}"


def test_importing_sandlot_loads_nothing_heavy() -> None:
    code = "import sys, sandlot; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {
        "torch",
        "ray",
        "numpy",
        "transformers",
        "uvicorn",
        "fastapi",
        "starlette",
        "websockets",
        "aiohttp",
    } & set(loaded)


def test_the_table_would_catch_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from sandlot.node import node\n    import torch.nn\n")
    assert imports(wrong) == {"sandlot.node.node", "torch.nn"}
    assert not any(under("node.node", prefix) for prefix in TABLE["rl.train"])
