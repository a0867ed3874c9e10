"""Which modules a `quantization_config` quantizes, held against compressed-tensors' own
matching; and its faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from case_names import case
from command import Capture, run
from compressed_tensors.utils import match_name
from error_parts import raises
from work import counted_calls

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.containers.hf_checkpoint import SETTINGS, read_codecs
from quantkit.formats.registry import METHODS

CONFIG = Path("x/config.json")
MODULES = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(12) for name in "qkvo"] + [
    "lm_head"
]
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}
Change = Callable[[dict[str, Any]], object]


def _config(**groups: tuple[list[Any], dict[str, Any]]) -> dict[str, Any]:
    """A config of groups: targets, and what differs from `WEIGHTS`."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            name: {"targets": targets, "weights": {**WEIGHTS, **changes}}
            for name, (targets, changes) in groups.items()
        },
        "ignore": ["lm_head"],
    }


def _read(raw: dict[str, Any]) -> dict[str, str]:
    _, codecs = read_codecs({SETTINGS: raw}, MODULES, Path("x/config.json"), METHODS)
    return {module: str(codec.scheme) for module, codec in codecs.items()}


PATTERNS: list[str] = [
    ".*q_proj",
    r"re:^model\.layers\.[0-9]{1,2}\.self_attn\.[qk]_proj$",
    "re:.*layers.1.*",
    "re:layers",
    "re:model",
    "re:.*(v|o)_proj$",
    "re:(?i).*V_PROJ",
    "re:.*",
    "re:",
    "q_proj",
    "model.layers.1.self_attn.q_proj",
]


def test_patterns_match_what_they_match_for_compressed_tensors() -> None:
    for pattern in PATTERNS:
        schemes = _read(_config(one=([pattern], {})))
        expected = {module for module in MODULES[:-1] if match_name(module, pattern)}
        assert set(schemes) == expected, pattern


def test_a_name_is_closer_than_a_pattern_and_that_than_a_class() -> None:
    schemes = _read(
        _config(
            a=(["Linear"], {}),
            b=(["re:.*q_proj"], {"group_size": 64}),
            c=(["model.layers.3.self_attn.q_proj"], {"num_bits": 8}),
        )
    )
    assert schemes["model.layers.3.self_attn.q_proj"] == "int8-g32"
    assert schemes["model.layers.4.self_attn.q_proj"] == "int4-g64"
    assert schemes["model.layers.3.self_attn.k_proj"] == "int4-g32"
    assert "lm_head" not in schemes


@pytest.mark.parametrize(
    ("targets", "other_targets", "module"),
    [
        (["Linear"], ["Linear"], "model.layers.0.self_attn.q_proj"),
        (["re:.*q_proj"], ["re:.*layers.2.*"], "model.layers.2.self_attn.q_proj"),
        (
            ["model.layers.5.self_attn.k_proj"],
            ["model.layers.5.self_attn.k_proj"],
            "model.layers.5.self_attn.k_proj",
        ),
    ],
)
def test_two_groups_that_contradict_each_other_are_refused_by_name(
    targets: list[str], other_targets: list[str], module: str
) -> None:
    found = "int4-g32 in 'one' and int8-g32 in 'two'"
    with raises(CheckpointError, f"'{module}'", path=CONFIG, found=found):
        _read(_config(one=(targets, {}), two=(other_targets, {"num_bits": 8})))
    assert _read(_config(one=(targets, {}), two=(other_targets, {}))) == _read(
        _config(one=([*targets, *other_targets], {}))
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "pattern",
    [
        r"re:(\w|\.|.)*(\w|\.|.)*[XY]",
        "re:(.*?)*(?:x|y)(?<=z)",
        "re:(?:(?:a{999}){999}){999}",
        "re:" + "(?:" * 90 + "a" + "{1,9})" * 90,
        "re:.{99999999999999999999}",
    ],
    ids=range(5),
)
@pytest.mark.parametrize("place", ["targets", "ignore"])
def test_a_pattern_that_takes_for_ever_is_given_up(
    pattern: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.base.patterns.MAX_SECONDS", 0.2)
    raw = _config(one=(["Linear"], {}))
    names = {"targets": "config_groups.one.targets", "ignore": "ignore"}
    if place == "targets":
        raw["config_groups"]["one"]["targets"] = [pattern] * 50
    else:
        raw["ignore"] = [pattern] * 50
    with raises(CheckpointError, f"quantization_config.{names[place]}", path=CONFIG):
        _read(raw)


@pytest.mark.parametrize(
    "pattern", ["re:(a|.)*(a|.)*X", "re:(.*)*(.*)*(.*)*$X", "re:" + "(.*.*)*" * 20 + "X"]
)
def test_a_pattern_that_only_pythons_own_matching_never_ends_is_matched(pattern: str) -> None:
    assert _read(_config(one=([pattern], {}))) == {}


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(",
        "re:[",
        "re:*",
        "re:(?R)",
        r"re:\p{L}",
        "re:(?P<a>.)(?P<a>.)",
        "re:" + "(" * 900 + ")" * 900,
        "re:" + "a" * 20_000,
    ],
)
def test_an_invalid_pattern_is_named(pattern: str) -> None:
    with raises(CheckpointError, "quantization_config.config_groups.one.targets", path=CONFIG):
        _read(_config(one=([pattern], {})))


