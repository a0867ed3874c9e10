"""What proposed tokens gain, compared with the same requests without them.

    python scripts/measure/measure_speculation.py replay FOLDER [--scheme int4-g128] [--right 0.8]
    python scripts/measure/measure_speculation.py lookup MODEL [--new 200]

`replay` runs random weights in TinyLlama's shape, which are made in FOLDER and kept; a draft that
costs nothing repeats the known text, each token right with a probability. `lookup` lets an instruct
model answer questions about texts of this repository, and draw random text at temperature 2, with
prompt lookup and without, alternately. Prints medians of tokens a second after the first token, the
ratio, and the share of proposals that were accepted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import measure_batch

from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.generation import Generation
from quantkit.runtime.lookup import Lookup

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "edit code": (
        "Rename SlotTable to Slots. Answer with the whole code.",
        "quantkit/runtime/slots.py",
    ),
    "summarize": ("Summarize this text in a few sentences.", "docs/serve.md"),
    "repeat": ("Repeat this text and correct its mistakes.", "docs/push.md"),
}
MAX_CHARACTERS = 2400  # of what a question is about
STORY = "Write a story about a lighthouse."


class Replay:
    """A draft that knows how the text goes on."""

    seconds, length = 0.0, 1 << 30

    def __init__(self, text: list[int], right: float, vocabulary: int) -> None:
        wrong = set(Random(0).sample(range(len(text)), round(len(text) * (1 - right))))
        self._text = [
            (token + 1) % vocabulary if place in wrong else token
            for place, token in enumerate(text)
        ]

    def propose(self, counts: Mapping[Generation, int]) -> dict[Generation, list[int]]:
        return {one: self._text[len(one.tokens) :][:count] for one, count in counts.items()}


def timed(engine: Engine, ids: list[int], new: int, **sampling: Any) -> tuple[list[int], float]:
    """The tokens, and how many a second came after the first one."""
    tokens: Iterator[int] = generate(engine, ids, max_new_tokens=new, **sampling)
    found = [next(tokens)]
    started = time.perf_counter()
    found += tokens
    return found, (len(found) - 1) / (time.perf_counter() - started)


def compare(
    name: str, plain: Engine, other: Engine, ids: list[int], new: int, rounds: int, **sampling: Any
) -> None:
    """Run both alternately, and print a line."""
    speeds: dict[Engine, list[float]] = {plain: [], other: []}
    texts = []
    for _ in range(rounds):
        for engine in speeds:
            text, speed = timed(engine, ids, new, **sampling)
            texts.append(text)
            speeds[engine].append(speed)
    assert all(text == texts[0] for text in texts), "a proposal changed the text"
    ratios = [
        with_it / without for without, with_it in zip(speeds[plain], speeds[other], strict=True)
    ]
    accepted = (
        f"{other.num_accepted_tokens} of {other.num_proposed_tokens} accepted"
        if other.num_proposed_tokens
        else "nothing proposed"
    )
    print(
        f"| {name} | {len(ids)} | {statistics.median(speeds[plain]):.1f} |"
        f" {statistics.median(speeds[other]):.1f} | {statistics.median(ratios):.2f} x |"
        f" {accepted} |",
        flush=True,
    )


def replay(options: argparse.Namespace) -> None:
    from quantkit.formats.detect import open_checkpoint
    from quantkit.model.load import load_model

    Lookup.propose = lambda lookup, count: []  # type: ignore[method-assign]
    folder = measure_batch.make(options.path, options.scheme, None)
    model: Decoder = load_model(open_checkpoint(folder), device="cpu")
    ids, vocabulary = [1, *range(900, 963)], model.config.vocab_size
    length = len(ids) + options.new
    plain, other = (
        Engine(model, length, draft_tokens=count) for count in (0, options.draft_tokens)
    )
    text, _ = timed(plain, ids, options.new)
    for right in options.right:
        drafted: Any = Replay(text, right, vocabulary)
        other.draft, other.num_proposed_tokens, other.num_accepted_tokens = drafted, 0, 0
        compare(f"replayed, {right:.0%} right", plain, other, ids, options.new, options.rounds)


def lookup(options: argparse.Namespace) -> None:
    import quantkit

    model, tokenizer = quantkit.load(options.path)
    chat = quantkit.chat_format(options.path, tokenizer)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (name, f"{question}\n\n{(ROOT / path).read_text()[:MAX_CHARACTERS]}", {})
        for name, (question, path) in QUESTIONS.items()
    ]
    cases += [("story", STORY, {}), ("random text", STORY, {"temperature": 2.0, "seed": 0})]
    for name, question, sampling in cases:
        ids = chat.encode([{"role": "user", "content": question}])
        length = len(ids) + options.new
        plain, other = (
            Engine(model, length, draft_tokens=count) for count in (0, options.draft_tokens)
        )
        compare(name, plain, other, ids, options.new, options.rounds, **sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["replay", "lookup"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--right", type=float, nargs="+", default=[0.8])
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        "| text | prompt | plain tok/s | with proposals | ratio | proposals"
        " |\n|---|---|---|---|---|---|"
    )
    {"replay": replay, "lookup": lookup}[options.kind](options)


if __name__ == "__main__":
    main()
