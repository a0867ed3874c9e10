"""Both streams within a branch that ends with experts: each expert is given the tokens that a router sends to it.

The tokens' states stay where they are. An expert's rows are looked up, some from each batch, and what it gives for
them is added to the branch's output; so there is one expert at a time, and none of its states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.activation_store import ActivationStore
from quantkit.model.decoder import Block, Step
from quantkit.model.feed_forward import Experts

QUANTIZED, FLOAT = "quantized", "float"  # the streams, by which the store knows a batch's states
_OUTPUT = {QUANTIZED: "quantized output", FLOAT: "float output"}
_ROWS = 2048  # that go through an expert together, unless one batch has more


@dataclass(frozen=True)
class Piece:
    """Some of the tokens that calibrate an expert.

    Attributes:
        inputs: normed states of the quantized stream, [N, D].
        counterparts: those of the float stream, [N, D], where it follows.
        shares: how much of what the expert gives each token gets, [N, 1].
    """

    inputs: Tensor
    counterparts: Tensor | None
    shares: Tensor


@dataclass(frozen=True)
class _Routes:
    """Where a batch's tokens go.

    Attributes:
        shares, chosen: of the experts, [N, K].
        shared: how much each token gets of what the shared experts give, [N].
    """

    shares: Tensor
    chosen: Tensor
    shared: Tensor

    def to(self, expert: int | None) -> tuple[Tensor, Tensor]:
        """The tokens sent to an expert, by number, and their shares; None is the shared experts."""
        if expert is None:
            return torch.arange(len(self.shared)), self.shared
        tokens, places = (self.chosen == expert).nonzero(as_tuple=True)
        return tokens, self.shares[tokens, places]


class ExpertStreams:
    """The states of all batches before a branch with experts, and what these have given so far."""

    def __init__(self, store: ActivationStore, device: torch.device, block: Block, step: Step) -> None:
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
        self._step = step
        self._routes: dict[str, dict[int, _Routes]] = {QUANTIZED: {}, FLOAT: {}}

    def enter(self, stream: str, index: int, states: Tensor) -> None:
        """Take up a batch's states [B, T, D] before the branch."""
        mlp = self._experts
        normed = self._normed(states.flatten(0, -2))
        shares, chosen = mlp.route(normed)
        shared = torch.ones(len(normed))
        if mlp.shared_expert_gate is not None:
            shared = torch.sigmoid(mlp.shared_expert_gate(normed)).squeeze(-1)
        self._routes[stream][index] = _Routes(shares.cpu(), chosen.to("cpu", torch.int16), shared.cpu())
        self._store.put((stream, index), states)
        self._store.put((_OUTPUT[stream], index), torch.zeros(states.shape, device=states.device))

    def leave(self) -> None:
        """Add to all states what the experts have given."""
        for stream, routes in self._routes.items():
            for index in routes:
                states, given = (self._store.take((key, index)).to(self._device) for key in (stream, _OUTPUT[stream]))
                self._store.put((stream, index), self._block.add("mlp", states, given))

    def token_counts(self) -> Tensor:
        """How many tokens of the quantized stream each expert is sent, and last how many there are: [E + 1] int64."""
        count = len(self._experts.experts)
        found = torch.zeros(count + 1, dtype=torch.int64)
        for routes in self._routes[QUANTIZED].values():
            found[:count] += torch.bincount(routes.chosen.flatten().long(), minlength=count)
            found[count] += len(routes.chosen)
        return found.to(self._device)

    def pieces(self, expert: int | None, *, everyone: bool) -> Iterator[Piece]:
        """The tokens that are sent to an expert, or all of them with equal shares; None is the shared experts."""
        followed = self._routes[FLOAT]
        for indexes in (followed, [index for index in self._routes[QUANTIZED] if index not in followed]):
            for rows in self._gathered(QUANTIZED, indexes, expert, everyone=everyone):
                inputs = self._states(QUANTIZED, rows)
                counterparts = self._states(FLOAT, rows) if indexes is followed else None
                shares = torch.cat([own for _, _, own in rows]).to(self._device)
                yield Piece(inputs, counterparts, shares.unsqueeze(-1))

    def add(self, stream: str, expert: int | None, apply: Callable[[Tensor], Tensor]) -> None:
        """Add what an expert gives for normed states [N, D] of the tokens that are sent to it, by their shares."""
        for rows in self._gathered(stream, self._routes[stream], expert, everyone=False):
            given = apply(self._states(stream, rows))
            pieces = torch.split(given, [len(tokens) for _, tokens, _ in rows])
            for (index, tokens, shares), piece in zip(rows, pieces, strict=True):
                self._store.add_rows((_OUTPUT[stream], index), tokens, piece * shares.to(piece.device).unsqueeze(-1))

    def _gathered(
        self, stream: str, indexes: Iterable[int], expert: int | None, *, everyone: bool
    ) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
        """Tokens of some batches, by number, with their shares, as many as go through an expert together."""
        found: list[tuple[int, Tensor, Tensor]] = []
        for index in indexes:
            routes = self._routes[stream][index]
            tokens, shares = routes.to(None if everyone else expert)
            if not len(tokens):
                continue
            found.append((index, tokens, torch.ones_like(shares) if everyone else shares))
            if sum(len(own) for _, own, _ in found) >= _ROWS:
                yield found
                found = []
        if found:
            yield found

    def _states(self, stream: str, rows: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Normed states [N, D] of tokens of some batches."""
        states = [self._store.rows((stream, index), tokens).to(self._device) for index, tokens, _ in rows]
        return self._normed(torch.cat(states))

    def _normed(self, states: Tensor) -> Tensor:
        return self._block.inner("mlp", states, self._step)
