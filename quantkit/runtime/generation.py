"""A continuation of a prompt as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.model.decoder import Decoder
from quantkit.runtime.completion import FinishReason, Logprobs
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import TokenLogprobs, agreed, generator_of, sample, token_logprobs
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.tensors.finite import finite_logits

_GREEDY = SamplingParams()


class Continuation:
    """One of the continuations that a request asks for, whatever runs it.

    Attributes:
        request, sample: what was asked for, and which of its continuations this is.
        sampling: how it is drawn; with a seed of its own, where the request has one.
        tokens: the new ones so far, without an end token.
        logprobs: of them; where the prompt is echoed, of its tokens before them.
        finish_reason: None while it goes on.
    """

    def __init__(self, request: Request, sample: int) -> None:
        self.request, self.sample = request, sample
        self.sampling = _of_sample(request.sampling, sample)
        self.tokens: list[int] = []
        self.logprobs = None if request.logprobs is None else Logprobs()
        self.finish_reason: FinishReason | None = None

    def take(self, token: int, logprobs: TokenLogprobs | None, ends: tuple[int, ...]) -> None:
        """Take up a token that was drawn.

        Args:
            logprobs: of it, where they are asked for.
            ends: the model's end tokens.
        """
        if token in ends or token in self.request.end_ids:
            self.finish_reason = "stop"
            return
        self.tokens.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.add(*logprobs.listed())
        if len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = "length"


class Generation(Continuation):
    """A continuation over the slots of an engine.

    Attributes:
        siblings: the continuations of the same prompt.
        slot: where it runs; None before.
        text: what is read before it goes on: its prompt; where rotary positions switch, all there is.
        stored: how much of that is in the slot.
        drawn: new tokens, of which the host may have seen fewer.
    """

    def __init__(self, request: Request, sample: int, siblings: Siblings, model: Decoder) -> None:
        super().__init__(request, sample)
        self.siblings = siblings
        self.slot: int | None = None
        self.text: Sequence[int] = request.prompt
        self.stored = 0
        self.drawn = 0
        self._sampling = agreed(self.sampling, model.group)
        self._generator = generator_of(self._sampling, model.device) if self._sampling.temperature > 0 else None
        self._greedy = replace(self._sampling, seed=None) == _GREEDY
        self._held: Tensor | None = None
        if self._sampling.repetition_penalty != 1:
            self._held = torch.zeros(1, model.config.vocab_size, dtype=torch.bool, device=model.device)
            self._held[0, request.prompt] = True

    @property
    def place(self) -> int:
        """Its slot, which it has."""
        assert self.slot is not None
        return self.slot

    @property
    def position(self) -> int:
        """Of the last token that was drawn."""
        return len(self.request.prompt) + self.drawn - 1

    @property
    def prefilled(self) -> bool:
        """Whether all that it goes on from is in the slot."""
        return self.stored == len(self.text)

    @property
    def echoes(self) -> bool:
        """Whether log-probabilities of what it reads are asked for."""
        return self.request.echo and self.logprobs is not None and not self.drawn

    @property
    def takes_likeliest(self) -> bool:
        """Whether its tokens are the likeliest ones, and nothing more is asked of their logits."""
        return self._greedy and self.logprobs is None

    @property
    def added(self) -> list[int]:
        """Tokens in the slot after what it has read."""
        read = len(self.text) - len(self.request.prompt)
        return self.tokens[read : max(read, self.drawn - 1)]

    def read_anew(self) -> None:
        """Let all there is be read once more; the host has seen every token."""
        self.text, self.stored = [*self.request.prompt, *self.tokens], 0

    def draw(self, logits: Tensor) -> Tensor:
        """The next token [1], of logits [1, V]."""
        self.drawn += 1
        if self._greedy:
            return logits.argmax(-1)
        token = sample(logits, self._sampling, self._generator, self._held)[0]
        if self._held is not None:
            self._held[0, token] = True
        return token

    def note_prompt(self, logits: Tensor, start: int, stop: int) -> None:
        """Take up what logits [T, V] at the positions from `start` to `stop` say of the prompt's next tokens.

        Raises:
            NonFiniteError: if they are NaN or Inf.
        """
        assert self.logprobs is not None and self.request.logprobs is not None
        told = self.request.prompt[start + 1 : stop + 1]
        if start == 0:
            self.logprobs.add([None], [{}])
        if told:
            finite_logits(logits[: len(told)])
            found = token_logprobs(logits[: len(told)], torch.tensor(told, device=logits.device), self.request.logprobs)
            self.logprobs.add(*found.listed())


@dataclass
class Siblings:
    """Continuations of one prompt, which is read once.

    Attributes:
        waiting: how many have not begun.
        reader: the one that reads the prompt.
        logits: what follows the prompt, [1, V], once it is read and as long as one waits.
        echoed: the prompt's log-probabilities, where they are asked for, once it is read.
    """

    waiting: int
    reader: Generation | None = None
    logits: Tensor | None = None
    echoed: Logprobs | None = None

    @property
    def unread(self) -> bool:
        """Whether nobody reads the prompt, or has read it."""
        return self.logits is None and (self.reader is None or self.reader.finish_reason is not None)


def _of_sample(params: SamplingParams, number: int) -> SamplingParams:
    """The same, with a seed of its own where there is one; after the largest comes the smallest."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + number) % 2**64)
