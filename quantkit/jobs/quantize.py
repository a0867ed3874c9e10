"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.calibration.layers import GptqSolver, LayerSolver, solve_rtn
from quantkit.calibration.pipeline import activation_bytes
from quantkit.calibration.ranks import Ranks
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import DTYPE_NAMES, FLOAT_DTYPES
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Planned, SafetensorsEncoder
from quantkit.formats.folder import hf_side_files
from quantkit.formats.staging import SCRATCH, partial_folder
from quantkit.jobs.card import NAME as CARD
from quantkit.jobs.card import model_card
from quantkit.jobs.output import SHARD_BYTES, Work, model_summary, write
from quantkit.jobs.prepare import planned_tensors, prepare, too_few_tokens
from quantkit.jobs.settings import gptq_settings
from quantkit.progress import Progress, silent
from quantkit.quality.gate import require_passed, run_gate
from quantkit.tensors.finite import all_finite, checked_cast
from quantkit.tensors.qtensor import QuantTensor, relative_error
from quantkit.tensors.scheme import QuantScheme, Recipe


def quantize(
    src: str | Path,
    dst: str | Path,
    plan: str | QuantScheme | Recipe,
    *,
    method: str = "rtn",
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    thorough: bool = False,
    activation_memory: float | None = None,
    device: str | None = None,
    keep: Iterable[str] = (),
    strict: bool = False,
    accept_quality_loss: bool = False,
    weights: str | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    source_check: bool = True,
    progress: Progress = silent,
) -> list[str]:
    """Write the model in `src`, quantized, to the new folder `dst`, if it passes the gate.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the plan names the head. Rows that the group size does not divide follow
    `QuantScheme.fitted`, which the manifest records.

    Args:
        src: a Meta or Hugging Face folder of floats.
        dst: the folder to make; it must not exist.
        plan: ``"int4-g128"`` and the like, a scheme, or a plan with overrides.
        method: ``rtn`` (round to nearest) or ``gptq``, which needs calibration text.
        calibration: a file or a hub dataset, see `load_calibration`; this and the options
            down to `device` go with gptq only.
        samples, length, seed: how many samples of how many tokens are drawn from it, and
            the seed of their places; by default 128 of the model's context, 2048 at most, and 0.
        thorough: follow the float model on all samples rather than on some of them; slower
            and closer.
        activation_memory: bytes of calibration activations held in memory, by default 4e9; more
            go to the disk of `dst`.
        device: where GPTQ computes, as torch spells it; a GPU by default if there is one.
        keep: globs of modules that keep their floats.
        strict: refuse a layer whose shape does not fit its scheme.
        accept_quality_loss: keep a result that does not pass the gate; see `run_gate`.
        weights, resume, allow_nonfinite, source_check, progress: as in `convert`.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.
    """
    settings = gptq_settings(
        method, calibration, samples=samples, length=length, seed=seed, thorough=thorough,
        activation_memory=activation_memory, device=device,
    )  # fmt: skip
    dst = Path(dst)
    source, assignment, tokenizer, notes = prepare(src, dst, plan, keep=keep, strict=strict, weights=weights)
    assigned = assignment.schemes
    scale_dtype = FLOAT_DTYPES[source.config.dtype]
    options: dict[str, object] = {
        "plan": assignment.plan.to_json(),
        "method": method,
        "allow_nonfinite": allow_nonfinite,
    }
    solver, scratch = None, 0
    computed_by: dict[str, object] = {}
    if settings is not None:
        computed_by = {"number of processes": Ranks().size, "kind of device": settings.device.type}
        drawn = settings.draw(tokenizer, source)
        notes += too_few_tokens(drawn, source.config)
        options["calibration"] = drawn.to_json()
        options["thorough"] = settings.thorough
        _, scratch = activation_bytes(source.config, drawn.tokens.shape, settings.effort, settings.memory_bytes)
        solver = GptqSolver(
            source, drawn, assigned, scale_dtype, device=settings.device, memory_bytes=settings.memory_bytes,
            effort=settings.effort,
        )  # fmt: skip
    solve: LayerSolver = solver or solve_rtn
    encoder = SafetensorsEncoder(planned_tensors(source, assigned), SHARD_BYTES)

    def begin(done: int, folder: Path) -> None:
        if solver is None:
            return
        index = {item.name: i for i, item in enumerate(encoder.planned)}

        def written(name: str) -> QuantTensor:
            value = encoder.decode(index[name], folder)
            assert isinstance(value, QuantTensor)
            return value

        solver.begin([item.name for item in encoder.planned[:done]], written, folder / SCRATCH)

    def produce(item: Planned) -> tuple[Tensor | QuantTensor, object]:
        weight = source.load(item.name)
        assert isinstance(weight, Tensor)
        if item.scheme is None:
            return checked_cast(weight, item.dtype, item.name, source.path, allow_nonfinite), None
        checked_cast(weight, weight.dtype, item.name, source.path, allow_nonfinite=False)
        quantized, record = solve(item.name, weight, item.scheme, item.dtype)
        if not all_finite(quantized.scale):
            raise NonFiniteError(
                f"tensor '{item.name}' holds values too large for scales in {DTYPE_NAMES[item.dtype]}",
                path=source.path, hint="convert the source to another dtype first",
            )  # fmt: skip
        return quantized, {**record, "relative_error": float(f"{relative_error(quantized, weight):.4g}")}

    def describe(folder: Path, records: dict[str, Any]) -> tuple[dict[str, object], dict[str, bytes]]:
        if solver is not None:
            solver.finish()
        result = open_checkpoint(folder)
        gate = run_gate(source, result, records, progress=progress)
        if not accept_quality_loss:
            require_passed(gate, source, result, dst)
        elif (problem := gate.problem()) is not None:
            notes.append(f"{dst}: {problem[0]}: {problem[1]}, expected {problem[2]}; accepted")
        details = {
            "model": model_summary(source, source.config.dtype), **options,
            "quality": gate.to_json(accepted=accept_quality_loss), "tensors": assignment.describe(records),
        }  # fmt: skip
        return details, {CARD: model_card(source, assigned, options, gate)}

    if solver is not None and Ranks().rank:
        begin(0, partial_folder(dst))
        solver.follow()
        return []
    ends = {entry.layer: entry.name for entry in parameters(source.config)}.values()
    work = Work(
        "quantize", encoder, produce, hf_side_files(source, source.config, assigned), describe, options,
        begin=begin, scratch_bytes=scratch, computed_by=computed_by,
        safe_after=lambda item: solver is not None and item.name in ends, source_check=source_check,
    )  # fmt: skip
    try:
        notes += write(work, source, dst, resume=resume, progress=progress)
    finally:
        if solver is not None:
            solver.close()
    return [*source.notes, *notes]
