"""Set up a quantization: its final schemes and samples, its quantizer, and the record of all that
decides its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from quantkit.base.late import LateModule
from quantkit.base.progress import Progress, in_phase
from quantkit.calibration.cache_scales import scale_tokens
from quantkit.calibration.data import Calibration, is_self
from quantkit.calibration.quantizers import RtnQuantizer
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.manifest import ACTIVATIONS
from quantkit.jobs.output.machine import machine
from quantkit.jobs.output.target import NATIVE
from quantkit.jobs.output.writer import Work, content_hash
from quantkit.jobs.quantize.calibrated_model import prepare_model
from quantkit.jobs.quantize.formats import FormatPlan, Formats
from quantkit.jobs.quantize.plan import Plan, SolverPlan
from quantkit.jobs.quantize.settings import note_too_few_tokens
from quantkit.jobs.quantize.size_fit import BIT_ALLOCATION, choose_schemes, set_up_size_fit
from quantkit.jobs.quantize.weights_only import find_modules_out_of_bounds, note_out_of_bounds
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.shared_scales import SharedScales
from quantkit.solver.columns import ColumnKernels, with_positive_scales
from quantkit.tensors.products import compute_dtype

if TYPE_CHECKING:
    from quantkit.bit_allocation.fit import Fit
    from quantkit.calibration import importance as input_importance
    from quantkit.jobs.quantize import imatrix
    from quantkit.passes.passage import Survey
else:
    input_importance = LateModule("quantkit.calibration.importance")
    imatrix = LateModule("quantkit.jobs.quantize.imatrix")

# The entries of the manifest on a quantization, in order.
_ENTRIES = (
    "recipe",
    "method",
    "allow_nonfinite",
    "tensors_only",
    "linears_by",
    "run_by",
    "to",
    ACTIVATIONS,
    "dequantize",
    "lora",
    "imatrix",
    "kv_cache",
    "split_max_size",
    BIT_ALLOCATION,
    "calibration",
    "effort",
    "template",
)


@dataclass(frozen=True)
class Samples:
    """The samples of GPTQ.

    Attributes:
        drawn: their tokens, and where these come from.
        survey: how samples reach the linears of a model that transformers runs; None for others.
    """

    drawn: Calibration
    survey: Survey | None


def settle_schemes_and_samples(
    formats: Formats,
    solver: SolverPlan,
    fit: Fit | None,
    *,
    resume: bool,
    group: ProcessGroup,
    progress: Progress,
) -> tuple[Formats, Samples | None]:
    """Decide on the final schemes, and draw the calibration samples; None for rounding.

    Args:
        resume: whether a choice of schemes by an interrupted run is kept.
    """
    source = formats.source
    settings = solver.settings
    # Without logits there is no gate: weights that rounding changes too much keep their floats.
    if not source.config.measurable:
        reasons = find_modules_out_of_bounds(
            source,
            formats.first.scheme_map.schemes,
            allow_nonfinite=solver.allow_nonfinite,
            progress=progress,
        )
        if reasons:
            kept = note_out_of_bounds(source, reasons)
            formats = formats.change_each(lambda plan: plan.without(reasons, [kept]))
    if settings is None:
        return formats, None
    drawn = settings.draw(source, group=group, progress=progress)
    survey = None
    unsolved: dict[str, str] = {}
    unsolved_notes: list[str] = []
    if source.config.run_by is not None:
        # Imports greenlet, which other jobs do not need.
        from quantkit.jobs.quantize.lockstep import survey_linears

        unsolved, unsolved_notes, survey = survey_linears(
            formats.first, drawn, solves_repeated=fit is None
        )
        formats = formats.change_each(lambda plan: plan.without(unsolved, unsolved_notes))
        # Only linears that can be solved are in the choice.
        if fit is not None:
            fit = set_up_size_fit(formats.first, fit.target)
    if fit is not None:
        allocation = choose_schemes(
            formats.dst,
            fit,
            settings,
            drawn,
            resume=resume,
            survey=survey,
            group=group,
            progress=progress,
        )
        # A size goes with one format.
        formats = formats.change_each(lambda plan: plan.with_allocation(allocation))
        # The chosen schemes are for all linears.
        if unsolved:
            formats = formats.change_each(lambda plan: plan.without(unsolved, unsolved_notes))
    notes = [*drawn.notes, *note_too_few_tokens(drawn.tokens.shape, source.config)]
    formats = formats.change_each(lambda plan: plan.add_notes(notes))
    return formats, Samples(drawn, survey)


def quantizer_of(
    plan: FormatPlan,
    solver: SolverPlan,
    samples: Samples | None,
    group: ProcessGroup,
    progress: Progress,
) -> RtnQuantizer:
    """Build the quantizer of a job: rounding, or GPTQ with quantkit's decoder or transformers."""
    source = plan.source
    scheme_map = plan.scheme_map
    settings = solver.settings
    shared = SharedScales(source, scheme_map.schemes)
    kernels_of = _choose_kernel_selector(plan)
    if settings is None or samples is None:
        quantizer = RtnQuantizer(
            source,
            allow_nonfinite=solver.allow_nonfinite,
            shared=shared,
            kernels_of=kernels_of,
            progress=progress,
        )
        # Rank 0 alone rounds and writes.
        if solver.is_weighted(source.config, scheme_map) and group.is_rank0:
            observed = in_phase(progress, input_importance.IMPORTANCE)
            importance = partial(
                input_importance.input_importance,
                source,
                plan.output.tokenizer,
                linears=scheme_map.linears,
                progress=observed,
            )
            if solver.imatrix is not None:
                importance = partial(imatrix.importance_from, solver.imatrix, source)
            # Measured on first use: a run that has all tensors already needs none. The gate, which
            # rounds the same weights, uses the same values.
            quantizer.importance = cache(importance)
        if solver.kv_cache is not None and group.is_rank0:
            quantizer.cache_sample = partial(
                input_importance.sample_tokens, source, plan.output.tokenizer, *scale_tokens(source)
            )
        return quantizer
    drawn = samples.drawn
    effort = settings.effort_on(source.config, drawn.tokens.shape, scheme_map.linears.values())
    # Imports greenlet, which other jobs do not need.
    from quantkit.calibration.gptq_quantizer import GptqQuantizer

    length = samples.drawn.tokens.shape[1]
    model = prepare_model(source, samples.survey, length, settings.device)
    return GptqQuantizer(
        source=source,
        calibration=drawn,
        schemes=scheme_map.schemes,
        passage=model.passage,
        groups=model.groups,
        recording_cache=model.recording_cache,
        embedding_parameter=model.embedding_parameter,
        device=settings.device,
        memory_bytes=settings.memory_bytes,
        effort=effort,
        allow_nonfinite=solver.allow_nonfinite,
        group=group,
        progress=progress,
        shared=shared,
        kernels_of=kernels_of,
    )


