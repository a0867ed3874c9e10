"""Turn the tokens of a continuation into text while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.generate import text_pieces
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import Completion, Logprobs
from quantkit.text.tokenizer import Tokenizer


class Reader:
    """Turns the tokens of a continuation into text while it runs.

    Attributes:
        number: of the prompt.
        pieces: the text so far, without an echoed prompt.
        tokens: the new ones that were read.
    """

    def __init__(
        self,
        number: int,
        generation: Continuation,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
    ) -> None:
        self.number = number
        self._of = generation
        request = generation.request
        if tokenizer is None:
            self._text = None
        else:
            self._text = Detokenizer(tokenizer, request.prompt, stop, request.spelled)
        self._prompt = ""
        # The prompt's text is decoded on its own, as nothing precedes it.
        if tokenizer is not None and generation.request.echo:
            self._prompt = "".join(text_pieces(tokenizer, (), generation.request.prompt))
        self.pieces: list[str] = []
        self.tokens = 0

    def read(self) -> bool:
        """Decode the new tokens of the continuation.

        Returns whether the text contains a stop string; the caller then ends the continuation.
        """
        if self._text is None:
            self.tokens = len(self._of.tokens)
            return False
        # Tokens after a stop string were drawn in vain: they are not part of the completion.
        while self.tokens < len(self._of.tokens) and self._text.stopped is None:
            self.pieces.append(self._text.add(self._of.tokens[self.tokens]))
            self.tokens += 1
        if self._of.finish_reason is not None:
            self.pieces.append(self._text.close())
        return self._text.stopped is not None

    def completion(self) -> Completion:
        """Create the completion after the continuation has ended.

        Raises `QuantkitError` if it has ended with an error.
        """
        if self._of.error is not None:
            raise self._of.error
        request = self._of.request
        reason = self._of.finish_reason
        assert reason is not None
        tokens = self._of.tokens[: self.tokens]
        logprobs = self._of.logprobs
        echoed = request.prompt if request.echo else []
        if logprobs is not None:
            logprobs = logprobs.cut(len(echoed) + self.tokens)
        text: str | None = None
        stopped: str | None = None
        if self._text is not None:
            text = self._prompt + "".join(self.pieces)
            stopped = self._text.stopped
        end_token: int | None = None
        end_logprobs: Logprobs | None = None
        # A stop string ends the text before the end token or the limit, even if the scheduler
        # reached those first.
        if stopped is not None:
            reason = "stop"
        else:
            end_token = self._of.end_token
            end_logprobs = self._of.end_logprobs
        return Completion(
            prompt=self.number,
            sample=self._of.sample,
            token_ids=[*echoed, *tokens],
            text=text,
            finish_reason=reason,
            stop=stopped,
            prompt_tokens=len(request.prompt),
            logprobs=logprobs,
            end_token=end_token,
            end_logprobs=end_logprobs,
        )
