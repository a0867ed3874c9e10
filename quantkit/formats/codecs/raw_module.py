"""The stored tensors of one module of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.base.messages import Message
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.tensors.late import torch
from quantkit.tensors.tensor_slice import TensorSlice


class RawModule:
    """The stored tensors of one module, by suffix: what their names have after the module's."""

    def __init__(
        self, name: str, files: Mapping[str, TensorFile], path: Path, notes: list[str] | None = None
    ) -> None:
        """
        Args:
            files: the file of each tensor, by its whole name; others may be among them.
            path: of the folder, for errors.
            notes: notes on the folder, to which a codec may add.
        """
        self.name = name
        self.path = path
        self._files = files
        self._notes = notes

    def other(self, name: str) -> RawModule:
        """Open another module of the same folder."""
        return RawModule(name, self._files, self.path, self._notes)

    def note(self, text: str) -> None:
        """Add a note on the folder for the user."""
        if self._notes is not None:
            self._notes.append(Message(f"{self.path}: ", text))

    def make_damage_error(
        self, problem: str, found: object = None, expected: object = None, hint: str | None = None
    ) -> CheckpointError:
        """Return the error for tensors that are missing, or contradict each other or the
        settings.
        """
        return CheckpointError(problem, path=self.path, found=found, expected=expected, hint=hint)

    def make_unsupported_error(
        self, problem: str, found: object = None, expected: object = None, hint: str | None = None
    ) -> UnsupportedError:
        """Return the error for tensors that quantkit does not read."""
        return UnsupportedError(problem, path=self.path, found=found, expected=expected, hint=hint)

    def find(self, suffix: str) -> StoredTensor | None:
        """Look up a tensor as the header describes it; None if it is missing."""
        name = f"{self.name}.{suffix}"
        if name in self._files:
            return self._files[name].tensors[name]
        return None

    def metadata(self, suffix: str, key: str) -> str | None:
        """Look up a value of the metadata in the header of a tensor's file."""
        name = f"{self.name}.{suffix}"
        if name in self._files:
            return self._files[name].metadata.get(key)
        return None

    def read(self, suffix: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Read a tensor, or a part of it; see `TensorFile.read`."""
        name = f"{self.name}.{suffix}"
        return self._files[name].read(name, part)

    def read_bytes(self, suffix: str, part: TensorSlice | None = None) -> bytes:
        """Read the elements of a tensor, or of a part of it, in order; see
        `TensorFile.read_bytes`.
        """
        name = f"{self.name}.{suffix}"
        return self._files[name].read_bytes(name, part)

    def require(self, expected: StoredTensor, scheme: object) -> None:
        """Raise `CheckpointError` if a tensor, by its whole name, does not exist in the type and
        shape of a scheme.
        """
        tensor = None
        description = "nothing"
        if expected.name in self._files:
            tensor = self._files[expected.name].tensors[expected.name]
            description = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise self.make_damage_error(
                f"tensor '{expected.name}' does not fit scheme {scheme}",
                description,
                f"{expected.dtype} {list(expected.shape)}",
            )
