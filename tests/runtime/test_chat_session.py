"""Conversations: what is computed anew, what is forgotten, and what is remembered of an answer
that was cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import quantkit
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.chat_session import ChatSession
from quantkit.runtime.engine import Engine
from quantkit.text.chat import Chat
from quantkit.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Decoder, Tokenizer]:
    return quantkit.load(demo_model, dtype="fp32")  # so that the sizes of steps decide no tie


@pytest.fixture(scope="module")
def chat(demo_model: Path, loaded: tuple[Decoder, Tokenizer]) -> Chat:
    return quantkit.chat_format(demo_model, loaded[1], "llama2")


def _session(loaded: tuple[Decoder, Tokenizer], chat: Chat, **options: Any) -> ChatSession:
    return ChatSession(*loaded, chat, **{"max_new_tokens": 12, "context": 300, **options})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of any engine takes up."""
    found: list[int] = []
    step = Engine.step

    def counted(self: Engine, tokens: Tensor, *rest: Sequence[int]) -> Tensor:
        found.append(len(tokens))
        return step(self, tokens, *rest)

    monkeypatch.setattr(Engine, "step", counted)
    # Proposed tokens would be rows too.
    monkeypatch.setattr("quantkit.runtime.engine.DRAFT_TOKENS", 0)
    return found


