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
from quantkit.base.progress import Progress
from quantkit.doctor.findings import Finding, LayerError, finding
from quantkit.doctor.folder import Folder
from quantkit.errors import QuantkitError, RequestError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import read_as_floats, resolve_stored_name, schemes
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_pair
from quantkit.quality.bounds import coarsest, same_bits, same_but_rounded, same_norms, weight_bound
from quantkit.quality.transcoded import offset_of
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, float_rows, frobenius, row_chunks

_TIMES_USUAL = 3.0
"""The largest error, in multiples of the model's median, of a weight in codes that are read as
floats.
"""


def check(
    folder: Folder, source: Path, progress: Progress
) -> tuple[list[Finding], list[LayerError]]:
    """Return what is wrong with tensors, compared with those of the source, and how far each linear
    is from it, the farthest first. A quantized source is a `RequestError`.
    """
    where = folder.path.name
    try:
        reference, patient = open_pair(source, folder.path)
    except QuantkitError as error:
        return [finding("other-model", where, str(error))], []
    if schemes(reference) or read_as_floats(reference):
        raise RequestError(
            "`against` is quantized itself",
            path=source,
            expected="the float model that this one was made of",
        )
    configs = [replace(one.config, tied_embeddings=False) for one in (reference, patient)]
    if differences := configs[0].differences(configs[1]):
        return [finding("other-model", where, difference) for difference in differences], []
    compared = _Comparison(reference, patient)
    try:
        findings = list(compared.iter_findings(progress))
    except QuantkitError as error:  # in a part that is read only now
        findings = [finding("other-model", where, str(error))]
    return findings, sorted(compared.layers, key=lambda layer: -layer.error)


class _Comparison:
    def __init__(self, reference: StoredCheckpoint, patient: StoredCheckpoint) -> None:
        self.reference = reference
        self.patient = patient
        self.layers: list[LayerError] = []
        # Errors of weights in codes that are read as floats.
        self._encoded: dict[str, float] = {}
        self._coarsest = coarsest(found) if (found := schemes(patient).values()) else None

    def iter_findings(self, progress: Progress) -> Iterator[Finding]:
        listed = parameters(replace(self.reference.config, tied_embeddings=False))
        for index, parameter in enumerate(listed):
            progress("against", index, len(listed), "tensors")
            yield from self._tensor(parameter.name)
        progress("against", len(listed), len(listed), "tensors")
        if self._encoded:
            usual = statistics.median(self._encoded.values())
        else:
            usual = 0.0
        for name, error in self._encoded.items():
            bound = _TIMES_USUAL * usual
            self.layers.append(LayerError(name, error, bound))
            if not error <= bound:
                yield finding(
                    "out-of-line", name, f"relative error {error:.3g}, {usual:.3g} is usual"
                )

    def _tensor(self, name: str) -> Iterator[Finding]:
        before, after = (
            one.load(resolve_stored_name(one, name)) for one in (self.reference, self.patient)
        )
        if isinstance(before, QuantTensor):
            before = before.dequantize()
        if isinstance(after, Tensor):
            cast = (
                before.dtype != after.dtype and before.dim() > 0 and same_but_rounded(before, after)
            )
            dtypes = [DType(model.config.dtype) for model in (self.reference, self.patient)]
            same_norm = same_norms(before, after, offset_of(self.reference.config, name), dtypes)
            if cast or same_norm or same_bits(before, after):
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
        if (
            self.patient.count_stored_bytes(stored)
            != StoredTensor(stored, spec.dtype, spec.shape).nbytes
        ):
            self._encoded[module] = error
        else:
            yield finding("changed", name, f"relative difference {error:.3g}")


def _relative_error(before: Tensor, after: Tensor | QuantTensor) -> float:
    """Frobenius norm of the difference over that of the source; NaN where a value is."""
    if tuple(before.shape) != tuple(after.shape):
        return math.inf
    if isinstance(after, Tensor) and before.dim() < 2:
        before = before.reshape(1, -1)
        after = after.reshape(1, -1)
    error = norm = 0.0
    for start, stop in row_chunks(before.shape[0], math.prod(before.shape[1:])):
        own = before[start:stop].float()
        error = math.hypot(error, frobenius(float_rows(after, start, stop) - own))
        norm = math.hypot(norm, frobenius(own))
    if norm:
        return error / norm
    if error:
        return math.inf
    return 0.0
