"""Timings as a picture: decoding by the number of sequences, prefill by the length of a prompt, long contexts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from quantkit.evals.bench import Bench
from quantkit.evals.extras import optional
from quantkit.evals.timing import Rate

_PANEL_INCHES, _DOTS_PER_INCH = (4.6, 3.8), 150
_LEGEND_LETTERS, _LEGEND_KEY = 55, 8  # that fit below a panel, and what a name's key takes up
_MOST_ACROSS = 3  # panels
_LINES = list(zip(("-", "--", "-.", ":") * 3, "os^vDX" * 2, strict=True))  # told apart without colours too
_TITLE_LETTERS = 36


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
    long = [one for one in found if one.at_contexts]
    across = min(len(long), _MOST_ACROSS)
    down = -(-len(long) // _MOST_ACROSS)
    width, height = _PANEL_INCHES
    figure = optional("matplotlib.figure").Figure(
        figsize=(width * max(len(panels), across), height * (1 + down)), dpi=_DOTS_PER_INCH, layout="constrained"
    )
    upper, *lower = figure.subfigures(2 if long else 1, 1, height_ratios=[1, down] if long else None, squeeze=False)[
        :, 0
    ]
    for axes, (title, label, rates) in zip(upper.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, [one.name for one in found], rates)
        _plain(axes, title, label)
    beside = max(1, _LEGEND_LETTERS * len(panels) // max(len(one.name) + _LEGEND_KEY for one in found))
    upper.legend(
        *upper.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=beside, frameon=False, fontsize=9
    )
    if long:
        grid = lower[0].subplots(down, across, squeeze=False, sharey=True).flatten()
        for axes, one in zip(grid, long, strict=False):
            _contexts(axes, one)
        for axes in grid[len(long) :]:
            axes.set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format=kind)
    return out.getvalue()


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one a model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, of) in enumerate(zip(names, rates, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(of))]
        axes.bar(
            places, [rate.median for rate in of.values()], width * 0.9, yerr=_range(list(of.values())), label=name,
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
    name = one.name if len(one.name) <= _TITLE_LETTERS else f"{one.name[: _TITLE_LETTERS - 1]}…"
    _plain(axes, f"decoding, {name}", "sequences at once")
    axes.set_xlim(0, 1.06 * batches[-1])
    axes.set_ylim(0)
    axes.set_ylabel("tokens a second, together")
    axes.set_xticks(batches)
    axes.yaxis.set_tick_params(labelleft=True)
    axes.legend(title="context", frameon=False, fontsize=9, title_fontsize=9, loc="best")


def _range(rates: Sequence[Rate]) -> list[list[float]]:
    """How far the runs reach, below and above."""
    return [[rate.median - rate.least for rate in rates], [rate.most - rate.median for rate in rates]]


def _plain(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
