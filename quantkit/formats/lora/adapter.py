"""An adapter's folder: its settings, and its tensors by what they do to a module of the base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, NonFiniteError, UnsupportedError
from quantkit.files import pth_io, safetensors_io
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import TensorFile
from quantkit.formats.lora.adapter_config import NAME, read_config
from quantkit.tensors.dtypes import STORED_FLOATS
from quantkit.tensors.late import torch
from quantkit.tensors.tensor_slice import TensorSlice

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# PEFT wraps the base in two modules, and saves the names of parameters with both wrappers.
PREFIX = "base_model.model."
"""What the names of tensors begin with in an adapter that PEFT has saved."""
# A and B of a linear are modules with a weight; those of an embedding are parameters themselves.
# PEFT saves the magnitude of DoRA without `.weight`.
_ROLES = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "bias",
    "lora_embedding_A": "embedding_down",
    "lora_embedding_B": "embedding_up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}


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
        weights_path = _find_weights(folder)
        if weights_path is None:
            raise CheckpointError(
                "the adapter has no weights", path=folder, expected=" or ".join(_WEIGHTS)
            )
        self._file: TensorFile
        if weights_path.suffix == ".safetensors":
            self._file = safetensors_io.open_file(weights_path)
        else:
            self._file = pth_io.open_file(weights_path)
        self.file = weights_path
        self.modules: dict[str, LoraModule] = {}
        self.replaced: dict[str, str] = {}
        self._sort_tensors()

    @property
    def has_prefix(self) -> bool:
        """Return whether the names of all its tensors begin as PEFT saves them."""
        return all(key.startswith(PREFIX) for key in self._file.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Look up the shape of one of its tensors."""
        return self._file.tensors[key].shape

    def load(self, key: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Read one of its tensors, or a part of it.

        Raises:
            CheckpointError: if the file changed since it was opened.
            NonFiniteError: if it holds NaN or Inf, unless they are allowed.
        """
        # The manifest records a hash of the file, which must be that of the values merged.
        self._file.source.require_unchanged()
        tensor: torch.Tensor = self._file.read(key, part)
        if not (self._allow_nonfinite or torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"tensor '{key}' of the adapter contains NaN or Inf",
                path=self.file,
                hint=Message(Option("allow_nonfinite", value=True), " merges it anyway"),
            )
        return tensor

    def read(self, key: str) -> torch.Tensor:
        """Read one of its tensors as `load` does, and convert it to float32."""
        return self.load(key).float()

    @cached_property
    def sha256(self) -> dict[str, str]:
        """Hash its files, by name."""
        hashes: dict[str, str] = {}
        for source_file in (SourceFile(self.config.path), self._file.source):
            hashes[source_file.path.name] = source_file.sha256()
        return hashes

    def to_json(self) -> dict[str, object]:
        """Describe the adapter for the manifest."""
        return {"name": self.path.absolute().name, "weight": self.weight, "sha256": self.sha256}

    def _sort_tensors(self) -> None:
        """Group the tensors of the file into those of LoRA modules and those that replace a tensor
        of the base.
        """
        keys_by_module: dict[str, dict[str, str]] = {}
        for key, tensor in self._file.tensors.items():
            if tensor.dtype not in STORED_FLOATS:
                raise UnsupportedError(
                    f"tensor '{key}' is not stored in a float type",
                    path=self.file,
                    found=tensor.dtype,
                )
            name = key.removeprefix(PREFIX)
            suffix = _find_role_suffix(name)
            if suffix is not None:
                module_name = name.removesuffix(f".{suffix}")
                keys_by_use = keys_by_module.setdefault(module_name, {})
                use = _ROLES[suffix]
            elif "lora_" in name or ".modules_to_save." in name:
                raise UnsupportedError(
                    f"tensor '{key}' is of a kind that cannot be merged",
                    path=self.file,
                    hint=(
                        "if the state dict of a training run was saved, such as '.default.weight',"
                        " save the adapter with PEFT's `save_pretrained()`"
                    ),
                )
            else:
                keys_by_use = self.replaced
                # PEFT saves the base's tensor of a module with LoRA under `base_layer`.
                use = name.replace(".base_layer.", ".")
            # The two spellings of a magnitude, or names with and without `base_layer`, can meet.
            if use in keys_by_use:
                raise CheckpointError(
                    f"tensor '{key}' is in the adapter twice",
                    path=self.file,
                    found=f"'{keys_by_use[use]}'",
                )
            keys_by_use[use] = key
        for module_name, keys_by_role in keys_by_module.items():
            self.modules[module_name] = self._build_module(module_name, keys_by_role)
        if not self.modules and not self.replaced:
            raise CheckpointError("contains no tensors", path=self.file)

    def _build_module(self, name: str, parts: Mapping[str, str]) -> LoraModule:
        """Check that a module has all its tensors, in shapes that fit each other."""
        is_embedding = "embedding_down" in parts or "embedding_up" in parts
        start = "embedding_" if is_embedding else ""
        expected_roles = {f"{start}down", f"{start}up"}
        if self.config.dora:
            expected_roles.add("magnitude")
        present_roles = set(parts)
        # B of a linear may have a bias (`lora_bias`); B of an embedding is a bare matrix.
        if not is_embedding:
            present_roles.discard("bias")
        if present_roles != expected_roles:
            raise CheckpointError(
                f"the tensors of module '{name}' do not belong together",
                path=self.file,
                found=_list_suffixes(parts),
                expected=_list_suffixes(expected_roles),
            )
        module = LoraModule(
            name=name,
            down=parts[f"{start}down"],
            up=parts[f"{start}up"],
            bias=parts.get("bias"),
            magnitude=parts.get("magnitude"),
            is_embedding=is_embedding,
        )
        rank = self.config.rank_of(name)
        down_shape = self.shape(module.down)
        up_shape = self.shape(module.up)
        # The matrices of a convolution have more axes.
        if len(down_shape) != 2 or len(up_shape) != 2:
            raise UnsupportedError(
                f"tensor '{module.down}' does not belong to a linear layer or an embedding",
                path=self.file,
                found=f"{list(down_shape)} and {list(up_shape)}",
            )
        for key, size in ((module.down, down_shape[0]), (module.up, up_shape[1])):
            if size != rank:
                raise CheckpointError(
                    f"tensor '{key}' has a different rank than the settings",
                    path=self.file,
                    found=size,
                    expected=f"{rank}, by {NAME}",
                    hint="the two files belong to different adapters",
                )
        # Both have one value per row of B.
        output_shape = up_shape[:1]
        for vector_key in (module.bias, module.magnitude):
            if vector_key is not None and self.shape(vector_key) != output_shape:
                raise CheckpointError(
                    f"tensor '{vector_key}' has the wrong shape",
                    path=self.file,
                    found=list(self.shape(vector_key)),
                    expected=list(output_shape),
                )
        setting = self.config.targets.find_exclusion(name)
        if setting is not None:
            raise CheckpointError(
                f"module '{name}' has tensors, but '{setting}' excludes it: PEFT does not load"
                " them",
                path=self.file,
                hint="the two files belong to different adapters",
            )
        return module


def _find_weights(folder: Path) -> Path | None:
    """Find the file of an adapter's tensors; safetensors are preferred to a pickle."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    return None


def _find_role_suffix(name: str) -> str | None:
    """Find the key of `_ROLES` that a tensor's name ends with."""
    for suffix in _ROLES:
        if name.endswith(f".{suffix}"):
            return suffix
    return None


def _list_suffixes(roles: Iterable[str]) -> str:
    """List the suffixes of tensors with these roles, for a message."""
    suffix_by_role: dict[str, str] = {}
    # PEFT's own spelling of a magnitude is the first in `_ROLES`, so it must be set last.
    for suffix, role in reversed(_ROLES.items()):
        suffix_by_role[role] = suffix
    return ", ".join(sorted(suffix_by_role[role] for role in roles))
