"""Timings as a table, as JSON and as a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.evals.bench import Bench, Rate
from quantkit.evals.extras import optional
from quantkit.evals.outputs import replace, require_writable
from quantkit.evals.timing import PROMPT

_INCHES, _DOTS_PER_INCH = (9.0, 4.0), 150


def table(found: Sequence[Bench]) -> list[str]:
    """Markdown: a column for each model, medians with the range of the runs."""
    lines = ["| | " + " | ".join(one.name for one in found) + " |", "|---" * (1 + len(found)) + "|"]

    def row(label: str, cells: Sequence[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    for length in found[0].prefill:
        row(f"prefill {length}, tok/s", [_range(one.prefill[length]) for one in found])
    for batch in found[0].decode:
        row(f"decode, batch {batch}, tok/s", [_range(one.decode[batch]) for one in found])
    row("weights read a step, MB", [f"{one.weight_bytes / 1e6:.0f}" for one in found])
    row("bandwidth measured, GB/s", [f"{one.bandwidth / 1e9:.1f}" for one in found])
    shares = [one.share_of_bandwidth for one in found]
    row("of that in decoding", ["" if share is None else f"{share:.0%}" for share in shares])
    row("load, s", [f"{one.load_seconds:.2f}" for one in found])
    row(f"first token of a prompt of {PROMPT}, s: at once, later",
        [f"{one.first_token_seconds[0]:.3f}, {one.first_token_seconds[1]:.3f}" for one in found])  # fmt: skip
    row("peak memory, MB", [f"{one.peak_bytes / 1e6:.0f}" for one in found])
    row("backend", [", ".join(one.backends) or "torch" for one in found])
    row("device", [one.device for one in found])
    row("threads", [str(one.threads) for one in found])
    return lines


def require_outputs(data: Path | None, plot: Path | None) -> None:
    """
    Raises:
        DestinationError: if a file's folder is not there or cannot be written in.
        RequestError: if a picture is wanted and matplotlib is not installed.
    """
    if plot is not None:
        optional("matplotlib")
    require_writable(data, plot)


def write(found: Sequence[Bench], data: Path | None, plot: Path | None) -> None:
    """Write what is wanted; each file is there whole or not at all.

    Raises:
        DestinationError: if one cannot be written.
    """
    if data is not None:
        listed = [{**asdict(one), "share_of_bandwidth": one.share_of_bandwidth} for one in found]
        replace(data, json.dumps(listed, indent=2).encode() + b"\n")
    if plot is not None:
        replace(plot, _picture(found))


def _picture(found: Sequence[Bench]) -> bytes:
    """A PNG: bars of decoding by batch and of prefill by length."""
    figure = optional("matplotlib.figure").Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
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
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one a model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, of) in enumerate(zip(names, rates, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(of))]
        medians = [rate.median for rate in of.values()]
        spread = [[rate.median - rate.least for rate in of.values()], [rate.most - rate.median for rate in of.values()]]
        axes.bar(places, medians, width * 0.9, yerr=spread, label=name, color=f"C{index}", error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])


def _range(rate: Rate) -> str:
    return f"{rate.median:.1f} ({rate.least:.1f} to {rate.most:.1f})"
