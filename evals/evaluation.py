"""The result of an evaluation, with its reports."""

from __future__ import annotations

from quantkit.evals.html.page import page
from quantkit.evals.report import build_tables
from quantkit.evals.results import EvaluationData
from quantkit.evals.table import render


class Evaluation(EvaluationData):
    """The measures of all models, as tables, a page or plain values; see `EvaluationData`."""

    def lines(self) -> list[str]:
        """Write the tables as text: models side by side, and their divergence from the
        reference.
        """
        return render(build_tables(self), "terminal")

    def to_html(self) -> str:
        """Write a page that needs nothing else: tables, charts, and texts with their tokens
        coloured by divergence.

        The texts are included only if `evaluate` was called with `details` and a reference.
        """
        return page(self)
