"""An evaluation as a picture: what quantization costs by bits a weight, and each model's worst
layers.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.errors import RequestError
from quantkit.evals.drawing import (
    PALETTE,
    SIZE,
    SMALL,
    AxisRange,
    Label,
    choose_color,
    choose_mark,
    choose_range,
    draw_labels,
    lay_out,
    new_figure,
    picture_bytes,
    set_range,
    shorten,
    style_axes,
)
from quantkit.evals.results import EvaluationData, Row
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.figures import Estimate, layer_errors, method_of, significant

_NUM_WORST = 8
# inches
_WIDTH = 8.0
_COSTS_HEIGHT = 4.0
_LAYERS_HEIGHT = 2.1
_MAX_PANELS = 3
# in average letters
_MAX_LABEL = 26


class Point(NamedTuple):
    """One model on one text: the indices of row and text, and KL or perplexity."""

    model: int
    text: int
    row: Row
    cost: Estimate

    @property
    def error_bar(self) -> tuple[float, float]:
        """Return the ends of one standard error to each side; the lower one is above 0, for a
        logarithmic axis.
        """
        error = self.cost.error or 0.0
        if not math.isfinite(error):
            error = 0.0
        value = self.cost.value
        return max(value - error, 0.1 * value), value + error


def picture(evaluation: EvaluationData, kind: str = "png") -> bytes:
    """Draw KL from the reference, or without one word perplexity, by bits per weight; below it the
    worst layers of up to three models that quantkit quantized by one method.

    `kind` is ``png``, ``pdf`` or ``svg``. Raises `RequestError` if matplotlib is not installed, or
    if there are neither models to compare on a text nor manifests with comparable errors of layers.
    """
    points = collect_points(evaluation)
    rows = []
    methods = []
    for row in evaluation.rows:
        if row.layer_errors:
            rows.append(row)
            methods.append(row.method)
    if not _are_layers_comparable(methods):
        rows = []
    if not points and not rows:
        raise _nothing_to_draw()
    heights = []
    if points:
        heights.append(_COSTS_HEIGHT)
    if rows:
        heights.append(_LAYERS_HEIGHT)
    figure = new_figure(_WIDTH, sum(heights))
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if points:
        axes = next(parts).subplots()
        draw_costs(axes, points, _bits_per_weight)
        _set_titles(axes, evaluation)
        bits = [point.row.bits_per_weight for point in points]
        # Names need room at both sides.
        room = max(0.35 * (max(bits) - min(bits)), 0.02 * max(bits))
        bits_range = AxisRange(max(0.0, min(bits) - room), max(bits) + room, log=False)
        set_range(axes, "x", bits_range)
    if rows:
        _draw_layers(next(parts), rows, evaluation.layer_error)
    if points:
        label_costs(figure, axes, points, _bits_per_weight, _MAX_LABEL)
    return picture_bytes(figure, kind)


def _bits_per_weight(row: Row) -> float:
    return row.bits_per_weight


def require_drawable(models: Sequence[Path]) -> None:
    """Check that there are errors of layers to draw if the models are not compared on a text.
    Raises `RequestError` if there are none, and `QuantkitError` if a model cannot be opened.
    """
    folders = [open_checkpoint(model).path for model in models]
    errors_by_model, _ = layer_errors(folders)
    methods = []
    for folder, errors in zip(folders, errors_by_model, strict=True):
        if errors:
            methods.append(method_of(folder))
    if not _are_layers_comparable(methods):
        raise _nothing_to_draw()


def _are_layers_comparable(methods: Sequence[str]) -> bool:
    """Check whether layers of models that were quantized by these methods can be drawn together.

    GPTQ moves weights further than rounding does, to keep the outputs: next to errors of rounding,
    the errors of its weights would suggest the opposite of what is lost.
    """
    return 0 < len(methods) <= _MAX_PANELS and len(set(methods)) == 1


def _nothing_to_draw() -> RequestError:
    expected = (
        f"two models and a text, or up to {_MAX_PANELS} models that quantkit quantized by one"
        " method"
    )
    return RequestError("nothing to draw", expected=expected)


def collect_points(evaluation: EvaluationData) -> list[Point]:
    """Collect the models that differ from the reference or, without one, two models or more."""
    if evaluation.reference is None and len(evaluation.rows) < 2:
        return []
    points = []
    for text_index, row_index, cost in evaluation.costs():
        points.append(Point(row_index, text_index, evaluation.rows[row_index], cost))
    return points


def draw_costs(axes: Any, points: Sequence[Point], size: Callable[[Row], float]) -> None:
    """Draw each point by the size of its model, with one standard error to each side: a color for
    each model, a mark for each text. Mark number i has the `gid` ``point-i``.
    """
    bar_ends: list[float] = []
    for point in points:
        bar_ends += point.error_bar
    axis_range = choose_range(bar_ends)
    set_range(axes, "y", axis_range)
    for index, point in enumerate(points):
        color = choose_color(point.model)
        across = size(point.row)
        # Without a known error, the bar is a point behind the mark.
        axes.vlines(across, *point.error_bar, color=color, linewidth=1.2, alpha=0.65)
        # A logarithmic axis shows 0 at its low end.
        height = max(point.cost.value, axis_range.low)
        marker = choose_mark(point.text).marker
        # A mark at the end of the axis is drawn as a whole.
        (mark,) = axes.plot(across, height, marker, color=color, markersize=6, clip_on=False)
        mark.set_gid(f"point-{index}")
    style_axes(axes, "both")


def label_costs(
    figure: Any,
    axes: Any,
    points: Sequence[Point],
    size: Callable[[Row], float],
    letters: int,
    obstacles: Sequence[Any] = (),
) -> None:
    """Write each model's name, at most so many average letters wide, next to its first mark. The
    figure must be complete but for these names, which do not cover `obstacles`.
    """
    renderer = lay_out(figure)
    bottom = axes.get_ylim()[0]
    labels: dict[int, Label] = {}
    places = []
    for point in points:
        across = size(point.row)
        height = max(point.cost.value, bottom)
        places.append((across, height))
        name = shorten(point.row.name, letters)
        # At the low end of a logarithmic axis, the point alone does not show that its cost is 0.
        if point.cost.value == 0:
            name += ": 0"
        # A model has a mark for each text, but one label: all its marks have its color.
        labels.setdefault(point.model, Label(name, across, height, choose_color(point.model)))
    legend = axes.get_legend()
    if legend is not None:
        obstacles = [*obstacles, legend]
    draw_labels(axes, list(labels.values()), places, obstacles, renderer)


def _set_titles(axes: Any, evaluation: EvaluationData) -> None:
    """Name the axes, the reference and the texts."""
    axes.set_xlabel("bits per weight", fontsize=SIZE)
    if evaluation.reference is None:
        axes.set_ylabel("word perplexity", fontsize=SIZE)
    else:
        axes.set_ylabel("KL per token, nats", fontsize=SIZE)
        name = shorten(evaluation.reference, _MAX_LABEL)
        bits_per_weight = significant(evaluation.rows[0].bits_per_weight)
        axes.set_title(
            f"KL from {name} ({bits_per_weight} bits a weight)",
            fontsize=SIZE + 1,
            parse_math=False,
        )
    if len(evaluation.texts) > 1:
        marks = []
        for index, text in enumerate(evaluation.texts):
            # matplotlib leaves labels that begin with an underscore out of legends.
            label = shorten(text, _MAX_LABEL).lstrip("_")
            (mark,) = axes.plot(
                [], [], choose_mark(index).marker, color=PALETTE["muted"], label=label
            )
            marks.append(mark)
        axes.legend(
            handles=marks, frameon=False, fontsize=SIZE - 1, title="text", title_fontsize=SIZE - 1
        )


def _draw_layers(part: Any, rows: Sequence[Row], layer_error: str) -> None:
    """Draw bars of the largest errors, the worst on top: a panel for each model, with one scale."""
    kind = {"output_error": "output", "relative_error": "weights"}[layer_error]
    largest = max(max(row.layer_errors.values()) for row in rows)
    panels = part.subplots(1, len(rows), squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
        style_axes(axes, "x")
        # The errors are sorted, the worst first; matplotlib draws the first bar at the bottom.
        worst = list(row.layer_errors.items())[:_NUM_WORST]
        worst.reverse()
        percentages = []
        names = []
        for name, error in worst:
            percentages.append(100 * error)
            short_name = name.removeprefix("model.layers.").replace(".", " ", 1)
            names.append(shorten(short_name, _MAX_LABEL))
        axes.barh(range(len(worst)), percentages, color="0.55", height=0.7)
        axes.set_yticks(range(len(worst)), names, fontsize=SMALL - 0.5)
        # Panels with fewer layers have bars of the same height.
        axes.set_ylim(-0.6, _NUM_WORST - 0.4)
        axes.set_xlim(0, 105 * largest)
        axes.tick_params(axis="x", labelsize=SMALL)
        # Characters that fit above a panel; a name has two lines of them.
        width = 72 // len(rows)
        title_lines = textwrap.wrap(shorten(row.name, 2 * width), width, break_on_hyphens=False)
        title = "\n".join(title_lines)
        axes.set_title(title, fontsize=SIZE - 0.5, parse_math=False)
    part.supxlabel(f"worst {_NUM_WORST} layers: relative error of the {kind}, %", fontsize=SIZE)
