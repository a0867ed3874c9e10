"""What vLLM finds in settings for its own modules, and the names that quantkit adds so that it
finds the right thing.

The expected names are those that vLLM 0.32 has, as `scripts/peers/peer_vllm_modules.py` saw them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.table import METHODS
from quantkit.formats.codecs.vllm import Linears, find_linear_shapes, name_for_vllm, vllm_problems
from quantkit.formats.codecs.vllm_modules import VllmNames
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme

INT4, INT8 = QuantScheme(4, 32), QuantScheme(8, 32)
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = tuple(
    f"mlp.experts.{expert}.{part}"
    for expert in range(2)
    for part in ("gate_proj", "up_proj", "down_proj")
)
METHOD_NAMES = ("compressed-tensors", "gptq", "awq")


def in_layers(*names: str, layers: int = 2, beginning: str = "model.layers") -> list[str]:
    return [f"{beginning}.{layer}.{name}" for layer in range(layers) for name in names]


def written(
    method: QuantMethod,
    schemes: Mapping[str, QuantScheme | None],
    model_type: str = "llama",
    *,
    named: bool = True,
) -> Linears:
    """Settings for schemes of linears, None for floats, as quantkit writes them; with `named`
    for vLLM too.
    """
    coded = {module: scheme for module, scheme in schemes.items() if scheme is not None}
    settings = method.write_settings(coded, dict.fromkeys(schemes, 64))
    shapes = dict.fromkeys(schemes, (64, 64))
    raw = {"model_type": model_type}
    if named:
        name_for_vllm(settings, Linears.of(method, settings, shapes, coded, raw))
    return Linears.of(method, settings, shapes, coded, raw)


def with_rows(linears: Linears, rows: Mapping[str, int]) -> Linears:
    """The same with other numbers of outputs."""
    shapes = {module: (rows.get(module, 64), 64) for module in linears.shapes}
    return Linears(
        method=linears.method,
        settings=linears.settings,
        shapes=shapes,
        coded=linears.coded,
        names=linears.names,
        model_type=linears.model_type,
    )


def rules_of(linears: Linears) -> set[str]:
    return {problem.rule for problem in vllm_problems(linears)}


# A model type, a linear layer, and the module of vLLM that has it.
VLLM_MODULES: list[tuple[str, str, str]] = [
    ("llama", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"),
    ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"),
    ("llama", "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
    ("qwen3_moe", "model.layers.1.mlp.experts.1.up_proj", "model.layers.1.mlp.experts"),
    ("granitemoehybrid", "model.layers.1.mamba.in_proj", "model.layers.1.mixer.in_proj"),
    ("falcon_h1", "model.layers.1.mamba.in_proj", "model.3.mixer.in_proj"),
    ("falcon_h1", "model.layers.1.self_attn.q_proj", "model.layers.1.qkv_proj"),
    (
        "qwen2_vl",
        "model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.self_attn.qkv_proj",
    ),
    ("minicpm3", "model.layers.1.self_attn.q_a_proj", ""),
]


def test_linears_are_in_the_modules_that_vllm_has() -> None:
    names = [*in_layers(*ATTENTION, *MLP, *EXPERTS, "mamba.in_proj", "self_attn.q_a_proj")]
    for model_type, linear, module in VLLM_MODULES:
        groups = VllmNames.of({"model_type": model_type}).group(names)
        modules = [group.name for group in groups if linear in group.parts]
        assert modules == [module], (model_type, linear)


def test_a_lone_part_is_not_fused() -> None:
    """Arcee, Jais and Nemotron have an up projection without a gate."""
    (module,) = VllmNames.of({"model_type": "nemotron"}).group(["model.layers.0.mlp.up_proj"])
    assert module.name == "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "falcon_h1"])
def test_state_spaces_in_floats_are_ignored_by_the_names_of_vllm(model_type: str) -> None:
    method = METHODS["compressed-tensors"]
    schemes = dict.fromkeys(in_layers(*ATTENTION), INT4) | dict.fromkeys(in_layers("mamba.in_proj"))
    assert rules_of(written(method, schemes, model_type, named=False)) == {"vllm-names"}
    linears = written(method, schemes, model_type)
    assert rules_of(linears) == set()
    patterns = [
        one.removeprefix("re:")
        for one in linears.settings.values["ignore"]
        if one.startswith("re:")
    ]
    for module in linears.names.group(in_layers("mamba.in_proj")):
        assert any(re.match(pattern, module.name) for pattern in patterns)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_experts_of_a_layer_in_floats_are_named_as_one_module(method: str) -> None:
    schemes: dict[str, QuantScheme | None] = dict.fromkeys(in_layers(*EXPERTS), INT4)
    schemes |= dict.fromkeys(in_layers(*EXPERTS, layers=1))
    linears = written(METHODS[method], schemes, "qwen3_moe")
    assert rules_of(linears) == set()
    if method == "gptq":
        assert linears.settings.values["dynamic"][r"-:^model\.layers\.0\.mlp\.experts$"] == {}
    if method == "awq":
        assert "model.layers.0.mlp.experts" in linears.settings.values["modules_to_not_convert"]
    if method != "compressed-tensors":  # which vLLM looks up by the linears of the first expert
        assert rules_of(written(METHODS[method], schemes, "qwen3_moe", named=False)) == {
            "vllm-names"
        }


def test_layers_of_other_bits_are_named_by_their_fused_modules_in_gptq() -> None:
    schemes = dict.fromkeys(in_layers(*ATTENTION, *MLP), INT4) | dict.fromkeys(
        in_layers(*ATTENTION, layers=1), INT8
    )
    assert rules_of(written(METHODS["gptq"], schemes, named=False)) == {"vllm-names"}
    linears = written(METHODS["gptq"], schemes)
    assert rules_of(linears) == set()
    expected = {"bits": 8, "group_size": 32}
    assert (
        linears.settings.values["dynamic"][r"+:^model\.layers\.0\.self_attn\.qkv_proj$"] == expected
    )


def test_a_layer_without_v_is_ignored_as_a_whole() -> None:
    """vLLM looks for q, k and v, and refuses a fused linear of which only some are ignored."""
    parts = ("self_attn.q_proj", "self_attn.k_proj")
    schemes: dict[str, QuantScheme | None] = dict.fromkeys(in_layers(*parts), INT4)
    schemes |= dict.fromkeys(in_layers(*parts, layers=1))
    method = METHODS["compressed-tensors"]
    assert rules_of(written(method, schemes, "gemma4_text", named=False)) == {"vllm-names"}
    linears = written(method, schemes, "gemma4_text")
    assert rules_of(linears) == set()
    assert r"re:^model\.layers\.0\.self_attn\.qkv_proj$" in linears.settings.values["ignore"]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_what_vllm_fuses_must_have_one_scheme(method: str) -> None:
    schemes: dict[str, QuantScheme | None] = dict.fromkeys(in_layers(*ATTENTION, *MLP), INT4)
    (problem,) = vllm_problems(
        written(METHODS[method], schemes | {"model.layers.1.self_attn.q_proj": None})
    )
    assert (problem.rule, problem.location) == (
        "fused-schemes",
        "model.layers.1.self_attn.qkv_proj",
    )
    experts: dict[str, QuantScheme | None] = dict.fromkeys(in_layers(*EXPERTS), INT4)
    (problem,) = vllm_problems(
        written(METHODS[method], experts | {"model.layers.1.mlp.experts.1.up_proj": None})
    )
    assert (problem.rule, problem.location) == ("expert-schemes", "model.layers.1.mlp.experts")


def test_settings_of_usual_models_need_no_other_names() -> None:
    for method, kept in itertools.product(METHOD_NAMES, ("o_proj", "layers.0.", "lm_head")):
        schemes: dict[str, QuantScheme | None] = {"lm_head": None}
        for name in in_layers(*ATTENTION, *MLP):
            schemes[name] = None if kept in name else INT4
        plain = written(METHODS[method], schemes, named=False)
        named = written(METHODS[method], schemes, named=True)
        assert plain.settings.values == named.settings.values, (method, kept)
        assert rules_of(named) == set(), (method, kept)


def test_gptq_of_a_gate_and_up_in_one_tensor_is_not_found_under_its_name() -> None:
    """vLLM's GLM-4 lists gate_proj and up_proj, which are no tensors; its GLM does not."""
    schemes = dict.fromkeys(in_layers(*ATTENTION, "mlp.gate_up_proj", "mlp.down_proj"), INT4)
    assert rules_of(written(METHODS["gptq"], schemes, "glm4")) == {"vllm-names"}
    assert rules_of(written(METHODS["gptq"], schemes, "glm")) == set()
    assert rules_of(written(METHODS["compressed-tensors"], schemes, "glm4")) == set()


