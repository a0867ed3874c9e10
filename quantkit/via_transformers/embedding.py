"""The embedding of a model that transformers runs: whether it is one matrix that may be
quantized, and the head too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.opaque import may_be_linear
from quantkit.architectures.names import EMBEDDING
from quantkit.errors import RequestError
from quantkit.via_transformers.lazy_model import LazyModel

_STORED = f"{EMBEDDING}.weight"


def with_embedding(config: ModelConfig, lazy: LazyModel, path: Path) -> ModelConfig:
    """Return a model known by its tensors, in which the embedding has its role, so that it may get
    a scheme.

    Args:
        lazy: the model.
        path: of the folder, for errors.

    Raises:
        RequestError: unless the embedding is one matrix of floats with the name `EMBEDDING` on
            disk, of which no copy is stored.
    """
    assert config.tensors is not None
    if (reason := _unfit(config, lazy)) is not None:
        raise RequestError(
            "the embedding of this model keeps its floats",
            path=path,
            found=reason,
            expected=f"one matrix, '{_STORED}'",
            hint="leave `embedding` out",
        )
    tensors = (
        replace(tensor, role="embedding") if tensor.name == _STORED else tensor
        for tensor in config.tensors
    )
    return replace(config, tensors=tuple(tensors))


def has_tied_head(lazy: LazyModel) -> bool:
    """Return whether the embedding is the output head too."""
    head = lazy.model.get_output_embeddings()
    names = set()
    for name, one in lazy.model.named_modules():
        if head is not None and one is head:
            names.add(name)
    found = lazy.embedding
    return found is not None and not names.isdisjoint(
        name.rpartition(".")[0] for name in _names(lazy, found[0])
    )


def _names(lazy: LazyModel, module: str) -> list[str]:
    """Return the parameters that are one with the weight of an embedding."""
    name = f"{module}.weight"
    if name in dict(lazy.model.named_parameters(remove_duplicate=False)):
        return lazy.same_as(name)
    return []


def _unfit(config: ModelConfig, lazy: LazyModel) -> str | None:
    """Why an embedding cannot be quantized, in words; None if it can."""
    found = lazy.embedding
    if found is None or not isinstance(found[1], nn.Embedding):
        return "none that looks up the rows of a matrix"
    names = _names(lazy, found[0])
    stored = {}
    for name, (target, merged) in lazy.targets.items():
        if target in names:
            stored[name] = merged
    if not stored or any(merged is not None for merged in stored.values()):
        return "one that is made of other tensors"
    if len(stored) > 1:
        return f"{' and '.join(stored)}, which are one in the model"
    if _STORED not in stored:
        return f"'{next(iter(stored))}'"
    tensor = next(one for one in config.tensors or () if one.name == _STORED)
    if may_be_linear(tensor):
        return None
    return f"values in {tensor.dtype}"
