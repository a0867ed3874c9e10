"""Set up a quantization: its final schemes and samples, its quantizer, and the record of all that
decides its bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from quantkit.base.arguments import as_path
from quantkit.base.progress import Progress, in_phase
from quantkit.bit_allocation.fit import Fit
from quantkit.calibration.cache_scales import scale_tokens
from quantkit.calibration.data import Calibration
from quantkit.calibration.importance import IMPORTANCE, input_importance, sample_tokens
from quantkit.calibration.quantizers import GptqQuantizer, RtnQuantizer
from quantkit.distributed.group import ProcessGroup
from quantkit.jobs.output.machine import machine
from quantkit.jobs.output.target import NATIVE
from quantkit.jobs.output.writer import Work, content_hash
from quantkit.jobs.quantize.imatrix import importance_from
from quantkit.jobs.quantize.prepare import (
    BIT_ALLOCATION,
    Prepared,
    choose_schemes,
    note_too_few_tokens,
)
from quantkit.jobs.quantize.weights_only import drop_schemes_out_of_bounds
from quantkit.model.shared_scales import SharedScales
from quantkit.quality.manifest_check import ACTIVATIONS
from quantkit.tensors.products import compute_dtype


def finalize_schemes(
    prepared: Prepared, fit: Fit | None, group: ProcessGroup, progress: Progress
) -> tuple[Prepared, Calibration | None]:
    """Decide on the final schemes, and draw the calibration samples; None for rounding."""
    source = prepared.source
    settings = prepared.settings
    drawn = None
    notes: list[str] = []
    # Without logits there is no gate: weights that rounding changes too much keep their floats.
    if not source.config.measurable:
        allow_nonfinite = prepared.options.allow_nonfinite
        scheme_map, notes = drop_schemes_out_of_bounds(
            source, prepared.scheme_map, allow_nonfinite=allow_nonfinite, progress=progress
        )
        prepared = replace(prepared, scheme_map=scheme_map)
    if settings is not None:
        drawn = settings.draw(source, group=group, progress=progress)
        notes = [*drawn.notes, *note_too_few_tokens(drawn.tokens.shape, source.config)]
        if source.config.run_by is not None:
            # Imports greenlet, which is optional.
            from quantkit.jobs.quantize.lockstep import survey_linears

            prepared = survey_linears(prepared, drawn)
        if fit is not None:
            prepared = choose_schemes(prepared, fit, drawn, group=group, progress=progress)
    return replace(prepared, notes=[*prepared.notes, *notes]), drawn


def quantizer_of(
    prepared: Prepared, drawn: Calibration | None, group: ProcessGroup, progress: Progress
) -> RtnQuantizer:
    """Build the quantizer of a job: rounding, or GPTQ with quantkit's decoder or transformers."""
    source = prepared.source
    settings = prepared.settings
    allow_nonfinite = prepared.options.allow_nonfinite
    shared = SharedScales(source, prepared.scheme_map.schemes)
    kernels_of = prepared.kernels_of
    if settings is None or drawn is None:
        quantizer = RtnQuantizer(
            source,
            allow_nonfinite=allow_nonfinite,
            shared=shared,
            kernels_of=kernels_of,
            progress=progress,
        )
        # Rank 0 alone rounds and writes.
        if prepared.is_weighted and group.is_rank0:
            observed = in_phase(progress, IMPORTANCE)
            linears = prepared.scheme_map.linears
            importance = partial(
                input_importance, source, prepared.tokenizer, linears=linears, progress=observed
            )
            if prepared.options.imatrix is not None:
                importance = partial(
                    importance_from, as_path("imatrix", prepared.options.imatrix), source
                )
            # Measured on first use: a run that has all tensors already needs none. The gate, which
            # rounds the same weights, uses the same values.
            quantizer.importance = cache(importance)
        if prepared.options.kv_cache is not None and group.is_rank0:
            quantizer.cache_sample = partial(
                sample_tokens, source, prepared.tokenizer, *scale_tokens(source)
            )
        return quantizer
    if source.config.run_by is not None:
        from quantkit.jobs.quantize.lockstep import lockstep_quantizer

        return lockstep_quantizer(prepared, settings, drawn, progress)
    effort = settings.effort_on(
        source.config, drawn.tokens.shape, prepared.scheme_map.linears.values()
    )
    return GptqQuantizer(
        source,
        drawn,
        prepared.scheme_map.schemes,
        device=settings.device,
        memory_bytes=settings.memory_bytes,
        effort=effort,
        allow_nonfinite=allow_nonfinite,
        group=group,
        progress=progress,
        shared=shared,
        kernels_of=kernels_of,
    )


def work_of(prepared: Prepared, drawn: Calibration | None, group: ProcessGroup) -> Work:
    """Describe the output with all that decides its bytes: for the manifest, and for runs that
    resume.
    """
    options = prepared.options
    settings = prepared.settings
    source = prepared.source
    recorded: dict[str, object] = {
        "recipe": prepared.scheme_map.recipe.to_json(),
        "method": prepared.method,
        "allow_nonfinite": options.allow_nonfinite,
    }
    if not source.config.runnable:
        recorded |= {"tensors_only": True, "linears_by": prepared.linears_by}
    if source.config.run_by is not None:
        recorded["run_by"] = source.config.run_by
    if prepared.target.name != NATIVE:
        recorded["to"] = prepared.target.name
    if prepared.activations:
        recorded[ACTIVATIONS] = prepared.activations
    if options.dequantize:
        recorded["dequantize"] = True
    recorded |= prepared.adapters
    # The content counts, not the path: equal inputs give an equal manifest.
    if options.imatrix is not None:
        recorded["imatrix"] = content_hash(as_path("imatrix", options.imatrix))
    if options.kv_cache is not None:
        recorded["kv_cache"] = options.kv_cache
    if options.split_max_size is not None:
        recorded["split_max_size"] = options.split_max_size
    if prepared.allocation is not None:
        recorded[BIT_ALLOCATION] = prepared.allocation.to_json()
    # Sums of floats depend on the machine, and a resumed run must give the same bytes.
    computed_by: dict[str, object] = {}
    scratch = 0
    # Plain rounding has no such sums.
    if settings is None and (prepared.is_weighted or options.kv_cache is not None):
        computed_by = machine(torch.device("cpu"))
    elif settings is not None and drawn is not None:
        recorded |= {"calibration": drawn.to_json(), "effort": settings.effort}
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
        # A model or a template has chosen or rendered these samples, so that text and seed alone do
        # not determine them.
        if settings.text is None or drawn.documents is not None:
            computed_by["calibration samples"] = drawn.fingerprint()
        _, scratch, _ = settings.activation_bytes(
            source.config, drawn.tokens.shape, prepared.scheme_map.linears.values()
        )
    if options.template is not None:
        recorded["template"] = Path(options.template).name
    return Work(
        job="quantize",
        source=source,
        encoder=prepared.encoder,
        side_files=prepared.side_files,
        options=recorded,
        computed_by=computed_by,
        scratch_bytes=scratch,
    )
