"""What commands would take, before they are begun: checks, memory, disk and time.

    >>> print(*quantkit.plan.quantize("model", "model-int4", "int4-g128").lines(), sep="\\n")

`convert` and `quantize` take the arguments of `quantkit.convert` and `quantkit.quantize`, check what those check, and
write nothing. `generate` does the same for generation on a TPU slice.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import input_groups, layer_kinds, linear_columns, sizes
from quantkit.arguments import as_path, as_text, as_whole, require_flags
from quantkit.bit_allocation.allocation import size_target
from quantkit.bit_allocation.cost import choice_bytes, choice_flops
from quantkit.calibration.effort import activation_bytes, batch_samples, inner_width
from quantkit.calibration.estimate import (
    calibration_flops,
    calibration_seconds,
    every_group,
    forward_flops,
    gptq_bytes,
    largest_block,
)
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.container import Encoder
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.output.destination import output_files
from quantkit.formats.output.sink import IN_FLIGHT_BYTES
from quantkit.formats.output.staging import partial_folder, require_output_absent, require_room_to_build, require_space
from quantkit.jobs.card import Labels, model_name
from quantkit.jobs.certificate import certified_text
from quantkit.jobs.conversion import conversion
from quantkit.jobs.fit_to_size import SizeFit, asked_recipe
from quantkit.jobs.output import SHARD_BYTES
from quantkit.jobs.prepare import planned_output, prepare, tensor_blocks, too_few_tokens
from quantkit.jobs.settings import Method, gptq_settings
from quantkit.jobs.target import TargetName, quantized_target, shard_bytes
from quantkit.memory import resident_bytes, size_text
from quantkit.model.device import float_type
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.measures import TOKENS_THROUGH_THE_HEAD
from quantkit.quality.windows import measured_tokens, window_length
from quantkit.tensors.dtypes import DType, FloatName
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.require import require_compiler

if TYPE_CHECKING:
    from quantkit.xla.estimate import SliceEstimate

__all__ = ["Estimate", "convert", "generate", "quantize"]

_LIBRARIES = 40 << 20  # what the mathematics libraries and threads set up once work begins
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
        disk_bytes: of the output.
        scratch_bytes: on disk while it runs.
        seconds: roughly, on this machine while it does nothing else, and once Python and torch are loaded.
        source_check_tokens: of a text, on which the source is tried first; 0 where it is not.
        notes: what the user should know.
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

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.layers.items()) or "not told"
        out = [
            f"linear layers: {kinds}",
            f"memory: {size_text(self.memory_bytes)}, in {self.phase}",
            f"disk: {size_text(self.disk_bytes)}",
            f"time: about {_duration(self.seconds)} on this machine",
        ]
        if self.device_bytes:
            out.insert(2, f"GPU memory: {size_text(self.device_bytes)}")
        if self.scratch_bytes:
            out[-2] += f", and {size_text(self.scratch_bytes)} of activations while it runs"
        if self.source_check_tokens:
            out.append(f"first: the source is tried on {self.source_check_tokens} tokens of a text; see `source_check`")
        return [*out, *(f"note: {note}" for note in self.notes)]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: TargetName | None = None,
    mp: int = 1,
    dtype: FloatName | torch.dtype | None = None,
    dequantize: bool = False,
    requantize: bool = False,
    split_max_size: int | None = None,
    template: str | None = None,
    weights: WeightKind | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    tensors_only: bool = False,
) -> Estimate:
    """What `quantkit.convert` with the same arguments would take.

    Returns:
        Memory, disk and time.

    Raises:
        QuantkitError: as `quantkit.convert` does for what can be told without reading weights.
    """
    require_flags(resume=resume, allow_nonfinite=allow_nonfinite, source_check=source_check, tensors_only=tensors_only)
    planned = conversion(
        src, dst, to=to, mp=mp, dtype=dtype, dequantize=dequantize, requantize=requantize,
        split_max_size=split_max_size, template=template, weights=weights, allow_nonfinite=allow_nonfinite,
        tensors_only=tensors_only, look=False,
    )  # fmt: skip
    work, notes = planned.work, planned.notes
    source = work.source
    disk = work.encoder.total_bytes() + _side_bytes(work.side_files)
    _require_room(Path(dst), work.encoder, disk, resume)
    phases = {"writing": _streaming(source, work.encoder)}
    checked = _checked_tokens(source, source_check)
    if checked:
        phases["the check of the source"] = _forward(source, checked, models=1)
    phase = max(phases, key=lambda name: phases[name])
    seconds = _writing_seconds(disk)
    if checked:
        seconds += forward_flops(source.config, checked) / _flop_rate() + _pass_seconds(source.config, 1)
    linears = linear_columns(source.config)
    specs = [spec for spec in work.encoder.planned if spec.name.removesuffix(".weight") in linears]
    layers = dict(Counter(str(spec.scheme or "floats") for spec in specs)) if source.config.runnable else {}
    return Estimate(layers, phases[phase], phase, 0, disk, 0, seconds, checked, notes)


def quantize(
    src: str | Path,
    dst: str | Path,
    scheme: str | QuantScheme | Recipe | None = None,
    *,
    target_bits: float | None = None,
    max_size: int | None = None,
    head: str | QuantScheme | None = None,
    to: TargetName | None = None,
    split_max_size: int | None = None,
    method: Method = "rtn",
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    thorough: bool = False,
    activation_memory: int | None = None,
    device: str | torch.device | None = None,
    embedding: str | QuantScheme | None = None,
    keep: str | Iterable[str] = (),
    strict: bool = False,
    accept_quality_loss: bool = False,
    certify_positions: int | None = None,
    certify_text: str | Path | None = None,
    base_model: str | None = None,
    license: str | None = None,
    template: str | None = None,
    weights: WeightKind | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    tensors_only: bool = False,
) -> Estimate:
    """What `quantkit.quantize` with the same arguments would take; calibration text is read, and no samples are drawn.

    Returns:
        Memory, disk and time, and what becomes of the layers.

    Raises:
        QuantkitError: as `quantkit.quantize` does for what can be told without reading weights.
    """
    require_flags(thorough=thorough, strict=strict, accept_quality_loss=accept_quality_loss)
    require_flags(resume=resume, allow_nonfinite=allow_nonfinite, source_check=source_check, tensors_only=tensors_only)
    dst = as_path("dst", dst)
    target = quantized_target(to, dst)
    Labels(base_model, license)
    settings = gptq_settings(
        method, calibration, samples=samples, length=length, seed=seed, thorough=thorough,
        activation_memory=activation_memory, device=device,
    )  # fmt: skip
    size = size_target(target_bits, max_size, scheme)
    prepared = prepare(
        src, dst, asked_recipe(scheme, size, head), embedding=embedding, keep=keep, strict=strict, weights=weights,
        tensors_only=tensors_only, gptq=settings is not None, target=target,
    )  # fmt: skip
    source, assignment, tokenizer, notes = prepared.source, prepared.scheme_map, prepared.tokenizer, prepared.notes
    assigned, config = assignment.schemes, source.config
    container = target.container
    blocks, most = tensor_blocks(source, assigned, target), shard_bytes(split_max_size, container, SHARD_BYTES)
    output = planned_output(prepared, blocks, target, template, most, model_name(source), dst)
    encoder, side_files = container.encoder(output), container.side_files(output)
    disk = encoder.total_bytes() + _side_bytes(side_files) + _MANIFEST * len(assignment.modules)
    phases = {"writing": _streaming(source, encoder)}
    checked = _checked_tokens(source, source_check)
    scratch, on_device, flops, seconds = 0, 0, 0, 0.0
    if config.runnable:
        phases["the gate"] = _gate(source)
        flops = forward_flops(config, 3 * measured_tokens(source) + checked)
        seconds = _pass_seconds(config, 3 + bool(checked))
    if (long := certified_text(certify_positions, certify_text, source, tokenizer)) is not None:
        notes += long.notes
        one = min(long.windows.shape[1], TOKENS_THROUGH_A_BLOCK)
        phases["the certificate"] = _forward(source, one, models=0) + long.memory_bytes(config)
        flops += forward_flops(config, long.tokens) + long.attention_flops(config)
        seconds += _pass_seconds(config, 3 * len(long.windows))
    if settings is not None:
        effort, shape = settings.effort, settings.shape(tokenizer, source)
        notes += too_few_tokens(shape, config)
        held, scratch = activation_bytes(config, shape, effort, settings.memory_bytes)
        work_bytes = gptq_bytes(config, batch_samples(config, shape[1]) * shape[1])
        codes = largest_block(config)
        if settings.device.type == "cuda":
            on_device, work_bytes = work_bytes, 0
        phases["calibration"] = resident_bytes() + _LIBRARIES + held + codes + work_bytes
        flops += calibration_flops(config, shape, effort)
        seconds += calibration_seconds(config, shape, effort)
    kinds = Counter(str(assigned[module]) if module in assigned else "float" for module in assignment.modules)
    if size is not None:
        sized = SizeFit(prepared, size, target, template, most, output.name, dst)
        fit = sized.required(settings)
        assert settings is not None
        disk += fit.most_bytes - encoder.total_bytes()
        needed = choice_bytes(config, shape, settings.memory_bytes)
        phases["the choice of schemes"] = resident_bytes() + _LIBRARIES + needed
        flops += choice_flops(config, shape, settings.memory_bytes)
        chosen = {module for unit in fit.units for module in unit.modules}
        kinds = Counter(
            f"chosen for {size}" if module in chosen else str(scheme or "float")
            for module, scheme in assignment.assigned.items()
        )
    _require_room(dst, encoder, disk + scratch, resume)
    phase = max(phases, key=lambda name: phases[name])
    seconds += flops / _flop_rate() + _writing_seconds(disk)
    return Estimate(dict(kinds), phases[phase], phase, on_device, disk, scratch, seconds, checked, notes)


def generate(
    model: str | Path | Checkpoint,
    target: str,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: FloatName | torch.dtype | None = None,
) -> SliceEstimate:
    """What generation takes of each chip of a TPU slice, as the compiler for that slice says; no TPU is needed.

    Args:
        model: a folder, or an open checkpoint; only its shapes are looked at.
        target: kind and number of chips, such as ``v5e-16``.
        batch: texts at once.
        context: tokens of a text, prompt included; None is all that the model can.
        dtype: of activations and float weights: ``bf16``, ``fp16``, ``fp32``, or torch's; None is the checkpoint's own.

    Returns:
        What each chip holds and exchanges.

    Raises:
        RequestError: for an unknown slice, or one that the model does not fit; if jax, torchax or the compiler for
            TPUs is not installed.
    """
    float_dtype = float_type(dtype)
    target, batch = as_text("target", target), as_whole("batch", batch)
    context = None if context is None else as_whole("context", context)
    if not hasattr(model, "config"):
        model = as_path("model", model)
    require_compiler()
    from quantkit.xla.estimate import estimate_slice

    checkpoint: Checkpoint = open_checkpoint(model) if isinstance(model, (str, Path)) else model
    require_runnable(checkpoint)
    return estimate_slice(checkpoint, target, batch=batch, context=context, dtype=float_dtype)


def _require_room(dst: Path, encoder: Encoder, needed: int, resume: bool) -> None:
    partial = partial_folder(dst)
    require_output_absent(dst, output_files(dst, encoder.files()), partial)
    require_room_to_build(partial, resume=resume)
    require_space(dst, needed)


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


def _gate(source: Checkpoint) -> int:
    """Peak of the gate, which holds the hidden states of three models on all texts."""
    return _forward(source, measured_tokens(source), models=3)


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
    groups = sum(count for _, count in every_group(config))
    return models * groups * _SECONDS_OF_GROUP


def _flop_rate() -> float:
    """Floating-point operations a second of a matrix product here and now."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = math.inf
    for _ in range(6):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 1024**3 / best


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
