"""Runs requests that share the steps of an engine, and start and end while others run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.model.device import numbers
from quantkit.runtime.captured import PendingTokens
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation, Share, Siblings
from quantkit.runtime.request import FinishReason, Request
from quantkit.runtime.sampling import TokenLogprobs
from quantkit.runtime.slots import SlotTable
from quantkit.runtime.speculative import Speculation
from quantkit.tensors.finite import finite_logits, nonfinite_logits

READ_LAG = 2
"""Steps that a GPU may be ahead of the tokens that the host reads, so that it always has work.
Tokens drawn beyond the end of a sequence are dropped.
"""


@dataclass
class _Rows:
    """The rows of the next step. The first `decoding` rows append the last token of a running
    sequence each, which is on the device; the others read `texts`.

    Attributes:
        lengths, wanted: see `Engine.step`.
        drawing: the sequences that get new tokens, each with the index of its first logits.
        proposals: tokens that are verified, of some of them.
    """

    decoding: int = 0
    texts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    drawing: dict[Generation, int] = field(default_factory=dict)
    proposals: dict[Generation, list[int]] = field(default_factory=dict)
    chunks: list[_Chunk] = field(default_factory=list)


@dataclass
class _Chunk:
    """A part of a prompt that a step reads, up to `stop`; `echoed` is the index of the logits of
    its first row, if all its logits are needed.
    """

    reader: Generation
    stop: int
    echoed: int | None = None


class _Drawn(NamedTuple):
    """New tokens, each of one of the sequences, which the host has not read."""

    sequences: list[Generation]
    tokens: PendingTokens
    logprobs: list[TokenLogprobs | None]


class Scheduler:
    """Runs requests in an engine's slots, which the first request takes over, also back from
    another user.

    Each step has one row of each sequence that decodes, and chunks of prompts in turn, so a short
    prompt never waits for all of a long one. Chunks begin at fixed places of a prompt, so its
    numbers do not depend on other requests. Where several requests wait, the one whose share has
    the fewest running continuations is next.
    """

    def __init__(
        self, engine: Engine, *, any_prefix: bool = False, max_running: int | None = None
    ) -> None:
        """
        Args:
            any_prefix: see `SlotTable`.
            max_running: continuations that run at the same time; the engine's other slots hold
                prompts that may come again. None is as many as there are slots.
        """
        self.engine = engine
        if max_running is None:
            self._max_running = engine.slots
        else:
            self._max_running = max_running
        self.num_reused_tokens = (
            # Tokens of prompts that were not computed, because a slot held them.
            0
        )
        self.speculation = Speculation(engine)
        self._any_prefix = any_prefix
        self._switch = engine.model.config.rope_switch
        self._slots: SlotTable | None = None
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._pending: deque[_Drawn] = deque()

    @property
    def slots(self) -> int:
        """Continuations that run at the same time."""
        return self._max_running

    def require(self, request: Request) -> None:
        """Raise `RequestError` if the prompt and new tokens do not fit into a slot."""
        self.engine.require_length(request.length)

    @property
    def busy(self) -> bool:
        """Return whether a request has not ended."""
        return bool(self._waiting or self._reading or self._running)

    def add(self, request: Request, share: Share | None = None) -> list[Generation]:
        """Add a request, and return its continuations.

        Args:
            share: of the client whose request it is, if that has others; by default each request
                has its own.

        Raises:
            RequestError: as `require`, or if another user has taken over the engine while
                continuations of this one run.
        """
        self.require(request)
        self._require_engine()
        if self._slots is None or self._slots is not self.engine.slot_table:
            self._slots = self.engine.take_over(any_prefix=self._any_prefix)
        siblings = Siblings(waiting=request.samples, share=share or Share())
        result = []
        for number in range(request.samples):
            result.append(Generation(request, number, siblings, self.engine.model))
        self._waiting.extend(result)
        return result

    def end(self, generation: Generation, reason: FinishReason = "stop") -> None:
        """End a continuation now."""
        generation.finish_reason = generation.finish_reason or reason
        self.speculation.forget(generation)
        if generation in self._waiting:
            self._remove_waiting(generation)
        elif generation in self._reading:
            self._reading.remove(generation)
            self._table.release(generation.slot)
            generation.siblings.share.running -= 1
        elif generation in self._running:
            self._running.remove(generation)
            self._table.release(generation.slot, generation.new_cached_tokens)
            generation.siblings.share.running -= 1

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Run one step of the engine.

        Returns:
            The continuations that have new tokens or have ended, as far as the host knows.

        Raises:
            RequestError: if another user has taken over the engine.
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        self._require_engine()
        self._admit()
        rows = self._next_rows()
        scored = list[Generation]()
        began = time.perf_counter()
        sequences = list(rows.drawing)
        tokens_only = all(sequence.needs_tokens_only for sequence in sequences)
        if rows.slots and not rows.texts and self._switch is None and tokens_only:
            for sequence in sequences:
                sequence.drawn += 1
            tokens = self.engine.decode(rows.slots, rows.positions)
            self._pending.append(_Drawn(sequences, tokens, [None] * len(sequences)))
        elif rows.slots:
            logits = self.engine.step(
                self._tokens(rows), rows.slots, rows.positions, rows.logits_indices, rows.lengths
            )
            scored = self._finish_chunks(rows, logits)
            if sequences:
                self._draw(logits, rows.drawing, rows.proposals)
        news = self._collect_tokens(
            idle=not rows.slots or any(map(self.speculation.can_propose, sequences))
        )
        if rows.slots:
            self.speculation.count_step(len(rows.slots), time.perf_counter() - began)
        return [*scored, *news]

    @property
    def _table(self) -> SlotTable:
        assert self._slots is not None
        return self._slots

    def _require_engine(self) -> None:
        if self.busy and self._slots is not self.engine.slot_table:
            hint = "give each its own engine, or run them in one batch"
            raise RequestError("the engine is in use by another generation", hint=hint)

    def _admit(self) -> None:
        """Assign free slots to waiting continuations."""
        while (
            self._waiting
            and self._table.free
            and len(self._reading) + len(self._running) < self._max_running
        ):
            ready = (one for one in self._waiting if one.siblings.prompt_free)
            if (
                one := min(ready, key=lambda one: one.siblings.share.running, default=None)
            ) is None:
                return
            siblings = one.siblings
            logits = one.siblings.logits
            prompt = one.request.prompt
            self._remove_waiting(one)
            siblings.share.running += 1
            if logits is not None and (source := self._table.find_whole_prompt(prompt)) is not None:
                one.slot = self._table.take_for(source)
                self._reuse(one, source, len(prompt))
                if siblings.echoed is not None:
                    one.logprobs = siblings.echoed.cut(len(prompt))
                self._running.append(one)
                self._draw(logits, {one: 0}, {})
            else:
                siblings.reader = one
                siblings.logits = None
                one.slot = self._table.take(prompt)
                self._reading.append(one)

    def _remove_waiting(self, generation: Generation) -> None:
        self._waiting.remove(generation)
        generation.siblings.waiting -= 1
        if not generation.siblings.waiting:
            generation.siblings.logits = None

    def _reuse(self, generation: Generation, source: int, count: int) -> None:
        """Copy the first tokens of what it reads from a slot that holds them."""
        if count:
            self.engine.copy_prefix(source, generation.slot, count)
            self.num_reused_tokens += count
            self._set_stored(generation, count)

    def _set_stored(self, generation: Generation, count: int) -> None:
        generation.stored = count
        self._table.hold(generation.slot, generation.text, count)

    def _next_rows(self) -> _Rows:
        rows = _Rows(chunks=self._next_chunks())
        running = [
            one
            for one in self._running
            if one.drawn < one.request.max_new_tokens and not self._switches(one)
        ]
        known = [one for one in running if len(one.tokens) == one.drawn]
        reading = sum(chunk.stop - chunk.reader.stored for chunk in rows.chunks)
        rows.proposals = self.speculation.propose(known, len(running) + reading)
        plain = [one for one in running if one not in rows.proposals]
        for place, one in enumerate(sorted(plain, key=lambda one: one.position, reverse=True)):
            rows.slots.append(one.slot)
            rows.positions.append(one.position)
            rows.lengths.append(one.position + 1)
            rows.logits_indices.append(place)
            rows.drawing[one] = place
        rows.decoding = len(plain)
        for one, proposed in rows.proposals.items():
            rows.drawing[one] = len(rows.logits_indices)
            rows.logits_indices += range(len(rows.slots), len(rows.slots) + 1 + len(proposed))
            rows.texts += [one.tokens[-1], *proposed]
            rows.slots += [one.slot] * (1 + len(proposed))
            rows.positions += range(one.position, one.position + 1 + len(proposed))
            rows.lengths += range(one.position + 1, one.position + 2 + len(proposed))
        for chunk in rows.chunks:
            one = chunk.reader
            row = len(rows.slots)
            count = chunk.stop - one.stored
            length = len(one.text)
            rows.texts += one.text[one.stored : chunk.stop]
            rows.slots += [one.slot] * count
            rows.positions += range(one.stored, chunk.stop)
            rows.lengths += [length] * count
            if one.echoes:
                chunk.echoed = len(rows.logits_indices)
                rows.logits_indices += range(row, row + count)
            elif chunk.stop == length:
                rows.logits_indices.append(row + count - 1)
            if chunk.stop == length and one.request.max_new_tokens:
                rows.drawing[one] = len(rows.logits_indices) - 1
        return rows

    def _next_chunks(self) -> list[_Chunk]:
        """Return the parts of prompts that the next step reads, in turn."""
        size = left = self.engine.chunk
        chunks: list[_Chunk] = []
        for one in list(self._reading):
            if not one.stored and not one.echoes:
                self._reuse(one, *self._table.find_longest_prefix(one.text))
            stop = min(len(one.text), (one.stored // size + 1) * size)
            left -= stop - one.stored
            if chunks and left < 0:
                break
            chunks.append(_Chunk(one, stop))
            self._reading.rotate(-1)
        return chunks

    def _tokens(self, rows: _Rows) -> Tensor:
        device = self.engine.model.device
        parts = []
        if rows.decoding:
            parts.append(self.engine.last[numbers(rows.slots[: rows.decoding], device)])
        if rows.texts:
            parts.append(numbers(rows.texts, device))
        return torch.cat(parts)

    def _finish_chunks(self, rows: _Rows, logits: Tensor) -> list[Generation]:
        """Note which parts of prompts a step has read; the continuations that end with it."""
        ended = []
        for chunk in rows.chunks:
            one = chunk.reader
            if chunk.echoed is not None:
                one.score_prompt(logits[chunk.echoed :], one.stored, chunk.stop)
            self._set_stored(one, chunk.stop)
            if chunk.stop < len(one.text):
                continue
            self._reading.remove(one)
            self._running.append(one)
            if one.siblings.waiting and not one.drawn:
                one.siblings.logits = logits[rows.drawing[one]].unsqueeze(0).clone()
                if one.echoes and one.logprobs is not None:
                    one.siblings.echoed = one.logprobs.cut(len(one.text))
            if not one.request.max_new_tokens:
                finite_logits(logits)
                self.end(one, "length")
                ended.append(one)
        return ended

    def _draw(
        self,
        logits: Tensor,
        places: Mapping[Generation, int],
        proposals: Mapping[Generation, list[int]],
    ) -> None:
        """Draw the next tokens of sequences from logits [M, V], where each has its first row at
        its place.
        """
        sequences = list[Generation]()
        found = list[tuple[Tensor, TokenLogprobs | None]]()
        rows = list[int]()
        with self.engine.model.ops.single_threaded():
            for one, place in places.items():
                proposed = proposals.get(one, [])
                drawn = list(one.draw_verified(logits[place : place + 1 + len(proposed)], proposed))
                if proposed:
                    self.speculation.record_verification(one, proposed, len(drawn) - 1)
                sequences += [one] * len(drawn)
                rows += range(place, place + len(drawn))
                found += drawn
            if rows != list(range(len(logits))):
                logits = logits[numbers(rows, logits.device)]
            tokens = torch.cat([token for token, _ in found])
            pending = self.engine.set_last(
                [sequence.slot for sequence in sequences], tokens, logits
            )
        self._pending.append(_Drawn(sequences, pending, [logprobs for _, logprobs in found]))

    def _collect_tokens(self, *, idle: bool) -> list[Generation]:
        """Append tokens that have reached the host to their sequences; those that have new ones."""
        ends = self.engine.model.config.eos_token_ids
        news: dict[Generation, None] = {}
        for drawn in [self._pending.popleft() for _ in range(self._num_ready_steps(idle))]:
            rows = zip(drawn.sequences, drawn.tokens.read(), drawn.logprobs, strict=True)
            running = [row for row in rows if row[0].finish_reason is None]
            if any(token < 0 for _, token, _ in running):
                raise nonfinite_logits(dtype=self.engine.model.dtype)
            for one, token, logprobs in running:
                news[one] = None
                if one.finish_reason is not None:
                    continue
                one.append(token, logprobs, ends)
                if one.finish_reason is not None:
                    self.end(one)
        for one in [one for one in self._running if self._switches(one)]:
            self._running.remove(one)
            one.text = [*one.request.prompt, *one.tokens]  # of which the host has seen each
            self._set_stored(one, 0)
            self._reading.append(one)
        return list(news)

    def _num_ready_steps(self, idle: bool) -> int:
        """Return the number of steps whose tokens are read now; `idle` is whether the device has
        nothing else to do.
        """
        pending = self._pending
        if idle or any(
            sequence.drawn == 1 or self._switches(sequence)
            for drawn in pending
            for sequence in drawn.sequences
        ):
            return len(pending)
        count = max(0, len(pending) - READ_LAG)
        while count < len(pending) and pending[count].tokens.is_ready:
            count += 1
        return count

    def _switches(self, generation: Generation) -> bool:
        """Return whether its last token makes it longer than LongRoPE's short factors serve."""
        return (
            self._switch is not None and len(generation.text) <= self._switch <= generation.position
        )
