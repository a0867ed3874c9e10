"""The charts of a page in SVG: cost by model size, and divergence by position."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantkit.evals.html.heatmap import round_up
from quantkit.evals.plot import Box, place_label
from quantkit.evals.results import Evaluation
from quantkit.quality.positions import FLOAT, PositionDivergence

HEIGHT = 300
LOG_RATIO = 8
"""An axis whose values differ by a larger factor is logarithmic."""
_TOP = 28
_BOTTOM = HEIGHT - 46
# pixels
_LETTER = 7.1
_LINE = 15
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
        """Return the position of a value; values outside the axis are moved to its ends."""
        scaled = math.log if self.log else float
        low = scaled(self.low)
        high = scaled(self.high)
        return self.start + (scaled(min(max(value, self.low), self.high)) - low) / (high - low) * (
            self.end - self.start
        )

    def ticks(self) -> list[float]:
        """Return a few round values."""
        if not self.log:
            step = round_up((self.high - self.low) / _MAX_TICKS, (1, 2, 2.5, 5, 10))
            first = math.ceil(self.low / step - 1e-9)
            ticks: list[float] = []
            for index in range(first, math.floor(self.high / step + 1e-9) + 1):
                ticks.append(index * step)
            return ticks
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        stride = max(1, len(decades) // _MAX_TICKS)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            values = []
            for decade in decades[::stride]:
                for factor in factors:
                    values.append(factor * 10.0**decade)
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
        """Return whether it is the drawing for wide windows."""
        return self.width > 400

    def line(
        self, kind: str, x: tuple[float, float], y: tuple[float, float], color: str | None = None
    ) -> None:
        """A straight line between two points."""
        ends = dict(zip(("x1", "x2", "y1", "y2"), map(_format_coordinate, (*x, *y)), strict=True))
        self.shapes.append(
            Shape("line", {"class": kind, **ends, "style": color and f"stroke:{color}"})
        )

    def text(
        self,
        content: str,
        x: float,
        y: float,
        kind: str,
        anchor: str,
        color: str | None = None,
        title: str | None = None,
    ) -> None:
        """A line of text with its baseline at `y`."""
        place = {"x": _format_coordinate(x), "y": _format_coordinate(y), "text-anchor": anchor}
        self.shapes.append(
            Shape(
                "text", {"class": kind, **place, "style": color and f"fill:{color}"}, content, title
            )
        )

    def axes(
        self, x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: Sequence[float] | None = None
    ) -> None:
        """Grid lines, tick labels and titles."""
        for value in y.ticks():
            self.line("grid", (x.start, x.end), (y.pixel(value),) * 2)
            self.text(tick_label(value), x.start - 6, y.pixel(value) + 4, "tick", "end")
        for value in x.ticks() if x_ticks is None else x_ticks:
            self.text(tick_label(value), x.pixel(value), y.start + 18, "tick", "middle")
        self.line("base", (x.start, x.end), (y.start, y.start))
        self.text(x_title, x.end, y.start + 36, "axis", "end")
        self.text(y_title, 2, 13, "axis", "start")

    def label(
        self, content: str, x: float, y: float, within: Box, occupied_boxes: list[Box], color: str
    ) -> None:
        """A name next to a point."""
        place = place_label(
            (x, y), (text_width(content), _LINE), _LABEL_DISTANCES, within, occupied_boxes
        )
        self.text(content, place.left, place.high - 4, "name", "start", color)


@dataclass(frozen=True)
class Chart:
    """A drawing for wide windows and one for phones; `label` describes them to screen readers."""

    label: str
    keys: list[str]
    drawings: tuple[Drawing, Drawing] = field(default_factory=lambda: (Drawing(500), Drawing(328)))


def left_margin(y: Axis) -> float:
    """Pixels that the labels of the vertical axis need."""
    return max(52.0, 8 + max(text_width(tick_label(value)) for value in y.ticks()))


def tick_label(value: float) -> str:
    """Return a round value with all its digits."""
    if value and not 1e-3 <= abs(value) < _LARGE:
        digits, _, power = f"{value:.{_DIGITS - 1}e}".partition("e")
        digits = digits.rstrip("0").rstrip(".")
        decade = "10" + str(int(power)).translate(_SUPERSCRIPTS)
        if digits == "1":
            return decade
        return f"{digits}·{decade}"
    if abs(value) < 1e5:
        return f"{value:.{_DIGITS}g}"
    return f"{value:,.{_DIGITS}g}"


def axis_range(values: Sequence[float]) -> tuple[float, float, bool]:
    """Return the ends of an axis for values, and whether it is logarithmic; a logarithmic axis
    shows 0 at its low end.
    """
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) > LOG_RATIO * min(positive):
        return min(positive) / 1.6, max(positive) * 1.6, True
    low = min(values)
    high = max(values)
    margin = max(0.15 * (high - low), _MIN_SPAN * abs(high)) or 1.0
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin, False


def fit(name: str, letters: int) -> str:
    """Return a name no wider than a number of average letters; of a longer name both ends
    remain.
    """
    if text_width(name) <= letters * _LETTER:
        return name
    for kept in range(len(name) - 1, 1, -1):
        shortened = f"{name[: (kept + 1) // 2]}…{name[len(name) - kept // 2 :]}"
        if text_width(shortened) <= letters * _LETTER:
            return shortened
    return "…"


def text_width(content: str) -> float:
    """Return the approximate width of a text in pixels."""
    return _LETTER * sum(map(_relative_width, content))


def _relative_width(character: str) -> float:
    """Return the width of a character in average letters: an estimate, since fonts differ."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%":
        return 1.9
    if character in "mw":
        return 1.6
    if character < "\u0590":  # Latin, Greek, Cyrillic, Armenian
        if character.isupper():
            return 1.25
        return 1.0
    # Arabic ligatures can be entire words
    if "\ufb50" <= character < "\ufe00":
        return 4.0
    return 1.6


