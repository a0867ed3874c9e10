"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.arguments import as_path, require_instance
from quantkit.bit_allocation.fit import Fit
from quantkit.calibration.cache_scales import scale_tokens
from quantkit.calibration.data import Calibration
from quantkit.calibration.importance import IMPORTANCE, input_importance, sample_tokens
from quantkit.calibration.quantizers import GptqQuantizer, RtnQuantizer, TensorBlock
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import Written, weight_size
from quantkit.formats.folders_encoder import of_folder
from quantkit.formats.output.staging import mark_kept, partial_folder
from quantkit.jobs.card import model_card_files
from quantkit.jobs.estimate import Estimate, estimate_quantization, require_buildable
from quantkit.jobs.existing import Existing, is_finished, require_folders
from quantkit.jobs.formats import Formats
from quantkit.jobs.imatrix import importance_from
from quantkit.jobs.option_fields import called_with
from quantkit.jobs.output import Work, Writer, content_hash, model_summary, writing
from quantkit.jobs.prepare import BIT_ALLOCATION, Prepared, choose_schemes, prepare, size_fit, too_few_tokens
from quantkit.jobs.quantize_options import QuantizeOptions
from quantkit.jobs.result import QuantizeResult, together
from quantkit.jobs.sizes import weight_sizes
from quantkit.jobs.steps import phase_of
from quantkit.jobs.target import NATIVE
from quantkit.jobs.weights_only import within_bounds
from quantkit.model.column_kernels import kernels_name
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.model.shared_scales import SharedScales
from quantkit.progress import Progress, deduplicated, in_phase, without_phase
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.quality.manifest_check import ACTIVATIONS
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly, carried_tensors, weights_only
from quantkit.tensors.products import compute_dtype
from quantkit.tensors.qtensor import ROUNDED
from quantkit.via_transformers.forward import run_by_transformers


@dataclass(frozen=True)
class QuantizeArguments(QuantizeOptions):
    """The arguments of `quantize`: the options, and who takes part.

    Attributes:
        group: the processes that share the calibration. Each makes the same call; rank 0 writes, and the others wait
            for it.
        on_estimate: called with the estimate of memory, disk and time before anything takes long.
        progress: as in `convert`.
    """

    _: KW_ONLY
    group: ProcessGroup = SINGLE
    on_estimate: Callable[[Estimate], None] | None = None
    progress: Progress | None = None


@called_with(QuantizeArguments)
def quantize(options: QuantizeArguments) -> QuantizeResult:
    """Write the model in `src`, quantized, to the new folder, or GGUF file, `dst`, if it passes the gate.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the recipe names them. Rows that the group size does not divide follow
    `QuantScheme.fitted`, which the manifest records.

    A model known by its tensors only is not run: its linears are rounded, those that lose too much keep their floats,
    and all other tensors stay as they are.

    Args:

    Returns:
        What was written: path, size, bits per weight, what the gate measured, notes; the same in each process of a
        group.

    Raises:
        RequestError: for a scheme, method or option that is invalid, or a size that no choice of schemes has.
        CheckpointError, UnsupportedError: if `src` is damaged, or of a kind that cannot be quantized, or `to` does not
            hold the scheme.
        DestinationError, ResumeError: if `dst` exists, cannot be written, or is being written.
        NonFiniteError, QualityError: if the weights hold NaN or Inf, or the result is too far from its source.
            After any of them there is no `dst`.

    Example:
        >>> made = quantkit.quantize("model", "model-int4", "int4-g128")
        >>> print(made.bits_per_weight, made.quality.texts[0].kl)
    """
    began = time.monotonic()
    require_instance("group", options.group, ProcessGroup, "a ProcessGroup")
    group, progress = options.group, deduplicated(options.progress)
    prepared = prepare(options)
    if prepared.source.config.run_by is not None and group.size > 1:
        raise RequestError(
            "models that transformers runs are quantized by one process", found=f"{group.size} processes"
        )
    there = is_finished(prepared.dst, options.if_exists) if group.is_rank0 else group.receive_from_rank0()
    if group.is_rank0:
        group.send_from_rank0(there)
    if there:
        return _skipped(prepared, group, began, progress) if group.is_rank0 else group.receive_from_rank0()
    fit, formats = size_fit(prepared), Formats.of(prepared)
    if group.is_rank0:
        require_buildable(prepared.dst, formats.encoder, resume=options.resume)  # before anything takes long
        _ = formats.side_files
        if options.on_estimate is not None:
            options.on_estimate(estimate_quantization(formats, fit))
    try:
        prepared, drawn = _settled(prepared, fit, group, progress)
    except KeyboardInterrupt as error:
        mark_kept(error, partial_folder(prepared.dst))
        raise
    formats = Formats.of(prepared)
    source, settings, dst = prepared.source, prepared.settings, prepared.dst
    quantizer = _quantizer(prepared, drawn, group, progress)
    if not group.is_rank0:
        return _follow_rank0(group, quantizer, formats.blocks, Written(formats.encoder, partial_folder(dst)))
    works = {folder: _work(one, drawn, group) for folder, one in formats.each.items()}
    work = formats.work(works)
    report = progress if settings is None else without_phase(progress, work.job)  # GPTQ reports its linears
    with writing(work, dst, resume=options.resume, source_check=options.source_check, progress=report) as writer:
        _write(formats.blocks, quantizer, writer, writer.written, durable=settings is not None)
        writer.finish()
        results = {
            folder: _proven(one, drawn, works[folder], folder, writer, quantizer, began, progress)
            for folder, one in formats.each.items()
        }
        writer.place()
    found = together(results, dst, time.monotonic() - began)
    records = of_folder(next(iter(results)), writer.records)
    found.notes.extend([*_starved_experts(records, source.config), *writer.notes])
    group.send_from_rank0(found)
    return found


