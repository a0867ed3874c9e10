"""Quantization schemes and the plan that assigns one to each linear layer."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError, RequestError
from quantkit.json_values import Settings, parsed, shown

FALLBACK_GROUP_SIZES = (128, 64, 32)
"""Group sizes tried, largest first, when the requested one does not divide a row."""

_SPELLING = re.compile(r"int(?P<bits>[48])(?:-g(?P<group>[0-9]{1,9}))?(?P<asym>-asym)?")


@dataclass(frozen=True)
class QuantScheme:
    """How one weight matrix [O, I] is held as integers: ``w = scale * (code - zero)``.

    Attributes:
        bits: bits per code, 4 or 8.
        group_size: inputs that share a scale; ``None`` means one scale per row.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise each
            group stores its own.

    Raises:
        RequestError: for other bits, or a group size that is no multiple of 8.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise RequestError("bits per weight are not supported", found=self.bits, expected="4 or 8")
        if self.group_size is not None and (self.group_size <= 0 or self.group_size % 8):
            raise RequestError(
                "group size is not supported",
                found=self.group_size,
                expected="a positive multiple of 8",
            )

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """Read ``int8``, ``int4-g128``, ``int4-g64-asym`` and the like.

        Raises:
            RequestError: if the text is not of that form.
        """
        match = _SPELLING.fullmatch(text.strip().lower())
        if match is None:
            raise RequestError(
                "unknown quantization scheme",
                found=shown(text),
                expected="int8, int4-g32, int4-g64 or int4-g128, with -asym for zero points",
            )
        group = match["group"]
        return cls(int(match["bits"]), None if group is None else int(group), match["asym"] is None)

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

        The policy for rows that the group size does not divide: the largest smaller
        group of 128, 64 or 32 that does; if none does, int8 per row. No layer is
        left unquantized for its shape.
        """
        if self.group_size is None or columns % self.group_size == 0:
            return self
        for size in FALLBACK_GROUP_SIZES:
            if size < self.group_size and columns % size == 0:
                return QuantScheme(self.bits, size, self.symmetric)
        return QuantScheme(8, None)


@dataclass(frozen=True)
class Override:
    """A glob on module names and what holds for those it matches (``None``: keep as float)."""

    pattern: str
    scheme: QuantScheme | None

    def matches(self, module: str) -> bool:
        return fnmatch.fnmatchcase(module, self.pattern)


@dataclass(frozen=True)
class Recipe:
    """A default scheme for all decoder linears and per-layer overrides, later ones winning.

    ``lm_head`` keeps its floats unless an override names it.
    """

    default: QuantScheme
    overrides: tuple[Override, ...] = ()

    @classmethod
    def from_json(cls, path: str | Path) -> Recipe:
        """Read ``{"default": "int4-g128", "overrides": [{"pattern": ..., "scheme": ...}]}``.

        A scheme of ``"keep"`` leaves the layers in floating point.

        Raises:
            RequestError: if the file is missing, is no such JSON, or names unknown keys.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the plan: {error}", path=path) from error
        try:
            settings = Settings(parsed(text, path), path)
            _require_keys(settings, {"default"}, {"overrides"})
            overrides = tuple(map(_override, settings.objects("overrides")))
            return cls(QuantScheme.parse(settings.text("default")), overrides)
        except QuantkitError as error:
            expected = '{"default": SCHEME, "overrides": [{"pattern": GLOB, "scheme": SCHEME or "keep"}]}'
            raise RequestError(
                f"is not a quantization plan: {error.problem}", path=path, found=error.found,
                expected=error.expected or expected,
            ) from error  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The JSON form that `from_json` reads."""
        return {
            "default": str(self.default),
            "overrides": [
                {"pattern": o.pattern, "scheme": "keep" if o.scheme is None else str(o.scheme)} for o in self.overrides
            ],
        }

    def keeping(self, patterns: Iterable[str]) -> Recipe:
        """This plan with more layers kept as floats."""
        return Recipe(self.default, self.overrides + tuple(Override(p, None) for p in patterns))

    def requested(self, module: str) -> QuantScheme | None:
        """What the plan asks for one module, before the shape is looked at."""
        for override in reversed(self.overrides):
            if override.matches(module):
                return override.scheme
        return None if module == "lm_head" else self.default

    def assign(self, columns: Mapping[str, int]) -> dict[str, QuantScheme]:
        """The scheme of every module that gets one, fitted to its columns.

        Args:
            columns: every linear module by name with its number of inputs.

        Raises:
            RequestError: if an override matches no module.
        """
        for override in self.overrides:
            if not any(override.matches(module) for module in columns):
                raise RequestError(
                    "pattern matches no linear layer",
                    found=shown(override.pattern),
                    expected="a glob such as 'model.layers.0.*' or '*.down_proj'",
                )
        requested = {module: self.requested(module) for module in columns}
        return {m: s.fitted(columns[m]) for m, s in requested.items() if s is not None}


def _override(entry: Settings) -> Override:
    _require_keys(entry, {"pattern", "scheme"}, set())
    pattern, scheme = entry.text("pattern"), entry.text("scheme")
    return Override(pattern, None if scheme == "keep" else QuantScheme.parse(scheme))


def _require_keys(settings: Settings, needed: set[str], optional: set[str]) -> None:
    keys = set(settings.values)
    if needed - keys or keys - needed - optional:
        raise RequestError("unknown or missing keys", found=shown(sorted(keys)))
