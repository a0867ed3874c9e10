"""The table of formats against the names that are spelled out for type checkers."""

from __future__ import annotations

from typing import get_args

from quantkit.formats.registry import TargetName, targets


def test_names_of_targets_are_spelled_out_for_type_checkers() -> None:
    assert get_args(TargetName) == tuple(targets())
