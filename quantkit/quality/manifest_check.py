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
from quantkit.base.progress import Progress, in_phase, silent
from quantkit.errors import CheckpointError, QualityError, RequestError, UnsupportedError
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import require_finished
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.bounds import REPEATABLE, build_gate_windows
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.gate import Gate, TextResult
from quantkit.quality.manifest_files import find_manifest, require_as_written
from quantkit.quality.measures import perplexity_estimates
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.transcoded import Exact
from quantkit.quality.weights_only import WeightsOnly, require_as_recorded
from quantkit.tensors.activations import Activations, InputRounding
from quantkit.via_transformers.forward import run_by_transformers, why_not_run

ACTIVATIONS = "activations"
"""The key of the manifest with the types that runtimes round the inputs of linears to, by scheme
of these.
"""


def neither_true_nor_false(report: object) -> NoReturn:
    """Refuse to be used as a boolean, as any report of a difference would be true."""
    raise TypeError(
        f"a {type(report).__name__} is neither true nor false: use `report.is_same` or `report.ok`"
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
        """Return the check as text."""
        one = self.recorded
        if self.perplexity is None:
            return f"'{one.text}' has changed since the model was made; not measured again"
        return (
            f"'{one.text}': perplexity {self.perplexity:.4g} as recorded when it was made (its"
            f" source {one.source_perplexity:.4g}); KL from its source {one.kl_estimate} nats a"
            f" token ({one.limit()})"
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
        """Everything found, and the manifest."""
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
        """Return the report as text."""
        total = self.files + len(self.edited)
        if self.is_same:
            count = f"all {total}"
        else:
            count = f"{self.files} of {total}"
        if total == 1:
            found = "the file is as quantkit wrote it"
        else:
            found = f"{count} files are as quantkit wrote them"
        out = [f"{self.path}: {found}"]
        out += [
            f"{name}: {what} since{' (not checked)' * (what == 'edited')}"
            for name, what in self.edited.items()
        ]
        if self.weights is None:
            out += []
        else:
            out += [self.weights.line()]
        exact = self.manifest.get("exact")
        if isinstance(exact, dict) and all(type(one) is int for one in exact.values()):
            with suppress(TypeError):  # it has another form
                out.append(
                    f"when it was made it was compared with its source: {Exact(**exact).line()}"
                )
        if self.run_by is None:
            out += []
        else:
            out += [f"run by {self.run_by}"]
        if self.not_run is None:
            out += []
        else:
            out += [f"its perplexities were not measured again: {self.not_run}"]
        return [*out, *(text.line() for text in self.texts), "verdict: the model is as it was made"]


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
            weights, of the config or of the tokenizer was added; see also `recheck`.
        QualityError: see `recheck`.
    """
    model = Path(model)
    require_finished(model, manifest.NAME)
    model, path = find_manifest(model)
    if not path.exists():
        # Raises another error if the model is damaged.
        open_checkpoint(model)
        is_file = not model.is_dir()
        if is_file:
            where = " next to it, where quantkit writes a file's manifest"
        else:
            where = ": quantkit did not make it"
        raise CheckpointError(
            f"has no {path.name}{where}",
            path=model,
            hint=f"{'copy it too, or ' if is_file else ''}pass the model to compare it with",
        )
    made, edited = require_as_written(model, progress=progress)
    if model.exists():
        readable = model
    else:
        readable = path.parent / min(made["files"], default="")
    texts: list[TextCheck] = []
    weights = None
    run_by = None
    not_run = None
    if made.get("job") == "quantize" or "quality" in made:
        checkpoint = with_codes(
            open_checkpoint(readable, tensors_only=made.get("tensors_only") is True)
        )
        if not checkpoint.config.runnable:
            require_as_recorded(checkpoint, made, path)
            if made.get("run_by") is None:
                weights = WeightsOnly.from_json(made.get("quality"), path)
            else:
                try:
                    run = run_by_transformers(checkpoint, trust_remote_code=trust_remote_code)
                    run_by = run.config.run_by
                except (RequestError, CheckpointError, UnsupportedError) as error:
                    not_run = why_not_run(error)
        if weights is None:
            texts = recheck(readable, made, checkpoint, progress=progress)
    return FolderReport(
        model, len(made["files"]) - len(edited), edited, texts, made, weights, run_by, not_run
    )


def recheck(
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
    known = {(text.text, text.sha256) for text in recorded.texts}
    if checkpoint.config.measurable:
        measured = build_gate_windows(checkpoint)
    else:
        measured = {}
    texts = {}
    for name, (digest, windows) in measured.items():
        if (name, digest) in known:
            texts[name] = windows
    in_one_phase = in_phase(progress, "perplexity")
    run = (
        RoundedInputs(checkpoint, inputs)
        if (inputs := read_input_roundings(model_manifest, checkpoint, model))
        else checkpoint
    )
    if texts:
        figures = perplexity_estimates(run, list(texts.values()), progress=in_one_phase)
    else:
        figures = []
    perplexities = {name: figure.value for name, figure in zip(texts, figures, strict=True)}
    checks = [
        TextCheck(text, perplexities.get(text.text))
        for text in recorded.texts
        if checkpoint.config.measurable
    ]
    for check in checks:
        found = check.perplexity
        expected = check.recorded.perplexity
        if found is not None and not (
            math.isfinite(found) and math.isclose(found, expected, rel_tol=REPEATABLE)
        ):
            raise QualityError(
                f"perplexity on '{check.recorded.text}' is not what the manifest says",
                path=model,
                found=f"{found:.4g}",
                expected=f"{expected:.4g}",
                hint="make it again",
            )
    for failure in (
        _failure(recorded, "gate", quality, model),
        _find_certificate_failure(model_manifest, model),
    ):
        if failure is not None:
            raise failure
    return checks


def read_input_roundings(
    model_manifest: Mapping[str, Any], checkpoint: Checkpoint, model: Path
) -> dict[str, InputRounding]:
    """Return how the inputs of linears were rounded when a model was measured, by module. Raises
    `CheckpointError` if the manifest states it in another form.
    """
    stated = model_manifest.get(ACTIVATIONS, {})
    if not checkpoint.config.runnable or not stated:
        return {}
    try:
        by_scheme = {name: Activations(found) for name, found in stated.items()}
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{ACTIVATIONS} is not by scheme", path=manifest_path(model), found=stated
        ) from error
    linears = {}
    for module, scheme in schemes(checkpoint).items():
        if module != EMBEDDING:
            linears[module] = scheme
    found = {}
    for module, scheme in linears.items():
        found[module] = InputRounding.of(by_scheme.get(str(scheme), Activations.NONE), scheme)
    return {module: one for module, one in found.items() if one is not None}


def describe_certificate_failure(model: Path) -> str | None:
    """Return how a model failed its certificate for long contexts; None if it passed, or has none.
    Raises `CheckpointError` if its manifest has a certificate of another form.
    """
    error = _find_certificate_failure(manifest_or_empty(model), model)
    if error is None:
        return None
    return str(error)


def _find_certificate_failure(
    model_manifest: Mapping[str, Any], model: Path
) -> QualityError | None:
    if (positions := model_manifest.get("positions")) is None:
        return None
    certificate = PositionCertificate.from_json(positions, manifest_path(model))
    return _failure(certificate, "certificate for long contexts", positions, model)


def _failure(
    recorded: Gate | PositionCertificate, name: str, value: Any, model: Path
) -> QualityError | None:
    """Return the error if the model did not pass when it was made; `value` is the manifest's form
    of `recorded`.
    """
    what, measured, allowed = recorded.problem() or ("", None, None)
    if not what and value.get("passed") is True:
        return None
    return QualityError(
        f"did not pass its {name} when it was made" + (f": {what}" if what else ""),
        path=model,
        found=measured,
        expected=allowed,
        hint=(
            "it was kept with `accept_quality_loss=True`"
            if value.get("accepted")
            else "make it again"
        ),
    )
