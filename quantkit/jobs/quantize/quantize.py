"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.base.arguments import is_several, require_instance
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, skip_repeated_reports, without_phase
from quantkit.calibration.data import Calibration
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.container import Written, weight_size
from quantkit.formats.folders_encoder import select_folder
from quantkit.formats.output.staging import mark_kept, name_partial_folder
from quantkit.jobs.output.estimate import Estimate, require_buildable
from quantkit.jobs.output.existing import Existing, is_finished, require_folders
from quantkit.jobs.output.result import QuantizeResult, join_results
from quantkit.jobs.output.writer import Writer, open_writer
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.estimate import estimate_quantization
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import BIT_ALLOCATION, Prepared, prepare, set_up_size_fit
from quantkit.jobs.quantize.proof import (
    collect_result,
    describe_plan,
    record_loading_problem,
    verify_output,
)
from quantkit.jobs.quantize.refined import locate_unrefined_model, refine_output
from quantkit.jobs.quantize.refined_estimate import estimate_refined_quantization
from quantkit.jobs.quantize.rounding_probe import is_probed, probe_rounding
from quantkit.jobs.quantize.work import finalize_schemes, quantizer_of, work_of
from quantkit.quality.gate import Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly
from quantkit.tensors.qtensor import ROUNDED
from quantkit.via_transformers.forward import run_by_transformers


@dataclass(frozen=True)
class QuantizeArguments(QuantizeOptions):
    """The arguments of `quantize`: the options, and who takes part.

    Attributes:
        group: the processes that share the calibration. Each makes the same call; rank 0 writes,
            and the others wait for it.
        on_estimate: called with the estimate of memory, disk and time before anything takes long.
        on_note: called with what the user should know while the job still runs: a scheme that will
            hardly pass.
        progress: as in `convert`.
    """

    _: KW_ONLY
    group: ProcessGroup = SINGLE
    on_estimate: Callable[[Estimate], None] | None = None
    on_note: Callable[[str], None] | None = None
    progress: Progress | None = None


