"""What becomes of quantized weights in another format: the same codes, with scales of which type;
or, where that is allowed, the least change of those that it cannot hold exactly: scales of another
type, else codes rounded anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import collect_default_floats, linear_columns
from quantkit.base.messages import Message, Option
from quantkit.errors import NonFiniteError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, list_uncarried_weights, schemes
from quantkit.formats.codecs.codec import (
    NO_EMBEDDING,
    CodeFormat,
    HoldsCodes,
    Reason,
    choose_codec,
    exact_scale,
)
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.container import StoredCheckpoint
from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import all_finite, cast_finite
from quantkit.tensors.qtensor import QuantTensor, Solver, cast_scales, relative_error
from quantkit.tensors.scheme import QuantScheme

# Bits of a weight, scales included, up to which integers that are not carried are rounded to int4.
_MAX_BITS_OF_INT4 = 5.2


@dataclass(frozen=True)
class Rounding:
    """A weight that a format cannot hold exactly is rounded to this scheme, for a reason in
    words.
    """

    scheme: QuantScheme
    reason: str


@dataclass(frozen=True)
class ScaleCast:
    """The scales of a weight, which a format cannot hold exactly, are cast to these types, one
    after the other.
    """

    dtypes: tuple[DType, ...]
    reason: str


@dataclass(frozen=True)
class Changes:
    """What becomes of the weights that a format cannot hold exactly, by name: some are rounded
    anew, others keep their codes and zero points.
    """

    rounded: Mapping[str, Rounding] = field(default_factory=dict)
    scale_casts: Mapping[str, ScaleCast] = field(default_factory=dict)


def plan_changes(source: StoredCheckpoint, codes: CodeFormat, *, weights: bool) -> Changes:
    """Choose what becomes of the weights that a format cannot hold exactly: the least change that
    lets it hold them.

    Where only the scales do not fit they are cast, unless that moves a weight by more than half a
    step. Integers whose codes are not carried are rounded in the linears that `quantize` takes;
    others become floats.

    Args:
        weights: whether to read the weights too, not headers alone.

    Raises:
        UnsupportedError: if no scheme of the format supports a weight.
    """
    roundings: dict[str, Rounding] = {}
    casts: dict[str, ScaleCast] = {}
    for module, scheme in schemes(source).items():
        name = f"{module}.weight"
        if must_write_embedding_as_float32(source, module, codes):
            continue
        reason = _find_misfit_or_cast(source, name, scheme, codes, weights=weights)
        if isinstance(reason, ScaleCast):
            casts[name] = reason
        elif reason is not None:
            closest = _choose_closest_scheme(source, name, scheme, codes)
            roundings[name] = Rounding(closest, reason.problem)
    # The same choice as `quantize` without a recipe: heads and the like become floats.
    linears = linear_columns(source.config).keys() - collect_default_floats(source.config)
    for name, stored_as in list_uncarried_weights(source).items():
        if name.removesuffix(".weight") in linears:
            similar = _choose_scheme_by_size(source, name)
            closest = _choose_closest_scheme(source, name, similar, codes)
            roundings[name] = Rounding(closest, f"it is {stored_as}")
    roundings |= _add_fused_parts(source, roundings)
    # A weight whose scales could be cast is rounded if it shares a tensor with one that must be.
    remaining_casts = {name: cast for name, cast in casts.items() if name not in roundings}
    return Changes(roundings, remaining_casts)


def must_write_embedding_as_float32(source: Checkpoint, module: str, codes: CodeFormat) -> bool:
    """Return whether a module is the embedding, in codes, and becomes float32, which has each of
    its numbers.

    This is so where a format has codes of linears only. It is also so for GGUF to
    compressed-tensors: all readers of GGUF know codes of the embedding, and few readers of the
    other format do.
    """
    if module == EMBEDDING:
        scheme = source.info(f"{module}.weight").scheme
    else:
        scheme = None
    if scheme is None:
        return False
    has_few_readers = source.format == "gguf" and isinstance(codes, CompressedTensors)
    return has_few_readers or codes.codec(scheme, embedding=True) == NO_EMBEDDING


def require_representable(
    source: Checkpoint, codes: CodeFormat, to_round: Mapping[str, Rounding]
) -> None:
    """Raise a `NotRepresentableError` for the first tensor whose scheme, or shape, a format does
    not support.
    """
    for module, scheme in schemes(source).items():
        name = f"{module}.weight"
        if name in to_round or must_write_embedding_as_float32(source, module, codes):
            continue
        reason = _find_misfit_in_header(source, name, scheme, codes)
        if reason is not None:
            raise reason.error(name, codes.name)


def choose_common_scale_dtype(
    source: Checkpoint, codes: CodeFormat, changes: Changes, *, look: bool
) -> DType | None:
    """Choose one type for all scales: the format's, that of the cast ones, or the model's. Return
    None where each weight keeps its own.

    With `look`, scales of other types are read to see if the model's type holds them.
    """
    if codes.scale_dtype is not None:
        return codes.scale_dtype
    if changes.scale_casts:
        return next(iter(changes.scale_casts.values())).dtypes[-1]
    model_dtype = DType(source.config.dtype)
    for module in schemes(source):
        name = f"{module}.weight"
        if name in changes.rounded or must_write_embedding_as_float32(source, module, codes):
            continue
        if source.info(name).dtype == model_dtype:
            continue
        # This reads the weight, so the first one that does not fit ends the search.
        if not look or not _can_represent_with_scales(source, name, model_dtype, codes):
            return None
    return model_dtype


def _can_represent_with_scales(
    source: Checkpoint, name: str, dtype: DType, codes: CodeFormat
) -> bool:
    """Read a weight and check whether a format holds it exactly, with scales of another type."""
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    rescaled = convert_scales_exactly(value, dtype)
    codec = _choose_codec_of(name, value.scheme, codes)
    if rescaled is None or isinstance(codec, Reason):
        return False
    return not isinstance(codec.encode(rescaled), Reason)


def convert_scales_exactly(value: QuantTensor, dtype: DType) -> QuantTensor | None:
    """Convert the scales of a weight to another type; return None if that would change a scale."""
    scale = exact_scale(value.scale, dtype)
    if value.minimum is None:
        minimum = None
    else:
        minimum = exact_scale(value.minimum, dtype)
    if isinstance(scale, Reason) or isinstance(minimum, Reason):
        return None
    return replace(value, scale=scale, minimum=minimum)


def _add_fused_parts(
    source: StoredCheckpoint, roundings: Mapping[str, Rounding]
) -> dict[str, Rounding]:
    """Round all parts of a tensor on disk if one of them is rounded, to the scheme of the first."""
    quantized = schemes(source).keys() | {name.removesuffix(".weight") for name in roundings}
    fused: dict[str, Rounding] = {}
    for tensor in disk_tensors(source.config, quantized):
        rounded_parts = [name for name in tensor.parts if name in roundings]
        # Where an expert has codes, each expert of its layer is written as a tensor of its own.
        if not rounded_parts or tensor.stacked is not None:
            continue
        first_name = rounded_parts[0]
        first = roundings[first_name]
        if all(roundings.get(name) == first for name in tensor.parts):
            continue
        reason = f"it is one tensor with '{first_name}', and of that {first.reason}"
        for part in tensor.parts:
            if part != first_name:
                fused[part] = Rounding(first.scheme, reason)
    return fused


def round_weight(
    value: Tensor | QuantTensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    name: str,
    path: Path,
) -> tuple[QuantTensor, Mapping[str, object]]:
    """Round a weight from the float32 numbers that it means, and make its record for the manifest.

    Raises `NonFiniteError` if it holds NaN or Inf, or its scales overflow their type.
    """
    if isinstance(value, QuantTensor):
        floats = value.dequantize()
    else:
        floats = value
    cast_finite(
        floats,
        floats.dtype,
        name,
        path,
        False,
        "repair the source; such values cannot be quantized",
    )
    rounded, solver = round_to_nearest(floats, scheme, scale_dtype, select_column_kernels)
    # Finite floats can still need a scale above the largest number of a narrow type.
    if not all_finite(rounded.scale):
        raise NonFiniteError(
            f"tensor '{name}' has values too large for scales in {scale_dtype}", path=path
        )
    error = relative_error(rounded, floats)
    return rounded, {"solver": solver, "relative_error": float(f"{error:.4g}")}


def cast_weight_scales(
    value: QuantTensor, dtypes: tuple[DType, ...]
) -> tuple[QuantTensor, Mapping[str, object]]:
    """Cast the scales of a weight as a `ScaleCast` says, and make its record for the manifest."""
    result = cast_scales(value, *(dtype.torch for dtype in dtypes))
    assert result is not None, "it was cast when the conversion was planned"
    error = relative_error(result, value.dequantize())
    return result, {"solver": Solver.SCALES_CAST, "relative_error": float(f"{error:.4g}")}


def _find_misfit_or_cast(
    source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat, *, weights: bool
) -> Reason | ScaleCast | None:
    """Find why a weight cannot be held exactly, or which cast of its scales lets it be held; None
    if it can be held as it is.
    """
    reason = _find_misfit_in_header(source, name, scheme, codes)
    codec = _choose_codec_of(name, scheme, codes)
    if reason is not None or isinstance(codec, Reason) or not weights:
        return reason
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    stored = codec.encode(value)
    if not isinstance(stored, Reason):
        return None
    if not stored.scale_types:
        return stored
    rescaled = cast_scales(value, *(dtype.torch for dtype in stored.scale_types))
    # Other scales can meet a second obstacle, so only a try shows that the codec takes them.
    if rescaled is None or isinstance(codec.encode(rescaled), Reason):
        return stored
    return ScaleCast(stored.scale_types, stored.problem)


def _choose_codec_of(name: str, scheme: QuantScheme, codes: CodeFormat) -> HoldsCodes | Reason:
    """Choose the codec of a format for a weight by its name, or explain why it has none."""
    return choose_codec(codes, scheme, embedding=name == f"{EMBEDDING}.weight", is_carried=True)


def _find_misfit_in_header(
    source: Checkpoint, name: str, scheme: QuantScheme, codes: CodeFormat
) -> Reason | None:
    """Find why no weight of this scheme and these sizes can be held; None if some can."""
    codec = _choose_codec_of(name, scheme, codes)
    if isinstance(codec, Reason):
        return codec
    return codec.misfit(source.info(name).shape)


def _choose_closest_scheme(
    source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat
) -> QuantScheme:
    """Choose the scheme of a format that loses least: as many bits or more, groups that are no
    longer.
    """
    rows, columns = source.info(name).shape
    fitting: list[QuantScheme] = []
    for candidate in codes.schemes:
        if candidate.group_size is not None and columns % candidate.group_size != 0:
            continue
        if _find_misfit_in_header(source, name, candidate, codes) is None:
            fitting.append(candidate)
    if not fitting:
        raise UnsupportedError(
            f"tensor '{name}' cannot be quantized for {codes.name}",
            path=source.path,
            found=f"{rows} x {columns}",
            expected=f"sizes that fit one of {', '.join(map(str, codes.schemes))}",
            hint=Message(
                "choose another format, or dequantize with ", Option("dequantize", value=True)
            ),
        )
    source_size = columns // scheme.groups(columns)

    def loss(candidate: QuantScheme) -> tuple[object, ...]:
        size = columns // candidate.groups(columns)
        fewer_bits = candidate.bits < scheme.bits
        longer_groups = size > source_size
        # Where precision is lost, short groups lose less. Otherwise the longest ones of those
        # that fit need the fewest scales.
        size_order = size if fewer_bits or longer_groups else -size
        return (
            fewer_bits,
            abs(candidate.bits - scheme.bits),
            longer_groups,
            size_order,
            candidate != scheme,
        )

    return min(fitting, key=loss)


def _choose_scheme_by_size(source: StoredCheckpoint, name: str) -> QuantScheme:
    """Choose the scheme that takes about the room of integers whose codes are not carried."""
    rows, columns = source.info(name).shape
    bits = 8 * source.count_stored_bytes(name) / (rows * columns)
    if bits <= _MAX_BITS_OF_INT4:
        return QuantScheme(4, 32).fit_to_columns(columns)
    return QuantScheme(8, None)
