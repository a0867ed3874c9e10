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
from quantkit.tensors.finite import finite_logits

PROMPT = 16  # tokens before decoding
# of `decoding_speed`
NEW_TOKENS = 32
RUNS = 3
_PROBE_BYTES = 1 << 29
_MIN_RUN_SECONDS = (
    # Calls are repeated for so long that a wake-up of another process counts little.
    0.1
)
PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Rate:
    """Tokens per second over several runs: the median, the minimum and the maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rate:
        """Runs with these rates."""
        return cls(statistics.median(rates), min(rates), max(rates))

    @property
    def spread(self) -> float:
        """Return the largest distance of a run from the median, as a share of the median."""
        return max(self.most - self.median, self.median - self.least) / self.median


def rate(
    tokens: int, timed_call: Callable[[], float], runs: int, group: ProcessGroup = SINGLE
) -> Rate:
    """Time several runs, after a call that warms up; `timed_call` makes a call for `tokens` and
    returns its seconds. Processes that share the model make as many calls, since the first one's
    time counts for all.
    """
    timed_call()
    return Rate.of([tokens / _mean_seconds(timed_call, group) for _ in range(runs)])


def _mean_seconds(timed_call: Callable[[], float], group: ProcessGroup) -> float:
    """Mean seconds of calls that are repeated until a run is long."""
    calls = 0
    total = 0.0
    while total < _MIN_RUN_SECONDS:
        calls = calls + 1
        total = total + group.broadcast_from_rank0(timed_call())
    return total / calls


class OtherProcesses:
    """Measures the cores that other processes use, from its creation on."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._started, self._process_cpu_start, self._total_cpu_start = (
            time.perf_counter(),
            time.process_time(),
            _cpu_seconds(),
        )

    def cores(self) -> float:
        """Busy cores on average; the load at the start if the system does not count CPU time."""
        now = _cpu_seconds()
        if now is None or self._total_cpu_start is None:
            return self._load
        others = now - self._total_cpu_start - (time.process_time() - self._process_cpu_start)
        return max(0.0, others / (time.perf_counter() - self._started))


