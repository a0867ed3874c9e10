"""Patterns of files: those of Python's `re`, with an end."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from quantkit.base import patterns
from quantkit.base.patterns import MatchTime, Pattern
from quantkit.errors import CheckpointError

NAMES = [
    f"model.layers.{layer}.{part}_proj"
    for layer in (0, 1, 10, 27)
    for part in ("self_attn.q", "mlp.down")
]
PIECES = [
    "model",
    "layers",
    r"\.",
    ".",
    "*",
    "+",
    "?",
    ".*",
    "|",
    "(",
    ")",
    "(?:",
    "[0-9]",
    "[^.]",
    r"\d",
    "{1,2}",
    "{2}",
    "{,3}",
    "^",
    "$",
    "(?=q)",
    "(?!mlp)",
    "(?<=_)",
    "q_proj",
    "down",
    r"\w",
    r"\b",
    "(?i)",
    "Q",
    "1",
    "[[]",
    "[]a]",
    "{x}",
    "*?",
    "++",
    "(?>a|.)",
    r"\Z",
    "(?P<n>.)",
    r"(?P=n)",
    "{e<=1}",
    "[[:alpha:]]",
    "[a-z&&[^q]]",
    r"\p{L}",
]


def _compile(expression: str, **affixes: str) -> Pattern:
    return Pattern(expression, key="the.key", match_time=MatchTime("x/config.json"), **affixes)


@pytest.mark.slow
def test_patterns_match_what_re_matches() -> None:
    """An expression matches the same names as with `re`, or is refused."""
    generator = random.Random(5)
    compared = 0
    for _ in range(6000):
        expression = "".join(generator.choices(PIECES, k=generator.randint(1, 7)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = re.compile(expression)
            except re.error:
                with pytest.raises(CheckpointError):
                    _compile(expression)
                continue
        try:
            pattern = _compile(expression)
        except CheckpointError:
            assert re.search(r"\{[^}]*[eds]|\[:", expression), expression
            continue
        for name in NAMES:
            compared += 1
            assert bool(pattern.match(name)) == bool(expected.match(name)), (expression, name)
            assert bool(pattern.fullmatch(name)) == bool(expected.fullmatch(name)), (
                expression,
                name,
            )
    assert compared > 10_000


@pytest.mark.parametrize(
    "expression", ["q_proj{e<=1}|k", "[[:alpha:]]*q_proj", "(?:q_prof){s}", r"[a\]b[:digit:]]+"]
)
def test_patterns_that_mean_something_else_to_regex_are_refused(expression: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"^x/config\.json: a pattern of the\.key is not supported"
    ):
        _compile(expression)


@pytest.mark.parametrize("expression", [r"(\w|\.|.)*(\w|\.|.)*[XY]", "(?:.|.)" * 40 + "[XY]"])
@pytest.mark.parametrize("method", ["match", "fullmatch"])
def test_a_match_that_takes_for_ever_is_given_up(
    expression: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.2)
    pattern = _compile(expression, prefix=r"(.*\.)?(", suffix=")$")
    with pytest.raises(
        CheckpointError, match=r"^x/config\.json: the patterns of the\.key take too long"
    ):
        getattr(pattern, method)(
            "model.language_model.layers.10.self_attn.q_proj.base_layer.weight"
        )


def test_all_patterns_of_a_file_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.2)
    match_time = MatchTime("x/config.json")
    slow = Pattern("(?:a|a)*[bc]", key="slow", match_time=match_time)
    other = Pattern("q.*", key="other", match_time=match_time)
    assert other.match("q_proj")
    with pytest.raises(CheckpointError, match="the patterns of slow"):
        slow.match("a" * 60)
    with pytest.raises(CheckpointError, match="the patterns of other"):
        other.match("q_proj")
    assert Pattern("q.*", key="other", match_time=MatchTime("x/config.json")).match("q_proj")


@pytest.mark.parametrize(
    "expression", ["(?:(?:a{999}){999}){999}", "a" * 20_000, ".{99999999999999999999}"]
)
def test_a_pattern_that_is_slow_to_compile_is_refused(expression: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"^x/config\.json: a pattern of the\.key is too large"
    ):
        _compile(expression)
