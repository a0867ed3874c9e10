"""What becomes of quantized weights in another format: the same codes, with scales of which type; or, where that is
allowed, codes rounded anew of those that it cannot hold exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import kept_unless_named, linear_columns
from quantkit.errors import NonFiniteError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, schemes
from quantkit.formats.codecs.codec import NO_EMBEDDING, CodeFormat, Reason, exact_scale
from quantkit.formats.codecs.compressed_tensors import CompressedTensors, Int8Activations
from quantkit.formats.container import StoredCheckpoint
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import all_finite, checked_cast
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme

_MOST_BITS_OF_INT4 = 5.2
"""Bits a weight, scales included, up to which integers whose codes are not carried are rounded to int4."""

_FEW_READ_EMBEDDINGS = (CompressedTensors.name, Int8Activations.name)


@dataclass(frozen=True)
class Rounding:
    """What becomes of a weight that a format cannot hold exactly.

    Attributes:
        scheme: to which it is rounded.
        reason: why, in words.
    """

    scheme: QuantScheme
    reason: str


def to_be_rounded(source: StoredCheckpoint, codes: CodeFormat, *, weights: bool) -> dict[str, Rounding]:
    """The weights that a format cannot hold exactly, by name.

    Integers whose codes are not carried are rounded in the linears that `quantize` takes; others become floats.

    Args:
        codes: the format.
        weights: whether to look at the weights too, and not at headers alone.

    Raises:
        UnsupportedError: if it has nothing for such a weight at all.
    """
    found = {}
    for module, scheme in schemes(source).items():
        name = f"{module}.weight"
        if widened(source, module, codes):
            continue
        reason = _reason(source, name, scheme, codes, weights=weights)
        if reason is not None:
            found[name] = Rounding(_closest(source, name, scheme, codes), reason.problem)
    linears = linear_columns(source.config).keys() - kept_unless_named(source.config)
    for name, stored_as in read_as_floats(source).items():
        if name.removesuffix(".weight") in linears:
            found[name] = Rounding(_closest(source, name, _suggested(source, name), codes), f"it is {stored_as}")
    return found | _together(source, found)


def widened(source: Checkpoint, module: str, codes: CodeFormat) -> bool:
    """Whether a module is the embedding, in codes, and becomes float32, which has each of its numbers: where a format
    has codes of linears only, and where llama.cpp's, which all its readers know, would go to one that few read it in.
    """
    scheme = source.info(f"{module}.weight").scheme if module == EMBEDDING else None
    if scheme is None:
        return False
    few = source.format == "gguf" and codes.name in _FEW_READ_EMBEDDINGS
    return few or codes.codec(scheme, embedding=True) == NO_EMBEDDING


def require_held(source: Checkpoint, codes: CodeFormat, to_round: Mapping[str, Rounding]) -> None:
    """
    Raises:
        UnsupportedError: naming the first tensor of a scheme that a format has not.
    """
    for module, scheme in schemes(source).items():
        if widened(source, module, codes):
            continue
        reason = codes.codec(scheme, embedding=module == EMBEDDING) if f"{module}.weight" not in to_round else None
        if isinstance(reason, Reason):
            raise reason.error(f"{module}.weight", codes.name)


def common_scale_dtype(
    source: Checkpoint, codes: CodeFormat, to_round: Mapping[str, Rounding], *, look: bool
) -> DType | None:  # fmt: skip
    """The type of all scales: the format's or the model's; None where each weight's own has to stay.

    Args:
        look: whether to look at scales of other types, and not at headers alone.
    """
    if codes.scale_dtype is not None:
        return codes.scale_dtype
    model = DType(source.config.dtype)
    quantized = (module for module, scheme in schemes(source).items() if not widened(source, module, codes))
    carried = [name for module in quantized if (name := f"{module}.weight") not in to_round]
    others = [name for name in carried if source.info(name).dtype != model]
    return model if all(look and _exact_in(source, name, model) for name in others) else None


def _exact_in(source: Checkpoint, name: str, dtype: DType) -> bool:
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    return with_scales(value, dtype) is not None


def with_scales(value: QuantTensor, dtype: DType) -> QuantTensor | None:
    """The same weight with scales of another type; None where they would be others."""
    scale = exact_scale(value.scale, dtype)
    return None if isinstance(scale, Reason) else replace(value, scale=scale)


def _together(source: StoredCheckpoint, found: Mapping[str, Rounding]) -> dict[str, Rounding]:
    """What becomes of weights that are one tensor on disk, of which some are rounded: all of them are, alike."""
    quantized = schemes(source).keys() | {name.removesuffix(".weight") for name in found}
    joined = {}
    for tensor in disk_tensors(source.config, quantized):
        own = [(name, found[name]) for name in tensor.parts if name in found]
        if own and tensor.stacked is None and {found.get(name) for name in tensor.parts} != {own[0][1]}:
            name, first = own[0]
            reason = f"it is one tensor with '{name}', and of that {first.reason}"
            joined.update({part: Rounding(first.scheme, reason) for part in tensor.parts if part != name})
    return joined


def rounded(
    value: Tensor | QuantTensor, scheme: QuantScheme, scale_dtype: torch.dtype, name: str, path: Path
) -> tuple[QuantTensor, Mapping[str, object]]:
    """A weight rounded again from the float32 numbers that it means, with what the manifest says of it.

    Args:
        path: what errors name.

    Raises:
        NonFiniteError: if it holds NaN or Inf, or its scales overflow their type.
    """
    floats = value.dequantize() if isinstance(value, QuantTensor) else value
    checked_cast(floats, floats.dtype, name, path, False, "repair the source; such numbers cannot be rounded")
    found = quantize_rtn(floats, scheme, scale_dtype)
    if not all_finite(found.scale):
        raise NonFiniteError(f"tensor '{name}' holds values too large for scales in {scale_dtype}", path=path)
    return found, {"solver": ROUNDING, "relative_error": float(f"{relative_error(found, floats):.4g}")}


def _reason(
    source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat, *, weights: bool
) -> Reason | None:
    """Why a weight cannot be held exactly; None if it can."""
    codec = codes.codec(scheme, embedding=name == f"{EMBEDDING}.weight")
    if isinstance(codec, Reason) or not weights:
        return codec if isinstance(codec, Reason) else None
    value = source.load(name)
    assert isinstance(value, QuantTensor)
    stored = codec.encode(value)
    return stored if isinstance(stored, Reason) else None


def _closest(source: StoredCheckpoint, name: str, scheme: QuantScheme, codes: CodeFormat) -> QuantScheme:
    """Of the schemes that a format has, the one that loses least: as many bits or more, groups that are no longer."""
    columns = source.info(name).shape[1]
    fitting = [one for one in codes.schemes if one.group_size is None or columns % one.group_size == 0]
    if not fitting:
        raise UnsupportedError(
            f"tensor '{name}' cannot be rounded to {codes.name}", path=source.path, found=f"{columns} columns",
            expected=", ".join(map(str, codes.schemes)),
        )  # fmt: skip
    wanted = columns // scheme.groups(columns)

    def loss(one: QuantScheme) -> tuple[object, ...]:
        size = columns // one.groups(columns)
        fewer, longer = one.bits < scheme.bits, size > wanted
        return fewer, abs(one.bits - scheme.bits), longer, size if fewer or longer else -size, one != scheme

    return min(fitting, key=loss)


def _suggested(source: StoredCheckpoint, name: str) -> QuantScheme:
    """The scheme that takes about the room of integers whose codes are not carried."""
    rows, columns = source.info(name).shape
    bits = 8 * source.stored_bytes(name) / (rows * columns)
    return QuantScheme(4, 32).fitted(columns) if bits <= _MOST_BITS_OF_INT4 else QuantScheme(8, None)
