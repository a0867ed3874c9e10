"""Tensors that refining has changed, as the manifest lists them: with hashes of their values
before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.output.destination import manifest_path
from quantkit.quality.figures import manifest_or_empty
from quantkit.tensors.qtensor import QuantTensor

REFINED = "refined"
"""The key of the manifest with what was refined."""


@dataclass(frozen=True)
class Change:
    """The hashes of a tensor before and after, see `tensor_hash`."""

    before: str
    after: str


def tensor_hash(value: Tensor | QuantTensor) -> str:
    """Compute the sha256 of a tensor's values: of codes, scales, and zero points or minima, or of
    floats in their type.
    """
    digest = sha256()
    if isinstance(value, QuantTensor):
        parts = [value.codes, value.scale, value.zero, value.minimum]
    else:
        parts = [value]
    for part in parts:
        if part is not None:
            # Equal bytes of another type or shape are other values.
            digest.update(f"{part.dtype} {list(part.shape)};".encode())
            # numpy lacks bfloat16, and a view of bytes copies nothing.
            digest.update(part.flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_changes(before: Checkpoint, after: Checkpoint, names: Iterable[str]) -> dict[str, Change]:
    """Hash the tensors of these names in two models, and return those that differ."""
    result: dict[str, Change] = {}
    for name in names:
        change = Change(tensor_hash(before.load(name)), tensor_hash(after.load(name)))
        if change.before != change.after:
            result[name] = change
    return result


def merge_changes(earlier: Mapping[str, Change], later: Mapping[str, Change]) -> dict[str, Change]:
    """Merge the changes of two refinements, one after the other."""
    result = dict(earlier)
    for name, change in later.items():
        if name in earlier:
            before = earlier[name].before
        else:
            before = change.before
        result[name] = Change(before, change.after)
    return result


def rehash_changes(model: Path, result: Checkpoint) -> dict[str, Change]:
    """Hash the tensors that a model's manifest lists as changed again, in the same model in another
    format.
    """
    names = set(result.names())
    results: dict[str, Change] = {}
    for name, change in read_changes(model).items():
        if name in names:
            results[name] = Change(change.before, tensor_hash(result.load(name)))
    return results


def read_changes(model: Path) -> dict[str, Change]:
    """Read the tensors that a model's manifest lists as changed by refining; none if it was not
    refined. Raises `CheckpointError` if the list has another form.
    """
    refined = manifest_or_empty(model).get(REFINED)
    if refined is None:
        return {}
    try:
        result: dict[str, Change] = {}
        for name, hashes in refined["tensors"].items():
            result[name] = Change(str(hashes["before"]), str(hashes["after"]))
        return result
    except (AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{REFINED} does not list tensors", path=manifest_path(model)
        ) from error
