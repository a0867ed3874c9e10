"""Measure the divergence of models from a reference by position, with a float and with an int8 KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.progress import Progress, silent
from quantkit.quality.figures import mean_estimate
from quantkit.quality.measures import Hidden, head_pieces, part_of, text_windows, token_kl
from quantkit.quality.positions import CACHES, FLOAT, INT8, SHORTEST, TOKENS, PositionDivergence, position_edges
from quantkit.tensors.finite import finite_logits

_DTYPES = {FLOAT: None, INT8: torch.int8}
_MIN_TOKENS = 2  # the first predicts the second


def position_windows(
    ids: Sequence[int], bos_id: int | None, length: int, context: int, count: int | None = None
) -> Tensor:
    """The first windows [W, T] of a text, each with BOS in front if there is one.

    Args:
        length: the most tokens of a window; windows are shorter if the text or the context is.
        count: maximal number of windows; None is as many as hold `TOKENS`, but at least one.

    Raises:
        RequestError: if the text has less than two tokens.
    """
    windows = text_windows(ids, bos_id, min(length, context))
    if windows.shape[-1] < _MIN_TOKENS:
        raise RequestError("the text is too short to measure on", found=f"{len(ids)} tokens")
    return windows[: max(1, TOKENS // windows.shape[1]) if count is None else count]


@torch.inference_mode()
def divergence_by_position(
    reference: Checkpoint, others: Sequence[Checkpoint], windows: Tensor, *,
    reference_hidden: Hidden = layerwise_hidden, group: ProcessGroup = SINGLE, progress: Progress = silent,
) -> list[dict[str, list[PositionDivergence]]]:  # fmt: skip
    """Compare checkpoints with one reference on windows [W, T] of token ids, position by position.

    One window and one model run at a time, in float32 on the CPU. In memory are hidden states [T, D] of the reference
    and of the model with either cache, and a block's temporaries for one of them.

    Args:
        reference_hidden: returns the reference's hidden states, for instance from a cache.
        group: the processes that share each model.

    Returns:
        For each compared checkpoint its buckets by the type of its KV cache: floats, or int8 rows at every position.
        The reference's cache is floats both times.

    Raises:
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    found: list[dict[str, list[Tensor]]] = [{cache: [] for cache in CACHES} for _ in others]
    runs = len(windows) * (1 + len(others) * len(CACHES))
    steps = (part_of(progress, run, runs) for run in range(runs))
    for window in windows:
        batch = Batch.from_start(window.unsqueeze(0))
        (first,) = reference_hidden(reference, [batch], group=group, progress=next(steps))
        for of_model, other in zip(found, others, strict=True):
            states = [
                layerwise_hidden(other, [batch], cache_dtype=_DTYPES[cache], group=group, progress=next(steps))[0][0]
                for cache in CACHES
            ]
            for cache, one in zip(CACHES, _compared(reference, other, first[0], states, group), strict=True):
                of_model[cache].append(one)
    stacked = [{cache: torch.stack(of_cache) for cache, of_cache in one.items()} for one in found]
    return [
        {cache: position_buckets(values[..., 0], values[..., 1]) for cache, values in one.items()} for one in stacked
    ]


def _compared(
    reference: Checkpoint, other: Checkpoint, first: Tensor, seconds: Sequence[Tensor], group: ProcessGroup
) -> list[Tensor]:
    """KL and agreement, float64 [T, 2], of several runs of a model, from hidden states [T, D]."""
    found: list[list[Tensor]] = [[] for _ in seconds]
    for pieces in head_pieces([len(first)], reference.config.vocab_size):
        rows = [some for _, some in pieces]
        expected = head_logits(reference, [first[some] for some in rows], group=group)
        logits = iter(head_logits(other, [one[some] for one in seconds for some in rows], group=group))
        for of_run in found:
            for p in expected:
                p, q = finite_logits(p, reference.path), finite_logits(next(logits), other.path)
                kl = token_kl(p.log_softmax(-1), q.log_softmax(-1))
                of_run.append(torch.stack([kl, (p.argmax(-1) == q.argmax(-1)).double()], dim=1))
    return [torch.cat(of_run) for of_run in found]


def position_buckets(kl: Tensor, agreed: Tensor, shortest: int = SHORTEST) -> list[PositionDivergence]:
    """Means over windows [W, T] of KL and of the likeliest tokens' agreement; a bucket's tokens are in the windows'
    order.

    Args:
        shortest: positions of the first bucket.
    """
    buckets = []
    for start, stop in pairwise(position_edges(kl.shape[1], shortest)):
        mean, share = mean_estimate(kl[:, start:stop].flatten()), agreed[:, start:stop].double().mean().item()
        value = max(mean.value, 0.0)  # sums are rounded
        buckets.append(PositionDivergence(start, stop, (stop - start) * len(kl), value, mean.error, share))
    return buckets
