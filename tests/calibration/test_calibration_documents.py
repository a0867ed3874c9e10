"""Documents in rows: which column has them, conversations in the chat template, and datasets and
strings in Python.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from command import Capture, run
from error_parts import raises
from transformers.utils.chat_template_utils import render_jinja_template

import quantkit
from quantkit.calibration import collector
from quantkit.calibration.conversations import ModelChat, model_chat
from quantkit.calibration.data import load_calibration
from quantkit.calibration.documents import read_documents
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import RequestError, ResumeError
from quantkit.text.chat import TemplateChat
from quantkit.text.chat_template import ChatTemplate
from quantkit.text.tokenizer import load_tokenizer

DOCUMENTS = [part for part in excerpt().split("\n") if part]
TEXT = "\n\n".join(DOCUMENTS)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}],
]
TURNS = (
    "{{ bos_token }}{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}{{"
    " '\\n' }}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + TURNS
)
REFUSED = [{"role": "user", "content": "no"}]
REFUSING = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + TURNS
)
RENDERED = "<system>Be brief.<user>Why?\n<user>How?<assistant>So.\n"


class Spelled:
    """A tokenizer of letters whose BOS is spelled."""

    bos_id = 0
    vocab_size = 0x500
    special_tokens: Mapping[str, int] = {"<s>": 0}

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        parts = text.split("<s>") if specials else [text]
        ids = list(itertools.chain.from_iterable([0, *map(ord, part)] for part in parts))[1:]
        return [0] * bos + ids


def chat(template: str = TURNS) -> ModelChat:
    found = TemplateChat(lambda _: ChatTemplate(template, tokens={"bos_token": "<s>"}), Spelled())  # type: ignore[arg-type]
    return lambda: (found, [])


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path)
    return path


def sharegpt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt"}
    return [
        {"from": names.get(one["role"], one["role"]), "value": one["content"]} for one in messages
    ]


@pytest.mark.parametrize("kind", ["jsonl", "sharegpt", "parquet", "dataset", "rows", "disk"])
def test_conversations_are_rendered_by_the_models_template(kind: str, tmp_path: Path) -> None:
    rows = [{"id": str(number), "messages": one} for number, one in enumerate(CHATS)]
    sources: dict[str, Any] = {
        "jsonl": lambda: lines(tmp_path / "a.jsonl", *rows),
        "sharegpt": lambda: lines(
            tmp_path / "a.json", *({"conversations": sharegpt(one)} for one in CHATS)
        ),
        "parquet": lambda: parquet(tmp_path / "a.parquet", messages=CHATS, id=["0", "1"]),
        "dataset": lambda: datasets.Dataset.from_list(rows),
        "rows": lambda: iter(rows),
        "disk": lambda: saved(tmp_path, rows),
    }
    found = read_documents(sources[kind](), 10**6, chat=chat())
    assert found.text == RENDERED  # without BOS, which leads each sample
    assert (found.specials, found.documents, found.notes) == (
        True,
        tuple(RENDERED.splitlines(keepends=True)),
        (),
    )


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def test_what_a_template_spells_becomes_special_tokens(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "Why?"}]})
    template = "{{ messages[0].content }}<s>"
    found = load_calibration(path, Spelled(), samples=1, length=6, seed=0, chat=chat(template))  # type: ignore[arg-type]
    assert found.tokens.tolist() == [[0, *map(ord, "Why?"), 0]]
    assert found.documents == 1


def test_a_template_without_a_system_role_gets_no_system_message(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"messages": one} for one in CHATS))
    assert read_documents(path, 10**6, chat=chat(NO_SYSTEM)).text == RENDERED.removeprefix(
        "<system>Be brief."
    )


def test_conversations_that_cannot_be_rendered_are_counted_or_the_error(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", {"messages": CHATS[0]}, {"messages": REFUSED}, {"messages": []}
    )
    (note,) = read_documents(path, 10**6, chat=chat(REFUSING)).notes
    assert re.search("2 of 3 .*line 2: .*not this", note)
    path = lines(tmp_path / "b.jsonl", {"messages": REFUSED}, {"messages": REFUSED})
    with raises(RequestError, "line 1: ", "not this", path=path):
        read_documents(path, 10**6, chat=chat(REFUSING))


CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
]


def test_conversations_of_which_a_part_would_be_lost_are_left_out(tmp_path: Path) -> None:
    known = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}.{% endif %}{% endfor %}"
    )
    question = {"role": "user", "content": "Why?"}
    observation = {"from": "observation", "value": "It rains."}  # ShareGPT's results of tools
    path = lines(
        tmp_path / "a.jsonl",
        *({"messages": chat} for chat in ([question], [question, observation], CALLS)),
    )
    documents = read_documents(path, 10**6, chat=chat(known))
    assert documents.text == "Why?."
    (note,) = documents.notes
    assert re.search(r"2 of 3 .*line 2: .*messages\[1\]\.content", note)


def test_calls_are_read_if_the_template_prints_them(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": CALLS})
    template = "{% for m in messages %}{{ m.role + ':' + m.content }}{{ m.tool_calls }}{% endfor %}"
    found = read_documents(path, 10**6, chat=chat(template))
    assert "weather" in found.text
    assert "Oslo" in found.text
    with pytest.raises(RequestError):  # as plain text
        read_documents(path, 10**6)


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "TEMPLATE_SECONDS", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    path = lines(tmp_path / "a.jsonl", {"messages": CHATS[0]})
    with raises(RequestError, " 0.5 seconds", path=path):
        read_documents(path, 10**6, chat=chat(endless))


def test_a_model_without_a_template_reads_conversations_as_plain_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"messages": conversation} for conversation in CHATS))
    documents = read_documents(
        path, 10**6, chat=partial(model_chat, DEMO_MODEL, load_tokenizer(DEMO_MODEL))
    )
    assert documents.text == "System: Be brief.\n\nUser: Why?\n\nUser: How?\n\nAssistant: So."
    assert not documents.specials
    assert "template" in documents.notes[0]
    path = lines(
        tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    )
    with raises(RequestError, "line 1: ", "'image'", path=path):
        read_documents(path, 10**6)
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "not?"}]
    documents = read_documents([{"messages": [{"role": "user", "content": parts}]}], 10**6)
    assert documents.text == "User: Why\nnot?"


RENDERED_CHAT = RENDERED.partition("\n")[0] + "\n"
COLUMNS: list[tuple[dict[str, Any], str | None, str, bool]] = [
    ({"text": "a", "body": "b", "messages": CHATS[0]}, None, "a", False),
    ({"body": "b", "messages": CHATS[0]}, None, RENDERED_CHAT, False),
    ({"body": "b", "n": 3}, None, "b", True),
    ({"text": "a", "body": "b"}, "body", "b", False),
    ({"text": "a", "chat": CHATS[0]}, "chat", RENDERED_CHAT, False),
]
"""A row, the column that is requested, the text that is read, and whether a note names it."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_the_column_is_the_requested_one_or_the_one_that_can_be_meant(
    kind: str, tmp_path: Path
) -> None:
    for row, column, text, has_note in COLUMNS:
        source: Any = datasets.Dataset.from_list([row])
        if kind == "jsonl":
            source = lines(tmp_path / "a.jsonl", row)
        elif kind == "parquet":
            columns = {name: [value] for name, value in row.items()}
            source = parquet(tmp_path / "a.parquet", **columns)
        documents = read_documents(source, 10**6, column=column, chat=chat())
        assert documents.text == text, row
        assert ["'body'" in note for note in documents.notes] == [True] * has_note, row


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize(
    ("column", "names"),
    [(None, ["messages", "conversations"]), ("bodies", ['"bodies"', "'body'?"])],
)
def test_a_column_that_cannot_be_known_is_an_error_with_the_columns(
    kind: str, column: str | None, names: list[str], tmp_path: Path
) -> None:
    row = {"title": "a", "body": "b"}
    source: Any = datasets.Dataset.from_list([row])
    if kind == "jsonl":
        source = lines(tmp_path / "a.jsonl", row)
    elif kind == "parquet":
        source = parquet(tmp_path / "a.parquet", title=["a"], body=["b"])
    with raises(RequestError, *names, found="title, body", options=["text_column"]):
        read_documents(source, 10**6, column=column)


