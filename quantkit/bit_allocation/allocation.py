"""The choice for a size: units of linears that share a scheme, each unit's scheme and losses,
the recipe, a picture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.topology import Parameter, group_fused_linears, parameters
from quantkit.base.arguments import as_integer, as_number
from quantkit.base.memory import size_text
from quantkit.errors import RequestError
from quantkit.model.load import BLOCK_PREFIX
from quantkit.quality.figures import significant
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

CANDIDATES = tuple(
    map(
        QuantScheme.parse,
        ("q3_k", "int4-g128", "int4-g64", "int4-g32", "q4_k", "q5_0", "q5_k", "q6_k", "int8"),
    )
)
"""The scheme of each unit is chosen among those of these that the format holds, and floats."""
FLOAT = "float"
"""The name in tables of the choice to keep floats."""
PICTURE = "bit-allocation.svg"
"""The name of the picture's file, next to the model card."""
# From few bits to many.
_COLORS = ("#d6e6f4", "#9cc8e2", "#4f9bcb", "#1c5f9f")
_FLOAT_COLOR = "#f0883e"
# pixels
_CELL = 20
_LETTER = 6.4
_MARGIN = 12
_TOP = 104
_MIN_WIDTH = 420.0
_UNIT = "KL x 1e-4"


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
        experts = f"{BLOCK_PREFIX.format(self.layer)}mlp.experts.*"
        routed = any(parameter.expert is not None for parameter in self.parameters)
        own = []
        for parameter in self.parameters:
            if parameter.expert is None:
                own.append(parameter.module)
        return [*own, *([experts] if routed else [])]


def units(config: ModelConfig, kept: Collection[str] = ()) -> list[Unit]:
    """Return the units of all layers, in the order of their first linears, without the modules
    `kept`.
    """
    linears = [
        parameter
        for parameter in parameters(config)
        if parameter.is_linear_weight
        and parameter.layer is not None
        and parameter.linear is not None
        and parameter.linear.quantizable
        and parameter.module not in kept
    ]
    groups = {parameter.module: {parameter.module} for parameter in linears}
    for together in _together(config, linears):
        own = [groups[module] for module in together if module in groups]
        if any(one is not own[0] for one in own):
            merged = set().union(*own)
            groups.update(dict.fromkeys(merged, merged))
    found: dict[int, list[Parameter]] = {}
    for parameter in linears:
        found.setdefault(id(groups[parameter.module]), []).append(parameter)
    return [Unit(own[0].layer or 0, _name(own), tuple(own)) for own in found.values()]


def _together(config: ModelConfig, linears: Collection[Parameter]) -> list[list[str]]:
    """Modules that must have the same scheme."""
    experts: dict[int | None, list[str]] = {}
    for parameter in linears:
        if parameter.expert is not None:
            experts.setdefault(parameter.layer, []).append(parameter.module)
    found = list(experts.values())
    for layer in range(config.num_layers):
        prefix = BLOCK_PREFIX.format(layer)
        found += [
            [prefix + module for module in modules]
            for modules in group_fused_linears(config, layer).values()
        ]
    return found + [
        [part.removesuffix(".weight") for part in tensor.parts] for tensor in disk_tensors(config)
    ]


def _name(unit_parameters: Collection[Parameter]) -> str:
    if any(parameter.expert is not None for parameter in unit_parameters):
        return "experts"
    if any("shared_expert" in parameter.module for parameter in unit_parameters):
        shared = "shared "
    else:
        shared = ""
    return shared + " ".join(
        parameter.module.rpartition(".")[2].removesuffix("_proj") for parameter in unit_parameters
    )


@dataclass(frozen=True)
class SizeTarget:
    """The requested size: mean bits for each weight of the linears, where codes, scales and zero
    points count, or bytes of all files of weights together.
    """

    bits: float | None = None
    bytes: int | None = None

    def to_json(self) -> dict[str, float | int]:
        if self.bits is not None:
            return {"target_bits": self.bits}
        return {"max_size": self.bytes or 0}

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits a weight"
        return size_text(self.bytes or 0)


def size_target(
    target_bits: float | None, max_size: int | None, scheme: object
) -> SizeTarget | None:
    """Return the requested size; None if a scheme is given instead. More than one of the three, or
    a size that is not a number above 0, is a `RequestError`.
    """
    options = (("scheme", scheme), ("target_bits", target_bits), ("max_size", max_size))
    named = [f"`{name}`" for name, value in options if value is not None]
    if len(named) > 1:
        raise RequestError(
            f"{' and '.join(named)} exclude each other", hint="a size chooses the schemes"
        )
    if target_bits is not None:
        bits = as_number("target_bits", target_bits)
        if not 0 < bits < math.inf:
            raise RequestError(
                "`target_bits` is no number of bits", found=bits, expected="such as 4.5"
            )
        return SizeTarget(bits=bits)
    if max_size is not None:
        size = as_integer("max_size", max_size)
        if size <= 0:
            raise RequestError("`max_size` must be positive", found=size)
        return SizeTarget(bytes=size)
    return None


