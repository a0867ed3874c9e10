"""The bounds on the loss from a change of type, and the windows of texts on which the gate and
`verify` measure it.

A model that passes the gate is never different to `verify`, as both use these.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.quality.gate_result import WINDOW
from quantkit.quality.measures import Quality, text_windows
from quantkit.tensors import float_codes
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import (
    QuantTensor,
    frobenius,
    quantize_rtn,
    relative_error,
    row_chunks,
)
from quantkit.tensors.scheme import TABLE, Codes, QuantScheme
from quantkit.text.tokenizer import prompt_start


@dataclass(frozen=True)
class Bound:
    """The largest loss that a type may cause: mean KL(source || result) per token, in nats, and
    perplexity over that of the source.
    """

    kl: float
    perplexity_ratio: float


BOUNDS = {
    "float16": Bound(1e-3, 1.01),
    "bfloat16": Bound(1e-3, 1.01),
    "int8": Bound(0.02, 1.02),
    "int6": Bound(0.04, 1.04),
    "fp8": Bound(0.06, 1.06),
    "int5": Bound(0.1, 1.1),
    "int4": Bound(0.25, 1.25),
    "int3": Bound(0.6, 1.6),
    "int2": Bound(1.6, 2.6),
}
"""By type; a pair of models has the bound of the coarsest tensor in which they differ.

FP8 (e4m3) has 3 bits of mantissa, so rounding to it loses 2.65 % of weights or inputs of any
distribution (Frobenius norms). Of normally distributed weights, int8 in rows loses 0.9 %, q6_k 2.05
% and q5_k 3.8 %: FP8's bound lies where 2.65 % lies between the last two, on logarithmic scales.
Rounding to q3_k loses 18.6 %, to q2_k 32.9 %: the bound of 2 bits follows from those of 3 and 4 on
logarithmic scales. Small floats of 4 bits lose what int4 does (mxfp4 11.5 %, nvfp4 9.5 %, int4-g128
11.1 %), so they have its bound. `scripts/measure/measure_normal_errors.py` prints these errors.
"""

TIMES_ROUNDING = 3.0
"""The largest error of a quantized weight, in units of that of rounding to nearest (Frobenius
norms).
"""

MAX_ERROR = 0.9
"""The relative error (Frobenius norms) from which a weight is lost, by whatever method: scales too
small for their type turn it into zeros, and so does rounding in the same scheme.
"""

_MIN_BOUND = 2.0**-8
"""The smallest bound on the error of a quantized weight, as its scales are rounded too."""

ROUNDING_BOUNDS = {"int8": 0.05, "int4": 0.25}
"""The largest relative error of rounding a weight of a model that cannot be run (Frobenius norms).

