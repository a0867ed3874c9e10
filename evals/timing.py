"""What is timed of a model, once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.tensors.finite import finite_logits

PROMPT = 16  # tokens before decoding
_PROBE_BYTES = 1 << 29


def seconds(run: Callable[[], object]) -> float:
    """That a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _random(model: Decoder, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def prefill_once(model: Decoder, length: int, compiled: bool | None) -> None:
    """A random prompt, up to its first new token.

    Raises:
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    finite_logits(Engine(model, length, compiled=compiled).prefill(_random(model, 1, length))).argmax().item()


class Decoding:
    """Greedy decoding of several sequences after a prompt of `PROMPT` tokens."""

    def __init__(self, model: Decoder, batch: int, new: int, compiled: bool | None) -> None:
        """
        Args:
            new: tokens of each.
        """
        self._new = new
        self._engine = Engine(model, PROMPT + new, batch=batch, compiled=compiled)
        self._prompt = _random(model, batch, PROMPT)

    def run(self) -> float:
        """Seconds that the new tokens took after the prompt."""
        tokens = self._engine.prefill(self._prompt).argmax(-1, keepdim=True)
        tokens.tolist()  # all that was asked of a GPU is done
        started = time.perf_counter()
        for _ in range(self._new):
            logits = self._engine.decode(tokens)
            with self._engine.model.ops.single_threaded():
                tokens = logits.argmax(-1, keepdim=True)
        tokens.tolist()
        return time.perf_counter() - started


def weight_bytes(model: Decoder) -> int:
    """Of what is read for each token: all weights but the embedding, unless it is the head as well."""
    embedding: nn.Module = model.model.embed_tokens
    left_out = {id(weight) for weight in embedding.parameters()} if model.lm_head is not None else set()
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if id(tensor) not in left_out)


def bandwidth(device: torch.device) -> float:
    """Bytes a second: the best of several sums over a large tensor, or on a GPU of copies of one."""
    probe = torch.ones(_PROBE_BYTES // 4, device=device)
    if device.type != "cuda":
        return probe.nbytes / min(seconds(probe.sum) for _ in range(5))
    copy = torch.empty_like(probe)

    def copied() -> None:
        copy.copy_(probe)
        torch.cuda.synchronize(device)

    return 2 * probe.nbytes / min(seconds(copied) for _ in range(10))