def test_a_later_row_without_the_column_is_an_error(tmp_path: Path) -> None:
    with raises(RequestError, "line 2", found="body"):
        read_documents(lines(tmp_path / "a.jsonl", {"text": "a"}, {"body": "b"}), 10**6)
    plain_text = DEMO_MODEL.parent / "excerpt.txt"
    with raises(RequestError, path=plain_text, options=["text_column"]):
        read_documents(plain_text, 10**6, column="body")


def _endless() -> Iterator[str]:
    yield from DOCUMENTS
    yield "no document " * 10**6
    raise AssertionError("read past the limit")


@pytest.mark.parametrize("kind", ["list", "generator", "dataset", "streamed", "disk"])
def test_python_objects_give_what_a_file_of_their_text_gives(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    rows = [{"text": document} for document in DOCUMENTS]
    sources: dict[str, Any] = {
        "list": lambda: DOCUMENTS,
        "generator": lambda: iter(DOCUMENTS),
        "dataset": lambda: datasets.Dataset.from_list(rows),
        "streamed": lambda: datasets.IterableDataset.from_generator(lambda: iter(rows)),
        "disk": lambda: str(saved(tmp_path, rows)),
    }
    (tmp_path / "text.txt").write_text(TEXT)
    settings: dict[str, Any] = {"samples": 4, "length": 50, "seed": 3}
    expected = load_calibration(tmp_path / "text.txt", tokenizer, **settings)
    calibration = load_calibration(sources[kind](), tokenizer, **settings)
    assert torch.equal(calibration.tokens, expected.tokens)
    assert calibration.to_json() == {
        "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        **settings,
        "documents": len(DOCUMENTS),
    }


def test_no_more_strings_are_read_than_the_samples_need() -> None:
    found = read_documents(_endless(), len(TEXT.encode()) + 100)
    assert found.text.startswith(TEXT + "\n\nno document")
    assert len(found.text.encode()) == len(TEXT.encode()) + 100


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (["a", 3], ["row 2", "type int"]),
        (["a", "\ud800"], ["row 2", "surrogates"]),
        ([{"title": "a", "body": "b"}], ["row 1", "found title, body"]),
        (["", None], ["empty"]),
    ],
)
def test_unusable_objects_are_named(source: Any, names: list[str]) -> None:
    with raises(RequestError, *names, path=Path("calibration")):
        load_calibration(source, load_tokenizer(DEMO_MODEL), samples=1, length=8, seed=0)