def _cpu_seconds() -> float | None:
    """CPU time of all processes and of other guests of the host since boot; None if not counted."""
    try:
        user, nice, system, _idle, _iowait, *rest = map(
            int, PROC_STAT.read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def use_threads(count: int = 1) -> Iterator[None]:
    """Compute on one thread, or a number of them. Several are slower for a small model, much slower
    on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _random(model: Decoder, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(
        model.device
    )


def prefill_once(
    model: Decoder, length: int, compiled: bool | None, cache_dtype: torch.dtype | None = None
) -> None:
    """A random prompt, up to its first new token.

    Raises `NonFiniteError` if the model's logits are NaN or Inf.
    """
    engine = Engine(model, length, cache_dtype=cache_dtype, compiled=compiled)
    finite_logits(_read(engine, 0, _random(model, 1, length)[0])).argmax().item()


def _read(engine: Engine, slot: int, prompt: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Read a prompt [T] into a slot from a position on, a chunk at a time; logits [1, V] of the
    next token.
    """
    length = len(prompt)
    logits = torch.empty(0)
    for begin in range(start, length, engine.chunk):
        positions = range(begin, min(begin + engine.chunk, length))
        if positions.stop == length:
            wanted = [len(positions) - 1]
        else:
            wanted = []
        logits = engine.step(
            prompt[begin : positions.stop], [slot] * len(positions), positions, wanted
        )
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
        """In a run, `new` tokens of each sequence are decoded after `prompt` ones, `PROMPT` at
        least. Raises `RequestError` if these exceed the model's context, or the cache does not fit
        in memory.
        """
        self.engine = Engine(
            model, prompt + new, slots=batch, cache_dtype=cache_dtype, compiled=compiled
        )
        self._new, self._prompts, self._group = new, _random(model, batch, prompt), group
        self._prompts[:, :-PROMPT] = self._prompts[0, :-PROMPT].clone()
        self._first: torch.Tensor | None = None

    def fill(self) -> float:
        """Read all prompts into their slots; returns the seconds of the first one. Raises
        `NonFiniteError` if the model's logits are NaN or Inf.
        """
        whole = self._prompts[0]
        chunk = self.engine.chunk
        # Each kind of step once.
        warm_up = 2 * chunk + (len(whole) % chunk or chunk)
        _read(self.engine, 0, whole[:warm_up]).argmax().item()
        logits: list[torch.Tensor] = []

        def read() -> None:
            logits[:] = [_read(self.engine, 0, whole)]
            # Waits until the GPU is done.
            logits[0].argmax().item()

        taken = _mean_seconds(partial(seconds, read), self._group)
        shared = len(whole) - PROMPT
        for slot, prompt in enumerate(self._prompts[1:], 1):
            self.engine.copy_prefix(0, slot, shared)
            logits.append(_read(self.engine, slot, prompt, shared))
        self._first = finite_logits(torch.cat(logits)).argmax(-1)
        return taken

    def run(self) -> float:
        """Seconds that the new tokens take after the prompts, which are read first if necessary."""
        if self._first is None:
            self.fill()
        assert self._first is not None
        tokens = self._first
        length = self._prompts.shape[1]
        slots = range(len(self._prompts))
        tokens.tolist()
        self.engine.last[: len(slots)] = tokens
        started = time.perf_counter()
        for position in range(length, length + self._new):
            pending = self.engine.decode(slots, [position] * len(slots))
        pending.read()
        return time.perf_counter() - started


def weight_bytes(model: Decoder) -> int:
    """Bytes read for each token: all weights except the embedding, unless it is tied to the head,
    and of a mixture's experts those of one token.
    """
    if model.config.tied_embeddings:
        left_out = 0
    else:
        left_out = count_loaded_bytes(model.model.embed_tokens)
    if model.config.experts is not None:
        unused = 1 - model.config.experts.per_token / model.config.experts.count
        experts = [part.experts for part in model.modules() if isinstance(part, Experts)]
        left_out += round(sum(unused * count_loaded_bytes(expert) for expert in experts))
    return count_loaded_bytes(model) - left_out


def count_loaded_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a model or a part of it, in the layout of the kernels."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def bandwidth(device: torch.device) -> float:
    """Bytes a second: the best of several sums over a large tensor, or of several copies on a
    GPU.
    """
    probe = torch.ones(_PROBE_BYTES // 4, device=device)
    if device.type != "cuda":
        return probe.nbytes / min(seconds(probe.sum) for _ in range(5))
    copy = torch.empty_like(probe)

    def copy_probe() -> None:
        copy.copy_(probe)
        torch.cuda.synchronize(device)

    return 2 * probe.nbytes / min(seconds(copy_probe) for _ in range(10))


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
        found = rate(NEW_TOKENS, Decoding(model, 1, NEW_TOKENS, None, group=group).run, RUNS, group)
    backends = backend_names(model)
    threads = torch.get_num_threads()
    return Speed(found.median, DType.of(model.dtype), backends, str(model.device), threads)


# Tokens of each sequence that are decoded in a run: the last ones of its context.
CONTEXT_NEW = 16
MIN_CONTEXT = PROMPT + CONTEXT_NEW
SPARE_BYTES = 256_000_000  # for intermediate results


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
        """Tokens a second of one sequence."""
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
            row = ""
        else:
            row = f" of {self.batch} {'sequence' if self.batch == 1 else 'sequences'}"
        return f"context {self.context}{row}: {self.reason}"


def prefill_rates(measurements: Sequence[AtContext]) -> dict[int, Rate]:
    """Prefill in tokens a second by context, with one run for each batch size."""
    rates: dict[int, list[float]] = {}
    for one in measurements:
        rates.setdefault(one.context, []).append(one.prompt_rate)
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
    found = []
    left_out = []
    for context, batch in rows:
        step()
        reason = group.broadcast_from_rank0(
            _too_large(model, context, batch, cache_dtype, group.size)
        )
        if reason is not None:
            left_out.append(LeftOut(context, batch, reason))
            continue
        try:
            with enough_memory(None):
                found.append(
                    _measure_context(model, context, batch, compiled, cache_dtype, runs, group)
                )
        except RequestError as error:
            if group.size > 1:  # the others would wait
                raise
            left_out.append(LeftOut(context, batch, error.problem))
    return found, left_out


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
    malloc_trim()
    if on_gpu := device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    counted = on_gpu or reset_peak()
    prompt = context - CONTEXT_NEW
    decoding = Decoding(
        model, batch, CONTEXT_NEW, compiled, prompt=prompt, cache_dtype=cache_dtype, group=group
    )
    prompt_rate = prompt / decoding.fill()
    together = rate(batch * CONTEXT_NEW, decoding.run, runs, group)
    peak = max_bytes(device) if counted else None
    return AtContext(context, batch, prompt_rate, together, decoding.engine.cache_bytes, peak)


def max_bytes(device: torch.device) -> int:
    """Peak memory since it was reset: of the process, or on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_bytes()


def _too_large(
    model: Decoder, context: int, batch: int, cache_dtype: torch.dtype, processes: int
) -> str | None:
    """Why the sequences do not fit in free memory; None if they fit."""
    needed = cache_bytes(model.config, batch, context, cache_dtype)
    free = free_bytes(model.device)
    if model.device.type == "cpu":
        free //= processes
    if needed + SPARE_BYTES <= free:
        return None
    return f"keys and values take {size_text(needed)}, and {size_text(free)} of memory are free"
