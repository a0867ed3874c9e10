"""The files of weights in a Hugging Face folder: those that an index lists, or parts by their
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.names import is_derived_buffer
from quantkit.base.json_values import read_json
from quantkit.base.late import LateModule
from quantkit.errors import CheckpointError
from quantkit.files import safetensors_io
from quantkit.files.source import SourceFile, make_damaged_file_error
from quantkit.files.tensor_file import StoredTensor, TensorFile, same_tensor

if TYPE_CHECKING:
    from quantkit.files import pth_io
else:
    pth_io = LateModule("quantkit.files.pth_io")

_STEMS = {"safetensors": "model", "bin": "pytorch_model"}


def weight_kinds(folder: Path) -> list[str]:
    """Find the sets of Hugging Face weights in a folder: safetensors, bin, both or none."""
    kinds: list[str] = []
    for kind in _STEMS:
        if index_path(folder, kind).is_file() or _find_weight_files(folder, kind):
            kinds.append(kind)
    return kinds


@dataclass
class Headers:
    """The tensors of the files of weights, from their headers.

    Attributes:
        tensors, files: by the name of a tensor; its file.
        settings: the index, if there is one.
        notes: what was ignored.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, TensorFile] = field(default_factory=dict)
    settings: list[SourceFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_headers(folder: Path, kind: str, *, derived: bool) -> Headers:
    """Open all files of weights.

    Args:
        kind: of the files: "safetensors", "bin" or the like.
        derived: whether to include buffers that the config determines.

    Raises:
        CheckpointError: if files are missing or damaged, or contradict the index.
    """
    headers = Headers()
    index = index_path(folder, kind)
    if index.is_file():
        weight_map = _read_weight_map(index)
        headers.settings.append(SourceFile(index))
        paths = sorted({folder / file for file in weight_map.values()})
    else:
        weight_map = None
        paths = _find_weight_files(folder, kind)
        _require_all_parts(paths)
    # Compared at the end, when all files that the index names are open.
    copies: list[tuple[str, TensorFile]] = []
    for path in paths:
        if kind == "safetensors":
            file = safetensors_io.open_file(path)
        else:
            file = pth_io.open_file(path)
        headers.notes += file.notes
        for name, tensor in file.tensors.items():
            if weight_map is not None and weight_map.get(name, path.name) != path.name:
                if derived or not is_derived_buffer(name):
                    copies.append((name, file))
                continue
            # An index need not list rotary tables, which no reader needs.
            if weight_map is not None and name not in weight_map:
                if derived or not is_derived_buffer(name):
                    raise _make_stale_index_error(index, name, path, "nothing")
                continue
            if name in headers.tensors:
                other_file = f"also in {headers.files[name].path.name}"
                raise CheckpointError(
                    f"tensor '{name}' is in two files", path=path, found=other_file
                )
            headers.tensors[name] = tensor
            headers.files[name] = file
    headers.notes += _check_copies(copies, headers.files, index)
    for name, file_name in (weight_map or {}).items():
        if name not in headers.tensors:
            expected = f"as {index.name} says"
            hint = "the index is stale or the shard belongs to another model"
            raise CheckpointError(
                f"lacks tensor '{name}'", path=folder / file_name, expected=expected, hint=hint
            )
    opened_names = {path.name for path in paths}
    stray_names = []
    for path in _find_weight_files(folder, kind):
        if path.name not in opened_names:
            stray_names.append(path.name)
    if stray_names:
        headers.notes.append(f"{folder}: {', '.join(stray_names)} not in the index; ignored")
        _require_same_weights(folder / f"{_STEMS[kind]}.{kind}", kind, headers, index)
    # Removed last, since an index may list them.
    if not derived:
        for name in list(headers.tensors):
            if is_derived_buffer(name):
                del headers.tensors[name]
                del headers.files[name]
    if not headers.tensors:
        raise CheckpointError("contains no tensors", path=folder)
    return headers


def _check_copies(
    copies: Sequence[tuple[str, TensorFile]], files: Mapping[str, TensorFile], index: Path
) -> list[str]:
    """Compare tensors that are in two files with those that the index names; return notes for the
    user.

    transformers takes the tensor of the last file, other readers that of the index, so that both
    must be equal.

    Raises:
        CheckpointError: if two differ, or the file that the index names lacks the tensor.
    """
    for name, file in copies:
        listed_file = files.get(name)
        if listed_file is None or name not in listed_file.tensors:
            raise _make_stale_index_error(index, name, file.path, "another file")
        if not same_tensor(listed_file, name, file, name):
            raise CheckpointError(
                f"tensor '{name}' differs from that of {listed_file.path.name},"
                " which the index names",
                path=file.path,
                hint="readers differ in which of them they load: remove the wrong one",
            )
    if not copies:
        return []
    name, file = copies[0]
    return [
        f"{file.path}: {len(copies)} tensors are equal copies of tensors in other files; ignored:"
        f" {name}"
    ]


def _require_same_weights(single: Path, kind: str, headers: Headers, index: Path) -> None:
    """Compare a single file of weights, which the index does not list, with the shards.

    transformers loads ``model.safetensors`` before it looks for an index; vLLM and quantkit load
    what the index lists.

    Raises:
        CheckpointError: if the single file has another value of a tensor.
    """
    if not single.is_file():
        return
    try:
        if kind == "safetensors":
            file = safetensors_io.open_file(single)
        else:
            file = pth_io.open_file(single)
    except CheckpointError:
        # An interrupted download, which no reader loads.
        return
    for name in file.tensors:
        home = headers.files.get(name)
        if home is not None and not same_tensor(home, name, file, name):
            raise CheckpointError(
                f"tensor '{name}' differs from that of {home.path.name}, which {index.name} names",
                path=single,
                hint=(
                    "transformers loads this file, other readers those of the index: remove the"
                    " wrong ones"
                ),
            )


def _make_stale_index_error(index: Path, name: str, path: Path, home: str) -> CheckpointError:
    problem = f"the index does not list tensor '{name}' in {path.name}"
    return CheckpointError(
        problem, path=index, found=home, hint="the index is stale; download it again"
    )


def index_path(folder: Path, kind: str) -> Path:
    """Return the path of the index of a sharded set of weights."""
    return folder / f"{_STEMS[kind]}.{kind}.index.json"


def _find_weight_files(folder: Path, kind: str) -> list[Path]:
    """Find weight files by name: a single one, or parts ``-00001-of-00002``."""
    pattern = re.compile(rf"{_STEMS[kind]}(-\d+-of-\d+)?\.{kind}")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _require_all_parts(paths: list[Path]) -> None:
    """Check that without an index all parts exist and belong to one set."""
    # As text, since the number of digits belongs to the names of the parts.
    totals = set()
    single_files = []
    for path in paths:
        match = re.search(r"-of-(\d+)\.", path.name)
        if match is not None:
            totals.add(match[1])
        if "-of-" not in path.name:
            single_files.append(path)
    if len(totals) + len(single_files) > 1:
        problem = "several sets of weights and no index to say which"
        file_names = ", ".join(path.name for path in paths)
        raise CheckpointError(
            problem, path=paths[0].parent, found=file_names, hint="move the stray files away"
        )
    for total in totals:
        present_names = {path.name for path in paths}
        for number in range(1, int(total) + 1):
            name = re.sub(r"-\d+-of-", f"-{number:0{len(total)}d}-of-", paths[0].name)
            if name not in present_names:
                count = f"{len(present_names)} of {int(total)} parts"
                raise make_damaged_file_error(
                    "the weight file is missing", paths[0].with_name(name), count
                )


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("lacks the key 'weight_map'", path=index)
    # Whoever made the folder chose these names, which must not lead out of it.
    for name, file in weight_map.items():
        if not _is_plain_file_name(file):
            problem = f"puts tensor '{name}' outside the folder"
            raise CheckpointError(
                problem, path=index, found=repr(file), expected="a plain file name"
            )
    return weight_map


def _is_plain_file_name(file: object) -> bool:
    """Return whether a value names a file in the same folder, on any system."""
    if not isinstance(file, str) or file in ("", ".", ".."):
        return False
    return Path(file).name == file and "\\" not in file
