"""Compare the tensors of two models: exactly, as the proof that another format has the same
model, or by norms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.base.progress import Progress, silent
from quantkit.errors import QuantkitError
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.kv_cache import KvCache
from quantkit.quality.bounds import (
    BOUNDS,
    Bound,
    bound_type,
    coarser,
    same_bits,
    same_but_rounded,
    same_norms,
    same_rates,
    weight_bound,
)
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, cast_scales, float_rows, frobenius, row_chunks
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.tensor_slice import TensorSlice

EXACT_COMPARISON = "exact"
"""The phase of the comparison."""
# What the names of logarithms of decay rates end with.
_LOG_RATES = ".A_log"
_BUG = "a bug in quantkit, or a disk that fails"
# Elements that are compared at a time.
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Exact:
    """Counts of tensors that were compared and found equal.

    Attributes:
        tensors: quantized tensors whose codes were carried.
        equal: those of them with the same numbers as in the source.
        floats: float tensors that are equal bit for bit; norms to which GGUF adds one, as numbers.
        norms: norms that differ, as GGUF adds one to them, which rounds small weights.
        scales_cast: quantized tensors with the source's codes and zero points, and its scales
            rounded to another type.
        cast: float tensors that are the source's, or what its codes mean, rounded once to another
            type.
    """

    tensors: int
    equal: int
    floats: int
    norms: int = 0
    scales_cast: int = 0
    cast: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form."""
        result: dict[str, Any] = {}
        for name, count in asdict(self).items():
            if count or name in ("tensors", "equal", "floats"):
                result[name] = count
        return result

    def line(self) -> str:
        """Describe the counts in a line."""
        if self.norms:
            every = ""
            lost = f", but {self.norms} norms rounded, to which GGUF adds 1"
        else:
            every = "all "
            lost = ""
        if not self.tensors and self.cast:
            num_tensors = self.floats + self.cast
            return f"{every}{num_tensors} tensors equal, {self.cast} of them once cast{lost}"
        if not self.tensors:
            return f"{every}{self.floats} tensors equal bit for bit{lost}"
        if self.scales_cast:
            count = f"{self.equal} of {self.tensors} quantized tensors"
            return (
                f"{count} equal as numbers, {self.scales_cast} in codes and zero points, with"
                f" scales cast{lost}"
            )
        return f"all {self.equal} quantized tensors equal as numbers{lost}"


def require_exact(
    source: Checkpoint,
    result: Checkpoint,
    rounded: Collection[str] = (),
    scale_casts: Mapping[str, tuple[DType, ...]] = MappingProxyType({}),
    *,
    float_types: Mapping[str, DType] = MappingProxyType({}),
    dequantize: bool = False,
    progress: Progress = silent,
) -> Exact:
    """Compare a written model, as its own reader loads it, with its source.

    A tensor of another float type must be the source's, rounded once. Norms to which GGUF adds one
    may be rounded by that, and are counted.

    Args:
        rounded: the tensors whose codes were not carried.
        scale_casts: the types to which the scales of other tensors were cast, one after the other,
            by name.
        float_types: the types to which floats were rounded, by name, if those in which they are
            stored are wider: GGUF stores norms and biases as float32.
        dequantize: whether codes became floats, each rounded once.

    Raises:
        QuantkitError: if a tensor differs: quantkit, or the disk, has changed it.
    """
    names = result.names()
    quantized = floats = norms = scales_cast = casts = 0
    for index, name in enumerate(names):
        progress(EXACT_COMPARISON, index, len(names), "tensors")
        before = source.info(resolve_stored_name(source, name))
        if name in rounded:
            continue
        if before.scheme is not None and not dequantize:
            quantized += 1
            equal = _same_weight(source, result, before.name, name)
            # A cast to the type that the source has changes nothing, and is not counted.
            if not equal and name in scale_casts:
                equal = _same_weight(source, result, before.name, name, scale_casts[name])
                scales_cast += equal
        elif result.format == "gguf" and _changes_in_gguf(result.config, name):
            weight = source.load(name)
            stored = result.load(name)
            assert isinstance(weight, Tensor)
            assert isinstance(stored, Tensor)
            dtypes = [DType(result.config.dtype)]
            equal = same_in_gguf(result.config, name, weight, stored, dtypes)
            is_rounded = not _equal(weight, stored.to(weight.dtype))
            norms += equal and is_rounded
            floats += equal and not is_rounded
        else:
            stored_type = result.info(name).dtype
            float_type = float_types.get(name, stored_type)
            if before.scheme is None and before.dtype == float_type == stored_type:
                floats += 1
                equal = _same_floats(source.load(before.name), result.load(name))
            else:
                casts += 1
                equal = _same_once_cast(
                    source.load(before.name), result.load(name), float_type.torch
                )
        if not equal:
            problem = f"tensor '{name}' differs from the source when it is read back"
            raise QuantkitError(problem, path=result.path, hint=_BUG)
    progress(EXACT_COMPARISON, len(names), len(names), "tensors")
    return Exact(
        tensors=quantized,
        equal=quantized - scales_cast,
        floats=floats,
        norms=norms,
        scales_cast=scales_cast,
        cast=casts,
    )


