"""Checkpoints of random weights in the shape of a named model, for timing."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import Parameter, linear_columns, parameters
from quantkit.base.arguments import as_path
from quantkit.base.json_values import read_settings
from quantkit.errors import RequestError
from quantkit.files.source import SourceFile
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.registry import HF
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
)
"""The last three for a mixture of experts, whose feed-forward is that of one expert."""
_SHAPES = {
    "llama-160m": (768, 3072, 12, 12, 12, 32000, 2048),
    "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 32000, 2048),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, 8192),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256, 8192),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000, 4096),
    "qwen3-moe-2.7b": (2048, 384, 16, 16, 4, 30000, 2048, 128, 64, 8),
}
# A longer context than some of these models have, so that all shapes can be timed there.
_MIN_CONTEXT = 4096
# The standard deviation of the weights.
_SPREAD = 0.02
# The scheme of the head where the linears have one.
_HEAD = QuantScheme(8, None)


@dataclass
class SyntheticCheckpoint:
    """Random weights in bfloat16, generated when they are loaded, the same each time; `path` is the
    shape's name, and modules without one of the `schemes` stay floats.
    """

    path: Path
    config: ModelConfig
    schemes: Mapping[str, QuantScheme]
    format: str = "random weights"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_cache: KvCache | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._entries = {parameter.name: parameter for parameter in parameters(self.config)}

    def names(self) -> list[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorSpec:
        parameter = self._entries[name]
        return TensorSpec(name, parameter.shape, DType.BFLOAT16, self._scheme(parameter))

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        weight = self._weight(self._entries[name])
        if part is None:
            return weight
        return part.of_weight(weight)

    def _weight(self, parameter: Parameter) -> Tensor | QuantTensor:
        # The seed depends only on the name: `hash` would differ in each process.
        generator = torch.Generator().manual_seed(zlib.crc32(parameter.name.encode()))
        scheme = self._scheme(parameter)
        if len(parameter.shape) == 1:
            # Norms that scale by 1 keep activations in range.
            return torch.ones(parameter.shape, dtype=torch.bfloat16)
        if scheme is None:
            return torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(
                0, _SPREAD, generator=generator
            )
        rows, columns = parameter.shape
        # Each random word has eight bytes, and each byte gives a code.
        words = torch.empty(-(-rows * columns // 8), dtype=torch.int64).random_(
            -(2**63), None, generator=generator
        )
        random_bytes = words.view(torch.uint8)[: rows * columns].view(rows, columns)
        codes = random_bytes & (scheme.levels - 1)
        # The levels reach from two standard deviations below zero to two above it.
        step = 4 * _SPREAD / scheme.levels
        scale = torch.full((rows, scheme.groups(columns)), step, dtype=torch.bfloat16)
        if scheme.symmetric:
            zero = None
        else:
            zero = torch.full(scale.shape, scheme.levels // 2, dtype=torch.uint8)
        return QuantTensor(codes, scale, zero, scheme)

    def files(self) -> list[SourceFile]:
        return []

    def _scheme(self, parameter: Parameter) -> QuantScheme | None:
        if parameter.is_linear_weight:
            return self.schemes.get(parameter.module)
        return None


def synthetic(shape: str, scheme: str | None, head: str | None = None) -> SyntheticCheckpoint:
    """Define a checkpoint of a named shape. `scheme` is that of the decoder's linears, None for
    floats; `head` is that of the head where the linears have one, int8 by default. Raises
    `RequestError` for an unknown shape or scheme.
    """
    if shape not in _SHAPES:
        raise RequestError("unknown shape", found=shape, expected=", ".join(_SHAPES))
    # Not strict: dense models have no values for the sizes of a mixture.
    sizes = dict(zip(_SIZES, _SHAPES[shape], strict=False))
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        **sizes,
        "max_position_embeddings": max(sizes["max_position_embeddings"], _MIN_CONTEXT),
    }
    if "num_experts" in sizes:
        raw |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "moe_intermediate_size": sizes["intermediate_size"],
        }
    config = config_from_hf(raw, shape)
    name = shape
    if scheme is not None:
        name += f"-{scheme}"
    if head is not None:
        name += f"-head-{head}"
    return SyntheticCheckpoint(Path(name), config, _schemes(config, scheme, head))


def open_shape_checkpoint(source: str | Path, scheme: str | None) -> Checkpoint:
    """Open a checkpoint for its shapes: a folder, a folder with only a ``config.json``, or a named
    shape.

    Args:
        scheme: of the linears where there are no weights; see `synthetic`. None is that of the
            config.

    Raises:
        RequestError: if there are weights, which have their schemes, or for an unknown shape or
            scheme.
        QuantkitError: as opening a folder does.
    """
    folder = as_path("path", source)
    # A folder that is called like a shape comes before the shape.
    if not folder.exists() and str(source) in _SHAPES:
        return synthetic(str(source), scheme)
    path = folder / "config.json"
    if HF.find_weight_kinds(folder) or not path.is_file():
        if scheme is not None:
            raise RequestError(
                "a folder with weights defines its own schemes",
                path=folder,
                found=f"scheme {scheme}",
            )
        return open_checkpoint(folder)
    raw = read_settings(path)
    config = config_from_hf(raw, path)
    if raw.get("quantization_config") is not None and scheme is None:
        return SyntheticCheckpoint(folder, config, HF.schemes(raw, config, path))
    return SyntheticCheckpoint(folder, config, _schemes(config, scheme))


def _schemes(
    config: ModelConfig, scheme: str | None, head: str | None = None
) -> dict[str, QuantScheme]:
    if scheme is None:
        return {}
    head_scheme = _HEAD if head is None else QuantScheme.parse(head)
    overrides: tuple[Override, ...] = (Override("lm_head", head_scheme),)
    # A tied head is the embedding, which stays in floats.
    if config.tied_embeddings:
        overrides = ()
    recipe = Recipe(QuantScheme.parse(scheme), overrides)
    return recipe.assign(linear_columns(config))
