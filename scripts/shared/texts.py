"""How far quantized models are from their source, on windows of texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quantkit.calibration.data import load_calibration
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.text.tokenizer import load_tokenizer, prompt_start

WINDOW = 256
"""Tokens of a window, and of a sample for calibration."""

WINDOWS = 60
"""Windows of a text."""

SAMPLES = 128
"""Samples for calibration."""


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the text for calibration, the texts to compare on, and `--seeds`."""
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)


def cut_windows(model: Path, text: Path, length: int = WINDOW, count: int = WINDOWS) -> Tensor:
    """Return the first windows of a text as tokens [N, T], in the model's tokens."""
    tokenizer = load_tokenizer(model)
    windows = text_windows(tokenizer.encode(text.read_text()), prompt_start(tokenizer), length)
    return windows[:count]


def cut_batches(
    model: Path, texts: Iterable[Path], length: int = WINDOW, count: int = WINDOWS
) -> list[Batch]:
    """Return the first windows of each text, to compare models on."""
    return [Batch.from_start(cut_windows(model, text, length, count)) for text in texts]


def measure_kls(source: Path, result: Path, batches: Sequence[Batch]) -> list[float]:
    """Return KL(source || result) per token in units of 1e-4 nats, by batch."""
    differences = compare_batches(open_checkpoint(source), open_checkpoint(result), batches)
    return [1e4 * difference.divergence.kl for difference in differences]


def format_kls(kls: Iterable[float]) -> list[str]:
    """Return the cells of a table for KL in units of 1e-4 nats."""
    return [f"{kl:.2f}" for kl in kls]


def format_titles(texts: Iterable[Path]) -> list[str]:
    """Return the titles of a table's columns of KL."""
    return [f"KL {text.stem}" for text in texts]


def average_kl(reference: Tensor, log_probs: Tensor) -> float:
    """Return the mean over tokens of KL(reference || other), in nats.

    Args:
        reference: logarithms of probabilities [..., V].
        log_probs: those of the other.
    """
    return float((reference.exp() * (reference - log_probs)).sum(-1).mean())


def save_samples(
    path: Path,
    model: Path,
    calibration: Path,
    *,
    seed: int,
    samples: int = SAMPLES,
    length: int = WINDOW,
) -> Path:
    """Write the samples that quantkit draws as `tokens` [N, T] int64, for a peer; return the path.

    Args:
        path: a safetensors file.
        model: the folder whose tokenizer is used.
        calibration: the text.
        seed: of the draw.
        samples: how many samples.
        length: tokens of a sample.
    """
    tokenizer = load_tokenizer(model)
    drawn = load_calibration(calibration, tokenizer, samples=samples, length=length, seed=seed)
    save_file({"tokens": drawn.tokens}, path)
    return path
