"""Runs requests that share the steps of an engine, and start and end while others run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quantkit.base.late import LateModule
from quantkit.errors import RequestError
from quantkit.model.device import copy_integers
from quantkit.runtime.captured import PendingTokens
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation, Share, Siblings
from quantkit.runtime.greedy import mark_nonfinite
from quantkit.runtime.request import FinishReason, Request
from quantkit.runtime.sampling import TokenLogprobs
from quantkit.runtime.slots import FEW_ROWS, SlotTable
from quantkit.runtime.speculative import Speculation

if TYPE_CHECKING:
    from quantkit.tensors import finite
else:
    finite = LateModule("quantkit.tensors.finite")

READ_LAG = 2
"""Steps that a GPU may be ahead of the tokens that the host reads, so that it always has work.
Tokens drawn beyond the end of a sequence are dropped.
"""


@dataclass
class _Rows:
    """The rows of the next step. The first `num_decoding` rows append the last token of a running
    sequence each, which is on the device; the others read `host_tokens`.

    Attributes:
        lengths, logits_indices: see `Engine.step`.
        drawing: the sequences that get new tokens, each with the index of its first logits.
        proposals: tokens that are verified, of some of them.
    """

    num_decoding: int = 0
    host_tokens: list[int] = field(default_factory=list)
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

    generation: Generation
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
        """Prepare to run requests; the first one takes over the engine.

        Args:
            any_prefix: see `SlotTable`.
            max_running: continuations that run at the same time; the engine's other slots keep
                prompts that may be requested again. None is the number of slots.
        """
        self.engine = engine
        if max_running is None:
            self._max_running = engine.slots
        else:
            self._max_running = max_running
        # Tokens of prompts that were not computed, because a slot contained them.
        self.num_reused_tokens = 0
        self.speculation = Speculation(engine)
        self._any_prefix = any_prefix
        self._switch = engine.model.config.rope_switch
        # None until the first request takes over the engine's slots.
        self._slot_table: SlotTable | None = None
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._pending: deque[_Drawn] = deque()

    @property
    def max_running(self) -> int:
        """Return how many continuations run at the same time."""
        return self._max_running

    def require_room(self, request: Request) -> None:
        """Raise `RequestError` if the prompt and new tokens do not fit into a slot, or the request
        wants proposals that the model cannot take back.
        """
        self.engine.require_length(request.length)
        self.engine.require_proposals(request.draft_tokens)

    @property
    def busy(self) -> bool:
        """Tell whether a request has not ended."""
        return bool(self._waiting or self._reading or self._running)

    def add(self, request: Request, share: Share | None = None) -> list[Generation]:
        """Add a request, and return its continuations.

        Args:
            share: of the client whose request it is, if that has others; by default each request
                has its own.

        Raises:
            RequestError: as `require_room`, or if another user has taken over the engine while
                continuations of this one run.
        """
        self.require_room(request)
        self._require_engine()
        # Another user may have taken over the slots since; their contents are then lost.
        if self._slot_table is None or self._slot_table is not self.engine.slot_table:
            self._slot_table = self.engine.take_over(any_prefix=self._any_prefix)
        siblings = Siblings(waiting=request.samples, share=share or Share())
        generations: list[Generation] = []
        for number in range(request.samples):
            generations.append(Generation(request, number, siblings, self.engine.model))
        self._waiting.extend(generations)
        return generations

    def end(self, generation: Generation, reason: FinishReason = "stop") -> None:
        """End a continuation now."""
        generation.finish_reason = generation.finish_reason or reason
        self.speculation.forget(generation)
        if generation in self._waiting:
            self._remove_waiting(generation)
        elif generation in self._reading:
            self._reading.remove(generation)
            # Complete chunks of the prompt stay in the slot, and can be reused.
            self._held_slot_table.release(generation.slot)
            generation.siblings.share.running -= 1
        elif generation in self._running:
            self._running.remove(generation)
            self._held_slot_table.release(generation.slot, generation.new_cached_tokens)
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
        scored: list[Generation] = []
        start_time = time.perf_counter()
        sequences = list(rows.drawing)
        # A captured step takes no lengths of sequences and returns no logits.
        tokens_only = all(sequence.needs_tokens_only for sequence in sequences)
        if rows.slots and not rows.host_tokens and self._switch is None and tokens_only:
            # `Generation.draw` counts the tokens of other steps.
            for sequence in sequences:
                sequence.num_drawn += 1
            tokens = self.engine.decode(rows.slots, rows.positions)
            self._pending.append(_Drawn(sequences, tokens, [None] * len(sequences)))
        elif rows.slots:
            logits = self.engine.step(
                self._tokens(rows), rows.slots, rows.positions, rows.logits_indices, rows.lengths
            )
            scored = self._finish_chunks(rows, logits)
            if sequences:
                self._draw(logits, rows.drawing, rows.proposals)
        # Proposals continue the last tokens, so the host has to read these before the next step.
        read_all = not rows.slots or any(map(self.speculation.can_propose, sequences))
        updated = self._collect_tokens(read_all=read_all)
        if rows.slots:
            self.speculation.count_step(len(rows.slots), time.perf_counter() - start_time)
        return [*scored, *updated]

    @property
    def _held_slot_table(self) -> SlotTable:
        assert self._slot_table is not None
        return self._slot_table

    def _require_engine(self) -> None:
        """Raise `RequestError` if another user has taken over slots with running sequences."""
        if self.busy and self._slot_table is not self.engine.slot_table:
            hint = "give each its own engine, or run them in one batch"
            raise RequestError("the engine is in use by another generation", hint=hint)

    def _admit(self) -> None:
        """Assign free slots to waiting continuations."""
        while (
            self._waiting
            and self._held_slot_table.has_free_slot
            and len(self._reading) + len(self._running) < self._max_running
        ):
            generation = self._next_waiting()
            if generation is None:
                return
            siblings = generation.siblings
            # `_remove_waiting` drops them if this is the last continuation that waits.
            logits = siblings.logits
            prompt = generation.request.prompt
            self._remove_waiting(generation)
            siblings.share.running += 1
            # A sibling has read the prompt, but its slot may have been taken since.
            source = None if logits is None else self._held_slot_table.find_whole_prompt(prompt)
            if logits is not None and source is not None:
                generation.slot = self._held_slot_table.take_for(source)
                self._reuse(generation, source, len(prompt))
                if siblings.echoed is not None:
                    generation.logprobs = siblings.echoed.cut(len(prompt))
                self._running.append(generation)
                self._draw(logits, {generation: 0}, {})
            else:
                siblings.prompt_reader = generation
                siblings.logits = None
                generation.slot = self._held_slot_table.take(prompt)
                self._reading.append(generation)

    def _next_waiting(self) -> Generation | None:
        """Choose the continuation that gets the next slot; None if all wait for a sibling."""
        # One request with many samples must not keep all slots from the others.
        next_generation = None
        for generation in self._waiting:
            if not generation.siblings.prompt_free:
                continue
            running = generation.siblings.share.running
            if next_generation is None or running < next_generation.siblings.share.running:
                next_generation = generation
        return next_generation

    def _remove_waiting(self, generation: Generation) -> None:
        """Remove a continuation from the queue, and logits that no sibling needs any more."""
        self._waiting.remove(generation)
        generation.siblings.waiting -= 1
        if not generation.siblings.waiting:
            generation.siblings.logits = None

    def _reuse(self, generation: Generation, source: int, count: int) -> None:
        """Copy keys and values of the first tokens of a text from a slot that contains them."""
        if count:
            self.engine.copy_prefix(source, generation.slot, count)
            self.num_reused_tokens += count
            self._set_stored(generation, count)

    def _set_stored(self, generation: Generation, count: int) -> None:
        """Record that the slot of a sequence contains the first tokens of its text."""
        generation.num_stored = count
        self._held_slot_table.record_contents(generation.slot, generation.tokens_to_read, count)

    def _next_rows(self) -> _Rows:
        """Collect the rows of the next step: decoding sequences, proposals, chunks of prompts."""
        rows = _Rows(chunks=self._next_chunks())
        running: list[Generation] = []
        # Running sequences whose tokens the host has read.
        up_to_date: list[Generation] = []
        for generation in self._running:
            # The host may not have read that a sequence has drawn all its tokens.
            if generation.num_drawn >= generation.request.max_new_tokens:
                continue
            if self._switches(generation):
                continue
            running.append(generation)
            if len(generation.tokens) == generation.num_drawn:
                up_to_date.append(generation)
        num_chunk_rows = sum(chunk.stop - chunk.generation.num_stored for chunk in rows.chunks)
        rows.proposals = self.speculation.propose(up_to_date, len(running) + num_chunk_rows)
        self._add_decoding_rows(rows, running)
        for generation, proposed in rows.proposals.items():
            num_rows = 1 + len(proposed)
            start = generation.position
            rows.drawing[generation] = len(rows.logits_indices)
            rows.logits_indices += range(len(rows.slots), len(rows.slots) + num_rows)
            rows.host_tokens += [generation.tokens[-1], *proposed]
            rows.slots += [generation.slot] * num_rows
            rows.positions += range(start, start + num_rows)
            rows.lengths += range(start + 1, start + 1 + num_rows)
        for chunk in rows.chunks:
            self._add_chunk_rows(rows, chunk)
        return rows

    def _add_decoding_rows(self, rows: _Rows, running: list[Generation]) -> None:
        """Add one row for each running sequence without proposals."""
        decoding = [generation for generation in running if generation not in rows.proposals]
        # Padding rows take the positions after the last row's, so the shortest sequence is last.
        decoding.sort(key=lambda generation: generation.position, reverse=True)
        for row, generation in enumerate(decoding):
            rows.slots.append(generation.slot)
            rows.positions.append(generation.position)
            rows.lengths.append(generation.position + 1)
            rows.logits_indices.append(row)
            rows.drawing[generation] = row
        rows.num_decoding = len(decoding)

    def _add_chunk_rows(self, rows: _Rows, chunk: _Chunk) -> None:
        """Add the rows of a part of a prompt, and the indices of the logits that it needs."""
        generation = chunk.generation
        first_row = len(rows.slots)
        count = chunk.stop - generation.num_stored
        length = len(generation.tokens_to_read)
        rows.host_tokens += generation.tokens_to_read[generation.num_stored : chunk.stop]
        rows.slots += [generation.slot] * count
        rows.positions += range(generation.num_stored, chunk.stop)
        # The length of the whole prompt: rotary positions must be those of one pass over it.
        rows.lengths += [length] * count
        if generation.echoes:
            chunk.echoed = len(rows.logits_indices)
            rows.logits_indices += range(first_row, first_row + count)
        elif chunk.stop == length:
            rows.logits_indices.append(first_row + count - 1)
        if chunk.stop == length and generation.request.max_new_tokens:
            rows.drawing[generation] = len(rows.logits_indices) - 1

    def _next_chunks(self) -> list[_Chunk]:
        """Choose the parts of prompts that the next step reads, in turn."""
        remaining_rows = self.engine.chunk_rows
        if self._running:
            remaining_rows = min(remaining_rows, self.engine.shared_chunk_rows)
        max_rows = remaining_rows
        chunks: list[_Chunk] = []
        # A copy: the queue is rotated in the loop.
        for generation in list(self._reading):
            # Reuse is decided when a prompt is first read: prompts read meanwhile count too. An
            # echoed prompt needs the logits of all its tokens.
            if not generation.num_stored and not generation.echoes:
                self._reuse(
                    generation,
                    *self._held_slot_table.find_longest_prefix(generation.tokens_to_read),
                )
            stop = self._find_chunk_end(generation, max_rows)
            remaining_rows -= stop - generation.num_stored
            if chunks and remaining_rows < 0:
                break
            chunks.append(_Chunk(generation, stop))
            self._reading.rotate(-1)
        return chunks

    def _find_chunk_end(self, generation: Generation, max_rows: int) -> int:
        """Return the position up to which the next step reads a text: `max_rows` further, or a few
        more.
        """
        size = self.engine.chunk_rows
        # Chunks end at multiples of the size, also after a reused prefix.
        end = min(len(generation.tokens_to_read), (generation.num_stored // size + 1) * size)
        stop = generation.num_stored + max_rows
        # Few rows would be summed in another order than with the rest of the chunk.
        if end - stop <= FEW_ROWS:
            return end
        return stop

    def _tokens(self, rows: _Rows) -> Tensor:
        """Collect the tokens of a step on the device."""
        device = self.engine.model.device
        parts: list[Tensor] = []
        # The host may not have read these tokens yet.
        if rows.num_decoding:
            parts.append(
                self.engine.last_tokens[copy_integers(rows.slots[: rows.num_decoding], device)]
            )
        if rows.host_tokens:
            parts.append(copy_integers(rows.host_tokens, device))
        return torch.cat(parts)

    def _finish_chunks(self, rows: _Rows, logits: Tensor) -> list[Generation]:
        """Record the parts of prompts that a step has read.

        Returns the continuations that end with their prompt, because it is only scored.
        """
        ended: list[Generation] = []
        for chunk in rows.chunks:
            generation = chunk.generation
            if chunk.echoed is not None:
                generation.score_prompt(logits[chunk.echoed :], generation.num_stored, chunk.stop)
            self._set_stored(generation, chunk.stop)
            is_whole = chunk.stop % self.engine.chunk_rows == 0
            is_last = chunk.stop == len(generation.tokens_to_read)
            # Siblings continue after the last token of the prompt.
            if is_whole or (is_last and generation.siblings.waiting):
                self.engine.keep_states(generation.slot)
            if not is_last:
                continue
            self._reading.remove(generation)
            self._running.append(generation)
            siblings = generation.siblings
            if siblings.waiting and not generation.num_drawn:
                # A copy: a view would keep the logits of the whole step in memory.
                siblings.logits = logits[rows.drawing[generation]].unsqueeze(0).clone()
                if generation.echoes and generation.logprobs is not None:
                    siblings.echoed = generation.logprobs.cut(len(generation.tokens_to_read))
            if not generation.request.max_new_tokens:
                # No token is drawn whose logits would be checked.
                finite.require_finite_logits(logits)
                self.end(generation, "length")
                ended.append(generation)
        return ended

    def _draw(
        self,
        logits: Tensor,
        places: Mapping[Generation, int],
        proposals: Mapping[Generation, list[int]],
    ) -> None:
        """Draw the next tokens of sequences from logits [M, V].

        Args:
            places: of each sequence the index of its first row of logits.
            proposals: tokens to verify, of some of them.
        """
        # One entry for each token drawn.
        sequences: list[Generation] = []
        tokens: list[Tensor] = []
        logprobs: list[TokenLogprobs | None] = []
        rows: list[int] = []
        with self.engine.model.ops.single_threaded():
            for generation, first_row in places.items():
                proposed = proposals.get(generation, [])
                sequence_logits = logits[first_row : first_row + 1 + len(proposed)]
                count = 0
                for token, token_logprobs in generation.draw_verified(sequence_logits, proposed):
                    sequences.append(generation)
                    tokens.append(token)
                    logprobs.append(token_logprobs)
                    count += 1
                rows += range(first_row, first_row + count)
                if proposed:
                    # The last token drawn is not a proposal.
                    self.speculation.record_verification(generation, proposed, count - 1)
            # Usually each row has drawn a token: then the logits need not be copied.
            if rows != list(range(len(logits))):
                logits = logits[copy_integers(rows, logits.device)]
            slots = [generation.slot for generation in sequences]
            drawn = torch.cat(tokens)
            pending = self.engine.set_last(slots, drawn, mark_nonfinite(drawn, logits))
        self._pending.append(_Drawn(sequences, pending, logprobs))

    def _collect_tokens(self, *, read_all: bool) -> list[Generation]:
        """Append tokens that have reached the host to their sequences.

        Returns the sequences that have new tokens.
        """
        ends = self.engine.model.config.eos_token_ids
        # A dictionary keeps the order, and has each sequence once.
        updated: dict[Generation, None] = {}
        # Removed before any is read: an error below must not leave a part of them in the queue.
        ready_steps = [
            self._pending.popleft() for _ in range(self._num_ready_steps(read_all=read_all))
        ]
        for drawn in ready_steps:
            rows = zip(drawn.sequences, drawn.tokens.read(), drawn.logprobs, strict=True)
            # Tokens after the end of a sequence are dropped, also if their logits are NaN.
            running = [row for row in rows if row[0].finish_reason is None]
            if any(token < 0 for _, token, _ in running):
                raise finite.nonfinite_logits(dtype=self.engine.model.dtype)
            for generation, token, logprobs in running:
                updated[generation] = None
                # An earlier token of the same step may have ended it.
                if generation.finish_reason is not None:
                    continue
                generation.append(token, logprobs, ends)
                if generation.finish_reason is not None:
                    self.end(generation)
        # Rotary positions have switched: all tokens are read again with the others.
        switching = [generation for generation in self._running if self._switches(generation)]
        for generation in switching:
            self._running.remove(generation)
            # `_num_ready_steps` lets the host read all tokens at a switch.
            generation.tokens_to_read = [*generation.request.prompt, *generation.tokens]
            self._set_stored(generation, 0)
            self._reading.append(generation)
        return list(updated)

    def _num_ready_steps(self, *, read_all: bool) -> int:
        """Count the steps whose tokens are read now.

        `read_all` reads all, because nothing is gained if the device runs ahead.
        """
        pending = self._pending
        if read_all:
            return len(pending)
        for drawn in pending:
            for generation in drawn.sequences:
                # A first token is read at once, as clients wait for it.
                if generation.num_drawn == 1 or self._switches(generation):
                    return len(pending)
        count = max(0, len(pending) - READ_LAG)
        while count < len(pending) and pending[count].tokens.is_ready:
            count += 1
        return count

    def _switches(self, generation: Generation) -> bool:
        """Tell whether the last token makes a sequence too long for LongRoPE's short factors."""
        return (
            self._switch is not None
            and len(generation.tokens_to_read) <= self._switch <= generation.position
        )
