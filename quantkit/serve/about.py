"""Describe a model from its folder: schemes, size, and the certificate of its quantization."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, QuantkitError
from quantkit.formats.detect import WeightKind
from quantkit.jobs.inspect import inspect
from quantkit.quality.figures import average_estimates, manifest_or_empty
from quantkit.quality.gate_result import Gate
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
    """Collect what the page shows of a model, as JSON values, from headers and the manifest alone.

    Args:
        path, weights: as for `quantkit.inspect`.

    Returns:
        Fields of `quantkit.Inspection`; ``scheme``, the schemes of the quantized tensors, None if
        all are floats; and ``certificate``, None if the folder has none. For a folder that cannot
        be inspected only ``problem``: the model may run nevertheless.
    """
    try:
        inspection = inspect(path, weights=weights)
    except QuantkitError as error:
        return {"problem": error.problem}
    floats = {str(dtype) for dtype in FLOATS}
    schemes: list[str] = []
    for kind in inspection.tensors:
        # For a tensor that is converted when it is read, the stored type comes first.
        scheme = kind.partition(" as ")[0]
        if scheme not in floats:
            schemes.append(scheme)
    facts: dict[str, Any] = {}
    for name in _INSPECTED:
        facts[name] = getattr(inspection, name)
    facts["scheme"] = ", ".join(schemes) or None
    facts["certificate"] = _finite(_certificate(path, inspection.positions))
    return facts


def _finite(value: Any) -> Any:
    """Replace each NaN and Inf in a JSON value by None, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _certificate(path: Path, positions: PositionCertificate | None) -> dict[str, Any] | None:
    """Read how far a model is from its float model, on the texts of its gate and by position.

    Returns None if the manifest does not tell.
    """
    quality = manifest_or_empty(path).get("quality")
    try:
        gate = Gate.from_json(quality, path)
    except CheckpointError:
        # A float model, one that another program quantized, or weights only.
        return None
    # The mean over all tokens, whatever text they are from.
    tokens = [text.tokens for text in gate.texts]
    kl = average_estimates([text.kl_estimate for text in gate.texts], tokens)
    problem = gate.problem()
    if not problem and positions is not None:
        problem = positions.problem()
    texts: list[dict[str, Any]] = []
    for text in gate.texts:
        facts: dict[str, Any] = {}
        for name in _OF_TEXT:
            facts[name] = getattr(text, name)
        facts["perplexity_ratio"] = text.perplexity_ratio.value
        texts.append(facts)
    return {
        "passed": problem is None,
        "problem": None if problem is None else f"{problem[0]}: {problem[1]}, {problem[2]}",
        "kl": kl.value,
        "kl_error": kl.error,
        # Every text has to pass, so the strictest bound is shown.
        "kl_bound": min(text.kl_bound for text in gate.texts),
        "texts": texts,
        "positions": None if positions is None else asdict(positions),
    }
