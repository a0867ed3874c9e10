"""`ModelConfig`: the whole architecture of a model, from the files that came with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.architectures.rope import RopeConfig
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, shown

HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What a config may say at most, far beyond what is published: things are made for each layer before all tensors
# are held against the config, and `plan DIR --target` reads configs that have none.
MOST_LAYERS = 1024
MOST_HEADS = 2**16
MOST_WIDTH = 2**24
MOST_CONTEXT = 2**31 - 1
LEAST_EPS, MOST_EPS = 1e-30, 1.0

_DEFAULT_WINDOW = 4096  # of transformers, where the key is absent; null means none
_WINDOW_LAYERS = 28  # likewise


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
            CheckpointError: if heads do not divide, or a token that the config names is not in the vocabulary.
        """
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "attention heads are no multiple of the KV heads",
                path=str(path),
                found=f"{self.num_heads} and {self.num_kv_heads}",
            )
        if self.head_dim % 2 or not self.head_dim:
            raise CheckpointError("head_dim must be even for rotary embedding", path=str(path), found=self.head_dim)
        if self.rope.type == "dynamic" and self.head_dim == 2:
            raise CheckpointError("head_dim must be above 2 for dynamic rope scaling", path=str(path), found=2)
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and token >= self.vocab_size:
                raise CheckpointError(
                    "the first or an end token is not in the vocabulary", path=str(path), found=token,
                    expected=f"at most {self.vocab_size - 1}",
                )  # fmt: skip
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


def config_from_hf(raw: Mapping[str, Any], path: object) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture, activation or setting quantkit does not know.
    """
    settings = Settings(raw, path)
    kind = settings.text("model_type", hint="this looks like Meta's params.json" if "dim" in raw else None)
    if kind not in HF_ARCHITECTURES:
        raise UnsupportedError(
            "architecture is not supported", path=settings.path, found=kind, expected=", ".join(HF_ARCHITECTURES)
        )
    if "hidden_act" in raw and settings.text("hidden_act") not in ("silu", "swish"):
        raise UnsupportedError(
            "activation is not supported", path=settings.path, found=raw["hidden_act"], expected="silu"
        )
    heads = settings.whole("num_attention_heads", 1, MOST_HEADS)
    hidden = settings.whole("hidden_size", 1, MOST_WIDTH)
    layers = settings.whole("num_hidden_layers", 1, MOST_LAYERS)
    if "num_key_value_heads" not in raw and kind != "llama":
        settings.need("num_key_value_heads")
    own_kv_heads = settings.has("num_key_value_heads")
    own_head_dim = settings.has("head_dim") or kind == "qwen3"
    attention_bias = settings.flag("attention_bias", False)
    ends = settings.ids("eos_token_id")
    starts = settings.ids("bos_token_id")
    return ModelConfig(
        architecture=kind,
        vocab_size=settings.whole("vocab_size", 1, MOST_WIDTH),
        hidden_size=hidden,
        intermediate_size=settings.whole("intermediate_size", 1, MOST_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.whole("num_key_value_heads", 1, MOST_HEADS) if own_kv_heads else heads,
        head_dim=settings.whole("head_dim", 1, MOST_HEADS) if own_head_dim else hidden // heads,
        norm_eps=settings.number("rms_norm_eps", LEAST_EPS, MOST_EPS),
        rope=RopeConfig.from_hf(raw, path),
        max_context=settings.whole("max_position_embeddings", 1, MOST_CONTEXT),
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and attention_bias),
        output_bias=kind in ("llama", "qwen3") and attention_bias,
        mlp_bias=kind == "llama" and settings.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
        windows=_windows(kind, settings, layers),
        dtype=_dtype(settings),
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=ends,
    ).validated(path)


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


def _windows(kind: str, settings: Settings, layers: int) -> tuple[int | None, ...]:
    everywhere = (None,) * layers
    if kind == "llama":
        return everywhere
    types = _layer_types(settings, layers)
    window = _DEFAULT_WINDOW
    if "sliding_window" in settings.values:
        if not settings.has("sliding_window"):
            return everywhere
        window = settings.whole("sliding_window", 1, MOST_CONTEXT)
    if kind == "mistral":
        if "full_attention" in types:
            raise UnsupportedError("mixed attention layers in a Mistral model are not supported", path=settings.path)
        return (window,) * layers
    if not settings.flag("use_sliding_window", False):
        return everywhere
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    key = "max_window_layers"
    first = settings.whole(key, 0, MOST_CONTEXT) if settings.has(key) else _WINDOW_LAYERS
    return tuple(window if layer >= first else None for layer in range(layers))


def _layer_types(settings: Settings, layers: int) -> list[str]:
    """The kind of attention of each layer; empty where the file does not say it."""
    key = "layer_types"
    types = settings.texts(key) if settings.has(key) else []
    if settings.has(key) and (len(types) != layers or set(types) - {"full_attention", "sliding_attention"}):
        raise CheckpointError(
            "layer_types does not fit the layers", path=settings.path, found=shown(types),
            expected=f"full_attention or sliding_attention for each of {layers}",
        )  # fmt: skip
    return types


def _hf_windows(windows: tuple[int | None, ...]) -> dict[str, Any]:
    width = next((w for w in windows if w is not None), None)
    first = next((i for i, w in enumerate(windows) if w is not None), len(windows))
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": first,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _dtype(settings: Settings) -> str:
    key = "dtype" if settings.has("dtype") else "torch_dtype"
    value = settings.text(key).removeprefix("torch.") if settings.has(key) else "float32"
    if value not in ("float32", "float16", "bfloat16"):
        raise UnsupportedError("dtype is not supported", path=settings.path, found=value)
    return value


def _collapse(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
