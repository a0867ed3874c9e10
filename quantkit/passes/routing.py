"""Sort tokens by the experts that they are sent to."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def list_expert_rows(chosen: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """List the tokens of each expert, and which of a token's choices the expert is.

    All results are views of two tensors: a stopped batch keeps them, and a tensor for each expert
    would be a file for each in `ActivationStore`.

    Args:
        chosen: the numbers [N, K] of the experts chosen for each token; one outside of 0 to
            `count` - 1 chooses none.
        count: the number of experts.

    Returns:
        For each expert two int64 tensors [M], in the order of the tokens.
    """
    sorted_choices, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count + 1, dtype=chosen.dtype, device=chosen.device)
    bounds: list[int] = torch.searchsorted(sorted_choices, experts).tolist()
    tokens = order // chosen.shape[1]
    choices = order % chosen.shape[1]
    return [(tokens[start:stop], choices[start:stop]) for start, stop in pairwise(bounds)]
