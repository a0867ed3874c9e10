"""Timing a model: prefill, decoding, long contexts, the bandwidth of its weights."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantkit.base.memory import enough_memory, malloc_trim, peak_bytes, reset_peak, size_text
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.models import backend_names
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.cache import cache_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.device import free_bytes
from quantkit.model.feed_forward import Experts
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import require_finite_logits

# Tokens before decoding.
PROMPT = 16
# New tokens and runs of `decoding_speed`.
NEW_TOKENS = 32
RUNS = 3
# Larger than the caches of processors.
_PROBE_BYTES = 1 << 29
# Calls are repeated for so long that a wake-up of another process counts little.
_MIN_RUN_SECONDS = 0.1
PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Rate:
    """Tokens per second over several runs: the median, the minimum and the maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rate:
        """Summarize runs with these rates."""
        return cls(statistics.median(rates), min(rates), max(rates))

    @property
    def spread(self) -> float:
        """Compute the largest distance of a run from the median, as a share of the median."""
        return max(self.most - self.median, self.median - self.least) / self.median


def measure_rate(
    tokens: int, timed_call: Callable[[], float], runs: int, group: ProcessGroup = SINGLE
) -> Rate:
    """Time several runs, after a call that warms up; `timed_call` makes a call for `tokens` and
    returns its seconds. Processes that share the model make as many calls, since the first one's
    time counts for all.
    """
    timed_call()
    rates = [tokens / _mean_seconds(timed_call, group) for _ in range(runs)]
    return Rate.of(rates)


def _mean_seconds(timed_call: Callable[[], float], group: ProcessGroup) -> float:
    """Measure the mean seconds of calls, which are repeated until a run is long."""
    num_calls = 0
    total = 0.0
    while total < _MIN_RUN_SECONDS:
        num_calls += 1
        # With times of their own, the processes would make different numbers of calls, and wait
        # for each other forever.
        total += group.broadcast_from_rank0(timed_call())
    return total / num_calls


class OtherProcesses:
    """Measures the cores that other processes use, from its creation on."""

    def __init__(self) -> None:
        # The load of the last minute, before this process's own work counts in it.
        self._load = os.getloadavg()[0]
        self._started = time.perf_counter()
        self._process_cpu_start = time.process_time()
        self._total_cpu_start = _cpu_seconds()

    def cores(self) -> float:
        """Measure the busy cores on average; the load at the start if the system does not count CPU
        time.
        """
        total_cpu_end = _cpu_seconds()
        if total_cpu_end is None or self._total_cpu_start is None:
            return self._load
        total_seconds = total_cpu_end - self._total_cpu_start
        process_seconds = time.process_time() - self._process_cpu_start
        elapsed = time.perf_counter() - self._started
        # The system counts in ticks, so the difference can be slightly negative.
        return max(0.0, (total_seconds - process_seconds) / elapsed)


def _cpu_seconds() -> float | None:
    """Read the CPU time of all processes and of other guests of the host since boot; None if not
    counted.
    """
    try:
        # The first line sums all processors: user, nice, system, idle, iowait, irq, softirq and
        # steal. Later columns are for guests of this system, and are part of the first two.
        first_line = PROC_STAT.read_text().split("\n", 1)[0]
        user, nice, system, _idle, _iowait, *interrupts_and_steal = map(
            int, first_line.split()[1:9]
        )
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + sum(interrupts_and_steal)
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def use_threads(count: int = 1) -> Iterator[None]:
    """Compute on one thread, or a number of them. Several are slower for a small model, much slower
    on a busy machine.
    """
    previous_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)


