"""What is measured of a quantized model once it is written."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.quality.gate_result import Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly


@dataclass(frozen=True)
class Measured:
    """What was measured of a result.

    Attributes:
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters.
        quality: the comparison with the source; by tensors if the model cannot be run.
        certificate: the loss by position; None if it was not requested.
        loading_problem: why transformers does not load the packed weights; None if it does, or if
            the model does not need it.
    """

    weight_bytes: int
    bits_per_weight: float
    quality: Gate | WeightsOnly
    certificate: PositionCertificate | None = None
    loading_problem: str | None = None
