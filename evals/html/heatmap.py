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
from quantkit.evals.results import EvaluationData, Row
from quantkit.quality.figures import significant

STEPS = 8
# Of the largest to the smallest value: beyond it steps are logarithmic.
_LOG_RATIO = 20
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
        """Choose the color of a value."""
        return sum(value >= limit for limit in self.limits)


def log_scale(values: Iterable[float]) -> ColorScale:
    """Build a scale with steps at 1, 2 and 5 of each decade, downward from the largest value."""
    largest = 0.0
    for value in values:
        if math.isfinite(value):
            largest = max(largest, value)
    # The steps of all decades are numbered in one sequence, three to a decade; 0 is the step at 1.
    top = 0
    if largest > 0:
        decade = math.floor(math.log10(largest))
        # The largest step below the value, since nothing above it needs a color.
        top = 3 * decade - 1
        for factor in _DECADE:
            if largest > factor * 10.0**decade:
                top += 1
    limits = []
    for number in range(top - STEPS + 1, top + 1):
        limits.append(_DECADE[number % 3] * 10.0 ** (number // 3))
    return ColorScale(tuple(limits))


def error_scale(values: Iterable[float]) -> ColorScale:
    """Build a scale with equal steps over all values, or logarithmic ones where these differ
    widely.
    """
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive or max(positive) > _LOG_RATIO * min(positive):
        return log_scale(positive)
    low = min(positive)
    high = max(positive)
    if high < _MIN_RATIO * low:
        # Otherwise small differences would look as large as the whole scale.
        middle = math.sqrt(low * high)
        low = middle / math.sqrt(_MIN_RATIO)
        high = middle * math.sqrt(_MIN_RATIO)
    width = round_up((high - low) / STEPS, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10))
    first = math.floor(low / width)
    limits = []
    for index in range(STEPS):
        limits.append(width * (first + index))
    return ColorScale(tuple(limits))


def round_up(value: float, steps: Sequence[float]) -> float:
    """Round to the next larger step in the value's decade; the last step is 10."""
    power = 10.0 ** math.floor(math.log10(value))
    # A value that is a step stays, in spite of the rounding of floats.
    least = value * (1 - 1e-9)
    return power * next(step for step in steps if step * power >= least)


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


def comparable(evaluation: EvaluationData) -> bool:
    """Check whether errors of all models can be compared.

    GPTQ moves weights further than rounding does and changes outputs less, so errors of its weights
    do not compare with those of rounding.
    """
    methods = {row.method for row in evaluation.rows if row.layer_errors}
    return evaluation.layer_error == "output_error" or len(methods) == 1


def heat_maps(evaluation: EvaluationData) -> list[HeatMap]:
    """Build a map for each model whose manifest has errors."""
    rows = []
    errors: list[float] = []
    for row in evaluation.rows:
        if row.layer_errors:
            rows.append(row)
            errors += row.layer_errors.values()
    # One scale for all maps, so that colors of different models can be compared.
    scale = error_scale(errors)
    return [_heat_map(row, scale) for row in rows]


def _heat_map(row: Row, scale: ColorScale) -> HeatMap:
    # By kind, layer and expert. A linear outside of experts has None in the place of the expert.
    errors: dict[str, dict[int, dict[int | None, float]]] = {}
    outside = []
    num_layers = 0
    for name, error in row.layer_errors.items():
        kind, layer, expert = _parse_module_name(name)
        if layer is None:
            outside.append(f"{kind} {_percent(error)}")
        else:
            errors.setdefault(kind, {}).setdefault(layer, {})[expert] = error
            num_layers = max(num_layers, layer + 1)
    # CANONICAL has the order of the data's flow.
    order = [_kind(role) for role in CANONICAL]
    rows: dict[str, list[Cell | None]] = {}
    for kind in sorted(errors, key=order.index):
        cells = []
        for layer in range(num_layers):
            cells.append(_cell(kind, layer, errors[kind].get(layer, {}), scale))
        rows[kind] = cells
    # A row's errors are sorted, the worst first.
    worst_name, worst_error = next(iter(row.layer_errors.items()))
    kind, worst_layer, expert = _parse_module_name(worst_name)
    place = kind
    if worst_layer is not None:
        place = f"layer {worst_layer}, {kind}"
        if expert is not None:
            place += f" {expert}"
    worst = f"{place}: {_percent(worst_error)}"
    return HeatMap(
        name=row.name, worst=worst, layers=num_layers, rows=rows, outside=outside, scale=scale
    )


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


def _parse_module_name(name: str) -> tuple[str, int | None, int | None]:
    """Find kind, layer and expert of a module by its canonical name; the kind is the name itself
    where no pattern matches.
    """
    for role, pattern in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match is not None:
            numbers = {key: int(digits) for key, digits in match.groupdict().items()}
            return _kind(role), numbers.get("layer"), numbers.get("expert")
    return name, None, None


def _kind(role: str) -> str:
    """Choose a short name for the linears of a role: ``q``, ``down``, ``expert up``."""
    group, _, part = role.partition(".")
    # Models' files call this linear ``o_proj``.
    if part == "output":
        part = "o"
    part = part.replace("_", " ")
    return f"{_GROUPS.get(group, group)} {part}".strip()


# A place for a number in a name, as `re.escape` spells it: it escapes the braces.
_NUMBER = re.compile(r"\\\{(layer|expert)\\\}")
_PATTERNS = {
    role: re.compile(_NUMBER.sub(r"(?P<\1>\\d+)", re.escape(name)))
    for role, name in CANONICAL.items()
}
