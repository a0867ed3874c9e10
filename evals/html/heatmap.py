"""Errors of quantized layers as a map: a row for each kind of linear, a column for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from quantkit.architectures.names import CANONICAL
from quantkit.evals.html.elements import Markup, element, joined, scrolled
from quantkit.evals.html.scale import Scale, for_errors
from quantkit.evals.results import Evaluation, Row
from quantkit.quality.figures import significant

_SHORT = {"attention": "", "mlp": "", "expert": "expert", "shared_expert": "shared"}
_NAMES = {"output": "o"}
_MOST_WITH_DIGITS = 16  # layers
_OF = {"output_error": "outputs", "relative_error": "weights"}


class _Place(NamedTuple):
    kind: str
    layer: int | None
    expert: int | None


def heat_maps(found: Evaluation) -> list[Markup]:
    """One of each model whose manifest tells errors, all of one scale where they can be compared."""
    listed = [row for row in found.rows if row.layer_errors]
    if not listed:
        return []
    what = f"error of {_OF[found.layer_error]}, %, from"
    if found.layer_error == "output_error" or len({row.method for row in listed}) == 1:
        scale = for_errors(error for row in listed for error in row.layer_errors.values())
        return [*(_of_model(row, scale) for row in listed), scale.legend(what, 100)]
    made = []
    for row in listed:
        own = for_errors(row.layer_errors.values())
        made.append(_of_model(row, own, own.legend(what, 100)))
    note = (
        "Each model has colours of its own: GPTQ moves weights further than rounding does and changes the outputs less,"
        " so that errors of weights do not compare between the two."
    )
    return [*made, element("p", {"class": "note"}, note)]


def _of_model(row: Row, scale: Scale, *legend: str) -> Markup:
    """The map of one model, and what lies outside its layers."""
    cells, apart = _cells(row.layer_errors)
    worst, error = next(iter(row.layer_errors.items()))
    said = f"worst: {_spoken(worst)}: {significant(100 * error, 2)} %"
    parts = [element("h3", None, row.name, element("small", {"class": "readout"}, said))]
    if cells:
        parts.append(scrolled(f"errors of {row.name} by layer", _map(cells, scale)))
    parts += map(joined, legend)
    if apart:
        listed = [f"{name} {significant(100 * error, 2)} %" for name, error in apart.items()]
        parts.append(element("p", {"class": "note"}, f"Outside the layers: {', '.join(listed)}."))
    return element("div", {"class": "heat-map"}, *parts)


def _cells(errors: Mapping[str, float]) -> tuple[dict[str, dict[int, dict[int | None, float]]], dict[str, float]]:
    """Errors by kind, layer and expert, kinds in the order of the data's flow; and those outside the layers."""
    found: dict[str, dict[int, dict[int | None, float]]] = {}
    apart = {}
    for name, error in errors.items():
        place = _place(name)
        if place is None or place.layer is None:
            apart[name if place is None else place.kind] = error
        else:
            found.setdefault(place.kind, {}).setdefault(place.layer, {})[place.expert] = error
    order = [_kind(role) for role in CANONICAL]
    return {kind: found[kind] for kind in sorted(found, key=order.index)}, apart


def _map(cells: Mapping[str, Mapping[int, Mapping[int | None, float]]], scale: Scale) -> Markup:
    layers = range(1 + max(layer for of_kind in cells.values() for layer in of_kind))
    digits = len(layers) <= _MOST_WITH_DIGITS
    head = [element("th", {"scope": "col"}, str(layer) if digits or layer % 5 == 0 else _hidden(str(layer)))
            for layer in layers]  # fmt: skip
    rows = [
        element("tr", None, element("th", {"scope": "row"}, kind),
                *(_cell(kind, layer, of_kind.get(layer, {}), scale, digits) for layer in layers))
        for kind, of_kind in cells.items()
    ]  # fmt: skip
    corner = element("th", {"scope": "col"}, "layer")
    return element(
        "table", {"class": "map digits" if digits else "map"},
        element("thead", None, element("tr", None, corner, *head)), element("tbody", None, *rows),
    )  # fmt: skip


def _cell(kind: str, layer: int, errors: Mapping[int | None, float], scale: Scale, digits: bool) -> Markup:
    """One linear of one layer; of experts their mean, and which is worst."""
    if not errors:
        return element("td", None)
    mean = sum(errors.values()) / len(errors)
    shown = significant(100 * mean, 2)
    told = f"layer {layer}, {kind}: {shown} %"
    if len(errors) > 1:
        worst = max(errors, key=errors.__getitem__)
        told += f" on average of {len(errors)}; expert {worst} {significant(100 * errors[worst], 2)} %"
    return element("td", {"class": f"k{scale.step(mean)}", "title": told}, shown if digits else _hidden(shown))


def _hidden(content: str) -> Markup:
    """For those who hear a page."""
    return element("span", {"class": "heard"}, content)


def _spoken(name: str) -> str:
    place = _place(name)
    if place is None or place.layer is None:
        return name if place is None else place.kind
    return f"layer {place.layer}, {place.kind}" + ("" if place.expert is None else f" {place.expert}")


def _place(name: str) -> _Place | None:
    """Where a module lies, by its canonical name; None of one that has none."""
    for role, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            number = {key: int(value) for key, value in match.groupdict().items()}
            return _Place(_kind(role), number.get("layer"), number.get("expert"))
    return None


def _kind(role: str) -> str:
    """What one calls the linears of a role: ``q``, ``down``, ``expert up``."""
    group, _, part = role.partition(".")
    return f"{_SHORT.get(group, group)} {_NAMES.get(part, part).replace('_', ' ')}".strip()


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for key in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{key}}}"), rf"(?P<{key}>\d+)")
    return re.compile(escaped)


_PATTERNS = {role: _pattern(name) for role, name in CANONICAL.items()}
