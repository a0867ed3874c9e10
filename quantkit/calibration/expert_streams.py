"""Both streams within a branch that ends with experts: each expert gets the tokens that the router sends to it.

The tokens' states stay in the store. An expert's rows are read from it, some from each batch, and the expert's output
for them is added to the branch's output. So one expert runs at a time, and none of its states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.activation_store import ActivationStore
from quantkit.model.decoder import Block
from quantkit.model.feed_forward import Experts

QUANTIZED, FLOAT = "quantized", "float"  # the streams: the store's keys for a batch's states
_OUTPUT = {QUANTIZED: "quantized output", FLOAT: "float output"}
_MIN_ROWS = 2048  # that go through an expert together, if it gets as many


@dataclass(frozen=True)
class Piece:
    """Some of the tokens that calibrate an expert.

    Attributes:
        inputs: normed states of the quantized stream, [N, D].
        float_inputs: those of the float stream, [N, D], for batches that it has.
        shares: each token's weight for the expert's output, [N, 1].
    """

    inputs: Tensor
    float_inputs: Tensor | None
    shares: Tensor


@dataclass(frozen=True)
class _Routes:
    """The router's choice for a batch's tokens.

    Attributes:
        shares, chosen: the experts' weights and numbers, [N, K].
        shared: the weight of the shared experts, [N].
    """

    shares: Tensor
    chosen: Tensor
    shared: Tensor

    def to(self, expert: int | None) -> tuple[Tensor, Tensor]:
        """The indices of the tokens sent to an expert, and their shares; None is the shared experts."""
        if expert is None:
            return torch.arange(len(self.shared)), self.shared
        tokens, places = (self.chosen == expert).nonzero(as_tuple=True)
        return tokens, self.shares[tokens, places]


class ExpertStreams:
    """The states of all batches before a branch with experts, and the sum of the experts' outputs so far."""

    def __init__(self, store: ActivationStore, device: torch.device, block: Block) -> None:
        """
        Args:
            store: holds the states.
            block: with its norms and router.
        """
        assert isinstance(block.mlp, Experts)
        self._store = store
        self._device = device
        self._block = block
        self._experts = block.mlp
        self._routes: dict[str, dict[int, _Routes]] = {QUANTIZED: {}, FLOAT: {}}

    def enter(self, stream: str, index: int, states: Tensor) -> None:
        """Store a batch's states [B, T, D] before the branch, and route its tokens."""
        mlp = self._experts
        normed = self._block.normed("mlp", states.flatten(0, -2))
        shares, chosen = mlp.route(normed)
        shared = torch.ones(len(normed))
        if mlp.shared_expert_gate is not None:
            shared = torch.sigmoid(mlp.shared_expert_gate(normed)).squeeze(-1)
        self._routes[stream][index] = _Routes(shares.cpu(), chosen.to("cpu", torch.int16), shared.cpu())
        self._store.put((stream, index), states)
        self._store.put((_OUTPUT[stream], index), torch.zeros(states.shape, device=states.device))

    def leave(self) -> None:
        """Add the experts' outputs to all states."""
        for stream, routes in self._routes.items():
            for index in routes:
                states, output = (self._store.take((key, index)).to(self._device) for key in (stream, _OUTPUT[stream]))
                self._store.put((stream, index), self._block.add("mlp", states, output))

    def token_counts(self) -> Tensor:
        """How many tokens of the quantized stream each expert is sent, and last the number of tokens: [E + 1] int64."""
        count = len(self._experts.experts)
        found = torch.zeros(count + 1, dtype=torch.int64)
        for routes in self._routes[QUANTIZED].values():
            found[:count] += torch.bincount(routes.chosen.flatten().long(), minlength=count)
            found[count] += len(routes.chosen)
        return found.to(self._device)

    def pieces(self, expert: int | None, *, all_tokens: bool) -> Iterator[Piece]:
        """The tokens that are sent to an expert, or all with equal shares; None is the shared experts."""
        with_floats = self._routes[FLOAT]
        without = [index for index in self._routes[QUANTIZED] if index not in with_floats]
        for indexes in (with_floats, without):
            for rows in self._gathered(QUANTIZED, indexes, expert, all_tokens=all_tokens):
                inputs = self._states(QUANTIZED, rows)
                float_inputs = self._states(FLOAT, rows) if indexes is with_floats else None
                shares = torch.cat([own for _, _, own in rows]).to(self._device)
                yield Piece(inputs, float_inputs, shares.unsqueeze(-1))

    def add(self, stream: str, expert: int | None, apply: Callable[[Tensor], Tensor]) -> None:
        """Add an expert's output, times the shares, for the tokens that are sent to it.

        Args:
            apply: the expert, for normed states [N, D].
        """
        for rows in self._gathered(stream, self._routes[stream], expert, all_tokens=False):
            output = apply(self._states(stream, rows))
            pieces = torch.split(output, [len(tokens) for _, tokens, _ in rows])
            for (index, tokens, shares), piece in zip(rows, pieces, strict=True):
                self._store.add_rows((_OUTPUT[stream], index), tokens, piece * shares.to(piece.device).unsqueeze(-1))

    def _gathered(
        self, stream: str, indexes: Iterable[int], expert: int | None, *, all_tokens: bool
    ) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
        """Tokens that go through an expert together: batch, indices of its tokens, shares."""
        found: list[tuple[int, Tensor, Tensor]] = []
        for index in indexes:
            routes = self._routes[stream][index]
            tokens, shares = routes.to(None if all_tokens else expert)
            if not len(tokens):
                continue
            found.append((index, tokens, torch.ones_like(shares) if all_tokens else shares))
            if sum(len(own) for _, own, _ in found) >= _MIN_ROWS:
                yield found
                found = []
        if found:
            yield found

    def _states(self, stream: str, rows: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Normed states [N, D] of tokens of several batches."""
        states = [self._store.rows((stream, index), tokens).to(self._device) for index, tokens, _ in rows]
        return self._block.normed("mlp", torch.cat(states))
