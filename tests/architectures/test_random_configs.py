"""Configs drawn at random over all families, through quantkit and transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from compare_configs import compare

from fuzzing.configs import FEATURES, draw
from quantkit.architectures.families import FAMILIES

CONFIGS, SEED = 100, 21


def test_every_family_that_runs_is_drawn() -> None:
    assert set(FEATURES) == {name for name, family in FAMILIES.items() if family.runs}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CONFIGS, 20))
def test_no_config_means_something_else_to_transformers(first: int, tmp_path: Path) -> None:
    """As ``python scripts/release/compare_configs.py --configs 100 --seed 21``."""
    outcomes = [
        compare(draw(SEED, number), tmp_path / str(number)) for number in range(first, first + 20)
    ]
    differing = {one.trial.number: one.detail for one in outcomes if one.what == "differs"}
    assert not differing, differing
    assert Counter(one.what for one in outcomes)["same"] >= 10


def test_a_config_depends_on_its_number_alone() -> None:
    there = [draw(1, number) for number in range(60)]
    assert there == [draw(1, number) for number in reversed(range(60))][::-1]
    assert len({str(one.raw) for one in there}) == 60
    assert there[0] != draw(2, 0)
