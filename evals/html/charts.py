"""The charts of a page: cost by model size, and divergence by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quantkit.evals.html.drawing import (
    LOG_RATIO,
    Axis,
    Chart,
    Drawing,
    Shape,
    axis_range,
    fit,
    left_margin,
    text_width,
)
from quantkit.evals.names import Box
from quantkit.evals.results import Evaluation
from quantkit.quality.figures import Estimate
from quantkit.quality.positions import FLOAT, PositionDivergence

_TEXT_MARKS = ("●", "■", "▲", "◆", "▼", "✚")
_MODEL_MARKS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z", "M-3.1-3.1h6.2v6.2h-6.2z", "M0-4.3L4 3h-8z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z", "M0 4.3L4-3h-8z", "M-4.2-1.4h2.8v-2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8z",
)  # fmt: skip
"""A circle, a square, a triangle, a diamond, a triangle upside down and a cross, around 0, in pixels."""


def model_color(index: int) -> str:
    """The color of a model by its row."""
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
    """Divergence from the reference, or without one perplexity, by model size; None without two models to compare."""
    points = list(_points(evaluation))
    if not points or (evaluation.reference is None and len(points) < 2):
        return None
    cost, texts = "word perplexity", list(evaluation.texts)
    if evaluation.reference is not None:
        cost = f"KL from {fit(evaluation.reference, 20)}, nats per token"
    keys = [f"{_mark(index)} {name}" for index, name in enumerate(texts)] if len(texts) > 1 else []
    chart = Chart.empty(f"{cost}, by size: {'; '.join(point.title for point in points)}", keys)
    for drawing in chart.drawings:
        _draw_points(drawing, evaluation, points, cost)
    return chart


def _points(evaluation: Evaluation) -> Iterator[_Point]:
    for number, text in enumerate(evaluation.texts):
        for index, row in enumerate(evaluation.rows):
            measures = row.texts[text]
            cost = Estimate(measures.documents.word_perplexity)
            if evaluation.reference is not None:
                if measures.divergence is None:
                    continue
                cost = Estimate(measures.divergence.kl, measures.divergence.kl_error)
            if math.isfinite(cost.value) and cost.value >= 0:
                title = f"{row.name} on {text}: {row.megabytes:.2f} MB, {cost}"
                yield _Point(index, _mark(number), row.megabytes, cost.value, cost.error or 0.0, title)


def _mark(text: int) -> str:
    return _TEXT_MARKS[text % len(_TEXT_MARKS)]


def _draw_points(drawing: Drawing, evaluation: Evaluation, points: list[_Point], cost: str) -> None:
    sizes = [point.megabytes for point in points]
    if evaluation.reference is not None:
        sizes.append(evaluation.rows[0].megabytes)
    y = drawing.y_axis(*axis_range([end for point in points for end in point.error_bar]))
    log = max(sizes) >= LOG_RATIO * min(sizes)
    x = Axis(min(sizes) / 1.6 if log else 0.0, max(sizes) * 1.12, left_margin(y), drawing.width - 8, log)
    drawing.axes(x, y, "size, MB", cost)
    taken: list[Box] = []
    if evaluation.reference is not None:
        at = x.pixel(evaluation.rows[0].megabytes)
        drawing.line("reference", (at, at), (y.start, y.end))
        name = fit(evaluation.reference, 22 if drawing.wide else 14)
        drawing.text(name, at - 6, y.end + 10, "name", "end")
        taken.append(Box(at - 6 - text_width(name), y.end, at + 2, y.end + 14))
    for point in points:
        at, height, color = x.pixel(point.megabytes), y.pixel(point.cost), model_color(point.model)
        taken.append(Box(at - 7, height - 7, at + 7, height + 7))
        low, high = point.error_bar
        drawing.line("bar", (at, at), (y.pixel(low), y.pixel(high)), color)
        drawing.text(point.mark, at, height + 5, "mark", "middle", color, point.title)
    within = Box(x.start, y.end - 10, drawing.width, y.start)
    for point in sorted({one.model: one for one in reversed(points)}.values()):
        name = fit(evaluation.rows[point.model].name, 26 if drawing.wide else 16) + ("" if point.cost else ": 0")
        at, height = x.pixel(point.megabytes), y.pixel(point.cost)
        drawing.label(name, at, height, within, taken, model_color(point.model))


class Line(NamedTuple):
    """One model's divergence by position; `model` is the index of its row."""

    model: int
    name: str
    dashed: bool
    buckets: Sequence[PositionDivergence]


