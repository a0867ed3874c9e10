"""Families with mixtures of experts: what is written and rounded, against transformers; what is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, NonFiniteError, QuantkitError, RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.model.load import load_model
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

INT4, INT8 = QuantScheme(4, 32), QuantScheme(8, None)
FAMILIES = [
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "gpt-oss",
    "lfm2-moe",
    "qwen3-5-moe",
    "qwen3-next",
    "granitemoehybrid-moe",
    "nemotron-h-moe",
    "gemma4-experts",
    "llama4",
]
# Their experts are one tensor on disk, which transformers does not read quantized.
STACKED = ("gpt-oss", "granitemoehybrid-moe", "gemma4-experts")
EXPERTS = [case for case in CASES if case.startswith(tuple(FAMILIES))]
_EVEN = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}


def _saved(case: str, folder: Path, **changes: Any) -> Path:
    kind, settings = CASES[case]
    even = {key: value for key, value in _EVEN.items() if key in settings}
    return oracle.save(oracle.make(kind, **{**settings, **even, **changes}), folder)


@torch.inference_mode()
def _logits(folder: Path, backend: str | None = None) -> Tensor:
    tokens = oracle.random_tokens(40, batch=2)
    found: Tensor = load_model(folder, dtype=torch.float32, backend=backend)(
        tokens, torch.arange(40)
    )
    return found


def _theirs(folder: Path) -> Tensor:
    return oracle.logits(oracle.load(folder), oracle.random_tokens(40, batch=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", EXPERTS)
def test_transformers_reads_what_is_written(case: str, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    source = oracle.save(oracle.make(kind, **settings), tmp_path / "source")
    quantkit.convert(source, tmp_path / "made", source_check=False)
    assert torch.equal(_theirs(tmp_path / "made"), _theirs(source))
    assert open_checkpoint(tmp_path / "made").config == open_checkpoint(source).config


def _as_floats(quantized: Path, source: Path, folder: Path) -> Path:
    """A quantized model as its family saves floats."""
    result = open_checkpoint(quantized)
    if result.config.architecture in (
        "lfm2_moe",
        "granitemoehybrid",
        "nemotron_h",
        "gemma4_text",
        "llama4_text",
    ):
        # Most of its names on disk are not canonical.
        return quantkit.convert(
            quantized, folder / "floats", dequantize=True, source_check=False
        ).path
    values = {name: result.load(name) for name in result.names()}
    floats = {
        name: one.dequantize() if isinstance(one, QuantTensor) else one
        for name, one in values.items()
    }
    if result.config.architecture in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        floats = {
            name.replace("shared_experts", "shared_expert"): one for name, one in floats.items()
        }
    oracle.copy(source, folder / "apart")
    save_file(floats, folder / "apart" / "model.safetensors", {"format": "pt"})
    quantkit.convert(folder / "apart", folder / "floats", source_check=False)
    return folder / "floats"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
@pytest.mark.parametrize("case", FAMILIES)
def test_rounded_models_are_those_of_transformers(case: str, scheme: str, tmp_path: Path) -> None:
    source = _saved(case, tmp_path / "source")
    quantkit.quantize(
        source, tmp_path / "made", scheme, method="rtn", accept_quality_loss=scheme != "int8"
    )
    found = _logits(tmp_path / "made", "reference")
    assert (found - _theirs(_as_floats(tmp_path / "made", source, tmp_path))).abs().max() < 1e-4
    assert (found - _logits(tmp_path / "made")).abs().max() < 0.05  # kernels round activations
    loads = "transformers" in open_checkpoint(tmp_path / "made").readers()
    assert loads == (case not in STACKED)
    if loads:
        assert (found - _theirs(tmp_path / "made")).abs().max() < 1e-4


def test_experts_of_gpt_oss_are_read_as_mlx_lm_names_them(tmp_path: Path) -> None:
    """Their modules have the names of the tensors that hold all floats."""
    source = _saved("gpt-oss", tmp_path / "source", intermediate_size=64)
    made = quantkit.quantize(
        source, tmp_path / "made", "int4-g32", to="mlx", method="rtn", accept_quality_loss=True
    )
    names = load_file(made.path / "model.safetensors")
    assert "model.layers.0.mlp.experts.down_proj.weight" in names
    twin = quantkit.quantize(
        source, tmp_path / "twin", "int4-g32", method="rtn", accept_quality_loss=True
    )
    assert (_logits(made.path, "reference") - _logits(twin.path, "reference")).abs().max() < 0.05


MIXES = {
    "attention": (("*self_attn*", INT8),),
    "attention kept": (("*self_attn*", None),),
    "experts kept": (("*.experts.*", None),),
    "shared kept": (("*.shared_expert.*", None),),
    "down": (("*down_proj", INT8),),
    "one expert": (("*.experts.1.*", INT8),),
    "one kept": (("*.experts.1.*", None),),
    "one layer kept": (("*.layers.1.mlp.experts.*", None),),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mix", MIXES)
def test_a_note_names_experts_that_transformers_does_not_load(mix: str, tmp_path: Path) -> None:
    """transformers 5.23 loads experts of several schemes without an error, and wrong; floats
    among them not at all.
    """
    source = _saved("qwen2-moe", tmp_path / "source")
    recipe = Recipe(INT4, tuple(Override(*one) for one in MIXES[mix]))
    options = QuantizeOptions(source, tmp_path / "made", recipe, method="rtn")
    notes = prepare(options).formats.first.notes
    quantkit.quantize(source, tmp_path / "made", recipe, method="rtn", accept_quality_loss=True)
    loads = "transformers" in open_checkpoint(tmp_path / "made").readers()
    assert loads == (mix in {"attention", "attention kept", "shared kept"})
    assert loads != any(
        re.search("transformers does not load (float )?experts", note) for note in notes
    )
    if loads:
        assert (
            _logits(tmp_path / "made", "reference") - _theirs(tmp_path / "made")
        ).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("case", "count"),
    [("mixtral", 3), ("qwen2-moe", 6), ("qwen3-moe-dense-layer", 2), ("gpt-oss", 3)],
)
def test_routers_and_shared_gates_stay_floats(case: str, count: int, tmp_path: Path) -> None:
    source = open_checkpoint(_saved(case, tmp_path / "source"))
    recipe = Recipe(INT4, (Override("model.layers.*", INT8),))
    quantkit.quantize(
        source.path, tmp_path / "made", recipe, method="rtn", accept_quality_loss=True
    )
    made = open_checkpoint(tmp_path / "made")
    routers = [
        name
        for name in made.names()
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    ]
    assert len(routers) == count
    for name in routers:
        assert made.info(name).scheme is None
        assert torch.equal(made.load(name), source.load(name))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("mixtral", "*.block_sparse_moe.gate"),
        ("qwen2-moe", "*.shared_expert_gate"),
        ("olmoe", "*.1.mlp.gate"),
        ("gpt-oss", "*.router"),
    ],
)
def test_a_recipe_may_keep_a_router_and_not_quantize_it(
    case: str, pattern: str, tmp_path: Path
) -> None:
    source = _saved(case, tmp_path / "source")
    with raises(RequestError, found=f"'{pattern}'"):
        quantkit.quantize(source, tmp_path / "made", Recipe(INT8, (Override(pattern, INT8),)))
    assert not (tmp_path / "made").exists()
    quantkit.quantize(source, tmp_path / "made", "int8", keep=[pattern])


def _edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    stored = load_file(file)
    edit(stored)
    save_file(stored, file, {"format": "pt"})
    return folder


_LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mixtral", "block_sparse_moe.experts.5.w2.weight"),
        ("mixtral", "block_sparse_moe.gate.weight"),
        ("qwen2-moe", "mlp.shared_expert.up_proj.weight"),
        ("qwen2-moe", "mlp.shared_expert_gate.weight"),
        ("qwen3-moe", "mlp.experts.0.gate_proj.weight"),
        ("olmoe", "self_attn.k_norm.weight"),
        ("gpt-oss", "mlp.experts.down_proj"),
        ("gpt-oss", "mlp.experts.gate_up_proj_bias"),
        ("gpt-oss", "self_attn.sinks"),
        ("gpt-oss", "mlp.router.bias"),
    ],
)
def test_a_missing_tensor_is_named(case: str, name: str, tmp_path: Path) -> None:
    folder = _edited(_saved(case, tmp_path), lambda stored: stored.pop(_LAYER + name))
    with raises(CheckpointError, f"'{_LAYER}{name}'", path=folder):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("case", "name", "at", "reported"),
    [
        (
            "mixtral",
            "block_sparse_moe.experts.5.w2.weight",
            (3, 4),
            "mlp.experts.5.down_proj.weight",
        ),
        ("qwen2-moe", "mlp.shared_expert_gate.weight", (0, 1), "mlp.shared_expert_gate.weight"),
        ("qwen3-moe", "mlp.gate.weight", (1, 1), "mlp.gate.weight"),
        ("gpt-oss", "mlp.experts.gate_up_proj", (2, 7, 5), "mlp.experts.2.up_proj.weight"),
        ("gpt-oss", "mlp.router.bias", (0,), "mlp.gate.bias"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_experts_and_routers_is_refused_by_name(
    case: str, name: str, at: tuple[int, ...], reported: str, value: float, tmp_path: Path
) -> None:
    def spoil(stored: dict[str, Tensor]) -> None:
        stored[_LAYER + name][at] = value

    folder = _edited(_saved(case, tmp_path / "source"), spoil)
    with raises(NonFiniteError, f"{_LAYER}{reported}"):
        quantkit.quantize(folder, tmp_path / "made", "int8", source_check=False)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("case", "changes", "name"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "7"),
        ("qwen3-moe", {"num_experts": 8}, "num_local_experts"),
        ("qwen3-moe", {"mlp_only_layers": [0.5]}, "'mlp_only_layers'"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step'"),
        ("qwen2-moe", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ("olmoe", {"clip_qkv": -1}, "'clip_qkv'"),
        ("gpt-oss", {"swiglu_limit": "7"}, "'swiglu_limit'"),
        ("gpt-oss", {"num_local_experts": 4096 * 2}, "8192"),
        ("mixtral", {"hidden_act": "relu"}, "relu"),
    ],
)
def test_configs_are_read_strictly(
    case: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = _saved(case, tmp_path)
    oracle.edit_json(folder / "config.json", **changes)
    with raises(QuantkitError, name, path=folder / "config.json"):
        open_checkpoint(folder)


def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    folder = _saved("gpt-oss", tmp_path, head_dim=64, sliding_window=128)
    expected = open_checkpoint(folder).config
    raw = json.loads((folder / "config.json").read_text())
    absent = dict.fromkeys(
        [
            "swiglu_alpha",
            "swiglu_limit",
            "layer_types",
            "sliding_window",
            "rope_parameters",
            "attention_bias",
            "head_dim",
        ]
    )
    assert set(absent) <= set(raw)
    oracle.edit_json(folder / "config.json", **absent)
    assert open_checkpoint(folder).config == expected
    folder = _saved("qwen3-moe-dense-layer", tmp_path / "qwen", mlp_only_layers=[])
    expected = open_checkpoint(folder).config
    gone = ["decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "attention_bias"]
    oracle.edit_json(folder / "config.json", **dict.fromkeys(gone))
    assert open_checkpoint(folder).config == expected


@pytest.mark.slow
def test_experts_are_reported(tmp_path: Path) -> None:
    source = _saved("qwen3-moe-dense-layer", tmp_path / "source")
    quantkit.quantize(source, tmp_path / "int4", "int4-g32", method="rtn", accept_quality_loss=True)
    hidden, attention, expert = 64, 2 * 64 * 128 + 2 * 64 * 32 + 2 * 16, 3 * 64 * 64
    rest = 96 * hidden + hidden + 3 * (attention + 2 * hidden) + 3 * 64 * 96 + 2 * 6 * hidden
    found = quantkit.inspect(tmp_path / "int4")
    assert (found.experts, found.experts_per_token) == (6, 2)
    assert (found.parameters, found.active_parameters) == (rest + 12 * expert, rest + 4 * expert)
    met = found.active_parameters / 1e6
    assert (
        f"  experts: 6 in a layer, 2 for a token, which meets {1e3 * met:.2f}K parameters"
        in found.lines()
    )
    readme = (tmp_path / "int4" / "README.md").read_text()
    assert (
        f"| experts | 6 in a layer, 2 for each token, which uses {met:.3g} million weights |"
        in readme
    )
    assert (
        "| kept as floats | embedding (also the output head), norms and routers (float32) |"
        in readme
    )
    assert "| transformers 5.23 with compressed-tensors 0.20 | yes |" in readme
    assert "| vLLM 0.32 on a CPU with AVX-512 | not tried with experts |" in readme
    recipe = Recipe(
        INT4,
        (
            Override("*down_proj", INT8),
            Override("model.layers.2.*", INT4),
            Override("*.0.*.experts.1.up*", INT8),
        ),
    )
    quantkit.quantize(source, tmp_path / "mixed", recipe, method="rtn", accept_quality_loss=True)
    readme = (tmp_path / "mixed" / "README.md").read_text()
    assert (
        "8 linear layers: `mlp.experts.*.down_proj`, `mlp.experts.1.up_proj` of layer 0;"
        " `mlp.down_proj` of layer 1 |" in readme
    )
    assert (
        "transformers 5.23 with compressed-tensors 0.20 | no: it does not load experts of several"
        " schemes |" in readme
    )
    assert "AutoModelForCausalLM" not in readme
    assert "library_name" not in readme
    dense = quantkit.inspect(oracle.save(oracle.make("llama"), tmp_path / "dense"))
    assert dense.experts == dense.experts_per_token == 0
    assert dense.active_parameters == dense.parameters
    assert not any(line.startswith("  experts") for line in dense.lines())


def test_of_equal_experts_those_of_the_lower_numbers_are_chosen(tmp_path: Path) -> None:
    """As by the kernels; a router of zeros is what mixtures begin with that are made of one
    model.
    """
    experts = load_model(_saved("qwen3-moe", tmp_path), dtype=torch.float32).model.layers[0].mlp
    with torch.no_grad():
        experts.gate.weight.zero_()
    weights, chosen = experts.route(torch.ones(2, 5, 64))
    assert chosen.is_contiguous()
    assert chosen.unique(dim=1).tolist() == [[[0, 1]]] * 2
    torch.testing.assert_close(weights.sum(-1), torch.full((2, 5), weights[0, 0].sum().item()))
