"""Check that a source predicts a sample text: the gate cannot detect a broken source, whose copy
is as broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.data.files import excerpt
from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.model.layerwise import Batch
from quantkit.quality.bounds import window_length
from quantkit.quality.figures import round_figure
from quantkit.quality.measures import Hidden, head_pieces, text_windows
from quantkit.tensors.finite import all_finite, cast_finite, nonfinite_logits
from quantkit.tensors.qtensor import QuantTensor
from quantkit.text.tokenizer import prompt_start
from quantkit.via_transformers.forward import final_hidden, final_logits

NOTED_BITS_PER_BYTE = 3.0
"""Above this a model predicts plain English so badly that its user is warned."""

# Enough for a window of any tokenizer.
_LETTERS = 8192
# Of the logits' range: rounding varies the logits of a model that ignores its input.
_FLAT = 1e-3
_SKIP = Message(Option("source_check", value=False), " skips this check")


@dataclass(frozen=True)
class SourceCheck:
    """A source's loss on one window of the packaged text of this name: the number of tokens
    predicted, their perplexity, and bits per byte of the text as UTF-8.
    """

    text: str
    tokens: int
    perplexity: float
    bits_per_byte: float

    def note(self) -> str | None:
        """Write a warning for the user if the source predicts poorly."""
        if self.bits_per_byte <= NOTED_BITS_PER_BYTE:
            return None
        return (
            f"the source predicts plain English poorly: {self.bits_per_byte:.2g} bits a byte,"
            f" perplexity {self.perplexity:.4g}"
        )


@torch.inference_mode()
def check_source(
    source: Checkpoint,
    *,
    allow_nonfinite: bool = False,
    source_hidden: Hidden = final_hidden,
    progress: Progress = silent,
) -> SourceCheck | str:
    """Run a source, one block in memory at a time, on one window of a packaged text.

    Args:
        allow_nonfinite: logits that are NaN or Inf are no error.
        source_hidden: returns the source's hidden states, for instance those that are kept for the
            gate.

    Returns:
        The loss, or why it could not be measured.

    Raises:
        CheckpointError: if its perplexity is no better than a uniform guess, or its logits do not
            depend on the input.
        NonFiniteError: if its logits are NaN or Inf, naming the first tensor that is.
    """
    if not source.config.measurable:
        return "the source is known by its tensors only"
    tokenizer, _ = load_checked_tokenizer(source)
    if tokenizer is None:
        return "the source has no tokenizer"
    ids = tokenizer.encode(excerpt()[:_LETTERS])
    start = prompt_start(tokenizer)
    window = text_windows(ids, start, window_length(source))[:1]
    if window.numel() < 2:
        return "the tokenizer makes no tokens of a plain text"
    (hidden,) = source_hidden(source, [Batch.from_start(window)], progress=progress)
    loss = _loss(source, hidden[0], window[0])
    if not math.isfinite(loss):
        if allow_nonfinite:
            return "the source's logits are NaN or Inf"
        # Raises an error that names the first damaged tensor, if a tensor is the cause.
        for name in source.names():
            value = source.load(name)
            if isinstance(value, QuantTensor):
                floats = value.scale
            else:
                floats = value
            cast_finite(floats, floats.dtype, name, source.path, allow_nonfinite=False)
        raise nonfinite_logits(source.path)
    written = len(tokenizer.decode(window[0].tolist()).encode())
    # Without a start token, the text's first token is not predicted.
    if not start:
        written -= len(tokenizer.decode(window[0, :1].tolist()).encode())
    count = len(window[0]) - 1
    # math.exp raises OverflowError above 709.
    perplexity = math.exp(min(loss / count, 700))
    # An embedding may be padded to more rows than the tokenizer has tokens.
    guess = min(tokenizer.vocab_size, source.config.vocab_size)
    if not loss / count < math.log(guess):
        raise CheckpointError(
            "the model predicts a plain English text no better than a uniform guess",
            path=source.path,
            found=f"perplexity {perplexity:.4g}",
            expected=f"less than its {guess} tokens",
            hint=Message(
                "the weights or the tokenizer are damaged or belong to another model; ", _SKIP
            ),
        )
    return SourceCheck(
        "speech",
        count,
        round_figure(perplexity),
        round_figure(loss / math.log(2) / max(written, 1), 4),
    )


def _loss(source: Checkpoint, hidden: Tensor, window: Tensor) -> float:
    """Compute minus the log probability, in nats, of the tokens of a window [T] after the first,
    given its hidden states [T, D]; NaN if a logit is NaN or Inf. Logits that are the same at every
    position are a `CheckpointError`.
    """
    loss = 0.0
    low = torch.full((source.config.vocab_size,), math.inf)
    high = -low
    for indexed_pieces in head_pieces([len(window)], source.config.vocab_size):
        pieces = [rows for _, rows in indexed_pieces]
        states = [hidden[rows] for rows in pieces]
        # No variable keeps the list of logits, which would be in memory with the next ones.
        for rows, logits in zip(pieces, final_logits(source, states), strict=True):
            if not all_finite(logits):
                return math.nan
            # The last position of a window has no target.
            targets = window[rows.start + 1 : rows.stop + 1]
            loss += F.cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
            low = torch.minimum(low, logits.amin(0))
            high = torch.maximum(high, logits.amax(0))
    if (high - low).max() <= _FLAT * (high.max() - low.min()):
        raise CheckpointError(
            "the model's logits do not depend on its input",
            path=source.path,
            found="the same prediction after every token of a text",
            hint=Message("the weights are missing, zero or all equal; ", _SKIP),
        )
    return loss


SOURCE_CHECK = "check of the source"