Normally distributed weights lose 0.01 in rows of int8, and 0.11 in groups of 128 of int4. If a
weight loses much more, outliers use up the range, and the effect on the model is not measured.
"""

REPEATABLE = 0.005
"""The largest relative change of a figure that is measured again on another machine."""

RANDOM = "random tokens"
"""The name of windows that are not from a text."""

# The first predicts the second.
_MIN_TOKENS = 2
# Of each text; models with more parameters are measured on one, as each window costs them more.
_WINDOWS = 2
_LARGE_PARAMETERS = 10**9


def coarser(bounds: Iterable[Bound]) -> Bound:
    """Choose the largest bound."""
    return max(bounds, key=lambda bound: bound.kl)


def scheme_bound(schemes: Iterable[QuantScheme]) -> Bound:
    """Choose the bound of the scheme that loses the most."""
    return coarser(BOUNDS[bound_type(scheme)] for scheme in schemes)


def bound_type(scheme: QuantScheme) -> str:
    """Return the key in `BOUNDS` of the codes of a scheme."""
    if scheme.codes is Codes.E4M3:
        return "fp8"
    return f"int{scheme.bits}"


def with_inputs(bound: Bound, inputs: Iterable[InputRounding]) -> Bound:
    """Add what rounding the inputs of linears may lose to the bound on the loss of their weights.

    Inputs lose as much as weights of the same type, as both are spread over the same codes. The two
    errors are independent, so their squares add up in the outputs, and KL grows with the square.
    """
    types = {rounding.activations for rounding in inputs}
    if not types:
        return bound
    input_bound = coarser(BOUNDS[activations] for activations in types)
    return Bound(
        bound.kl + input_bound.kl, bound.perplexity_ratio + input_bound.perplexity_ratio - 1
    )


def coarsest(schemes: Iterable[QuantScheme]) -> QuantScheme:
    """Choose the scheme that loses the most and, if there are several, the one with the longest
    groups.
    """

    def loss_rank(scheme: QuantScheme) -> tuple[float, float]:
        # Without a group size, each row is one group.
        return scheme_bound([scheme]).kl, scheme.group_size or math.inf

    return max(schemes, key=loss_rank)


def weight_bound(
    quantized: QuantTensor, weight: Tensor | QuantTensor, coarsest: QuantScheme
) -> float:
    """Compute the largest relative error of a quantized weight [O, I] that passes.

    If the reference has floats, it is a multiple of the error of rounding to nearest in the same
    scheme: rows with outliers, or too small for their scales' type, lose more by any method. If
    both are quantized, it follows from their step sizes.

    Args:
        coarsest: the coarsest scheme whose losses this weight may compensate: its own, or that of
            all layers if it was solved for the inputs that earlier layers pass to it.
    """
    scale_dtype = quantized.scale.dtype
    if isinstance(weight, QuantTensor):
        error = max(_step_error(quantized), _step_error(weight))
    else:
        error = relative_error(quantize_rtn(weight, quantized.scheme, scale_dtype), weight)
    # A solver may change this weight to compensate what coarser layers before it have lost.
    compensated = coarsest.with_dividing_groups(weight.shape[1])
    if compensated != quantized.scheme:
        if isinstance(weight, QuantTensor):
            floats = weight.dequantize()
        else:
            floats = weight
        error = max(error, relative_error(quantize_rtn(floats, compensated, scale_dtype), floats))
    return min(MAX_ERROR, max(_MIN_BOUND, TIMES_ROUNDING * error))


def worst_row(quantized: QuantTensor, weight: Tensor) -> tuple[float, float]:
    """Find the row of a quantized weight [O, I] that exceeds its bound the most, and return its
    relative error and its bound. NaN if a row has a NaN.
    """
    worst = -1.0
    result = (0.0, _MIN_BOUND)
    for start, stop in row_chunks(*quantized.shape):
        rows = quantized.rows(start, stop)
        reference = weight[start:stop].float()
        rounded = quantize_rtn(reference, rows.scheme, rows.scale.dtype).dequantize()
        # A row of zeros, as of an unused token, has no error.
        norms = _row_norms(reference).clamp(min=torch.finfo(torch.float32).tiny)
        error = _row_norms(rows.dequantize() - reference) / norms
        rounding_error = _row_norms(rounded - reference) / norms
        bound = (TIMES_ROUNDING * rounding_error).clamp(min=_MIN_BOUND)
        # torch takes NaN for the largest value.
        excess, row = torch.max(error / bound, 0)
        if not excess.item() <= worst:
            worst = excess.item()
            result = (error[row].item(), bound[row].item())
    return result


def _row_norms(matrix: Tensor) -> Tensor:
    """Compute the norm of each row, in float64, as squares of large values overflow in float32."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64)
    return norms


