"""Measure how far models are from a reference by position, with keys and values in a float and in an int8 cache."""

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
from quantkit.quality.measures import Hidden, head_pieces, text_windows, token_kl
from quantkit.quality.positions import CACHES, FLOAT, INT8, SHORTEST, TOKENS, PositionDivergence, position_edges
from quantkit.tensors.finite import finite_logits

_DTYPES = {FLOAT: None, INT8: torch.int8}
_LEAST = 2  # tokens, of which the first predicts the second


def position_windows(
    ids: Sequence[int], bos_id: int | None, length: int, context: int, count: int | None = None
) -> Tensor:
    """The first windows [W, T] of a text, each led by BOS where one is given.

    Args:
        length: tokens of a window, at most; a shorter text, or context, gives shorter ones.
        count: how many, at most; None is as many as hold `TOKENS`, but one at least.

    Raises:
        RequestError: if the text has less than two tokens.
    """
    windows = text_windows(ids, bos_id, min(length, context))
    if windows.shape[-1] < _LEAST:
        raise RequestError("the text is too short to measure on", found=f"{len(ids)} tokens")
    return windows[: max(1, TOKENS // windows.shape[1]) if count is None else count]


@torch.inference_mode()
def divergence_by_position(
    reference: Checkpoint, others: Sequence[Checkpoint], windows: Tensor, *,
    reference_hidden: Hidden = layerwise_hidden, group: ProcessGroup = SINGLE, progress: Progress = silent,
) -> list[dict[str, list[PositionDivergence]]]:  # fmt: skip
    """Hold checkpoints against one reference on windows [W, T] of token ids, position by position.

    One window and one model are taken at a time, in float32 on the CPU, so that what is in memory are hidden states
    [T, D] of the reference and of the model with either cache, and what a block makes of one of them.

    Args:
        reference_hidden: gives the reference's hidden states; a place for a cache.
        group: the processes that share each model.

    Returns:
        For each of the others its buckets, by what its keys and values are kept in: floats, or rows of int8 as a
        cache of that type gives them back, at every position. The reference's are floats both times.

    Raises:
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    found: list[dict[str, list[Tensor]]] = [{cache: [] for cache in CACHES} for _ in others]
    runs = len(windows) * (1 + len(others) * len(CACHES))
    done = 0

    def told(phase: str, layer: int, layers: int, unit: str, /) -> None:
        progress(phase, done * layers + layer, runs * layers, unit)

    for window in windows:
        batch = Batch.from_start(window.unsqueeze(0))
        (first,) = reference_hidden(reference, [batch], group=group, progress=told)
        done += 1
        for of_model, other in zip(found, others, strict=True):
            states = []
            for cache in CACHES:
                states += layerwise_hidden(other, [batch], cache_dtype=_DTYPES[cache], group=group, progress=told)
                done += 1
            compared = _compared(reference, other, first[0], [one[0] for one in states], group)
            for cache, one in zip(CACHES, compared, strict=True):
                of_model[cache].append(one)
    return [{cache: _buckets(torch.stack(of_cache)) for cache, of_cache in one.items()} for one in found]


def _compared(
    reference: Checkpoint, other: Checkpoint, first: Tensor, seconds: Sequence[Tensor], group: ProcessGroup
) -> list[Tensor]:
    """KL and agreement, float64 [T, 2], of each of several runs of a model, from hidden states [T, D]."""
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


def _buckets(found: Tensor) -> list[PositionDivergence]:
    """Those of KL and agreement [W, T, 2]."""
    return position_buckets(found[..., 0], found[..., 1])


def position_buckets(kl: Tensor, agreed: Tensor, shortest: int = SHORTEST) -> list[PositionDivergence]:
    """Means over windows [W, T] of KL and of whether both hold the same token likeliest; a bucket's tokens are taken
    window after window.

    Args:
        shortest: positions of the first bucket.
    """
    buckets = []
    for start, stop in pairwise(position_edges(kl.shape[1], shortest)):
        mean, share = mean_estimate(kl[:, start:stop].flatten()), agreed[:, start:stop].double().mean().item()
        value = max(mean.value, 0.0)  # sums are rounded
        buckets.append(PositionDivergence(start, stop, (stop - start) * len(kl), value, mean.error, share))
    return buckets