@accept_fields_of(QuantizeArguments)
def quantize(options: QuantizeArguments) -> QuantizeResult:
    """Write the model in `src`, quantized, to the new folder, or GGUF file, `dst`, if it passes the
    gate.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the recipe names them. Rows that the group size does not divide follow
    `QuantScheme.fit_to_columns`, which the manifest records.

    A model known by its tensors only is not run: its linears are rounded, those that lose too much
    keep their floats, and all other tensors stay as they are.

    Args:

    Returns:
        What was written: path, size, bits per weight, what the gate measured, notes; the same in
        each process of a group.

    Raises:
        RequestError: for a scheme, method or option that is invalid, or a size that no choice of
            schemes has.
        CheckpointError, UnsupportedError: if `src` is damaged, or of a kind that cannot be
            quantized, or `to` does not hold the scheme.
        DestinationError, ResumeError: if `dst` exists, cannot be written, or is being written.
        NonFiniteError, QualityError: if the weights hold NaN or Inf, or the result is too far from
            its source. After any of them there is no `dst`.

    Example:
        >>> made = quantkit.quantize("model", "model-int4", "int4-g128")
        >>> print(made.bits_per_weight, made.quality.texts[0].kl)
    """
    began = time.monotonic()
    require_instance("group", options.group, ProcessGroup, "a ProcessGroup")
    group = options.group
    progress = skip_repeated_reports(options.progress)
    prepared = prepare(options)
    if prepared.source.config.run_by is not None and group.size > 1:
        raise RequestError(
            "models that transformers runs can only be quantized by one process",
            found=f"{group.size} processes",
        )
    if options.refine:
        return _quantize_and_refine(options, prepared, began, progress)
    # The others may run on machines without the output, and follow what rank 0 finds there.
    if group.is_rank0:
        finished = is_finished(prepared.dst, options.if_exists)
        group.send_from_rank0(finished)
    else:
        finished = group.receive_from_rank0()
    if finished:
        if group.is_rank0:
            return _read_existing_result(prepared, group, began, progress)
        existing_result: QuantizeResult = group.receive_from_rank0()
        return existing_result
    fit = set_up_size_fit(prepared)
    formats = Formats.of(prepared)
    if group.is_rank0:
        # Missing space and side files that do not fit are errors before anything takes long.
        require_buildable(prepared.dst, formats.encoder, resume=options.resume)
        _ = formats.side_files
        if options.on_estimate is not None:
            options.on_estimate(estimate_quantization(formats, fit))
    # Ctrl-C tells whether an earlier run's partial output is kept, or that nothing was written.
    try:
        prepared, drawn = finalize_schemes(prepared, fit, group, progress)
    except KeyboardInterrupt as error:
        mark_kept(error, name_partial_folder(prepared.dst))
        raise
    formats = Formats.of(prepared)
    source = prepared.source
    settings = prepared.settings
    dst = prepared.dst
    quantizer = quantizer_of(prepared, drawn, group, progress)
    if not group.is_rank0:
        return _follow_rank0(
            group, quantizer, formats.blocks, Written(formats.encoder, name_partial_folder(dst))
        )
    works = {}
    for folder, prepared_format in formats.prepared_by_folder.items():
        works[folder] = work_of(prepared_format, drawn, group)
    work = formats.work(works)
    # GPTQ reports this phase itself, linear by linear.
    if settings is None:
        report = progress
    else:
        report = without_phase(progress, work.job)
    with open_writer(
        work, dst, resume=options.resume, source_check=options.source_check, progress=report
    ) as writer:
        # A run that resumes solved tensors has printed the note before.
        if is_probed(prepared) and not writer.existing_tensors.names:
            note = probe_rounding(prepared, progress)
            if note is not None and options.on_note is not None:
                options.on_note(note)
        _write(
            formats.blocks, quantizer, writer, writer.existing_tensors, durable=settings is not None
        )
        writer.finish()
        results = {}
        for folder, prepared_format in formats.prepared_by_folder.items():
            results[folder] = verify_output(
                prepared_format, drawn, works[folder], folder, writer, quantizer, began, progress
            )
        # Only an output whose formats have all passed gets its name.
        writer.place()
    result = join_results(results, dst, time.monotonic() - began)
    records = select_folder(next(iter(results)), writer.records)
    result.notes.extend([*_note_starved_experts(records, source.config), *writer.notes])
    group.send_from_rank0(result)
    return result


def _quantize_and_refine(
    options: QuantizeArguments, prepared: Prepared, began: float, progress: Progress
) -> QuantizeResult:
    """Quantize to a folder next to the output, and refine the model in it."""
    if options.group.size > 1:
        raise RequestError(
            Message(Option("refine", value=True), " requires a single process"),
            found=f"{options.group.size} processes",
        )
    require_buildable(prepared.dst, prepared.encoder, resume=options.resume)
    estimate = estimate_refined_quantization(prepared)
    if options.on_estimate is not None:
        options.on_estimate(estimate)
    between = locate_unrefined_model(prepared.dst)
    calibration = options.calibration
    has_unrefined = between.exists()
    # Both jobs read the text, and an iterator can be read only once.
    if is_several(calibration) and not hasattr(calibration, "__getitem__"):
        calibration = list(calibration)
    # The gate decides on the refined model: its bound does not apply before training.
    plain = replace(
        options,
        dst=between,
        refine=False,
        train_codes=False,
        train_norms=False,
        epochs=None,
        on_estimate=None,
        calibration=calibration,
        accept_quality_loss=True,
        if_exists="skip" if has_unrefined and options.resume else "fail",
        resume=options.resume and name_partial_folder(between).exists(),
        progress=progress,
    )
    fields = {}
    # `quantize` is decorated to take fields, not an options object.
    for name in inspect.signature(QuantizeArguments).parameters:
        fields[name] = getattr(plain, name)
    try:
        first = quantize(**fields)
        return refine_output(prepared, first, calibration, began, progress)
    except BaseException as error:
        # The message names the folder, from which `resume` continues.
        if between.exists():
            mark_kept(error, between)
        raise


