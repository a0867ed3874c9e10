"""Quantization schemes: how a weight matrix is stored as integers."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from enum import StrEnum

from quantkit.base.arguments import as_integer, as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError

SUPER_BLOCK = 256
"""The weights of a row that share a scale of scales; see `Scales.SUPER_BLOCKS`."""
# Tried in this order when the requested one does not divide a row.
_FALLBACK_GROUP_SIZES = (
    128,
    64,
    32,
)

SPELLINGS = "int8, int4-g32, int4-g64 or int4-g128"
"""The schemes that a user may request, for messages and help; those of int4 also with zero
points: ``-asym``.
"""


class Scales(StrEnum):
    """How the scales of groups are stored, and what an asymmetric group stores in addition to its
    scale.
    """

    # A float; an integer zero point.
    FLOATS = "floats"
    # A float; a minimum in floats: GGUF's Q5_0, Q4_1, Q5_1 and IQ4_NL, in float16, and MLX.
    BLOCKS = "blocks"
    # Integers, times a float16 for 256 weights; a minimum likewise: GGUF's K-quants and IQ4_XS.
    SUPER_BLOCKS = "super-blocks"
    # A float for `TILE` rows and as many columns.
    TILES = "tiles"
    # A power of two, of MXFP4 (OCP Microscaling Formats 1.0).
    POWERS = "powers"
    # A float8 e4m3 over a float32 of the whole tensor, of NVFP4.
    NESTED = "nested"


class Codes(StrEnum):
    """What codes are: integers with equal steps or from a table, or small floats."""

    INTEGERS = "integers"
    # A sign, 2 bits of exponent, 1 of mantissa: 0 to 6.
    E2M1 = "e2m1"
    # Torch's float8_e4m3fn: 0 to 448.
    E4M3 = "e4m3"
    # Numbers of the integers in `TABLE`, of IQ4_NL and IQ4_XS.
    TABLE = "table"


TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's kvalues_iq4nl."""
_FLOAT_BITS = {Codes.E2M1: 4, Codes.E4M3: 8}
_FLOAT_NAMES = {
    Scales.FLOATS: "fp8",
    Scales.TILES: "fp8-block",
    Scales.POWERS: "mxfp4",
    Scales.NESTED: "nvfp4",
}
# The group size of GGUF's blocks without scales of scales.
_BLOCK = 32
_OF_SMALL_FLOATS = (Scales.TILES, Scales.POWERS, Scales.NESTED)
TILE = 128
"""The rows, and the columns, that share a scale; see `Scales.TILES`."""


