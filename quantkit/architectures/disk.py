"""What a family's Hugging Face folder holds: its tensors by name, and the canonical ones that each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import families
from quantkit.architectures.families.family import Family, StackedExperts
from quantkit.architectures.names import BLOCK, CANONICAL
from quantkit.architectures.topology import ExpertBank, Linear, Parameter, block_items, parameters, sizes


@dataclass(frozen=True)
class DiskTensor:
    """One tensor on disk.

    Attributes:
        parts: the canonical tensors that it holds, in order; rows one below the other where they are several linears
            of a block, or those of each expert in turn.
        stacked: how it holds experts, if it does.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    stacked: StackedExperts | None = None


def disk_tensors(config: ModelConfig) -> list[DiskTensor]:
    """The tensors of a folder of a model's family; stacked experts where the family has them."""
    family = families()[config.architecture]
    found: list[DiskTensor] = []
    fused: dict[str, list[Parameter]] = {}
    for parameter in parameters(config):
        if any(parameter.role in stacked.roles for stacked in family.stacked):
            continue
        linear = parameter.linear
        if linear is not None and linear.fused is not None and linear.fused in family.fused:
            name = _named(family.fused[linear.fused], parameter)
            fused.setdefault(name, []).append(parameter)
        else:
            template = family.names.get(parameter.role, CANONICAL[parameter.role])
            found.append(DiskTensor(_named(template, parameter), parameter.shape, (parameter.name,)))
    for name, parts in fused.items():
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        found.append(DiskTensor(name, shape, tuple(part.name for part in parts)))
    for layer, features in enumerate(config.layers):
        if features.experts:
            found += _stacked(config, family, layer)
    return found


def _stacked(config: ModelConfig, family: Family, layer: int) -> list[DiskTensor]:
    """The tensors that hold all experts of a layer."""
    counts = sizes(config)
    bank = next(item for item in block_items(config, layer) if isinstance(item, ExpertBank))
    found = []
    for stacked in family.stacked:
        linears = [linear for role in stacked.roles for linear in bank.linears if linear.role == role]
        rows = sum(counts[linear.dims[0]] for linear in linears)
        columns = counts[linears[0].dims[1]]
        matrix = (columns, rows) if stacked.transposed else (rows, columns)
        shapes: Mapping[str, tuple[str | None, tuple[int, ...]]] = {
            "weight": (stacked.name, matrix), "bias": (stacked.bias, (rows,)),
        }  # fmt: skip
        for leaf, (name, shape) in shapes.items():
            if name is not None:
                parts = tuple(
                    f"{_module(linear, layer, expert)}.{leaf}" for expert in range(bank.count) for linear in linears
                )
                found.append(DiskTensor(name.format(layer=layer), (bank.count, *shape), parts, stacked))
    return found


def _named(template: str, parameter: Parameter) -> str:
    module = template.format(layer=parameter.layer, expert=parameter.expert)
    return f"{module}.{parameter.leaf}" if parameter.leaf else module


def _module(linear: Linear, layer: int, expert: int) -> str:
    assert CANONICAL[linear.role].startswith(BLOCK)
    return CANONICAL[linear.role].format(layer=layer, expert=expert)
