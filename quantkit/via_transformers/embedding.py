"""The embedding of a model that transformers runs: whether it is one matrix that may be
quantized, and whether it is also the head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from quantkit.architectures.config import ModelConfig, OpaqueTensor
from quantkit.architectures.families.opaque import may_be_linear
from quantkit.architectures.names import EMBEDDING
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.via_transformers.lazy_model import LazyModel

_STORED = f"{EMBEDDING}.weight"


def with_embedding(config: ModelConfig, lazy: LazyModel, path: Path) -> ModelConfig:
    """Set the role of the embedding in the config of a model known by its tensors, so that it may
    get a scheme.

    Args:
        lazy: the model.
        path: of the folder, for errors.

    Raises:
        RequestError: unless the embedding is one matrix of floats with the name `EMBEDDING` on
            disk, of which no copy is stored.
    """
    assert config.tensors is not None
    reason = _unfit(config, lazy)
    if reason is not None:
        raise RequestError(
            "the embedding of this model cannot be quantized",
            path=path,
            found=reason,
            expected=f"one matrix, '{_STORED}'",
            hint=Message("leave ", Option("embedding"), " out"),
        )
    tensors: list[OpaqueTensor] = []
    for tensor in config.tensors:
        if tensor.name == _STORED:
            tensor = replace(tensor, role="embedding")
        tensors.append(tensor)
    return replace(config, tensors=tuple(tensors))


def has_tied_head(lazy: LazyModel) -> bool:
    """Check that the embedding is also the output head."""
    head = lazy.model.get_output_embeddings()
    embedding = lazy.embedding
    if head is None or embedding is None:
        return False
    # The weights are compared, because head and embedding are different modules.
    for name in _names(lazy, embedding[0]):
        if lazy.model.get_submodule(name.rpartition(".")[0]) is head:
            return True
    return False


def _names(lazy: LazyModel, module: str) -> list[str]:
    """List the parameters that are tied to the weight of an embedding, itself among them."""
    name = f"{module}.weight"
    if name in dict(lazy.model.named_parameters(remove_duplicate=False)):
        return lazy.same_as(name)
    return []


def _unfit(config: ModelConfig, lazy: LazyModel) -> str | None:
    """Explain why an embedding cannot be quantized; None if it can."""
    embedding = lazy.embedding
    if embedding is None or not isinstance(embedding[1], nn.Embedding):
        return "none that looks up the rows of a matrix"
    parameter_names = _names(lazy, embedding[0])
    stored: dict[str, str | None] = {}
    for name, (target, pattern) in lazy.targets.items():
        if target in parameter_names:
            stored[name] = pattern
    # A pattern means that the loader merges or splits the tensor.
    if not stored or any(pattern is not None for pattern in stored.values()):
        return "one that is made of other tensors"
    # A stored copy would keep the float values after the embedding is rounded.
    if len(stored) > 1:
        return f"{' and '.join(stored)}, which are one in the model"
    if _STORED not in stored:
        return f"'{next(iter(stored))}'"
    tensor = next(tensor for tensor in config.tensors or () if tensor.name == _STORED)
    if may_be_linear(tensor):
        return None
    return f"values in {tensor.dtype}"