def test_tiles_must_divide_the_rows_of_all_but_the_last_fused_linear() -> None:
    names = in_layers(*ATTENTION, layers=1)
    linears = written(
        METHODS["compressed-tensors"], dict.fromkeys(names, QuantScheme.parse("fp8-block"))
    )
    even = with_rows(linears, dict.fromkeys(names[:2], 128))
    assert rules_of(even) == set()
    assert rules_of(with_rows(even, {names[0]: 128, names[1]: 96})) == {"vllm-tiles"}


@pytest.mark.parametrize(
    ("method", "rules"),
    [("compressed-tensors", set()), ("gptq", {"vllm-head"}), ("awq", {"vllm-head"})],
)
def test_a_head_of_gptq_or_awq_must_have_rows_that_vllm_need_not_pad(
    method: str, rules: set[str]
) -> None:
    schemes = {**dict.fromkeys(in_layers(*ATTENTION), INT4), "lm_head": INT4}
    linears = written(METHODS[method], schemes)
    assert rules_of(with_rows(linears, {"lm_head": 128})) == set()
    assert rules_of(with_rows(linears, {"lm_head": 136})) == rules


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("bloom", ["transformer.h.0.self_attention.query_key_value"]),
        ("gpt_oss", in_layers(*EXPERTS)),
    ],
)
def test_weights_that_the_loader_of_a_model_does_not_take_are_found(
    model_type: str, names: list[str]
) -> None:
    method = METHODS["compressed-tensors"]
    assert rules_of(written(method, dict.fromkeys(names, INT4), model_type)) == {"vllm-loader"}
    assert rules_of(written(method, dict.fromkeys(names, INT4), "other")) == set()


