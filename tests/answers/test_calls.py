"""Calls of tools and reasoning in texts: the same pieces in whatever parts the text comes, and
no text lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from quantkit.answers.calls import CallParser
from quantkit.answers.form import AnswerForm, Parts
from quantkit.answers.pieces import Parser, PlainParser
from quantkit.answers.reasoning import ReasoningParser
from quantkit.answers.syntaxes import SYNTAXES, recognize_syntax
from quantkit.grammar.after_reasoning import Reasoning

Calls = list[tuple[str, str]]
F, G = ("f", '{"a": 1}'), ("g", "{}")

HERMES: list[tuple[str, str, Calls]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}',
        "",
        [F, G],
    ),
    (
        'Let me see.\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n',
        "Let me see.",
        [F],
    ),
    ('<tool_call>{"name":"g","arguments":{}}</tool_call>\n and so', "and so", [G]),
    (
        '<tool_call>{"name":"f","arguments":{"a":"</tool_call>{\\"}"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>{\\"}"}')],
    ),
    ('<tool_call>{"name":"f","arguments":{"ä":"日"}}</tool_call>', "", [("f", '{"ä": "日"}')]),
    (
        '<tool_call>no</tool_call> <tool_call>{"name":"g","arguments":{}}</tool_call>',
        "<tool_call>no</tool_call>",
        [G],
    ),
]
LLAMA: list[tuple[str, str, Calls]] = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (
        '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}',
        "",
        [F, G],
    ),
    ('I look.\n<|python_tag|>{"name": "g", "parameters": {}}', "I look.", [G]),
]
MISTRAL: list[tuple[str, str, Calls]] = [
    (
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {},'
            ' "id": "x"}]'
        ),
        "",
        [F, G],
    ),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "", [F, G]),
    ('Well. [TOOL_CALLS]f{"a": 1}', "Well.", [F]),
]
CASES = [
    (name, *case)
    for name, cases in (
        ("hermes", HERMES),
        ("llama3", LLAMA),
        ("mistral", MISTRAL),
        ("mistral_args", MISTRAL),
    )
    for case in cases
]

NO_CALLS = {
    "hermes": [
        '<tool_call>{"name":"unknown","arguments":{}}</tool_call>',
        '<tool_call>{"name":"f"}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a":',
        '<tool_call>{"name":"f","arguments":[]}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>',
        '<tool_call>{name: "f"}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a":' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
        "<tool_call>",
        " <tool",
        "{}",
        " \n",
        "",
    ],
    "llama3": [
        '{"name": "x", "parameters": {}}',
        '{"a": 1} and {"b": 2}',
        'So {"name": "f", "parameters": {}}',
        "{}",
        "{",
        "<|python_tag|>import math",
        '{"name": "f", "parameters": {}',
        '{"name": "f", "parameters": "{}"}',
        "  no\n",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "x", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "f"}]',
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]x[ARGS]{}",
        "[TOOL_CALLS]f x\n{}",
        "[TOOL_CALLS]f\n[ARGS]{}",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]",
        "[TOOL",
    ],
}


def read(parser: Parser, parts: Iterable[str]) -> tuple[str, str, Calls]:
    found = Parts()
    for part in parts:
        found.add(parser.feed(part))
    found.add(parser.close())
    return found.content, found.reasoning, [(one.name, one.arguments) for one in found.calls]


def parts_of(text: str) -> list[list[str]]:
    """The text whole, in single letters, and in parts of random lengths."""
    rng = random.Random(len(text))
    cuts = [sorted(rng.randrange(len(text) + 1) for _ in range(4)) for _ in range(5)]
    some = [[text[i:j] for i, j in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    return [[text], list(text), *some]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found(name: str, text: str, content: str, calls: Calls) -> None:
    for parts in parts_of(text):
        assert read(CallParser(SYNTAXES[name](), ["f", "g"]), parts) == (content, "", calls)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts]
)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    for parts in parts_of(text):
        assert read(CallParser(SYNTAXES[name](), ["f", "g"]), parts) == (text, "", [])


def test_further_calls_are_dropped_where_one_is_wanted() -> None:
    for name, text, content, calls in CASES:
        assert read(CallParser(SYNTAXES[name](), ["f", "g"], parallel=False), [text]) == (
            content,
            "",
            calls[:1],
        )


def test_long_arguments_take_linear_time() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":"' + "x" * 300_000 + '"}}</tool_call>'
    _, _, [(_, found)] = read(
        CallParser(SYNTAXES["hermes"](), ["f"]), [text[i : i + 3] for i in range(0, len(text), 3)]
    )
    assert len(found) == 300_000 + len('{"a": ""}')


@pytest.mark.parametrize(
    ("opened", "text", "content", "reasoning"),
    [
        (False, "<think>\nAbc\n\ndef.\n</think>\n\nYes. ", "Yes. ", "Abc\n\ndef."),
        (True, "Abc </thinking> d\n</think>Yes", "Yes", "Abc </thinking> d"),
        (True, "\n</think>\n\nYes", "Yes", ""),
        (False, "Yes <think>no</think>", "Yes <think>no</think>", ""),
        (False, " <thin", " <thin", ""),
        (True, "Abc </th", "", "Abc </th"),
        (False, "<think>", "", ""),
        (True, "Abc</think>", "", "Abc"),
        (False, "", "", ""),
    ],
)
def test_reasoning_comes_first(opened: bool, text: str, content: str, reasoning: str) -> None:
    for parts in parts_of(text):
        assert read(ReasoningParser(PlainParser(), opened), parts) == (content, reasoning, [])


def test_calls_follow_reasoning_and_tokens_of_it_are_counted() -> None:
    form = AnswerForm("hermes", ("f",), reasoning=Reasoning(7, 8, opened=False))
    text = '<think>a <tool_call></think>\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>'
    for parts in parts_of(text):
        assert read(form.create_parser(), parts) == ("", "a <tool_call>", [F])
    assert [form.count_reasoning_tokens(one) for one in ([7, 1, 2, 8, 3], [1, 2], [7, 1], [])] == [
        4,
        0,
        2,
        0,
    ]
    opened = AnswerForm(reasoning=Reasoning(7, 8, opened=True))
    assert [opened.count_reasoning_tokens(one) for one in ([1, 8, 3], [1, 2])] == [2, 2]


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("for each call: <tool_call>\n{...}", [], "hermes"),
        ("<tool_call>\n<function=x>", [], None),
        ("'[TOOL_CALLS]' + calls", [], "mistral"),
        ("'[TOOL_CALLS]' + name + '[ARGS]'", [], "mistral_args"),
        ("{{ calls }}", ["[TOOL_CALLS]"], None),
        ('{"name": x, "parameters": y}', ["<|python_tag|>"], "llama3"),
        ('{"name": x, "parameters": y}', [], None),
        ("{{ tools }}", [], None),
    ],
)
def test_the_syntax_is_that_of_the_template(template: str, tokens: list[str], name: Any) -> None:
    assert recognize_syntax(template, dict.fromkeys(tokens, 1)) == name
