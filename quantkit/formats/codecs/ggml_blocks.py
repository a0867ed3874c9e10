"""The bytes of GGUF's blocks of integers: codes, scales and minima, packed and unpacked exactly.

Blocks of 32 weights: a float16 scale ``d``, in asymmetric ones (``Q4_1``, ``Q5_1``) a float16
``m``, ``w = d * code + m``; in those of 5 bits the codes' highest bits; then two 4-bit codes a
byte: byte j holds those of weights j (low) and j + 16.

K-quants, blocks of 256 weights: a float16 ``d`` and, in asymmetric ones, ``dmin``; integers for
groups of 32 (``Q4_K``, ``Q5_K``) or 16 weights; the codes' lower bits, which two or four weights
share a byte for, and their higher bits apart. ``IQ4_NL`` and ``IQ4_XS`` are blocks of either kind
whose codes are numbers of a table. ``MXFP4`` is a block of 32 weights with the exponent of a power
of two, plus 127, in place of ``d``, and codes e2m1. Sources: ggml's block_q4_1, block_q5_0,
block_q5_1, block_q2_K, block_q3_K, block_q4_K, block_q5_K, block_q6_K, block_iq4_nl, block_iq4_xs,
block_mxfp4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.small_floats import decode_exponents, encode_exponents
from quantkit.tensors import scheme as schemes
from quantkit.tensors.late import block_scales, torch
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.block_scales import BlockScales

_FLOAT16_BYTES = 2


@dataclass(frozen=True)
class BlockLayout:
    """The arrangement of a type's blocks in bytes.

    Attributes:
        scheme: of the weights.
        pack: takes codes [N, block] uint8 and scales with rows [N, ...], one for each block;
            returns bytes [N, ...].
        unpack: the inverse.
    """

    scheme: QuantScheme
    pack: Callable[[Tensor, BlockScales], Tensor]
    unpack: Callable[[Tensor], tuple[Tensor, BlockScales]]


def _as_bytes(values: Tensor) -> Tensor:
    """View float16 [N, K] as bytes [N, 2 K]."""
    # `contiguous` keeps the strides of an axis of length 1, as rows with one block have, and a view
    # of bytes needs 1.
    return values.half().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _as_float16(data: Tensor) -> Tensor:
    """View bytes [N, 2 K] as float16 [N, K]."""
    # Floats need aligned bytes.
    return data.clone(memory_format=torch.contiguous_format).view(torch.float16)


def _negate(values: Tensor) -> Tensor:
    """Change the sign of float16, of NaN too."""
    # Flipping the sign bit keeps the bytes of a NaN; arithmetic need not.
    return (values.contiguous().view(torch.int16) ^ -(1 << 15)).view(torch.float16)


def _pack_nibbles(codes: Tensor, size: int) -> Tensor:
    """Pack codes [N, B] of 4 bits into bytes [N, B / 2]: in each run of two times `size`, the
    first go to the low nibbles.
    """
    runs = codes.reshape(len(codes), -1, 2, size)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def _unpack_nibbles(data: Tensor, size: int) -> Tensor:
    runs = data.reshape(len(data), -1, size)
    return torch.stack((runs & 0xF, runs >> 4), 2).flatten(1)


def _pack_bits(flags: Tensor) -> Tensor:
    """Pack flags [N, 8 K] into bytes [N, K]: byte j has those from 8 j on, the first lowest."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    return (flags.reshape(len(flags), -1, 8) * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(data: Tensor) -> Tensor:
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _pack_planes(values: Tensor, bits: int, size: int) -> Tensor:
    """Pack values [N, K * size] of some bits into bytes: byte j of each run of `size` has those of
    weights j, j + size, and so on, the first lowest, as many as it has room for.
    """
    count = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    # The shifted values have no bit in common, so that their sum is their union.
    shifted = values.reshape(len(values), -1, count, size) << shifts
    return shifted.sum(2, dtype=torch.uint8).flatten(1)


