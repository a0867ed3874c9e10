"""What commands would take, before they are begun: checks, memory, disk and time.

    >>> print(*quantkit.plan.quantize("model", "model-int4", "int4-g128").lines(), sep="\\n")

`convert` and `quantize` take the arguments of `quantkit.convert` and `quantkit.quantize`, check what those check, and
write nothing. `generate` does the same for generation on a TPU slice.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import input_groups, layer_kinds, linear_columns, sizes
from quantkit.arguments import as_integer, as_path, as_string
from quantkit.bit_allocation.fit import Fit
from quantkit.bit_allocation.losses import choice_bytes, choice_flops
from quantkit.calibration import estimate as costs
from quantkit.calibration.effort import batch_samples, inner_width
from quantkit.calibration.packaged import PREFIX, ROUNDS
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.container import Encoder
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.output.destination import output_files, require_space
from quantkit.formats.output.sink import IN_FLIGHT_BYTES
from quantkit.formats.output.staging import partial_folder, require_output_absent, require_room_to_build
from quantkit.jobs.convert import Conversion, plan_conversion
from quantkit.jobs.convert_options import ConvertOptions
from quantkit.jobs.option_fields import called_with
from quantkit.jobs.prepare import Prepared, prepare, size_fit, too_few_tokens
from quantkit.jobs.quantize_options import QuantizeOptions
from quantkit.jobs.sizes import WeightSizes, weight_sizes
from quantkit.memory import resident_bytes, size_text
from quantkit.model.device import float_type
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.bounds import measured_tokens, window_length
from quantkit.quality.measures import TOKENS_THROUGH_THE_HEAD
from quantkit.tensors.dtypes import DType, FloatName
from quantkit.tensors.products import bfloat16_linear, compute_dtype, times
from quantkit.xla import require_compiler

if TYPE_CHECKING:
    from quantkit.xla.estimate import SliceEstimate

__all__ = ["Estimate", "convert", "generate", "quantize"]

_LIBRARIES = 40 << 20  # what the mathematics libraries and threads set up once work begins
_PRODUCTS = 60 << 20  # what oneDNN keeps for each shape that the solver and experts multiply
_CPU = torch.device("cpu")
_MANIFEST = 300  # bytes of quantkit.json for each linear layer
_GUESSED_DISK_RATE = 5e8  # bytes a second through reading, hashing and writing; not measured here
# Seconds that do not shrink with the model, as measured on a small one:
_SECONDS_OF_FILES = 0.12  # opened, hashed, synced and read back
_SECONDS_OF_GROUP = 0.0025  # of linears in one model, to load and set up


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
        seconds: roughly, on this machine while it does nothing else, and once Python and torch are loaded.
        source_check_tokens: tokens of the sample text on which the source is checked; 0 if it is not.
        notes: what the user should know.
        weights: the size of its weights and of the source's; None for `convert`.
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
    weights: WeightSizes | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return asdict(self)

    def line(self) -> str:
        """The figures in one line, for whoever is about to wait."""
        taken = [f"memory {size_text(self.memory_bytes)}"]
        if self.device_bytes:
            taken.append(f"GPU memory {size_text(self.device_bytes)}")
        taken += [f"time {_duration(self.seconds)}", f"disk {self._disk()}"]
        return "; ".join([f"this takes about {', '.join(taken)}", *self._hints()])

    def lines(self) -> list[str]:
        """The report for people."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.layers.items()) or "unknown"
        out = [
            f"linear layers: {kinds}", f"memory: {size_text(self.memory_bytes)}, in {self.phase}",
            f"disk: {self._disk()}", f"time: about {_duration(self.seconds)} on this machine",
        ]  # fmt: skip
        if self.device_bytes:
            out.insert(2, f"GPU memory: {size_text(self.device_bytes)}")
        if self.source_check_tokens:
            out.append(
                f"first: the source model is checked on {self.source_check_tokens} tokens of text; see `source_check`"
            )
        return [*out, *self._hints(), *(f"note: {note}" for note in self.notes)]

    def _disk(self) -> str:
        """The size of the output, by its weights where it is compared with the source, and of activations."""
        size = size_text(self.disk_bytes) if self.weights is None else self.weights.text()
        more = f", and {size_text(self.scratch_bytes)} of activations while it runs" if self.scratch_bytes else ""
        return f"{size}{more}"

    def _hints(self) -> list[str]:
        return [] if self.weights is None else self.weights.hints()


@called_with(ConvertOptions)
def convert(options: ConvertOptions) -> Estimate:
    """What `quantkit.convert` with the same arguments would take.

    Returns:
        Memory, disk and time.

    Raises:
        QuantkitError: as `quantkit.convert` does for what can be found without reading weights.
    """
    planned = plan_conversion(options, headers_only=True)
    estimate = _estimate_conversion(planned)
    _require_room(planned.dst, planned.work.encoder, estimate, resume=options.resume)
    return estimate


