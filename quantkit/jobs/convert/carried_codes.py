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
from quantkit.architectures.topology import kept_unless_named, linear_columns
from quantkit.errors import NonFiniteError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, schemes
from quantkit.formats.codecs.codec import NO_EMBEDDING, CodeFormat, Reason, exact_scale
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.container import StoredCheckpoint
from quantkit.model.column_kernels import column_kernels
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import all_finite, cast_finite
from quantkit.tensors.qtensor import QuantTensor, Solver, cast_scales, relative_error
from quantkit.tensors.scheme import QuantScheme

_MAX_BITS_OF_INT4 = (
    # A weight, scales included, up to which integers that are not carried are rounded to int4.
    5.2
)


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
    cast: Mapping[str, ScaleCast] = field(default_factory=dict)


def plan_changes(source: StoredCheckpoint, codes: CodeFormat, *, weights: bool) -> Changes:
    """Return what becomes of the weights that a format cannot hold exactly: the least that lets it
    hold them.

    Where only the scales do not fit they are cast, unless that moves a weight by more than half a
    step. Integers whose codes are not carried are rounded in the linears that `quantize` takes;
    others become floats.

    Args:
        weights: whether to read the weights too, not headers alone.

    Raises:
        UnsupportedError: if no scheme of the format supports a weight.
    """
    found: dict[str, Rounding] = {}
    cast: dict[str, ScaleCast] = {}
    for module, scheme in schemes(source).items():
        name = f"{module}.weight"
        if is_widened_embedding(source, module, codes):
            continue
        reason = _reason(source, name, scheme, codes, weights=weights)
        if isinstance(reason, ScaleCast):
            cast[name] = reason
        elif reason is not None:
            found[name] = Rounding(
                _choose_closest_scheme(source, name, scheme, codes), reason.problem
            )
    linears = linear_columns(source.config).keys() - kept_unless_named(source.config)
    for name, stored_as in read_as_floats(source).items():
        if name.removesuffix(".weight") in linears:
            found[name] = Rounding(
                _choose_closest_scheme(source, name, _choose_scheme_by_size(source, name), codes),
                f"it is {stored_as}",
            )
    found |= _add_fused_parts(source, found)
    return Changes(found, {name: one for name, one in cast.items() if name not in found})


def is_widened_embedding(source: Checkpoint, module: str, codes: CodeFormat) -> bool:
    """Return whether a module is the embedding, in codes, and becomes float32, which has each of
    its numbers: where a format has codes of linears only, and where llama.cpp's, which all its
    readers know, would go to one that few read it in.
    """
    if module == EMBEDDING:
        scheme = source.info(f"{module}.weight").scheme
    else:
        scheme = None
    if scheme is None:
        return False
    few = source.format == "gguf" and isinstance(codes, CompressedTensors)
    return few or codes.codec(scheme, embedding=True) == NO_EMBEDDING


def require_representable(
    source: Checkpoint, codes: CodeFormat, to_round: Mapping[str, Rounding]
) -> None:
    """Raise a `NotRepresentableError` for the first tensor whose scheme, or shape, a format does
    not support.
    """
    for module, scheme in schemes(source).items():
        name = f"{module}.weight"
        if name in to_round or is_widened_embedding(source, module, codes):
            continue
        if (reason := _reason_in_header(source, name, scheme, codes)) is not None:
            raise reason.error(name, codes.name)


def common_scale_dtype(
    source: Checkpoint, codes: CodeFormat, changes: Changes, *, look: bool
) -> DType | None:
    """Return the type of all scales: the format's, that of the cast ones, or the model's, which
    with `look` is compared with scales of other types; None where each weight keeps its own.
    """
    if codes.scale_dtype is not None:
        return codes.scale_dtype
    if changes.cast:
        return next(iter(changes.cast.values())).dtypes[-1]
    model = DType(source.config.dtype)
    quantized = (
        module
        for module, scheme in schemes(source).items()
        if not is_widened_embedding(source, module, codes)
    )
    carried = [name for module in quantized if (name := f"{module}.weight") not in changes.rounded]
    others = [name for name in carried if source.info(name).dtype != model]
    if all(look and _held_in(source, name, model, codes) for name in others):
        return model
    return None


def _held_in(source: Checkpoint, name: str, dtype: DType, codes: CodeFormat) -> bool:
    """Return whether a format holds a weight exactly, with scales of another type."""
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    reason = with_scales(value, dtype)
    codec = codes.codec(value.scheme, embedding=name == f"{EMBEDDING}.weight")
    return (
        reason is not None
        and not isinstance(codec, Reason)
        and not isinstance(codec.encode(reason), Reason)
    )


