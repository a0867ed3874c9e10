"""mlx-lm on folders, for `check_mlx.py`.

    PYTHON scripts/peers/peer_mlx.py logits FOLDER TOKENS OUT
    PYTHON scripts/peers/peer_mlx.py quantize FOLDER TARGET BITS GROUP_SIZE
    PYTHON scripts/peers/peer_mlx.py dequantize FOLDER OUT

PYTHON has mlx and mlx-lm. `logits` computes those of the tokens in a JSON file in float32 and
writes them as a safetensors file; `quantize` is ``mlx_lm.convert``; `dequantize` writes all
quantized weights as float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model, quantize_model, save_config, save_model


def _in_float32(model: nn.Module) -> nn.Module:
    wide = (mx.float16, mx.bfloat16)
    model.update(
        tree_map(
            lambda one: one.astype(mx.float32) if one.dtype in wide else one, model.parameters()
        )
    )
    return model


def logits(folder: str, tokens: str, out: str) -> None:
    model = _in_float32(load_model(Path(folder))[0])
    found = model(mx.array(json.loads(Path(tokens).read_text())))
    mx.save_safetensors(out, {"logits": found.astype(mx.float32)})


def quantize(folder: str, target: str, bits: str, group_size: str) -> None:
    model, config = load_model(Path(folder))
    model, config = quantize_model(model, config, int(group_size), int(bits))
    save_model(target, model)
    save_config(config, Path(target) / "config.json")


def dequantize(folder: str, out: str) -> None:
    model = _in_float32(load_model(Path(folder))[0])
    found = {}
    for name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if "scales" in module:
            options = {"group_size": module.group_size, "bits": module.bits}
            found[f"{name}.weight"] = mx.dequantize(
                module.weight, module.scales, module.biases, **options
            )
    mx.save_safetensors(out, found)


if __name__ == "__main__":
    {"logits": logits, "quantize": quantize, "dequantize": dequantize}[sys.argv[1]](*sys.argv[2:])
