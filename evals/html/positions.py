"""Divergence by how far in a context a token lies: a line for each model, and for each kind of cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quantkit.evals.html.axes import HEIGHT, Axis, drawn, frame, left_margin, short, spread, text, wide
from quantkit.evals.html.elements import Attributes, Markup, element, joined
from quantkit.evals.results import Evaluation
from quantkit.quality.positions import FLOAT, PositionDivergence

_MOST_TICKS = 8


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
    kls = [one.kl for line in drawn_lines for one in line.buckets if math.isfinite(one.kl) and one.kl > 0]
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
    names = [short(line.name, letters) for line in drawn_lines if not line.dashed]
    most = max(one.stop for line in drawn_lines for one in line.buckets)
    least = min(line.buckets[0].stop for line in drawn_lines)
    low, high, log = spread(kls)
    y = Axis(low if log else 0.0, high, HEIGHT - 46, 28, log)
    x = Axis(least / math.sqrt(2), most, left_margin(y), width - 14 - max(map(wide, names), default=0), True)
    ticks = [2**power for power in range(least.bit_length() - 1, most.bit_length())]
    ticks = ticks[:: -(-len(ticks) // (_MOST_TICKS if width > 400 else 5))]
    yield from frame(x, y, "position in the context, tokens", "KL, nats per token", ticks)
    taken: list[float] = []
    for line in sorted(drawn_lines, key=lambda one: (one.dashed, -one.buckets[-1].kl)):
        color = f"var(--m{line.model % 6})"
        kept = [one for one in line.buckets if math.isfinite(one.kl) and one.kl > 0]
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
            told = f"{line.name}, positions {one.name}: {one.estimate}"
            dot: Attributes = {"cx": round(at, 1), "cy": round(up, 1), "r": 3, "style": f"fill:{color}"}
            yield element("circle", dot, element("title", None, told))
        if not line.dashed:
            at, up = places[-1]
            while any(abs(up - other) < 14 for other in taken):
                up += 3
            taken.append(up)
            yield text(short(line.name, letters), x.end + 8, up + 4, "name", "start", color)
