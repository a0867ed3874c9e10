"""Models whose blocks run in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder

PLAIN_SETTINGS: dict[str, Any] = {
    "heads": 1,
    "kv_heads": 1,
    "window": 0,
    "chunk": 0,
    "scale": None,
    "softcap": None,
    "clip": None,
    "gated": False,
    "norms_rotated": False,
    "activation": "silu",
    "limit": None,
    "eps": 1e-5,
    "centered": False,
    "multiplier": 1.0,
    "parallel": False,
    "per_token": 0,
    "sigmoid": False,
    "normalized": True,
    "normalization_eps": 0.0,
    "scaling": 1.0,
    "weighted_inputs": False,
}
"""The settings of a block as Llama's in the order in which the kernels take them."""


def list_settings(**changes: Any) -> tuple[Any, ...]:
    """List a block's settings as the kernels take them."""
    assert changes.keys() <= PLAIN_SETTINGS.keys()
    return tuple((PLAIN_SETTINGS | changes).values())


def block_logits(
    model: Decoder,
    tokens: Tensor,
    steps: list[int],
    dtype: torch.dtype,
    *,
    is_prefill: bool = False,
) -> Tensor:
    """Logits [B, T, V], so many tokens at a time through the cache, the first among themselves
    if `is_prefill`.
    """
    return model.head(hidden_states(model, tokens, steps, dtype, is_prefill=is_prefill))


def hidden_states(
    model: Decoder,
    tokens: Tensor,
    steps: list[int],
    dtype: torch.dtype,
    *,
    is_prefill: bool = False,
) -> Tensor:
    """The hidden states [B, T, D] of which they are."""
    cache = KVCache(model.config, len(tokens), tokens.shape[1] + 3, dtype, "cpu")
    parts, start = [], 0
    with torch.inference_mode():
        for count in steps:
            positions = torch.arange(start, start + count)
            own = is_prefill and start == 0
            parts.append(
                model.hidden(tokens[:, start : start + count], positions, cache, is_prefill=own)
            )
            start += count
    return torch.cat(parts, dim=1)


class WrongBackend:
    """Kernels of which one gives a number in each row that is too large by a share."""

    def __init__(self, kernels: Any, wrong: str, share: float) -> None:
        self._kernels, self._wrong, self._share = kernels, wrong, share

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._kernels, name)

        def slightly_off(first: Tensor, *rest: Any) -> Any:
            out = right(first, *rest)
            changed = first if out is None else out
            changed[..., -1] *= 1 + self._share
            return out

        return slightly_off if name == self._wrong else right
