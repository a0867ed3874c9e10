"""Quantize block after block, each linear against the inputs it will really see.

The topology says which linears share an input, and the block itself is run up to there: nothing here knows what a
block does. Only the linears at work are in memory, in float32; the samples lie in an `ActivationStore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantkit.architectures.topology import InputGroup
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.block_pair import BlockPair, Finished, forget
from quantkit.calibration.column_kernels import column_kernels
from quantkit.calibration.effort import Effort
from quantkit.calibration.expert_quantizer import ProgressCallback, quantize_experts
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.streams import Streams
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.memory import malloc_trim
from quantkit.model.decoder import Block
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme


class BlockQuantizer:
    """Gives the quantized weights of one decoder block after the other."""

    def __init__(
        self, source: Checkpoint, tokens: Tensor, schemes: Mapping[str, QuantScheme], store: ActivationStore,
        device: torch.device, effort: Effort, group: ProcessGroup,
    ) -> None:  # fmt: skip
        """Embed the samples.

        Args:
            source: the float model.
            tokens: samples [N, T]; each of several processes takes its share.
            schemes: by module; modules that are not in it stay floats.
            store: holds the activations.
            device: where everything is computed.
            effort: how much to do about drift.
            group: the processes that share the work.
        """
        self._source = source
        self._device = device
        self._group = group
        scale_dtype, kernels = DType(source.config.dtype).torch, column_kernels(device)
        self._solver = GroupSolver(schemes, scale_dtype, group, kernels)
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        own = tokens[group.share(len(tokens))]
        self._streams = Streams(source.config, own, embedding, store, device, effort)
        self._layer = 0

    @torch.inference_mode()
    def next_block(self, finished: Finished | None = None, told: ProgressCallback | None = None) -> dict[str, Result]:
        """Quantize the next block; the results by tensor name.

        Args:
            finished: gives the block's weights by tensor name if an earlier run has
                already found them; they are then passed through.
            told: is told, of each group of linears, how many are done with.

        Raises:
            NonFiniteError: if a weight or the inputs of a linear hold NaN or Inf.
        """
        pair = BlockPair.of(self._source, self._layer, self._solver, self._device)
        results: dict[str, Result] = {}
        for branch in Block.BRANCHES:
            groups = [group for group in pair.groups if group.branch == branch]
            if branch == "mlp" and self._source.config.layers[self._layer].experts:
                results |= quantize_experts(pair, groups, self._streams, self._group, finished, told)
            else:
                results |= self._branch(branch, pair, groups, finished, told)
        self._layer += 1
        return results

    def _branch(
        self, branch: str, pair: BlockPair, groups: Sequence[InputGroup], finished: Finished | None,
        told: ProgressCallback | None,
    ) -> dict[str, Result]:  # fmt: skip
        """The results of a branch that ends with one linear."""
        floats, quantized = pair.floats, pair.quantized
        results: dict[str, Result] = {}
        *leading, last = groups
        ends = branch == Block.BRANCHES[-1] and self._layer == self._source.config.num_layers - 1
        for group in groups:
            pair.fill(group)
            statistics = pair.statistics(group) if pair.wanted(group) and finished is None else None
            if group is last:
                self._streams.reach_end(group, quantized, floats, statistics, last=ends)
                forget(leading, floats, quantized)
            elif statistics is not None:
                self._streams.gather(group, quantized, floats, statistics)
            malloc_trim()
            solved: dict[str, Result] = {}
            if finished is not None:
                solved = pair.load_resumed(group, finished)
            elif statistics is not None:
                statistics.finish(self._group)
                solved = pair.solve(group, statistics)
            del statistics
            malloc_trim()
            results |= pair.install(group, solved)
            pair.settle(group)
            if told is not None:
                told(len(group.modules))
        self._streams.finish_later(branch, quantized)
        forget([last], floats)
        return results
