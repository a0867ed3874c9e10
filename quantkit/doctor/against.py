"""Compare each linear with its float source, and find tensors that changed although they should
not have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress
from quantkit.doctor.findings import Finding, LayerError, finding
from quantkit.doctor.folder import Folder
from quantkit.errors import QuantkitError, RequestError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import list_uncarried_weights, resolve_stored_name, schemes
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_pair
from quantkit.quality.bounds import coarsest, same_bits, same_but_rounded, weight_bound
from quantkit.quality.transcoded import same_in_gguf
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, float_rows, frobenius, row_chunks

_TIMES_USUAL = 3.0
"""The largest error, in multiples of the model's median, of a weight in codes that are read as
floats.
"""


def check(
    folder: Folder, source: Path, progress: Progress
) -> tuple[list[Finding], list[LayerError]]:
    """Compare the tensors with those of the source: return findings, and the error of each linear,
    the largest first. A quantized source is a `RequestError`.
    """
    location = folder.path.name
    try:
        reference, patient = open_pair(source, folder.path)
    except QuantkitError as error:
        return [finding("other-model", location, str(error))], []
    if schemes(reference) or list_uncarried_weights(reference):
        raise RequestError(
            Message(Option("against"), " is quantized itself"),
            path=source,
            expected="the float model that this one was made of",
        )
    # A converter may store the head apart from a tied embedding: `_Comparison` then compares both
    # with the same tensor of the source.
    reference_config = replace(reference.config, tied_embeddings=False)
    patient_config = replace(patient.config, tied_embeddings=False)
    differences = reference_config.differences(patient_config)
    if differences:
        return [finding("other-model", location, difference) for difference in differences], []
    comparison = _Comparison(reference, patient)
    try:
        findings = list(comparison.iter_findings(progress))
    except QuantkitError as error:
        # Opening reads only headers, so damage of the values appears while they are compared.
        findings = [finding("other-model", location, str(error))]
    return findings, sorted(comparison.layers, key=lambda layer: -layer.error)


class _Comparison:
    def __init__(self, reference: StoredCheckpoint, patient: StoredCheckpoint) -> None:
        self.reference = reference
        self.patient = patient
        self.layers: list[LayerError] = []
        # Errors of weights in codes that are read as floats.
        self._encoded: dict[str, float] = {}
        patient_schemes = schemes(patient).values()
        self._coarsest = coarsest(patient_schemes) if patient_schemes else None

    def iter_findings(self, progress: Progress) -> Iterator[Finding]:
        listed = parameters(replace(self.reference.config, tied_embeddings=False))
        for index, parameter in enumerate(listed):
            progress("against", index, len(listed), "tensors")
            yield from self._tensor(parameter.name)
        progress("against", len(listed), len(listed), "tensors")
        # quantkit does not know the rounding error of these formats. The median of the model's own
        # errors stands in for it, so these findings come after all tensors are read.
        if self._encoded:
            usual = statistics.median(self._encoded.values())
        else:
            usual = 0.0
        for name, error in self._encoded.items():
            bound = _TIMES_USUAL * usual
            self.layers.append(LayerError(name, error, bound))
            # A NaN fails every comparison, so `error > bound` would accept it.
            if not error <= bound:
                yield finding(
                    "out-of-line", name, f"relative error {error:.3g}, {usual:.3g} is usual"
                )

    def _tensor(self, name: str) -> Iterator[Finding]:
        before = self.reference.load(resolve_stored_name(self.reference, name))
        after = self.patient.load(resolve_stored_name(self.patient, name))
        if isinstance(before, QuantTensor):
            before = before.dequantize()
        if isinstance(after, Tensor) and self._is_unchanged(name, before, after):
            return
        error = _relative_error(before, after)
        module = name.removesuffix(".weight")
        if isinstance(after, QuantTensor):
            bound = weight_bound(after, before, self._coarsest or after.scheme)
            self.layers.append(LayerError(module, error, bound))
            if not error <= bound:
                yield finding(
                    "out-of-line",
                    module,
                    f"relative error {error:.3g}; rounding explains {bound:.3g}",
                )
            return
        stored = resolve_stored_name(self.patient, name)
        spec = self.patient.info(stored)
        # Floats take as many bytes as their shape and dtype say; codes that are decoded while they
        # are read take fewer.
        float_bytes = StoredTensor(stored, spec.dtype, spec.shape).nbytes
        if self.patient.count_stored_bytes(stored) != float_bytes:
            self._encoded[module] = error
        else:
            yield finding("changed", name, f"relative difference {error:.3g}")

    def _is_unchanged(self, name: str, before: Tensor, after: Tensor) -> bool:
        """Compare a tensor with its source, up to a cast and to how its family stores norms."""
        if before.dtype != after.dtype and before.dim() > 0 and same_but_rounded(before, after):
            return True
        dtypes = [DType(self.reference.config.dtype), DType(self.patient.config.dtype)]
        if same_in_gguf(self.reference.config, name, before, after, dtypes):
            return True
        return same_bits(before, after)


def _relative_error(before: Tensor, after: Tensor | QuantTensor) -> float:
    """Divide the Frobenius norm of the difference by that of the source; NaN if a value is NaN."""
    if tuple(before.shape) != tuple(after.shape):
        return math.inf
    if isinstance(after, Tensor) and before.dim() < 2:
        before = before.reshape(1, -1)
        after = after.reshape(1, -1)
    error = norm = 0.0
    # `after` is decoded in chunks of rows, so a large tensor is never all in float32.
    for start, stop in row_chunks(before.shape[0], math.prod(before.shape[1:])):
        source_rows = before[start:stop].float()
        error = math.hypot(error, frobenius(float_rows(after, start, stop) - source_rows))
        norm = math.hypot(norm, frobenius(source_rows))
    if norm:
        return error / norm
    if error:
        return math.inf
    return 0.0
