"""What a family of models is, and how most of its config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.architectures.config import (
    MAX_CONTEXT,
    MAX_EPS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    MIN_EPS,
    LayerConfig,
    ModelConfig,
)
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.rope import DEFAULT_THETA, FULL, SLIDING, RopeConfig, ropes_by_layer
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, shown

DEFAULT_WINDOW = 4096  # of transformers, where the key is absent; null means none


@dataclass(frozen=True)
class StackedExperts:
    """One tensor on disk with the weights of all experts of a layer, [E, ...].

    Attributes:
        name: of the tensor.
        roles: the linears of each expert that it holds, their outputs side by side.
        transposed: whether inputs come before outputs.
        interleaved: whether the outputs of several roles alternate.
        bias: the name of the tensor of their biases, if they have any.
    """

    name: str
    roles: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    bias: str | None = None


@dataclass(frozen=True)
class Family:
    """A family: its config.json, and its names on disk where they are not the canonical ones.

    Attributes:
        model_type: the key of config.json that tells it.
        class_name: transformers' class, for ``architectures`` in config.json.
        read: a config.json to a `ModelConfig`; raises `CheckpointError` or `UnsupportedError`.
        write: the keys of config.json that say what `ModelConfig` says beyond `config_to_hf`'s own.
        names: modules on disk by role, where they differ from `names.CANONICAL`.
        fused: linears that are one on disk: the fused role of the topology to the module's name.
        stacked: experts that are one tensor on disk.
        interleaved_rotary: whether the dimensions of a pair that turns lie side by side on disk.
        rope_by_layer: whether its configs have rotary settings by kind of layer: see `ropes_by_layer`.
        runs: whether the decoder computes all that its configs say.
        gguf: what llama.cpp knows of it; None if it is not read or written as GGUF.
        gguf_mark: the key of config.json that only this one has among the families that share a GGUF architecture.
    """

    model_type: str
    class_name: str
    read: Callable[[Settings], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, str] = field(default_factory=dict)
    stacked: tuple[StackedExperts, ...] = ()
    interleaved_rotary: bool = False
    rope_by_layer: bool = False
    runs: bool = True
    gguf: GgufArchitecture | None = None
    gguf_mark: Literal["sliding_window", "num_experts"] | None = None


def read_config(
    settings: Settings,
    layers: Sequence[LayerConfig] | None = None,
    *,
    activations: tuple[str, ...] = ("silu", "swish"),
    activation_key: str = "hidden_act",
    kv_heads_required: bool = True,
    head_dim: int | None = None,
    head_dim_required: bool = False,
    tied_by_default: bool = False,
    default_theta: float = DEFAULT_THETA,
    windowed_theta: tuple[str, float] | None = None,
    partial_rotary: float | None = None,
    query_scaling: bool = False,
    **features: Any,
) -> ModelConfig:
    """What all families' configs say alike.

    Args:
        layers: what each layer does; without it all are alike and plain.
        activations: that the family's feed-forward may have.
        kv_heads_required: whether ``num_key_value_heads`` must be there, null standing for as many as heads.
        head_dim: if the file does not say it; else the hidden size over the heads.
        tied_by_default: whether the head is the embedding where nothing is said.
        default_theta: of the rotary embedding, where nothing is said.
        windowed_theta: as for `ropes_by_layer`, in families that keep rotary positions of layers with a window apart.
        partial_rotary, query_scaling: as for `RopeConfig.from_hf`.
        features: further fields of `ModelConfig`.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an activation or setting quantkit does not know.
    """
    if activation_key in settings.values and settings.text(activation_key) not in activations:
        raise UnsupportedError(
            "activation is not supported", path=settings.path, found=settings.values[activation_key],
            expected=activations[0],
        )  # fmt: skip
    heads = settings.whole("num_attention_heads", 1, MAX_HEADS)
    hidden = settings.whole("hidden_size", 1, MAX_WIDTH)
    layers = (LayerConfig(),) * layer_count(settings) if layers is None else tuple(layers)
    if "num_key_value_heads" not in settings.values and kv_heads_required:
        settings.need("num_key_value_heads")
    own_head_dim = settings.has("head_dim") or head_dim_required
    head_dim = settings.whole("head_dim", 1, MAX_HEADS) if own_head_dim else head_dim or hidden // heads
    own_kv_heads = settings.has("num_key_value_heads")
    ends = settings.ids("eos_token_id")
    starts = settings.ids("bos_token_id")
    if windowed_theta is None:
        rope, window_rope = RopeConfig.from_hf(
            settings.values, settings.path, default_theta, head_dim=head_dim, partial=partial_rotary,
            query_scaling=query_scaling,
        ), None  # fmt: skip
    else:
        rope, window_rope = ropes_by_layer(
            settings.values, settings.path, default_theta, windowed_theta, head_dim=head_dim,
            windowed=[layer.window is not None for layer in layers],
        )  # fmt: skip
    return ModelConfig(
        architecture=settings.text("model_type"),
        vocab_size=settings.whole("vocab_size", 1, MAX_WIDTH),
        hidden_size=hidden,
        intermediate_size=settings.whole("intermediate_size", 1, MAX_WIDTH),
        layers=layers,
        num_heads=heads,
        num_kv_heads=settings.whole("num_key_value_heads", 1, MAX_HEADS) if own_kv_heads else heads,
        head_dim=head_dim,
        norm_eps=settings.number("rms_norm_eps", MIN_EPS, MAX_EPS),
        rope=rope,
        window_rope=window_rope,
        max_context=settings.whole("max_position_embeddings", 1, MAX_CONTEXT),
        tied_embeddings=settings.flag("tie_word_embeddings", tied_by_default),
        dtype=_dtype(settings),
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=ends,
        **features,
    ).validated(settings.path)


def with_default_rope(settings: Settings, default: Mapping[str, Any]) -> Settings:
    """The settings of a family that scales positions where a config has no rotary settings: an empty ``rope_scaling``
    is none, as in transformers."""
    if settings.has("rope_parameters") or settings.values.get("rope_scaling"):
        return settings
    return Settings({**settings.values, "rope_parameters": default, "rope_scaling": None}, settings.path)


def layer_count(settings: Settings) -> int:
    """How many layers a config says there are."""
    return settings.whole("num_hidden_layers", 1, MAX_LAYERS)


def layer_types(settings: Settings, layers: int) -> list[str]:
    """The kind of attention of each layer; empty where the file does not say it.

    Raises:
        CheckpointError: if the kinds are unknown, or not as many as layers.
    """
    key = "layer_types"
    types = settings.texts(key) if settings.has(key) else []
    if settings.has(key) and (len(types) != layers or set(types) - {FULL, SLIDING}):
        raise CheckpointError(
            "layer_types does not fit the layers", path=settings.path, found=shown(types),
            expected=f"{FULL} or {SLIDING} for each of {layers}",
        )  # fmt: skip
    return types


def sliding_window(settings: Settings, default: int | None = DEFAULT_WINDOW) -> int | None:
    """The window that a config gives to its sliding layers; None where it says there is none."""
    if "sliding_window" not in settings.values:
        return default
    return settings.whole("sliding_window", 1, MAX_CONTEXT) if settings.has("sliding_window") else None


def windowed(types: Sequence[str], window: int | None) -> list[LayerConfig]:
    """Layers whose kind of attention is given."""
    return [LayerConfig(window=window if kind == SLIDING else None) for kind in types]


def layers_by_kind(settings: Settings, interval: int) -> list[LayerConfig]:
    """Layers of the kinds of attention that a config lists; where it does not, with a window but for every
    `interval`-th.

    Raises:
        CheckpointError: if the kinds do not fit the layers, or some have a window and the config says that none does.
    """
    count = layer_count(settings)
    types = layer_types(settings, count) or [SLIDING if (i + 1) % interval else FULL for i in range(count)]
    window = sliding_window(settings)
    if window is None and SLIDING in types:
        raise CheckpointError("there are layers with a window, and sliding_window says none", path=settings.path)
    return windowed(types, window)


def written_layer_types(config: ModelConfig) -> list[str]:
    """The key ``layer_types``."""
    return [FULL if window is None else SLIDING for window in config.windows]


def written_layer_ropes(config: ModelConfig) -> dict[str, Any]:
    """The key ``rope_parameters`` where a family has rotary positions by kind of layer: of both kinds, which
    transformers looks for whatever layers there are."""
    ropes = {FULL: config.rope, SLIDING: config.window_rope or config.rope}
    return {"rope_parameters": {kind: rope.to_hf(config.head_dim)["rope_parameters"] for kind, rope in ropes.items()}}


def written_window(config: ModelConfig) -> int:
    """The key ``sliding_window`` of families of which readers want a number where no layer has a window too."""
    return only_window(config) or DEFAULT_WINDOW


def only_window(config: ModelConfig) -> int | None:
    """The window of the layers that have one; a family has no more than one."""
    return next((window for window in config.windows if window is not None), None)


def _dtype(settings: Settings) -> str:
    key = "dtype" if settings.has("dtype") else "torch_dtype"
    value = settings.text(key).removeprefix("torch.") if settings.has(key) else "float32"
    if value not in ("float32", "float16", "bfloat16"):
        raise UnsupportedError("dtype is not supported", path=settings.path, found=value)
    return value
