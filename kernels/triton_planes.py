"""The layout of llama.cpp's block types for the Triton kernels: codes of 2 to 8 bits in planes, in
units of 128 columns.

A unit has 16 *lanes*. A lane has the codes of 8 columns, those with its number in each of 8 runs of
16 columns: two in each of four *pairs*, one of either half of the lane. That is the order of the
words of int4 (`triton_words`), so the activations need no other order than for those.

Codes are split into one or two planes of 4, 2 or 1 bits: 6 bits are 4 and 2. A lane of a plane is
an integer of 8 codes, of 32 or 16 bits, or of one bit a byte. So a thread loads the same lanes of
both planes, and joins their bits without moving any to another thread. Two units share the integers
of a plane of one bit, because Triton orders what tensor cores multiply by the narrowest integers
that it loads: bytes would be moved.

The integers that scales and minima of K-quants are lie in words of 32 bits as well, four of a unit
in each, next to the float16 numbers that 256 columns share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.triton_layout import LANES, PlaneLayout
from quantkit.kernels.triton_tiles import UNIT
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import TABLE, QuantScheme

BASE = 0x43800000
"""The bits of 256, whose last places are 2**-15: an integer of 8 bits, put there, is added.

It is an argument of kernels: as a constant it would cost an instruction for each code.
"""

_PAIRS = 4
_INTEGERS = {1: torch.int16, 2: torch.int16, 4: torch.int32}
"""By bits of a plane, what a lane is stored in."""
# Of a lane, in a plane of one bit.
_UNIT_BITS = 8
# Codes that are packed at a time: the intermediate integers take four bytes for each.
_PACK_CODES = 1 << 25


@dataclass(frozen=True)
class PlaneWeight:
    """A weight [O, I] in planes, of U units; None for what its type lacks.

    Attributes:
        codes: the lowest bits of codes, [O, 16 U]; int32 for 4 bits, int16 for 2.
        high: the other bits, likewise; for 1 bit int16 with two units in each, [O, 16 ceil(U / 2)].
        scale: of groups, floats [O, G] with G for whole units; or words of integers, int32
            [O, W U].
        minimum: of groups, floats [O, G]; those of K-quants are in the words of `scale`.
        outer, outer_minimum: float16 [O, U / 2].
        table: the numbers that codes stand for, float16 [16].
    """

    codes: Tensor
    high: Tensor | None
    scale: Tensor
    minimum: Tensor | None
    outer: Tensor | None
    outer_minimum: Tensor | None
    table: Tensor | None

    def find_layout(self, low_bits: int, high_bits: int, group: int) -> PlaneLayout:
        """Return the layout of the weight, whose planes have these bits."""
        return PlaneLayout(
            low_bits=low_bits,
            high_bits=high_bits,
            group=group,
            nested=self.outer is not None,
            has_minima=self.minimum is not None or self.outer_minimum is not None,
            in_table=self.table is not None,
        )


def pack_weight(weight: QuantTensor, layout: PlaneLayout) -> PlaneWeight:
    """Pack a weight whose scheme has the layout; zeros fill the last unit."""
    low_parts = []
    high_parts = []
    for codes in weight.codes.split(max(1, _PACK_CODES // weight.shape[1])):
        padded = F.pad(codes, (0, -codes.shape[1] % UNIT))
        low_parts.append(_pack_plane(padded & (2**layout.low_bits - 1), layout.low_bits))
        if layout.high_bits:
            high_parts.append(_pack_plane(padded >> layout.low_bits, layout.high_bits))
    high = None
    if high_parts:
        high = torch.cat(high_parts)
    scale = weight.scale
    minimum = weight.minimum
    if layout.nested:
        scale = _pack_integers(weight, layout)
        minimum = None
    else:
        # Groups that fill the last unit.
        missing = -weight.shape[1] % UNIT // layout.group
        scale = F.pad(scale, (0, missing)).contiguous()
        if minimum is not None:
            minimum = F.pad(minimum, (0, missing)).contiguous()
    table = None
    if layout.in_table:
        # Of 32 bits, Triton would copy what it looks up through shared memory.
        table = torch.tensor(TABLE, dtype=torch.float16, device=scale.device)
    return PlaneWeight(
        codes=torch.cat(low_parts),
        high=high,
        scale=scale,
        minimum=minimum,
        outer=_contiguous(weight.outer),
        outer_minimum=_contiguous(weight.outer_minimum),
        table=table,
    )


def unpack_weight(
    packed: PlaneWeight, layout: PlaneLayout, scheme: QuantScheme, columns: int
) -> QuantTensor:
    """Restore a weight of some columns from its planes."""
    codes = _unpack_plane(packed.codes, layout.low_bits)
    if packed.high is not None:
        high = _unpack_plane(packed.high, layout.high_bits)[:, : codes.shape[1]]
        codes = codes | high << layout.low_bits
    scale = packed.scale
    minimum = packed.minimum
    groups = columns // layout.group
    if layout.nested:
        minimum = _unpack_minima(scale, layout)
        scale = _unpack_scales(scale, layout)
    else:
        scale = scale[:, :groups]
        if minimum is not None:
            minimum = minimum[:, :groups]
    return QuantTensor(
        codes[:, :columns].contiguous(),
        scale,
        None,
        scheme,
        minimum,
        packed.outer,
        packed.outer_minimum,
    )


def _contiguous(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    return values.contiguous()


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [O, 128 U] of 1, 2 or 4 bits into lanes [O, 16 U], half as many for 1 bit."""
    runs = codes.view(len(codes), -1, _PAIRS, 2, LANES)
    lanes = torch.zeros_like(runs[:, :, 0, 0], dtype=torch.int32)
    for pair in range(_PAIRS):
        for half in range(2):
            position = bits * (pair + _PAIRS * half)
            lanes |= runs[:, :, pair, half].to(torch.int32) << position
    if bits == 1:
        lanes = F.pad(lanes, (0, 0, 0, lanes.shape[1] % 2))
        lanes = lanes[:, ::2] | lanes[:, 1::2] << _UNIT_BITS
    # Narrower integers keep the lowest bits.
    return lanes.to(_INTEGERS[bits]).flatten(1)


