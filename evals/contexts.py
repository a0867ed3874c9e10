"""Decoding with much context: how fast several sequences go on together, and what memory that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.timing import PROMPT, Decoding, Rate, rate
from quantkit.memory import enough_memory, malloc_trim, peak_bytes, reset_peak, size_text
from quantkit.model.cache import cache_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.device import free_bytes

NEW = 16  # tokens of each sequence that are decoded in a run: the last of its context
LEAST = PROMPT + NEW
"""The shortest context."""
_SPARE_BYTES = 256_000_000  # of memory, for what is computed


class Row(NamedTuple):
    """Sequences decoded at once, and the tokens of each, new ones included."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"context {self.context} of {self.batch} {'sequence' if self.batch == 1 else 'sequences'}"


@dataclass(frozen=True)
class AtContext:
    """What several sequences did, each with so much context.

    Attributes:
        context: tokens of each sequence at the end, of which the last `NEW` are decoded.
        batch: sequences.
        prompt_rate: tokens a second of reading a prompt, all of a context but the new tokens.
        together: decoding; all sequences' tokens count.
        cache_bytes: keys and values of all sequences.
        peak_bytes: memory at its peak meanwhile, weights included, the process's or what it took up on the GPU; None
            where the system does not tell.
    """

    context: int
    batch: int
    prompt_rate: float
    together: Rate
    cache_bytes: int
    peak_bytes: int | None

    @property
    def each(self) -> float:
        """Tokens a second of one sequence."""
        return self.together.median / self.batch


def prefill_rates(found: Sequence[AtContext]) -> dict[int, Rate]:
    """Tokens a second of a prompt, by the context that it fills but for `NEW` tokens; it was read for each row."""
    rates: dict[int, list[float]] = {}
    for one in found:
        rates.setdefault(one.context, []).append(one.prompt_rate)
    return {context: Rate.of(of) for context, of in rates.items()}


def rows(contexts: Sequence[int], batches: Sequence[int], most: int) -> list[Row]:
    """What there is to measure of a model whose context is `most`."""
    return [Row(context, batch) for context in contexts if context <= most for batch in batches]


def too_long(contexts: Sequence[int], most: int) -> list[str]:
    """Why contexts are left out."""
    return [f"context {context}: the model's is {most}" for context in contexts if context > most]


def measure(
    model: Decoder, wanted: Sequence[Row], *, compiled: bool | None, cache_dtype: torch.dtype, runs: int,
    group: ProcessGroup, step: Callable[[], None],
) -> tuple[list[AtContext], list[str]]:  # fmt: skip
    """Measure rows that fit in memory; and why the others do not.

    Args:
        step: called before each.

    Raises:
        RequestError: if one of several processes runs out of memory.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    found, left_out = [], []
    for row in wanted:
        step()
        if (reason := group.broadcast_from_rank0(_too_large(model, row, cache_dtype, group.size))) is not None:
            left_out.append(f"{row}: {reason}")
            continue
        try:
            with enough_memory(None):
                found.append(_measure(model, row, compiled, cache_dtype, runs))
        except RequestError as error:
            if group.size > 1:  # the others go on
                raise
            left_out.append(f"{row}: {error.problem}")
    return found, left_out


def _measure(model: Decoder, row: Row, compiled: bool | None, cache_dtype: torch.dtype, runs: int) -> AtContext:
    device = model.device
    if compiled or device.type == "cuda":
        torch.compiler.reset()  # what was compiled for another cache would count against the limit of graphs
    malloc_trim()
    counted = True
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        counted = reset_peak()
    prompt = row.context - NEW
    decoding = Decoding(model, row.batch, NEW, compiled, prompt=prompt, cache_dtype=cache_dtype)
    prompt_rate = prompt / decoding.fill()
    together = rate(row.batch * NEW, decoding.run, runs)
    peak = max_bytes(device) if counted else None
    return AtContext(*row, prompt_rate, together, decoding.engine.cache_bytes, peak)


def max_bytes(device: torch.device) -> int:
    """Memory at its peak, since that was counted: the process's, or what it takes up on the GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()


def _too_large(model: Decoder, row: Row, cache_dtype: torch.dtype, processes: int) -> str | None:
    """Why a row cannot be measured in the memory that is free now; None if it can."""
    needed, free = cache_bytes(model.config, row.batch, row.context, cache_dtype), free_bytes(model.device)
    if model.device.type == "cpu":
        free //= processes
    if needed + _SPARE_BYTES <= free:
        return None
    return f"keys and values take {size_text(needed)}, and {size_text(free)} of memory are free"
