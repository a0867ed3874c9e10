"""The files of a model that `push` sends, and the checks that they pass before."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.base.json_values import format_value
from quantkit.doctor.diagnose import diagnose
from quantkit.doctor.findings import Diagnosis, Finding
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.files import safetensors_io
from quantkit.files.gguf_io import read_header
from quantkit.files.gguf_types import GGUF_SUFFIX
from quantkit.files.hub_answers import is_file_name
from quantkit.files.hub_names import PREFIX
from quantkit.files.links import require_inside
from quantkit.files.located import PARTIAL, gguf_models, locate_existing_model, read_part_headers
from quantkit.files.source import SourceFile, open_weights
from quantkit.formats import manifest
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import require_finished

# Of quantkit, and of the hub's library.
_UNFINISHED = (PARTIAL, ".incomplete")
_CACHE = "__pycache__"
_PICKLES = (".bin", ".pth", ".pt")
_PARSED = (".safetensors", GGUF_SUFFIX)
_log = logging.getLogger(__name__)


def require_sound(model: Path) -> Path:
    """Find a model, a folder or a GGUF file, and require that `quantkit.diagnose` finds no error in
    it; its warnings are logged.

    Raises:
        RequestError: if it is neither.
        CheckpointError: if it is unfinished, or something is wrong with it.
    """
    if str(model).startswith(PREFIX) and not model.exists():
        raise RequestError(
            "is a repository on the hub",
            found=format_value(str(model)),
            expected="a folder or a GGUF file to push",
        )
    path = locate_existing_model(model)
    if not path.is_dir() and path.suffix.lower() != GGUF_SUFFIX:
        raise RequestError(
            "is only one file of a model", path=model, expected="its folder, or a GGUF file"
        )
    require_finished(path, manifest.NAME)
    # A link may hide the name of a partial folder.
    if path.resolve().name.endswith(PARTIAL):
        raise _build_unfinished_error(path)
    _require_no_errors(diagnose(path), path)
    gguf_paths = gguf_models(path) if path.is_dir() else []
    # The doctor checks one model at a time, and a folder can contain several.
    if len(gguf_paths) > 1:
        for gguf_path in gguf_paths:
            _require_no_errors(diagnose(gguf_path), gguf_path)
    return path


def model_files(model: Path) -> tuple[dict[str, Path], list[str]]:
    """List the files to send by their names in the repository; and the hidden files and folders,
    which are not sent.

    All files of a folder, also in folders in it; or all files of a GGUF model, with its own
    manifest.

    Raises:
        CheckpointError: if one cannot be read, is unfinished, is no file, its weights are damaged,
            or a link leads out of the folder.
        RequestError: if a folder in it is a link.
    """
    hidden: list[str] = []
    if model.is_dir():
        root = model
        files = dict(sorted(_walk(model, hidden)))
    else:
        root = model.parent
        paths = [part.path for part in read_part_headers(model)]
        # A manifest of the whole folder has files that are not sent.
        model_manifest = manifest_path(model)
        if model_manifest.name != manifest.NAME and model_manifest.is_file():
            paths.append(model_manifest)
        files = {path.name: path for path in paths}
    for name, path in files.items():
        _require_readable(name, path)
        # The header of safetensors and GGUF files was read: they are weights, which may be on
        # another disk.
        if path.suffix.lower() not in _PARSED:
            require_inside(path, root)
    return files, hidden


def manifests(model: Path) -> list[Path]:
    """List what has a manifest: the folder or the GGUF file, and each GGUF model in the folder."""
    models = [model]
    if model.is_dir():
        models += gguf_models(model)
    # Models can share the manifest of their folder. Reversed, so that it counts for the first one,
    # the folder.
    model_of: dict[Path, Path] = {}
    for candidate in reversed(models):
        model_of[manifest_path(candidate)] = candidate
    return [candidate for path, candidate in model_of.items() if path.is_file()]


def _walk(folder: Path, hidden: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files to send by their relative names, and append what is left out to `hidden`."""

    # `os.walk` skips folders that it cannot read, unless this raises an error.
    def raise_unreadable(error: OSError) -> None:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=error.filename)

    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        for name in sorted(folders + names):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if _is_hidden(name):
                hidden.append(relative)
            elif name.endswith(_UNFINISHED):
                raise _build_unfinished_error(path)
            elif name in names:
                yield relative, path
            elif path.is_symlink():
                problem = "is a link to a folder, whose files would not be sent"
                hint = "copy the folder, or remove it"
                raise RequestError(problem, path=path, hint=hint)
        # `os.walk` goes on with what remains in this list.
        folders[:] = sorted(name for name in folders if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _CACHE


def _require_readable(name: str, path: Path) -> None:
    if not is_file_name(name):
        raise RequestError(
            "has a name that the hub does not accept",
            path=format_value(str(path)),
            found=format_value(name),
        )
    if path.is_symlink() and not path.exists():
        raise CheckpointError("is a link to a file that is missing", path=path)
    # A pointer of git-lfs stands in for the content in clones without it.
    SourceFile(path).require_content()
    suffix = path.suffix.lower()
    # Also weights in inner folders, which the doctor does not read.
    try:
        if suffix == ".safetensors":
            safetensors_io.open_file(path)
        elif suffix == GGUF_SUFFIX:
            read_header(path)
        elif suffix in _PICKLES:
            open_weights(path)
    except UnsupportedError:
        # Sound, but with types that are not read here.
        pass


def _require_no_errors(diagnosis: Diagnosis, model: Path) -> None:
    errors: list[Finding] = []
    warnings: list[Finding] = []
    for finding in diagnosis.findings:
        severity = diagnosis.severity(finding)
        if severity == "error":
            errors.append(finding)
        elif severity == "warning":
            warnings.append(finding)
    if errors:
        first = errors[0]
        hint = first.rule.remedy
        # One line for the first error. The doctor lists all of them.
        if len(errors) > 1:
            hint += f"; there are {len(errors) - 1} more errors, run the doctor"
        raise CheckpointError(
            f"{first.rule.name}: {first.location}: {first.message}", path=model, hint=hint
        )
    for warning in warnings:
        _log.warning("%s: %s: %s: %s", model, warning.rule.name, warning.location, warning.message)


def _build_unfinished_error(path: Path) -> CheckpointError:
    return CheckpointError(
        "is unfinished", path=path, hint="finish the command that writes it, or remove it"
    )