@pytest.mark.parametrize(("scheme", "rules"), [("int4-g32", set()), ("fp8", {"vllm-loader"})])
def test_codes_that_vllm_transposes_are_found(scheme: str, rules: set[str]) -> None:
    schemes = {"transformer.h.0.attn.c_attn": QuantScheme.parse(scheme)}
    linears = written(METHODS["compressed-tensors"], schemes, "gpt2")
    assert rules_of(linears) == rules


def test_modules_without_a_name_are_like_others() -> None:
    """vLLM's MiniCPM 3 looks for the settings of q_a_proj under an empty name."""
    schemes = dict.fromkeys(in_layers("self_attn.q_a_proj", "self_attn.o_proj"), INT4)
    assert rules_of(written(METHODS["compressed-tensors"], schemes, "minicpm3")) == set()
    kept = {name: None if name.endswith("q_a_proj") else scheme for name, scheme in schemes.items()}
    linears = written(METHODS["compressed-tensors"], kept, "minicpm3")
    assert rules_of(linears) == set()
    assert "re:^$" in linears.settings.values["ignore"]
    kept["model.layers.0.self_attn.q_a_proj"] = INT4
    assert rules_of(written(METHODS["compressed-tensors"], kept, "minicpm3")) == {"fused-schemes"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_settings_of_others_need_not_name_what_tensors_show_to_be_floats(method: str) -> None:
    settings = {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "zero_point": True,
        "lm_head": False,
    }
    coded = in_layers(*ATTENTION, *EXPERTS)
    shapes = dict.fromkeys([*coded, *in_layers("mlp.shared_expert.up_proj"), "lm_head"], (64, 64))
    raw = {"model_type": "qwen2_moe"}
    assert rules_of(Linears.of(METHODS[method], settings, shapes, coded, raw)) == set()


def test_settings_that_cannot_be_read_have_no_problems() -> None:
    settings: dict[str, Any] = {"config_groups": 5}
    linears = Linears.of(METHODS["compressed-tensors"], settings, {}, {}, {"model_type": "llama"})
    assert vllm_problems(linears) == []


def test_experts_in_one_tensor_are_linears_of_each_expert() -> None:
    """They are floats among the quantized linears of the same layer."""
    bank = "model.layers.0.mlp.experts"
    shapes = {
        f"{bank}.down_proj": (2, 64, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 32),
        "model.layers.0.mlp.gate.weight": (2, 64),
        "model.embed_positions.weight": (128, 64),
    }
    stored = {name: StoredTensor(name, DType.BFLOAT16, shape) for name, shape in shapes.items()}
    coded: dict[str, tuple[int, ...] | None] = dict.fromkeys(
        [f"{bank}.{expert}.gate_proj" for expert in range(2)]
    )
    found = find_linear_shapes(stored, coded, "gemma4_text")
    assert found == {
        "model.layers.0.self_attn.o_proj": (64, 32),
        **dict.fromkeys([f"{bank}.0.down_proj", f"{bank}.1.down_proj", *coded]),
    }
    method = METHODS["compressed-tensors"]
    schemes = {module: INT4 if module in coded else None for module in found}
    settings = written(method, schemes, "gemma4_text").settings
    linears = Linears.of(method, settings, found, coded, {"model_type": "gemma4_text"})
    assert rules_of(linears) == {"expert-schemes"}


GPTQ_SETTINGS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
}
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
PACKED_SETTINGS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "ignore": [],
}
FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def without(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


# Settings, and the rules of the doctor that they break.
VLLM_SETTINGS: list[tuple[dict[str, Any], set[str]]] = [
    (GPTQ_SETTINGS, set()),
    (without(GPTQ_SETTINGS, "desc_act"), {"vllm-settings"}),
    (without(GPTQ_SETTINGS, "sym"), {"vllm-settings"}),
    ({**GPTQ_SETTINGS, "desc_act": True}, {"gptq-order"}),
    ({**GPTQ_SETTINGS, "desc_act": True, "static_groups": True}, {"gptq-order"}),
    ({**GPTQ_SETTINGS, "desc_act": True, "group_size": -1}, set()),
    ({**GPTQ_SETTINGS, "dynamic": {"+:.*nothing.*": {"desc_act": True}}}, {"gptq-order"}),
    (
        {**GPTQ_SETTINGS, "dynamic": {"-:.*nothing.*": {"desc_act": True}, "lm_head": False}},
        set(),
    ),
    (AWQ_SETTINGS, set()),
    (without(AWQ_SETTINGS, "zero_point"), {"vllm-settings"}),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True}, set()),
    (PACKED_SETTINGS, set()),
    ({**PACKED_SETTINGS, "sparsity_config": {}, "kv_cache_scheme": FP8_CACHE}, set()),
    (
        {**PACKED_SETTINGS, "sparsity_config": {"format": "dense", "targets": ["Linear"]}},
        {"vllm-settings"},
    ),
    ({**PACKED_SETTINGS, "kv_cache_scheme": {**FP8_CACHE, "type": "int"}}, {"vllm-settings"}),
    (
        {**PACKED_SETTINGS, "kv_cache_scheme": {**FP8_CACHE, "strategy": "channel"}},
        {"vllm-settings"},
    ),
    (
        {**PACKED_SETTINGS, "kv_cache_scheme": {**FP8_CACHE, "symmetric": False}},
        {"vllm-settings"},
    ),
]


