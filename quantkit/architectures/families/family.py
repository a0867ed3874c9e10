"""A family of models, and how its config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.architectures.config import LayerConfig, Limits, ModelConfig
from quantkit.architectures.families.keys import Keys, layer_count
from quantkit.architectures.rope import DEFAULT_THETA, RopeConfig, ropes_by_layer
from quantkit.base.json_values import Settings
from quantkit.errors import UnsupportedError

WINDOWED_BASE = "rope.freq_base_swa"
"""The rotary base of layers with a window."""
YARN_BETAS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
"""The bounds of YaRN's ramp, in rotations within the original context."""
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""``mscale_all_dim`` of YaRN, next to an ``mscale`` of 1."""
YARN_TRUNCATE = "rope.scaling.yarn_truncate"
"""Whether the bounds of YaRN's ramp are rounded to whole dimensions; quantkit's key."""
QUERY_SCALE = "attention.temperature_scale"
"""``llama_4_scaling_beta``, see `RopeConfig.query_scaling_beta`."""
RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPS = "attention.layer_norm_epsilon"
"""The epsilon of norms that only divide, and of those that also subtract the mean."""
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
PREDICTION_LAYERS = "nextn_predict_layers"
"""The last layers, which predict further tokens; llama.cpp runs them only to propose tokens."""


@dataclass(frozen=True)
class StackedExperts:
    """One tensor on disk with the weights of all experts of a layer, [E, ...].

    Attributes:
        name: of the tensor.
        roles: the linears of each expert that it contains, with their outputs side by side.
        transposed: whether inputs come before outputs.
        interleaved: whether the outputs of several roles alternate.
        bias: the name of the tensor of their biases, if they have any.
    """

    name: str
    roles: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    bias: str | None = None


Ranges = tuple[tuple[int, int], ...]
"""Rows or columns, in an order: the first of each range and the one after its last."""


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a GGUF file with rows or columns of a canonical one in an order of its own.

    Attributes:
        module: its name, without the leaf; None for the usual one.
        rows, columns: those of the canonical tensor, in the order of the file; None for all of
            them in canonical order.
    """

    module: str | None = None
    rows: Ranges | None = None
    columns: Ranges | None = None


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp, which families may share: what a GGUF file can state, and what
    llama.cpp computes.

    Sources: llama.cpp's converter (what it writes for each family) and its loader (what it does
    with it).

    Attributes:
        name: the value of ``general.architecture``.
        keys: its keys in addition to those that all architectures have, without its name; keys of
            YaRN in them are settings that llama.cpp reads, instead of assuming their defaults.
        names: modules by role, if they differ from `names.GGUF_NAMES`.
        interleaved_rotary: whether the two rows of a rotary pair are adjacent.
        fused: roles of linears that are stored as one tensor.
        window_period: if a file does not say which layers have a window: all but the last of each
            period; None if llama.cpp ignores windows.
        default_window: the width where a file states none; such an architecture cannot do without.
        biases: the linears that may have one: ``qkv``, ``output`` (of attention), ``mlp``.
        rope_freqs: whether it supports a factor for each frequency, as in Llama 3.
        long_rope: whether it supports LongRoPE's factors.
        partial_rotary: whether some dimensions of a head may stay unrotated.
        normalized: whether the weights of a token's experts add up to 1; None if it has no experts.
        dense_layers: whether some layers of a model with experts may have none.
        dense_too: whether files without experts exist as well.
        tied: True if the head always is the embedding, False if it never is, None if files without
            a head exist.
        full_width: whether the widths of all heads must add up to the hidden size.
        uneven: whether the layers of a model differ in their tensors.
        single_branches: whether a layer is a mixer or a feed-forward; files list the widths of the
            latter for each layer then, 0 in those with a mixer.
        layer_without_kv: the name in ``layer_types`` of layers without KV heads, which have another
            mixer; files list the KV heads of each layer then. None if all layers have attention.
        wide_scale_layers: the number of layers at which attention is scaled by the hidden size over
            the heads.
        eps_key: its key of the epsilon of norms.
        multiplies_logits: whether ``logit_scale`` multiplies logits, instead of dividing them.
        one_rotary_base: whether layers with a window use the base of the others.
        parts: by role, the tensors that store the canonical one, if they are several or have other
            orders of rows or columns.
        older_names: by role, the modules of older files, which store the canonical tensor as it is;
            llama.cpp loads them too.
        refused: features that llama.cpp does not compute, by their description in errors.
        prepare: its keys as `build_config` reads those of all architectures, and what `read` needs
            besides these.
        read_ropes: keys of rotary positions in config.json, from a file's own keys and its factors,
            in place of those of other architectures; `write` states them.
        list_rope_factors: the factors that every file has.
        read: keys of config.json that follow from a file's own keys and the size of its heads.
        write: keys that only this architecture has, without its name, from a config that is not
            refused.
    """

    name: str
    keys: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rotary: bool = False
    fused: tuple[str, ...] = ()
    window_period: int | None = None
    default_window: int | None = None
    biases: tuple[str, ...] = ()
    rope_freqs: bool = False
    long_rope: bool = False
    partial_rotary: bool = False
    normalized: bool | None = None
    dense_layers: bool = False
    dense_too: bool = False
    tied: bool | None = None
    full_width: bool = False
    uneven: bool = False
    single_branches: bool = False
    layer_without_kv: str | None = None
    wide_scale_layers: int | None = None
    eps_key: str = RMS_EPS
    multiplies_logits: bool = False
    one_rotary_base: bool = False
    parts: Callable[[ModelConfig], Mapping[str, tuple[StoredPart, ...]]] = lambda config: {}
    older_names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Callable[[ModelConfig], bool]] = field(default_factory=dict)
    prepare: Callable[[Settings], Settings] = lambda keys: keys
    read_ropes: Callable[[Settings, Sequence[float]], dict[str, Any]] | None = None
    list_rope_factors: Callable[[ModelConfig], tuple[float, ...]] | None = None
    read: Callable[[Settings, int], dict[str, Any]] = lambda keys, head_dim: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Family:
    """A family: its config.json, and its names on disk that are not canonical.

    Attributes:
        model_type: its name in config.json.
        class_name: transformers' class, for ``architectures`` in config.json.
        keys: of config.json in addition to those of all families, in the order of writing.
        options: further arguments of `read_config`.
        prepare: the settings to read, from those of the file.
        names: modules on disk by role, if they differ from `names.CANONICAL`.
        fused: linears that are one on disk: the fused role of the topology to the module's name.
        stacked: experts that are one tensor on disk.
        loads_split_experts: of a family with `stacked`, whether transformers also loads experts
            that are a tensor for each linear, as quantized ones are (seen in 5.23).
        interleaved_rotary: whether the dimensions of a rotary pair are adjacent on disk.
        renamed: the beginning of names on disk that transformers replaces when it loads them, and
            that of its modules.
        prediction: what names of layers for multi-token prediction begin with, which transformers
            leaves out when it loads the model.
        writes_rope: whether `keys` write all rotary settings, as older spellings would be wrong.
        runs: whether the decoder computes everything that its configs state.
        in_mlx: whether mlx-lm is known to load quantized tensors by the names that quantkit writes.
        gguf: its architecture in llama.cpp; None if it is not read or written as GGUF.
        gguf_sparse: its architecture of models with experts, if llama.cpp has another one for them.
        gguf_mark: the key of config.json that only this one has among the families with the same
            GGUF architecture.
    """

    model_type: str
    class_name: str
    keys: tuple[Keys, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Settings], Settings] = lambda settings: settings
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, str] = field(default_factory=dict)
    stacked: tuple[StackedExperts, ...] = ()
    loads_split_experts: bool = False
    interleaved_rotary: bool = False
    renamed: tuple[str, str] | None = None
    prediction: str | None = None
    writes_rope: bool = False
    runs: bool = True
    in_mlx: bool = True
    gguf: GgufArchitecture | None = None
    gguf_sparse: GgufArchitecture | None = None
    gguf_mark: Literal["sliding_window", "num_experts", "attn_layer_indices"] | None = None

    @property
    def gguf_architectures(self) -> dict[str, GgufArchitecture]:
        """Return its architectures in llama.cpp by name."""
        architectures: dict[str, GgufArchitecture] = {}
        for architecture in (self.gguf, self.gguf_sparse):
            if architecture is not None:
                architectures[architecture.name] = architecture
        return architectures

    def read(self, settings: Settings) -> ModelConfig:
        """Read the config from a config.json.

        Raises `CheckpointError`, `UnsupportedError`, see `read_config`.
        """
        settings = self.prepare(settings)
        options = dict(self.options)
        for keys in self.keys:
            options |= keys.read(settings)
        return read_config(settings, **options)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write the keys of config.json in addition to those of all families."""
        values: dict[str, Any] = {}
        for keys in self.keys:
            values.update(keys.write(config))
        return values


