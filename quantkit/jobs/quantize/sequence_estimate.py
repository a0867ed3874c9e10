"""Estimate `quantize` with `refine=True`: a quantization, and a refinement of its result."""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.jobs.output.estimate import Estimate
from quantkit.jobs.output.speed import Speed
from quantkit.jobs.quantize.estimate import estimate_quantization
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.size_fit import set_up_size_fit
from quantkit.jobs.refine.estimate import REFINED_GATE, REFINED_WRITING, TrainingCost
from quantkit.jobs.refine.options import BATCH, EPOCHS
from quantkit.quality.bounds import count_gate_tokens
from quantkit.training.trained import has_trained_scales


def estimate_sequence(plan: Plan, options: QuantizeOptions) -> Estimate:
    """Estimate the steps of both jobs, one after the other.

    Raises:
        RequestError: if the result has no scales to train, or is rounded to nearest.
    """
    format_plan = plan.formats.first
    scheme_map = format_plan.scheme_map
    settings = plan.solver.settings
    source = format_plan.source
    trained = {}
    # K-quants, small floats and schemes with integer scales have nothing that training can change.
    for module, scheme in scheme_map.linears.items():
        if has_trained_scales(scheme):
            trained[module] = (source.info(f"{module}.weight").shape, scheme)
    if not trained:
        raise RequestError(
            Message(
                Option("refine", value=True),
                " trains float scales of integer weights, and no linear gets any",
            ),
            path=source.path,
            found=" and ".join(scheme_map.counts()),
            expected="int4 or int8",
        )
    # Schemes of 8 bits are rounded by default.
    if settings is None:
        raise RequestError(
            Message(
                Option("refine", value=True),
                " trains on GPTQ's samples, and this scheme is rounded to nearest by default",
            ),
            path=source.path,
            found=" and ".join(scheme_map.counts()),
            hint=Message(
                "add ", Option("method", value="gptq"), ", or run `quantkit refine` on the result"
            ),
        )
    fit = set_up_size_fit(format_plan, options.size)
    estimate = estimate_quantization(plan, fit, length=options.length, resume=options.resume)
    cost = TrainingCost.of(
        source.config,
        settings,
        trained,
        epochs=EPOCHS if options.epochs is None else options.epochs,
        batch=BATCH,
        codes=options.train_codes,
    )
    if cost.memory_bytes > estimate.memory_bytes:
        phase = "training"
    else:
        phase = estimate.phase
    speed = Speed(source.config)
    steps = {**estimate.steps, **cost.steps}
    steps[REFINED_WRITING] = speed.writing(estimate.disk_bytes, estimate.disk_bytes)
    if source.config.measurable:
        steps[REFINED_GATE] = speed.forward(count_gate_tokens(source), models=3)
    total_seconds = math.fsum(steps.values())
    efforts = {}
    # The effort changes the quantization alone: training adds the same time to each.
    for name, seconds in estimate.efforts.items():
        efforts[name] = seconds + total_seconds - estimate.seconds
    return replace(
        estimate,
        memory_bytes=max(estimate.memory_bytes, cost.memory_bytes),
        phase=phase,
        steps=steps,
        seconds=total_seconds,
        efforts=efforts,
        # The quantized model stays on disk until the refined one has passed the gate.
        disk_bytes=2 * estimate.disk_bytes,
        scratch_bytes=max(estimate.scratch_bytes, cost.scratch_bytes),
    )
