"""Quantization schemes: how a weight matrix is held as integers."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from quantkit.arguments import as_integer, as_string, require_flags
from quantkit.errors import RequestError
from quantkit.json_values import shown

_LIKE_GGUF = {"q4": ["int4-g32"], "q8": ["int8"]}  # by how the names of GGUF's types begin
_FALLBACK_GROUP_SIZES = (128, 64, 32)  # tried in this order when the requested one does not divide a row

SPELLINGS = "int8, int4-g32, int4-g64 or int4-g128"
"""The schemes that a user may request, for messages and help; those of int4 also with zero points: ``-asym``."""


@dataclass(frozen=True)
class QuantScheme:
    """How one weight matrix [O, I] is held as integers: ``w = scale * (code - zero)``.

    Checkpoints that others made may have any that can be constructed; users are offered those of `SCHEMES`.

    Attributes:
        bits: bits per code, 4 or 8.
        group_size: inputs that share a scale; ``None`` means one scale per row.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise each group stores its own.

    Raises:
        RequestError: for other bits, a group size that is no multiple of 8, or values of other types.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    def __post_init__(self) -> None:
        require_flags(symmetric=self.symmetric)
        object.__setattr__(self, "bits", as_integer("bits", self.bits))
        if self.group_size is not None:
            object.__setattr__(self, "group_size", as_integer("group_size", self.group_size))
        if self.bits not in (4, 8):
            raise RequestError("bits per weight are not supported", found=self.bits, expected="4 or 8")
        if self.group_size is not None and (self.group_size <= 0 or self.group_size % 8):
            raise RequestError(
                "group size is not supported", found=self.group_size, expected="a positive multiple of 8"
            )

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """One of `SCHEMES` by its name.

        Raises:
            RequestError: if there is none of that name.
        """
        name = as_string("scheme", text).strip().lower()
        if name in SCHEMES:
            return SCHEMES[name]
        if name in ("int4", "int4-asym"):
            raise RequestError(f"{name} needs a group size: {name.replace('int4', 'int4-g128')}")
        near = difflib.get_close_matches(name.replace("_", "-"), SCHEMES, 1) or _LIKE_GGUF.get(name[:2], [])
        raise RequestError(
            "unknown quantization scheme", found=shown(text),
            expected=f"{SPELLINGS}; int4 also with zero points: int4-g128-asym",
            hint=f"did you mean {near[0]}?" if near else None,
        )  # fmt: skip

    def __str__(self) -> str:
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"int{self.bits}{group}{'' if self.symmetric else '-asym'}"

    @property
    def levels(self) -> int:
        """Number of codes, ``2 ** bits``."""
        return 1 << self.bits

    def groups(self, columns: int) -> int:
        """Scales per row for a matrix with this many columns.

        Raises:
            RequestError: if the group size does not divide the columns.
        """
        if self.group_size is None:
            return 1
        if columns % self.group_size:
            raise RequestError(f"group size of {self} does not divide the row", found=f"{columns} columns")
        return columns // self.group_size

    def cut(self, start: int, stop: int) -> QuantScheme:
        """The scheme of the columns from `start` up to `stop`: groups are halved, or worse, where a cut goes
        through one, and both parts keep its scale and zero point.

        Raises:
            RequestError: if the parts are too small for groups.
        """
        if self.group_size is None:
            return self
        size = math.gcd(self.group_size, start, stop)
        if size == self.group_size:
            return self
        if size % 8:
            raise RequestError(
                f"a cut through a group of {self} leaves too small a part", found=f"{size} columns",
                expected="a multiple of 8", hint="use fewer processes",
            )  # fmt: skip
        return QuantScheme(self.bits, size, self.symmetric)

    def fitted(self, columns: int) -> QuantScheme:
        """The scheme actually used for a matrix with this many columns.

        The policy for rows that the group size does not divide: the largest smaller group of 128, 64 or 32 that does;
        if none does, int8 per row. No layer is left unquantized for its shape.
        """
        if self.group_size is None or columns % self.group_size == 0:
            return self
        for size in _FALLBACK_GROUP_SIZES:
            if size < self.group_size and columns % size == 0:
                return QuantScheme(self.bits, size, self.symmetric)
        return QuantScheme(8, None)


_IN_GROUPS = [QuantScheme(4, size, symmetric) for symmetric in (True, False) for size in (32, 64, 128)]
SCHEMES = {str(scheme): scheme for scheme in (QuantScheme(8, None), *_IN_GROUPS)}
"""The schemes that a user may request, by name: those that the gate lets through and that kernels serve."""
EMBEDDING_SCHEME = SCHEMES["int8"]
"""What embeddings are quantized to: a scale for each token, as each has one row."""
