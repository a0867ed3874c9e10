"""`lora` of `convert` and `quantize`: adapters that PEFT makes, against PEFT's own merge."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked
import lora
import oracle
import pytest
import torch
from command import Capture, run
from partial import contents, interrupted
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    NonFiniteError,
    QuantkitError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.lora.adapter import Adapter
from quantkit.formats.lora.adapter_config import KNOWN, read_config
from quantkit.formats.lora.merged_checkpoint import MergedCheckpoint
from quantkit.jobs.output import writer as output
from quantkit.tensors import qtensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.text.tokenizer import load_tokenizer

UNCHECKED: Any = {"source_check": False}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank and alpha": {"r": 3, "lora_alpha": 7},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_proj": 6},
        "alpha_pattern": {
            "proj": 99,
            "layers.1": 99,
            r"layers\.[02]\.self_attn\.q_proj": 11,
            "down_proj": 3,
        },
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "dora": {"use_dora": True, "target_modules": [*ATTENTION, "up_proj"]},
    "dora and rslora": {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 9}},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "dora of the embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": 0, "layers_pattern": "l.*s"},
    "exclude_modules": {"exclude_modules": ["layers.0.self_attn.q_proj", "down_proj"]},
    "exclude_modules by expression": {"exclude_modules": r".*\.1\..*"},
    "fan_in_fan_out": {"fan_in_fan_out": True, "target_modules": [*ATTENTION, "up_proj"]},
    "fan_in_fan_out and dora": {"fan_in_fan_out": True, "use_dora": True},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "expression": {"target_modules": r".*\.[01]\.self_attn\.(q|o)_proj"},
    "bin": {"safetensors": False},
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model: some of its linears have biases."""
    return oracle.save(oracle.make("qwen2"), tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model whose head is its embedding."""
    return oracle.save(
        oracle.make("llama", tie_word_embeddings=True), tmp_path_factory.mktemp("tied") / "base"
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], ulps: float = 4) -> None:
    """Compare all tensors, in units of the last place of the largest value of a row."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        spacing = torch.finfo(value.dtype).eps * value.abs().amax(-1, keepdim=True).float()
        assert ((found[name].float() - value.float()).abs() <= ulps * spacing).all(), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_equals_that_of_peft(kind: str, base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter", **ADAPTERS[kind])
    if "fan_in_fan_out" in kind:
        _edited(fan_in_fan_out=True)(adapter)  # some versions of PEFT save what the user said
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    expected = lora.merged(base, adapter)
    require_close(tensors(made.path), expected)
    before = tensors(base)
    assert any(not torch.equal(before[name], value) for name, value in expected.items())


def test_bfloat16_is_rounded_once_as_by_peft(tmp_path: Path) -> None:
    base = oracle.save(oracle.make("qwen2").to(torch.bfloat16), tmp_path / "base")
    adapter = lora.save_adapter(base, tmp_path / "adapter", use_rslora=True, bias="all")
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), lora.merged(base, adapter, torch.bfloat16), ulps=0)
    made = quantkit.convert(base, tmp_path / "floats", lora=adapter, dtype="fp32", **UNCHECKED)
    require_close(tensors(made.path), lora.merged(base, adapter))


def test_an_adapter_in_float64_is_read_as_by_peft(base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    _stored(lambda all: all.update({name: value.double() for name, value in all.items()}))(adapter)
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), lora.merged(base, adapter))


