"""Estimate the memory, disk and time of a quantization from shapes and headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.architectures.names import EMBEDDING
from quantkit.base.late import LateFunction, LateModule
from quantkit.calibration import estimate as costs
from quantkit.calibration.data import is_self
from quantkit.calibration.effort import batch_samples
from quantkit.calibration.packaged import PREFIX
from quantkit.formats.output.staging import (
    name_partial_folder,
)
from quantkit.jobs.output.estimate import (
    Estimate,
    count_checked_tokens,
    estimate_streaming_bytes,
    forward_bytes,
    measure_planned,
    process_bytes,
    side_bytes,
)
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.settings import note_too_few_tokens
from quantkit.jobs.quantize.sizes import weight_sizes
from quantkit.jobs.quantize.steps import quantization_steps
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.bounds import count_gate_tokens
from quantkit.quality.kept_states import count_kept_bytes
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from quantkit.bit_allocation import choice_costs
    from quantkit.bit_allocation.fit import Fit
    from quantkit.calibration.self_text import estimate_writing_bytes
else:
    estimate_writing_bytes = LateFunction("quantkit.calibration.self_text:estimate_writing_bytes")
    choice_costs = LateModule("quantkit.bit_allocation.choice_costs")

# Factor on the memory of the choice of schemes: the allocator keeps freed memory between the states
# that stay, as measured.
_HEAP = 1.25
# Bytes of quantkit.json for each linear layer.
_MANIFEST = 300


def estimate_quantization(
    plan: Plan, fit: Fit | None, *, length: int | None, resume: bool
) -> Estimate:
    """Estimate a quantization.

    Args:
        fit: what chooses the schemes for a size; those of the plan are placeholders then.
        length: the requested tokens of a sample; None is each effort's own.
        resume: whether an interrupted run is continued, if there is one.
    """
    formats = plan.formats
    format_plans = list(formats.by_folder.values())
    source = formats.source
    scheme_map = formats.first.scheme_map
    settings = plan.solver.settings
    certified = plan.checks.certified
    # Formats share notes on the source, and each is printed once.
    notes = list(plan.notes)
    for format_plan in format_plans:
        for note in format_plan.notes:
            if note not in notes:
                notes.append(note)
    assigned = scheme_map.module_schemes
    config = source.config
    sizes = []
    for format_plan in format_plans:
        # Until the schemes are chosen, only the limit of their size is known.
        if fit is None:
            output_bytes = format_plan.encoder.total_bytes()
        else:
            output_bytes = fit.max_bytes
        sizes.append(weight_sizes(format_plan, output_bytes))
    written = sum(size.output_bytes for size in sizes)
    manifest_bytes = _MANIFEST * len(assigned) * len(format_plans)
    disk = written + side_bytes(formats.side_files) + manifest_bytes
    phases = {
        "writing": max(
            estimate_streaming_bytes(source, format_.encoder) for format_ in format_plans
        )
    }
    # Weights that are rounded for one format are kept for the next ones.
    if len(format_plans) > 1 and settings is None:
        phases["writing"] += costs.largest_block(config)
    checked = count_checked_tokens(source, plan.checks.source_check)
    scratch = 0
    on_device = 0
    # The gate holds the hidden states of three models on all texts.
    if config.measurable:
        phases["the gate"] = forward_bytes(source, count_gate_tokens(source), models=3)
    if certified is not None:
        # `memory_bytes` counts the hidden states of a window.
        block_tokens = certified.windows.shape[1]
        # quantkit's decoder runs a long window in parts through a block.
        if config.runnable:
            block_tokens = min(block_tokens, TOKENS_THROUGH_A_BLOCK)
        block_bytes = forward_bytes(source, block_tokens, models=0)
        phases["the certificate"] = block_bytes + certified.memory_bytes(config)
    if settings is not None:
        shape = settings.samples, settings.length
        notes += note_too_few_tokens(shape, config)
        device = settings.device
        schemes = scheme_map.linears.values()
        activation_bytes, scratch, on_device = settings.activation_bytes(config, shape, schemes)
        batch = batch_samples(config, shape[1]) * shape[1]
        effort = settings.effort_on(config, shape, schemes)
        backward = costs.gradient_bytes(config, shape, effort, settings.memory_bytes)
        work_bytes = costs.gptq_bytes(config, batch, device, two_sided=backward > 0)
        # The solved codes of a block are kept until they are written.
        codes = costs.largest_block(config)
        if config.run_by is not None:
            work_bytes = costs.lockstep_bytes(config, batch)
        # The solver's matrices are on the device that computes.
        if device.type == "cuda":
            on_device = on_device + work_bytes
            work_bytes = 0
        states_bytes = count_kept_bytes(source)
        phases["calibration"] = (
            process_bytes() + activation_bytes + codes + work_bytes + states_bytes
        )
        if backward:
            phases["the gradients"] = process_bytes() + backward
        if fit is not None:
            needed = choice_costs.choice_bytes(config, shape, settings.memory_bytes)
            phases["the choice of schemes"] = process_bytes() + int(_HEAP * needed)
        # The model tries the beginning of each sample of the included text, and drops those that it
        # cannot predict.
        if is_self(settings.text):
            writing_bytes = estimate_writing_bytes(source, *shape, device)
            if device.type == "cuda":
                on_device = max(on_device, writing_bytes)
                writing_bytes = 0
            phases["the writing of samples"] = process_bytes() + writing_bytes
        elif settings.text is None:
            tried = shape[0] * min(shape[1], PREFIX)
            phases["the choice of samples"] = forward_bytes(source, tried, models=1)
    kinds = _count_kinds(assigned, fit)
    phase = max(phases, key=lambda name: phases[name])
    steps, efforts = quantization_steps(plan, fit, sizes, checked, length)
    # All formats store the same codes.
    to_run = measure_planned(config, formats.first.output.planned)
    if fit is not None:
        # The placeholders of schemes that are not chosen yet have another size.
        to_run = replace(to_run, weight_bytes=fit.max_bytes)
    return Estimate(
        layers=dict(kinds),
        memory_bytes=phases[phase],
        phase=phase,
        device_bytes=on_device,
        disk_bytes=disk,
        scratch_bytes=scratch,
        seconds=math.fsum(steps.values()),
        source_check_tokens=checked,
        notes=notes,
        steps=steps,
        efforts=efforts,
        weights=sizes[0] if len(format_plans) == 1 else None,
        kv_cache=plan.solver.kv_cache,
        resumed=resume and name_partial_folder(formats.dst).is_dir(),
        to_run=to_run,
        context=config.max_context,
    )


def _count_kinds(assigned: Mapping[str, QuantScheme | None], fit: Fit | None) -> Counter[str]:
    """Count the linears by scheme; those whose schemes `fit` chooses are one kind."""
    chosen: set[str] = set()
    kinds: Counter[str] = Counter()
    if fit is not None:
        for unit in fit.units:
            chosen.update(unit.modules)
        if chosen:
            kinds[f"chosen for {fit.target}"] = len(chosen)
    for module, scheme in assigned.items():
        if module != EMBEDDING and module not in chosen:
            kinds[str(scheme or "float")] += 1
    return kinds
