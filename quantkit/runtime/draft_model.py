"""Tokens proposed by a smaller model, for all sequences of an engine at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.model.device import numbers
from quantkit.runtime.generation import Generation

if TYPE_CHECKING:
    from quantkit.runtime.engine import Engine

# Tokens by which vocabularies of one family differ.
_PADDING = 512
# The weight of the latest measurement in a mean.
_LATEST = 0.1


@dataclass
class _Held:
    """What a slot holds: the first `stored` tokens of `text`, which is of `reader`."""

    reader: Generation | None = None
    text: list[int] = field(default_factory=list)
    stored: int = 0


class DraftModel:
    """A model that proposes tokens, in slots that are numbered as those of the large one.

    Attributes:
        seconds: that one token of a sequence took of late.
    """

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        """`vocabulary` is the number of the large model's tokens."""
        self.seconds = 0.0
        self._vocabulary = vocabulary
        self._draft_vocab_size = engine.model.config.vocab_size
        self._engine = engine
        self._switch = engine.model.config.rope_switch
        self._slot_contents = [_Held() for _ in range(engine.slots)]

    @property
    def length(self) -> int:
        """Tokens that a sequence may have."""
        return self._engine.length

    def propose(self, counts: Mapping[Generation, int]) -> dict[Generation, list[int]]:
        """Tokens that may come next, for each sequence as many as `counts` says. Long texts are
        read first, a part with each call, and get none before.
        """
        texts = {one: [*one.request.prompt, *one.tokens] for one, count in counts.items() if count}
        behind = None
        for one, text in texts.items():
            self._take(one, text)
            if (
                behind is None
                and len(text) - self._slot_contents[one.slot].stored > self._engine.chunk
            ):
                behind = one
        if behind is not None:
            self._read(
                {
                    behind: texts[behind][
                        : self._slot_contents[behind.slot].stored + self._engine.chunk
                    ]
                }
            )
        ready = {
            one: text
            for one, text in texts.items()
            if self._count_unread(one, text) <= self._engine.chunk
        }
        began = time.perf_counter()
        drawn = dict[Generation, list[int]]((one, []) for one in ready)
        guesses = {one: one.sampler.guesses() for one in ready}
        while ready:
            logits = self._read({one: [*text, *drawn[one]] for one, text in ready.items()})
            with self._engine.model.ops.single_threaded():
                for row, one in enumerate(ready):
                    drawn[one].append(guesses[one](logits[row : row + 1]))
            ready = {one: text for one, text in ready.items() if len(drawn[one]) < counts[one]}
        if total := sum(map(len, drawn.values())):
            taken = (time.perf_counter() - began) / total
            self.seconds += (taken - self.seconds) * (_LATEST if self.seconds else 1)
        return drawn

    def _take(self, generation: Generation, text: list[int]) -> None:
        """Let a slot hold as much of a text as it does."""
        held = self._slot_contents[generation.slot]
        end = min(held.stored, len(text) - 1)
        if held.reader is not generation:
            end = next((at for at in range(end) if held.text[at] != text[at]), end)
        if self._switch is not None and end <= self._switch < len(text):
            end = 0
        self._slot_contents[generation.slot] = _Held(generation, text, end)

    def _count_unread(self, generation: Generation, text: list[int]) -> int:
        return len(text) - self._slot_contents[generation.slot].stored

    def _read(self, texts: Mapping[Generation, list[int]]) -> torch.Tensor:
        """Read the new part of texts; logits [B, V] of what follows each."""
        tokens = list[int]()
        slots = list[int]()
        positions = list[int]()
        wanted = list[int]()
        for one, text in texts.items():
            held = self._slot_contents[one.slot]
            tokens += [min(token, self._draft_vocab_size - 1) for token in text[held.stored :]]
            slots += [one.slot] * (len(text) - held.stored)
            positions += range(held.stored, len(text))
            wanted.append(len(tokens) - 1)
            held.text, held.stored = text, len(text)
        logits = self._engine.step(
            numbers(tokens, self._engine.model.device), slots, positions, wanted
        )
        missing = self._vocabulary - logits.shape[-1]
        if missing:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits


def require_same_tokens(model: Decoder, draft: Decoder) -> None:
    """Raise `RequestError` if a draft model cannot have the tokens of a model; vocabularies of one
    family may be padded to different sizes.
    """
    found = draft.config.vocab_size
    expected = model.config.vocab_size
    if abs(found - expected) > _PADDING:
        raise RequestError("the draft model has another vocabulary", found=found, expected=expected)