def test_adapters_are_added_with_their_weights(base: Path, tmp_path: Path, capfd: Capture) -> None:
    one = lora.save_adapter(base, tmp_path / "one", r=2)
    two = lora.save_adapter(
        base, tmp_path / "two", r=5, target_modules=["q_proj", "embed_tokens"], seed=4
    )
    expected = lora.merged_with_weights(base, {one: 0.7, two: -0.3})
    made = quantkit.convert(base, tmp_path / "out", lora={one: 0.7, two: -0.3}, **UNCHECKED)
    require_close(tensors(made.path), expected)
    assert [(entry["name"], entry["weight"]) for entry in made.manifest["options"]["lora"]] == [
        ("one", 0.7),
        ("two", -0.3),
    ]
    given = ["--lora", f"{one}=0.7", "--lora", f"{two}=-0.3", "--no-source-check"]
    code, _, err = run(capfd, "convert", base, tmp_path / "by-command", *given)
    assert code == 0, err
    assert contents(tmp_path / "by-command") == contents(made.path)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_tied_head_that_an_adapter_replaces_becomes_separate(
    module: str, tied: Path, tmp_path: Path
) -> None:
    adapter = lora.save_adapter(tied, tmp_path / "adapter", modules_to_save=[module])
    made = quantkit.convert(tied, tmp_path / "out", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), lora.merged(tied, adapter))
    assert json.loads((made.path / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("head becomes a separate tensor" in note for note in made.notes)
    source, result = (
        MergedCheckpoint(open_checkpoint(tied), [Adapter(adapter)]),
        open_checkpoint(made.path),
    )
    assert sorted(source.names()) == sorted(result.names())
    assert source.count_stored_bytes("lm_head.weight") == result.count_stored_bytes(
        "lm_head.weight"
    )


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_tied_model_predicts_what_its_adapter_does(
    module: str, tied: Path, tmp_path: Path
) -> None:
    """PEFT's merge would change both the embedding and the head; its adapter changes one of
    them.
    """
    adapter = lora.save_adapter(tied, tmp_path / "adapter", target_modules=["q_proj", module])
    made = quantkit.convert(tied, tmp_path / "out", lora=adapter, **UNCHECKED)
    tokens = oracle.random_tokens(12)
    expected = oracle.logits(lora.loaded(tied, adapter), tokens)
    assert torch.allclose(oracle.logits(oracle.load(made.path), tokens), expected, atol=1e-4)


FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    "glm": {"target_modules": ["q_proj", "k_proj", "gate_up_proj"], "bias": "all"},
    "gemma2": {"modules_to_save": ["input_layernorm"]},
    "qwen3_moe": {"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["q_norm"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_other_names_or_rows_are_merged(kind: str, tmp_path: Path) -> None:
    head = {} if kind == "phi3" else {"head_dim": 16}
    base = oracle.save(oracle.make(kind, **head), tmp_path / "base")
    adapter = lora.save_adapter(base, tmp_path / "adapter", **FAMILIES[kind])
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    found = {name: value.detach() for name, value in oracle.load(made.path).state_dict().items()}
    require_close(found, lora.merged(base, adapter))


def test_experts_that_an_adapter_names_one_by_one_are_merged(tmp_path: Path) -> None:
    """As PEFT saved adapters of experts when transformers kept each expert separately."""
    base = oracle.save(
        oracle.make("qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2),
        tmp_path / "base",
    )
    adapter = lora.save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    path, weights = adapter / "adapter_model.safetensors", tensors(base)
    stored, generator = load_file(path), torch.Generator().manual_seed(1)
    for name in [name for name in weights if ".experts." in name]:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        rows, columns = weights[name].shape
        stored[f"{module}.lora_A.weight"] = 0.1 * torch.randn(4, columns, generator=generator)
        stored[f"{module}.lora_B.weight"] = 0.1 * torch.randn(rows, 4, generator=generator)
    save_file(stored, path, metadata={"format": "pt"})
    _edited(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])(adapter)
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    found = {name: value.detach() for name, value in oracle.load(made.path).state_dict().items()}
    require_close(found, lora.merged(base, adapter))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert not torch.equal(tensors(made.path)[name], weights[name])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "all"}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
        ("opt", {"target_modules": ["q_proj", "fc1"], "use_dora": True}),
        ("opt", {"target_modules": ["q_proj", "fc1"], "fan_in_fan_out": True}),
    ],
)
def test_models_known_by_their_tensors_are_merged(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = oracle.save(oracle.make(kind), tmp_path / "base")
    adapter = lora.save_adapter(base, tmp_path / "adapter", **settings)
    _edited(fan_in_fan_out=settings.get("fan_in_fan_out", False))(adapter)
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, tensors_only=True, **UNCHECKED)
    found = {name: value.detach() for name, value in oracle.load(made.path).state_dict().items()}
    require_close(found, lora.merged(base, adapter))


@pytest.mark.slow
def test_a_model_with_conv1d_is_merged_before_it_is_quantized(tmp_path: Path) -> None:
    base = oracle.save(oracle.make("gpt2"), tmp_path / "base")
    adapter = lora.save_adapter(
        base, tmp_path / "adapter", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
    )
    merged = quantkit.convert(base, tmp_path / "merged", lora=adapter, tensors_only=True)
    rounding = {"method": "rtn", "tensors_only": True}
    expected = quantkit.quantize(merged.path, tmp_path / "expected", "int8", **rounding)
    made = quantkit.quantize(base, tmp_path / "out", "int8", lora=adapter, **rounding)
    found = tensors(made.path)
    assert all(torch.equal(found[name], value) for name, value in tensors(expected.path).items())


