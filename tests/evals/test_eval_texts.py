"""Texts: articles, detokenization and counts, alone and beside lm-evaluation-harness's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from error_parts import raises
from hypothesis import given
from hypothesis import strategies as st

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import RequestError
from quantkit.evals.texts import articles, detokenize, read_text, rolling
from quantkit.quality.measures import NOT_SCORED

WIKI = (
    " \n = First = \n \n A well @-@ known text . \n \n = = Part = = \n \n More .\n = Second one ="
    " \n \n The end . \n"
)
PIECES = [
    " @-@ ",
    " @,@ ",
    " @.@ ",
    "s '",
    " 's",
    " : ",
    " ; ",
    " . ",
    " ! ",
    " ? ",
    " , ",
    "( ",
    " )",
    "[ ",
    " ]",
    "{ ",
] + [
    " }",
    '" ',
    ' "',
    "' ",
    " '",
    " = = = = ",
    "= = =",
    "= =",
    " ° ",
    " \n",
    "\n ",
    " N ",
    "/' 5/",
    " ",
    "a",
    "é",
    "=",
]


@pytest.mark.parametrize(
    ("tokenized", "text"),
    [
        ("a well @-@ known 1 @,@ 234 @.@ 5 thing", "a well-known 1,234.5 thing"),
        ("one , two ; three : four . Five ! Six ? yes", "one, two; three: four. Five! Six? yes"),
        ("( in round ) [ square ] { and curly } ones", "(in round) [square] {and curly} ones"),
        ('he said " so it is " and left', 'he said "so it is" and left'),
        ("the dog 's tail and the dogs ' tails", "the dog's tail and the dogs' tails"),
        (" = = Part = = \n", " == Part ==\n"),
        ("= = = = deep = = = =", "==== deep ===="),
        ("at 20 ° C in a N b", "at 20°C in a 1 b"),
    ],
)
def test_wikitext_reads_as_it_was_written(tokenized: str, text: str) -> None:
    assert detokenize(tokenized) == text


def test_articles_begin_at_their_titles() -> None:
    first, second = articles(WIKI)
    assert first.startswith(" = First = \n")
    assert first.endswith("More .")
    assert second == " = Second one = \n \n The end . \n"
    assert articles("A preface .\n" + WIKI)[0] == "A preface .\n "


@pytest.mark.parametrize("text", ["", "\n\n", "Two words.\n", " = = A section = = \n"])
def test_a_text_without_articles_is_refused(text: str) -> None:
    with raises(RequestError) as caught:
        articles(text)
    assert caught.value.expected
    assert caught.value.hint


def test_a_text_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKI)
    (tmp_path / "plain.txt").write_text("Two words,\nthree = more = \n")
    wiki, plain = read_text(tmp_path / "wiki.txt"), read_text(tmp_path / "plain.txt")
    assert wiki.is_wikitext
    assert len(wiki.documents) == 2
    assert wiki.readings[1] == " = Second one =\n\nThe end.\n"
    assert (
        wiki.bytes == len(WIKI) - 3
    )  # neither the blank line at the top nor the break between the articles
    assert (plain.is_wikitext, plain.documents, plain.readings) == (False, [plain.raw], [plain.raw])
    assert plain.words == 7  # six, and the empty piece at the end
    assert plain.name == "plain"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b" \n\t\n", "is empty"), (b"caf\xe9 au lait", "not plain text")],
)
def test_what_is_no_text_is_refused(content: bytes | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(RequestError, match=problem):
        read_text(tmp_path / "text")


@pytest.mark.parametrize("length", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 20])
def test_rolling_windows_predict_every_token_once(count: int, length: int) -> None:
    ids = list(range(100, 100 + count))
    windows = rolling(ids, 1, length)
    assert [t for _, targets in windows for t in targets if t != NOT_SCORED] == ids
    for inputs, targets in windows:
        assert len(inputs) == len(targets) == min(length, count)
        for at, target in enumerate(targets):
            if target != NOT_SCORED:  # what a position is given precedes what it predicts
                assert inputs[at] == (target - 1 if target > 100 else 1)


@pytest.fixture(scope="module")
def task() -> Any:
    """The harness's own code for its wikitext task."""
    return pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_detokenization_is_the_harness_s(task: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert detokenize(text) == task.wikitext_detokenizer({"page": text})


def test_counts_are_the_harness_s(task: Any, tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKI)
    text = read_text(tmp_path / "wiki.txt")
    counted = [task.process_results({"page": page}, (-1.0,)) for page in text.documents]
    assert text.words == sum(one["word_perplexity"][1] for one in counted)
    assert text.bytes == sum(one["bits_per_byte"][1] for one in counted)


@pytest.mark.parametrize(
    ("raw", "noted"), [("世界你好" * 30, True), ("The people of the world. " * 9, False)]
)
def test_a_text_with_few_spaces_has_a_note(raw: str, noted: bool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(raw, encoding="utf-8")
    assert (read_text(tmp_path / "text.txt").note is not None) == noted


def test_texts_by_name_are_paths_datasets_or_strings(tmp_path: Path) -> None:
    documents = ["The people of the land. " * 9, "The world."]
    rows = [{"text": one} for one in documents]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {
        "file": tmp_path / "a.jsonl",
        "rows": datasets.Dataset.from_list(rows),
        "strings": iter(documents),
    }
    found = quantkit.evaluate(DEMO_MODEL, texts=texts, window=32)
    assert list(found.texts) == ["file", "rows", "strings"]
    assert (
        found.rows[0].texts["rows"] == found.rows[0].texts["strings"] == found.rows[0].texts["file"]
    )
    with pytest.raises(RequestError, match="mine: the text of row 1 is of type int"):
        quantkit.evaluate(DEMO_MODEL, texts={"mine": [3]})


@pytest.mark.parametrize(
    "wrong", [["the people " * 50], datasets.Dataset.from_list([{"text": "a"}])]
)
def test_texts_without_a_name_are_paths(wrong: Any) -> None:
    with pytest.raises(
        RequestError, match=r'`texts` is .*; strings and datasets need a name: {"name": \["..."\]}'
    ):
        quantkit.evaluate(DEMO_MODEL, texts=wrong)


def test_rows_are_documents_by_their_column_and_conversations_in_the_models_format(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [
        {"role": "user", "content": "Who are the people?"},
        {"role": "assistant", "content": "All of us."},
    ]
    rows = [{"title": "a", "messages": messages}, {"title": " ", "messages": messages}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = "User: Who are the people?\n\nAssistant: All of us."
    text = read_text(path)
    assert (text.documents, text.raw, text.words) == ([plain, plain], f"{plain}\n\n{plain}", 18)
    assert "no chat template" in text.notes[0]
    assert read_text(path, "title").documents == ["a"]  # an empty one has no words
    found = quantkit.evaluate(DEMO_MODEL, texts=path, window=32)
    assert found.texts["chat"].documents == 2
    assert found.notes == list(text.notes)
    with pytest.raises(
        RequestError,
        match=r"`text_column=.body.` is not a column of line 1 \(found title, messages\)",
    ):
        quantkit.evaluate(DEMO_MODEL, texts=path, text_column="body")
    with pytest.raises(RequestError, match="`text_column` requires `texts`"):
        quantkit.evaluate(DEMO_MODEL, text_column="body")
