"""Quantized linears that share their inputs become one when a model is loaded.

One product of many rows is faster than several of few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.tensors.qtensor import QuantTensor, stacked

_JOINT = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True)
class Place:
    """Where a quantized weight goes.

    Attributes:
        module: the linear that takes it, by name.
        owners: the linears whose rows it has; they are no longer needed.
        weight: their rows, one below the other.
        bias: [O], or None.
    """

    module: str
    owners: tuple[str, ...]
    weight: QuantTensor
    bias: Tensor | None


def place(checkpoint: Checkpoint, prefix: str, owner: str, weight: QuantTensor) -> Place:
    """The place of the weight of the linear `owner`, whose name in the checkpoint has a prefix.

    The first of linears that share inputs takes the others along if they are of its scheme.
    """
    for module, children in _JOINT.items():
        if owner.endswith(children[0]):
            parent = owner.removesuffix(children[0])
            owners = tuple(parent + child for child in children)
            parts = [weight, *(checkpoint.load(f"{prefix}{other}.weight") for other in owners[1:])]
            whole = stacked([part for part in parts if isinstance(part, QuantTensor)])
            if whole is not None and len(whole.codes) == sum(part.shape[0] for part in parts):
                return Place(parent + module, owners, whole, _bias(checkpoint, prefix, owners))
    return Place(owner, (owner,), weight, _bias(checkpoint, prefix, (owner,)))


def _bias(checkpoint: Checkpoint, prefix: str, owners: tuple[str, ...]) -> Tensor | None:
    present = checkpoint.names()
    names = [f"{prefix}{owner}.bias" for owner in owners]
    parts = [part for name in names if name in present and isinstance(part := checkpoint.load(name), Tensor)]
    return torch.cat(parts) if parts else None
