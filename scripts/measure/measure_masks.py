"""Measure masks of tokens for JSON schemas: how long one takes to compile, and each token of an
answer.

    python scripts/measure/measure_masks.py [--tokens 150000] [--answers 20]

The vocabulary is made up: single bytes, words with and without a space, signs, numbers and Chinese
characters, as byte strings. For each schema, answers are drawn at random among the allowed tokens,
closing brackets and quotes more often. Prints a table in Markdown: compilation, and for one token
the mask as a tensor of booleans together with the acceptance of the token that is drawn, in the
median, in 99 of 100 cases, and at worst. One thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from quantkit.grammar.grammars import Grammars
from quantkit.grammar.lark import json_grammar
from quantkit.grammar.schema import check_schema
from quantkit.text.token_bytes import TokenBytes

LETTERS = "eeeeetttaaaooiinnnsshhrrddllcumwfgypbvkjxqz"
SIGNS = "{}[]():;,.<>/\\|\"'`~!@#$%^&*-_=+ \n\t"
COMMON = [
    '{"',
    '":',
    '","',
    '"}',
    "}]",
    '": "',
    '", "',
    "[]",
    "{}",
    ' "',
    "},",
    "],",
    "\n  ",
    "    ",
]
MAX_TOKENS = 100


def vocabulary(count: int) -> list[bytes]:
    """Byte strings, all different."""
    rng, found = random.Random(0), dict.fromkeys(bytes([value]) for value in range(256))
    found |= dict.fromkeys(mark.encode() for mark in COMMON) | dict.fromkeys(
        b"%d" % value for value in range(1000)
    )
    while len(found) < count:
        kind = rng.random()
        if kind < 0.8:
            word = "".join(rng.choices(LETTERS, k=min(14, max(2, int(rng.gauss(6, 2.5))))))
            text = (" " if rng.random() < 0.55 else "") + (
                word.capitalize() if rng.random() < 0.3 else word
            )
        elif kind < 0.95:
            text = "".join(chr(rng.randrange(0x4E00, 0x9FA0)) for _ in range(rng.randint(1, 3)))
        else:
            text = "".join(rng.choices(SIGNS, k=rng.randint(2, 6)))
        found[text.encode()] = None
    return list(found)


class Vocabulary:
    """A tokenizer that only knows the bytes of its tokens; the last one is the end."""

    kind, bos_id = "synthetic", None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.vocab_size = [*tokens, b""], len(tokens) + 1
        self.token_bytes = TokenBytes(self.tokens.__getitem__, replaces_each_byte=False)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "flat object": _object(
        name={"type": "string"},
        age={"type": "integer"},
        score={"type": "number"},
        ok={"type": "boolean"},
    ),
    "nested arrays": _object(
        rows={
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 8},
        }
    ),
    "1000 values": {"enum": [f"value {number}" for number in range(1000)]},
    "maxLength and pattern": _object(
        a={"type": "string", "maxLength": 40},
        b={"type": "string", "pattern": "^[A-Z][a-z]{1,20}(-[0-9]{2,4})?$"},
    ),
    "maxLength 5000": _object(a={"type": "string", "maxLength": 5000}),
    "anyOf of 10 objects": {
        "anyOf": [_object(kind={"const": f"k{i}"}, x={"type": "number"}) for i in range(10)]
    },
    "recursive reference": _object(
        value={"type": "integer"}, children={"type": "array", "items": {"$ref": "#"}}
    ),
}


def measure_schema(
    found: Grammars, tokens: list[bytes], schema: dict[str, Any], answers: int
) -> tuple[float, list[float]]:
    """Return the seconds that a schema takes to compile, and each token of answers."""
    grammar = json_grammar(check_schema(schema))
    begun = time.perf_counter()
    factory = found.constraint(grammar)
    compiled, times = time.perf_counter() - begun, list[float]()
    closing = [tokens.index(mark) for mark in (b'"', b"}", b"]", b'"}')]
    generator, end = torch.Generator().manual_seed(0), len(tokens) - 1
    for _ in range(answers):
        constraint = factory()
        for _ in range(MAX_TOKENS):
            begun = time.perf_counter()
            allowed = constraint.compute_token_mask()
            spent = time.perf_counter() - begun
            weights = allowed.float()
            weights[closing] *= 0.15 * float(allowed.sum())
            token = int(torch.multinomial(weights, 1, generator=generator))
            if token == end:
                break
            begun = time.perf_counter()
            constraint.accept(token)
            times.append(spent + time.perf_counter() - begun)
    return compiled, sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--answers", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = Vocabulary(vocabulary(options.tokens - 1))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    begun = time.perf_counter()
    grammars.constraint(json_grammar({}))
    print(f"{options.tokens} tokens read in {time.perf_counter() - begun:.2f} s\n")
    print("| schema | compile, ms | token, µs: median | 99 of 100 | max |\n|---|--:|--:|--:|--:|")
    for name, schema in SCHEMAS.items():
        compiled, times = measure_schema(grammars, tokenizer.tokens, schema, options.answers)
        cells = statistics.median(times), times[int(0.99 * len(times))], times[-1]
        print(
            f"| {name} | {1e3 * compiled:.1f} | "
            + " | ".join(f"{1e6 * cell:.0f}" for cell in cells)
            + " |"
        )


if __name__ == "__main__":
    main()
