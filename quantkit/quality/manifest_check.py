"""Compare a model with its own manifest: the sha256 of every file, and the quality when it was
made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quantkit.architectures.names import EMBEDDING
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase, silent
from quantkit.errors import CheckpointError, QualityError, RequestError, UnsupportedError
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.formats.manifest import ACTIVATIONS
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import require_finished
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.bounds import REPEATABLE, build_gate_windows
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.gate_result import Gate, TextResult
from quantkit.quality.manifest_files import find_manifest, require_as_written
from quantkit.quality.measures import perplexity_estimates
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.transcoded import Exact
from quantkit.quality.weights_only import WeightsOnly, require_as_recorded
from quantkit.tensors.activations import Activations, InputRounding
from quantkit.via_transformers.forward import run_by_transformers, why_not_run


def neither_true_nor_false(report: object) -> NoReturn:
    """Refuse to be used as a boolean, as any report of a difference would be true."""
    raise TypeError(
        f"a {type(report).__name__} has no truth value: use `report.is_same` or `report.ok`"
    )


@dataclass(frozen=True)
class TextCheck:
    """One text of the gate, measured again.

    Attributes:
        recorded: its figures in the manifest.
        perplexity: now; None if this quantkit does not have the text.
    """

    recorded: TextResult
    perplexity: float | None

    def line(self) -> str:
        """Describe the check in a line."""
        recorded = self.recorded
        if self.perplexity is None:
            return f"'{recorded.text}' has changed since the model was made; not measured again"
        return (
            f"'{recorded.text}': perplexity {self.perplexity:.4g} as recorded when it was made (its"
            f" source {recorded.source_perplexity:.4g}); KL from its source {recorded.kl_estimate}"
            f" nats a token ({recorded.limit()})"
        )


@dataclass(frozen=True)
class FolderReport:
    """A model compared with its own manifest. There is a report only for a sound model: any fault
    is an error.

    Attributes:
        path: of the model.
        files: how many are as quantkit wrote them.
        edited: the change of each file that users may edit, ``edited`` or ``removed``, by its name.
        texts: the texts of a quantized model, measured again.
        weights: the recorded figures of a model that was not run when it was made.
        manifest: of the model.
        run_by: what ran the model to measure them, such as ``transformers 5.23.0``; None for our
            decoder.
        not_run: of a model that transformers ran when it was made, why it could not be measured
            again.
    """

    path: Path
    files: int
    edited: dict[str, str]
    texts: list[TextCheck]
    manifest: dict[str, Any]
    weights: WeightsOnly | None = None
    run_by: str | None = None
    not_run: str | None = None

    __bool__ = neither_true_nor_false

    @property
    def is_same(self) -> bool:
        """Return whether every file is as quantkit wrote it, the model card too."""
        return not self.edited

    @property
    def ok(self) -> bool:
        """Return whether the model is as it was made: always, as anything else is an error."""
        return True

    def to_json(self) -> dict[str, Any]:
        """Return everything found, and the manifest."""
        return {
            "path": str(self.path),
            "same": self.is_same,
            "ok": self.ok,
            "files": self.files,
            "edited": self.edited,
            "perplexities": {text.recorded.text: text.perplexity for text in self.texts},
            "run_by": self.run_by,
            "not_run": self.not_run,
            "manifest": self.manifest,
        }

    def lines(self) -> list[str]:
        """Format the report as lines of text."""
        total = self.files + len(self.edited)
        if self.is_same:
            count = f"all {total}"
        else:
            count = f"{self.files} of {total}"
        if total == 1:
            summary = "the file is as quantkit wrote it"
        else:
            summary = f"{count} files are as quantkit wrote them"
        out = [f"{self.path}: {summary}"]
        for name, change in self.edited.items():
            if change == "edited":
                out.append(f"{name}: {change} since (not checked)")
            else:
                out.append(f"{name}: {change} since")
        if self.weights is not None:
            out.append(self.weights.line())
        exact = self.manifest.get("exact")
        if isinstance(exact, dict) and all(type(tensors) is int for tensors in exact.values()):
            # A manifest of another version may have other keys. The files are checked without them.
            with suppress(TypeError):
                out.append(
                    f"when it was made it was compared with its source: {Exact(**exact).line()}"
                )
        if self.run_by is not None:
            out.append(f"run by {self.run_by}")
        if self.not_run is not None:
            out.append(f"its perplexities were not measured again: {self.not_run}")
        for text in self.texts:
            out.append(text.line())
        out.append("verdict: the model is as it was made")
        return out


def verify_model(
    model: str | Path, *, trust_remote_code: bool = False, progress: Progress = silent
) -> FolderReport:
    """Compare a folder or a GGUF file with its manifest: the sha256 of its files and, if it was
    quantized, its quality.

    A model card may have been edited, or removed.

    Args:
        trust_remote_code: see `run_by_transformers`.

    Raises:
        CheckpointError: if there is no manifest, a file is missing or changed, or a file of
            weights, of the config or of the tokenizer was added; see also `measure_again`.
        QualityError: see `measure_again`.
    """
    model = Path(model)
    require_finished(model, manifest.NAME)
    model, path = find_manifest(model)
    if not path.exists():
        # Raises another error if the model is damaged.
        open_checkpoint(model)
        if model.is_dir():
            place = ": quantkit did not make it"
            hint = "pass the model to compare it with"
        else:
            place = " next to it, where quantkit writes a file's manifest"
            hint = "copy it too, or pass the model to compare it with"
        raise CheckpointError(f"has no {path.name}{place}", path=model, hint=hint)
    model_manifest, edited = require_as_written(model, progress=progress)
    if model.exists():
        readable = model
    else:
        # A split GGUF model has no file of its own name: its first part opens all.
        readable = path.parent / min(model_manifest["files"], default="")
    texts: list[TextCheck] = []
    weights = None
    run_by = None
    not_run = None
    if model_manifest.get("job") == "quantize" or "quality" in model_manifest:
        # A model that was quantized by its tensors alone must be opened so again.
        tensors_only = model_manifest.get("tensors_only") is True
        checkpoint = with_codes(open_checkpoint(readable, tensors_only=tensors_only))
        if not checkpoint.config.runnable:
            require_as_recorded(checkpoint, model_manifest, path)
            if model_manifest.get("run_by") is None:
                weights = WeightsOnly.from_json(model_manifest.get("quality"), path)
            else:
                try:
                    run = run_by_transformers(checkpoint, trust_remote_code=trust_remote_code)
                    run_by = run.config.run_by
                except (RequestError, CheckpointError, UnsupportedError) as error:
                    not_run = why_not_run(error)
        if weights is None:
            texts = measure_again(readable, model_manifest, checkpoint, progress=progress)
    return FolderReport(
        path=model,
        files=len(model_manifest["files"]) - len(edited),
        edited=edited,
        texts=texts,
        manifest=model_manifest,
        weights=weights,
        run_by=run_by,
        not_run=not_run,
    )


def measure_again(
    model: Path,
    model_manifest: Mapping[str, Any],
    checkpoint: Checkpoint,
    *,
    progress: Progress = silent,
) -> list[TextCheck]:
    """Compare a quantized model with the figures in its manifest. The source is not needed: the
    model's perplexities are measured again, if it can be run. Raises `CheckpointError` if the
    manifest states no gate, and `QualityError` if a perplexity is not the manifest's, or if the
    model did not pass its gate or its certificate for long contexts when it was made.
    """
    quality: Any = model_manifest.get("quality")
    recorded = Gate.from_json(quality, manifest_path(model))
    # A text of another version of quantkit gives another perplexity.
    recorded_texts = {(text.text, text.sha256) for text in recorded.texts}
    if checkpoint.config.measurable:
        gate_windows = build_gate_windows(checkpoint)
    else:
        gate_windows = {}
    texts = {}
    for name, (digest, windows) in gate_windows.items():
        if (name, digest) in recorded_texts:
            texts[name] = windows
    in_one_phase = in_phase(progress, "perplexity")
    # Runtimes round the inputs of linears, and so did the gate.
    inputs = read_input_roundings(model_manifest, checkpoint, model)
    run: Checkpoint = checkpoint
    if inputs:
        run = RoundedInputs(checkpoint, inputs)
    if texts:
        figures = perplexity_estimates(run, list(texts.values()), progress=in_one_phase)
    else:
        figures = []
    perplexities = {name: figure.value for name, figure in zip(texts, figures, strict=True)}
    checks: list[TextCheck] = []
    if checkpoint.config.measurable:
        checks = [TextCheck(text, perplexities.get(text.text)) for text in recorded.texts]
    for check in checks:
        measured = check.perplexity
        expected = check.recorded.perplexity
        if measured is None:
            continue
        # Another machine sums in another order. Infinity is close to infinity, but no figure.
        is_close = math.isclose(measured, expected, rel_tol=REPEATABLE)
        if not math.isfinite(measured) or not is_close:
            raise QualityError(
                f"perplexity on '{check.recorded.text}' differs from the manifest",
                path=model,
                found=f"{measured:.4g}",
                expected=f"{expected:.4g}",
                hint="create the model again",
            )
    gate_failure = _build_failure(recorded, "gate", quality, model)
    certificate_failure = _find_certificate_failure(model_manifest, model)
    if gate_failure is not None:
        raise gate_failure
    if certificate_failure is not None:
        raise certificate_failure
    return checks


def read_input_roundings(
    model_manifest: Mapping[str, Any], checkpoint: Checkpoint, model: Path
) -> dict[str, InputRounding]:
    """Read how the inputs of linears were rounded when a model was measured, by module. Raises
    `CheckpointError` if the manifest states it in another form.
    """
    types_by_scheme = model_manifest.get(ACTIVATIONS, {})
    if not types_by_scheme:
        return {}
    try:
        activations = {scheme: Activations(kind) for scheme, kind in types_by_scheme.items()}
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{ACTIVATIONS} does not map schemes to activation dtypes",
            path=manifest_path(model),
            found=types_by_scheme,
        ) from error
    roundings: dict[str, InputRounding] = {}
    for module, scheme in schemes(checkpoint).items():
        # The inputs of an embedding are token ids.
        if module == EMBEDDING:
            continue
        rounding = InputRounding.of(activations.get(str(scheme), Activations.NONE), scheme)
        if rounding is not None:
            roundings[module] = rounding
    return roundings


def describe_certificate_failure(model: Path) -> str | None:
    """Say how a model failed its certificate for long contexts; None if it passed, or has none.
    Raises `CheckpointError` if its manifest has a certificate of another form.
    """
    error = _find_certificate_failure(manifest_or_empty(model), model)
    if error is None:
        return None
    return str(error)


def _find_certificate_failure(
    model_manifest: Mapping[str, Any], model: Path
) -> QualityError | None:
    positions = model_manifest.get("positions")
    if positions is None:
        return None
    certificate = PositionCertificate.from_json(positions, manifest_path(model))
    return _build_failure(certificate, "certificate for long contexts", positions, model)


def _build_failure(
    recorded: Gate | PositionCertificate, name: str, value: Any, model: Path
) -> QualityError | None:
    """Build the error if the model did not pass when it was made; `value` is the manifest's form
    of `recorded`.
    """
    problem, measured, allowed = recorded.problem() or ("", None, None)
    if not problem and value.get("passed") is True:
        return None
    message = f"did not pass its {name} when it was made"
    if problem:
        message += f": {problem}"
    if value.get("accepted"):
        hint: str = Message("it was kept with ", Option("accept_quality_loss", value=True, job=""))
    else:
        hint = "make it again"
    return QualityError(message, path=model, found=measured, expected=allowed, hint=hint)
