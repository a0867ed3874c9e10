"""The calibration samples on their way through the model, in two streams: one through the quantized layers and, for
some of the samples, one through the float layers. How far the two have drifted apart goes into each layer's target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import InputGroup
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.block_pair import linear_of
from quantkit.calibration.effort import Effort, batch_samples
from quantkit.calibration.expert_streams import FLOAT, QUANTIZED, ExpertStreams
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import Block, Step, scaled_embeddings
from quantkit.model.rope import Rotary

INNER = "inner"  # what the store holds of a batch besides its states in the streams


class Streams:
    """The hidden states of all batches, before one branch of one block after the other.

    A branch of the quantized stream is finished one pass late, when its last linear has been quantized and the
    states are needed again; until then what that linear is applied to is kept.
    """

    def __init__(
        self, config: ModelConfig, samples: Tensor, embedding: Tensor, store: ActivationStore, device: torch.device,
        effort: Effort,
    ) -> None:  # fmt: skip
        """
        Args:
            samples: tokens [N, T]; there may be none.
            embedding: of all tokens, [V, D].
            store: holds the states.
            device: where blocks are run.
            effort: says which batches the float stream takes.
        """
        self._store = store
        self._device = device
        self._effort = effort
        length = samples.shape[1]
        batches = torch.split(samples, batch_samples(config, length)) if len(samples) else ()
        self._batches = len(batches)
        for index, batch in enumerate(batches):
            states = scaled_embeddings(nn.functional.embedding(batch, embedding).float(), config.embedding_multiplier)
            for stream in (QUANTIZED, FLOAT)[: 1 + self._follows(index)]:
                store.put((stream, index), states.to(device))
        positions = torch.arange(length, device=device)
        angles = Rotary(config).to(device)(positions)
        self._step = Step(angles, causal_attention(positions, config.windows))
        self._unfinished: tuple[str, Block] | None = None
        self._apart = False  # before the first linear that is quantized both streams are one

    def gather(self, group: InputGroup, quantized: Block, floats: Block, found: HessianAccumulator) -> None:
        """Add up the inputs of linears within a branch."""
        for index in range(self._batches):
            x = self._current(index)
            inputs = self._inputs(group, quantized, x)
            if self._follows(index):
                y = self._take(FLOAT, index)
                found.add_pair(inputs, self._inputs(group, floats, y) - inputs if self._apart else None)
                self._put(FLOAT, index, y)
            else:
                found.add(inputs)
            self._put(QUANTIZED, index, x)
        self._unfinished = None

    def reach_end(
        self, group: InputGroup, quantized: Block, floats: Block, found: HessianAccumulator | None, *, last: bool
    ) -> None:
        """Run a branch up to its last linear, the float stream through it; add up its inputs where `found` is given.

        The drift is that of the linear's outputs.

        Args:
            last: nothing comes after the branch, so the streams end here.
        """
        linear = linear_of(floats, group.modules[0])
        for index in range(self._batches):
            x = self._current(index)
            inner = quantized.inner(group.branch, x, self._step)
            inputs = inner if found is None else self._inputs(group, quantized, x, inner)
            if self._follows(index):
                y = self._take(FLOAT, index)
                own = floats.inner(group.branch, y, self._step)
                if found is not None:  # one product of a difference loses less than a difference of two
                    drift = linear(self._inputs(group, floats, y, own) - inputs)
                    found.add_pair(inputs, drift if linear.bias is None else drift - linear.bias)
                if not last:
                    self._put(FLOAT, index, floats.finish(group.branch, y, own, self._step))
            elif found is not None:
                found.add(inputs)
            if not last:
                self._put(INNER, index, inner)
                self._put(QUANTIZED, index, x)
        self._unfinished = None
        self._apart = True

    def finish_later(self, branch: str, quantized: Block) -> None:
        """Have the next pass finish a branch whose last linear has now been quantized."""
        self._unfinished = branch, quantized

    def enter_experts(self, block: Block) -> ExpertStreams:
        """Both streams at a branch that ends with experts.

        Args:
            block: with its norms and router.
        """
        experts = ExpertStreams(self._store, self._device, block, self._step)
        for index in range(self._batches):
            experts.enter(QUANTIZED, index, self._current(index))
            if self._follows(index):
                experts.enter(FLOAT, index, self._take(FLOAT, index))
        self._unfinished = None
        self._apart = True
        return experts

    def _follows(self, index: int) -> bool:
        return self._effort.follows(index, self._batches)

    def _current(self, index: int) -> Tensor:
        """The quantized stream's states [B, T, D] before the branch at work."""
        x = self._take(QUANTIZED, index)
        if self._unfinished is None:
            return x
        branch, block = self._unfinished
        return block.finish(branch, x, self._take(INNER, index), self._step)

    def _inputs(self, group: InputGroup, block: Block, x: Tensor, inner: Tensor | None = None) -> Tensor:
        """What a block applies the linears of a group to, [..., I], for hidden states [B, T, D]; it runs no further.

        Args:
            inner: what `Block.inner` gave for the branch, if it has been run.
        """
        found = []

        def listen(at: str, value: Tensor) -> None:
            if at == group.site:
                found.append(value)
                raise _Reached

        step = replace(self._step, tap=listen)
        try:
            block.finish(group.branch, x, block.inner(group.branch, x, step) if inner is None else inner, step)
        except _Reached:
            return found[0]
        raise RuntimeError(f"the {group.branch} branch of a block has no site {group.site}")

    def _take(self, stream: str, index: int) -> Tensor:
        return self._store.take((stream, index)).to(self._device)

    def _put(self, stream: str, index: int, value: Tensor) -> None:
        self._store.put((stream, index), value)


class _Reached(Exception):
    """Ends a run of a block at a site."""
