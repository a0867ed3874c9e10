"""A continuation of a prompt while it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.base.late import LateModule
from quantkit.errors import QuantkitError
from quantkit.model.decoder import Decoder
from quantkit.runtime.lookup import Lookup
from quantkit.runtime.request import FinishReason, Logprobs, Request
from quantkit.runtime.sampling import Sampler, TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from quantkit.tensors import finite
else:
    finite = LateModule("quantkit.tensors.finite")


class Continuation:
    """One of the continuations of a request.

    Attributes:
        request, sample: the request, and the number of this continuation.
        sampling: the request's options; if these have a seed, it is increased by `sample`, modulo
            2^64.
        tokens: the new ones so far, without an end token.
        logprobs: of `tokens`; if the prompt is echoed, of its tokens before them.
        end_token: the token that ended it, once one has.
        end_logprobs: of `end_token`.
        finish_reason: None while it runs.
        error: why it has ended without a result.
    """

    def __init__(self, request: Request, sample: int) -> None:
        self.request = request
        self.sample = sample
        self.sampling = request.sampling
        # Samples with one seed would be the same text.
        if self.sampling.seed is not None:
            self.sampling = replace(self.sampling, seed=(self.sampling.seed + sample) % 2**64)
        self.tokens: list[int] = []
        if request.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs = Logprobs()
        self.end_token: int | None = None
        self.end_logprobs: Logprobs | None = None
        self.finish_reason: FinishReason | None = None
        self.error: QuantkitError | None = None

    def append(self, token: int, logprobs: TokenLogprobs | None, ends: tuple[int, ...]) -> None:
        """Append a drawn token with its log-probabilities, and end at an end token or the limit.

        Args:
            logprobs: of the token; None if they are not requested.
            ends: the model's end tokens.
        """
        if token in ends or token in self.request.end_ids:
            self.finish_reason = "stop"
            self.end_token = token
            # OpenAI's completions list the end token too, although it is not part of the text.
            if logprobs is not None:
                self.end_logprobs = Logprobs(*logprobs.to_lists())
            return
        self.tokens.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.add(*logprobs.to_lists())
        if len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = "length"


class Generation(Continuation):
    """A continuation in a slot of an engine.

    Attributes:
        siblings: the continuations of the same prompt.
        sampler: draws its tokens.
        slot: set once it has one.
        tokens_to_read: before it continues: its prompt; after rotary positions switch, all tokens.
        num_stored: how many of these tokens are in the slot.
        num_drawn: the number of new tokens, of which the host may have seen fewer.
        lookup: proposes its next tokens, once it has been used.
    """

    slot: int
    lookup: Lookup | None = None

    def __init__(self, request: Request, sample: int, siblings: Siblings, model: Decoder) -> None:
        super().__init__(request, sample)
        self.siblings = siblings
        self.sampler = Sampler(
            self.sampling,
            request.prompt,
            model.config.vocab_size,
            model.device,
            model.group,
            constraint=request.constraint,
        )
        self.tokens_to_read: Sequence[int] = request.prompt
        self.num_stored = 0
        self.num_drawn = 0

    @property
    def position(self) -> int:
        """Compute the position of the last drawn token."""
        return len(self.request.prompt) + self.num_drawn - 1

    @property
    def echoes(self) -> bool:
        """Tell whether log-probabilities of the tokens being read are requested."""
        # A text that is read again, after rotary positions switch, has been scored before.
        return self.request.scores_prompt and not self.num_drawn

    @property
    def needs_tokens_only(self) -> bool:
        """Tell whether the next token is the likeliest one, and the logits have no other use."""
        return (
            self.sampler.params.likeliest_only
            and self.logprobs is None
            and self.request.constraint is None
        )

    @property
    def new_cached_tokens(self) -> list[int]:
        """Return the tokens in the slot after `tokens_to_read`."""
        num_read = len(self.tokens_to_read) - len(self.request.prompt)
        # The slot gets a token in the step that draws the next one, so the last is not in it.
        return self.tokens[num_read : max(num_read, self.num_drawn - 1)]

    def append(self, token: int, logprobs: TokenLogprobs | None, ends: tuple[int, ...]) -> None:
        failed_at = self.sampler.failed_at
        # Tokens drawn before the failure may reach the host after it.
        if failed_at is None or len(self.tokens) < failed_at:
            super().append(token, logprobs, ends)
        else:
            self.error = self.sampler.error
            self.finish_reason = "stop"

    def draw(self, logits: Tensor) -> tuple[Tensor, TokenLogprobs | None]:
        """Draw the next token [1] from logits [1, V], with its log-probabilities, if requested."""
        self.num_drawn += 1
        token = self.sampler.draw(logits)
        count = self.request.logprobs
        if count is None:
            return token, None
        # The model's log-probabilities, before any sampling option changes the logits.
        return token, token_logprobs(logits, token, count).on_host()

    def draw_verified(
        self, logits: Tensor, proposed: Sequence[int]
    ) -> Iterator[tuple[Tensor, TokenLogprobs | None]]:
        """Draw the next tokens from logits [1 + P, V] of the last token and P proposed ones.

        Yields the results of `draw`. Row i + 1 is valid only if row i draws the proposed token, so
        the first other token is the last one.
        """
        # After the last proposal one more token is drawn, which has nothing to be compared with.
        for row, expected in enumerate([*proposed, None]):
            drawn_token = self.draw(logits[row : row + 1])
            yield drawn_token
            if expected is None or int(drawn_token[0]) != expected:
                return

    def score_prompt(self, logits: Tensor, start: int, stop: int) -> None:
        """Add log-probabilities of the prompt's tokens after the positions from `start` to `stop`.

        Args:
            logits: [T, V] at these positions; there may be more.

        Raises:
            NonFiniteError: if logits are NaN or Inf.
        """
        assert self.logprobs is not None and self.request.logprobs is not None
        # Logits at a position are those of the token after it.
        tokens = self.request.prompt[start + 1 : stop + 1]
        # The first token of a prompt follows nothing.
        if start == 0:
            self.logprobs.add([None], [{}])
        if tokens:
            logits = finite.require_finite_logits(logits[: len(tokens)])
            token_tensor = torch.tensor(tokens, device=logits.device)
            logprobs = token_logprobs(logits, token_tensor, self.request.logprobs)
            self.logprobs.add(*logprobs.to_lists())


@dataclass
class Share:
    """The share of the engine that one client uses, with one or several prompts.

    Attributes:
        running: continuations that have a slot.
    """

    running: int = 0


@dataclass
class Siblings:
    """Continuations of one prompt, which is read once.

    Attributes:
        waiting: how many have no slot yet.
        share: counts those that have one.
        prompt_reader: the one that reads the prompt.
        logits: for the first new token, [1, V], kept from when the prompt is read until none waits.
        echoed: the prompt's log-probabilities, if requested, once it is read.
    """

    waiting: int
    share: Share = field(default_factory=Share)
    prompt_reader: Generation | None = None
    logits: Tensor | None = None
    echoed: Logprobs | None = None

    @property
    def prompt_free(self) -> bool:
        """Tell whether another continuation may begin: none is reading the prompt."""
        return (
            self.logits is not None
            or self.prompt_reader is None
            or self.prompt_reader.finish_reason is not None
        )
