"""A model and its tokenizer, ready to run."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.parallel.group import Group
from quantkit.parallel.sharded import shard
from quantkit.tokenizer import Tokenizer, load_tokenizer


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    weights: str | None = None,
    tp: Group | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Open a checkpoint, quantized or not, with its tokenizer.

    Args:
        path: a Meta or Hugging Face folder.
        device: where the model runs.
        dtype: of activations and float weights; None is the checkpoint's own.
        backend: the kernel backend for quantized layers by name; None chooses.
        weights: picks one of several sets of weights in the folder.
        tp: the processes that share the model, from `joined`; each calls this, and then the model, alike.

    Raises:
        QuantkitError: of the kind that says what is wrong.
    """
    checkpoint = open_checkpoint(path, weights)
    tokenizer, _ = checked_tokenizer(checkpoint)
    if tp is not None:
        checkpoint = shard(checkpoint, tp)
    model = load_model(checkpoint, device=device, dtype=dtype, backend=backend)
    return model, tokenizer or load_tokenizer(path)
