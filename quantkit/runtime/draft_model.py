"""Tokens proposed by a smaller model, for all sequences of an engine at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.device import copy_integers
from quantkit.runtime.generation import Generation

# Models of one family pad the same vocabulary to different sizes, at most this far apart.
_PADDING = 512
# The weight of the latest measurement in the moving mean of seconds.
_LATEST = 0.1


class DraftEngine(Protocol):
    """What a draft model needs of an `Engine`, which documents the attributes."""

    model: Decoder
    slots: int
    length: int
    chunk_rows: int

    def step(
        self,
        tokens: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        logits_indices: Sequence[int],
    ) -> torch.Tensor: ...

    def compile_steps(self, max_rows: int) -> int: ...


@dataclass
class _SlotContents:
    """The contents of a slot.

    Attributes:
        generation: the sequence that the slot belongs to.
        tokens: those whose keys the slot contains, or will contain after the next step.
        num_stored: how many of them it contains.
        num_confirmed: how many of them belong to the sequence for certain; the others are
            proposals.
    """

    generation: Generation | None = None
    tokens: list[int] = field(default_factory=list)
    num_stored: int = 0
    num_confirmed: int = 0


class DraftModel:
    """A model that proposes tokens, in slots that are numbered as those of the large one.

    Attributes:
        seconds: a moving mean of the time to propose one token of one sequence.
    """

    def __init__(self, engine: DraftEngine, vocabulary: int) -> None:
        """Wrap an engine over the draft model; `vocabulary` is the large model's token count."""
        self.seconds = 0.0
        self._vocabulary = vocabulary
        self._draft_vocab_size = engine.model.config.vocab_size
        self._engine = engine
        self._switch = engine.model.config.rope_switch
        self._slot_contents = [_SlotContents() for _ in range(engine.slots)]

    @property
    def length(self) -> int:
        """Return how many tokens a sequence may have."""
        return self._engine.length

    def warm_up(self) -> int:
        """Compile all steps, over empty slots; returns their number."""
        # The steps overwrite the slots.
        self._slot_contents = [_SlotContents() for _ in range(self._engine.slots)]
        # All sequences may read a chunk in the same step.
        return self._engine.compile_steps(self._engine.slots * self._engine.chunk_rows)

    def propose(self, counts: Mapping[Generation, int]) -> dict[Generation, list[int]]:
        """Propose tokens that may come next, for each sequence as many as `counts` says.

        Long texts are prefilled first, one chunk per call, and get no proposals until then.
        """
        texts: dict[Generation, list[int]] = {}
        for generation, count in counts.items():
            if count:
                texts[generation] = [*generation.request.prompt, *generation.tokens]
        self._prefill_first_long(texts)
        ready: dict[Generation, list[int]] = {}
        for generation, text in texts.items():
            if self._count_unread(generation, text) <= self._engine.chunk_rows:
                ready[generation] = text
        # The prefill above happens once per text, so it is no part of the seconds per token.
        start_time = time.perf_counter()
        drawn: dict[Generation, list[int]] = {}
        guesses: dict[Generation, Callable[[torch.Tensor], int]] = {}
        for generation in ready:
            drawn[generation] = []
            guesses[generation] = generation.sampler.create_draft_sampler()
        while ready:
            extended = {
                generation: [*text, *drawn[generation]] for generation, text in ready.items()
            }
            logits = self._read(extended)
            # The tensors of one row are too small to share among threads.
            with self._engine.model.ops.single_threaded():
                for row, generation in enumerate(ready):
                    token = guesses[generation](logits[row : row + 1])
                    drawn[generation].append(token)
            remaining: dict[Generation, list[int]] = {}
            for generation, text in ready.items():
                if len(drawn[generation]) < counts[generation]:
                    remaining[generation] = text
            ready = remaining
        num_drawn = sum(map(len, drawn.values()))
        if num_drawn:
            token_seconds = (time.perf_counter() - start_time) / num_drawn
            weight = _LATEST if self.seconds else 1
            self.seconds += (token_seconds - self.seconds) * weight
        return drawn

    def _prefill_first_long(self, texts: Mapping[Generation, list[int]]) -> None:
        """Record the texts of all slots, and read one chunk of the first long one."""
        long_generation = None
        for generation, text in texts.items():
            self._record_tokens(generation, text)
            is_long = self._count_unread(generation, text) > self._engine.chunk_rows
            if long_generation is None and is_long:
                long_generation = generation
        # One chunk per call: a long prompt must not delay the steps of other sequences.
        if long_generation is not None:
            end = self._slot_contents[long_generation.slot].num_stored + self._engine.chunk_rows
            self._read({long_generation: texts[long_generation][:end]})

    def _record_tokens(self, generation: Generation, text: list[int]) -> None:
        """Record the text of a generation for its slot, and keep the stored prefix that it has."""
        contents = self._slot_contents[generation.slot]
        # The last token is always read: its logits draw the first proposal.
        end = min(contents.num_stored, len(text) - 1)
        # The text of another generation may differ anywhere, that of the same one only where the
        # slot contains proposals: the large model may have rejected them.
        start = contents.num_confirmed if contents.generation is generation else 0
        for index in range(start, end):
            if contents.tokens[index] != text[index]:
                end = index
                break
        # Beyond this length the model uses other rotary frequencies, so stored keys do not fit.
        if self._switch is not None and end <= self._switch < len(text):
            end = 0
        self._slot_contents[generation.slot] = _SlotContents(generation, text, end, len(text))

    def _count_unread(self, generation: Generation, text: list[int]) -> int:
        return len(text) - self._slot_contents[generation.slot].num_stored

    def _read(self, texts: Mapping[Generation, list[int]]) -> torch.Tensor:
        """Run a step over the unread parts of texts; logits [B, V] of the token after each."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for generation, text in texts.items():
            contents = self._slot_contents[generation.slot]
            # The large model may draw padding tokens that the draft's vocabulary lacks.
            for token in text[contents.num_stored :]:
                tokens.append(min(token, self._draft_vocab_size - 1))
            slots += [generation.slot] * (len(text) - contents.num_stored)
            positions += range(contents.num_stored, len(text))
            last_rows.append(len(tokens) - 1)
            contents.tokens = text
            contents.num_stored = len(text)
        logits = self._engine.step(
            copy_integers(tokens, self._engine.model.device), slots, positions, last_rows
        )
        # Samplers expect the large model's vocabulary: missing tokens are never proposed, and a
        # negative padding cuts off those that only the draft has.
        num_missing = self._vocabulary - logits.shape[-1]
        if num_missing:
            return torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
        return logits


def require_same_tokens(model: Decoder, draft: Decoder) -> None:
    """Raise `RequestError` if a draft model cannot have the tokens of a model.

    Vocabularies of one family may be padded to different sizes.
    """
    draft_size = draft.config.vocab_size
    model_size = model.config.vocab_size
    if abs(draft_size - model_size) > _PADDING:
        raise RequestError(
            "the draft model has a different vocabulary", found=draft_size, expected=model_size
        )
