"""Estimate the memory, disk and time of a conversion."""

from __future__ import annotations

import math
from collections import Counter

from quantkit.architectures.topology import linear_columns
from quantkit.jobs.convert.conversion import Conversion
from quantkit.jobs.output.estimate import (
    Estimate,
    count_checked_tokens,
    estimate_streaming_bytes,
    forward_bytes,
    measure_planned,
    side_bytes,
)
from quantkit.jobs.output.speed import Speed
from quantkit.quality.bounds import count_gate_tokens
from quantkit.quality.source_check import SOURCE_CHECK
from quantkit.quality.transcoded import EXACT_COMPARISON


def estimate_conversion(plan: Conversion) -> Estimate:
    """Estimate what a conversion takes."""
    work = plan.work
    notes = plan.notes
    source = work.source
    config = source.config
    specs = work.encoder.planned
    disk = work.encoder.total_bytes() + side_bytes(work.side_files)
    phases = {"writing": estimate_streaming_bytes(source, work.encoder)}
    # The check runs while the source is hashed, and ends before the first tensor is written.
    checked = count_checked_tokens(source, plan.options.source_check)
    speed = Speed(config)
    steps = dict[str, float]()
    if checked:
        phases[SOURCE_CHECK] = forward_bytes(source, checked, models=1)
        steps[SOURCE_CHECK] = speed.forward(checked)
    source_bytes = sum(file.size for file in source.files())
    steps["convert"] = speed.writing(disk, source_bytes)
    steps[EXACT_COMPARISON] = speed.reading(source_bytes + disk)
    # All else is compared as numbers. Only changed codes need a pass through both models.
    if plan.changes.rounded or plan.changes.scale_casts:
        steps["gate"] = speed.forward(count_gate_tokens(source), models=2)
    phase = max(phases, key=lambda name: phases[name])
    linears = linear_columns(config)
    layers = Counter[str]()
    # The report calls an empty count "unknown", as the architecture is.
    if config.runnable:
        for spec in specs:
            if spec.name.removesuffix(".weight") in linears:
                layers[str(spec.scheme or "floats")] += 1
    seconds = math.fsum(steps.values())
    return Estimate(
        layers=dict(layers),
        memory_bytes=phases[phase],
        phase=phase,
        device_bytes=0,
        disk_bytes=disk,
        scratch_bytes=0,
        seconds=seconds,
        source_check_tokens=checked,
        notes=notes,
        steps=steps,
        to_run=measure_planned(config, specs),
        context=config.max_context,
    )