@called_with(QuantizeOptions)
def quantize(options: QuantizeOptions) -> Estimate:
    """What `quantkit.quantize` with the same arguments would take; calibration text is read, and no samples are drawn.

    Returns:
        Memory, disk and time, and what becomes of the layers.

    Raises:
        QuantkitError: as `quantkit.quantize` does for what can be found without reading weights.
    """
    prepared = prepare(options)
    estimate = estimate_quantization(prepared, size_fit(prepared))
    _require_room(prepared.dst, prepared.encoder, estimate, resume=options.resume)
    if prepared.settings is not None:
        prepared.settings.require_text(prepared.tokenizer, prepared.source)
    return estimate


def generate(
    model: str | Path | Checkpoint, target: str, *, batch: int = 1, context: int | None = None,
    dtype: FloatName | torch.dtype | None = None,
) -> SliceEstimate:  # fmt: skip
    """What generation takes of each chip of a TPU slice, as the compiler for that slice says; no TPU is needed.

    Args:
        model: a folder, or an open checkpoint; only its shapes are looked at.
        target: kind and number of chips, such as ``v5e-16``.
        batch: texts at once.
        context: tokens of a sequence, prompt included; None is the model's maximum.
        dtype: of activations and float weights: ``bf16``, ``fp16``, ``fp32``, or torch's; None is the checkpoint's own.

    Returns:
        What each chip holds and exchanges.

    Raises:
        RequestError: for an unknown slice, or one that the model does not fit; if jax, torchax or the compiler for
            TPUs is not installed.
    """
    float_dtype = float_type(dtype)
    target, batch = as_string("target", target), as_integer("batch", batch)
    context = None if context is None else as_integer("context", context)
    if not hasattr(model, "config"):
        model = as_path("model", model)
    require_compiler()
    from quantkit.xla.estimate import estimate_slice

    checkpoint: Checkpoint = open_checkpoint(model) if isinstance(model, (str, Path)) else model
    require_runnable(checkpoint)
    return estimate_slice(checkpoint, target, batch=batch, context=context, dtype=float_dtype)


def _require_room(dst: Path, encoder: Encoder, estimate: Estimate, *, resume: bool) -> None:
    require_buildable(dst, encoder, resume=resume)
    require_space(dst, estimate.disk_bytes + estimate.scratch_bytes)


def _estimate_conversion(planned: Conversion) -> Estimate:
    """What a conversion takes."""
    work, notes = planned.work, planned.notes
    source = work.source
    disk = work.encoder.total_bytes() + _side_bytes(work.side_files)
    phases = {"writing": _streaming(source, work.encoder)}
    checked = _checked_tokens(source, planned.options.source_check)
    if checked:
        phases["the check of the source"] = _forward(source, checked, models=1)
    phase = max(phases, key=lambda name: phases[name])
    seconds = _writing_seconds(disk)
    if checked:
        seconds += costs.forward_flops(source.config, checked) / _flop_rate() + _pass_seconds(source.config, 1)
    linears = linear_columns(source.config)
    specs = [spec for spec in work.encoder.planned if spec.name.removesuffix(".weight") in linears]
    layers = dict(Counter(str(spec.scheme or "floats") for spec in specs)) if source.config.runnable else {}
    return Estimate(layers, phases[phase], phase, 0, disk, 0, seconds, checked, notes)


