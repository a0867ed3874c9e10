"""Renders an evaluation as a page, from the template ``page.html.jinja``."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup

from quantkit.evals.drawing import PALETTE, choose_color, theme_color
from quantkit.evals.html.charts import Chart, cost_chart, position_chart, position_lines
from quantkit.evals.html.heatmap import comparable, heat_maps
from quantkit.evals.html.tokens import in_text, script_data, token_scale, worst_tokens
from quantkit.evals.report import build_full_tables, build_position_tables, method
from quantkit.evals.results import EvaluationData, Row
from quantkit.evals.table import columns_to_right
from quantkit.quality.figures import Estimate, significant

_FOLDER = Path(__file__).parent


def page(evaluation: EvaluationData) -> str:
    """Render the page as one file that loads nothing.

    Raises `RequestError` if there are charts to draw, and matplotlib is not installed.
    """
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    dots: dict[str, str | None] = {}
    for index, row in enumerate(evaluation.rows):
        dots[row.name] = theme_color(choose_color(index))
        # The reference is no point of the charts, and has no color.
        if row.name == evaluation.reference:
            dots[row.name] = None
    # Of each line, the page sets the topic before the colon apart.
    method_lines = [line.partition(": ") for line in method(evaluation)]
    # The page's security policy allows only the script with this digest.
    script_digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = environment.get_template("page.html.jinja").render(
        evaluation=evaluation,
        headline=headline(evaluation),
        main_model=main_model(evaluation).name,
        tables=build_full_tables(evaluation),
        charts=list(_charts(evaluation)),
        palette=PALETTE,
        position_tables=build_position_tables(evaluation),
        heat_maps=heat_maps(evaluation),
        comparable=comparable(evaluation),
        token_scale=token_scale(evaluation),
        worst_tokens=worst_tokens,
        method=method_lines,
        dots=dots,
        columns_to_right=columns_to_right,
        in_text=in_text,
        script=Markup(script),
        script_digest=script_digest,
        style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        data=Markup(script_data(evaluation)) if evaluation.details else None,
    )
    # A folder's name need not be Unicode: Python represents its other bytes by surrogates, which
    # UTF-8 cannot encode.
    return html.encode(errors="surrogateescape").decode(errors="replace")


def _charts(evaluation: EvaluationData) -> Iterator[tuple[str, str, Chart]]:
    """Draw the charts, each with its title and note."""
    chart = cost_chart(evaluation)
    if chart is not None:
        if evaluation.reference is None:
            cost = "word perplexity"
        else:
            cost = "divergence"
        yield f"Size against {cost}", "Further left is smaller, further down is better.", chart
    for text in evaluation.texts:
        title = f"KL from {evaluation.reference} by position, on {text}"
        chart = position_chart(position_lines(evaluation, text), title)
        if chart is not None:
            heading = "Divergence by position"
            if len(evaluation.texts) > 1:
                heading += f", {text}"
            yield (
                heading,
                "Further right, more text precedes a token. Bars are one standard error.",
                chart,
            )


def headline(evaluation: EvaluationData) -> tuple[str, str | None, list[str]]:
    """Write the title, the sentence below it where there is a reference, and a sentence for each
    of the other models.
    """
    main = main_model(evaluation)
    compared = _select_compared_rows(evaluation)
    other_summaries = [_summary(evaluation, row) for row in compared if row is not main]
    if evaluation.reference is None:
        return _summary(evaluation, main), None, other_summaries
    title = _summary(evaluation, main)
    if other_summaries and evaluation.texts:
        title += f", the least of {len(compared)} models"
    lead = f"Compared with {_size(evaluation.rows[0])}"
    if evaluation.texts:
        _, agreements = _divergences(evaluation, main)
        agreement = _range([agreement.times(100) for agreement in agreements])
        lead += (
            f"; {main.name} predicts the same likeliest token at {agreement}\u00a0% of positions"
        )
    return title, f"{lead}.", other_summaries


def main_model(evaluation: EvaluationData) -> Row:
    """Choose the model that diverges least from the reference; if several do, or there is no
    reference, the smallest.
    """

    def mean_kl(row: Row) -> float:
        kls = []
        for text in evaluation.texts:
            divergence = row.texts[text].divergence
            if divergence is not None:
                kls.append(divergence.kl)
        if kls:
            return sum(kls) / len(kls)
        # Without divergences, all models are equal here and the size decides.
        return 0.0

    return min(_select_compared_rows(evaluation), key=lambda row: (mean_kl(row), row.megabytes))


def _select_compared_rows(evaluation: EvaluationData) -> list[Row]:
    if evaluation.reference is None:
        return evaluation.rows
    return evaluation.rows[1:]


def _summary(evaluation: EvaluationData, row: Row) -> str:
    if evaluation.reference is None:
        perplexities = []
        for text in evaluation.texts:
            perplexities.append(Estimate(row.texts[text].documents.word_perplexity))
        if perplexities:
            return f"{_size(row)}, word perplexity {_range(perplexities)}"
        return _size(row)
    ratio = evaluation.rows[0].megabytes / row.megabytes
    factor = significant(max(ratio, 1 / ratio), 2)
    comparison = "smaller" if ratio > 1 else "larger"
    # A no-break space: a line does not end between a figure and its sign.
    size = f"{factor}\u00a0× {comparison}"  # noqa: RUF001
    if factor == "1.0":
        size = f"as large as {evaluation.reference}"
    size += f" ({row.megabytes:.2f} MB)"
    if not evaluation.texts:
        return f"{row.name} is {size}"
    kls, _ = _divergences(evaluation, row)
    return f"{row.name} is {size}; per token it diverges by {_range(kls)} nats"


def _size(row: Row) -> str:
    return f"{row.name}: {row.megabytes:.2f} MB, {significant(row.bits_per_weight)} bits a weight"


def _divergences(evaluation: EvaluationData, row: Row) -> tuple[list[Estimate], list[Estimate]]:
    """Collect KL and top-1 agreement on each text, or their means where there are three texts or
    more.
    """
    means = evaluation.over_texts(row)
    if means is not None:
        return [means.kl], [means.top1_agreement]
    kls = []
    agreements = []
    for text in evaluation.texts:
        divergence = row.texts[text].divergence
        if divergence is not None:
            kls.append(Estimate(divergence.kl, divergence.kl_error))
            agreements.append(Estimate(divergence.top1_agreement, divergence.top1_error))
    return kls, agreements


def _range(estimates: list[Estimate]) -> str:
    """Write one figure, or the smallest and the largest, with the digits that tables have, without
    errors and line breaks.
    """
    ordered = sorted(estimates, key=lambda estimate: estimate.value)
    values = []
    for estimate in (ordered[0], ordered[-1]):
        # 0.0123 ± 0.0004 or (1.23 ± 0.04)e-05: the exponent follows the error.
        value, _, error = str(estimate).partition(" ± ")
        _, _, exponent = error.partition(")")
        values.append(value.lstrip("(") + exponent)
    # Equal figures are written once. A line may break after a hyphen, but not after U+2011.
    return " to ".join(dict.fromkeys(values)).replace("e-", "e\u2011")
