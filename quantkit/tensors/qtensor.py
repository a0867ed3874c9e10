"""`QuantTensor`, the definition of truth for quantized weights, and its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from quantkit.tensors import code_table, float_codes
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.scheme import TABLE, Codes, QuantScheme, Scales

FIELDS = ("codes", "scale", "zero", "minimum", "outer", "outer_minimum")
"""The tensors of a `QuantTensor`; all but the first two may be None."""


class Solver(StrEnum):
    """How the codes of a weight were computed, as manifests call it."""

    # `quantize_rtn`: on the scales that span each group.
    ROUNDING = "round-to-nearest"
    # `solver.rounding.quantize_searched`.
    SEARCHED = "round-to-nearest, searched scales"
    # The same, where inputs differ in size.
    WEIGHTED = "round-to-nearest, searched scales, weighted by inputs"
    # Codes are those of the source.
    CARRIED = "carried"
    # Codes and zero points are those of the source, scales are rounded to another type.
    SCALES_CAST = "scales cast"
    # Codes and zero points are those of the source, see `quantkit.refine`.
    SCALES_TRAINED = "scales trained"
    CODES_TRAINED = "scales and codes trained"


ROUNDED = (Solver.ROUNDING, Solver.SEARCHED, Solver.WEIGHTED)
CHUNK_ELEMENTS = 1 << 20
CACHED_ELEMENTS = 1 << 17
"""Elements whose float32 temporaries stay in a core's cache."""
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class QuantTensor:
    """A weight matrix as codes: ``w[o, i] = scale[o, g] * (codes[o, i] - zero[o, g])``; in GGUF's
    blocks ``w[o, i] = outer[o, s] * scale[o, g] * codes[o, i] - outer_minimum[o, s] * minimum[o,
    g]``; or as small floats: ``w[o, i] = step[o, g] * value(codes[o, i])``, see `steps`.

    Attributes:
        codes: [O, I] uint8, each below ``2 ** bits``; small floats as their bits.
        scale: [O, G] float16, bfloat16 or float32, as the file stores it, or an integer if there is
            an outer one.
        zero: [O, G] uint8, or None for a symmetric scheme, whose zero point is ``2 ** (bits - 1)``
            everywhere, and for one with minima.
        scheme: bits, group size and symmetry; G is ``scheme.groups(I)``.
        minimum: [O, G] like `scale`, for asymmetric schemes in blocks of GGUF; None for others.
        outer, outer_minimum: [O, S] float16 scales of scales and of minima, for schemes with such;
            None for others. Of NVFP4 `outer` is [O, 1] float32, equal in all rows, and scales are
            float16 here, which has all e4m3 numbers; of MXFP4 they are float32.

    Raises:
        ValueError: if a shape or dtype contradicts the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: QuantScheme
    minimum: Tensor | None = None
    outer: Tensor | None = None
    outer_minimum: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(
                f"codes must be uint8 [O, I], found {self.codes.dtype} {tuple(self.codes.shape)}"
            )
        if self.scale.dtype not in _SCALE_DTYPES:
            raise ValueError(
                f"scale must be float16, bfloat16 or float32, found {self.scale.dtype}"
            )
        expected = (self.codes.shape[0], self.scheme.groups(self.codes.shape[1]))
        if tuple(self.scale.shape) != expected:
            raise ValueError(f"scale must be {expected}, found {tuple(self.scale.shape)}")
        floats = self.scheme.scales is Scales.FLOATS
        nested = self.scheme.scales is Scales.SUPER_BLOCKS
        asymmetric = not self.scheme.symmetric
        self._require("zero", self.zero, expected, torch.uint8, is_expected=asymmetric and floats)
        self._require(
            "minimum",
            self.minimum,
            expected,
            self.scale.dtype,
            is_expected=asymmetric and not floats,
        )
        if self.scheme.of_small_floats:
            has_outer = self.scheme.scales is Scales.NESTED
            outer_shape = (expected[0], 1)
            self._require("outer", self.outer, outer_shape, torch.float32, is_expected=has_outer)
            return
        outer_shape = (expected[0], self.codes.shape[1] // self.scheme.unit)
        self._require("outer", self.outer, outer_shape, torch.float16, is_expected=nested)
        self._require(
            "outer_minimum",
            self.outer_minimum,
            outer_shape,
            torch.float16,
            is_expected=nested and asymmetric,
        )

    @staticmethod
    def _require(
        name: str,
        value: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        is_expected: bool,
    ) -> None:
        if (value is not None) != is_expected:
            raise ValueError(f"{name} must be set if and only if the scheme has it")
        if value is not None and (tuple(value.shape) != shape or value.dtype != dtype):
            raise ValueError(
                f"{name} must be {dtype} {shape}, found {value.dtype} {tuple(value.shape)}"
            )

    @classmethod
    def of_blocks(cls, codes: Tensor, scales: BlockScales, scheme: QuantScheme) -> QuantTensor:
        """Build a weight in blocks of GGUF."""
        return cls(
            codes, scales.scale, None, scheme, scales.minimum, scales.outer, scales.outer_minimum
        )

    @property
    def block_scales(self) -> BlockScales | None:
        """Return the scales of a weight in blocks of GGUF; None for others."""
        if self.scheme.scales is Scales.FLOATS or self.scheme.of_small_floats:
            return None
        return BlockScales(self.scale, self.minimum, self.outer, self.outer_minimum)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantTensor:
        """Apply a change to the codes, scales, minima and zero points, which are [O, I], [O, G] and
        [O, S].
        """
        zero = None if self.zero is None else change(self.zero)
        blocks = self.block_scales
        if blocks is not None:
            return QuantTensor.of_blocks(change(self.codes), blocks.map(change), self.scheme)
        outer = None if self.outer is None else change(self.outer)
        return QuantTensor(change(self.codes), change(self.scale), zero, self.scheme, outer=outer)

    def rows(self, start: int, stop: int) -> QuantTensor:
        """Slice output rows, as views."""
        return self.map(lambda tensor: tensor[start:stop])

    def take(self, index: Tensor) -> QuantTensor:
        """Select output rows by their numbers [N], in that order."""
        return self.map(lambda tensor: tensor[index])

    def merge_rows(self, rows: Tensor, other: QuantTensor) -> QuantTensor:
        """Combine the rows where a mask [O] is true with those of another weight elsewhere, which
        has the same scheme and shape.
        """
        concatenated = concatenate_rows([self, other])
        index = torch.arange(len(rows), device=rows.device)
        return concatenated.take(torch.where(rows, index, index + len(rows)))

    def columns(self, start: int, stop: int) -> QuantTensor:
        """Slice inputs; where a cut goes through a group, in smaller groups whose scales repeat.

        Raises:
            RequestError: see `QuantScheme.cut`.
        """
        scheme = self.scheme.cut(start, stop)
        codes = self.codes[:, start:stop]
        if self.scheme.group_size is None or scheme.group_size is None:
            return QuantTensor(codes, self.scale, self.zero, scheme)
        blocks = self.block_scales
        # `QuantScheme.cut` refuses cuts through a block.
        if blocks is not None:

            def slice_columns(values: Tensor) -> Tensor:
                size = self.shape[1] // values.shape[1]
                return values[:, start // size : stop // size]

            return QuantTensor.of_blocks(codes, blocks.map(slice_columns), scheme)
        first_inputs = torch.arange(start, stop, scheme.group_size, device=codes.device)
        groups = first_inputs // self.scheme.group_size
        zero = None if self.zero is None else self.zero[:, groups]
        return QuantTensor(codes, self.scale[:, groups], zero, scheme, outer=self.outer)

    def to(self, device: torch.device | str) -> QuantTensor:
        """Move the weight to another device."""
        return self.map(lambda tensor: tensor.to(device))

    @property
    def steps(self) -> Tensor:
        """Compute what codes less their zero points are multiplied with, [O, G] float32; of NVFP4
        the scale over the outer one, rounded to float32, as in compressed-tensors.
        """
        if self.scheme.scales is Scales.NESTED and self.outer is not None:
            return self.scale.float() / self.outer
        if self.block_scales is None:
            return self.scale.float()
        return self.block_scales.steps

    def dequantize(self) -> Tensor:
        """Compute the weights [O, I] in float32. This product, rounded once, is the truth."""
        rows, columns = self.shape
        groups = self.scale.shape[1]
        if self.scheme.of_small_floats:
            values = float_codes.decode_values(self.codes, self.scheme.codes).view(rows, groups, -1)
            return values.mul_(self.steps.unsqueeze(-1)).view(rows, columns)
        values = self.codes.view(rows, groups, -1).float()
        blocks = self.block_scales
        if blocks is None:
            steps = self.scale.float()
        else:
            steps = blocks.steps
            offsets = blocks.offsets
            if offsets is not None:
                scaled = values.mul_(steps.unsqueeze(-1))
                return scaled.sub_(offsets.unsqueeze(-1)).view(rows, columns)
        if self.scheme.codes is Codes.TABLE:
            values = code_table.look_up(self.codes.view(rows, groups, -1))
            return values.mul_(steps.unsqueeze(-1)).view(rows, columns)
        # The difference of two codes is exact in float32, so only the product is rounded.
        zero = self.scheme.levels // 2 if self.zero is None else self.zero.float().unsqueeze(-1)
        return values.sub_(zero).mul_(steps.unsqueeze(-1)).view(rows, columns)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Compute the weights [O, I], each in float32 and rounded once."""
        weights = torch.empty(self.shape, dtype=dtype)
        # In chunks, so that float32 takes little memory.
        for start, stop in row_chunks(*self.shape):
            weights[start:stop] = self.rows(start, stop).dequantize()
        return weights


