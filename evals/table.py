"""Checkpoints side by side: size, perplexity, distance from the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.jobs.inspect import inspect
from quantkit.progress import Progress, silent
from quantkit.quality import measures
from quantkit.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Row:
    """One checkpoint of a table.

    Attributes:
        megabytes: of its tensors on disk, 10**6 bytes.
        bits_per_weight: of the tensors, over all parameters.
        perplexity: per token, over windows of `compare`'s length.
        kl: mean per token of KL(source || this), in nats.
        largest_logit_difference: to the source.
    """

    name: str
    megabytes: float
    bits_per_weight: float
    perplexity: float
    kl: float
    largest_logit_difference: float


def compare(
    source: Path, checkpoints: Sequence[Path], text: str, *, window: int = 256, progress: Progress = silent
) -> list[Row]:
    """Measure checkpoints against their source on one text, in float32, source first.

    Raises:
        CheckpointError: if the text is too short for one prediction.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    reference = open_checkpoint(source)
    tokenizer = checked_tokenizer(reference)[0] or load_tokenizer(source)
    windows = measures.text_windows(tokenizer.encode(text), tokenizer.bos_id, window)
    if windows.shape[0] == 0 or windows.shape[1] < 2:
        raise CheckpointError("the text is too short to measure on", path=source)
    others = [open_checkpoint(path) for path in checkpoints]
    found = measures.compare(reference, others, windows, progress=progress)
    rows = [_row(source, found[0].reference_perplexity, 0.0, 0.0)]
    for path, one in zip(checkpoints, found, strict=True):
        rows.append(_row(path, one.perplexity, one.divergence.kl, one.divergence.largest_logit_difference))
    return rows


def format_rows(rows: Sequence[Row]) -> list[str]:
    """The table as aligned text."""
    lines = [f"{'checkpoint':<12}{'MB':>8}{'bits/weight':>13}{'perplexity':>12}{'KL':>10}{'max logit diff':>16}"]
    for row in rows:
        lines.append(
            f"{row.name:<12}{row.megabytes:>8.2f}{row.bits_per_weight:>13.2f}{row.perplexity:>12.3f}"
            f"{row.kl:>10.5f}{row.largest_logit_difference:>16.4f}"
        )
    return lines


def _row(path: Path, perplexity: float, kl: float, largest: float) -> Row:
    size = inspect(path)
    return Row(path.name, size.weight_bytes / 1e6, size.bits_per_weight, perplexity, kl, largest)
