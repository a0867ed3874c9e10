"""Perplexity of whole documents, by the definitions of lm-evaluation-harness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.evals.texts import Text, prefix_token, token_ids
from quantkit.formats.checkpoint import Checkpoint
from quantkit.progress import Progress, silent
from quantkit.quality.measures import NOT_SCORED, Windows, log_loss, perplexity
from quantkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentScore:
    """How well a model predicts a text's documents, whatever its tokenizer."""

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float


def score_documents(
    checkpoint: Checkpoint, tokenizer: Tokenizer, text: Text, window: int, *, group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> DocumentScore:  # fmt: skip
    """The log probability of a text's documents, in rolling windows, per word and byte of the raw text.

    Raises:
        CheckpointError: if the tokenizer has neither BOS nor EOS to begin with.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    prefix = prefix_token(tokenizer, checkpoint)
    pairs = (pair for one in text.readings for pair in rolling(token_ids(tokenizer, one), prefix, window))
    loss = log_loss(checkpoint, grouped(pairs), group=group, progress=progress)
    return DocumentScore(perplexity(loss, text.words), perplexity(loss, text.bytes), loss / text.bytes / math.log(2))


def rolling(ids: Sequence[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Windows over a document that predict every token once: ids, and targets at the same positions.

    Windows are adjacent; the last one reaches back to full length and scores only the
    remaining tokens (lm-evaluation-harness, one token of context).
    """
    source = [prefix, *ids]
    pairs = []
    done = 0
    while done < len(ids):
        new = min(length, len(ids) - done)
        end = done + new
        begin = max(0, end - length)
        targets = [NOT_SCORED] * (done - begin) + list(ids[done:end])
        pairs.append((source[begin:end], targets))
        done = end
    return pairs


def grouped(pairs: Iterable[tuple[list[int], list[int]]]) -> list[Windows]:
    """Windows grouped by length, so that they run as batches."""
    by_length: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for pair in pairs:
        by_length[len(pair[0])].append(pair)
    return [
        Windows(torch.tensor([ids for ids, _ in group]), torch.tensor([targets for _, targets in group]))
        for group in by_length.values()
    ]