def _step_error(value: QuantTensor) -> float:
    """Compute the relative error of a weight if its values were distributed evenly between its
    steps.
    """
    rows, columns = value.shape
    # Even errors in a step s have the mean square s^2 / 12. Steps of small floats grow with the
    # code, steps of integers are those of the group.
    if value.scheme.of_small_floats:
        gaps = float_codes.compute_gaps(value.codes, value.scheme.codes).view(
            *value.scale.shape, -1
        )
        squares = gaps.mul_(value.steps.unsqueeze(-1)).double().square().sum().item() / 12
    else:
        # The numbers of a table are some integers apart, here their mean distance.
        distance = 1.0
        if value.scheme.codes is Codes.TABLE:
            distance = (TABLE[-1] - TABLE[0]) / (len(TABLE) - 1)
        steps = value.steps.double() * distance
        squares = steps.square().sum().item() * (columns // value.scale.shape[1]) / 12
    norm = 0.0
    for start, stop in row_chunks(rows, columns):
        norm = math.hypot(norm, frobenius(value.rows(start, stop).dequantize()))
    if norm:
        return math.sqrt(squares) / norm
    return 0.0


def same_but_rounded(a: Tensor, b: Tensor) -> bool:
    """Return whether one of two float tensors is the other one, cast to its type."""

    def is_cast(first: Tensor, second: Tensor) -> bool:
        for start, stop in row_chunks(len(a), math.prod(a.shape[1:])):
            cast_rows = first[start:stop].to(second.dtype)
            if not torch.equal(cast_rows, second[start:stop]):
                return False
        return True

    return is_cast(a, b) or is_cast(b, a)


# Of a rate of decay whose logarithm was computed from its float32: that rounding, one of the
# logarithm, and one of the exponential of another writer.
RATE_ERROR = 2.0**-21


def same_norms(a: Tensor, b: Tensor, offset: float, dtypes: Iterable[DType] = ()) -> bool:
    """Return whether two norm weights are equal once a model adds its offset to them in float32.

    Gemma multiplies by ``1 + weight``, and GGUF stores that sum. It rounds weights whose last bits
    are below those of 1, and both weights then give the same results. False without an offset.

    Args:
        dtypes: the float types of the two models, to which one of the weights may have been cast
            before.
    """
    if not offset or a.shape != b.shape:
        return False
    sum_a = a.float() + offset
    sum_b = b.float() + offset
    if torch.equal(sum_a, sum_b):
        return True
    for dtype in dtypes:
        cast_a = a.to(dtype.torch).float() + offset
        cast_b = b.to(dtype.torch).float() + offset
        if torch.equal(cast_a, sum_b) or torch.equal(sum_a, cast_b):
            return True
    return False


def same_rates(a: Tensor, b: Tensor, dtypes: Iterable[DType] = ()) -> bool:
    """Return whether the exponentials of two tensors are equal, up to their rounding to float32.

    Delta rules and state spaces decay at rates whose logarithms folders store. GGUF stores the
    rates in float32, from which the last bits of the logarithms do not follow.

    Args:
        dtypes: see `same_norms`.
    """
    if a.shape != b.shape:
        return False
    pairs = [(a, b)]
    for dtype in dtypes:
        pairs += [(a.to(dtype.torch), b), (a, b.to(dtype.torch))]
    for first, second in pairs:
        rates = first.double().exp()
        # NaN fails the comparison.
        if ((second.double().exp() - rates).abs() <= RATE_ERROR * rates).all():
            return True
    return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same type and shape, and are equal in every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # As bytes, 0 and -0 differ, and NaN equals itself.
    bytes_a = a.contiguous().view(-1).view(torch.uint8)
    bytes_b = b.contiguous().view(-1).view(torch.uint8)
    return torch.equal(bytes_a, bytes_b)


def exceeds(quality: Quality, bound: Bound) -> bool:
    """Return whether a model's loss on one text exceeds the bound, or is NaN; `REPEATABLE` is added
    to the bound.
    """
    room = 1 + REPEATABLE
    ratio = quality.perplexity / quality.reference_perplexity
    # Written with `not`, as NaN fails every comparison.
    return not (quality.divergence.kl <= room * bound.kl and ratio <= room * bound.perplexity_ratio)


def build_gate_windows(checkpoint: Checkpoint) -> dict[str, tuple[str, Tensor]]:
    """Cut each text into windows [W, T]; return them with the sha256 of the text, by its name.

    Without a tokenizer, or if it makes no tokens of the texts, they are random tokens, the same
    each time, with their own hash.
    """
    length = window_length(checkpoint)
    count = _count_windows(checkpoint)
    tokenizer, _ = load_checked_tokenizer(checkpoint)
    if tokenizer is not None:
        result = {}
        for name, text in gate_texts().items():
            windows = text_windows(tokenizer.encode(text), prompt_start(tokenizer), length)[:count]
            if windows.shape[1] >= _MIN_TOKENS:
                result[name] = (hashlib.sha256(text.encode()).hexdigest(), windows)
        if result:
            return result
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(checkpoint.config.vocab_size, (count, length), generator=generator)
    return {RANDOM: (hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), tokens)}


def window_length(checkpoint: Checkpoint) -> int:
    """Return the number of tokens in a model's windows."""
    return max(_MIN_TOKENS, min(WINDOW, checkpoint.config.max_context))


def count_gate_tokens(checkpoint: Checkpoint) -> int:
    """Count the most tokens that a model is measured on."""
    return len(gate_texts()) * _count_windows(checkpoint) * window_length(checkpoint)


def _count_windows(checkpoint: Checkpoint) -> int:
    """Choose the number of windows of each text."""
    if parameter_count(checkpoint) > _LARGE_PARAMETERS:
        return 1
    return _WINDOWS
