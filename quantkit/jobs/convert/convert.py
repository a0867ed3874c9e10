"""Convert a checkpoint: another format, sharding or float type; the same model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass

import torch
from torch import Tensor

from quantkit.base.option_fields import accept_fields_of
from quantkit.base.progress import Progress, in_phase, skip_repeated_reports
from quantkit.formats.checkpoint import resolve_stored_name, schemes
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.output.destination import manifest_path
from quantkit.jobs.convert import carried_codes
from quantkit.jobs.convert.conversion import Conversion, plan_conversion, suggest_requantize
from quantkit.jobs.convert.estimate import estimate_conversion
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.output.estimate import Estimate
from quantkit.jobs.output.existing import Existing, may_accept_existing
from quantkit.jobs.output.result import ConvertResult
from quantkit.jobs.output.writer import Writer, model_summary, open_writer
from quantkit.quality.changed_tensors import REFINED, rehash_changes
from quantkit.quality.figures import manifest_or_empty, read_record
from quantkit.quality.gate import require_passed, run_gate
from quantkit.quality.gate_result import Gate
from quantkit.quality.transcoded import Exact, require_exact, require_same_kv_cache
from quantkit.quality.weights_only import describe_unquantized_tensors
from quantkit.tensors.finite import cast_finite, require_finite_codes
from quantkit.tensors.qtensor import QuantTensor, Solver, row_chunks
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class ConvertArguments(ConvertOptions):
    """The arguments of `convert`: the options, and where progress is reported.

    Attributes:
        on_estimate: called with the estimate of memory, disk and time before anything takes long.
        progress: called for each layer; None reports nothing.
    """

    _: KW_ONLY
    on_estimate: Callable[[Estimate], None] | None = None
    progress: Progress | None = None


# The decorator fills in Args of the docstring.
@accept_fields_of(ConvertArguments)
def convert(options: ConvertArguments) -> ConvertResult:
    """Write the model in `src` to the new folder, or GGUF file, `dst`.

    The codes, scales and zero points of a quantized model stay as they are; otherwise the
    conversion is refused. The result is read back and compared with the source, tensor by tensor;
    tensors that were rounded anew are measured by the gate.

    Args:

    Returns:
        What was written: path, size, bits per weight, which tensors are proven equal, notes.

    Raises:
        QuantkitError: its type says what is wrong; nothing is written at `dst` then.

    Example:
        >>> quantkit.convert("Llama-3.2-1B", "Llama-3.2-1B-hf", dtype="bf16")
        >>> quantkit.convert("Llama-3.2-1B", "merged", lora={"adapter": 0.7, "other": 0.3})
        >>> quantkit.convert("Llama-3.2-1B-int4", "llama-3.2-1b.gguf").exact.line()
    """
    started = time.monotonic()
    progress = skip_repeated_reports(options.progress)
    plan = plan_conversion(options)
    if may_accept_existing(plan.dst, options.if_exists):
        return _read_existing_result(plan, started, progress)
    if options.on_estimate is not None:
        options.on_estimate(estimate_conversion(plan))
    source_check = options.source_check
    with open_writer(
        plan.work, plan.dst, resume=options.resume, source_check=source_check, progress=progress
    ) as writer:
        writer.report_progress()
        # Scales that a format cannot hold show only when their numbers are read.
        with suggest_requantize(options):
            for spec in writer.missing:
                writer.put(spec.name, *_load_output_value(plan, spec))
        result = writer.seal()
        # The output gets its name only if the comparison passes.
        exact, gate = _compare(plan, writer, result, progress)
        size = weight_size(result)
        manifest = writer.commit(_collect_details(plan, writer, result, exact, gate))
    return ConvertResult(
        plan.dst,
        *size,
        exact,
        len(plan.changes.rounded),
        gate,
        time.monotonic() - started,
        [*plan.notes, *writer.notes],
        manifest,
    )


def _read_existing_result(plan: Conversion, started: float, progress: Progress) -> ConvertResult:
    """Check an existing output against the plan, and return its recorded result.

    Raises `DestinationError` if it is another one than this job would write.
    """
    work = plan.work
    existing = Existing.read(plan.dst, progress)
    existing.require_inputs(
        work, _describe_plan(plan), source_check=plan.options.source_check, progress=progress
    )
    existing.require_files(work)
    manifest = existing.manifest
    path = manifest_path(plan.dst)
    if "quality" in manifest:
        gate = existing.read_passed_check(Gate, "quality")
    else:
        gate = None
    exact = read_record(Exact, manifest.get("exact"), path, "what is equal")
    return ConvertResult(
        plan.dst,
        *weight_size(existing.open_weights(work)),
        exact,
        len(plan.changes.rounded),
        gate,
        time.monotonic() - started,
        plan.notes,
        manifest,
        skipped=True,
    )


def _load_output_value(
    plan: Conversion, spec: TensorSpec
) -> tuple[Tensor | QuantTensor, Mapping[str, object] | None]:
    """Read a tensor of the source and convert it for the output, with its record for the
    manifest.
    """
    changes = plan.changes
    allow_nonfinite = plan.options.allow_nonfinite
    dtype = spec.dtype.torch
    if spec.name in changes.rounded:
        source = plan.rounding_source
    else:
        source = plan.work.source
    value = source.load(resolve_stored_name(source, spec.name))
    # Float results are checked by `cast_finite`, after their codes are multiplied by the scales.
    if isinstance(value, QuantTensor) and spec.scheme is not None:
        require_finite_codes(value, spec.name, source.path, allow_nonfinite)
    if spec.scheme is not None and spec.name in changes.rounded:
        return carried_codes.round_weight(value, spec.scheme, dtype, spec.name, source.path)
    if isinstance(value, Tensor):
        return cast_finite(value, dtype, spec.name, source.path, allow_nonfinite), None
    if spec.scheme is not None and spec.name in changes.scale_casts:
        return carried_codes.cast_weight_scales(value, changes.scale_casts[spec.name].dtypes)
    if spec.scheme is not None:
        # With a type that does not hold the scales, the encoder gets the value as it is and
        # explains why it cannot be written.
        carried = carried_codes.convert_scales_exactly(value, spec.dtype) or value
        return carried, {"solver": Solver.CARRIED}
    # In parts, because the float32 products of all rows would need more memory than the result.
    floats = torch.empty(value.shape, dtype=dtype)
    for start, stop in row_chunks(*value.shape):
        rows = value.rows(start, stop).dequantize()
        floats[start:stop] = cast_finite(rows, dtype, spec.name, source.path, allow_nonfinite)
    return floats, None


def _compare(
    plan: Conversion, writer: Writer, result: StoredCheckpoint, progress: Progress
) -> tuple[Exact, Gate | None]:
    """Compare a result with its source: each tensor that was not rounded anew, and by the gate if
    codes or scales were changed; raises a `QualityError` if it differs too much.
    """
    source = plan.work.source
    changes = plan.changes
    gate = None
    if plan.kv_cache is not None:
        require_same_kv_cache(plan.kv_cache, result)
    scale_casts = {name: cast.dtypes for name, cast in changes.scale_casts.items()}
    exact = require_exact(
        source,
        result,
        changes.rounded,
        scale_casts,
        float_types={spec.name: spec.dtype for spec in plan.work.encoder.planned},
        dequantize=plan.options.dequantize,
        progress=progress,
    )
    if changes.rounded or changes.scale_casts:
        # The gate's bounds depend on the scheme of each module.
        requested: dict[str, QuantScheme] = {}
        for spec in plan.work.encoder.planned:
            if spec.scheme is not None:
                requested[spec.name.removesuffix(".weight")] = spec.scheme
        gate = run_gate(
            source, result, writer.records, requested=requested, progress=in_phase(progress, "gate")
        )
        require_passed(gate, source, result, plan.dst, remedy="start from the float model")
    return exact, gate


def _collect_details(
    plan: Conversion,
    writer: Writer,
    result: StoredCheckpoint,
    exact: Exact,
    gate: Gate | None,
) -> dict[str, object]:
    """Collect the job's part of the manifest."""
    source = plan.work.source
    assigned = schemes(result)
    details: dict[str, object] = {
        **_describe_plan(plan),
        "schemes": {module: str(scheme) for module, scheme in assigned.items()},
        "exact": exact.to_json(),
    }
    if gate is not None:
        modules: dict[str, dict[str, object]] = {}
        for module, scheme in assigned.items():
            modules[module] = {"scheme": str(scheme), **writer.records.get(f"{module}.weight", {})}
        details |= {"quality": gate.to_json(), "modules": modules}
    # The record of tensors that refining has changed is carried over, with the hashes that these
    # tensors have in the new format.
    changed_tensors = rehash_changes(source.path, result)
    if changed_tensors:
        refined = manifest_or_empty(source.path)[REFINED]
        tensors = {name: asdict(tensor) for name, tensor in changed_tensors.items()}
        details[REFINED] = {**refined, "tensors": tensors}
    if not source.config.runnable:
        details["carried"] = describe_unquantized_tensors(source, result)
    return details


def _describe_plan(plan: Conversion) -> dict[str, object]:
    """Collect the part of the manifest that is known before anything is written."""
    source = plan.work.source
    options = plan.work.options
    details: dict[str, object] = {
        "model": model_summary(source, plan.options.float_type or source.config.dtype),
        "options": options,
    }
    if source.config.runnable:
        return details
    return {**details, "tensors_only": True}
