"""What charts share: axes, their ticks, and labels that keep out of each other's way."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantkit.evals.html.elements import Attributes, Markup, element, joined

WIDTHS = {"wide": 500, "narrow": 328}
"""In pixels, of the two drawings of each chart: one is shown where a window is wide, the other on phones."""
HEIGHT = 300
FAR_APART = 8
"""Values further apart stand on a logarithmic axis."""
_LETTER = 7.1  # width, in pixels
_LINE = 15
_TICKS = 6
_DIGITS = 9  # of a label: more than any round value has, and fewer than a float's, whose last are noise
_LARGE = 1e7  # values from there on are spelled by their power of ten
_ALIKE = 0.05  # of a value: no axis is shorter, so that its labels stay so
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Where a value lies, in pixels; at an end what lies beyond it."""
        scaled = math.log if self.log else float
        share = (scaled(min(max(value, self.low), self.high)) - scaled(self.low)) / (
            scaled(self.high) - scaled(self.low)
        )
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, few of them."""
        if not self.log:
            step = _round_step((self.high - self.low) / _TICKS)
            first = math.ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = max(1, len(decades) // _TICKS)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
            found = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            if len(found) <= _TICKS:
                break
        return found


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


def drawn(draw: Callable[[int], Iterable[str]], label: str) -> Markup:
    """A chart for wide and for narrow windows.

    Args:
        draw: gives the elements of a chart of so many pixels in width, and `HEIGHT`.
        label: what it shows, for those who cannot see it.
    """
    return joined(*(
        element("svg", {"class": f"chart {kind}", "viewBox": f"0 0 {width} {HEIGHT}", "width": width, "height": HEIGHT,
                        "role": "img", "aria-label": label}, *draw(width))
        for kind, width in WIDTHS.items()
    ))  # fmt: skip


def frame(x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: Sequence[float] | None = None) -> list[Markup]:
    """Lines of a grid, what they stand for, and what the axes are."""
    found = []
    for value in y.ticks():
        at = y.at(value)
        found.append(element("line", {"class": "grid", "x1": x.start, "x2": x.end, "y1": at, "y2": at}))
        found.append(text(tick(value), x.start - 6, at + 4, "tick", "end"))
    for value in x.ticks() if x_ticks is None else x_ticks:
        found.append(text(tick(value), x.at(value), y.start + 18, "tick", "middle"))
    found.append(element("line", {"class": "base", "x1": x.start, "x2": x.end, "y1": y.start, "y2": y.start}))
    found.append(text(x_title, x.end, y.start + 36, "axis", "end"))
    found.append(text(y_title, 2, 13, "axis", "start"))
    return found


def left_margin(y: Axis) -> float:
    """Pixels to the left of a chart that the labels of its upright axis need."""
    return max(52.0, 8 + max(wide(tick(value)) for value in y.ticks()))


def tick(value: float) -> str:
    """A round value with all its digits."""
    if value and not 1e-3 <= abs(value) < _LARGE:
        digits, _, power = f"{value:.{_DIGITS - 1}e}".partition("e")
        digits, decade = digits.rstrip("0").rstrip("."), "10" + str(int(power)).translate(_SUPERSCRIPTS)
        return decade if digits == "1" else f"{digits}·{decade}"
    return f"{value:.{_DIGITS}g}" if abs(value) < 1e5 else f"{value:,.{_DIGITS}g}"


def text(content: str, x: float, y: float, kind: str, anchor: str, color: str | None = None) -> Markup:
    """A line of text; `y` is its base line."""
    fill = None if color is None else f"fill:{color}"
    at: Attributes = {"class": kind, "x": round(x, 1), "y": round(y, 1), "text-anchor": anchor, "style": fill}
    return element("text", at, content)


def label_near(content: str, x: float, y: float, within: Box, taken: list[Box], color: str) -> Markup:
    """A name beside a mark, where the least else stands; takes its place."""
    width = wide(content)
    found: list[tuple[float, Box]] = []
    for away in (9.0, 18.0, 30.0, 44.0):
        for right, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            left = x + right * away - (width if right < 0 else width / 2 if right == 0 else 0)
            base = y - up * away + 4 + (4 if up < 0 else -2 if up > 0 else 0)
            box = Box(left, base - _LINE + 4, left + width, base + 4)
            outside = width * _LINE - box.shared(within)
            cost = sum(box.shared(other) for other in taken) + 10 * outside + away / 10
            found.append((cost, box))
    place = min(found, key=lambda one: one[0])[1]
    taken.append(place)
    return text(content, place.left, place.bottom - 4, "name", "start", color)


def spread(values: Sequence[float]) -> tuple[float, float, bool]:
    """The ends of an axis for values, and whether it is logarithmic: at the foot of such a one stands what is 0."""
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) > FAR_APART * min(positive):
        return min(positive) / 1.6, max(positive) * 1.6, True
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), _ALIKE * abs(high)) or 1.0
    return max(0.0, low - room) if low >= 0 else low - room, high + room, False


def short(name: str, letters: int) -> str:
    """A name that fits in the room of so many letters: of a longer one both ends."""
    if wide(name) <= letters * _LETTER:
        return name
    for kept in range(len(name) - 1, 1, -1):
        found = f"{name[: (kept + 1) // 2]}…{name[len(name) - kept // 2 :]}"
        if wide(found) <= letters * _LETTER:
            return found
    return "…"


def wide(content: str) -> float:
    """About how wide a name is drawn, in pixels."""
    return _LETTER * sum(map(_letters, content))


def _letters(sign: str) -> float:
    """How many ordinary letters a sign is as wide as: estimated, as fonts differ."""
    if unicodedata.category(sign) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(sign) in "WF" or sign in "MW@%":
        return 1.9
    if sign in "mw":
        return 1.6
    if sign < "\u0590":  # Latin, Greek, Cyrillic, Armenian
        return 1.25 if sign.isupper() else 1.0
    return 4.0 if "\ufb50" <= sign < "\ufe00" else 1.6  # whole words of Arabic are one sign there


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(step for step in (1, 2, 2.5, 5, 10) if step * power >= least * (1 - 1e-9))
