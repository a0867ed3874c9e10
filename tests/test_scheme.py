"""Schemes, their spelling and fit, and the plan that hands them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import RequestError
from quantkit.tensors.scheme import Override, QuantScheme, Recipe

COLUMNS = {
    "model.layers.0.self_attn.q_proj": 128,
    "model.layers.0.mlp.down_proj": 352,
    "model.layers.1.self_attn.q_proj": 128,
    "model.layers.1.mlp.down_proj": 352,
    "model.layers.10.self_attn.q_proj": 128,
    "lm_head": 128,
}


def _plan(default: str, *overrides: tuple[str, str | None]) -> Recipe:
    parsed = (Override(p, None if s is None else QuantScheme.parse(s)) for p, s in overrides)
    return Recipe(QuantScheme.parse(default), tuple(parsed))


@settings(deadline=None, derandomize=True)
@given(
    st.builds(QuantScheme, st.sampled_from([4, 8]), st.none() | st.integers(1, 99).map(lambda n: 8 * n), st.booleans())
)
def test_parsing_undoes_spelling(scheme: QuantScheme) -> None:
    assert QuantScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", QuantScheme(8, None)),
        ("int4-g128", QuantScheme(4, 128)),
        ("int4-g64-asym", QuantScheme(4, 64, symmetric=False)),
        ("int8-g32", QuantScheme(8, 32)),
        (" INT4-G32\n", QuantScheme(4, 32)),
    ],
)
def test_schemes_are_read(text: str, expected: QuantScheme) -> None:
    assert QuantScheme.parse(text) == expected
    assert expected.levels == 2**expected.bits


BAD = ["", "int", "int2", "int16", "int4-", "int4-g", "int4g128", "int4-128", "g128", "int4-g-8", "int4-asym-g32",
       "int4-g32-sym", "int4-g32 asym", "fp8", "int4-g1e2", "w4a16", "int8 int4"]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_spellings_are_refused_with_the_good_ones(text: str) -> None:
    with pytest.raises(RequestError, match=r"unknown quantization scheme .*expected int8, int4-g32") as caught:
        QuantScheme.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["int4-g0", "int4-g12", "int8-g1", "int4-g100"])
def test_group_sizes_that_are_no_multiple_of_eight_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected a positive multiple of 8"):
        QuantScheme.parse(text)


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(RequestError, match=f"found {bits}, expected 4 or 8"):
        QuantScheme(bits, None)


@pytest.mark.parametrize(
    ("asked", "columns", "used"),
    [
        ("int4-g128", 11008, "int4-g128"),
        ("int4-g128", 96, "int4-g32"),
        ("int4-g128", 192, "int4-g64"),
        ("int4-g64", 96, "int4-g32"),
        ("int4-g256", 384, "int4-g128"),
        ("int4-g128", 48, "int8"),
        ("int4-g32", 80, "int8"),
        ("int4-g32-asym", 80, "int8"),
        ("int4-g128-asym", 96, "int4-g32-asym"),
        ("int8-g64", 96, "int8-g32"),
        ("int4-g24", 96, "int4-g24"),
        ("int4-g24", 128, "int8"),
        ("int4", 7, "int4"),
        ("int8", 7, "int8"),
        ("int8-asym", 7, "int8-asym"),
    ],
)
def test_the_policy_for_rows_that_do_not_fit(asked: str, columns: int, used: str) -> None:
    fitted = QuantScheme.parse(asked).fitted(columns)
    assert str(fitted) == used
    assert fitted.groups(columns) * (fitted.group_size or columns) == columns


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(["int4-g32", "int4-g128", "int4-g64-asym", "int8-g32"]), st.integers(1, 5000))
def test_a_fitted_scheme_fits_and_stays(text: str, columns: int) -> None:
    fitted = QuantScheme.parse(text).fitted(columns)
    assert fitted.groups(columns) >= 1
    assert fitted.fitted(columns) == fitted


def test_the_head_keeps_its_floats_unless_named() -> None:
    assert set(_plan("int8").assign(COLUMNS)) == set(COLUMNS) - {"lm_head"}
    assert str(_plan("int8", ("lm_head", "int4-g32")).assign(COLUMNS)["lm_head"]) == "int4-g32"
    assert "lm_head" in _plan("int8", ("*", "int8")).assign(COLUMNS)


def test_later_overrides_win() -> None:
    plan = _plan("int4-g32", ("*.down_proj", "int8"), ("model.layers.1.*", None), ("*.1.self_attn.*", "int4"))
    assigned = {module: str(scheme) for module, scheme in plan.assign(COLUMNS).items()}
    assert assigned == {
        "model.layers.0.self_attn.q_proj": "int4-g32",
        "model.layers.0.mlp.down_proj": "int8",
        "model.layers.1.self_attn.q_proj": "int4",
        "model.layers.10.self_attn.q_proj": "int4-g32",
    }


def test_patterns_match_whole_names_and_their_case() -> None:
    with pytest.raises(RequestError, match=r"matches no linear layer"):
        _plan("int8", ("q_proj", None)).assign(COLUMNS)
    with pytest.raises(RequestError, match=r"matches no linear layer"):
        _plan("int8", ("*.Q_PROJ", None)).assign(COLUMNS)
    kept = set(COLUMNS) - set(_plan("int8", ("model.layers.1.*", None)).assign(COLUMNS))
    assert kept == {"lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("scheme", ["int8", None])
def test_a_pattern_that_matches_nothing_is_refused(scheme: str | None) -> None:
    with pytest.raises(RequestError, match=r"pattern matches no linear layer \(found '\*.w1', expected a glob"):
        _plan("int4-g32", ("lm_head", None), ("*.w1", scheme)).assign(COLUMNS)


def test_assigned_schemes_are_fitted() -> None:
    assigned = _plan("int4-g128").assign(COLUMNS)
    assert str(assigned["model.layers.0.mlp.down_proj"]) == "int4-g32"
    assert str(assigned["model.layers.0.self_attn.q_proj"]) == "int4-g128"


def test_keeping_wins_over_all_before() -> None:
    plan = _plan("int8", ("*.down_proj", "int4")).keeping(["*.down_proj", "*.10.*"])
    assert plan.requested("model.layers.0.mlp.down_proj") is None
    assert plan.requested("model.layers.10.self_attn.q_proj") is None
    assert plan.requested("model.layers.0.self_attn.q_proj") == QuantScheme(8, None)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = _plan("int4-g128-asym", ("*.down_proj", "int8"), ("lm_head", None))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert Recipe.from_json(path) == plan


def test_a_plan_file_needs_no_overrides(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"default": "int8"}')
    assert Recipe.from_json(str(path)) == Recipe(QuantScheme(8, None))


BAD_PLANS: dict[str, Any] = {
    "no json": "{",
    "a list": [],
    "a string": "int8",
    "no default": {"overrides": []},
    "a number as default": {"default": 4},
    "null as default": {"default": None},
    "a bad default": {"default": "int3"},
    "an unknown key": {"default": "int8", "override": []},
    "overrides of strings": {"default": "int8", "overrides": ["lm_head"]},
    "overrides of null": {"default": "int8", "overrides": None},
    "an override without scheme": {"default": "int8", "overrides": [{"pattern": "lm_head"}]},
    "an override without pattern": {"default": "int8", "overrides": [{"scheme": "int8"}]},
    "an override with a bad scheme": {"default": "int8", "overrides": [{"pattern": "lm_head", "scheme": "none"}]},
    "a null scheme": {"default": "int8", "overrides": [{"pattern": "lm_head", "scheme": None}]},
    "a numeric pattern": {"default": "int8", "overrides": [{"pattern": 1, "scheme": "int8"}]},
    "an unknown key in an override": {
        "default": "int8",
        "overrides": [{"pattern": "lm_head", "scheme": "int8", "gruop": 32}],
    },
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_errors_in_a_plan_file_name_the_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = BAD_PLANS[case]
    path.write_text(content if case == "no json" else json.dumps(content))
    with pytest.raises(RequestError) as caught:
        Recipe.from_json(path)
    assert str(path) in str(caught.value)


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent.json: cannot read the plan"):
        Recipe.from_json(tmp_path / "absent.json")


def test_a_plan_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match=r"plan.json: cannot read the plan"):
        Recipe.from_json(tmp_path / "plan.json")
