"""What a job takes: memory, disk and time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import CANONICAL
from quantkit.architectures.topology import compute_sizes, input_groups, layer_kinds
from quantkit.base.memory import available_bytes, resident_bytes, size_text, total_bytes
from quantkit.base.messages import Message, Option, join_messages
from quantkit.calibration import estimate as costs
from quantkit.calibration.effort import inner_width
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.container import Encoder
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.kv_scales import is_scale
from quantkit.formats.output.destination import list_placed_files
from quantkit.formats.output.sink import IN_FLIGHT_BYTES
from quantkit.formats.output.staging import (
    name_partial_folder,
    require_output_absent,
    require_room_to_build,
)
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.model.run_memory import (
    NOT_RUN,
    RunMemory,
    count_cache_bytes_per_token,
    count_state_bytes,
    count_weight_bytes,
)
from quantkit.model.stored_codes import runs_on_cpu
from quantkit.quality.bounds import window_length
from quantkit.quality.measures import TOKENS_THROUGH_THE_HEAD
from quantkit.tensors.dtypes import DType
from quantkit.tensors.spec import TensorSpec

_HEAD = f"{CANONICAL['head']}.weight"

# What the mathematics libraries and threads set up once work begins.
_LIBRARIES = 40 << 20
# What oneDNN keeps for each shape that the solver and experts multiply.
_PRODUCTS = 60 << 20
# Steps of a shorter job are not listed.
_LONG_SECONDS = 20


@dataclass(frozen=True)
class Estimate:
    """What a command would take.

    Attributes:
        layers: number of linear layers by what becomes of them.
        memory_bytes: peak of the process, in the phase named.
        phase: of the peak.
        device_bytes: peak on the GPU, if one computes.
        disk_bytes: of the output, with the files next to its weights.
        scratch_bytes: on disk while it runs.
        seconds: roughly, on this machine while it does nothing else, and once Python and torch are
            loaded.
        source_check_tokens: tokens of the sample text on which the source is checked; 0 if it is
            not.
        notes: what the user should know.
        steps: the seconds of each step, by the name of its phase in reports of progress, in order.
        efforts: the seconds with each effort of GPTQ; empty for other jobs.
        weights: the size of its weights and of the source's; None for `convert` and for several
            formats.
        kv_cache: of which scales are written, such as ``fp8``; None for none.
        resumed: whether an interrupted run is continued, which takes less time than this.
        to_run: what the result takes to run on a CPU; zeros if nothing here runs it.
        context: tokens that it can take at most.
        available_bytes: memory that this process can have, on the machine and within its control
            groups.
    """

    layers: dict[str, int]
    memory_bytes: int
    phase: str
    device_bytes: int
    disk_bytes: int
    scratch_bytes: int
    seconds: float
    source_check_tokens: int
    notes: list[str]
    steps: dict[str, float]
    efforts: dict[str, float] = field(default_factory=dict)
    weights: WeightSizes | None = None
    kv_cache: str | None = None
    resumed: bool = False
    to_run: RunMemory = NOT_RUN
    context: int = 0
    available_bytes: int = field(
        default_factory=lambda: min(total_bytes(), available_bytes() + resident_bytes())
    )

    def to_json(self) -> dict[str, Any]:
        """Convert all of it to plain values; the memory to run by the names of `Inspection`."""
        values = asdict(self)
        del values["to_run"]
        values["run_bytes"] = self.to_run.weight_bytes
        values["cache_bytes_per_token"] = self.to_run.cache_bytes_per_token
        return values

    def line(self) -> str:
        """Write the figures in one line, for whoever is about to wait."""
        figures = [f"memory {size_text(self.memory_bytes)}"]
        if self.device_bytes:
            figures.append(f"GPU memory {size_text(self.device_bytes)}")
        duration = _duration(self.seconds)
        if self.resumed:
            duration = f"at most {duration}, as an interrupted run is continued"
        figures += [f"time {duration}", f"disk {self._disk()}"]
        return join_messages("; ", [f"this takes about {', '.join(figures)}", *self._hints()])

    def lines(self) -> list[str]:
        """Write the report for people."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.layers.items()) or "unknown"
        out = [
            f"linear layers: {kinds}",
            f"memory: {size_text(self.memory_bytes)}, in {self.phase}",
            f"disk: {self._disk()}",
            *self._memory_to_run(),
            f"time: about {_duration(self.seconds)} on this machine{self._steps()}",
        ]
        if self.efforts:
            durations: list[str] = []
            for name, seconds in self.efforts.items():
                durations.append(f"{name} {_duration(seconds)}")
            out.append(Message("time by ", Option("effort"), f": {', '.join(durations)}"))
        # Next to the lines that they belong to.
        if self.device_bytes:
            out.insert(2, f"GPU memory: {size_text(self.device_bytes)}")
        if self.kv_cache is not None:
            out.insert(1, f"KV cache: {self.kv_cache}")
        if self.source_check_tokens:
            out.append(
                Message(
                    f"first: the source model is checked on {self.source_check_tokens} tokens of"
                    " text; see ",
                    Option("source_check"),
                )
            )
        notes = [Message("note: ", note) for note in self.notes]
        return [*out, *self._hints(), *notes]

    def _disk(self) -> str:
        """Write the size of the output, by its weights where it is compared with the source, and
        of activations.
        """
        if self.weights is None:
            size = size_text(self.disk_bytes)
        else:
            size = self.weights.text()
        if self.scratch_bytes:
            return f"{size}, and {size_text(self.scratch_bytes)} of activations while it runs"
        return size

    def _memory_to_run(self) -> list[str]:
        """State what the result takes to run, in a line."""
        if not self.to_run.weight_bytes:
            return []
        return [f"memory to run the result: {self.to_run.text(self.context)}"]

    def _steps(self) -> str:
        """List the steps that take a noticeable part of the time, if it is long."""
        if self.seconds < _LONG_SECONDS:
            return ""
        long_steps: list[str] = []
        for name, seconds in self.steps.items():
            if seconds > self.seconds / 20:
                long_steps.append(f"{name} {_duration(seconds)}")
        # A single step takes about all of the time, which is stated already.
        if len(long_steps) > 1:
            return f": {', '.join(long_steps)}"
        return ""

    def _hints(self) -> list[str]:
        if self.weights is None:
            hints = []
        else:
            hints = self.weights.hints()
        if self.memory_bytes > self.available_bytes:
            hints.append(f"only {size_text(self.available_bytes)} of memory is available")
        return hints


