"""Quantize one decoder block, each linear for the inputs that the quantized model passes to it.

The topology lists the linears that share an input, and the block itself is run up to there: nothing here depends on
what a block computes. Only the linears in use are in memory, in float32; the samples are in an `ActivationStore`.

The experts of a mixture are quantized one after the other, each on the tokens that are sent to it. If an expert gets
few tokens for a linear's inputs, that linear's Hessian is singular, or close to it, and its errors may grow on other
tokens. It is then calibrated on all tokens, whose states are similar to those it is sent. So is a linear whose weights
change by more on its own tokens than its scheme explains. If they do on all tokens too, it is rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from quantkit.architectures.topology import InputGroup
from quantkit.calibration.block_pair import BlockPair, linear_of, unload
from quantkit.calibration.group_solver import Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.streams import FLOAT, QUANTIZED, ExpertStreams, Piece, Streams
from quantkit.memory import malloc_trim
from quantkit.model.decoder import Block
from quantkit.model.feed_forward import MLP
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import ROUNDING

MIN_TOKENS_PER_INPUT = 2
"""Tokens sent to an expert per input of a linear; with fewer it is calibrated on all tokens."""


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
            yield from _quantize_experts(pair, groups, streams)
        else:
            is_end = branch == Block.BRANCHES[-1] and pair.layer == config.num_layers - 1
            yield from _quantize_branch(pair, groups, streams, is_end=is_end)


def _quantize_branch(
    pair: BlockPair, groups: Sequence[InputGroup], streams: Streams, *, is_end: bool
) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a branch that ends with one linear; with `is_end` no other branch follows."""
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
        yield len(group.modules), results
    streams.finish_later(last.branch, pair.quantized)
    unload([last], pair.floats)


def _quantize_experts(
    pair: BlockPair, groups: Sequence[InputGroup], streams: Streams
) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a branch that ends with experts, and move both streams to its end; yields after each expert."""
    states = streams.enter_experts(pair.quantized)
    counts = states.token_counts()
    pair.solver.group.sum_(counts)
    experts = _Experts(pair, states, counts.tolist())
    for _, own in itertools.groupby(groups, key=_owner):
        of_expert = list(own)
        yield sum(len(group.modules) for group in of_expert), experts.quantize(of_expert)
    states.leave()


@dataclass(frozen=True)
class _Tokens:
    """The tokens that linears of an expert are calibrated on: their count, whether they are all tokens, and how many
    are sent to the expert."""

    count: int
    all: bool
    sent: int

    def record(self, reason: str) -> dict[str, object]:
        """The manifest's entry; `reason` says why the tokens that were tried first are not used, if there were any."""
        if not self.all:
            return {"tokens": self.count, "tokens_from": "routed"}
        because = {"tokens_reason": reason} if reason else {}
        return {"tokens": self.count, "tokens_from": "all", "routed_tokens": self.sent, **because}


@dataclass(frozen=True)
class _Experts:
    """The experts of a block; `counts` are the tokens by expert, then the number of tokens, in all processes."""

    pair: BlockPair
    states: ExpertStreams
    counts: Sequence[int]

    def quantize(self, groups: Sequence[InputGroup]) -> dict[str, Result]:
        """The results of an expert, or of the shared ones; its output is then added to both streams."""
        pair = self.pair
        floats, quantized = (_mlp(block, groups[0]) for block in (pair.floats, pair.quantized))
        results: dict[str, Result] = {}
        for group in groups:
            pair.load(group)
        for group in groups:
            linears = pair.linears(group)
            solved = self._solve(group, linears, floats, quantized) if linears else {}
            del linears
            malloc_trim()
            pair.install(group, solved)
            results |= solved
        for stream, mlp in ((QUANTIZED, quantized), (FLOAT, floats)):
            self.states.add(stream, groups[0].expert, mlp)
        unload(groups, pair.floats, pair.quantized)
        return results

    def _solve(
        self, group: InputGroup, linears: Mapping[str, nn.Linear], floats: MLP, quantized: MLP
    ) -> dict[str, Result]:
        """The results of linears of an expert that share their inputs."""
        if group.expert is None:
            return self._calibrate(group, linears, floats, quantized, all_tokens=False)
        results: dict[str, Result] = {}
        reasons = dict.fromkeys(linears, "")
        sent, every = self.counts[group.expert], self.counts[-1]
        enough = sent >= MIN_TOKENS_PER_INPUT * linear_of(self.pair.floats, group.modules[0]).in_features
        choices = [*([_Tokens(sent, False, sent)] if enough else []), _Tokens(every, True, sent)]
        for tokens in choices:
            unsolved = {name: linears[name] for name in reasons}
            found = self._calibrate(group, unsolved, floats, quantized, all_tokens=tokens.all)
            for name, result in found.items():
                results[name] = replace(result, record={**result.record, **tokens.record(reasons[name])})
            distorted = self._distorted(found, unsolved, tokens)
            reasons = {name: "; ".join(filter(None, (reasons[name], reason))) for name, reason in distorted.items()}
            if not reasons:
                break
        for name, reason in reasons.items():
            record = {"solver": ROUNDING, **choices[-1].record(reason)}
            results[name] = self.pair.solver.round(name, linears[name].weight, record)
        return results

    def _calibrate(
        self, group: InputGroup, linears: Mapping[str, nn.Linear], floats: MLP, quantized: MLP, *, all_tokens: bool
    ) -> dict[str, Result]:
        """GPTQ on the tokens sent to the group's expert, or on all."""
        statistics = self.pair.statistics(group)
        for piece in self.states.pieces(group.expert, all_tokens=all_tokens):
            _add(piece, group, floats, quantized, statistics)
        return self.pair.solve(group, statistics, linears)

    def _distorted(
        self, found: Mapping[str, Result], linears: Mapping[str, nn.Linear], tokens: _Tokens
    ) -> dict[str, str]:
        """The linears that changed by more than their schemes explain, with the reason for the manifest."""
        solver = self.pair.solver
        bounds = {name: solver.error_bound(result.weight, linears[name].weight) for name, result in found.items()}
        votes = [float(not result.error <= bounds[name]) for name, result in found.items()]
        distorted = torch.tensor(votes, device=self.pair.device)
        solver.group.sum_(distorted)  # machines may round differently
        on = "all tokens" if tokens.all else "the tokens sent to it"
        return {
            name: f"changed by {found[name].error:.3g} on {on}, expected at most {bound:.3g}"
            for (name, bound), count in zip(bounds.items(), distorted.tolist(), strict=True)
            if count
        }


def _add(piece: Piece, group: InputGroup, floats: MLP, quantized: MLP, statistics: HessianAccumulator) -> None:
    """Add a piece to the sums over a group's inputs, weighted by the tokens' shares."""
    inputs, float_inputs = piece.inputs, piece.float_inputs
    if group.writes:
        inputs = quantized.inner(inputs)
        float_inputs = None if float_inputs is None else floats.inner(float_inputs)
    if float_inputs is None:
        statistics.add(inputs * piece.shares)
        return
    difference = (float_inputs - inputs) * piece.shares
    if group.writes:
        difference = times(difference, floats.down_proj.weight.t())
    statistics.add_pair(inputs * piece.shares, difference)


def _owner(group: InputGroup) -> str:
    return group.modules[0].rpartition(".")[0]


def _mlp(block: Block, group: InputGroup) -> MLP:
    """The expert that a group belongs to."""
    found = block.get_submodule(_owner(group))
    assert isinstance(found, MLP)
    return found