def _unpack_plane(lanes: Tensor, bits: int) -> Tensor:
    """Extract codes, uint8 [O, 128 U], from lanes; for 1 bit those of an even number of units."""
    shifts = torch.arange(2 * _PAIRS, device=lanes.device, dtype=torch.int32) * bits
    units = lanes.view(len(lanes), -1, 1, LANES).to(torch.int32)
    if bits == 1:
        units = torch.cat((units, units >> _UNIT_BITS), 2).view(len(lanes), -1, 1, LANES)
    # The mask removes the other codes, and the sign that a shift repeats.
    codes = (units >> shifts.view(-1, 1)) & (2**bits - 1)
    # Runs are numbered by half and pair here.
    runs = codes.view(len(lanes), -1, 2, _PAIRS, LANES).transpose(2, 3)
    ordered: Tensor = runs.to(torch.uint8).flatten(1)
    return ordered


def _pack_integers(weight: QuantTensor, layout: PlaneLayout) -> Tensor:
    """Pack the integers of a K-quant's groups [O, G] into words [O, W U]: those of a unit's scales,
    then of its minima; a byte each, or half of one.
    """
    raised = (weight.scale + layout.lift).to(torch.uint8)
    groups = raised.view(len(raised), -1, UNIT // layout.group)
    if weight.minimum is not None:
        minima = weight.minimum.to(torch.uint8).view_as(groups)
        if layout.shares_bytes:
            groups = groups | minima << 4
        else:
            groups = torch.cat((groups, minima), -1)
    return groups.flatten(1).contiguous().view(torch.int32)


def _unpack_scales(words: Tensor, layout: PlaneLayout) -> Tensor:
    """Extract the integers of scales, float16 [O, G]; see `_pack_integers`."""
    values = words.contiguous().view(torch.uint8)
    if layout.shares_bytes:
        values = values & 0xF
    elif layout.has_minima:
        values = values.view(len(values), -1, 2, UNIT // layout.group)[:, :, 0].flatten(1)
    return values.half() - layout.lift


def _unpack_minima(words: Tensor, layout: PlaneLayout) -> Tensor | None:
    """Extract the integers of minima, float16 [O, G]; None without minima."""
    if not layout.has_minima:
        return None
    values = words.contiguous().view(torch.uint8)
    if layout.shares_bytes:
        return (values >> 4).half()
    return values.view(len(values), -1, 2, UNIT // layout.group)[:, :, 1].flatten(1).half()


@triton.jit
def spread_halves(lanes, BITS: tl.constexpr):
    """Place the codes of a lane's second half from bit 16 on, those of the first are from bit 0
    on.
    """
    if BITS == 4:
        wide = lanes
    else:
        HALF: tl.constexpr = 4 * BITS
        wide = lanes.to(tl.int32)
        wide = (wide & (2**HALF - 1)) | ((wide << (16 - HALF)) & ((2**HALF - 1) << 16))
    return wide


@triton.jit
def add_base(integers, base):
    """Compute 256 plus integers of 8 bits, in float32."""
    return (((integers & 0xFF) << 15) | base).to(tl.float32, bitcast=True)


@triton.jit
def codes_of_pair(lanes, high, NUMBER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Take a pair's codes from spread lanes of both planes: one from bit 0 on, one from bit 16
    on.
    """
    codes = (lanes >> (LOW * NUMBER)) & ((2**LOW - 1) * 0x10001)
    if HIGH:
        codes |= ((high >> (HIGH * NUMBER)) & ((2**HIGH - 1) * 0x10001)) << LOW
    return codes


@triton.jit
def load_group(weight, at, PART: tl.constexpr, LAYOUT: tl.constexpr):
    """Load the step and the offset of one of a unit's groups, float32 [ROWS, 1], both exact; the
    offset is 0 without minima.

    Args:
        weight: the pointers of a `PlaneWeight`, in its order.
        at: as for `weights_of_pair`.
        LAYOUT: the values of `PlaneLayout.constants`.
    """
    row = at[0]
    unit = at[1]
    units = at[2]
    base = at[3]
    GROUP: tl.constexpr = LAYOUT[2]
    MINIMA: tl.constexpr = LAYOUT[4]
    PARTS: tl.constexpr = 128 // GROUP
    scale = weight[2]
    if LAYOUT[3]:
        # Minima of groups of 16 share a byte with scales; those of groups of 32 follow them.
        SHARED: tl.constexpr = MINIMA and GROUP == 16
        WORDS: tl.constexpr = PARTS // 2 if MINIMA and GROUP == 32 else PARTS // 4
        LIFT: tl.constexpr = 0.0 if MINIMA else 128.0
        word = row * (units * WORDS) + unit * WORDS + PART // 4
        integers = tl.load(scale + word) >> (PART % 4 * 8)
        shared = row * (units // 2) + unit // 2
        outer_step = tl.load(weight[4] + shared).to(tl.float32)
        inner = add_base((integers & 0xF) if SHARED else integers, base)
        # A product of 9 and 11 bits is exact in float32, and so is the difference.
        step = tl.fma(inner, outer_step, -(256.0 + LIFT) * outer_step)
        offset = tl.zeros(step.shape, tl.float32)
        if MINIMA:
            outer_offset = tl.load(weight[5] + shared).to(tl.float32)
            if SHARED:
                integers = (integers >> 4) & 0xF
            else:
                integers = tl.load(scale + word + PARTS // 4) >> (PART % 4 * 8)
            offset = tl.fma(add_base(integers, base), outer_offset, -256.0 * outer_offset)
    else:
        group = row * (units * PARTS) + unit * PARTS + PART
        step = tl.load(scale + group).to(tl.float32)
        offset = tl.zeros(step.shape, tl.float32)
        if MINIMA:
            offset = tl.load(weight[3] + group).to(tl.float32)
    return step, offset


@triton.jit
def weigh(codes, step, offset, table, base, LAYOUT: tl.constexpr, DTYPE: tl.constexpr):
    """Compute weights [ROWS, 16] in DTYPE from codes in the lowest 8 bits."""
    MINIMA: tl.constexpr = LAYOUT[4]
    CENTRE: tl.constexpr = 256.0 if MINIMA else 256.0 + 2.0 ** (LAYOUT[0] + LAYOUT[1] - 1)
    if LAYOUT[5]:
        weights = tl.load(table + (codes & 0xF)).to(tl.float32) * step
    elif DTYPE.is_fp32():
        # As `QuantTensor.dequantize`, whose product of a code and an integer is exact.
        weights = (add_base(codes, base) - CENTRE) * step - offset
    else:
        # One instruction for a weight. What is subtracted may be off by 2**-16 of a step, which is
        # much less than what rounding to 16 bits changes.
        weights = tl.fma(add_base(codes, base), step, -(CENTRE * step + offset))
    return weights.to(DTYPE)


@triton.jit
def weights_of_pair(
    weight, lanes, high, at, NUMBER: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr
):
    """Compute the weights [ROWS, 16] of both halves of a unit's pair.

    Args:
        lanes, high: from `load_lanes`.
        at: rows [ROWS, 1], unit and units as for that, and `BASE`.
    """
    base = at[3]
    GROUP: tl.constexpr = LAYOUT[2]
    codes = codes_of_pair(lanes, high, NUMBER, LAYOUT[0], LAYOUT[1])
    step, offset = load_group(weight, at, NUMBER * 32 // GROUP, LAYOUT)
    first = weigh(codes, step, offset, weight[6], base, LAYOUT, DTYPE)
    # The second half is the next group, if a group is one run of columns.
    if GROUP == 16:
        step, offset = load_group(weight, at, NUMBER * 2 + 1, LAYOUT)
    second = weigh(codes >> 16, step, offset, weight[6], base, LAYOUT, DTYPE)
    return first, second


@triton.jit
def load_lanes(weight, row, unit, units, LAYOUT: tl.constexpr):
    """Load the lanes [ROWS, 16] of a unit of both planes, spread, for rows [ROWS, 1]."""
    # As many of each plane in a load: the layouts agree, and nothing moves between threads.
    lane = tl.max_contiguous(tl.arange(0, 16)[None, :], (1, 4))
    at = row * (units * 16) + unit * 16 + lane
    lanes = spread_halves(tl.load(weight[0] + at), LAYOUT[0])
    high = lanes
    if LAYOUT[1] == 1:
        # Two units share integers.
        at = row * (tl.cdiv(units, 2) * 16) + unit // 2 * 16 + lane
        high = spread_halves(tl.load(weight[1] + at).to(tl.int32) >> (unit % 2 * 8), 1)
    elif LAYOUT[1]:
        high = spread_halves(tl.load(weight[1] + at), LAYOUT[1])
    return lanes, high
