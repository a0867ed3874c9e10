"""The charts of a page in SVG: cost by model size, and divergence by position."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantkit.evals.html.heatmap import round_up
from quantkit.evals.plot import Box, place_label
from quantkit.evals.results import EvaluationData
from quantkit.quality.positions import FLOAT, PositionDivergence

HEIGHT = 300
LOG_RATIO = 8
"""An axis whose values differ by a larger factor is logarithmic."""
# Above the top is the title of the vertical axis; below the bottom are tick labels and the title
# of the horizontal axis.
_TOP = 28
_BOTTOM = HEIGHT - 46
# The average width of a letter, and the height of a line, in pixels.
_LETTER = 7.1
_LINE = 15
_MAX_TICKS = 6
# Of a tick label: more than a round value has, fewer than the noise of a float.
_DIGITS = 9
# Tick labels from here on, and below 0.001, are powers of ten.
_LARGE = 1e7
# The least margin of an axis, as a share of the largest value: equal values need one too.
_MIN_SPAN = 0.05
# From a point to its label, in pixels; the nearest place without overlap is used.
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
        """Map a value to its position; values outside the axis are moved to its ends."""
        scaled = math.log if self.log else float
        low = scaled(self.low)
        high = scaled(self.high)
        clamped = min(max(value, self.low), self.high)
        share = (scaled(clamped) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Choose a few round values."""
        if not self.log:
            step = round_up((self.high - self.low) / _MAX_TICKS, (1, 2, 2.5, 5, 10))
            # An end that is a multiple of the step is a tick, in spite of the division's rounding.
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            values = []
            for index in range(first, last + 1):
                values.append(index * step)
            return values
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        stride = max(1, len(decades) // _MAX_TICKS)
        # From the densest ticks to the sparsest, until there are few enough.
        for factors in ((1, 2, 5), (1, 3), (1,)):
            ticks: list[float] = []
            for decade in decades[::stride]:
                for factor in factors:
                    tick = factor * 10.0**decade
                    if self.low * 0.999 <= tick <= self.high * 1.001:
                        ticks.append(tick)
            if len(ticks) <= _MAX_TICKS:
                break
        return ticks


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
        """Draw a straight line between two points."""
        attributes = {
            "class": kind,
            "x1": _format_coordinate(x[0]),
            "x2": _format_coordinate(x[1]),
            "y1": _format_coordinate(y[0]),
            "y2": _format_coordinate(y[1]),
            # The template leaves out an attribute that is None.
            "style": color and f"stroke:{color}",
        }
        self.shapes.append(Shape("line", attributes))

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
        """Draw a line of text with its baseline at `y`."""
        attributes = {
            "class": kind,
            "x": _format_coordinate(x),
            "y": _format_coordinate(y),
            "text-anchor": anchor,
            "style": color and f"fill:{color}",
        }
        self.shapes.append(Shape("text", attributes, content, title))

    def axes(
        self, x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: Sequence[float] | None = None
    ) -> None:
        """Draw grid lines, tick labels and titles."""
        for value in y.ticks():
            height = y.pixel(value)
            self.line("grid", (x.start, x.end), (height, height))
            # The baseline is below the tick, so that the middle of the digits is beside it.
            self.text(tick_label(value), x.start - 6, height + 4, "tick", "end")
        if x_ticks is None:
            x_ticks = x.ticks()
        for value in x_ticks:
            self.text(tick_label(value), x.pixel(value), y.start + 18, "tick", "middle")
        self.line("base", (x.start, x.end), (y.start, y.start))
        self.text(x_title, x.end, y.start + 36, "axis", "end")
        self.text(y_title, 2, 13, "axis", "start")

    def label(
        self, content: str, x: float, y: float, within: Box, occupied_boxes: list[Box], color: str
    ) -> None:
        """Draw a name next to a point, and add its box to the occupied ones."""
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
    """Measure the pixels that the labels of the vertical axis need."""
    widest_label = max(text_width(tick_label(value)) for value in y.ticks())
    return max(52.0, 8 + widest_label)


def tick_label(value: float) -> str:
    """Write a round value with all its digits."""
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
    """Choose the ends of an axis for values, and whether it is logarithmic; a logarithmic axis
    shows 0 at its low end.
    """
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) > LOG_RATIO * min(positive):
        return min(positive) / 1.6, max(positive) * 1.6, True
    low = min(values)
    high = max(values)
    # Values that are all 0 have a margin too, because an axis has two ends.
    margin = max(0.15 * (high - low), _MIN_SPAN * abs(high)) or 1.0
    axis_low = low - margin
    # An axis of values that cannot be negative does not show negative ticks.
    if low >= 0:
        axis_low = max(0.0, axis_low)
    return axis_low, high + margin, False