def same_in_gguf(
    config: ModelConfig, name: str, a: Tensor, b: Tensor, dtypes: Collection[DType]
) -> bool:
    """Return whether two tensors of a name differ at most by the rounding of what GGUF stores in
    place of some: sums of norms and an offset, and rates in place of their logarithms. For `dtypes`
    see `same_norms`.
    """
    if name.endswith(_LOG_RATES):
        return same_rates(a, b, dtypes)
    return same_norms(a, b, _norm_offset_of(config, name), dtypes)


def _changes_in_gguf(config: ModelConfig, name: str) -> bool:
    return name.endswith(_LOG_RATES) or _norm_offset_of(config, name) != 0


def _norm_offset_of(config: ModelConfig, name: str) -> float:
    """Return the offset that a model adds to a tensor; 0 if it is not the weight of a norm."""
    # The norms of delta rules have none.
    if "norm" in name and ".linear_attn." not in name:
        return config.norm_offset
    return 0.0


def require_same_kv_cache(source: KvCache, result: StoredCheckpoint) -> None:
    """Compare the written scales of a quantized key/value cache with its source, byte by byte.
    Raises `QuantkitError` if it differs: quantkit, or the disk, has changed it.
    """
    cache = result.kv_cache
    is_same = False
    if cache is not None:
        stored = (cache.scheme, cache.read_tensors())
        expected = (source.scheme, source.read_tensors())
        is_same = stored == expected
    if not is_same:
        raise QuantkitError(
            "the scales of the KV cache differ from the source", path=result.path, hint=_BUG
        )