def test_a_square_weight_of_a_class_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Code in the model's folder may make a `Conv1D` of any linear."""
    base = oracle.save(oracle.make("opt"), tmp_path / "base")
    adapter = lora.save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "fc1"])
    _edited(fan_in_fan_out=True)(adapter)
    oracle.edit_json(base / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(UnsupportedError, match=r"'fan_in_fan_out' is true, .*q_proj' is not known"):
        quantkit.convert(base, tmp_path / "out", lora=adapter, tensors_only=True, **UNCHECKED)


def test_names_without_the_models_prefix_are_found(tmp_path: Path) -> None:
    """GPT-2's own folders have `h.0`, where transformers' module is `transformer.h.0`."""
    base = oracle.save(oracle.make("gpt2", tie_word_embeddings=True), tmp_path / "base")
    adapter = lora.save_adapter(
        base, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True
    )
    expected = lora.merged(base, adapter)
    stored = load_file(base / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): value for name, value in stored.items()},
        base / "model.safetensors",
    )
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, tensors_only=True, **UNCHECKED)
    found = tensors(made.path)
    require_close(found, {name: expected[f"transformer.{name}"] for name in found})


def test_tensors_without_the_prefix_of_peft_are_merged_as_transformers_adds_them(
    base: Path, tmp_path: Path
) -> None:
    prefix = "base_model.model."
    usual = lora.save_adapter(base, tmp_path / "usual")
    adapter = Path(shutil.copytree(usual, tmp_path / "adapter"))
    stored = load_file(adapter / "adapter_model.safetensors")
    assert all(name.startswith(prefix) for name in stored)
    save_file(
        {name.removeprefix(prefix): value for name, value in stored.items()},
        adapter / "adapter_model.safetensors",
        {"format": "pt"},
    )
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    tokens = oracle.random_tokens(12)
    merged_logits = oracle.logits(oracle.load(made.path), tokens)
    model = oracle.load(base)
    model.load_adapter(str(adapter))
    assert torch.allclose(merged_logits, oracle.logits(model, tokens), atol=1e-4)
    # PEFT's own class warns, and leaves the tensors out.
    assert not torch.allclose(
        oracle.logits(lora.loaded(base, adapter), tokens), merged_logits, atol=1e-2
    )
    assert any(prefix in note for note in made.notes)
    plain = quantkit.convert(base, tmp_path / "plain", lora=usual, **UNCHECKED)
    assert not any(prefix in note for note in plain.notes)


def test_a_model_that_reads_images_is_merged(
    tiny_image_text_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """On disk, the text part of LLaVA is `language_model.model`; in transformers,
    `model.language_model`.
    """
    base = tiny_image_text_model("llava")
    adapter = lora.save_adapter(
        base, tmp_path / "adapter", target_modules=["q_proj", "fc1", "linear_1"]
    )
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, tensors_only=True, **UNCHECKED)
    found = {name: value.detach() for name, value in lora.load(made.path).state_dict().items()}
    require_close(found, lora.merged(base, adapter))


@pytest.mark.parametrize("module", ["lm_head", "wte"])
def test_a_tied_head_of_a_model_known_by_its_tensors_is_refused(
    module: str, tmp_path: Path
) -> None:
    base = oracle.save(oracle.make("gpt2", tie_word_embeddings=True), tmp_path / "base")
    adapter = lora.save_adapter(
        base, tmp_path / "adapter", target_modules=["c_attn", module], fan_in_fan_out=True
    )
    with pytest.raises(UnsupportedError, match="known by its tensors only"):
        quantkit.convert(base, tmp_path / "out", lora=adapter, tensors_only=True, **UNCHECKED)


