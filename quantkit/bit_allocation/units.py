"""Units of linears that share a scheme: those that runtimes fuse or that are one module on disk, and all experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.topology import Parameter, fused_modules, parameters
from quantkit.model.load import BLOCK_PREFIX


@dataclass(frozen=True)
class Unit:
    """Linears of a layer that share a scheme.

    Attributes:
        layer: its index.
        name: for tables, the same in all layers: ``q k v``, ``o``, ``experts``.
        parameters: their weights.
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
    def columns(self) -> set[int]:
        return {parameter.shape[1] for parameter in self.parameters}

    @property
    def patterns(self) -> list[str]:
        """Globs that match its modules and no others."""
        experts = f"{BLOCK_PREFIX.format(self.layer)}mlp.experts.*"
        routed = any(parameter.expert is not None for parameter in self.parameters)
        own = [parameter.module for parameter in self.parameters if parameter.expert is None]
        return [*own, *([experts] if routed else [])]


def units(config: ModelConfig, kept: Collection[str] = ()) -> list[Unit]:
    """The units of all layers, in the order of their first linears.

    Args:
        kept: modules that are in no unit.
    """
    linears = [
        parameter for parameter in parameters(config)
        if parameter.is_linear_weight and parameter.layer is not None and parameter.linear is not None
        and parameter.linear.quantizable and parameter.module not in kept
    ]  # fmt: skip
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
    found: list[list[str]] = []
    experts: dict[int | None, list[str]] = {}
    for parameter in linears:
        if parameter.expert is not None:
            experts.setdefault(parameter.layer, []).append(parameter.module)
    found += experts.values()
    for layer in range(config.num_layers):
        prefix = BLOCK_PREFIX.format(layer)
        found += [[prefix + module for module in modules] for modules in fused_modules(config, layer).values()]
    return found + [[part.removesuffix(".weight") for part in tensor.parts] for tensor in disk_tensors(config)]


def _name(own: Collection[Parameter]) -> str:
    if any(parameter.expert is not None for parameter in own):
        return "experts"
    shared = "shared " if any("shared_expert" in parameter.module for parameter in own) else ""
    return shared + " ".join(parameter.module.rpartition(".")[2].removesuffix("_proj") for parameter in own)
