"""The gated delta rule by chunks, held against its definition token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.model.mixers.gated_delta import apply_delta_rule

HEADS, KEYS, VALUES = 3, 5, 4


def _draw(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, HEADS, *shape, generator=generator, dtype=torch.float64)

    keys = normal(count, KEYS)
    return {
        "queries": normal(count, KEYS),
        "keys": keys / keys.norm(dim=-1, keepdim=True),
        "values": normal(count, VALUES),
        "write_shares": normal(count).sigmoid(),
        "log_decay": -normal(count).exp(),
        "matrices": normal(KEYS, VALUES),
    }


def _token_by_token(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    state, read = given["matrices"], []
    for place in range(given["queries"].shape[2]):
        query, key, value = (given[name][:, :, place] for name in ("queries", "keys", "values"))
        state = given["log_decay"][:, :, place, None, None].exp() * state
        known = torch.einsum("bhk,bhkv->bhv", key, state)
        new = given["write_shares"][:, :, place, None] * (value - known)
        state = state + torch.einsum("bhk,bhv->bhkv", key, new)
        read.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(read, dim=2), state


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_chunk_gives_what_its_tokens_give_one_by_one(count: int) -> None:
    given = _draw(count)
    for found, expected in zip(apply_delta_rule(**given), _token_by_token(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_strong_decay_is_no_overflow() -> None:
    given = _draw(64)
    given["log_decay"] = given["log_decay"] * 1e3
    for found, expected in zip(apply_delta_rule(**given), _token_by_token(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
