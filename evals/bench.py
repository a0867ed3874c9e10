"""How fast models run: prefill, decoding, loading, and what memory allows."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.evals.models import backend_names
from quantkit.evals.synthetic import synthetic
from quantkit.evals.timing import PROMPT, Decoding, bandwidth, prefill_once, seconds, weight_bytes
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown
from quantkit.memory import enough_memory, resident_bytes, total_bytes
from quantkit.model.device import usable_device
from quantkit.model.load import load_model
from quantkit.progress import Progress, silent
from quantkit.tensors.dtypes import DType

NEW = 48  # tokens decoded in a run
RUNS = 5
_MOST_RUNS = 10_000
_MOST_THREADS = 256


@dataclass(frozen=True)
class Rate:
    """Tokens per second over several runs: the median, the least and the most."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Bench:
    """What one model did, in a process of its own.

    Attributes:
        name: the folder's, or the shape's.
        quantized: whether any layer is.
        backends: of the quantized layers.
        dtype: of the cache, and of activations in prefill.
        device: that computed, by its maker's name for a GPU.
        threads: of the CPU.
        load_seconds: from files to a model ready to run.
        first_token_seconds: from a prompt of `PROMPT` tokens to its first new token, at the first
            attempt, and the median of later ones.
        prefill: by tokens of the prompt.
        decode: by batch size; all sequences' tokens count.
        weight_bytes: read for each step of decoding.
        bandwidth: bytes a second that the same threads read from memory, or that the GPU copies, read and
            written together; measured afterwards.
        peak_bytes: memory at its peak, the process's or what it took up on the GPU.
    """

    name: str
    quantized: bool
    backends: list[str]
    dtype: str
    device: str
    threads: int
    load_seconds: float
    first_token_seconds: tuple[float, float]
    prefill: dict[int, Rate]
    decode: dict[int, Rate]
    weight_bytes: int
    bandwidth: float
    peak_bytes: int

    @property
    def share_of_bandwidth(self) -> float | None:
        """Of the bandwidth, what the weights alone take up in decoding one sequence; None if not measured."""
        return self.decode[1].median * self.weight_bytes / self.bandwidth if 1 in self.decode else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_bandwidth": self.share_of_bandwidth}


@dataclass(frozen=True)
class Job:
    """What to measure of one model: a folder, or a named shape with schemes."""

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
    if group.size > 1:
        if len(jobs) > 1:
            raise RequestError("several processes measure one model at a time", found=len(jobs))
        return [_measure(jobs[0], group)]
    found = []
    for index, job in enumerate(jobs):
        progress("bench", index, len(jobs), "models")
        found.append(_measured_apart(job))
    progress("bench", len(jobs), len(jobs), "models")
    return found


def slower_than_floats(found: Sequence[Bench]) -> list[str]:
    """A line for each quantized model that decodes slower than a float one measured with it."""
    floats = [one for one in found if not one.quantized and 1 in one.decode]
    return [
        f"{one.name} decodes slower than {other.name}, which is not quantized"
        for one in found
        for other in floats
        if one.quantized and 1 in one.decode and one.decode[1].median < other.decode[1].median
    ]


def require_room(job: Job) -> None:
    """Check what is asked for, before anything is loaded.

    Raises:
        RequestError: for numbers that are out of range, or more tokens than the context or the memory hold.
        QuantkitError: if the model cannot be opened.
    """
    least = min((*job.prompts, *job.batches, job.runs), default=0)
    if least < 1 or not (job.prompts or job.batches):
        raise RequestError("prompt lengths, batches and runs must be at least 1", found=shown(least))
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    for what, number, limit in (("runs", job.runs, _MOST_RUNS), ("threads", job.threads, most)):
        if number is not None and not 1 <= number <= limit:
            raise RequestError(f"{what} are out of range", found=shown(number), expected=f"1 to {limit}")
    config = job.checkpoint().config
    needed = max((*job.prompts, PROMPT + NEW))
    if needed > config.max_context:
        raise RequestError(
            "the model's context is too short", path=job.path, found=config.max_context,
            expected=f"at least {shown(needed)}",
        )  # fmt: skip
    positions = max((*job.prompts, *(batch * (PROMPT + NEW) for batch in job.batches)))
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions  # at a byte each
    if cache > (memory := total_bytes()):
        raise RequestError(
            "keys and values of so many tokens do not fit in memory", path=job.path,
            found=f"{shown(positions)} tokens", expected=f"at most {memory * positions // cache}",
        )  # fmt: skip


def _measured_apart(job: Job) -> Bench:
    """
    Raises:
        RequestError: if the process is ended from outside, as by a system that runs out of memory.
        QuantkitError: as `_measure` does.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(job, sender), daemon=True)
    process.start()
    sender.close()  # so that the process's end is the end of what can be received
    try:
        result: Bench | Exception = receiver.recv()
    except EOFError as error:
        raise RequestError(
            "the process that measures was ended", path=job.path, found=job.shape,
            hint="it may have run out of memory; ask for fewer tokens",
        ) from error  # fmt: skip
    finally:
        process.terminate()
        process.join()
        receiver.close()
    if isinstance(result, Exception):
        raise result
    return result


def _tell(job: Job, sender: Connection) -> None:
    """What the process does; errors come as values."""
    try:
        sender.send(_measure(job))
    except QuantkitError as error:
        sender.send(error)
    except Exception as error:  # of any kind, which might not go through a pipe
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))


@torch.inference_mode()
def _measure(job: Job, group: ProcessGroup = SINGLE) -> Bench:
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with enough_memory(job.path):
        return _measure_model(job, group)


def _measure_model(job: Job, group: ProcessGroup) -> Bench:
    checkpoint = job.checkpoint()
    started = time.perf_counter()
    device = group.device or usable_device(job.device)
    model = load_model(checkpoint, device=device, backend=job.backend, group=group)
    load_seconds = time.perf_counter() - started
    firsts = [seconds(partial(prefill_once, model, PROMPT, job.compiled)) for _ in range(1 + job.runs)]
    prefill = {}
    for length in job.prompts:
        prefill[length] = _rate(length, partial(seconds, partial(prefill_once, model, length, job.compiled)), job.runs)
    decode = {}
    for batch in job.batches:
        decode[batch] = _rate(batch * NEW, Decoding(model, batch, NEW, job.compiled).run, job.runs)
    peak = _peak_bytes(model.device)
    return Bench(
        checkpoint.path.name, bool(schemes(checkpoint)), backend_names(model), DType.of(model.dtype),
        _device_name(model.device), torch.get_num_threads(), load_seconds, (firsts[0], statistics.median(firsts[1:])),
        prefill, decode, weight_bytes(model), bandwidth(model.device), peak,
    )  # fmt: skip


def _rate(tokens: int, taken: Callable[[], float], runs: int) -> Rate:
    rates = [tokens / taken() for _ in range(1 + runs)][1:]
    return Rate(statistics.median(rates), min(rates), max(rates))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())
