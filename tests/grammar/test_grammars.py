"""Masks of tokens: what may follow, where a text may end, and what is too complex."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from quantkit.errors import QuantkitError, RequestError
from quantkit.grammar import grammars as module
from quantkit.grammar.grammars import Grammars
from quantkit.grammar.lark import json_grammar
from quantkit.grammar.schema import check_schema
from quantkit.runtime.sampling import Sampler
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.text.token_bytes import TokenBytes

END, UNUSED = 256, 257
MORE = [b'{"', b'"a', b'"a":', b"true", b"\xc3\xa9", b'"a']
SIZE = UNUSED + 1 + len(MORE)
VOCAB_SIZE = SIZE + 5  # rows of the model that stand for no token


class _ByteDecoder:
    """A tokenizer of bytes, an end token, an unused special token, and a few longer tokens."""

    kind, vocab_size, bos_id = "bytes", SIZE, None

    def __init__(self, *, without: bytes = b"") -> None:
        found = [bytes([value]) for value in range(256)] + [b"</s>", b"", *MORE]
        self.bytes_of = [b"" if one and one in without else one for one in found]
        self.token_bytes: TokenBytes | None = TokenBytes(
            lambda token: self.bytes_of[token], replaces_each_byte=False
        )


def _grammars(tokenizer: Any = None) -> Grammars:
    return Grammars(tokenizer or _ByteDecoder(), VOCAB_SIZE, [END])


def _constraint(schema: Any, found: Grammars | None = None) -> Any:
    return (found or _grammars()).constraint(json_grammar(check_schema(schema)))()


def _next(constraint: Any) -> set[bytes]:
    """What may follow; an end as b"</s>"."""
    mask = constraint.compute_token_mask()
    assert (mask.dtype, mask.shape) == (torch.bool, (VOCAB_SIZE,))
    names = (
        [bytes([value]) for value in range(256)] + [b"</s>", b"unused", *MORE] + [b"no token"] * 5
    )
    return {names[token] for token in mask.nonzero()[:, 0].tolist()}


def _accept(constraint: Any, text: bytes) -> None:
    for value in text:
        assert constraint.compute_token_mask()[value]
        constraint.accept(value)


def test_masks_are_of_whole_tokens_and_ends() -> None:
    constraint = _constraint(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    )
    assert _next(constraint) == {b"{", b'{"'}
    _accept(constraint, b"{")
    assert (
        {b'"', b'"a', b'"a":', b" "}
        <= _next(constraint)
        <= {b'"', b'"a', b'"a":', b" ", b"\n", b"\r"}
    )
    assert constraint.compute_token_mask()[UNUSED + 1 + MORE.index(b'"a')]
    assert constraint.compute_token_mask()[SIZE - 1]  # the same bytes once more
    _accept(constraint, b'"a":true')
    assert b"</s>" not in _next(constraint)
    _accept(constraint, b"}")
    assert _next(constraint) == {b"</s>"}
    constraint.accept(END)
    assert _next(constraint) == {b"</s>"}  # a GPU may be some steps ahead


def test_a_number_may_go_on_or_end_and_further_end_tokens_count() -> None:
    found = _grammars()
    constraint = found.constraint(json_grammar(check_schema({"type": "integer"})), [UNUSED])()
    _accept(constraint, b"12")
    assert _next(constraint) == {b"</s>", b"unused", *(b"%d" % digit for digit in range(10))}


def test_keys_are_spelled_in_one_way() -> None:
    """Else one that is taken could be there once more, with any value."""
    constraint = _constraint({"type": "object", "properties": {"a": {"type": "null"}}})
    _accept(constraint, b'{"b\\')
    assert {one for one in _next(constraint) if len(one) == 1} == {
        bytes([value]) for value in b'nrbtf\\"'
    }


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1e38, seed=1, top_k=40)]
)
@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_only_allowed_tokens_are_drawn_whatever_the_logits(
    worst: float, sampling: SamplingParams
) -> None:
    grammar = json_grammar(check_schema({"enum": ["true", 17]}))
    sampler = Sampler(
        sampling, [1], VOCAB_SIZE, torch.device("cpu"), constraint=_grammars().constraint(grammar)
    )
    logits = torch.full((1, VOCAB_SIZE), worst)
    logits[0, -1] = 60.0  # a row that is no token
    drawn = [int(sampler.draw(logits.clone())) for _ in range(8)]
    text = bytes(drawn[: drawn.index(END)]) if max(drawn) <= END else b""
    assert sampler.error is None
    assert text in (b'"true"', b"17") or UNUSED + 1 + MORE.index(b"true") in drawn


def test_a_dead_end_is_an_error_and_the_tokens_from_there_on_are_placeholders() -> None:
    grammar = json_grammar(check_schema({"const": "x}y"}))
    factory = _grammars(_ByteDecoder(without=b"}")).constraint(grammar)
    sampler = Sampler(SamplingParams(), [1], VOCAB_SIZE, torch.device("cpu"), constraint=factory)
    drawn = [int(sampler.draw(torch.zeros(1, VOCAB_SIZE))) for _ in range(4)]
    assert drawn == [ord('"'), ord("x"), 0, 0]
    assert sampler.failed_at == 2
    assert "no token can follow in the requested format" in str(sampler.error)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "integer", "minimum": 2, "maximum": 1},
            "Unsatisfiable schema: minimum (2) is greater",
        ),
        ({"$ref": "#"}, "no text has it"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (
            {"patternProperties": {"^a": {"type": "null"}, "b$": {}}, "type": "object"},
            "not disjoint",
        ),
    ],
)
def test_what_cannot_be_compiled_is_an_error(schema: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        _constraint(schema)
    assert message in str(error.value)
    assert "json-schema:///" not in str(error.value)


HUGE: dict[str, Any] = {
    "products": {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]}
                    for j in range(4)
                ]
            }
            for i in range(9)
        ]
    },
    "references": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            "d40": {"type": "null"},
        },
    },
    "patterns": {"allOf": [{"type": "string", "pattern": f".*a{i}.*b.*"} for i in range(300)]},
    "states": {"type": "string", "pattern": "^(.|b)*a.{200}$"},
    "repetitions": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "counts": {"type": "array", "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}},
    "values": {"enum": [f"value {number}" for number in range(9_000)]},
    "properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "null"} for i in range(1000)},
    },
    "multiple": {"type": "integer", "multipleOf": 9973},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_what_explodes_ends_soon(name: str) -> None:
    """Compiled and followed for some tokens, or refused, in bounded time."""
    begun = time.perf_counter()
    try:
        constraint = _constraint(HUGE[name])
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            allowed = constraint.compute_token_mask()
            allowed[END] = False
            if not allowed.any():
                break
            constraint.accept(int(torch.multinomial(allowed.float(), 1, generator=generator)))
    except QuantkitError:
        pass
    assert time.perf_counter() - begun < 20


def test_grammars_are_compiled_once_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    found = _grammars()
    first = json_grammar({"const": 1})
    found.constraint(first)
    kept = found._compiled[next(iter(found._compiled))]
    found.constraint(json_grammar({"const": 2}))
    found.constraint(first)
    assert kept in found._compiled.values()
    found.constraint(json_grammar({"const": 3}))
    assert len(found._compiled) == 2
    assert kept in found._compiled.values()


def test_what_took_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is known does not wait for what is being compiled."""
    found, tried = _grammars(), list[str]()

    def slow(grammar: str, limits: object) -> None:
        tried.append(grammar)
        found.constraint(first)  # which another thread could need now
        raise RequestError("the format is not supported: it takes too long")

    first = json_grammar({"const": 1})
    found.constraint(first)
    monkeypatch.setattr(module, "try_out", slow)
    for _ in range(2):
        with pytest.raises(RequestError, match="it takes too long"):
            found.constraint(json_grammar({"const": 2}))
    assert len(tried) == 1


def test_what_a_model_lacks_is_an_error() -> None:
    with pytest.raises(RequestError, match="no end token"):
        Grammars(_ByteDecoder(), VOCAB_SIZE, []).constraint(json_grammar({}))  # type: ignore[arg-type]
    tokenizer = _ByteDecoder()
    tokenizer.token_bytes = None
    with pytest.raises(RequestError, match="bytes of the tokenizer's tokens are unknown"):
        _grammars(tokenizer).constraint(json_grammar({}))
