"""Check a quantized model once it is written: compare it with its source, and add its card and
manifest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase
from quantkit.calibration.data import Calibration
from quantkit.calibration.quantizers import RtnQuantizer
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import weight_size
from quantkit.formats.folders_encoder import select_folder
from quantkit.jobs.output.result import QuantizeResult
from quantkit.jobs.output.writer import Work, Writer, model_summary
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.jobs.quantize.sizes import weight_sizes
from quantkit.jobs.quantize.steps import phase_of
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly, describe_carried_tensors, weights_only
from quantkit.via_transformers.forward import run_by_transformers


def verify_output(
    prepared: Prepared,
    drawn: Calibration | None,
    work: Work,
    folder: str,
    writer: Writer,
    quantizer: RtnQuantizer,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Check the result in a folder of the output, and complete it with its card and manifest.
    Raises `QualityError` as `_check` does.
    """
    source = prepared.source
    records = select_folder(folder, writer.records)
    # The gate measures the bytes on disk, not the tensors in memory.
    result = writer.read_back(folder)
    if source.config.run_by is not None:
        result = run_by_transformers(result, code=source.config.code)
        prepared = record_loading_problem(prepared, result)
    size = weight_size(result)
    gate, certificate = _check(prepared, result, records, quantizer, folder, progress)
    card = model_card_files(prepared, drawn, *size, gate, certificate)
    facts = write_manifest_entries(prepared, work, result, records, gate, certificate)
    manifest = writer.add_manifest(facts, card, folder)
    return collect_result(prepared, drawn, size, gate, certificate, began, manifest)


def collect_result(
    prepared: Prepared,
    drawn: Calibration | None,
    size: tuple[int, float],
    gate: Gate | WeightsOnly,
    certificate: PositionCertificate | None,
    began: float,
    manifest: dict[str, Any],
    *,
    skipped: bool = False,
) -> QuantizeResult:
    """Collect what a quantization wrote and measured, with all notes."""
    notes = [
        *prepared.source.notes,
        *prepared.notes,
        *prepared.target.container.notes(prepared.output),
        *_note_rounded_inputs(prepared),
        *_note_accepted_losses(prepared.dst, gate, certificate),
    ]
    embedding = prepared.scheme_map.embedding
    calibration = None
    if drawn is not None:
        calibration = drawn.to_json()
    effort = None
    if prepared.settings is not None:
        effort = prepared.settings.effort
    return QuantizeResult(
        prepared.dst,
        prepared.scheme_map.counts(),
        *size,
        prepared.method,
        calibration,
        gate,
        prepared.options.accept_quality_loss,
        time.monotonic() - began,
        notes,
        manifest,
        weight_sizes(prepared, prepared.encoder.total_bytes()),
        None if embedding is None else str(embedding),
        certificate,
        prepared.allocation,
        skipped,
        effort,
        prepared.options.kv_cache,
    )


def _note_rounded_inputs(prepared: Prepared) -> list[str]:
    """Write a note where readers of the result round the inputs of linears."""
    if not prepared.activations:
        return []
    types = " and ".join(dict.fromkeys(prepared.activations.values()))
    # transformers runs the gate of models without a decoder here, with float inputs.
    if prepared.source.config.runnable:
        measured = "and so does the gate"
    else:
        measured = "figures here are of the weights alone"
    return [f"{prepared.dst}: readers round the inputs of linears to {types}, {measured}"]


def record_loading_problem(prepared: Prepared, result: Checkpoint) -> Prepared:
    """Record in the job whether transformers loads the packed result, with a note if it does
    not.
    """
    # Imports transformers, which is optional.
    from quantkit.via_transformers.packed_loading import loading_problem

    problem = loading_problem(result.path, prepared.source.config.code)
    if problem is None:
        return prepared
    note = Message(
        f"{prepared.dst}: {result.config.run_by} does not load the packed weights ({problem}); ",
        Option("dequantize", value=True, job="convert"),
        " makes a folder that it loads",
    )
    return replace(prepared, unread=problem, notes=[*prepared.notes, note])


def _check(
    prepared: Prepared,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    quantizer: RtnQuantizer,
    folder: str,
    progress: Progress,
) -> tuple[Gate | WeightsOnly, PositionCertificate | None]:
    """Compare a result with its source, by logits; of a model that cannot be run, compare tensors.
    Raises `QualityError` if it is too far from it, unless that is accepted.
    """
    source = prepared.source
    certified = prepared.certified
    schemes = prepared.scheme_map.schemes
    if not source.config.measurable:
        return weights_only(result, records), None
    accepted = prepared.options.accept_quality_loss
    inputs = prepared.measurement_inputs
    gate = run_gate(
        source,
        result,
        records,
        requested=schemes,
        importance=quantizer.importance,
        inputs=inputs,
        progress=in_phase(progress, phase_of("gate", folder)),
    )
    if not accepted:
        require_passed(gate, source, result, prepared.dst)
    # After the gate: the certificate takes longer, and a refused model needs none.
    if certified is None:
        return gate, None
    observed = in_phase(progress, phase_of("certificate", folder))
    certificate = certified.certificate(source, result, schemes.values(), inputs, observed)
    if not accepted:
        certificate.require_within(prepared.dst)
    return gate, certificate


def write_manifest_entries(
    prepared: Prepared,
    work: Work,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    gate: Gate | WeightsOnly,
    certificate: PositionCertificate | None,
) -> dict[str, object]:
    """Write the manifest's entries that are particular to a quantization."""
    source = prepared.source
    accepted = prepared.options.accept_quality_loss
    entries: dict[str, object] = {
        **describe_plan(prepared, work),
        "quality": gate.to_json(accepted=accepted),
        "modules": prepared.scheme_map.describe(records),
    }
    if work.computed_by:
        entries["computed_by"] = work.computed_by
    if certificate is not None:
        entries["positions"] = certificate.to_json(accepted=accepted)
    if not source.config.runnable:
        entries["carried"] = describe_carried_tensors(source, result)
    return entries


def describe_plan(prepared: Prepared, work: Work) -> dict[str, object]:
    """Write the manifest's entries that are known before anything is written."""
    return {"model": model_summary(prepared.source, prepared.source.config.dtype), **work.options}


def _note_accepted_losses(
    dst: Path, *checks: Gate | WeightsOnly | PositionCertificate | None
) -> list[str]:
    """Write notes on measurements that are too far from the source in a result that is kept."""
    notes = []
    for check in checks:
        if not isinstance(check, (Gate, PositionCertificate)):
            continue
        problem = check.problem()
        if problem is not None:
            notes.append(f"{dst}: {problem[0]}: {problem[1]}, expected {problem[2]}; accepted")
    return notes
