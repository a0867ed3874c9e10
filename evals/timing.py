"""Timing a model: prefill, decoding, the bandwidth of its weights."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantkit.distributed.group import ProcessGroup
from quantkit.evals.models import backend_names
from quantkit.evals.texts import token_ids
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Decoder
from quantkit.model.feed_forward import Experts
from quantkit.model.load import load_model
from quantkit.runtime.captured import LateTokens
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import finite_logits
from quantkit.text.tokenizer import Tokenizer

PROMPT = 16  # tokens before decoding
PROMPT_TOKENS = 16
NEW_TOKENS = 32
RUNS = 3
_PROBE_BYTES = 1 << 29
_MIN_RUN_SECONDS = 0.1  # of a run, which is repeated until then: a wake-up of another process counts little in it
_PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Rate:
    """Tokens per second over several runs: the median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rate:
        """Runs with these rates."""
        return cls(statistics.median(rates), min(rates), max(rates))

    @property
    def spread(self) -> float:
        """How far the furthest run is from the median, as a share of it."""
        return max(self.most - self.median, self.median - self.least) / self.median


def rate(tokens: int, taken: Callable[[], float], runs: int) -> Rate:
    """Time several runs, after a call that warms up.

    Args:
        tokens: of a call.
        taken: calls, and gives the seconds that count.
    """
    taken()
    rates = []
    for _ in range(runs):
        rates.append(tokens / _mean_seconds(taken))
    return Rate.of(rates)


def _mean_seconds(taken: Callable[[], float]) -> float:
    """That a call takes, which is repeated until a run is long."""
    calls, total = 0, 0.0
    while total < _MIN_RUN_SECONDS:
        calls, total = calls + 1, total + taken()
    return total / calls


