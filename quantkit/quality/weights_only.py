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
            raise ValueError("there must be parameters, and the error a number")

    @property
    def share(self) -> float:
        """Return the share of the parameters that are quantized."""
        return self.quantized / self.parameters

    def problem(self) -> None:
        """None: a weight whose error exceeds its bound keeps its floats."""
        return None

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """Return the manifest's form; `accepted` is as for a `Gate`, but there is nothing to
        accept.
        """
        return {"compared": COMPARED, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> WeightsOnly:
        """Return the result of `to_json`, from the manifest at a path.

        Raises `CheckpointError` if it has another form.
        """
        compared = isinstance(value, dict) and value.get("compared") == COMPARED
        return read_record(cls, value if compared else None, path, "the errors of the tensors")

    def line(self) -> str:
        """Return the figures as text."""
        return (
            f"{COMPARED}; {self.share:.1%} of the parameters quantized, {self.carried} tensors"
            f" carried, largest relative error {self.worst_error:.3g} ({self.worst})"
        )


def weights_only(result: Checkpoint, records: Mapping[str, Mapping[str, Any]]) -> WeightsOnly:
    """Return the figures of a quantized model; `records` are the manifest's entries on tensors, by
    name.
    """
    assigned = schemes(result)
    errors = {}
    for module in assigned:
        errors[module] = float(records[f"{module}.weight"]["relative_error"])
    worst = max(errors, key=lambda module: errors[module])
    quantized = sum(math.prod(result.info(f"{module}.weight").shape) for module in assigned)
    carried = len(_find_carried_tensors(result))
    return WeightsOnly(parameter_count(result), quantized, carried, worst, errors[worst])


def describe_carried_tensors(source: Any, result: Checkpoint) -> dict[str, str]:
    """Return how each tensor that is not quantized was stored, by name; `source` is the
    `StoredCheckpoint` it comes from.
    """
    found = {}
    for name, part in _find_carried_tensors(result).items():
        spec = result.info(part)
        before = source.info(part)
        if source.count_stored_bytes(part) != StoredTensor(part, before.dtype, before.shape).nbytes:
            found[name] = f"dequantized to {spec.dtype} by its own scales"
        else:
            found[name] = "bit for bit" if spec.dtype == before.dtype else f"cast to {spec.dtype}"
    return found


def _find_carried_tensors(model: Checkpoint) -> dict[str, str]:
    """Return the tensors on disk that are not quantized, each with one of the tensors that it
    holds.
    """
    quantized = schemes(model)
    tensors = disk_tensors(model.config, quantized)
    result: dict[str, str] = {}
    for tensor in tensors:
        if tensor.parts[0].removesuffix(".weight") not in quantized:
            result[tensor.name] = tensor.parts[0]
    return result


def read_weight_errors(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the errors of a model's weights in its manifest, by tensor name; none if it was
    dequantized since, as its floats are not those that were quantized.
    """
    made = manifest_or_empty(checkpoint.path)
    if isinstance(options := made.get("options"), dict) and options.get("dequantize"):
        return {}
    return {
        f"{module}.weight": error
        for module, record in read_module_records(made).items()
        if isinstance(error := record.get("relative_error"), (int, float))
    }


def error_problem(name: str, error: float, recorded: float | None) -> str | None:
    """Return the problem if the error of a tensor is not the recorded one."""
    if recorded is None or math.isclose(error, recorded, rel_tol=REPEATABLE):
        return None
    return f"the error of {name} is {error:.4g}, and {recorded:.4g} in the manifest"


def summary_problems(checkpoint: Checkpoint) -> list[str]:
    """Return where the manifest of a model known by its tensors only contradicts its own entries on
    tensors, or the tensors. Raises `CheckpointError` if it has a summary of another form. A model
    that transformers ran has a gate instead.
    """
    made = manifest_or_empty(checkpoint.path)
    if made.get("tensors_only") is not True:
        return []
    carried = set(_find_carried_tensors(checkpoint))
    if isinstance(stated := made.get("carried"), dict):
        listed = set(stated)
    else:
        listed = None
    problems = []
    if listed != carried:
        problems.append(
            f"the manifest lists {len(listed or ())} carried tensors, and the model has"
            f" {len(carried)}"
        )
    if "quality" not in made or made.get("run_by") is not None:
        return problems
    summary = WeightsOnly.from_json(made["quality"], manifest_path(checkpoint.path))
    records = {
        f"{name}.weight": module_record for name, module_record in read_module_records(made).items()
    }
    try:
        found = weights_only(checkpoint, records)
    except (LookupError, TypeError, ValueError):
        return [*problems, "the manifest does not state the error of each quantized tensor"]
    return problems + [
        f"'{what}' is {recorded:g} in the manifest's summary, and {expected:g} by its tensors"
        for (what, recorded), expected in zip(
            asdict(summary).items(), asdict(found).values(), strict=True
        )
        if what != "worst" and recorded != expected
    ]


def require_as_recorded(checkpoint: Checkpoint, manifest: Mapping[str, Any], path: Path) -> None:
    """Compare the schemes of a model with its manifest `made`, which is at `path`. Raises
    `CheckpointError` if they differ.
    """
    recorded = {
        name: module_record["scheme"]
        for name, module_record in read_module_records(manifest).items()
        if module_record.get("scheme")
    }
    found = {module: str(scheme) for module, scheme in schemes(checkpoint).items()}
    if recorded != found:
        name = next(one for one in {**recorded, **found} if recorded.get(one) != found.get(one))
        raise CheckpointError(
            f"the scheme of '{name}' is not what the manifest says",
            path=path,
            found=found.get(name, "floats"),
            expected=format_value(recorded.get(name, "floats")),
            hint="copy or make it again",
        )
    for problem in summary_problems(checkpoint):
        raise CheckpointError(problem, path=path, hint="copy or make it again")