def test_a_saved_dataset_of_several_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"text": TEXT}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    with raises(
        RequestError, str(tmp_path / "both/train"), path=tmp_path / "both", found="train, test"
    ):
        read_documents(tmp_path / "both", 10**6)
    assert read_documents(tmp_path / "both/train", 10**6).text == TEXT
    (tmp_path / "both/train/state.json").write_text("{")
    with raises(RequestError, path=tmp_path / "both/train"):
        read_documents(tmp_path / "both/train", 10**6)


@pytest.mark.slow
def test_a_generator_calibrates_and_other_strings_do_not_resume(
    demo_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"method": "gptq", "samples": 4, "length": 32, "source_check": False}

    def interrupt(phase: str, done: int, *_: object) -> None:
        if (phase, done) == ("quantize", 14):
            raise KeyboardInterrupt

    def quantize(source: Any, **options: Any) -> quantkit.QuantizeResult:
        return quantkit.quantize(
            demo_model, tmp_path / "out", "int8", calibration=source, **settings, **options
        )

    with pytest.raises(KeyboardInterrupt):
        quantize(iter(DOCUMENTS), progress=interrupt)
    with raises(ResumeError, "calibration (documents, sha256)"):
        quantize(DOCUMENTS[1:], resume=True)
    result = quantize(iter(DOCUMENTS), resume=True)
    recorded = json.loads((tmp_path / "out/quantkit.json").read_text())["calibration"]
    assert recorded == result.calibration
    assert (recorded["sha256"], recorded["documents"]) == (
        hashlib.sha256(TEXT.encode()).hexdigest(),
        len(DOCUMENTS),
    )
    assert "--calibration TEXT" in (tmp_path / "out/README.md").read_text()


