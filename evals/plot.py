"""An evaluation as a picture."""

from __future__ import annotations

import io
from itertools import cycle
from typing import Any

from quantkit.errors import RequestError
from quantkit.evals.extras import optional
from quantkit.evals.results import Evaluation

_WORST = 10
_MARKS = (("o", "●"), ("s", "■"), ("^", "▲"), ("v", "▼"), ("D", "◆"))
_PANEL_INCHES, _DOTS_PER_INCH = (5.5, 4.4), 150
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