class OtherProcesses:
    """How much of the machine other processes use, from here on."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._started, self._own, self._all = time.perf_counter(), time.process_time(), _cpu_seconds()

    def cores(self) -> float:
        """Cores that they have kept busy on average; where the system does not count it, its load at the start."""
        now = _cpu_seconds()
        if now is None or self._all is None:
            return self._load
        others = now - self._all - (time.process_time() - self._own)
        return max(0.0, others / (time.perf_counter() - self._started))


def _cpu_seconds() -> float | None:
    """That all processes, and a host's other guests, have taken since the machine started; None if not counted."""
    try:
        user, nice, system, _idle, _iowait, *rest = map(int, _PROC_STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def seconds(run: Callable[[], object]) -> float:
    """That a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _random(model: Decoder, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def prefill_once(
    model: Decoder, length: int, compiled: bool | None, cache_dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    """A random prompt, up to its first new token.

    Raises:
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    engine = Engine(model, length, cache_dtype=cache_dtype, compiled=compiled)
    finite_logits(_read(engine, 0, _random(model, 1, length)[0])).argmax().item()


def _read(engine: Engine, slot: int, prompt: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Let a slot read a prompt [T] from a position on, a chunk at a time; logits [1, V] of what follows."""
    length, logits = len(prompt), torch.empty(0)
    for begin in range(start, length, engine.chunk):
        positions = range(begin, min(begin + engine.chunk, length))
        wanted = [len(positions) - 1] if positions.stop == length else []
        logits = engine.step(prompt[begin : positions.stop], [slot] * len(positions), positions, wanted)
    return logits


class Decoding:
    """Greedy decoding of several sequences after a random prompt, as often as it is asked for.

    The sequences' prompts differ in their last `PROMPT` tokens alone: one is read, the others begin with a copy of it.
    """

    def __init__(
        self, model: Decoder, batch: int, new: int, compiled: bool | None, *, prompt: int = PROMPT,
        cache_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            new: tokens of each, in a run.
            prompt: tokens of each before them, `PROMPT` at least.

        Raises:
            RequestError: if that exceeds the model's context, or the cache does not fit in memory.
        """
        self.engine = Engine(model, prompt + new, slots=batch, cache_dtype=cache_dtype, compiled=compiled)
        self._new, self._prompts = new, _random(model, batch, prompt)
        self._prompts[:, :-PROMPT] = self._prompts[0, :-PROMPT].clone()
        self._first: torch.Tensor | None = None

    def fill(self) -> float:
        """Seconds that the first sequence's prompt took; the slots hold all of them afterwards.

        Raises:
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        whole, chunk = self._prompts[0], self.engine.chunk
        warm_up = 2 * chunk + (len(whole) % chunk or chunk)  # each kind of step once
        _read(self.engine, 0, whole[:warm_up]).argmax().item()
        logits: list[torch.Tensor] = []

        def read() -> None:
            logits[:] = [_read(self.engine, 0, whole)]
            logits[0].argmax().item()  # all that was asked of a GPU is done

        taken, shared = _mean_seconds(partial(seconds, read)), len(whole) - PROMPT
        for slot, prompt in enumerate(self._prompts[1:], 1):
            self.engine.copy_prefix(0, slot, shared)
            logits.append(_read(self.engine, slot, prompt, shared))
        self._first = finite_logits(torch.cat(logits)).argmax(-1)
        return taken

    def run(self) -> float:
        """Seconds that the new tokens took after the prompts, which are read if they have not been."""
        if self._first is None:
            self.fill()
        assert self._first is not None
        tokens, length, slots = self._first, self._prompts.shape[1], range(len(self._prompts))
        tokens.tolist()
        self.engine.last[: len(slots)] = tokens
        started = time.perf_counter()
        drawn: LateTokens | None = None
        for position in range(length, length + self._new):
            drawn = self.engine.decode(slots, [position] * len(slots))
            if drawn is None:
                logits = self.engine.step(tokens, slots, [position] * len(slots), slots)
                with self.engine.model.ops.single_threaded():
                    tokens = logits.argmax(-1)
        if drawn is None:
            tokens.tolist()
        else:
            drawn.read()
        return time.perf_counter() - started


def weight_bytes(model: Decoder) -> int:
    """Of what is read for each token: all weights but the embedding, unless it is the head as well, and of a mixture's
    experts as many as take a token."""
    left_out = 0 if model.config.tied_embeddings else _bytes(model.model.embed_tokens)
    if model.config.experts is not None:
        unused = 1 - model.config.experts.per_token / model.config.experts.count
        left_out += round(sum(unused * _bytes(part.experts) for part in model.modules() if isinstance(part, Experts)))
    return loaded_bytes(model) - left_out


def loaded_bytes(model: Decoder) -> int:
    """Of all weights, as the kernels have them."""
    return _bytes(model)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


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


@dataclass(frozen=True)
class Speed:
    """Tokens per second of greedy decoding, one sequence at a time.

    Attributes:
        tokens_per_second: the median of `RUNS` runs, the prompt and the first token left out.
        dtype: of activations, as the checkpoint's own.
        backends: of quantized layers; none where there are no such.
        device, threads: what it ran on.
    """

    tokens_per_second: float
    dtype: str
    backends: list[str]
    device: str
    threads: int


def decoding_speed(
    checkpoint: Checkpoint, tokenizer: Tokenizer, text: str, device: torch.device, group: ProcessGroup
) -> Speed:
    """Let a model continue the first tokens of a text, past any end token.

    Raises:
        RequestError: if the model's context is too short.
        NonFiniteError: if its logits are NaN or Inf.
    """
    model = load_model(checkpoint, device=device, group=group)
    model.config = replace(model.config, eos_token_ids=())
    prompt = token_ids(tokenizer, text)[:PROMPT_TOKENS]
    rates = []
    for _ in range(RUNS):
        tokens = generate(model, prompt, max_new_tokens=NEW_TOKENS + 1)
        next(tokens)
        started = time.perf_counter()
        count = sum(1 for _ in tokens)
        rates.append(count / (time.perf_counter() - started))
    return Speed(
        statistics.median(rates), DType.of(model.dtype), backend_names(model), str(model.device),
        torch.get_num_threads(),
    )  # fmt: skip
