"""What a model's folder states about it: its schemes and size, and the certificate of its
quantization.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, QuantkitError
from quantkit.formats.detect import WeightKind
from quantkit.jobs.inspect import inspect
from quantkit.quality.figures import average_estimates, manifest_or_empty
from quantkit.quality.gate import Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.tensors.dtypes import FLOATS

_INSPECTED = (
    "format",
    "architecture",
    "parameters",
    "weight_bytes",
    "bits_per_weight",
    "context",
    "tensors",
    "readers",
    "made_by",
)
_OF_TEXT = ("text", "tokens", "kl", "kl_error", "kl_bound", "top1_agreement", "rounding_kl")


def about(path: Path, weights: WeightKind | None = None) -> dict[str, Any]:
    """Return what the page shows of a model, as JSON values, from headers and the manifest alone.

    Args:
        path, weights: as for `quantkit.inspect`.

    Returns:
        Fields of `quantkit.Inspection`; ``scheme``, the schemes of the quantized tensors, None if
        all are floats; and ``certificate``, None where the folder has none. A folder that cannot be
        inspected has ``problem`` alone: the model may run nevertheless.
    """
    try:
        found = inspect(path, weights=weights)
    except QuantkitError as error:
        return {"problem": error.problem}
    floats = {str(dtype) for dtype in FLOATS}
    schemes = [kind for name in found.tensors if (kind := name.partition(" as ")[0]) not in floats]
    fields = {name: getattr(found, name) for name in _INSPECTED}
    certificate = _finite(_certificate(path, found.positions))
    return {**fields, "scheme": ", ".join(schemes) or None, "certificate": certificate}


def _finite(value: Any) -> Any:
    """Return a value with None for each NaN and Inf, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _certificate(path: Path, positions: PositionCertificate | None) -> dict[str, Any] | None:
    """Return how far a model is from its float model, on the texts of its gate and by position;
    None if nothing states it.
    """
    quality = manifest_or_empty(path).get("quality")
    try:
        gate = Gate.from_json(quality, path)
    except CheckpointError:
        # A float model, one that another program quantized, or weights only.
        return None
    tokens = [text.tokens for text in gate.texts]
    kl = average_estimates([text.kl_estimate for text in gate.texts], tokens)
    problem = gate.problem() or (None if positions is None else positions.problem())
    return {
        "passed": problem is None,
        "problem": None if problem is None else f"{problem[0]}: {problem[1]}, {problem[2]}",
        "kl": kl.value,
        "kl_error": kl.error,
        "kl_bound": min(text.kl_bound for text in gate.texts),
        "texts": [
            {
                **{name: getattr(text, name) for name in _OF_TEXT},
                "perplexity_ratio": text.perplexity_ratio.value,
            }
            for text in gate.texts
        ],
        "positions": None if positions is None else asdict(positions),
    }
