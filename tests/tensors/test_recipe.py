"""Recipes: which scheme each layer gets, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from case_names import case
from error_parts import raises
from schemes import any_scheme

from quantkit.errors import RequestError
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

COLUMNS = {
    "model.layers.0.self_attn.q_proj": 128,
    "model.layers.0.mlp.down_proj": 352,
    "model.layers.1.self_attn.q_proj": 128,
    "model.layers.1.mlp.down_proj": 352,
    "model.layers.10.self_attn.q_proj": 128,
    "lm_head": 128,
}


def _recipe(default: str, *overrides: tuple[str, str | None]) -> Recipe:
    parsed = (Override(p, None if s is None else any_scheme(s)) for p, s in overrides)
    return Recipe(any_scheme(default), tuple(parsed))


def test_the_head_keeps_its_floats_unless_named() -> None:
    assert set(_recipe("int8").assign(COLUMNS)) == set(COLUMNS) - {"lm_head"}
    assert str(_recipe("int8", ("lm_head", "int4-g32")).assign(COLUMNS)["lm_head"]) == "int4-g32"
    assert "lm_head" in _recipe("int8", ("*", "int8")).assign(COLUMNS)


@pytest.mark.parametrize(
    ("pattern", "scheme", "named"),
    [
        ("*.self_attn.*", "int8", True),
        ("*.0.self_attn.q_proj", "int8", True),
        ("model.layers.0.*", "int8", False),
        ("model.layers.0.*", None, True),
        ("*.down_proj", "int8", False),
    ],
)
def test_what_has_to_be_named_alone_is_named_by_no_pattern_for_others_too(
    pattern: str, scheme: str | None, named: bool
) -> None:
    recipe = _recipe("int4", (pattern, scheme))
    attention = {name for name in COLUMNS if "self_attn" in name}
    assert recipe.select_specific_overrides(attention, COLUMNS.keys() - attention).overrides == (
        recipe.overrides if named else ()
    )
    everything = _recipe("int4", ("*", "int8"), ("*.*", "int8"))
    assert everything.select_specific_overrides(COLUMNS, ()).overrides == ()


def test_later_overrides_win() -> None:
    recipe = _recipe(
        "int4-g32", ("*.down_proj", "int8"), ("model.layers.1.*", None), ("*.1.self_attn.*", "int4")
    )
    assigned = {module: str(scheme) for module, scheme in recipe.assign(COLUMNS).items()}
    assert assigned == {
        "model.layers.0.self_attn.q_proj": "int4-g32",
        "model.layers.0.mlp.down_proj": "int8",
        "model.layers.1.self_attn.q_proj": "int4",
        "model.layers.10.self_attn.q_proj": "int4-g32",
    }


def test_patterns_match_whole_names_and_their_case() -> None:
    with raises(RequestError, found="'q_proj'"):
        _recipe("int8", ("q_proj", None)).assign(COLUMNS)
    with raises(RequestError, found="'*.Q_PROJ'"):
        _recipe("int8", ("*.Q_PROJ", None)).assign(COLUMNS)
    kept = set(COLUMNS) - set(_recipe("int8", ("model.layers.1.*", None)).assign(COLUMNS))
    assert kept == {"lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("scheme", ["int8", None])
def test_a_pattern_that_matches_nothing_is_refused(scheme: str | None) -> None:
    with raises(RequestError, found="'*.w1'"):
        _recipe("int4-g32", ("lm_head", None), ("*.w1", scheme)).assign(COLUMNS)


def test_assigned_schemes_are_fitted() -> None:
    assigned = _recipe("int4-g128").assign(COLUMNS)
    assert str(assigned["model.layers.0.mlp.down_proj"]) == "int4-g32"
    assert str(assigned["model.layers.0.self_attn.q_proj"]) == "int4-g128"


def test_keeping_wins_over_all_before() -> None:
    recipe = _recipe("int8", ("*.down_proj", "int4")).keeping(["*.down_proj", "*.10.*"])
    assert recipe.find_scheme("model.layers.0.mlp.down_proj") is None
    assert recipe.find_scheme("model.layers.10.self_attn.q_proj") is None
    assert recipe.find_scheme("model.layers.0.self_attn.q_proj") == QuantScheme(8, None)


def test_a_recipe_survives_its_file(tmp_path: Path) -> None:
    recipe = _recipe("int4-g128-asym", ("*.down_proj", "int8"), ("lm_head", None))
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.to_json()))
    assert Recipe.from_json(path) == recipe


def test_a_recipe_file_needs_no_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('{"default": "int8"}')
    assert Recipe.from_json(str(path)) == Recipe(QuantScheme(8, None))


BAD_RECIPES: dict[str, Any] = {
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
    "an override with a bad scheme": {
        "default": "int8",
        "overrides": [{"pattern": "lm_head", "scheme": "none"}],
    },
    "a null scheme": {"default": "int8", "overrides": [{"pattern": "lm_head", "scheme": None}]},
    "a numeric pattern": {"default": "int8", "overrides": [{"pattern": 1, "scheme": "int8"}]},
    "an unknown key in an override": {
        "default": "int8",
        "overrides": [{"pattern": "lm_head", "scheme": "int8", "gruop": 32}],
    },
}


def test_errors_in_a_recipe_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    for name, content in BAD_RECIPES.items():
        if name == "no json":
            path.write_text(content)
        else:
            path.write_text(json.dumps(content))
        with case(name), raises(RequestError, path=path):
            Recipe.from_json(path)


def test_a_scheme_that_a_recipe_cannot_have_is_reported_as_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('{"default": "int8", "overrides": [{"pattern": "*", "scheme": "int4"}]}')
    with raises(RequestError, "int4-g128", path=path):
        Recipe.from_json(path)


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with raises(RequestError, path=tmp_path / "absent.json"):
        Recipe.from_json(tmp_path / "absent.json")


def test_a_recipe_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(b"\xff\xfe\x00")
    with raises(RequestError, path=tmp_path / "recipe.json"):
        Recipe.from_json(tmp_path / "recipe.json")