def measure_seconds(run: Callable[[], object]) -> float:
    """Measure the seconds that a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _make_prompts(model: Decoder, batch: int, length: int) -> torch.Tensor:
    # Generated on the CPU, so that all devices read the same tokens.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return tokens.to(model.device)


def prefill_once(
    model: Decoder, length: int, compiled: bool | None, cache_dtype: torch.dtype | None = None
) -> None:
    """Read a random prompt, up to its first new token.

    Raises `NonFiniteError` if the model's logits are NaN or Inf.
    """
    engine = Engine(model, length, cache_dtype=cache_dtype, compiled=compiled)
    prompt = _make_prompts(model, 1, length)[0]
    # `item` waits until the GPU is done.
    require_finite_logits(_read_prompt(engine, 0, prompt)).argmax().item()


def _read_prompt(engine: Engine, slot: int, prompt: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Read a prompt [T] into a slot from a position on, a chunk at a time; returns the logits
    [1, V] of the next token.
    """
    length = len(prompt)
    logits = torch.empty(0)
    for begin in range(start, length, engine.chunk_rows):
        positions = range(begin, min(begin + engine.chunk_rows, length))
        # Only the last token of a prompt needs logits, which the head computes for the whole
        # vocabulary.
        output_rows = []
        if positions.stop == length:
            output_rows.append(len(positions) - 1)
        slots = [slot] * len(positions)
        logits = engine.step(prompt[begin : positions.stop], slots, positions, output_rows)
    return logits


