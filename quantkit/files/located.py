"""Locate the files that a user names: models on this machine or on the hub, all files of a GGUF
model, and plain texts.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option, join_messages
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.gguf_types import (
    GGUF_SUFFIX,
    MAGIC,
    name_part,
    parse_part_count,
    parse_part_stem,
)
from quantkit.files.hub_names import PREFIX, HubModel, parse_hub_name
from quantkit.files.source import make_damaged_file_error

# Folders on this machine need neither.
if TYPE_CHECKING:
    from quantkit.files import gguf_io, hub
else:
    gguf_io = LateModule("quantkit.files.gguf_io")
    hub = LateModule("quantkit.files.hub")

PARTIAL = ".partial"
"""The end of the name of an unfinished output."""
# A job may locate the same model several times, and each download asks the hub for its commit.
_downloaded: dict[HubModel, Path] = {}
# Names of files with a projector for images, or with statistics of activations.
_NO_MODELS = (
    "mmproj",
    "imatrix",
)


def locate_model(path: str | Path) -> Path:
    """Locate the folder or file of a model on this machine.

    Downloads ``hf:owner/name``, once per process; an existing path has priority. ``X.gguf`` means
    ``X-00001-of-0000N.gguf`` if only that exists.

    Raises:
        RequestError, NoSpaceError, CheckpointError: see `download`.
    """
    model = parse_hub_name(str(path))
    if model is None:
        file = Path(path)
        if file.suffix != GGUF_SUFFIX or file.exists():
            return file
        pattern = f"{glob.escape(file.stem)}-00001-of-{'[0-9]' * 5}{GGUF_SUFFIX}"
        first_parts = list(file.parent.glob(pattern))
        # Several are models that were split into different numbers of parts.
        if len(first_parts) == 1:
            return first_parts[0]
        return file
    if model not in _downloaded or not _downloaded[model].exists():
        _downloaded[model] = hub.download(model)
    return _downloaded[model]


def locate_existing_model(path: str | Path) -> Path:
    """Locate a model as `locate_model` does, with its errors, and raise a `RequestError` if the
    path does not exist.
    """
    model_path = locate_model(path)
    if model_path.exists():
        return model_path
    if model_path.is_symlink():
        raise RequestError(
            "is a broken or circular link", path=path, found=f"-> {os.readlink(model_path)}"
        )
    # Addresses copied from a browser. `Path` joins the two slashes after "https:".
    name = re.sub(r"^(https?:/+huggingface\.co/|HF:)", "", str(path))
    try:
        model = parse_hub_name(f"{PREFIX}{name}")
    except RequestError:
        model = None
    partial = f"{model_path}{PARTIAL}"
    hints: list[str] = []
    if os.path.exists(partial):
        hints = [
            Message(
                f"{partial} is not finished: add ",
                Option("resume", value=True, job=""),
                " to the command that began it",
            )
        ]
    else:
        hints = [f"did you mean {similar_path}?" for similar_path in _find_similar(model_path)]
    if model is not None:
        hints.append(f"if it is a model of the Hugging Face hub: {model}")
    raise RequestError("does not exist", path=path, hint=join_messages("; ", hints) or None)


def _find_similar(path: Path) -> list[Path]:
    """Find a file or folder next to a path with a similar name; at most one."""
    try:
        names = [name for name in os.listdir(path.parent) if name != path.name]
    except OSError:
        return []
    return [path.with_name(name) for name in difflib.get_close_matches(path.name, names, 1)]


def gguf_models(folder: Path) -> list[Path]:
    """List the GGUF models in a folder: the first file of each."""
    first_files: dict[str, Path] = {}
    # Reversed, so that the first part of a split model overwrites the others.
    for path in sorted(folder.glob(f"*{GGUF_SUFFIX}"), reverse=True):
        if not path.name.lower().startswith(_NO_MODELS):
            first_files[parse_part_stem(path.name) or path.name] = path
    return list(first_files.values())[::-1]


def gguf_file(path: Path) -> Path | None:
    """Find the GGUF file at a path: the path itself, by its suffix or first bytes, or the only
    model of a folder; None if there is none.
    """
    if path.is_dir():
        models = gguf_models(path)
        if len(models) == 1:
            return models[0]
        return None
    if not path.is_file():
        return None
    if path.suffix == GGUF_SUFFIX:
        return path
    # Blobs in the hub's cache have no suffix.
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return path
        return None


def read_part_headers(path: Path) -> list[gguf_io.GgufHeader]:
    """Read the headers of all files of the model that a file belongs to, in order.

    Raises:
        CheckpointError: see `read_header`; if a part is missing, or belongs to another model.
        UnsupportedError: see `read_header`.
    """
    header = gguf_io.read_header(path)
    if header.split is None or header.split.count == 1:
        if parse_part_count(path.name) > 1:
            raise CheckpointError(
                "is named like a part of a model, but is a complete model", path=path
            )
        return [header]
    stem = parse_part_stem(path.name)
    index = header.split.index
    count = header.split.count
    # The names of the other parts follow from the name of this one.
    if stem is None or path.name != name_part(stem, index, count):
        problem = f"is part {index + 1} of {count} of a model, but is not named like it"
        raise CheckpointError(
            problem, path=path, expected=name_part(stem or path.stem, index, count)
        )
    files = [path.with_name(name_part(stem, number, count)) for number in range(count)]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise make_damaged_file_error(
            "the weight file is missing", missing[0], f"{count - len(missing)} of {count} parts"
        )
    parts: list[gguf_io.GgufHeader] = []
    for number, file in enumerate(files):
        if number == index:
            part = header
        else:
            part = gguf_io.read_header(file)
        if part.split is None or (part.split.index, part.split.count) != (number, count):
            raise CheckpointError(f"is not part {number + 1} of {count} of the model", path=file)
        parts.append(part)
    paths_by_tensor: dict[str, Path] = {}
    for part in parts:
        for name in part.tensors:
            if name in paths_by_tensor:
                raise CheckpointError(
                    f"tensor '{name}' is in two files",
                    path=part.path,
                    found=f"also in {paths_by_tensor[name].name}",
                )
            paths_by_tensor[name] = part.path
    for part in parts:
        # Every part states the number of tensors of the whole model.
        if part.split is not None and part.split.tensors != len(paths_by_tensor):
            raise CheckpointError(
                "the parts and the model have different numbers of tensors",
                path=part.path,
                found=len(paths_by_tensor),
                expected=part.split.tensors,
                hint="a part belongs to another model",
            )
    return parts


def read_utf8_text(path: Path) -> tuple[str, str]:
    """Read a file's text, and compute its sha256.

    Raises:
        RequestError: if it cannot be read, is not UTF-8, or is empty.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise RequestError(f"the text cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            "is not plain text", path=path, found=f"byte {error.start}", expected="UTF-8"
        ) from error
    if not text.strip():
        raise RequestError("the text is empty", path=path)
    return text, hashlib.sha256(raw).hexdigest()
