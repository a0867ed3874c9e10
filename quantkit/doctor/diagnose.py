"""Check a model's folder or file with all rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.arguments import as_integer, as_path, as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.doctor import gguf, parts, quantization, readers, text, weights
from quantkit.doctor.findings import (
    RUNTIMES,
    SEVERITIES,
    Diagnosis,
    Finding,
    LayerError,
    Runtime,
    finding,
)
from quantkit.doctor.folder import Folder
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.located import locate_existing_model, locate_model
from quantkit.formats import manifest
from quantkit.formats.output.staging import require_finished

_MAX_DEGREE = 1024
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
)
_TITLES = {
    "safetensors": "Hugging Face",
    "bin": "Hugging Face",
    "meta": "Meta",
    "gguf": "GGUF",
    "mistral": "Mistral's own layout",
}


def diagnose(
    path: str | Path,
    *,
    runtime: Runtime | None = None,
    tp: int = 1,
    deep: bool = False,
    against: str | Path | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Find what is wrong with a model's folder or file, whoever made it; only headers are read by
    default.

    Args:
        path: a folder, or a file of weights.
        runtime: ``vllm``, ``transformers``, ``llama.cpp`` or ``mlx``: also check what this runtime
            does not load.
        tp: the degree of tensor parallelism at which it is to run.
        deep: read the weights too: NaN, what was never written, sizes out of line, zero points off
            by one; compare the files with quantkit.json, if there is one; run the model on a short
            text, if it is small and no error was found before.
        against: the float model that it was made of: compute how far each linear is from it.
        progress: is called while weights are read.

    Returns:
        What was found, the worst first; `broken` is whether something would break.

    Raises:
        CheckpointError: if the path is a partial folder of an interrupted run.
        RequestError: if nothing is at a path, the source is quantized itself, a file holds no
            weights, or an argument is invalid.

    Example:
        >>> print(*quantkit.diagnose("model-awq", runtime="vllm", tp=2).lines(), sep="\\n")
    """
    require_flags(deep=deep)
    if runtime is not None and as_string("runtime", runtime) not in RUNTIMES:
        raise RequestError(
            "unknown runtime", found=format_value(runtime), expected=", ".join(RUNTIMES)
        )
    if not 1 <= as_integer("tp", tp) <= _MAX_DEGREE:
        raise RequestError(
            Message(Option("tp"), " is out of range"),
            found=format_value(tp),
            expected=f"1 to {_MAX_DEGREE}",
        )
    folder = Folder(as_path("path", path))
    if against is None:
        source = None
    else:
        source = as_path("against", against)
    if source is not None:
        require_finished(locate_existing_model(source), manifest.NAME)
    checks = _Checks(folder, runtime, tp, deep)
    # The order matters: the model is loaded, and then run, only if no check before found an error.
    findings = list(checks.check_headers())
    layers: list[LayerError] = []
    if deep:
        # Rules about values, predictions and a source import torch, which a diagnosis from headers
        # does without.
        from quantkit.doctor import values

        findings += values.check(folder, checks.view, progress)
        findings += checks.check_manifest_files(progress)
    if not _has_errors(findings):
        findings += checks.check_loading()
    if deep:
        findings += checks.check_predictions(progress, sound=not _has_errors(findings))
    if source is not None:
        from quantkit.doctor import against as comparison

        source_findings, layers = comparison.check(folder, source, progress)
        findings += source_findings
    # Two checks may report the same fault of the same tensor.
    findings = list(dict.fromkeys(findings))
    return Diagnosis(
        path=str(path),
        kind=checks.describe_kind(),
        runtime=runtime,
        findings=_sort_findings(findings, runtime),
        looked_at=checks.list_checked_parts(),
        left_out=checks.list_unchecked_parts(source is not None),
        layers=layers,
    )


def _has_errors(findings: Sequence[Finding]) -> bool:
    return any(finding.rule.severity == "error" for finding in findings)


def _sort_findings(findings: Sequence[Finding], runtime: Runtime | None) -> list[Finding]:
    """Sort by severity, and keep the findings of each rule together, in the order of checks."""
    rule_places: dict[str, int] = {}
    rules = [finding.rule for finding in findings]
    for rule in rules:
        rule_places.setdefault(rule.name, len(rule_places))

    def sort_key(entry: Finding) -> tuple[int, int]:
        severity = entry.rule.severity_for(runtime)
        return SEVERITIES.index(severity), rule_places[entry.rule.name]

    return sorted(findings, key=sort_key)


