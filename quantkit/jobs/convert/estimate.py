"""Estimate the memory, disk and time of a conversion."""

from __future__ import annotations

import math
from collections import Counter

from quantkit.architectures.topology import linear_columns
from quantkit.jobs.convert.conversion import Conversion
from quantkit.jobs.output.estimate import (
    Estimate,
    _streaming,
    count_checked_tokens,
    forward_bytes,
    side_bytes,
)
from quantkit.jobs.output.speed import Speed
from quantkit.quality.bounds import count_gate_tokens
from quantkit.quality.source_check import SOURCE_CHECK


def estimate_conversion(planned: Conversion) -> Estimate:
    """Return what a conversion takes."""
    work = planned.work
    notes = planned.notes
    source = work.source
    config = source.config
    specs = work.encoder.planned
    disk = work.encoder.total_bytes() + side_bytes(work.side_files)
    phases = {"writing": _streaming(source, work.encoder)}
    checked = count_checked_tokens(source, planned.options.source_check)
    speed = Speed(config)
    steps = dict[str, float]()
    if checked:
        phases[SOURCE_CHECK] = forward_bytes(source, checked, models=1)
        steps[SOURCE_CHECK] = speed.forward(checked)
    steps["convert"] = speed.writing(disk, sum(file.size for file in source.files()))
    if planned.changes.rounded or planned.changes.cast:
        steps["gate"] = speed.forward(count_gate_tokens(source), models=2)
    phase = max(phases, key=lambda name: phases[name])
    linears = linear_columns(config)
    counted = [spec for spec in specs if spec.name.removesuffix(".weight") in linears]
    if config.runnable:
        layers = dict(Counter(str(spec.scheme or "floats") for spec in counted))
    else:
        layers = {}
    return Estimate(
        layers, phases[phase], phase, 0, disk, 0, math.fsum(steps.values()), checked, notes, steps
    )
