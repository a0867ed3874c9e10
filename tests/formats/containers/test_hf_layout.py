"""Canonical tensors out of the folders of all families: fused, stacked, in another order, in
part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from families import CASES, let_run, make, opened
from hf_layout import SCHEMES, quantized_on_disk, restacked, same, turn
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import BLOCK
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.source import SourceFile
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice


@pytest.fixture(autouse=True)
def _all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, _ in CASES.values():
        let_run(monkeypatch, kind)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is read of files."""
    sizes: list[int] = []
    plain = SourceFile.read_into

    def counted(self: SourceFile, offset: int, target: memoryview) -> None:
        sizes.append(target.nbytes)
        plain(self, offset, target)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    return sizes


def _expected(folder: Path, checkpoint: HFCheckpoint) -> dict[str, Tensor]:
    """What a folder holds by canonical names, put together by hand."""
    stored = load_file(folder / "model.safetensors")
    config = checkpoint.config
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith("qkv_proj"):
            sizes = [config.num_heads * config.head_dim] + 2 * [
                config.num_kv_heads * config.head_dim
            ]
            for part, rows in zip("qkv", tensor.split(sizes), strict=True):
                found[f"{module.removesuffix('qkv_proj')}{part}_proj.{leaf}"] = rows
        elif module.endswith("mlp.gate_up_proj"):
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[f"{module.removesuffix('gate_up_proj')}{part}_proj.{leaf}"] = rows
        elif module.endswith("mlp.experts"):
            leaf, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
            for expert, matrix in enumerate(tensor):
                linears = {"gate_proj": matrix[..., ::2], "up_proj": matrix[..., 1::2]}
                for linear, part in (
                    linears.items() if leaf == "gate_up_proj" else [("down_proj", matrix)]
                ):
                    found[f"{module}.{expert}.{linear}.{kind}"] = (
                        part.t() if part.ndim == 2 else part
                    )
        elif config.architecture == "nemotron_h":
            found[_nemotron_name(name, config)] = tensor
        elif module.endswith(".shared_mlp.input_linear"):
            mlp = _granite_mlp(config)
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[name.replace("shared_mlp.input_linear", f"{mlp}.{part}_proj")] = rows
        elif module.endswith(".shared_mlp.output_linear"):
            mlp = _granite_mlp(config)
            found[name.replace("shared_mlp.output_linear", f"{mlp}.down_proj")] = tensor
        elif module.endswith(".block_sparse_moe.input_linear"):
            bank = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
            for expert, matrix in enumerate(tensor):
                for part, rows in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    found[f"{bank}.{expert}.{part}_proj.weight"] = rows
        elif module.endswith(".block_sparse_moe.output_linear"):
            bank = name.replace("block_sparse_moe.output_linear.weight", "mlp.experts")
            for expert, matrix in enumerate(tensor):
                found[f"{bank}.{expert}.down_proj.weight"] = matrix
        elif module.endswith(".experts"):
            inputs_first = config.architecture == "llama4_text"
            for expert, matrix in enumerate(tensor):
                parts = {"down_proj": matrix.t() if inputs_first else matrix}
                if leaf == "gate_up_proj":
                    halves = (matrix.t() if inputs_first else matrix).chunk(2)
                    parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
                for linear, part in parts.items():
                    layer = ".".join(module.split(".")[:3])
                    found[f"{layer}.mlp.experts.{expert}.{linear}.weight"] = part
        elif config.architecture in ("cohere2", "llama4_text") and module.endswith(
            ("q_proj", "k_proj")
        ):
            heads = torch.unflatten(tensor, 0, (-1, config.head_dim))
            found[name] = torch.cat((heads[:, ::2], heads[:, 1::2]), dim=1).flatten(0, 1)
        elif config.architecture[:3] == "glm" and module.endswith(("q_proj", "k_proj")):
            half = config.head_dim // 2  # of each head turns, in pairs side by side
            heads = torch.unflatten(tensor, 0, (-1, config.head_dim))
            turned, (first, second) = heads[:, :half], heads[:, half:].chunk(2, dim=1)
            found[name] = torch.cat(
                (turned[:, ::2], first, turned[:, 1::2], second), dim=1
            ).flatten(0, 1)
        else:
            kind = config.architecture
            if kind == "gemma4_text" and config.experts is not None:
                kind = "gemma4_text with experts"
            found[_renamed(name, kind)] = tensor
    return found


