"""The topology: a model's tensors by role, for families that run and for families that do not
yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import transformers
from error_parts import raises
from safetensors import safe_open
from topology_cases import CASES, ENDS

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.families import FAMILIES, config_from_hf
from quantkit.architectures.names import CANONICAL
from quantkit.architectures.topology import (
    ExpertBank,
    block_items,
    group_fused_linears,
    input_groups,
    linear_columns,
    list_summed_modules,
    parameters,
)
from quantkit.base.json_values import Settings
from quantkit.errors import CheckpointError, UnsupportedError


def _saved(case: str, folder: Path) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """The config of a tiny model of transformers, and the shapes of the tensors that it saves."""
    kind, changes = CASES[case]
    oracle.save(oracle.make(kind, **{**ENDS, **changes}), folder)
    config = FAMILIES[kind].read(Settings(json.loads((folder / "config.json").read_text()), folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        return config, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("case", CASES)
def test_tensors_on_disk_are_those_that_transformers_saves(case: str, tmp_path: Path) -> None:
    config, saved = _saved(case, tmp_path)
    assert {tensor.name: tensor.shape for tensor in disk_tensors(config)} == saved


@pytest.mark.parametrize("case", CASES)
def test_every_canonical_tensor_is_in_one_tensor_on_disk(case: str, tmp_path: Path) -> None:
    config, _ = _saved(case, tmp_path)
    stored = [part for tensor in disk_tensors(config) for part in tensor.parts]
    assert sorted(stored) == sorted(parameter.name for parameter in parameters(config))
    assert len(set(stored)) == len(stored)


@pytest.mark.parametrize("case", CASES)
def test_all_linears_but_routers_belong_to_one_group_of_inputs(case: str, tmp_path: Path) -> None:
    config, _ = _saved(case, tmp_path)
    grouped = [
        f"model.layers.{layer}.{module}"
        for layer in range(config.num_layers)
        for group in input_groups(config, layer)
        for module in group.modules
    ]
    assert sorted([*grouped, *([] if config.tied_embeddings else ["lm_head"])]) == sorted(
        linear_columns(config)
    )
    assert not any(
        "router" in group.linears[0].role for group in input_groups(config, config.num_layers - 1)
    )


def test_the_groups_of_a_dense_block_follow_the_data(tmp_path: Path) -> None:
    config, _ = _saved("llama", tmp_path)
    assert [(group.site, group.modules, group.writes) for group in input_groups(config, 1)] == [
        ("attention.in", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), False),
        ("attention.out", ("self_attn.o_proj",), True),
        ("mlp.in", ("mlp.gate_proj", "mlp.up_proj"), False),
        ("mlp.out", ("mlp.down_proj",), True),
    ]
    assert group_fused_linears(config, 1) == {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
    assert list_summed_modules(config)[:2] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.down_proj",
    ]


def test_each_expert_has_inputs_of_its_own(tmp_path: Path) -> None:
    config, _ = _saved("mixtral", tmp_path)
    groups = [group for group in input_groups(config, 0) if group.expert is not None]
    assert [(group.site, group.expert) for group in groups] == [
        (site, expert) for expert in range(4) for site in ("expert.in", "expert.out")
    ]
    assert groups[2].modules == ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj")


def test_dense_layers_stand_before_sparse_ones(tmp_path: Path) -> None:
    config, _ = _saved("deepseek-v3", tmp_path)
    sparse = [
        any(isinstance(item, ExpertBank) for item in block_items(config, layer))
        for layer in range(3)
    ]
    assert sparse == [False, True, True]
    shared = next(group for group in input_groups(config, 1) if group.site == "mlp.in")
    assert shared.modules == ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")


def test_stacked_experts_say_how_they_lie(tmp_path: Path) -> None:
    config, saved = _saved("gpt-oss", tmp_path)
    stacked = {tensor.name: tensor for tensor in disk_tensors(config) if tensor.stacked}
    gate_up = stacked["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.stacked is not None
    assert gate_up.stacked.transposed
    assert gate_up.stacked.interleaved
    assert gate_up.parts[:3] == (
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight",
    )
    assert saved[gate_up.name] == (4, 64, 2 * 96)


def test_windows_and_positions_are_reported_layer_by_layer(tmp_path: Path) -> None:
    config, _ = _saved("gemma2", tmp_path)
    assert config.windows == (4096, None, 4096)
    gpt, _ = _saved("gpt-oss", tmp_path / "gpt")
    assert gpt.windows == (128, None, 128)


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if not family.runs])
def test_families_that_do_not_run_are_refused_by_name(kind: str) -> None:
    with raises(UnsupportedError, "llama", "qwen3", path=Path("config.json"), found=kind):
        config_from_hf({"model_type": kind}, "config.json")


def test_canonical_names_distinguish_roles() -> None:
    assert len(set(CANONICAL.values())) == len(CANONICAL)


def test_configs_differ_by_their_layers(tmp_path: Path) -> None:
    gemma, _ = _saved("gemma2", tmp_path)
    assert gemma.differences(gemma) == []
    llama, _ = _saved("llama", tmp_path / "llama")
    (line,) = [line for line in gemma.differences(llama) if line.startswith("window ")]
    assert line.startswith("window 4096 against none ")


@pytest.mark.parametrize(
    "changes",
    [
        {"no_rope_layers": [1, 0]},
        {"no_rope_layers": [1, 0, 2]},
        {"no_rope_layers": [1, 0, True]},
        {"no_rope_layers": "101"},
        {"no_rope_layer_interval": 0},
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
    ],
)
def test_smollm3_layers_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    raw = {
        **oracle.SIZES,
        "model_type": "smollm3",
        "rms_norm_eps": 1e-6,
        "no_rope_layers": None,
        **changes,
    }
    with pytest.raises(CheckpointError):
        config_from_hf(raw, "config.json")


# Nemotron H has no rotary positions.
@pytest.mark.parametrize("kind", [kind for kind, _ in CASES.values() if kind != "nemotron_h"])
def test_the_base_of_rotary_positions_is_the_familys_where_a_config_says_none(
    kind: str, tmp_path: Path
) -> None:
    kind, changes = next((one, changes) for one, changes in CASES.values() if one == kind)
    raw = json.loads(
        (
            oracle.save(oracle.make(kind, **{**ENDS, **changes}), tmp_path) / "config.json"
        ).read_text()
    )
    raw.pop("rope_parameters")
    raw.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ropes = theirs.rope_parameters
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"]
    ours = FAMILIES[kind].read(Settings(raw, "config.json"))
    first = "full_attention" if "full_attention" in kinds else "sliding_attention"
    assert ours.rope.theta == ropes.get(first, ropes)["rope_theta"]
    assert (
        "sliding_attention" not in kinds
        or (ours.window_rope or ours.rope).theta
        == ropes.get("sliding_attention", ropes)["rope_theta"]
    )