@dataclass(frozen=True)
class UnitChoice:
    """A manifest's entry on a unit: its layer, the names of its linears, globs that match their
    modules, how many weights they have, the name of the scheme (`FLOAT` keeps floats), and the KL
    that each scheme would cost.
    """

    layer: int
    linears: str
    modules: list[str]
    weights: int
    scheme: str
    estimated_kl: dict[str, float]

    @classmethod
    def of(
        cls, unit: Unit, scheme: QuantScheme | None, losses: Mapping[QuantScheme, float]
    ) -> UnitChoice:
        """Return the choice of a scheme, None for floats, given the loss of each."""
        rounded = {str(one): float(f"{loss:.4g}") for one, loss in losses.items()}
        return cls(
            unit.layer, unit.name, unit.patterns, unit.weights, str(scheme or FLOAT), rounded
        )

    @property
    def loss(self) -> float:
        return self.estimated_kl.get(self.scheme, 0.0)


@dataclass(frozen=True)
class Allocation:
    """The schemes with the smallest loss for a size.

    Attributes:
        bits: for each weight of the linears, as in `SizeTarget.bits`.
        weight_bytes: of all files of weights together.
        units: in the order of the layers.
    """

    target: SizeTarget
    bits: float
    weight_bytes: int
    units: Sequence[UnitChoice]

    @property
    def kl(self) -> float:
        """Return the estimated KL per token of all units together."""
        return sum(unit.loss for unit in self.units)

    def recipe(self, requested_overrides: Iterable[Override] = ()) -> Recipe:
        """Return the recipe that gives every unit its scheme; `others` are requested overrides,
        which precede.
        """
        counts = Counter(unit.scheme for unit in self.units if unit.scheme != FLOAT)
        default = counts.most_common(1)[0][0]
        named = [unit for unit in self.units if unit.scheme != default]
        overrides = (
            Override(pattern, None if unit.scheme == FLOAT else QuantScheme.parse(unit.scheme))
            for unit in named
            for pattern in unit.modules
        )
        return Recipe(QuantScheme.parse(default), (*overrides, *requested_overrides))

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {
            **self.target.to_json(),
            "bits_per_weight": self.bits,
            "weight_bytes": self.weight_bytes,
            "estimated_kl": float(f"{self.kl:.4g}"),
            "units": [asdict(unit) for unit in self.units],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Allocation:
        """Return the result of `to_json`, read back."""
        target = SizeTarget(fields.get("target_bits"), fields.get("max_size"))
        units = [UnitChoice(**one) for one in fields["units"]]
        return cls(target, fields["bits_per_weight"], fields["weight_bytes"], units)

    def table(self) -> list[list[str]]:
        """Return a header and a row for each layer: the schemes of its units, and their
        estimated cost.
        """
        names = list(dict.fromkeys(unit.linears for unit in self.units))
        rows = [["layer", *names, "KL x 1e-4"]]
        for layer in dict.fromkeys(unit.layer for unit in self.units):
            own = {unit.linears: unit for unit in self.units if unit.layer == layer}
            schemes = []
            for name in names:
                schemes.append(own[name].scheme if name in own else "")
            rows.append(
                [str(layer), *schemes, significant(1e4 * sum(unit.loss for unit in own.values()))]
            )
        return rows

    def line(self) -> str:
        """Return a summary in one line."""
        return (
            f"chosen for {self.target}: {self.bits:.4g} bits a weight of the linear layers,"
            f" {size_text(self.weight_bytes)} of weights, estimated KL {significant(self.kl)}"
        )

    def lines(self) -> list[str]:
        """Return the table as text."""
        rows = self.table()
        first, *middle, last = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines: list[str] = []
        for row in rows:
            lines.append(
                "  ".join(
                    [row[0].rjust(first), *map(str.ljust, row[1:-1], middle), row[-1].rjust(last)]
                ).rstrip()
            )
        return lines


def picture(allocation: Allocation) -> str:
    """Return the choice as an SVG: a column for each layer, a row for each kind of linears, darker
    where there are more bits; above it each layer's estimated loss. It follows the reader's light
    or dark theme.
    """
    names = list(dict.fromkeys(unit.linears for unit in allocation.units))
    losses = {unit.layer: 0.0 for unit in allocation.units}
    for unit in allocation.units:
        losses[unit.layer] += unit.loss
    title = f"{allocation.bits:.4g} bits a weight, estimated KL {significant(allocation.kl)}"
    left = _MARGIN + max(len(name) for name in [*names, _UNIT]) * _LETTER + 8
    offered = {scheme for unit in allocation.units for scheme in unit.estimated_kl} - {FLOAT}
    ordered = [scheme for scheme in map(str, CANDIDATES) if scheme in offered]
    last = max(1, len(ordered) - 1)
    shades = (_COLORS[round(number * (len(_COLORS) - 1) / last)] for number in range(len(ordered)))
    colors = dict(zip(ordered, shades, strict=True)) | {FLOAT: _FLOAT_COLOR}
    legend = []
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
        unit=_UNIT,
        names=names,
        losses=losses,
        colors=colors,
        legend=legend,
        max_loss=max(*losses.values(), 1e-30),
        columns={layer: column for column, layer in enumerate(losses)},
        stride=max(1, len(losses) // 16),
        left=left,
        top=_TOP,
        bottom=_TOP + len(names) * _CELL,
        width=max(left + len(losses) * _CELL + _MARGIN, _MIN_WIDTH, len(title) * _LETTER),
        significant=significant,
    )
