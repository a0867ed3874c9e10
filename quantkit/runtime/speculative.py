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

from quantkit.runtime.draft_lengths import Chance, StepTimes, choose_lengths
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
        # Processes that share a model must run the same steps, and their clocks differ.
        self._adaptive = engine.model.group.size == 1
        self._times = StepTimes()
        # How often proposals of the draft model are right; `Lookup` counts its own.
        self._drafted: dict[Generation, Acceptance] = {}

    def can_propose(self, generation: Generation) -> bool:
        """Tell whether tokens may be proposed for a sequence."""
        return self._limit(generation) > 0

    def count_step(self, rows: int, seconds: float) -> None:
        """Learn how long a step took."""
        self._times.add(rows, seconds)

    def propose(self, sequences: Sequence[Generation], rows: int) -> dict[Generation, list[int]]:
        """Propose tokens for the next step to verify.

        Args:
            sequences: whose tokens the host has read.
            rows: of the step without proposals.
        """
        # Dictionaries keep the order of `sequences`, which is the same in all processes.
        limits: dict[Generation, int] = {}
        for generation in sequences:
            limit = self._limit(generation)
            if limit:
                limits[generation] = limit
        if not limits:
            return {}
        # Proposals from the text cost nothing, so they come before those of a draft model.
        text_proposals: dict[Generation, list[int]] = {}
        chances: dict[Generation, Chance] = {}
        for generation, limit in limits.items():
            tokens = self._propose_from_text(generation, limit)
            if tokens:
                text_proposals[generation] = tokens
                chances[generation] = Chance(len(tokens), _get_lookup(generation).rate)
        if self._draft is not None:
            for generation, limit in limits.items():
                if generation not in text_proposals:
                    room = self._draft.length - generation.position - 1
                    rate = self._drafted.setdefault(generation, Acceptance()).rate
                    draft_limit = max(0, min(limit, room))
                    chances[generation] = Chance(draft_limit, rate, self._draft.seconds)
        counts = self._choose_counts(chances, rows, len(sequences))
        proposals: dict[Generation, list[int]] = {}
        for generation, tokens in text_proposals.items():
            proposals[generation] = tokens[: counts[generation]]
        if self._draft is not None:
            draft_counts: dict[Generation, int] = {}
            for generation in chances:
                if generation not in text_proposals:
                    draft_counts[generation] = counts[generation]
            proposals |= self._draft.propose(draft_counts)
            # A rate that was low once would never be measured again.
            for generation in draft_counts:
                if not proposals.get(generation):
                    self._drafted[generation].fade(1)
        valid_proposals: dict[Generation, list[int]] = {}
        for generation, tokens in proposals.items():
            tokens_before_end = self._cut_at_end_token(generation, tokens)
            if tokens_before_end:
                valid_proposals[generation] = tokens_before_end
        return valid_proposals

    def record_verification(
        self, generation: Generation, proposed: Sequence[int], accepted: int
    ) -> None:
        """Learn how many proposals for a sequence were right."""
        self._engine.num_proposed_tokens += len(proposed)
        self._engine.num_accepted_tokens += accepted
        # `Lookup` compares its own proposals when it reads the next tokens.
        if _get_lookup(generation).proposed is None and generation in self._drafted:
            self._drafted[generation].add(accepted, int(accepted < len(proposed)))

    def forget(self, generation: Generation) -> None:
        """Drop the counts of a sequence that has ended."""
        self._drafted.pop(generation, None)

    def _limit(self, generation: Generation) -> int:
        """Compute how many tokens may be proposed for a sequence."""
        if generation.request.draft_tokens is None:
            limit = self._draft_tokens
        else:
            limit = generation.request.draft_tokens
        # A step always draws one token more than the accepted proposals.
        remaining = generation.request.max_new_tokens - generation.num_drawn - 1
        # The sequence is read again with other rotary positions once it exceeds the switch.
        if self._switch is not None and len(generation.tokens_to_read) <= self._switch:
            remaining = min(remaining, self._switch - 1 - generation.position)
        return max(0, min(limit, remaining))

    def _propose_from_text(self, generation: Generation, count: int) -> list[int]:
        """Update the lookup with the sequence's new tokens, and propose at most `count` tokens."""
        lookup = _get_lookup(generation)
        lookup.extend(generation.tokens[len(lookup) - len(generation.request.prompt) :])
        return lookup.propose(count)

    def _choose_counts(
        self, chances: Mapping[Generation, Chance], rows: int, tokens: int
    ) -> Mapping[Generation, int]:
        """Choose how many tokens to propose for each sequence, by measured times if possible."""
        if not self._adaptive:
            return {generation: chance.limit for generation, chance in chances.items()}
        return choose_lengths(chances, rows, tokens, self._times)

    def _cut_at_end_token(self, generation: Generation, tokens: Sequence[int]) -> list[int]:
        """Remove an end token and the tokens after it: nothing is drawn after one."""
        ends = self._ends.union(generation.request.end_ids)
        return list(itertools.takewhile(lambda token: token not in ends, tokens))


def _get_lookup(generation: Generation) -> Lookup:
    """Return the lookup of a sequence; it reads the prompt when it is first needed."""
    if generation.lookup is None:
        generation.lookup = Lookup(generation.request.prompt)
    return generation.lookup
