"""An evaluation as a picture: what quantization costs by bits a weight, and each model's worst
layers.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.errors import RequestError
from quantkit.evals import optional
from quantkit.evals.results import EvaluationData, Row
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.figures import layer_errors, method_of, significant

_NUM_WORST = 8
# inches
_WIDTH = 8.0
_COSTS_HEIGHT = 4.0
_LAYERS_HEIGHT = 2.1
_MAX_PANELS = 3
_MARKS = "os^vDP*X"
# characters
_MAX_LABEL = 26
# Points from a mark to its label.
_LABEL_DISTANCES = (9, 16, 26, 40, 58)
# Of the largest to the smallest perplexity: beyond it the axis is logarithmic.
_LOG_RATIO = 5
# Sizes of fonts in points.
_SMALL = 7.5
_SIZE = 9


class _Point(NamedTuple):
    """One model on one text."""

    row: Row
    cost: float
    error: float | None
    color: str
    mark: str


def picture(evaluation: EvaluationData, kind: str = "png") -> bytes:
    """Draw KL from the reference, or without one word perplexity, by bits per weight; below it the
    worst layers of up to three models that quantkit quantized by one method.

    `kind` is ``png``, ``pdf`` or ``svg``. Raises `RequestError` if matplotlib is not installed, or
    if there are neither models to compare on a text nor manifests with comparable errors of layers.
    """
    points = _collect_points(evaluation)
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
        _draw_costs(axes, evaluation, points)
    if rows:
        _draw_layers(next(parts), rows, evaluation.layer_error)
    if points:
        # Labels are placed by pixels, which are known only once the figure is laid out: it is drawn
        # for that, and the layout is then kept as it is.
        canvas = optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        with ignore_missing_glyphs():
            canvas.draw()
            figure.set_layout_engine("none")
            _draw_labels(axes, points, canvas.get_renderer())
    return picture_bytes(figure, kind)


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


def _collect_points(evaluation: EvaluationData) -> list[_Point]:
    """Collect the models that differ from the reference or, without one, two models or more."""
    if evaluation.reference is None and len(evaluation.rows) < 2:
        return []
    points: list[_Point] = []
    for text_index, row_index, cost in evaluation.costs():
        # A logarithmic axis cannot show 0.
        if cost.value > 0:
            # A color for each model, a mark for each text; matplotlib's cycle has ten colors.
            color = f"C{row_index % 10}"
            mark = _MARKS[text_index % len(_MARKS)]
            points.append(_Point(evaluation.rows[row_index], cost.value, cost.error, color, mark))
    return points


def _draw_costs(axes: Any, evaluation: EvaluationData, points: Sequence[_Point]) -> None:
    """Draw each model by its size, with one standard error to each side if it is known."""
    ticker = optional("matplotlib.ticker")
    lines = optional("matplotlib.lines")
    costs = []
    bits = []
    for point in points:
        costs.append(point.cost)
        bits.append(point.row.bits_per_weight)
        bar = None
        if point.error is not None and math.isfinite(point.error):
            # The lower end stays above 0, for a logarithmic axis.
            bar = [
                [min(point.error, 0.9 * point.cost)],
                [point.error],
            ]
        axes.errorbar(
            point.row.bits_per_weight,
            point.cost,
            yerr=bar,
            fmt=point.mark,
            color=point.color,
            markersize=6,
            capsize=2.5,
            elinewidth=1,
        )
    if evaluation.reference is not None or max(costs) > _LOG_RATIO * min(costs):
        axes.set_yscale("log")
        axes.set_ylim(min(costs) / 1.8, max(costs) * 1.8)
        # Over more than two decades, ticks at 2 and 5 would be too many.
        steps: tuple[float, ...] = (1.0, 2.0, 5.0)
        if max(costs) / min(costs) > 100:
            steps = (1.0,)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=12))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.margins(y=0.25)
    # Room for labels.
    room = max(0.35 * (max(bits) - min(bits)), 0.02 * max(bits))
    axes.set_xlim(max(0, min(bits) - room), max(bits) + room)
    axes.minorticks_off()
    axes.set_xlabel("bits per weight", fontsize=_SIZE)
    if evaluation.reference is None:
        axes.set_ylabel("word perplexity", fontsize=_SIZE)
    else:
        axes.set_ylabel("KL per token, nats", fontsize=_SIZE)
        name = shorten(evaluation.reference, _MAX_LABEL)
        bits_per_weight = significant(evaluation.rows[0].bits_per_weight)
        axes.set_title(
            f"KL from {name} ({bits_per_weight} bits a weight)",
            fontsize=_SIZE + 1,
            parse_math=False,
        )
    axes.tick_params(labelsize=_SIZE)
    if len(evaluation.texts) > 1:
        style = {"linestyle": "", "color": "0.4"}
        marks = []
        for text, mark in zip(evaluation.texts, cycle(_MARKS)):
            # matplotlib leaves labels that begin with an underscore out of legends.
            label = shorten(text, _MAX_LABEL).lstrip("_")
            marks.append(lines.Line2D([], [], marker=mark, label=label, **style))
        axes.legend(
            handles=marks, frameon=False, fontsize=_SIZE - 1, title="text", title_fontsize=_SIZE - 1
        )
    style_axes(axes, "both")


def _draw_labels(axes: Any, points: Sequence[_Point], renderer: Any) -> None:
    """Write each model's name next to its first mark; the layout must be final."""

    def box(extent: Any) -> Box:
        return Box(extent.x0, extent.y0, extent.x1, extent.y1)

    places = []
    # What labels avoid: all marks, the legend, and the labels before them.
    occupied_boxes: list[Box] = []
    for point in points:
        x, y = axes.transData.transform((point.row.bits_per_weight, point.cost))
        places.append((x, y))
        occupied_boxes.append(Box(x - 13, y - 13, x + 13, y + 13))
    legend = axes.get_legend()
    if legend is not None:
        occupied_boxes.append(box(legend.get_window_extent(renderer)))
    pixels_per_point = renderer.points_to_pixels(1.0)
    distances = [distance * pixels_per_point for distance in _LABEL_DISTANCES]
    labelled_models: set[str] = set()
    for point, (x, y) in zip(points, places, strict=True):
        name = point.row.name
        # A model has a mark for each text, but one label: all its marks have its color.
        if name in labelled_models:
            continue
        labelled_models.add(name)
        label = axes.annotate(
            shorten(name, _MAX_LABEL),
            (point.row.bits_per_weight, point.cost),
            (0, 0),
            textcoords="offset points",
            fontsize=_SIZE - 1,
            color=point.color,
            parse_math=False,
            va="bottom",
            arrowprops={
                "arrowstyle": "-",
                "color": point.color,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )
        # `Annotation`'s own method would include the arrow.
        extent = optional("matplotlib.text").Text.get_window_extent(label, renderer)
        # The padding of one pixel keeps labels from touching; the position leaves it out again.
        padded = box(extent.padded(1))
        size = (padded.right - padded.left, padded.high - padded.low)
        within = box(axes.get_window_extent(renderer))
        label_box = place_label((x, y), size, distances, within, occupied_boxes)
        offset_x = (label_box.left + 1 - x) / pixels_per_point
        offset_y = (label_box.low + 1 - y) / pixels_per_point
        label.set_position((offset_x, offset_y))
        # A label further away than the nearest distance needs a line to its mark.
        gap = max(label_box.left - x, x - label_box.right, label_box.low - y, y - label_box.high)
        label.arrow_patch.set_visible(gap > distances[0] + 1)


def _draw_layers(part: Any, rows: Sequence[Row], layer_error: str) -> None:
    """Draw bars of the largest errors, the worst on top: a panel for each model, with one scale."""
    kind = {"output_error": "output", "relative_error": "weights"}[layer_error]
    largest = max(max(row.layer_errors.values()) for row in rows)
    panels = part.subplots(1, len(rows), squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
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
        axes.set_yticks(range(len(worst)), names, fontsize=_SMALL - 0.5)
        # Panels with fewer layers have bars of the same height.
        axes.set_ylim(-0.6, _NUM_WORST - 0.4)
        axes.set_xlim(0, 105 * largest)
        axes.tick_params(axis="x", labelsize=_SMALL)
        axes.tick_params(axis="y", length=0)
        # Characters that fit above a panel; a name has two lines of them.
        width = 72 // len(rows)
        title_lines = textwrap.wrap(shorten(row.name, 2 * width), width, break_on_hyphens=False)
        title = "\n".join(title_lines)
        axes.set_title(title, fontsize=_SIZE - 0.5, parse_math=False)
        style_axes(axes, "x")
    part.supxlabel(f"worst {_NUM_WORST} layers: relative error of the {kind}, %", fontsize=_SIZE)


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure, sizes in inches.

    Raises `RequestError` if matplotlib is not installed.
    """
    # pyplot would choose a backend by the display, and keep every figure in memory.
    return optional("matplotlib.figure").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )


def picture_bytes(figure: Any, kind: str) -> bytes:
    """Write the figure as a file: ``png``, ``pdf`` or ``svg``."""
    file = io.BytesIO()
    with ignore_missing_glyphs():
        figure.savefig(file, format=kind)
    return file.getvalue()


def style_axes(axes: Any, grid: str) -> None:
    """Draw a light grid along ``x``, ``y`` or ``both``, and no frame at the top and the right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Suppress warnings for names in scripts that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


# From a point to its label: first beside it and above it, then diagonally.
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


@dataclass(frozen=True)
class Box:
    """A rectangle; `low` and `high` are the ends of its vertical side."""

    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: Box) -> float:
        """Compute the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.high, other.high) - max(self.low, other.low)
        return max(0.0, width) * max(0.0, height)


def place_label(
    point: tuple[float, float],
    size: tuple[float, float],
    distances: Iterable[float],
    within: Box,
    occupied_boxes: list[Box],
) -> Box:
    """Choose the box for a label of this width and height, at one of the distances from a point,
    that overlaps `occupied_boxes` the least and stays within an area if it can. If several do, the
    nearest is used. It is added to `occupied_boxes`.
    """

    def cost(box: Box) -> float:
        overlap = sum(box.overlap(occupied_box) for occupied_box in occupied_boxes)
        # What is outside cannot be read at all, so it counts more than an overlap.
        outside = size[0] * size[1] - box.overlap(within)
        # Rounded, so that costs are equal where only the rounding of floats differs: the nearest
        # box is then chosen.
        return round(overlap + 10 * outside, 3)

    candidates = []
    for distance, (right, up) in product(distances, _DIRECTIONS):
        box_left = point[0] + right * distance - size[0] * (1 - right) / 2
        box_low = point[1] + up * distance - size[1] * (1 - up) / 2
        candidates.append(Box(box_left, box_low, box_left + size[0], box_low + size[1]))
    place = min(candidates, key=cost)
    occupied_boxes.append(place)
    return place


def shorten(name: str, length: int) -> str:
    """Shorten a name to at most `length` characters, by keeping its two ends."""
    half = (length - 1) // 2
    if len(name) <= length:
        return name
    return f"{name[:half]}…{name[-half:]}"
