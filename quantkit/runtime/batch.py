"""Requests that share the steps of an engine, joining and leaving while others run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.model.device import numbers
from quantkit.runtime.captured import DeviceTokens, LateTokens
from quantkit.runtime.completion import FinishReason
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation, Siblings
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import TokenLogprobs, token_logprobs
from quantkit.runtime.slots import SlotTable
from quantkit.tensors.finite import finite_logits, nonfinite_logits

_LOOKS = {"cpu": 1}
MAX_LOOKAHEAD = 8
"""Tokens of a sequence that a device draws before the host looks at them, but for the first: each look waits for all
that was asked of it."""
READ_LAG = 2
"""Tokens of a sequence that are drawn before the host reads what a recorded step drew: meanwhile the device has work.
Those beyond an end are left out."""


@dataclass
class _Rows:
    """A step in the making: its rows, those whose logits are wanted, and what for. First come those of sequences that
    decode, `decoding` of them, whose tokens are on the device."""

    decoding: int = 0
    texts: list[int] = field(default_factory=list)  # tokens of the rows after them
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the sequences, see `Engine.step`
    wanted: list[int] = field(default_factory=list)
    drawing: dict[Generation, int] = field(default_factory=dict)  # and the place of its logits
    chunks: list[_Chunk] = field(default_factory=list)


@dataclass
class _Chunk:
    """What a step reads of a prompt.

    Attributes:
        stop: up to where.
        echoed: the place of the logits of its first row, where all are wanted.
    """

    of: Generation
    stop: int
    echoed: int | None = None


@dataclass
class _Drawn:
    """Tokens of several sequences that the host has not seen."""

    by: list[Generation]
    tokens: LateTokens
    extremes: Tensor | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    recorded: bool = False


class Batch:
    """Runs requests over an engine's slots.

    Each step carries one row of each sequence that decodes, and chunks of prompts in turn, so a short prompt never
    waits for all of a long one. Chunks begin at fixed places of a prompt: what else runs does not change its numbers.

    It has the engine from the first request on, until another one is lent it; with the next request it takes it back.
    """

    def __init__(self, engine: Engine, *, any_prefix: bool = False) -> None:
        """
        Args:
            any_prefix: whether a prompt goes on from whatever a slot holds of it, new tokens of the answer before as
                well, as a conversation does. Else only from what has the same bits.
        """
        self.engine = engine
        self.reused = 0
        """Tokens of prompts that were not computed, but found in a slot."""
        model = engine.model
        self._any_prefix = any_prefix
        self._switch = model.config.rope_switch
        self._slots = self._table()
        self._loan: int | None = None
        self._ahead = _LOOKS.get(model.device.type, MAX_LOOKAHEAD)
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._unseen: deque[_Drawn] = deque()

    @property
    def slots(self) -> int:
        """Continuations that run together."""
        return self.engine.slots

    def require(self, request: Request) -> None:
        """
        Raises:
            RequestError: unless a slot holds its prompt and new tokens.
        """
        self.engine.require_length(request.length)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._waiting or self._reading or self._running)

    def add(self, request: Request) -> list[Generation]:
        """Take up a request; its continuations.

        Raises:
            RequestError: if a slot does not hold its prompt and new tokens, or another has taken over the engine while
                continuations of this one run.
        """
        self.require(request)
        self._require_engine()
        if not self.engine.is_owned(self._loan):
            self._slots, self._loan = self._table(), self.engine.acquire()
        siblings = Siblings(waiting=request.samples)
        found = [Generation(request, number, siblings, self.engine.model) for number in range(request.samples)]
        self._waiting.extend(found)
        return found

    def end(self, generation: Generation, reason: FinishReason = "stop") -> None:
        """Let a continuation end here, whatever is still to come of it."""
        generation.finish_reason = generation.finish_reason or reason
        if generation in self._waiting:
            self._waiting.remove(generation)
            self._begun(generation)
        elif generation in self._reading:
            self._reading.remove(generation)
            self._slots.release(generation.place)
        elif generation in self._running:
            self._running.remove(generation)
            self._slots.release(generation.place, generation.added)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """One step of the engine; the continuations that have new tokens or have ended, as far as is known.

        Raises:
            RequestError: if another has taken over the engine.
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        self._require_engine()
        ended: list[Generation] = []
        self._admit()
        rows = self._compose()
        if rows.slots and not self._decode(rows):
            tokens = self._tokens(rows)
            logits = self.engine.step(tokens, rows.slots, rows.positions, rows.wanted, rows.lengths)
            ended = self._note_chunks(rows, logits)
            if rows.drawing:
                places = list(rows.drawing.values())
                if places != list(range(len(logits))):
                    logits = logits[numbers(places, logits.device)]
                self._draw(logits, list(rows.drawing))
        return [*ended, *self._look(idle=not rows.slots)]

    def _require_engine(self) -> None:
        """
        Raises:
            RequestError: if another has taken over the engine, and with it what was going on.
        """
        if self.busy and not self.engine.is_owned(self._loan):
            raise RequestError(
                "the engine is in use by another generation",
                hint="give each an engine of its own, or run them in one batch",
            )  # fmt: skip

    def _table(self) -> SlotTable:
        """Of slots that hold nothing."""
        config = self.engine.model.config
        return SlotTable(
            self.engine.slots, self.engine.chunk, any_prefix=self._any_prefix, windows=any(config.windows),
            unstretched=config.max_unscaled_context if config.follows_length else None,
            switches=config.rope_switch is not None,
        )  # fmt: skip

    def _admit(self) -> None:
        """Give free slots to those that wait."""
        for one in list(self._waiting):
            if not self._slots.free:
                return
            prompt, siblings = one.request.prompt, one.siblings
            if siblings.logits is not None and (source := self._slots.with_all_of(prompt)) is not None:
                one.slot = self._slots.take_for(source)
                self._copy(one, source, len(prompt))
                if siblings.echoed is not None:
                    one.logprobs = siblings.echoed.cut(len(prompt))
                self._running.append(one)
                self._draw(siblings.logits, [one])
            elif siblings.logits is not None or siblings.unread:
                siblings.reader, siblings.logits = one, None
                one.slot = self._slots.take(prompt)
                self._reading.append(one)
            else:
                continue
            self._waiting.remove(one)
            self._begun(one)

    def _begun(self, one: Generation) -> None:
        """Of its siblings, one less waits."""
        one.siblings.waiting -= 1
        if not one.siblings.waiting:
            one.siblings.logits = None

    def _copy(self, one: Generation, source: int, count: int) -> None:
        """Let its slot begin with the first tokens of what it reads, which another holds."""
        if count:
            self.engine.copy_prefix(source, one.place, count)
            self.reused += count
            self._keep(one, count)

    def _keep(self, one: Generation, count: int) -> None:
        """So many tokens of what it reads are in its slot now."""
        one.stored = count
        self._slots.hold(one.place, one.text, count)

    def _compose(self) -> _Rows:
        rows = _Rows()
        running = [one for one in self._running if not self._switches(one)]
        going_on = [one for one in running if one.drawn < one.request.max_new_tokens]
        if running := sorted(going_on, key=lambda one: one.position, reverse=True):
            rows.slots, rows.positions = [one.place for one in running], [one.position for one in running]
            rows.lengths = [position + 1 for position in rows.positions]
            rows.decoding, rows.wanted = len(running), list(range(len(running)))
            rows.drawing = {one: place for place, one in enumerate(running)}
        for chunk in self._chunks():
            one, row, text = chunk.of, len(rows.slots), chunk.of.text
            rows.texts += text[one.stored : chunk.stop]
            rows.slots += [one.place] * (chunk.stop - one.stored)
            rows.positions += range(one.stored, chunk.stop)
            rows.lengths += [len(text)] * (chunk.stop - one.stored)
            rows.chunks.append(chunk)
            if one.echoes:
                chunk.echoed = len(rows.wanted)
                rows.wanted += range(row, len(rows.slots))
            elif chunk.stop == len(text):
                rows.wanted.append(len(rows.slots) - 1)
            if chunk.stop == len(text) and one.request.max_new_tokens:
                rows.drawing[one] = len(rows.wanted) - 1
        return rows

    def _tokens(self, rows: _Rows) -> Tensor:
        """Of the rows of a step."""
        device, parts = self.engine.model.device, []
        if rows.decoding:
            parts.append(self.engine.last[numbers(rows.slots[: rows.decoding], device)])
        if rows.texts:
            parts.append(numbers(rows.texts, device))
        return torch.cat(parts)

    def _decode(self, rows: _Rows) -> bool:
        """Let the engine draw by itself, if all that is wanted of a step are the likeliest tokens; whether it did."""
        by = list(rows.drawing)
        if rows.chunks or self._switch is not None or not all(one.takes_likeliest for one in by):
            return False
        tokens = self.engine.decode(rows.slots, rows.positions)
        if tokens is None:
            return False
        for one in by:
            one.drawn += 1
        self._unseen.append(_Drawn(by, tokens, recorded=True))
        return True

    def _chunks(self) -> list[_Chunk]:
        """What is read of prompts in this step; who was served last is served next time after all others."""
        size = left = self.engine.chunk
        taken: list[_Chunk] = []
        for one in list(self._reading):
            if not one.stored and not one.echoes:
                self._copy(one, *self._slots.best(one.text))
            stop = min(len(one.text), (one.stored // size + 1) * size)
            left -= stop - one.stored
            if taken and left < 0:
                break
            taken.append(_Chunk(one, stop))
            self._reading.rotate(-1)
        return taken

    def _note_chunks(self, rows: _Rows, logits: Tensor) -> list[Generation]:
        """Take up what a step has read of prompts; those that end with it."""
        ended = []
        for chunk in rows.chunks:
            one = chunk.of
            if chunk.echoed is not None:
                one.note_prompt(logits[chunk.echoed :], one.stored, chunk.stop)
            self._keep(one, chunk.stop)
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

    def _draw(self, logits: Tensor, by: list[Generation]) -> None:
        """The next token of each, of logits [B, V]."""
        extremes = None
        with self.engine.model.ops.single_threaded():
            if self._ahead == 1:
                finite_logits(logits)
            else:
                extremes = torch.stack(torch.aminmax(logits))
                logits = logits.nan_to_num()  # drawn from, but never given out
            tokens = torch.cat([one.draw(logits[row : row + 1]) for row, one in enumerate(by)])
            logprobs = [
                None if one.request.logprobs is None
                else token_logprobs(logits[row : row + 1], tokens[row : row + 1], one.request.logprobs)
                for row, one in enumerate(by)
            ]  # fmt: skip
            self.engine.last[numbers([one.place for one in by], tokens.device)] = tokens
        self._unseen.append(_Drawn(by, DeviceTokens(tokens), extremes, logprobs))

    def _look(self, *, idle: bool) -> list[Generation]:
        """Take up what was drawn, as far as it is time to; the continuations that have news."""
        ends = self.engine.model.config.eos_token_ids
        taken = [self._unseen.popleft() for _ in range(self._due(idle))]
        if extremes := [drawn.extremes for drawn in taken if drawn.extremes is not None]:
            finite_logits(torch.stack(extremes))
        news: dict[Generation, None] = {}
        for drawn in taken:
            for one, token, logprobs in zip(
                drawn.by, drawn.tokens.read(), drawn.logprobs or [None] * len(drawn.by), strict=True
            ):
                if one.finish_reason is not None:
                    continue
                if token < 0:
                    raise nonfinite_logits(dtype=self.engine.model.dtype)
                news[one] = None
                one.take(token, logprobs, ends)
                if one.finish_reason is not None:
                    self.end(one)
        for one in [one for one in self._running if self._switches(one)]:
            self._running.remove(one)
            one.read_anew()
            self._keep(one, 0)
            self._reading.append(one)
        return list(news)

    def _due(self, idle: bool) -> int:
        """How many of the steps that nobody has looked at are to be taken up.

        Args:
            idle: whether the device was given nothing more to do.
        """
        unseen = self._unseen
        drawn = [step for step in unseen if not step.recorded]
        waits = any(
            one.drawn in (1, one.request.max_new_tokens) or self._switches(one) for step in drawn for one in step.by
        )
        if idle or waits or len(drawn) >= self._ahead:
            return len(unseen)
        count = max(0, len(unseen) - READ_LAG) if len(drawn) < len(unseen) else 0
        while count < len(unseen) and unseen[count].recorded and unseen[count].tokens.arrived:
            count += 1
        return count

    def _switches(self, one: Generation) -> bool:
        """Whether its last token makes it longer than keys turned by LongRoPE's short factors serve."""
        return self._switch is not None and len(one.text) <= self._switch <= one.position