def with_scales(value: QuantTensor, dtype: DType) -> QuantTensor | None:
    """Return the same weight with scales of another type; None where they would be others."""
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
    """Return what becomes of weights that are one tensor on disk, of which some are rounded: all of
    them are.
    """
    quantized = schemes(source).keys() | {name.removesuffix(".weight") for name in roundings}
    joined = {}
    for tensor in disk_tensors(source.config, quantized):
        own = [(name, roundings[name]) for name in tensor.parts if name in roundings]
        if (
            own
            and tensor.stacked is None
            and {roundings.get(name) for name in tensor.parts} != {own[0][1]}
        ):
            name, first = own[0]
            reason = f"it is one tensor with '{name}', and of that {first.reason}"
            joined.update(
                {part: Rounding(first.scheme, reason) for part in tensor.parts if part != name}
            )
    return joined


def round_weight(
    value: Tensor | QuantTensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    name: str,
    path: Path,
) -> tuple[QuantTensor, Mapping[str, object]]:
    """Return a weight rounded again from the float32 numbers that it means, with its record for the
    manifest. Raises `NonFiniteError` if it holds NaN or Inf, or its scales overflow their type.
    """
    if isinstance(value, QuantTensor):
        floats = value.dequantize()
    else:
        floats = value
    cast_finite(
        floats, floats.dtype, name, path, False, "repair the source; such numbers cannot be rounded"
    )
    found, solver = round_to_nearest(floats, scheme, scale_dtype, column_kernels)
    if not all_finite(found.scale):
        raise NonFiniteError(
            f"tensor '{name}' holds values too large for scales in {scale_dtype}", path=path
        )
    return found, {
        "solver": solver,
        "relative_error": float(f"{relative_error(found, floats):.4g}"),
    }


def cast(value: QuantTensor, dtypes: tuple[DType, ...]) -> tuple[QuantTensor, Mapping[str, object]]:
    """Return a weight with scales of another type, see `ScaleCast`, with its record for the
    manifest.
    """
    found = cast_scales(value, *(dtype.torch for dtype in dtypes))
    assert found is not None, "it was cast when the conversion was planned"
    error = relative_error(found, value.dequantize())
    return found, {"solver": Solver.SCALES_CAST, "relative_error": float(f"{error:.4g}")}


def _reason(
    source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat, *, weights: bool
) -> Reason | ScaleCast | None:
    """Why a weight cannot be held exactly, or what is done to its scales so that it can; None if
    it can.
    """
    reason = _reason_in_header(source, name, scheme, codes)
    codec = codes.codec(scheme, embedding=name == f"{EMBEDDING}.weight")
    if reason is not None or isinstance(codec, Reason) or not weights:
        return reason
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    stored = codec.encode(value)
    if not isinstance(stored, Reason):
        return None
    if stored.scale_types:
        other = cast_scales(value, *(dtype.torch for dtype in stored.scale_types))
    else:
        other = None
    held = other is not None and not isinstance(codec.encode(other), Reason)
    if held:
        return ScaleCast(stored.scale_types, stored.problem)
    return stored


def _reason_in_header(
    source: Checkpoint, name: str, scheme: QuantScheme, codes: CodeFormat
) -> Reason | None:
    """Why a weight of a scheme and of its sizes cannot be held; None if some such can."""
    codec = codes.codec(scheme, embedding=name == f"{EMBEDDING}.weight")
    if isinstance(codec, Reason):
        return codec
    return codec.misfit(source.info(name).shape)


def _choose_closest_scheme(
    source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat
) -> QuantScheme:
    """Of the schemes that a format has, the one that loses least: as many bits or more, groups
    that are no longer.
    """
    rows, columns = source.info(name).shape
    fitting = []
    for one in codes.schemes:
        if (one.group_size is None or columns % one.group_size == 0) and _reason_in_header(
            source, name, one, codes
        ) is None:
            fitting.append(one)
    if not fitting:
        raise UnsupportedError(
            f"tensor '{name}' cannot be rounded to {codes.name}",
            path=source.path,
            found=f"{rows} x {columns}",
            expected=f"sizes that one of {', '.join(map(str, codes.schemes))} goes with",
            hint="choose another format, or write floats with `dequantize=True`",
        )
    wanted = columns // scheme.groups(columns)

    def loss(candidate: QuantScheme) -> tuple[object, ...]:
        size = columns // candidate.groups(columns)
        fewer = candidate.bits < scheme.bits
        longer = size > wanted
        return (
            fewer,
            abs(candidate.bits - scheme.bits),
            longer,
            size if fewer or longer else -size,
            candidate != scheme,
        )

    return min(fitting, key=loss)


def _choose_scheme_by_size(source: StoredCheckpoint, name: str) -> QuantScheme:
    """Return the scheme that takes about the room of integers whose codes are not carried."""
    rows, columns = source.info(name).shape
    bits = 8 * source.count_stored_bytes(name) / (rows * columns)
    if bits <= _MAX_BITS_OF_INT4:
        return QuantScheme(4, 32).fit_to_columns(columns)
    return QuantScheme(8, None)
