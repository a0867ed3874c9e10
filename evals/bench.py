"""How fast models run: prefill, decoding, loading, and what memory allows."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.evals.models import backend_names
from quantkit.evals.synthetic import synthetic
from quantkit.evals.timing import (
    PROMPT,
    Decoding,
    OtherProcesses,
    Rate,
    bandwidth,
    prefill_once,
    rate,
    seconds,
    weight_bytes,
)
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown
from quantkit.memory import enough_memory, resident_bytes, total_bytes
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
        dtype: of the cache, and of activations in prefill.
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

    @property
    def share_of_bandwidth(self) -> float | None:
        """Of the bandwidth, what the weights alone take up in decoding one sequence; None if not measured."""
        return self.decode[1].median * self.weight_bytes / self.bandwidth if 1 in self.decode else None

    @property
    def busy(self) -> bool:
        """Whether other processes took cores that this one needed."""
        needed = self.threads if self.device == "cpu" else 1
        return self.other_load is not None and self.other_load + needed > self.cores + _IDLE_CORES

    def to_json(self) -> dict[str, Any]:
        """All figures, in tokens a second, seconds and bytes."""
        return {**asdict(self), "share_of_bandwidth": self.share_of_bandwidth, "busy": self.busy}


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
        return [_measure(jobs[0], group, progress)]
    return [_measured_apart(job, progress) for job in jobs]


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


def _measured_apart(job: Job, progress: Progress) -> Bench:
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
    steps = count()

    def step() -> None:
        progress(f"bench {name}", next(steps), 3 + len(job.prompts) + len(job.batches), "measurements")

    step()
    started = time.perf_counter()
    device = group.device or usable_device(job.device)
    model = load_model(checkpoint, device=device, backend=job.backend, group=group)
    load_seconds = time.perf_counter() - started
    step()
    others = OtherProcesses()
    firsts = [seconds(partial(prefill_once, model, PROMPT, job.compiled)) for _ in range(1 + job.runs)]
    prefill = {}
    for length in job.prompts:
        step()
        prefill[length] = rate(length, partial(seconds, partial(prefill_once, model, length, job.compiled)), job.runs)
    decode = {}
    for batch in job.batches:
        step()
        decode[batch] = rate(batch * NEW, Decoding(model, batch, NEW, job.compiled).run, job.runs)
    other_load = others.cores() if group.size == 1 else None  # the group's own processes are among the others
    peak, threads, read = _peak_bytes(model.device), torch.get_num_threads(), weight_bytes(model)
    step()
    one_thread = None
    if model.device.type == "cpu" and job.threads is None and group.size == 1 and 1 in decode:
        one_thread = _on_one_thread(model, job) if threads > 1 and read < _FEW_BYTES else None
    found = Bench(
        name, bool(schemes(checkpoint)), backend_names(model), DType.of(model.dtype), _device_name(model.device),
        threads, os.cpu_count() or threads, other_load, load_seconds, (firsts[0], statistics.median(firsts[1:])),
        prefill, decode, one_thread, read, bandwidth(model.device), peak,
    )  # fmt: skip
    step()
    return found


def _on_one_thread(model: Decoder, job: Job) -> Rate:
    """Decoding one sequence on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return rate(NEW, Decoding(model, 1, NEW, job.compiled).run, job.runs)
    finally:
        torch.set_num_threads(before)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())
