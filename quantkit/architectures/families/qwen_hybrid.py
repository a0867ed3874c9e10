"""Qwen3-Next, and Qwen3.5, text, dense and with experts: gated delta rules between layers with
gated attention.

Its description is the code of transformers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from quantkit.architectures.config import GatedDeltaConfig, Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    PREDICTION_LAYERS,
    Family,
    GgufArchitecture,
    Ranges,
    StoredPart,
    count_layers,
)
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.families.qwen import QWEN2_MOE
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

# The name of a layer with a delta rule in config.json.
_LINEAR = "linear_attention"
# Every so many layers have attention, if a config does not list them; transformers' default.
_INTERVAL = 4
# How rotary positions of images are arranged; those of text have one number for all.
_FOR_IMAGES = ("mrope_section", "mrope_interleaved")
# Transformers' defaults, by the key in config.json.
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _prepare(settings: Settings) -> Settings:
    """Drop rotary settings that do not concern text."""
    values = dict(settings.values)
    for key in ("rope_parameters", "rope_scaling"):
        rotary = values.get(key)
        if isinstance(rotary, dict):
            values[key] = {name: value for name, value in rotary.items() if name not in _FOR_IMAGES}
    return Settings(values, settings.path)


def _read_mixers(settings: Settings) -> dict[str, Any]:
    """Read the mixer of each layer, and the sizes of the delta rule."""
    count = keys.layer_count(settings)
    if settings.has("layer_types"):
        types = settings.strings("layer_types")
    else:
        interval = _INTERVAL
        if settings.has("full_attention_interval"):
            interval = settings.integer("full_attention_interval", 1, Limits.layers)
        types = []
        for layer in range(count):
            types.append(_LINEAR if (layer + 1) % interval else FULL)
    if len(types) != count or set(types) - {FULL, _LINEAR}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(types),
            expected=f"{FULL} or {_LINEAR} for each of {count}",
        )
    sizes = {}
    for key, default in _SIZES.items():
        sizes[key] = settings.integer(key, 1, Limits.heads) if settings.has(key) else default
    delta = GatedDeltaConfig(
        key_heads=sizes["linear_num_key_heads"],
        value_heads=sizes["linear_num_value_heads"],
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        convolution=sizes["linear_conv_kernel_dim"],
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            "heads of values are not a multiple of those of keys",
            path=settings.path,
            found=f"{delta.value_heads} and {delta.key_heads}",
        )
    mixers = []
    for kind in types:
        mixers.append("gated_delta" if kind == _LINEAR else "attention")
    return {"mixers": mixers, "gated_delta": delta}


def _write_mixers(config: ModelConfig) -> dict[str, Any]:
    delta = config.gated_delta
    assert delta is not None
    types = []
    for layer in config.layers:
        types.append(FULL if layer.mixer == "attention" else _LINEAR)
    return {
        "layer_types": types,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.convolution,
    }


_GGUF_KEY_HEADS = "ssm.group_count"
_GGUF_VALUE_HEADS = "ssm.time_step_rank"
_GGUF_KEY_DIM = "ssm.state_size"
_GGUF_VALUES = "ssm.inner_size"
_GGUF_CONVOLUTION = "ssm.conv_kernel"
_GGUF_RECURRENT = "attention.recurrent_layers"
_GGUF_INTERVAL = "full_attention_interval"
_GGUF_KEYS = (
    _GGUF_KEY_HEADS,
    _GGUF_VALUE_HEADS,
    _GGUF_KEY_DIM,
    _GGUF_VALUES,
    _GGUF_CONVOLUTION,
    _GGUF_RECURRENT,
    _GGUF_INTERVAL,
    PREDICTION_LAYERS,
)
# The rotary pairs that turn with the time, the row and the column of an image's part, and with a
# fourth number.
_GGUF_SECTIONS = "rope.dimension_sections"
_GGUF_CHANNELS = "blk.{layer}.attn_qkv"
_GGUF_GATES = "blk.{layer}.attn_gate"
# llama.cpp adds the epsilon of norms to the squared length of queries and keys, transformers this.
_LENGTH_EPS = 1e-6


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    """Read the sizes of the delta rule, and which layers have one."""
    value_heads = gguf.integer(_GGUF_VALUE_HEADS, 1, Limits.heads)
    key_dim = gguf.integer(_GGUF_KEY_DIM, 1, Limits.heads)
    values = gguf.integer(_GGUF_VALUES, 1, Limits.width)
    # llama.cpp reads only one size, and multiplies states by it.
    if values != value_heads * key_dim:
        raise UnsupportedError(
            f"{gguf.name}.{_GGUF_VALUES} is not the number of heads times their size",
            path=gguf.path,
            found=values,
            expected=value_heads * key_dim,
        )
    types = []
    for is_recurrent in _read_recurrent(gguf):
        types.append(_LINEAR if is_recurrent else FULL)
    return {
        "layer_types": types,
        "linear_num_key_heads": gguf.integer(_GGUF_KEY_HEADS, 1, Limits.heads),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": key_dim,
        "linear_conv_kernel_dim": gguf.integer(_GGUF_CONVOLUTION, 1, Limits.heads),
        "attention_bias": False,
    }


def _read_recurrent(gguf: Settings) -> list[bool]:
    """Read whether each layer has a delta rule: from a list, or from an interval."""
    count = count_layers(gguf)
    blocks = gguf.integer("block_count", 1, Limits.layers)
    if not gguf.has(_GGUF_RECURRENT):
        interval = _INTERVAL
        if gguf.has(_GGUF_INTERVAL):
            interval = gguf.integer(_GGUF_INTERVAL, 1, Limits.layers)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    flags = gguf.values[_GGUF_RECURRENT]
    is_list = isinstance(flags, list) and len(flags) == blocks
    if not is_list or not all(flag in (0, 1) for flag in flags):
        raise CheckpointError(
            f"{gguf.name}.{_GGUF_RECURRENT} does not match the layers",
            path=gguf.path,
            found=format_value(flags),
            expected=f"true or false for each of {blocks}",
        )
    return [bool(flag) for flag in flags[:count]]


def _write_gguf(config: ModelConfig) -> dict[str, Any]:
    delta = config.gated_delta
    assert delta is not None
    recurrent = [layer.mixer == "gated_delta" for layer in config.layers]
    values: dict[str, Any] = {
        _GGUF_KEY_HEADS: delta.key_heads,
        _GGUF_VALUE_HEADS: delta.value_heads,
        _GGUF_KEY_DIM: delta.key_dim,
        _GGUF_VALUES: delta.value_heads * delta.value_dim,
        _GGUF_CONVOLUTION: delta.convolution,
        _GGUF_RECURRENT: recurrent,
    }
    # Older releases of llama.cpp read only an interval.
    for interval in range(1, config.num_layers + 2):
        if recurrent == [(layer + 1) % interval != 0 for layer in range(config.num_layers)]:
            return {**values, _GGUF_INTERVAL: interval}
    return values


def _read_gguf_with_sections(gguf: Settings, head_dim: int) -> dict[str, Any]:
    """Do as `_read_gguf`, and check that the positions of text turn all rotary pairs."""
    sections = gguf.integers(_GGUF_SECTIONS, 0, Limits.heads)
    rotated = head_dim
    if gguf.has("rope.dimension_count"):
        rotated = gguf.integer("rope.dimension_count", 2, head_dim)
    expected = _split_pairs(rotated // 2)
    if len(sections) != len(expected) or not _turns_all_pairs(sections, rotated // 2):
        raise UnsupportedError(
            f"{gguf.name}.{_GGUF_SECTIONS} leaves rotary pairs without positions",
            path=gguf.path,
            found=format_value(sections),
            expected=format_value(expected),
        )
    return _read_gguf(gguf, head_dim)


def _write_gguf_with_sections(config: ModelConfig) -> dict[str, Any]:
    """Do as `_write_gguf`, with sections that positions of text turn completely."""
    pairs = (config.rope.rotary_dim or config.head_dim) // 2
    return {**_write_gguf(config), _GGUF_SECTIONS: _split_pairs(pairs)}


def _split_pairs(pairs: int) -> list[int]:
    """Split rotary pairs into sections that take turns: those of the published models, whose heads
    have 32 pairs, are [11, 11, 10, 0].
    """
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]


def _turns_all_pairs(sections: list[int], pairs: int) -> bool:
    """Return whether each of the rotary pairs turns with one of the first three numbers of a
    position, which are the same in text; the fourth one is 0.
    """
    # As ggml arranges them: the three in turn, each as often as its section says.
    period = sum(sections)
    return period > 0 and all(pair < 3 * sections[pair % 3] for pair in range(min(pairs, period)))


def _tile_value_heads(config: ModelConfig) -> dict[str, tuple[StoredPart, ...]]:
    """List the tensors whose value heads a file has in another order: the first of each key head,
    then the second of each, and so on. llama.cpp repeats all key heads for these.
    """
    delta = config.gated_delta
    assert delta is not None
    shared = delta.value_heads // delta.key_heads
    if shared == 1:
        return {}
    heads = []
    for number in range(shared):
        for key_head in range(delta.key_heads):
            heads.append(key_head * shared + number)

    def list_heads(size: int, first: int = 0) -> Ranges:
        return tuple((first + head * size, first + (head + 1) * size) for head in heads)

    keys_width = 2 * delta.key_heads * delta.key_dim
    channels = StoredPart(rows=((0, keys_width), *list_heads(delta.value_dim, keys_width)))
    values = list_heads(delta.value_dim)
    parts = {
        "gated_delta.qkv": channels,
        "gated_delta.filter": channels,
        "gated_delta.gate": StoredPart(rows=values),
        "gated_delta.out": StoredPart(columns=values),
    }
    for name in ("write", "decay", "decay_bias", "log_rate"):
        parts[f"gated_delta.{name}"] = StoredPart(rows=list_heads(1))
    return {role: (part,) for role, part in parts.items()}


def _divide_joined_linear(config: ModelConfig) -> dict[str, tuple[StoredPart, ...]]:
    """Divide the rows of the linear with the queries, keys, values and gates of each key head in
    turn: a file has all queries, all keys and all values in one tensor, all gates in another.
    """
    delta = config.gated_delta
    assert delta is not None
    values = delta.value_heads // delta.key_heads * delta.value_dim
    # Of each key head: queries, keys, values and gates.
    sizes = [delta.key_dim, delta.key_dim, values, values]
    rows_by_part: list[list[tuple[int, int]]] = [[], [], [], []]
    row = 0
    for _ in range(delta.key_heads):
        for rows, size in zip(rows_by_part, sizes, strict=True):
            rows.append((row, row + size))
            row += size
    *rows_of_channels, rows_of_gates = rows_by_part
    channels = StoredPart(_GGUF_CHANNELS, tuple(itertools.chain(*rows_of_channels)))
    gates = StoredPart(_GGUF_GATES, tuple(rows_of_gates))
    return {"gated_delta.qkvz": (channels, gates)}


_QWEN3_5_GGUF = GgufArchitecture(
    "qwen35",
    keys=(*_GGUF_KEYS, _GGUF_SECTIONS),
    names={"mlp.norm": "blk.{layer}.post_attention_norm"},
    partial_rotary=True,
    uneven=True,
    parts=_tile_value_heads,
    read=_read_gguf_with_sections,
    write=_write_gguf_with_sections,
    refused={
        "delta rules whose keys and values differ in size": lambda config: (
            config.gated_delta is not None
            and config.gated_delta.key_dim != config.gated_delta.value_dim
        ),
        f"an epsilon of norms other than {_LENGTH_EPS:g}": lambda config: (
            config.norm_eps != _LENGTH_EPS
        ),
        # llama.cpp ends the process.
        "convolutions of one token": lambda config: (
            config.gated_delta is not None and config.gated_delta.convolution == 1
        ),
    },
)
_EXPERTS_GGUF_KEYS = (*EXPERT_KEYS, "expert_shared_feed_forward_length")
_QWEN3_5_MOE_GGUF = replace(
    _QWEN3_5_GGUF,
    name="qwen35moe",
    keys=(*_QWEN3_5_GGUF.keys, *_EXPERTS_GGUF_KEYS),
    normalized=True,
)
_QWEN3_NEXT_GGUF = replace(
    _QWEN3_5_MOE_GGUF,
    name="qwen3next",
    keys=(*_GGUF_KEYS, *_EXPERTS_GGUF_KEYS),
    names={**_QWEN3_5_GGUF.names, "gated_delta.qkvz": _GGUF_CHANNELS},
    parts=_divide_joined_linear,
    older_names={"gated_delta.qkvz": "blk.{layer}.ssm_in"},
    read=_read_gguf,
    write=_write_gguf,
)


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (keys.ATTENTION_BIAS, Keys(_read_mixers, _write_mixers), keys.PARTIAL_ROTARY),
    options={
        "qk_norm": "head",
        "norm_offset": 1.0,
        # Of transformers, if the keys are absent.
        "head_dim": 256,
        "partial_rotary": 0.25,
        "attention_gate": True,
        "leading_rotary": True,
    },
    prepare=_prepare,
    gguf=_QWEN3_5_GGUF,
)


def _prepare_moe(settings: Settings) -> Settings:
    """Do the same; configs state no width of a dense feed-forward, which no layer has."""
    prepared = _prepare(settings)
    width = prepared.values.get("moe_intermediate_size")
    return Settings({**prepared.values, "intermediate_size": width}, settings.path)


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    keys=(
        *QWEN3_5.keys,
        keys.experts(
            size_key="moe_intermediate_size",
            shared_key="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
    prepare=_prepare_moe,
    names=QWEN2_MOE.names,
    gguf=_QWEN3_5_MOE_GGUF,
)


def _read_joined_mixers(settings: Settings) -> dict[str, Any]:
    """Do as `_read_mixers`, for delta rules whose projections are joined key head by key head."""
    read = _read_mixers(settings)
    return {**read, "gated_delta": replace(read["gated_delta"], joined=True)}


QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    keys=(
        keys.ATTENTION_BIAS,
        Keys(_read_joined_mixers, _write_mixers),
        keys.PARTIAL_ROTARY,
        keys.experts(
            size_key="moe_intermediate_size",
            shared_key="shared_expert_intermediate_size",
            norm_key="norm_topk_prob",
            normalized=True,
            shared_gate=True,
        ),
        keys.SPARSE_LAYERS,
    ),
    # Unlike Qwen3.5, it reads no images.
    prepare=lambda settings: settings,
    names=QWEN2_MOE.names,
    prediction="mtp.",
    in_mlx=False,
    gguf=_QWEN3_NEXT_GGUF,
)
