"""Which of llama.cpp's block types, and of the weights like them, the Triton kernels multiply, and
how these lie in memory; without torch.

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

# Bits of the planes that codes of some bits are split into.
_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
_FLOAT_GROUPS = (32, 64, 128)
_INTEGER_GROUPS = (16, 32)


@dataclass(frozen=True)
class PlaneLayout:
    """How a weight of a scheme lies in planes.

    Attributes:
        planes: bits of the planes; the second is 0 if there is only one.
        group: columns that share a scale.
        nested: scales and minima are integers, times float16 numbers for 256 columns.
        has_minima: whether groups have minima; otherwise the middle code is zero.
        in_table: codes are indices of `TABLE`.
    """

    planes: tuple[int, int]
    group: int
    nested: bool
    has_minima: bool
    in_table: bool

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return sum(self.planes)

    @property
    def lift(self) -> int:
        """Return what is added to the integers of scales, so that none is negative."""
        return 0 if self.has_minima else 128

    @property
    def shares_bytes(self) -> bool:
        """Return whether the integers of a scale and a minimum share a byte: those of Q2_K have 4
        bits each.
        """
        return self.nested and self.has_minima and self.group == LANES

    def constants(self) -> dict[str, int | bool]:
        """List the constants that kernels are compiled for."""
        first_bits, second_bits = self.planes
        return {
            "FIRST": first_bits,
            "SECOND": second_bits,
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
    allowed_groups = _INTEGER_GROUPS if nested else _FLOAT_GROUPS
    if scheme.group_size not in allowed_groups:
        return None
    # Of floats without minima, these are Q8_0 and larger groups.
    if scheme.scales is Scales.FLOATS and not (scheme.bits == 8 and scheme.symmetric):
        return None
    return PlaneLayout(
        planes=_PLANES[scheme.bits],
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
    rows, columns = spec.shape
    units = math.ceil(columns / UNIT)
    code_bytes = units * UNIT * layout.bits // 8
    if layout.planes[1] == 1 and units % 2:
        # Two units share the integers of a plane of one bit.
        code_bytes += UNIT // 8
    groups = units * UNIT // layout.group
    # Scales, and minima.
    count = 2 if layout.has_minima else 1
    if layout.nested:
        inner_bytes = groups if layout.shares_bytes else groups * count
        scale_bytes = inner_bytes + columns // SUPER_BLOCK * count * 2
    else:
        scale_bytes = groups * count * spec.dtype.itemsize
    return rows * (code_bytes + scale_bytes)
