"""What llama.cpp knows of a family: what a GGUF file of it can state, and what llama.cpp computes of that.

Sources: llama.cpp's converter (what it writes for each family) and its loader (what it does with it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.json_values import Settings

WINDOWED_BASE = "rope.freq_base_swa"
"""The rotary base of layers with a window."""
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
ALL_BIASES = ("qkv", "output", "mlp")
MAX_MULTIPLIER = 1e6


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp; families may share one.

    Attributes:
        name: the value of ``general.architecture``.
        keys: its keys in addition to those that all architectures have, without its name.
        interleaved_rotary: whether the two rows of a rotary pair are adjacent.
        fused: roles of linears that are stored as one tensor.
        window_period: if a file does not say which layers have a window: all but the last of each period; None if
            llama.cpp ignores windows.
        default_window: the width where a file states none; such an architecture cannot do without.
        biases: the linears that may have one: ``qkv``, ``output`` (of attention), ``mlp``.
        rope_freqs: whether it supports a factor for each frequency, as in Llama 3.
        long_rope: whether it supports LongRoPE's factors.
        partial_rotary: whether some dimensions of a head may stay unrotated.
        normalized: whether the weights of a token's experts add up to 1; None if it has no experts.
        dense_too: whether files without experts exist as well.
        tied: True if the head always is the embedding, False if it never is, None if files without a head exist.
        full_width: whether the widths of all heads must add up to the hidden size.
        wide_scale_layers: the number of layers at which attention is scaled by the hidden size over the heads.
        one_rotary_base: whether layers with a window use the base of the others.
        refused: features that llama.cpp does not compute, by their description in errors.
        read: keys of config.json that follow from a file's own keys and the size of its heads.
    """

    name: str
    keys: tuple[str, ...] = ()
    interleaved_rotary: bool = False
    fused: tuple[str, ...] = ()
    window_period: int | None = None
    default_window: int | None = None
    biases: tuple[str, ...] = ()
    rope_freqs: bool = False
    long_rope: bool = False
    partial_rotary: bool = False
    normalized: bool | None = None
    dense_too: bool = False
    tied: bool | None = None
    full_width: bool = False
    wide_scale_layers: int | None = None
    one_rotary_base: bool = False
    refused: Mapping[str, Callable[[ModelConfig], bool]] = field(default_factory=dict)
    read: Callable[[Settings, int], dict[str, Any]] = lambda keys, head_dim: {}


def optional_number(keys: Settings, key: str) -> float | None:
    """A multiplier or soft cap; absent, null and 0 are None."""
    return (keys.number(key, 0, MAX_MULTIPLIER) or None) if keys.has(key) else None
