"""The calibration samples' hidden states in two streams: one through the quantized layers and, for
some of the samples, one through the float layers. The drift between the two is part of each layer's
target.

Within a branch that ends with experts, each expert gets the tokens that the router sends to it. The
tokens' states stay in the store: an expert's rows are read from it, some from each batch, and the
expert's output for them is added to the branch's output. So one expert runs at a time, and none of
its states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import InputGroup
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.block_pair import BlockPair, linear_of
from quantkit.calibration.effort import Effort, batch_samples
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import make_causal_attention
from quantkit.model.decoder import Block, Step, scale_embeddings
from quantkit.model.feed_forward import Experts
from quantkit.model.load import narrow_to_floats
from quantkit.model.rope import Rotary
from quantkit.tensors.qtensor import QuantTensor

# the streams: the store's keys for a batch's states
QUANTIZED = "quantized"
FLOAT = "float"
_OUTPUT = {QUANTIZED: "quantized output", FLOAT: "float output"}
# The store's key for the inputs of a branch's last linear.
_INPUTS = "inputs"
# That go through an expert together, if it gets as many.
_MIN_ROWS = 2048


def embed_batches(
    source: Checkpoint, batches: Iterable[Tensor], embedding: QuantTensor | None = None
) -> Iterator[Tensor]:
    """Yield the first block's inputs [B, T, D], float32, for each batch of tokens [B, T];
    `embedding` replaces the source's floats.
    """
    if embedding is None:
        matrix = narrow_to_floats(source.load(f"{EMBEDDING}.weight"))
    else:
        matrix = embedding.dequantize()
    for batch in batches:
        yield scale_embeddings(
            nn.functional.embedding(batch, matrix).float(), source.config.embedding_multiplier
        )


def step_of_samples(config: ModelConfig, length: int, device: torch.device) -> Step:
    """Return the step in which blocks process whole samples."""
    positions = torch.arange(length, device=device)
    return Step(
        Rotary(config).to(device)(positions), make_causal_attention(positions, config.windows)
    )


class Streams:
    """The hidden states of all batches, before one branch of one block after the other.

    A branch of the quantized stream is finished in the next pass, when its last linear has been
    quantized; until then the inputs of that linear are kept.
    """

    def __init__(
        self,
        source: Checkpoint,
        samples: Tensor,
        store: ActivationStore,
        device: torch.device,
        effort: Effort,
        embedding: QuantTensor | None = None,
    ) -> None:
        """Embed the samples, tokens [N, T] of which there may be none, and store the states;
        `effort` determines the batches of the float stream, and `embedding` replaces the source's
        floats in the quantized one.
        """
        config = source.config
        length = samples.shape[1]
        self._store = store
        self._device = device
        self._effort = effort
        if len(samples):
            batches = torch.split(samples, batch_samples(config, length))
        else:
            batches = ()
        self._batches = len(batches)
        for index, states in enumerate(embed_batches(source, batches, embedding)):
            store.put((QUANTIZED, index), states.to(device))
        for index, states in enumerate(embed_batches(source, batches)):
            if self._has_floats(index):
                store.put((FLOAT, index), states.to(device))
        self._step = step_of_samples(config, length, device)
        self._unfinished: tuple[str, Block] | None = None
        # Else both streams are the same until the first quantized linear.
        self._drifted = embedding is not None

    def gather(self, group: InputGroup, pair: BlockPair, statistics: HessianAccumulator) -> None:
        """Add up the inputs of linears at the start of a branch."""
        for index in range(self._batches):
            x = self._current(index)
            inputs = pair.quantized.apply_norm(group.branch, x)
            if self._has_floats(index):
                y = self._take(FLOAT, index)
                if self._drifted:
                    difference = pair.floats.apply_norm(group.branch, y) - inputs
                else:
                    difference = None
                statistics.add_pair(inputs, difference)
                self._store.put((FLOAT, index), y)
            else:
                statistics.add(inputs)
            self._store.put((QUANTIZED, index), x)
        self._unfinished = None

    def run_to_last(
        self,
        group: InputGroup,
        pair: BlockPair,
        statistics: HessianAccumulator | None,
        *,
        is_end: bool,
    ) -> None:
        """Run the quantized stream up to a branch's last linear, the float stream to the branch's
        end. Sums over the linear's inputs are added to `statistics`, if any; the drift is that of
        its outputs. With `is_end` no other branch follows, so the streams end here.
        """
        linear = linear_of(pair.floats, group.modules[0])
        branch = group.branch
        for index in range(self._batches):
            x = self._current(index)
            inputs = pair.quantized.inner(branch, x, self._step)
            if self._has_floats(index):
                y = self._take(FLOAT, index)
                float_inputs = pair.floats.inner(branch, y, self._step)
                # The product of a difference is more precise than that of two products.
                if statistics is not None:
                    drift = linear(float_inputs - inputs)
                    statistics.add_pair(
                        inputs, drift if linear.bias is None else drift - linear.bias
                    )
                if not is_end:
                    self._store.put((FLOAT, index), pair.floats.finish(branch, y, float_inputs))
            elif statistics is not None:
                statistics.add(inputs)
            if not is_end:
                self._store.put((_INPUTS, index), inputs)
                self._store.put((QUANTIZED, index), x)
        self._unfinished = None
        self._drifted = True

    def finish_later(self, branch: str, quantized: Block) -> None:
        """Finish a branch, whose last linear has now been quantized, in the next pass."""
        self._unfinished = branch, quantized

    def enter_experts(self, block: Block) -> ExpertStreams:
        """Both streams at a branch that ends with experts; the block has its norms and router."""
        experts = ExpertStreams(self._store, self._device, block)
        for index in range(self._batches):
            experts.enter(QUANTIZED, index, self._current(index))
            if self._has_floats(index):
                experts.enter(FLOAT, index, self._take(FLOAT, index))
        self._unfinished = None
        self._drifted = True
        return experts

    def _has_floats(self, index: int) -> bool:
        return self._effort.follows(index, self._batches)

    def _current(self, index: int) -> Tensor:
        """Return the quantized stream's states [B, T, D] before the current branch."""
        x = self._take(QUANTIZED, index)
        if self._unfinished is None:
            return x
        branch, block = self._unfinished
        return block.finish(branch, x, self._take(_INPUTS, index))

    def _take(self, stream: str, index: int) -> Tensor:
        return self._store.take((stream, index)).to(self._device)


