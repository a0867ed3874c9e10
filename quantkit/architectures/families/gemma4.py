"""Gemma 4, text, dense and with experts: layers without a window have heads, and rotary positions,
of their own; values are normalized; small models share keys and values between layers, and have a
vector of each token for each layer.

Its description is the code of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quantkit.architectures.config import (
    ExpertsConfig,
    LayerInputsConfig,
    Limits,
    ModelConfig,
)
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    WINDOWED_BASE,
    Family,
    GgufArchitecture,
    StackedExperts,
)
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK, GGUF_NAMES
from quantkit.architectures.rope import (
    FULL,
    MAX_THETA,
    MIN_THETA,
    SLIDING,
    RopeConfig,
)
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

_ACTIVATION = "gelu_pytorch_tanh"
_CAP = "final_logit_softcapping"
_CAPS = (1e-3, 1e6)
# Transformers' defaults, if a key is absent.
_INTERVAL = 6
_WINDOW = 512
_HEAD_DIM = 256
_FULL_HEAD_DIM = 512
_LAYER_INPUTS = 256
_LAYER_INPUTS_VOCABULARY = 262144
_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_ROPE_TYPES = {FULL: ("proportional", "default"), SLIDING: ("default",)}
_BY_LAYER = "per_layer_config"
_SIZES = ("head_dim", "num_key_value_heads")


def _require_causal(settings: Settings) -> dict[str, Any]:
    """Raise an `UnsupportedError` for bidirectional attention between tokens of text."""
    bidirectional = settings.values.get("use_bidirectional_attention")
    # Such attention of ``vision`` is only among the tokens of an image.
    if bidirectional not in (None, "vision"):
        raise UnsupportedError(
            "bidirectional attention is not supported",
            path=settings.path,
            found=format_value(bidirectional),
        )
    return {}


def _read_layer_inputs(settings: Settings) -> dict[str, Any]:
    """Read the vectors of tokens for each layer."""
    size = _LAYER_INPUTS
    if "hidden_size_per_layer_input" in settings.values:
        size = settings.integer("hidden_size_per_layer_input", 0, Limits.width)
    if not size:
        return {}
    rows = _LAYER_INPUTS_VOCABULARY
    if "vocab_size_per_layer_input" in settings.values:
        rows = settings.integer("vocab_size_per_layer_input", 1, Limits.width)
    vocabulary = settings.integer("vocab_size", 1, Limits.width)
    if rows < vocabulary:
        raise CheckpointError(
            "tokens lack an embedding for each layer",
            path=settings.path,
            found=f"vocab_size_per_layer_input {rows}",
            expected=f"at least {vocabulary}",
        )
    return {"layer_inputs": LayerInputsConfig(size, rows)}


def _read_sharing(settings: Settings) -> dict[str, Any]:
    """Read which layers share keys and values: the last ones, with the latest of the others of
    their kind.
    """
    count = keys.layer_count(settings)
    shared = 0
    if settings.has("num_kv_shared_layers"):
        shared = settings.integer("num_kv_shared_layers", 0, count)
    windowed = [window is not None for window in _read_windows(settings)["windows"]]
    if shared and not _read_layer_inputs(settings):
        raise UnsupportedError(
            "transformers does not run shared keys and values without embeddings for each layer",
            path=settings.path,
            found=f"num_kv_shared_layers {shared}",
            expected="hidden_size_per_layer_input above 0",
        )
    first = count - shared
    if shared and set(windowed[:first]) != set(windowed):
        raise CheckpointError(
            "layers share keys and values of a kind that no layer computes",
            path=settings.path,
            found=f"num_kv_shared_layers {shared}",
        )
    is_wide = settings.flag("use_double_wide_mlp", False)
    return {
        "sharing": [layer >= first for layer in range(count)],
        "wide_sharing_layers": is_wide and shared > 0,
    }


_WINDOWS = keys.windows_by_kind(_INTERVAL, default=_WINDOW)


def _read_windows(settings: Settings) -> dict[str, Any]:
    """Read the windows of the layers; the last one never has one, as in transformers."""
    windows = _WINDOWS.read(settings)["windows"]
    return {"windows": [*windows[:-1], None]}


def _read_sizes(settings: Settings) -> dict[str, Any]:
    """Read the heads of layers without a window."""
    windows = _read_windows(settings)["windows"]
    usual = {"head_dim": _HEAD_DIM, "num_key_value_heads": 0}
    for key in _SIZES:
        if settings.has(key):
            usual[key] = settings.integer(key, 1, Limits.heads)
    shares = settings.flag("attention_k_eq_v", False)
    if settings.has(_BY_LAYER):
        sizes = _read_sizes_by_layer(settings, windows, usual)
    else:
        sizes = dict(usual)
        sizes["head_dim"] = _FULL_HEAD_DIM
        if "global_head_dim" in settings.values:
            sizes["head_dim"] = settings.integer("global_head_dim", 1, Limits.heads)
        # Transformers reads it next to shared keys and values only.
        if shares and settings.has("num_global_key_value_heads"):
            key = "num_global_key_value_heads"
            sizes["num_key_value_heads"] = settings.integer(key, 1, Limits.heads)
    different: dict[str, int | None] = {}
    for key in _SIZES:
        different[key] = None if sizes[key] == usual[key] else sizes[key]
    return {
        "full_head_dim": different["head_dim"],
        "full_kv_heads": different["num_key_value_heads"],
        "values_are_keys": shares,
    }


def _read_sizes_by_layer(
    settings: Settings, windows: list[int | None], usual: dict[str, int]
) -> dict[str, int]:
    """Read the sizes that transformers writes for each layer: those of all layers without a window
    must be the same, and the others must have the usual ones.
    """
    by_layer = settings.inside(_BY_LAYER)
    numbers = {str(layer) for layer in range(len(windows))}
    found: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    unknown = sorted(set(by_layer.values) - numbers)
    for layer, window in enumerate(windows):
        sizes = dict(usual)
        if by_layer.has(str(layer)):
            changes = by_layer.inside(str(layer))
            unknown += sorted(set(changes.values) - set(_SIZES))
            for key in _SIZES:
                if changes.has(key):
                    sizes[key] = changes.integer(key, 1, Limits.heads)
        found[window is None].add(tuple(sizes[key] for key in _SIZES))
    if unknown:
        raise UnsupportedError(
            f"unknown settings in {_BY_LAYER}", path=settings.path, found=format_value(unknown)
        )
    with_window = found[False] or {tuple(usual.values())}
    if len(found[True]) != 1 or with_window != {tuple(usual.values())}:
        raise UnsupportedError(
            f"{_BY_LAYER} with sizes that do not follow the windows is not supported",
            path=settings.path,
        )
    return dict(zip(_SIZES, next(iter(found[True])), strict=True))


def _read_ropes(settings: Settings) -> dict[str, Any]:
    """Read the rotary positions of both kinds of layers, from ``rope_parameters`` only."""
    # The older spelling, even null, which transformers takes for all layer types.
    if "rope_scaling" in settings.values:
        raise UnsupportedError(
            "rope_scaling is not supported for this model family",
            path=settings.path,
            found=format_value(settings.values["rope_scaling"]),
            expected="rope_parameters for each layer type",
        )
    kinds = Settings(_ROPES, settings.path)
    if settings.has("rope_parameters"):
        kinds = settings.inside("rope_parameters")
    windows = _read_windows(settings)["windows"]
    sizes = _read_sizes(settings)
    head_dim = _HEAD_DIM
    if settings.has("head_dim"):
        head_dim = settings.integer("head_dim", 1, Limits.heads)
    full = _read_rope(kinds, FULL, sizes["full_head_dim"] or head_dim)
    if not any(windows):
        return {"ropes": (full, None)}
    windowed = _read_rope(kinds, SLIDING, head_dim)
    # Heads of another size have other angles even if the settings are the same.
    if windowed == full and sizes["full_head_dim"] is None:
        return {"ropes": (full, None)}
    return {"ropes": (full, windowed)}


def _read_rope(kinds: Settings, kind: str, head_dim: int) -> RopeConfig:
    if not kinds.has(kind):
        raise CheckpointError(f"rope_parameters lack '{kind}'", path=kinds.path)
    # Nothing outside of these settings counts.
    values = {"rope_parameters": dict(kinds.inside(kind).values)}
    rope = RopeConfig.from_hf(values, kinds.path, head_dim=head_dim, proportional=True)
    if rope.type not in _ROPE_TYPES[kind]:
        raise UnsupportedError(
            f"rope type of {kind} is not supported for this model family",
            path=kinds.path,
            found=rope.type,
            expected=" or ".join(_ROPE_TYPES[kind]),
        )
    return rope


def _read_features(settings: Settings) -> dict[str, Any]:
    return {"embedding_multiplier": math.sqrt(settings.integer("hidden_size", 1, Limits.width))}


def _read_experts(settings: Settings) -> dict[str, Any]:
    """Read the experts, which all layers have next to the feed-forward if any has."""
    if not settings.flag("enable_moe_block", False):
        return {}
    experts = ExpertsConfig(
        count=settings.integer("num_experts", 1, Limits.experts),
        size=settings.integer("moe_intermediate_size", 1, Limits.width),
        per_token=settings.integer("top_k_experts", 1, Limits.experts),
        shared_size=settings.integer("intermediate_size", 1, Limits.width),
        separate_norms=True,
        expert_scales=True,
    )
    return {"experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    full_head_dim = config.full_head_dim or config.head_dim
    full_kv_heads = config.full_kv_heads or config.num_kv_heads
    by_layer = {}
    for number, layer in enumerate(config.layers):
        if layer.window is None:
            sizes = (full_head_dim, full_kv_heads)
            by_layer[str(number)] = dict(zip(_SIZES, sizes, strict=True))
    experts = config.experts
    inputs = config.layer_inputs
    parameters = {FULL: config.rope.to_hf(full_head_dim)["rope_parameters"]}
    if any(config.windows):
        windowed = config.window_rope or config.rope
        parameters[SLIDING] = windowed.to_hf(config.head_dim)["rope_parameters"]
    else:
        # Transformers expects both kinds.
        parameters[SLIDING] = _ROPES[SLIDING]
    return {
        "hidden_activation": _ACTIVATION,
        "attention_k_eq_v": config.values_are_keys,
        # Releases of transformers read one or the other.
        "global_head_dim": full_head_dim,
        "num_global_key_value_heads": full_kv_heads,
        _BY_LAYER: by_layer,
        "rope_parameters": parameters,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "vocab_size_per_layer_input": config.vocab_size if inputs is None else inputs.vocab_size,
        "num_kv_shared_layers": sum(layer.shares_kv for layer in config.layers),
        "use_double_wide_mlp": config.wide_sharing_layers,
        "enable_moe_block": experts is not None,
        "num_experts": None if experts is None else experts.count,
        "top_k_experts": None if experts is None else experts.per_token,
        "moe_intermediate_size": None if experts is None else experts.size,
    }


# llama.cpp's keys: those of other architectures are of layers without a window.
_GGUF_WINDOW = "attention.sliding_window"
_GGUF_PATTERN = "attention.sliding_window_pattern"
_GGUF_KV_HEADS = "attention.head_count_kv"
_GGUF_WIDTH = "feed_forward_length"
_GGUF_LENGTHS = ("attention.key_length", "attention.value_length")
_GGUF_WINDOWED_LENGTHS = ("attention.key_length_swa", "attention.value_length_swa")
_GGUF_ROTATED = "rope.dimension_count"
_GGUF_WINDOWED_ROTATED = "rope.dimension_count_swa"
_GGUF_SHARED = "attention.shared_kv_layers"
_GGUF_LAYER_INPUT = "embedding_length_per_layer_input"
# Not in files: what `_prepare_gguf` finds, for `_read_gguf`.
_FULL_HEAD = "full.key_length"
_FULL_KV = "full.head_count_kv"
_WIDE = "full.wide"
_GGUF_CAP = 30.0
"""llama.cpp's soft cap of logits where a file states none."""
_NOT_ROTATED = 1e30
"""The factor that divides the frequencies of dimensions that are not rotated."""