def test_a_name_among_many_is_looked_at_once() -> None:
    raw = _config(one=(["Linear"], {}))
    raw["ignore"] = [f"model.layers.{index}" for index in range(20_000)]
    with counted_calls() as calls:
        assert len(_read(raw)) == len(MODULES)
    assert calls[0] < 10 * 20_000


WRONG: dict[str, Change] = {
    "targets null": lambda raw: raw["config_groups"]["one"].update(targets=None),
    "targets of numbers": lambda raw: raw["config_groups"]["one"].update(targets=[5]),
    "targets a text": lambda raw: raw["config_groups"]["one"].update(targets="Linear"),
    "group no object": lambda raw: raw["config_groups"].update(one=[]),
    "groups a list": lambda raw: raw.update(config_groups=[WEIGHTS]),
    "groups null": lambda raw: raw.update(config_groups=None),
    "too many groups": lambda raw: raw.update(
        config_groups={str(i): raw["config_groups"]["one"] for i in range(999)}
    ),
    "ignore a number": lambda raw: raw.update(ignore=5),
    "ignore of null": lambda raw: raw.update(ignore=[None]),
    "format a list": lambda raw: raw.update(format=["pack-quantized"]),
    "method a list": lambda raw: raw.update(quant_method=["compressed-tensors"]),
    "weights null": lambda raw: raw["config_groups"]["one"].update(weights=None),
    **{
        f"{key} {value!r}": lambda raw, key=key, value=value: raw["config_groups"]["one"][
            "weights"
        ].update(  # type: ignore[misc]
            {key: value}
        )
        for key, value in [
            ("group_size", -1),
            ("group_size", 0),
            ("group_size", 32.0),
            ("group_size", "32"),
            ("group_size", True),
            ("group_size", None),
            ("group_size", 10**30),
            ("num_bits", 4.0),
            ("num_bits", "4"),
            ("num_bits", None),
            ("num_bits", True),
            ("num_bits", [4]),
            ("symmetric", "true"),
            ("symmetric", 1),
            ("type", ["int"]),
            ("strategy", 7),
        ]
    },
}


def test_a_value_of_the_wrong_kind_names_its_file() -> None:
    for name, change in WRONG.items():
        raw = copy.deepcopy(_config(one=(["Linear"], {})))
        change(raw)
        with case(name), raises(CheckpointError, "quantization_config", path=CONFIG):
            _read(raw)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("group", {}), ("channel", {"group_size": -1}), ("tensor", {"group_size": None})],
)
def test_a_strategy_that_is_not_said_is_reported_by_the_group_size(
    strategy: str, changes: dict[str, Any]
) -> None:
    unsaid, said = (
        read_codecs(
            {SETTINGS: _config(one=(["Linear"], {**changes, "strategy": one}))},
            MODULES,
            Path("x"),
            METHODS,
        )[1]
        for one in (None, strategy)
    )
    assert said
    assert unsaid == said


OTHER_SCHEMES: list[dict[str, Any]] = [
    {"num_bits": 3},
    {"type": "float"},
    {"strategy": "block"},
    {"dynamic": True},
    {"dynamic": "local"},
    {"group_size": 20},
    {"actorder": "dynamic"},
    {"actorder": True},
    {"actorder": ["group"]},
]


def test_another_scheme_is_not_supported() -> None:
    for changes in OTHER_SCHEMES:
        with case(changes), raises(UnsupportedError, path=CONFIG):
            _read(_config(one=(["Linear"], changes)))


def test_what_changes_the_arithmetic_next_tos_is_not_supported() -> None:
    with raises(UnsupportedError, path=CONFIG):
        _read({**_config(one=(["Linear"], {})), "transform_config": {"config_groups": {"a": 1}}})


def test_the_command_reports_a_contradiction_in_one_line(tmp_path: Path, capfd: Capture) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "hf")
    quantkit.quantize(source, tmp_path / "int4", "int4-g32", method="rtn", accept_quality_loss=True)
    groups = _config(one=(["Linear"], {}), two=(["Linear"], {"num_bits": 8}))
    oracle.edit_json(tmp_path / "int4" / "config.json", quantization_config=groups)
    code, out, err = run(capfd, "inspect", tmp_path / "int4")
    assert (code, out) == (3, "")
    assert err.startswith(f"quantkit: error: {tmp_path / 'int4' / 'config.json'}: ")
    assert err.count("\n") == 1
