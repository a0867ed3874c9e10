"""`ModelConfig`: the whole architecture of a model, from the files that came with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.rope_config import RopeConfig

HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_DEFAULT_WINDOW = 4096  # of transformers, where the key is absent; null means none


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a decoder's arithmetic; nothing about weights on disk.

    ``windows`` holds, per layer, how many positions back attention sees (itself
    included), or ``None`` for all. ``dtype`` is the float type of the checkpoint:
    ``float32``, ``float16`` or ``bfloat16``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_context: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def validated(self, path: object) -> ModelConfig:
        """Return self.

        Raises:
            CheckpointError: if sizes are not positive or heads do not divide.
        """
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_context",
        ):
            if getattr(self, key) <= 0:
                raise CheckpointError(f"{key} must be positive", path=str(path), found=getattr(self, key))
        numbers = {"norm_eps": self.norm_eps, "rope theta": self.rope.theta, "rope factor": self.rope.factor}
        for key, number in numbers.items():
            if not 0 < number < math.inf:
                raise CheckpointError(f"{key} must be positive and finite", path=str(path), found=number)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "attention heads are no multiple of the KV heads",
                path=str(path),
                found=f"{self.num_heads} and {self.num_kv_heads}",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim must be even for rotary embedding", path=str(path), found=self.head_dim)
        return self

    def with_dtype(self, dtype: str) -> ModelConfig:
        """The same model in another float type."""
        return replace(self, dtype=dtype)

    def differences(self, other: ModelConfig) -> list[str]:
        """What differs between two models' arithmetic, float type left aside."""
        skipped = {"dtype", "bos_token_id", "eos_token_ids"}
        return [
            f"{key}: {getattr(self, key)} against {getattr(other, key)}"
            for key in self.__dataclass_fields__
            if key not in skipped and getattr(self, key) != getattr(other, key)
        ]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: if the file is missing, empty, not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError("the file is missing", path=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=path) from error
    if not text.strip():
        raise CheckpointError("the file is empty", path=path, expected="a JSON object")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("does not hold a JSON object", path=path, found=type(value).__name__)
    return value


def config_from_hf(raw: Mapping[str, Any], path: object) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        CheckpointError: if a key is missing or of the wrong type.
        UnsupportedError: for an architecture, activation or setting quantkit does not know.
    """
    where = str(path)

    def need(key: str) -> Any:
        if raw.get(key) is None:
            hint = None
            if key == "model_type" and "dim" in raw:
                hint = "this looks like Meta's params.json"
            raise CheckpointError(f"lacks the key '{key}'", path=where, hint=hint)
        return raw[key]

    kind = need("model_type")
    if kind not in HF_ARCHITECTURES:
        raise UnsupportedError(
            "architecture is not supported", path=where, found=kind, expected=", ".join(HF_ARCHITECTURES)
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError("activation is not supported", path=where, found=raw["hidden_act"], expected="silu")
    try:
        heads = int(need("num_attention_heads"))
        hidden = int(need("hidden_size"))
        layers = int(need("num_hidden_layers"))
        kv_heads = raw.get("num_key_value_heads")
        if "num_key_value_heads" not in raw and kind != "llama":
            need("num_key_value_heads")
        head_dim = need("head_dim") if kind == "qwen3" else raw.get("head_dim")
        attention_bias = bool(raw.get("attention_bias", False))
        return ModelConfig(
            architecture=kind,
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(need("intermediate_size")),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=hidden // heads if head_dim is None else int(head_dim),
            norm_eps=float(need("rms_norm_eps")),
            rope=RopeConfig.from_hf(raw, path),
            max_context=int(need("max_position_embeddings")),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and attention_bias),
            output_bias=kind in ("llama", "qwen3") and attention_bias,
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(kind, raw, layers, where),
            dtype=_dtype(raw, where),
            bos_token_id=_first(raw.get("bos_token_id")),
            eos_token_ids=_ids(raw.get("eos_token_id")),
        ).validated(path)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"holds a value of the wrong type: {error}", path=where) from error


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of a Hugging Face ``config.json`` that say all of `config`."""
    raw: dict[str, Any] = {
        "architectures": [HF_ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _collapse(config.eos_token_ids),
        **config.rope.to_hf(),
    }
    if config.architecture in ("llama", "qwen3"):
        raw["attention_bias"] = config.output_bias
    if config.architecture == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if config.architecture == "mistral":
        raw["sliding_window"] = config.windows[0]
    if config.architecture in ("qwen2", "qwen3"):
        raw.update(_hf_windows(config.windows))
    return raw


def _windows(kind: str, raw: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", _DEFAULT_WINDOW)
    if kind == "llama" or window is None:
        return (None,) * layers
    window = int(window)
    if kind == "mistral":
        if "full_attention" in (raw.get("layer_types") or ()):
            raise UnsupportedError("mixed attention layers in a Mistral model are not supported", path=where)
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError("layer_types does not fit the layers", path=where, found=types)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _hf_windows(windows: tuple[int | None, ...]) -> dict[str, Any]:
    width = next((w for w in windows if w is not None), None)
    first = next((i for i, w in enumerate(windows) if w is not None), len(windows))
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": first,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    value = str(value).removeprefix("torch.")
    if value not in ("float32", "float16", "bfloat16"):
        raise UnsupportedError("dtype is not supported", path=where, found=value)
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def _collapse(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
