"""The memory, disk and time that conversions and quantizations take, from shapes and headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import input_groups, layer_kinds, linear_columns, sizes
from quantkit.base.memory import available_bytes, resident_bytes, size_text, total_bytes
from quantkit.bit_allocation.fit import Fit
from quantkit.bit_allocation.losses import choice_bytes
from quantkit.calibration import estimate as costs
from quantkit.calibration.effort import batch_samples, inner_width
from quantkit.calibration.packaged import PREFIX
from quantkit.formats.checkpoint import Checkpoint, stored_name
from quantkit.formats.container import Encoder
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.kv_scales import is_scale
from quantkit.formats.output.destination import output_files
from quantkit.formats.output.sink import IN_FLIGHT_BYTES
from quantkit.formats.output.staging import (
    partial_folder,
    require_output_absent,
    require_room_to_build,
)
from quantkit.jobs.convert.conversion import Conversion
from quantkit.jobs.output.speed import Speed
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.prepare import too_few_tokens
from quantkit.jobs.quantize.sizes import WeightSizes, weight_sizes
from quantkit.jobs.quantize.steps import SOURCE_CHECK, quantization_steps
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.bounds import measured_tokens, window_length
from quantkit.quality.measures import TOKENS_THROUGH_THE_HEAD
from quantkit.tensors.dtypes import DType

_LIBRARIES = 40 << 20  # what the mathematics libraries and threads set up once work begins
_PRODUCTS = 60 << 20  # what oneDNN keeps for each shape that the solver and experts multiply
# of the choice of schemes: freed memory stays between the states that it keeps, as measured
_HEAP = 1.25
_LONG_SECONDS = 20
_MANIFEST = 300  # bytes of quantkit.json for each linear layer


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
    available_bytes: int = field(
        default_factory=lambda: min(total_bytes(), available_bytes() + resident_bytes())
    )

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return asdict(self)

    def line(self) -> str:
        """The figures in one line, for whoever is about to wait."""
        taken = [f"memory {size_text(self.memory_bytes)}"]
        if self.device_bytes:
            taken.append(f"GPU memory {size_text(self.device_bytes)}")
        most = ("at most ", ", as an interrupted run is continued") if self.resumed else ("", "")
        taken += [f"time {most[0]}{_duration(self.seconds)}{most[1]}", f"disk {self._disk()}"]
        return "; ".join([f"this takes about {', '.join(taken)}", *self._hints()])

    def lines(self) -> list[str]:
        """The report for people."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.layers.items()) or "unknown"
        out = [
            f"linear layers: {kinds}",
            f"memory: {size_text(self.memory_bytes)}, in {self.phase}",
            f"disk: {self._disk()}",
            f"time: about {_duration(self.seconds)} on this machine{self._steps()}",
        ]
        if self.efforts:
            each = ", ".join(
                f"{name} {_duration(seconds)}" for name, seconds in self.efforts.items()
            )
            out.append(f"time by `effort`: {each}")
        if self.device_bytes:
            out.insert(2, f"GPU memory: {size_text(self.device_bytes)}")
        if self.kv_cache is not None:
            out.insert(1, f"KV cache: {self.kv_cache}")
        if self.source_check_tokens:
            out.append(
                f"first: the source model is checked on {self.source_check_tokens} tokens of text;"
                " see `source_check`"
            )
        return [*out, *self._hints(), *(f"note: {note}" for note in self.notes)]

    def _disk(self) -> str:
        """The size of the output, by its weights where it is compared with the source, and of
        activations.
        """
        size = size_text(self.disk_bytes) if self.weights is None else self.weights.text()
        more = (
            f", and {size_text(self.scratch_bytes)} of activations while it runs"
            if self.scratch_bytes
            else ""
        )
        return f"{size}{more}"

    def _steps(self) -> str:
        """The steps that take a noticeable part of the time, if it is long."""
        if self.seconds < _LONG_SECONDS:
            return ""
        long = [
            f"{name} {_duration(own)}"
            for name, own in self.steps.items()
            if own > self.seconds / 20
        ]
        return f": {', '.join(long)}" if len(long) > 1 else ""

    def _hints(self) -> list[str]:
        hints = [] if self.weights is None else self.weights.hints()
        if self.memory_bytes > self.available_bytes:
            hints.append(f"only {size_text(self.available_bytes)} of memory is available")
        return hints


