"""Measurements as pictures: an evaluation, and timings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from quantkit.errors import RequestError
from quantkit.evals.bench import Bench, Rate
from quantkit.evals.extras import optional
from quantkit.evals.results import Evaluation

_WORST = 10
_MARKS = (("o", "●"), ("s", "■"), ("^", "▲"), ("v", "▼"), ("D", "◆"))
_PANEL_INCHES, _BENCH_INCHES, _DOTS_PER_INCH = (5.5, 4.4), (9.0, 4.0), 150
_LEAST_RATIO_OF_TICKS = 1.12


def picture(found: Evaluation, kind: str = "png") -> bytes:
    """What quantization costs in perplexity by bits per weight, and the last model's worst layers.

    Args:
        kind: ``png``, ``pdf`` or ``svg``.

    Raises:
        RequestError: if matplotlib is not installed, or there is neither a second model
            with a text nor a manifest with layers' errors to show.
    """
    costs = len(found.rows) > 1 and bool(found.texts)
    panels = [draw for draw, wanted in ((_costs, costs), (_layers, bool(found.layer_errors))) if wanted]
    if not panels:
        raise RequestError("nothing to draw", expected="two models and a text, or a last model that quantkit quantized")
    width, height = _PANEL_INCHES
    figure = optional("matplotlib.figure").Figure(
        figsize=(width * len(panels), height), dpi=_DOTS_PER_INCH, layout="constrained"
    )
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, found)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, kind)


def bench_picture(found: Sequence[Bench], kind: str = "png") -> bytes:
    """Bars of decoding by batch and of prefill by length; a ``png``, ``pdf`` or ``svg``."""
    figure = optional("matplotlib.figure").Figure(figsize=_BENCH_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    panels: list[tuple[str, str, list[dict[int, Rate]]]] = [
        ("decoding", "batch", [one.decode for one in found]),
        ("prefill", "tokens of the prompt", [one.prefill for one in found]),
    ]
    for axes, (title, label, rates) in zip(figure.subplots(1, 2), panels, strict=True):
        _bars(axes, [one.name for one in found], rates)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
        axes.set_ylabel("tokens per second")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    return _saved(figure, kind)


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one a model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, of) in enumerate(zip(names, rates, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(of))]
        medians = [rate.median for rate in of.values()]
        spread = [[rate.median - rate.least for rate in of.values()], [rate.most - rate.median for rate in of.values()]]
        axes.bar(places, medians, width * 0.9, yerr=spread, label=name, color=f"C{index}", error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])


def _saved(figure: Any, kind: str) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=kind)
    return out.getvalue()


def _costs(axes: Any, found: Evaluation) -> None:
    """Word perplexity above that of the reference or, without one, of the model with most bits per weight."""
    base = found.rows[0] if found.reference else max(found.rows, key=lambda row: row.bits_per_weight)
    marked = list(zip(found.texts, cycle(_MARKS)))
    for text, (marker, _) in marked:
        for index, row in enumerate(found.rows):
            ratio = row.texts[text].documents.word_perplexity / base.texts[text].documents.word_perplexity
            label = row.name if text == marked[0][0] else None
            axes.plot(row.bits_per_weight, 100 * (ratio - 1), marker, color=f"C{index % 10}", label=label, markersize=7)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = _apart(sorted(row.bits_per_weight for row in found.rows))
    axes.set_xticks(ticks, [f"{tick:.1f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bits per weight")
    axes.set_ylabel(f"word perplexity above that of {base.name}, %")
    axes.set_title(", ".join(f"{sign} {text}" for text, (_, sign) in marked), fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def _layers(axes: Any, found: Evaluation) -> None:
    """Bars of the largest errors, the worst on top."""
    worst = list(found.layer_errors.items())[:_WORST][::-1]
    names = [name.removeprefix("model.layers.").replace(".", " ", 1) for name, _ in worst]
    axes.barh(names, [100 * error for _, error in worst], color="C0")
    of = {"output_error": "output", "relative_error": "weights"}[found.layer_error]
    axes.set_xlabel(f"relative error of the {of}, %")
    axes.set_title(f"worst layers of {found.rows[-1].name}", fontsize=11)


def _apart(ticks: list[float]) -> list[float]:
    """Those of ascending ticks whose labels do not run into each other on a logarithmic axis."""
    kept = ticks[:1]
    for tick in ticks:
        if tick > kept[-1] * _LEAST_RATIO_OF_TICKS:
            kept.append(tick)
    return kept
