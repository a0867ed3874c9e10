"""The demo on the model that ships with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.errors import DestinationError
from quantkit.evals.demo import SCHEMES, run_demo
from quantkit.quality.verify import Verdict


def test_the_demo_measures_every_checkpoint(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "demo")
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["bf16", *SCHEMES]
    assert report.verdicts["bf16"] is Verdict.SAME
    assert rows["bf16"].kl == rows["bf16"].largest_logit_difference == 0
    # int4 costs more than int8, and larger groups more than smaller ones, in bits saved and in KL
    ranked = [rows[name] for name in ("bf16", "int8", "int4-g32", "int4-g64", "int4-g128")]
    assert [row.bits_per_weight for row in ranked] == sorted((row.bits_per_weight for row in ranked), reverse=True)
    assert [row.kl for row in ranked] == sorted(row.kl for row in ranked)
    assert rows["int8"].perplexity == pytest.approx(rows["bf16"].perplexity, rel=0.005)
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [row["name"] for row in value["rows"]] == list(rows)
    assert value["verdicts"] == {"bf16": "same", **dict.fromkeys(SCHEMES, "within_bound")}
    text = "\n".join(report.lines())
    assert all(name in text for name in rows)
    assert all(sample.startswith("My fellow citizens") for sample in report.samples.values())


def test_the_demo_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(DestinationError):
        run_demo(tmp_path)