def estimate_conversion(planned: Conversion) -> Estimate:
    """What a conversion takes."""
    work, notes = planned.work, planned.notes
    source = work.source
    config, specs = source.config, work.encoder.planned
    disk = work.encoder.total_bytes() + side_bytes(work.side_files)
    phases = {"writing": _streaming(source, work.encoder)}
    checked = checked_tokens(source, planned.options.source_check)
    speed, steps = Speed(config), dict[str, float]()
    if checked:
        phases[SOURCE_CHECK] = forward_bytes(source, checked, models=1)
        steps[SOURCE_CHECK] = speed.forward(checked)
    steps["convert"] = speed.writing(disk, sum(file.size for file in source.files()))
    if planned.changes.rounded or planned.changes.cast:
        steps["gate"] = speed.forward(measured_tokens(source), models=2)
    phase = max(phases, key=lambda name: phases[name])
    linears = linear_columns(config)
    counted = [spec for spec in specs if spec.name.removesuffix(".weight") in linears]
    layers = (
        dict(Counter(str(spec.scheme or "floats") for spec in counted)) if config.runnable else {}
    )
    return Estimate(
        layers, phases[phase], phase, 0, disk, 0, math.fsum(steps.values()), checked, notes, steps
    )


def estimate_quantization(formats: Formats, fit: Fit | None) -> Estimate:
    """What a quantization takes; with a `fit`, the schemes of `formats` stand for those that it
    chooses.
    """
    each, prepared = list(formats.each.values()), formats.first
    source, settings, certified = prepared.source, prepared.settings, prepared.certified
    notes = list(dict.fromkeys(note for one in each for note in one.notes))
    assigned, config = prepared.scheme_map.assigned, source.config
    sizes = [
        weight_sizes(one, one.encoder.total_bytes() if fit is None else fit.max_bytes)
        for one in each
    ]
    written = sum(one.output_bytes for one in sizes)
    disk = written + side_bytes(formats.side_files) + _MANIFEST * len(assigned) * len(each)
    phases = {"writing": max(_streaming(source, one.encoder) for one in each)}
    if (
        len(each) > 1 and settings is None
    ):  # what is rounded for one format is kept for the next ones
        phases["writing"] += costs.largest_block(config)
    checked = checked_tokens(source, prepared.options.source_check)
    scratch, on_device = 0, 0
    if config.measurable:  # the gate holds the hidden states of three models on all texts
        phases["the gate"] = forward_bytes(source, measured_tokens(source), models=3)
    if certified is not None:
        one = min(certified.windows.shape[1], TOKENS_THROUGH_A_BLOCK)
        phases["the certificate"] = forward_bytes(source, one, models=0) + certified.memory_bytes(
            config
        )
    if settings is not None:
        shape = settings.samples, settings.length
        notes += too_few_tokens(shape, config)
        device = settings.device
        schemes = prepared.scheme_map.linears.values()
        held, scratch, on_device = settings.activation_bytes(config, shape, schemes)
        batch = batch_samples(config, shape[1]) * shape[1]
        effort = settings.effort_on(config, shape, schemes)
        backward = costs.gradient_bytes(config, shape, effort, settings.memory_bytes)
        work_bytes = costs.gptq_bytes(config, batch, device, two_sided=backward > 0)
        codes = costs.largest_block(config)
        if config.run_by is not None:
            work_bytes = costs.lockstep_bytes(config, batch)
        if device.type == "cuda":
            on_device, work_bytes = on_device + work_bytes, 0
        phases["calibration"] = process_bytes() + held + codes + work_bytes
        if backward:
            phases["the gradients"] = process_bytes() + backward
        if fit is not None:
            needed = choice_bytes(config, shape, settings.memory_bytes)
            phases["the choice of schemes"] = process_bytes() + int(_HEAP * needed)
        if settings.text is None:
            tried = shape[0] * min(shape[1], PREFIX)
            phases["the choice of samples"] = forward_bytes(source, tried, models=1)
    kinds = Counter(
        str(scheme or "float") for module, scheme in assigned.items() if module != EMBEDDING
    )
    if fit is not None:
        chosen = {module for unit in fit.units for module in unit.modules}
        others = (
            str(assigned[module] or "float")
            for module in assigned
            if module not in {EMBEDDING, *chosen}
        )
        kinds = Counter({f"chosen for {fit.target}": len(chosen)}) + Counter(others)
    phase = max(phases, key=lambda name: phases[name])
    steps, efforts = quantization_steps(formats, fit, sizes, checked)
    return Estimate(
        dict(kinds),
        phases[phase],
        phase,
        on_device,
        disk,
        scratch,
        math.fsum(steps.values()),
        checked,
        notes,
        steps,
        efforts,
        sizes[0] if len(each) == 1 else None,
        prepared.options.kv_cache,
        prepared.options.resume and partial_folder(formats.dst).is_dir(),
    )


