"""Measure the divergence of models from a reference by position, with a float and with an int8
KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.figures import mean_estimate
from quantkit.quality.measures import Hidden, Windows, collect_tallies, part_of, text_windows
from quantkit.quality.positions import (
    FLOAT,
    SHORTEST,
    TOKENS,
    PositionDivergence,
    position_edges,
    select_caches,
)
from quantkit.via_transformers.forward import final_hidden

_CACHE_DTYPES: Mapping[str, torch.dtype | None] = {FLOAT: None, "int8": torch.int8}
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
    """Cut the first windows [W, T] of a text, each of which begins like a prompt; and write a note
    if they are shorter than was requested.

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
        raise RequestError("the text is too short to measure", found=f"{len(ids)} tokens")
    notes = []
    window_tokens = windows.shape[1]
    if window_tokens < length:
        if window_tokens == context:
            limiting = "the model's context"
        else:
            limiting = f"the text '{text}'"
        notes = [
            f"KL by position goes to {window_tokens} tokens, not {length}: {limiting} has no more"
        ]
    if count is None:
        count = max(1, TOKENS // window_tokens)
    return windows[:count], notes


def divergence_by_position(
    reference: Checkpoint,
    candidates: Sequence[Checkpoint],
    windows: Tensor,
    *,
    reference_hidden: Hidden = final_hidden,
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
        For each compared checkpoint its buckets by the type of its KV cache: floats, and int8 rows
        at every position if quantkit's decoder runs all models. The reference's cache is floats
        both times.

    Raises:
        RequestError: if a vocabulary differs from the reference's in size.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    caches = select_caches(reference.config, *(model.config for model in candidates))
    # Figures [T] of each compared run, by window.
    window_figures: list[list[list[Tensor]]] = []
    for index, window in enumerate(windows):
        report = part_of(progress, index, len(windows))
        # Windows of a long context are run one at a time, since their hidden states are large.
        (tallies,) = collect_tallies(
            reference,
            candidates,
            [Windows.of(window.unsqueeze(0))],
            cache_dtypes=[_CACHE_DTYPES[cache] for cache in caches],
            reference_hidden=reference_hidden,
            group=group,
            progress=report,
        )
        window_figures.append([tally.by_token() for tally in tallies])
    # Runs are in the order of `collect_tallies`: for each candidate one with each cache.
    runs = zip(*window_figures, strict=True)
    result: list[dict[str, list[PositionDivergence]]] = []
    for _ in candidates:
        buckets: dict[str, list[PositionDivergence]] = {}
        for cache in caches:
            kl: list[Tensor] = []
            agreed: list[Tensor] = []
            for figures in next(runs):
                kl.append(figures[0])
                agreed.append(figures[1])
            buckets[cache] = position_buckets(torch.stack(kl), torch.stack(agreed))
        result.append(buckets)
    return result


def position_buckets(
    kl: Tensor, agreed: Tensor, shortest: int = SHORTEST
) -> list[PositionDivergence]:
    """Average KL, and the likeliest tokens' agreement, of windows [W, T] in buckets of positions. A
    bucket's tokens are in the windows' order, and the first bucket has `shortest` positions.
    """
    buckets = []
    for start, stop in pairwise(position_edges(kl.shape[1], shortest)):
        mean = mean_estimate(kl[:, start:stop].flatten())
        share = agreed[:, start:stop].double().mean().item()
        # KL is not negative, but sums are rounded.
        value = max(mean.value, 0.0)
        tokens = (stop - start) * len(kl)
        buckets.append(
            PositionDivergence(
                start=start,
                stop=stop,
                tokens=tokens,
                kl=value,
                kl_error=mean.error,
                top1_agreement=share,
            )
        )
    return buckets
