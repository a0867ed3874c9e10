"""GPTQ for a mixture of experts: one expert after the other, each on the tokens that are sent to it.

An expert that gets few tokens for a linear's inputs leaves that linear's Hessian singular, or close to it, and its
errors free to grow on other tokens. It is calibrated on all tokens then, whose states are much like those it is sent.
So is a linear whose weights its own tokens change by more than its scheme explains; where all tokens do so too, it is
rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.architectures.topology import InputGroup
from quantkit.calibration.block_pair import BlockPair, Finished, forget, linear_of
from quantkit.calibration.expert_streams import FLOAT, QUANTIZED, ExpertStreams, Piece
from quantkit.calibration.group_solver import Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.streams import Streams
from quantkit.distributed.group import ProcessGroup
from quantkit.memory import malloc_trim
from quantkit.model.decoder import Block
from quantkit.model.feed_forward import MLP
from quantkit.model.linear import no_tap
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import ROUNDING

ProgressCallback = Callable[[int], None]
"""Is told how many more linears are done with."""


def quantize_experts(
    pair: BlockPair, groups: Sequence[InputGroup], streams: Streams, processes: ProcessGroup,
    finished: Finished | None, told: ProgressCallback | None,
) -> dict[str, Result]:  # fmt: skip
    """The results of a branch that ends with experts, by tensor name; both streams are led through it.

    Args:
        groups: of the branch.
        processes: those that share the samples; all decide alike.
        finished, told: as for `BlockQuantizer.next_block`.

    Raises:
        NonFiniteError: if a weight or the inputs of a linear hold NaN or Inf.
    """
    states = streams.enter_experts(pair.quantized)
    counts = states.token_counts()
    processes.sum_(counts)
    work = _ExpertWork(pair, states, processes, counts.tolist())
    owners = [list(own) for _, own in itertools.groupby(groups, key=_owner)]
    results: dict[str, Result] = {}
    for own in owners:
        results |= work.expert(own, finished)
        if told is not None:
            told(sum(len(group.modules) for group in own))
    states.leave()
    return results


ENOUGH = 2
"""Tokens sent to an expert for each input of a linear; with fewer it is calibrated on all tokens."""


@dataclass(frozen=True)
class Tokens:
    """What a group of an expert's linears is calibrated on.

    Attributes:
        count: how many tokens.
        everyone: whether they are all tokens, since those sent to the expert do not do.
        sent: how many are.
    """

    count: int
    everyone: bool
    sent: int

    def record(self, reason: str) -> dict[str, object]:
        """What the manifest says of them.

        Args:
            reason: why they are not those that were tried first; empty where they are.
        """
        if not self.everyone:
            return {"tokens": self.count, "tokens_from": "routed"}
        told = {"tokens_reason": reason} if reason else {}
        return {"tokens": self.count, "tokens_from": "all", "routed_tokens": self.sent, **told}


@dataclass(frozen=True)
class _ExpertWork:
    """The experts of a block.

    Attributes:
        counts: tokens by expert, and last of all, in all processes.
    """

    pair: BlockPair
    states: ExpertStreams
    processes: ProcessGroup
    counts: Sequence[int]

    def expert(self, groups: Sequence[InputGroup], finished: Finished | None) -> dict[str, Result]:
        """The results of one expert, by tensor name, or of the shared ones."""
        pair, number = self.pair, groups[0].expert
        floats, quantized = (_mlp(block, groups[0]) for block in (pair.floats, pair.quantized))
        results: dict[str, Result] = {}
        for group in groups:
            pair.fill(group)
        for group in groups:
            solved: dict[str, Result] = {}
            if finished is not None:
                solved = pair.load_resumed(group, finished)
            elif pair.wanted(group):
                solved = self._solved(group, floats, quantized)
            malloc_trim()
            results |= pair.install(group, solved)
        for stream, mlp in ((QUANTIZED, quantized), (FLOAT, floats)):
            self.states.add(stream, number, mlp)
        forget(groups, pair.floats, pair.quantized)
        return results

    def _solved(self, group: InputGroup, floats: MLP, quantized: MLP) -> dict[str, Result]:
        """The results of some linears of an expert, by module within the block."""
        wanted = dict.fromkeys(self.pair.wanted(group), "")
        if group.expert is None:
            return self._calibrated(group, wanted, floats, quantized, everyone=False)
        results: dict[str, Result] = {}
        choices = self._choices(group)
        for tokens in choices:
            found = self._calibrated(group, wanted, floats, quantized, everyone=tokens.everyone)
            for module, (codes, record) in found.items():
                results[module] = codes, {**record, **tokens.record(wanted[module])}
            beyond = self._beyond(found, tokens)
            wanted = {module: "; ".join(filter(None, (wanted[module], told))) for module, told in beyond.items()}
            if not wanted:
                break
        for module, reason in wanted.items():
            codes = self.pair.rounded(module)
            results[module] = codes, {"solver": ROUNDING, **choices[-1].record(reason)}
        return results

    def _calibrated(
        self, group: InputGroup, modules: Collection[str], floats: MLP, quantized: MLP, *, everyone: bool
    ) -> dict[str, Result]:
        """What GPTQ makes of some linears of a group on the tokens sent to their expert, or on all."""
        statistics = self.pair.statistics(group)
        for piece in self.states.pieces(group.expert, everyone=everyone):
            _take_up(piece, group, floats, quantized, statistics)
        statistics.finish(self.processes)
        return self.pair.solve(group, statistics, modules)

    def _choices(self, group: InputGroup) -> list[Tokens]:
        """What an expert's group may be calibrated on, the better first."""
        assert group.expert is not None
        sent, everyone = self.counts[group.expert], self.counts[-1]
        enough = sent >= ENOUGH * linear_of(self.pair.floats, group.modules[0]).in_features
        own = [Tokens(sent, False, sent)] if enough else []
        return [*own, Tokens(everyone, True, sent)]

    def _beyond(self, found: Mapping[str, Result], tokens: Tokens) -> dict[str, str]:
        """The linears that tokens changed by more than their schemes explain, with what the manifest says of it."""
        changes = {module: self.pair.change(module, codes) for module, (codes, _) in found.items()}
        beyond = torch.tensor([float(not error <= bound) for error, bound in changes.values()], device=self.pair.device)
        self.processes.sum_(beyond)  # not all machines need round alike
        on = "all tokens" if tokens.everyone else "the tokens sent to it"
        return {
            module: f"changed by {error:.3g} on {on}, expected at most {bound:.3g}"
            for (module, (error, bound)), count in zip(changes.items(), beyond.tolist(), strict=True)
            if count
        }


def _take_up(piece: Piece, group: InputGroup, floats: MLP, quantized: MLP, statistics: HessianAccumulator) -> None:
    """Add a piece to the sums over a group's inputs, by the tokens' shares."""
    inputs, counterparts = piece.inputs, piece.counterparts
    if group.writes:
        inputs = quantized.inner(inputs, no_tap)
        counterparts = None if counterparts is None else floats.inner(counterparts, no_tap)
    if counterparts is None:
        statistics.add(inputs * piece.shares)
        return
    difference = (counterparts - inputs) * piece.shares
    if group.writes:
        difference = times(difference, floats.down_proj.weight.t())
    statistics.add_pair(inputs * piece.shares, difference)


def _owner(group: InputGroup) -> str:
    return group.modules[0].rpartition(".")[0]


def _mlp(block: Block, group: InputGroup) -> MLP:
    """The expert whose linears a group is."""
    found = block.get_submodule(_owner(group))
    assert isinstance(found, MLP)
    return found
