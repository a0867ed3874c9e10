"""Figures on a quantized model that cannot be run: how its tensors were stored, and how much
they changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.architectures.disk import disk_tensors
from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint, parameter_count, schemes
from quantkit.formats.output.destination import manifest_path
from quantkit.quality.bounds import REPEATABLE
from quantkit.quality.figures import manifest_or_empty, read_module_records, read_record

COMPARED = "weights only: no logits were compared"


@dataclass(frozen=True)
class WeightsOnly:
    """What a model that cannot be run has instead of a gate.

    Attributes:
        parameters: of the model, as if all were floats.
        quantized: how many of them are in quantized weights.
        carried: how many tensors are not quantized.
        worst: the quantized module with the largest relative error.
        worst_error: that error (Frobenius norms).
    """

    parameters: int
    quantized: int
    carried: int
    worst: str
    worst_error: float

    def __post_init__(self) -> None:
        if self.parameters <= 0 or not math.isfinite(self.worst_error):
            raise ValueError("parameters must be positive, and the error finite")

    @property
    def share(self) -> float:
        """Return the share of the parameters that are quantized."""
        return self.quantized / self.parameters

    def problem(self) -> None:
        """Return None: a weight whose error exceeds its bound keeps its floats."""
        return None

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """Return the manifest's form; `accepted` is as for a `Gate`, but there is nothing to
        accept.
        """
        return {"compared": COMPARED, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> WeightsOnly:
        """Read the result of `to_json` from the manifest at a path.

        Raises `CheckpointError` if it has another form.
        """
        # A gate in its place has other keys, and None is refused as any other form is.
        if not isinstance(value, dict) or value.get("compared") != COMPARED:
            value = None
        return read_record(cls, value, path, "the errors of the tensors")

    def line(self) -> str:
        """Describe the figures in a line."""
        return (
            f"{COMPARED}; {self.share:.1%} of the parameters quantized, {self.carried} tensors"
            f" carried, largest relative error {self.worst_error:.3g} ({self.worst})"
        )


def weights_only(result: Checkpoint, records: Mapping[str, Mapping[str, Any]]) -> WeightsOnly:
    """Compute the figures of a quantized model; `records` are the manifest's entries on tensors, by
    name.
    """
    assigned = schemes(result)
    errors = {}
    for module in assigned:
        errors[module] = float(records[f"{module}.weight"]["relative_error"])
    worst = max(errors, key=lambda module: errors[module])
    quantized = sum(math.prod(result.info(f"{module}.weight").shape) for module in assigned)
    carried = len(_find_unquantized_tensors(result))
    return WeightsOnly(
        parameters=parameter_count(result),
        quantized=quantized,
        carried=carried,
        worst=worst,
        worst_error=errors[worst],
    )


def describe_unquantized_tensors(source: Any, result: Checkpoint) -> dict[str, str]:
    """Describe how each tensor that is not quantized was stored, by name; `source` is the
    `StoredCheckpoint` it comes from.
    """
    descriptions: dict[str, str] = {}
    for name, part in _find_unquantized_tensors(result).items():
        spec = result.info(part)
        before = source.info(part)
        # Codes take fewer bytes than the floats as which they are read.
        float_bytes = StoredTensor(part, before.dtype, before.shape).nbytes
        if source.count_stored_bytes(part) != float_bytes:
            descriptions[name] = f"dequantized to {spec.dtype} by its own scales"
        elif spec.dtype == before.dtype:
            descriptions[name] = "bit for bit"
        else:
            descriptions[name] = f"cast to {spec.dtype}"
    return descriptions


def _find_unquantized_tensors(model: Checkpoint) -> dict[str, str]:
    """Find the tensors on disk that are not quantized, each with one of the tensors in it."""
    quantized = schemes(model)
    tensors = disk_tensors(model.config, quantized)
    result: dict[str, str] = {}
    for tensor in tensors:
        if tensor.parts[0].removesuffix(".weight") not in quantized:
            result[tensor.name] = tensor.parts[0]
    return result


def read_weight_errors(checkpoint: Checkpoint) -> dict[str, float]:
    """Read the errors of a model's weights from its manifest, by tensor name; none if it was
    dequantized since, as its floats are not those that were quantized.
    """
    model_manifest = manifest_or_empty(checkpoint.path)
    options = model_manifest.get("options")
    if isinstance(options, dict) and options.get("dequantize"):
        return {}
    errors: dict[str, float] = {}
    for module, record in read_module_records(model_manifest).items():
        error = record.get("relative_error")
        if isinstance(error, (int, float)):
            errors[f"{module}.weight"] = error
    return errors


def error_problem(name: str, error: float, recorded: float | None) -> str | None:
    """Compare the error of a tensor with the recorded one; None if they agree."""
    if recorded is None or math.isclose(error, recorded, rel_tol=REPEATABLE):
        return None
    return f"the error of {name} is {error:.4g}, and {recorded:.4g} in the manifest"


def summary_problems(checkpoint: Checkpoint) -> list[str]:
    """Find where the manifest of a model known by its tensors only contradicts its own entries on
    tensors, or the tensors. Raises `CheckpointError` if it has a summary of another form. A model
    that transformers ran has a gate instead.
    """
    model_manifest = manifest_or_empty(checkpoint.path)
    if model_manifest.get("tensors_only") is not True:
        return []
    carried = set(_find_unquantized_tensors(checkpoint))
    descriptions = model_manifest.get("carried")
    listed: set[str] | None = None
    if isinstance(descriptions, dict):
        listed = set(descriptions)
    problems: list[str] = []
    if listed != carried:
        problems.append(
            f"the manifest lists {len(listed or ())} carried tensors, and the model has"
            f" {len(carried)}"
        )
    if "quality" not in model_manifest or model_manifest.get("run_by") is not None:
        return problems
    summary = WeightsOnly.from_json(model_manifest["quality"], manifest_path(checkpoint.path))
    records: dict[str, dict[str, Any]] = {}
    for module, record in read_module_records(model_manifest).items():
        records[f"{module}.weight"] = record
    try:
        expected_summary = weights_only(checkpoint, records)
    except (LookupError, TypeError, ValueError):
        return [*problems, "the manifest does not state the error of each quantized tensor"]
    expected_figures = asdict(expected_summary)
    for field_name, recorded in asdict(summary).items():
        expected = expected_figures[field_name]
        # Of two modules with the same error, either may be the worst.
        if field_name != "worst" and recorded != expected:
            problems.append(
                f"'{field_name}' is {recorded:g} in the manifest's summary, and {expected:g} by its"
                " tensors"
            )
    return problems


def require_as_recorded(checkpoint: Checkpoint, manifest: Mapping[str, Any], path: Path) -> None:
    """Compare the schemes of a model with its manifest, which is at `path`. Raises
    `CheckpointError` if they differ.
    """
    # The manifest has entries on tensors without a scheme: those that kept their floats.
    recorded: dict[str, Any] = {}
    for module, record in read_module_records(manifest).items():
        if record.get("scheme"):
            recorded[module] = record["scheme"]
    stored = {module: str(scheme) for module, scheme in schemes(checkpoint).items()}
    for name in {**recorded, **stored}:
        if recorded.get(name) != stored.get(name):
            raise CheckpointError(
                f"the scheme of '{name}' differs from the manifest",
                path=path,
                found=stored.get(name, "unquantized"),
                expected=format_value(recorded.get(name, "unquantized")),
                hint="copy or create it again",
            )
    for problem in summary_problems(checkpoint):
        raise CheckpointError(problem, path=path, hint="copy or create it again")