def _proven(
    prepared: Prepared, drawn: Calibration | None, work: Work, folder: str, writer: Writer, quantizer: RtnQuantizer,
    began: float, progress: Progress,
) -> QuantizeResult:  # fmt: skip
    """Check the result in a folder of the output, and complete it with its card and manifest. Raises `QualityError` as
    `_check` does."""
    source, records = prepared.source, of_folder(folder, writer.records)
    result = writer.read_back(folder)
    if source.config.run_by is not None:
        result = run_by_transformers(result, code=source.config.code)
        prepared = _with_loading(prepared, result)
    size = weight_size(result)
    gate, certificate = _check(prepared, result, records, quantizer, folder, progress)
    card = model_card_files(prepared, drawn, *size, gate, certificate)
    details = _details(prepared, work, result, records, gate, certificate)
    manifest = writer.add_manifest(details, card, folder)
    return _result(prepared, drawn, size, gate, certificate, began, manifest)


def _result(
    prepared: Prepared, drawn: Calibration | None, size: tuple[int, float], gate: Gate | WeightsOnly,
    certificate: PositionCertificate | None, began: float, manifest: dict[str, Any], *, skipped: bool = False,
) -> QuantizeResult:  # fmt: skip
    notes = [
        *prepared.source.notes, *prepared.notes, *_rounded_inputs(prepared),
        *_accepted(prepared.dst, gate, certificate),
    ]  # fmt: skip
    embedding = prepared.scheme_map.embedding
    return QuantizeResult(
        prepared.dst, prepared.scheme_map.counts(), *size, prepared.method, None if drawn is None else drawn.to_json(),
        gate, prepared.options.accept_quality_loss, time.monotonic() - began, notes, manifest,
        weight_sizes(prepared, prepared.encoder.total_bytes()), None if embedding is None else str(embedding),
        certificate, prepared.allocation, skipped, None if prepared.settings is None else prepared.settings.effort,
        prepared.options.kv_cache,
    )  # fmt: skip


def _rounded_inputs(prepared: Prepared) -> list[str]:
    """A note where readers of the result round the inputs of linears."""
    if not prepared.activations:
        return []
    types = " and ".join(dict.fromkeys(prepared.activations.values()))
    measured = "and so does the gate" if prepared.source.config.runnable else "figures here are of the weights alone"
    return [f"{prepared.dst}: readers round the inputs of linears to {types}, {measured}"]


