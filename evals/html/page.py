"""Renders an evaluation as a page, from the template ``page.html.jinja``."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup

from quantkit.evals.html.charts import (
    HEIGHT,
    Chart,
    cost_chart,
    model_color,
    position_chart,
    position_lines,
)
from quantkit.evals.html.heatmap import comparable, heat_maps
from quantkit.evals.html.tokens import in_text, script_data, token_scale, worst_tokens
from quantkit.evals.report import build_full_tables, build_position_tables, method
from quantkit.evals.results import Evaluation, Row
from quantkit.evals.table import columns_to_right
from quantkit.quality.figures import Estimate, significant

_FOLDER = Path(__file__).parent


def page(evaluation: Evaluation) -> str:
    """Return the page as one file that loads nothing."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    whole = environment.get_template("page.html.jinja").render(
        evaluation=evaluation,
        headline=headline(evaluation),
        main_model=main_model(evaluation).name,
        tables=build_full_tables(evaluation),
        charts=list(_charts(evaluation)),
        height=HEIGHT,
        position_tables=build_position_tables(evaluation),
        heat_maps=heat_maps(evaluation),
        comparable=comparable(evaluation),
        token_scale=token_scale(evaluation),
        worst_tokens=worst_tokens,
        method=[line.partition(": ") for line in method(evaluation)],
        dots={
            row.name: None if row.name == evaluation.reference else model_color(index)
            for index, row in enumerate(evaluation.rows)
        },
        columns_to_right=columns_to_right,
        in_text=in_text,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        data=Markup(script_data(evaluation)) if evaluation.details else None,
    )
    # A folder's name need not be Unicode.
    return whole.encode(errors="surrogateescape").decode(errors="replace")


def _charts(evaluation: Evaluation) -> Iterator[tuple[str, str, Chart]]:
    """Title, note and drawings of each chart."""
    if (chart := cost_chart(evaluation)) is not None:
        if evaluation.reference is None:
            cost = "word perplexity"
        else:
            cost = "divergence"
        yield f"Size against {cost}", "Further left is smaller, further down is better.", chart
    for text in evaluation.texts:
        title = f"KL from {evaluation.reference} by position, on {text}"
        if (chart := position_chart(position_lines(evaluation, text), title)) is not None:
            heading = "Divergence by position" + (f", {text}" if len(evaluation.texts) > 1 else "")
            yield (
                heading,
                "Further right, more text precedes a token. Bars are one standard error.",
                chart,
            )


def headline(evaluation: Evaluation) -> tuple[str, str | None, list[str]]:
    """Return the title, the sentence below it where there is a reference, and a sentence for each
    of the other models.
    """
    main = main_model(evaluation)
    compared = _select_compared_rows(evaluation)
    others = [_summary(evaluation, row) for row in compared if row is not main]
    if evaluation.reference is None:
        return _summary(evaluation, main), None, others
    if others and evaluation.texts:
        rank = f", the least of {len(compared)} models"
    else:
        rank = ""
    lead = f"Compared with {_size(evaluation.rows[0])}"
    if evaluation.texts:
        agreement = _range(
            [divergence.times(100) for divergence in _divergences(evaluation, main)[1]]
        )
        lead += (
            f"; {main.name} predicts the same likeliest token at {agreement}\u00a0% of positions"
        )
    return _summary(evaluation, main) + rank, f"{lead}.", others


def main_model(evaluation: Evaluation) -> Row:
    """Return the model that diverges least from the reference; if several do, or there is no
    reference, the smallest.
    """

    def mean_kl(row: Row) -> float:
        kls = [
            one.kl for text in evaluation.texts if (one := row.texts[text].divergence) is not None
        ]
        if kls:
            return sum(kls) / len(kls)
        return 0.0

    return min(_select_compared_rows(evaluation), key=lambda row: (mean_kl(row), row.megabytes))


def _select_compared_rows(evaluation: Evaluation) -> list[Row]:
    if evaluation.reference is None:
        return evaluation.rows
    return evaluation.rows[1:]


def _summary(evaluation: Evaluation, row: Row) -> str:
    if evaluation.reference is None:
        perplexities = []
        for text in evaluation.texts:
            perplexities.append(Estimate(row.texts[text].documents.word_perplexity))
        if perplexities:
            cost = f", word perplexity {_range(perplexities)}"
        else:
            cost = ""
        return f"{_size(row)}{cost}"
    ratio = evaluation.rows[0].megabytes / row.megabytes
    factor = significant(max(ratio, 1 / ratio), 2)
    size = f"{factor}\u00a0× {'smaller' if ratio > 1 else 'larger'}"  # noqa: RUF001
    if factor == "1.0":
        size = f"as large as {evaluation.reference}"
    size += f" ({row.megabytes:.2f} MB)"
    if not evaluation.texts:
        return f"{row.name} is {size}"
    return (
        f"{row.name} is {size}; per token it diverges by {_range(_divergences(evaluation, row)[0])}"
        " nats"
    )


def _size(row: Row) -> str:
    return f"{row.name}: {row.megabytes:.2f} MB, {significant(row.bits_per_weight)} bits a weight"


def _divergences(evaluation: Evaluation, row: Row) -> tuple[list[Estimate], list[Estimate]]:
    """KL and top-1 agreement on each text; their means where there are three texts or more."""
    if (over := evaluation.over_texts(row)) is not None:
        return [over.kl], [over.top1_agreement]
    measured = [one for text in evaluation.texts if (one := row.texts[text].divergence) is not None]
    kls = [Estimate(one.kl, one.kl_error) for one in measured]
    return kls, [Estimate(one.top1_agreement, one.top1_error) for one in measured]


def _range(estimates: list[Estimate]) -> str:
    """Return one figure, or the smallest and the largest, with the digits that tables have, without
    errors and line breaks.
    """
    ordered = sorted(estimates, key=lambda one: one.value)
    values = []
    # 0.0123 ± 0.0004 or (1.23 ± 0.04)e-05.
    for one in (ordered[0], ordered[-1]):
        value, sign, error = str(one).partition(" ± ")
        values.append(value.lstrip("(") + error.partition(")")[2] if sign else value)
    return " to ".join(dict.fromkeys(values)).replace("e-", "e\u2011")