def _format_coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_TEXT_MARKS = ("●", "■", "▲", "◆", "▼", "✚")
_MODEL_MARKS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
    "M-3.1-3.1h6.2v6.2h-6.2z",
    "M0-4.3L4 3h-8z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0 4.3L4-3h-8z",
    "M-4.2-1.4h2.8v-2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8z",
)
"""A circle, a square, a triangle, a diamond, a triangle upside down and a cross, around 0, in
pixels.
"""


def model_color(index: int) -> str:
    """Return the color of a model by its row."""
    return f"var(--m{index % 6})"


class _Point(NamedTuple):
    model: int
    mark: str
    megabytes: float
    cost: float
    error: float
    title: str

    @property
    def error_bar(self) -> tuple[float, float]:
        return max(self.cost - self.error, 0.1 * self.cost), self.cost + self.error


def cost_chart(evaluation: Evaluation) -> Chart | None:
    """Divergence from the reference, or without one perplexity, by model size; None without two
    models to compare.
    """
    points = list(_points(evaluation))
    if not points or (evaluation.reference is None and len(points) < 2):
        return None
    cost = "word perplexity"
    texts = list(evaluation.texts)
    if evaluation.reference is not None:
        cost = f"KL from {fit(evaluation.reference, 20)}, nats per token"
    if len(texts) > 1:
        keys = [f"{_mark(index)} {name}" for index, name in enumerate(texts)]
    else:
        keys = []
    chart = Chart(f"{cost}, by size: {'; '.join(point.title for point in points)}", keys)
    for drawing in chart.drawings:
        _draw_points(drawing, evaluation, points, cost)
    return chart


def _points(evaluation: Evaluation) -> Iterator[_Point]:
    texts = list(evaluation.texts)
    for number, index, cost in evaluation.costs():
        row = evaluation.rows[index]
        title = f"{row.name} on {texts[number]}: {row.megabytes:.2f} MB, {cost}"
        yield _Point(index, _mark(number), row.megabytes, cost.value, cost.error or 0.0, title)


def _mark(text: int) -> str:
    return _TEXT_MARKS[text % len(_TEXT_MARKS)]


def _draw_points(drawing: Drawing, evaluation: Evaluation, points: list[_Point], cost: str) -> None:
    sizes = [point.megabytes for point in points]
    if evaluation.reference is not None:
        sizes.append(evaluation.rows[0].megabytes)
    low, high, log = axis_range([end for point in points for end in point.error_bar])
    y = Axis(low, high, _BOTTOM, _TOP, log)
    log = max(sizes) >= LOG_RATIO * min(sizes)
    x = Axis(
        min(sizes) / 1.6 if log else 0.0, max(sizes) * 1.12, left_margin(y), drawing.width - 8, log
    )
    drawing.axes(x, y, "size, MB", cost)
    taken: list[Box] = []
    if evaluation.reference is not None:
        at = x.pixel(evaluation.rows[0].megabytes)
        drawing.line("reference", (at, at), (y.start, y.end))
        name = fit(evaluation.reference, 22 if drawing.wide else 14)
        drawing.text(name, at - 6, y.end + 10, "name", "end")
        taken.append(Box(at - 6 - text_width(name), y.end, at + 2, y.end + 14))
    for point in points:
        at = x.pixel(point.megabytes)
        height = y.pixel(point.cost)
        color = model_color(point.model)
        taken.append(Box(at - 7, height - 7, at + 7, height + 7))
        low, high = point.error_bar
        drawing.line("bar", (at, at), (y.pixel(low), y.pixel(high)), color)
        drawing.text(point.mark, at, height + 5, "mark", "middle", color, point.title)
    within = Box(x.start, y.end - 10, drawing.width, y.start)
    for point in sorted({one.model: one for one in reversed(points)}.values()):
        name = fit(evaluation.rows[point.model].name, 26 if drawing.wide else 16) + (
            "" if point.cost else ": 0"
        )
        at = x.pixel(point.megabytes)
        height = y.pixel(point.cost)
        drawing.label(name, at, height, within, taken, model_color(point.model))


