"""The families that quantkit supports, one file each, found automatically."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its ``model_type``."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in found}


def config_from_hf(raw: Mapping[str, Any], path: object) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture, activation or setting that is not supported.
    """
    settings = Settings(raw, path)
    kind = settings.string("model_type", hint="this looks like Meta's params.json" if "dim" in raw else None)
    family = families().get(kind)
    if family is None or not family.runs:
        supported = sorted(name for name, known in families().items() if known.runs)
        raise UnsupportedError(
            "architecture is not supported", path=settings.path, found=kind, expected=", ".join(supported),
            hint="`tensors_only=True` of quantize and convert takes its tensors as they are",
        )  # fmt: skip
    return family.read(settings)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of a Hugging Face ``config.json`` that say all of `config`."""
    family = families()[config.architecture]
    ends = config.eos_token_ids
    return {
        "architectures": [family.class_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS.get(config.activation, "silu"),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
        **config.rope.to_hf(config.head_dim),
        **family.write(config),
    }
