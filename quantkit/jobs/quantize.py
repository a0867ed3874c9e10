"""Quantize a checkpoint's linear layers to int8 per row or int4 in groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from quantkit.errors import NonFiniteError, RequestError, UnsupportedError
from quantkit.finite import all_finite, checked_cast
from quantkit.formats.checkpoint import DTYPE_NAMES, FLOAT_DTYPES, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Planned, SafetensorsEncoder
from quantkit.formats.folder import checked_tokenizer, hf_side_files, require_new_names
from quantkit.jobs.output import SHARD_BYTES, model_summary, write
from quantkit.naming import entries, linear_columns
from quantkit.progress import Progress, silent
from quantkit.qtensor import QuantTensor, quantize_rtn, relative_error
from quantkit.scheme import QuantPlan, QuantScheme


def quantize(
    src: str | Path,
    dst: str | Path,
    plan: str | QuantScheme | QuantPlan,
    *,
    keep: Iterable[str] = (),
    strict: bool = False,
    weights: str | None = None,
    resume: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Write the model in `src`, quantized by round-to-nearest, to the new folder `dst`.

    All decoder linears are quantized; ``lm_head`` and the embedding keep their floats
    unless the plan names the head. Rows that the group size does not divide follow
    `QuantScheme.fitted`, which the manifest records.

    Args:
        src: a Meta or Hugging Face folder of floats.
        dst: the folder to make; it must not exist.
        plan: ``"int4-g128"`` and the like, a scheme, or a plan with overrides.
        keep: globs of modules that keep their floats.
        strict: refuse a layer whose shape does not fit its scheme.
        weights, resume, allow_nonfinite, progress: as in `convert`.

    Returns:
        Notes for the user.

    Raises:
        QuantkitError: of the kind that says what is wrong; `dst` is then not there.
    """
    plan = _as_plan(plan).keeping(keep)
    source = open_checkpoint(src, weights)
    require_new_names(source.path, Path(dst))
    _, notes = checked_tokenizer(source)
    if already := schemes(source):
        raise UnsupportedError(
            "the source is quantized already", path=source.path, found=str(next(iter(already.values()))),
            hint="start from the float model",
        )  # fmt: skip
    assigned = _assign(plan, source.config.tied_embeddings, linear_columns(source.config))
    requested = {module: plan.requested(module) for module in assigned}
    misfits = {module: requested[module] for module, scheme in assigned.items() if scheme != requested[module]}
    if misfits:
        first, wanted = next(iter(misfits.items()))
        fact = f"{wanted} does not divide the rows of {len(misfits)} layers, {first} first"
        if strict:
            raise RequestError(fact, path=source.path, hint="choose another group size, or leave --strict out")
        notes.append(f"{source.path}: {fact}; {assigned[first]} is used there")
    if not all(scheme.symmetric for scheme in assigned.values()):
        notes.append(f"{dst}: transformers does not load zero points in this format (seen in 5.23); quantkit does")
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
        quantized = quantize_rtn(weight, item.scheme, item.dtype)
        if not all_finite(quantized.scale):
            raise NonFiniteError(
                f"tensor '{item.name}' holds values too large for scales in {DTYPE_NAMES[item.dtype]}",
                path=source.path, hint="convert the source to another dtype first",
            )  # fmt: skip
        return quantized, float(f"{relative_error(quantized, weight):.4g}")

    def details(records: dict[str, object]) -> dict[str, object]:
        tensors = {
            module: _describe(assigned.get(module), misfits.get(module), records.get(module + ".weight"))
            for module in linear_columns(source.config)
        }
        return {"model": model_summary(source, source.config.dtype), "plan": plan.to_json(), "tensors": tensors}

    write(
        "quantize", source, Path(dst), SafetensorsEncoder(planned, SHARD_BYTES), produce,
        hf_side_files(source, source.config, assigned), details,
        options={"plan": plan.to_json(), "allow_nonfinite": allow_nonfinite}, resume=resume, progress=progress,
    )  # fmt: skip
    return [*source.notes, *notes]


def _describe(scheme: QuantScheme | None, unfit: QuantScheme | None, error: object) -> dict[str, object]:
    """What the manifest says of one linear layer."""
    if scheme is None:
        return {"scheme": None, "reason": "kept as float by the plan"}
    facts: dict[str, object] = {"scheme": str(scheme), "solver": "round-to-nearest", "relative_error": error}
    return facts if unfit is None else {**facts, "reason": f"{unfit} does not divide the row"}


def _as_plan(plan: str | QuantScheme | QuantPlan) -> QuantPlan:
    if isinstance(plan, QuantPlan):
        return plan
    return QuantPlan(QuantScheme.parse(plan) if isinstance(plan, str) else plan)


def _assign(plan: QuantPlan, tied: bool, columns: dict[str, int]) -> dict[str, QuantScheme]:
    """The scheme of every module.

    Raises:
        RequestError: if nothing would be quantized, or an override wants what cannot be.
    """
    for override in plan.overrides:
        if override.scheme is None:
            continue
        if override.matches("model.embed_tokens"):
            raise RequestError("the embedding cannot be quantized in this format", found=repr(override.pattern))
        if tied and override.matches("lm_head"):
            raise RequestError("lm_head is tied to the embedding and keeps its floats", found=repr(override.pattern))
    assigned = plan.assign(columns)
    if not assigned:
        raise RequestError("the plan keeps every layer; nothing would be quantized")
    return assigned
