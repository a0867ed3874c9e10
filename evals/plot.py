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
from quantkit.evals.results import Evaluation, Row
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.figures import layer_errors, method_of, significant

_NUM_WORST = 8
# inches
_WIDTH = 8.0
_COSTS_HEIGHT = 4.0
_LAYERS_HEIGHT = 2.1
_MAX_PANELS = 3
_MARKS = "os^vDP*X"
_MAX_LABEL = 26  # characters
# Points from a mark to its label.
_LABEL_DISTANCES = (9, 16, 26, 40, 58)
_LOG_RATIO = 5  # of the largest to the smallest perplexity: beyond it the axis is logarithmic
# points
_SMALL = 7.5
_SIZE = 9


class _Point(NamedTuple):
    """One model on one text."""

    row: Row
    cost: float
    error: float | None
    color: str
    mark: str


def picture(evaluation: Evaluation, kind: str = "png") -> bytes:
    """KL from the reference, or without one word perplexity, by bits per weight; below it the worst
    layers of up to three models that quantkit quantized by one method.

    `kind` is ``png``, ``pdf`` or ``svg``. Raises `RequestError` if matplotlib is not installed, or
    if there are neither models to compare on a text nor manifests with comparable errors of layers.
    """
    points = _collect_points(evaluation)
    rows = [row for row in evaluation.rows if row.layer_errors]
    if not _are_layers_comparable([row.method for row in rows]):
        rows = []
    if not points and not rows:
        raise _nothing_to_draw()
    heights = [_COSTS_HEIGHT] * bool(points) + [_LAYERS_HEIGHT] * bool(rows)
    figure = new_figure(_WIDTH, sum(heights))
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if points:
        axes = next(parts).subplots()
        _draw_costs(axes, evaluation, points)
    if rows:
        _layers(next(parts), rows, evaluation.layer_error)
    if points:
        canvas = optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        with ignore_missing_glyphs():
            canvas.draw()
            figure.set_layout_engine("none")
            _label(axes, points, canvas.get_renderer())
    return picture_bytes(figure, kind)


def require_drawable(models: Sequence[Path]) -> None:
    """Check that there are errors of layers to draw if the models are not compared on a text.
    Raises `RequestError` if there are none, and `QuantkitError` if a model cannot be opened.
    """
    folders = [open_checkpoint(model).path for model in models]
    measured = zip(folders, layer_errors(folders)[0], strict=True)
    if not _are_layers_comparable([method_of(folder) for folder, errors in measured if errors]):
        raise _nothing_to_draw()


def _are_layers_comparable(methods: Sequence[str]) -> bool:
    """Return whether the layers of models are drawn that were quantized by these methods.

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


def _collect_points(evaluation: Evaluation) -> list[_Point]:
    """With a reference the models that differ from it, otherwise two models or more."""
    if evaluation.reference is None and len(evaluation.rows) < 2:
        return []
    points: list[_Point] = []
    for number, index, cost in evaluation.costs():
        if cost.value > 0:
            points.append(
                _Point(
                    evaluation.rows[index],
                    cost.value,
                    cost.error,
                    f"C{index % 10}",
                    _MARKS[number % len(_MARKS)],
                )
            )
    return points


def _draw_costs(axes: Any, evaluation: Evaluation, points: Sequence[_Point]) -> None:
    """Each model by its size, with one standard error to each side if it is known."""
    ticker = optional("matplotlib.ticker")
    lines = optional("matplotlib.lines")
    for point in points:
        bar = None
        if point.error is not None and math.isfinite(point.error):
            # Above 0 for a logarithmic axis.
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
    costs = [point.cost for point in points]
    bits = [point.row.bits_per_weight for point in points]
    if evaluation.reference is not None or max(costs) > _LOG_RATIO * min(costs):
        axes.set_yscale("log")
        axes.set_ylim(min(costs) / 1.8, max(costs) * 1.8)
        wide = max(costs) / min(costs) > 100
        axes.yaxis.set_major_locator(
            ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12)
        )
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.margins(y=0.25)
    room = max(0.35 * (max(bits) - min(bits)), 0.02 * max(bits))  # for labels
    axes.set_xlim(max(0, min(bits) - room), max(bits) + room)
    axes.minorticks_off()
    axes.set_xlabel("bits per weight", fontsize=_SIZE)
    axes.set_ylabel(
        "word perplexity" if evaluation.reference is None else "KL per token, nats", fontsize=_SIZE
    )
    if evaluation.reference is not None:
        name = shorten(evaluation.reference, _MAX_LABEL)
        bits_per_weight = significant(evaluation.rows[0].bits_per_weight)
        axes.set_title(
            f"KL from {name} ({bits_per_weight} bits a weight)",
            fontsize=_SIZE + 1,
            parse_math=False,
        )
    axes.tick_params(labelsize=_SIZE)
    if len(evaluation.texts) > 1:
        labels = [shorten(text, _MAX_LABEL).lstrip("_") for text in evaluation.texts]
        style = {"linestyle": "", "color": "0.4"}
        marks = []
        for label, mark in zip(labels, cycle(_MARKS)):
            marks.append(lines.Line2D([], [], marker=mark, label=label, **style))
        axes.legend(
            handles=marks, frameon=False, fontsize=_SIZE - 1, title="text", title_fontsize=_SIZE - 1
        )
    style_axes(axes, "both")


def _label(axes: Any, points: Sequence[_Point], renderer: Any) -> None:
    """Write each model's name next to its first mark; the layout must be final."""

    def box(extent: Any) -> Box:
        return Box(extent.x0, extent.y0, extent.x1, extent.y1)

    places = [axes.transData.transform((point.row.bits_per_weight, point.cost)) for point in points]
    taken = [Box(x - 13, y - 13, x + 13, y + 13) for x, y in places]
    if (legend := axes.get_legend()) is not None:
        taken.append(box(legend.get_window_extent(renderer)))
    pixels = renderer.points_to_pixels(1.0)
    named: set[str] = set()
    for point, place in zip(points, places, strict=True):
        if (name := point.row.name) in named:
            continue
        named.add(name)
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
        size = box(optional("matplotlib.text").Text.get_window_extent(label, renderer).padded(1))
        distances = [distance * pixels for distance in _LABEL_DISTANCES]
        width = size.right - size.left
        height = size.high - size.low
        found = place_label(
            tuple(place), (width, height), distances, box(axes.get_window_extent(renderer)), taken
        )
        label.set_position(
            ((found.left + 1 - place[0]) / pixels, (found.low + 1 - place[1]) / pixels)
        )
        gap = max(
            found.left - place[0],
            place[0] - found.right,
            found.low - place[1],
            place[1] - found.high,
        )
        label.arrow_patch.set_visible(gap > distances[0] + 1)


