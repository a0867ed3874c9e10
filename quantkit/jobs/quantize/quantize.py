"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.base.arguments import is_several, require_instance
from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, skip_repeated_reports, without_phase
from quantkit.calibration.data import Calibration
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.container import Written, weight_size
from quantkit.formats.folders_encoder import of_folder
from quantkit.formats.output.staging import mark_kept, partial_folder
from quantkit.jobs.output.estimate import Estimate, require_buildable
from quantkit.jobs.output.existing import Existing, is_finished, require_folders
from quantkit.jobs.output.result import QuantizeResult, together
from quantkit.jobs.output.writer import Writer, writing
from quantkit.jobs.quantize.card import model_card_files
from quantkit.jobs.quantize.estimate import estimate_quantization
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import BIT_ALLOCATION, Prepared, prepare, size_fit
from quantkit.jobs.quantize.proof import describe_plan, result_of, verify_output, with_loading
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
            "models that transformers runs are quantized by one process",
            found=f"{group.size} processes",
        )
    if options.refine:
        return _quantize_and_refine(options, prepared, began, progress)
    if group.is_rank0:
        there = is_finished(prepared.dst, options.if_exists)
    else:
        there = group.receive_from_rank0()
    if group.is_rank0:
        group.send_from_rank0(there)
    if there:
        return (
            _read_existing_result(prepared, group, began, progress)
            if group.is_rank0
            else group.receive_from_rank0()
        )
    fit = size_fit(prepared)
    formats = Formats.of(prepared)
    if group.is_rank0:
        # Before anything takes long.
        require_buildable(prepared.dst, formats.encoder, resume=options.resume)
        _ = formats.side_files
        if options.on_estimate is not None:
            options.on_estimate(estimate_quantization(formats, fit))
    try:
        prepared, drawn = finalize_schemes(prepared, fit, group, progress)
    except KeyboardInterrupt as error:
        mark_kept(error, partial_folder(prepared.dst))
        raise
    formats = Formats.of(prepared)
    source = prepared.source
    settings = prepared.settings
    dst = prepared.dst
    quantizer = quantizer_of(prepared, drawn, group, progress)
    if not group.is_rank0:
        return _follow_rank0(
            group, quantizer, formats.blocks, Written(formats.encoder, partial_folder(dst))
        )
    works = {
        folder: work_of(one, drawn, group) for folder, one in formats.prepared_by_folder.items()
    }
    work = formats.work(works)
    # GPTQ reports its linears
    if settings is None:
        report = progress
    else:
        report = without_phase(progress, work.job)
    with writing(
        work, dst, resume=options.resume, source_check=options.source_check, progress=report
    ) as writer:
        if is_probed(prepared) and not writer.existing_tensors.names:
            note = probe_rounding(prepared, progress)
            if note is not None and options.on_note is not None:
                options.on_note(note)
        _write(
            formats.blocks, quantizer, writer, writer.existing_tensors, durable=settings is not None
        )
        writer.finish()
        results = {}
        for folder, one in formats.prepared_by_folder.items():
            results[folder] = verify_output(
                one, drawn, works[folder], folder, writer, quantizer, began, progress
            )
        writer.place()
    result = together(results, dst, time.monotonic() - began)
    records = of_folder(next(iter(results)), writer.records)
    result.notes.extend([*_note_starved_experts(records, source.config), *writer.notes])
    group.send_from_rank0(result)
    return result


def _quantize_and_refine(
    options: QuantizeArguments, prepared: Prepared, began: float, progress: Progress
) -> QuantizeResult:
    """Quantize to a folder next to the output, and refine what is there."""
    if options.group.size > 1:
        raise RequestError(
            "`refine=True` is for one process", found=f"{options.group.size} processes"
        )
    require_buildable(prepared.dst, prepared.encoder, resume=options.resume)
    estimate = estimate_refined_quantization(prepared)
    if options.on_estimate is not None:
        options.on_estimate(estimate)
    between = locate_unrefined_model(prepared.dst)
    calibration = options.calibration
    is_there = between.exists()
    if is_several(calibration) and not hasattr(calibration, "__getitem__"):
        calibration = list(calibration)  # it is read twice
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
        if_exists="skip" if is_there and options.resume else "fail",
        resume=options.resume and partial_folder(between).exists(),
        progress=progress,
    )
    fields = {}
    for name in inspect.signature(QuantizeArguments).parameters:
        fields[name] = getattr(plain, name)
    try:
        first = quantize(**fields)
        return refine_output(prepared, first, calibration, began, progress)
    except BaseException as error:
        if between.exists():
            mark_kept(error, between)
        raise


