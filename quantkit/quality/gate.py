"""The gate: a quantized model is compared with its source, and with the RTN baseline, before it
gets its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.architectures.names import EMBEDDING
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import QualityError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView, schemes
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.model.shared_scales import SharedScales
from quantkit.quality.bounds import (
    BOUNDS,
    MAX_ERROR,
    build_gate_windows,
    coarsest,
    scheme_bound,
    weight_bound,
    with_inputs,
    worst_row,
)
from quantkit.quality.figures import round_figure
from quantkit.quality.gate_result import Gate, TextResult
from quantkit.quality.measures import Hidden, Windows, collect_tallies
from quantkit.solver.rounding import Importance, round_to_nearest
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import ROUNDED, QuantTensor, Solver, quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.via_transformers.forward import final_hidden

if TYPE_CHECKING:
    from quantkit.quality import transcoded
else:
    transcoded = LateModule("quantkit.quality.transcoded")

_TRAINED = (Solver.SCALES_TRAINED, Solver.CODES_TRAINED)
_NUM_WORST = 3
# The longest group of int4 in the baseline.
_COARSEST = 128

SLACK = 1.01
"""The largest KL of a result, in units of that of the RTN baseline."""
FLOOR = 1e-3
"""A KL below this is not compared with the baseline."""
CACHE_KL = BOUNDS["int8"].kl
"""What a KV cache in 8 bits may add to the KL of a result: as much as weights in 8 bits may
have.
"""


def run_gate(
    source: Checkpoint,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    *,
    requested: Mapping[str, QuantScheme] | None = None,
    importance: Callable[[], Importance] = dict,
    inputs: Mapping[str, InputRounding] = MappingProxyType({}),
    source_hidden: Hidden = final_hidden,
    progress: Progress = silent,
) -> Gate:
    """Compare a quantized model with its source on texts that are not for calibration.

    The mean KL must be within `BOUNDS` for the scheme that loses the most, and for the inputs if
    they are rounded; and, with a little slack, within that of the RTN baseline (`RtnBaseline`). A
    result that is its own baseline is run once. A source that is quantized itself has no baseline.
    A result with a quantized KV cache is run with it, the baseline without, and the cache may add
    `CACHE_KL` to its KL.

    Args:
        source: the float model, or a quantized one of which some tensors had to be rounded again.
        result: the quantized model.
        records: the manifest's entries on tensors, by name.
        requested: the scheme of each module; None is the result's own, which may have smaller
            groups that repeat a scale.
        importance: returns what `RtnQuantizer` rounded the result with.
        inputs: how runtimes round the inputs of linears, by module; the result and its baseline are
            run so too.
        source_hidden: returns the source's hidden states, for instance those that an earlier check
            has computed.

    Raises:
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    assigned = schemes(result) if requested is None else requested
    has_cache = result.kv_cache is not None and source.kv_cache is None
    candidates: list[Checkpoint] = [result]
    is_rounded = False
    if not schemes(source):
        scale_dtype = result.info(f"{next(iter(assigned))}.weight").dtype
        solvers = {record.get("solver") for record in records.values() if record}
        input_importance: Importance = {}
        if Solver.WEIGHTED in solvers:
            input_importance = importance()
        # Only to recognize a result that was just rounded; the baseline of any other rounds on
        # spanning scales.
        same_rounding = RtnBaseline(
            source,
            assigned,
            scale_dtype,
            searched=Solver.WEIGHTED in solvers or Solver.SEARCHED in solvers,
            importance=input_importance,
        )
        is_rounded = is_baseline(result, same_rounding, records)
        if not is_rounded:
            candidates.append(RtnBaseline(source, assigned, scale_dtype))
        elif has_cache:
            # The result with floats in its cache.
            candidates.append(same_rounding)
    if inputs:
        candidates = [RoundedInputs(candidate, inputs) for candidate in candidates]
    bound = with_inputs(scheme_bound(assigned.values()), inputs.values())
    gate_windows = build_gate_windows(source)
    tallies = collect_tallies(
        source,
        candidates,
        [Windows.of(windows) for _, windows in gate_windows.values()],
        reference_hidden=source_hidden,
        progress=progress,
    )
    texts: list[TextResult] = []
    for (name, (digest, _)), text_tallies in zip(gate_windows.items(), tallies, strict=True):
        quality = text_tallies[0].quality()
        rounding_kl: float | None = None
        limit = bound.kl
        if len(text_tallies) > 1:
            rounding_kl = text_tallies[1].quality().divergence.kl
            cache_kl = CACHE_KL if has_cache else 0
            limit = min(limit, max(FLOOR, SLACK * rounding_kl) + cache_kl)
        divergence = quality.divergence
        texts.append(
            TextResult(
                name,
                digest,
                divergence.tokens,
                kl=round_figure(divergence.kl),
                kl_p99=round_figure(divergence.kl_p99),
                kl_bound=round_figure(limit),
                top1_agreement=round_figure(divergence.top1_agreement),
                source_perplexity=round_figure(quality.reference_perplexity),
                perplexity=round_figure(quality.perplexity),
                kl_error=_round_optional(divergence.kl_error),
                ratio_error=_round_optional(quality.ratio_error),
                rounding_kl=_round_optional(rounding_kl),
            )
        )
    fallbacks: dict[str, str] = {}
    for name, record in records.items():
        if record and "fallback" in record:
            fallbacks[name.removesuffix(".weight")] = str(record["fallback"])
    return Gate(
        texts=texts,
        perplexity_ratio_bound=bound.perplexity_ratio,
        fallbacks=fallbacks,
        distorted=_find_distorted_layers(source, result, records, assigned, progress),
        is_rounded=is_rounded,
    )