def _layers(part: Any, rows: Sequence[Row], layer_error: str) -> None:
    """Bars of the largest errors, the worst on top: a panel for each model, with one scale."""
    kind = {"output_error": "output", "relative_error": "weights"}[layer_error]
    largest = max(error for row in rows for error in row.layer_errors.values())
    for axes, row in zip(part.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        worst = list(row.layer_errors.items())[:_NUM_WORST][::-1]
        axes.barh(range(len(worst)), [100 * error for _, error in worst], color="0.55", height=0.7)
        names = []
        for name, _ in worst:
            names.append(name.removeprefix("model.layers.").replace(".", " ", 1))
        axes.set_yticks(
            range(len(worst)), [shorten(name, _MAX_LABEL) for name in names], fontsize=_SMALL - 0.5
        )
        axes.set_ylim(-0.6, _NUM_WORST - 0.4)
        axes.set_xlim(0, 105 * largest)
        axes.tick_params(axis="x", labelsize=_SMALL)
        axes.tick_params(axis="y", length=0)
        width = 72 // len(rows)
        title = "\n".join(
            textwrap.wrap(shorten(row.name, 2 * width), width, break_on_hyphens=False)
        )
        axes.set_title(title, fontsize=_SIZE - 0.5, parse_math=False)
        style_axes(axes, "x")
    part.supxlabel(f"worst {_NUM_WORST} layers: relative error of the {kind}, %", fontsize=_SIZE)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, sizes in inches.

    Raises `RequestError` if matplotlib is not installed.
    """
    return optional("matplotlib.figure").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )


def picture_bytes(figure: Any, kind: str) -> bytes:
    """Return the figure as a file: ``png``, ``pdf`` or ``svg``."""
    out = io.BytesIO()
    with ignore_missing_glyphs():
        figure.savefig(out, format=kind)
    return out.getvalue()


def style_axes(axes: Any, grid: str) -> None:
    """A light grid along ``x``, ``y`` or ``both``, and no frame at the top and the right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """No warnings for names in scripts that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


@dataclass(frozen=True)
class Box:
    """A rectangle; `low` and `high` are the ends of its vertical side."""

    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: Box) -> float:
        """Return the area that both cover."""
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
    """Return the box for a label of this width and height, at one of the distances from a point,
    that overlaps `taken` the least and stays within an area if it can. If several do, the nearest
    is used. It is added to `taken`.
    """

    def cost(box: Box) -> float:
        outside = size[0] * size[1] - box.overlap(within)
        # Equal where only floats differ.
        return round(sum(box.overlap(other) for other in occupied_boxes) + 10 * outside, 3)

    candidates = []
    for distance, (right, up) in product(distances, _DIRECTIONS):
        left = point[0] + right * distance - size[0] * (1 - right) / 2
        low = point[1] + up * distance - size[1] * (1 - up) / 2
        candidates.append(Box(left, low, left + size[0], low + size[1]))
    place = min(candidates, key=cost)
    occupied_boxes.append(place)
    return place


def shorten(name: str, length: int) -> str:
    """Return a name of at most `length` characters: the two ends of a longer one."""
    half = (length - 1) // 2
    if len(name) <= length:
        return name
    return f"{name[:half]}…{name[-half:]}"
