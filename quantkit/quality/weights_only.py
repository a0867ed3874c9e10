"""What is known of a quantized model that cannot be run: what became of its tensors, and by how much they changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, parameter_count, schemes
from quantkit.formats.output.destination import manifest_path
from quantkit.json_values import shown
from quantkit.quality.bounds import REPEATABLE

COMPARED = "weights only: no logits were compared"


@dataclass(frozen=True)
class WeightsOnly:
    """What stands in the gate's place for a model that cannot be run.

    Attributes:
        parameters: of the model, as if all were floats.
        quantized: how many of them lie in quantized weights.
        carried: how many tensors are not quantized.
        worst: the quantized module with the largest relative error.
        worst_error: that error (Frobenius norms).
    """

    parameters: int
    quantized: int
    carried: int
    worst: str
    worst_error: float

    @property
    def share(self) -> float:
        """Of the parameters that are quantized."""
        return self.quantized / self.parameters

    def problem(self) -> None:
        """None: a weight that changes more than it may keeps its floats."""
        return None

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """The manifest's form.

        Args:
            accepted: as for a `Gate`; there is nothing to accept.
        """
        return {"compared": COMPARED, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> WeightsOnly:
        """What `to_json` gave, read from the manifest at a path.

        Raises:
            CheckpointError: if it is of another form.
        """
        try:
            found = cls(
                int(value["parameters"]), int(value["quantized"]), int(value["carried"]), str(value["worst"]),
                float(value["worst_error"]),
            )  # fmt: skip
            sound = value["compared"] == COMPARED and found.parameters > 0 and math.isfinite(found.worst_error)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError("does not tell what became of the tensors", path=path, hint="make it again")
        return found

    def line(self) -> str:
        """For people."""
        return (
            f"{COMPARED}; {self.share:.1%} of the parameters quantized, {self.carried} tensors carried, largest"
            f" relative error {self.worst_error:.3g} ({self.worst})"
        )


def weights_only(result: Checkpoint, records: Mapping[str, Mapping[str, Any]]) -> WeightsOnly:
    """What became of a model's tensors.

    Args:
        result: the quantized model.
        records: what the manifest says of tensors, by name.
    """
    assigned = schemes(result)
    errors = {module: float(records[f"{module}.weight"]["relative_error"]) for module in assigned}
    worst = max(errors, key=lambda module: errors[module])
    quantized = sum(math.prod(result.info(f"{module}.weight").shape) for module in assigned)
    carried = len(result.names()) - len(assigned)
    return WeightsOnly(parameter_count(result), quantized, carried, worst, errors[worst])


def carried_tensors(source: Any, result: Checkpoint) -> dict[str, str]:
    """What was done to each tensor that is not quantized, by name.

    Args:
        source: the `StoredCheckpoint` that it comes from.
    """
    found = {}
    for name in result.names():
        spec, before = result.info(name), source.info(name)
        if spec.scheme is None:
            as_floats = StoredTensor(name, before.dtype, before.shape).nbytes
            if source.stored_bytes(name) != as_floats:
                found[name] = f"dequantized to {spec.dtype} by its own scales"
            else:
                found[name] = "bit for bit" if spec.dtype == before.dtype else f"cast to {spec.dtype}"
    return found


class RecordedErrors:
    """What the manifests of two folders say of their weights' errors, held against what is measured again."""

    def __init__(self, *checkpoints: Checkpoint) -> None:
        self._recorded: dict[str, float] = {}
        for checkpoint in checkpoints:
            try:
                made = manifest.read(checkpoint.path)
            except CheckpointError:
                continue
            options, modules = made.get("options"), made.get("modules")
            if isinstance(options, dict) and options.get("dequantize"):  # these floats are not what was quantized
                self._recorded = {}
                break
            for module, record in modules.items() if isinstance(modules, dict) else ():
                error = record.get("relative_error") if isinstance(record, dict) else None
                if isinstance(error, (int, float)):
                    self._recorded[f"{module}.weight"] = error

    def problem(self, name: str, error: float) -> list[str]:
        """What is wrong with the error of a tensor, if anything is."""
        recorded = self._recorded.get(name)
        if recorded is None or math.isclose(error, recorded, rel_tol=REPEATABLE):
            return []
        return [f"the error of {name} is {error:.4g}, and {recorded:.4g} in the manifest"]


def summary_problems(checkpoint: Checkpoint) -> list[str]:
    """How the manifest of a folder made of tensors contradicts its own account of each tensor, or the tensors there.

    Raises:
        CheckpointError: if a summary is there and of another form.
    """
    try:
        made = manifest.read(checkpoint.path)
    except CheckpointError:
        return []
    if made.get("tensors_only") is not True:
        return []
    carried = {name for name in checkpoint.names() if checkpoint.info(name).scheme is None}
    listed = made.get("carried")
    problems = []
    if not isinstance(listed, dict) or set(listed) != carried:
        count = len(listed) if isinstance(listed, dict) else 0
        problems.append(f"the manifest tells what became of {count} tensors, and {len(carried)} are carried")
    if "quality" not in made:
        return problems
    told, modules = WeightsOnly.from_json(made["quality"], manifest_path(checkpoint.path)), made.get("modules")
    records = {f"{name}.weight": one for name, one in modules.items()} if isinstance(modules, dict) else {}
    try:
        found = weights_only(checkpoint, records)
    except (LookupError, TypeError, ValueError):
        return [*problems, "the manifest does not tell the error of each quantized tensor"]
    for what in ("parameters", "quantized", "carried", "worst_error"):
        recorded, expected = getattr(told, what), getattr(found, what)
        if recorded != expected:
            problems.append(f"'{what}' is {recorded:g} in the manifest's summary, and {expected:g} by its tensors")
    return problems


def require_as_recorded(checkpoint: Checkpoint, modules: Any, path: Path) -> None:
    """Hold the schemes of a folder against its manifest's account of its modules.

    Args:
        modules: the manifest's.
        path: of the manifest.

    Raises:
        CheckpointError: if they differ.
    """
    listed = modules.items() if isinstance(modules, dict) else ()
    recorded = {name: one.get("scheme") for name, one in listed if isinstance(one, dict) and one.get("scheme")}
    found = {module: str(scheme) for module, scheme in schemes(checkpoint).items()}
    if recorded != found:
        name = next(one for one in {**recorded, **found} if recorded.get(one) != found.get(one))
        raise CheckpointError(
            f"the scheme of '{name}' is not what the manifest says", path=path, found=found.get(name, "floats"),
            expected=shown(recorded.get(name, "floats")), hint="copy or make it again",
        )  # fmt: skip
    for problem in summary_problems(checkpoint):
        raise CheckpointError(problem, path=path, hint="copy or make it again")
