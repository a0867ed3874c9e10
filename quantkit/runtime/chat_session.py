"""A conversation with a model, answer by answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_integer, as_string, require_tokenizer, wrong_type
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.formats.folder import require_rows
from quantkit.model.decoder import Decoder
from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.engine import Engine, require_decoder
from quantkit.runtime.generation import Generation
from quantkit.runtime.request import (
    MIN_ROOM,
    FinishReason,
    check_max_new_tokens,
    check_stop_strings,
    create_request,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.chat import Chat
from quantkit.text.tokenizer import Tokenizer

_Message = dict[str, Any]
_log = logging.getLogger(__name__)

CONTEXT = 8192
"""The default number of tokens of a conversation, for models with a longer context: its cache
would be large.
"""
# A quarter of the context is kept for answers.
_SHARE = 4
# A session logs this once: in a full context every further question drops messages.
_FULL = (
    "the context of %d tokens is full: from now on the oldest questions and answers are forgotten"
)


def conversation_length(config: ModelConfig, context: int | None) -> int:
    """Choose the number of tokens of a conversation: `context`, or a default if it is None.

    Raises `RequestError` if `context` is out of range.
    """
    if context is None:
        return min(config.max_context, CONTEXT)
    length = as_integer("context", context, 1)
    if length > config.max_positions:
        raise RequestError(
            Message(Option("context"), " exceeds the model's"),
            found=length,
            expected=f"at most {config.max_positions}",
        )
    return length


class ChatSession:
    """A conversation: the model answers each question with all earlier messages in its context.

    Earlier messages stay in the KV cache, so a turn reads only the new ones. When the context is
    full the oldest questions are forgotten with their answers; the system prompt stays. One thread
    uses a conversation at a time: another one that calls `ask` meanwhile gets an error.

    Attributes:
        messages: questions and answers, each with ``role`` and ``content``, without the system
            prompt.
        finish_reason: what ended the last answer: ``stop`` or ``length``; None before the first
            answer, and if the last one was cut off.

    Example:
        >>> model, tokenizer = quantkit.load("model")
        >>> chat = quantkit.chat_format("model", tokenizer)
        >>> session = quantkit.ChatSession(model, tokenizer, chat)
        >>> for piece in session.ask("What is the capital of France?"):
        ...     print(piece, end="", flush=True)
    """

    def __init__(
        self,
        model: Decoder | Engine,
        tokenizer: Tokenizer,
        chat: Chat,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        context: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        """Prepare a conversation without messages.

        Args:
            model, tokenizer: from `quantkit.load`; instead of the model also an engine over it, to
                choose how it runs.
            chat: from `quantkit.chat_format`.
            system: the system prompt.
            max_new_tokens: of one answer at most; None is until the context is full.
            context: tokens of the conversation; None is the model's, 8192 at most, or the engine's.
            stop: strings at which an answer ends.
            sampling: how tokens are drawn, greedily by default: see `quantkit.generate`.
                `quantkit.sampling_defaults` gives what the model's makers advise.

        Raises:
            RequestError: for arguments that make no sense.
            CheckpointError: if the tokenizer is another model's, with more tokens than this one
                knows.
        """
        decoder = require_decoder(model)
        require_tokenizer(tokenizer)
        if not hasattr(chat, "encode") or not hasattr(chat, "end_ids"):
            raise wrong_type("chat", chat, "what quantkit.chat_format(path, tokenizer) gives")
        require_rows(tokenizer, decoder.config.vocab_size)
        # Any prompt checks the sampling options: errors appear here, not at the first question.
        create_request(decoder.config, [0], 1, sampling)
        if max_new_tokens is None:
            self._max_new_tokens = None
        else:
            self._max_new_tokens = check_max_new_tokens(max_new_tokens)
        self._stop = check_stop_strings(stop, tokenizer)
        self._tokenizer = tokenizer
        self._chat = chat
        self._sampling = sampling
        if isinstance(model, Engine):
            if context is not None:
                raise RequestError(
                    Message(Option("context"), " requires a model; an engine already has a length")
                )
            self._engine = model
        else:
            self._engine = Engine(model, conversation_length(decoder.config, context))
        self.messages: list[dict[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self.system = system
        # The history is this session's own, so its texts may depend on how it was computed.
        self._scheduler = Scheduler(self._engine, any_prefix=True)
        self._answer: Generator[str, None, None] | None = None
        self._dropped_reported = False
        self._turn = threading.RLock()

    @property
    def system(self) -> str | None:
        """Return the system prompt; messages stay when it is changed."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is None:
            self._system = None
        else:
            self._system = as_string("system", text)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens that turns did not compute, as the cache held them."""
        return self._scheduler.num_reused_tokens

    def reset(self) -> None:
        """Forget all messages, not the system prompt; raises `RequestError` while another thread
        computes an answer.
        """
        with self._alone():
            self._leave_answer()
            self.messages.clear()
            self.finish_reason = None

    def ask(
        self, text: str, *, interrupted: Callable[[], bool] | None = None
    ) -> Generator[str, None, None]:
        """Ask a question.

        Args:
            interrupted: called before each step; the answer ends once it returns True.

        Returns:
            A generator of the pieces of the answer, computed on demand. It may be closed at any
            time: the answer that is remembered ends there. A question without an answer is dropped.
            The next question closes it too.

        Raises:
            RequestError: at once, if the question is too long for the context, the format does not
                take it, or another thread computes an answer; later if another generation takes
                over the engine, or the next question has begun.
            NonFiniteError: if the model's logits are NaN or Inf; the question is then forgotten.
        """
        question = {"role": "user", "content": as_string("text", text)}
        if interrupted is not None and not callable(interrupted):
            raise wrong_type("interrupted", interrupted, "a function that says so")
        with self._alone():
            self._leave_answer()
            self._answer = self._start_answer(question, interrupted)
            return self._iterate_under_lock(self._answer)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the conversation; raises `RequestError` while another thread has locked it."""
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "the conversation is in use by another thread",
                hint="use one `ChatSession` per thread",
            )
        try:
            yield
        finally:
            self._turn.release()

    def _iterate_under_lock(self, answer: Generator[str, None, None]) -> Generator[str, None, None]:
        """Yield the pieces of an answer, and lock the conversation while one is computed."""
        try:
            while True:
                with self._alone():
                    if answer is not self._answer:
                        raise RequestError(
                            "the answer cannot continue, because another question was asked"
                        )
                    piece = next(answer, None)
                if piece is None:
                    return
                yield piece
        finally:
            # If another thread has locked the conversation, it closes this answer first.
            if self._turn.acquire(blocking=False):
                answer.close()
                self._turn.release()

    def _start_answer(
        self, question: _Message, interrupted: Callable[[], bool] | None
    ) -> Generator[str, None, None]:
        """Encode the conversation with a question, and return a generator of its answer.

        The generator changes the messages when it starts, so an answer that is never read leaves
        the conversation as it was.
        """
        dropped, ids = self._fit_conversation(question)
        length = self._engine.length - len(ids)
        config = self._engine.model.config
        request = create_request(
            config, ids, min(self._max_new_tokens or length, length), self._sampling
        )
        request = replace(request, end_ids=self._chat.end_ids)

        def answer() -> Generator[str, None, None]:
            del self.messages[:dropped]
            if dropped and not self._dropped_reported and self._engine.model.group.is_rank0:
                self._dropped_reported = True
                _log.info(_FULL, self._engine.length)
            self.messages.append(question)
            (generation,) = self._scheduler.add(request)
            pieces: list[str] = []
            self.finish_reason = None
            try:
                for piece in self._iterate_pieces(generation, interrupted):
                    pieces.append(piece)
                    yield piece
            # The reader closed the answer between steps: it ends here and is remembered.
            except GeneratorExit:
                raise
            except BaseException as error:
                # The step was cut off, so the slots may not contain what the scheduler recorded.
                self._scheduler = Scheduler(self._engine, any_prefix=True)
                # After Ctrl-C the answer so far is remembered, after an error it is not.
                if isinstance(error, Exception):
                    pieces.clear()
                raise
            finally:
                self._scheduler.end(generation)
                if pieces or self.finish_reason is not None:
                    self.messages.append({"role": "assistant", "content": "".join(pieces)})
                # Two questions in a row would break the alternation of roles.
                else:
                    self.messages.pop()

        return answer()

    def _leave_answer(self) -> None:
        """Close an answer that is still being generated."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _iterate_pieces(
        self, generation: Generation, interrupted: Callable[[], bool] | None
    ) -> Generator[str, None, None]:
        """Run steps until the generation ends, and yield the pieces of text that are not empty."""
        text = Detokenizer(self._tokenizer, (), self._stop)
        count = 0
        while generation.finish_reason is None:
            if interrupted is not None and interrupted():
                return
            self._scheduler.step()
            # A step may add several tokens, if proposals were accepted.
            for token in generation.tokens[count:]:
                if piece := text.add(token):
                    yield piece
                if text.found_stop is not None:
                    self._scheduler.end(generation)
                    break
            count = len(generation.tokens)
        if piece := text.close():
            yield piece
        if text.found_stop is None:
            self.finish_reason = generation.finish_reason
        else:
            self.finish_reason = "stop"

    def _fit_conversation(self, question: _Message) -> tuple[int, list[int]]:
        """Drop the oldest messages until a question and its answer have room.

        Returns how many messages to drop, and the tokens of the remaining conversation.
        """
        length = self._engine.length
        dropped = 0
        ids = self._encode_messages(0, question)
        share = max(1, length // _SHARE)
        # A drop changes the beginning of the prompt, so the cache no longer fits. Each drop frees
        # the whole share, so that the next turns need none.
        if len(ids) + min(share, self._max_new_tokens or share) > length:
            while len(ids) + share > length and dropped < len(self.messages):
                # A question goes with its answer.
                dropped += 2
                ids = self._encode_messages(dropped, question)
        if len(ids) + min(MIN_ROOM, self._max_new_tokens or MIN_ROOM) > length:
            raise RequestError(
                "the message is too long for the context",
                found=f"{len(ids)} tokens with the system prompt",
                expected=f"fewer than {length}, so that there is room for an answer",
                hint=Message("use a shorter message, or a larger ", Option("context")),
            )
        return dropped, ids

    def _encode_messages(self, dropped: int, question: _Message) -> list[int]:
        """Encode the system prompt, the messages after the dropped ones, and a question."""
        system: list[_Message]
        if self._system is None:
            system = []
        else:
            system = [{"role": "system", "content": self._system}]
        return self._chat.encode([*system, *self.messages[dropped:], question])