class Decoding:
    """Greedy decoding of several sequences after a random prompt, repeatable.

    The prompts differ only in their last `PROMPT` tokens: one is read in full, the others begin
    with a copy of it.
    """

    def __init__(
        self,
        model: Decoder,
        batch: int,
        new: int,
        compiled: bool | None,
        *,
        prompt: int = PROMPT,
        cache_dtype: torch.dtype | None = None,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """Prepare runs in which `new` tokens of each sequence are decoded after `prompt` ones,
        `PROMPT` at least. Raises `RequestError` if these exceed the model's context, or the cache
        does not fit in memory.
        """
        self.engine = Engine(
            model, prompt + new, slots=batch, cache_dtype=cache_dtype, compiled=compiled
        )
        self._new = new
        self._group = group
        self._prompts = _make_prompts(model, batch, prompt)
        # All prompts share their beginning, so that only one of them is read in full. Different
        # ends keep the sequences from decoding the same tokens.
        self._prompts[:, :-PROMPT] = self._prompts[0, :-PROMPT].clone()
        self._first: torch.Tensor | None = None

    def fill(self) -> float:
        """Read all prompts into their slots; returns the seconds of the first one. Raises
        `NonFiniteError` if the model's logits are NaN or Inf.
        """
        first_prompt = self._prompts[0]
        chunk = self.engine.chunk_rows
        # Each kind of step once: a first chunk, a later one, and a last one, which may be shorter.
        warm_up = 2 * chunk + (len(first_prompt) % chunk or chunk)
        _read_prompt(self.engine, 0, first_prompt[:warm_up]).argmax().item()
        logits: list[torch.Tensor] = []

        def read_first_prompt() -> None:
            logits[:] = [_read_prompt(self.engine, 0, first_prompt)]
            # Waits until the GPU is done.
            logits[0].argmax().item()

        prompt_seconds = _mean_seconds(partial(measure_seconds, read_first_prompt), self._group)
        shared_length = len(first_prompt) - PROMPT
        others = range(1, len(self._prompts))
        if others and self.engine.model.config.keeps_states:
            # States are those after the last token, so the shared beginning is read again.
            _read_prompt(self.engine, 0, first_prompt[:shared_length])
            self.engine.keep_states(0)
            _read_prompt(self.engine, 0, first_prompt, shared_length)
        for slot in others:
            self.engine.copy_prefix(0, slot, shared_length)
            prompt = self._prompts[slot]
            logits.append(_read_prompt(self.engine, slot, prompt, shared_length))
        for slot in range(len(self._prompts)):
            self.engine.keep_states(slot)
        self._first = require_finite_logits(torch.cat(logits)).argmax(-1)
        return prompt_seconds

    def run(self) -> float:
        """Measure the seconds of the new tokens after the prompts, which are read first if
        necessary.
        """
        if self._first is None:
            self.fill()
        assert self._first is not None
        tokens = self._first
        length = self._prompts.shape[1]
        slots = range(len(self._prompts))
        # Waits until the GPU is done with what came before.
        tokens.tolist()
        # Each run overwrites the cache's positions after the prompts, and begins with the states
        # after them, so runs are alike.
        for slot in slots:
            self.engine.copy_prefix(slot, slot, length)
        self.engine.last_tokens[: len(slots)] = tokens
        started = time.perf_counter()
        for position in range(length, length + self._new):
            pending = self.engine.decode(slots, [position] * len(slots))
        pending.read()
        return time.perf_counter() - started


def weight_bytes(model: Decoder) -> int:
    """Count the bytes that are read for each token: all weights except the embedding, unless it is
    tied to the head, and of a mixture's experts those of one token.
    """
    unread_bytes = 0
    # Of an embedding, a token reads one row; the head, which can be the same tensor, is read in
    # full.
    if not model.config.tied_embeddings:
        unread_bytes = count_loaded_bytes(model.model.embed_tokens)
    if model.config.experts is not None:
        unused_share = 1 - model.config.experts.per_token / model.config.experts.count
        unused_sizes = []
        for module in model.modules():
            if isinstance(module, Experts):
                unused_sizes.append(unused_share * count_loaded_bytes(module.experts))
        unread_bytes += round(sum(unused_sizes))
    return count_loaded_bytes(model) - unread_bytes


def count_loaded_bytes(module: nn.Module) -> int:
    """Count the bytes of all weights of a model or a part of it, in the layout of the kernels."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def measure_bandwidth(device: torch.device) -> float:
    """Measure bytes a second: the best of several sums over a large tensor, or of several copies on
    a GPU.
    """
    # Four bytes for each float.
    probe = torch.ones(_PROBE_BYTES // 4, device=device)
    if device.type != "cuda":
        return probe.nbytes / min(measure_seconds(probe.sum) for _ in range(5))
    copy = torch.empty_like(probe)

    def copy_probe() -> None:
        copy.copy_(probe)
        torch.cuda.synchronize(device)

    # A copy reads and writes.
    return 2 * probe.nbytes / min(measure_seconds(copy_probe) for _ in range(10))


@dataclass(frozen=True)
class Speed:
    """Tokens per second of greedy decoding, one sequence at a time.

    Attributes:
        tokens_per_second: the median of `RUNS` runs, the prompt and the first token left out.
        dtype: of activations, as the checkpoint's own.
        backends: of quantized layers; none where there are no such.
        device, threads: used for the measurement.
    """

    tokens_per_second: float
    dtype: str
    backends: list[str]
    device: str
    threads: int


def decoding_speed(
    checkpoint: Checkpoint, device: torch.device, allow_slow: bool, group: ProcessGroup
) -> Speed:
    """Measure a model as `bench` does, with one sequence. Raises `RequestError` if the model's
    context is too short or there are no kernels, and `NonFiniteError` if its logits are NaN or Inf.
    """
    model = load_model(checkpoint, device=device, allow_slow=allow_slow, group=group)
    with torch.inference_mode():
        decoding = Decoding(model, 1, NEW_TOKENS, None, group=group)
        decoding_rate = measure_rate(NEW_TOKENS, decoding.run, RUNS, group)
    return Speed(
        decoding_rate.median,
        DType.of(model.dtype),
        backend_names(model),
        str(model.device),
        torch.get_num_threads(),
    )


# Tokens of each sequence that are decoded in a run: the last ones of its context.
CONTEXT_NEW = 16
MIN_CONTEXT = PROMPT + CONTEXT_NEW
# For intermediate results, which need memory besides the cache.
SPARE_BYTES = 256_000_000


@dataclass(frozen=True)
class AtContext:
    """The figures of several sequences of one length.

    Attributes:
        context: tokens of each sequence at the end; the last `CONTEXT_NEW` are decoded.
        batch: sequences.
        prompt_rate: tokens a second of prefill, which is the context without the new tokens.
        together: decoding; the tokens of all sequences count.
        cache_bytes: keys and values of all sequences.
        peak_bytes: peak memory meanwhile, including weights, of the process or on the GPU; None if
            the system does not report it.
    """

    context: int
    batch: int
    prompt_rate: float
    together: Rate
    cache_bytes: int
    peak_bytes: int | None

    @property
    def sequence_rate(self) -> float:
        """Compute the tokens a second of one sequence."""
        return self.together.median / self.batch


@dataclass(frozen=True)
class LeftOut:
    """A context that could not be measured, with a number of sequences, or with any if `batch`
    is None; and why.
    """

    context: int
    batch: int | None
    reason: str

    def __str__(self) -> str:
        if self.batch is None:
            sequences = ""
        elif self.batch == 1:
            sequences = " of 1 sequence"
        else:
            sequences = f" of {self.batch} sequences"
        return f"context {self.context}{sequences}: {self.reason}"


def prefill_rates(measurements: Sequence[AtContext]) -> dict[int, Rate]:
    """Summarize prefill in tokens a second by context, with one run for each batch size."""
    rates: dict[int, list[float]] = {}
    # Every row reads one prompt in full, whatever its number of sequences.
    for measurement in measurements:
        rates.setdefault(measurement.context, []).append(measurement.prompt_rate)
    return {context: Rate.of(runs) for context, runs in rates.items()}


def measure_contexts(
    model: Decoder,
    rows: Sequence[tuple[int, int]],
    *,
    compiled: bool | None,
    cache_dtype: torch.dtype,
    runs: int,
    group: ProcessGroup,
    step: Callable[[], None],
) -> tuple[list[AtContext], list[LeftOut]]:
    """Measure the rows that fit in memory; the second list has the others.

    Args:
        rows: tokens of each sequence, including new ones, and the number of sequences that are
            decoded at once.
        step: called before each row.

    Raises:
        RequestError: if several processes share the model and one runs out of memory.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    measurements = []
    left_out = []
    for context, batch in rows:
        step()
        # Free memory differs between processes; all must leave out the same rows.
        reason = group.broadcast_from_rank0(
            _explain_lack_of_memory(model, context, batch, cache_dtype, group.size)
        )
        if reason is not None:
            left_out.append(LeftOut(context, batch, reason))
            continue
        try:
            with enough_memory(None):
                measurements.append(
                    _measure_context(model, context, batch, compiled, cache_dtype, runs, group)
                )
        except RequestError as error:
            # The other processes would wait for this one.
            if group.size > 1:
                raise
            left_out.append(LeftOut(context, batch, error.problem))
    return measurements, left_out


def _measure_context(
    model: Decoder,
    context: int,
    batch: int,
    compiled: bool | None,
    cache_dtype: torch.dtype,
    runs: int,
    group: ProcessGroup,
) -> AtContext:
    device = model.device
    if compiled or device.type == "cuda":
        # Graphs for another cache would count toward the limit.
        torch.compiler.reset()
    # Memory that the row before has freed would count toward this row's peak.
    malloc_trim()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        is_peak_known = True
    else:
        is_peak_known = reset_peak()
    prompt = context - CONTEXT_NEW
    decoding = Decoding(
        model, batch, CONTEXT_NEW, compiled, prompt=prompt, cache_dtype=cache_dtype, group=group
    )
    prompt_rate = prompt / decoding.fill()
    together = measure_rate(batch * CONTEXT_NEW, decoding.run, runs, group)
    peak = read_peak_bytes(device) if is_peak_known else None
    return AtContext(
        context=context,
        batch=batch,
        prompt_rate=prompt_rate,
        together=together,
        cache_bytes=decoding.engine.cache_bytes,
        peak_bytes=peak,
    )


def read_peak_bytes(device: torch.device) -> int:
    """Read the peak memory since it was reset: of the process, or on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_bytes()


def _explain_lack_of_memory(
    model: Decoder, context: int, batch: int, cache_dtype: torch.dtype, processes: int
) -> str | None:
    """Explain why the sequences do not fit in free memory; None if they fit."""
    needed = cache_bytes(model.config, batch, context, cache_dtype)
    free = free_bytes(model.device)
    # Processes on the CPU share one memory; each GPU has its own.
    if model.device.type == "cpu":
        free //= processes
    if needed + SPARE_BYTES <= free:
        return None
    return f"keys and values take {size_text(needed)}, and {size_text(free)} of memory are free"
