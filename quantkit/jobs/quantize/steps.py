"""Estimate the seconds of each step of a quantization, by the names of the steps' phases in reports
of progress.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantkit.base.late import LateModule
from quantkit.calibration import estimate as costs
from quantkit.calibration.cache_scales import CACHE_SCALES, scale_tokens
from quantkit.calibration.effort import EFFORTS, GRADIENTS, Effort
from quantkit.calibration.settings import DRAWING, GptqSettings
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.jobs.output.speed import Speed, estimate_draw
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.rounding_probe import PROBE, is_probed
from quantkit.quality.bounds import count_gate_tokens, window_length
from quantkit.quality.positions import select_caches
from quantkit.quality.source_check import SOURCE_CHECK
from quantkit.tensors.products import compute_dtype
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from quantkit.bit_allocation import choice_costs, row_errors
    from quantkit.bit_allocation.fit import Fit
    from quantkit.calibration import importance
else:
    choice_costs = LateModule("quantkit.bit_allocation.choice_costs")
    row_errors = LateModule("quantkit.bit_allocation.row_errors")
    importance = LateModule("quantkit.calibration.importance")

# The time of samples and of the solver, in units of the time of their matrix products.
_OVERHEAD = 1.3
# For each linear, in addition to the search of its scales: sums over its weights and its Hessian.
_SECONDS_OF_CHOICE = 0.04


def quantization_steps(
    plan: Plan,
    fit: Fit | None,
    sizes: Sequence[WeightSizes],
    checked_tokens: int,
    length: int | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the seconds of each step, in order; and of all steps with each effort of GPTQ, if it
    solves.

    Args:
        fit: the choice of schemes for a size, if there is one.
        sizes: of the weights of the source and of the output in each format.
        checked_tokens: those on which the source is checked.
        length: the requested tokens of a sample; None is each effort's own.
    """
    settings = plan.solver.settings
    config = plan.formats.source.config
    speed = Speed(config)
    steps = _steps(plan, settings, fit, speed, sizes, checked_tokens)
    efforts: dict[str, float] = {}
    # The plan shows all efforts, so that a user can compare them before a job begins.
    if settings is not None:
        for name in EFFORTS:
            effort_settings = settings.with_effort(name, length, config)
            effort_steps = _steps(plan, effort_settings, fit, speed, sizes, checked_tokens)
            efforts[name] = math.fsum(effort_steps.values())
    return steps, efforts


