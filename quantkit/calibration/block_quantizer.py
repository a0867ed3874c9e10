"""Quantize one decoder block, each linear for the inputs that the quantized model passes to it.

The topology says which linears share an input, and the block itself is run up to there: nothing here knows what a
block computes. Only the linears in use are in memory, in float32; the samples are in an `ActivationStore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quantkit.architectures.topology import InputGroup
from quantkit.calibration.block_pair import BlockPair, unload
from quantkit.calibration.expert_quantizer import quantize_experts
from quantkit.calibration.group_solver import Result
from quantkit.calibration.streams import Streams
from quantkit.memory import malloc_trim
from quantkit.model.decoder import Block


def quantize_block(pair: BlockPair, streams: Streams) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a block, and move the streams from its inputs to its outputs.

    Yields:
        After each group of linears: their number, and the results by name of the linear.

    Raises:
        NonFiniteError: if a weight or the inputs of a linear hold NaN or Inf.
    """
    config = pair.source.config
    for branch in Block.BRANCHES:
        groups = [group for group in pair.groups if group.branch == branch]
        if branch == "mlp" and config.layers[pair.layer].experts:
            yield from quantize_experts(pair, groups, streams)
        else:
            is_end = branch == Block.BRANCHES[-1] and pair.layer == config.num_layers - 1
            yield from _quantize_branch(pair, groups, streams, is_end=is_end)


def _quantize_branch(
    pair: BlockPair, groups: Sequence[InputGroup], streams: Streams, *, is_end: bool
) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a branch that ends with one linear.

    Args:
        is_end: no other branch follows.
    """
    *leading, last = groups
    for group in groups:
        pair.load(group)
        linears = pair.linears(group)
        statistics = pair.statistics(group) if linears else None
        if group is last:
            streams.run_to_last(group, pair, statistics, is_end=is_end)
            unload(leading, pair.floats, pair.quantized)
        elif statistics is not None:
            streams.gather(group, pair, statistics)
        malloc_trim()
        results = {} if statistics is None else pair.solve(group, statistics, linears)
        del statistics, linears
        malloc_trim()
        pair.install(group, results)
        pair.drop_solver_weights(group)
        yield len(group.modules), results
    streams.finish_later(last.branch, pair.quantized)
    unload([last], pair.floats)