def test_settings_that_vllm_refuses_are_found() -> None:
    for settings, rules in VLLM_SETTINGS:
        method = METHODS[settings["quant_method"]]
        linears = Linears.of(method, settings, {}, {}, {"model_type": "llama"})
        assert rules_of(linears) == rules, settings


@pytest.mark.parametrize(
    ("listed", "rules"),
    [
        (
            [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]],
            set(),
        ),
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], {"vllm-names"}),
        ([["self_attn.q_proj"], ["self_attn.o_proj"]], {"vllm-names"}),
        ([], set()),
    ],
)
def test_lists_of_quantized_modules_decide_as_in_vllm(listed: list[Any], rules: set[str]) -> None:
    coded = in_layers(*ATTENTION)
    settings = {**GPTQ_SETTINGS, "modules_in_block_to_quantize": listed}
    shapes = dict.fromkeys(coded, (64, 64))
    assert (
        rules_of(Linears.of(METHODS["gptq"], settings, shapes, coded, {"model_type": "llama"}))
        == rules
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "falcon_h1"])
def test_globs_in_settings_and_names_are_no_numbers(model_type: str) -> None:
    """Other tools write them under ``ignore``, where vLLM compares them as names."""
    coded = in_layers(*ATTENTION)
    settings = written(METHODS["compressed-tensors"], dict.fromkeys(coded, INT4)).settings.values
    globs = ["*.gate", "gpt_neox.*.gate", "gpt_neox.layers.0.+.*", "+.*"]
    floats = [f"model.layers.{layer}.mamba.in_proj" for layer in ("*", "+", "9" * 5000)]
    settings = {**settings, "ignore": [*floats, *globs]}
    shapes = dict.fromkeys([*coded, *floats], (64, 64))
    linears = Linears.of(
        METHODS["compressed-tensors"], settings, shapes, coded, {"model_type": model_type}
    )
    assert all(problem.location.startswith("model.") for problem in vllm_problems(linears))
    assert linears.names.map_setting("*.gate.1.+") == "*.gate.1.+"