def _steps(
    plan: Plan,
    settings: GptqSettings | None,
    fit: Fit | None,
    speed: Speed,
    sizes: Sequence[WeightSizes],
    checked_tokens: int,
) -> dict[str, float]:
    formats = plan.formats
    scheme_map = formats.first.scheme_map
    certified = plan.checks.certified
    source = formats.source
    config = source.config
    weights = _weights(formats.first)
    writing = speed.writing(sum(size.output_bytes for size in sizes), sizes[0].source_bytes)
    if config.measurable:
        gate_tokens = count_gate_tokens(source)
    else:
        gate_tokens = 0
    steps: dict[str, float] = {}
    if settings is None and not config.measurable:
        steps["rounding errors"] = speed.rounding(weights, searched=True)
    if settings is not None:
        steps |= _estimate_steps_before_check(settings, fit, speed)
        shape = settings.samples, settings.length
        effort = settings.effort_on(config, shape, scheme_map.linears.values())
    if checked_tokens:
        # The source passes all of the gate's windows once, for all checks.
        steps[SOURCE_CHECK] = speed.blocks(gate_tokens) + speed.head(checked_tokens)
    if is_probed(source, settings):
        probe_tokens = window_length(source)
        probe_seconds = speed.blocks(probe_tokens) + 2 * speed.head(probe_tokens)
        steps[PROBE] = probe_seconds + speed.rounding(weights, searched=False)
    if settings is not None:
        flops = costs.gradient_flops(config, shape, effort)
        # Only the thorough effort has a backward pass.
        if flops:
            tokens = effort.gradient_samples(config, shape) * settings.length
            steps[GRADIENTS] = _OVERHEAD * (speed.products(flops) + speed.head_gradients(tokens))
    if plan.solver.is_weighted(config, scheme_map):
        steps[importance.IMPORTANCE] = speed.forward(
            math.prod(importance.importance_tokens(source))
        )
    # GPTQ measures keys and values on its own samples; rounding needs a pass of its own for them.
    if settings is None and plan.solver.kv_cache is not None:
        tokens = math.prod(scale_tokens(source))
        steps[CACHE_SCALES] = speed.forward(tokens) + speed.rounding(weights, searched=True)
    if settings is None:
        scale_dtypes = set()
        # Formats with the same type of scales share the rounded weights.
        for block in formats.blocks:
            for spec in block.tensors:
                if spec.scheme is not None:
                    scale_dtypes.add(spec.dtype)
        steps["quantize"] = writing + len(scale_dtypes) * speed.rounding(weights, searched=True)
    else:
        steps["quantize"] = writing + _estimate_gptq_seconds(settings, effort, speed)
    for number, folder in enumerate(formats.by_folder):
        # A model that is only rounded is its own baseline: two models run instead of three, and the
        # weights are rounded once more. With a quantized KV cache it also runs with floats there,
        # and its weights are rounded again for that.
        if config.measurable and settings is None:
            extra_models = int(plan.solver.kv_cache is not None)
            gate_seconds = speed.forward(gate_tokens, models=1 + extra_models)
            gate_seconds += speed.head(gate_tokens)
            gate_seconds += (1 + extra_models) * speed.rounding(weights, searched=True)
            steps[phase_of("gate", folder)] = gate_seconds
        # After GPTQ, weights are rounded for the baseline, and once more to compare their errors.
        elif config.measurable:
            gate_seconds = speed.forward(gate_tokens, models=2) + speed.head(gate_tokens)
            gate_seconds += 2 * speed.rounding(weights, searched=False)
            steps[phase_of("gate", folder)] = gate_seconds
        # Without a check, the first gate runs the source.
        if config.measurable and not checked_tokens and number == 0:
            steps[phase_of("gate", folder)] += speed.blocks(gate_tokens)
        if certified is not None:
            # Of the source, and of the result with each cache.
            passes = (1 + len(select_caches(config))) * len(certified.windows)
            attention = speed.products(certified.attention_flops(config))
            steps[phase_of("certificate", folder)] = (
                speed.forward(certified.count_tokens(config), passes=passes) + attention
            )
    return steps


def phase_of(check: str, folder: str) -> str:
    """Name the phase of a check of the result in a folder of the output; ``""`` is the output
    itself.
    """
    if folder:
        return f"{check} of {folder}"
    return check


def _estimate_steps_before_check(
    settings: GptqSettings, fit: Fit | None, speed: Speed
) -> dict[str, float]:
    """Estimate the steps before the source is checked: the choice of samples, and of schemes."""
    steps = {}
    shape = (settings.samples, settings.length)
    config = speed.config
    drawing = estimate_draw(settings, speed)
    if drawing:
        steps[DRAWING] = drawing
    if fit is not None:
        _, for_gradients = choice_costs.sample_counts(config, shape, settings.memory_bytes)
        pass_seconds = speed.products(
            choice_costs.choice_flops(config, shape, settings.memory_bytes)
        )
        head_seconds = speed.head_gradients(for_gradients * settings.length)
        trial_weights = row_errors.count_trial_weights(fit.units, fit.options)
        rounding_seconds = speed.rounding(trial_weights, searched=True)
        choice_seconds = _SECONDS_OF_CHOICE * speed.linears
        steps[choice_costs.CHOICE] = (
            _OVERHEAD * (pass_seconds + head_seconds) + rounding_seconds + choice_seconds
        )
    return steps


def _estimate_gptq_seconds(settings: GptqSettings, effort: Effort, speed: Speed) -> float:
    """Estimate the seconds of GPTQ: of its samples, its solver, and their other arithmetic."""
    config = speed.config
    device = settings.device
    shape = (settings.samples, settings.length)
    solving = speed.products(costs.solving_flops(config, shape, effort), device=device)
    sample_flops = costs.calibration_flops(config, shape, effort)
    # Samples run in the type of the device; the solver computes in float32.
    samples = speed.products(sample_flops, compute_dtype(device), device)
    other_seconds = costs.calibration_seconds(config, shape, effort, device)
    return _OVERHEAD * (solving + samples) + other_seconds


def _weights(plan: FormatPlan) -> Counter[QuantScheme]:
    """Count the weights of each scheme."""
    weights = Counter[QuantScheme]()
    for module, scheme in plan.scheme_map.schemes.items():
        weights[scheme] += math.prod(plan.source.info(f"{module}.weight").shape)
    return weights
