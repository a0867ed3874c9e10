"""An adapter's folder: its settings, and its tensors by what they do to a module of the base."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quantkit.base.arguments import as_number, as_path, is_several
from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError, NonFiniteError, RequestError, UnsupportedError
from quantkit.files import pth_io, safetensors_io
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import TensorFile
from quantkit.formats.lora.adapter_config import NAME, read_config
from quantkit.tensors.dtypes import STORED_FLOATS
from quantkit.tensors.late import torch
from quantkit.tensors.tensor_slice import TensorSlice

Requested = str | Path | Iterable[str | Path] | Mapping[str | Path, float]
"""One adapter or several: folders, each possibly with ``=WEIGHT`` after it, or weights by
folder.
"""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_ROLES = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "bias",
    "lora_embedding_A": "embedding_down",
    "lora_embedding_B": "embedding_up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_WITH_WEIGHT = re.compile(r"(?P<path>.+)=(?P<weight>[^=/]+)", re.DOTALL)


@dataclass(frozen=True)
class LoraModule:
    """The tensors that an adapter has for one module, by their names in its file.

    Attributes:
        down: A, [rank, inputs]; of an embedding [rank, tokens].
        up: B, [outputs, rank]; of an embedding [width, rank].
        bias: of B, [outputs]; None if there is none.
        magnitude: of DoRA, [outputs]; of an embedding [width]; None without DoRA.
        is_embedding: whether the module is an embedding.
    """

    name: str
    down: str
    up: str
    bias: str | None
    magnitude: str | None
    is_embedding: bool


class Adapter:
    """A LoRA adapter in a folder, read lazily.

    Attributes:
        weight: the factor of all its updates.
        modules: what it adds to modules, by their names in the base.
        replaced: the tensors of the base that it replaces, with the names of their new values.
    """

    def __init__(self, folder: Path, weight: float = 1.0, *, allow_nonfinite: bool = False) -> None:
        """Open an adapter; headers only.

        Args:
            allow_nonfinite: whether its tensors may hold NaN and Inf.

        Raises:
            CheckpointError: if files are missing or damaged, or tensors do not belong together.
            UnsupportedError: if it has settings or tensors that are not known.
        """
        self.path = folder
        self.weight = weight
        self._allow_nonfinite = allow_nonfinite
        if not (folder / NAME).is_file():
            raise CheckpointError(
                "is not a LoRA adapter", path=folder, expected=f"a folder with {NAME}"
            )
        self.config = read_config(folder)
        found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
        if found is None:
            raise CheckpointError(
                "the adapter has no weights", path=folder, expected=" or ".join(_WEIGHTS)
            )
        self._file: TensorFile = (
            safetensors_io if found.suffix == ".safetensors" else pth_io
        ).open_file(found)
        self.file = found
        self.modules: dict[str, LoraModule] = {}
        self.replaced: dict[str, str] = {}
        self._sort_tensors()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of one of its tensors."""
        return self._file.tensors[key].shape

    def load(self, key: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return one of its tensors, or a part of it.

        Raises:
            CheckpointError: if the file changed since it was opened.
            NonFiniteError: if it holds NaN or Inf, unless they are allowed.
        """
        self._file.source.require_unchanged()
        value: torch.Tensor = self._file.read(key, part)
        if not (self._allow_nonfinite or torch.isfinite(value).all()):
            raise NonFiniteError(
                f"tensor '{key}' of the adapter holds NaN or Inf",
                path=self.file,
                hint="`allow_nonfinite=True` merges it all the same",
            )
        return value

    def read(self, key: str) -> torch.Tensor:
        """Return one of its tensors in float32; otherwise as `load`."""
        return self.load(key).float()

    @cached_property
    def sha256(self) -> dict[str, str]:
        """Return the hashes of its files, by name."""
        result: dict[str, str] = {}
        for file in (SourceFile(self.config.path), self._file.source):
            result[file.path.name] = file.sha256()
        return result

    def to_json(self) -> dict[str, object]:
        """Return what the manifest records."""
        return {"name": self.path.absolute().name, "weight": self.weight, "sha256": self.sha256}

    def _sort_tensors(self) -> None:
        parts: dict[str, dict[str, str]] = {}
        for key, tensor in self._file.tensors.items():
            if tensor.dtype not in STORED_FLOATS:
                raise UnsupportedError(
                    f"tensor '{key}' is not stored as floats", path=self.file, found=tensor.dtype
                )
            name = key.removeprefix(_PREFIX)
            suffix = next((one for one in _ROLES if name.endswith(f".{one}")), None)
            if suffix is not None:
                held = parts.setdefault(name.removesuffix(f".{suffix}"), {})
                place = _ROLES[suffix]
            elif "lora_" in name or ".modules_to_save." in name:
                raise UnsupportedError(
                    f"tensor '{key}' is of a kind that is not merged",
                    path=self.file,
                    hint=(
                        "if the state dict of a training run was saved, such as '.default.weight',"
                        " save the adapter with PEFT's `save_pretrained()`"
                    ),
                )
            else:
                held = self.replaced
                place = name.replace(".base_layer.", ".")
            if place in held:
                raise CheckpointError(
                    f"tensor '{key}' is in the adapter twice",
                    path=self.file,
                    found=f"'{held[place]}'",
                )
            held[place] = key
        self.modules = {name: self._module(name, part) for name, part in parts.items()}
        if not self.modules and not self.replaced:
            raise CheckpointError("holds no tensors", path=self.file)

    def _module(self, name: str, parts: Mapping[str, str]) -> LoraModule:
        """Check that a module has all its tensors, in shapes that fit each other."""
        is_embedding = "embedding_down" in parts or "embedding_up" in parts
        start = "embedding_" if is_embedding else ""
        expected = {f"{start}down", f"{start}up"} | ({"magnitude"} if self.config.dora else set())
        found = set(parts) - (set() if is_embedding else {"bias"})
        if found != expected:
            spelled = {role: suffix for suffix, role in reversed(_ROLES.items())}
            raise CheckpointError(
                f"the tensors of module '{name}' do not belong together",
                path=self.file,
                found=", ".join(sorted(spelled[part] for part in parts)),
                expected=", ".join(sorted(spelled[one] for one in expected)),
            )
        module = LoraModule(
            name,
            parts[f"{start}down"],
            parts[f"{start}up"],
            parts.get("bias"),
            parts.get("magnitude"),
            is_embedding,
        )
        rank = self.config.rank_of(name)
        (down, up) = (self.shape(module.down), self.shape(module.up))
        if len(down) != 2 or len(up) != 2:
            raise UnsupportedError(
                f"tensor '{module.down}' is not of a linear or an embedding",
                path=self.file,
                found=f"{list(down)} and {list(up)}",
            )
        for key, size in ((module.down, down[0]), (module.up, up[1])):
            if size != rank:
                raise CheckpointError(
                    f"tensor '{key}' has another rank than the settings",
                    path=self.file,
                    found=size,
                    expected=f"{rank}, by {NAME}",
                    hint="the two files are of different adapters",
                )
        for one in (module.bias, module.magnitude):
            if one is not None and self.shape(one) != up[:1]:
                raise CheckpointError(
                    f"tensor '{one}' has the wrong shape",
                    path=self.file,
                    found=list(self.shape(one)),
                    expected=list(up[:1]),
                )
        if (setting := self.config.targets.find_exclusion(name)) is not None:
            raise CheckpointError(
                f"module '{name}' has tensors, and '{setting}' excludes it: PEFT does not load"
                " them",
                path=self.file,
                hint="the two files are of different adapters",
            )
        return module


def parse_adapters(lora: Requested) -> list[tuple[Path, float]]:
    """Return the folders of adapters and their weights.

    Raises:
        RequestError: for a value of another type, a weight that is not finite, or an adapter that
            is named twice.
    """
    if isinstance(lora, Mapping):
        result = [
            (as_path("lora", path), as_number("lora", weight)) for path, weight in lora.items()
        ]
    else:
        several = lora if is_several(lora) and not isinstance(lora, (str, Path)) else [lora]
        result = [_with_weight(as_path("lora", one)) for one in several]
    folders = [path.absolute() for path, _ in result]
    for path, weight in result:
        if not math.isfinite(weight):
            raise RequestError("the weight of an adapter is not finite", path=path, found=weight)
        if folders.count(path.absolute()) > 1:
            raise RequestError("`lora` names an adapter twice", found=path)
    return result


def adapter_words(lora: Requested) -> tuple[str, ...]:
    """Requested adapters as the command line spells them.

    Raises `RequestError` as `parse_adapters` does.
    """
    return tuple(
        str(path) if weight == 1 else f"{path}={weight}" for path, weight in parse_adapters(lora)
    )


def _with_weight(path: Path) -> tuple[Path, float]:
    """Return an adapter, and the weight after its path: ``PATH=0.5``; 1 if there is none."""
    match = _WITH_WEIGHT.fullmatch(str(path))
    if match is None or path.exists():
        return path, 1.0
    try:
        return Path(match["path"]), float(match["weight"])
    except ValueError:
        raise RequestError(
            "no weight of an adapter",
            found=format_value(match["weight"]),
            expected="PATH=NUMBER, such as adapter=0.5",
        ) from None