def _find_size(gguf: Settings, sizes: Sequence[Any], key: str) -> Any:
    """Find the size of several layers, which must be the same."""
    if len(set(map(str, sizes))) != 1:
        raise UnsupportedError(
            f"layers of a kind that differ in {gguf.name}.{key} are not supported",
            path=gguf.path,
            found=format_value(gguf.values[key]),
        )
    return sizes[0]


def _prepare_gguf(gguf: Settings) -> Settings:
    """Take the sizes of layers with a window for those of all, and keep the others apart."""
    values = dict(gguf.values)
    layers = gguf.integer("block_count", 1, Limits.layers)
    windowed = values.get(_GGUF_PATTERN)
    if not isinstance(windowed, list) or len(windowed) != layers or not 0 < sum(windowed) < layers:
        raise CheckpointError(
            f"{gguf.name}.{_GGUF_PATTERN} does not match the layers",
            path=gguf.path,
            found=format_value(windowed),
            expected=f"a flag for each of {layers}, with layers of both kinds",
        )
    values[_FULL_HEAD] = gguf.need(_GGUF_LENGTHS[0])
    for key, windowed_key in zip(_GGUF_LENGTHS, _GGUF_WINDOWED_LENGTHS, strict=True):
        if values.get(key, values[_FULL_HEAD]) != values[_FULL_HEAD]:
            raise UnsupportedError(
                "keys and values of different sizes are not supported", path=gguf.path
            )
        values[key] = gguf.need(windowed_key)
    kv_heads = gguf.need(_GGUF_KV_HEADS)
    if not isinstance(kv_heads, list):
        kv_heads = [kv_heads] * layers
    for has_window, key in ((True, _GGUF_KV_HEADS), (False, _FULL_KV)):
        sizes = []
        for count, flag in zip(kv_heads, windowed, strict=True):
            if bool(flag) == has_window:
                sizes.append(count)
        values[key] = _find_size(gguf, sizes, _GGUF_KV_HEADS)
    widths = gguf.need(_GGUF_WIDTH)
    values[_WIDE] = False
    if isinstance(widths, list):
        first = layers
        if gguf.has(_GGUF_SHARED):
            first -= gguf.integer(_GGUF_SHARED, 0, layers)
        values[_GGUF_WIDTH] = _find_size(gguf, widths[:first], _GGUF_WIDTH)
        if widths != [values[_GGUF_WIDTH]] * layers:
            wide = [2 * values[_GGUF_WIDTH]] * (layers - first)
            values[_WIDE] = True
            _find_size(gguf, [str(wide), str(widths[first:])], _GGUF_WIDTH)
    return Settings(values, gguf.path, gguf.name)


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    sizes = dict.fromkeys(_SIZES, 0)
    sizes["head_dim"] = gguf.integer(_FULL_HEAD, 1, Limits.heads)
    sizes["num_key_value_heads"] = gguf.integer(_FULL_KV, 1, Limits.heads)
    by_layer = {}
    for number, flag in enumerate(gguf.values[_GGUF_PATTERN]):
        if not flag:
            by_layer[str(number)] = sizes
    layer_input = 0
    if gguf.has(_GGUF_LAYER_INPUT):
        layer_input = gguf.integer(_GGUF_LAYER_INPUT, 0, Limits.width)
    shared = 0
    if gguf.has(_GGUF_SHARED):
        shared = gguf.integer(_GGUF_SHARED, 0, Limits.layers)
    cap = _GGUF_CAP
    if gguf.has(_CAP):
        cap = gguf.number(_CAP, 0, _CAPS[1])
    values = {
        "hidden_activation": _ACTIVATION,
        # 0 stands for none.
        _CAP: cap or None,
        _BY_LAYER: by_layer,
        "hidden_size_per_layer_input": layer_input,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": gguf.values[_WIDE],
    }
    if gguf.values.get(EXPERT_KEYS[0]):
        values["enable_moe_block"] = True
        values["top_k_experts"] = gguf.integer(EXPERT_KEYS[1], 1, Limits.experts)
    return values


