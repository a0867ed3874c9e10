"""The difference of two models' predictions, and the perplexity of one model.

Log probabilities are natural logarithms in float32; the figures made of them are float64. One
decoder block is in memory at a time, and long texts are split into parts, whose hidden states are
at most `STATES_BYTES` per model. Each weight is read once per part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.topology import count_head_layers
from quantkit.base.progress import Progress, Stretches, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK, Batch
from quantkit.quality.figures import Estimate, mean_estimate
from quantkit.tensors.finite import require_finite_logits
from quantkit.via_transformers.forward import final_hidden, final_logits

STATES_BYTES = 256 << 20
NOT_SCORED = -100
"""The target of a position that predicts nothing; cross entropy ignores it."""
TOKENS_THROUGH_THE_HEAD = 64
# Of one model, in memory at a time; more for a large vocabulary.
LOGITS_BYTES = 32 << 20
# Pieces of `TOKENS_THROUGH_THE_HEAD` tokens that go through the head together, at least. Each time,
# the head is converted to float32, which takes a quarter of the time of one piece.
_MIN_HEAD_PIECES = 2
# Log probabilities that are compared at a time, and at least a row for each thread: so few that
# intermediate results take no new pages of memory.
_COMPARED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Divergence:
    """The difference of a model's predictions from a reference's.

    Attributes:
        tokens: positions compared.
        largest_logit_difference: over all positions and tokens of the vocabulary.
        kl: mean of KL(reference || other) per position, in nats.
        kl_median, kl_p99: its median and 99th percentile.
        top1_agreement: share of positions whose likeliest token is the same.
        kl_error, top1_error: standard errors of the mean and of the share; None for too few tokens.
    """

    tokens: int
    largest_logit_difference: float
    kl: float
    kl_median: float
    kl_p99: float
    top1_agreement: float
    kl_error: float | None = None
    top1_error: float | None = None


@dataclass(frozen=True)
class Quality:
    """A model compared with its reference on one text; perplexities are per token.

    Attributes:
        reference_perplexity_error, perplexity_error: standard errors, the text as a sample of its
            kind.
        ratio_error: that of ``perplexity / reference_perplexity``, paired by token.
    """

    divergence: Divergence
    reference_perplexity: float
    perplexity: float
    reference_perplexity_error: float | None = None
    perplexity_error: float | None = None
    ratio_error: float | None = None


@dataclass(frozen=True)
class Windows:
    """Token ids [W, T], the target of each: ids [W, T], or `NOT_SCORED`; and positions [T], None
    for 0, 1, 2, ...
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor | None = None) -> Windows:
        """Let each position predict the next token of its window; the last predicts nothing."""
        targets = torch.full_like(tokens, NOT_SCORED)
        targets[:, :-1] = tokens[:, 1:]
        return cls(tokens, targets, positions)

    def batch(self) -> Batch:
        """Build a batch of the tokens at their positions."""
        if self.positions is None:
            return Batch.from_start(self.tokens)
        return Batch(self.tokens, self.positions)


class Hidden(Protocol):
    """Returns final hidden states [B, T, D] of every batch, as `final_hidden` does."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        *,
        group: ProcessGroup = SINGLE,
        progress: Progress = silent,
    ) -> list[Tensor]: ...


Listener = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Receives the predictions of two models for some tokens of a text at a time, in order: logarithms
of the reference's and the other's probabilities [N, V], KL(reference || other) of each token in
nats [N], and its target [N].
"""


def compare_batches(
    reference: Checkpoint,
    other: Checkpoint,
    batches: Sequence[Batch],
    *,
    progress: Progress = silent,
) -> list[Quality]:
    """Compare a checkpoint with a reference on every batch, all in one pass; figures are NaN for
    logits that are not finite.
    """
    windows = [Windows.of(batch.tokens, batch.positions) for batch in batches]
    tallies = collect_tallies(reference, [other], windows, progress=progress, finite=False)
    return [tally.quality() for (tally,) in tallies]


