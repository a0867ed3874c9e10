"""Apply a delta: write a quantized model with what refining changed in it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from quantkit.base.arguments import as_path
from quantkit.base.progress import Progress, silent, skip_repeated_reports
from quantkit.formats.container import weight_size
from quantkit.jobs.output.writer import open_writer
from quantkit.jobs.refine.result import RefineResult
from quantkit.jobs.refine.rewritten import (
    base_hashes,
    describe_quantization,
    plan_rewriting,
    put_all,
    require_written,
)
from quantkit.quality.changed_tensors import REFINED
from quantkit.quality.manifest_check import measure_again
from quantkit.training.delta import Delta, DeltaCheckpoint

_MODEL_ENTRIES = (REFINED, "quality", "modules")
"""The entries of a delta that describe the resulting model, for its manifest."""


def apply_delta(
    model: str | Path,
    delta: str | Path,
    dst: str | Path,
    *,
    resume: bool = False,
    progress: Progress = silent,
) -> RefineResult:
    """Write a quantized model with a delta applied: the model that `refine` would have written.

    Args:
        model: the quantized model that the delta was made for.
        delta: a file that `refine` wrote.
        dst: the folder to make, or a file ``*.gguf``, in the format of `model`; it must not exist.
        resume: continue an interrupted run, if there is one.
        progress: as in `convert`.

    Returns:
        What was written, and the KL when the delta was made.

    Raises:
        QualityError: if the result does not have the perplexities that the delta states.
        CheckpointError: if the delta is damaged, or belongs to another model, or the model has
            changed since.
        DestinationError, ResumeError: as in `convert`.
        QuantkitError: as `convert` does.
    """
    began = time.monotonic()
    progress = skip_repeated_reports(progress)
    opened_delta = Delta(as_path("delta", delta))
    plan = plan_rewriting(as_path("model", model), as_path("dst", dst), resume=resume)
    source = plan.work.source
    # A delta contains differences of codes, which are wrong for the codes of another model.
    opened_delta.require_base(base_hashes(source), source.path)
    opened_delta.require_fits(source)
    changed = DeltaCheckpoint(source, opened_delta)
    options = {**plan.work.options, "delta": opened_delta.check}
    work = replace(plan.work, job="apply-delta", options=options)
    with open_writer(work, plan.dst, resume=resume, source_check=True, progress=progress) as writer:
        result = put_all(writer, changed, {})
        require_written(changed, result, None)
        size = weight_size(result)
        details = describe_quantization(source, result, opened_delta.changed)
        for key in _MODEL_ENTRIES:
            details[key] = opened_delta.details[key]
        # The run that made the delta measured the same model: its perplexities must be met.
        measure_again(plan.dst, details, result, progress=progress)
        manifest = writer.commit(details)
    notes = [*plan.notes, *writer.notes]
    return RefineResult(
        plan.dst,
        *size,
        opened_delta.curve,
        len(opened_delta.changed),
        None,
        time.monotonic() - began,
        notes,
        manifest,
    )