def test_tied_adapters_of_a_tied_base_are_refused(tied: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(
        tied, tmp_path / "adapter", modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    with pytest.raises(UnsupportedError, match="'ensure_weight_tying' is not supported"):
        quantkit.convert(tied, tmp_path / "out", lora=adapter, **UNCHECKED)


@pytest.mark.parametrize("to", ["meta", "gguf"])
def test_bases_in_other_formats_are_merged(to: str, tmp_path: Path) -> None:
    vocabulary = load_tokenizer(DEMO_MODEL).vocab_size
    base = oracle.save(oracle.make("llama", head_dim=8, vocab_size=vocabulary), tmp_path / "base")
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", base / "tokenizer.model")
    adapter = lora.save_adapter(base, tmp_path / "adapter", target_modules=ATTENTION)
    expected = quantkit.convert(base, tmp_path / "merged", lora=adapter, **UNCHECKED)
    other = quantkit.convert(
        base, tmp_path / ("base.gguf" if to == "gguf" else to), to=to, **UNCHECKED
    )
    made = quantkit.convert(other.path, tmp_path / "out", to="hf", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), tensors(expected.path), ulps=0)


def test_a_quantized_base_is_read_as_floats(tmp_path: Path) -> None:
    base = oracle.save(
        oracle.make("llama", hidden_size=128, intermediate_size=256), tmp_path / "base"
    )
    adapter = lora.save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    small = quantkit.quantize(
        base, tmp_path / "int4", "int4-g64", method="rtn", **UNCHECKED, accept_quality_loss=True
    )
    with pytest.raises(
        UnsupportedError, match=r"base model is quantized.*found int4-g64.*`dequantize=True`"
    ):
        quantkit.convert(small.path, tmp_path / "out", lora=adapter, **UNCHECKED)
    made = quantkit.convert(
        small.path, tmp_path / "out", lora=adapter, dequantize=True, **UNCHECKED
    )
    floats = quantkit.convert(small.path, tmp_path / "floats", dequantize=True, **UNCHECKED)
    require_close(tensors(made.path), lora.merged(floats.path, adapter))


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_quantize_rounds_the_merged_model(kind: str, tmp_path: Path) -> None:
    base = oracle.save(oracle.make(kind, hidden_size=64, ffn_dim=96), tmp_path / "base")
    adapter = lora.save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    options = {
        "method": "rtn",
        "accept_quality_loss": True,
        "tensors_only": kind == "opt",
        **UNCHECKED,
    }
    floats = {**UNCHECKED, "tensors_only": kind == "opt"}
    made = quantkit.quantize(base, tmp_path / "made", "int8", lora=adapter, **options)
    merged = quantkit.convert(base, tmp_path / "merged", lora=adapter, **floats)
    expected = quantkit.quantize(merged.path, tmp_path / "expected", "int8", **options)
    found, other = tensors(made.path), tensors(expected.path)
    assert found.keys() == other.keys()
    assert all(torch.equal(found[name], other[name]) for name in other)
    assert made.manifest["lora"][0]["weight"] == 1
    if kind == "llama":
        readme = (made.path / "README.md").read_text()
        assert "base with the LoRA adapter `adapter`, quantized by" in readme
        assert "--lora adapter" in readme


def test_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    base = oracle.save(oracle.make("glm", head_dim=16), tmp_path / "base")
    dora = lora.save_adapter(
        base, tmp_path / "dora", target_modules=[*ATTENTION, "embed_tokens"], use_dora=True
    )
    source = MergedCheckpoint(open_checkpoint(base), [Adapter(dora)])
    for name in source.names():
        whole = source.load(name)
        parts = [TensorSlice(0, ((2, 9), (1, 3)))] + (
            [TensorSlice(1, ((3, 7),))] if whole.dim() == 2 else []
        )
        for part in parts:
            assert torch.allclose(source.load(name, part), part.of(whole), atol=1e-6), name


def test_rows_are_merged_in_chunks(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"target_modules": [*ATTENTION, "embed_tokens"], "use_dora": True, "bias": "all"}
    adapter = lora.save_adapter(base, tmp_path / "adapter", **settings)
    monkeypatch.setattr(qtensor, "row_chunks", partial(qtensor.row_chunks, elements=300))
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), lora.merged(base, adapter))