def position_lines(evaluation: Evaluation, text: str) -> list[Line]:
    """Divergence by position, with both caches if it was requested; otherwise over the windows of the other figures."""
    rows = list(enumerate(evaluation.rows))
    requested = [
        Line(index, row.name, cache != FLOAT, buckets)
        for index, row in rows
        for cache, buckets in row.texts[text].positions.items()
    ]
    if requested or text not in evaluation.details:
        return requested
    by_model = evaluation.details[text].positions
    return [Line(index, row.name, False, by_model[row.name]) for index, row in rows if row.name in by_model]


def position_chart(lines: Sequence[Line], title: str) -> Chart | None:
    """The lines; None if there is nothing to draw."""
    finite = [bucket for line in lines for bucket in line.buckets if math.isfinite(bucket.kl)]
    kls = [kl for bucket in finite for kl in (bucket.kl, bucket.kl + (bucket.kl_error or 0))]
    if not kls or max(len(line.buckets) for line in lines) < 2:
        return None
    values = [
        f"{line.name}: {', '.join(f'{bucket.name}: {bucket.estimate}' for bucket in line.buckets)}" for line in lines
    ]
    keys = ["dashed: with the int8 cache"] if any(line.dashed for line in lines) else []
    chart = Chart.empty(f"{title}. {'; '.join(values)}", keys)
    for drawing in chart.drawings:
        _draw_lines(drawing, lines, kls)
    return chart


def _draw_lines(drawing: Drawing, lines: Sequence[Line], kls: Sequence[float]) -> None:
    def name(line: Line) -> str:
        """With the value of a line of zeros, which a logarithmic axis cannot show."""
        return fit(line.name, 20 if drawing.wide else 11) + ("" if any(one.kl for one in line.buckets) else ": 0")

    last = max(bucket.stop for line in lines for bucket in line.buckets)
    first = min(line.buckets[0].stop for line in lines)
    low, high, log = axis_range(kls)
    y = drawing.y_axis(low if log else 0.0, high, log)
    right = drawing.width - 24 - max(text_width(name(line)) for line in lines)
    x = Axis(first / math.sqrt(2), last, left_margin(y), right, True)
    ticks = [2**power for power in range(first.bit_length() - 1, last.bit_length())]
    ticks = ticks[:: -(-len(ticks) // (8 if drawing.wide else 5))]
    drawing.axes(x, y, "position in the context, tokens", "KL, nats per token", ticks)
    taken: list[float] = []
    named: set[int] = set()
    for line in sorted(lines, key=lambda one: (one.dashed, -one.buckets[-1].kl)):
        color = model_color(line.model)
        buckets = [one for one in line.buckets if math.isfinite(one.kl)]
        if not buckets:
            continue
        points = [(x.pixel(math.sqrt(max(one.start, one.stop / 2) * one.stop)), y.pixel(one.kl)) for one in buckets]
        for one, (at, _) in zip(buckets, points, strict=True):
            error = one.kl_error or 0
            drawing.line("bar", (at, at), (y.pixel(max(one.kl - error, low)), y.pixel(one.kl + error)), color)
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
    """A mark that distinguishes a model's line without colors too."""
    attributes = {"d": _MODEL_MARKS[model % 6], "transform": f"translate({x:.1f} {y:.1f})"}
    return Shape("path", {**attributes, "style": f"fill:{model_color(model)}"}, title=title)