def _skipped(prepared: Prepared, group: ProcessGroup, began: float, progress: Progress) -> QuantizeResult:
    """The result that exists. Raises `DestinationError` if it is another one than this job would write."""
    options, formats = prepared.options, Formats.of(prepared)
    require_folders(prepared.dst, formats.each)
    there = {folder: Existing.read(one.dst, progress) for folder, one in formats.each.items()}
    if options.size is not None:
        existing = there[""]  # a size goes with one format
        if (allocation := prepared.recorded_allocation(existing.manifest.get(BIT_ALLOCATION))) is None:
            raise existing.differs(BIT_ALLOCATION)
        prepared = prepared.with_allocation(allocation)
    for folder, one in Formats.of(prepared).each.items():
        known = {"job": "quantize", **_work(one, None, group).options}
        there[folder].require({key: there[folder].manifest.get(key) for key in known}, known)  # first, as it is fast
    prepared, drawn = _settled(prepared, None, SINGLE, progress)  # rank 0 draws for all
    each = Formats.of(prepared).each.items()
    results = {folder: _kept(one, drawn, there[folder], group, began, progress) for folder, one in each}
    found = together(results, prepared.dst, time.monotonic() - began)
    group.send_from_rank0(found)
    return found


def _kept(
    prepared: Prepared, drawn: Calibration | None, there: Existing, group: ProcessGroup, began: float,
    progress: Progress,
) -> QuantizeResult:  # fmt: skip
    """One result that exists, with samples that were drawn; see `_skipped`."""
    options, work = prepared.options, _work(prepared, drawn, group)
    there.require_inputs(work, _planned(prepared, work), source_check=options.source_check, progress=progress)
    accepted, certificate, text = options.accept_quality_loss, None, prepared.certified
    gate = there.passed(Gate if prepared.source.config.measurable else WeightsOnly, "quality", accepted=accepted)
    if ("positions" in there.manifest) != (text is not None):
        raise there.differs("certify_positions")
    if text is not None:
        stated = {"text": text.name, "sha256": text.sha256, "asked": text.requested}
        certificate = there.passed(PositionCertificate, "positions", accepted=accepted, **stated)
    opened = there.opened(work)
    if prepared.source.config.run_by is not None:
        prepared = _with_loading(prepared, run_by_transformers(opened, code=prepared.source.config.code))
    size = weight_size(opened)
    there.require_files(work, model_card_files(prepared, drawn, *size, gate, certificate))
    return _result(prepared, drawn, size, gate, certificate, began, there.manifest, skipped=True)


def _settled(
    prepared: Prepared, fit: Fit | None, group: ProcessGroup, progress: Progress
) -> tuple[Prepared, Calibration | None]:
    """The final schemes, and the calibration samples; None for rounding."""
    source, settings, drawn = prepared.source, prepared.settings, None
    notes: list[str] = []
    if not source.config.measurable:
        allow_nonfinite = prepared.options.allow_nonfinite
        scheme_map, notes = within_bounds(
            source, prepared.scheme_map, allow_nonfinite=allow_nonfinite, progress=progress
        )
        prepared = replace(prepared, scheme_map=scheme_map)
    if settings is not None:
        drawn = settings.draw(source, group=group, progress=progress)
        notes = [*drawn.notes, *too_few_tokens(drawn.tokens.shape, source.config)]
        if source.config.run_by is not None:
            from quantkit.jobs.lockstep import surveyed

            prepared = surveyed(prepared, drawn)
        if fit is not None:
            prepared = choose_schemes(prepared, fit, drawn, group=group, progress=progress)
    return replace(prepared, notes=[*prepared.notes, *notes]), drawn


def _with_loading(prepared: Prepared, result: Checkpoint) -> Prepared:
    """A job that knows whether transformers loads the packed result, with a note if it does not."""
    from quantkit.via_transformers.packed_loading import loading_problem

    if (problem := loading_problem(result.path, prepared.source.config.code)) is None:
        return prepared
    remedy = "`quantkit convert` with `dequantize=True` makes a folder that it loads"
    note = f"{prepared.dst}: {result.config.run_by} does not load the packed weights ({problem}); {remedy}"
    return replace(prepared, unread=problem, notes=[*prepared.notes, note])