def fit(name: str, letters: int) -> str:
    """Shorten a name to the width of a number of average letters; of a longer name both ends
    remain.
    """
    if text_width(name) <= letters * _LETTER:
        return name
    for length in range(len(name) - 1, 1, -1):
        shortened = f"{name[: (length + 1) // 2]}…{name[len(name) - length // 2 :]}"
        if text_width(shortened) <= letters * _LETTER:
            return shortened
    return "…"


def text_width(content: str) -> float:
    """Estimate the width of a text in pixels."""
    return _LETTER * sum(map(_relative_width, content))


def _relative_width(character: str) -> float:
    """Estimate the width of a character in average letters; fonts differ."""
    # Marks over or below the character before them, and format characters, take no room.
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    # W and F are the wide and full-width characters of East Asian scripts.
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%":
        return 1.9
    if character in "mw":
        return 1.6
    # Latin, Greek, Cyrillic, Armenian
    if character < "\u0590":
        if character.isupper():
            return 1.25
        return 1.0
    # Arabic ligatures can be entire words.
    if "\ufb50" <= character < "\ufe00":
        return 4.0
    return 1.6


def _format_coordinate(value: float) -> str:
    # A tenth of a pixel cannot be seen, and short numbers make the page smaller.
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
    """Choose the color of a model by its row."""
    # Style variables of the page: dark and light themes have other colors.
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
        # Above 0, for a logarithmic axis.
        return max(self.cost - self.error, 0.1 * self.cost), self.cost + self.error


def cost_chart(evaluation: EvaluationData) -> Chart | None:
    """Draw the divergence from the reference, or without one the perplexity, by model size; None
    without two models to compare.
    """
    points = list(_points(evaluation))
    if not points or (evaluation.reference is None and len(points) < 2):
        return None
    cost = "word perplexity"
    if evaluation.reference is not None:
        cost = f"KL from {fit(evaluation.reference, 20)}, nats per token"
    keys: list[str] = []
    # The marks of a single text need no explanation.
    if len(evaluation.texts) > 1:
        for index, name in enumerate(evaluation.texts):
            keys.append(f"{_mark(index)} {name}")
    titles = "; ".join(point.title for point in points)
    chart = Chart(f"{cost}, by size: {titles}", keys)
    for drawing in chart.drawings:
        _draw_points(drawing, evaluation, points, cost)
    return chart


def _points(evaluation: EvaluationData) -> Iterator[_Point]:
    texts = list(evaluation.texts)
    for number, index, cost in evaluation.costs():
        row = evaluation.rows[index]
        title = f"{row.name} on {texts[number]}: {row.megabytes:.2f} MB, {cost}"
        yield _Point(index, _mark(number), row.megabytes, cost.value, cost.error or 0.0, title)


def _mark(text: int) -> str:
    return _TEXT_MARKS[text % len(_TEXT_MARKS)]