def require_buildable(dst: Path, encoder: Encoder, *, resume: bool) -> None:
    """Raise a `DestinationError` or `ResumeError` if an output cannot be built there."""
    partial = partial_folder(dst)
    require_output_absent(dst, output_files(dst, encoder.files()), partial)
    require_room_to_build(partial, resume=resume)


def process_bytes() -> int:
    """What the process has in memory once work begins."""
    return resident_bytes() + _LIBRARIES + _PRODUCTS


def side_bytes(files: Mapping[str, bytes | Path]) -> int:
    """The size of the files next to the weights."""
    return sum(
        len(content) if isinstance(content, bytes) else content.stat().st_size
        for content in files.values()
    )


def _streaming(source: Checkpoint, encoder: Encoder) -> int:
    """Peak of a stream of tensors: the largest as it is read, cast or split, and what is under
    way.
    """
    largest = 0
    for item in encoder.planned:
        if is_scale(item.name):
            continue
        count, dtype = math.prod(item.shape), source.info(stored_name(source, item.name)).dtype
        copied = item.scheme is None and (item.dtype != dtype or encoder.rearranges)
        largest = max(largest, count * dtype.itemsize + copied * count * item.dtype.itemsize)
    largest = max(largest, 2 * encoder.joined_bytes)
    return resident_bytes() + largest + min(IN_FLIGHT_BYTES, encoder.total_bytes())


def checked_tokens(source: Checkpoint, source_check: bool) -> int:
    """Tokens on which the source is tried before anything is written."""
    tokenizer, _ = checked_tokenizer(source)
    return window_length(source) if source_check and tokenizer is not None else 0


def forward_bytes(source: Checkpoint, tokens: int, *, models: int) -> int:
    """Peak of a pass through models on disk: a head, hidden states, one batch in a layer, one
    layer's codes.
    """
    config = source.config
    if config.tensors is not None:
        weights = (DType.FLOAT32.itemsize + DType(config.dtype).itemsize) * costs.largest_block(
            config
        )
    else:
        counts = sizes(config)
        groups = (group for layer in layer_kinds(config) for group in input_groups(config, layer))
        weights = 3 * max(
            counts[linear.dims[0]] * counts[linear.dims[1]]
            for group in groups
            for linear in group.linears
        )
    states = 4 * tokens * (2 * models * config.hidden_size + 4 * inner_width(config))
    logits = 4 * 8 * TOKENS_THROUGH_THE_HEAD * config.vocab_size
    head = config.vocab_size * config.hidden_size * DType(config.dtype).itemsize
    head += (
        0 if config.runnable else config.vocab_size * config.hidden_size * DType.FLOAT32.itemsize
    )
    return resident_bytes() + _LIBRARIES + head + states + logits + weights


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(math.ceil(seconds), 1)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