def _quantizer(prepared: Prepared, drawn: Calibration | None, group: ProcessGroup, progress: Progress) -> RtnQuantizer:
    source, settings, allow_nonfinite = prepared.source, prepared.settings, prepared.options.allow_nonfinite
    shared, kernels_of = SharedScales(source, prepared.scheme_map.schemes), prepared.kernels_of
    if settings is None or drawn is None:
        quantizer = RtnQuantizer(
            source, allow_nonfinite=allow_nonfinite, shared=shared, kernels_of=kernels_of, progress=progress
        )
        if prepared.is_weighted and group.is_rank0:
            observed, linears = in_phase(progress, IMPORTANCE), prepared.scheme_map.linears
            importance = partial(input_importance, source, prepared.tokenizer, linears=linears, progress=observed)
            if prepared.options.imatrix is not None:
                importance = partial(importance_from, as_path("imatrix", prepared.options.imatrix), source)
            quantizer.importance = cache(importance)
        if prepared.options.kv_cache is not None and group.is_rank0:
            quantizer.cache_sample = partial(sample_tokens, source, prepared.tokenizer, *scale_tokens(source))
        return quantizer
    if source.config.run_by is not None:
        from quantkit.jobs.lockstep import lockstep_quantizer

        return lockstep_quantizer(prepared, settings, drawn, progress)
    return GptqQuantizer(
        source, drawn, prepared.scheme_map.schemes, device=settings.device, memory_bytes=settings.memory_bytes,
        effort=settings.effort_on(source.config, drawn.tokens.shape), allow_nonfinite=allow_nonfinite, group=group,
        progress=progress, shared=shared, kernels_of=kernels_of,
    )  # fmt: skip


