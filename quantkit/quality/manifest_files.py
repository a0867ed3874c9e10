"""Compare the files of a model with the sha256 in its manifest; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.progress import Progress, silent
from quantkit.errors import CheckpointError
from quantkit.files.gguf_types import GGUF_SUFFIX, parse_part_stem
from quantkit.files.located import gguf_file
from quantkit.files.source import SourceFile
from quantkit.formats import manifest
from quantkit.formats.output.destination import manifest_path
from quantkit.formats.registry import read_names
from quantkit.text.chat_template import template_paths

_WEIGHT_FILES = {".safetensors", ".pth", ".bin", ".gguf"}
_README = "README.md"
"""Users may edit it; it is not loaded."""


def find_manifest(model: Path) -> tuple[Path, Path]:
    """Find the manifest of a model, or of the only GGUF file of a folder if that has it. Return the
    model and the path of the manifest, which may not exist.
    """
    path = manifest_path(model)
    if path.exists():
        return model, path
    file = gguf_file(model)
    if file is not None and manifest_path(file).exists():
        return file, manifest_path(file)
    return model, path


def is_loaded(name: str) -> bool:
    """Return whether readers load a file of this name, next to a model's weights, or would take it
    for one of them.
    """
    return (
        Path(name).suffix in _WEIGHT_FILES or name in read_names() or name.endswith(".index.json")
    )


def _sha256(path: Path) -> str:
    return SourceFile(path).sha256()


def _require_own(path: Path, listed: Iterable[str]) -> None:
    """Raise a `CheckpointError` if the manifest next to a file, or to the parts of a model, lists
    files with other names: those of the model before it was renamed, which may still be there.
    """
    model_name = path.name.removesuffix(f".{manifest.NAME}")
    # The manifest of a folder has no name of a model, and moves with its files.
    if model_name == path.name:
        return
    stem = model_name.removesuffix(GGUF_SUFFIX)
    for name in listed:
        if name != model_name and parse_part_stem(name) != stem:
            raise CheckpointError(
                "the manifest belongs to another file",
                path=path,
                found=name,
                expected=model_name,
                hint="rename the model back, or `quantkit convert` it to the new name",
            )


def require_as_written(
    model: Path, *, progress: Progress = silent, sha256: Callable[[Path], str] = _sha256
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare the sha256 of a model's files with its manifest, and return that with the change of
    each file that users may edit, by its name; `sha256` returns that of a file. Raises
    `CheckpointError` if there is no manifest, a file is missing or changed, or a file of weights,
    of the config or of the tokenizer was added.
    """
    model_manifest = manifest.read(model)
    listed: Mapping[str, str] = model_manifest["files"]
    _require_own(manifest_path(model), listed)
    paths: list[Path] = []
    if model.is_dir():
        paths = sorted({*model.iterdir(), *template_paths(model)})
    for path in paths:
        # quantkit writes no folders, and readers load chat templates from one.
        nested = path.parent != model
        if nested or (path.name not in listed and is_loaded(path.name)):
            raise CheckpointError(
                "the manifest does not list this file",
                path=path,
                hint="remove it, or create the model again",
            )
    edited = {}
    for index, (name, expected) in enumerate(listed.items()):
        progress("sha256", index, len(listed), "files")
        path = manifest_path(model).parent / name
        # A manifest from elsewhere must not make the command read files outside the folder.
        if Path(name).name == name and path.is_file():
            digest = sha256(path)
        else:
            digest = None
        if digest == expected:
            continue
        if name == _README:
            edited[name] = "removed" if digest is None else "edited"
        elif digest is None:
            raise CheckpointError("the manifest lists this file, but it is missing", path=path)
        else:
            raise CheckpointError(
                "the file has changed since quantkit wrote it",
                path=path,
                found=f"sha256 {digest[:12]}",
                expected=expected[:12],
                hint="copy or create it again",
            )
    return model_manifest, edited