def test_the_command_takes_a_column(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    file = lines(
        tmp_path / "a.jsonl", *({"title": "t", "body": document} for document in DOCUMENTS)
    )
    command: list[str | Path] = [
        "plan",
        "quantize",
        demo_model,
        tmp_path / "out",
        "--scheme",
        "int8",
        "--method",
        "gptq",
    ]
    command += ["--samples", "4", "--length", "32", "--calibration", file]
    code, _, err = run(capfd, *command)
    assert code == 2
    assert "found title, body" in err
    assert "--text-column" in err
    assert run(capfd, *command, "--text-column", "body")[0] == 0
    code, _, err = run(capfd, *command[:-2], "--text-column", "body")
    assert code == 2
    assert "--text-column" in err
    assert "--calibration" in err


@pytest.mark.parametrize(
    ("wrong", "example"),
    [
        ("The people " * 99, '["..."]'),
        (datasets.DatasetDict(test=datasets.Dataset.from_list([{"text": "a"}])), 'ds["test"]'),
    ],
    ids=["string", "splits"],
)
def test_the_error_for_what_is_no_source_says_what_is_one(
    wrong: Any, example: str, tmp_path: Path
) -> None:
    with raises(RequestError, example, options=["calibration"]):
        quantkit.quantize(DEMO_MODEL, tmp_path / "out", "int4-g64", calibration=wrong)


@pytest.mark.parametrize("wrong", [3, b"text", {"train": ["a"]}])
def test_what_is_no_source_is_refused(wrong: Any, demo_model: Path, tmp_path: Path) -> None:
    with raises(RequestError, argument="calibration", found=repr(wrong)):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", calibration=wrong)


# Tools, and messages as JSON


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}},
    },
    {"type": "function", "function": {"name": "time"}},
]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS


def _expected_text(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    """The text that transformers makes of a conversation."""
    (text,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, bos_token="<s>"
    )
    return str(text).removeprefix("<s>")


@pytest.mark.parametrize("kind", ["jsonl", "json strings", "parquet", "dataset", "rows"])
def test_tools_next_to_messages_are_rendered(kind: str, tmp_path: Path) -> None:
    rows = [{"messages": CHATS[0], "tools": TOOLS}, {"messages": CHATS[1], "tools": None}]
    columns = {
        "messages": [json.dumps(messages) for messages in CHATS],
        "tools": [json.dumps(TOOLS), ""],
    }
    tables = {"messages": CHATS, "tools": [TOOLS, []]}
    sources: dict[str, Any] = {
        "jsonl": lambda: lines(tmp_path / "a.jsonl", *rows),
        "json strings": lambda: parquet(tmp_path / "a.parquet", **columns),
        "parquet": lambda: parquet(tmp_path / "a.parquet", **tables),
        "dataset": lambda: datasets.Dataset.from_dict(tables),
        "rows": lambda: rows,
    }
    found = read_documents(sources[kind](), 10**6, chat=chat(WITH_TOOLS))
    expected = [
        _expected_text(WITH_TOOLS, CHATS[0], TOOLS),
        _expected_text(WITH_TOOLS, CHATS[1], None),
    ]
    assert list(found.documents or ()) == expected
    assert found.notes == ()


def test_a_template_that_prints_no_tools_is_noted(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", *({"messages": messages, "tools": TOOLS} for messages in CHATS)
    )
    found = read_documents(path, 10**6, chat=chat())
    assert found.text == RENDERED.removesuffix("\n") + "\n"
    assert len(found.notes) == 1


@pytest.mark.parametrize("tools", ["not JSON", 5, [5], {"name": "f"}])
def test_tools_of_wrong_types_are_refused(tools: object, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": CHATS[0], "tools": tools})
    with pytest.raises(RequestError):
        read_documents(path, 10**6, chat=chat(WITH_TOOLS))


@pytest.mark.parametrize("column", ["messages", "conversations", "text"])
def test_messages_in_a_json_string_are_messages(column: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({column: json.dumps(messages)} for messages in CHATS))
    assert read_documents(path, 10**6, chat=chat()).text == RENDERED


def test_messages_in_a_json_string_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", *({"messages": "\ufeff" + json.dumps(messages)} for messages in CHATS)
    )
    assert read_documents(path, 10**6, chat=chat()).text == RENDERED


@pytest.mark.parametrize(
    "text",
    [
        repr(CHATS[0]),
        '[{"role": "user"]',
        '[{"a": 1}]',
        json.dumps({"messages": CHATS[0]}),
        repr(CHATS[0][0]),
    ],
)
def test_strings_that_look_like_messages_and_are_none_are_refused(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        read_documents(lines(tmp_path / "a.jsonl", {"messages": text}), 10**6, chat=chat())
    assert caught.value.path == tmp_path / "a.jsonl"
    assert (
        read_documents(lines(tmp_path / "b.jsonl", {"text": text}), 10**6, chat=chat()).text == text
    )
