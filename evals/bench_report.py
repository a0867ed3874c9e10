"""Timings for people: tables, what to beware of, a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from quantkit.evals.bench import Bench
from quantkit.evals.extras import optional
from quantkit.evals.table import NONE, Table
from quantkit.evals.timing import PROMPT, Rate

_WIDE_SPREAD = 0.3  # of runs: beyond it a median tells little
_FASTER = 1.1  # times as fast: less may be chance
_PANEL_INCHES, _DOTS_PER_INCH = (4.6, 3.8), 150
_LEGEND_LETTERS, _LEGEND_KEY = 55, 8  # that fit below a panel, and what a name's key takes up


def tables(found: Sequence[Bench]) -> list[Table]:
    """A row for each model: its speed, how it starts and what memory it takes, what decoding draws from memory."""
    rates = [_rates(one) for one in found]
    speed = Table(
        "Tokens a second, median ± furthest run. prefill N: a prompt of N tokens; decode N: N sequences",
        ("model", *rates[0]),
        [(one.name, *map(_rate, of.values())) for one, of in zip(found, rates, strict=True)],
    )
    start = Table(
        f"Loading, and from a prompt of {PROMPT} tokens to its first new token: the first time, and later",
        ("model", "load s", "first token ms", "later ms", "peak memory MB", "threads", "device"),
        [
            (one.name, _digits(one.load_seconds), *(_digits(1000 * taken) for taken in one.first_token_seconds),
             _digits(one.peak_bytes / 1e6), str(one.threads), one.device)
            for one in found
        ],
    )  # fmt: skip
    memory = Table(
        "Weights read for each token when decoding one sequence, against what memory can give",
        ("model", "MB a token", "memory GB/s", "share of memory bandwidth", "float type", "kernels"),
        [
            (one.name, _digits(one.weight_bytes / 1e6), _digits(one.bandwidth / 1e9),
             NONE if one.share_of_bandwidth is None else f"{one.share_of_bandwidth:.0%}",
             one.dtype, ", ".join(one.backends) or "torch")
            for one in found
        ],
    )  # fmt: skip
    return [speed, start, memory]


def warnings(found: Sequence[Bench]) -> list[str]:
    """Why figures are not to be trusted, and which models quantization made slower."""
    return [*_busy(found), *_unsteady(found), *_slower_than_floats(found)]


def notes(found: Sequence[Bench]) -> list[str]:
    """A line for each model that one thread decodes faster than several."""
    return [
        f"one thread decodes {one.name} faster ({_digits(one.one_thread.median)} tokens a second, not"
        f" {_digits(one.decode[1].median)}): try `threads=1`"
        for one in found
        if one.one_thread is not None and one.one_thread.median > _FASTER * one.decode[1].median
    ]


def picture(found: Sequence[Bench], kind: str = "png") -> bytes:
    """Bars of decoding by batch and of prefill by length; a ``png``, ``pdf`` or ``svg``."""
    panels = [
        ("decoding", "sequences at once", [one.decode for one in found]),
        ("prefill", "tokens of the prompt", [one.prefill for one in found]),
    ]
    panels = [panel for panel in panels if panel[2][0]]
    width, height = _PANEL_INCHES
    figure = optional("matplotlib.figure").Figure(
        figsize=(width * len(panels), height), dpi=_DOTS_PER_INCH, layout="constrained"
    )
    for axes, (title, label, rates) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, [one.name for one in found], rates)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
        axes.set_ylabel("tokens a second")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    beside = max(1, _LEGEND_LETTERS * len(panels) // max(len(one.name) + _LEGEND_KEY for one in found))
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=beside, frameon=False, fontsize=9
    )
    out = io.BytesIO()
    figure.savefig(out, format=kind)
    return out.getvalue()


def _rates(one: Bench) -> dict[str, Rate]:
    """All rates, by the heads of their columns."""
    prefill = {f"prefill {length}": rate for length, rate in one.prefill.items()}
    return prefill | {f"decode {batch}": rate for batch, rate in one.decode.items()}


def _rate(rate: Rate) -> str:
    return f"{_digits(rate.median)} ± {rate.spread:.0%}"


def _digits(value: float) -> str:
    """The three that count."""
    return f"{float(f'{value:.3g}'):.12g}"


def _busy(found: Sequence[Bench]) -> list[str]:
    loads = [(one.other_load, one.cores) for one in found if one.busy and one.other_load is not None]
    if not loads:
        return []
    load, cores = max(loads)
    return [f"the machine is busy: other processes used {load:.1f} of its {cores} cores; figures are low"]


def _unsteady(found: Sequence[Bench]) -> list[str]:
    wide = [
        (rate.spread, f"{what} of {one.name}")
        for one in found
        for what, rate in _rates(one).items()
        if rate.spread > _WIDE_SPREAD
    ]
    if not wide:
        return []
    spread, what = max(wide)
    few = f"a figure spreads by {spread:.0%}" if len(wide) == 1 else f"{len(wide)} figures spread by up to {spread:.0%}"
    return [f"{few} ({what}): measure again on a quiet machine, or with more `runs`"]


def _slower_than_floats(found: Sequence[Bench]) -> list[str]:
    """A line for each quantized model that decodes slower than a float one measured with it."""
    floats = [one for one in found if not one.quantized and 1 in one.decode]
    return [
        f"{one.name} decodes slower than {other.name}, which is not quantized"
        for one in found
        for other in floats
        if one.quantized and 1 in one.decode and one.decode[1].median < other.decode[1].median
    ]


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one a model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, of) in enumerate(zip(names, rates, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(of))]
        medians = [rate.median for rate in of.values()]
        spread = [[rate.median - rate.least for rate in of.values()], [rate.most - rate.median for rate in of.values()]]
        axes.bar(places, medians, width * 0.9, yerr=spread, label=name, color=f"C{index}", error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])