def _unpack_planes(data: Tensor, bits: int, size: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    return (data.reshape(len(data), -1, 1, size) >> shifts & (1 << bits) - 1).flatten(1)


def _build_small_layout(scheme: QuantScheme) -> BlockLayout:
    """Build the layout of blocks of 32 weights."""
    has_fifth_bit = scheme.bits == 5
    size = 16

    def pack(codes: Tensor, scales: BlockScales) -> Tensor:
        fields = [_as_bytes(scales.scale)]
        if scales.minimum is not None:
            # These blocks add `m`; `BlockScales` subtracts its minimum, as K-quants do.
            fields.append(_as_bytes(_negate(scales.minimum)))
        if has_fifth_bit:
            fields.append(_pack_bits(codes >> 4))
        return torch.cat((*fields, _pack_nibbles(codes & 0xF, size)), 1)

    def unpack(data: Tensor) -> tuple[Tensor, BlockScales]:
        scale = _as_float16(data[:, :_FLOAT16_BYTES])
        fields = data[:, _FLOAT16_BYTES:]
        minimum = None
        if not scheme.symmetric:
            minimum = _negate(_as_float16(fields[:, :_FLOAT16_BYTES]))
            fields = fields[:, _FLOAT16_BYTES:]
        codes = _unpack_nibbles(fields[:, -size:], size)
        if has_fifth_bit:
            codes = codes | _unpack_bits(fields[:, :-size]) << 4
        return codes, block_scales.BlockScales(scale, minimum, None, None)

    return BlockLayout(scheme, pack, unpack)


def _pack_scales_and_minima(scales: BlockScales) -> Tensor:
    """Pack ``d``, ``dmin`` and eight pairs of 6 bits in 12 bytes."""
    assert (
        scales.outer is not None and scales.outer_minimum is not None and scales.minimum is not None
    )
    # Bytes 0 to 3 have the first four scales and bytes 4 to 7 the first four minima, each with the
    # two high bits of the last four; bytes 8 to 11 have the low nibbles of the last four.
    first, last = torch.split(scales.scale.to(torch.uint8), 4, 1)
    low, high = torch.split(scales.minimum.to(torch.uint8), 4, 1)
    inner = (first | last >> 4 << 6, low | high >> 4 << 6, (last & 0xF) | high << 4)
    return torch.cat((_as_bytes(scales.outer), _as_bytes(scales.outer_minimum), *inner), 1)


def _unpack_scales_and_minima(data: Tensor) -> BlockScales:
    outer = _as_float16(data[:, :_FLOAT16_BYTES])
    outer_minimum = _as_float16(data[:, _FLOAT16_BYTES : 2 * _FLOAT16_BYTES])
    first, second, third = torch.split(data[:, 2 * _FLOAT16_BYTES :], 4, 1)
    scale = torch.cat((first & 0x3F, (third & 0xF) | first >> 6 << 4), 1)
    minimum = torch.cat((second & 0x3F, third >> 4 | second >> 6 << 4), 1)
    return block_scales.BlockScales(scale.half(), minimum.half(), outer, outer_minimum)


def _pack_q4(codes: Tensor, scales: BlockScales) -> Tensor:
    return torch.cat((_pack_scales_and_minima(scales), _pack_nibbles(codes, 32)), 1)


def _unpack_q4(data: Tensor) -> tuple[Tensor, BlockScales]:
    return _unpack_nibbles(data[:, 16:], 32), _unpack_scales_and_minima(data[:, :16])


def _pack_q5(codes: Tensor, scales: BlockScales) -> Tensor:
    fifth_bits = _pack_planes(codes >> 4, 1, 32)
    return torch.cat(
        (_pack_scales_and_minima(scales), fifth_bits, _pack_nibbles(codes & 0xF, 32)), 1
    )


def _unpack_q5(data: Tensor) -> tuple[Tensor, BlockScales]:
    codes = _unpack_nibbles(data[:, 48:], 32) | _unpack_planes(data[:, 16:48], 1, 32) << 4
    return codes, _unpack_scales_and_minima(data[:, :16])


def _pack_q6(codes: Tensor, scales: BlockScales) -> Tensor:
    assert scales.outer is not None
    low = _pack_nibbles(codes & 0xF, 64)
    high = _pack_planes(codes >> 4, 2, 32)
    inner = scales.scale.to(torch.int8).view(torch.uint8)
    return torch.cat((low, high, inner, _as_bytes(scales.outer)), 1)


def _unpack_q6(data: Tensor) -> tuple[Tensor, BlockScales]:
    low, high, inner, outer = torch.split(data, [128, 64, 16, _FLOAT16_BYTES], 1)
    codes = _unpack_nibbles(low, 64) | _unpack_planes(high, 2, 32) << 4
    scale = inner.contiguous().view(torch.int8).half()
    return codes, block_scales.BlockScales(scale, None, _as_float16(outer), None)


def _pack_q3(codes: Tensor, scales: BlockScales) -> Tensor:
    """Pack the codes' highest bits, then their low two bits, then the scales plus 32: their low
    nibbles by eights, and their high two bits by fours; last ``d``.
    """
    assert scales.outer is not None
    inner = (scales.scale + 32).to(torch.uint8)
    return torch.cat(
        (
            _pack_planes(codes >> 2, 1, 32),
            _pack_planes(codes & 3, 2, 32),
            _pack_nibbles(inner & 0xF, 8),
            _pack_planes(inner >> 4, 2, 4),
            _as_bytes(scales.outer),
        ),
        1,
    )


def _unpack_q3(data: Tensor) -> tuple[Tensor, BlockScales]:
    high, low, nibbles, pairs, outer = torch.split(data, [32, 64, 8, 4, _FLOAT16_BYTES], 1)
    codes = _unpack_planes(low, 2, 32) | _unpack_planes(high, 1, 32) << 2
    inner = _unpack_nibbles(nibbles, 8) | _unpack_planes(pairs, 2, 4) << 4
    return codes, block_scales.BlockScales(inner.half() - 32, None, _as_float16(outer), None)


def _pack_q2(codes: Tensor, scales: BlockScales) -> Tensor:
    """Pack scales (low) and minima (high) of 4 bits in 16 bytes, the codes, ``d``, ``dmin``."""
    assert (
        scales.outer is not None and scales.outer_minimum is not None and scales.minimum is not None
    )
    inner = scales.scale.to(torch.uint8) | scales.minimum.to(torch.uint8) << 4
    outer = (_as_bytes(scales.outer), _as_bytes(scales.outer_minimum))
    return torch.cat((inner, _pack_planes(codes, 2, 32), *outer), 1)


def _unpack_q2(data: Tensor) -> tuple[Tensor, BlockScales]:
    inner, codes, outer, outer_minimum = torch.split(
        data, [16, 64, _FLOAT16_BYTES, _FLOAT16_BYTES], 1
    )
    scales = block_scales.BlockScales(
        (inner & 0xF).half(), (inner >> 4).half(), _as_float16(outer), _as_float16(outer_minimum)
    )
    return _unpack_planes(codes, 2, 32), scales


def _pack_iq4_nl(codes: Tensor, scales: BlockScales) -> Tensor:
    return torch.cat((_as_bytes(scales.scale), _pack_nibbles(codes, 16)), 1)


def _unpack_iq4_nl(data: Tensor) -> tuple[Tensor, BlockScales]:
    scale, codes = torch.split(data, [_FLOAT16_BYTES, 16], 1)
    scales = block_scales.BlockScales(_as_float16(scale), None, None, None)
    return _unpack_nibbles(codes, 16), scales


def _pack_iq4_xs(codes: Tensor, scales: BlockScales) -> Tensor:
    """Pack ``d``, then the scales plus 32: their high two bits by fours, and their low nibbles by
    twos; last the codes.
    """
    assert scales.outer is not None
    inner = (scales.scale + 32).to(torch.uint8)
    high = _pack_planes(inner >> 4, 2, 1)
    low = _pack_nibbles(inner & 0xF, 1)
    return torch.cat((_as_bytes(scales.outer), high, low, _pack_nibbles(codes, 16)), 1)


def _unpack_iq4_xs(data: Tensor) -> tuple[Tensor, BlockScales]:
    outer, high, low, codes = torch.split(data, [_FLOAT16_BYTES, 2, 4, 128], 1)
    inner = _unpack_nibbles(low, 1) | _unpack_planes(high, 2, 1) << 4
    scales = block_scales.BlockScales(inner.half() - 32, None, _as_float16(outer), None)
    return _unpack_nibbles(codes, 16), scales


def _pack_mxfp4(codes: Tensor, scales: BlockScales) -> Tensor:
    return torch.cat((encode_exponents(scales.scale), _pack_nibbles(codes, 16)), 1)


def _unpack_mxfp4(data: Tensor) -> tuple[Tensor, BlockScales]:
    scale = decode_exponents(data[:, :1])
    return _unpack_nibbles(data[:, 1:], 16), block_scales.BlockScales(scale, None, None, None)


LAYOUTS = {
    GgmlType.Q4_1: _build_small_layout(schemes.Q4_1),
    GgmlType.Q5_0: _build_small_layout(schemes.Q5_0),
    GgmlType.Q5_1: _build_small_layout(schemes.Q5_1),
    GgmlType.Q3_K: BlockLayout(schemes.Q3_K, _pack_q3, _unpack_q3),
    GgmlType.Q4_K: BlockLayout(schemes.Q4_K, _pack_q4, _unpack_q4),
    GgmlType.Q5_K: BlockLayout(schemes.Q5_K, _pack_q5, _unpack_q5),
    GgmlType.Q6_K: BlockLayout(schemes.Q6_K, _pack_q6, _unpack_q6),
    GgmlType.Q2_K: BlockLayout(schemes.Q2_K, _pack_q2, _unpack_q2),
    GgmlType.IQ4_NL: BlockLayout(schemes.IQ4_NL, _pack_iq4_nl, _unpack_iq4_nl),
    GgmlType.IQ4_XS: BlockLayout(schemes.IQ4_XS, _pack_iq4_xs, _unpack_iq4_xs),
    GgmlType.MXFP4: BlockLayout(schemes.MXFP4, _pack_mxfp4, _unpack_mxfp4),
}
"""By type."""
