"""The methods of quantization whose weights are all read as floats, by their names and settings;
`dequantized` reads the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from quantkit.base.json_values import Settings
from quantkit.formats.codecs.codec import QuantMethod, Runtime
from quantkit.formats.codecs.layout import Claim, Claims, block_size
from quantkit.formats.codecs.layouts import FLOAT8
from quantkit.formats.codecs.targets import is_head, select_unskipped

MODEL_OPTIMIZER = "modelopt"
"""NVIDIA's method, of which only FP8 with a scale for each weight is read."""
BITSANDBYTES = "bitsandbytes"
# Settings that apply to all linears except the head.
_STATED_FOR_ALL = ("fbgemm_fp8", "fp8")


class FloatMethod(QuantMethod):
    """A method all of whose quantized weights are read as floats."""

    read_as_floats = True

    def __init__(self, name: str, *runtimes: Runtime) -> None:
        self.name = name
        self.runtimes = runtimes

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        if self.name not in _STATED_FOR_ALL:
            return Claims()
        block = block_size(settings, "weight_block_size")
        claim = Claim(FLOAT8, 8, symmetric=True, activations=True, block=block)
        claims: dict[str, Claim] = {}
        for module in select_unskipped(modules, settings):
            if not is_head(module):
                claims[module] = claim
        return Claims(claims, certain=True)


METHODS = (
    FloatMethod(BITSANDBYTES, "transformers"),
    FloatMethod("fbgemm_fp8", "vllm", "transformers"),
    FloatMethod("fp8", "vllm", "transformers"),
    FloatMethod(MODEL_OPTIMIZER, "vllm", "mlx"),
    FloatMethod("mxfp4", "vllm", "transformers", "mlx"),
)
"""In the order of messages."""
NAMES = frozenset(method.name for method in METHODS)


def read_method(settings: Settings) -> str | None:
    """Read the method of quantization that settings state; None if they do not."""
    if settings.has("quant_method"):
        return settings.string("quant_method")
    # Early settings of bitsandbytes do not name it.
    for key in ("load_in_4bit", "load_in_8bit"):
        if settings.flag(key, False):
            return BITSANDBYTES
    return None


def iter_weight_groups(
    settings: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the groups of compressed-tensors that quantize weights, and what they say of these."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        return
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield group, weights


def uses_small_floats(settings: Mapping[str, Any]) -> bool:
    """Return whether settings of a quantization say that weights are in small floats."""
    for _, weights in iter_weight_groups(settings):
        if weights.get("type") == "float":
            return True
    return settings.get("quant_method") in NAMES
