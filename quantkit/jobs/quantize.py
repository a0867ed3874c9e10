"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.calibration.data import Calibration, load_calibration
from quantkit.calibration.layers import GptqSolver, LayerSolver, solve_rtn
from quantkit.config import ModelConfig
from quantkit.errors import NonFiniteError, RequestError, UnsupportedError
from quantkit.finite import all_finite, checked_cast
from quantkit.formats.checkpoint import DTYPE_NAMES, FLOAT_DTYPES, Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Planned, SafetensorsEncoder
from quantkit.formats.folder import checked_tokenizer, hf_side_files, require_new_names
from quantkit.jobs.assignment import Assignment
from quantkit.jobs.output import SHARD_BYTES, model_summary, write
from quantkit.naming import entries
from quantkit.progress import Progress, silent
from quantkit.qtensor import QuantTensor, relative_error
from quantkit.scheme import QuantPlan, QuantScheme
from quantkit.tokenizer import Tokenizer

METHODS = ("rtn", "gptq")
_CALIBRATION_LENGTH = 2048


def quantize(
    src: str | Path,
    dst: str | Path,
    plan: str | QuantScheme | QuantPlan,
    *,
    method: str = "rtn",
    calibration: str | Path | None = None,
    samples: int = 128,
    length: int | None = None,
    seed: int = 0,
    keep: Iterable[str] = (),
    strict: bool = False,
    weights: str | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Write the model in `src`, quantized, to the new folder `dst`.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the plan names the head. Rows that the group size does not divide follow
    `QuantScheme.fitted`, which the manifest records.

    Args:
        src: a Meta or Hugging Face folder of floats.
        dst: the folder to make; it must not exist.
        plan: ``"int4-g128"`` and the like, a scheme, or a plan with overrides.
        method: ``rtn`` (round to nearest) or ``gptq``, which needs calibration text.
        calibration: plain text, or JSON lines with a ``text`` each.
        samples, length, seed: how many samples of how many tokens are drawn from it, and
            the seed of their places; by default the model's context, 2048 at most.
        keep: globs of modules that keep their floats.
        strict: refuse a layer whose shape does not fit its scheme.
        weights, resume, allow_nonfinite, progress: as in `convert`.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.
    """
    if method not in METHODS:
        raise RequestError("unknown method", found=method, expected=" or ".join(METHODS))
    if (method == "gptq") != (calibration is not None):
        raise RequestError("calibration text goes with the method gptq, and only with it")
    plan = _as_plan(plan).keeping(keep)
    source = open_checkpoint(src, weights)
    require_new_names(source.path, Path(dst))
    tokenizer, notes = checked_tokenizer(source)
    if already := schemes(source):
        raise UnsupportedError(
            "the source is quantized already", path=source.path, found=str(next(iter(already.values()))),
            hint="start from the float model",
        )  # fmt: skip
    assignment = Assignment.of(plan, source.config)
    assigned = assignment.schemes
    if assignment.misfit and strict:
        raise RequestError(assignment.misfit, path=source.path, hint="choose another group size, or leave --strict out")
    if assignment.misfit:
        notes.append(f"{source.path}: {assignment.misfit}; {assigned[next(iter(assignment.misfits))]} is used there")
    if not all(scheme.symmetric for scheme in assigned.values()):
        notes.append(f"{dst}: transformers does not load zero points in this format (seen in 5.23); quantkit does")
    solve: LayerSolver = solve_rtn
    drawn = None
    if method == "gptq" and calibration is not None:
        drawn = _draw(Path(calibration), tokenizer, source, samples, length, seed)
        solve = GptqSolver(source, drawn, assigned)
        notes += _too_few_tokens(drawn, source.config)
    scale_dtype = FLOAT_DTYPES[source.config.dtype]
    planned = [
        Planned(e.name, e.shape, scale_dtype, assigned[e.module])
        if e.row.linear and e.module in assigned
        else Planned(e.name, e.shape, source.info(e.name).dtype)
        for e in entries(source.config)
    ]

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

    options: dict[str, object] = {"plan": plan.to_json(), "method": method, "allow_nonfinite": allow_nonfinite}
    if drawn is not None:
        options["calibration"] = drawn.to_json()

    def details(records: dict[str, Any]) -> dict[str, object]:
        summary = model_summary(source, source.config.dtype)
        return {"model": summary, **options, "tensors": assignment.describe(records)}

    write(
        "quantize", source, Path(dst), SafetensorsEncoder(planned, SHARD_BYTES), produce,
        hf_side_files(source, source.config, assigned), details,
        options=options, resume=resume, progress=progress,
    )  # fmt: skip
    return [*source.notes, *notes]


def _draw(
    path: Path, tokenizer: Tokenizer | None, source: Checkpoint, samples: int, length: int | None, seed: int
) -> Calibration:
    if tokenizer is None:
        raise RequestError("calibration needs a tokenizer, and the source has none", path=source.path)
    length = length or min(source.config.max_context, _CALIBRATION_LENGTH)
    if length > source.config.max_context:
        raise RequestError("samples exceed the model's context", found=length, expected=source.config.max_context)
    return load_calibration(path, tokenizer, samples=samples, length=length, seed=seed)


def _too_few_tokens(drawn: Calibration, config: ModelConfig) -> list[str]:
    """A note where a Hessian cannot have full rank."""
    tokens, width = drawn.tokens.numel(), max(config.intermediate_size, config.hidden_size)
    if tokens >= width:
        return []
    return [f"{tokens} calibration tokens are fewer than the widest layer's {width} inputs; give more samples"]


def _as_plan(plan: str | QuantScheme | QuantPlan) -> QuantPlan:
    if isinstance(plan, QuantPlan):
        return plan
    return QuantPlan(QuantScheme.parse(plan) if isinstance(plan, str) else plan)
