"""Which of llama.cpp's block types, and of the weights like them, the Triton kernels multiply, and
how these lie in memory.

A type's `PlaneLayout` is the only description of it on GPUs: packing, kernels and the stated memory
follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.kernels.triton_tiles import UNIT
from quantkit.tensors.scheme import SUPER_BLOCK, Codes, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec

LANES = 16
"""Lanes of a unit, see `triton_planes`."""

PLANE_FIELDS = ("codes", "high", "scale", "minimum", "outer", "outer_minimum", "table")
"""The tensors of a `PlaneWeight`, in the order in which kernels take them."""

# Bits in the first plane, by bits of a code; the second plane has the others.
_LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 4}
_FLOAT_GROUPS: tuple[int, ...] = (32, 64, 128)
_INTEGER_GROUPS = (16, 32)


@dataclass(frozen=True)
class PlaneLayout:
    """How a weight of a scheme lies in planes.

    Attributes:
        low_bits: the bits of a code in the first plane.
        high_bits: the others, in the second plane; 0 if there is none.
        group: columns that share a scale.
        nested: scales and minima are integers, times float16 numbers for 256 columns.
        has_minima: whether groups have minima; otherwise the middle code is zero.
        in_table: codes are indices of `TABLE`.
    """

    low_bits: int
    high_bits: int
    group: int
    nested: bool
    has_minima: bool
    in_table: bool

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return self.low_bits + self.high_bits

    @property
    def lift(self) -> int:
        """Return what is added to the integers of scales, so that none is negative."""
        if self.has_minima:
            return 0
        return 128

    @property
    def shares_bytes(self) -> bool:
        """Return whether the integers of a scale and a minimum share a byte: those of Q2_K have 4
        bits each.
        """
        return self.nested and self.has_minima and self.group == LANES

    def constants(self) -> dict[str, int | bool]:
        """List the constants that kernels are compiled for."""
        return {
            "LOW": self.low_bits,
            "HIGH": self.high_bits,
            "GROUP": self.group,
            "NESTED": self.nested,
            "MINIMA": self.has_minima,
            "IN_TABLE": self.in_table,
        }


def find_layout(scheme: QuantScheme) -> PlaneLayout | None:
    """Find the layout of a scheme's weights; None if the kernels do not multiply them in planes.

    Int4 with a float for each group has another layout, see `triton_words`, and needs none.
    """
    if scheme.group_size is None or scheme.of_small_floats:
        return None
    nested = scheme.scales is Scales.SUPER_BLOCKS
    allowed_groups = _FLOAT_GROUPS
    if nested:
        allowed_groups = _INTEGER_GROUPS
    if scheme.group_size not in allowed_groups:
        return None
    # Of floats without minima, these are Q8_0 and larger groups.
    if scheme.scales is Scales.FLOATS and not (scheme.bits == 8 and scheme.symmetric):
        return None
    return PlaneLayout(
        low_bits=_LOW_BITS[scheme.bits],
        high_bits=scheme.bits - _LOW_BITS[scheme.bits],
        group=scheme.group_size,
        nested=nested,
        has_minima=scheme.has_minima,
        in_table=scheme.codes is Codes.TABLE,
    )


def require_layout(scheme: QuantScheme) -> PlaneLayout:
    """Return the layout of a scheme that the backend supports in planes."""
    layout = find_layout(scheme)
    assert layout is not None, scheme
    return layout


def count_plane_bytes(spec: TensorSpec, layout: PlaneLayout) -> int:
    """Count the bytes of a weight [O, I] in planes."""
    rows = spec.shape[0]
    columns = spec.shape[1]
    units = math.ceil(columns / UNIT)
    code_bytes = units * UNIT * layout.bits // 8
    if layout.high_bits == 1 and units % 2:
        # Two units share the integers of a plane of one bit.
        code_bytes += UNIT // 8
    groups = units * UNIT // layout.group
    count = 1
    if layout.has_minima:
        count = 2
    if layout.nested:
        # Integers, and float16 numbers for 256 columns.
        scale_bytes = columns // SUPER_BLOCK * count * 2
        if layout.shares_bytes:
            scale_bytes += groups
        else:
            scale_bytes += groups * count
    else:
        scale_bytes = groups * count * spec.dtype.itemsize
    return rows * (code_bytes + scale_bytes)
