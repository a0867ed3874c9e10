"""Speculative decoding: tokens are proposed, and several verified in one step (2211.17192).

Proposals come from the text itself (prompt lookup), or else from a draft model. A sequence draws
its tokens one after the other, as it would without proposals and with the same random numbers, and
goes on to its next row of the step for as long as it draws what was proposed. So no proposal
changes what a model says, greedy or sampled. The draft model draws with the same random numbers
too, which makes equal tokens likely.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from quantkit.runtime.draft_lengths import Chance, StepTimes, lengths
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.lookup import Acceptance, Lookup


class Speculation:
    """Proposes tokens for a scheduler's sequences, where that makes them faster; the engine
    counts them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draft_tokens = engine.draft_tokens
        self._draft = engine.draft
        self._switch = engine.model.config.rope_switch
        self._ends = frozenset(engine.model.config.eos_token_ids)
        # Processes that share a model must take the same steps, and their clocks differ.
        self._adaptive = engine.model.group.size == 1
        self._times = StepTimes()
        self._drafted: dict[Generation, Acceptance] = {}

    def can_propose(self, generation: Generation) -> bool:
        """Return whether tokens may be proposed for a sequence."""
        return self._limit(generation) > 0

    def count_step(self, rows: int, seconds: float) -> None:
        """Learn how long a step took."""
        self._times.add(rows, seconds)

    def propose(self, sequences: Sequence[Generation], rows: int) -> dict[Generation, list[int]]:
        """Return what the next step verifies, of sequences whose tokens the host has read; `rows`
        are those of the step without it.
        """
        limits = {sequence: limit for sequence in sequences if (limit := self._limit(sequence))}
        if not limits:
            return {}
        found = {
            one: tokens
            for one, limit in limits.items()
            if (tokens := self._propose_from_text(one, limit))
        }
        chances = {one: Chance(len(tokens), _get_lookup(one).rate) for one, tokens in found.items()}
        if self._draft is not None:
            for one in [one for one in limits if one not in found]:  # in one order in all processes
                room = self._draft.length - one.position - 1
                rate = self._drafted.setdefault(one, Acceptance()).rate
                chances[one] = Chance(max(0, min(limits[one], room)), rate, self._draft.seconds)
        counts = self._choose_counts(chances, rows, len(sequences))
        proposals = {one: tokens[: counts[one]] for one, tokens in found.items()}
        if self._draft is not None:
            drafted = {chance: counts[chance] for chance in chances if chance not in found}
            proposals |= self._draft.propose(drafted)
            for one in drafted:
                if not proposals.get(one):
                    self._drafted[one].fade(1)
        return {
            one: kept
            for one, tokens in proposals.items()
            if (kept := self._cut_at_end_token(one, tokens))
        }

    def record_verification(
        self, generation: Generation, proposed: Sequence[int], accepted: int
    ) -> None:
        """Learn how many proposals for a sequence were right."""
        self._engine.num_proposed_tokens += len(proposed)
        self._engine.num_accepted_tokens += accepted
        if _get_lookup(generation).proposed is None and generation in self._drafted:
            self._drafted[generation].add(accepted, int(accepted < len(proposed)))

    def forget(self, generation: Generation) -> None:
        """A sequence has ended."""
        self._drafted.pop(generation, None)

    def _limit(self, generation: Generation) -> int:
        """Return how many tokens may be proposed for a sequence."""
        if generation.request.draft_tokens is None:
            limit = self._draft_tokens
        else:
            limit = generation.request.draft_tokens
        left = generation.request.max_new_tokens - generation.drawn - 1
        if self._switch is not None and len(generation.text) <= self._switch:
            left = min(left, self._switch - 1 - generation.position)
        return max(0, min(limit, left))

    def _propose_from_text(self, generation: Generation, count: int) -> list[int]:
        lookup = _get_lookup(generation)
        lookup.extend(generation.tokens[len(lookup) - len(generation.request.prompt) :])
        return lookup.propose(count)

    def _choose_counts(
        self, chances: Mapping[Generation, Chance], rows: int, tokens: int
    ) -> Mapping[Generation, int]:
        if not self._adaptive:
            return {one: chance.limit for one, chance in chances.items()}
        return lengths(chances, rows, tokens, self._times)

    def _cut_at_end_token(self, generation: Generation, tokens: Sequence[int]) -> list[int]:
        """Proposals up to an end token: nothing is drawn after one."""
        ends = self._ends.union(generation.request.end_ids)
        return list(itertools.takewhile(lambda token: token not in ends, tokens))


def _get_lookup(generation: Generation) -> Lookup:
    if generation.lookup is None:
        generation.lookup = Lookup(generation.request.prompt)
    return generation.lookup
