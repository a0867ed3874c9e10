"""Probe a scheme by rounding, before GPTQ: a note that the result will hardly pass the gate comes
within seconds.

GPTQ lowers the KL of rounding, but not without limit. If rounding exceeds the gate's bound by more
than GPTQ has ever been seen to gain, the user can choose another scheme at once, not after the
whole calibration.
"""

from __future__ import annotations

import math

from quantkit.base.progress import Progress, in_phase
from quantkit.bit_allocation.size_target import CANDIDATES
from quantkit.calibration.settings import GptqSettings
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.bounds import build_gate_windows, coarsest, scheme_bound, window_length
from quantkit.quality.gate import RtnBaseline
from quantkit.quality.measures import Hidden, compare
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme

PROBE = "rounding probe"
"""The name of the phase in reports of progress."""

GPTQ_GAIN = 6.0
"""The largest factor by which GPTQ lowers the KL of rounding, with a margin: docs/calibration.md
has the measured factors. A lower one would warn of schemes that pass.
"""

_CALIBRATION_SHARE = 64
"""Calibration tokens for each token of the probe, at least. A probe runs two models on one window
and rounds all weights, which then is 1 to 4 % of the job; the default number of samples suffices
for it.
"""


def is_probed(source: Checkpoint, settings: GptqSettings | None) -> bool:
    """Decide whether a job is long enough for a probe; from counts, so that forecast and job
    always agree.
    """
    if settings is None or not source.config.measurable:
        return False
    return settings.samples * settings.length >= _CALIBRATION_SHARE * window_length(source)


def probe_rounding(plan: FormatPlan, source_hidden: Hidden, progress: Progress) -> str | None:
    """Round the weights to nearest as they are loaded, and compare the result with the source on a
    window of the gate.

    Args:
        source_hidden: returns the source's hidden states, for instance those that are kept.

    Returns:
        A note if GPTQ cannot be expected to bring the KL within the gate's bound; None if it can.
    """
    source = plan.source
    schemes = plan.scheme_map.schemes
    # One window of one text is enough: the factor below leaves a wide margin.
    _, windows = next(iter(build_gate_windows(source).values()))
    scale_dtype = _find_scale_dtype(plan)
    rounded: Checkpoint = RtnBaseline(source, schemes, scale_dtype)
    if source.config.runnable and plan.inputs:
        rounded = RoundedInputs(rounded, plan.inputs)
    try:
        (quality,) = compare(
            source,
            [rounded],
            windows[:1],
            reference_hidden=source_hidden,
            progress=in_phase(progress, PROBE),
        )
    except NonFiniteError:
        # The checks of the source and of the result name the tensor.
        return None
    bound = scheme_bound(schemes.values()).kl
    # Even the largest gain of GPTQ would not bring a larger KL within the bound.
    if quality.divergence.kl <= GPTQ_GAIN * bound:
        return None
    return _describe(plan, kl=quality.divergence.kl, bound=bound)


def _find_scale_dtype(plan: FormatPlan) -> DType:
    """Find the type of the scales; all quantized tensors of a format have the same."""
    for block in plan.blocks:
        for spec in block.tensors:
            if spec.scheme is not None:
                return spec.dtype
    raise ValueError("no tensor is quantized")


def _describe(plan: FormatPlan, *, kl: float, bound: float) -> str:
    """Write the note: what rounding loses, the bound, and which schemes are finer."""
    scheme = coarsest(plan.scheme_map.schemes.values())
    note = (
        f"{plan.dst}: {scheme} will hardly pass the gate: rounding to nearest gives a KL of"
        f" {kl:.2g}, GPTQ lowers it {GPTQ_GAIN:g} times at most, and the bound is {bound:g}"
    )
    finer = ", ".join(str(candidate) for candidate in _list_finer_schemes(plan, scheme))
    if finer:
        return f"{note}; consider {finer}"
    return note


def _list_finer_schemes(plan: FormatPlan, scheme: QuantScheme) -> list[QuantScheme]:
    """List the schemes that the format holds with more bits than `scheme`, or as many in shorter
    groups.
    """
    codes = plan.target.codes
    assert codes is not None
    finer = []
    for candidate in CANDIDATES:
        shorter = (candidate.group_size or math.inf) < (scheme.group_size or math.inf)
        is_finer = candidate.bits > scheme.bits or (candidate.bits == scheme.bits and shorter)
        if is_finer and not isinstance(choose_codec(codes, candidate), Reason):
            finer.append(candidate)
    return finer