def _draw_points(
    drawing: Drawing, evaluation: EvaluationData, points: list[_Point], cost: str
) -> None:
    sizes = []
    bar_ends: list[float] = []
    for point in points:
        sizes.append(point.megabytes)
        bar_ends += point.error_bar
    if evaluation.reference is not None:
        sizes.append(evaluation.rows[0].megabytes)
    low, high, log = axis_range(bar_ends)
    y = Axis(low=low, high=high, start=_BOTTOM, end=_TOP, log=log)
    log_sizes = max(sizes) >= LOG_RATIO * min(sizes)
    # A linear axis of sizes begins at 0, where distances show how much smaller a model is.
    smallest = min(sizes) / 1.6 if log_sizes else 0.0
    x = Axis(
        low=smallest,
        high=max(sizes) * 1.12,
        start=left_margin(y),
        end=drawing.width - 8,
        log=log_sizes,
    )
    drawing.axes(x, y, "size, MB", cost)
    # What labels avoid: marks, the reference's name, and the labels before them.
    occupied_boxes: list[Box] = []
    if evaluation.reference is not None:
        # Its KL is 0, so the reference is a line at its size, not a point.
        across = x.pixel(evaluation.rows[0].megabytes)
        drawing.line("reference", (across, across), (y.start, y.end))
        name = fit(evaluation.reference, 22 if drawing.wide else 14)
        drawing.text(name, across - 6, y.end + 10, "name", "end")
        occupied_boxes.append(Box(across - 6 - text_width(name), y.end, across + 2, y.end + 14))
    first_points: dict[int, _Point] = {}
    for point in points:
        first_points.setdefault(point.model, point)
        across = x.pixel(point.megabytes)
        height = y.pixel(point.cost)
        color = model_color(point.model)
        occupied_boxes.append(Box(across - 7, height - 7, across + 7, height + 7))
        low, high = point.error_bar
        drawing.line("bar", (across, across), (y.pixel(low), y.pixel(high)), color)
        drawing.text(point.mark, across, height + 5, "mark", "middle", color, point.title)
    within = Box(x.start, y.end - 10, drawing.width, y.start)
    # A model has one label, at its point for the first text: all its points have one size and
    # color.
    for point in sorted(first_points.values()):
        name = fit(evaluation.rows[point.model].name, 26 if drawing.wide else 16)
        # A logarithmic axis cannot show 0.
        if not point.cost:
            name += ": 0"
        across = x.pixel(point.megabytes)
        height = y.pixel(point.cost)
        drawing.label(name, across, height, within, occupied_boxes, model_color(point.model))


class Line(NamedTuple):
    """One model's divergence by position; `model` is the index of its row."""

    model: int
    name: str
    dashed: bool
    buckets: Sequence[PositionDivergence]


def position_lines(evaluation: EvaluationData, text: str) -> list[Line]:
    """Collect the divergence by position, with both caches if it was requested; otherwise over the
    windows of the other figures.
    """
    lines = []
    for index, row in enumerate(evaluation.rows):
        for cache, buckets in row.texts[text].positions.items():
            lines.append(Line(index, row.name, cache != FLOAT, buckets))
    if lines or text not in evaluation.details:
        return lines
    buckets_by_model = evaluation.details[text].positions
    for index, row in enumerate(evaluation.rows):
        # The reference has no divergence.
        if row.name in buckets_by_model:
            lines.append(Line(index, row.name, False, buckets_by_model[row.name]))
    return lines


def position_chart(lines: Sequence[Line], title: str) -> Chart | None:
    """Draw the lines; None if there is nothing to draw."""
    kls = []
    descriptions = []
    keys: list[str] = []
    most_buckets = 0
    for line in lines:
        most_buckets = max(most_buckets, len(line.buckets))
        values = []
        for bucket in line.buckets:
            values.append(f"{bucket.name}: {bucket.estimate}")
            if math.isfinite(bucket.kl):
                # The axis has room for error bars above; below, they end at the axis.
                kls += [bucket.kl, bucket.kl + (bucket.kl_error or 0)]
        descriptions.append(f"{line.name}: {', '.join(values)}")
        if line.dashed:
            keys = ["dashed: with the int8 cache"]
    # A single bucket is a point, not a line.
    if not kls or most_buckets < 2:
        return None
    chart = Chart(f"{title}. {'; '.join(descriptions)}", keys)
    for drawing in chart.drawings:
        _draw_lines(drawing, lines, kls)
    return chart