def equal_as_numbers(a: QuantTensor, b: QuantTensor) -> bool:
    """Return whether two weights [O, I] are the same numbers, even with other groups or types of
    scales.
    """
    if a.shape != b.shape:
        return False
    rows, columns = a.shape
    if not (_is_integer_on_floats(a.scheme) and _is_integer_on_floats(b.scheme)):
        for start, stop in row_chunks(rows, columns):
            if not _equal(a.rows(start, stop).dequantize(), b.rows(start, stop).dequantize()):
                return False
        return True
    # Both are compared in groups of the largest size that divides those of each.
    size = math.gcd(columns // a.scale.shape[1], columns // b.scale.shape[1])
    for start, stop in row_chunks(rows, columns):
        if not _equal_rows(a.rows(start, stop), b.rows(start, stop), size):
            return False
    return True


def _is_integer_on_floats(scheme: QuantScheme) -> bool:
    return not scheme.of_small_floats and scheme.scales is Scales.FLOATS


def row_pieces(shape: tuple[int, ...], head_dim: int) -> Iterator[TensorSlice | None]:
    """Yield parts of a tensor's rows, of complete heads, as readers of rotary rows require.

    None is the whole tensor.
    """
    if not shape:
        yield None
        return
    head_rows = max(1, head_dim)
    head_elements = head_rows * max(1, math.prod(shape[1:]))
    step = head_rows * max(1, _AT_ONCE // head_elements)
    for start in range(0, shape[0], step):
        yield TensorSlice(0, ((start, min(start + step, shape[0])),))


def _same_weight(
    source: Checkpoint,
    result: Checkpoint,
    before_name: str,
    name: str,
    scale_cast: tuple[DType, ...] = (),
) -> bool:
    """Return whether the weights are the same numbers, once the scales of the source are cast to
    the types in `scale_cast`.
    """
    before = source.load(before_name)
    after = result.load(name)
    if isinstance(before, QuantTensor) and scale_cast:
        before = cast_scales(before, *(dtype.torch for dtype in scale_cast)) or before
    if not isinstance(before, QuantTensor):
        return False
    if isinstance(after, QuantTensor):
        return equal_as_numbers(before, after)
    # Some formats have codes for linears only, and floats for the embedding.
    if name != f"{EMBEDDING}.weight" or before.shape != after.shape:
        return False
    for start, stop in row_chunks(*before.shape):
        if not _equal(before.rows(start, stop).dequantize(), after[start:stop]):
            return False
    return True


def _same_once_cast(
    before: Tensor | QuantTensor, after: Tensor | QuantTensor, dtype: torch.dtype
) -> bool:
    """Return whether `after` has the numbers of `before`, each rounded once to `dtype`; its own
    type may be wider.
    """
    if isinstance(after, QuantTensor) or before.shape != after.shape:
        return False
    if isinstance(before, Tensor) and before.dim() < 2:
        return _equal(before.to(dtype).to(after.dtype), after)
    # In parts, because the float32 products of all rows would need more memory than the weight.
    for start, stop in row_chunks(before.shape[0], math.prod(before.shape[1:])):
        if isinstance(before, QuantTensor):
            rows = before.rows(start, stop).dequantize()
        else:
            rows = before[start:stop]
        if not _equal(rows.to(dtype).to(after.dtype), after[start:stop]):
            return False
    return True


def _same_floats(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and same_bits(a, b)


def _equal_rows(a: QuantTensor, b: QuantTensor, size: int) -> bool:
    """Return whether rows with groups that are multiples of `size` have equal numbers."""
    scale_a, zero_a = _repeat_in_groups(a, size)
    scale_b, zero_b = _repeat_in_groups(b, size)
    same_codes = a.scheme.bits == b.scheme.bits and torch.equal(a.codes, b.codes)
    if same_codes and torch.equal(zero_a, zero_b) and _equal(scale_a, scale_b):
        return True
    # Other codes and scales may still be the same numbers: products decide, and take longer.
    return _equal(_products(a, scale_a, zero_a), _products(b, scale_b, zero_b))


def _repeat_in_groups(value: QuantTensor, size: int) -> tuple[Tensor, Tensor]:
    """Repeat scales in float64 and zero points [O, I / size] within longer groups."""
    scale = value.scale.double()
    columns = value.shape[1]
    # Symmetric codes have the middle of their range as the zero point.
    if value.zero is not None:
        zero = value.zero
    else:
        zero = torch.full_like(scale, value.scheme.levels // 2, dtype=torch.uint8)
    times = columns // scale.shape[1] // size
    return scale.repeat_interleave(times, 1), zero.repeat_interleave(times, 1)


def _products(value: QuantTensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Multiply codes by scales in float64, which is exact: 24 bits of a scale times 9 of a code."""
    codes = value.codes.reshape(*scale.shape, -1).double()
    return (codes - zero.double().unsqueeze(-1)) * scale.unsqueeze(-1)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all numbers are equal: 0 and -0 are, and so are NaN and NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class TensorDifference:
    """The difference between a tensor and its counterpart: Frobenius norms, and the largest
    element.
    """

    name: str
    relative_error: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        return self.relative_error <= self.bound

    @property
    def excess(self) -> float:
        """Return the error in units of its bound; infinite if it is NaN or no error is allowed."""
        if math.isnan(self.relative_error) or not self.bound:
            return math.inf
        return self.relative_error / self.bound


def tensor_difference(
    name: str,
    first: Tensor | QuantTensor,
    second: Tensor | QuantTensor,
    coarsest: QuantScheme | None,
    *,
    config: ModelConfig | None = None,
    dtypes: Collection[DType] = (),
) -> tuple[TensorDifference | None, Bound]:
    """Compare a tensor with its reference, the first one: return the difference, None if they are
    equal, and the type's bound. For `coarsest` see `weight_bound`; None for a tensor that is
    quantized in neither model. For `config`, that of the reference, and `dtypes` see
    `same_in_gguf`.
    """
    bounds = [BOUNDS["float16"]]
    for value in (first, second):
        type_name: str
        if isinstance(value, QuantTensor):
            type_name = bound_type(value.scheme)
        else:
            type_name = DType.of(value.dtype)
        # Types without a bound, such as float32, lose nothing.
        if type_name in BOUNDS:
            bounds.append(BOUNDS[type_name])
    bound = coarser(bounds)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if same_bits(first, second):
            return None, bound
        if not first.is_floating_point() or not second.is_floating_point():
            return TensorDifference(name, math.inf, math.inf, 0.0), bound
        # A scalar has no rows to divide into chunks.
        if not first.dim():
            first = first.unsqueeze(0)
        if not second.dim():
            second = second.unsqueeze(0)
    equal = True
    if isinstance(first, QuantTensor) and isinstance(second, QuantTensor):
        if equal_as_numbers(first, second):
            return None, bound
        # The numbers differ even if the difference is lost in float32.
        equal = False
    error = norm = largest = 0.0
    for part in row_chunks(first.shape[0], math.prod(first.shape[1:])):
        x = float_rows(first, *part)
        y = float_rows(second, *part)
        norm = math.hypot(norm, frobenius(x))
        if torch.equal(x, y):
            continue
        equal = False
        difference = y - x
        element = difference.abs().max().item()
        if math.isnan(element):
            largest = element
        else:
            largest = max(largest, element)
        error = math.hypot(error, frobenius(difference))
    if equal:
        return None, bound
    if norm:
        relative = error / norm
    elif error:
        relative = math.inf
    else:
        relative = 0.0
    if isinstance(second, QuantTensor):
        allowed = weight_bound(second, first, coarsest or second.scheme)
    elif isinstance(first, QuantTensor):
        allowed = weight_bound(first, second, coarsest or first.scheme)
    else:
        # A cast to another float type is no fault, nor is the rounding of GGUF's sums of norms.
        is_cast = first.dtype != second.dtype and same_but_rounded(first, second)
        is_same = config is not None and same_in_gguf(config, name, first, second, dtypes)
        if is_cast or is_same:
            allowed = relative
        else:
            allowed = 0.0
    return TensorDifference(name, relative, largest, allowed), bound
