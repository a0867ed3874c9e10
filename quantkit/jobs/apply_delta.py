"""Apply a delta: write a quantized model with what refining changed in it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from quantkit.arguments import as_path
from quantkit.formats.container import weight_size
from quantkit.jobs.output import writing
from quantkit.jobs.refine_result import RefineResult
from quantkit.jobs.rewritten import carried_details, open_hashes, plan_rewriting, put_all, require_written
from quantkit.progress import Progress, deduplicated, silent
from quantkit.training.delta import Delta, DeltaCheckpoint


def apply_delta(
    model: str | Path, delta: str | Path, dst: str | Path, *, resume: bool = False, progress: Progress = silent
) -> RefineResult:  # fmt: skip
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
        CheckpointError: if the delta is damaged, or belongs to another model, or the model has changed since.
        DestinationError, ResumeError: as in `convert`.
        QuantkitError: as `convert` does.
    """
    began = time.monotonic()
    progress = deduplicated(progress)
    found = Delta(as_path("delta", delta))
    plan = plan_rewriting(as_path("model", model), as_path("dst", dst), resume=resume)
    source = plan.work.source
    found.require_base(open_hashes(source), source.path)
    changed = DeltaCheckpoint(source, found)
    work = replace(plan.work, job="apply-delta", options={**plan.work.options, "delta": found.check})
    with writing(work, plan.dst, resume=resume, source_check=True, progress=progress) as writer:
        result = put_all(writer, changed, {})
        require_written(changed, result, None)
        size = weight_size(result)
        made = writer.commit({**carried_details(source.path), **found.details})
    notes = [*plan.notes, *writer.notes]
    return RefineResult(plan.dst, *size, found.curve, len(found.changed), None, time.monotonic() - began, notes, made)
