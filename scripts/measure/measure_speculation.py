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
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.generation import Generation
from quantkit.runtime.lookup import Lookup

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.models import make_tinyllama
from shared.ratios import median_ratio
from shared.tables import print_header, print_row

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
        """Return as many of the next tokens of each text as it wants."""
        proposals = {}
        for generation, count in counts.items():
            proposals[generation] = self._text[len(generation.tokens) :][:count]
        return proposals


def generate_and_time(
    engine: Engine, ids: list[int], new: int, **sampling: Any
) -> tuple[list[int], float]:
    """Return the tokens, and how many a second came after the first one."""
    tokens: Iterator[int] = generate(engine, ids, max_new_tokens=new, **sampling)
    text = [next(tokens)]
    started = time.perf_counter()
    text += tokens
    return text, (len(text) - 1) / (time.perf_counter() - started)


def compare(
    name: str,
    plain: Engine,
    drafting: Engine,
    ids: list[int],
    new: int,
    rounds: int,
    **sampling: Any,
) -> None:
    """Run both alternately, and print a line."""
    speeds: dict[Engine, list[float]] = {plain: [], drafting: []}
    texts = []
    for _ in range(rounds):
        for engine in speeds:
            text, speed = generate_and_time(engine, ids, new, **sampling)
            texts.append(text)
            speeds[engine].append(speed)
    assert all(text == texts[0] for text in texts), "a proposal changed the text"
    accepted = "nothing proposed"
    if drafting.num_proposed_tokens:
        accepted = f"{drafting.num_accepted_tokens} of {drafting.num_proposed_tokens} accepted"
    print_row(
        name,
        len(ids),
        f"{statistics.median(speeds[plain]):.1f}",
        f"{statistics.median(speeds[drafting]):.1f}",
        f"{median_ratio(speeds[drafting], speeds[plain]):.2f} x",
        accepted,
    )


def replay(options: argparse.Namespace) -> None:
    """Compare drafts of a known text on random weights."""
    from quantkit.formats.detect import open_checkpoint
    from quantkit.model.load import load_model

    Lookup.propose = lambda lookup, count: []  # type: ignore[method-assign]
    folder = make_tinyllama(options.path, options.scheme, None)
    model: Decoder = load_model(open_checkpoint(folder), device="cpu")
    ids = [1, *range(900, 963)]
    length = len(ids) + options.new
    plain = Engine(model, length, draft_tokens=0)
    drafting = Engine(model, length, draft_tokens=options.draft_tokens)
    text, _ = generate_and_time(plain, ids, options.new)
    for right in options.right:
        draft: Any = Replay(text, right, model.config.vocab_size)
        drafting.draft = draft
        drafting.num_proposed_tokens = 0
        drafting.num_accepted_tokens = 0
        name = f"replayed, {right:.0%} right"
        compare(name, plain, drafting, ids, options.new, options.rounds)


def lookup(options: argparse.Namespace) -> None:
    """Compare prompt lookup on questions to an instruct model."""
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
        plain = Engine(model, length, draft_tokens=0)
        drafting = Engine(model, length, draft_tokens=options.draft_tokens)
        compare(name, plain, drafting, ids, options.new, options.rounds, **sampling)


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
    print_header("text", "prompt", "plain tok/s", "with proposals", "ratio", "proposals")
    {"replay": replay, "lookup": lookup}[options.kind](options)


if __name__ == "__main__":
    main()
