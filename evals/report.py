"""An evaluation as tables in Markdown, with what was measured and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.evals.method import method
from quantkit.evals.results import Evaluation, Row

_Column = tuple[str, Callable[[Row], str]]
_NONE = "-"


def markdown(found: Evaluation) -> str:
    """The whole report."""
    return "\n".join(["# Evaluation", "", *tables(found), "", "## How it was measured", "", *method(found), ""])


def tables(found: Evaluation) -> list[str]:
    """A table for each text, a row per model, tasks and speed in the first; then one of divergence."""
    size: list[_Column] = [
        ("model", lambda row: row.name),
        ("MB", lambda row: f"{row.megabytes:.2f}"),
        ("bits/weight", lambda row: f"{row.bits_per_weight:.2f}"),
    ]
    rest = [*_task_columns(found), *_speed_columns(found)]
    blocks = []
    for text in found.texts:
        blocks.append([f"On {text}:"] if len(found.texts) > 1 else [])
        blocks.append(_table(found.rows, [*size, *_text_columns(found, text), *rest]))
        rest = []
    if not found.texts:
        blocks.append(_table(found.rows, [*size, *rest]))
    elif found.reference is not None:
        blocks.append([f"KL({found.reference} || model) per token, in nats:"])
        blocks.append(_divergence_table(found))
    return [line for block in blocks if block for line in (*block, "")][:-1]


def _text_columns(found: Evaluation, text: str) -> list[_Column]:
    columns: list[_Column] = [
        ("word ppl", lambda row: f"{row.texts[text].documents.word_perplexity:.4f}"),
        ("bits/byte", lambda row: f"{row.texts[text].documents.bits_per_byte:.4f}"),
        ("token ppl", lambda row: f"{row.texts[text].token_perplexity:.4f}"),
    ]
    if found.reference is None:
        return columns

    def kl(row: Row) -> str:
        apart = row.texts[text].divergence
        return _NONE if apart is None else f"{apart.kl:.6f}"

    def top1(row: Row) -> str:
        apart = row.texts[text].divergence
        return _NONE if apart is None else f"{apart.top1_agreement:.2%}"

    return [*columns, ("KL", kl), ("top-1", top1)]


def _task_columns(found: Evaluation) -> list[_Column]:
    def column(task: str) -> _Column:
        return f"{task} {found.rows[0].tasks[task].metric}", lambda row: f"{row.tasks[task].value:.4f}"

    return [column(task) for task in found.rows[0].tasks]


def _speed_columns(found: Evaluation) -> list[_Column]:
    if found.rows[0].speed is None:
        return []
    return [("tok/s", lambda row: _NONE if row.speed is None else f"{row.speed.tokens_per_second:.1f}")]


def _divergence_table(found: Evaluation) -> list[str]:
    heads = ["model", "text", "mean", "median", "99 %", "top-1", "ppl ratio"]
    cells = [
        [row.name, text, f"{apart.kl:.6f}", f"{apart.kl_median:.6f}", f"{apart.kl_p99:.6f}",
         f"{apart.top1_agreement:.2%}", f"{found.perplexity_ratio(row, text):.5f}"]
        for text in found.texts
        for row in found.rows
        if (apart := row.texts[text].divergence) is not None
    ]  # fmt: skip
    return _aligned(heads, cells)


def _table(rows: Sequence[Row], columns: Sequence[_Column]) -> list[str]:
    return _aligned([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def _aligned(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown whose source is aligned too: the first column to the left, the others to the right."""
    widths = [max(len(line[index]) for line in (heads, *cells)) for index in range(len(heads))]

    def line(values: Sequence[str]) -> str:
        padded = [value.rjust(width) for value, width in zip(values[1:], widths[1:], strict=True)]
        return f"| {' | '.join([values[0].ljust(widths[0]), *padded])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(heads), line(rule), *(line(values) for values in cells)]
