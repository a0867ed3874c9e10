"""Decoding with long contexts: the speed of several sequences together, and the memory that they need."""

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

NEW = 16  # tokens of each sequence that are decoded in a run: the last ones of its context
MIN_CONTEXT = PROMPT + NEW
_SPARE_BYTES = 256_000_000  # for intermediate results


class Row(NamedTuple):
    """Sequences decoded at once, and the tokens of each, including new ones."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"context {self.context} of {self.batch} {'sequence' if self.batch == 1 else 'sequences'}"


@dataclass(frozen=True)
class AtContext:
    """The figures of several sequences of one length.

    Attributes:
        context: tokens of each sequence at the end; the last `NEW` are decoded.
        batch: sequences.
        prompt_rate: tokens a second of prefill, which is the context without the new tokens.
        together: decoding; the tokens of all sequences count.
        cache_bytes: keys and values of all sequences.
        peak_bytes: peak memory meanwhile, including weights, of the process or on the GPU; None if the system does not
            report it.
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
    """Prefill in tokens a second by context, with one run for each batch size."""
    rates: dict[int, list[float]] = {}
    for one in found:
        rates.setdefault(one.context, []).append(one.prompt_rate)
    return {context: Rate.of(runs) for context, runs in rates.items()}


def rows(contexts: Sequence[int], batches: Sequence[int], max_context: int) -> list[Row]:
    """The measurements that fit a model's context."""
    return [Row(context, batch) for context in contexts if context <= max_context for batch in batches]


def measure(
    model: Decoder, rows: Sequence[Row], *, compiled: bool | None, cache_dtype: torch.dtype, runs: int,
    group: ProcessGroup, step: Callable[[], None],
) -> tuple[list[AtContext], list[str]]:  # fmt: skip
    """Measure the rows that fit in memory; a line for each of the others.

    Args:
        step: called before each row.

    Raises:
        RequestError: if several processes share the model and one runs out of memory.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    found, left_out = [], []
    for row in rows:
        step()
        if (reason := group.broadcast_from_rank0(_too_large(model, row, cache_dtype, group.size))) is not None:
            left_out.append(f"{row}: {reason}")
            continue
        try:
            with enough_memory(None):
                found.append(_measure(model, row, compiled, cache_dtype, runs))
        except RequestError as error:
            if group.size > 1:  # the others would wait
                raise
            left_out.append(f"{row}: {error.problem}")
    return found, left_out


def _measure(model: Decoder, row: Row, compiled: bool | None, cache_dtype: torch.dtype, runs: int) -> AtContext:
    device = model.device
    if compiled or device.type == "cuda":
        torch.compiler.reset()  # graphs for another cache would count toward the limit
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
    """Peak memory since it was reset: of the process, or on the GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()


def _too_large(model: Decoder, row: Row, cache_dtype: torch.dtype, processes: int) -> str | None:
    """Why a row does not fit in free memory; None if it fits."""
    needed, free = cache_bytes(model.config, row.batch, row.context, cache_dtype), free_bytes(model.device)
    if model.device.type == "cpu":
        free //= processes
    if needed + _SPARE_BYTES <= free:
        return None
    return f"keys and values take {size_text(needed)}, and {size_text(free)} of memory are free"