def _round_optional(value: float | None) -> float | None:
    if value is None:
        return None
    return round_figure(value)


def require_passed(
    gate: Gate, source: Checkpoint, result: Checkpoint, dst: Path, remedy: str | None = None
) -> None:
    """Check that a model passed; `remedy` is the next step if it did not, and None is that of a
    quantization. Raises `QualityError` if it did not pass, naming the layers whose weights changed
    the most.
    """
    problem = gate.problem()
    if problem is None:
        return
    if remedy is None:
        if gate.is_rounded:
            solver: str = Message(Option("method", value="gptq"))
        elif all(_baseline_passes(text) for text in gate.texts):
            solver = Message("GPTQ with more text, or round with ", Option("method", value="rtn"))
        else:
            solver = "GPTQ with more text"
        if result.kv_cache is not None:
            cache: str = Message("leave ", Option("kv_cache"), " out, ")
        else:
            cache = ""
        remedy = Message(
            cache,
            "choose a finer scheme or ",
            solver,
            ", or keep it with ",
            Option("accept_quality_loss", value=True),
            " (and ",
            Option("resume", value=True),
            ")",
        )
    errors: list[tuple[float, str]] = []
    for module in schemes(result):
        errors.append((relative_error(*_load_pair(source, result, module)), module))
    errors.sort(reverse=True)
    worst = ", ".join(f"{module} ({error:.2g})" for error, module in errors[:_NUM_WORST])
    raise QualityError(
        problem[0],
        path=dst,
        found=problem[1],
        expected=problem[2],
        hint=Message(f"largest relative weight errors: {worst}; ", remedy),
    )


def _baseline_passes(text: TextResult) -> bool:
    return text.rounding_kl is not None and text.rounding_kl <= text.kl_bound


def _find_distorted_layers(
    source: Checkpoint,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    assigned: Mapping[str, QuantScheme],
    progress: Progress,
) -> dict[str, tuple[float, float]]:
    """Find the layers whose recorded errors exceed their bound: `MAX_ERROR` for those that were
    only rounded, else `weight_bound`; a layer without a recorded error counts as exceeding. An
    embedding exceeds it if any row does, as texts have few of the tokens.

    Returns:
        The error and its bound by module.
    """
    distorted: dict[str, tuple[float, float]] = {}
    coarsest_scheme = coarsest(assigned.values())
    for index, (module, scheme) in enumerate(assigned.items()):
        progress("weights", index, len(assigned), "linears")
        record = records.get(module + ".weight") or {}
        solver = record.get("solver")
        if module == EMBEDDING:
            error, bound = worst_row(*_load_pair(source, result, module))
        elif solver == Solver.CARRIED or (solver in _TRAINED and "relative_error" not in record):
            # Carried codes have no error. A trained model without a recorded one has other channels
            # than the float model, so that there is nothing to compare.
            continue
        else:
            error = float(record.get("relative_error", math.nan))
            if solver in (Solver.ROUNDING, Solver.SEARCHED, Solver.SCALES_CAST):
                # Its error is that of rounding, or less.
                bound = MAX_ERROR
            else:
                if solver == Solver.WEIGHTED:
                    compensated = scheme
                else:
                    compensated = coarsest_scheme
                bound = weight_bound(*_load_pair(source, result, module), compensated)
        if not error <= bound:
            distorted[module] = (round_figure(error), round_figure(bound))
    progress("weights", len(assigned), len(assigned), "linears")
    return distorted


