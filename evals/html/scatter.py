"""What models cost by their size: divergence from the reference, or perplexity without one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from quantkit.evals.html.axes import HEIGHT, Axis, Box, drawn, frame, label_near, left_margin, short, spread, text, wide
from quantkit.evals.html.elements import Markup, element, joined
from quantkit.evals.results import Evaluation
from quantkit.quality.figures import Estimate

_MARKS = ("●", "■", "▲", "◆", "▼", "✚")


class _Point(NamedTuple):
    model: int
    mark: int
    megabytes: float
    cost: float
    error: float
    told: str

    @property
    def ends(self) -> tuple[float, float]:
        """Of its bar."""
        return max(self.cost - self.error, 0.1 * self.cost), self.cost + self.error


def scatter(found: Evaluation) -> Markup | None:
    """Each model on each text; None where there is nothing to compare."""
    points = list(_points(found))
    if not points or (found.reference is None and len(points) < 2):
        return None
    what = "word perplexity"
    if found.reference is not None:
        what = f"KL from {short(found.reference, 20)}, nats per token"
    told = "; ".join(point.told for point in points)
    return joined(
        drawn(lambda width: _drawing(found, points, what, width), f"{what}, by size: {told}"),
        *_legend(list(found.texts)),
    )


def _points(found: Evaluation) -> Iterator[_Point]:
    for mark, text_name in enumerate(found.texts):
        for index, row in enumerate(found.rows):
            measures = row.texts[text_name]
            cost = Estimate(measures.documents.word_perplexity)
            if found.reference is not None:
                if measures.divergence is None:
                    continue
                cost = Estimate(measures.divergence.kl, measures.divergence.kl_error)
            if math.isfinite(cost.value) and cost.value >= 0:
                told = f"{row.name} on {text_name}: {row.megabytes:.2f} MB, {cost}"
                yield _Point(index, mark % len(_MARKS), row.megabytes, cost.value, cost.error or 0.0, told)


def _drawing(found: Evaluation, points: list[_Point], what: str, width: int) -> Iterator[Markup]:
    sizes = [point.megabytes for point in points]
    if found.reference is not None:
        sizes.append(found.rows[0].megabytes)
    low, high, log = spread([end for point in points for end in point.ends])
    y = Axis(low, high, HEIGHT - 46, 28, log)
    x = Axis(0.0 if max(sizes) < 8 * min(sizes) else min(sizes) / 1.6, max(sizes) * 1.12, left_margin(y), width - 8,
             max(sizes) >= 8 * min(sizes))  # fmt: skip
    yield from frame(x, y, "size, MB", what)
    taken: list[Box] = []
    if found.reference is not None:
        at = x.at(found.rows[0].megabytes)
        yield element("line", {"class": "reference", "x1": at, "x2": at, "y1": y.start, "y2": y.end})
        name = short(found.reference, 22 if width > 400 else 14)
        yield text(name, at - 6, y.end + 10, "name", "end")
        taken.append(Box(at - 6 - wide(name), y.end, at + 2, y.end + 14))
    for point in points:
        at, up, color = x.at(point.megabytes), y.at(point.cost), f"var(--m{point.model % 6})"
        taken.append(Box(at - 7, up - 7, at + 7, up + 7))
        least, most = point.ends
        ends = {"x1": at, "x2": at, "y1": y.at(least), "y2": y.at(most)}
        yield element("line", {"class": "bar", "style": f"stroke:{color}", **ends})
        yield element(
            "text", {"class": "mark", "x": round(at, 1), "y": round(up + 5, 1), "text-anchor": "middle",
                     "style": f"fill:{color}"},
            element("title", None, point.told), _MARKS[point.mark],
        )  # fmt: skip
    within, named = Box(x.start, y.end - 10, width, y.start), set()
    for point in points:
        if point.model not in named:
            named.add(point.model)
            name = short(found.rows[point.model].name, 26 if width > 400 else 16) + ("" if point.cost else ": 0")
            color = f"var(--m{point.model % 6})"
            yield label_near(name, x.at(point.megabytes), y.at(point.cost), within, taken, color)


def _legend(texts: list[str]) -> list[Markup]:
    """Which mark is which text, of several."""
    if len(texts) < 2:
        return []
    marks = [element("span", None, f"{_MARKS[index % len(_MARKS)]} {name}") for index, name in enumerate(texts)]
    return [element("p", {"class": "keys"}, *marks)]
