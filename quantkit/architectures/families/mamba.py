"""Keys of config.json that families with Mamba-2 have in common.

Their description is the code of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quantkit.architectures.config import Limits, Mamba2Config, ModelConfig
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import INFINITY, Settings, format_value
from quantkit.errors import CheckpointError

LINEAR = "linear_attention"
"""The name of a layer with Mamba-2 in config.json."""
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers in older files, and today's names."""

GGUF_MAMBA = (
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
)
"""llama.cpp's keys of Mamba-2: its rank of step sizes is the number of heads."""

_LIMITS = "time_step_limit"
# Transformers' defaults, by the key in config.json.
_SIZES = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_BOUNDS = {
    "mamba_n_heads": Limits.heads,
    "mamba_n_groups": Limits.heads,
    "mamba_d_state": Limits.heads,
    "mamba_d_conv": Limits.convolution,
    "mamba_expand": Limits.heads,
}
_MAX_STEP = 1e6


def find_mixers(kinds: Sequence[str], settings: Settings) -> list[str]:
    """Find the mixers of layers of the given kinds, whose older names are accepted.

    Raises:
        CheckpointError: if a kind is unknown, or there is not one for each layer.
    """
    count = settings.integer("num_hidden_layers", 1, Limits.layers)
    current = [OLDER_KINDS.get(kind, kind) for kind in kinds]
    if len(current) != count or set(current) - {FULL, LINEAR}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(list(kinds)),
            expected=f"{FULL} or {LINEAR} for each of {count}",
        )
    mixers = []
    for kind in current:
        mixers.append("mamba2" if kind == LINEAR else "attention")
    return mixers


def list_kinds(config: ModelConfig) -> list[str]:
    """List the kinds of layers, as `find_mixers` reads them."""
    kinds = []
    for layer in config.layers:
        kinds.append(FULL if layer.mixer == "attention" else LINEAR)
    return kinds


def read_mamba(settings: Settings) -> Mamba2Config:
    """Read the settings of Mamba-2 by the names that Granite 4 and Bamba give them.

    Raises:
        CheckpointError: if a value has the wrong type or is out of range, or sizes do not fit.
    """
    sizes = {}
    for key, default in _SIZES.items():
        sizes[key] = default
        # transformers fails if one of them is null.
        if key in settings.values:
            sizes[key] = settings.integer(key, 1, _BOUNDS[key])
    heads = sizes["mamba_n_heads"]
    width = sizes["mamba_expand"] * settings.integer("hidden_size", 1, Limits.width)
    key = "mamba_d_head"
    if settings.values.get(key, "auto") == "auto":
        head_size = width // heads
    else:
        head_size = settings.integer(key, 1, Limits.width)
    if heads * head_size != width:
        raise CheckpointError(
            "the heads of Mamba do not fill its width",
            path=settings.path,
            found=f"{heads} of {head_size}",
            expected=f"mamba_expand x hidden_size = {width}",
        )
    mamba = Mamba2Config(
        heads=heads,
        head_size=head_size,
        groups=sizes["mamba_n_groups"],
        state_size=sizes["mamba_d_state"],
        convolution=sizes["mamba_d_conv"],
        # Null is false, as in Python.
        convolution_bias=settings.flag("mamba_conv_bias", "mamba_conv_bias" not in settings.values),
        bias=settings.flag("mamba_proj_bias", False),
        step_limits=_read_limits(settings),
    )
    require_groups(mamba, settings)
    return mamba


def write_mamba(config: ModelConfig) -> dict[str, Any]:
    """Write the keys that `read_mamba` reads."""
    assert config.mamba2 is not None
    return list_mamba_keys(config.mamba2, config.hidden_size)


def list_mamba_keys(mamba: Mamba2Config, hidden_size: int) -> dict[str, Any]:
    """List the settings of Mamba-2 as `read_mamba` reads them."""
    largest_step = mamba.step_limits[1]
    return {
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_size,
        "mamba_n_groups": mamba.groups,
        "mamba_d_state": mamba.state_size,
        "mamba_d_conv": mamba.convolution,
        "mamba_expand": mamba.inner_size // hidden_size,
        "mamba_conv_bias": mamba.convolution_bias,
        "mamba_proj_bias": mamba.bias,
        _LIMITS: [mamba.step_limits[0], INFINITY if largest_step == math.inf else largest_step],
    }


def read_gguf_mamba(gguf: Settings) -> Mamba2Config:
    """Read Mamba-2 from the keys `GGUF_MAMBA` of a GGUF file.

    Raises:
        CheckpointError: if a value has the wrong type or is out of range, or sizes do not fit.
    """
    convolution, inner, state_size, heads, groups = (
        gguf.integer(key, 1, Limits.width) for key in GGUF_MAMBA
    )
    if inner % heads:
        raise CheckpointError(
            "the heads of Mamba do not fill its width",
            path=gguf.path,
            found=f"{heads} heads of {inner} in all",
        )
    return Mamba2Config(heads, inner // heads, groups, state_size, convolution)


def write_gguf_mamba(config: ModelConfig) -> dict[str, Any]:
    """Write the keys `GGUF_MAMBA`."""
    mamba = config.mamba2
    assert mamba is not None
    values = (
        mamba.convolution,
        mamba.inner_size,
        mamba.state_size,
        mamba.heads,
        mamba.groups,
    )
    return dict(zip(GGUF_MAMBA, values, strict=True))


def has_one_mixer(config: ModelConfig) -> bool:
    """Return whether no layer has Mamba-2, or none has attention; llama.cpp ends its process when
    it runs such a hybrid.
    """
    mixers = {layer.mixer for layer in config.layers}
    return not mixers >= {"attention", "mamba2"}


def _lacks_convolution_bias(config: ModelConfig) -> bool:
    return config.mamba2 is not None and not config.mamba2.convolution_bias


def _has_linear_biases(config: ModelConfig) -> bool:
    return config.mamba2 is not None and config.mamba2.bias


GGUF_REFUSED = {
    "convolutions of Mamba without biases": _lacks_convolution_bias,
    "biases of Mamba's linears": _has_linear_biases,
}
"""What llama.cpp does not compute in Mamba-2, as `GgufArchitecture.refused`."""


def require_groups(mamba: Mamba2Config, settings: Settings) -> None:
    """Raise `CheckpointError` if the heads cannot be divided among the groups."""
    if mamba.heads % mamba.groups:
        raise CheckpointError(
            "the heads of Mamba are not a multiple of its groups",
            path=settings.path,
            found=f"{mamba.heads} and {mamba.groups}",
        )


def _read_limits(settings: Settings) -> tuple[float, float]:
    """Read the range of step sizes: two numbers, the second of which may be infinite."""
    if _LIMITS not in settings.values:
        return 0.0, math.inf
    limits = settings.values[_LIMITS]
    if not isinstance(limits, list) or len(limits) != 2:
        settings.wrong_type(_LIMITS, "two numbers")
    numbers = [math.inf if limit == INFINITY else limit for limit in limits]
    if not all(type(limit) in (int, float) for limit in numbers):
        settings.wrong_type(_LIMITS, "two numbers")
    if not 0 <= numbers[0] <= min(numbers[1], _MAX_STEP):
        raise CheckpointError(
            f"'{_LIMITS}' is out of range",
            path=settings.path,
            found=format_value(limits),
            expected=f"two rising numbers from 0, the first at most {_MAX_STEP:g}",
        )
    return float(numbers[0]), float(numbers[1])
