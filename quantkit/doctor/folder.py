"""What is in a model's folder or file, whoever made it: what can be read, and a list of what
cannot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import read_json, read_settings
from quantkit.doctor.side_files import CONFIG, PARAMS, SideFiles
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.files import pth_io, safetensors_io
from quantkit.files.gguf_io import GgufHeader, read_header
from quantkit.files.gguf_types import split_name, split_stem
from quantkit.files.located import require_there
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.containers.hf_files import index_path
from quantkit.formats.containers.hf_settings import SETTINGS, settings_in
from quantkit.formats.output.destination import MANIFEST
from quantkit.formats.output.staging import require_finished

_READERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": safetensors_io.open_file,
    ".bin": pth_io.open_file,
    ".pth": pth_io.open_file,
    ".pt": pth_io.open_file,
}
# Bytes of a file's name.
_MAX_NAME = 255
_NAMED = {
    "safetensors": r"model(-\d+-of-\d+)?\.safetensors",
    "bin": r"pytorch_model(-\d+-of-\d+)?\.bin",
    "meta": r"consolidated\.\d+\.pth",
    "mistral": r"consolidated(-\d+-of-\d+)?\.safetensors",
}
_ALONE = r"model.*\.(pth|pt)"  # gpt-fast's
_PART = re.compile(r"-(\d+)-of-(\d+)\.")
_MAX_FILES = 4096


class Folder(SideFiles):
    """What is at a path; only headers are read.

    Attributes:
        kind: of the weights that are checked: ``safetensors``, ``bin``, ``meta``, ``mistral`` or
            ``gguf``; ``file`` for a single file; empty if there are none.
        settings: of the quantization, wherever the folder has them; None for floats.
        index: the file of each tensor, as the index says; None if there is none that can be read.
        index_has_metadata: whether the index has the object ``metadata``.
        listed: the files of weights that belong to the model, whether or not they exist.
        stray: other files of the same kind next to them.
        others: further models there, which are not checked.
        files: files of weights that could be read.
        headers: of GGUF files that could be read.
        stored, homes: their tensors, and the file of each.
        twice: tensors that are in two files, and which.
        problems: files that could not be read, or should be there, with the error of each.
    """

    def __init__(self, path: Path) -> None:
        """A path with nothing there, or a file that holds no weights, is a `RequestError`; a
        partial folder of an interrupted run is a `CheckpointError`.
        """
        found = require_there(path)
        require_finished(found, MANIFEST)
        self.problems: list[tuple[Path, QuantkitError]] = []
        self.stray: list[Path] = []
        self.files: dict[str, TensorFile] = {}
        self.headers: dict[str, GgufHeader] = {}
        self.stored: dict[str, StoredTensor] = {}
        self.homes: dict[str, TensorFile] = {}
        self.twice: dict[str, tuple[str, str]] = {}
        self.other_models: list[Path] = []
        self.index: Mapping[str, Any] | None = None
        self.index_has_metadata = False
        root = found if found.is_dir() else found.parent
        if found.is_dir():
            names = sorted(os.listdir(root))
        else:
            names = [found.name]
        path_of_config = root / CONFIG
        config: Mapping[str, Any] = {}
        if found.is_dir() and path_of_config.is_file():
            config = self._read(lambda: read_settings(path_of_config), root)
        super().__init__(path, root, names, kind="", config=config)
        settings = self._read(lambda: settings_in(self.config, root), root).get(SETTINGS)
        self.settings: Mapping[str, Any] | None = settings if isinstance(settings, dict) else None
        self.kind, self.listed = self._find_weights(found)
        for one in self.listed[:_MAX_FILES]:
            self._open(one)

    @property
    def method(self) -> str | None:
        """``quant_method``; None if nothing says that the folder is quantized."""
        if self.settings is None:
            return None
        stated = self.settings.get("quant_method")
        if isinstance(stated, str):
            return stated
        return "unnamed"

    @property
    def complete(self) -> bool:
        """Return whether every file of weights could be read."""
        return len(self.files) + len(self.headers) == len(self.listed)

    def in_unread_file(self, name: str) -> bool:
        """Return whether a tensor may be in a file that could not be read."""
        if self.complete:
            return False
        if self.index is None:
            return True
        return str(self.index.get(name, "")) not in self.files and name in self.index

    def _read(self, read: Callable[[], Mapping[str, Any]], root: Path) -> Mapping[str, Any]:
        """Return what `read` returns; if it is damaged, nothing, and the problem is kept."""
        try:
            return read()
        except CheckpointError as error:
            self.problems.append((error.path or root, error))
            return {}

    def _find_weights(self, model_path: Path) -> tuple[str, list[Path]]:
        """Return the kind of weights that a reader would take, and their files."""
        if model_path.is_file():
            if model_path.suffix.lower() == ".gguf":
                return "gguf", self._list_gguf_parts([model_path])
            if model_path.suffix.lower() not in _READERS:
                raise RequestError(
                    "holds no weights",
                    path=self.path,
                    expected=(
                        f"a folder, or a file *.gguf, {', '.join('*' + one for one in _READERS)}"
                    ),
                )
            return "file", [model_path]
        for kind in ("safetensors", "bin"):
            if (index := index_path(self.root, kind)).is_file() and (
                listed := self._read_indexed_files(index)
            ):
                known = set(listed)
                self.stray = [
                    one
                    for one in self._matching(rf".*\.{kind}")
                    if one not in known and _is_weights(one)
                ]
                return kind, listed
            if named := self._matching(_NAMED[kind]):
                return kind, self._add_missing_parts(named)
        if PARAMS in self.names and (named := self._matching(_NAMED["meta"])):
            return "meta", named
        if gguf := self._matching(r"(?i).*\.gguf"):
            return "gguf", self._list_gguf_parts(gguf)
        if named := self._matching(_NAMED["mistral"]):
            return "mistral", self._add_missing_parts(named)
        others = [one for one in self._matching(r".*\.safetensors") if _is_weights(one)]
        if not others and (alone := self._matching(_ALONE)):
            self.other_models = alone[1:]
            return "file", alone[:1]
        if others:
            return ("safetensors", others)
        return ("", [])

    def _matching(self, pattern: str) -> list[Path]:
        return [self.root / name for name in self.names if re.fullmatch(pattern, name)]

    def _read_indexed_files(self, index: Path) -> list[Path]:
        try:
            content = read_json(index)
            mapped = content.get("weight_map")
            if not isinstance(mapped, dict) or not mapped:
                raise CheckpointError("lacks the key 'weight_map'", path=index)
        except CheckpointError as error:
            self.problems.append((index, error))
            return []
        self.index = mapped
        self.index_has_metadata = isinstance(content.get("metadata"), dict)
        inside = set()
        for name in mapped.values():
            if isinstance(name, str) and may_hold_weights(name):
                inside.add(name)
        return [self.root / name for name in sorted(inside)]

    def _add_missing_parts(self, paths: list[Path]) -> list[Path]:
        """Files by their names alone, with the parts of their set that are not there."""
        found = dict.fromkeys(paths)
        for path in paths:
            if (part := _PART.search(path.name)) is None or int(part[2]) > _MAX_FILES:
                continue
            for number in range(1, int(part[2]) + 1):
                name = _PART.sub(f"-{number:0{len(part[1])}d}-of-{part[2]}.", path.name)
                found.setdefault(path.with_name(name))
        return list(found)

    def _list_gguf_parts(self, paths: list[Path]) -> list[Path]:
        """Return the first of the models that GGUF files are, with all its parts; those of pictures
        come last.
        """
        ranked = sorted(paths, key=lambda path: ("mmproj" in path.name.lower(), path.name))
        first = ranked[0]
        stem = split_stem(first.name)
        count = _PART.search(first.name)
        if stem is None or count is None or int(count[2]) > _MAX_FILES:
            self.other_models = [path for path in ranked if path != first]
            return [first]
        parts = []
        for index in range(int(count[2])):
            parts.append(first.with_name(split_name(stem, index, int(count[2]))))
        self.other_models = [path for path in ranked if path not in parts]
        return parts

    def _open(self, path: Path) -> None:
        try:
            if self.kind == "gguf":
                self.headers[path.name] = read_header(path)
                return
            file = _READERS[path.suffix.lower()](path)
        except QuantkitError as error:
            self.problems.append((path, error))
            return
        self.files[path.name] = file
        for name, tensor in file.tensors.items():
            # Each shard holds a part of every tensor.
            if name in self.homes and self.kind != "meta":
                self.twice[name] = self.homes[name].path.name, path.name
                if self.index is not None and self.index.get(name) != path.name:
                    continue
            self.stored[name] = tensor
            self.homes[name] = file


def may_hold_weights(name: str) -> bool:
    """Return whether a name is that of a file of weights in the same folder."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    plain = not any(one in name for one in "/\\\0") and len(encoded) <= _MAX_NAME
    return plain and os.path.splitext(name)[1].lower() in _READERS


def _is_weights(path: Path) -> bool:
    """Return whether a file may hold a model's weights: neither an adapter nor a trainer's own."""
    return not path.name.startswith(
        ("adapter_", "training_args", "optimizer", "scheduler", "consolidated")
    )