class _Routes(NamedTuple):
    """The router's choice for a batch: weights and indices of experts, [N, K]; weights of the
    shared experts, [N].
    """

    shares: Tensor
    chosen: Tensor
    shared: Tensor


class ExpertStreams:
    """The states of all batches before a branch with experts, and the sum of the experts' outputs
    so far. The block has its norms and router.
    """

    def __init__(self, store: ActivationStore, device: torch.device, block: Block) -> None:
        assert isinstance(block.mlp, Experts)
        self._store = store
        self._device = device
        self._block = block
        self._experts = block.mlp
        self._routes: dict[str, dict[int, _Routes]] = {QUANTIZED: {}, FLOAT: {}}

    def enter(self, stream: str, index: int, states: Tensor) -> None:
        """Store a batch's states [B, T, D] before the branch, and route its tokens."""
        mlp = self._experts
        normed = self._block.apply_norm("mlp", states.flatten(0, -2))
        shares, chosen = mlp.route(normed)
        shared = torch.ones(len(normed))
        if mlp.shared_expert_gate is not None:
            shared = torch.sigmoid(mlp.shared_expert_gate(normed)).squeeze(-1)
        self._routes[stream][index] = _Routes(
            shares.cpu(), chosen.to("cpu", torch.int16), shared.cpu()
        )
        self._store.put((stream, index), states)
        self._store.put((_OUTPUT[stream], index), torch.zeros(states.shape, device=states.device))

    def leave(self) -> None:
        """Add the experts' outputs to all states."""
        for stream, routes in self._routes.items():
            for index in routes:
                states, output = (
                    self._store.take((key, index)).to(self._device)
                    for key in (stream, _OUTPUT[stream])
                )
                self._store.put((stream, index), self._block.add("mlp", states, output))

    def token_counts(self) -> Tensor:
        """Return how many tokens of the quantized stream each expert is sent, and last the number
        of tokens: [E + 1] int64.
        """
        count = len(self._experts.experts)
        found = torch.zeros(count + 1, dtype=torch.int64)
        for routes in self._routes[QUANTIZED].values():
            found[:count] += torch.bincount(routes.chosen.flatten().long(), minlength=count)
            found[count] += len(routes.chosen)
        return found.to(self._device)

    def pieces(
        self, expert: int | None, *, all_tokens: bool
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield the tokens that are sent to an expert, or all with equal shares; None is the shared
        experts.

        Yields for some of the tokens normed states of the quantized stream, [N, D]; those of the
        float stream, [N, D], for batches that it has; and each token's weight for the expert's
        output, [N, 1].
        """
        with_floats = self._routes[FLOAT]
        without = [index for index in self._routes[QUANTIZED] if index not in with_floats]
        for indexes in (with_floats, without):
            for rows in self._iter_token_groups(QUANTIZED, indexes, expert, all_tokens=all_tokens):
                inputs = self._states(QUANTIZED, rows)
                if indexes is with_floats:
                    float_inputs = self._states(FLOAT, rows)
                else:
                    float_inputs = None
                shares = torch.cat([own for _, _, own in rows]).to(self._device)
                yield inputs, float_inputs, shares.unsqueeze(-1)

    def add(self, stream: str, expert: int | None, apply: Callable[[Tensor], Tensor]) -> None:
        """Add the output of an expert, which `apply` computes for normed states [N, D], times the
        shares, for the tokens that are sent to it.
        """
        for rows in self._iter_token_groups(stream, self._routes[stream], expert, all_tokens=False):
            output = apply(self._states(stream, rows))
            pieces = torch.split(output, [len(tokens) for _, tokens, _ in rows])
            for (index, tokens, shares), piece in zip(rows, pieces, strict=True):
                self._store.add_rows(
                    (_OUTPUT[stream], index), tokens, piece * shares.to(piece.device).unsqueeze(-1)
                )

    def _iter_token_groups(
        self, stream: str, indexes: Iterable[int], expert: int | None, *, all_tokens: bool
    ) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
        """Tokens that go through an expert together: batch, indices of its tokens, shares."""
        found: list[tuple[int, Tensor, Tensor]] = []
        for index in indexes:
            routes = self._routes[stream][index]
            if all_tokens or expert is None:
                tokens = torch.arange(len(routes.shared))
                if all_tokens:
                    shares = torch.ones_like(routes.shared)
                else:
                    shares = routes.shared
            else:
                tokens, places = (routes.chosen == expert).nonzero(as_tuple=True)
                shares = routes.shares[tokens, places]
            if len(tokens):
                found.append((index, tokens, shares))
            if sum(len(own) for _, own, _ in found) >= _MIN_ROWS:
                yield found
                found = []
        if found:
            yield found

    def _states(self, stream: str, rows: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Normed states [N, D] of tokens of several batches."""
        states = []
        for index, tokens, _ in rows:
            states.append(self._store.rows((stream, index), tokens).to(self._device))
        return self._block.apply_norm("mlp", torch.cat(states))
