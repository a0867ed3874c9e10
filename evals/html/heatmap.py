"""Color scales, and errors of quantized layers as heat maps: a row for each kind of linear, a
column for each layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.architectures.names import CANONICAL
from quantkit.evals.results import Evaluation, Row
from quantkit.quality.figures import significant

STEPS = 8
_LOG_RATIO = 20  # of the largest to the smallest value: beyond it steps are logarithmic
# Closer values have colors from the middle of the scale.
_MIN_RATIO = 2
_DECADE = (1, 2, 5)


@dataclass(frozen=True)
class ColorScale:
    """Colors 1 to `STEPS`, which begin at `limits`, ascending; values below all limits have
    color 0.
    """

    limits: tuple[float, ...]

    def color(self, value: float) -> int:
        """Return the color of a value."""
        return sum(value >= limit for limit in self.limits)


def log_scale(values: Iterable[float]) -> ColorScale:
    """Steps at 1, 2 and 5 of each decade, downward from the largest value."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    top = 0
    if largest > 0:
        decade = math.floor(math.log10(largest))
        top = 3 * decade + sum(largest > factor * 10.0**decade for factor in _DECADE) - 1
    thirds = range(top - STEPS + 1, top + 1)
    return ColorScale(tuple(_DECADE[third % 3] * 10.0 ** (third // 3) for third in thirds))


def error_scale(values: Iterable[float]) -> ColorScale:
    """Equal steps over all values, logarithmic ones where these differ widely."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive or max(positive) > _LOG_RATIO * min(positive):
        return log_scale(positive)
    low = min(positive)
    high = max(positive)
    if high < _MIN_RATIO * low:
        middle = math.sqrt(low * high)
        low = middle / math.sqrt(_MIN_RATIO)
        high = middle * math.sqrt(_MIN_RATIO)
    width = round_up((high - low) / STEPS, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10))
    first = math.floor(low / width)
    return ColorScale(tuple(width * (first + index) for index in range(STEPS)))


def round_up(value: float, steps: Sequence[float]) -> float:
    """Return the next larger step in the value's decade; the last step is 10."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in steps if step * power >= value * (1 - 1e-9))


_GROUPS = {"attention": "", "mlp": "", "expert": "expert", "shared_expert": "shared"}
_MAX_LAYERS_WITH_DIGITS = 16


class Cell(NamedTuple):
    """The error of one linear of one layer; of experts the mean."""

    color: int
    percent: str
    title: str


@dataclass(frozen=True)
class HeatMap:
    """One model's errors.

    Attributes:
        worst: the linear with the largest error.
        rows: by kind of linear, in the order of the data's flow, a cell for each of `layers` layers
            or None.
        outside: errors of linears that belong to no layer.
        scale: shared by all maps.
    """

    name: str
    worst: str
    layers: int
    rows: dict[str, list[Cell | None]]
    outside: list[str]
    scale: ColorScale

    @property
    def digits(self) -> bool:
        """Return whether there is room for the values."""
        return self.layers <= _MAX_LAYERS_WITH_DIGITS


def comparable(evaluation: Evaluation) -> bool:
    """Return whether errors of all models can be compared.

    GPTQ moves weights further than rounding does and changes outputs less, so errors of its weights
    do not compare with those of rounding.
    """
    methods = {row.method for row in evaluation.rows if row.layer_errors}
    return evaluation.layer_error == "output_error" or len(methods) == 1


def heat_maps(evaluation: Evaluation) -> list[HeatMap]:
    """Return a map for each model whose manifest has errors."""
    rows = [row for row in evaluation.rows if row.layer_errors]
    scale = error_scale(error for row in rows for error in row.layer_errors.values())
    return [_heat_map(row, scale) for row in rows]


def _heat_map(row: Row, scale: ColorScale) -> HeatMap:
    places: dict[str, dict[int, dict[int | None, float]]] = {}
    outside = []
    for name, error in row.layer_errors.items():
        kind, layer, expert = _place(name)
        if layer is None:
            outside.append(f"{kind} {_percent(error)}")
        else:
            places.setdefault(kind, {}).setdefault(layer, {})[expert] = error
    order = [_kind(role) for role in CANONICAL]
    layers = 1 + max((layer for by_layer in places.values() for layer in by_layer), default=-1)
    rows = {
        kind: [_cell(kind, layer, places[kind].get(layer, {}), scale) for layer in range(layers)]
        for kind in sorted(places, key=order.index)
    }
    name, error = next(iter(row.layer_errors.items()))
    kind, worst_layer, expert = _place(name)
    if worst_layer is None:
        place = kind
    else:
        place = f"layer {worst_layer}, {kind}" + ("" if expert is None else f" {expert}")
    return HeatMap(row.name, f"{place}: {_percent(error)}", layers, rows, outside, scale)


def _cell(
    kind: str, layer: int, errors: Mapping[int | None, float], scale: ColorScale
) -> Cell | None:
    if not errors:
        return None
    mean = sum(errors.values()) / len(errors)
    title = f"layer {layer}, {kind}: {_percent(mean)}"
    if len(errors) > 1:
        worst = max(errors, key=errors.__getitem__)
        title += f" on average of {len(errors)}; expert {worst} {_percent(errors[worst])}"
    return Cell(scale.color(mean), significant(100 * mean, 2), title)


def _percent(error: float) -> str:
    return f"{significant(100 * error, 2)} %"


def _place(name: str) -> tuple[str, int | None, int | None]:
    """Kind, layer and expert of a module by its canonical name; the name itself where no pattern
    matches.
    """
    for role, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            return _kind(role), numbers.get("layer"), numbers.get("expert")
    return name, None, None


def _kind(role: str) -> str:
    """Return a short name for the linears of a role: ``q``, ``down``, ``expert up``."""
    group, _, part = role.partition(".")
    return (
        f"{_GROUPS.get(group, group)} {'o' if part == 'output' else part.replace('_', ' ')}".strip()
    )


# A place for a number in a name, as `re.escape` spells it.
_NUMBER = re.compile(r"\\\{(layer|expert)\\\}")
_PATTERNS = {
    role: re.compile(_NUMBER.sub(r"(?P<\1>\\d+)", re.escape(name)))
    for role, name in CANONICAL.items()
}