def _draw_lines(drawing: Drawing, lines: Sequence[Line], kls: Sequence[float]) -> None:
    def shorten_name(line: Line) -> str:
        """Shorten a name, and add the value of a line of zeros, which a logarithmic axis cannot
        show.
        """
        name = fit(line.name, 20 if drawing.wide else 11)
        if any(bucket.kl for bucket in line.buckets):
            return name
        return f"{name}: 0"

    first_stops = []
    last_stops = []
    name_widths = []
    for line in lines:
        first_stops.append(line.buckets[0].stop)
        last_stops.append(line.buckets[-1].stop)
        name_widths.append(text_width(shorten_name(line)))
    first = min(first_stops)
    last = max(last_stops)
    low, high, log = axis_range(kls)
    y = Axis(low=low if log else 0.0, high=high, start=_BOTTOM, end=_TOP, log=log)
    # Names are to the right of the lines, with room for a mark.
    right = drawing.width - 24 - max(name_widths)
    # A bucket is twice as long as the one before it: on a logarithmic axis, they are equally wide.
    x = Axis(low=first / math.sqrt(2), high=last, start=left_margin(y), end=right, log=True)
    ticks = []
    for power in range(first.bit_length() - 1, last.bit_length()):
        ticks.append(2**power)
    max_ticks = 8 if drawing.wide else 5
    # Every n-th, where n is rounded up.
    ticks = ticks[:: -(-len(ticks) // max_ticks)]
    drawing.axes(x, y, "position in the context, tokens", "KL, nats per token", ticks)
    name_heights: list[float] = []
    named_models: set[int] = set()
    # Names are placed from the top line downward. Solid lines come first, because both lines of a
    # model share one name, which is at the end of the solid one.
    for line in sorted(lines, key=lambda line: (line.dashed, -line.buckets[-1].kl)):
        color = model_color(line.model)
        buckets = [bucket for bucket in line.buckets if math.isfinite(bucket.kl)]
        if not buckets:
            continue
        points = []
        for bucket in buckets:
            # The middle of a bucket on the logarithmic axis; the first begins at 0, and is drawn
            # as if it began at half its end.
            middle = math.sqrt(max(bucket.start, bucket.stop / 2) * bucket.stop)
            points.append((x.pixel(middle), y.pixel(bucket.kl)))
        for bucket, (across, _) in zip(buckets, points, strict=True):
            error = bucket.kl_error or 0
            bar_low = y.pixel(max(bucket.kl - error, low))
            bar_high = y.pixel(bucket.kl + error)
            drawing.line("bar", (across, across), (bar_low, bar_high), color)
        path = "M" + " L".join(f"{across:.1f} {height:.1f}" for across, height in points)
        style = f"stroke:{color}"
        if line.dashed:
            style += ";stroke-dasharray:5 4"
        drawing.shapes.append(Shape("path", {"class": "line", "d": path, "style": style}))
        # SVG draws in this order: marks are above the line and its error bars.
        for bucket, (across, height) in zip(buckets, points, strict=True):
            title = f"{line.name}, positions {bucket.name}: {bucket.estimate}"
            drawing.shapes.append(_model_mark(line.model, across, height, title))
        if line.model not in named_models:
            named_models.add(line.model)
            height = points[-1][1]
            while any(abs(height - name_height) < 14 for name_height in name_heights):
                height += 3
            name_heights.append(height)
            drawing.shapes.append(_model_mark(line.model, x.end + 11, height))
            drawing.text(shorten_name(line), x.end + 18, height + 4, "name", "start", color)


def _model_mark(model: int, x: float, y: float, title: str | None = None) -> Shape:
    """Draw a mark that distinguishes a model's line without colors too."""
    attributes = {"d": _MODEL_MARKS[model % 6], "transform": f"translate({x:.1f} {y:.1f})"}
    return Shape("path", {**attributes, "style": f"fill:{model_color(model)}"}, title=title)