def cast_scales(value: QuantTensor, *dtypes: torch.dtype) -> QuantTensor | None:
    """Round the scales of a weight to each type in turn, and keep its codes and zero points.

    Scales that are NaN or infinite stay so.

    Returns:
        None where a weight would move by more than half a step, as by rounding it anew: where a
        scale overflows, or becomes zero or subnormal, in a group that has other weights than zeros.
    """
    scale = value.scale
    for dtype in dtypes:
        scale = scale.to(dtype)
    rows, groups = scale.shape
    zero = value.scheme.levels // 2 if value.zero is None else value.zero.short().unsqueeze(-1)
    # Of the largest weight of each group, which moves furthest.
    steps = (value.codes.view(rows, groups, -1).short() - zero).abs().amax(-1)
    # In float64, so that the comparison with half a step is not rounded.
    before = value.scale.double()
    after = scale.double()
    within_half_step = steps * (after - before).abs() <= before.abs() / 2
    if not (within_half_step | ~before.isfinite()).all():
        return None
    return QuantTensor(value.codes, scale, value.zero, value.scheme)


def quantize_rtn(
    weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, outer: Tensor | None = None
) -> QuantTensor:
    """Round each weight to the nearest code of scales that span the groups, all arithmetic in
    float32.

    Symmetric scales spread the largest magnitude of a group over ``(levels - 1) / 2`` steps;
    asymmetric ones spread its range, zero included, over ``levels - 1`` steps. Codes are computed
    against the scale as stored. Where storing rounds it down, the largest weights are beyond the
    last code and are clipped to it.

    Args:
        weight: [O, I], any float dtype, finite.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in; MXFP4 and NVFP4 have types of their scales.
        outer: float32 [1], the float32 of NVFP4, which weights that are multiplied as one must
            share; None is the weight's.
    """
    if scheme.of_small_floats:
        span, span_outer = float_codes.spanning_scales(weight, scheme, scale_dtype, outer)
        return small_floats(weight, span, span_outer, scheme)
    rows, columns = weight.shape
    if scheme.scales is not Scales.FLOATS:
        parts = []
        for start, stop in row_chunks(rows, columns, CACHED_ELEMENTS):
            parts.append(_round_in_blocks(weight[start:stop], scheme))
        return concatenate_rows(parts)
    groups = scheme.groups(columns)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    zero: Tensor | None = None
    if not scheme.symmetric:
        zero = torch.empty(rows, groups, dtype=torch.uint8, device=weight.device)
    # Rows in chunks whose temporaries stay in the cache.
    for start, stop in row_chunks(rows, columns, CACHED_ELEMENTS):
        grouped = weight[start:stop].float().view(stop - start, groups, -1)
        scale[start:stop] = spanning_scales(grouped, scheme, scale_dtype)
        wide = scale[start:stop].float().unsqueeze(-1)
        if zero is None:
            offset: Tensor | int = scheme.levels // 2
        else:
            low = grouped.amin(-1).clamp(max=0).unsqueeze(-1)
            offset = (-low / wide).round().clamp(0, scheme.levels - 1)
            zero[start:stop] = offset.squeeze(-1).to(torch.uint8)
        grid = (grouped / wide).round_().add_(offset).clamp_(0, scheme.levels - 1)
        # Torch is slow from floats to bytes.
        codes[start:stop] = grid.view(stop - start, columns).to(torch.int16)
    return QuantTensor(codes, scale, zero, scheme)


