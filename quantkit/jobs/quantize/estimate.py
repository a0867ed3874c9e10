"""The memory, disk and time that conversions and quantizations take, from shapes and headers."""

from __future__ import annotations

import math
from collections import Counter

from quantkit.architectures.names import EMBEDDING
from quantkit.bit_allocation.fit import Fit
from quantkit.bit_allocation.losses import choice_bytes
from quantkit.calibration import estimate as costs
from quantkit.calibration.effort import batch_samples
from quantkit.calibration.packaged import PREFIX
from quantkit.formats.output.staging import (
    partial_folder,
)
from quantkit.jobs.output.estimate import (
    Estimate,
    _streaming,
    count_checked_tokens,
    forward_bytes,
    process_bytes,
    side_bytes,
)
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.prepare import too_few_tokens
from quantkit.jobs.quantize.sizes import weight_sizes
from quantkit.jobs.quantize.steps import quantization_steps
from quantkit.model.layerwise import TOKENS_THROUGH_A_BLOCK
from quantkit.quality.bounds import count_gate_tokens

# of the choice of schemes: freed memory stays between the states that it keeps, as measured
_HEAP = 1.25
# Bytes of quantkit.json for each linear layer.
_MANIFEST = 300


def estimate_quantization(formats: Formats, fit: Fit | None) -> Estimate:
    """Return what a quantization takes; with a `fit`, the schemes of `formats` stand for those that
    it chooses.
    """
    each = list(formats.prepared_by_folder.values())
    prepared = formats.first
    source = prepared.source
    settings = prepared.settings
    certified = prepared.certified
    notes = list(dict.fromkeys(note for one in each for note in one.notes))
    assigned = prepared.scheme_map.module_schemes
    config = source.config
    sizes = [
        weight_sizes(one, one.encoder.total_bytes() if fit is None else fit.max_bytes)
        for one in each
    ]
    written = sum(size.output_bytes for size in sizes)
    disk = written + side_bytes(formats.side_files) + _MANIFEST * len(assigned) * len(each)
    phases = {"writing": max(_streaming(source, one.encoder) for one in each)}
    # What is rounded for one format is kept for the next ones.
    if len(each) > 1 and settings is None:
        phases["writing"] += costs.largest_block(config)
    checked = count_checked_tokens(source, prepared.options.source_check)
    scratch = 0
    on_device = 0
    # The gate holds the hidden states of three models on all texts.
    if config.measurable:
        phases["the gate"] = forward_bytes(source, count_gate_tokens(source), models=3)
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
            on_device = on_device + work_bytes
            work_bytes = 0
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
        chosen = set()
        for unit in fit.units:
            for module in unit.modules:
                chosen.add(module)
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
