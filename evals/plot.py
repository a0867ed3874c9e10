"""An evaluation as a picture: what quantization costs by bits a weight, and each model's worst layers."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

from quantkit.errors import RequestError
from quantkit.evals.extras import optional
from quantkit.evals.results import Evaluation, Row
from quantkit.quality.figures import significant

_WORST = 8
_INCHES, _DOTS_PER_INCH = 8.0, 150
_COSTS_INCHES, _LAYERS_INCHES = 4.0, 2.1
_MOST_PANELS = 3
_MARKS = "os^vDP*X"
_LONGEST_LABEL = 26
_LABEL_AWAY = (9, 16, 26, 40, 58)  # points from a mark to its label
_WIDE_RANGE = 5  # perplexities further apart stand on a logarithmic axis
_SMALL, _SIZE = 7.5, 9


class _Point(NamedTuple):
    """One model on one text: where it stands, how certain, and how it is drawn."""

    row: Row
    bits: float
    cost: float
    error: float | None
    color: str
    mark: str


def picture(found: Evaluation, kind: str = "png") -> bytes:
    """KL from the reference, or without one word perplexity, by bits per weight; below it the worst layers of each
    model that quantkit quantized, where these are three at most and all of one method.

    Args:
        kind: ``png``, ``pdf`` or ``svg``.

    Raises:
        RequestError: if matplotlib is not installed, or there is neither a model to compare on a text nor a manifest
            with layers' errors to show beside each other.
    """
    points = _points(found)
    listed = _comparable(found)
    if not points and not listed:
        raise RequestError(
            "nothing to draw",
            expected=f"two models and a text, or up to {_MOST_PANELS} models that quantkit quantized by one method",
        )
    heights = [_COSTS_INCHES] * bool(points) + [_LAYERS_INCHES] * bool(listed)
    figure = optional("matplotlib.figure").Figure(
        figsize=(_INCHES, sum(heights)), dpi=_DOTS_PER_INCH, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    halves = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name may be in a script that the font lacks
        axes = next(halves).subplots() if points else None
        if axes is not None:
            _costs(axes, found, points)
        if listed:
            _layers(next(halves), listed, found.layer_error)
        canvas = optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        canvas.draw()
        if axes is not None:
            figure.set_layout_engine("none")
            _label(axes, points, canvas.get_renderer())
        out = io.BytesIO()
        figure.savefig(out, format=kind)
    return out.getvalue()


def _comparable(found: Evaluation) -> list[Row]:
    """Models whose worst layers can be read side by side; none where methods are mixed.

    GPTQ moves weights further than rounding does, to keep the outputs: its weights' errors beside those of rounding
    say the opposite of what is lost.
    """
    listed = [row for row in found.rows if row.layer_errors]
    return listed if len(listed) <= _MOST_PANELS and len({row.method for row in listed}) == 1 else []


def _points(found: Evaluation) -> list[_Point]:
    """What can be drawn: with a reference the models that differ from it, else two models or more."""
    if found.reference is None and len(found.rows) < 2:
        return []
    points = []
    for text, mark in zip(found.texts, cycle(_MARKS)):
        for index, row in enumerate(found.rows):
            measured, error = row.texts[text], None
            cost = measured.documents.word_perplexity
            if found.reference is not None:
                cost, error = (0.0, None) if (apart := measured.divergence) is None else (apart.kl, apart.kl_error)
            if math.isfinite(cost) and cost > 0:
                points.append(_Point(row, row.bits_per_weight, cost, error, f"C{index % 10}", mark))
    return points


def _costs(axes: Any, found: Evaluation, points: Sequence[_Point]) -> None:
    """Every model by its size, with one standard error to each side where that is known."""
    ticker, lines = optional("matplotlib.ticker"), optional("matplotlib.lines")
    for point in points:
        axes.errorbar(
            point.bits, point.cost, yerr=_within(point), fmt=point.mark, color=point.color, markersize=6, capsize=2.5,
            elinewidth=1,
        )  # fmt: skip
    costs, bits = [point.cost for point in points], [point.bits for point in points]
    if found.reference is not None or max(costs) > _WIDE_RANGE * min(costs):
        axes.set_yscale("log")
        axes.set_ylim(min(costs) / 1.8, max(costs) * 1.8)
        wide = max(costs) / min(costs) > 100
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.margins(y=0.25)
    room = max(0.35 * (max(bits) - min(bits)), 0.02 * max(bits))  # for labels
    axes.set_xlim(max(0, min(bits) - room), max(bits) + room)
    axes.minorticks_off()
    axes.set_xlabel("bits per weight", fontsize=_SIZE)
    if found.reference is None:
        axes.set_ylabel("word perplexity", fontsize=_SIZE)
    else:
        axes.set_ylabel("KL per token, nats", fontsize=_SIZE)
        title = f"KL from {_short(found.reference)} ({significant(found.rows[0].bits_per_weight)} bits a weight)"
        axes.set_title(title, fontsize=_SIZE + 1, parse_math=False)
    axes.tick_params(labelsize=_SIZE)
    if len(found.texts) > 1:
        marks = [
            lines.Line2D([], [], linestyle="", marker=mark, color="0.4", label=_short(text).lstrip("_"))
            for text, mark in zip(found.texts, cycle(_MARKS))
        ]
        axes.legend(handles=marks, frameon=False, fontsize=_SIZE - 1, title="text", title_fontsize=_SIZE - 1)
    _plain(axes, "both")


def _within(point: _Point) -> list[list[float]] | None:
    """One standard error to each side; below not beyond what a logarithmic axis can show."""
    if point.error is None or not math.isfinite(point.error):
        return None
    return [[min(point.error, 0.9 * point.cost)], [point.error]]


def _label(axes: Any, points: Sequence[_Point], renderer: Any) -> None:
    """Each model's name beside its first mark, where nothing else stands; once the axes have their place."""
    box = axes.get_window_extent(renderer)
    marks = [axes.transData.transform((point.bits, point.cost)) for point in points]
    around = optional("matplotlib.transforms").Bbox.from_bounds
    taken = [around(x - 13, y - 13, 26, 26) for x, y in marks]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent(renderer))
    named: set[str] = set()
    for point in points:
        if point.row.name in named:
            continue
        named.add(point.row.name)
        best: tuple[float, Any] | None = None
        for away in _LABEL_AWAY:
            for right, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
                label = _annotated(axes, point, right * away, up * away)
                drawn = _text_box(label, renderer)
                overlaps = sum(_shared(drawn, other) for other in taken) + _outside(drawn, box)
                if best is None or overlaps < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = overlaps, label
                else:
                    label.remove()
                if overlaps == 0:
                    break
            if best is not None and best[0] == 0:
                break
        if best is not None:
            taken.append(_text_box(best[1], renderer))


