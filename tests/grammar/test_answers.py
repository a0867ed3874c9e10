"""Answers that must satisfy a JSON schema, drawn at random and judged by the package jsonschema."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_schemas import judge, random_schema

import quantkit
from quantkit.errors import RequestError
from quantkit.grammar.grammars import Grammars
from quantkit.grammar.lark import json_grammar
from quantkit.grammar.schema import check_schema
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.request import Request
from quantkit.runtime.sampling_params import SamplingParams

COUNT = int(os.environ.get("QUANTKIT_SCHEMAS", "60"))
"""Schemas that are tried; ``QUANTKIT_SCHEMAS=500`` for all."""

TOKENS = 200


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Any, Any]:
    return quantkit.load(demo_model, backend="cpu-exact")


@pytest.fixture(scope="module")
def engine(loaded: tuple[Any, Any]) -> Engine:
    return Engine(loaded[0], TOKENS + 8, slots=16)


@pytest.fixture(scope="module")
def grammars(loaded: tuple[Any, Any]) -> Grammars:
    model, tokenizer = loaded
    return Grammars(tokenizer, model.config.vocab_size, model.config.eos_token_ids)


@pytest.mark.slow
def test_answers_satisfy_their_schemas(
    loaded: tuple[Any, Any], engine: Engine, grammars: Grammars
) -> None:
    model, tokenizer = loaded
    bias = _shorter(tokenizer, model.config)
    prompt, schemas, refused = tokenizer.encode("My"), list[dict[str, Any]](), list[str]()

    def requests() -> Iterator[Request]:
        for seed in range(COUNT):
            schema = random_schema(seed)
            try:
                constraint = grammars.constraint(json_grammar(check_schema(schema)))
            except RequestError as error:
                refused.append(f"{seed}: {error}")
                continue
            schemas.append(schema)
            sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=bias)
            yield Request(prompt, TOKENS, sampling, constraint=constraint)

    made = list(requests())
    ended = 0
    for one in completions(engine, made, tokenizer, [()] * len(made)):
        if one.finish_reason == "stop":
            assert one.text is not None
            judge(schemas[one.prompt], one.text)
            ended += 1
    assert len(refused) <= COUNT // 10  # schemas that no value satisfies
    assert ended >= 0.7 * len(made)


def _shorter(tokenizer: Any, config: Any) -> dict[int, float]:
    """A bias with which a model that knows no JSON ends what it has begun."""
    bias = dict.fromkeys(config.eos_token_ids, 6.0)
    marks = {b'"': 4.0, b"}": 9.0, b"]": 4.0, b",": -4.0, b".": -6.0}
    for token in range(config.vocab_size):
        data = tokenizer.token_bytes.of(token)
        if data in marks:
            bias[token] = marks[data]
        elif data and not data.strip():
            bias[token] = -12.0
    return bias
