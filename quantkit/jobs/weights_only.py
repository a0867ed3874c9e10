"""Quantizing a model that cannot be run: what rounding would change too much keeps its floats."""

from __future__ import annotations

import math
import re

from quantkit.architectures.config import ModelConfig
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.inspect import count_text
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.progress import Progress
from quantkit.quality.bounds import ROUNDING_BOUNDS
from quantkit.tensors.dtypes import DType
from quantkit.tensors.spec import TensorSpec

_PARTS = {"tower": "linears of parts for pictures or sound", "head": "output heads"}
_EXPERTS = re.compile(r"(.*\.)?[^.]*experts?[^.]*(\..*)?")


def kept_parts(config: ModelConfig) -> list[str]:
    """What of a model known by its tensors only is not rounded though it is large, in a few words for people."""
    counts: dict[str, list[int]] = {}
    for tensor in config.tensors or ():
        stacked = not tensor.role and len(tensor.shape) > 2 and _EXPERTS.fullmatch(tensor.name)
        part = "stacked experts" if stacked else _PARTS.get(tensor.role)
        if part is not None:
            counts.setdefault(part, []).append(math.prod(tensor.shape))
    return [
        f"{part}: {count_text(sum(sizes))} parameters in {len(sizes)} tensor{'s' * (len(sizes) > 1)}"
        for part, sizes in counts.items()
    ]


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
