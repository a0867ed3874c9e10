"""Quantizing a model that cannot be run: what rounding would change too much keeps its floats."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from quantkit.architectures.config import ModelConfig, OpaqueTensor
from quantkit.architectures.families.opaque import HEADS, ROUTERS, is_extra_layer, is_table
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.inspect import count_text
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.progress import Progress
from quantkit.quality.bounds import ROUNDING_BOUNDS
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.spec import TensorSpec

_PARTS = {"tower": "linears of parts for pictures or sound", "head": "output heads"}
_EXPERTS = re.compile(r"(.*\.)?[^.]*experts?[^.]*(\..*)?")
_SMALL_SHARE = 0.005
_NAMED = 4


def kept_parts(config: ModelConfig, raw: Mapping[str, Any]) -> list[str]:
    """What of a model known by its tensors only is not rounded though it is large, in a few words for people.

    Args:
        raw: its config.json.
    """
    sizes = {tensor.name: math.prod(tensor.shape) for tensor in config.tensors or ()}
    total = max(1, sum(sizes.values()))
    parts: dict[str, dict[str, list[int]]] = {}
    for tensor in config.tensors or ():
        part = _part(tensor, raw)
        if part is not None:
            alike = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
            parts.setdefault(part, {}).setdefault(alike, []).append(sizes[tensor.name])
    found = []
    for part, names in parts.items():
        if part == _OTHERS:
            names = {name: own for name, own in names.items() if sum(own) >= _SMALL_SHARE * total}
        count, size = sum(map(len, names.values())), sum(map(sum, names.values()))
        if count:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = f"{', '.join(sorted(names, key=lambda name: -sum(names[name]))[:_NAMED])}{more}"
            found.append(
                f"{part}: {count_text(size)} parameters in {count} tensor{'s' * (count > 1)} ({listed}),"
                f" {size / total:.1%} of the parameters"
            )
    return found


_OTHERS = "other matrices"


def _part(tensor: OpaqueTensor, raw: Mapping[str, Any]) -> str | None:
    """What a tensor that stays as it is belongs to, in words; None for one that is rounded, or no matrix of floats."""
    if tensor.role in _PARTS:
        return _PARTS[tensor.role]
    last = tensor.module.rpartition(".")[2]
    if tensor.role == "linear" or last in ROUTERS or (tensor.role == "float" and last in HEADS):
        return None
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or is_table(tensor.name):
        return "further layers for prediction" if not tensor.role and is_extra_layer(tensor.name, raw) else None
    if is_extra_layer(tensor.name, raw):
        return "further layers for prediction"
    return "stacked experts" if len(tensor.shape) > 2 and _EXPERTS.fullmatch(tensor.name) else _OTHERS


def within_bounds(
    source: Checkpoint, scheme_map: SchemeMap, *, allow_nonfinite: bool, progress: Progress
) -> tuple[SchemeMap, list[str]]:  # fmt: skip
    """Round every weight once, before anything is written, and leave out those that lose more than `ROUNDING_BOUNDS`.

    Returns:
        What is quantized, and notes on what is not.

    Raises:
        NonFiniteError: if a weight holds NaN or Inf.
        QualityError: if none may be quantized.
    """
    scale_dtype, schemes = DType(source.config.dtype), scheme_map.schemes
    specs = (
        TensorSpec(f"{module}.weight", source.info(f"{module}.weight").shape, scale_dtype, scheme)
        for module, scheme in schemes.items()
    )
    quantizer = RtnQuantizer(source, allow_nonfinite=allow_nonfinite)
    too_far = {}
    for index, spec in enumerate(specs):
        progress("rounding errors", index, len(schemes), "weights")
        for name, _, record in quantizer.solve(TensorBlock(None, (spec,))):
            assert record is not None
            assert spec.scheme is not None
            error, bound = float(str(record["relative_error"])), ROUNDING_BOUNDS[f"int{spec.scheme.bits}"]
            if not error <= bound:
                too_far[name.removesuffix(".weight")] = (
                    f"rounding to {spec.scheme} changes it by {error:.3g} of its norm, more than {bound:g}"
                )
    progress("rounding errors", len(schemes), len(schemes), "weights")
    if not too_far:
        return scheme_map, []
    left = scheme_map.without(too_far)
    module, reason = next(iter(too_far.items()))
    more = f", and so do {len(too_far) - 1} more" if len(too_far) > 1 else ""
    return left, [f"{source.path}: '{module}' keeps its floats: {reason}{more}"]