def _granite_mlp(config: ModelConfig) -> str:
    return "mlp" if config.experts is None else "mlp.shared_experts"


def _nemotron_name(name: str, config: ModelConfig) -> str:
    """The canonical name of a tensor of Nemotron H, each of whose layers has one branch."""
    changes = {
        "backbone.embeddings": "model.embed_tokens",
        "backbone.norm_f": "model.norm",
        "backbone.": "model.",
        "gate.e_score_correction_bias": "score_correction",
        "fc1_latent_proj": "latent_in_proj",
        "fc2_latent_proj": "latent_out_proj",
    }
    for old, new in changes.items():
        name = name.replace(old, new)
    if ".layers." not in name:
        return name
    layer = config.layers[int(name.split(".")[2])]
    norm = "post_attention_layernorm" if layer.feed_forward else "input_layernorm"
    branch = {"attention": "self_attn", "mamba2": "mamba", "none": "mlp"}[layer.mixer]
    head, _, tail = name.partition(".mixer.")
    return f"{head}.{branch}.{tail}" if tail else name.replace(".norm.", f".{norm}.")


_OUTPUT_NORMS = {
    "post_attention_layernorm": "attention_output_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}


_LFM2 = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward.expert_bias": "mlp.score_correction",
    "feed_forward": "mlp",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


def _renamed(name: str, kind: str) -> str:
    changes = {
        "mixtral": {
            "block_sparse_moe": "mlp",
            ".w1.": ".gate_proj.",
            ".w2.": ".down_proj.",
            ".w3.": ".up_proj.",
        },
        "gpt_oss": {"mlp.router": "mlp.gate"},
        "qwen2_moe": {"mlp.shared_expert.": "mlp.shared_experts."},
        "qwen3_next": {"mlp.shared_expert.": "mlp.shared_experts."},
        "qwen3_5_moe_text": {"mlp.shared_expert.": "mlp.shared_experts."},
        "glm4": {
            "post_self_attn_layernorm": "attention_output_layernorm",
            "post_mlp_layernorm": "mlp_output_layernorm",
        },
        "gemma2": {**_OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"},
        "exaone4": _OUTPUT_NORMS,
        "hunyuan_v1_dense": {"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
        "gemma4_text with experts": {
            "post_feedforward_layernorm_1": "mlp.shared_output_layernorm",
            "post_feedforward_layernorm_2": "mlp.experts_output_layernorm",
            "pre_feedforward_layernorm_2": "mlp.experts_layernorm",
            "pre_feedforward_layernorm": "mlp.shared_layernorm",
            **_OUTPUT_NORMS,
            ".mlp.gate_proj": ".mlp.shared_experts.gate_proj",
            ".mlp.up_proj": ".mlp.shared_experts.up_proj",
            ".mlp.down_proj": ".mlp.shared_experts.down_proj",
            "router.proj": "mlp.gate",
            "router.scale": "mlp.router_scale",
            "router.per_expert_scale": "mlp.expert_scales",
            "layer_scalar": "layer_scale",
        },
        "llama4_text": {
            "feed_forward.router": "mlp.gate",
            "feed_forward.shared_expert.": "mlp.shared_experts.",
            "feed_forward": "mlp",
        },
        "gemma4_text": {
            **_OUTPUT_NORMS,
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "layer_scalar": "layer_scale",
            "per_layer_input_gate": "layer_input.gate",
            "post_per_layer_input_norm": "layer_input.norm",
            "embed_tokens_per_layer": "layer_inputs.embedding",
            "per_layer_model_projection": "layer_inputs.projection",
            "per_layer_projection_norm": "layer_inputs.norm",
            "per_layer_projection": "layer_input.projection",
        },
        "lfm2": _LFM2,
        "lfm2_moe": _LFM2,
        "bamba": {
            "final_layernorm": "norm",
            "pre_ff_layernorm": "post_attention_layernorm",
            "feed_forward": "mlp",
        },
        "granitemoehybrid": {"block_sparse_moe.router.layer": "mlp.gate"},
        "deepseek_v3": {"mlp.gate.e_score_correction_bias": "mlp.score_correction"},
        "olmo2": _OUTPUT_NORMS,
        "olmo3": _OUTPUT_NORMS,
        "gemma3_text": {**_OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"},
    }
    for old, new in changes.get(kind, {}).items():
        if old in name:
            name = name.replace(old, new)
    return name


@pytest.mark.parametrize("case", CASES)
def test_canonical_tensors_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    folder = oracle.save(make(case), tmp_path)
    checkpoint = opened(folder)
    expected = _expected(folder, checkpoint)
    assert set(checkpoint.names()) == set(expected)
    for name in checkpoint.names():
        value = checkpoint.load(name)
        assert isinstance(value, Tensor)
        assert value.is_contiguous()
        assert torch.equal(value, expected[name]), name
        assert checkpoint.info(name).shape == tuple(value.shape)
        assert checkpoint.count_stored_bytes(name) == value.nbytes


def _parts(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    rows = shape[0]
    yield TensorSlice(0, ((rows // 2, rows),))
    yield TensorSlice(0, ((1, rows - 1), (0, 1)))
    if len(shape) == 2:
        yield TensorSlice(1, ((8, shape[1] // 8 * 8),))


@pytest.mark.parametrize("case", ["phi3", "gpt-oss", "mixtral"])
def test_parts_of_fused_and_stacked_tensors(case: str, tmp_path: Path) -> None:
    checkpoint = opened(oracle.save(make(case), tmp_path))
    for name in checkpoint.names():
        whole = checkpoint.load(name)
        assert isinstance(whole, Tensor)
        for part in _parts(tuple(whole.shape)) if whole.shape[0] > 2 else ():
            read = checkpoint.load(name, part)
            assert isinstance(read, Tensor)
            assert torch.equal(read, part.of(whole)), (name, part)


@pytest.mark.parametrize(
    ("case", "name", "maximum"),
    [
        ("phi3", "self_attn.k_proj.weight", 16 * 64 * 4),
        ("mixtral", "mlp.experts.2.up_proj.weight", 96 * 64 * 4),
        ("gpt-oss", "mlp.experts.2.down_proj.weight", 96 * 64 * 4),
        (
            "gpt-oss",
            "mlp.experts.2.up_proj.weight",
            2 * 96 * 64 * 4,
        ),  # its rows alternate with those of gate
    ],
)
def test_no_more_is_read_than_must_be(
    case: str, name: str, maximum: int, tmp_path: Path, bytes_read: list[int]
) -> None:
    checkpoint = opened(oracle.save(make(case), tmp_path))
    bytes_read.clear()
    checkpoint.load(BLOCK.format(layer=1) + name)
    assert 0 < sum(bytes_read) <= maximum


def _canonical(checkpoint: HFCheckpoint) -> dict[str, Any]:
    return {name: checkpoint.load(name) for name in checkpoint.names()}


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "gpt-oss"]
)
def test_experts_stacked_and_apart_are_the_same(
    case: str, tmp_path: Path, bytes_read: list[int]
) -> None:
    own = _canonical(opened(oracle.save(make(case), tmp_path / "own")))
    stacked = opened(restacked(case, tmp_path / "stacked"))
    bytes_read.clear()
    gate = stacked.load(BLOCK.format(layer=2) + "mlp.experts.3.gate_proj.weight")
    assert sum(bytes_read) <= gate.nbytes * (2 if case == "gpt-oss" else 1)
    assert torch.equal(_table(_canonical(stacked)), _table(own))
    if case != "gpt-oss":
        turned = opened(restacked(case, tmp_path / "turned", transposed=True))
        assert torch.equal(_table(_canonical(turned)), _table(own))


def test_each_layers_stacked_experts_lie_as_its_own_shapes_say(tmp_path: Path) -> None:
    """A square one like the other of its layer, which is not."""
    model = make("qwen3-moe", moe_intermediate_size=64)
    own = _canonical(opened(oracle.save(model, tmp_path / "own")))
    folder = oracle.save(model, tmp_path / "mixed", save_original_format=False)

    def turn(stored: dict[str, Tensor]) -> None:
        for name in [
            name for name, tensor in stored.items() if ".layers.1." in name and tensor.ndim == 3
        ]:
            stored[name] = stored[name].transpose(1, 2).contiguous()

    assert torch.equal(_table(_canonical(opened(_edited(folder, turn)))), _table(own))


def test_experts_with_canonical_names_are_read(tmp_path: Path) -> None:
    own = opened(oracle.save(make("mixtral"), tmp_path / "own"))
    values = _canonical(own)
    oracle.copy(tmp_path / "own", tmp_path / "canonical")
    save_file(values, tmp_path / "canonical" / "model.safetensors", {"format": "pt"})
    assert torch.equal(_table(_canonical(opened(tmp_path / "canonical"))), _table(values))


def _table(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[name].flatten() for name in sorted(values)])


def test_a_square_down_projection_is_turned_as_the_family_has_it(tmp_path: Path) -> None:
    model = make("gpt-oss", intermediate_size=64)
    checkpoint = opened(oracle.save(model, tmp_path))
    down = model.state_dict()["model.layers.2.mlp.experts.down_proj"]
    assert down.shape == (4, 64, 64)
    read = checkpoint.load(BLOCK.format(layer=2) + "mlp.experts.1.down_proj.weight")
    assert isinstance(read, Tensor)
    assert torch.equal(read, down[1].t())


def _edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    stored = load_file(file)
    edit(stored)
    save_file(stored, file, {"format": "pt"})
    return folder


_MIXTRAL = "model.layers.1.block_sparse_moe.experts."


def test_a_missing_expert_is_named_as_it_is_called_on_disk(tmp_path: Path) -> None:
    folder = _edited(
        oracle.save(make("mixtral"), tmp_path), lambda stored: stored.pop(_MIXTRAL + "3.w1.weight")
    )
    name = f"'{_MIXTRAL}3.w1.weight'"
    with raises(CheckpointError, name, path=folder, found="59 of 60 tensors"):
        opened(folder)


def test_one_expert_too_many_is_refused(tmp_path: Path) -> None:
    def add(stored: dict[str, Tensor]) -> None:
        stored[_MIXTRAL + "4.w1.weight"] = stored[_MIXTRAL + "3.w1.weight"].clone()

    folder = _edited(oracle.save(make("mixtral"), tmp_path), add)
    name = f"'{_MIXTRAL}4.w1.weight'"
    with raises(CheckpointError, name, path=folder, found="expert 4", expected="experts 0 to 3"):
        opened(folder)


def test_experts_in_two_forms_are_refused(tmp_path: Path) -> None:
    def add(stored: dict[str, Tensor]) -> None:
        stored["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 64, 96)

    folder = _edited(oracle.save(make("mixtral"), tmp_path), add)
    found = f"'{_MIXTRAL}0.w1' and 'model.layers.1.mlp.experts.down_proj'"
    with raises(CheckpointError, path=folder, found=found):
        opened(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_float_type_is_that_of_the_tensors_where_none_is_said(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = oracle.save(make("llama").to(dtype), tmp_path)
    oracle.edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    assert opened(folder).config.dtype == str(dtype).removeprefix("torch.")


def test_a_stack_of_too_few_experts_is_misshapen(tmp_path: Path) -> None:
    def cut(stored: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.down_proj"
        stored[name] = stored[name][:3].clone()

    folder = _edited(restacked("mixtral", tmp_path), cut)
    with raises(CheckpointError, "experts.down_proj'", found=[3, 64, 96]):
        opened(folder)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_fused_modules_are_split_as_they_are_quantized(scheme: QuantScheme, tmp_path: Path) -> None:
    folder = oracle.save(make("phi3"), tmp_path)
    modules = quantized_on_disk(folder, scheme)
    checkpoint = opened(folder)
    block = BLOCK.format(layer=1)
    fused = modules[block + "self_attn.qkv_proj"]
    for name, start, stop in (("q", 0, 64), ("k", 64, 80), ("v", 80, 96)):
        own, canonical = fused.rows(start, stop), f"{block}self_attn.{name}_proj.weight"
        assert checkpoint.info(canonical).scheme == scheme
        assert same(checkpoint.load(canonical), own)
        for part in (
            TensorSlice(0, ((8, 16),)),
            TensorSlice(0, ((8, 16), (0, 8))),
            TensorSlice(1, ((32, 64),)),
        ):
            assert same(checkpoint.load(canonical, part), part.of_weight(own))
    names = [f"{block}mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert [
        same(checkpoint.load(name), modules[block + "mlp.gate_up_proj"].rows(*rows))
        for name, rows in zip(names, [(0, 96), (96, 192)], strict=True)
    ] == [True, True]
    stored = sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "gate_up" in name
    )
    assert stored == 3 * sum(checkpoint.count_stored_bytes(name) for name in names)


def test_experts_are_modules_by_their_names_on_disk(tmp_path: Path) -> None:
    folder = oracle.save(make("mixtral"), tmp_path)
    scheme = QuantScheme(4, 32)
    modules = quantized_on_disk(folder, scheme)
    checkpoint = opened(folder)
    read = checkpoint.load(BLOCK.format(layer=1) + "mlp.experts.2.down_proj.weight")
    assert same(read, modules[_MIXTRAL + "2.w2"])
    assert checkpoint.info(BLOCK.format(layer=1) + "mlp.gate.weight").scheme is None


@pytest.mark.parametrize("partial", [None, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rows_are_brought_into_canonical_order(
    interleaved: bool, partial: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"attention_bias": True, "head_dim": 8}
    folder = oracle.save(oracle.make("qwen3", **changes), tmp_path)
    stored = load_file(folder / "model.safetensors")
    turn(monkeypatch, interleaved=interleaved, partial=partial)
    checkpoint = opened(folder)
    turned = partial or 8
    pairs = [
        (2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2) for i in range(turned // 2)
    ]
    pairs += [(turned + i, turned + (8 - turned) // 2 + i) for i in range((8 - turned) // 2)]
    order = [first for first, _ in pairs] + [second for _, second in pairs]
    for name in checkpoint.names():
        expected = stored[name]
        if any(f"{kind}_proj" in name or f"{kind}_norm" in name for kind in "qk"):
            heads = [head * 8 + row for head in range(expected.shape[0] // 8) for row in order]
            expected = expected[heads]
        read = checkpoint.load(name)
        assert isinstance(read, Tensor)
        assert torch.equal(read, expected), name
        for part in _parts(tuple(expected.shape)):
            piece = checkpoint.load(name, part)
            assert isinstance(piece, Tensor)
            assert torch.equal(piece, part.of(expected)), (name, part)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rotary_rows_of_quantized_modules(
    scheme: QuantScheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = oracle.save(oracle.make("qwen3", head_dim=8), tmp_path)
    modules = quantized_on_disk(folder, scheme)
    turn(monkeypatch, interleaved=True, partial=None)
    name = BLOCK.format(layer=0) + "self_attn.k_proj"
    heads = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    index = torch.cat((heads, heads + 8))
    own = modules[name]
    zero = None if own.zero is None else own.zero[index]
    expected = QuantTensor(own.codes[index], own.scale[index], zero, scheme)
    checkpoint = opened(folder)
    assert same(checkpoint.load(name + ".weight"), expected)
    for part in (
        TensorSlice(0, ((8, 16),)),
        TensorSlice(0, ((3, 12),)),
        TensorSlice(1, ((32, 64),)),
    ):
        assert same(checkpoint.load(name + ".weight", part), part.of_weight(expected))


def test_a_config_that_ignores_modules_means_their_names_on_disk(tmp_path: Path) -> None:
    folder = oracle.save(make("phi3"), tmp_path)
    quantized_on_disk(folder, QuantScheme(8, None))
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["ignore"].append(BLOCK.format(layer=1) + "mlp.gate_up_proj")
    oracle.edit_json(folder / "config.json", quantization_config=raw["quantization_config"])
    with raises(UnsupportedError, "1.mlp.gate_up_proj.weight_packed"):
        opened(folder)


def test_a_square_projection_is_turned_like_the_others(tmp_path: Path) -> None:
    model = make("gpt-oss", intermediate_size=64)
    folder = oracle.save(model, tmp_path)

    def turned(stored: dict[str, Tensor]) -> None:
        for name, tensor in stored.items():
            if tensor.ndim == 3:
                stored[name] = tensor.transpose(1, 2).contiguous()

    own = _canonical(opened(folder))
    _edited(folder, turned)
    assert torch.equal(_table(_canonical(opened(folder))), _table(own))