class _Checks:
    """The rules that apply to a folder, and what they read of it."""

    def __init__(self, folder: Folder, runtime: Runtime | None, tp: int, deep: bool) -> None:
        self.folder = folder
        self.runtime = runtime
        self.tp = tp
        self.deep = deep
        self.view = View(folder) if folder.kind in ("safetensors", "bin", "file") else None
        self._manifest: Mapping[str, Any] = {}
        self._read: list[str] = []
        self._unread: list[str] = []
        # Whether the tensors that transformers' class needs were looked for.
        self._by_class = False

    def check_headers(self) -> Iterator[Finding]:
        """Check headers and small files, for the kind of folder and the runtime."""
        folder = self.folder
        view = self.view
        yield from weights.check_files(folder)
        if self.runtime is not None:
            yield from readers.check_container(folder, self.runtime)
        if view is not None:
            yield from weights.check(view)
            yield from parts.check(view)
            weight_findings = list(quantization.check(view, self.tp))
            yield from weight_findings
            yield from quantization.check_zero_points(view, deep=self.deep)
            yield from quantization.check_cache(view)
            if self.runtime is not None:
                # vLLM's problems include some that a rule about weights has reported already.
                reported_rules = {finding.rule.name for finding in weight_findings}
                yield from readers.check(view, self.runtime, reported_rules)
        if folder.kind in ("safetensors", "bin", "meta"):
            rows = None
            if view is not None:
                rows = view.rows_of_embedding()
            yield from text.check(folder, rows)
        elif folder.kind == "gguf":
            yield from gguf.check(folder)

    def check_loading(self) -> Iterator[Finding]:
        """Load the folder with quantkit's own reader, and yield what it refuses."""
        if self.folder.kind in ("meta", "gguf"):
            yield from weights.check_opened(self.folder)
        elif self.view is not None and self.view.is_read:
            yield from weights.check_read(self.view, deep=self.deep)
        elif (
            self.view is not None
            and not (self.view.has_known_tensors or self.view.without_head)
            and self.folder.config
        ):
            # For a family that is not known here, transformers' class says which tensors it needs.
            self._by_class, class_findings = weights.check_by_transformers(self.folder)
            yield from class_findings

    def check_manifest_files(self, progress: Progress) -> Iterator[Finding]:
        """Compare the files with the hashes in quantkit's manifest, if there is one."""
        from quantkit.quality.manifest_files import find_manifest, require_as_written

        model, path = find_manifest(locate_model(self.folder.path))
        if not path.exists():
            return
        try:
            self._manifest = manifest.read(model)
            require_as_written(model, progress=progress)
            self._read.append(
                f"sha256 of {len(self._manifest['files'])} files, as {path.name} has them"
            )
        except CheckpointError as error:
            yield finding(
                "not-as-written",
                path.name if error.path is None else error.path.name,
                error.problem,
            )

    def check_predictions(self, progress: Progress, *, sound: bool) -> list[Finding]:
        """Run the model, if it is sound so far, and check its predictions."""
        runs = self.view is None or self.view.is_read or self._by_class
        # `_TITLES` has further kinds, of which quantkit's reader opens none.
        if self.folder.kind not in ("safetensors", "bin", "meta", "gguf") or not runs:
            return []
        if not sound:
            self._unread.append("what it predicts: it is not run because of the errors")
            return []
        from quantkit.doctor import predictions

        result = predictions.check(self.folder, self._manifest, progress)
        if result.measured is not None:
            self._read.append(result.measured)
        if result.left_out is not None:
            self._unread.append(result.left_out)
        return result.findings

    def describe_kind(self) -> str:
        """Describe the kind of model in a few words."""
        folder = self.folder
        words = [_TITLES.get(folder.kind, "a file of weights" if folder.kind else "no model")]
        # Names from a damaged or hostile file may have any length, and this is one line.
        family = folder.config.get("model_type")
        if isinstance(family, str):
            words.append(family[:40])
        if folder.headers:
            # The parts of a GGUF model state the same architecture.
            header = next(iter(folder.headers.values()))
            words.append(str(header.metadata.get("general.architecture"))[:40])
        if folder.method:
            words.append(folder.method[:40])
        return ", ".join(words)

    def list_checked_parts(self) -> list[str]:
        """List what was read."""
        folder = self.folder
        count = len(folder.files) + len(folder.headers)
        tensor_count = len(folder.stored)
        for header in folder.headers.values():
            tensor_count += len(header.tensors)
        depth = "weights" if self.deep else "headers"
        result = [f"{depth} of {count} file{'s' if count != 1 else ''}, {tensor_count} tensors"]
        side_files = [name for name in _SIDE_FILES if name in folder.names]
        if self._by_class:
            side_files.append("which tensors transformers' class needs")
        # No rule reads the side files of Mistral's own layout.
        if folder.kind == "mistral":
            return result
        return [*result, *side_files, *self._read]

    def list_unchecked_parts(self, compared: bool) -> list[str]:
        """List what was not read, and what to do to have it read."""
        view = self.view
        if self.deep:
            result = list(self._unread)
        else:
            result = [
                Message(
                    "the weights themselves, and what it predicts (",
                    Option("deep", value=True),
                    ")",
                )
            ]
        if not compared:
            result.append(
                Message("how far it is from its source (", Option("against", metavar="SRC"), ")")
            )
        if self.runtime is None:
            result.append(
                Message("what a runtime does not load (", Option("runtime", metavar="NAME"), ")")
            )
        for path in self.folder.other_models:
            result.append(f"{path.name}: pass its path to check it")
        if (
            view is not None
            and not view.has_known_tensors
            and self.folder.config
            and not self._by_class
        ):
            if view.without_head:
                subject = f"{view.without_head} is"
            else:
                subject = "its family is"
            result.append(f"which tensors the model needs: {subject} not known here")
        if self.folder.kind == "mistral":
            result.append(
                "params.json, tokenizer, and which tensors the model needs: the layout is not known"
                " here"
            )
        return result