def count_layers(gguf: Settings) -> int:
    """Count a file's layers, without those for multi-token prediction; see `PREDICTION_LAYERS`."""
    blocks = gguf.integer("block_count", 1, Limits.layers)
    if not gguf.has(PREDICTION_LAYERS):
        return blocks
    return blocks - gguf.integer(PREDICTION_LAYERS, 0, blocks - 1)


def read_config(
    settings: Settings,
    *,
    windows: Sequence[int | None] | None = None,
    rotary: Sequence[bool] | None = None,
    sparse: Sequence[bool] | None = None,
    mixers: Sequence[str] | None = None,
    feed_forwards: Sequence[bool] | None = None,
    chunks: Sequence[int | None] | None = None,
    sharing: Sequence[bool] | None = None,
    activations: tuple[str, ...] = ("silu", "swish"),
    activation_key: str = "hidden_act",
    kv_heads_required: bool = True,
    head_dim: int | None = None,
    head_dim_required: bool = False,
    tied_by_default: bool = False,
    default_theta: float = DEFAULT_THETA,
    windowed_theta: tuple[str, float] | None = None,
    rope_types: tuple[str, ...] | None = None,
    partial_rotary: float | None = None,
    query_scaling: bool = False,
    ropes: tuple[RopeConfig, RopeConfig | None] | None = None,
    **features: Any,
) -> ModelConfig:
    """Read the keys that all families have.

    Args:
        windows: of each layer; by default none has one.
        rotary: whether each layer has rotary positions; by default all do.
        sparse: whether each layer has experts; by default all if the model has any.
        mixers: the mixer of each layer; by default all have attention.
        feed_forwards: whether each layer has a feed-forward; by default all do.
        chunks: of each layer; by default none has any.
        sharing: whether each layer shares keys and values; by default none does.
        activations: the possible ones of the family's feed-forward.
        kv_heads_required: whether ``num_key_value_heads`` must be present; null stands for the
            number of heads.
        head_dim: by default; if it is None, the hidden size over the heads.
        tied_by_default: whether the head is the embedding if the key is absent.
        default_theta: of the rotary embedding, if the key is absent.
        windowed_theta: as for `ropes_by_layer`, in families with separate rotary positions of
            layers with a window.
        rope_types: the only types of rope scaling; None for all.
        partial_rotary, query_scaling: as for `RopeConfig.from_hf`.
        ropes: rotary positions of layers without and with a window, in families that read them
            themselves; the second is None if they do not differ.
        features: further fields of `ModelConfig`.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an activation or setting quantkit does not know.
    """
    if activation_key in settings.values and settings.string(activation_key) not in activations:
        raise UnsupportedError(
            "activation is not supported",
            path=settings.path,
            found=settings.values[activation_key],
            expected=activations[0],
        )
    heads = settings.integer("num_attention_heads", 1, Limits.heads)
    hidden = settings.integer("hidden_size", 1, Limits.width)
    count = layer_count(settings)
    if windows is None:
        windows = [None] * count
    if rotary is None:
        rotary = [True] * count
    if sparse is None:
        sparse = [features.get("experts") is not None] * count
    if mixers is None:
        mixers = ["attention"] * count
    if feed_forwards is None:
        feed_forwards = [True] * count
    if chunks is None:
        chunks = [None] * count
    if sharing is None:
        sharing = [False] * count
    layers = []
    for layer in range(count):
        layers.append(
            LayerConfig(
                window=windows[layer],
                rotary=rotary[layer],
                experts=sparse[layer],
                mixer=mixers[layer],
                feed_forward=feed_forwards[layer],
                chunk=chunks[layer],
                shares_kv=sharing[layer],
            )
        )
    # Null stands for the number of heads, but transformers replaces an absent key by the number of
    # KV heads of one published model.
    if "num_key_value_heads" not in settings.values and kv_heads_required:
        settings.need("num_key_value_heads")
    if settings.has("head_dim") or head_dim_required:
        head_dim = settings.integer("head_dim", 1, Limits.heads)
    else:
        head_dim = head_dim or hidden // heads
    starts = settings.ids("bos_token_id")
    ends = settings.ids("eos_token_id")
    window_rope = None
    if ropes is not None:
        rope, window_rope = ropes
    elif windowed_theta is None:
        rope = RopeConfig.from_hf(
            settings.values,
            settings.path,
            default_theta,
            head_dim=head_dim,
            partial=partial_rotary,
            query_scaling=query_scaling,
        )
    else:
        rope, window_rope = ropes_by_layer(
            settings.values,
            settings.path,
            default_theta,
            windowed_theta,
            head_dim=head_dim,
            windowed=[window is not None for window in windows],
        )
    if rope_types is not None and rope.type not in rope_types:
        raise UnsupportedError(
            "rope type is not supported for this model family",
            path=settings.path,
            found=rope.type,
            expected=" or ".join(rope_types),
        )
    # transformers 5 renames the key; without either, torch's default type is meant.
    if settings.has("dtype"):
        dtype_key = "dtype"
    else:
        dtype_key = "torch_dtype"
    if settings.has(dtype_key):
        dtype = settings.string(dtype_key).removeprefix("torch.")
    else:
        dtype = "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedError("dtype is not supported", path=settings.path, found=dtype)
    return ModelConfig(
        architecture=settings.string("model_type"),
        vocab_size=settings.integer("vocab_size", 1, Limits.width),
        hidden_size=hidden,
        intermediate_size=settings.integer("intermediate_size", 1, Limits.width),
        layers=tuple(layers),
        num_heads=heads,
        num_kv_heads=_read_kv_heads(settings, heads),
        head_dim=head_dim,
        norm_eps=settings.number("rms_norm_eps", *Limits.eps),
        rope=rope,
        window_rope=window_rope,
        max_context=settings.integer("max_position_embeddings", 1, Limits.context),
        tied_embeddings=settings.flag("tie_word_embeddings", tied_by_default),
        dtype=dtype,
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=ends,
        **features,
    ).validate(settings.path)


def _read_kv_heads(settings: Settings, heads: int) -> int:
    if settings.has("num_key_value_heads"):
        return settings.integer("num_key_value_heads", 1, Limits.heads)
    return heads


def with_default_rope(settings: Settings, default: Mapping[str, Any]) -> Settings:
    """Add the default rotary settings of a family that scales positions. An empty ``rope_scaling``
    is none, as in transformers.
    """
    if settings.has("rope_parameters") or settings.values.get("rope_scaling"):
        return settings
    return Settings(
        {**settings.values, "rope_parameters": default, "rope_scaling": None}, settings.path
    )