def small_floats(
    weight: Tensor, scale: Tensor, outer: Tensor | None, scheme: QuantScheme
) -> QuantTensor:
    """Round a weight [O, I] to the nearest small floats of given scales [O, G], and of an outer one
    [O, 1].
    """
    steps = scale.float()
    if outer is not None:
        steps = steps / outer
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start, stop in row_chunks(len(weight), weight.shape[1], CACHED_ELEMENTS):
        grouped = weight[start:stop].float().view(stop - start, scale.shape[1], -1)
        row_steps = steps[start:stop].unsqueeze(-1)
        codes[start:stop] = float_codes.nearest(grouped, row_steps, scheme.codes).flatten(1)
    return QuantTensor(codes, scale, None, scheme, outer=outer)


def _round_in_blocks(weight: Tensor, scheme: QuantScheme) -> QuantTensor:
    """Round rows [O, I] to the nearest codes of scales that span the groups, both as GGUF's blocks
    store them.
    """
    grouped = weight.float().reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    high = grouped.amax(-1).clamp(min=0)
    low = grouped.amin(-1).clamp(max=0)
    if scheme.codes is Codes.TABLE:
        steps = torch.maximum(high / TABLE[-1], low / TABLE[0])
        scales = BlockScales.nearest(steps, None, scheme)
    elif scheme.symmetric:
        steps = torch.maximum(high, -low) / ((scheme.levels - 1) / 2)
        scales = BlockScales.nearest(steps, None, scheme)
    else:
        scales = BlockScales.nearest((high - low) / (scheme.levels - 1), -low, scheme)
    return QuantTensor.of_blocks(nearest_codes(grouped, scales, scheme), scales, scheme)


