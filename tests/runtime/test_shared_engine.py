"""What happens where two use one engine, or one conversation, in turn or from two threads: the
right text or an error, never another's text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.chat_session import ChatSession
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.chat import Chat
from quantkit.text.tokenizer import Tokenizer

Loaded = tuple[Decoder, Tokenizer]
QUESTIONS = ("Who is the king?", "And the queen?", "And their people?")
IN_USE = "^the engine is in use by another generation"


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> Loaded:
    return quantkit.load(demo_model)


@pytest.fixture(scope="module")
def chat(demo_model: Path, loaded: Loaded) -> Chat:
    return quantkit.chat_format(demo_model, loaded[1], "llama2")


def _session(engine: Engine, loaded: Loaded, chat: Chat) -> ChatSession:
    return ChatSession(engine, loaded[1], chat, max_new_tokens=12)


def _said(session: ChatSession, question: str) -> str:
    return "".join(session.ask(question))


@pytest.mark.slow
def test_conversations_that_take_turns_on_an_engine_have_their_own_text(
    loaded: Loaded, chat: Chat
) -> None:
    alone = _session(Engine(loaded[0], 400), loaded, chat)
    expected = [_said(alone, question) for question in QUESTIONS]
    engine = Engine(loaded[0], 400)
    first, second = (_session(engine, loaded, chat) for _ in range(2))
    found = []
    for number, question in enumerate(QUESTIONS):
        found.append(_said(first, question))
        _said(second, f"Tell me of the war and the laws of the nation in the year {number}")
        assert second.num_reused_tokens == 0
    assert found == expected
    assert first.num_reused_tokens == 0


@pytest.mark.parametrize("other", ["batch", "stream", "warm-up"])
def test_a_conversation_forgets_what_slots_held_before_another_used_them(
    other: str, loaded: Loaded, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    alone = _session(Engine(model, 400), loaded, chat)
    expected = [_said(alone, question) for question in QUESTIONS]
    engine = Engine(model, 400)
    session = _session(engine, loaded, chat)
    found = [_said(session, QUESTIONS[0])]
    text = "The state of the union is strong and will be for years to come"
    if other == "batch":
        quantkit.generate_batch(engine, [text], tokenizer=tokenizer, max_new_tokens=20)
    elif other == "stream":
        next(quantkit.stream(engine, tokenizer, text, max_new_tokens=20))  # and left
    else:
        monkeypatch.setattr(engine, "_compiled", True)
        monkeypatch.setattr(engine, "step", lambda *given: None)
        engine.warm_up()
        monkeypatch.undo()
    found.append(_said(session, QUESTIONS[1]))
    assert session.num_reused_tokens == 0
    found.append(_said(session, QUESTIONS[2]))
    assert found == expected
    assert session.num_reused_tokens > 0


def test_of_two_that_generate_on_an_engine_the_first_is_reported(loaded: Loaded) -> None:
    model, tokenizer = loaded
    engine = Engine(model, 100, slots=2)
    prompts = ("My fellow citizens", "The king")
    expected = [
        "".join(quantkit.stream(model, tokenizer, prompt, max_new_tokens=12)) for prompt in prompts
    ]
    first, second = (
        quantkit.stream(engine, tokenizer, prompt, max_new_tokens=12) for prompt in prompts
    )
    begun = next(first)
    assert expected[0].startswith(begun)
    begun = next(second)
    with pytest.raises(
        RequestError, match=f"{IN_USE}; give each its own engine, or run them in one batch"
    ):
        next(first)
    assert begun + "".join(second) == expected[1]
    assert list(first) == []


def test_an_answer_whose_engine_was_taken_over_is_reported_and_forgotten(
    loaded: Loaded, chat: Chat
) -> None:
    engine = Engine(loaded[0], 400)
    session = _session(engine, loaded, chat)
    answer = session.ask(QUESTIONS[0])
    next(answer)
    quantkit.generate_batch(engine, [[1, 5, 7]], max_new_tokens=3)
    with pytest.raises(RequestError, match=IN_USE):
        list(answer)
    assert session.messages == []
    assert _said(session, QUESTIONS[0]) == _said(
        _session(Engine(loaded[0], 400), loaded, chat), QUESTIONS[0]
    )


def test_a_batch_takes_its_engine_back_once_nothing_of_it_runs(loaded: Loaded) -> None:
    engine = Engine(loaded[0], 40)
    mine, other = Scheduler(engine), Scheduler(engine)
    (running,) = mine.add(Request([1, 5, 7], 9))
    other.add(Request([1, 6], 2))
    for use in (mine.step, lambda: mine.add(Request([1, 8], 2))):
        with pytest.raises(RequestError, match=IN_USE):
            use()
    mine.end(running)
    assert mine.step() == []  # it has nothing to do, and takes nothing from the other
    assert [len(one.tokens) for one in other.step()] == [1]
    mine.add(Request([1, 8], 2))
    with pytest.raises(RequestError, match=IN_USE):
        other.step()


class _Held:
    """Holds a thread within a step of an engine, the first that comes, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self._step = 0, Engine.step
        self._within, self._let_go = threading.Event(), threading.Event()
        monkeypatch.setattr(Engine, "step", lambda *given: self._stepped(*given))

    def _stepped(self, *given: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 1:
            self._within.set()
            assert self._let_go.wait(60)
        return self._step(*given)

    def meanwhile(self, first: Callable[[], object], then: Callable[[], None]) -> None:
        """Run the first in a thread, and the other while that is within its first step."""
        thread = threading.Thread(target=first)
        thread.start()
        try:
            assert self._within.wait(60)
            then()
        finally:
            self._let_go.set()
            thread.join()


def test_metas_class_serves_one_thread_after_the_other(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = quantkit.Llama.build(demo_model, demo_model, 60, 2)

    def said(prompt: str) -> str:
        return llama.text_completion([prompt], temperature=0, max_gen_len=8)[0]["generation"]

    prompts = ("My fellow citizens", "The king")
    expected = [said(prompt) for prompt in prompts]
    held, found = _Held(monkeypatch), {}
    second = threading.Thread(target=lambda: found.update({1: said(prompts[1])}))

    def other() -> None:
        assert llama._turn.locked()
        second.start()

    held.meanwhile(lambda: found.update({0: said(prompts[0])}), other)
    second.join()
    assert [found[0], found[1]] == expected


def test_a_conversation_is_one_threads_at_a_time(
    loaded: Loaded, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _said(_session(Engine(loaded[0], 400), loaded, chat), QUESTIONS[0])
    session = _session(Engine(loaded[0], 400), loaded, chat)
    held, found = _Held(monkeypatch), list[str]()
    waiting = session.ask(QUESTIONS[0])

    def other() -> None:
        for use in (lambda: session.ask(QUESTIONS[1]), session.reset):
            with pytest.raises(
                RequestError, match=r"^the conversation is in use by another thread"
            ):
                use()

    held.meanwhile(lambda: found.extend(waiting), other)
    assert "".join(found) == expected
    assert [one["content"] for one in session.messages] == [QUESTIONS[0], expected]


def test_an_answer_that_was_left_for_another_question_does_not_go_on(
    loaded: Loaded, chat: Chat
) -> None:
    session = _session(Engine(loaded[0], 400), loaded, chat)
    left = session.ask(QUESTIONS[0])
    said = next(left)
    answer = _said(session, QUESTIONS[1])
    with pytest.raises(RequestError, match=r"^the answer cannot continue"):
        next(left)
    assert [one["content"] for one in session.messages] == [
        QUESTIONS[0],
        said,
        QUESTIONS[1],
        answer,
    ]
