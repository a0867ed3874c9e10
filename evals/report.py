"""An evaluation as tables, and as a report on the method and the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jinja2

from quantkit.evals.results import Evaluation, Row
from quantkit.evals.table import NONE, Table, render
from quantkit.evals.timing import NEW_TOKENS, PROMPT, RUNS
from quantkit.quality.figures import Estimate, significant
from quantkit.quality.measures import Divergence
from quantkit.quality.positions import CACHES, FLOAT, rise

_Column = tuple[str, Callable[[Row], str]]
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


def render_markdown(evaluation: Evaluation) -> str:
    """Return the whole report."""
    lines = [
        "# Evaluation",
        "",
        *render(build_tables(evaluation), "markdown"),
        "",
        "## How it was measured",
        "",
    ]
    return "\n".join([*lines, *(f"- {line}" for line in method(evaluation)), ""])


def build_tables(evaluation: Evaluation) -> list[Table]:
    """Return a table for each text, a row per model, tasks and speed in the first; then those of
    divergence.
    """
    rest = _task_and_speed_columns(evaluation)
    if evaluation.rows[0].tasks:
        task_note = _TASK_ERRORS
    else:
        task_note = ""
    result = []
    for text in evaluation.texts:
        title = (
            f"On {_describe_text(evaluation, text)}; token ppl in windows of"
            f" {evaluation.window}. {task_note}"
        )
        result.append(
            _table(title.rstrip(), evaluation.rows, [*_SIZE, *_text_columns(text), *rest])
        )
        rest = []
        task_note = ""
    if not evaluation.texts:
        result.append(_table(task_note or None, evaluation.rows, [*_SIZE, *rest]))
    elif evaluation.reference is not None:
        result += [
            _build_divergence_table(evaluation, evaluation.reference),
            *build_position_tables(evaluation).values(),
        ]
    return result


def build_full_tables(evaluation: Evaluation) -> list[Table]:
    """Return a table for each text with all figures of the models; then one of means over the
    texts.
    """
    rest = _task_and_speed_columns(evaluation)
    made = []
    for text in evaluation.texts:
        if evaluation.reference is None:
            divergence = []
        else:
            divergence = _divergence_columns(evaluation, text)
        title = f"On {_describe_text(evaluation, text)}"
        made.append(
            _table(title, evaluation.rows, [*_SIZE, *divergence, *_text_columns(text), *rest])
        )
        rest = []
    if means := _means(evaluation):
        head = "model", "KL, nats/token", "top-1, %", "ppl ratio"
        rows: list[tuple[str, ...]] = []
        for name, _, kl, _, _, top1, ratio in means:
            rows.append((name, kl, top1, ratio))
        made.append(Table(f"Mean of {len(evaluation.texts)} texts", head, rows))
    return made or [_table(None, evaluation.rows, [*_SIZE, *rest])]


def build_sheet(evaluation: Evaluation) -> Table:
    """Everything in one table for programs, a row per text and model, with shares as fractions."""
    texts: list[str | None] = [*evaluation.texts] or [None]
    whole = [_table(None, evaluation.rows, _all_columns(evaluation, text)) for text in texts]
    return Table(None, whole[0].head, [row for one in whole for row in one.rows])


def _all_columns(evaluation: Evaluation, text: str | None) -> list[_Column]:
    columns = [*_SIZE, *_task_and_speed_columns(evaluation)]
    if text is not None:
        if evaluation.reference is None:
            divergence = []
        else:
            divergence = _divergence_columns(evaluation, text, share=1)
        columns[len(_SIZE) : len(_SIZE)] = [*_text_columns(text), *divergence]
        columns = [
            columns[0],
            ("text", lambda row: text),
            *columns[1:],
            *_position_columns(evaluation, text),
        ]
    return [(_KEYS.get(head, head), cell) for head, cell in columns]


def _describe_text(evaluation: Evaluation, text: str) -> str:
    """Return a text and its length, as a range where tokenizers differ."""
    counts = {row.texts[text].tokens for row in evaluation.rows}
    return (
        f"{text} ({' to '.join(str(count) for count in sorted({min(counts), max(counts)}))} tokens)"
    )


def _text_columns(text: str) -> list[_Column]:
    return [
        ("word ppl", lambda row: significant(row.texts[text].documents.word_perplexity, _DIGITS)),
        ("bits/byte", lambda row: significant(row.texts[text].documents.bits_per_byte, _DIGITS)),
        ("token ppl", lambda row: significant(row.texts[text].token_perplexity, _DIGITS)),
    ]


def _build_divergence_table(evaluation: Evaluation, reference: str) -> Table:
    compared = evaluation.rows[1:]
    several = len(evaluation.texts) > 1

    def part(text: str) -> Table:
        if several:
            name: list[_Column] = [("text", lambda _: text)]
        else:
            name = []
        return _table(None, compared, [_SIZE[0], *name, *_divergence_columns(evaluation, text)])

    made = [part(text) for text in evaluation.texts]
    texts = ", ".join(_describe_text(evaluation, text) for text in evaluation.texts)
    title = (
        f"Against {reference}, on {texts} in windows of {evaluation.window}:"
        f" KL({reference} || model),"
        " its median and 99th percentile; tokens whose likeliest is the same; ratio of token ppl."
        f" {_ERRORS}"
        + (
            " That of a mean is from the spread between the texts."
            if len(evaluation.texts) > 2
            else ""
        )
    )
    return Table(
        title, made[0].head, [*(row for one in made for row in one.rows), *_means(evaluation)]
    )


def _means(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Rows of the divergence table, of three texts or more."""
    return [
        (
            row.name,
            f"mean of {len(evaluation.texts)}",
            str(over.kl),
            NONE,
            NONE,
            str(over.top1_agreement.times(100)),
            str(over.perplexity_ratio),
        )
        for row in evaluation.rows
        if (over := evaluation.over_texts(row)) is not None
    ]


