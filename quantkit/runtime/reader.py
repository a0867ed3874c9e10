"""A continuation's tokens as text, as they come."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.generate import text_pieces
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import Completion
from quantkit.text.tokenizer import Tokenizer


class Reader:
    """Turns the tokens of a continuation into text, as they come.

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
        if tokenizer is not None and generation.request.echo:
            self._prompt = "".join(text_pieces(tokenizer, (), generation.request.prompt))
        self.pieces: list[str] = []
        self.tokens = 0

    def read(self) -> bool:
        """Read the tokens that are new; whether a stop string was found."""
        if self._text is None:
            self.tokens = len(self._of.tokens)
            return False
        while self.tokens < len(self._of.tokens) and self._text.stopped is None:
            self.pieces.append(self._text.add(self._of.tokens[self.tokens]))
            self.tokens += 1
        if self._of.finish_reason is not None:
            self.pieces.append(self._text.close())
        return self._text.stopped is not None

    def completion(self) -> Completion:
        """Return the completion, once the continuation has ended.

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
        if self._text is None:
            stopped = None
        else:
            stopped = self._text.stopped
        is_ended_by_token = stopped is None and self._of.end_token is not None
        return Completion(
            self.number,
            self._of.sample,
            [*echoed, *tokens],
            None if self._text is None else self._prompt + "".join(self.pieces),
            reason if stopped is None else "stop",
            stopped,
            len(request.prompt),
            logprobs,
            end_token=self._of.end_token if is_ended_by_token else None,
            end_logprobs=self._of.end_logprobs if is_ended_by_token else None,
        )
