"""Describe the schemes chosen for a size: units of linears that share a scheme, each unit's scheme
and losses, the recipe and a picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.names import expert_bank
from quantkit.architectures.topology import (
    Parameter,
    collect_default_floats,
    group_fused_linears,
    parameters,
)
from quantkit.base.memory import size_text
from quantkit.bit_allocation.size_target import CANDIDATES, SizeTarget
from quantkit.formats.codecs.vllm_modules import VllmNames
from quantkit.model.load import BLOCK_PREFIX
from quantkit.quality.figures import significant
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

FLOAT = "float"
"""The name in tables of the choice to keep floats."""
# Of schemes, from few bits to many.
_COLORS = ("#d6e6f4", "#9cc8e2", "#4f9bcb", "#1c5f9f")
_FLOAT_COLOR = "#f0883e"
# Sizes in pixels; `_LETTER` is the width of a letter, because an SVG does not measure its text.
_CELL = 20
_LETTER = 6.4
_MARGIN = 12
_TOP = 104
_MIN_WIDTH = 420.0

Measure = Literal["KL", "relative error"]
"""What losses estimate: KL(source || quantized) in nats per token; or half the squared error of a
linear's outputs, relative to their squares, where gradients by outputs are not known.
"""
_KEYS: Mapping[Measure, str] = {"KL": "estimated_kl", "relative error": "estimated_error"}


@dataclass(frozen=True)
class Unit:
    """Linears of a layer that share a scheme; `name` is for tables, the same in all layers: ``q
    k v``, ``experts``.
    """

    layer: int
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def modules(self) -> list[str]:
        return [parameter.module for parameter in self.parameters]

    @property
    def weights(self) -> int:
        return sum(parameter.shape[0] * parameter.shape[1] for parameter in self.parameters)

    @property
    def patterns(self) -> list[str]:
        """Globs that match its modules and no others."""
        globs: list[str] = []
        for parameter in self.parameters:
            bank = expert_bank(parameter.module)
            # All experts of a layer are in one unit, so one glob replaces up to hundreds of names.
            if bank is None:
                glob = parameter.module
            else:
                glob = f"{bank}.*"
            if glob not in globs:
                globs.append(glob)
        return globs


def units(
    config: ModelConfig, kept: Collection[str] = (), raw: Mapping[str, Any] | None = None
) -> list[Unit]:
    """Group the linears of all layers into units, in the order of their first linears, without the
    modules `kept` and those that stay floats by default.

    Args:
        raw: config.json, for the names in vLLM of a model that is known by its tensors only.
    """
    default_floats = collect_default_floats(config)
    linears: list[Parameter] = []
    for parameter in parameters(config):
        if not parameter.is_linear_weight or parameter.module in kept:
            continue
        if parameter.module in default_floats:
            continue
        if parameter.layer is None or parameter.linear is None:
            continue
        if parameter.linear.quantizable:
            linears.append(parameter)
    # Every module refers to the set of its group, so groups that share a module can be merged.
    groups = {parameter.module: {parameter.module} for parameter in linears}
    for modules in _together(config, linears, raw or {}):
        merged: set[str] = set()
        for module in modules:
            merged |= groups.get(module, set())
        groups.update(dict.fromkeys(merged, merged))
    # The set's identity names the group.
    members: dict[int, list[Parameter]] = {}
    for parameter in linears:
        members.setdefault(id(groups[parameter.module]), []).append(parameter)
    grouped_units: list[Unit] = []
    for unit_parameters in members.values():
        layer = unit_parameters[0].layer or 0
        grouped_units.append(Unit(layer, _name(unit_parameters), tuple(unit_parameters)))
    return grouped_units


def _together(
    config: ModelConfig, linears: Collection[Parameter], raw: Mapping[str, Any]
) -> list[list[str]]:
    """List the modules that must have the same scheme."""
    if config.tensors is not None:
        groups: list[list[str]] = []
        # Runtimes fuse linears, and all experts of a layer, by their names.
        for module in VllmNames.of(raw).group(parameter.module for parameter in linears):
            groups.append(list(module.parts))
        return groups
    # Runtimes fuse all experts of a layer.
    experts: dict[int | None, list[str]] = {}
    for parameter in linears:
        if parameter.expert is not None:
            experts.setdefault(parameter.layer, []).append(parameter.module)
    groups = list(experts.values())
    # Linears that runtimes fuse, such as q, k and v.
    for layer in range(config.num_layers):
        prefix = BLOCK_PREFIX.format(layer)
        for modules in group_fused_linears(config, layer).values():
            groups.append([prefix + module for module in modules])
    # Linears that are one tensor on disk.
    for tensor in disk_tensors(config):
        groups.append([part.removesuffix(".weight") for part in tensor.parts])
    return groups


def _name(unit_parameters: Collection[Parameter]) -> str:
    shared = ""
    names: list[str] = []
    for parameter in unit_parameters:
        if expert_bank(parameter.module) is not None:
            return "experts"
        if "shared_expert" in parameter.module:
            shared = "shared "
        names.append(parameter.module.rpartition(".")[2].removesuffix("_proj"))
    return shared + " ".join(names)


@dataclass(frozen=True)
class UnitChoice:
    """A manifest's entry on a unit: its layer, the names of its linears, globs that match their
    modules, how many weights they have, the name of the scheme (`FLOAT` keeps floats), and the loss
    that each scheme would cost, see `Allocation.measure`.
    """

    layer: int
    linears: str
    modules: list[str]
    weights: int
    scheme: str
    losses: dict[str, float]

    @classmethod
    def of(
        cls, unit: Unit, scheme: QuantScheme | None, losses: Mapping[QuantScheme, float]
    ) -> UnitChoice:
        """Describe the choice of a scheme, None for floats, given the loss of each."""
        # The losses are estimates: more digits would only lengthen the manifest.
        rounded: dict[str, float] = {}
        for candidate, loss in losses.items():
            rounded[str(candidate)] = float(f"{loss:.4g}")
        return cls(
            unit.layer, unit.name, unit.patterns, unit.weights, str(scheme or FLOAT), rounded
        )

    @property
    def loss(self) -> float:
        return self.losses.get(self.scheme, 0.0)

    def to_json(self, key: str) -> dict[str, Any]:
        """Write the manifest's entry, with the losses under a key."""
        fields = asdict(self)
        losses = fields.pop("losses")
        return {**fields, key: losses}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], key: str) -> UnitChoice:
        """Read the result of `to_json`."""
        others = {name: value for name, value in fields.items() if name != key}
        return cls(**others, losses=fields[key])


