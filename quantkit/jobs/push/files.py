"""The files of a model that `push` sends, and the checks that they pass before."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.base.json_values import format_value
from quantkit.doctor.diagnose import diagnose
from quantkit.doctor.findings import Diagnosis
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.files import safetensors_io
from quantkit.files.gguf_io import read_header
from quantkit.files.gguf_types import GGUF
from quantkit.files.hub import PREFIX
from quantkit.files.hub_answers import is_file_name
from quantkit.files.links import require_inside
from quantkit.files.located import PARTIAL, gguf_models, read_parts, require_there
from quantkit.files.source import SourceFile, open_weights
from quantkit.formats import manifest
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.output.staging import require_finished

_UNFINISHED = (PARTIAL, ".incomplete")  # of quantkit, and of the hub's library
_CACHE = "__pycache__"
_PICKLES = (".bin", ".pth", ".pt")
_PARSED = (".safetensors", GGUF)
_log = logging.getLogger(__name__)


def require_sound(model: Path) -> Path:
    """Return the path of a model in which `quantkit.diagnose` finds no error, a folder or a GGUF
    file; its warnings are logged.

    Raises:
        RequestError: if it is neither.
        CheckpointError: if it is unfinished, or something is wrong with it.
    """
    if str(model).startswith(PREFIX) and not model.exists():
        raise RequestError(
            "is a name on the hub",
            found=format_value(str(model)),
            expected="a folder or a GGUF file to push",
        )
    found = require_there(model)
    if not found.is_dir() and found.suffix.lower() != GGUF:
        raise RequestError(
            "is one file of a model", path=model, expected="its folder, or a GGUF file"
        )
    require_finished(found, manifest.NAME)
    if found.resolve().name.endswith(PARTIAL):
        raise _build_unfinished_error(found)
    _require_no_errors(diagnose(found), found)
    if found.is_dir():
        several = gguf_models(found)
    else:
        several = []
    for one in several if len(several) > 1 else ():
        _require_no_errors(diagnose(one), one)
    return found


def model_files(model: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files to send by their names in the repository; and the hidden files and folders,
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
        files = dict(sorted(_walk(model, hidden)))
    else:
        own = manifest_path(model)
        paths = [part.path for part in read_parts(model)]
        if own.name != manifest.NAME and own.is_file():
            paths += [own]
        else:
            paths += []
        files = {path.name: path for path in paths}
    root = model if model.is_dir() else model.parent
    for name, path in files.items():
        _require_readable(name, path)
        # The header of safetensors and GGUF files was read: they are weights, which may be on
        # another disk.
        if path.suffix.lower() not in _PARSED:
            require_inside(path, root)
    return files, hidden


def manifests(model: Path) -> list[Path]:
    """Return what has a manifest: the folder or the GGUF file, and each GGUF model in the
    folder.
    """
    found = [model, *(gguf_models(model) if model.is_dir() else ())]
    own = {manifest_path(one): one for one in reversed(found)}
    return [one for path, one in own.items() if path.is_file()]


def _walk(folder: Path, hidden: list[str]) -> Iterator[tuple[str, Path]]:
    def raise_unreadable(error: OSError) -> None:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=error.filename)

    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        for name in sorted(folders + names):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if name.startswith(".") or name == _CACHE:
                hidden.append(relative)
            elif name.endswith(_UNFINISHED):
                raise _build_unfinished_error(path)
            elif name in names:
                yield relative, path
            elif path.is_symlink():
                problem = "is a link to a folder, whose files would not be sent"
                hint = "copy the folder, or remove it"
                raise RequestError(problem, path=path, hint=hint)
        folders[:] = sorted(
            name for name in folders if not (name.startswith(".") or name == _CACHE)
        )


def _require_readable(name: str, path: Path) -> None:
    if not is_file_name(name):
        raise RequestError(
            "has a name that the hub does not accept",
            path=format_value(str(path)),
            found=format_value(name),
        )
    if path.is_symlink() and not path.exists():
        raise CheckpointError("is a link to a file that is missing", path=path)
    SourceFile(path).require_content()
    suffix = path.suffix.lower()
    # Also weights in inner folders, which the doctor does not read.
    try:
        if suffix == ".safetensors":
            safetensors_io.open_file(path)
        elif suffix == GGUF:
            read_header(path)
        elif suffix in _PICKLES:
            open_weights(path)
    except UnsupportedError:
        # Sound, but with types that are not read here.
        pass


def _require_no_errors(diagnosis: Diagnosis, model: Path) -> None:
    errors = [finding for finding in diagnosis.findings if diagnosis.severity(finding) == "error"]
    if errors:
        first = errors[0]
        more = len(errors) - 1
        hint = first.rule.remedy + (
            f"; there are {more} more errors, run the doctor" if more else ""
        )
        raise CheckpointError(
            f"{first.rule.name}: {first.location}: {first.message}", path=model, hint=hint
        )
    for finding in diagnosis.findings:
        if diagnosis.severity(finding) == "warning":
            _log.warning(
                "%s: %s: %s: %s", model, finding.rule.name, finding.location, finding.message
            )


def _build_unfinished_error(path: Path) -> CheckpointError:
    return CheckpointError(
        "is unfinished", path=path, hint="finish the command that writes it, or remove it"
    )
