"""Measurements as tables in Markdown: an evaluation, with what was measured and how, and timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.evals.bench import Bench, Rate
from quantkit.evals.method import method
from quantkit.evals.results import Evaluation, Row
from quantkit.evals.timing import PROMPT

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


def bench_table(found: Sequence[Bench]) -> list[str]:
    """Markdown: a column for each model, medians with the range of the runs."""
    lines = ["| | " + " | ".join(one.name for one in found) + " |", "|---" * (1 + len(found)) + "|"]

    def row(label: str, cells: Sequence[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    for length in found[0].prefill:
        row(f"prefill {length}, tok/s", [_range(one.prefill[length]) for one in found])
    for batch in found[0].decode:
        row(f"decode, batch {batch}, tok/s", [_range(one.decode[batch]) for one in found])
    row("weights read a step, MB", [f"{one.weight_bytes / 1e6:.0f}" for one in found])
    row("bandwidth measured, GB/s", [f"{one.bandwidth / 1e9:.1f}" for one in found])
    shares = [one.share_of_bandwidth for one in found]
    row("of that in decoding", ["" if share is None else f"{share:.0%}" for share in shares])
    row("load, s", [f"{one.load_seconds:.2f}" for one in found])
    row(f"first token of a prompt of {PROMPT}, s: at once, later",
        [f"{one.first_token_seconds[0]:.3f}, {one.first_token_seconds[1]:.3f}" for one in found])  # fmt: skip
    row("peak memory, MB", [f"{one.peak_bytes / 1e6:.0f}" for one in found])
    row("backend", [", ".join(one.backends) or "torch" for one in found])
    row("device", [one.device for one in found])
    row("threads", [str(one.threads) for one in found])
    return lines


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


def _range(rate: Rate) -> str:
    return f"{rate.median:.1f} ({rate.least:.1f} to {rate.most:.1f})"
