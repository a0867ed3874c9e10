"""Timings as a picture: decoding by the number of sequences, prefill by the length of a prompt, long contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from quantkit.evals.bench import Bench
from quantkit.evals.names import shorten
from quantkit.evals.plot import new_figure, picture_bytes, style_axes
from quantkit.evals.timing import Rate

_PANEL_WIDTH, _PANEL_HEIGHT = 4.6, 3.8  # inches
_LEGEND_WIDTH, _LEGEND_KEY = 55, 8  # characters that fit below a panel, and the width of a name's key
_MAX_COLUMNS = 3
_LINES = list(zip(("-", "--", "-.", ":") * 3, "os^vDX" * 2, strict=True))  # distinct without colors too
_MAX_TITLE = 36  # characters


def picture(found: Sequence[Bench], kind: str = "png") -> bytes:
    """Bars of decoding by batch and of prefill by length; below them, for each model measured with long contexts,
    decoding by batch with a line for each context.

    Args:
        kind: ``png``, ``pdf`` or ``svg``.

    Raises:
        RequestError: if matplotlib is not installed.
    """
    panels = [
        ("decoding", "sequences at once", [one.decode for one in found]),
        ("prefill", "tokens of the prompt", [one.prefill for one in found]),
    ]
    panels = [panel for panel in panels if panel[2][0]]
    with_contexts = [one for one in found if one.at_contexts]
    columns, rows = min(len(with_contexts), _MAX_COLUMNS), -(-len(with_contexts) // _MAX_COLUMNS)
    figure = new_figure(_PANEL_WIDTH * max(len(panels), columns), _PANEL_HEIGHT * (1 + rows))
    heights = [1, rows] if with_contexts else [1]
    upper, *lower = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, label, rates) in zip(upper.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, [one.name for one in found], rates)
        _titles(axes, title, label)
    per_row = max(1, _LEGEND_WIDTH * len(panels) // max(len(one.name) + _LEGEND_KEY for one in found))
    upper.legend(
        *upper.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=per_row, frameon=False, fontsize=9
    )
    if with_contexts:
        grid = lower[0].subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axes, one in zip(grid, with_contexts, strict=False):
            _contexts(axes, one)
        for axes in grid[len(with_contexts) :]:
            axes.set_visible(False)
    return picture_bytes(figure, kind)


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one for each model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, by_key) in enumerate(zip(names, rates, strict=True)):
        places, bars = [place - 0.4 + (index + 0.5) * width for place in range(len(by_key))], list(by_key.values())
        axes.bar(
            places, [rate.median for rate in bars], width * 0.9, yerr=_range(bars), label=name,
            color=f"C{index}", error_kw={"linewidth": 0.8},
        )  # fmt: skip
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])


def _contexts(axes: Any, one: Bench) -> None:
    """A line for each context, by the number of sequences; both axes from 0."""
    batches = sorted({at.batch for at in one.at_contexts})
    for context, (style, mark) in zip(dict.fromkeys(at.context for at in one.at_contexts), cycle(_LINES), strict=False):
        line = sorted((at.batch, at.together) for at in one.at_contexts if at.context == context)
        axes.errorbar(
            [batch for batch, _ in line], [rate.median for _, rate in line], yerr=_range([rate for _, rate in line]),
            linestyle=style, marker=mark, markersize=5, linewidth=1.3, elinewidth=0.8, capsize=2, label=f"{context:,}",
        )  # fmt: skip
    _titles(axes, f"decoding, {shorten(one.name, _MAX_TITLE)}", "sequences at once")
    axes.set_xlim(0, 1.06 * batches[-1])
    axes.set_ylim(0)
    axes.set_ylabel("tokens a second, together")
    axes.set_xticks(batches)
    axes.yaxis.set_tick_params(labelleft=True)
    axes.legend(title="context", frameon=False, fontsize=9, title_fontsize=9, loc="best")


def _range(rates: Sequence[Rate]) -> list[list[float]]:
    """Distances from the median to the slowest and to the fastest run."""
    return [[rate.median - rate.least for rate in rates], [rate.most - rate.median for rate in rates]]


def _titles(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,g}")
    style_axes(axes, "y")
