"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from quantkit.arguments import as_path, require_flags, require_instance
from quantkit.bit_allocation.allocation import Allocation, size_target
from quantkit.calibration.data import Calibration
from quantkit.calibration.quantizers import GptqQuantizer, Quantizer, RtnQuantizer, TensorBlock
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import Written, weight_size
from quantkit.formats.detect import WeightKind
from quantkit.formats.output.staging import partial_folder
from quantkit.formats.registry import Target
from quantkit.jobs.card import model_card_files
from quantkit.jobs.card_facts import Made
from quantkit.jobs.certificate import certified_text
from quantkit.jobs.command import file_name
from quantkit.jobs.estimate import Estimate, estimate_quantization, require_buildable
from quantkit.jobs.fit_to_size import OPTION as BIT_ALLOCATION
from quantkit.jobs.fit_to_size import SizeFit, requested_recipe
from quantkit.jobs.kv_cache import dropped_kv_cache
from quantkit.jobs.labels import Labels, model_name
from quantkit.jobs.output import SHARD_BYTES, Work, Writer, model_summary, writing
from quantkit.jobs.prepare import Prepared, planned_output, prepare, starved_experts, tensor_blocks, too_few_tokens
from quantkit.jobs.result import QuantizeResult
from quantkit.jobs.settings import GptqSettings, Method, MethodOptions
from quantkit.jobs.target import NATIVE, TargetName, quantized_target, shard_bytes
from quantkit.jobs.weights_only import within_bounds
from quantkit.progress import Progress, deduplicated, in_phase, without_phase
from quantkit.quality.gate import Gate, require_passed, run_gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly, carried_tensors, weights_only
from quantkit.tensors.products import compute_dtype
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme


def quantize(
    src: str | Path,
    dst: str | Path,
    scheme: str | QuantScheme | Recipe | None = None,
    *,
    target_bits: float | None = None,
    max_size: int | None = None,
    head: str | QuantScheme | None = None,
    to: TargetName | None = None,
    split_max_size: int | None = None,
    method: Method | None = None,
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    thorough: bool = False,
    activation_memory: int | None = None,
    device: str | torch.device | None = None,
    embedding: str | QuantScheme | None = None,
    keep: str | Iterable[str] = (),
    strict: bool = False,
    accept_quality_loss: bool = False,
    certify_positions: int | None = None,
    certify_text: str | Path | None = None,
    base_model: str | None = None,
    license: str | None = None,
    template: str | None = None,
    weights: WeightKind | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    tensors_only: bool = False,
    group: ProcessGroup = SINGLE,
    on_estimate: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Write the model in `src`, quantized, to the new folder, or GGUF file, `dst`, if it passes the gate.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the recipe names them. Rows that the group size does not divide follow
    `QuantScheme.fitted`, which the manifest records.

    A model known by its tensors only is not run: its linears are rounded, those that lose too much keep their floats,
    and all other tensors stay as they are.

    Args:
        src: a model of floats; one in FP8 or MXFP4 counts as such.
        dst: the folder to make, or a file ``*.gguf``; it must not exist.
        scheme: its name, ``int8`` or ``int4-g128`` and the like; a `QuantScheme`; or a `Recipe` with overrides.
        target_bits: in place of a scheme: bits of each weight of the decoder linears on average, such as 4.5; codes,
            scales and zero points count, and the head if it is named. The scheme of each layer is chosen with GPTQ's
            samples among int4 in groups of 128, 64 and 32, int8 and floats, so that least is lost; linears that
            runtimes fuse share one.
        max_size: the same for all files of weights together, in bytes.
        head: the scheme of the output head, which keeps its floats by default; a recipe names ``lm_head`` instead.
        to: ``compressed-tensors`` (the default), ``int-quantized``, ``gptq``, ``awq``, ``mlx`` or ``gguf``; any of
            them with any `method`.
        split_max_size: as in `convert`.
        method: ``rtn`` (round to nearest) or ``gptq``; None is gptq if any layer gets int4, else rtn.
        calibration: a file, or a hub dataset as ``owner/name:config:split``; None is the text that ships with the
            package. This and the options down to `device` go with gptq only.
        samples, length, seed: how many samples of how many tokens are drawn from it, and
            the seed of their places; by default 128 of the model's context, 2048 at most, and 0.
        thorough: follow the float model on all samples rather than on some of them; slower
            and closer.
        activation_memory: bytes of calibration activations held in memory, by default 4_000_000_000;
            more go to the disk of `dst`.
        device: where GPTQ computes, as torch spells it; a GPU by default if there is one.
        embedding: the scheme of the embedding, ``int8``, one scale for each token; it is the head's too where both are
            one. None keeps its floats, unless a recipe names ``model.embed_tokens``.
        keep: glob, or several, of modules that keep their floats, such as ``*.layers.0.*``.
        strict: refuse a layer whose shape does not fit its scheme.
        accept_quality_loss: keep a result that is too far from its source.
        certify_positions: also measure the divergence by position, in windows of so many tokens, with keys and values
            in a float and in an int8 cache; with floats none may be beyond the gate's bound for the scheme.
        certify_text: a file to do that on; by default the gate's texts, some 5,000 tokens in all. A text, or context,
            that is shorter than the positions is measured to its end, and a note says so.
        base_model, license: for the model card: the source's name on a hub, ``owner/name``, and a licence as hubs
            spell it; by default what the source says of itself.
        tensors_only: take the tensors as they are, of whatever architecture; goes with rounding, and no logits are
            compared.
        group: the processes that share the calibration; each calls this alike, the first one writes, and the
            others wait for it.
        on_estimate: called with what it will take, once that is known and before anything takes long.
        template, weights, resume, allow_nonfinite, source_check, progress: as in `convert`.

    Returns:
        What was written: path, size, bits a weight, what the gate measured, notes; in each process of a group the
        same.

    Raises:
        RequestError: for a scheme, method or option that makes no sense, or a size that no choice of schemes has.
        CheckpointError, UnsupportedError: if `src` is damaged, or of a kind that cannot be quantized, or `to` does not
            hold the scheme.
        DestinationError, ResumeError: if `dst` is there, cannot be written, or is being written.
        NonFiniteError, QualityError: if the weights hold NaN or Inf, or the result is too far from its source.
            After any of them `dst` is not there.

    Example:
        >>> made = quantkit.quantize("model", "model-int4", "int4-g128")
        >>> print(made.bits_per_weight, made.quality.texts[0].kl)
    """
    began = time.monotonic()
    require_flags(thorough=thorough, strict=strict, accept_quality_loss=accept_quality_loss)
    require_flags(resume=resume, allow_nonfinite=allow_nonfinite, source_check=source_check, tensors_only=tensors_only)
    require_instance("group", group, ProcessGroup, "a ProcessGroup")
    progress, dst, labels = deduplicated(progress), as_path("dst", dst), Labels(base_model, license)
    target = quantized_target(to, dst)
    size = size_target(target_bits, max_size, scheme)
    asked = MethodOptions(
        method, calibration, samples, length, seed, thorough, activation_memory, device, sized=size is not None
    )
    prepared = prepare(
        src, dst, requested_recipe(scheme, size, head, target), embedding=embedding, keep=keep, strict=strict,
        weights=weights, tensors_only=tensors_only, method=asked, target=target,
    )  # fmt: skip
    name = model_name(prepared.source, labels.base_model)
    most = shard_bytes(split_max_size, target.container, SHARD_BYTES)
    long = certified_text(certify_positions, certify_text, prepared.source, prepared.tokenizer)
    drawn, allocation = None, None
    if size is not None:
        prepared, allocation, drawn = SizeFit(prepared, size, target, template, most, name, dst).choose(
            long, on_estimate, resume=resume, source_check=source_check, group=group, progress=progress
        )
    source, scheme_map, settings, notes = prepared.source, prepared.scheme_map, prepared.settings, prepared.notes
    notes += dropped_kv_cache(source, dst)
    runnable = source.config.runnable
    if not runnable:
        scheme_map, more = within_bounds(source, scheme_map, allow_nonfinite=allow_nonfinite, progress=progress)
        notes += more
    schemes = scheme_map.schemes
    options = _options(prepared, scheme_map.recipe, target, split_max_size, allocation, allow_nonfinite=allow_nonfinite)
    blocks = tensor_blocks(source, schemes, target)
    planned = planned_output(prepared, blocks, target, template, most, name, dst)
    encoder = target.container.encoder(planned)
    notes += target.container.notes(planned)
    side_files = target.container.side_files(planned)
    if group.is_rank0:
        require_buildable(dst, encoder, resume=resume)  # before anything takes long
        if on_estimate is not None and allocation is None:
            on_estimate(estimate_quantization(prepared, encoder, side_files, long, source_check=source_check))
    computed_by: dict[str, object] = {}
    scratch = 0
    quantizer: Quantizer = RtnQuantizer(source, allow_nonfinite=allow_nonfinite)
    if settings is not None:
        drawn = drawn or settings.draw(prepared.tokenizer, source, group=group, progress=progress)
        notes += [*drawn.notes, *too_few_tokens(drawn.tokens.shape, source.config)]
        options |= {"calibration": drawn.to_json(), "thorough": settings.thorough}
        computed_by = _computed_by(settings, drawn, group)
        scratch = settings.scratch_bytes(source, drawn)
        quantizer = GptqQuantizer(
            source, drawn, schemes, device=settings.device, memory_bytes=settings.memory_bytes,
            effort=settings.effort(source.config, drawn.tokens.shape), allow_nonfinite=allow_nonfinite, group=group,
            progress=progress,
        )  # fmt: skip
    if template is not None:
        options["template"] = Path(template).name
    if not group.is_rank0:
        return _follow_rank0(group, quantizer, blocks, Written(encoder, partial_folder(dst)))
    work = Work("quantize", source, encoder, side_files, options, computed_by, scratch)
    told = progress if settings is None else without_phase(progress, work.job)  # GPTQ tells of its linears
    with writing(work, dst, resume=resume, source_check=source_check, progress=told) as writer:
        _write(blocks, quantizer, writer, writer.written, durable=settings is not None)
        result = writer.seal()
        written = weight_size(result)
        notes += starved_experts(writer.records, source.config)
        gate, more = _gate(source, result, writer, schemes, dst, accepted=accept_quality_loss, progress=progress)
        notes += more
        certificate = None
        if long is not None:
            certificate = long.certificate(source, result, schemes.values(), in_phase(progress, "certificate"))
            if not accept_quality_loss:
                certificate.require_within(dst)
            notes += [*long.notes, *_accepted(certificate, dst)]
        details = {
            "model": model_summary(source, source.config.dtype), **options,
            "quality": gate.to_json(accepted=accept_quality_loss), "modules": scheme_map.describe(writer.records),
            **({} if certificate is None else {"positions": certificate.to_json(accepted=accept_quality_loss)}),
            **({} if runnable else {"carried": carried_tensors(source, result)}),
        }  # fmt: skip
        others = {
            "template": options.get("template"), "weights": weights, "allow_nonfinite": allow_nonfinite,
            "accept_quality_loss": accept_quality_loss, "tensors_only": tensors_only, "to": options.get("to"),
            "split_max_size": split_max_size, "certify_positions": certify_positions,
            "certify_text": certify_text and (file_name(certify_text) or "TEXT"),
        }  # fmt: skip
        card = {}
        if target.method is not None:
            made = Made(scheme_map, target.method, *written, settings, drawn, others, labels, allocation)
            card = model_card_files(source, made, gate, certificate)
        manifest = writer.commit(details, card)
    found = QuantizeResult(
        dst, scheme_map.counts(), *written, prepared.method, None if drawn is None else drawn.to_json(),
        gate, accept_quality_loss, time.monotonic() - began, [*source.notes, *notes, *writer.notes], manifest,
        None if scheme_map.embedding is None else str(scheme_map.embedding), certificate, allocation,
    )  # fmt: skip
    group.send_from_rank0(found)
    return found


def _options(
    prepared: Prepared, recipe: Recipe, target: Target, split_max_size: int | None, allocation: Allocation | None, *,
    allow_nonfinite: bool,
) -> dict[str, object]:  # fmt: skip
    """What decides the result besides the source and the calibration, for the manifest, and for runs that resume."""
    options: dict[str, object] = {
        "recipe": recipe.to_json(), "method": prepared.method, "allow_nonfinite": allow_nonfinite,
    }  # fmt: skip
    if not prepared.source.config.runnable:
        options |= {"tensors_only": True, "linears_by": prepared.linears_by}
    if target.name != NATIVE:
        options["to"] = target.name
    if split_max_size is not None:
        options["split_max_size"] = split_max_size
    if allocation is not None:
        options[BIT_ALLOCATION] = allocation.to_json()
    return options


def _computed_by(settings: GptqSettings, drawn: Calibration, group: ProcessGroup) -> dict[str, object]:
    """What GPTQ's results depend on that is asked for nowhere."""
    found: dict[str, object] = {
        "number of processes": group.size, "kind of device": settings.device.type,
        "samples multiplied in": str(compute_dtype(settings.device)),
    }  # fmt: skip
    if settings.text is None:
        found["calibration samples"] = drawn.fingerprint()  # the source's own figures have chosen them
    return found


def _gate(
    source: Checkpoint, result: Checkpoint, writer: Writer, schemes: Mapping[str, QuantScheme], dst: Path, *,
    accepted: bool, progress: Progress,
) -> tuple[Gate | WeightsOnly, list[str]]:  # fmt: skip
    """Hold a result against its source; of a model that cannot be run, its tensors. Notes come with it.

    Raises:
        QualityError: if it is too far from it, unless that is accepted.
    """
    if not source.config.runnable:
        return weights_only(result, writer.records), []
    gate = run_gate(source, result, writer.records, requested=schemes, progress=in_phase(progress, "gate"))
    if not accepted:
        require_passed(gate, source, result, dst)
    return gate, _accepted(gate, dst)


def _write(
    blocks: Sequence[TensorBlock], quantizer: Quantizer, writer: Writer, there: Written, *, durable: bool
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
    group: ProcessGroup, quantizer: Quantizer, blocks: Sequence[TensorBlock], there: Written
) -> QuantizeResult:
    """What another process than the first does: it solves with the others, and waits for the one that writes."""
    with quantizer.running(blocks, there):
        for block in blocks:
            quantizer.solve(block)  # the first process writes it
    told: QuantizeResult = group.receive_from_rank0()
    return told


def _accepted(gate: Gate | PositionCertificate, dst: Path) -> list[str]:
    """A note on what the gate, or the certificate, found too far from the source in a result that is kept."""
    problem = gate.problem()
    return [] if problem is None else [f"{dst}: {problem[0]}: {problem[1]}, expected {problem[2]}; accepted"]
