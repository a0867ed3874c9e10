"""Quantize and refine: `quantize` with `refine=True` is two jobs in sequence. The first writes the
quantized model next to the output; the second trains it, and writes the output.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantkit.base.arguments import is_several
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import IfExists
from quantkit.base.progress import Progress, in_phase
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import NoImprovementError, RequestError
from quantkit.files.gguf_types import GGUF_SUFFIX
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import name_partial_folder, note_partial_output
from quantkit.jobs.output.estimate import Estimate, require_buildable
from quantkit.jobs.output.result import QuantizeResult
from quantkit.jobs.output.writer import Work, Writer, open_writer
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.measured import Measured
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.prepare import prepare
from quantkit.jobs.quantize.run import run_quantization
from quantkit.jobs.quantize.sequence_estimate import estimate_sequence
from quantkit.jobs.quantize.verification import (
    collect_result,
    open_result,
    write_manifest_entries,
)
from quantkit.jobs.quantize.work import work_of
from quantkit.jobs.refine.estimate import REFINED_GATE, REFINED_WRITING
from quantkit.jobs.refine.options import RefineOptions
from quantkit.jobs.refine.plan import Refinement, plan_refinement
from quantkit.jobs.refine.refine import Changes, describe_changes, put_trained
from quantkit.jobs.refine.rewritten import mark_trained, put_all, require_written
from quantkit.jobs.refine.training import training_of
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.gate import require_passed, run_gate
from quantkit.quality.gate_result import Gate
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import State

_BETWEEN = ".unrefined"
# Entries of a record that are no longer true once values are trained.
_OF_SOLVER = ("output_error",)


def quantize_and_refine(
    options: QuantizeOptions,
    *,
    group: ProcessGroup,
    on_estimate: Callable[[Estimate], None] | None,
    on_note: Callable[[str], None] | None,
    progress: Progress,
) -> QuantizeResult:
    """Quantize to a folder next to the output, and refine the model in it; see `quantize`. A model
    that training does not bring closer to its source is written as it was quantized, with a note.
    """
    began = time.monotonic()
    plan = prepare(options)
    dst = plan.formats.dst
    if group.size > 1:
        raise RequestError(
            Message(Option("refine", value=True), " requires a single process"),
            found=f"{group.size} processes",
            hint=Message(
                "run it without torchrun; or leave ",
                Option("refine"),
                " out, and run `quantkit refine` on the result",
            ),
        )
    require_buildable(dst, plan.formats.encoder, resume=options.resume)
    estimate = estimate_sequence(plan, options)
    if on_estimate is not None:
        on_estimate(estimate)
    calibration = options.calibration
    # Both jobs read the text, and an iterator can be read only once.
    if is_several(calibration) and not hasattr(calibration, "__getitem__"):
        options = replace(options, calibration=list(calibration))
    between = _locate_unrefined_model(dst)
    try:
        quantized = run_quantization(
            _select_quantize_options(options, between),
            group=group,
            on_estimate=None,
            on_note=on_note,
            progress=progress,
        )
        result = _refine(plan, options, quantized, began, progress)
    except BaseException as error:
        # The message names the folder, from which `resume` continues.
        if between.exists():
            note_partial_output(error, between)
        raise
    return result


def _locate_unrefined_model(dst: Path) -> Path:
    """Choose the path of the quantized model until it is refined: next to the output."""
    # Readers know GGUF by the end of its name.
    if dst.suffix == GGUF_SUFFIX:
        return dst.with_name(f"{dst.stem}{_BETWEEN}{GGUF_SUFFIX}")
    return dst.with_name(dst.name + _BETWEEN)


def _select_quantize_options(options: QuantizeOptions, between: Path) -> QuantizeOptions:
    """Select the options of the first job, which writes to `between`; a run that resumes takes the
    quantized model that is there.
    """
    if_exists: IfExists = "fail"
    if between.exists() and options.resume:
        if_exists = "skip"
    return replace(
        options,
        dst=between,
        refine=False,
        train_codes=False,
        train_norms=False,
        epochs=None,
        # The gate decides on the refined model: its bound does not apply before training.
        accept_quality_loss=True,
        if_exists=if_exists,
        resume=options.resume and name_partial_folder(between).exists(),
    )


def _refine(
    plan: Plan,
    options: QuantizeOptions,
    quantized: QuantizeResult,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Train the quantized model, write the result to the output, and remove the quantized model.

    Raises:
        QualityError: if the result does not pass the gate.
    """
    dst = plan.formats.dst
    settings = plan.solver.settings
    # Refining goes with GPTQ: estimates refuse others.
    assert settings is not None
    allocation = quantized.allocation
    if allocation is not None:
        formats = plan.formats.change_each(
            lambda format_plan: format_plan.with_allocation(allocation)
        )
        plan = replace(plan, formats=formats)
    plan = replace(plan, formats=_leave_out_floats(plan.formats, quantized))
    refinement = plan_refinement(
        RefineOptions(
            quantized.path,
            dst,
            against=plan.formats.source.path,
            calibration=options.calibration,
            text_column=options.text_column,
            samples=settings.samples,
            length=settings.length,
            seed=settings.seed,
            train_codes=options.train_codes,
            train_norms=options.train_norms,
            epochs=options.epochs,
            activation_memory=settings.memory_bytes,
            device=settings.device,
            resume=options.resume,
        ),
        by_transformers=not plan.formats.source.config.runnable,
        code=plan.formats.source.config.code,
    )
    drawn = refinement.settings.draw(refinement.reference, progress=progress)
    try:
        with training_of(refinement, drawn, dst, resume=options.resume, progress=progress) as (
            trained,
            state,
        ):
            result = _write_trained(
                plan, quantized, refinement, drawn, trained, state, began, progress
            )
    except NoImprovementError as error:
        result = _write_untrained(plan, quantized, refinement, drawn, began, progress)
        result.notes.append(
            f"{dst}: {error.problem} ({error.found}); it is written as it was quantized"
        )
    # Last: if anything above fails, the user still has the quantized model.
    _remove_model(quantized.path)
    return result