def compare(
    reference: Checkpoint,
    candidates: Sequence[Checkpoint],
    windows: Tensor,
    *,
    reference_hidden: Hidden = final_hidden,
    listeners: Sequence[Listener] = (),
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> list[Quality]:
    """Compare checkpoints with one reference on a text, as windows [W, T] of token ids.

    Args and errors are those of `collect_tallies`.
    """
    (tallies,) = collect_tallies(
        reference,
        candidates,
        [Windows.of(windows)],
        listeners=listeners,
        reference_hidden=reference_hidden,
        group=group,
        progress=progress,
    )
    return [tally.quality() for tally in tallies]


@torch.inference_mode()
def collect_tallies(
    reference: Checkpoint,
    candidates: Sequence[Checkpoint],
    texts: Sequence[Windows],
    *,
    cache_dtypes: Sequence[torch.dtype | None] = (None,),
    listeners: Sequence[Listener] = (),
    reference_hidden: Hidden = final_hidden,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
    finite: bool = True,
) -> list[list[Tally]]:
    """Compare checkpoints with one reference on texts.

    All positions are compared; perplexity is that of the tokens after the first.

    Args:
        cache_dtypes: types of KV caches that each checkpoint is run with; None leaves keys and
            values as they are.
        listeners: one per checkpoint and type; or none at all.
        reference_hidden: returns the reference's hidden states, for instance from a cache.
        finite: logits that are NaN or Inf are an error.

    Returns:
        For each text the figures of each compared checkpoint, with each type of KV cache.

    Raises:
        RequestError: if a vocabulary differs from the reference's in size.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    size = reference.config.vocab_size
    for other in candidates:
        if other.config.vocab_size != size:
            raise RequestError(
                "cannot be compared with the reference",
                path=other.path,
                found=f"{other.config.vocab_size} tokens",
                expected=f"a vocabulary of {size}",
            )
    compared = []
    for other in candidates:
        for cache in cache_dtypes:
            compared.append((other, cache))
    result = []
    for _ in texts:
        # Without listeners, `zip_longest` fills in None for each comparison.
        result.append([Tally(listener) for listener, _ in zip_longest(listeners, compared)])
    width = reference.config.hidden_size
    for other in candidates:
        width = max(width, other.config.hidden_size)
    parts = _split_into_parts(texts, width)
    layers = reference.config.num_layers
    head_layers = count_head_layers(reference.config)
    stretches = Stretches(progress, len(parts) * (len(compared) + 1) * (layers + head_layers))
    for part in parts:
        batches: list[Batch] = []
        targets: list[Tensor] = []
        for _, windows in part:
            batches.append(windows.batch())
            targets.append(windows.targets.flatten())
        target_counts = [len(target) for target in targets]
        reference_states = reference_hidden(
            reference, batches, group=group, progress=stretches.next(layers)
        )
        # Models whose head is to be reported: the reference's with the first of the others.
        unreported_heads = 1
        state_bytes = 4 * width * sum(target_counts)
        # Small models are compared in one pass, as each pass computes the reference's logits again.
        # In the budget, the reference's states count as those of one model.
        for run_slice in _pieces(len(compared), max(1, 2 * STATES_BYTES // state_bytes - 1)):
            model_states = []
            for other, cache in compared[run_slice]:
                model_states.append(
                    final_hidden(
                        other,
                        batches,
                        cache_dtype=cache,
                        group=group,
                        progress=stretches.next(layers),
                    )
                )
            head_report = stretches.next(head_layers * (unreported_heads + len(model_states)))
            unreported_heads = 0
            pieces = list(head_pieces(target_counts, size))
            for done, rows in enumerate(pieces, start=1):
                expected = _logits(reference, reference_states, rows, group, finite=finite)
                run_indices = range(run_slice.start, run_slice.stop)
                for run, states in zip(run_indices, model_states, strict=True):
                    logits = _logits(compared[run][0], states, rows, group, finite=finite)
                    for (batch, batch_rows), p, q in zip(rows, expected, logits, strict=True):
                        text = part[batch][0]
                        result[text][run].add(p, q, targets[batch][batch_rows])
                head_report("layers", done, len(pieces), "layers")
    return result


@torch.inference_mode()
def log_loss(
    checkpoint: Checkpoint,
    windows: Sequence[Windows],
    *,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> float:
    """Sum minus the log probabilities, in nats, of all scored targets. Raises `NonFiniteError` if
    the model's logits are NaN or Inf.
    """
    return sum(
        losses.sum().item() for _, losses in _iter_losses(checkpoint, windows, group, progress)
    )


@torch.inference_mode()
def perplexity_estimates(
    checkpoint: Checkpoint,
    texts: Sequence[Tensor],
    *,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> list[Estimate]:
    """Measure perplexity per token over each text, as windows [W, T]: each token but a window's
    first is predicted from the earlier ones of the window. The error is defined as in `Quality`.
    Raises `NonFiniteError` if the model's logits are NaN or Inf.
    """
    text_losses = token_losses(checkpoint, texts, group=group, progress=progress)
    return [mean_estimate(losses.flatten()).exp() for losses in text_losses]


@torch.inference_mode()
def token_losses(
    checkpoint: Checkpoint,
    texts: Sequence[Tensor],
    *,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> list[Tensor]:
    """Compute minus the log probability, in nats, of each token but the first of each text's
    windows [W, T]: [W, T - 1]. Raises `NonFiniteError` if the model's logits are NaN or Inf.
    """
    scored = [Windows.of(windows) for windows in texts]
    text_pieces: list[list[Tensor]] = [[] for _ in scored]
    for text, losses in _iter_losses(checkpoint, scored, group, progress):
        text_pieces[text].append(losses)
    result: list[Tensor] = []
    for pieces, windows in zip(text_pieces, texts, strict=True):
        result.append(torch.cat(pieces).view(len(windows), -1))
    return result


def perplexity(loss: float, count: int) -> float:
    """Compute the exponential of a loss in nats, divided by `count`; infinite beyond the range of a
    float.
    """
    # math.exp raises OverflowError beyond the range.
    return torch.tensor(loss / count, dtype=torch.float64).exp().item()


def text_windows(ids: Sequence[int], start: Sequence[int], length: int) -> Tensor:
    """Cut the token ids of a text into windows [W, length], each of which begins like a prompt.

    Ids that do not fill a last window are dropped. A text shorter than one window is one shorter
    window, and an empty text has none.

    Args:
        ids: of the whole text, with or without `start` before them.
        start: the ids that each window begins with, see `prompt_start`.
        length: of a window, `start` included.
    """
    prefix = list(start)
    body = list(ids)
    if body[: len(prefix)] == prefix:
        body = body[len(prefix) :]
    step = min(length - len(prefix), len(body))
    if step < 1:
        return torch.empty(0, 0, dtype=torch.long)
    windows: list[list[int]] = []
    for position in range(0, len(body) - step + 1, step):
        windows.append(prefix + body[position : position + step])
    return torch.tensor(windows)


class Tally:
    """Figures on two models' predictions, collected batch by batch: a few numbers per token."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._largest = 0.0
        self._batch_figures: list[tuple[Tensor, ...]] = []

    def add(self, reference_logits: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add the logits [N, V] of both and the targets [N], in the order of the text."""
        count, size = logits.shape
        # At least two rows, because torch sums a single row in another order.
        rows = max(2, torch.get_num_threads(), _COMPARED_ELEMENTS // size)
        parts = max(1, count // rows)
        for part in zip(
            reference_logits.tensor_split(parts),
            logits.tensor_split(parts),
            targets.tensor_split(parts),
            strict=True,
        ):
            self._add_rows(*part)

    def _add_rows(self, reference_logits: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a few rows, as `add` does."""
        difference = (reference_logits - logits).abs_().max().item()
        # `max` of two floats drops a NaN that is its second argument.
        if math.isnan(difference):
            self._largest = difference
        else:
            self._largest = max(self._largest, difference)
        log_p = reference_logits.log_softmax(-1)
        log_q = logits.log_softmax(-1)
        # A KL near 0 is a sum of terms of both signs over the vocabulary, which cancel.
        kl = (log_p - log_q).mul_(log_p.exp()).sum(-1, dtype=torch.float64)
        if self._listener is not None:
            self._listener(log_p, log_q, kl, targets)
        loss_p = F.nll_loss(log_p, targets, reduction="none", ignore_index=NOT_SCORED)
        loss_q = F.nll_loss(log_q, targets, reduction="none", ignore_index=NOT_SCORED)
        agreed = reference_logits.argmax(-1) == logits.argmax(-1)
        self._batch_figures.append(
            (kl, agreed.double(), loss_p.double(), loss_q.double(), targets != NOT_SCORED)
        )

    def by_token(self) -> list[Tensor]:
        """Concatenate, of each token, KL(reference || other), whether the likeliest token is the
        same, and both losses, as float64 [N]; and whether it has a target.
        """
        return [torch.cat(parts) for parts in zip(*self._batch_figures, strict=True)]

    def quality(self) -> Quality:
        """Compute the figures over all tokens."""
        kl, agreed, reference_losses, losses, scored = self.by_token()
        mean = mean_estimate(kl)
        top1 = mean_estimate(agreed)
        median, p99 = np.quantile(kl.numpy(), [0.5, 0.99]).tolist()
        # KL is not negative, but rounding of equal logits makes it slightly so.
        divergence = Divergence(
            tokens=len(kl),
            largest_logit_difference=self._largest,
            kl=max(mean.value, 0.0),
            kl_median=max(median, 0.0),
            kl_p99=max(p99, 0.0),
            top1_agreement=top1.value,
            kl_error=mean.error,
            top1_error=top1.error,
        )
        reference_losses = reference_losses[scored]
        losses = losses[scored]
        reference = mean_estimate(reference_losses).exp()
        other = mean_estimate(losses).exp()
        # Both models find the same tokens hard: paired, the ratio has a smaller error than either.
        ratio = mean_estimate(losses - reference_losses).exp()
        return Quality(
            divergence=divergence,
            reference_perplexity=reference.value,
            perplexity=other.value,
            reference_perplexity_error=reference.error,
            perplexity_error=other.error,
            ratio_error=ratio.error,
        )


def _iter_losses(
    checkpoint: Checkpoint, texts: Sequence[Windows], group: ProcessGroup, progress: Progress
) -> Iterator[tuple[int, Tensor]]:
    """Yield minus the log probabilities [N] of some scored targets at a time, with the index of
    their text.
    """
    parts = _split_into_parts(texts, checkpoint.config.hidden_size)
    layers = checkpoint.config.num_layers
    head = count_head_layers(checkpoint.config)
    stretches = Stretches(progress, len(parts) * (layers + head))
    for part in parts:
        batches = [windows.batch() for _, windows in part]
        states = final_hidden(checkpoint, batches, group=group, progress=stretches.next(layers))
        head_report = stretches.next(head)
        targets: list[Tensor] = []
        # The head is the largest matrix of many models, and only these positions need it.
        scored: list[Tensor] = []
        for _, windows in part:
            target = windows.targets.flatten()
            targets.append(target)
            scored.append((target != NOT_SCORED).nonzero().squeeze(-1))
        counts = [len(positions) for positions in scored]
        pieces = list(head_pieces(counts, checkpoint.config.vocab_size))
        for done, rows in enumerate(pieces, start=1):
            chosen: list[tuple[int, Tensor]] = []
            for batch, scored_rows in rows:
                chosen.append((batch, scored[batch][scored_rows]))
            piece_logits = _logits(checkpoint, states, chosen, group, finite=True)
            for (batch, positions), logits in zip(chosen, piece_logits, strict=True):
                losses = F.cross_entropy(logits, targets[batch][positions], reduction="none")
                yield part[batch][0], losses.double()
            head_report("layers", done, len(pieces), "layers")


def _logits(
    checkpoint: Checkpoint,
    states: Sequence[Tensor],
    rows: Sequence[tuple[int, slice | Tensor]],
    group: ProcessGroup,
    *,
    finite: bool,
) -> list[Tensor]:
    """Compute the logits [N, V] of rows of hidden states [B, T, D]; with `finite`, NaN or Inf is a
    `NonFiniteError`.
    """
    row_states = [states[batch].flatten(0, 1)[batch_rows] for batch, batch_rows in rows]
    result = final_logits(checkpoint, row_states, group=group)
    if finite:
        return [require_finite_logits(logits, checkpoint.path) for logits in result]
    return result


def head_pieces(counts: Sequence[int], vocab_size: int) -> Iterator[list[tuple[int, slice]]]:
    """Yield the matrix's index and a few rows each, for all rows of several matrices. The logits of
    one list fit in memory together; the head is converted once for all of them.
    """
    row_pieces = []
    for index, count in enumerate(counts):
        for rows in _pieces(count, TOKENS_THROUGH_THE_HEAD):
            row_pieces.append((index, rows))
    for group in _pieces(len(row_pieces), _count_head_pieces(vocab_size)):
        yield row_pieces[group]


def tokens_per_head_pass(vocab_size: int) -> int:
    """Count the tokens that go through a head of this size together, at most."""
    return _count_head_pieces(vocab_size) * TOKENS_THROUGH_THE_HEAD


def _count_head_pieces(vocab_size: int) -> int:
    # Of logits in float32.
    piece_bytes = 4 * TOKENS_THROUGH_THE_HEAD * vocab_size
    return max(_MIN_HEAD_PIECES, LOGITS_BYTES // piece_bytes)


def _split_into_parts(
    texts: Sequence[Windows], hidden_size: int
) -> list[list[tuple[int, Windows]]]:
    """Divide texts into parts whose hidden states fit the budget: of each the batches, with the
    index of their text.
    """
    parts: list[list[tuple[int, Windows]]] = [[]]
    total = 0
    for index, text in enumerate(texts):
        count, length = text.tokens.shape
        for rows in _pieces(count, max(1, TOKENS_THROUGH_A_BLOCK // length)):
            # Hidden states are float32.
            size = (rows.stop - rows.start) * length * hidden_size * 4
            if parts[-1] and total + size > STATES_BYTES:
                parts.append([])
                total = 0
            parts[-1].append(
                (index, Windows(text.tokens[rows], text.targets[rows], text.positions))
            )
            total += size
    return parts


def _pieces(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def part_of(progress: Progress, index: int, count: int) -> Progress:
    """Scale progress reports to one of `count` equal parts of a job."""

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        progress(phase, index * total + done, count * total, unit)

    return report
