"""How far two models are apart, and how well one predicts a text.

All in natural logarithms and float32. One decoder block is in memory at a time, and long texts are
taken in parts, whose hidden states are no more than `STATES_BYTES` of each model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.progress import Progress, silent
from quantkit.tensors.finite import finite_logits

STATES_BYTES = 256 << 20
NOT_SCORED = -100
"""Stands for a target where nothing is predicted; cross entropy leaves it out."""
_TOKENS_THROUGH_A_BLOCK = 2048
TOKENS_THROUGH_THE_HEAD = 64


@dataclass(frozen=True)
class Divergence:
    """How far a model's predictions are from a reference's, over a number of tokens.

    Attributes:
        tokens: positions compared.
        largest_logit_difference: over all positions and tokens of the vocabulary.
        kl: mean of KL(reference || other) per position, in nats.
        kl_median, kl_p99: its median and 99th percentile.
        top1_agreement: share of positions whose likeliest token is the same.
    """

    tokens: int
    largest_logit_difference: float
    kl: float
    kl_median: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class Quality:
    """What a model lost against its reference on one text; perplexities are per token."""

    divergence: Divergence
    reference_perplexity: float
    perplexity: float


@dataclass(frozen=True)
class Windows:
    """Token ids [W, T], and what each position is to predict: ids [W, T], or `NOT_SCORED`."""

    tokens: Tensor
    targets: Tensor

    @classmethod
    def of(cls, tokens: Tensor) -> Windows:
        """Each position predicts the next token of its window; the last nothing."""
        targets = torch.full_like(tokens, NOT_SCORED)
        targets[:, :-1] = tokens[:, 1:]
        return cls(tokens, targets)

    @property
    def scored(self) -> int:
        return int((self.targets != NOT_SCORED).sum())


class Hidden(Protocol):
    """Final hidden states [B, T, D] of every batch, as `layerwise_hidden` gives them."""

    def __call__(
        self, checkpoint: Checkpoint, batches: Sequence[Batch], *, group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> list[Tensor]: ...  # fmt: skip


@torch.inference_mode()
def compare_batches(
    reference: Checkpoint, other: Checkpoint, batches: Sequence[Batch], *, progress: Progress = silent
) -> list[Quality]:
    """Hold one checkpoint against another on every batch, all in one pass; figures are NaN where logits are not
    finite."""
    first = layerwise_hidden(reference, batches, progress=progress)
    second = layerwise_hidden(other, batches, progress=progress)
    results = []
    for expected, found, batch in zip(first, second, batches, strict=True):
        tally = _Tally()
        tally.add(reference, other, expected, found, Windows.of(batch.tokens).targets, head_logits)
        results.append(tally.quality())
    return results


@torch.inference_mode()
def compare(
    reference: Checkpoint, others: Sequence[Checkpoint], windows: Tensor, *,
    reference_hidden: Hidden = layerwise_hidden, group: ProcessGroup = SINGLE, progress: Progress = silent,
) -> list[Quality]:  # fmt: skip
    """Hold checkpoints against one reference on windows [W, T] of token ids.

    All T positions are compared; perplexity is that of the tokens after the first.

    Args:
        reference_hidden: gives the reference's hidden states; a place for a cache.
        group: the processes that share each model.

    Raises:
        RequestError: if a vocabulary differs from the reference's in size.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    size = reference.config.vocab_size
    if odd := [other for other in others if other.config.vocab_size != size]:
        raise RequestError(
            "cannot be compared with the reference", path=odd[0].path,
            found=f"{odd[0].config.vocab_size} tokens", expected=f"a vocabulary of {size}",
        )  # fmt: skip
    logits = partial(_finite_logits, group=group)
    tallies = [_Tally() for _ in others]
    parts = _parts([Windows.of(windows)], max(c.config.hidden_size for c in (reference, *others)))
    runs = len(parts) * (len(others) + 1)
    for index, part in enumerate(parts):
        batches = [Batch.from_start(one.tokens) for one in part]
        run = index * (len(others) + 1)
        first = reference_hidden(reference, batches, group=group, progress=_stretch(progress, run, runs))
        for number, (other, tally) in enumerate(zip(others, tallies, strict=True), 1):
            second = layerwise_hidden(other, batches, group=group, progress=_stretch(progress, run + number, runs))
            for expected, found, one in zip(first, second, part, strict=True):
                tally.add(reference, other, expected, found, one.targets, logits)
    return [tally.quality() for tally in tallies]


