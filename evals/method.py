"""What an evaluation measured and how, in prose, from the template ``method.jinja``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2

from quantkit.evals.positions import windows_by_position
from quantkit.evals.results import Evaluation
from quantkit.evals.timing import NEW_TOKENS, PROMPT, RUNS


def method(evaluation: Evaluation) -> list[str]:
    """Lines of Markdown: units, errors, BOS, windows, strides, hashes of texts, dtypes and backends."""

    def each(describe: Callable[..., str], *args: str) -> str:
        """What all models share, or what each has."""
        names: dict[str, list[str]] = {}
        for row in evaluation.rows:
            names.setdefault(describe(row, *args), []).append(row.name)
        if len(names) == 1:
            return next(iter(names))
        return "; ".join(f"{', '.join(models)}: {value}" for value, models in names.items())

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("method.jinja").read_text(encoding="utf-8"))
    text = template.render(
        evaluation=evaluation, each=each, windows_by_position=windows_by_position(evaluation), runs=RUNS,
        device={"cpu": "the CPU", "cuda": "a GPU"}.get(evaluation.device, evaluation.device),
        new_tokens=NEW_TOKENS, prompt_tokens=PROMPT,
    )  # fmt: skip
    return [line for line in text.split("\n") if line]
