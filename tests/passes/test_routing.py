"""Tokens by expert."""

from __future__ import annotations

import pytest
import torch

from quantkit.passes.routing import list_expert_rows

COUNT = 5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_experts_get_their_tokens_in_order_and_others_none(dtype: torch.dtype) -> None:
    # Numbers below and above those of the experts, some experts without tokens.
    chosen = torch.tensor([[2, 0], [7, 2], [4, 2], [-1, 5], [0, 4]], dtype=dtype)
    rows = list_expert_rows(chosen, COUNT)
    assert len(rows) == COUNT
    for expert, (tokens, choices) in enumerate(rows):
        expected_tokens, expected_choices = (chosen == expert).nonzero(as_tuple=True)
        assert torch.equal(tokens, expected_tokens)
        assert torch.equal(choices, expected_choices)


def test_a_stopped_batch_keeps_two_tensors_for_all_experts() -> None:
    rows = list_expert_rows(torch.randint(COUNT, (40, 2)), COUNT)
    storages = {tensor.untyped_storage()._cdata for pair in rows for tensor in pair}
    assert len(storages) == 2
