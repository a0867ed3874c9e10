"""Fused projections: linears that read the same inputs become one when a model is loaded.

One product of many rows is faster than several of few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import fused_modules
from quantkit.formats.checkpoint import Checkpoint
from quantkit.tensors.qtensor import QuantTensor, stacked


@dataclass(frozen=True)
class Projection:
    """The weight of a linear in memory.

    Attributes:
        module: the linear, by its canonical name or that of a fused one.
        sources: the linears of the checkpoint whose rows it has, in order.
        weight: their rows, one below the other.
        bias: [O], or None.
    """

    module: str
    sources: tuple[str, ...]
    weight: QuantTensor
    bias: Tensor | None


def fusible(config: ModelConfig, block_prefix: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By the first linear of each group that may be fused: the fused one's name and those of the group."""
    found = {}
    for layer in range(config.num_layers):
        prefix = block_prefix.format(layer)
        for fused, modules in fused_modules(config, layer).items():
            found[prefix + modules[0]] = prefix + fused, tuple(prefix + module for module in modules)
    return found


def projection(
    checkpoint: Checkpoint, module: str, weight: QuantTensor, groups: Mapping[str, tuple[str, tuple[str, ...]]]
) -> Projection:
    """The projection that takes the weight of a linear of the checkpoint.

    The first linear of a group takes the others along if they are of its scheme.

    Args:
        groups: from `fusible`.
    """
    if module in groups:
        fused, sources = groups[module]
        parts = [weight, *(checkpoint.load(f"{source}.weight") for source in sources[1:])]
        whole = stacked([part for part in parts if isinstance(part, QuantTensor)])
        if whole is not None and len(whole.codes) == sum(part.shape[0] for part in parts):
            return Projection(fused, sources, whole, _bias(checkpoint, sources))
    return Projection(module, (module,), weight, _bias(checkpoint, (module,)))


def float_group(
    checkpoint: Checkpoint, module: str, groups: Mapping[str, tuple[str, tuple[str, ...]]]
) -> tuple[str, tuple[str, ...]] | None:
    """The fused linear's name, and those of the group that a linear is the first of, if all of them are floats.

    Args:
        groups: from `fusible`.
    """
    group = groups.get(module)
    if group is None or any(checkpoint.info(f"{source}.weight").scheme is not None for source in group[1]):
        return None
    return group


def _bias(checkpoint: Checkpoint, modules: Sequence[str]) -> Tensor | None:
    present = checkpoint.names()
    names = [f"{module}.bias" for module in modules]
    parts = [part for name in names if name in present and isinstance(part := checkpoint.load(name), Tensor)]
    return torch.cat(parts) if parts else None
