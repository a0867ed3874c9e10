"""Which schemes the CPU kernels multiply, and how many bytes they take there; without torch, so
that commands state what a model takes before it is loaded.
"""

from __future__ import annotations

from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import SUPER_BLOCK, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec

COLUMNS = 32
"""Columns that share an activation scale; groups have a multiple of them."""

# The layout of ``layout.h``: bands of 16 rows, a line of 64 bytes for what the rows of a band have
# for a group, and a header before all of them.
_ROWS = 16
_LINE_BYTES = 64
_HEADER_BYTES = 64
# Scales and minima of 2 bits have 4 bits each, and share a byte.
_PAIRED_BITS = 2


def explain_unsupported_scheme(scheme: QuantScheme) -> str | None:
    """Explain why the kernels do not multiply weights of a scheme; None if they do."""
    # Twice the numbers of MXFP4 are integers.
    if scheme.of_small_floats and scheme.scales is not Scales.POWERS:
        return "weights are small floats; it multiplies integers"
    # The blocks of llama.cpp have groups of 16 or 32, and K-quants of 256.
    if scheme.group_size is not None and scheme.unit % COLUMNS:
        return f"group size is not a multiple of {COLUMNS}"
    return None


def count_packed_bytes(spec: TensorSpec) -> int:
    """Count the bytes of a quantized weight [O, I] in the layout of the kernels."""
    scheme = spec.scheme
    assert scheme is not None
    rows, columns = spec.shape
    padded_columns = _round_up(columns, COLUMNS)
    codes = padded_columns * scheme.bits * _ROWS // 8
    groups = scheme.groups(columns)
    if scheme.scales is Scales.SUPER_BLOCKS:
        num_inner = 1
        if scheme.has_minima and scheme.bits != _PAIRED_BITS:
            num_inner = 2
        scales = columns // SUPER_BLOCK * _LINE_BYTES + groups * _ROWS * num_inner
    else:
        scale_dtype = spec.dtype
        if scheme.scales is Scales.POWERS:
            # It has all powers of two, whatever the type in which they are read.
            scale_dtype = DType.BFLOAT16
        groups_per_line = _LINE_BYTES // (_ROWS * scale_dtype.itemsize)
        # Zero points and minima are in a line after that of their scales.
        num_lines = 1 if scheme.symmetric else 2
        scales = -(-groups // groups_per_line) * _LINE_BYTES * num_lines
    bands = -(-rows // _ROWS)
    return _HEADER_BYTES + bands * (codes + scales)


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
