"""Quantize one decoder block, each linear for the inputs that the quantized model passes to it.

The topology lists the linears that share an input, and the block itself is run up to there: nothing
here depends on what a block computes. Only the linears in use are in memory, in float32; the
samples are in an `ActivationStore`.

The experts of a mixture are quantized one after the other, each on the tokens that are sent to it.
If an expert gets few tokens for a linear's inputs, that linear's Hessian is singular, or close to
it, and its errors may grow on other tokens. It is then calibrated on all tokens, whose states are
similar to those it is sent. So is a linear whose weights change by more on its own tokens than its
scheme explains. If they do on all tokens too, it is rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from quantkit.architectures.topology import InputGroup
from quantkit.base.memory import malloc_trim
from quantkit.calibration.block_pair import BlockPair, linear_of, unload
from quantkit.calibration.group_solver import Result
from quantkit.calibration.streams import FLOAT, QUANTIZED, ExpertStreams, Streams
from quantkit.model.decoder import Block
from quantkit.model.feed_forward import MLP
from quantkit.tensors.products import times

MIN_TOKENS_PER_INPUT = 2
"""Tokens sent to an expert per input of a linear; with fewer it is calibrated on all tokens."""


def quantize_block(pair: BlockPair, streams: Streams) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a block, and move the streams from its inputs to its outputs. After each group of
    linears, yields their number, and the results by name; NaN or Inf in a weight or the inputs of a
    linear is a `NonFiniteError`.
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
        if linears:
            statistics = pair.statistics(group)
        else:
            statistics = None
        if group is last:
            streams.run_to_last(group, pair, statistics, is_end=is_end)
            unload(leading, pair.floats, pair.quantized)
        elif statistics is not None:
            streams.gather(group, pair, statistics)
        malloc_trim()
        results: dict[str, Result] = {}
        if statistics is not None:
            results = pair.solver.solve(linears, statistics, outputs=group.writes, bounded=True)
        del statistics, linears
        malloc_trim()
        pair.install(group, results)
        yield len(group.modules), results
    streams.finish_later(last.branch, pair.quantized)
    unload([last], pair.floats)


def _quantize_experts(
    pair: BlockPair, groups: Sequence[InputGroup], streams: Streams
) -> Iterator[tuple[int, Mapping[str, Result]]]:
    """Quantize a branch that ends with experts, and move both streams to its end; yields after
    each expert.
    """
    states = streams.enter_experts(pair.quantized)
    counts = states.token_counts()
    pair.solver.group.sum_(counts)
    for _, own in itertools.groupby(groups, key=_owner):
        expert = _Expert(pair, states, counts.tolist(), list(own))
        yield sum(len(group.modules) for group in expert.groups), expert.quantize()
    states.leave()


class _Expert:
    """An expert of a block, or its shared ones, with their groups of linears; `counts` are the
    tokens by expert, then the number of tokens, in all processes.
    """

    def __init__(
        self,
        pair: BlockPair,
        states: ExpertStreams,
        counts: Sequence[int],
        groups: Sequence[InputGroup],
    ) -> None:
        self.pair = pair
        self.states = states
        self.counts = counts
        self.groups = groups
        floats, quantized = (
            block.get_submodule(_owner(groups[0])) for block in (pair.floats, pair.quantized)
        )
        assert isinstance(floats, MLP)
        assert isinstance(quantized, MLP)
        self.floats = floats
        self.quantized = quantized

    def quantize(self) -> dict[str, Result]:
        """Return the results by name; the expert's output is then added to both streams."""
        pair = self.pair
        results: dict[str, Result] = {}
        for group in self.groups:
            pair.load(group)
        for group in self.groups:
            linears = pair.linears(group)
            if linears:
                solved = self._solve(group, linears)
            else:
                solved = {}
            del linears
            malloc_trim()
            pair.install(group, solved)
            results |= solved
        for stream, mlp in ((QUANTIZED, self.quantized), (FLOAT, self.floats)):
            self.states.add(stream, self.groups[0].expert, mlp)
        unload(self.groups, pair.floats, pair.quantized)
        return results

    def _solve(self, group: InputGroup, linears: Mapping[str, nn.Linear]) -> dict[str, Result]:
        """Return the results of linears of an expert that share their inputs."""
        if group.expert is None:
            return self._calibrate(group, linears, all_tokens=False)
        results: dict[str, Result] = {}
        # Why the tokens that were tried first are not used.
        reasons = dict.fromkeys(linears, "")
        sent = self.counts[group.expert]
        every = self.counts[-1]
        enough = (
            sent >= MIN_TOKENS_PER_INPUT * linear_of(self.pair.floats, group.modules[0]).in_features
        )
        record: dict[str, object] = {"tokens": sent, "tokens_from": "routed"}
        for all_tokens in (False, True) if enough else (True,):
            if all_tokens:
                record = {"tokens": every, "tokens_from": "all", "routed_tokens": sent}
            unsolved = {name: linears[name] for name in reasons}
            found = self._calibrate(group, unsolved, all_tokens=all_tokens)
            for name, result in found.items():
                if reasons[name]:
                    because = {"tokens_reason": reasons[name]}
                else:
                    because = {}
                results[name] = replace(result, record={**result.record, **record, **because})
            distorted = self._find_distorted(
                found, unsolved, "all tokens" if all_tokens else "the tokens sent to it"
            )
            reasons = {
                name: "; ".join(filter(None, (reasons[name], reason)))
                for name, reason in distorted.items()
            }
            if not reasons:
                break
        for name, reason in reasons.items():
            rounded = {**record, "tokens_reason": reason}
            results[name] = self.pair.solver.round(name, linears[name].weight, rounded)
        return results

    def _calibrate(
        self, group: InputGroup, linears: Mapping[str, nn.Linear], *, all_tokens: bool
    ) -> dict[str, Result]:
        """GPTQ on the tokens sent to the group's expert, or on all, weighted by the tokens'
        shares.
        """
        statistics = self.pair.statistics(group)
        for inputs, float_inputs, shares in self.states.pieces(group.expert, all_tokens=all_tokens):
            if group.writes:
                inputs = self.quantized.inner(inputs)
                if float_inputs is None:
                    float_inputs = None
                else:
                    float_inputs = self.floats.inner(float_inputs)
            if float_inputs is None:
                statistics.add(inputs * shares)
                continue
            difference = (float_inputs - inputs) * shares
            if group.writes:
                difference = times(difference, self.floats.down_proj.weight.t())
            statistics.add_pair(inputs * shares, difference)
        return self.pair.solver.solve(linears, statistics, outputs=group.writes)

    def _find_distorted(
        self, results: Mapping[str, Result], linears: Mapping[str, nn.Linear], tokens: str
    ) -> dict[str, str]:
        """Return the linears that changed by more than their schemes explain, with the reason for
        the manifest.
        """
        excesses = self.pair.solver.find_excesses(results, linears)
        result: dict[str, str] = {}
        for name, (error, bound) in excesses.items():
            result[name] = f"changed by {error:.3g} on {tokens}, expected at most {bound:.3g}"
        return result


def _owner(group: InputGroup) -> str:
    """Return the name of the module that a group's linears are in."""
    return group.modules[0].rpartition(".")[0]