@torch.inference_mode()
def log_loss(
    checkpoint: Checkpoint, windows: Sequence[Windows], *, group: ProcessGroup = SINGLE, progress: Progress = silent
) -> float:
    """Minus the log probability, in nats, of all scored targets together.

    Raises:
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    loss = 0.0
    parts = _parts(windows, checkpoint.config.hidden_size)
    for index, part in enumerate(parts):
        batches = [Batch.from_start(one.tokens) for one in part]
        states = layerwise_hidden(checkpoint, batches, group=group, progress=_stretch(progress, index, len(parts)))
        for hidden, one in zip(states, part, strict=True):
            scored = one.targets != NOT_SCORED
            rows, targets = hidden[scored], one.targets[scored]
            for piece in _pieces(len(targets), TOKENS_THROUGH_THE_HEAD):
                logits = _finite_logits(checkpoint, rows[piece], group=group)
                loss += F.cross_entropy(logits, targets[piece], reduction="sum").item()
    return loss


def token_perplexity(
    checkpoint: Checkpoint, windows: Tensor, *, group: ProcessGroup = SINGLE, progress: Progress = silent
) -> float:
    """Perplexity per token over windows [W, T]: each token but a window's first is predicted
    from those before it in the window.

    Raises:
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    scored = Windows.of(windows)
    return perplexity(log_loss(checkpoint, [scored], group=group, progress=progress), scored.scored)


def perplexity(loss: float, count: int) -> float:
    """The exponent of a loss in nats per so many units; infinite beyond the range of a float."""
    return torch.tensor(loss / count, dtype=torch.float64).exp().item()


def text_windows(ids: Sequence[int], bos_id: int | None, length: int) -> Tensor:
    """Cut token ids into windows [W, length], each led by BOS where one is given.

    Ids that do not fill a last window are left out; a text shorter than one window is
    one shorter window, and an empty one none.
    """
    body = list(ids[1:]) if bos_id is not None and ids[:1] == [bos_id] else list(ids)
    lead = [] if bos_id is None else [bos_id]
    step = min(length - len(lead), len(body))
    if step < 1:
        return torch.empty(0, 0, dtype=torch.long)
    return torch.tensor([lead + body[i : i + step] for i in range(0, len(body) - step + 1, step)])


class _Tally:
    """What two models' predictions amount to, gathered batch by batch."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._largest = 0.0
        self._agreed = 0
        self._scored = 0
        self._losses = [0.0, 0.0]

    def add(
        self, reference: Checkpoint, other: Checkpoint, expected: Tensor, found: Tensor, targets: Tensor,
        logits: Callable[[Checkpoint, Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Take in a batch: both models' hidden states [B, T, D] and the targets [B, T]."""
        expected, found, targets = expected.flatten(0, 1), found.flatten(0, 1), targets.flatten()
        for rows in _pieces(len(targets), TOKENS_THROUGH_THE_HEAD):
            p, q = logits(reference, expected[rows]), logits(other, found[rows])
            difference = (p - q).abs().max().item()
            self._largest = difference if math.isnan(difference) else max(self._largest, difference)
            self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            self._kl.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64))
            for index, log in enumerate((log_p, log_q)):
                self._losses[index] += F.nll_loss(log, targets[rows], reduction="sum", ignore_index=NOT_SCORED).item()
        self._scored += int((targets != NOT_SCORED).sum())

    def divergence(self) -> Divergence:
        kl = torch.cat(self._kl)
        median, p99 = np.quantile(kl.numpy(), [0.5, 0.99]).tolist()
        mean, median, p99 = (max(value, 0.0) for value in (kl.mean().item(), median, p99))
        return Divergence(len(kl), self._largest, mean, median, p99, self._agreed / len(kl))

    def quality(self) -> Quality:
        return Quality(self.divergence(), *(perplexity(loss, self._scored) for loss in self._losses))


def _finite_logits(checkpoint: Checkpoint, hidden: Tensor, *, group: ProcessGroup) -> Tensor:
    """Logits [N, V] of hidden states [N, D].

    Raises:
        NonFiniteError: if one is NaN or Inf.
    """
    return finite_logits(head_logits(checkpoint, hidden, group=group), checkpoint.path)


def _parts(windows: Sequence[Windows], hidden_size: int) -> list[list[Windows]]:
    """Split windows into batches, and these into parts whose hidden states fit the budget."""
    parts: list[list[Windows]] = [[]]
    held = 0
    for one in windows:
        count, length = one.tokens.shape
        for rows in _pieces(count, max(1, _TOKENS_THROUGH_A_BLOCK // length)):
            size = (rows.stop - rows.start) * length * hidden_size * 4
            if parts[-1] and held + size > STATES_BYTES:
                parts.append([])
                held = 0
            parts[-1].append(Windows(one.tokens[rows], one.targets[rows]))
            held += size
    return parts


def _pieces(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _stretch(progress: Progress, index: int, count: int) -> Progress:
    """The progress of one of `count` equal stretches of a way."""

    def report(done: int, total: int, name: str) -> None:
        progress(index * total + done, count * total, name)

    return report
