"""AutoRound's own ``quant_method``: layouts of GPTQ and AWQ, whose settings it says in its own words.

Source: the package auto_round, its export_to_autoround and inference.
"""

from __future__ import annotations

import re
from typing import Any

from quantkit.errors import UnsupportedError
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.json_values import Settings, shown

_PACKINGS = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
_FLOAT_BITS = 16
_PATTERN = re.compile(r"\.\*|[][^$|()?+\\]")  # what only patterns of modules have, not names


class AutoRound(QuantMethod):
    """``quant_method: auto-round``: read as GPTQ or AWQ."""

    name = "auto-round"

    def resolve(self, settings: Settings) -> tuple[str, Settings]:
        found = plain(settings)
        return found.string("quant_method"), found


def plain(settings: Settings) -> Settings:
    """The settings of GPTQ or AWQ that say the same.

    Raises:
        UnsupportedError: for its other packings, values that are no integers, activations of few bits, rotated
            weights, and several schemes in AWQ.
        CheckpointError: if the settings lack a key, or a value is of the wrong type.
    """
    packing = settings.string("packing_format")
    if packing not in _PACKINGS:
        raise UnsupportedError(
            "this packing of AutoRound is not read", path=settings.path, found=shown(packing),
            expected=", ".join(_PACKINGS), hint="export the model with the format auto_round:auto_gptq",
        )  # fmt: skip
    _require_weights_only(settings)
    if settings.values.get("rotation_config"):
        raise UnsupportedError("rotated weights of AutoRound are not read", path=settings.path)
    method, layout = _PACKINGS[packing]
    said = {key: settings.values.get(key) for key in ("bits", "group_size", "sym")}
    names: dict[str, dict[str, Any]] = {}
    patterns: dict[str, dict[str, Any]] = {}
    extra = settings.inside("extra_config") if settings.has("extra_config") else Settings({}, settings.path)
    for key in extra.values:
        one = extra.inside(key)
        if one.has("bits") and one.integer("bits", 1, 32) >= _FLOAT_BITS:
            own, sign = {}, "-"
        else:
            _require_weights_only(one)
            own, sign = {name: one.values[name] for name in said if one.has(name)}, "+"
            if method == "awq" and any(own[name] != said[name] for name in own):
                raise UnsupportedError(
                    "AWQ of several schemes is not read", path=settings.path, found=f"{shown(key)}: {shown(own)}",
                    expected="one scheme", hint="export the model with the format auto_round:auto_gptq",
                )  # fmt: skip
        if _PATTERN.search(key):
            patterns[f"{sign}:.*(?:{key})"] = own
        else:
            names[f"{sign}:{re.escape(key)}$"] = own
    said |= {"quant_method": method, "lm_head": "lm_head" in extra.values}
    if method == "awq":
        said |= {"version": layout, "zero_point": not settings.flag("sym", True)}
    else:
        said |= {"checkpoint_format": layout, "dynamic": names | patterns}
    return Settings(said, settings.path, settings.name)


def _require_weights_only(settings: Settings) -> None:
    if settings.has("data_type") and settings.string("data_type") != "int":
        raise UnsupportedError(
            "AutoRound's weights are of a type that is not read", path=settings.path,
            found=shown(settings.values["data_type"]), expected="int",
        )  # fmt: skip
    if settings.has("act_bits") and settings.integer("act_bits", 1, 32) < _FLOAT_BITS:
        raise UnsupportedError(
            "AutoRound's activations of few bits are not read", path=settings.path,
            found=f"{settings.values['act_bits']} bits", expected=f"{_FLOAT_BITS} bits",
        )  # fmt: skip
