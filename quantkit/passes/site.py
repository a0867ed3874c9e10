"""Name the products of a model, and describe what a batch of samples brings to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
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
        count: of experts, if the parameter is a matrix with their weights one after the other.
        firsts: for each of these linears, which of its own rows is the first here; empty if all are
            complete.
        transposed: whether the module has the weight as [I, O].
        stacked: whether an expert's parameter contains the weights of all experts.
    """

    module: str
    leaf: str
    expert: int | None
    rows: tuple[tuple[str, int, int], ...]
    transposed: bool = False
    firsts: tuple[int, ...] = ()
    count: int | None = None
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
        is_whole = self.expert is None or not self.stacked
        return is_whole and not self.transposed and not self.firsts

    def parts(self) -> Iterator[tuple[str, slice, slice]]:
        """Yield each linear with its rows in this weight, and the same rows in its own weight."""
        firsts = self.firsts or (0,) * len(self.rows)
        for (linear, start, stop), first in zip(self.rows, firsts, strict=True):
            yield linear, slice(start, stop), slice(first, first + stop - start)

    def of(self, parameter: Tensor) -> Tensor:
        """Select the weight [O, I] in its parameter, not copied."""
        if self.expert is None or not self.stacked:
            weight = parameter
        elif self.count is not None:
            weight = parameter.view(self.count, -1, parameter.shape[1])[self.expert]
        else:
            weight = parameter[self.expert]
        if self.transposed:
            return weight.t()
        return weight


def gather_weights(
    sites: Iterable[Site], linears: Collection[str], parameter_of: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Gather the weights [O, I] of some linears from all sites that have rows of them; copied only
    where necessary.

    Args:
        parameter_of: looks up a parameter by name.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for site in sites:
        weight = site.of(parameter_of(site.parameter))
        for linear, rows_here, rows_of_linear in site.parts():
            if linear in linears:
                pieces[linear].append((rows_of_linear.start, weight[rows_here]))
    weights: dict[str, Tensor] = {}
    for linear, rows in pieces.items():
        if len(rows) == 1:
            weights[linear] = rows[0][1].contiguous()
        else:
            rows.sort(key=lambda piece: piece[0])
            weights[linear] = torch.cat([piece for _, piece in rows])
    return weights


@dataclass
class Brought:
    """The inputs of a batch to a product. Its tensors lose their memory when the batch is moved to
    a file.

    Attributes:
        inputs: [..., I].
        tokens: for an expert's product, the numbers [N] of the tokens whose rows these are; None if
            it gets all.
        shares: the weights [...] of the expert's output for these tokens.
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

    def visit_product(
        self, experts: nn.Module, leaf: str, expert: int | None, brought: Brought
    ) -> None:
        """Observe the inputs of a product with the weight of an expert, or of shared experts, in
        the parameter `leaf`, before it is computed.
        """
        ...

    def visit_output(
        self, experts: nn.Module, leaf: str, expert: int | None, output: Tensor
    ) -> Tensor:
        """Observe the output [N, O] of a product with the weight of an expert in a parameter that
        contains those of all experts. Returns it, or what takes its place.
        """
        ...
