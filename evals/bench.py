"""How fast models run: prefill, decoding, loading, and what memory allows."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.evals import contexts
from quantkit.evals.contexts import AtContext, max_bytes
from quantkit.evals.models import backend_names
from quantkit.evals.synthetic import synthetic
from quantkit.evals.timing import (
    PROMPT,
    Decoding,
    OtherProcesses,
    Rate,
    bandwidth,
    loaded_bytes,
    prefill_once,
    rate,
    seconds,
    weight_bytes,
)
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown
from quantkit.memory import enough_memory, total_bytes
from quantkit.model.cache import cache_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.device import usable_device
from quantkit.model.load import load_model
from quantkit.progress import Progress, silent
from quantkit.tensors.dtypes import DType

NEW = 48  # tokens decoded in a run
RUNS = 5
_MOST_RUNS = 10_000
_MOST_THREADS = 256
_FEW_BYTES = 100_000_000  # of weights: threads that wait for each other may take longer than one that reads them all
_IDLE_CORES = 0.3  # that others may keep busy beside the threads that compute


@dataclass(frozen=True)
class Bench:
    """What one model did, in a process of its own.

    Attributes:
        name: the folder's, or the shape's.
        quantized: whether any layer is.
        backends: of the quantized layers.
        dtype: of activations in prefill.
        device: that computed, by its maker's name for a GPU.
        threads: of the CPU.
        cores: that the machine has.
        other_load: of these, how many other processes kept busy meanwhile; None if not measured.
        load_seconds: from files to a model ready to run.
        first_token_seconds: from a prompt of `PROMPT` tokens to its first new token, at the first
            attempt, and the median of later ones.
        prefill: by tokens of the prompt.
        decode: by batch size; all sequences' tokens count.
        one_thread: one sequence on a thread alone, where the weights are few; None if not measured.
        weight_bytes: read for each step of decoding.
        bandwidth: bytes a second that the same threads read from memory, or that the GPU copies, read and
            written together; measured afterwards.
        peak_bytes: memory at its peak, the process's or what it took up on the GPU.
        cache_dtype: of keys and values.
        loaded_bytes: of all weights in memory.
        at_contexts: decoding with long contexts, where that was asked for.
        left_out: what of these could not be measured, and why.
        price_per_hour: of all that computes here, in any currency; None if not given.
    """

    name: str
    quantized: bool
    backends: list[str]
    dtype: str
    device: str
    threads: int
    cores: int
    other_load: float | None
    load_seconds: float
    first_token_seconds: tuple[float, float]
    prefill: dict[int, Rate]
    decode: dict[int, Rate]
    one_thread: Rate | None
    weight_bytes: int
    bandwidth: float
    peak_bytes: int
    cache_dtype: str
    loaded_bytes: int
    at_contexts: list[AtContext] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    price_per_hour: float | None = None

    @property
    def share_of_bandwidth(self) -> float | None:
        """Of the bandwidth, what the weights alone take up in decoding one sequence; None if not measured."""
        return self.decode[1].median * self.weight_bytes / self.bandwidth if 1 in self.decode else None

    @property
    def busy(self) -> bool:
        """Whether other processes took cores that this one needed."""
        needed = self.threads if self.device == "cpu" else 1
        return self.other_load is not None and self.other_load + needed > self.cores + _IDLE_CORES

    def cost(self, tokens_per_second: float) -> float | None:
        """Of a thousand tokens at such a rate; None without a price."""
        return None if self.price_per_hour is None else 1000 * self.price_per_hour / (3600 * tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """All figures, in tokens a second, seconds and bytes; what a thousand tokens cost, where there is a price."""
        prefill_at = contexts.prefill_rates(self.at_contexts)
        found = {
            **asdict(self), "share_of_bandwidth": self.share_of_bandwidth, "busy": self.busy,
            "at_contexts": [{**asdict(one), "each": one.each} for one in self.at_contexts],
            "prefill_at_contexts": {context: asdict(of) for context, of in prefill_at.items()},
        }  # fmt: skip
        if self.price_per_hour is not None:
            found["cost_of_thousand_tokens"] = {
                name: {key: self.cost(of.median) for key, of in rates.items()}
                for name, rates in (
                    ("prefill", self.prefill), ("decode", self.decode), ("prefill_at_contexts", prefill_at)
                )
            }  # fmt: skip
            for one, told in zip(self.at_contexts, found["at_contexts"], strict=True):
                told["cost_of_thousand_tokens"] = self.cost(one.together.median)
        return found


@dataclass(frozen=True)
class Job:
    """What to measure of one model, a folder or a named shape with schemes; by its own name where none is given."""

    path: Path | None
    shape: str | None
    scheme: str | None
    head: str | None
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: int | None
    runs: int
    backend: str | None
    compiled: bool | None
    device: str | None = None
    name: str | None = None
    contexts: tuple[int, ...] = ()
    int8_cache: bool = False
    price_per_hour: float | None = None

    def checkpoint(self) -> Checkpoint:
        """
        Raises:
            QuantkitError: if it cannot be opened.
        """
        if self.path is not None:
            return open_checkpoint(self.path)
        assert self.shape is not None
        return synthetic(self.shape, self.scheme, self.head)


def bench(jobs: Sequence[Job], *, group: ProcessGroup = SINGLE, progress: Progress = silent) -> list[Bench]:
    """Measure models one after the other, each in a fresh process.

    Args:
        group: the processes that share the model, of which there is then one, measured in these
            processes; memory is each one's own.

    Raises:
        RequestError: if a prompt, with what is decoded after it, exceeds a model's context, or processes
            are to share several models.
        QuantkitError: if a model cannot be opened or loaded.
        NonFiniteError: if its logits are NaN or Inf.
    """
    for job in jobs:
        require_room(job)
    if group.size > 1 and len(jobs) > 1:
        raise RequestError("several processes measure one model at a time", found=len(jobs))
    found = [_measure(job, group, progress) if group.size > 1 else _measured_apart(job, progress) for job in jobs]
    if any(job.contexts for job in jobs) and not any(one.at_contexts for one in found):
        raise RequestError(f"no context could be measured: {found[0].left_out[-1]}", path=jobs[0].path)
    return found


def require_room(job: Job) -> None:
    """Check what is asked for, before anything is loaded.

    Raises:
        RequestError: for numbers that are out of range, or more tokens than the context or the memory hold, in each of
            several contexts.
        QuantkitError: if the model cannot be opened.
    """
    _require_range(job)
    checkpoint, shortest = job.checkpoint(), min(job.contexts, default=contexts.LEAST)
    config = checkpoint.config
    needed = max((*job.prompts, PROMPT + NEW, shortest))
    if needed > config.max_context:
        raise RequestError(
            "the model's context is too short", path=job.path or checkpoint.path, found=config.max_context,
            expected=f"at least {shown(needed)}",
        )  # fmt: skip
    together = max(job.batches, default=0) * (PROMPT + NEW), min(job.batches, default=0) * shortest
    positions = max((*job.prompts, *together))
    cache = cache_bytes(config, 1, positions, torch.int8)  # the least that they take up
    if cache > (memory := total_bytes()):
        raise RequestError(
            "keys and values of so many tokens do not fit in memory", path=job.path,
            found=f"{shown(positions)} tokens", expected=f"at most {memory * positions // cache}",
        )  # fmt: skip


def _require_range(job: Job) -> None:
    """
    Raises:
        RequestError: for numbers that no model can do with.
    """
    least = min((*job.prompts, *job.batches, job.runs), default=0)
    if least < 1 or not (job.prompts or job.batches):
        raise RequestError("prompt lengths, batches and runs must be at least 1", found=shown(least))
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    for what, number, limit in (("runs", job.runs, _MOST_RUNS), ("threads", job.threads, most)):
        if number is not None and not 1 <= number <= limit:
            raise RequestError(f"{what} are out of range", found=shown(number), expected=f"1 to {limit}")
    if job.contexts and (not job.batches or min(job.contexts) < contexts.LEAST):
        raise RequestError(
            f"contexts must be at least {contexts.LEAST}, of batches", found=shown(min(job.contexts))
        )  # fmt: skip
    if job.price_per_hour is not None and not 0 < job.price_per_hour < math.inf:
        raise RequestError("no price", found=shown(job.price_per_hour), expected="an amount above 0")


def _measured_apart(job: Job, progress: Progress) -> Bench:
    """
    Raises:
        RequestError: if the process is ended from outside, as by a system that runs out of memory.
        QuantkitError: as `_measure` does.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(job, sender), daemon=True)
    _start(process)
    sender.close()  # so that the process's end is the end of what can be received
    try:
        while isinstance(told := receiver.recv(), tuple):
            progress(*told)
    except EOFError as error:
        raise RequestError(
            "the process that measures was ended", path=job.path, found=job.shape,
            hint="it may have run out of memory; ask for fewer tokens",
        ) from error  # fmt: skip
    finally:
        process.terminate()
        process.join()
        receiver.close()
    if isinstance(told, Exception):
        raise told
    assert isinstance(told, Bench)
    return told


