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
from quantkit.quality.gate import Gate
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
    """Return the file of a delta.

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
                apart = (new.codes.to(torch.int16) - old.codes).to(torch.int8)
                tensors[name + CODES] = torch.frombuffer(
                    bytearray(zlib.compress(apart.numpy().data)), dtype=torch.uint8
                )
        else:
            assert isinstance(new, Tensor)
            tensors[name] = new.contiguous()
    stated = {
        "base": dict(base),
        "changed": {name: [one.before, one.after] for name, one in changed.items()},
    }
    head = json.dumps({**stated, "details": details}, sort_keys=True)
    metadata = {"format": FORMAT, "head": head, "sha256": _check(head, tensors)}
    # safetensors' own `save` writes the keys of the metadata in another order in each process.
    listed = [
        StoredTensor(name, DType.of(tensors[name].dtype), tuple(tensors[name].shape))
        for name in sorted(tensors)
    ]
    data = [tensor_bytes(tensors[tensor.name], tensor) for tensor in listed]
    return b"".join([build_header(listed, metadata), *data])


class Delta:
    """An opened delta.

    Attributes:
        base: the sha256 of the files of the model that it belongs to, by name.
        changed: hashes by tensor.
        details: how it was made.
        curve: the KL as it fell.
        check: the hash of the delta.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` if the file is no delta, or damaged."""
        self.path = path
        if path.is_dir():
            raise CheckpointError(
                "is a folder, not a delta", path=path, expected="a file that `refine` wrote"
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
            # Backticks would be names of options.
            reason = str(error).replace("`", "'")
            raise CheckpointError(f"is no delta: {reason}", path=path, hint=_DAMAGED) from error
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                "is no delta", path=path, found=metadata.get("format"), expected=FORMAT
            )
        head = metadata.get("head", "")
        self.check = _check(head, self.tensors)
        if metadata.get("sha256") != self.check:
            raise CheckpointError("is not as it was written", path=path, hint=_DAMAGED)
        try:
            stated = json.loads(head)
            self.base = {str(name): str(digest) for name, digest in stated["base"].items()}
            self.changed = {
                str(name): Change(*map(str, hashes)) for name, hashes in stated["changed"].items()
            }
            self.curve = [_evaluation(one) for one in stated["details"][REFINED]["curve"]]
            recorded = stated["details"]["quality"]
            _ = dict(stated["details"]["modules"])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                "does not state what it changes", path=path, hint=_DAMAGED
            ) from error
        self.details: dict[str, Any] = stated["details"]
        _ = Gate.from_json(recorded, path)
        if not self.curve:
            raise CheckpointError("states no KL", path=path, hint=_DAMAGED)

    def require_fits(self, model: Checkpoint) -> None:
        """Raise `CheckpointError` unless it changes tensors of a model alone, each from the
        values that it has.
        """
        parts = {
            name
            for changed in self.changed
            for name in (changed, *(changed + end for end in _ENDS))
        }
        strange = [*(self.changed.keys() - set(model.names())), *(self.tensors.keys() - parts)]
        if strange:
            raise CheckpointError(
                f"changes '{strange[0]}', which is no tensor of the model", path=self.path
            )
        for name, change in self.changed.items():
            if tensor_hash(model.load(name)) != change.before:
                raise CheckpointError(
                    f"belongs to another '{name}' than the model has", path=self.path
                )

    def require_base(self, hashes: Mapping[str, str], model: Path) -> None:
        """Raise `CheckpointError` unless these are the hashes of the model that it belongs to."""
        if hashes == self.base:
            return
        differing = sorted(
            name for name in {*hashes, *self.base} if hashes.get(name) != self.base.get(name)
        )
        if differing[0] in hashes:
            other = "another"
        else:
            other = "no"
        raise CheckpointError(
            f"the delta {self.path} belongs to another model, or one of its files has changed",
            path=model,
            found=f"{other} '{differing[0]}'",
            expected=f"sha256 {self.base.get(differing[0], 'of no such file')}",
            hint="apply it to the model that it was made for",
        )


class DeltaCheckpoint(CheckpointView):
    """A quantized model with a delta applied."""

    def __init__(self, quantized: Checkpoint, delta: Delta) -> None:
        super().__init__(quantized)
        self._delta = delta

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        """Raises `CheckpointError` if the result is not what the delta's maker had."""
        change = self._delta.changed.get(name)
        if change is None:
            return self._source.load(name, part)
        value = self._source.load(name)
        try:
            result = self._apply_delta(name, value)
        except (KeyError, RuntimeError, ValueError, zlib.error) as error:
            raise self._make_damage_error(name) from error
        if tensor_hash(result) != change.after:
            raise self._make_damage_error(name)
        if part is None:
            return result
        return part.of_weight(result)

    def _apply_delta(self, name: str, value: Tensor | QuantTensor) -> Tensor | QuantTensor:
        """Return a tensor as the delta changes it.

        Raises `KeyError`, `ValueError` or `zlib.error` if it does not fit.
        """
        tensors = self._delta.tensors
        if not isinstance(value, QuantTensor):
            result: Tensor = tensors[name]
            if (result.shape, result.dtype) != (value.shape, value.dtype):
                raise ValueError("another shape or type")
            return result
        scale = tensors[name + SCALE]
        if value.minimum is None:
            minimum = None
        else:
            minimum = tensors[name + MINIMUM]
        if scale.dtype != value.scale.dtype:
            raise ValueError("another type of scales")
        value = replace(value, scale=scale, minimum=minimum)
        if (packed := tensors.get(name + CODES)) is None:
            return value
        size = value.codes.numel()
        # Not what a bomb would give.
        data = zlib.decompressobj().decompress(packed.numpy().data, size + 1)
        apart = torch.frombuffer(bytearray(data), dtype=torch.int8).view(value.shape)
        codes = value.codes.to(torch.int16) + apart
        if codes.min() < 0 or codes.max() >= value.scheme.levels:
            raise ValueError("codes out of range")
        return replace(value, codes=codes.to(torch.uint8))

    def _make_damage_error(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"does not give tensor '{name}'", path=self._delta.path, hint=_DAMAGED
        )


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    """Return an entry of the curve. Raises `ValueError` if a figure is out of range."""
    one = Evaluation(int(entry["step"]), float(entry["held_back"]))
    if not (one.held_back > 0 and math.isfinite(one.held_back)):
        raise ValueError("a KL is positive")
    return one


def _check(head: str, tensors: Mapping[str, Tensor]) -> str:
    found = sha256(head.encode())
    for name in sorted(tensors):
        found.update(f"{name} {tensor_hash(tensors[name])};".encode())
    return found.hexdigest()
