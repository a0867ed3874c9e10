"""A model over a static cache: the prompt in one step, then one token at a time; eager or compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels.build import cache_folder
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder

LEAST_BUCKET = 16
_LEAST_CACHE = 256
_GRAPHS = 64  # of one function: buckets of prompts times sizes of caches
_SINGLE_THREADED: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.threads": 1
}  # see `Operations.single_threaded`


class Engine:
    """Runs sequences of one batch, one prompt after the other.

    Compiled, prompts are padded to buckets, powers of two, so that no length but the first of
    its bucket compiles anything. What pads a prompt follows it and is never seen: each later
    token is stored over it first.
    """

    def __init__(
        self, model: Decoder, length: int, *, batch: int = 1, cache_dtype: torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            model: from `quantkit.load`.
            length: positions to hold, of prompt and new tokens.
            cache_dtype: of keys and values; None is the activations', int8 takes half of that.
            compiled: by `torch.compile`; None is so on GPUs, while on a CPU eager steps are as fast and begin at once.

        Raises:
            RequestError: if the length exceeds the model's context.
        """
        context = model.config.max_context
        if length > context:
            raise RequestError(
                "prompt and new tokens exceed the model's context", found=length, expected=f"at most {context}",
                hint="give a shorter prompt, or ask for fewer new tokens",
            )  # fmt: skip
        self.model = model
        self._compiled = model.device.type == "cuda" if compiled is None else compiled
        if self._compiled:
            length = min(bucket(length, _LEAST_CACHE), context)
        self._cache = KVCache(model.config, batch, length, cache_dtype or model.dtype, model.device)
        if self._compiled and model.device.type == "cuda":
            for tensor in (*self._cache.keys, *self._cache.values):  # else recorded steps would copy the cache
                torch._dynamo.mark_static_address(tensor, guard=False)
        self._position = torch.zeros(1, dtype=torch.long, device=model.device)
        self._used = 0

    @property
    def length(self) -> int:
        """Positions it can hold."""
        return self._cache.length

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Begin anew with prompts [B, T] of one length; logits [B, V] of what follows."""
        count = tokens.shape[1]
        self._advance(count, start=0)
        if self._compiled:
            padding = min(bucket(count, LEAST_BUCKET), self.length) - count
            tokens = torch.nn.functional.pad(tokens, (0, padding))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        self._position = positions[count - 1 : count] + 1
        step = _compile(_first, tokens.device.type) if self._compiled else _first
        logits: Tensor = step(self.model, tokens, positions, self._position - 1, self._cache)
        return logits

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Take up the next token of each sequence [B, 1]; logits [B, V] of what follows."""
        self._advance(1, start=self._used)
        step = _compile(_next, tokens.device.type) if self._compiled else _next
        logits: Tensor = step(self.model, tokens, self._position, self._cache)
        self._position = self._position + 1
        return logits

    def _advance(self, count: int, *, start: int) -> None:
        """Writes beyond the cache would be lost on some devices without a word."""
        if start + count > self.length:
            raise RequestError("the cache is full", found=start + count, expected=f"at most {self.length} positions")
        self._used = start + count


def bucket(count: int, least: int) -> int:
    """The smallest power of two, `least` or above, that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


def _first(model: Decoder, tokens: Tensor, positions: Tensor, last: Tensor, cache: KVCache) -> Tensor:
    hidden = model.hidden(tokens, positions, cache, first=True)
    return model.head(hidden.index_select(1, last).squeeze(1))


def _next(model: Decoder, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    return model.head(model.hidden(tokens, positions, cache).squeeze(1))


@functools.cache
def _compile(step: Callable[..., Tensor], device: str) -> Callable[..., Any]:
    """One graph for each set of shapes; on GPUs recorded and replayed where it is of one token.

    What is compiled is kept for the next process, in ``TORCHINDUCTOR_CACHE_DIR`` or the cache of kernels.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    mode = "reduce-overhead" if device == "cuda" and step is _next else None
    options = _SINGLE_THREADED if device == "cpu" else None
    return torch._dynamo.config.patch(recompile_limit=_GRAPHS)(  # type: ignore[no-any-return]
        torch.compile(step, fullgraph=True, dynamic=False, mode=mode, options=options)
    )