def _edited(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: oracle.edit_json(folder / "adapter_config.json", **changes)


def _stored(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return edit


Q = "base_model.model.model.layers.1.self_attn.q_proj"
REFUSED: list[tuple[Callable[[Path], None], type[QuantkitError], str]] = [
    (
        _edited(peft_type="VERA"),
        UnsupportedError,
        r"an unsupported type \(found 'VERA', expected LORA",
    ),
    (
        _edited(init_lora_weights="pissa_niter_4"),
        UnsupportedError,
        "changes the base .*'pissa_niter_4'",
    ),
    (_edited(init_lora_weights="lora_ga"), UnsupportedError, "changes the base .*'lora_ga'"),
    (
        _edited(target_parameters=["experts.gate_up_proj"]),
        UnsupportedError,
        "'target_parameters' is not supported",
    ),
    (
        _edited(trainable_token_indices=[1]),
        UnsupportedError,
        "'trainable_token_indices' is not supported",
    ),
    (_edited(layer_replication=[[0, 2]]), UnsupportedError, "'layer_replication' is not supported"),
    (
        _edited(alora_invocation_tokens=[1]),
        UnsupportedError,
        "'alora_invocation_tokens' is not supported",
    ),
    (_edited(megatron_config={"a": 1}), UnsupportedError, "'megatron_config' is not supported"),
    (_edited(use_qalora=True), UnsupportedError, "'use_qalora' is not supported"),
    (_edited(some_new_setting=2), UnsupportedError, "'some_new_setting' is not supported"),
    (_edited(bias="some"), UnsupportedError, "unknown value of 'bias'"),
    (
        _edited(rank_pattern={"(": 2}),
        CheckpointError,
        r"adapter_config.json: a pattern of 'rank_pattern' is invalid",
    ),
    (
        _edited(modules_to_save=["("]),
        CheckpointError,
        r"adapter_config.json: a pattern of 'modules_to_save' is",
    ),
    (
        _edited(rank_pattern={"q_proj": 5}),
        CheckpointError,
        "a different rank than the settings .found 4, expected 5",
    ),
    (_edited(target_modules=["q_proj"]), CheckpointError, "'target_modules' excludes it"),
    (_edited(exclude_modules=["down_proj"]), CheckpointError, "'exclude_modules' excludes it"),
    (
        _edited(exclude_modules=".*1.*q_proj"),
        CheckpointError,
        "layers.1.self_attn.q_proj' .*'exclude_modules' exclude",
    ),
    (
        _edited(layers_to_transform=[0]),
        CheckpointError,
        "layers.1.* has tensors, .*'layers_to_transform' excludes it",
    ),
    (
        _edited(layers_to_transform=1, layers_pattern="layer"),
        CheckpointError,
        "'layers_to_transform' excludes it",
    ),
    (_edited(modules_to_save=["mlp"]), CheckpointError, "'modules_to_save' excludes it"),
    (_edited(layers_to_transform=["1"]), CheckpointError, "wrong type for 'layers_to_transform'"),
    (_edited(exclude_modules=5), CheckpointError, "wrong type for 'exclude_modules'"),
    (
        _edited(target_modules=".*proj", layers_to_transform=[1]),
        CheckpointError,
        "which PEFT refuses",
    ),
    (
        _edited(target_modules=["q_proj", "v_proj", "down_proj", "o_proj"]),
        CheckpointError,
        "lacks tensors of module",
    ),
    (_edited(modules_to_save=["lm_head"]), CheckpointError, "lacks the tensors of 'lm_head'"),
    (_edited(use_dora=True), CheckpointError, "do not belong together .*lora_magnitude_vector"),
    (_stored(lambda all: all.pop(f"{Q}.lora_B.weight")), CheckpointError, "do not belong together"),
    (
        _stored(lambda all: [all.pop(f"{Q}.lora_{one}.weight") for one in "AB"]),
        CheckpointError,
        "lacks tensors of",
    ),
    (
        _stored(lambda all: all.update({f"{Q}.lora_C.weight": torch.ones(2)})),
        UnsupportedError,
        "cannot be merged",
    ),
    (
        _stored(
            lambda all: all.update({f"{Q}.lora_A.default.weight": all.pop(f"{Q}.lora_A.weight")})
        ),
        UnsupportedError,
        r"lora_A\.default\.weight' is of a kind that cannot be merged; .*`save_pretrained\(\)`",
    ),
    (
        _stored(lambda all: all.update({f"{Q}.other": torch.ones(2)})),
        CheckpointError,
        "which the base does not have",
    ),
    (
        _stored(lambda all: all.update({f"{Q}.bias": torch.ones(2)})),
        CheckpointError,
        r"found \[2\], expected \[64\]",
    ),
    (
        _stored(lambda all: all.update({f"{Q}.lora_A.weight": torch.ones(4, 63)})),
        CheckpointError,
        (
            r"does not match the base \(found \[64, 63\], expected \[64, 64\].*pass the base .*"
            r" names .*base"
        ),
    ),
    (
        _stored(lambda all: all[f"{Q}.lora_A.weight"].fill_(math.nan)),
        NonFiniteError,
        "of the adapter contains NaN or Inf",
    ),
    (_stored(lambda all: all.clear()), CheckpointError, "contains no tensors"),
    (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        CheckpointError,
        "has no weights",
    ),
    (
        lambda folder: (folder / "adapter_config.json").unlink(),
        CheckpointError,
        "is not a LoRA adapter",
    ),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("damage", "kind", "message"), REFUSED)
def test_what_is_not_merged_is_refused_by_name(
    damage: Callable[[Path], None],
    kind: type[QuantkitError],
    message: str,
    base: Path,
    tmp_path: Path,
) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    damage(adapter)
    with pytest.raises(kind, match=message):
        quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("adapter_vocabulary", "saved"),
    [(80, ["embed_tokens", "lm_head"]), (80, ["lm_head"]), (60, ["embed_tokens"])],
)
def test_a_resized_vocabulary_is_named(
    adapter_vocabulary: int, saved: list[str], base: Path, tmp_path: Path
) -> None:
    resized = oracle.save(oracle.make("qwen2", vocab_size=adapter_vocabulary), tmp_path / "resized")
    adapter = lora.save_adapter(resized, tmp_path / "adapter", modules_to_save=saved)
    with pytest.raises(CheckpointError) as caught:
        quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    assert caught.value.hint is not None
    assert f"model.resize_token_embeddings({adapter_vocabulary})" in caught.value.hint
    assert caught.value.path == adapter / "adapter_model.safetensors"


@pytest.mark.parametrize(
    "key",
    [
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "layers_pattern",
    ],
)
def test_a_pattern_that_takes_for_ever_is_given_up(
    key: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.base.patterns.MAX_SECONDS", 0.2)
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    endless = r"(?:\w|.)*[XY]"
    values: dict[str, Any] = {
        "rank_pattern": {endless: 4},
        "alpha_pattern": {endless: 4},
        "modules_to_save": [endless],
    }
    changes: dict[str, Any] = {key: values.get(key, endless)}
    if key == "layers_pattern":
        changes["layers_to_transform"] = [0, 1]
    _edited(**changes)(adapter)
    with pytest.raises(CheckpointError, match=rf"the patterns of '{key}' take too long") as caught:
        quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    assert caught.value.path == adapter / "adapter_config.json"


SELECTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "layers.1.mlp.down_proj", "wte"]},
    {"target_modules": r".*\.[01]\..*(q|v)_proj"},
    {"target_modules": "(?i).*Q_PROJ"},
    {"target_modules": ["proj"]},
    {"target_modules": ["q_proj", "c_attn", "down_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "c_attn", "down_proj", "w1"], "layers_to_transform": 0},
    {
        "target_modules": ["q_proj", "c_attn", "w1"],
        "layers_to_transform": [1, 3],
        "layers_pattern": "layers",
    },
    {
        "target_modules": ["q_proj", "c_attn", "w1"],
        "layers_to_transform": [1, 3],
        "layers_pattern": ["h", "expert.?"],
    },
    {"target_modules": ["q_proj", "w1"], "layers_to_transform": [1], "layers_pattern": []},
    {"target_modules": ["q_proj", "w1"], "layers_to_transform": []},
    {
        "target_modules": ["q_proj", "down_proj"],
        "exclude_modules": ["down_proj", "layers.1.self_attn.q_proj"],
    },
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r"model\.layers\.0.*"},
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": []},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "self.attn"]},
    {"target_modules": ["q_proj", "w1", "down_proj"], "modules_to_save": ["layers.1", "experts"]},
]
MODULES = [
    *(
        f"{prefix}layers.{layer}.{part}"
        for prefix in ("", "model.", "model.language_model.")
        for layer in (0, 1, 11)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.3.w1")
    ),
    "h.1.attn.c_attn",
    "transformer.h.1.attn.c_attn",
    "transformer.h.3.attn.c_attn",
    "transformer.wte",
    "lm_head",
    "q_proj",
    "model.xq_proj",
]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_modules_that_an_adapter_changes_are_those_of_peft(
    selection: dict[str, Any], tmp_path: Path
) -> None:
    config = lora.peft.LoraConfig(**selection)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 1, **selection})
    )
    targets = read_config(tmp_path).targets
    for module in MODULES:
        is_expected = bool(check_target_module_exists(config, module))
        assert (targets.find_exclusion(module) is None) == is_expected, module


