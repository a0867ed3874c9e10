"""Checkpoints side by side: size, perplexity, distance from the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.inspect import inspect
from quantkit.model.blockwise import Batch
from quantkit.progress import Progress, silent
from quantkit.quality import divergence, text_windows, token_perplexity
from quantkit.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Row:
    """One checkpoint of a table.

    Attributes:
        megabytes: all files of the folder, 10**6 bytes.
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
    """
    reference = open_checkpoint(source)
    tokenizer = load_tokenizer(source)
    windows = text_windows(tokenizer.encode(text), tokenizer.bos_id, window)
    if windows.shape[0] == 0 or windows.shape[1] < 2:
        raise CheckpointError("the text is too short to measure on", path=source)
    rows = []
    for index, path in enumerate((source, *checkpoints)):
        progress(index, len(checkpoints) + 1, f"measure {path.name}")
        other = open_checkpoint(path)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        distance = divergence(reference, other, [Batch.from_start(windows)])[0]
        rows.append(
            Row(
                path.name,
                size / 1e6,
                inspect(path).bits_per_weight,
                token_perplexity(other, windows),
                distance.kl,
                distance.largest_logit_difference,
            )
        )
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