def _read_existing_result(
    prepared: Prepared, group: ProcessGroup, began: float, progress: Progress
) -> QuantizeResult:
    """Return the result that exists.

    Raises `DestinationError` if it is another one than this job would write.
    """
    options = prepared.options
    formats = Formats.of(prepared)
    require_folders(prepared.dst, formats.prepared_by_folder)
    there = {
        folder: Existing.read(one.dst, progress)
        for folder, one in formats.prepared_by_folder.items()
    }
    if options.size is not None:
        # A size goes with one format.
        existing = there[""]
        if (allocation := prepared.parse_allocation(existing.manifest.get(BIT_ALLOCATION))) is None:
            raise existing.differs(BIT_ALLOCATION)
        prepared = prepared.with_allocation(allocation)
    for folder, one in Formats.of(prepared).prepared_by_folder.items():
        known = {"job": "quantize", **work_of(one, None, group).options}
        # First, as it is fast.
        there[folder].require({key: there[folder].manifest.get(key) for key in known}, known)
    # Rank 0 draws for all.
    prepared, drawn = finalize_schemes(prepared, None, SINGLE, progress)
    each = Formats.of(prepared).prepared_by_folder.items()
    results = {
        folder: _read_existing_format(one, drawn, there[folder], group, began, progress)
        for folder, one in each
    }
    result = together(results, prepared.dst, time.monotonic() - began)
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
    """Return one result that exists, with samples that were drawn; see `_read_existing_result`."""
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
        stated = {"text": text.name, "sha256": text.sha256, "asked": text.requested}
        certificate = existing.read_passed_check(
            PositionCertificate, "positions", accepted=accepted, **stated
        )
    opened = existing.open_weights(work)
    if prepared.source.config.run_by is not None:
        prepared = with_loading(
            prepared, run_by_transformers(opened, code=prepared.source.config.code)
        )
    size = weight_size(opened)
    existing.require_files(work, model_card_files(prepared, drawn, *size, gate, certificate))
    return result_of(
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
    """Solve and write what is not there yet, with `durable` so that each block outlives the run."""
    with quantizer.running(blocks, existing_tensors):
        for block in blocks:
            if not existing_tensors.names.issuperset(spec.name for spec in block.tensors):
                writer.report_progress()
            for name, tensor, record in quantizer.solve(block):
                writer.put(name, tensor, record)
                # Before the next one is made.
                del tensor
            if durable:
                # What takes long to solve is not solved again.
                writer.checkpoint()


def _follow_rank0(
    group: ProcessGroup,
    quantizer: RtnQuantizer,
    blocks: Sequence[TensorBlock],
    existing_tensors: Written,
) -> QuantizeResult:
    """Return what another process than the first does: it solves with the others, and waits for the
    one that writes.
    """
    with quantizer.running(blocks, existing_tensors):
        for block in blocks:
            # The first process writes it.
            quantizer.solve(block)
    result: QuantizeResult = group.receive_from_rank0()
    return result


def _note_starved_experts(
    records: Mapping[str, Mapping[str, object]], config: ModelConfig
) -> list[str]:
    """Return a note where experts were sent too few calibration tokens, by the tensors' records."""
    found: dict[tuple[int | None, int], list[Mapping[str, object]]] = {}
    experts = set()
    for parameter in parameters(config):
        if parameter.expert is not None:
            experts.add((parameter.layer, parameter.expert))
            record = records.get(parameter.name, {})
            if record.get("tokens_from") == "all":
                found.setdefault((parameter.layer, parameter.expert), []).append(record)
    if not found:
        return []
    never = sum(any(record["routed_tokens"] == 0 for record in own) for own in found.values())
    if never:
        none = f", {never} of them none"
    else:
        none = ""
    rounded = sum(record["solver"] in ROUNDED for own in found.values() for record in own)
    if rounded:
        were = "was" if rounded == 1 else "were"
        last = f", and {rounded} of their linears {were} rounded to nearest"
    else:
        last = ""
    return [
        f"{len(found)} of {len(experts)} experts were sent too few calibration tokens{none}: "
        f"all tokens calibrated them{last}"
    ]
