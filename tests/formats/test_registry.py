"""The table of formats against the names that are spelled out for type checkers."""

from __future__ import annotations

from quantkit.formats.registry import targets
from quantkit.formats.target_names import FLOAT_TARGETS, TARGET_NAMES


def test_names_of_targets_are_those_of_the_table() -> None:
    assert tuple(targets()) == TARGET_NAMES
    without_codes = [name for name, target in targets().items() if target.codes is None]
    assert list(FLOAT_TARGETS) == without_codes
