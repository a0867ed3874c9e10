"""torchao's weights: a folder that transformers quantizes and saves, and the floats that torchao
makes of it.

    PYTHON scripts/peer_torchao.py FOLDER TARGET FLOATS {int8,int8-dynamic,int4,intx4}

PYTHON has transformers and torchao. FOLDER holds floats; FLOATS is a safetensors file for
`compare_with_owner.py`. ``int4`` are Int4Tensors of symmetric groups, made here as torchao's own
quantizer needs a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(),
    "int8-dynamic": lambda: Int8DynamicActivationInt8WeightConfig(),
    "intx4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int4": lambda: Int8WeightOnlyConfig(),
}
GROUP = 32


def as_int4(weight: torch.Tensor) -> tuple[Int4Tensor, torch.Tensor]:
    """Groups of signed codes with offsets of half a step, and the floats that they mean."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (
        (groups / scale.float().unsqueeze(-1))
        .round()
        .clamp(-8, 7)
        .to(torch.int8)
        .view(rows, columns)
    )
    offset = scale / 2
    packed = (codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)
    wide = [one.float().repeat_interleave(GROUP, 1) for one in (scale, offset)]
    tensor = Int4Tensor(
        packed, scale.t().contiguous(), offset.t().contiguous(), [1, GROUP], weight.shape
    )
    return tensor, codes.float() * wide[0] + wide[1]


def main(folder: str, target: str, floats: str, kind: str) -> None:
    options = {"dtype": torch.bfloat16, "quantization_config": TorchAoConfig(CONFIGS[kind]())}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.save_pretrained(target)
    found = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if type(tensor) is torch.Tensor or not hasattr(tensor, "dequantize"):
            continue
        if kind == "int4":
            state[name], found[name] = as_int4(tensor.dequantize())
        else:
            found[name] = tensor.dequantize()
    if kind == "int4":
        tensors, metadata = flatten_tensor_state_dict(state)
        save_file(tensors, Path(target) / "model.safetensors", metadata=metadata | {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, floats)


if __name__ == "__main__":
    main(*sys.argv[1:])
