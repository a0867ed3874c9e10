"""SVG drawings: axes with round ticks, and text whose width is estimated."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.evals.names import Box, place_label

HEIGHT = 300
LOG_RATIO = 8
"""An axis whose values differ by a larger factor is logarithmic."""
_TOP, _BOTTOM = 28, HEIGHT - 46
_LETTER, _LINE = 7.1, 15  # pixels
_MAX_TICKS = 6
_DIGITS = 9  # of a tick label: more than a round value has, fewer than the noise of a float
_LARGE = 1e7
_MIN_SPAN = 0.05  # of the largest value
_LABEL_DISTANCES = (9.0, 18.0, 30.0, 44.0)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def pixel(self, value: float) -> float:
        """The position of a value; values outside the axis are moved to its ends."""
        scaled = math.log if self.log else float
        low, high = scaled(self.low), scaled(self.high)
        return self.start + (scaled(min(max(value, self.low), self.high)) - low) / (high - low) * (
            self.end - self.start
        )

    def ticks(self) -> list[float]:
        """A few round values."""
        if not self.log:
            step = _round_step((self.high - self.low) / _MAX_TICKS)
            first = math.ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        stride = max(1, len(decades) // _MAX_TICKS)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            values = [factor * 10.0**decade for decade in decades[::stride] for factor in factors]
            values = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(values) <= _MAX_TICKS:
                break
        return values


@dataclass(frozen=True)
class Shape:
    """An SVG element: its content is `text`, and `title` is shown at the pointer."""

    tag: str
    attributes: dict[str, Any]
    text: str = ""
    title: str | None = None


@dataclass(frozen=True)
class Drawing:
    """One SVG picture, `width` by `HEIGHT` pixels."""

    width: int
    shapes: list[Shape] = field(default_factory=list)

    @property
    def wide(self) -> bool:
        """Whether it is the drawing for wide windows."""
        return self.width > 400

    def line(self, kind: str, x: tuple[float, float], y: tuple[float, float], color: str | None = None) -> None:
        """A straight line between two points."""
        ends = dict(zip(("x1", "x2", "y1", "y2"), map(_rounded, (*x, *y)), strict=True))
        self.shapes.append(Shape("line", {"class": kind, **ends, "style": color and f"stroke:{color}"}))

    def text(
        self, content: str, x: float, y: float, kind: str, anchor: str, color: str | None = None,
        title: str | None = None,
    ) -> None:  # fmt: skip
        """A line of text with its baseline at `y`."""
        place = {"x": _rounded(x), "y": _rounded(y), "text-anchor": anchor}
        self.shapes.append(Shape("text", {"class": kind, **place, "style": color and f"fill:{color}"}, content, title))

    def y_axis(self, low: float, high: float, log: bool) -> Axis:
        """The vertical axis."""
        return Axis(low, high, _BOTTOM, _TOP, log)

    def axes(self, x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: Sequence[float] | None = None) -> None:
        """Grid lines, tick labels and titles."""
        for value in y.ticks():
            self.line("grid", (x.start, x.end), (y.pixel(value),) * 2)
            self.text(tick_label(value), x.start - 6, y.pixel(value) + 4, "tick", "end")
        for value in x.ticks() if x_ticks is None else x_ticks:
            self.text(tick_label(value), x.pixel(value), y.start + 18, "tick", "middle")
        self.line("base", (x.start, x.end), (y.start, y.start))
        self.text(x_title, x.end, y.start + 36, "axis", "end")
        self.text(y_title, 2, 13, "axis", "start")

    def label(self, content: str, x: float, y: float, within: Box, taken: list[Box], color: str) -> None:
        """A name next to a point."""
        place = place_label((x, y), (text_width(content), _LINE), _LABEL_DISTANCES, within, taken)
        self.text(content, place.left, place.high - 4, "name", "start", color)


@dataclass(frozen=True)
class Chart:
    """A drawing for wide windows and one for phones; `label` describes them to screen readers."""

    label: str
    drawings: list[Drawing]
    keys: list[str]

    @classmethod
    def empty(cls, label: str, keys: Iterable[str] = ()) -> Chart:
        """A chart to draw on."""
        return cls(label, [Drawing(500), Drawing(328)], list(keys))


def left_margin(y: Axis) -> float:
    """Pixels that the labels of the vertical axis need."""
    return max(52.0, 8 + max(text_width(tick_label(value)) for value in y.ticks()))


def tick_label(value: float) -> str:
    """A round value with all its digits."""
    if value and not 1e-3 <= abs(value) < _LARGE:
        digits, _, power = f"{value:.{_DIGITS - 1}e}".partition("e")
        digits, decade = digits.rstrip("0").rstrip("."), "10" + str(int(power)).translate(_SUPERSCRIPTS)
        return decade if digits == "1" else f"{digits}·{decade}"
    return f"{value:.{_DIGITS}g}" if abs(value) < 1e5 else f"{value:,.{_DIGITS}g}"


def axis_range(values: Sequence[float]) -> tuple[float, float, bool]:
    """The ends of an axis for values, and whether it is logarithmic; a logarithmic axis shows 0 at its low end."""
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) > LOG_RATIO * min(positive):
        return min(positive) / 1.6, max(positive) * 1.6, True
    low, high = min(values), max(values)
    margin = max(0.15 * (high - low), _MIN_SPAN * abs(high)) or 1.0
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin, False


def fit(name: str, letters: int) -> str:
    """A name no wider than a number of average letters; of a longer name both ends remain."""
    if text_width(name) <= letters * _LETTER:
        return name
    for kept in range(len(name) - 1, 1, -1):
        shortened = f"{name[: (kept + 1) // 2]}…{name[len(name) - kept // 2 :]}"
        if text_width(shortened) <= letters * _LETTER:
            return shortened
    return "…"


def text_width(content: str) -> float:
    """The approximate width of a text in pixels."""
    return _LETTER * sum(map(_relative_width, content))


def _relative_width(character: str) -> float:
    """The width of a character in average letters: an estimate, since fonts differ."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%":
        return 1.9
    if character in "mw":
        return 1.6
    if character < "\u0590":  # Latin, Greek, Cyrillic, Armenian
        return 1.25 if character.isupper() else 1.0
    return 4.0 if "\ufb50" <= character < "\ufe00" else 1.6  # Arabic ligatures can be entire words


def _rounded(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _round_step(minimum: float) -> float:
    power = 10.0 ** math.floor(math.log10(minimum))
    return power * next(step for step in (1, 2, 2.5, 5, 10) if step * power >= minimum * (1 - 1e-9))