def test_an_adapter_of_some_layers_must_have_all_their_tensors(base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter", layers_to_transform=[1])
    _stored(lambda all: [all.pop(f"{Q}.lora_{one}.weight") for one in "AB"])(adapter)
    with pytest.raises(
        CheckpointError, match=r"lacks tensors of module 'model.layers.1.self_attn.q_proj'"
    ):
        quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)


def test_empty_settings_count_as_absent(base: Path, tmp_path: Path) -> None:
    """Old adapters have keys that PEFT no longer has, and null for some that it has."""
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    expected = quantkit.convert(base, tmp_path / "expected", lora=adapter, **UNCHECKED)
    path = adapter / "adapter_config.json"
    old = {
        "bias": None,
        "rank_pattern": None,
        "enable_lora": None,
        "merge_weights": False,
        "some_list": [],
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **old}))
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    require_close(tensors(made.path), tensors(expected.path), ulps=0)


def test_every_setting_of_the_installed_peft_is_decided() -> None:
    """A new setting is refused once it has a value; its default must not be refused."""
    defaults = lora.default_settings()
    refused = {name for name in defaults if name not in KNOWN}
    assert refused == {
        "megatron_config",
        "trainable_token_indices",
        "velora_config",
        "alora_invocation_tokens",
        "use_qalora",
        "monteclora_config",
        "layer_replication",
        "target_parameters",
        "use_bdlora",
        "arrow_config",
        "kasa_config",
    }
    assert not any(defaults[name] for name in refused)


