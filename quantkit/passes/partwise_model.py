"""What a model offers so that samples can pass through it part by part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.passes.site import Visitor


class PartwiseModel(Protocol):
    """A model whose parameters are on the meta device, except those of parts that are loaded.

    A *part* is an element of an outermost list of modules, such as a decoder block, or any other
    module with parameters.

    Attributes:
        model: the model; its `forward` takes ``input_ids`` and ``use_cache``.
        loaded: the parts whose weights are in memory.
        device: where the weights are loaded to, and the model computes.
        is_repeatable: whether its blocks are known to do the same when they are called again with
            the same inputs; otherwise passes that call them again compare the outputs.
    """

    model: Any
    is_repeatable: bool
    device: torch.device
    loaded: set[str]

    @property
    def parts(self) -> list[str]:
        """List the names of all parts."""
        ...

    @property
    def first_parts(self) -> list[str]:
        """Find the parts that tokens enter first."""
        ...

    @property
    def resident_parts(self) -> set[str]:
        """Find the parts that stay loaded for a complete pass."""
        ...

    @property
    def body(self) -> nn.Module:
        """Find the model without its head."""
        ...

    def part_of(self, module: str) -> str | None:
        """Find the part that a module is, or is in; None for a module that contains parts."""
        ...

    def is_listed(self, part: str) -> bool:
        """Check that a part is an element of a list of modules."""
        ...

    def same_as(self, name: str) -> list[str]:
        """List the names of all parameters that are tied to a parameter, its own among them."""
        ...

    def load(self, part: str) -> None:
        """Load the weights of a part's modules, in float32. They require no gradients."""
        ...

    def unload(self, part: str) -> None:
        """Free the weights of a part, except those that are tied to a part that is loaded."""
        ...

    def set_visitor(self, visitor: Visitor | None) -> None:
        """Set what sees the inputs of all of the model's experts."""
        ...

    def open_head(self) -> AbstractContextManager[Callable[[Tensor], Tensor]] | None:
        """Open the head: the context yields a function that computes the logits [N, V] of states
        [N, D] that `model` returns, under autograd if that is on. None if the head is in `model`.
        """
        ...

    def silence(self) -> AbstractContextManager[None]:
        """Silence the logs and warnings of the model's code."""
        ...


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a model, not trained."""
    owner, _, leaf = name.rpartition(".")
    if isinstance(value, nn.Parameter):
        parameter = value
    else:
        parameter = nn.Parameter(value, requires_grad=False)
    setattr(model.get_submodule(owner), leaf, parameter)