def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach: who has started it ends it."""
    resource_tracker.ensure_running()  # here, since it lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(job: Job, sender: Connection) -> None:
    """What the process does; how far it is, its result and errors come as values."""

    def progress(*now: str | int) -> None:
        sender.send(now)

    try:
        sender.send(_measure(job, SINGLE, progress))
    except QuantkitError as error:
        sender.send(error)
    except Exception as error:  # of any kind, which might not go through a pipe
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))


@torch.inference_mode()
def _measure(job: Job, group: ProcessGroup, progress: Progress) -> Bench:
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with enough_memory(job.path):
        return _measure_model(job, group, progress)


def _measure_model(job: Job, group: ProcessGroup, progress: Progress) -> Bench:
    checkpoint = job.checkpoint()
    name = job.name or checkpoint.path.resolve().name
    rows = contexts.rows(job.contexts, job.batches, checkpoint.config.max_context)
    steps, measurements = count(), 3 + len(job.prompts) + len(job.batches) + len(rows)

    def step() -> None:
        progress(f"bench {name}", next(steps), measurements, "measurements")

    step()
    started = time.perf_counter()
    device = group.device or usable_device(job.device)
    model = load_model(checkpoint, device=device, backend=job.backend, group=group)
    load_seconds = time.perf_counter() - started
    step()
    others, cache = OtherProcesses(), torch.int8 if job.int8_cache else model.dtype
    firsts = [seconds(partial(prefill_once, model, PROMPT, job.compiled, cache)) for _ in range(1 + job.runs)]
    prefill = {}
    for length in job.prompts:
        step()
        once = partial(prefill_once, model, length, job.compiled, cache)
        prefill[length] = rate(length, partial(seconds, once), job.runs)
    decode = {}
    for batch in job.batches:
        step()
        decoding = Decoding(model, batch, NEW, job.compiled, cache_dtype=cache)
        decode[batch] = rate(batch * NEW, decoding.run, job.runs)
        del decoding
    peak = max_bytes(model.device)
    at_contexts, left_out = contexts.measure(
        model, rows, compiled=job.compiled, cache_dtype=cache, runs=job.runs, group=group, step=step
    )
    other_load = others.cores() if group.size == 1 else None  # the group's own processes are among the others
    threads, read = torch.get_num_threads(), weight_bytes(model)
    step()
    one_thread = None
    if model.device.type == "cpu" and job.threads is None and group.size == 1 and 1 in decode:
        one_thread = _on_one_thread(model, job, cache) if threads > 1 and read < _FEW_BYTES else None
    found = Bench(
        name, bool(schemes(checkpoint)), backend_names(model), DType.of(model.dtype), _device_name(model.device),
        threads, os.cpu_count() or threads, other_load, load_seconds, (firsts[0], statistics.median(firsts[1:])),
        prefill, decode, one_thread, read, bandwidth(model.device),
        max([peak, *(one.peak_bytes or 0 for one in at_contexts)]), DType.of(cache), loaded_bytes(model), at_contexts,
        [*contexts.too_long(job.contexts, checkpoint.config.max_context), *left_out], job.price_per_hour,
    )  # fmt: skip
    step()
    return found


def _on_one_thread(model: Decoder, job: Job, cache: torch.dtype) -> Rate:
    """Decoding one sequence on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return rate(NEW, Decoding(model, 1, NEW, job.compiled, cache_dtype=cache).run, job.runs)
    finally:
        torch.set_num_threads(before)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