@dataclass(frozen=True)
class QuantScheme:
    """How one weight matrix [O, I] is stored: as integers, ``w = scale * (code - zero)`` or
    ``w = scale * code - minimum``; or as small floats, ``w = scale * code``, or in a table, ``w =
    scale * TABLE[code]``.

    Checkpoints that others made may have any that can be constructed; users are offered those of
    `SCHEMES`.

    Attributes:
        bits: bits per code: 4 or 8; 2 to 6 in blocks of GGUF; 4, 5 or 8 with minima in floats.
        group_size: inputs that share a scale; ``None`` means one scale per row.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise each group stores its
            own, or a minimum.
        scales: how scales are stored.
        codes: what codes are; small floats and those of a table are symmetric.

    Raises:
        RequestError: for other bits, a group size that is no multiple of 8, or values of other
            types.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    scales: Scales = Scales.FLOATS
    codes: Codes = Codes.INTEGERS

    def __post_init__(self) -> None:
        require_flags(symmetric=self.symmetric)
        object.__setattr__(self, "bits", as_integer("bits", self.bits))
        if self.group_size is not None:
            object.__setattr__(self, "group_size", as_integer("group_size", self.group_size))
        # GGUF's blocks of 32 and its K-quants.
        expected: tuple[int, ...] = (2, 3, 4, 5, 6)
        if self.scales is Scales.FLOATS or self.of_small_floats:
            expected = (4, 8)
        # MLX has 8 bits with minima as well.
        elif self.scales is Scales.BLOCKS and not self.symmetric:
            expected = (4, 5, 8)
        if self.bits not in expected:
            expected_text = " or ".join(map(str, expected))
            raise RequestError(
                "bits per weight are not supported", found=self.bits, expected=expected_text
            )
        if self.of_small_floats:
            fits = _FLOAT_BITS.get(self.codes) == self.bits
        elif self.codes is Codes.TABLE:
            in_blocks = self.scales in (Scales.BLOCKS, Scales.SUPER_BLOCKS)
            fits = in_blocks and self.bits == 4 and self.symmetric
        else:
            fits = self.scales not in _OF_SMALL_FLOATS
        if not fits:
            raise RequestError(
                "this weight type and this kind of scales cannot be combined",
                found=f"{self.bits} bits, {self.codes}, {self.scales}",
                expected=", ".join(_FLOAT_NAMES.values()),
            )
        if self.group_size is not None and (self.group_size <= 0 or self.group_size % 8):
            raise RequestError(
                "group size is not supported",
                found=self.group_size,
                expected="a positive multiple of 8",
            )

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """Parse the name of one of `SCHEMES`.

        Raises:
            RequestError: if no scheme has that name.
        """
        name = as_string("scheme", text).strip().lower()
        if name in SCHEMES:
            return SCHEMES[name]
        if name in ("int4", "int4-asym"):
            raise RequestError(f"{name} needs a group size: {name.replace('int4', 'int4-g128')}")
        if name in GGUF_SCHEMES:
            return GGUF_SCHEMES[name]
        if name in FLOAT_SCHEMES:
            return FLOAT_SCHEMES[name]
        schemes = {**GGUF_SCHEMES, **FLOAT_SCHEMES, **SCHEMES}
        # GGUF's names have underscores, the others hyphens; a user may mix them up.
        matches = difflib.get_close_matches(name, schemes, 1)
        matches += difflib.get_close_matches(name.replace("_", "-"), schemes, 1)
        raise RequestError(
            "unknown quantization scheme",
            found=format_value(text),
            expected=(
                f"{SPELLINGS}; int4 also with zero points: int4-g128-asym;"
                f" {', '.join(FLOAT_SCHEMES)}; for GGUF also {GGUF_SPELLINGS}"
            ),
            hint=f"did you mean {matches[0]}?" if matches else None,
        )

    def __str__(self) -> str:
        if self.of_small_floats:
            return _FLOAT_NAMES[self.scales]
        if self.codes is Codes.TABLE:
            return "iq4_xs" if self.scales is Scales.SUPER_BLOCKS else "iq4_nl"
        if self.scales is Scales.SUPER_BLOCKS:
            return f"q{self.bits}_k"
        if self.scales is not Scales.FLOATS:
            # llama.cpp's names: 0 for symmetric blocks, 1 for blocks with a minimum.
            name = f"q{self.bits}_{int(not self.symmetric)}"
            if self.scales is Scales.BLOCKS and self.group_size != _BLOCK:
                name += f"-g{self.group_size}"
            return name
        name = f"int{self.bits}"
        if self.group_size is not None:
            name += f"-g{self.group_size}"
        if not self.symmetric:
            name += "-asym"
        return name

    @property
    def of_small_floats(self) -> bool:
        """Return whether codes are small floats, whose steps differ."""
        return self.codes in _FLOAT_BITS

    @property
    def is_int4(self) -> bool:
        """Return whether codes are integers of 4 bits."""
        return self.bits == 4 and self.codes is Codes.INTEGERS

    @property
    def has_minima(self) -> bool:
        """Return whether groups have minima instead of zero points."""
        return not self.symmetric and self.scales in (Scales.BLOCKS, Scales.SUPER_BLOCKS)

    @property
    def levels(self) -> int:
        """Count the codes, ``2 ** bits``."""
        return 1 << self.bits

    @property
    def unit(self) -> int:
        """Return the number of columns that are stored as a unit; 1 without groups."""
        if self.scales is Scales.SUPER_BLOCKS:
            return SUPER_BLOCK
        return self.group_size or 1

    @property
    def of_floats(self) -> QuantScheme:
        """Return the scheme with as many codes, and a float scale for each group: to search scales
        with. It need not be one that can be constructed.
        """
        changed = replace(self)
        # `replace` with another field would check the bits, which may be those of blocks only.
        object.__setattr__(changed, "scales", Scales.FLOATS)
        return changed

    def groups(self, columns: int) -> int:
        """Count the scales per row for a matrix with this many columns.

        Raises:
            RequestError: if the group size does not divide the columns.
        """
        if self.group_size is None:
            return 1
        if columns % self.unit:
            raise RequestError(
                f"group size of {self} does not divide the row", found=f"{columns} columns"
            )
        return columns // self.group_size

    def cut(self, start: int, stop: int) -> QuantScheme:
        """Choose the scheme of the columns from `start` up to `stop`: groups are halved, or worse,
        where a cut goes through one, and both parts keep its scale and zero point.

        Raises:
            RequestError: if the parts are too small for groups.
        """
        if self.group_size is None:
            return self
        size = math.gcd(self.unit, start, stop)
        if size == self.unit:
            return self
        if size % 8 or self.scales is not Scales.FLOATS:
            raise RequestError(
                f"a group of {self} would be split into parts that are too small",
                found=f"{size} columns",
                expected="a multiple of 8",
                hint="use fewer processes",
            )
        return QuantScheme(self.bits, size, self.symmetric)

    def fit_to_columns(self, columns: int) -> QuantScheme:
        """Choose the scheme actually used for a matrix with this many columns.

        The policy for rows that the group size does not divide: the largest smaller group of 128,
        64 or 32 that does; if none does, int8 per row. No layer is left unquantized for its shape.
        A type that 256 does not divide becomes what llama.cpp takes instead: IQ4_NL, Q4_0, Q5_0,
        Q5_1, or Q8_0 as int8 in groups of 32. Of small floats, those of 8 bits become FP8 per row,
        those of 4 bits int8 per row.
        """
        if columns % self.unit == 0:
            return self
        if self.of_small_floats:
            if self.bits == 8:
                return FP8
            return QuantScheme(8, None)
        if self.scales is not Scales.FLOATS:
            if columns % 32 == 0:
                if self.codes is Codes.TABLE:
                    return IQ4_NL
                return _K_FALLBACKS.get(self.bits, self)
            return QuantScheme(8, None)
        assert self.group_size is not None
        for size in _FALLBACK_GROUP_SIZES:
            if size < self.group_size and columns % size == 0:
                return QuantScheme(self.bits, size, self.symmetric)
        return QuantScheme(8, None)

    def with_dividing_groups(self, columns: int) -> QuantScheme:
        """Derive a scheme that loses about as much, for rows that the group size need not divide.

        Bounds on errors use it, to find what a layer's scheme would cost the weight of another
        layer. `fit_to_columns` does not serve there, because it may choose more bits. Here the bits
        stay, and the groups shrink to a size that divides the row; a K-quant's groups also lose the
        scales of scales, which need blocks of 256.
        """
        if columns % self.unit == 0:
            return self
        if self.scales is Scales.TILES:
            return FP8
        assert self.group_size is not None
        size = math.gcd(self.group_size, columns)
        if self.scales is Scales.SUPER_BLOCKS:
            scales = Scales.BLOCKS
        else:
            scales = self.scales
        # A group size must be a multiple of 8.
        return replace(self, group_size=None if size % 8 else size, scales=scales)


_IN_GROUPS = [
    QuantScheme(4, 32),
    QuantScheme(4, 64),
    QuantScheme(4, 128),
    QuantScheme(4, 32, False),
    QuantScheme(4, 64, False),
    QuantScheme(4, 128, False),
]
SCHEMES = {str(scheme): scheme for scheme in (QuantScheme(8, None), *_IN_GROUPS)}
"""The schemes that a user may request, by name: those that the gate lets through and that
kernels serve.
"""
Q4_0 = QuantScheme(4, 32)
Q8_0 = QuantScheme(8, 32)
Q4_1 = QuantScheme(4, 32, False, Scales.BLOCKS)
Q5_1 = QuantScheme(5, 32, False, Scales.BLOCKS)
Q5_0 = QuantScheme(5, 32, True, Scales.BLOCKS)
Q3_K = QuantScheme(3, 16, True, Scales.SUPER_BLOCKS)
Q6_K = QuantScheme(6, 16, True, Scales.SUPER_BLOCKS)
Q4_K = QuantScheme(4, 32, False, Scales.SUPER_BLOCKS)
Q5_K = QuantScheme(5, 32, False, Scales.SUPER_BLOCKS)
Q2_K = QuantScheme(2, 16, False, Scales.SUPER_BLOCKS)
IQ4_NL = QuantScheme(4, 32, True, Scales.BLOCKS, Codes.TABLE)
IQ4_XS = QuantScheme(4, 32, True, Scales.SUPER_BLOCKS, Codes.TABLE)
_BLOCKS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, Q4_1, Q5_0, Q5_1)
# Q4_0 and Q8_0 are also int4-g32 and int8-g32, as `str` calls them, so GGUF's names are added.
GGUF_SCHEMES = {str(scheme): scheme for scheme in (*_BLOCKS, Q8_0)}
GGUF_SCHEMES |= {"q4_0": Q4_0, "q8_0": Q8_0}
"""Those that a user may request for GGUF, by name."""
GGUF_SPELLINGS = "q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, q4_0, q4_1, q5_0, q5_1, q8_0"
FP8 = QuantScheme(8, None, codes=Codes.E4M3)
FP8_BLOCK = QuantScheme(
    bits=8, group_size=TILE, symmetric=True, scales=Scales.TILES, codes=Codes.E4M3
)
MXFP4 = QuantScheme(bits=4, group_size=32, symmetric=True, scales=Scales.POWERS, codes=Codes.E2M1)
NVFP4 = QuantScheme(bits=4, group_size=16, symmetric=True, scales=Scales.NESTED, codes=Codes.E2M1)
FLOAT_SCHEMES = {_FLOAT_NAMES[scheme.scales]: scheme for scheme in (FP8, FP8_BLOCK, MXFP4, NVFP4)}
"""Those in small floats that a user may request for compressed-tensors, MXFP4 also for GGUF, by
name; there are no kernels for them here.
"""
_K_FALLBACKS = {2: Q4_0, 3: Q4_0, 4: Q5_0, 5: Q5_1, 6: Q8_0}
EMBEDDING_SCHEME = SCHEMES["int8"]
"""What embeddings are quantized to: a scale for each token, as each has one row."""
KEEP = "keep"
"""In place of the scheme of an embedding: its floats."""
