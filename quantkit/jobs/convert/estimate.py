"""Estimate the memory, disk and time of a conversion."""

from __future__ import annotations

import math
from collections import Counter

from quantkit.architectures.topology import linear_columns
from quantkit.jobs.convert.conversion import Conversion
from quantkit.jobs.output.estimate import (
    Estimate,
    _estimate_streaming_bytes,
    count_checked_tokens,
    forward_bytes,
    side_bytes,
)
from quantkit.jobs.output.speed import Speed
from quantkit.quality.bounds import count_gate_tokens
from quantkit.quality.source_check import SOURCE_CHECK


def estimate_conversion(planned: Conversion) -> Estimate:
    """Estimate what a conversion takes."""
    work = planned.work
    notes = planned.notes
    source = work.source
    config = source.config
    specs = work.encoder.planned
    disk = work.encoder.total_bytes() + side_bytes(work.side_files)
    phases = {"writing": _estimate_streaming_bytes(source, work.encoder)}
    # The check runs while the source is hashed, and ends before the first tensor is written.
    checked = count_checked_tokens(source, planned.options.source_check)
    speed = Speed(config)
    steps = dict[str, float]()
    if checked:
        phases[SOURCE_CHECK] = forward_bytes(source, checked, models=1)
        steps[SOURCE_CHECK] = speed.forward(checked)
    source_bytes = sum(file.size for file in source.files())
    steps["convert"] = speed.writing(disk, source_bytes)
    # Carried codes are compared as numbers. Only changed ones need a pass through both models.
    if planned.changes.rounded or planned.changes.cast:
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
    return Estimate(dict(layers), phases[phase], phase, 0, disk, 0, seconds, checked, notes, steps)