def _leave_out_floats(formats: Formats, quantized: QuantizeResult) -> Formats:
    """Leave out the linears that the first job could not solve, which stayed floats; its notes say
    why.
    """
    solved = quantized.manifest["modules"]
    floats: dict[str, str] = {}
    for module in formats.first.scheme_map.schemes:
        record = solved.get(module, {})
        if record.get("scheme") is None:
            floats[module] = str(record.get("reason", "it was not solved"))
    if not floats:
        return formats
    return formats.change_each(lambda format_plan: format_plan.without(floats, []))


def _write_trained(
    plan: Plan,
    quantized: QuantizeResult,
    refinement: Refinement,
    drawn: Calibration,
    trained: TrainedCheckpoint,
    state: State,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Write the trained model, and compare it with its source.

    Raises `QualityError` if it does not pass the gate.
    """
    format_plan = plan.formats.first
    work = work_of(plan, format_plan, drawn, SINGLE)
    work = replace(work, options={**work.options, "refine": refinement.options.to_record()})
    changes = describe_changes(refinement, trained, state, drawn)
    records = _merge_records(quantized.manifest["modules"], changes.records)
    # Under a phase of its own: a bar that returned to "quantize" would start the whole job again.
    observed = in_phase(progress, REFINED_WRITING)
    with open_writer(
        work,
        format_plan.dst,
        resume=refinement.options.resume,
        source_check=False,
        progress=observed,
    ) as writer:
        result = put_trained(writer, refinement, trained, records)
        gate = run_gate(
            format_plan.source,
            result,
            records,
            requested=format_plan.scheme_map.schemes,
            inputs=format_plan.inputs,
            progress=in_phase(progress, REFINED_GATE),
        )
        written = _commit(
            plan, quantized, drawn, work, writer, result, records, gate, changes, began
        )
    return replace(written, refined=[asdict(evaluation) for evaluation in state.curve])


def _write_untrained(
    plan: Plan,
    quantized: QuantizeResult,
    refinement: Refinement,
    drawn: Calibration,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Write the model as it was quantized, as `quantize` does without `refine`. Raises
    `QualityError` if it has not passed the gate, which measured it when it was quantized.
    """
    plan = replace(plan, request=plan.request.without_refinement())
    format_plan = plan.formats.first
    work = work_of(plan, format_plan, drawn, SINGLE)
    records = _merge_records(quantized.manifest["modules"], {})
    gate = quantized.quality
    # A model that is refined can be run.
    assert isinstance(gate, Gate)
    with open_writer(
        work,
        format_plan.dst,
        resume=refinement.options.resume,
        source_check=False,
        progress=in_phase(progress, REFINED_WRITING),
    ) as writer:
        result = put_all(writer, refinement.quantized, records)
        require_written(refinement.quantized, result, refinement.quantized)
        changes = Changes(tensors={}, records={}, details={})
        return _commit(plan, quantized, drawn, work, writer, result, records, gate, changes, began)


def _commit(
    plan: Plan,
    quantized: QuantizeResult,
    drawn: Calibration,
    work: Work,
    writer: Writer,
    result: StoredCheckpoint,
    records: Mapping[str, Mapping[str, Any]],
    gate: Gate,
    changes: Changes,
    began: float,
) -> QuantizeResult:
    """Complete a result with its card and manifest, which gets the details of the changes, and give
    it its name. Raises `QualityError` if it did not pass the gate, unless that is accepted.
    """
    format_plan = plan.formats.first
    if not plan.checks.accept_quality_loss:
        require_passed(gate, format_plan.source, result, format_plan.dst)
    result, problem = open_result(format_plan, result)
    measured = Measured(*weight_size(result), gate, loading_problem=problem)
    card = model_card_files(plan, format_plan, drawn, measured)
    entries = write_manifest_entries(plan, format_plan, work, result, records, measured)
    # They describe a result whose norms are those of the source.
    if "carried" in entries:
        entries["carried"] = mark_trained(entries["carried"], changes.tensors)
    # The quantization has checked the source already.
    source_check = {"source_check": quantized.manifest["source_check"]}
    manifest = writer.commit({**source_check, **entries, **changes.details}, card)
    return collect_result(plan, format_plan, drawn, measured, began, manifest)


def _remove_model(path: Path) -> None:
    """Remove a model that was written."""
    files = manifest_or_empty(path).get("files", {})
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    # A GGUF model may have several files. The manifest next to them goes first: alone, it would
    # describe files that do not exist.
    manifest_path(path).unlink(missing_ok=True)
    for name in files:
        path.with_name(name).unlink(missing_ok=True)


def _merge_records(
    solved: Mapping[str, Mapping[str, Any]], trained: Mapping[str, Mapping[str, object]]
) -> dict[str, dict[str, object]]:
    """Merge the records of all weights by name: those of the solver, given by module, updated by
    those of training.
    """
    records: dict[str, dict[str, object]] = {}
    for module, solver_record in solved.items():
        weight = f"{module}.weight"
        trained_record = trained.get(weight, {})
        record = {}
        for key, value in solver_record.items():
            if not trained_record or key not in _OF_SOLVER:
                record[key] = value
        record.update(trained_record)
        # The manifest writes the scheme of each module itself.
        record.pop("scheme", None)
        records[weight] = record
    return records
