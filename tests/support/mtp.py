"""Layers for multi-token prediction (MTP), with the names that published checkpoints have, for
tiny models without.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm_ocr")
"""Architectures whose published checkpoints have such layers; those of Qwen3.5 and GLM-OCR read
images.
"""
_IN_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.*)")


def make(kind: str, folder: Path) -> Path:
    """Write a tiny random model of an architecture with such a layer."""
    import tiny_architectures
    import tiny_image_text

    (tiny_architectures if kind in tiny_architectures.ARCHITECTURES else tiny_image_text).make(
        kind, folder / "without"
    )
    add(folder / "without", folder / "with")
    return folder / "with"


def add(folder: Path, target: Path) -> Tensors:
    """Copy a tiny model to `target`, with a layer for prediction in addition, and return the
    tensors of that layer.
    """
    shutil.copytree(folder, target)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    found = {name: one.clone() for name, one in _layer(config["model_type"], tensors).items()}
    text: dict[str, Any] = config.get("text_config", config)
    text["mtp_num_hidden_layers" if "mtp.fc.weight" in found else "num_nextn_predict_layers"] = 1
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors | found, target / "model.safetensors", {"format": "pt"})
    return found


def is_of_layer(name: str) -> bool:
    """Whether a tensor of a model that was made here is in that layer."""
    return name.startswith("mtp.") or ".layers.2." in name


def _layer(kind: str, tensors: Tensors) -> Tensors:
    """A layer for prediction like the last of the model, which are two."""
    inside = [match for name in tensors if (match := _IN_LAYER.fullmatch(name)) and match[2] == "1"]
    block = {match[3]: tensors[match[0]] for match in inside}
    norm = block["input_layernorm.weight"]
    joining = torch.randn(len(norm), 2 * len(norm)).mul_(0.02).to(norm.dtype)
    if kind.startswith("qwen3"):
        names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found = {"mtp.fc.weight": joining} | {f"mtp.{name}.weight": norm for name in names}
        block = _stacked(block) if kind == "qwen3_5_moe" else block
        return found | {f"mtp.layers.0.{name}": one for name, one in block.items()}
    embedding = next(one for name, one in tensors.items() if name.endswith("embed_tokens.weight"))
    block |= {f"{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
    block |= {
        "eh_proj.weight": joining,
        "embed_tokens.weight": embedding,
        "shared_head.head.weight": embedding,
    }
    return {f"{inside[0][1]}.2.{name}": one for name, one in block.items()}


def _stacked(block: Tensors) -> Tensors:
    """The tensors of a layer with all experts in one tensor."""
    rest = {name: one for name, one in block.items() if ".experts." not in name}
    count = (len(block) - len(rest)) // 3
    gates, ups, downs = (
        [block[f"mlp.experts.{index}.{one}_proj.weight"] for index in range(count)]
        for one in ("gate", "up", "down")
    )
    joined = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    return {**rest, "mlp.experts.gate_up_proj": joined, "mlp.experts.down_proj": torch.stack(downs)}