def estimate_quantization(prepared: Prepared, fit: Fit | None) -> Estimate:
    """What a quantization takes; with a `fit`, the schemes of `prepared` stand for those that it chooses."""
    encoder, certified = prepared.encoder, prepared.certified
    source, settings, notes = prepared.source, prepared.settings, list(prepared.notes)
    assigned, config = prepared.scheme_map.assigned, source.config
    weights = weight_sizes(prepared, encoder.total_bytes() if fit is None else fit.max_bytes)
    disk = weights.output_bytes + _side_bytes(prepared.side_files) + _MANIFEST * len(assigned)
    phases = {"writing": _streaming(source, encoder)}
    checked = _checked_tokens(source, prepared.options.source_check)
    scratch, on_device, flops, seconds = 0, 0, 0, 0.0
    if config.runnable:  # the gate holds the hidden states of three models on all texts
        phases["the gate"] = _forward(source, measured_tokens(source), models=3)
        flops = costs.forward_flops(config, 3 * measured_tokens(source) + checked)
        seconds = _pass_seconds(config, 3 + bool(checked))
    if certified is not None:
        one = min(certified.windows.shape[1], TOKENS_THROUGH_A_BLOCK)
        phases["the certificate"] = _forward(source, one, models=0) + certified.memory_bytes(config)
        flops += costs.forward_flops(config, certified.tokens) + certified.attention_flops(config)
        seconds += _pass_seconds(config, 3 * len(certified.windows))
    if settings is not None:
        shape = settings.samples, settings.length
        effort = settings.effort_on(config, shape)
        notes += too_few_tokens(shape, config)
        device = settings.device
        held, scratch, on_device = settings.activation_bytes(config, shape)
        work_bytes = costs.gptq_bytes(config, batch_samples(config, shape[1]) * shape[1], device)
        codes = costs.largest_block(config)
        if device.type == "cuda":
            on_device, work_bytes = on_device + work_bytes, 0
        phases["calibration"] = resident_bytes() + _LIBRARIES + _PRODUCTS + held + codes + work_bytes
        if fit is not None:
            needed = choice_bytes(config, shape, settings.memory_bytes)
            phases["the choice of schemes"] = resident_bytes() + _LIBRARIES + needed
            flops += choice_flops(config, shape, settings.memory_bytes)
        seconds += costs.solving_flops(config, shape, effort) / _flop_rate(torch.float32, device)
        seconds += costs.calibration_flops(config, shape, effort) / _flop_rate(compute_dtype(device), device)
        seconds += costs.calibration_seconds(config, shape, effort, device)
        if settings.text is None:
            tried = shape[0] * min(shape[1], PREFIX)
            phases["the choice of samples"] = _forward(source, tried, models=1)
            flops += 2 * costs.forward_flops(config, tried)  # replacements are fewer each time
            seconds += _pass_seconds(config, ROUNDS)
    kinds = Counter(str(scheme or "float") for module, scheme in assigned.items() if module != EMBEDDING)
    if fit is not None:
        chosen = {module for unit in fit.units for module in unit.modules}
        others = (str(assigned[module] or "float") for module in assigned if module not in {EMBEDDING, *chosen})
        kinds = Counter({f"chosen for {fit.target}": len(chosen)}) + Counter(others)
    phase = max(phases, key=lambda name: phases[name])
    seconds += flops / _flop_rate() + _writing_seconds(disk)
    return Estimate(dict(kinds), phases[phase], phase, on_device, disk, scratch, seconds, checked, notes, weights)


def require_buildable(dst: Path, encoder: Encoder, *, resume: bool) -> None:
    """Raise a `DestinationError` or `ResumeError` if an output cannot be built there."""
    partial = partial_folder(dst)
    require_output_absent(dst, output_files(dst, encoder.files()), partial)
    require_room_to_build(partial, resume=resume)


def _side_bytes(files: Mapping[str, bytes | Path]) -> int:
    return sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())


def _streaming(source: Checkpoint, encoder: Encoder) -> int:
    """Peak of a stream of tensors: the largest as it is read, cast or split, and what is under way."""
    largest, names = 0, frozenset(source.names())
    for item in encoder.planned:
        name = item.name if item.name in names else "model.embed_tokens.weight"
        count, dtype = math.prod(item.shape), source.info(name).dtype
        copied = item.scheme is None and (item.dtype != dtype or encoder.rearranges)
        largest = max(largest, count * dtype.itemsize + copied * count * item.dtype.itemsize)
    largest = max(largest, 2 * encoder.joined_bytes)
    return resident_bytes() + largest + min(IN_FLIGHT_BYTES, encoder.total_bytes())


def _checked_tokens(source: Checkpoint, source_check: bool) -> int:
    """Tokens on which the source is tried before anything is written."""
    tokenizer, _ = checked_tokenizer(source)
    return window_length(source) if source_check and tokenizer is not None else 0


def _forward(source: Checkpoint, tokens: int, *, models: int) -> int:
    """Peak of a pass through models on disk: a head, hidden states, one batch in a layer, one layer's codes."""
    config = source.config
    counts = sizes(config)
    groups = (group for layer in layer_kinds(config) for group in input_groups(config, layer))
    widest = max(counts[linear.dims[0]] * counts[linear.dims[1]] for group in groups for linear in group.linears)
    states = 4 * tokens * (2 * models * config.hidden_size + 4 * inner_width(config))
    logits = 4 * 8 * TOKENS_THROUGH_THE_HEAD * config.vocab_size
    head = config.vocab_size * config.hidden_size * DType(config.dtype).itemsize
    return resident_bytes() + _LIBRARIES + head + states + logits + 3 * widest


def _writing_seconds(disk: int) -> float:
    return _SECONDS_OF_FILES + 2 * disk / _GUESSED_DISK_RATE


def _pass_seconds(config: ModelConfig, models: int) -> float:
    """What passes through models take besides arithmetic."""
    groups = sum(count for _, count in costs.every_group(config))
    return models * groups * _SECONDS_OF_GROUP


def _flop_rate(dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> float:
    """Floating-point operations a second of a matrix product here and now."""
    size = 1024 if device.type == "cpu" else 4096
    a, b = torch.randn(2, size, size, device=device)
    weight = b.bfloat16()
    best = math.inf
    for _ in range(6):
        started = time.perf_counter()
        product = bfloat16_linear(a, weight) if dtype == torch.bfloat16 else times(a, b)
        product[0, 0].item()  # waits for the GPU
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(math.ceil(seconds), 1)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