def test_an_answer_is_what_the_whole_conversation_gives(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    model, tokenizer = loaded
    session = _session(loaded, chat, system="Be brief.", context=2000)
    said: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for question in ("The people?", "And the Congress?", "Größe, 日本語 🚀"):
        said.append(_user(question))
        expected = tokenizer.decode(
            list(quantkit.generate(model, chat.encode(said), max_new_tokens=12))
        )
        answer = "".join(session.ask(question))
        assert answer == expected
        said.append(_assistant(answer))
        assert session.messages == said[1:]
        assert session.finish_reason == "length"


def test_a_turn_computes_only_what_is_new(
    loaded: tuple[Decoder, Tokenizer], chat: Chat, rows: list[int]
) -> None:
    session = _session(loaded, chat, context=2000)
    list(session.ask("The people of the United States?"))
    first = chat.encode([_user("The people of the United States?")])
    assert rows == [len(first), *[1] * 11]
    rows.clear()
    held = len(first) + 11  # the last token was drawn and not taken up
    list(session.ask("And the Congress?"))
    whole = chat.encode([*session.messages[:3]])
    shared = next(
        at
        for at, token in enumerate(whole)
        if at == held or whole[:at] + [token] != whole[: at + 1]
    )
    assert session.num_reused_tokens > 0
    assert rows == [len(whole) - session.num_reused_tokens, *[1] * 11]
    assert len(first) <= session.num_reused_tokens <= shared
    rows.clear()
    before = session.num_reused_tokens
    session.reset()
    list(session.ask("The people of the United States?"))
    assert (
        session.num_reused_tokens - before == len(first) - 1
    )  # what was begun so is still in the cache
    assert rows[0] == 1


def test_the_oldest_turns_are_forgotten_and_the_system_prompt_stays(
    loaded: tuple[Decoder, Tokenizer], chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    class Seen:
        end_ids: tuple[int, ...] = ()

        def encode(self, messages: Any, **options: Any) -> list[int]:
            seen.append(messages)
            return chat.encode(messages)

    session = _session(loaded, Seen(), context=150, system="Be brief.")
    with caplog.at_level(logging.INFO, logger="quantkit"):
        for turn in range(8):
            list(session.ask(f"What of year {turn}?"))
            assert seen[-1][0] == {"role": "system", "content": "Be brief."}
            assert seen[-1][-1] == _user(f"What of year {turn}?")
            assert len(chat.encode(seen[-1])) + 12 <= 150
    assert session.messages[0] != _user("What of year 0?")
    assert session.messages[0]["role"] == "user"
    assert len(session.messages) > 2
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        "the context of 150 tokens is full: from now on the oldest questions and answers are"
        " forgotten"
    ]


def test_an_answer_may_fill_the_context(loaded: tuple[Decoder, Tokenizer], chat: Chat) -> None:
    session = _session(loaded, chat, context=80, max_new_tokens=None, logit_bias={2: -1000.0})
    count = len(loaded[1].encode("".join(session.ask("The people?")), bos=False))
    assert session.finish_reason == "length"
    assert count > 40
    assert "".join(session.ask("And?"))


def test_a_message_that_does_not_fit_alone_is_refused_and_forgotten(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    session = _session(loaded, chat, context=100)
    answer = "".join(session.ask("The people?"))
    with pytest.raises(RequestError, match=r"too long for the context .*fewer than 100.*`context`"):
        session.ask("word " * 200)
    assert session.messages == [_user("The people?"), _assistant(answer)]


def test_what_was_said_before_a_question_was_left_is_remembered(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    session = _session(loaded, chat)
    pieces = session.ask("The people?")
    said = [next(pieces), next(pieces)]
    pieces.close()
    assert session.messages == [_user("The people?"), _assistant("".join(said))]
    assert session.finish_reason is None
    assert "".join(session.ask("And?"))
    begun = _session(loaded, chat)
    left = begun.ask("The people?")
    assert [next(left), next(left)] == said
    assert "".join(begun.ask("And?")) == session.messages[-1]["content"]
    assert begun.messages == session.messages
    next(begun.ask("And?"))
    begun.reset()
    assert begun.messages == []
    fresh = _session(loaded, chat)
    fresh.messages += session.messages[:2]
    assert "".join(fresh.ask("And?")) == session.messages[-1]["content"]


def test_an_answer_ends_where_it_is_interrupted(
    loaded: tuple[Decoder, Tokenizer], chat: Chat, rows: list[int]
) -> None:
    session = _session(loaded, chat)
    said = list(session.ask("The people?", interrupted=lambda: len(rows) == 3))
    assert len(rows) == 3
    assert session.messages == [_user("The people?"), _assistant("".join(said))]
    assert list(session.ask("The people?", interrupted=lambda: True)) == []
    assert len(session.messages) == 2  # a question without an answer is forgotten
    list(session.ask("And?"))
    assert len(session.messages) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_is_broken_off_spoils_nothing(
    error: type[BaseException],
    loaded: tuple[Decoder, Tokenizer],
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = _session(loaded, chat)
    pieces = session.ask("The people?")
    said = next(pieces)
    with monkeypatch.context() as broken:
        broken.setattr(Engine, "step", lambda *_: (_ for _ in ()).throw(error()))
        with pytest.raises(error):
            next(pieces)
    remembered = [_user("The people?"), _assistant(said)] if error is KeyboardInterrupt else []
    assert session.messages == remembered
    other = _session(loaded, chat)
    other.messages += remembered
    assert "".join(session.ask("And?")) == "".join(other.ask("And?"))


def test_stop_strings_and_end_tokens_of_the_format_end_an_answer(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    whole = "".join(_session(loaded, chat).ask("The people?"))
    word = whole.split()[-1]
    stopped = _session(loaded, chat, stop=word)
    assert "".join(stopped.ask("The people?")) == whole[: whole.index(word)]
    assert stopped.finish_reason == "stop"
    ids = list(quantkit.generate(loaded[0], chat.encode([_user("The people?")]), max_new_tokens=12))

    class Ending:
        end_ids = (ids[5],)
        encode = chat.encode

    ended = _session(loaded, Ending())
    assert "".join(ended.ask("The people?")) == loaded[1].decode(ids[: ids.index(ids[5])])
    assert ended.finish_reason == "stop"


def test_the_system_prompt_is_changed_and_the_history_stays(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    session = _session(loaded, chat, context=2000)
    list(session.ask("The people?"))
    session.system = "Be brief."
    answer = "".join(session.ask("And?"))
    said = [{"role": "system", "content": "Be brief."}, *session.messages[:3]]
    ids = list(quantkit.generate(loaded[0], chat.encode(said), max_new_tokens=12))
    assert answer == loaded[1].decode(ids)


def test_draws_can_be_repeated(loaded: tuple[Decoder, Tokenizer], chat: Chat) -> None:
    first, second = (
        _session(loaded, chat, temperature=1.0, seed=5, repetition_penalty=1.2) for _ in range(2)
    )
    assert ["".join(first.ask(text)) for text in ("A", "B")] == [
        "".join(second.ask(text)) for text in ("A", "B")
    ]


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"context": 0}, "`context` must be at least 1"),
        ({"context": 10**6}, "`context` exceeds the model's"),
        ({"max_new_tokens": 0}, "nothing to generate"),
        ({"system": 5}, "`system`"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop string is empty"),
        ({"num_beams": 2}, "beam search is not supported"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    options: dict[str, Any], reported: str, loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    with pytest.raises(RequestError, match=reported):
        _session(loaded, chat, **options)


def test_a_session_needs_a_model_and_a_format(
    loaded: tuple[Decoder, Tokenizer], chat: Chat
) -> None:
    for model, format in ((loaded, chat), (loaded[0], "llama2")):
        with pytest.raises(RequestError, match="of the wrong type"):
            ChatSession(model, loaded[1], format)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="requires a model"):
        ChatSession(Engine(loaded[0], 64), loaded[1], chat, context=64)
    with pytest.raises(RequestError, match="`text`"):
        _session(loaded, chat).ask(None)  # type: ignore[arg-type]
