"""How far two models are apart, and how well one predicts a text.

All in natural logarithms and float32; one decoder block in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.blockwise import Batch, blockwise_hidden, head_logits
from quantkit.progress import Progress, silent

_TOKENS_AT_ONCE = 128


@dataclass(frozen=True)
class Divergence:
    """How far a model's predictions are from a reference's, over a number of tokens.

    Attributes:
        tokens: positions compared.
        largest_logit_difference: over all positions and tokens of the vocabulary.
        kl: mean of KL(reference || other) per position, in nats.
        top1_agreement: share of positions whose likeliest token is the same.
    """

    tokens: int
    largest_logit_difference: float
    kl: float
    top1_agreement: float


@torch.inference_mode()
def divergence(
    reference: Checkpoint, other: Checkpoint, batches: Sequence[Batch], *, progress: Progress = silent
) -> list[Divergence]:
    """Compare two checkpoints' logits on every batch; NaN where logits are not finite."""
    first = blockwise_hidden(reference, batches, progress=progress)
    second = blockwise_hidden(other, batches, progress=progress)
    results = []
    for expected, found in zip(first, second, strict=True):
        expected, found = expected.flatten(0, 1), found.flatten(0, 1)
        largest, kl, agreed = 0.0, 0.0, 0
        for rows in _pieces(expected.shape[0]):
            p = head_logits(reference, expected[rows])
            q = head_logits(other, found[rows])
            difference = (p - q).abs().max().item()
            largest = difference if math.isnan(difference) else max(largest, difference)
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            kl += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
        count = expected.shape[0]
        results.append(Divergence(count, largest, max(kl / count, 0.0), agreed / count))
    return results


@torch.inference_mode()
def token_perplexity(checkpoint: Checkpoint, windows: Tensor, *, progress: Progress = silent) -> float:
    """Perplexity per token over windows [W, T]: each token but a window's first is predicted
    from those before it in the window."""
    hidden = blockwise_hidden(checkpoint, [Batch.from_start(windows)], progress=progress)[0]
    states, targets = hidden[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
    loss = 0.0
    for rows in _pieces(states.shape[0]):
        logits = head_logits(checkpoint, states[rows])
        loss += torch.nn.functional.cross_entropy(logits, targets[rows], reduction="sum").item()
    return math.exp(loss / targets.numel())


def text_windows(ids: Sequence[int], bos_id: int | None, length: int) -> Tensor:
    """Cut token ids into windows [W, length], each led by BOS where the model has one.

    Ids that do not fill a last window are left out; a text shorter than one window is
    one shorter window.
    """
    body = list(ids[1:]) if bos_id is not None and ids[:1] == [bos_id] else list(ids)
    lead = [] if bos_id is None else [bos_id]
    step = min(length - len(lead), len(body))
    return torch.tensor([lead + body[i : i + step] for i in range(0, len(body) - step + 1, step)])


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, _TOKENS_AT_ONCE):
        yield slice(start, min(start + _TOKENS_AT_ONCE, count))
