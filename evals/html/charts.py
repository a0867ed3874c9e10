"""The charts of a page: cost by model size, and divergence by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from quantkit.evals import optional
from quantkit.evals.drawing import (
    LOG_RATIO,
    PALETTE,
    SIZE,
    AxisRange,
    choose_color,
    choose_mark,
    choose_range,
    inline_svg,
    lay_out,
    new_figure,
    set_range,
    shorten,
    spread,
    style_axes,
    text_width,
)
from quantkit.evals.plot import collect_points, draw_costs, label_costs
from quantkit.evals.results import EvaluationData, Row
from quantkit.quality.positions import FLOAT, PositionDivergence

# inches; the page scales charts to its width, and a phone's is little more than this one.
_WIDTH = 4.0
_HEIGHT = 2.8
# in average letters
_MAX_REFERENCE = 18
_MAX_LABEL = 20
_MAX_LINE_NAME = 14
_MAX_POSITIONS = 6
# Between the names of two lines, and from the axes to the names, in points.
_NAME_GAP = 12
_NAME_DISTANCE = 4


@dataclass(frozen=True)
class Chart:
    """An SVG element, and lines below it that explain marks and dashes."""

    svg: Markup
    keys: list[str]


def cost_chart(evaluation: EvaluationData) -> Chart | None:
    """Draw the divergence from the reference, or without one the perplexity, by model size; None
    without two models to compare.

    Raises `RequestError` if matplotlib is not installed.
    """
    points = collect_points(evaluation)
    if not points:
        return None
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    draw_costs(axes, points, _megabytes)
    sizes = [point.row.megabytes for point in points]
    cost = "word perplexity"
    obstacles = []
    if evaluation.reference is not None:
        sizes.append(evaluation.rows[0].megabytes)
        cost = f"KL from {shorten(evaluation.reference, _MAX_REFERENCE)}, nats per token"
    if max(sizes) >= LOG_RATIO * min(sizes):
        axis_range = AxisRange(min(sizes) / 1.6, max(sizes) * 1.2, True)
    else:
        # A linear axis of sizes begins at 0, where distances show how much smaller a model is.
        axis_range = AxisRange(0.0, max(sizes) * 1.12, False)
    set_range(axes, "x", axis_range)
    _set_titles(axes, "size, MB", cost)
    if evaluation.reference is not None:
        obstacles.append(_draw_reference(axes, evaluation.rows[0]))
    label_costs(figure, axes, points, _megabytes, _MAX_LABEL, obstacles)
    texts = list(evaluation.texts)
    titles = {}
    descriptions = []
    for index, point in enumerate(points):
        row = point.row
        title = f"{row.name} on {texts[point.text]}: {row.megabytes:.2f} MB, {point.cost}"
        descriptions.append(title)
        titles[f"point-{index}"] = [title]
    keys: list[str] = []
    # The marks of a single text need no explanation.
    if len(texts) > 1:
        for index, text in enumerate(texts):
            keys.append(f"{choose_mark(index).character} {text}")
    description = f"{cost}, by size: {'; '.join(descriptions)}"
    return Chart(Markup(inline_svg(figure, description, titles)), keys)


def _megabytes(row: Row) -> float:
    return row.megabytes


def _draw_reference(axes: Any, row: Row) -> Any:
    """Draw the reference as a line at its size, because its KL is 0, and return its name."""
    axes.axvline(row.megabytes, color=PALETTE["muted"], linewidth=1, linestyle=(0, (3, 3)))
    low, high = axes.get_xlim()
    offset = _NAME_DISTANCE
    alignment = "left"
    # The name is at the side where there is more room.
    if row.megabytes - low > high - row.megabytes:
        offset = -_NAME_DISTANCE
        alignment = "right"
    return axes.annotate(
        shorten(row.name, _MAX_REFERENCE),
        (row.megabytes, 1),
        (offset, 0),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        horizontalalignment=alignment,
        verticalalignment="top",
        fontsize=SIZE,
        color=PALETTE["ink"],
        parse_math=False,
    )


def _set_titles(axes: Any, x_title: str, y_title: str) -> None:
    """Name the axes at their ends, where the vertical one's name takes no width."""
    axes.set_xlabel(x_title, fontsize=SIZE, color=PALETTE["muted"], loc="right")
    axes.set_title(y_title, fontsize=SIZE, color=PALETTE["muted"], loc="left", parse_math=False)


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
    """Draw the lines; None if there is nothing to draw.

    Raises `RequestError` if matplotlib is not installed.
    """
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
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    axis_range = choose_range(kls)
    # A linear axis begins at 0, where distances show how much worse a model is.
    if not axis_range.log:
        axis_range = axis_range._replace(low=0.0)
    set_range(axes, "y", axis_range)
    _set_positions(axes, lines)
    _set_titles(axes, "position in the context, tokens", "KL, nats per token")
    titles = {}
    for index, line in enumerate(lines):
        gid = f"line-{index}"
        titles[gid] = _draw_line(axes, line, gid)
    style_axes(axes, "y")
    _draw_names(figure, axes, lines)
    description = f"{title}. {'; '.join(descriptions)}"
    return Chart(Markup(inline_svg(figure, description, titles)), keys)


