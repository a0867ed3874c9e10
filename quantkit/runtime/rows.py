"""Write several texts of equal length together, each token chosen by the caller.

B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quantkit.base.memory import size_text
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.model.decoder import Decoder
from quantkit.model.device import free_bytes
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.tensors.products import compute_dtype

Choose = Callable[[Tensor], Tensor]
"""From the logits [B, V] of the next token to the tokens [B], on the same device."""


class RowWriter(Protocol):
    """A model that continues rows of tokens in lockstep."""

    def write_rows(self, first: Tensor, length: int, choose: Choose) -> Tensor:
        """Continue rows to a length.

        Args:
            first: the first token of each row [B], on the CPU.
            length: T, at least 2.
            choose: called T - 1 times, in the order of the tokens.

        Returns:
            The rows [B, T], on the CPU.
        """
        ...


class DecoderRows:
    """Writes rows with quantkit's decoder, with all weights in memory."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    @torch.inference_mode()
    def write_rows(self, first: Tensor, length: int, choose: Choose) -> Tensor:
        """Continue rows; see `RowWriter`."""
        num_rows = len(first)
        # Compilation would take longer than it saves in one use.
        engine = Engine(self._model, length - 1, slots=num_rows, compiled=False)
        slots = range(num_rows)
        tokens = first.to(self._model.device)
        columns = [tokens]
        for position in range(length - 1):
            logits = engine.step(tokens, slots, [position] * num_rows, slots)
            tokens = choose(logits)
            columns.append(tokens)
        return torch.stack(columns, dim=1).cpu()


def load_decoder_rows(checkpoint: Checkpoint, device: torch.device) -> DecoderRows:
    """Load a model for quantkit's decoder, in the type in which samples of calibration are
    multiplied on the device.

    Raises:
        RequestError: if its weights do not fit in memory.
    """
    require_room(checkpoint, device)
    return DecoderRows(load_model(checkpoint, device=device, dtype=compute_dtype(device)))


def weight_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the type of the weights of a model that writes rows: float32 where transformers runs
    it.
    """
    if checkpoint.config.run_by is not None:
        return torch.float32
    return compute_dtype(device)


def require_room(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise a `RequestError` if the weights of a model that writes rows exceed the memory of the
    device.
    """
    dtype = weight_dtype(checkpoint, device)
    required_bytes = dtype.itemsize * parameter_count(checkpoint)
    room = free_bytes(device)
    if required_bytes > room:
        name = str(dtype).removeprefix("torch.")
        raise RequestError(
            f"does not fit in memory as {name}",
            path=checkpoint.path,
            found=size_text(required_bytes),
            expected=f"at most {size_text(room)}",
        )
