"""A delta: the tensors that refining has changed, in one file that belongs to one quantized model.

A safetensors file. For each changed weight it has ``NAME.scale``, its scales [O, G] in their type,
``NAME.minimum`` likewise if it has minima, and ``NAME.codes`` if codes were trained: the bytes of
zlib for the differences of all codes, int8 [O, I]. A norm has its values under its own name. The
metadata has the sha256 of the files of the model that it belongs to, the hashes of each tensor
before and after, and a hash of the delta itself.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.files.safetensors_io import build_header
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.formats.container import tensor_bytes
from quantkit.quality.changed_tensors import REFINED, Change, tensor_hash
from quantkit.quality.gate_result import Gate
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.training import Evaluation

FORMAT = "quantkit delta 1"
SCALE = ".scale"
MINIMUM = ".minimum"
CODES = ".codes"
_ENDS = (SCALE, MINIMUM, CODES)
_DAMAGED = "the file is damaged; download it again"


def delta_bytes(
    before: Checkpoint,
    after: Checkpoint,
    changed: Mapping[str, Change],
    base: Mapping[str, str],
    details: Mapping[str, Any],
) -> bytes:
    """Write the file of a delta.

    Args:
        changed: the tensors that differ.
        base: the sha256 of the files of `before`, by name.
        details: how it was made, JSON.
    """
    tensors: dict[str, Tensor] = {}
    for name in changed:
        old = before.load(name)
        new = after.load(name)
        if isinstance(old, QuantTensor) and isinstance(new, QuantTensor):
            tensors[name + SCALE] = new.scale.contiguous()
            if new.minimum is not None:
                tensors[name + MINIMUM] = new.minimum.contiguous()
            if not torch.equal(old.codes, new.codes):
                # Most codes stay the same, so differences compress better than codes. Codes are
                # uint8, whose subtraction would wrap; training moves a code by few steps.
                differences = (new.codes.to(torch.int16) - old.codes).to(torch.int8)
                compressed = zlib.compress(differences.numpy().data)
                # `frombuffer` warns of a buffer that is not writable.
                tensors[name + CODES] = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
        else:
            assert isinstance(new, Tensor)
            tensors[name] = new.contiguous()
    hashes: dict[str, list[str]] = {}
    for name, change in changed.items():
        hashes[name] = [change.before, change.after]
    head_fields = {"base": dict(base), "changed": hashes, "details": details}
    head = json.dumps(head_fields, sort_keys=True)
    metadata = {"format": FORMAT, "head": head, "sha256": _check(head, tensors)}
    # safetensors' own `save` writes the keys of the metadata in another order in each process.
    stored_tensors: list[StoredTensor] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        stored_tensors.append(StoredTensor(name, DType.of(tensor.dtype), tuple(tensor.shape)))
    data = [tensor_bytes(tensors[stored.name], stored) for stored in stored_tensors]
    return b"".join([build_header(stored_tensors, metadata), *data])


class Delta:
    """An opened delta.

    Attributes:
        base: the sha256 of the files of the model that it belongs to, by name.
        changed: hashes by tensor.
        details: how it was made.
        curve: the evaluations of the training.
        check: the hash of the delta.
    """

    def __init__(self, path: Path) -> None:
        """Open a delta. Raises `CheckpointError` if the file is no delta, or damaged."""
        self.path = path
        if path.is_dir():
            raise CheckpointError(
                "is a folder, not a delta",
                path=path,
                expected="a file that refine wrote",
            )
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise CheckpointError(
                f"cannot be read: {error.strerror or 'no such file'}", path=path
            ) from error
        except SafetensorError as error:
            # In quantkit's errors, backticks mark the names of options.
            reason = str(error).replace("`", "'")
            raise CheckpointError(f"is not a delta: {reason}", path=path, hint=_DAMAGED) from error
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                "is not a delta", path=path, found=metadata.get("format"), expected=FORMAT
            )
        head = metadata.get("head", "")
        self.check = _check(head, self.tensors)
        if metadata.get("sha256") != self.check:
            raise CheckpointError("has changed since it was written", path=path, hint=_DAMAGED)
        # The hash shows that the file is complete, not that a version of quantkit wrote it, so the
        # types of its fields are checked too.
        try:
            head_fields = json.loads(head)
            self.base: dict[str, str] = {}
            for name, digest in head_fields["base"].items():
                self.base[str(name)] = str(digest)
            self.changed: dict[str, Change] = {}
            for name, hashes in head_fields["changed"].items():
                self.changed[str(name)] = Change(*map(str, hashes))
            curve_entries = head_fields["details"][REFINED]["curve"]
            self.curve = [_evaluation(entry) for entry in curve_entries]
            recorded = head_fields["details"]["quality"]
            _ = dict(head_fields["details"]["modules"])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                "does not state what it changes", path=path, hint=_DAMAGED
            ) from error
        self.details: dict[str, Any] = head_fields["details"]
        # Raises its own error if the recorded gate is not valid.
        _ = Gate.from_json(recorded, path)
        if not self.curve:
            raise CheckpointError("does not state a KL", path=path, hint=_DAMAGED)

    def require_fits(self, model: Checkpoint) -> None:
        """Raise `CheckpointError` unless the delta changes only tensors of a model, each from the
        values that the model has.
        """
        expected_tensors: set[str] = set()
        for changed_name in self.changed:
            expected_tensors.add(changed_name)
            expected_tensors.update(changed_name + end for end in _ENDS)
        unknown = [
            *(self.changed.keys() - set(model.names())),
            *(self.tensors.keys() - expected_tensors),
        ]
        if unknown:
            raise CheckpointError(
                f"changes '{unknown[0]}', which is not a tensor of the model", path=self.path
            )
        for name, change in self.changed.items():
            if tensor_hash(model.load(name)) != change.before:
                raise CheckpointError(
                    f"was made for a different '{name}' than the model's", path=self.path
                )

    def require_base(self, hashes: Mapping[str, str], model: Path) -> None:
        """Raise `CheckpointError` unless these are the hashes of the model that the delta belongs
        to.
        """
        if hashes == self.base:
            return
        # Sorted, so that the error names the same file each time.
        differing: list[str] = []
        for name in sorted({*hashes, *self.base}):
            if hashes.get(name) != self.base.get(name):
                differing.append(name)
        first = differing[0]
        other = "another" if first in hashes else "no"
        raise CheckpointError(
            f"the delta {self.path} was made for another model, or one of its files has changed",
            path=model,
            found=f"{other} '{first}'",
            expected=f"sha256 {self.base.get(first, 'of no such file')}",
            hint="apply it to the model that it was made for",
        )


class DeltaCheckpoint(CheckpointView):
    """A quantized model with a delta applied."""

    def __init__(self, quantized: Checkpoint, delta: Delta) -> None:
        super().__init__(quantized)
        self._delta = delta

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        """Load a tensor, changed by the delta. Raises `CheckpointError` if the result is not the
        tensor that was written into the delta.
        """
        change = self._delta.changed.get(name)
        if change is None:
            return self._source.load(name, part)
        # All of the tensor, because hashes and differences of codes are of complete tensors.
        value = self._source.load(name)
        try:
            tensor = self._apply_delta(name, value)
        except (KeyError, RuntimeError, ValueError, zlib.error) as error:
            raise self._make_damage_error(name) from error
        if tensor_hash(tensor) != change.after:
            raise self._make_damage_error(name)
        if part is None:
            return tensor
        return part.of_weight(tensor)

    def _apply_delta(self, name: str, value: Tensor | QuantTensor) -> Tensor | QuantTensor:
        """Apply the delta to a tensor.

        Raises `KeyError`, `ValueError` or `zlib.error` if the delta does not fit.
        """
        tensors = self._delta.tensors
        if not isinstance(value, QuantTensor):
            norm: Tensor = tensors[name]
            if (norm.shape, norm.dtype) != (value.shape, value.dtype):
                raise ValueError("different shape or dtype")
            return norm
        scale = tensors[name + SCALE]
        if value.minimum is None:
            minimum = None
        else:
            minimum = tensors[name + MINIMUM]
        if scale.dtype != value.scale.dtype:
            raise ValueError("different scale dtype")
        value = replace(value, scale=scale, minimum=minimum)
        compressed = tensors.get(name + CODES)
        if compressed is None:
            return value
        size = value.codes.numel()
        # At most one byte more than the codes, so that a small file cannot fill the memory; with
        # that byte, `view` fails.
        data = zlib.decompressobj().decompress(compressed.numpy().data, size + 1)
        differences = torch.frombuffer(bytearray(data), dtype=torch.int8).view(value.shape)
        # int16 contains every sum of a uint8 and an int8.
        codes = value.codes.to(torch.int16) + differences
        if codes.min() < 0 or codes.max() >= value.scheme.levels:
            raise ValueError("quantized weights out of range")
        return replace(value, codes=codes.to(torch.uint8))

    def _make_damage_error(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"does not yield the recorded tensor '{name}'", path=self._delta.path, hint=_DAMAGED
        )


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    """Read an entry of the curve. Raises `ValueError` if a figure is out of range."""
    evaluation = Evaluation(int(entry["step"]), float(entry["held_back"]))
    if not (evaluation.held_back > 0 and math.isfinite(evaluation.held_back)):
        raise ValueError("a KL must be positive")
    return evaluation


def _check(head: str, tensors: Mapping[str, Tensor]) -> str:
    # The metadata contains this hash, so it covers the head and the tensors, not the file.
    digest = sha256(head.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensor_hash(tensors[name])};".encode())
    return digest.hexdigest()
