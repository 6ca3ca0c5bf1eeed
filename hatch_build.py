"""Builds sandlot-init with the package, so that `pip install` is all there is to do and a wheel needs no compiler.

Without a compiler (or off Linux) the package is built all the same: everything but the native driver works, and
`sandlot doctor` says what is missing. The binary is static and calls the kernel only: one wheel serves any
distribution of its architecture and any Python 3.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARY = "src/sandlot/drivers/native/bin/sandlot-init"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("CC")
        compiler = next(filter(shutil.which, [wanted] if wanted else ["cc", "gcc", "clang"]), None)
        if sys.platform != "linux" or compiler is None:
            self.app.display_warning("no C compiler for Linux: building without sandlot-init (no native sandboxes)")
            return
        output = Path(self.root, BINARY)
        output.parent.mkdir(parents=True, exist_ok=True)
        build = Path(self.root, "init")
        with_make = ["make", "-s", f"CC={compiler}", f"OUT={output}"]
        command = with_make if shutil.which("make") else _by_hand(compiler, build, output)
        made = subprocess.run(
            command,
            cwd=build,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise RuntimeError(
                f"sandlot-init did not compile:\n{made.stderr}\nhint: install the C library's headers, "
                "`apt install libc6-dev`"
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _by_hand(compiler: str, build: Path, output: Path) -> list[str]:
    return [compiler, "-std=gnu11", "-O2", "-static", "-o", str(output), *(str(path) for path in build.glob("*.c"))]
