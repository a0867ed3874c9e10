"""Which GGUF files make up a model: one, or the parts that it was split into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.files.gguf_io import MAGIC, GgufHeader, read_header
from quantkit.files.gguf_types import GGUF, split_count, split_name, split_stem
from quantkit.files.source import damaged_file

_NO_MODELS = ("mmproj", "imatrix")  # names of files with a projector for images, or with statistics of activations


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == GGUF:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder: the first file of each."""
    paths = sorted(path for path in folder.glob(f"*{GGUF}") if not path.name.lower().startswith(_NO_MODELS))
    return list({split_stem(path.name) or path.name: path for path in reversed(paths)}.values())[::-1]


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at a path: the path itself, or the only model of a folder; None if there is none."""
    if path.is_dir():
        models = gguf_models(path)
        return models[0] if len(models) == 1 else None
    return path if is_gguf(path) else None


def read_parts(path: Path) -> list[GgufHeader]:
    """The headers of all files of the model that a file belongs to, in order.

    Raises:
        CheckpointError: see `read_header`; if a part is missing, or belongs to another model.
        UnsupportedError: see `read_header`.
    """
    header = read_header(path)
    if header.split is None or header.split.count == 1:
        if split_count(path.name) > 1:
            raise CheckpointError("has the name of a part of a model, and is a whole one", path=path)
        return [header]
    stem, (index, count) = split_stem(path.name), (header.split.index, header.split.count)
    if stem is None or path.name != split_name(stem, index, count):
        raise CheckpointError(
            f"is part {index + 1} of {count} of a model, and has another name", path=path,
            expected=split_name(stem or path.stem, index, count),
        )  # fmt: skip
    found = []
    for number in range(count):
        name = path.with_name(split_name(stem, number, count))
        if not name.exists():
            present = sum(path.with_name(split_name(stem, one, count)).exists() for one in range(count))
            raise damaged_file("the weight file is missing", name, f"{present} of {count} parts")
        part = header if number == index else read_header(name)
        if part.split is None or (part.split.index, part.split.count) != (number, count):
            raise CheckpointError(f"is not part {number + 1} of {count} of the model", path=name)
        found.append(part)
    _require_whole(found)
    return found


def _require_whole(parts: Iterable[GgufHeader]) -> None:
    """Refuse parts with a tensor twice, or another number of tensors than each of them states."""
    names: dict[str, Path] = {}
    for part in parts:
        for name in part.tensors:
            if name in names:
                raise CheckpointError(
                    f"tensor '{name}' is in two files", path=part.path, found=f"also in {names[name].name}"
                )
            names[name] = part.path
    for part in parts:
        if part.split is not None and part.split.tensors != len(names):
            raise CheckpointError(
                "the parts have another number of tensors than the model", path=part.path, found=len(names),
                expected=part.split.tensors, hint="a part is another model's",
            )  # fmt: skip