def _set_positions(axes: Any, lines: Sequence[Line]) -> None:
    """Set the axis of positions, with powers of two as ticks."""
    first = min(line.buckets[0].stop for line in lines)
    last = max(line.buckets[-1].stop for line in lines)
    # A bucket is twice as long as the one before it: on a logarithmic axis, they are equally wide.
    set_range(axes, "x", AxisRange(first / 2, last, True))
    ticks = []
    for power in range(first.bit_length() - 1, last.bit_length()):
        ticks.append(2**power)
    # Every n-th, where n is rounded up.
    stride = -(-len(ticks) // _MAX_POSITIONS)
    axes.xaxis.set_major_locator(optional("matplotlib.ticker").FixedLocator(ticks[::stride]))


def _draw_line(axes: Any, line: Line, gid: str) -> list[str]:
    """Draw a line with a mark and one standard error for each bucket, and return a description of
    each mark. Marks distinguish models without colors too.
    """
    color = choose_color(line.model)
    # What is below the axis is drawn at its low end: 0 on a logarithmic axis.
    bottom = axes.get_ylim()[0]
    middles = []
    heights = []
    titles = []
    for bucket in line.buckets:
        if not math.isfinite(bucket.kl):
            continue
        # The middle of a bucket on the logarithmic axis; the first begins at 0, and is drawn as if
        # it began at half its end.
        middle = math.sqrt(max(bucket.start, bucket.stop / 2) * bucket.stop)
        middles.append(middle)
        heights.append(max(bucket.kl, bottom))
        titles.append(f"{line.name}, positions {bucket.name}: {bucket.estimate}")
        error = bucket.kl_error or 0
        if error:
            low = max(bucket.kl - error, bottom)
            high = max(bucket.kl + error, bottom)
            axes.vlines(middle, low, high, color=color, linewidth=1.2, alpha=0.65)
    if line.dashed:
        style = "--"
    else:
        style = "-"
    # One artist for all marks: the page finds them in this order.
    axes.plot(
        middles,
        heights,
        linestyle=style,
        marker=choose_mark(line.model).marker,
        markersize=4.5,
        color=color,
        gid=gid,
    )
    return titles


def _draw_names(figure: Any, axes: Any, lines: Sequence[Line]) -> None:
    """Write the names of models with their marks to the right of their lines."""
    bottom = axes.get_ylim()[0]
    names: dict[int, str] = {}
    last_heights = []
    # Both lines of a model share one name, which is at the end of the solid one.
    for line in sorted(lines, key=lambda line: line.dashed):
        kls = [bucket.kl for bucket in line.buckets if math.isfinite(bucket.kl)]
        if line.model in names or not kls:
            continue
        name = shorten(line.name, _MAX_LINE_NAME)
        # A logarithmic axis cannot show 0.
        if not any(kls):
            name += ": 0"
        names[line.model] = f"{choose_mark(line.model).character} {name}"
        last_heights.append(max(kls[-1], bottom))
    # The layout leaves room at the right: matplotlib does not know how wide a browser's glyphs are.
    room = max(map(text_width, names.values())) * SIZE + _NAME_DISTANCE
    figure.get_layout_engine().set(rect=(0, 0, 1 - room / (72 * _WIDTH), 1))
    renderer = lay_out(figure)
    pixels_per_point = renderer.points_to_pixels(1.0)
    # Only the heights matter here; any position on the horizontal axis is right.
    points = [(1.0, height) for height in last_heights]
    pixels = axes.transData.transform(points)[:, 1]
    free_pixels = spread(list(pixels), _NAME_GAP * pixels_per_point)
    for (model, name), height, pixel, free_pixel in zip(
        names.items(), last_heights, pixels, free_pixels, strict=True
    ):
        axes.annotate(
            name,
            (1, height),
            (_NAME_DISTANCE, (free_pixel - pixel) / pixels_per_point),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=SIZE,
            color=choose_color(model),
            parse_math=False,
            # Names are outside the axes.
            annotation_clip=False,
        )
