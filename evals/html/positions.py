"""Divergence by how far in a context a token lies: a line for each model, and for each kind of cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quantkit.evals.html.axes import HEIGHT, Axis, drawn, frame, left_margin, short, spread, text, wide
from quantkit.evals.html.elements import Markup, element, joined
from quantkit.evals.results import Evaluation
from quantkit.quality.positions import FLOAT, PositionDivergence

_MOST_TICKS = 8
_MARKS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z", "M-3.1-3.1h6.2v6.2h-6.2z", "M0-4.3L4 3h-8z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z", "M0 4.3L4-3h-8z", "M-4.2-1.4h2.8v-2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8z",
)  # fmt: skip
"""A circle, a square, a triangle, a diamond, a triangle that stands on its head, a cross: around 0, in pixels."""


class Line(NamedTuple):
    """One model's divergence by position; `model` is its place among the rows."""

    model: int
    name: str
    dashed: bool
    buckets: Sequence[PositionDivergence]


def lines(found: Evaluation, text_name: str) -> list[Line]:
    """Divergence by position as it was asked for, with both caches; else that of the windows of the other figures."""
    rows = list(enumerate(found.rows))
    asked = [
        Line(index, row.name, cache != FLOAT, buckets)
        for index, row in rows
        for cache, buckets in row.texts[text_name].positions.items()
    ]
    if asked or text_name not in found.details:
        return asked
    by_model = found.details[text_name].positions
    return [Line(index, row.name, False, by_model[row.name]) for index, row in rows if row.name in by_model]


def chart(drawn_lines: Sequence[Line], what: str) -> Markup | None:
    """The lines; None where there is nothing to draw."""
    shown = [one for line in drawn_lines for one in line.buckets if math.isfinite(one.kl)]
    kls = [kl for one in shown for kl in (one.kl, one.kl + (one.kl_error or 0))]
    if not kls or max(len(line.buckets) for line in drawn_lines) < 2:
        return None
    told = "; ".join(f"{line.name}: {_told(line)}" for line in drawn_lines)
    dashes = [element("p", {"class": "keys"}, "dashed: with the int8 cache")] if _dashed(drawn_lines) else []
    return joined(drawn(lambda width: _drawing(drawn_lines, kls, width), f"{what}. {told}"), *dashes)


def _dashed(drawn_lines: Sequence[Line]) -> bool:
    return any(line.dashed for line in drawn_lines)


def _told(line: Line) -> str:
    return ", ".join(f"{one.name}: {one.estimate}" for one in line.buckets)


def _drawing(drawn_lines: Sequence[Line], kls: Sequence[float], width: int) -> Iterator[Markup]:
    letters = 20 if width > 400 else 11
    names = [_named(line, letters) for line in drawn_lines]
    most = max(one.stop for line in drawn_lines for one in line.buckets)
    least = min(line.buckets[0].stop for line in drawn_lines)
    low, high, log = spread(kls)
    y = Axis(low if log else 0.0, high, HEIGHT - 46, 28, log)
    x = Axis(least / math.sqrt(2), most, left_margin(y), width - 24 - max(map(wide, names), default=0), True)
    ticks = [2**power for power in range(least.bit_length() - 1, most.bit_length())]
    ticks = ticks[:: -(-len(ticks) // (_MOST_TICKS if width > 400 else 5))]
    yield from frame(x, y, "position in the context, tokens", "KL, nats per token", ticks)
    taken: list[float] = []
    named: set[int] = set()
    for line in sorted(drawn_lines, key=lambda one: (one.dashed, -one.buckets[-1].kl)):
        color = f"var(--m{line.model % 6})"
        kept = [one for one in line.buckets if math.isfinite(one.kl)]
        places = [(x.at(math.sqrt(max(one.start, one.stop / 2) * one.stop)), y.at(one.kl)) for one in kept]
        if not kept:
            continue
        for one, (at, _) in zip(kept, places, strict=True):
            ends = {"y1": y.at(max(one.kl - (one.kl_error or 0), low)), "y2": y.at(one.kl + (one.kl_error or 0))}
            yield element("line", {"class": "bar", "x1": at, "x2": at, "style": f"stroke:{color}", **ends})
        path = "M" + " L".join(f"{at:.1f} {up:.1f}" for at, up in places)
        style = f"stroke:{color}" + (";stroke-dasharray:5 4" if line.dashed else "")
        yield element("path", {"class": "line", "d": path, "style": style})
        for one, (at, up) in zip(kept, places, strict=True):
            yield _mark(line, at, up, element("title", None, f"{line.name}, positions {one.name}: {one.estimate}"))
        if line.model not in named:
            named.add(line.model)
            up = places[-1][1]
            while any(abs(up - other) < 14 for other in taken):
                up += 3
            taken.append(up)
            yield _mark(line, x.end + 11, up)
            yield text(_named(line, letters), x.end + 18, up + 4, "name", "start", color)


def _named(line: Line, letters: int) -> str:
    """What stands at a line's end; of one at the axis' foot, whose scale may have no 0, that it is 0."""
    return short(line.name, letters) + ("" if any(one.kl for one in line.buckets) else ": 0")


def _mark(line: Line, at: float, up: float, *content: Markup) -> Markup:
    """What tells a model's line from others, also without colours."""
    moved = f"translate({at:.1f} {up:.1f})"
    style = f"fill:var(--m{line.model % 6})"
    return element("path", {"d": _MARKS[line.model % 6], "transform": moved, "style": style}, *content)
