"""Refine what was just quantized, before it gets its name: `quantize` with `refine=True`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantkit.base.arguments import as_path
from quantkit.base.progress import Progress, in_phase
from quantkit.calibration.data import Calibration
from quantkit.calibration.documents import TextSource
from quantkit.distributed.group import SINGLE
from quantkit.errors import NoImprovementError
from quantkit.files.gguf_types import GGUF
from quantkit.formats.container import weight_size
from quantkit.formats.output.destination import manifest_path
from quantkit.jobs.output.result import QuantizeResult
from quantkit.jobs.output.writer import open_writer
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.jobs.quantize.proof import collect_result, write_manifest_entries
from quantkit.jobs.quantize.work import work_of
from quantkit.jobs.refine.estimate import REFINED_GATE, REFINED_WRITING
from quantkit.jobs.refine.options import RefineOptions
from quantkit.jobs.refine.plan import Refinement, plan_refinement
from quantkit.jobs.refine.refine import describe_refinement, records_of
from quantkit.jobs.refine.rewritten import put_all, require_written
from quantkit.jobs.refine.training import training_of
from quantkit.quality.changed_tensors import find_changes
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import State

_BETWEEN = ".unrefined"
# Entries of a record that are no longer true once values are trained.
_OF_SOLVER = ("output_error",)


def locate_unrefined_model(dst: Path) -> Path:
    """Choose the path of the quantized model until it is refined: next to the output."""
    # Readers know GGUF by the end of its name.
    if dst.suffix == GGUF:
        return dst.with_name(f"{dst.stem}{_BETWEEN}{GGUF}")
    return dst.with_name(dst.name + _BETWEEN)


def refine_output(
    prepared: Prepared,
    first: QuantizeResult,
    calibration: TextSource | None,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Train the result that was quantized first, write it to the requested output, and remove the
    intermediate model.

    If training does not bring it closer to its source, it is written unchanged, with a note.

    Raises:
        QualityError: if the result does not pass the gate.
    """
    if first.allocation is not None:
        prepared = prepared.with_allocation(first.allocation)
    options = prepared.options
    settings = prepared.settings
    # Refining goes with GPTQ: estimates refuse others.
    assert settings is not None
    planned = plan_refinement(
        RefineOptions(
            first.path,
            as_path("dst", options.dst),
            against=prepared.source.path,
            calibration=calibration,
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
        )
    )
    drawn = planned.settings.draw(planned.reference, progress=progress)
    try:
        with training_of(
            planned, drawn, prepared.dst, resume=options.resume, progress=progress
        ) as (trained, state):
            final = _write_refined(prepared, first, planned, drawn, trained, state, began, progress)
    except NoImprovementError as error:
        final = _write_unrefined(prepared, first, planned, drawn, began, progress)
        final.notes.append(
            f"{prepared.dst}: {error.problem} ({error.found}); it is written as it was quantized"
        )
    # Last: if anything above fails, the user still has the quantized model.
    remove_model(first.path)
    return final


def _write_refined(
    prepared: Prepared,
    first: QuantizeResult,
    planned: Refinement,
    drawn: Calibration,
    trained: TrainedCheckpoint,
    state: State,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Write the trained model, and compare it with its source.

    Raises `QualityError` if it does not pass the gate.
    """
    options = prepared.options
    work = work_of(prepared, drawn, SINGLE)
    work = replace(work, options={**work.options, "refine": planned.options.to_record()})
    changed = find_changes(planned.quantized, trained, sorted(trained.factors))
    training_details = describe_refinement(planned, changed, state, drawn)
    records = _records(first.manifest["modules"], records_of(planned, trained, changed))
    # Under a phase of its own: a bar that returned to "quantize" would start the whole job again.
    observed = in_phase(progress, REFINED_WRITING)
    with open_writer(
        work, prepared.dst, resume=options.resume, source_check=False, progress=observed
    ) as writer:
        result = put_all(writer, trained, records)
        if planned.names.codes:
            require_written(trained, result, None)
        else:
            # Trained scales alone must leave the codes of the quantized model as they are.
            require_written(trained, result, planned.quantized)
        gate = run_gate(
            prepared.source,
            result,
            records,
            requested=prepared.scheme_map.schemes,
            inputs=prepared.measurement_inputs,
            progress=in_phase(progress, REFINED_GATE),
        )
        if not options.accept_quality_loss:
            require_passed(gate, prepared.source, result, prepared.dst)
        size = weight_size(result)
        card = model_card_files(prepared, drawn, *size, gate, None)
        facts = write_manifest_entries(prepared, work, result, records, gate, None)
        # The quantization has checked the source already.
        source_check = {"source_check": first.manifest["source_check"]}
        manifest = writer.commit({**source_check, **facts, **training_details}, card)
    written = collect_result(prepared, drawn, size, gate, None, began, manifest)
    return replace(written, refined=[asdict(evaluation) for evaluation in state.curve])


def _write_unrefined(
    prepared: Prepared,
    first: QuantizeResult,
    planned: Refinement,
    drawn: Calibration,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Write the model as it was quantized, as `quantize` does without `refine`. Raises
    `QualityError` if it has not passed the gate, which measured it when it was quantized.
    """
    plain_options = replace(
        prepared.options, refine=False, train_codes=False, train_norms=False, epochs=None
    )
    plain = replace(prepared, options=plain_options)
    work = work_of(plain, drawn, SINGLE)
    records = _records(first.manifest["modules"], {})
    gate = first.quality
    # A model that is refined can be run.
    assert isinstance(gate, Gate)
    observed = in_phase(progress, REFINED_WRITING)
    with open_writer(
        work, plain.dst, resume=plain_options.resume, source_check=False, progress=observed
    ) as writer:
        result = put_all(writer, planned.quantized, records)
        require_written(planned.quantized, result, planned.quantized)
        if not plain_options.accept_quality_loss:
            require_passed(gate, plain.source, result, plain.dst)
        size = weight_size(result)
        card = model_card_files(plain, drawn, *size, gate, None)
        facts = write_manifest_entries(plain, work, result, records, gate, None)
        manifest = writer.commit({"source_check": first.manifest["source_check"], **facts}, card)
    return collect_result(plain, drawn, size, gate, None, began, manifest)


def remove_model(path: Path) -> None:
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


def _records(
    first: Mapping[str, Mapping[str, Any]], trained: Mapping[str, Mapping[str, object]]
) -> dict[str, dict[str, object]]:
    """Merge the records of all weights by name: those of the solver, updated by those of
    training.
    """
    records: dict[str, dict[str, object]] = {}
    for module, solver_record in first.items():
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