class Line(NamedTuple):
    """One model's divergence by position; `model` is the index of its row."""

    model: int
    name: str
    dashed: bool
    buckets: Sequence[PositionDivergence]


def position_lines(evaluation: Evaluation, text: str) -> list[Line]:
    """Divergence by position, with both caches if it was requested; otherwise over the windows
    of the other figures.
    """
    requested = []
    rows = list(enumerate(evaluation.rows))
    for index, row in rows:
        requested += [
            Line(index, row.name, cache != FLOAT, position)
            for cache, position in row.texts[text].positions.items()
        ]
    if requested or text not in evaluation.details:
        return requested
    by_model = evaluation.details[text].positions
    return [
        Line(index, row.name, False, by_model[row.name])
        for index, row in rows
        if row.name in by_model
    ]


def position_chart(lines: Sequence[Line], title: str) -> Chart | None:
    """Return the lines; None if there is nothing to draw."""
    finite = []
    for line in lines:
        for bucket in line.buckets:
            if math.isfinite(bucket.kl):
                finite.append(bucket)
    kls = []
    for bucket in finite:
        for kl in (bucket.kl, bucket.kl + (bucket.kl_error or 0)):
            kls.append(kl)
    if not kls or max(len(line.buckets) for line in lines) < 2:
        return None
    values = []
    for line in lines:
        values.append(
            f"{line.name}: {', '.join(f'{one.name}: {one.estimate}' for one in line.buckets)}"
        )
    if any(line.dashed for line in lines):
        keys = ["dashed: with the int8 cache"]
    else:
        keys = []
    chart = Chart(f"{title}. {'; '.join(values)}", keys)
    for drawing in chart.drawings:
        _draw_lines(drawing, lines, kls)
    return chart


def _draw_lines(drawing: Drawing, lines: Sequence[Line], kls: Sequence[float]) -> None:
    def name(line: Line) -> str:
        """With the value of a line of zeros, which a logarithmic axis cannot show."""
        return fit(line.name, 20 if drawing.wide else 11) + (
            "" if any(bucket.kl for bucket in line.buckets) else ": 0"
        )

    last = max(bucket.stop for line in lines for bucket in line.buckets)
    first = min(line.buckets[0].stop for line in lines)
    low, high, log = axis_range(kls)
    y = Axis(low if log else 0.0, high, _BOTTOM, _TOP, log)
    right = drawing.width - 24 - max(text_width(name(line)) for line in lines)
    x = Axis(first / math.sqrt(2), last, left_margin(y), right, True)
    ticks = [2**power for power in range(first.bit_length() - 1, last.bit_length())]
    ticks = ticks[:: -(-len(ticks) // (8 if drawing.wide else 5))]
    drawing.axes(x, y, "position in the context, tokens", "KL, nats per token", ticks)
    taken: list[float] = []
    named: set[int] = set()
    for line in sorted(lines, key=lambda one: (one.dashed, -one.buckets[-1].kl)):
        color = model_color(line.model)
        buckets = [bucket for bucket in line.buckets if math.isfinite(bucket.kl)]
        if not buckets:
            continue
        points = [
            (
                x.pixel(math.sqrt(max(bucket.start, bucket.stop / 2) * bucket.stop)),
                y.pixel(bucket.kl),
            )
            for bucket in buckets
        ]
        for one, (at, _) in zip(buckets, points, strict=True):
            error = one.kl_error or 0
            drawing.line(
                "bar", (at, at), (y.pixel(max(one.kl - error, low)), y.pixel(one.kl + error)), color
            )
        path = "M" + " L".join(f"{at:.1f} {height:.1f}" for at, height in points)
        style = f"stroke:{color}" + (";stroke-dasharray:5 4" if line.dashed else "")
        drawing.shapes.append(Shape("path", {"class": "line", "d": path, "style": style}))
        for one, (at, height) in zip(buckets, points, strict=True):
            title = f"{line.name}, positions {one.name}: {one.estimate}"
            drawing.shapes.append(_model_mark(line.model, at, height, title))
        if line.model not in named:
            named.add(line.model)
            height = points[-1][1]
            while any(abs(height - other) < 14 for other in taken):
                height += 3
            taken.append(height)
            drawing.shapes.append(_model_mark(line.model, x.end + 11, height))
            drawing.text(name(line), x.end + 18, height + 4, "name", "start", color)


def _model_mark(model: int, x: float, y: float, title: str | None = None) -> Shape:
    """Return a mark that distinguishes a model's line without colors too."""
    attributes = {"d": _MODEL_MARKS[model % 6], "transform": f"translate({x:.1f} {y:.1f})"}
    return Shape("path", {**attributes, "style": f"fill:{model_color(model)}"}, title=title)