def _divergence_columns(evaluation: Evaluation, text: str, *, share: float = 100) -> list[_Column]:
    """Figures of models compared with the reference; the reference's cells are empty. `share` is
    the value of all tokens in the column of top-1 agreement.
    """

    def column(head: str, shown: Callable[[Divergence], str]) -> _Column:
        def cell(row: Row) -> str:
            apart = row.texts[text].divergence
            if apart is None:
                return NONE
            return shown(apart)

        return head, cell

    def ratio(row: Row) -> str:
        value = evaluation.perplexity_ratio(row, text)
        error = row.texts[text].perplexity_ratio_error
        if value is None or row.texts[text].divergence is None:
            return NONE
        return str(Estimate(value, error))

    return [
        column("KL, nats/token", lambda apart: str(Estimate(apart.kl, apart.kl_error))),
        column("KL median", lambda apart: significant(apart.kl_median, _QUANTILE_DIGITS)),
        column("KL 99 %", lambda apart: significant(apart.kl_p99, _QUANTILE_DIGITS)),
        column(
            "top-1, %",
            lambda apart: str(Estimate(apart.top1_agreement, apart.top1_error).times(share)),
        ),
        ("ppl ratio", ratio),
    ]


def _task_and_speed_columns(evaluation: Evaluation) -> list[_Column]:
    def score(task: str, row: Row) -> str:
        return str(row.tasks[task].estimate)

    columns: list[_Column] = []
    columns += [
        (f"{task} {one.metric}", partial(score, task))
        for task, one in evaluation.rows[0].tasks.items()
    ]
    if evaluation.rows[0].speed is not None:
        columns.append(
            (
                "tok/s",
                lambda row: NONE if row.speed is None else significant(row.speed.tokens_per_second),
            )
        )
    return columns


def _table(title: str | None, rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    return Table(
        title,
        tuple(head for head, _ in columns),
        [tuple(cell(row) for _, cell in columns) for row in rows],
    )


def method(evaluation: Evaluation) -> list[str]:
    """Lines of Markdown: units, errors, BOS, windows, strides, hashes of texts, dtypes and
    backends.
    """

    def summarize_models(describe: Callable[..., str], *args: str) -> str:
        """Return what all models share, or what each has."""
        names: dict[str, list[str]] = {}
        for row in evaluation.rows:
            names.setdefault(describe(row, *args), []).append(row.name)
        if len(names) == 1:
            return next(iter(names))
        return "; ".join(f"{', '.join(models)}: {value}" for value, models in names.items())

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


def build_position_tables(evaluation: Evaluation) -> dict[str, Table]:
    """Return a table by text: a row per model and bucket, and one with the change of divergence
    with the position.
    """
    result: dict[str, Table] = {}
    for text, extent in _windows_by_position(evaluation).items():
        result[text] = _build_position_table(evaluation, text, *extent)
    return result


def _build_position_table(evaluation: Evaluation, text: str, length: int, windows: int) -> Table:
    rows = []
    for row in evaluation.rows:
        if caches := row.texts[text].positions:
            for buckets in zip(*(caches[cache] for cache in CACHES), strict=True):
                cells = []
                for bucket in buckets:
                    for cell in (str(bucket.estimate), f"{100 * bucket.top1_agreement:.1f}"):
                        cells.append(cell)
                rows.append((row.name, buckets[0].name, str(buckets[0].tokens), *cells))
            rises = [
                NONE if (ratio := rise(caches[cache])) is None else str(ratio) for cache in CACHES
            ]
            rows.append((row.name, "last / first", NONE, rises[0], NONE, rises[1], NONE))
    title = (
        f"By position, against {evaluation.reference}, on {text} ({windows} x {length} tokens):"
        f" KL({evaluation.reference} || model) in nats/token, and tokens whose"
        " likeliest is the same,"
        " with keys and values in a float and in an int8 cache"
        f" ({evaluation.reference}'s are floats)."
        " last / first is the KL of the last positions over that of the first: above 1, divergence"
        " rises with the position."
    )
    heads = []
    for cache in CACHES:
        for head in (f"KL, {cache} cache", "top-1, %"):
            heads.append(head)
    return Table(title, ("model", "positions", "tokens", *heads), rows)


def _position_columns(evaluation: Evaluation, text: str) -> list[_Column]:
    """For programs, columns for each bucket and cache of all texts; cells of a text without the
    bucket are empty.
    """
    every = (
        of_text.positions.get(FLOAT, [])
        for row in evaluation.rows
        for of_text in row.texts.values()
    )
    buckets = {}
    for some in every:
        for one in some:
            buckets[(one.start, one.stop)] = one.name

    def cell(cache: str, name: str, field: str, row: Row) -> str:
        own = row.texts[text].positions.get(cache, [])
        return next((str(getattr(one, field)) for one in own if one.name == name), NONE)

    position_columns: list[_Column] = []
    for _, name in sorted(buckets.items()):
        for cache in CACHES:
            for head, field in (("KL", "estimate"), ("top1", "top1_agreement")):
                position_columns.append(
                    (f"{head} {name} {cache}", partial(cell, cache, name, field))
                )
    return position_columns


def _windows_by_position(evaluation: Evaluation) -> dict[str, tuple[int, int]]:
    """Return the windows' length and number, for each text measured by position."""
    return {
        text: (buckets[-1].stop, buckets[0].tokens // buckets[0].stop)
        for text in evaluation.texts
        for row in evaluation.rows
        if (buckets := row.texts[text].positions.get(FLOAT))
    }