def _choose_kernel_selector(plan: FormatPlan) -> Callable[[torch.device], ColumnKernels]:
    """Choose the solver's kernels for a device. Scales stay positive where readers round the inputs
    of int4: vLLM's kernels for that were seen to take no others (vllm-project/vllm#48905).
    """
    for module in plan.inputs:
        scheme = plan.scheme_map.schemes[module]
        if scheme.is_int4:
            return lambda device: with_positive_scales(select_column_kernels(device))
    return select_column_kernels


def work_of(
    plan: Plan, format_plan: FormatPlan, drawn: Calibration | None, group: ProcessGroup
) -> Work:
    """Describe the output in one format with all that decides its bytes: for the manifest, and for
    runs that resume.
    """
    solver = plan.solver
    settings = solver.settings
    source = format_plan.source
    scheme_map = format_plan.scheme_map
    recorded: dict[str, object] = {
        **plan.request.recorded,
        "recipe": scheme_map.recipe.to_json(),
        "method": solver.method,
        "allow_nonfinite": solver.allow_nonfinite,
    }
    if source.config.run_by is not None:
        recorded["run_by"] = source.config.run_by
    if format_plan.target.name != NATIVE:
        recorded["to"] = format_plan.target.name
    if format_plan.activations:
        recorded[ACTIVATIONS] = format_plan.activations
    # The content counts, not the path: equal inputs give an equal manifest.
    if solver.imatrix is not None:
        recorded["imatrix"] = content_hash(solver.imatrix)
    if solver.kv_cache is not None:
        recorded["kv_cache"] = solver.kv_cache
    if format_plan.allocation is not None:
        recorded[BIT_ALLOCATION] = format_plan.allocation.to_json()
    # Sums of floats depend on the machine, and a resumed run must give the same bytes.
    computed_by: dict[str, object] = {}
    scratch = 0
    is_weighted = solver.is_weighted(source.config, scheme_map)
    # Plain rounding has no such sums.
    if settings is None and (is_weighted or solver.kv_cache is not None):
        computed_by = machine(torch.device("cpu"))
    elif settings is not None and drawn is not None:
        recorded |= {"calibration": drawn.to_json(), "effort": settings.effort_name}
        device = settings.device
        if device.type == "cuda":
            device_kind = torch.cuda.get_device_name(device)
        else:
            device_kind = device.type
        computed_by = machine(device) | {
            "number of processes": group.size,
            "samples multiplied in": str(compute_dtype(device)),
            "kind of device": device_kind,
        }
        # A model or a template has chosen, written or rendered these samples, so that text and seed
        # alone do not determine them.
        if settings.text is None or is_self(settings.text) or drawn.documents is not None:
            computed_by["calibration samples"] = drawn.fingerprint()
        _, scratch, _ = settings.activation_bytes(
            source.config, drawn.tokens.shape, scheme_map.linears.values()
        )
    # Equal requests give the same bytes of the manifest; an entry without a place is an error.
    ordered = {key: recorded[key] for key in sorted(recorded, key=_ENTRIES.index)}
    return Work(
        job="quantize",
        source=source,
        encoder=format_plan.encoder,
        side_files=format_plan.side_files,
        options=ordered,
        computed_by=computed_by,
        scratch_bytes=scratch,
    )
