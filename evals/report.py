"""An evaluation as tables, and as a report on the method and the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jinja2

from quantkit.evals.results import EvaluationData, Row
from quantkit.evals.table import NONE, Table, render
from quantkit.evals.timing import NEW_TOKENS, PROMPT, RUNS
from quantkit.quality.figures import Estimate, significant
from quantkit.quality.measures import Divergence
from quantkit.quality.positions import CACHES, FLOAT, rise

_Column = tuple[str, Callable[[Row], str]]
_CACHE_NAMES = {FLOAT: "a float", "int8": "an int8"}
_DIGITS = 4
"""Of perplexities, as in papers: they are exact for this text, and have no error."""
_QUANTILE_DIGITS = 2
_ERRORS = (
    "± is one standard error for these tokens as a sample of their text; another text may differ by"
    " several times that."
)
_TASK_ERRORS = "Tasks: ± is one standard error over the questions."
_SIZE: tuple[_Column, ...] = (
    ("model", lambda row: row.name),
    ("MB", lambda row: f"{row.megabytes:.2f}"),
    ("bits/weight", lambda row: f"{row.bits_per_weight:.2f}"),
)
_KEYS = {
    "MB": "size_mb",
    "bits/weight": "bits_per_weight",
    "bits/byte": "bits_per_byte",
    "KL, nats/token": "kl",
    "KL median": "kl_median",
    "KL 99 %": "kl_p99",
    "top-1, %": "top1",
    "tok/s": "tokens_per_second",
}
"""Heads of columns for programs, where the usual ones have units or signs."""


def render_markdown(evaluation: EvaluationData) -> str:
    """Write the whole report."""
    lines = ["# Evaluation", ""]
    lines += render(build_tables(evaluation), "markdown")
    lines += ["", "## How it was measured", ""]
    for line in method(evaluation):
        lines.append(f"- {line}")
    # The file ends with a line break.
    lines.append("")
    return "\n".join(lines)


def build_tables(evaluation: EvaluationData) -> list[Table]:
    """Build a table for each text, a row per model, tasks and speed in the first; then those of
    divergence.
    """
    task_and_speed = _task_and_speed_columns(evaluation)
    task_note = _TASK_ERRORS if evaluation.rows[0].tasks else ""
    if not evaluation.texts:
        return [_table(task_note or None, evaluation.rows, [*_SIZE, *task_and_speed])]
    tables = []
    for text in evaluation.texts:
        title = (
            f"On {_describe_text(evaluation, text)}; token ppl in windows of"
            f" {evaluation.window}. {task_note}"
        )
        columns = [*_SIZE, *_text_columns(text), *task_and_speed]
        tables.append(_table(title.rstrip(), evaluation.rows, columns))
        # Tasks and speed do not depend on the text: the first table has them, the others not.
        task_and_speed = []
        task_note = ""
    if evaluation.reference is not None:
        tables.append(_build_divergence_table(evaluation, evaluation.reference))
        tables += build_position_tables(evaluation).values()
    return tables


def build_full_tables(evaluation: EvaluationData) -> list[Table]:
    """Build a table for each text with all figures of the models; then one of means over the
    texts.
    """
    task_and_speed = _task_and_speed_columns(evaluation)
    if not evaluation.texts:
        return [_table(None, evaluation.rows, [*_SIZE, *task_and_speed])]
    tables = []
    for text in evaluation.texts:
        columns = [*_SIZE]
        if evaluation.reference is not None:
            columns += _divergence_columns(evaluation, text)
        columns += _text_columns(text)
        columns += task_and_speed
        title = f"On {_describe_text(evaluation, text)}"
        tables.append(_table(title, evaluation.rows, columns))
        # Tasks and speed do not depend on the text.
        task_and_speed = []
    means = _means(evaluation)
    if means:
        head = "model", "KL, nats/token", "top-1, %", "ppl ratio"
        rows: list[tuple[str, ...]] = []
        # Means have no quantiles, and the title says what they are of.
        for name, _, kl, _, _, top1, ratio in means:
            rows.append((name, kl, top1, ratio))
        tables.append(Table(f"Mean of {len(evaluation.texts)} texts", head, rows))
    return tables


def build_sheet(evaluation: EvaluationData) -> Table:
    """Build one table of all figures for programs, with a row per text and model, and with shares
    as fractions.
    """
    texts: list[str | None] = [*evaluation.texts]
    if not texts:
        texts = [None]
    head: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    for text in texts:
        # All texts have the same columns.
        table = _table(None, evaluation.rows, _all_columns(evaluation, text))
        head = table.head
        rows += table.rows
    return Table(None, head, rows)


def _all_columns(evaluation: EvaluationData, text: str | None) -> list[_Column]:
    """Choose the columns of a text for programs, with heads that are short and without units."""
    columns = [*_SIZE]
    if text is not None:
        # The text follows the model, since both together identify a row.
        columns.insert(1, ("text", lambda row: text))
        columns += _text_columns(text)
        if evaluation.reference is not None:
            columns += _divergence_columns(evaluation, text, share=1)
    columns += _task_and_speed_columns(evaluation)
    if text is not None:
        columns += _position_columns(evaluation, text)
    return [(_KEYS.get(head, head), cell) for head, cell in columns]


def _describe_text(evaluation: EvaluationData, text: str) -> str:
    """Name a text and its length, as a range where tokenizers differ."""
    counts = {row.texts[text].tokens for row in evaluation.rows}
    extremes = sorted({min(counts), max(counts)})
    return f"{text} ({' to '.join(map(str, extremes))} tokens)"


def _text_columns(text: str) -> list[_Column]:
    return [
        ("word ppl", lambda row: significant(row.texts[text].documents.word_perplexity, _DIGITS)),
        ("bits/byte", lambda row: significant(row.texts[text].documents.bits_per_byte, _DIGITS)),
        ("token ppl", lambda row: significant(row.texts[text].token_perplexity, _DIGITS)),
    ]


def _build_divergence_table(evaluation: EvaluationData, reference: str) -> Table:
    compared = evaluation.rows[1:]
    several = len(evaluation.texts) > 1

    def build_table_of_text(text: str) -> Table:
        """Build the rows of all models for one text."""
        columns = [_SIZE[0]]
        if several:
            columns.append(("text", lambda _: text))
        columns += _divergence_columns(evaluation, text)
        return _table(None, compared, columns)

    head: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    descriptions = []
    for text in evaluation.texts:
        text_table = build_table_of_text(text)
        head = text_table.head
        rows += text_table.rows
        descriptions.append(_describe_text(evaluation, text))
    rows += _means(evaluation)
    texts = ", ".join(descriptions)
    title = (
        f"Against {reference}, on {texts} in windows of {evaluation.window}:"
        f" KL({reference} || model),"
        " its median and 99th percentile; tokens whose likeliest is the same; ratio of token ppl."
        f" {_ERRORS}"
    )
    # Fewer texts have no means.
    if len(evaluation.texts) > 2:
        title += " That of a mean is from the spread between the texts."
    return Table(title, head, rows)


def _means(evaluation: EvaluationData) -> list[tuple[str, ...]]:
    """Build the rows of the divergence table for means over three texts or more."""
    rows: list[tuple[str, ...]] = []
    for row in evaluation.rows:
        means = evaluation.over_texts(row)
        if means is not None:
            cells = (
                row.name,
                f"mean of {len(evaluation.texts)}",
                str(means.kl),
                # A mean of quantiles is no quantile of all tokens.
                NONE,
                NONE,
                str(means.top1_agreement.times(100)),
                str(means.perplexity_ratio),
            )
            rows.append(cells)
    return rows


def _divergence_columns(
    evaluation: EvaluationData, text: str, *, share: float = 100
) -> list[_Column]:
    """Define the columns of models compared with the reference, whose own cells are empty. `share`
    is the value of all tokens in the column of top-1 agreement.
    """

    def column(head: str, describe: Callable[[Divergence], str]) -> _Column:
        def cell(row: Row) -> str:
            divergence = row.texts[text].divergence
            if divergence is None:
                return NONE
            return describe(divergence)

        return head, cell

    def kl(divergence: Divergence) -> str:
        return str(Estimate(divergence.kl, divergence.kl_error))

    def median(divergence: Divergence) -> str:
        return significant(divergence.kl_median, _QUANTILE_DIGITS)

    def percentile_99(divergence: Divergence) -> str:
        return significant(divergence.kl_p99, _QUANTILE_DIGITS)

    def agreement(divergence: Divergence) -> str:
        estimate = Estimate(divergence.top1_agreement, divergence.top1_error)
        return str(estimate.times(share))

    def ratio(row: Row) -> str:
        value = evaluation.perplexity_ratio(row, text)
        error = row.texts[text].perplexity_ratio_error
        if value is None or row.texts[text].divergence is None:
            return NONE
        return str(Estimate(value, error))

    return [
        column("KL, nats/token", kl),
        column("KL median", median),
        column("KL 99 %", percentile_99),
        column("top-1, %", agreement),
        ("ppl ratio", ratio),
    ]


def _task_and_speed_columns(evaluation: EvaluationData) -> list[_Column]:
    def score(task: str, row: Row) -> str:
        return str(row.tasks[task].estimate)

    def speed(row: Row) -> str:
        if row.speed is None:
            return NONE
        return significant(row.speed.tokens_per_second)

    columns: list[_Column] = []
    # All models answer the same tasks.
    for task, task_score in evaluation.rows[0].tasks.items():
        columns.append((f"{task} {task_score.metric}", partial(score, task)))
    if evaluation.rows[0].speed is not None:
        columns.append(("tok/s", speed))
    return columns


def _table(title: str | None, rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    head = [name for name, _ in columns]
    table_rows: list[tuple[str, ...]] = []
    for row in rows:
        cells = []
        for _, cell in columns:
            cells.append(cell(row))
        table_rows.append(tuple(cells))
    return Table(title, tuple(head), table_rows)


def method(evaluation: EvaluationData) -> list[str]:
    """Describe the method in lines of Markdown: units, errors, BOS, windows, strides, hashes of
    texts, dtypes and backends.
    """

    def summarize_models(describe: Callable[..., str], *args: str) -> str:
        """Describe what all models share, or what each has."""
        names: dict[str, list[str]] = {}
        for row in evaluation.rows:
            names.setdefault(describe(row, *args), []).append(row.name)
        # One line of text is enough where models do not differ, as most do not.
        if len(names) == 1:
            return next(iter(names))
        summaries = []
        for description, models in names.items():
            summaries.append(f"{', '.join(models)}: {description}")
        return "; ".join(summaries)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        Path(__file__).with_name("method.jinja").read_text(encoding="utf-8")
    )
    text = template.render(
        evaluation=evaluation,
        each=summarize_models,
        windows_by_position=_windows_by_position(evaluation),
        runs=RUNS,
        device={"cpu": "the CPU", "cuda": "a GPU"}.get(evaluation.device, evaluation.device),
        new_tokens=NEW_TOKENS,
        prompt_tokens=PROMPT,
    )
    return [line for line in text.split("\n") if line]


def build_position_tables(evaluation: EvaluationData) -> dict[str, Table]:
    """Build a table for each text: a row per model and bucket, and one with the change of
    divergence with the position.
    """
    tables: dict[str, Table] = {}
    for text, (length, windows) in _windows_by_position(evaluation).items():
        tables[text] = _build_position_table(evaluation, text, length, windows)
    return tables


def _build_position_table(
    evaluation: EvaluationData, text: str, length: int, windows: int
) -> Table:
    rows: list[tuple[str, ...]] = []
    caches = _list_caches(evaluation, text)
    for row in evaluation.rows:
        buckets_by_cache = row.texts[text].positions
        # The reference has no divergence.
        if not buckets_by_cache:
            continue
        # Both caches are measured in the same windows, so their buckets are the same ranges.
        for buckets in zip(*(buckets_by_cache[cache] for cache in caches), strict=True):
            cells = []
            for bucket in buckets:
                cells += [str(bucket.estimate), f"{100 * bucket.top1_agreement:.1f}"]
            rows.append((row.name, buckets[0].name, str(buckets[0].tokens), *cells))
        rise_cells = []
        for cache in caches:
            ratio = rise(buckets_by_cache[cache])
            # The rise has no counterpart for top-1 agreement.
            rise_cells += [NONE if ratio is None else str(ratio), NONE]
        rows.append((row.name, "last / first", NONE, *rise_cells))
    # Only quantkit's decoder has an int8 cache.
    names = [_CACHE_NAMES[cache] for cache in caches]
    title = (
        f"By position, against {evaluation.reference}, on {text} ({windows} x {length} tokens):"
        f" KL({evaluation.reference} || model) in nats/token, and tokens whose"
        f" likeliest is the same, with keys and values in {' and in '.join(names)} cache"
        f" ({evaluation.reference}'s are floats)."
        " last / first is the KL of the last positions over that of the first: above 1, divergence"
        " rises with the position."
    )
    heads = []
    for cache in caches:
        heads += [f"KL, {cache} cache", "top-1, %"]
    return Table(title, ("model", "positions", "tokens", *heads), rows)


def _list_caches(evaluation: EvaluationData, *texts: str) -> list[str]:
    """List the types of KV caches with which any model is measured on some texts."""
    measured: set[str] = set()
    for row in evaluation.rows:
        for text in texts:
            measured.update(row.texts[text].positions)
    return [cache for cache in CACHES if cache in measured]


def _position_columns(evaluation: EvaluationData, text: str) -> list[_Column]:
    """Define columns for programs, for each bucket and cache of all texts; cells of a text without
    the bucket are empty.
    """
    # The windows of a short text are shorter and can have other buckets: all rows of a sheet have
    # the columns of all.
    bucket_names = {}
    for row in evaluation.rows:
        for measures in row.texts.values():
            for bucket in measures.positions.get(FLOAT, []):
                bucket_names[(bucket.start, bucket.stop)] = bucket.name

    def cell(cache: str, name: str, field: str, row: Row) -> str:
        for bucket in row.texts[text].positions.get(cache, []):
            if bucket.name == name:
                return str(getattr(bucket, field))
        return NONE

    columns: list[_Column] = []
    caches = _list_caches(evaluation, *evaluation.texts)
    for _, name in sorted(bucket_names.items()):
        for cache in caches:
            for head, field in (("KL", "estimate"), ("top1", "top1_agreement")):
                columns.append((f"{head} {name} {cache}", partial(cell, cache, name, field)))
    return columns


def _windows_by_position(evaluation: EvaluationData) -> dict[str, tuple[int, int]]:
    """Find the windows' length and number, for each text measured by position."""
    windows = {}
    for text in evaluation.texts:
        for row in evaluation.rows:
            buckets = row.texts[text].positions.get(FLOAT)
            if buckets:
                # The first bucket begins at 0, and every window has all of its positions.
                num_windows = buckets[0].tokens // buckets[0].stop
                windows[text] = (buckets[-1].stop, num_windows)
    return windows
