"""Check a quantized model once it is written: compare it with its source, and add its card and
manifest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase
from quantkit.calibration.data import Calibration
from quantkit.calibration.quantizers import RtnQuantizer
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.folders_encoder import select_folder
from quantkit.jobs.output.result import QuantizeResult
from quantkit.jobs.output.writer import Work, Writer, model_summary
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.jobs.quantize.measured import Measured
from quantkit.jobs.quantize.plan import Checks, Plan
from quantkit.jobs.quantize.sizes import weight_sizes
from quantkit.jobs.quantize.steps import phase_of
from quantkit.quality.gate import require_passed, run_gate
from quantkit.quality.gate_result import Gate
from quantkit.quality.measures import Hidden
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly, describe_unquantized_tensors, weights_only
from quantkit.via_transformers.forward import run_by_transformers


def verify_output(
    plan: Plan,
    folder: str,
    drawn: Calibration | None,
    work: Work,
    writer: Writer,
    quantizer: RtnQuantizer,
    source_hidden: Hidden,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Check the result in a folder of the output, and complete it with its card and manifest;
    `source_hidden` returns the source's hidden states for the gate.

    Raises `QualityError` as `_check` does.
    """
    format_plan = plan.formats.by_folder[folder]
    records = select_folder(folder, writer.records)
    # The gate measures the bytes on disk, not the tensors in memory.
    result, problem = open_result(format_plan, writer.read_back(folder))
    size = weight_size(result)
    gate, certificate = _check(
        format_plan, plan.checks, result, records, quantizer, source_hidden, folder, progress
    )
    measured = Measured(*size, gate, certificate, problem)
    card = model_card_files(plan, format_plan, drawn, measured)
    facts = write_manifest_entries(plan, format_plan, work, result, records, measured)
    manifest = writer.add_manifest(facts, card, folder)
    return collect_result(plan, format_plan, drawn, measured, began, manifest)


def open_result(plan: FormatPlan, result: StoredCheckpoint) -> tuple[StoredCheckpoint, str | None]:
    """Let transformers run a result if it ran the source.

    Returns:
        The result, and why transformers does not load its packed weights; None if it does, or for
        models that quantkit runs.
    """
    config = plan.source.config
    if config.run_by is None:
        return result, None
    # Imports transformers, which is optional.
    from quantkit.via_transformers.packed_loading import loading_problem

    result = run_by_transformers(result, code=config.code)
    return result, loading_problem(result.path, config.code)


def collect_result(
    plan: Plan,
    format_plan: FormatPlan,
    drawn: Calibration | None,
    measured: Measured,
    began: float,
    manifest: dict[str, Any],
    *,
    skipped: bool = False,
) -> QuantizeResult:
    """Collect what a quantization wrote and measured, with all notes."""
    solver = plan.solver
    notes = [
        *format_plan.source.notes,
        *plan.notes,
        *format_plan.notes,
        *_note_loading_problem(format_plan, measured.loading_problem),
        *format_plan.target.container.notes(format_plan.output),
        *_note_rounded_inputs(format_plan),
        *_note_accepted_losses(format_plan.dst, measured.quality, measured.certificate),
    ]
    calibration = None
    if drawn is not None:
        calibration = drawn.to_json()
    effort = None
    if solver.settings is not None:
        effort = solver.settings.effort_name
    embedding = None
    if format_plan.scheme_map.embedding is not None:
        embedding = str(format_plan.scheme_map.embedding)
    return QuantizeResult(
        path=format_plan.dst,
        schemes=format_plan.scheme_map.counts(),
        weight_bytes=measured.weight_bytes,
        bits_per_weight=measured.bits_per_weight,
        method=solver.method,
        calibration=calibration,
        quality=measured.quality,
        accepted=plan.checks.accept_quality_loss,
        seconds=time.monotonic() - began,
        notes=notes,
        manifest=manifest,
        weights=weight_sizes(format_plan, format_plan.encoder.total_bytes()),
        embedding=embedding,
        positions=measured.certificate,
        allocation=format_plan.allocation,
        skipped=skipped,
        effort=effort,
        kv_cache=solver.kv_cache,
    )


def _note_rounded_inputs(plan: FormatPlan) -> list[str]:
    """Write a note where readers of the result round the inputs of linears."""
    if not plan.activations:
        return []
    types = " and ".join(dict.fromkeys(plan.activations.values()))
    # Of a model that is not run, tensors are compared.
    if plan.source.config.measurable:
        measured = "and so does the gate"
    else:
        measured = "figures here are of the weights alone"
    return [f"{plan.dst}: readers round the inputs of linears to {types}, {measured}"]


def _note_loading_problem(plan: FormatPlan, problem: str | None) -> list[str]:
    """Write a note where transformers does not load the packed result."""
    if problem is None:
        return []
    return [
        Message(
            f"{plan.dst}: {plan.source.config.run_by} does not load the packed weights"
            f" ({problem}); ",
            Option("dequantize", value=True, job="convert"),
            " makes a folder that it loads",
        )
    ]


def _check(
    plan: FormatPlan,
    checks: Checks,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    quantizer: RtnQuantizer,
    source_hidden: Hidden,
    folder: str,
    progress: Progress,
) -> tuple[Gate | WeightsOnly, PositionCertificate | None]:
    """Compare a result with its source, by logits; of a model that cannot be run, compare tensors.
    Raises `QualityError` if it is too far from it, unless that is accepted.
    """
    source = plan.source
    certified = checks.certified
    schemes = plan.scheme_map.schemes
    if not source.config.measurable:
        return weights_only(result, records), None
    accepted = checks.accept_quality_loss
    inputs = plan.inputs
    gate = run_gate(
        source,
        result,
        records,
        requested=schemes,
        importance=quantizer.importance,
        inputs=inputs,
        source_hidden=source_hidden,
        progress=in_phase(progress, phase_of("gate", folder)),
    )
    if not accepted:
        require_passed(gate, source, result, plan.dst)
    # After the gate: the certificate takes longer, and a refused model needs none.
    if certified is None:
        return gate, None
    observed = in_phase(progress, phase_of("certificate", folder))
    certificate = certified.certificate(source, result, schemes.values(), inputs, observed)
    if not accepted:
        certificate.require_within(plan.dst)
    return gate, certificate


def write_manifest_entries(
    plan: Plan,
    format_plan: FormatPlan,
    work: Work,
    result: Checkpoint,
    records: Mapping[str, Mapping[str, Any]],
    measured: Measured,
) -> dict[str, Any]:
    """Write the manifest's entries that are particular to a quantization."""
    accepted = plan.checks.accept_quality_loss
    entries: dict[str, Any] = {
        **describe_work(work),
        "quality": measured.quality.to_json(accepted=accepted),
        "modules": format_plan.scheme_map.describe(records),
    }
    if work.computed_by:
        entries["computed_by"] = work.computed_by
    if measured.certificate is not None:
        entries["positions"] = measured.certificate.to_json(accepted=accepted)
    if not work.source.config.runnable:
        entries["carried"] = describe_unquantized_tensors(work.source, result)
    return entries


def describe_work(work: Work) -> dict[str, object]:
    """Write the manifest's entries that are known before anything is written."""
    return {"model": model_summary(work.source, work.source.config.dtype), **work.options}


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
