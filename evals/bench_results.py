"""The figures of several models, with their tables."""

from __future__ import annotations

from typing import Any

from quantkit.evals.bench_report import build_tables
from quantkit.evals.bench_result import Bench
from quantkit.evals.table import render


class BenchResult(list[Bench]):
    """The figures of each model, in order."""

    def to_json(self) -> list[dict[str, Any]]:
        """Collect what `Bench.to_json` returns for each model."""
        return [model_bench.to_json() for model_bench in self]

    def lines(self) -> list[str]:
        """Write the tables as text."""
        return render(build_tables(self), "terminal")
