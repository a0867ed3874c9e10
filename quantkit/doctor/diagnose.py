"""Check a model's folder or file with all rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.arguments import as_integer, as_path, as_string, require_flags
from quantkit.base.json_values import format_value
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
from quantkit.files.located import locate_model, require_there
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
            "no such runtime", found=format_value(runtime), expected=", ".join(RUNTIMES)
        )
    if not 1 <= as_integer("tp", tp) <= _MAX_DEGREE:
        raise RequestError(
            "`tp` is out of range", found=format_value(tp), expected=f"1 to {_MAX_DEGREE}"
        )
    folder = Folder(as_path("path", path))
    if against is None:
        source = None
    else:
        source = as_path("against", against)
    if source is not None:
        require_finished(require_there(source), manifest.NAME)
    checks = _Checks(folder, runtime, tp, deep)
    findings = list(checks.check_headers())
    layers: list[LayerError] = []
    if deep:
        from quantkit.doctor import values

        findings += values.check(folder, checks.view, progress)
        findings += checks.check_manifest_files(progress)
    if not _has_errors(findings):
        findings += checks.check_loading()
    if deep:
        findings += checks.check_predictions(progress, sound=not _has_errors(findings))
    if source is not None:
        from quantkit.doctor import against as compared

        found, layers = compared.check(folder, source, progress)
        findings += found
    findings = list(dict.fromkeys(findings))
    places = {}
    for place, rule in enumerate(dict.fromkeys(one.rule.name for one in findings)):
        places[rule] = place
    findings.sort(
        key=lambda one: (SEVERITIES.index(one.rule.severity_for(runtime)), places[one.rule.name])
    )
    return Diagnosis(
        str(path),
        checks.describe_kind(),
        runtime,
        findings,
        checks.list_checked_parts(),
        checks.list_unchecked_parts(source is not None),
        layers,
    )


def _has_errors(findings: Sequence[Finding]) -> bool:
    return any(finding.rule.severity == "error" for finding in findings)


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
        folder = self.folder
        view = self.view
        yield from weights.check_files(folder)
        if self.runtime is not None:
            yield from readers.check_container(folder, self.runtime)
        if view is not None:
            yield from weights.check(view)
            yield from parts.check(view)
            of_weights = list(quantization.check(view, self.tp))
            yield from of_weights
            yield from quantization.check_zero_points(view, deep=self.deep)
            yield from quantization.check_cache(view)
            if self.runtime is not None:
                yield from readers.check(
                    view, self.runtime, {of_weight.rule.name for of_weight in of_weights}
                )
        if folder.kind in ("safetensors", "bin", "meta"):
            yield from text.check(folder, view.rows_of_embedding() if view is not None else None)
        elif folder.kind == "gguf":
            yield from gguf.check(folder)

    def check_loading(self) -> Iterator[Finding]:
        """Yield what quantkit's own reader refuses."""
        if self.folder.kind in ("meta", "gguf"):
            yield from weights.check_opened(self.folder)
        elif self.view is not None and self.view.is_read:
            yield from weights.check_read(self.view, deep=self.deep)
        elif (
            self.view is not None
            and not (self.view.has_known_tensors or self.view.without_head)
            and self.folder.config
        ):
            self._by_class, found = weights.check_by_transformers(self.folder)
            yield from found

    def check_manifest_files(self, progress: Progress) -> Iterator[Finding]:
        """Yield whether the files are those of quantkit's manifest, if there is one."""
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
        """Return what is wrong with a model's predictions; it is run if it is sound so far."""
        runs = self.view is None or self.view.is_read or self._by_class
        if self.folder.kind not in ("safetensors", "bin", "meta", "gguf") or not runs:
            return []
        if not sound:
            self._unread.append("what it predicts: it is not run because of the errors")
            return []
        from quantkit.doctor import predictions

        found = predictions.check(self.folder, self._manifest, progress)
        if found.measured is None:
            self._read += []
        else:
            self._read += [found.measured]
        if found.left_out is None:
            self._unread += []
        else:
            self._unread += [found.left_out]
        return found.findings

    def describe_kind(self) -> str:
        """Return the kind of model, in a few words."""
        folder = self.folder
        words = [_TITLES.get(folder.kind, "a file of weights" if folder.kind else "no model")]
        if isinstance(kind := folder.config.get("model_type"), str):
            words.append(kind[:40])
        words += [
            str(header.metadata.get("general.architecture"))[:40]
            for header in list(folder.headers.values())[:1]
        ]
        return ", ".join(words + ([folder.method[:40]] if folder.method else []))

    def list_checked_parts(self) -> list[str]:
        folder = self.folder
        count = len(folder.files) + len(folder.headers)
        tensors = len(folder.stored) + sum(
            len(header.tensors) for header in folder.headers.values()
        )
        what = "weights" if self.deep else "headers"
        result = [f"{what} of {count} file{'s' if count != 1 else ''}, {tensors} tensors"]
        side_files = [name for name in _SIDE_FILES if name in folder.names]
        if self._by_class:
            side_files += ["which tensors transformers' class needs"]
        else:
            side_files += []
        if folder.kind == "mistral":
            return result
        return [*result, *side_files, *self._read]

    def list_unchecked_parts(self, compared: bool) -> list[str]:
        """Return what was not read, and what to do to have it read."""
        view = self.view
        if self.deep:
            result = self._unread
        else:
            result = ["the weights themselves, and what it predicts (`deep=True`)"]
        if compared:
            result += []
        else:
            result += ["how far it is from its source (`against=SRC`)"]
        if self.runtime is None:
            result.append("what a runtime does not load (`runtime=NAME`)")
        result += [f"{path.name}: pass its path to check it" for path in self.folder.other_models]
        if (
            view is not None
            and not view.has_known_tensors
            and self.folder.config
            and not self._by_class
        ):
            if view.without_head:
                what = f"{view.without_head} is"
            else:
                what = "its family is"
            result.append(f"which tensors the model needs: {what} not known here")
        if self.folder.kind == "mistral":
            result.append(
                "params.json, tokenizer, and which tensors the model needs: the layout is not known"
                " here"
            )
        return result
