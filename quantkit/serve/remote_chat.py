"""A conversation with a model on a server, answer by answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from quantkit.base.arguments import as_string
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.serve.client import Server
from quantkit.serve.client_errors import (
    ContextLengthError,
    create_lost_error,
    create_other_api_error,
)

_log = logging.getLogger(__name__)

# A conversation logs this once: in a full context every further question drops messages.
_FULL = (
    "the context of the server is full: from now on the oldest questions and answers are forgotten"
)
# A quarter of the messages is dropped each time.
_SHARE = 4


@dataclass(frozen=True)
class Usage:
    """The tokens of an answer, as the server counts them, and its time.

    Attributes:
        first_seconds, seconds: from the request to the first piece of the answer, and to its end.
    """

    prompt_tokens: int
    completion_tokens: int
    first_seconds: float
    seconds: float

    def __str__(self) -> str:
        # The time to the first token is that of the prompt.
        decode_seconds = self.seconds - self.first_seconds
        rate = ""
        if self.completion_tokens > 1 and decode_seconds > 0:
            rate = f", {(self.completion_tokens - 1) / decode_seconds:.1f} tokens/s"
        counts = f"{self.completion_tokens} tokens in {self.seconds:.1f} s{rate}"
        return (
            f"{counts}, the first after {self.first_seconds:.2f} s; prompt of {self.prompt_tokens}"
            " tokens"
        )


class RemoteChat:
    """A conversation with a model on a server, with the interface of `ChatSession`.

    Attributes:
        messages: questions and answers, each with ``role`` and ``content``, without the system
            prompt.
        system: the system prompt; messages stay when it is changed.
        finish_reason: what ended the last answer: ``stop``, ``length`` or another reason of the
            server; None before the first answer, and if the last one was cut off.
        usage: of the last answer, if the server counts it.
    """

    def __init__(
        self,
        server: Server,
        model: str | None = None,
        *,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare a conversation; asks the server for its model if none is named.

        Args:
            model: its name; None is the server's only one.
            options: of all requests, as the API names them.

        Raises:
            RequestError: if the server has several models and none is named, or as `Server.models`
                does.
        """
        if model is None:
            models = server.models()
            if len(models) > 1:
                names = ", ".join(format_value(name) for name in models)
                raise RequestError(
                    f"{server.url} serves several models",
                    found=names,
                    hint=Message("select one with ", Option("model")),
                )
            model = models[0]
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._server = server
        self._options = dict(options or {})
        self._dropped_reported = False

    def reset(self) -> None:
        """Forget all messages, not the system prompt."""
        self.messages.clear()
        self.finish_reason = self.usage = None

    def ask(
        self, text: str, *, interrupted: Callable[[], bool] | None = None
    ) -> Generator[str, None, None]:
        """Ask a question.

        Args:
            interrupted: called several times a second; the answer ends once it returns True.

        Returns:
            A generator of the pieces of the answer. It may be closed at any time: the answer that
            is remembered ends there. A question without an answer is dropped, also after an error.

        Raises:
            RequestError: as `Server.stream` does, while the answer is read.
        """
        question = {"role": "user", "content": as_string("text", text)}
        return self._iterate_answer(question, interrupted or (lambda: False))

    def _iterate_answer(
        self, question: dict[str, str], interrupted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        """Yield the pieces of an answer, and remember question and answer at the end."""
        pieces: list[str] = []
        self.finish_reason = self.usage = None
        try:
            for piece in self._answer_within_context(question, interrupted):
                pieces.append(piece)
                yield piece
        # After an error neither the question nor a part of the answer is remembered.
        except RequestError:
            pieces.clear()
            self.finish_reason = None
            raise
        # Also reached if the reader closes the answer early: it is remembered up to there.
        finally:
            if pieces or self.finish_reason is not None:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self.messages += [question, answer]

    def _answer_within_context(
        self, question: dict[str, str], interrupted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        """Yield the pieces of an answer; drop the oldest messages until the server accepts the
        conversation.
        """
        dropped = 0
        while True:
            messages = [*self.messages[dropped:], question]
            try:
                for piece in self._iterate_pieces(messages, interrupted):
                    # Messages are forgotten only once the server has accepted the others.
                    if dropped:
                        self._forget(dropped)
                        dropped = 0
                    yield piece
                return
            except ContextLengthError:
                remaining = len(self.messages) - dropped
                if remaining == 0:
                    raise
                # An even number: questions are dropped with their answers.
                dropped += max(2, remaining // _SHARE // 2 * 2)

    def _forget(self, count: int) -> None:
        """Remove the oldest messages, and log that once."""
        del self.messages[:count]
        if not self._dropped_reported:
            self._dropped_reported = True
            _log.info(_FULL)

    def _iterate_pieces(
        self, messages: list[dict[str, str]], interrupted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        """Request an answer, and yield its pieces that are not empty."""
        system: list[dict[str, str]]
        if self.system is None:
            system = []
        else:
            system = [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        start_time = time.perf_counter()
        first_seconds: float | None = None
        last_seconds = 0.0
        with closing(self._server.stream("/chat/completions", body)) as events:
            for event in events:
                if interrupted():
                    return
                # None arrives while the client waits, so that `interrupted` is called.
                if event is None:
                    continue
                try:
                    piece, reason, counts = _delta(event)
                except (LookupError, TypeError, AttributeError, ValueError):
                    raise create_other_api_error(self._server.url, event) from None
                # The first event of OpenAI's API has a role, but no text.
                if piece or reason:
                    last_seconds = time.perf_counter() - start_time
                    if first_seconds is None:
                        first_seconds = last_seconds
                    self.finish_reason = reason or self.finish_reason
                if counts is not None:
                    self.usage = Usage(*counts, first_seconds or last_seconds, last_seconds)
                if piece:
                    yield piece
        # A complete answer has a reason, also if the connection ends in an orderly way.
        if self.finish_reason is None:
            raise create_lost_error(self._server.url)


def _delta(event: Any) -> tuple[str, str | None, tuple[int, int] | None]:
    """Read the text of an event, what ended the answer, and the tokens of prompt and answer.

    Absent parts are an empty text and None. Raises any error for an event of another API.
    """
    counts = None
    usage = event.get("usage")
    if usage is not None:
        counts = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    # The event with the usage has no choices.
    if not event["choices"]:
        return "", None, counts
    choice = event["choices"][0]
    text = choice.get("delta", {}).get("content") or ""
    reason = choice.get("finish_reason")
    # JSON can contain lone surrogates, which cannot be printed.
    printable_text = text.encode(errors="replace").decode()
    return printable_text, None if reason is None else str(reason), counts
