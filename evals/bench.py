"""Measure the speed of models: prefill, decoding, loading; and their memory."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from quantkit.base.arguments import (
    as_integer,
    as_number,
    as_paths,
    is_several,
    require_flags,
    require_instance,
    wrong_type,
)
from quantkit.base.json_values import format_value
from quantkit.base.memory import enough_memory, total_bytes
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.processors import validate_threads
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError
from quantkit.evals import timing
from quantkit.evals.bench_result import Bench
from quantkit.evals.bench_results import BenchResult
from quantkit.evals.models import backend_names
from quantkit.evals.synthetic import synthetic
from quantkit.evals.table import parse_named_paths, short_names
from quantkit.evals.timing import MIN_CONTEXT, PROMPT, Decoding, LeftOut, measure_rate
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels import dispatch
from quantkit.model.cache import cache_bytes
from quantkit.model.device import free_bytes, resolve_device
from quantkit.model.load import (
    choose_default_dtype,
    load_model,
    measure_run_memory,
    require_kernels,
)
from quantkit.model.run_memory import RunMemory
from quantkit.tensors.dtypes import DType

_log = logging.getLogger(__name__)

# Tokens decoded in a run.
NEW = 48
_MAX_RUNS = 10_000
# Bytes of weights below which several threads can be slower than one.
SMALL_BYTES = 100_000_000


@dataclass(frozen=True)
class BenchModel:
    """A model to measure: a folder, or random weights of a named shape; `scheme` and `head` as
    for `synthetic`.
    """

    path: Path | None = None
    shape: str | None = None
    scheme: str | None = None
    head: str | None = None
    name: str | None = None

    def checkpoint(self) -> Checkpoint:
        """Open or generate it. Raises `QuantkitError` if it cannot be opened."""
        if self.path is not None:
            return open_checkpoint(self.path, text_part=True)
        assert self.shape is not None
        return synthetic(self.shape, self.scheme, self.head)


@dataclass(frozen=True)
class BenchArguments:
    """The arguments of `bench`.

    Attributes:
        models: a folder or several; ``NAME=PATH`` gives one a name. A `quantkit.BenchModel` has
            random weights of a named shape.
        prompt_lengths: tokens of prefill, in a list.
        batches: sequences decoded at once, in a list.
        contexts: lengths of context to decode at too, with each of `batches`.
        price_per_hour: of all hardware that computes here, in any currency.
        threads: of the CPU; None is torch's number.
        runs: of each measurement, after one to warm up.
        int8_cache: store keys and values in 8 bits.
        backend, allow_slow, compiled, device: as for `load` and `generate`.
        group: processes that share the model; then there is one model, measured in these processes,
            and memory is that of each process.
        progress: called for each measurement; None reports nothing.
    """

    models: str | Path | BenchModel | Sequence[str | Path | BenchModel]
    _: KW_ONLY
    prompt_lengths: Sequence[int] = (16, 128, 512)
    batches: Sequence[int] = (1, 4, 8)
    contexts: Sequence[int] = ()
    price_per_hour: float | None = None
    threads: int | None = None
    runs: int = 5
    int8_cache: bool = False
    backend: str | None = None
    allow_slow: bool = False
    compiled: bool | None = None
    device: str | torch.device | None = None
    group: ProcessGroup = SINGLE
    progress: Progress | None = None

    def validate(self) -> None:
        """Check what does not depend on the model.

        Raises:
            RequestError: for values of the wrong type or out of range.
        """
        require_flags(int8_cache=self.int8_cache, allow_slow=self.allow_slow)
        as_integer("runs", self.runs)
        for name in ("prompt_lengths", "batches", "contexts"):
            values = getattr(self, name)
            if not is_several(values) or isinstance(values, str):
                raise wrong_type(name, values, "integers in a list")
            for value in values:
                as_integer(name, value)
        smallest = min((*self.prompt_lengths, *self.batches, self.runs))
        if smallest < 1 or not (self.prompt_lengths or self.batches):
            raise RequestError(
                "prompt lengths, batches and runs must be at least 1", found=format_value(smallest)
            )
        if self.runs > _MAX_RUNS:
            raise RequestError(
                "runs are out of range", found=format_value(self.runs), expected=f"1 to {_MAX_RUNS}"
            )
        if self.threads is not None:
            validate_threads(self.threads)
        if self.contexts and (not self.batches or min(self.contexts) < MIN_CONTEXT):
            raise RequestError(
                f"contexts must be at least {MIN_CONTEXT}, and require batches",
                found=format_value(min(self.contexts)),
            )
        if self.price_per_hour is not None:
            price = as_number("price_per_hour", self.price_per_hour)
            # NaN fails this comparison too.
            if not 0 < price < math.inf:
                raise RequestError(
                    "invalid price",
                    found=format_value(self.price_per_hour),
                    expected="an amount above 0",
                )

    def sources(self) -> list[BenchModel]:
        """List the models, with their names in the result."""
        models: list[object] = [self.models]
        if is_several(self.models) and not isinstance(self.models, str):
            models = list(self.models)
        folders = [model for model in models if not isinstance(model, BenchModel)]
        named_paths = parse_named_paths(as_paths("models", folders))
        # All folders are named together, because a short name must differ from every other.
        path_ends = short_names([path for _, path in named_paths])
        folder_models = []
        for (name, path), path_end in zip(named_paths, path_ends, strict=True):
            folder_models.append(BenchModel(path, name=name or path_end))
        remaining_folder_models = iter(folder_models)
        sources: list[BenchModel] = []
        for model in models:
            if isinstance(model, BenchModel):
                sources.append(model)
            else:
                sources.append(next(remaining_folder_models))
        return sources


@accept_fields_of(BenchArguments)
def bench(arguments: BenchArguments) -> BenchResult:
    """Measure the speed of models one after the other, each in a new process.

    Args:

    Returns:
        The figures of each model, in a list in order, with `to_json()` and `lines()`.

    Raises:
        RequestError: if a prompt with the tokens decoded after it exceeds a model's context or the
            memory, or if processes would share several models.
        QuantkitError: if a model cannot be opened or loaded.
        NonFiniteError: if its logits are NaN or Inf.

    Example:
        >>> (result,) = quantkit.bench("model-int4", prompt_lengths=[128], batches=[1])
        >>> result.decode[1].median
    """
    models = arguments.sources()
    group = arguments.group
    progress = skip_repeated_reports(arguments.progress)
    # The options are sent to another process, which is in no group; a progress function might not
    # be picklable.
    options = replace(arguments, models=(), group=SINGLE, progress=None)
    require_instance("group", group, ProcessGroup, "a ProcessGroup")
    if not models:
        raise RequestError(Message("there is no model to measure: ", Option("models"), " is empty"))
    options.validate()
    # All models are checked before the first one runs, so that a late error does not waste the
    # time of the earlier measurements.
    for model in models:
        require_room(model, options)
    if group.size > 1 and len(models) > 1:
        raise RequestError("several processes can only measure one model", found=len(models))
    allowed = dispatch.list_allowed_backends(options.backend, allow_slow=options.allow_slow)
    device = group.device or resolve_device(options.device)
    lengths = [*options.prompt_lengths, PROMPT + NEW, *options.contexts]
    for model in models:
        checkpoint = model.checkpoint()
        require_kernels(checkpoint, device, choose_default_dtype(checkpoint), allowed)
        memory = _measure_memory(checkpoint, options, device, group)
        memory.require_fit(free_bytes(device), model.path)
        if group.is_rank0:
            text = memory.text(max(lengths), max(options.batches, default=1))
            _log.info("%s: memory to run: %s", model.name or checkpoint.path.name, text)
    result = BenchResult()
    for model in models:
        # A new process would not be a member of the group.
        if group.size > 1:
            result.append(_measure(model, options, progress, group))
        else:
            result.append(_measure_in_new_process(model, options, progress))
    has_contexts = any(model_bench.at_contexts for model_bench in result)
    if options.contexts and not has_contexts:
        raise RequestError(
            f"no context could be measured: {result[0].left_out[-1]}", path=models[0].path
        )
    return result


def require_room(model: BenchModel, options: BenchArguments) -> None:
    """Check that the tokens, those of the shortest context, fit the model's context and the memory,
    before anything is loaded. Raises `RequestError` if they do not, and `QuantkitError` if the
    model cannot be opened.
    """
    checkpoint = model.checkpoint()
    max_context = checkpoint.config.max_context
    shortest = min(options.contexts, default=MIN_CONTEXT)
    needed = max((*options.prompt_lengths, PROMPT + NEW, shortest))
    if needed > max_context:
        raise RequestError(
            "the model's context is too short",
            path=model.path or checkpoint.path,
            found=max_context,
            expected=f"at least {format_value(needed)}",
        )
    batches = options.batches or (0,)
    positions = max(
        (*options.prompt_lengths, max(batches) * (PROMPT + NEW), min(batches) * shortest)
    )
    # An int8 cache is the smallest: what exceeds the memory with it never fits.
    cache = cache_bytes(checkpoint.config, 1, positions, torch.int8)
    memory = total_bytes()
    if cache > memory:
        raise RequestError(
            "the KV cache does not fit in memory",
            path=model.path,
            found=f"{format_value(positions)} tokens",
            expected=f"at most {memory * positions // cache}",
        )


def _measure_memory(
    checkpoint: Checkpoint, options: BenchArguments, device: torch.device, group: ProcessGroup
) -> RunMemory:
    """State what each process takes to run a model."""
    return measure_run_memory(
        checkpoint,
        device=device,
        backend=options.backend,
        allow_slow=options.allow_slow,
        group=group,
        cache_dtype=torch.int8 if options.int8_cache else None,
    )


def _measure_in_new_process(
    model: BenchModel, options: BenchArguments, progress: Progress
) -> Bench:
    """Run `_measure` in a new process. Raises `RequestError` if the process is killed, for example
    by a system without free memory.

    `multiprocessing.Process` would import the calling script again.
    """
    connection, child_connection = multiprocessing.Pipe()
    import_paths = list(map(str, sys.path))
    program = (
        f"import sys; sys.path[:] = {import_paths}; from quantkit.evals import bench;"
        f" bench.serve({child_connection.fileno()})"
    )
    # The new process inherits the blocked signal, so Ctrl-C ends only this process.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[child_connection.fileno()]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    try:
        connection.send((model, options))
        # While this process has the other end open, `recv` does not fail when the process ends.
        child_connection.close()
        message = connection.recv()
        # Tuples are progress; the first message of another type is the result or the error.
        while isinstance(message, tuple):
            progress(*message)
            message = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        code = process.wait()
        hint = None
        # The out-of-memory killer of Linux sends SIGKILL.
        if code == -signal.SIGKILL:
            hint = "it may have run out of memory; request fewer tokens"
        raise RequestError(
            "the measuring process was terminated",
            path=model.path,
            found=f"exit code {code}",
            hint=hint,
        ) from error
    finally:
        process.terminate()
        process.wait()
        connection.close()
    if isinstance(message, Exception):
        raise message
    assert isinstance(message, Bench)
    return message


def serve(connection: int) -> None:
    """Run in the new process: receive what to measure, send progress as tuples, then the result
    or the error.
    """
    # The caller has already shown the same warnings.
    logging.getLogger(dispatch.__name__).setLevel(logging.ERROR)
    with Connection(connection) as caller:
        try:
            model, options = caller.recv()
            caller.send(_measure(model, options, lambda *state: caller.send(state)))
        except QuantkitError as error:
            caller.send(error)
        # An error of another type might not be picklable: only its text is sent.
        except Exception as error:
            caller.send(RuntimeError(f"{type(error).__name__}: {error}"))


@torch.inference_mode()
def _measure(
    source: BenchModel, options: BenchArguments, progress: Progress, group: ProcessGroup = SINGLE
) -> Bench:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with enough_memory(source.path):
        return _measure_model(source, options, progress, group)


def _measure_model(
    source: BenchModel, options: BenchArguments, progress: Progress, group: ProcessGroup
) -> Bench:
    checkpoint = source.checkpoint()
    name = source.name or checkpoint.path.resolve().name
    max_context = checkpoint.config.max_context
    rows = []
    too_long = []
    for context in options.contexts:
        if context > max_context:
            too_long.append(LeftOut(context, None, f"the model's is {max_context}"))
            continue
        for batch in options.batches:
            rows.append((context, batch))
    steps = count()
    # The three others are loading, the first tokens, and the measurements at the end.
    total = 3 + len(options.prompt_lengths) + len(options.batches) + len(rows)

    def step() -> None:
        progress(f"bench {name}", next(steps), total, "measurements")

    step()
    device = group.device or resolve_device(options.device)
    memory = _measure_memory(checkpoint, options, device, group)
    started = time.perf_counter()
    model = load_model(
        checkpoint,
        device=device,
        backend=options.backend,
        allow_slow=options.allow_slow,
        group=group,
    )
    load_seconds = time.perf_counter() - started
    step()
    other_processes = timing.OtherProcesses()
    compiled = options.compiled
    runs = options.runs
    if options.int8_cache:
        cache = torch.int8
    else:
        cache = model.dtype

    def prefill_seconds(length: int) -> float:
        return timing.measure_seconds(partial(timing.prefill_once, model, length, compiled, cache))

    # The first prompt runs before any other measurement, so that its time includes what a process
    # does once, such as compilation.
    first_token_seconds = [prefill_seconds(PROMPT) for _ in range(1 + runs)]
    prefill = {}
    for length in options.prompt_lengths:
        step()
        prefill[length] = measure_rate(length, partial(prefill_seconds, length), runs, group)
    decode = {}
    for batch in options.batches:
        step()
        decoding = Decoding(model, batch, NEW, compiled, cache_dtype=cache, group=group)
        decode[batch] = measure_rate(batch * NEW, decoding.run, runs, group)
    # Long contexts reset the peak, and the bandwidth's tensor would count toward it.
    peak = timing.read_peak_bytes(model.device)
    at_contexts, left_out = timing.measure_contexts(
        model, rows, compiled=compiled, cache_dtype=cache, runs=runs, group=group, step=step
    )
    # The group's processes would count as others.
    if group.size == 1:
        other_load = other_processes.cores()
    else:
        other_load = None
    threads = torch.get_num_threads()
    read_bytes = timing.weight_bytes(model)
    step()
    one_thread = None
    on_cpu_alone = model.device.type == "cpu" and group.size == 1
    # Threads that the user has chosen need no advice.
    default_threads = options.threads is None and threads > 1
    if on_cpu_alone and default_threads and 1 in decode and read_bytes < SMALL_BYTES:
        with timing.use_threads():
            one_thread = measure_rate(
                NEW, Decoding(model, 1, NEW, compiled, cache_dtype=cache).run, runs
            )
    if model.device.type == "cuda":
        device_name = torch.cuda.get_device_name(model.device)
    else:
        device_name = model.device.type
    peaks = [peak]
    for at_context in at_contexts:
        peaks.append(at_context.peak_bytes or 0)
    result = Bench(
        name=name,
        quantized=bool(schemes(checkpoint)),
        backends=backend_names(model),
        dtype=DType.of(model.dtype),
        device=device_name,
        threads=threads,
        cores=os.cpu_count() or threads,
        other_load=other_load,
        load_seconds=load_seconds,
        first_token_seconds=(first_token_seconds[0], statistics.median(first_token_seconds[1:])),
        prefill=prefill,
        decode=decode,
        one_thread=one_thread,
        weight_bytes=read_bytes,
        bandwidth=timing.measure_bandwidth(model.device),
        peak_bytes=max(peaks),
        cache_dtype=DType.of(cache),
        loaded_bytes=timing.count_loaded_bytes(model),
        run_bytes=memory.weight_bytes,
        cache_bytes_per_token=memory.cache_bytes_per_token,
        at_contexts=at_contexts,
        left_out=[*too_long, *left_out],
        price_per_hour=options.price_per_hour,
    )
    step()
    return result