def nearest_codes(grouped: Tensor, scales: BlockScales, scheme: QuantScheme) -> Tensor:
    """Find the codes [O, I] uint8 whose values are nearest to weights [O, G, S]; the middle one
    where a step is zero.
    """
    steps = scales.steps.unsqueeze(-1)
    offsets = scales.offsets
    if scheme.codes is Codes.TABLE:
        quotients = torch.where(steps == 0, 0, grouped / steps)
        return code_table.find_nearest(quotients.flatten(1))
    if offsets is None:
        low = scheme.levels // 2
        shifted = grouped
    else:
        low = 0
        shifted = grouped + offsets.unsqueeze(-1)
    codes = torch.where(steps == 0, 0, shifted / steps).round_()
    codes = codes.add_(low).clamp_(0, scheme.levels - 1)
    # Torch is slow from floats to bytes.
    return codes.flatten(1).to(torch.int16).to(torch.uint8)


def concatenate_rows(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Concatenate the rows of weights, in order, which have one scheme and one dtype of scales."""
    first, *following = parts
    # A copy of a single part would only take memory.
    if not following:
        return first

    def concatenate_field(read: Callable[[QuantTensor], Tensor | None]) -> Tensor | None:
        tensors = [tensor for tensor in map(read, parts) if tensor is not None]
        if tensors:
            return torch.cat(tensors)
        return None

    codes = torch.cat([part.codes for part in parts])
    scale = torch.cat([part.scale for part in parts])
    return QuantTensor(
        codes=codes,
        scale=scale,
        zero=concatenate_field(lambda part: part.zero),
        scheme=first.scheme,
        minimum=concatenate_field(lambda part: part.minimum),
        outer=concatenate_field(lambda part: part.outer),
        outer_minimum=concatenate_field(lambda part: part.outer_minimum),
    )


def concatenate_if_uniform(parts: Sequence[QuantTensor]) -> QuantTensor | None:
    """Concatenate the rows of weights, in order; None where they differ in scheme or dtype of the
    scales.
    """
    if len({(part.scheme, part.scale.dtype) for part in parts}) != 1:
        return None
    return concatenate_rows(parts)


def relative_error(quantized: QuantTensor, weight: Tensor) -> float:
    """Compute the Frobenius norm of the weight error over that of the weight; 0 for all zeros."""
    error = 0.0
    norm = 0.0
    # In chunks, whose float32 temporaries stay in the cache.
    for start, stop in row_chunks(*quantized.shape, CACHED_ELEMENTS):
        reference = weight[start:stop].float()
        difference = quantized.rows(start, stop).dequantize().sub_(reference)
        error = math.hypot(error, frobenius(difference))
        norm = math.hypot(norm, frobenius(reference))
    return error / norm if norm else 0.0


def frobenius(matrix: Tensor) -> float:
    """Compute the Frobenius norm, accumulated in float64."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return norm.item()


def float_rows(value: Tensor | QuantTensor, start: int, stop: int) -> Tensor:
    """Read rows of a weight in float32, dequantized where it is quantized."""
    if isinstance(value, QuantTensor):
        return value.rows(start, stop).dequantize()
    return value[start:stop].float()


def row_chunks(
    rows: int, columns: int, elements: int = CHUNK_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Yield row ranges of `elements` elements, a million by default, so that float32 temporaries
    stay small.
    """
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis into int32 words, least significant bits first.

    Args:
        codes: [..., N] uint8 below ``2 ** bits``; bits 4 or 8.

    Returns:
        [..., ceil(N * bits / 32)] int32; the last word is padded with zero bits.
    """
    per_word = 32 // bits
    padding = -codes.shape[-1] % per_word
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    # Views of words need aligned bytes.
    aligned = codes.clone(memory_format=torch.contiguous_format)
    return aligned.view(-1).view(torch.int32).view(*codes.shape[:-1], -1)


def unpack_int32(words: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_int32`: [..., W] int32 to [..., count] uint8."""
    aligned = words.clone(memory_format=torch.contiguous_format)
    data = aligned.view(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 4:
        # Halves are written in place: stacked, both would be in memory twice.
        codes = data.new_empty((*data.shape[:-1], 2 * data.shape[-1]))
        torch.bitwise_and(data, 0xF, out=codes[..., 0::2])
        torch.bitwise_right_shift(data, 4, out=codes[..., 1::2])
        data = codes
    return data[..., :count].contiguous()


def spanning_scales(grouped: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Tensor:
    """Compute the scales [O, G] in their stored dtype with which codes span groups [O, G, S]; 1
    where a group is all zeros or too small to scale.
    """
    high = grouped.amax(-1)
    low = grouped.amin(-1)
    if scheme.symmetric:
        step = torch.maximum(high, -low) / ((scheme.levels - 1) / 2)
    else:
        step = (high.clamp(min=0) - low.clamp(max=0)) / (scheme.levels - 1)
    stored = step.to(scale_dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored))