@dataclass(frozen=True)
class Allocation:
    """The schemes with the smallest loss for a size.

    Attributes:
        bits: for each weight of the linears, as in `SizeTarget.bits`.
        weight_bytes: of all files of weights together.
        units: in the order of the layers.
        measure: what the losses estimate.
    """

    target: SizeTarget
    bits: float
    weight_bytes: int
    units: Sequence[UnitChoice]
    measure: Measure = "KL"

    @property
    def loss(self) -> float:
        """Sum the estimated losses of all units: per token, if they are a KL."""
        return sum(unit.loss for unit in self.units)

    def recipe(self, requested_overrides: Iterable[Override] = ()) -> Recipe:
        """Write the recipe that gives every unit its scheme. Requested overrides follow, so that
        they take precedence.
        """
        # The most frequent scheme is the default, which needs the fewest overrides.
        counts = Counter[str]()
        for unit in self.units:
            if unit.scheme != FLOAT:
                counts[unit.scheme] += 1
        default = counts.most_common(1)[0][0]
        overrides: list[Override] = []
        for unit in self.units:
            if unit.scheme == default:
                continue
            scheme = None if unit.scheme == FLOAT else QuantScheme.parse(unit.scheme)
            for pattern in unit.modules:
                overrides.append(Override(pattern, scheme))
        return Recipe(QuantScheme.parse(default), (*overrides, *requested_overrides))

    def to_json(self) -> dict[str, Any]:
        """Write the manifest's entry."""
        return {
            **self.target.to_json(),
            "bits_per_weight": self.bits,
            "weight_bytes": self.weight_bytes,
            _KEYS[self.measure]: float(f"{self.loss:.4g}"),
            "units": [unit.to_json(_KEYS[self.measure]) for unit in self.units],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Allocation:
        """Read the result of `to_json`."""
        target = SizeTarget(fields.get("target_bits"), fields.get("max_size"))
        measure: Measure = "KL"
        for name, key in _KEYS.items():
            if key in fields:
                measure = name
        key = _KEYS[measure]
        units = [UnitChoice.from_json(unit_fields, key) for unit_fields in fields["units"]]
        return cls(target, fields["bits_per_weight"], fields["weight_bytes"], units, measure)

    def table(self) -> list[list[str]]:
        """List a header and a row for each layer: the schemes of its units, and their estimated
        cost.
        """
        names: list[str] = []
        units_of_layer: dict[int, dict[str, UnitChoice]] = {}
        for unit in self.units:
            if unit.linears not in names:
                names.append(unit.linears)
            units_of_layer.setdefault(unit.layer, {})[unit.linears] = unit
        rows = [["layer", *names, f"{self.measure} x 1e-4"]]
        for layer, layer_units in units_of_layer.items():
            schemes: list[str] = []
            for name in names:
                # Layers may differ in their linears, such as dense layers and those with experts.
                schemes.append(layer_units[name].scheme if name in layer_units else "")
            loss = sum(unit.loss for unit in layer_units.values())
            rows.append([str(layer), *schemes, significant(1e4 * loss)])
        return rows

    def line(self) -> str:
        """Summarize the choice in one line."""
        return (
            f"chosen for {self.target}: {self.bits:.4g} bits a weight of the linear layers,"
            f" {size_text(self.weight_bytes)} of weights, estimated {self.measure}"
            f" {significant(self.loss)}"
        )

    def lines(self) -> list[str]:
        """Write the table as text: numbers are aligned to the right, schemes to the left."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *middle, last = widths
        lines: list[str] = []
        for row in rows:
            schemes = map(str.ljust, row[1:-1], middle)
            cells = [row[0].rjust(first), *schemes, row[-1].rjust(last)]
            lines.append("  ".join(cells).rstrip())
        return lines


def picture(allocation: Allocation) -> str:
    """Draw the choice as an SVG: a column for each layer, a row for each kind of linears, darker
    for more bits; above it each layer's estimated loss. It follows the reader's light or dark
    theme.
    """
    names: list[str] = []
    losses: dict[int, float] = {}
    offered: set[str] = set()
    for unit in allocation.units:
        if unit.linears not in names:
            names.append(unit.linears)
        losses[unit.layer] = losses.get(unit.layer, 0.0) + unit.loss
        offered.update(unit.losses)
    unit_text = f"{allocation.measure} x 1e-4"
    title = (
        f"{allocation.bits:.4g} bits a weight, estimated {allocation.measure}"
        f" {significant(allocation.loss)}"
    )
    # 8 pixels separate the names of the rows from the cells.
    cells_left = _MARGIN + max(map(len, [*names, unit_text])) * _LETTER + 8
    # CANDIDATES are in the order of their bits.
    ordered = [scheme for scheme in map(str, CANDIDATES) if scheme in offered]
    last = max(1, len(ordered) - 1)
    colors: dict[str, str] = {}
    for number, scheme in enumerate(ordered):
        colors[scheme] = _COLORS[round(number * (len(_COLORS) - 1) / last)]
    colors[FLOAT] = _FLOAT_COLOR
    legend: list[tuple[str, str, float]] = []
    x = float(_MARGIN)
    for scheme, color in colors.items():
        legend.append((scheme, color, x))
        x += 30 + len(scheme) * _LETTER
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    template = environment.from_string(
        Path(__file__).with_name("picture.svg.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        allocation=allocation,
        title=title,
        unit=unit_text,
        names=names,
        losses=losses,
        colors=colors,
        legend=legend,
        # Losses are divided by it, and all of them may be zero.
        max_loss=max(*losses.values(), 1e-30),
        columns={layer: column for column, layer in enumerate(losses)},
        # About 16 layers have a number, so that numbers do not overlap.
        stride=max(1, len(losses) // 16),
        left=cells_left,
        top=_TOP,
        bottom=_TOP + len(names) * _CELL,
        width=max(cells_left + len(losses) * _CELL + _MARGIN, _MIN_WIDTH, len(title) * _LETTER),
        significant=significant,
    )
