"""Turn the tokens of a continuation into text while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.generate import text_pieces
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import Completion, Logprobs
from quantkit.text.tokenizer import Tokenizer


class CompletionReader:
    """Turns the tokens of a continuation into text while it runs.

    Attributes:
        number: of the prompt.
        pieces: the text so far, without an echoed prompt.
        num_tokens: new ones that were read.
    """

    def __init__(
        self,
        number: int,
        generation: Continuation,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
    ) -> None:
        self.number = number
        self._continuation = generation
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
        self.num_tokens = 0

    def read(self) -> bool:
        """Decode the new tokens of the continuation.

        Returns whether the text contains a stop string; the caller then ends the continuation.
        """
        if self._text is None:
            self.num_tokens = len(self._continuation.tokens)
            return False
        # Tokens after a stop string were drawn in vain: they are not part of the completion.
        while self.num_tokens < len(self._continuation.tokens) and self._text.found_stop is None:
            self.pieces.append(self._text.add(self._continuation.tokens[self.num_tokens]))
            self.num_tokens += 1
        if self._continuation.finish_reason is not None:
            self.pieces.append(self._text.close())
        return self._text.found_stop is not None

    def completion(self) -> Completion:
        """Create the completion after the continuation has ended.

        Raises `QuantkitError` if it has ended with an error.
        """
        if self._continuation.error is not None:
            raise self._continuation.error
        request = self._continuation.request
        reason = self._continuation.finish_reason
        assert reason is not None
        tokens = self._continuation.tokens[: self.num_tokens]
        logprobs = self._continuation.logprobs
        echoed = request.prompt if request.echo else []
        if logprobs is not None:
            logprobs = logprobs.cut(len(echoed) + self.num_tokens)
        text: str | None = None
        stopped: str | None = None
        if self._text is not None:
            text = self._prompt + "".join(self.pieces)
            stopped = self._text.found_stop
        end_token: int | None = None
        end_logprobs: Logprobs | None = None
        # A stop string ends the text before the end token or the limit, even if the scheduler
        # reached those first.
        if stopped is not None:
            reason = "stop"
        else:
            end_token = self._continuation.end_token
            end_logprobs = self._continuation.end_logprobs
        return Completion(
            prompt=self.number,
            sample=self._continuation.sample,
            token_ids=[*echoed, *tokens],
            text=text,
            finish_reason=reason,
            stop=stopped,
            prompt_tokens=len(request.prompt),
            logprobs=logprobs,
            end_token=end_token,
            end_logprobs=end_logprobs,
        )