def _read_gguf_ropes(gguf: Settings, factors: Sequence[float]) -> dict[str, Any]:
    """Read the rotary positions of both kinds of layers: some dimensions of heads without a window
    have a factor that keeps them as they are.
    """
    sizes = (_GGUF_ROTATED, _FULL_HEAD), (_GGUF_WINDOWED_ROTATED, _GGUF_LENGTHS[0])
    for key, length in sizes:
        if gguf.has(key) and gguf.values[key] != gguf.values[length]:
            raise UnsupportedError(
                f"{gguf.name}.{key} other than the size of heads is not supported",
                path=gguf.path,
                found=format_value(gguf.values[key]),
                expected=gguf.values[length],
            )
    pairs = gguf.integer(_FULL_HEAD, 1, Limits.heads) // 2
    rotated = sum(factor == 1 for factor in factors)
    expected = (*([1.0] * rotated), *([_NOT_ROTATED] * (pairs - rotated)))
    if len(factors) != pairs or tuple(factors) != expected or not rotated:
        raise UnsupportedError(
            "factors of frequencies other than 1 and 1e30 are not supported in Gemma 4",
            path=gguf.path,
            found=format_value(list(factors)),
            expected=f"{pairs}, the first of them 1",
        )
    if gguf.values.get("rope.scaling.type", "none") != "none":
        raise UnsupportedError(
            "rope scaling is not supported in Gemma 4",
            path=gguf.path,
            found=format_value(gguf.values["rope.scaling.type"]),
        )
    bases = []
    for key, kind in (("rope.freq_base", FULL), (WINDOWED_BASE, SLIDING)):
        # llama.cpp's default.
        base = 10000.0
        if gguf.has(key):
            base = gguf.number(key, MIN_THETA, MAX_THETA)
        bases.append({**_ROPES[kind], "rope_theta": base})
    full, windowed = bases
    if rotated == pairs:
        full = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    else:
        full["partial_rotary_factor"] = rotated / pairs
    return {"rope_parameters": {FULL: full, SLIDING: windowed}}


