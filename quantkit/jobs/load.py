"""A model and its tokenizer, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.model.decoder import Decoder
from quantkit.model.device import float_type
from quantkit.model.load import load_model
from quantkit.progress import Progress, silent
from quantkit.text.tokenizer import Tokenizer, load_tokenizer
from quantkit.xla.require import require_packages

if TYPE_CHECKING:
    from quantkit.xla.engine import XlaModel


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str | None = None,
    weights: str | None = None,
    tp: ProcessGroup = SINGLE,
) -> tuple[Decoder, Tokenizer]:
    """Open a checkpoint, quantized or not, with its tokenizer.

    Args:
        path: a Meta or Hugging Face folder.
        device: where the model runs, as torch spells it; None is that of `tp` or, alone, a GPU if there is one.
        dtype: of activations and float weights, such as ``bf16``; None is the checkpoint's own.
        backend: the kernel backend for quantized layers by name; None chooses.
        weights: picks one of several sets of weights in the folder.
        tp: the processes that share the model, from `joined`; each calls this, and then the model, alike.

    Raises:
        QuantkitError: of the kind that says what is wrong.
    """
    float_dtype = float_type(dtype)
    checkpoint: Checkpoint = open_checkpoint(path, weights)
    tokenizer, _ = checked_tokenizer(checkpoint)
    model = load_model(checkpoint, device=device, dtype=float_dtype, backend=backend, group=tp)
    return model, tokenizer or load_tokenizer(path)


def load_xla(
    path: str | Path,
    *,
    devices: int | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    multi_host: bool = False,
    progress: Progress = silent,
) -> tuple[XlaModel, Tokenizer]:
    """What `load` does, for the devices that JAX finds; the process can't `torch.compile` from then on.

    Args:
        devices: that share the model; None takes all.
        multi_host: whether other processes, each with this call, have devices as well.

    Raises:
        QuantkitError: of the kind that says what is wrong.
    """
    require_packages()
    from quantkit.xla.engine import model_on_devices

    checkpoint = open_checkpoint(path, weights)
    tokenizer, _ = checked_tokenizer(checkpoint)
    model = model_on_devices(
        checkpoint, devices=devices, dtype=float_type(dtype), multi_host=multi_host, progress=progress
    )
    return model, tokenizer or load_tokenizer(path)
