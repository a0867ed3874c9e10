"""Speculative decoding (2211.17192): a small model proposes tokens, the large one judges them in one step.

What comes out is distributed as if the large model had drawn it alone; greedy, it is its own text, but for
ties that a step of several tokens may round the other way.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from quantkit.arguments import as_integer
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import MAX_NEW_TOKENS, TokenIds, checked_request, prompt_ids, require_model
from quantkit.runtime.sampling import generator_of, probabilities, same_seed
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.finite import finite_logits

DRAFT_TOKENS = 4


def speculate(
    model: Decoder, draft: Decoder, ids: TokenIds, *, max_new_tokens: int = MAX_NEW_TOKENS,
    draft_tokens: int = DRAFT_TOKENS, **sampling: Unpack[SamplingOptions],
) -> Generator[int, None, None]:  # fmt: skip
    """Token ids that continue `ids`, as `generate` gives them, with the help of a smaller model.

    Args:
        model, draft: from `quantkit.load`, with the same tokens; both shared by processes, or neither.
        ids, max_new_tokens, sampling: see `generate`.
        draft_tokens: maximum number proposed at a time.

    Raises:
        RequestError: at once, as `generate` does, for either model; or if their vocabularies differ in size.
        NonFiniteError: if the logits of either are NaN or Inf.
    """
    require_model("model", model, Decoder)
    require_model("draft", draft, Decoder)
    draft_tokens = as_integer("draft_tokens", draft_tokens)
    if draft_tokens < 1:
        raise RequestError("nothing to propose", found=f"{draft_tokens} draft tokens", expected="at least 1")
    found, expected = draft.config.vocab_size, model.config.vocab_size
    if found != expected:
        raise RequestError("the draft model has another vocabulary", found=found, expected=expected)
    prompt = prompt_ids(ids)
    request, _ = (checked_request(one.config, prompt, max_new_tokens, sampling) for one in (model, draft))
    params, length = same_seed(request.sampling, model.group), request.length
    target, helper = (_Reader(one, len(prompt), length) for one in (model, draft))
    return _tokens(target, helper, prompt, length, draft_tokens, params)


class _Reader:
    """A model over a slot; what is stored beyond `stored` positions is of refused tokens, and never seen. Where rotary
    positions switch, a text that has become longer is read again."""

    def __init__(self, model: Decoder, prompt_length: int, length: int) -> None:
        self.model = model
        self._read_length = prompt_length  # of what was read at once
        self._switch = model.config.rope_switch
        self.stored = 0
        self._engine = Engine(model, length, compiled=False)

    def room(self, length: int) -> float:
        """How many tokens may follow a sequence before rotary positions switch."""
        return math.inf if self._switch is None or length > self._switch else self._switch - length

    def read(self, text: list[int], last: int, params: SamplingParams) -> Tensor:
        """Store the new part of a sequence; probabilities [last, V] of what follows each of its last tokens."""
        if self._switch is not None and self._read_length <= self._switch < len(text):
            self._read_length, self.stored = len(text), 0
        while len(text) - self.stored > self._engine.chunk + last:
            self._step(text, self.stored + self._engine.chunk, 0)
        logits = self._step(text, len(text), last)
        with self.model.ops.single_threaded():
            seen = self._seen(text, last) if params.needs_seen_tokens else None
            return probabilities(finite_logits(logits), params, seen)

    def _step(self, text: list[int], stop: int, last: int) -> Tensor:
        """Store a sequence up to `stop`; logits of its last tokens."""
        count = stop - self.stored
        tokens = torch.tensor(text[self.stored : stop], device=self.model.device)
        positions, wanted = range(self.stored, stop), range(count - last, count)
        lengths = [max(position + 1, self._read_length) for position in positions]
        self.stored = stop
        return self._engine.step(tokens, [0] * count, positions, wanted, lengths)

    def _seen(self, text: list[int], last: int) -> Tensor:
        """Which tokens the text holds up to each of its last, bool [last, V]."""
        seen = torch.zeros(last, self.model.config.vocab_size, dtype=torch.bool, device=self.model.device)
        for row in range(last):
            seen[row, text[: len(text) - last + row + 1]] = True
        return seen


def _tokens(
    target: _Reader, draft: _Reader, text: list[int], length: int, max_tokens: int, params: SamplingParams
) -> Generator[int, None, None]:
    generator = generator_of(params, target.model.device)
    while len(text) < length:
        rooms = (reader.room(len(text)) for reader in (target, draft))
        count = int(min(max_tokens, length - len(text) - 1, *rooms))
        for token in _step(target, draft, text, count, params, generator):
            if token in target.model.config.eos_token_ids:
                return
            yield token
            text.append(token)
        for reader in (target, draft):  # the last token is read with what follows it
            reader.stored = min(reader.stored, len(text) - 1)


@torch.inference_mode()
def _step(
    target: _Reader, draft: _Reader, text: list[int], count: int, params: SamplingParams, generator: torch.Generator
) -> list[int]:
    """Tokens that go on with `text`: as many of `count` proposals as are accepted, and one more."""
    proposed, guesses = list[int](), list[Tensor]()
    for _ in range(count):
        guesses.append(draft.read(text + proposed, 1, params)[0])
        proposed.append(_draw(guesses[-1], generator))
    judged = target.read(text + proposed, len(proposed) + 1, params)
    return accepted(judged, guesses, proposed, generator)


def accepted(
    judged: Tensor, guesses: Sequence[Tensor], proposed: Sequence[int], generator: torch.Generator
) -> list[int]:
    """The proposed tokens [P] up to the first that is refused, and one more, which the large model draws: `judged` are
    its probabilities [P + 1, V], and `guesses` those of the small model [V], from which each token was drawn."""
    for index, (token, guess) in enumerate(zip(proposed, guesses, strict=True)):
        chance = torch.rand((), generator=generator, device=generator.device)
        if chance * guess[token] >= judged[index, token]:
            missed = (judged[index] - guess).clamp(min=0)
            return [*proposed[:index], _draw(missed if missed.any() else judged[index], generator)]
    return [*proposed, _draw(judged[-1], generator)]


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))