def _write_gguf(config: ModelConfig) -> dict[str, Any]:
    windowed = [window is not None for window in config.windows]
    full_head_dim = config.full_head_dim or config.head_dim
    windowed_rope = config.window_rope or config.rope
    shared = sum(layer.shares_kv for layer in config.layers)
    values = {
        _GGUF_PATTERN: windowed,
        _GGUF_KV_HEADS: [config.kv_heads_of(layer) for layer in range(config.num_layers)],
        _GGUF_ROTATED: full_head_dim,
        _GGUF_WINDOWED_ROTATED: config.head_dim,
        "rope.freq_base": float(config.rope.theta),
        WINDOWED_BASE: float(windowed_rope.theta),
        _GGUF_SHARED: shared,
        _GGUF_LAYER_INPUT: 0 if config.layer_inputs is None else config.layer_inputs.size,
        _CAP: float(config.logit_softcap or 0),
        **dict.fromkeys(_GGUF_LENGTHS, full_head_dim),
        **dict.fromkeys(_GGUF_WINDOWED_LENGTHS, config.head_dim),
    }
    if config.wide_sharing_layers:
        values[_GGUF_WIDTH] = [
            config.intermediate_size_of(layer) for layer in range(config.num_layers)
        ]
    return values


def _list_gguf_factors(config: ModelConfig) -> tuple[float, ...]:
    pairs = (config.full_head_dim or config.head_dim) // 2
    rotated = pairs
    if config.rope.rotary_dim is not None:
        rotated = config.rope.rotary_dim // 2
    return (*([1.0] * rotated), *([_NOT_ROTATED] * (pairs - rotated)))


