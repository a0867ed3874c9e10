"""The calibration samples' hidden states in two streams: one through the quantized layers and, for some of the
samples, one through the float layers. The drift between the two goes into each layer's target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.topology import InputGroup
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.block_pair import BlockPair, linear_of
from quantkit.calibration.effort import Effort, batch_samples
from quantkit.calibration.expert_streams import FLOAT, QUANTIZED, ExpertStreams
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import Block, Step, scaled_embeddings
from quantkit.model.rope import Rotary

INPUTS = "inputs"  # the store's key for the inputs of a branch's last linear


class Streams:
    """The hidden states of all batches, before one branch of one block after the other.

    A branch of the quantized stream is finished in the next pass, when its last linear has been quantized; until then
    the inputs of that linear are kept.
    """

    def __init__(
        self, source: Checkpoint, samples: Tensor, store: ActivationStore, device: torch.device, effort: Effort
    ) -> None:
        """Embed the samples.

        Args:
            source: the float model.
            samples: tokens [N, T]; there may be none.
            store: holds the states.
            device: where blocks are run.
            effort: says which batches the float stream has.
        """
        config, length = source.config, samples.shape[1]
        self._store = store
        self._device = device
        self._effort = effort
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        batches = torch.split(samples, batch_samples(config, length)) if len(samples) else ()
        self._batches = len(batches)
        for index, batch in enumerate(batches):
            states = scaled_embeddings(nn.functional.embedding(batch, embedding).float(), config.embedding_multiplier)
            for stream in (QUANTIZED, FLOAT)[: 1 + self._has_floats(index)]:
                store.put((stream, index), states.to(device))
        positions = torch.arange(length, device=device)
        angles = Rotary(config).to(device)(positions)
        self._step = Step(angles, causal_attention(positions, config.windows))
        self._unfinished: tuple[str, Block] | None = None
        self._drifted = False  # until the first quantized linear both streams are the same

    def gather(self, group: InputGroup, pair: BlockPair, statistics: HessianAccumulator) -> None:
        """Add up the inputs of linears at the start of a branch."""
        for index in range(self._batches):
            x = self._current(index)
            inputs = pair.quantized.normed(group.branch, x)
            if self._has_floats(index):
                y = self._take(FLOAT, index)
                difference = pair.floats.normed(group.branch, y) - inputs if self._drifted else None
                statistics.add_pair(inputs, difference)
                self._store.put((FLOAT, index), y)
            else:
                statistics.add(inputs)
            self._store.put((QUANTIZED, index), x)
        self._unfinished = None

    def run_to_last(
        self, group: InputGroup, pair: BlockPair, statistics: HessianAccumulator | None, *, is_end: bool
    ) -> None:
        """Run the quantized stream up to a branch's last linear, the float stream to the branch's end.

        Args:
            statistics: if given, sums over the linear's inputs are added; the drift is that of its outputs.
            is_end: no other branch follows, so the streams end here.
        """
        linear, branch = linear_of(pair.floats, group.modules[0]), group.branch
        for index in range(self._batches):
            x = self._current(index)
            inputs = pair.quantized.inner(branch, x, self._step)
            if self._has_floats(index):
                y = self._take(FLOAT, index)
                float_inputs = pair.floats.inner(branch, y, self._step)
                if statistics is not None:  # the product of a difference is more precise than that of two products
                    drift = linear(float_inputs - inputs)
                    statistics.add_pair(inputs, drift if linear.bias is None else drift - linear.bias)
                if not is_end:
                    self._store.put((FLOAT, index), pair.floats.finish(branch, y, float_inputs))
            elif statistics is not None:
                statistics.add(inputs)
            if not is_end:
                self._store.put((INPUTS, index), inputs)
                self._store.put((QUANTIZED, index), x)
        self._unfinished = None
        self._drifted = True

    def finish_later(self, branch: str, quantized: Block) -> None:
        """Finish a branch, whose last linear has now been quantized, in the next pass."""
        self._unfinished = branch, quantized

    def enter_experts(self, block: Block) -> ExpertStreams:
        """Both streams at a branch that ends with experts.

        Args:
            block: with its norms and router.
        """
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
        """The quantized stream's states [B, T, D] before the current branch."""
        x = self._take(QUANTIZED, index)
        if self._unfinished is None:
            return x
        branch, block = self._unfinished
        return block.finish(branch, x, self._take(INPUTS, index))

    def _take(self, stream: str, index: int) -> Tensor:
        return self._store.take((stream, index)).to(self._device)
