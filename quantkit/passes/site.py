"""Name the products of a model, and describe what a batch of samples brings to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

WEIGHT = "weight"


@dataclass(frozen=True)
class Site:
    """A product with a weight [O, I].

    Attributes:
        module: the module that has the weight; of an expert's, the module of all experts.
        leaf: the weight's parameter there, with a dot for each module between them.
        expert: the number of the expert that the weight belongs to; None for no expert, or one that
            gets all tokens.
        rows: the linears on disk that the weight is made of, with the first of their rows and the
            one after the last.
        transposed: whether the module has the weight as [I, O].
        stacked: whether an expert's parameter contains the weights of all experts.
    """

    module: str
    leaf: str
    expert: int | None
    rows: tuple[tuple[str, int, int], ...]
    transposed: bool = False
    stacked: bool = True

    @property
    def parameter(self) -> str:
        return f"{self.module}.{self.leaf}"

    @property
    def owner(self) -> str:
        """Return the name of the module that has the parameter itself."""
        return self.parameter.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Return whether the weight is the whole parameter of a module of its own."""
        return not self.transposed and (self.expert is None or not self.stacked)

    def of(self, parameter: Tensor) -> Tensor:
        """Select the weight [O, I] in its parameter, not copied."""
        if self.expert is None or not self.stacked:
            weight = parameter
        else:
            weight = parameter[self.expert]
        if self.transposed:
            return weight.t()
        return weight


@dataclass
class Brought:
    """The inputs of a batch to a product. Its tensors lose their memory when the batch is moved to
    a file.

    Attributes:
        inputs: [..., I].
        tokens: for an expert's product, the numbers [N] of the tokens whose rows these are; None if
            it gets all.
        shares: the weights [N] of the expert's output for these tokens.
        at: computes the inputs [N, I] that tokens, given by their numbers, would have at an
            expert's product; its argument None means all tokens. None if an expert's inputs are
            known for its own tokens only, and if there are no experts.
    """

    inputs: Tensor
    tokens: Tensor | None = None
    shares: Tensor | None = None
    at: Callable[[Tensor | None], Tensor] | None = None


class Visitor(Protocol):
    """Sees the inputs of experts."""

    def visit_routing(self, experts: nn.Module, counts: list[int]) -> None:
        """Observe the number of tokens that are sent to each expert, before any product."""
        ...

    def visit_product(self, experts: nn.Module, leaf: str, expert: int, brought: Brought) -> None:
        """Observe the inputs of a product with the weight of an expert in the parameter `leaf`,
        before it is computed.
        """
        ...