def require_buildable(dst: Path, encoder: Encoder, *, resume: bool) -> None:
    """Raise a `DestinationError` or `ResumeError` if an output cannot be built there."""
    partial = name_partial_folder(dst)
    require_output_absent(dst, list_placed_files(dst, encoder.files()), partial)
    require_room_to_build(partial, resume=resume)


def process_bytes() -> int:
    """Estimate what the process has in memory once work begins."""
    return resident_bytes() + _LIBRARIES + _PRODUCTS


def side_bytes(files: Mapping[str, bytes | Path]) -> int:
    """Add up the sizes of the files next to the weights."""
    size = 0
    for content in files.values():
        if isinstance(content, bytes):
            size += len(content)
        else:
            size += content.stat().st_size
    return size


def estimate_streaming_bytes(source: Checkpoint, encoder: Encoder) -> int:
    """Estimate the peak of a stream of tensors: the largest as it is read, cast or split, and what
    is under way.
    """
    largest = 0
    for spec in encoder.planned:
        # Scales of a KV cache are small, and have no tensor of the model to look up.
        if is_scale(spec.name):
            continue
        count = math.prod(spec.shape)
        dtype = source.info(resolve_stored_name(source, spec.name)).dtype
        size = count * dtype.itemsize
        # A cast or a change of layout needs a second tensor next to the one that was read.
        if spec.scheme is None and (spec.dtype != dtype or encoder.rearranges):
            size += count * spec.dtype.itemsize
        largest = max(largest, size)
    # Parts of a tensor on disk are buffered until all are there, and then joined in a copy.
    largest = max(largest, 2 * encoder.max_buffered_bytes)
    return resident_bytes() + largest + min(IN_FLIGHT_BYTES, encoder.total_bytes())


def count_checked_tokens(source: Checkpoint, source_check: bool) -> int:
    """Count the tokens on which the source is tried before anything is written."""
    tokenizer, _ = load_checked_tokenizer(source)
    if source_check and tokenizer is not None:
        return window_length(source)
    return 0


def forward_bytes(source: Checkpoint, tokens: int, *, models: int) -> int:
    """Estimate the peak of a pass through models on disk: a head, hidden states, one batch in a
    layer, one layer's codes.
    """
    config = source.config
    if config.tensors is not None:
        # transformers runs blocks in float32, next to their tensors as read.
        element_bytes = DType.FLOAT32.itemsize + DType(config.dtype).itemsize
        weights = element_bytes * costs.largest_block(config)
    else:
        counts = compute_sizes(config)
        largest = 0
        for layer in layer_kinds(config):
            for group in input_groups(config, layer):
                for linear in group.linears:
                    rows, columns = linear.dims
                    largest = max(largest, counts[rows] * counts[columns])
        weights = 3 * largest
    # Float32 states: input and output of the layer for each model, and four in its widest part.
    states = 4 * tokens * (2 * models * config.hidden_size + 4 * inner_width(config))
    logits = 4 * 8 * TOKENS_THROUGH_THE_HEAD * config.vocab_size
    head_weights = config.vocab_size * config.hidden_size
    head = head_weights * DType(config.dtype).itemsize
    # Through transformers the head is multiplied in float32.
    if not config.runnable:
        head += head_weights * DType.FLOAT32.itemsize
    return resident_bytes() + _LIBRARIES + head + states + logits + weights


def measure_planned(config: ModelConfig, specs: Iterable[TensorSpec]) -> RunMemory:
    """State what a model that will be written takes to run on a CPU; zeros if nothing here runs it.

    Args:
        config: of the model.
        specs: of all tensors that will be written.
    """
    if not config.measurable:
        return NOT_RUN
    run: list[TensorSpec] = []
    num_weights = 0
    # Of the floats, by dtype.
    sizes: Counter[DType] = Counter()
    for spec in specs:
        # Formats that store a tied head write the embedding twice.
        is_copied_head = spec.name == _HEAD and config.tied_embeddings and config.runnable
        if is_copied_head or is_scale(spec.name):
            continue
        num_weights += math.prod(spec.shape)
        if spec.scheme is None:
            sizes[spec.dtype] += math.prod(spec.shape)
            run.append(spec)
        elif runs_on_cpu(spec):
            run.append(spec)
        else:
            # The reader turns it into floats.
            run.append(replace(spec, dtype=DType(config.dtype), scheme=None))
    if not config.runnable:
        return RunMemory(DType.FLOAT32.itemsize * num_weights, 0)
    # A conversion may change it.
    dtype = DType(config.dtype)
    if sizes:
        dtype = sizes.most_common(1)[0][0]
    return RunMemory(
        count_weight_bytes(run),
        count_cache_bytes_per_token(config, dtype),
        count_state_bytes(config),
    )


def _duration(seconds: float) -> str:
    # Rounded up: an estimate should not promise less.
    if seconds < 90:
        return f"{max(math.ceil(seconds), 1)} s"
    if seconds < 5400:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