@pytest.mark.parametrize(
    ("model_type", "ignored", "rules"),
    [
        ("qwen3_moe", ["lm_head"], {"vllm-names"}),
        ("qwen3_moe", ["lm_head", "re:.*mlp.gate$"], set()),
        ("qwen2_moe", ["lm_head"], set()),
    ],
)
@pytest.mark.parametrize("method", ["compressed-tensors", "awq"])
def test_routers_that_vllm_quantizes_must_be_named(
    method: str, model_type: str, ignored: list[str], rules: set[str]
) -> None:
    """vLLM builds the routers of Qwen 3 as linears with settings; no tool quantizes them."""
    coded = in_layers(*ATTENTION, *EXPERTS)
    settings = dict(
        written(METHODS[method], dict.fromkeys(coded, INT4), model_type).settings.values
    )
    if method == "awq":
        settings["modules_to_not_convert"] = [
            name.removeprefix("re:.*").removesuffix("$") for name in ignored
        ]
    settings["ignore"] = ignored
    routers = {f"{name}.weight": (2, 64) for name in in_layers("mlp.gate")}
    stored = {name: StoredTensor(name, DType.BFLOAT16, shape) for name, shape in routers.items()}
    shapes = find_linear_shapes(stored, dict.fromkeys(coded, (64, 64)), model_type)
    assert (
        rules_of(Linears.of(METHODS[method], settings, shapes, coded, {"model_type": model_type}))
        == rules
    )