def _annotated(axes: Any, point: _Point, right: float, up: float) -> Any:
    """A name so many points off its mark, with a line to it where it is far."""
    far = max(abs(right), abs(up)) > _LABEL_AWAY[0]
    return axes.annotate(
        _short(point.row.name), (point.bits, point.cost), (right, up), textcoords="offset points",
        fontsize=_SIZE - 1, color=point.color, parse_math=False,
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="bottom" if up > 0 else "top" if up < 0 else "center",
        arrowprops={"arrowstyle": "-", "color": point.color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4}
        if far else None,
    )  # fmt: skip


def _text_box(label: Any, renderer: Any) -> Any:
    """Where an annotation's text stands; its own extent has the line in it."""
    label.update_positions(renderer)
    return optional("matplotlib.text").Text.get_window_extent(label, renderer).padded(1)


def _shared(one: Any, other: Any) -> float:
    """The area that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _outside(one: Any, box: Any) -> float:
    """The area of a box that lies outside another; worse than to overlap."""
    return 10 * float(one.width * one.height - _shared(one, box))


def _layers(part: Any, rows: Sequence[Row], kind: str) -> None:
    """Bars of the largest errors, the worst on top: a panel a model, all of one scale."""
    of = {"output_error": "output", "relative_error": "weights"}[kind]
    most = max(error for row in rows for error in row.layer_errors.values())
    for axes, row in zip(part.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        worst = list(row.layer_errors.items())[:_WORST][::-1]
        axes.barh(range(len(worst)), [100 * error for _, error in worst], color="0.55", height=0.7)
        axes.set_yticks(range(len(worst)), [_short(_layer_name(name)) for name, _ in worst], fontsize=_SMALL - 0.5)
        axes.set_ylim(-0.6, _WORST - 0.4)
        axes.set_xlim(0, 105 * most)
        axes.tick_params(axis="x", labelsize=_SMALL)
        axes.tick_params(axis="y", length=0)
        axes.set_title(_in_two_lines(row.name, 72 // len(rows)), fontsize=_SIZE - 0.5, parse_math=False)
        _plain(axes, "x")
    part.supxlabel(f"worst {_WORST} layers: relative error of the {of}, %", fontsize=_SIZE)


def _plain(axes: Any, grid: str) -> None:
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _layer_name(name: str) -> str:
    return name.removeprefix("model.layers.").replace(".", " ", 1)


def _in_two_lines(name: str, width: int) -> str:
    return "\n".join(textwrap.wrap(_short(name, 2 * width), width, break_on_hyphens=False))


def _short(text: str, longest: int = _LONGEST_LABEL) -> str:
    """A name that fits: of a longer one both ends."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"