def _load_pair(source: Checkpoint, result: Checkpoint, module: str) -> tuple[QuantTensor, Tensor]:
    """Load the weight of a module in the result, and in the source."""
    quantized = result.load(module + ".weight")
    weight = source.load(module + ".weight")
    assert isinstance(quantized, QuantTensor)
    if isinstance(weight, QuantTensor):
        weight = weight.dequantize()
    return quantized, weight


class RtnBaseline(CheckpointView):
    """The RTN baseline: a float checkpoint with some layers rounded to nearest when they are
    loaded, but int4 never in groups longer than 128.
    """

    def __init__(
        self,
        source: Checkpoint,
        assigned: Mapping[str, QuantScheme],
        scale_dtype: DType | None = None,
        *,
        searched: bool = False,
        importance: Importance = MappingProxyType({}),
    ) -> None:
        """
        Args:
            assigned: the schemes by module.
            scale_dtype: of its scales; None is the source's.
            searched: whether fewer than 8 bits are rounded on searched scales, as `method="rtn"`
                does, instead of those that span the groups.
            importance: of inputs by module, for the search.
        """
        super().__init__(source)
        self._scale_dtype = scale_dtype or DType(source.config.dtype)
        self._searched = searched
        self._importance = importance
        self._shared = SharedScales(source, assigned)
        self._assigned = {}
        for module, scheme in assigned.items():
            if scheme.bits == 4 and (scheme.group_size is None or scheme.group_size > _COARSEST):
                columns = source.info(module + ".weight").shape[1]
                scheme = QuantScheme(4, _COARSEST, scheme.symmetric).with_dividing_groups(columns)
            self._assigned[module] = scheme

    def info(self, name: str) -> TensorSpec:
        info = self._source.info(name)
        scheme = self._assigned.get(name.removesuffix(".weight"))
        return TensorSpec(
            name, info.shape, info.dtype if scheme is None else self._scale_dtype, scheme
        )

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        module = name.removesuffix(".weight")
        scheme = self._assigned.get(module)
        if scheme is None:
            return self._source.load(name, part)
        tiled = scheme.scales is Scales.TILES
        # Rows have groups of their own, so a part of them rounds like the whole tensor.
        by_rows = not tiled and (part is None or part.axis == 0)
        value = self._source.load(name, part if by_rows else None)
        if isinstance(value, Tensor):
            scale_dtype = self._scale_dtype.torch
            outer = self._shared.of(module)
            if self._searched:
                importance = self._importance.get(module)
                value, _ = round_to_nearest(
                    value, scheme, scale_dtype, select_column_kernels, importance, outer
                )
            else:
                value = quantize_rtn(value, scheme, scale_dtype, outer)
        if part is None or by_rows:
            return value
        return part.of_weight(value)


def is_baseline(
    result: Checkpoint, baseline: Checkpoint, records: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Return whether a result is its own baseline, so that running both would give the same figures
    twice.

    That is so if every quantized layer was only rounded, according to `records` (the manifest's
    entries on tensors, by name), and every tensor, as it is read back, has the numbers that
    rounding the source gives.
    """
    if baseline.config.differences(result.config) or baseline.names() != result.names():
        return False
    # Headers and records first, as values take the time of rounding the source again.
    for name in result.names():
        info = result.info(name)
        expected = baseline.info(name)
        if info.shape != expected.shape or (info.scheme is None) != (expected.scheme is None):
            return False
        if info.scheme is None:
            continue
        record = records.get(name) or {}
        if record.get("solver") not in ROUNDED or "fallback" in record:
            return False
    for name in result.names():
        for rows in transcoded.row_pieces(result.info(name).shape, result.config.head_dim):
            if not _same_numbers(result.load(name, rows), baseline.load(name, rows)):
                return False
    return True


def _same_numbers(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> bool:
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor):
        return transcoded.equal_as_numbers(a, b)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.float(), b.float())
