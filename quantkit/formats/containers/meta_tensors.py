"""Names and row order of the tensors in Meta's checkpoints."""

from __future__ import annotations

from quantkit.architectures.names import META_NAMES
from quantkit.architectures.topology import Parameter
from quantkit.tensors.late import torch


def meta_name(parameter: Parameter) -> str:
    """Return Meta's name of a tensor that its format has."""
    assert parameter.leaf == "weight", parameter.name
    return f"{META_NAMES[parameter.role].format(layer=parameter.layer)}.weight"


def to_rotate_half(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Bring interleaved rotary rows [heads * head_dim, ...] into rotate-half order."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def to_interleaved(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo `to_rotate_half`."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
