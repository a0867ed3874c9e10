"""Run a quantization: prepare it, solve and write block by block, check the result, and name it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.base.late import LateModule
from quantkit.base.progress import Progress, without_phase
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.container import Written
from quantkit.formats.folders_encoder import select_folder
from quantkit.formats.output.staging import name_partial_folder, note_partial_output
from quantkit.jobs.output.estimate import Estimate, require_buildable
from quantkit.jobs.output.existing import may_accept_existing
from quantkit.jobs.output.result import QuantizeResult, join_results
from quantkit.jobs.output.writer import Writer, open_writer
from quantkit.jobs.quantize.estimate import estimate_quantization
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.prepare import prepare
from quantkit.jobs.quantize.rounding_probe import is_probed, probe_rounding
from quantkit.jobs.quantize.size_fit import set_up_size_fit
from quantkit.jobs.quantize.verification import verify_output
from quantkit.jobs.quantize.work import Samples, quantizer_of, settle_schemes_and_samples, work_of
from quantkit.quality.kept_states import KeptStates
from quantkit.tensors.qtensor import ROUNDED

if TYPE_CHECKING:
    from quantkit.jobs.quantize import existing
else:
    existing = LateModule("quantkit.jobs.quantize.existing")


def run_quantization(
    options: QuantizeOptions,
    *,
    group: ProcessGroup,
    on_estimate: Callable[[Estimate], None] | None,
    on_note: Callable[[str], None] | None,
    progress: Progress,
) -> QuantizeResult:
    """Quantize a model, apart from `refine`; see `quantize`."""
    began = time.monotonic()
    plan = prepare(options)
    formats = plan.formats
    # The others may run on machines without the output, and follow what rank 0 finds there.
    if group.is_rank0:
        finished = may_accept_existing(formats.dst, options.if_exists)
        group.send_from_rank0(finished)
    else:
        finished = group.receive_from_rank0()
    if finished:
        if group.is_rank0:
            return existing.read_existing_result(plan, options.size, group, began, progress)
        existing_result: QuantizeResult = group.receive_from_rank0()
        return existing_result
    fit = set_up_size_fit(formats.first, options.size)
    if group.is_rank0:
        # Missing space and side files that do not fit are errors before anything takes long.
        require_buildable(formats.dst, formats.encoder, resume=options.resume)
        formats.require_side_files()
        if on_estimate is not None:
            on_estimate(
                estimate_quantization(plan, fit, length=options.length, resume=options.resume)
            )
    # Ctrl-C tells whether an earlier run's partial output is kept, or that nothing was written.
    try:
        formats, samples = settle_schemes_and_samples(
            formats, plan.solver, fit, resume=options.resume, group=group, progress=progress
        )
    except KeyboardInterrupt as error:
        note_partial_output(error, name_partial_folder(formats.dst))
        raise
    plan = replace(plan, formats=formats)
    quantizer = quantizer_of(formats.first, plan.solver, samples, group, progress)
    if not group.is_rank0:
        existing_tensors = Written(formats.encoder, name_partial_folder(formats.dst))
        return _follow_rank0(group, quantizer, formats.blocks, existing_tensors)
    result = _write_formats(
        plan,
        samples,
        quantizer,
        group,
        began,
        resume=options.resume,
        on_note=on_note,
        progress=progress,
    )
    group.send_from_rank0(result)
    return result


def _write_formats(
    plan: Plan,
    samples: Samples | None,
    quantizer: RtnQuantizer,
    group: ProcessGroup,
    began: float,
    *,
    resume: bool,
    on_note: Callable[[str], None] | None,
    progress: Progress,
) -> QuantizeResult:
    """Solve and write the model in all formats, check each result, and name the output.

    Raises `QualityError` if a result is too far from its source.
    """
    formats = plan.formats
    source = formats.source
    settings = plan.solver.settings
    drawn = None
    # Rounding needs no samples.
    if samples is not None:
        drawn = samples.drawn
    source_hidden = KeptStates(source)
    works = {}
    for folder, format_plan in formats.by_folder.items():
        works[folder] = work_of(plan, format_plan, drawn, group)
    work = formats.work(works)
    # GPTQ reports this phase itself, linear by linear.
    if settings is None:
        report = progress
    else:
        report = without_phase(progress, work.job)
    with open_writer(
        work,
        formats.dst,
        resume=resume,
        source_check=plan.checks.source_check,
        source_hidden=source_hidden,
        progress=report,
    ) as writer:
        # A run that resumes solved tensors has printed the note before.
        if is_probed(source, settings) and not writer.existing_tensors.names:
            note = probe_rounding(formats.first, source_hidden, progress)
            if note is not None and on_note is not None:
                on_note(note)
        _write(
            formats.blocks, quantizer, writer, writer.existing_tensors, durable=settings is not None
        )
        writer.finish()
        results = {}
        for folder in formats.by_folder:
            results[folder] = verify_output(
                plan,
                folder,
                drawn,
                works[folder],
                writer,
                quantizer,
                source_hidden,
                began,
                progress,
            )
        # Only an output whose formats have all passed gets its name.
        writer.place()
    result = join_results(results, formats.dst, time.monotonic() - began)
    records = select_folder(next(iter(results)), writer.records)
    result.notes.extend(quantizer.notes)
    result.notes.extend([*_note_starved_experts(records, source.config), *writer.notes])
    return result


def _write(
    blocks: Sequence[TensorBlock],
    quantizer: RtnQuantizer,
    writer: Writer,
    existing_tensors: Written,
    *,
    durable: bool,
) -> None:
    """Solve and write the tensors that do not exist yet; with `durable`, each block outlives the
    run.
    """
    with quantizer.running(blocks, existing_tensors):
        for block in blocks:
            # Tensors are reported once they are written: this begins the phase before the first one
            # is made. There is none to make in a block that an earlier run has written.
            if not block.is_complete_in(existing_tensors):
                writer.report_progress()
            for name, tensor, record in quantizer.solve(block):
                writer.put(name, tensor, record)
                # Free the tensor before the next one is made.
                del tensor
            # A block of GPTQ takes long to solve: a resumed run must not solve it again.
            if durable:
                writer.record_safe_point()


def _follow_rank0(
    group: ProcessGroup,
    quantizer: RtnQuantizer,
    blocks: Sequence[TensorBlock],
    existing_tensors: Written,
) -> QuantizeResult:
    """Solve with the other processes, and wait for the result of the first one, which writes."""
    with quantizer.running(blocks, existing_tensors):
        for block in blocks:
            # The call itself solves the block with the other processes. The iterator that it
            # returns only makes the tensors to write, which the first process does.
            quantizer.solve(block)
    result: QuantizeResult = group.receive_from_rank0()
    return result


def _note_starved_experts(
    records: Mapping[str, Mapping[str, object]], config: ModelConfig
) -> list[str]:
    """Write a note where experts were sent too few calibration tokens, by the tensors' records."""
    # The records of such experts, by layer and number.
    starved: dict[tuple[int | None, int], list[Mapping[str, object]]] = {}
    experts = set()
    for parameter in parameters(config):
        if parameter.expert is not None:
            experts.add((parameter.layer, parameter.expert))
            record = records.get(parameter.name, {})
            if record.get("tokens_from") == "all":
                starved.setdefault((parameter.layer, parameter.expert), []).append(record)
    if not starved:
        return []
    without_tokens = 0
    rounded = 0
    for expert_records in starved.values():
        if any(record["routed_tokens"] == 0 for record in expert_records):
            without_tokens += 1
        for record in expert_records:
            if record["solver"] in ROUNDED:
                rounded += 1
    without_text = ""
    if without_tokens:
        without_text = f", {without_tokens} of them none"
    rounded_text = ""
    # Linears that even all tokens solve badly.
    if rounded:
        were = "was" if rounded == 1 else "were"
        rounded_text = f", and {rounded} of their linears {were} rounded to nearest"
    return [
        f"{len(starved)} of {len(experts)} experts were sent too few calibration"
        f" tokens{without_text}: all tokens calibrated them{rounded_text}"
    ]