def _work(prepared: Prepared, drawn: Calibration | None, group: ProcessGroup) -> Work:
    """What is to be written, with all that decides its bytes: for the manifest, and for runs that resume."""
    options, settings, source = prepared.options, prepared.settings, prepared.source
    recorded: dict[str, object] = {
        "recipe": prepared.scheme_map.recipe.to_json(), "method": prepared.method,
        "allow_nonfinite": options.allow_nonfinite,
    }  # fmt: skip
    if not source.config.runnable:
        recorded |= {"tensors_only": True, "linears_by": prepared.linears_by}
    if source.config.run_by is not None:
        recorded["run_by"] = source.config.run_by
    if prepared.target.name != NATIVE:
        recorded["to"] = prepared.target.name
    if prepared.activations:
        recorded[ACTIVATIONS] = prepared.activations
    if options.dequantize:
        recorded["dequantize"] = True
    recorded |= prepared.adapters
    if options.imatrix is not None:
        recorded["imatrix"] = content_hash(as_path("imatrix", options.imatrix))
    if options.kv_cache is not None:
        recorded["kv_cache"] = options.kv_cache
    if options.split_max_size is not None:
        recorded["split_max_size"] = options.split_max_size
    if prepared.allocation is not None:
        recorded[BIT_ALLOCATION] = prepared.allocation.to_json()
    computed_by: dict[str, object] = {}
    scratch = 0
    if settings is None and (prepared.is_weighted or options.kv_cache is not None):
        computed_by = _machine(torch.device("cpu"))
    elif settings is not None and drawn is not None:
        recorded |= {"calibration": drawn.to_json(), "effort": settings.effort}
        device = settings.device
        computed_by = _machine(device) | {
            "number of processes": group.size, "samples multiplied in": str(compute_dtype(device)),
            "kind of device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }  # fmt: skip
        if settings.text is None or drawn.documents is not None:  # a model or a template has made or chosen them
            computed_by["calibration samples"] = drawn.fingerprint()
        _, scratch, _ = settings.activation_bytes(source.config, drawn.tokens.shape)
    if options.template is not None:
        recorded["template"] = Path(options.template).name
    return Work("quantize", source, prepared.encoder, prepared.side_files, recorded, computed_by, scratch)


def _machine(device: torch.device) -> dict[str, object]:
    """What sums of floats depend on, and so do solved and weighted codes."""
    return {
        "torch": torch.__version__, "number of threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(), "column kernels": kernels_name(device),
    }  # fmt: skip


def _check(
    prepared: Prepared, result: Checkpoint, records: Mapping[str, Mapping[str, Any]], quantizer: RtnQuantizer,
    folder: str, progress: Progress,
) -> tuple[Gate | WeightsOnly, PositionCertificate | None]:  # fmt: skip
    """Compare a result with its source; the tensors of a model that cannot be run. Raises `QualityError` if it is too
    far from it, unless that is accepted."""
    source, certified, schemes = prepared.source, prepared.certified, prepared.scheme_map.schemes
    if not source.config.measurable:
        return weights_only(result, records), None
    accepted = prepared.options.accept_quality_loss
    inputs = prepared.inputs if source.config.runnable else {}  # transformers runs the weights alone
    gate = run_gate(
        source, result, records, requested=schemes, importance=quantizer.importance, inputs=inputs,
        progress=in_phase(progress, phase_of("gate", folder)),
    )  # fmt: skip
    if not accepted:
        require_passed(gate, source, result, prepared.dst)
    if certified is None:
        return gate, None
    observed = in_phase(progress, phase_of("certificate", folder))
    certificate = certified.certificate(source, RoundedInputs(result, inputs), schemes.values(), observed)
    if not accepted:
        certificate.require_within(prepared.dst)
    return gate, certificate


def _details(
    prepared: Prepared, work: Work, result: Checkpoint, records: Mapping[str, Mapping[str, Any]],
    gate: Gate | WeightsOnly, certificate: PositionCertificate | None,
) -> dict[str, object]:  # fmt: skip
    """The manifest's own part of a quantization."""
    source, accepted = prepared.source, prepared.options.accept_quality_loss
    details: dict[str, object] = {
        **_planned(prepared, work),
        "quality": gate.to_json(accepted=accepted), "modules": prepared.scheme_map.describe(records),
    }  # fmt: skip
    if work.computed_by:
        details["computed_by"] = work.computed_by
    if certificate is not None:
        details["positions"] = certificate.to_json(accepted=accepted)
    if not source.config.runnable:
        details["carried"] = carried_tensors(source, result)
    return details


def _planned(prepared: Prepared, work: Work) -> dict[str, object]:
    """The part of it that is known before anything is written."""
    return {"model": model_summary(prepared.source, prepared.source.config.dtype), **work.options}


def _write(
    blocks: Sequence[TensorBlock], quantizer: RtnQuantizer, writer: Writer, there: Written, *, durable: bool
) -> None:
    """Solve and write what is not there yet, with `durable` so that each block outlives the run."""
    with quantizer.running(blocks, there):
        for block in blocks:
            if not there.names.issuperset(spec.name for spec in block.tensors):
                writer.report_progress()
            for name, tensor, record in quantizer.solve(block):
                writer.put(name, tensor, record)
                del tensor  # before the next one is made
            if durable:
                writer.checkpoint()  # what takes long to solve is not solved again


def _follow_rank0(
    group: ProcessGroup, quantizer: RtnQuantizer, blocks: Sequence[TensorBlock], there: Written
) -> QuantizeResult:
    """What another process than the first does: it solves with the others, and waits for the one that writes."""
    with quantizer.running(blocks, there):
        for block in blocks:
            quantizer.solve(block)  # the first process writes it
    result: QuantizeResult = group.receive_from_rank0()
    return result


def _accepted(dst: Path, *checks: Gate | WeightsOnly | PositionCertificate | None) -> list[str]:
    """Notes on what was found too far from the source in a result that is kept."""
    found = [one.problem() for one in checks if isinstance(one, (Gate, PositionCertificate))]
    return [f"{dst}: {one[0]}: {one[1]}, expected {one[2]}; accepted" for one in found if one is not None]


def _starved_experts(records: Mapping[str, Mapping[str, object]], config: ModelConfig) -> list[str]:
    """A note where experts were sent too few calibration tokens, by the tensors' records."""
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
    none = f", {never} of them none" if never else ""
    rounded = sum(record["solver"] in ROUNDED for own in found.values() for record in own)
    last = f", and {rounded} of their linears {'was' if rounded == 1 else 'were'} rounded to nearest" if rounded else ""
    return [
        f"{len(found)} of {len(experts)} experts were sent too few calibration tokens{none}: "
        f"all tokens calibrated them{last}"
    ]
