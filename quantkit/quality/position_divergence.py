"""Measure the divergence of models from a reference by position, with a float and with an int8
KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import layerwise_hidden
from quantkit.quality.figures import mean_estimate
from quantkit.quality.measures import Hidden, Windows, collect_tallies, part_of, text_windows
from quantkit.quality.positions import CACHES, SHORTEST, TOKENS, PositionDivergence, position_edges

_CACHE_DTYPES = (None, torch.int8)  # of `CACHES`
# The first predicts the second.
_MIN_TOKENS = 2


def position_windows(
    text: str,
    ids: Sequence[int],
    start: Sequence[int],
    length: int,
    context: int,
    count: int | None = None,
) -> tuple[Tensor, list[str]]:
    """Return the first windows [W, T] of a text, each of which begins like a prompt; and a note if
    they are shorter than was requested.

    Args:
        text: its name.
        start: the ids that a prompt begins with, see `prompt_start`.
        length: the most tokens of a window; windows are shorter if the text or the model's context
            is.
        count: maximal number of windows; None is as many as hold `TOKENS`, but at least one.

    Raises:
        RequestError: if the text has less than two tokens.
    """
    windows = text_windows(ids, start, min(length, context))
    if windows.shape[-1] < _MIN_TOKENS:
        raise RequestError("the text is too short to measure on", found=f"{len(ids)} tokens")
    notes = []
    if (found := windows.shape[1]) < length:
        if found == context:
            shorter = "the model's context"
        else:
            shorter = f"the text '{text}'"
        notes = [f"KL by position goes to {found} tokens, not {length}: {shorter} has no more"]
    return windows[: max(1, TOKENS // found) if count is None else count], notes


def divergence_by_position(
    reference: Checkpoint,
    candidates: Sequence[Checkpoint],
    windows: Tensor,
    *,
    reference_hidden: Hidden = layerwise_hidden,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> list[dict[str, list[PositionDivergence]]]:
    """Compare checkpoints with one reference on windows [W, T] of token ids, position by position.

    One window and one model run at a time, in float32 on the CPU. In memory are hidden states [T,
    D] of the reference and of a model with either cache, and a block's temporaries for one of them;
    of more models if they are small.

    Args:
        reference_hidden: returns the reference's hidden states, for instance from a cache.

    Returns:
        For each compared checkpoint its buckets by the type of its KV cache: floats, or int8 rows
        at every position. The reference's cache is floats both times.

    Raises:
        RequestError: if a vocabulary differs from the reference's in size.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    found = []
    for index, window in enumerate(windows):
        report = part_of(progress, index, len(windows))
        own = [Windows.of(window.unsqueeze(0))]
        (of_window,) = collect_tallies(
            reference,
            candidates,
            own,
            cache_dtypes=_CACHE_DTYPES,
            reference_hidden=reference_hidden,
            group=group,
            progress=report,
        )
        found.append([tally.by_token() for tally in of_window])
    stacked = (
        [torch.stack(parts) for parts in zip(*of_run, strict=True)]
        for of_run in zip(*found, strict=True)
    )
    buckets = (position_buckets(kl, agreed) for kl, agreed, *_ in stacked)
    result: list[dict[str, list[PositionDivergence]]] = []
    for _ in candidates:
        result.append({cache: next(buckets) for cache in CACHES})
    return result


def position_buckets(
    kl: Tensor, agreed: Tensor, shortest: int = SHORTEST
) -> list[PositionDivergence]:
    """Means over windows [W, T] of KL and of the likeliest tokens' agreement; a bucket's tokens are
    in the windows' order, and the first bucket has `shortest` positions.
    """
    buckets = []
    for start, stop in pairwise(position_edges(kl.shape[1], shortest)):
        mean = mean_estimate(kl[:, start:stop].flatten())
        share = agreed[:, start:stop].double().mean().item()
        value = max(mean.value, 0.0)  # sums are rounded
        buckets.append(
            PositionDivergence(start, stop, (stop - start) * len(kl), value, mean.error, share)
        )
    return buckets
