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
from quantkit.files.gguf_types import name_part, parse_part_stem
from quantkit.files.located import locate_existing_model
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.containers.hf_files import index_path
from quantkit.formats.containers.hf_settings import SETTINGS, find_settings
from quantkit.formats.output.destination import MANIFEST
from quantkit.formats.output.staging import require_finished

_READERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": safetensors_io.open_file,
    ".bin": pth_io.open_file,
    ".pth": pth_io.open_file,
    ".pt": pth_io.open_file,
}
# Bytes of a file's name, as usual file systems allow.
_MAX_NAME = 255
_NAMED = {
    "safetensors": r"model(-\d+-of-\d+)?\.safetensors",
    "bin": r"pytorch_model(-\d+-of-\d+)?\.bin",
    "meta": r"consolidated\.\d+\.pth",
    "mistral": r"consolidated(-\d+-of-\d+)?\.safetensors",
}
# gpt-fast writes a single file of this name.
_ALONE = r"model.*\.(pth|pt)"
_PART = re.compile(r"-(\d+)-of-(\d+)\.")
# A name of a part can state any number of parts, each of which would become a path.
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
        other_models: further models there, which are not checked.
        files: files of weights that could be read.
        headers: of GGUF files that could be read.
        stored, homes: their tensors, and the file of each.
        twice: tensors that are in two files, and which.
        problems: files that could not be read, or should be there, with the error of each.
    """

    def __init__(self, path: Path) -> None:
        """Find the files of weights and read their headers.

        A path with nothing there, or a file without weights, is a `RequestError`; a partial folder
        of an interrupted run is a `CheckpointError`.
        """
        model_path = locate_existing_model(path)
        require_finished(model_path, MANIFEST)
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
        if model_path.is_dir():
            root = model_path
            names = sorted(os.listdir(root))
        else:
            # For a single file, the files next to it are ignored: they may belong to other models.
            root = model_path.parent
            names = [model_path.name]
        path_of_config = root / CONFIG
        config: Mapping[str, Any] = {}
        if model_path.is_dir() and path_of_config.is_file():
            config = self._read(lambda: read_settings(path_of_config), root)
        super().__init__(path, root, names, kind="", config=config)
        settings = self._read(lambda: find_settings(self.config, root), root).get(SETTINGS)
        self.settings: Mapping[str, Any] | None = settings if isinstance(settings, dict) else None
        self.kind, self.listed = self._find_weights(model_path)
        for weights_path in self.listed[:_MAX_FILES]:
            self._open(weights_path)

    @property
    def method(self) -> str | None:
        """Return ``quant_method``; None if nothing says that the folder is quantized."""
        if self.settings is None:
            return None
        method = self.settings.get("quant_method")
        if isinstance(method, str):
            return method
        # Some tools write settings without the name of their method.
        return "unnamed"

    @property
    def complete(self) -> bool:
        """Return whether every file of weights could be read."""
        return len(self.files) + len(self.headers) == len(self.listed)

    def in_unread_file(self, name: str) -> bool:
        """Return whether a tensor may be in a file that could not be read."""
        if self.complete:
            return False
        # Without an index, nothing says in which file a tensor should be.
        if self.index is None:
            return True
        return str(self.index.get(name, "")) not in self.files and name in self.index

    def _read(self, read: Callable[[], Mapping[str, Any]], root: Path) -> Mapping[str, Any]:
        """Call `read`; if the file is damaged, record the problem and return an empty mapping."""
        try:
            return read()
        except CheckpointError as error:
            self.problems.append((error.path or root, error))
            return {}

    def _find_weights(self, model_path: Path) -> tuple[str, list[Path]]:
        """Find the kind of weights that a reader would take, and their files."""
        if model_path.is_file():
            if model_path.suffix.lower() == ".gguf":
                return "gguf", self._list_gguf_parts([model_path])
            if model_path.suffix.lower() not in _READERS:
                patterns = ", ".join("*" + suffix for suffix in _READERS)
                raise RequestError(
                    "contains no weights",
                    path=self.path,
                    expected=f"a folder, or a file *.gguf, {patterns}",
                )
            return "file", [model_path]
        # Readers prefer safetensors to pickles, and an index to the names of files.
        for kind in ("safetensors", "bin"):
            index = index_path(self.root, kind)
            if index.is_file():
                indexed_paths = self._read_indexed_files(index)
                if indexed_paths:
                    self.stray = self._find_stray_files(kind, indexed_paths)
                    return kind, indexed_paths
            named_paths = self._matching(_NAMED[kind])
            if named_paths:
                return kind, self._add_missing_parts(named_paths)
        meta_paths = self._matching(_NAMED["meta"])
        if PARAMS in self.names and meta_paths:
            return "meta", meta_paths
        gguf_paths = self._matching(r"(?i).*\.gguf")
        if gguf_paths:
            return "gguf", self._list_gguf_parts(gguf_paths)
        mistral_paths = self._matching(_NAMED["mistral"])
        if mistral_paths:
            return "mistral", self._add_missing_parts(mistral_paths)
        # Weights under names that some readers do not find, which the rule `no-index` reports.
        unusual_paths = [path for path in self._matching(r".*\.safetensors") if _is_weights(path)]
        if unusual_paths:
            return "safetensors", unusual_paths
        gpt_fast_paths = self._matching(_ALONE)
        if gpt_fast_paths:
            self.other_models = gpt_fast_paths[1:]
            return "file", gpt_fast_paths[:1]
        return "", []

    def _find_stray_files(self, kind: str, indexed_paths: list[Path]) -> list[Path]:
        indexed = set(indexed_paths)
        stray: list[Path] = []
        for path in self._matching(rf".*\.{kind}"):
            if path not in indexed and _is_weights(path):
                stray.append(path)
        return stray

    def _matching(self, pattern: str) -> list[Path]:
        return [self.root / name for name in self.names if re.fullmatch(pattern, name)]

    def _read_indexed_files(self, index: Path) -> list[Path]:
        try:
            content = read_json(index)
            weight_map = content.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError("lacks the key 'weight_map'", path=index)
        except CheckpointError as error:
            self.problems.append((index, error))
            return []
        self.index = weight_map
        self.index_has_metadata = isinstance(content.get("metadata"), dict)
        file_names = set()
        # An index may name files outside the folder; those are reported and never opened.
        for name in weight_map.values():
            if isinstance(name, str) and may_hold_weights(name):
                file_names.add(name)
        return [self.root / name for name in sorted(file_names)]

    def _add_missing_parts(self, paths: list[Path]) -> list[Path]:
        """Add the parts that the names of files count and that are missing."""
        all_paths = dict.fromkeys(paths)
        for path in paths:
            part = _PART.search(path.name)
            if part is None or int(part[2]) > _MAX_FILES:
                continue
            for number in range(1, int(part[2]) + 1):
                name = _PART.sub(f"-{number:0{len(part[1])}d}-of-{part[2]}.", path.name)
                all_paths.setdefault(path.with_name(name))
        return list(all_paths)

    def _list_gguf_parts(self, paths: list[Path]) -> list[Path]:
        """List the parts of the first model among GGUF files, and record the other models."""
        # llama.cpp stores the encoder of images in a companion file that is no language model.
        ranked = sorted(paths, key=lambda path: ("mmproj" in path.name.lower(), path.name))
        first = ranked[0]
        stem = parse_part_stem(first.name)
        count = _PART.search(first.name)
        if stem is None or count is None or int(count[2]) > _MAX_FILES:
            self.other_models = [path for path in ranked if path != first]
            return [first]
        parts = []
        for index in range(int(count[2])):
            parts.append(first.with_name(name_part(stem, index, int(count[2]))))
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
    # A separator would lead out of the folder, and the system refuses NUL and names of more bytes.
    if any(character in name for character in "/\\\0") or len(encoded) > _MAX_NAME:
        return False
    return os.path.splitext(name)[1].lower() in _READERS


def _is_weights(path: Path) -> bool:
    """Return whether a file may hold a model's weights: neither an adapter nor a trainer's own."""
    return not path.name.startswith(
        ("adapter_", "training_args", "optimizer", "scheduler", "consolidated")
    )
