"""Renders an evaluation as a page, from the template ``page.html.jinja``."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup

from quantkit.evals.html.charts import cost_chart, model_color, position_chart, position_lines
from quantkit.evals.html.drawing import HEIGHT, Chart
from quantkit.evals.html.headline import headline, main_model
from quantkit.evals.html.heatmap import heat_maps, share_scale
from quantkit.evals.html.pieces import in_text
from quantkit.evals.html.tokens import script_data, token_scale, worst_tokens
from quantkit.evals.method import method
from quantkit.evals.positions import position_tables
from quantkit.evals.report import side_by_side
from quantkit.evals.results import Evaluation
from quantkit.evals.table import columns_to_right

_FOLDER = Path(__file__).parent


def page(evaluation: Evaluation) -> str:
    """The page as one file that loads nothing."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    whole = environment.get_template("page.html.jinja").render(
        evaluation=evaluation,
        headline=headline(evaluation),
        main_model=main_model(evaluation).name,
        tables=side_by_side(evaluation),
        charts=list(_charts(evaluation)),
        height=HEIGHT,
        position_tables=position_tables(evaluation),
        heat_maps=heat_maps(evaluation),
        share_scale=share_scale(evaluation),
        token_scale=token_scale(evaluation),
        worst_tokens=worst_tokens,
        method=[line.partition(": ") for line in method(evaluation)],
        dots={row.name: None if row.name == evaluation.reference else model_color(index)
              for index, row in enumerate(evaluation.rows)},
        columns_to_right=columns_to_right,
        in_text=in_text,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        data=Markup(script_data(evaluation)) if evaluation.details else None,
    )  # fmt: skip
    return whole.encode(errors="surrogateescape").decode(errors="replace")  # a folder's name need not be Unicode


def _charts(evaluation: Evaluation) -> Iterator[tuple[str, str, Chart]]:
    """Title, note and drawings of each chart."""
    if (chart := cost_chart(evaluation)) is not None:
        cost = "word perplexity" if evaluation.reference is None else "divergence"
        yield f"Size against {cost}", "Further left is smaller, further down is better.", chart
    for text in evaluation.texts:
        title = f"KL from {evaluation.reference} by position, on {text}"
        if (chart := position_chart(position_lines(evaluation, text), title)) is not None:
            heading = "Divergence by position" + (f", {text}" if len(evaluation.texts) > 1 else "")
            yield heading, "Further right, more text precedes a token. Bars are one standard error.", chart