@pytest.mark.parametrize(
    ("kinds", "weights", "message"),
    [
        (["dora"], [0.5], "DoRA supports neither"),
        (["dora", "rslora"], [1, 1], "DoRA supports neither"),
        (["bias all"], [0.5], "replaces one of the base"),
        (["bias all", "bias all"], [1, 1], "replaces one of the"),
    ],
)
def test_what_cannot_be_added_is_refused(
    kinds: list[str], weights: list[float], message: str, base: Path, tmp_path: Path
) -> None:
    adapters = [
        lora.save_adapter(base, tmp_path / f"a{number}", **ADAPTERS[kind])
        for number, kind in enumerate(kinds)
    ]
    with pytest.raises(UnsupportedError, match=message):
        quantkit.convert(
            base, tmp_path / "out", lora=dict(zip(adapters, weights, strict=True)), **UNCHECKED
        )


def test_an_adapter_with_another_tokenizer_is_said(base: Path, tmp_path: Path) -> None:
    """Trainers save theirs next to the adapter: a model that was trained to end with another
    token would not stop.
    """
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    base = shutil.copytree(base, tmp_path / "base")
    for folder in (base, adapter):
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": null}')
    made = quantkit.convert(base, tmp_path / "same", lora=adapter, **UNCHECKED)
    assert not any("its tokenizer has another" in note for note in made.notes)
    (adapter / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "bos_token": null}'
    )
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    made = quantkit.convert(base, tmp_path / "other", lora=adapter, **UNCHECKED)
    assert any(
        "its tokenizer has another chat template and EOS token than" in note for note in made.notes
    )
    (adapter / "tokenizer_config.json").write_text("{")
    assert quantkit.convert(base, tmp_path / "damaged", lora=adapter, **UNCHECKED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a=b", "the weight of an adapter is not a number"),
        ({"a": math.nan}, "not finite"),
        (["a", "a=2"], "names an adapter twice"),
        (3, "wrong type"),
        ({"a": "1"}, "`lora`"),
        ("", "is empty"),
    ],
)
def test_a_wrong_request_is_refused(given: Any, message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        quantkit.convert(base, tmp_path / "out", lora=given)


def test_an_adapter_of_another_base_is_said(base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **UNCHECKED)
    assert not any("was made for" in note for note in made.notes)
    _edited(base_model_name_or_path="someone/Other-7B")(adapter)
    made = quantkit.convert(base, tmp_path / "other", lora=adapter, **UNCHECKED)
    assert any("was made for someone/Other-7B" in note for note in made.notes)
    larger = oracle.save(
        oracle.make("qwen2", hidden_size=80, num_attention_heads=10), tmp_path / "larger"
    )
    with pytest.raises(CheckpointError, match=r"does not match the base.*names someone/Other-7B"):
        quantkit.convert(larger, tmp_path / "wrong", lora=adapter, **UNCHECKED)


@pytest.mark.parametrize("tensors_only", [False, True])
def test_an_adapter_in_the_models_folder_is_not_ignored_in_silence(
    tensors_only: bool, base: Path, tmp_path: Path
) -> None:
    folder = oracle.copy(base, tmp_path / "both")
    lora.save_adapter(base, folder)
    options = {"tensors_only": tensors_only, **UNCHECKED}
    made = quantkit.convert(folder, tmp_path / "out", **options)
    assert any("also contains a LoRA adapter, which is not merged" in note for note in made.notes)
    assert not (made.path / "adapter_config.json").exists()
    made = quantkit.quantize(
        folder, tmp_path / "int8", "int8", method="rtn", accept_quality_loss=True, **options
    )
    assert any("also contains a LoRA adapter, which is not merged" in note for note in made.notes)
    assert any("also contains a LoRA adapter" in note for note in open_checkpoint(folder).notes)
    made = quantkit.convert(folder, tmp_path / "merged", lora=folder, **options)
    assert not any("not merged" in note for note in made.notes)
    require_close(tensors(made.path), lora.merged(base, folder))


CHILD = """
import os, signal, sys
import quantkit
from quantkit.jobs.output import writer as output
output.SAFE_POINT_BYTES = 10_000

def progress(phase, done, total, unit):
    if phase == "convert" and 0.5 * total <= done < total:
        os.kill(os.getpid(), signal.SIGKILL)

quantkit.convert(sys.argv[1], sys.argv[2], lora=sys.argv[3], source_check=False, progress=progress)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_merge_resumes_with_the_same_adapter_only(base: Path, tmp_path: Path) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    expected = quantkit.convert(base, tmp_path / "expected", lora=adapter, **UNCHECKED)
    assert forked.python(CHILD, base, tmp_path / "out", adapter).returncode == -signal.SIGKILL
    other = lora.save_adapter(base, tmp_path / "other" / "adapter", seed=5)
    for changed in (other, f"{adapter}=0.5", ()):
        with pytest.raises(ResumeError, match="lora"):
            quantkit.convert(base, tmp_path / "out", lora=changed, resume=True, **UNCHECKED)
    reported: list[tuple[Any, ...]] = []
    options = {"resume": True, "progress": lambda *now: reported.append(now), **UNCHECKED}
    made = quantkit.convert(base, tmp_path / "out", lora=adapter, **options)
    assert next(done for phase, done, *_ in reported if phase == "convert") > 0
    assert contents(made.path) == contents(expected.path)
    assert quantkit.convert(
        base, tmp_path / "out", lora=adapter, if_exists="skip", **UNCHECKED
    ).skipped
    with pytest.raises(DestinationError, match="options"):
        quantkit.convert(base, tmp_path / "out", lora=other, if_exists="skip", **UNCHECKED)


def test_a_quantization_resumes_with_the_same_adapter_only(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "SAFE_POINT_BYTES", 10_000)
    adapter, other = (
        lora.save_adapter(base, tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 5))
    )
    options: dict[str, Any] = {"method": "rtn", "accept_quality_loss": True}

    def job(src: Path, dst: Path, **given: Any) -> Any:
        return quantkit.quantize(src, dst, "int8", lora=adapter, **options, **given)

    interrupted(job, base, tmp_path / "out")
    with pytest.raises(ResumeError, match="lora"):
        quantkit.quantize(
            base, tmp_path / "out", "int8", lora=other, resume=True, **options, **UNCHECKED
        )
    made = job(base, tmp_path / "out", resume=True, **UNCHECKED)
    expected = job(base, tmp_path / "expected", **UNCHECKED)
    assert tensors(made.path).keys() == tensors(expected.path).keys()
    assert contents(made.path)["model.safetensors"] == contents(expected.path)["model.safetensors"]


def test_the_commands_merge_adapters_and_refuse_another_base(
    base: Path, tmp_path: Path, capfd: Capture
) -> None:
    adapter = lora.save_adapter(base, tmp_path / "adapter")
    given = ["--scheme", "int8", "--lora", adapter, "--no-source-check", "--accept-quality-loss"]
    code, _, err = run(capfd, "quantize", base, tmp_path / "out", *given)
    assert code == 0, err
    expected = quantkit.quantize(
        base, tmp_path / "same", "int8", lora=adapter, **UNCHECKED, accept_quality_loss=True
    )
    assert (
        contents(tmp_path / "out")["model.safetensors"]
        == contents(expected.path)["model.safetensors"]
    )
    code, _, err = run(capfd, "plan", "convert", base, tmp_path / "planned", "--lora", adapter)
    assert code == 0, err
    larger = oracle.save(oracle.make("qwen2", intermediate_size=80), tmp_path / "larger")
    code, _, err = run(capfd, "convert", larger, tmp_path / "wrong", "--lora", adapter)
    assert code == 3
    assert (
        "module 'model.layers.0.mlp.down_proj' does not match the base (found [64, 96], expected"
        " [64, 80]" in err
    )
    code, _, err = run(capfd, "convert", adapter, tmp_path / "wrong")
    assert code == 4
    assert "merge it into its base with --lora of convert or quantize" in err