def _shares_otherwise(config: ModelConfig) -> bool:
    """Return whether shared keys and values are not those of the last two layers before, of which
    the last one has no window.
    """
    first = config.num_layers - sum(layer.shares_kv for layer in config.layers)
    if first < _GGUF_FEWEST:
        return True
    for number, source in enumerate(config.kv_sources):
        has_window = config.layers[number].window is not None
        if source is not None and source != first - (2 if has_window else 1):
            return True
    return False


def _has_other_rows(config: ModelConfig) -> bool:
    return config.layer_inputs is not None and config.layer_inputs.vocab_size != config.vocab_size


_GGUF_FEWEST = 2
_GEMMA4_GGUF = GgufArchitecture(
    "gemma4",
    keys=(
        *EXPERT_KEYS,
        _CAP,
        WINDOWED_BASE,
        *_GGUF_WINDOWED_LENGTHS,
        _GGUF_WINDOWED_ROTATED,
        _GGUF_SHARED,
        _GGUF_LAYER_INPUT,
    ),
    names={
        "shared_expert.gate": GGUF_NAMES["mlp.gate"],
        "shared_expert.up": GGUF_NAMES["mlp.up"],
        "shared_expert.down": GGUF_NAMES["mlp.down"],
    },
    window_period=_INTERVAL,
    normalized=True,
    dense_too=True,
    uneven=True,
    prepare=_prepare_gguf,
    read_ropes=_read_gguf_ropes,
    list_rope_factors=_list_gguf_factors,
    read=_read_gguf,
    write=_write_gguf,
    refused={
        "the absence of sliding-window layers": lambda config: not any(config.windows),
        "shared keys and values other than those of the last two layers that compute some": (
            _shares_otherwise
        ),
        "embeddings of layers for more tokens than the vocabulary has": _has_other_rows,
        "a factor of rotary positions": lambda config: config.rope.factor != 1,
    },
)

