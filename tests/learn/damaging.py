"""An engine whose third update has one tensor damaged on its way: the control of publication."""

from __future__ import annotations

from safetensors.torch import load_file, save_file

from sandlot.rl.engines.local import LocalEngine


class Damaging(LocalEngine):
    async def update(self, path: str, version: int) -> None:
        if version == 3:
            weights = load_file(path)
            weights["model.layers.1.mlp.down_proj.weight"] *= 1.1
            save_file(weights, path)
        await super().update(path, version)
