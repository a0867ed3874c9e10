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
from quantkit.errors import RequestError
from quantkit.serve.client import Server
from quantkit.serve.client_errors import ContextLengthError, lost, other_api

_log = logging.getLogger(__name__)

# logged once
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
        later = self.seconds - self.first_seconds
        rate = ""
        if self.completion_tokens > 1 and later > 0:
            rate = f", {(self.completion_tokens - 1) / later:.1f} tokens/s"
        counts = f"{self.completion_tokens} tokens in {self.seconds:.1f} s{rate}"
        return (
            f"{counts}, the first after {self.first_seconds:.2f} s; prompt of {self.prompt_tokens}"
            " tokens"
        )


class RemoteChat:
    """A conversation as `ChatSession` has it, with a model on a server.

    Attributes:
        messages: what was said, each with ``role`` and ``content``, without the system prompt.
        system: the system prompt; messages stay when it is changed.
        finish_reason: what ended the last answer: ``stop``, ``length`` or what else the server
            says; None before one, and where it was cut off.
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
        """
        Args:
            model: its name; None is the server's only one.
            options: of all requests, as the API names them.

        Raises:
            RequestError: if the server has several models and none is named, or as `Server.models`
                does.
        """
        if model is None:
            model, *others = server.models()
            if others:
                names = ", ".join(format_value(name) for name in (model, *others))
                raise RequestError(
                    f"{server.url} has several models", found=names, hint="select one with `model`"
                )
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._server, self._options = server, dict(options or {})
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
        said: list[str] = []
        self.finish_reason = self.usage = None
        try:
            for piece in self._answer_within_context(question, interrupted):
                said.append(piece)
                yield piece
        except RequestError:
            said.clear()
            self.finish_reason = None
            raise
        finally:
            if said or self.finish_reason is not None:
                self.messages += [question, {"role": "assistant", "content": "".join(said)}]

    def _answer_within_context(
        self, question: dict[str, str], interrupted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        """Yield the pieces of an answer; as long as the server finds the conversation too long,
        without its oldest part.
        """
        dropped = 0
        while True:
            try:
                for piece in self._iterate_pieces(
                    [*self.messages[dropped:], question], interrupted
                ):
                    if dropped:
                        self._forget(dropped)
                        dropped = 0
                    yield piece
                return
            except ContextLengthError:
                if (left := len(self.messages) - dropped) == 0:
                    raise
                dropped += max(2, left // _SHARE // 2 * 2)  # questions with their answers

    def _forget(self, count: int) -> None:
        del self.messages[:count]
        if not self._dropped_reported:
            self._dropped_reported = True
            _log.info(_FULL)

    def _iterate_pieces(
        self, messages: list[dict[str, str]], interrupted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        """Yield the pieces of an answer that are not empty."""
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
        begun = time.perf_counter()
        first = None
        last = 0.0
        with closing(self._server.stream("/chat/completions", body)) as events:
            for event in events:
                if interrupted():
                    return
                if event is None:
                    continue
                try:
                    piece, reason, counts = _delta(event)
                except (LookupError, TypeError, AttributeError, ValueError):
                    raise other_api(self._server.url, event) from None
                if piece or reason:
                    last = time.perf_counter() - begun
                    first = last if first is None else first
                    self.finish_reason = reason or self.finish_reason
                if counts is not None:
                    self.usage = Usage(*counts, first or last, last)
                if piece:
                    yield piece
        if self.finish_reason is None:
            raise lost(self._server.url)


def _delta(event: Any) -> tuple[str, str | None, tuple[int, int] | None]:
    """Return the text of an event, what ended the answer, and the tokens of prompt and answer; each
    only where it is there. Raises any error for an event of another API.
    """
    counts = None
    if (usage := event.get("usage")) is not None:
        counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    if not event["choices"]:
        return "", None, counts
    choice = event["choices"][0]
    text = choice.get("delta", {}).get("content") or ""
    reason = choice.get("finish_reason")
    return text.encode(errors="replace").decode(), None if reason is None else str(reason), counts