_EXPERTS = BLOCK + "experts."
GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (
        Keys(_require_causal),
        Keys(_read_features),
        keys.ATTENTION_BIAS,
        Keys(_read_windows, _WINDOWS.write),
        Keys(_read_sizes),
        Keys(_read_layer_inputs),
        Keys(_read_sharing),
        Keys(_read_ropes),
        Keys(_read_experts),
        keys.number(_CAP, "logit_softcap", *_CAPS, None, null=None),
        Keys(write=_write),
    ),
    options={
        "activation": "gelu_tanh",
        "activation_key": "hidden_activation",
        "activations": (_ACTIVATION,),
        "attention_scale": 1.0,
        "head_dim": _HEAD_DIM,
        "layer_scales": True,
        "norms": "both",
        "qk_norm": "head",
        "tied_by_default": True,
        "value_norm": True,
        "wide_norms": True,
    },
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.norm": BLOCK + "pre_feedforward_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
        "layer_input.gate": BLOCK + "per_layer_input_gate",
        "layer_input.projection": BLOCK + "per_layer_projection",
        "layer_input.norm": BLOCK + "post_per_layer_input_norm",
        "layer_inputs.embedding": "model.embed_tokens_per_layer",
        "layer_inputs.projection": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
        "layer_scale": BLOCK + "layer_scalar",
        # With experts, the feed-forward for every token is the shared one.
        "shared_expert.norm": BLOCK + "pre_feedforward_layernorm",
        "shared_expert.output_norm": BLOCK + "post_feedforward_layernorm_1",
        "shared_expert.gate": BLOCK + "mlp.gate_proj",
        "shared_expert.up": BLOCK + "mlp.up_proj",
        "shared_expert.down": BLOCK + "mlp.down_proj",
        "expert.norm": BLOCK + "pre_feedforward_layernorm_2",
        "expert.output_norm": BLOCK + "post_feedforward_layernorm_2",
        "expert.gate": _EXPERTS + "{expert}.gate_proj",
        "expert.up": _EXPERTS + "{expert}.up_proj",
        "expert.down": _EXPERTS + "{expert}.down_proj",
        "router": BLOCK + "router.proj",
        "router.scale": BLOCK + "router.scale",
        "router.expert_scales": BLOCK + "router.per_expert_scale",
    },
    writes_rope=True,
    in_mlx=False,
    stacked=(
        StackedExperts(_EXPERTS + "gate_up_proj", ("expert.gate", "expert.up")),
        StackedExperts(_EXPERTS + "down_proj", ("expert.down",)),
    ),
    gguf=_GEMMA4_GGUF,
)