def _read_existing_result(
    prepared: Prepared, group: ProcessGroup, began: float, progress: Progress
) -> QuantizeResult:
    """Read the result that exists, and compare it with the one that this job would write.

    Raises `DestinationError` if they differ.
    """
    options = prepared.options
    formats = Formats.of(prepared)
    require_folders(prepared.dst, formats.prepared_by_folder)
    existing_by_folder = {}
    for folder, prepared_format in formats.prepared_by_folder.items():
        existing_by_folder[folder] = Existing.read(prepared_format.dst, progress)
    if options.size is not None:
        # A size goes with one format.
        existing = existing_by_folder[""]
        allocation = prepared.parse_allocation(existing.manifest.get(BIT_ALLOCATION))
        if allocation is None:
            raise existing.differs(BIT_ALLOCATION)
        prepared = prepared.with_allocation(allocation)
    # The options are compared first, which is fast: drawing samples may run the model.
    for folder, prepared_format in Formats.of(prepared).prepared_by_folder.items():
        expected = {"job": "quantize", **work_of(prepared_format, None, group).options}
        existing = existing_by_folder[folder]
        existing.require({key: existing.manifest.get(key) for key in expected}, expected)
    # The other processes only wait for the result, so that rank 0 draws all samples.
    prepared, drawn = finalize_schemes(prepared, None, SINGLE, progress)
    results = {}
    for folder, prepared_format in Formats.of(prepared).prepared_by_folder.items():
        results[folder] = _read_existing_format(
            prepared_format, drawn, existing_by_folder[folder], group, began, progress
        )
    result = join_results(results, prepared.dst, time.monotonic() - began)
    group.send_from_rank0(result)
    return result


def _read_existing_format(
    prepared: Prepared,
    drawn: Calibration | None,
    existing: Existing,
    group: ProcessGroup,
    began: float,
    progress: Progress,
) -> QuantizeResult:
    """Read one result that exists, with samples that were drawn; see `_read_existing_result`."""
    options = prepared.options
    work = work_of(prepared, drawn, group)
    existing.require_inputs(
        work, describe_plan(prepared, work), source_check=options.source_check, progress=progress
    )
    accepted = options.accept_quality_loss
    certificate = None
    text = prepared.certified
    gate = existing.read_passed_check(
        Gate if prepared.source.config.measurable else WeightsOnly, "quality", accepted=accepted
    )
    if ("positions" in existing.manifest) != (text is not None):
        raise existing.differs("certify_positions")
    if text is not None:
        text_facts = {"text": text.name, "sha256": text.sha256, "asked": text.requested}
        certificate = existing.read_passed_check(
            PositionCertificate, "positions", accepted=accepted, **text_facts
        )
    opened = existing.open_weights(work)
    if prepared.source.config.run_by is not None:
        prepared = record_loading_problem(
            prepared, run_by_transformers(opened, code=prepared.source.config.code)
        )
    size = weight_size(opened)
    existing.require_files(work, model_card_files(prepared, drawn, *size, gate, certificate))
    return collect_result(
        prepared, drawn, size, gate, certificate, began, existing.manifest, skipped=True
    )


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
            if not existing_tensors.names.issuperset(spec.name for spec in block.tensors):
                writer.report_progress()
            for name, tensor, record in quantizer.solve(block):
                writer.put(name, tensor, record)
                # Free the tensor before the next one is made.
                del tensor
            # A block of GPTQ takes long to solve: a resumed run must not solve it again.
            if durable:
                writer.checkpoint()


def _follow_rank0(
    group: ProcessGroup,
    quantizer: RtnQuantizer,
    blocks: Sequence[TensorBlock],
    existing_tensors: Written,
) -> QuantizeResult:
    """Solve with the other processes, and wait for the result of the first one, which writes."""
    with quantizer.running(blocks, existing_tensors):
        for block in blocks:
            # The call takes part in the solution; the first process writes the tensors.
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
