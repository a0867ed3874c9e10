"""Apply a delta: write a quantized model with what refining changed in it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from quantkit.base.arguments import as_path
from quantkit.base.progress import Progress, silent, skip_repeated_reports
from quantkit.formats.container import weight_size
from quantkit.jobs.output.writer import writing
from quantkit.jobs.refine.result import RefineResult
from quantkit.jobs.refine.rewritten import (
    base_hashes,
    plan_rewriting,
    put_all,
    read_quantization_details,
    require_written,
)
from quantkit.quality.changed_tensors import REFINED
from quantkit.quality.manifest_check import recheck
from quantkit.training.delta import Delta, DeltaCheckpoint

_TAKEN = (REFINED, "quality", "modules")
"""What a delta states of the model that it gives."""


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
    found = Delta(as_path("delta", delta))
    plan = plan_rewriting(as_path("model", model), as_path("dst", dst), resume=resume)
    source = plan.work.source
    found.require_base(base_hashes(source), source.path)
    found.require_fits(plan.work.source)
    changed = DeltaCheckpoint(source, found)
    work = replace(
        plan.work, job="apply-delta", options={**plan.work.options, "delta": found.check}
    )
    with writing(work, plan.dst, resume=resume, source_check=True, progress=progress) as writer:
        result = put_all(writer, changed, {})
        require_written(changed, result, None)
        size = weight_size(result)
        made = {
            **read_quantization_details(source.path),
            **{key: found.details[key] for key in _TAKEN},
        }
        # The delta's maker measured the same.
        recheck(plan.dst, made, result, progress=progress)
        made = writer.commit(made)
    notes = [*plan.notes, *writer.notes]
    return RefineResult(
        plan.dst,
        *size,
        found.curve,
        len(found.changed),
        None,
        time.monotonic() - began,
        notes,
        made,
    )
