"""Look for all that is wrong with a folder or file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.arguments import as_path, as_text, as_whole, require_flags
from quantkit.doctor import files, gguf, kv_cache, quantization, readers, text, weights, zero_points
from quantkit.doctor.findings import RUNTIMES, Finding, Runtime, ordered
from quantkit.doctor.folder import Folder
from quantkit.doctor.report import Diagnosis, LayerError
from quantkit.doctor.view import View
from quantkit.errors import RequestError
from quantkit.files.located import require_there
from quantkit.json_values import shown
from quantkit.progress import Progress, silent

_MOST_DEGREE = 1024
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja")


def diagnose(
    path: str | Path,
    *,
    runtime: Runtime | None = None,
    tp: int = 1,
    deep: bool = False,
    against: str | Path | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Look for what is wrong with a model's folder or file, whoever made it; headers alone unless asked for more.

    Args:
        path: a folder, or a file of weights.
        runtime: ``vllm``, ``transformers``, ``llama.cpp`` or ``mlx``: also what this one minds.
        tp: the degree of tensor parallelism that it shall run at.
        deep: read the weights too: NaN, what was never written, sizes out of line, zero points off by one; compare the
            files with quantkit.json, if there is one; run the model on a short text, if it is small and no error was
            found before.
        against: the float model that it was made of: how far each linear is from it.
        progress: is told how far the reading of weights is.

    Returns:
        What was found, the worst first; `broken` says whether something would break.

    Raises:
        CheckpointError: if nothing is at a path.
        RequestError: if the source is quantized itself, a file holds no weights, or an argument makes no sense.

    Example:
        >>> print(*quantkit.diagnose("model-awq", runtime="vllm", tp=2).lines(), sep="\\n")
    """
    require_flags(deep=deep)
    if runtime is not None and as_text("runtime", runtime) not in RUNTIMES:
        raise RequestError("no such runtime", found=shown(runtime), expected=", ".join(RUNTIMES))
    if not 1 <= as_whole("tp", tp) <= _MOST_DEGREE:
        raise RequestError("`tp` is out of range", found=shown(tp), expected=f"1 to {_MOST_DEGREE}")
    folder = Folder(as_path("path", path))
    source = None if against is None else as_path("against", against)
    if source is not None:
        require_there(source)
    patient = _Patient(folder, runtime, tp, deep)
    findings = list(patient.findings())
    layers: list[LayerError] = []
    if deep:
        from quantkit.doctor import values

        findings += values.check(folder, patient.view, progress)
        findings += patient.check_written(progress)
    if not _has_errors(findings):
        findings += files.check_opened(folder) if patient.is_read_strictly else patient.check_read()
    if deep:
        findings += patient.check_predictions(progress, sound=not _has_errors(findings))
    if source is not None:
        from quantkit.doctor import against as compared

        found, layers = compared.check(folder, source, progress)
        findings += found
    return Diagnosis(
        str(path), patient.kind(), runtime, ordered(findings, runtime), patient.looked_at(),
        patient.left_out(source is not None), layers,
    )  # fmt: skip


def _has_errors(findings: Sequence[Finding]) -> bool:
    return any(finding.rule.severity == "error" for finding in findings)


class _Patient:
    """What is looked at, and by which rules."""

    def __init__(self, folder: Folder, runtime: Runtime | None, tp: int, deep: bool) -> None:
        self.folder, self.runtime, self.tp, self.deep = folder, runtime, tp, deep
        self.view = View(folder) if folder.kind in ("safetensors", "bin", "file") else None
        self._manifest: Mapping[str, Any] = {}
        self._read: list[str] = []
        self._unread: list[str] = []

    def findings(self) -> Iterator[Finding]:
        folder, view = self.folder, self.view
        yield from files.check(folder)
        if self.runtime is not None:
            yield from readers.check_container(folder, self.runtime)
        if view is not None:
            yield from weights.check(view)
            yield from quantization.check(view, self.tp)
            yield from zero_points.check(view, deep=self.deep)
            yield from kv_cache.check(view)
            if self.runtime is not None:
                yield from readers.check(view, self.runtime)
        if folder.kind in ("safetensors", "bin", "meta"):
            yield from text.check(folder, view.rows_of_embedding() if view is not None else None)
        elif folder.kind == "gguf":
            yield from gguf.check(folder)

    def check_read(self) -> Iterator[Finding]:
        """What quantkit's own reader minds where it reads such folders."""
        view = self.view
        if view is not None and view.is_read:
            yield from weights.check_read(view, deep=self.deep)

    def check_written(self, progress: Progress) -> list[Finding]:
        """Whether the files are those of quantkit's manifest, where there is one."""
        from quantkit.doctor import written

        found = written.check(self.folder, progress)
        self._manifest = found.manifest
        self._read += [] if found.compared is None else [found.compared]
        return found.findings

    def check_predictions(self, progress: Progress, *, sound: bool) -> list[Finding]:
        """What the model predicts.

        Args:
            sound: whether no error was found before.
        """
        if self.folder.kind not in ("safetensors", "bin", "meta", "gguf") or (self.view and not self.view.is_read):
            return []
        if not sound:
            self._unread.append("what it predicts: it is not run where there are errors")
            return []
        from quantkit.doctor import predictions

        found = predictions.check(self.folder, self._manifest, progress)
        self._read += [] if found.figures is None else [found.figures]
        self._unread += [] if found.left_out is None else [found.left_out]
        return found.findings

    @property
    def is_read_strictly(self) -> bool:
        """Whether it is opened as by jobs, where there are few rules of its own."""
        return self.folder.kind in ("meta", "gguf")

    def kind(self) -> str:
        """What it is, in a few words."""
        folder = self.folder
        titles = {
            "safetensors": "Hugging Face",
            "bin": "Hugging Face",
            "meta": "Meta",
            "gguf": "GGUF",
            "mistral": "Mistral's own layout",
        }
        told = [titles.get(folder.kind, "a file of weights" if folder.kind else "no model")]
        if isinstance(kind := folder.config.get("model_type"), str):
            told.append(kind[:40])
        for header in list(folder.headers.values())[:1]:
            told.append(str(header.metadata.get("general.architecture"))[:40])
        told += [folder.method[:40]] if folder.method else []
        return ", ".join(told)

    def looked_at(self) -> list[str]:
        """What was read."""
        folder = self.folder
        count = len(folder.files) + len(folder.headers)
        tensors = len(folder.stored) + sum(len(header.tensors) for header in folder.headers.values())
        told = [
            f"{'weights' if self.deep else 'headers'} of {count} file{'s' if count != 1 else ''}, {tensors} tensors"
        ]
        beside = [name for name in _BESIDE if name in folder.names]
        return told if folder.kind == "mistral" else [*told, *beside, *self._read]

    def left_out(self, compared: bool) -> list[str]:
        """What was not, and what would have it looked at."""
        view = self.view
        told = self._unread if self.deep else ["the weights themselves, and what it predicts (`deep=True`)"]
        told += [] if compared else ["how far it is from its source (`against=SRC`)"]
        if self.runtime is None:
            told.append("what one runtime minds (`runtime=NAME`)")
        told += [f"{path.name}: name it to have it looked at" for path in self.folder.others]
        if view is not None and not view.known and self.folder.config:
            what = f"{view.without_head} is" if view.without_head else "its family is"
            told.append(f"which tensors the model needs: {what} not known here")
        if self.folder.kind == "mistral":
            told.append("params.json, tokenizer, and which tensors the model needs: the layout is not known here")
        return told
