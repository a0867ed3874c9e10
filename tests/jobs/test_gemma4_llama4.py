"""Gemma 4 and Llama 4 through the jobs: quantized, adapted, served in parts; what their configs may
say.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lora
import oracle
import pytest
import torch
from architecture_cases import CASES
from diagnoses import require_sound
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.architectures.config import QueryScaleConfig
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.model import attention
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict, verify
from quantkit.runtime.engine import Engine
from quantkit.xla.split import require_served

VOCABULARY = 2048  # of the demo's tokenizer
KINDS = ("gemma4-features", "gemma4-experts", "gemma4-small", "llama4-features", "llama4-bare")
# Whose layers pass more than hidden states to later ones.
SMALL = "gemma4-small"
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}
SAMPLES: dict[str, Any] = {"calibration": EXCERPT, "samples": 32, "length": 64}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    folders = {}
    for case in KINDS:
        kind, changes = CASES[case]
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "max_position_embeddings": 600,
        }
        for key in ("moe_intermediate_size", "intermediate_size"):
            if key in changes:
                sizes[key] = 64
        if case == SMALL:
            sizes["vocab_size_per_layer_input"] = VOCABULARY
        folder = folders[case] = base / case
        model = oracle.make(kind, **{**changes, **sizes})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Scores are not divided, so that queries of length 1 would see one key alone.
                if name.endswith("self_attn.q_norm.weight"):
                    parameter *= 0.2
        oracle.save(model, folder)
        shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folders


@pytest.mark.parametrize("case", KINDS)
def test_gptq_loses_less_than_rounding_and_is_read_by_transformers(
    case: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    kl = []
    for method, how in {"gptq": SAMPLES, "rtn": {}}.items():
        made = quantkit.quantize(
            sources[case], tmp_path / method, "int4-g32", method=method, **how, **UNCHECKED
        )
        assert made.quality is not None
        kl.append(max(text.kl for text in made.quality.texts))
        assert made.manifest.get("run_by") is None
        assert verify(sources[case], made.path).verdict is Verdict.WITHIN_BOUND
        require_sound(made.path)
    assert kl[0] < kl[1]
    model = load_model(tmp_path / "gptq", dtype=torch.float32, backend="reference", device="cpu")
    tokens = oracle.random_tokens(20, batch=2, vocabulary=VOCABULARY)
    with torch.inference_mode():
        found = model(tokens)
    # Of quantized experts, which transformers expects in one tensor, those of the floats.
    floats = quantkit.convert(
        tmp_path / "gptq", tmp_path / "floats", dequantize=True, source_check=False
    ).path
    theirs = oracle.logits(oracle.load(floats), tokens)
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", KINDS)
def test_an_adapter_is_merged_as_peft_merges_it(
    case: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {}
    # Not all layers of the small one have the projections of values.
    if case.startswith("gemma4"):
        settings["target_modules"] = ["q_proj", "o_proj", "down_proj"]
    adapter = lora.save_adapter(sources[case], tmp_path / "adapter", **settings)
    made = quantkit.convert(sources[case], tmp_path / "out", lora=adapter, source_check=False)
    tokens = oracle.random_tokens(20, batch=2, vocabulary=VOCABULARY)
    expected = oracle.logits(lora.loaded(sources[case], adapter), tokens)
    with torch.inference_mode():
        found = load_model(made.path, dtype=torch.float32, device="cpu")(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in KINDS if case != SMALL])
def test_training_moves_scales(case: str, sources: dict[str, Path], tmp_path: Path) -> None:
    rounded = quantkit.quantize(
        sources[case], tmp_path / "int4", "int4-g32", method="rtn", **UNCHECKED
    )
    made = quantkit.refine(
        rounded.path, tmp_path / "new", against=sources[case], epochs=1, **SAMPLES, **UNCHECKED
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (rounded.path, made.path)
    )
    scale = "model.layers.1.self_attn.q_proj.weight_scale"
    assert not torch.equal(before[scale], after[scale])


def test_what_is_not_supported_is_refused_by_name(sources: dict[str, Path], tmp_path: Path) -> None:
    for case, folder in sources.items():
        kind = CASES[case][0]
        refused = f"{kind.removesuffix('_text')} models"
        # llama.cpp computes the others.
        if case not in ("gemma4-small", "gemma4-experts"):
            with raises(UnsupportedError, refused):
                quantkit.convert(folder, tmp_path / case, to="gguf")
        with raises(UnsupportedError, kind):
            quantkit.quantize(
                folder, tmp_path / f"{case}-mlx", "int4-g32", to="mlx", method="rtn", **UNCHECKED
            )
        with raises(UnsupportedError, kind):
            require_served(open_checkpoint(folder).config)
    rounded = quantkit.quantize(
        sources[SMALL], tmp_path / "int4", "int4-g32", method="rtn", **UNCHECKED
    )
    with raises(UnsupportedError, "shared keys and values"):
        quantkit.refine(
            rounded.path, tmp_path / "new", against=sources[SMALL], **SAMPLES, **UNCHECKED
        )


def test_layers_that_share_keys_and_values_have_none_in_the_cache(
    sources: dict[str, Path],
) -> None:
    folder = sources[SMALL]
    config = open_checkpoint(folder).config
    assert config.kv_sources == (None, None, 0, 1, 1)
    # Of layers 0 and 1, whose heads have 16 and 32 dimensions: keys and values, 4 bytes each.
    per_token = 2 * 2 * (16 + 32) * 4
    assert quantkit.inspect(folder).cache_bytes_per_token == per_token
    model = load_model(folder, dtype=torch.float32, device="cpu")
    assert Engine(model, 50, slots=3).cache_bytes == 3 * 50 * per_token


def test_projections_of_shared_keys_and_values_are_ignored_as_by_transformers(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """Published folders have them."""
    folder = oracle.copy(sources[SMALL], tmp_path / "published")
    tensors = load_file(folder / "model.safetensors")
    for layer in (2, 3, 4):
        block = f"model.layers.{layer}.self_attn."
        for leaf in ("k_proj", "v_proj", "k_norm"):
            tensors[f"{block}{leaf}.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = oracle.random_tokens(20, vocabulary=VOCABULARY)
    with torch.inference_mode():
        found = load_model(folder, dtype=torch.float32, device="cpu")(tokens)
    torch.testing.assert_close(found, oracle.logits(oracle.load(folder), tokens), rtol=0, atol=1e-4)
    made = quantkit.convert(folder, tmp_path / "made", source_check=False).path
    assert "model.layers.2.self_attn.k_proj.weight" not in load_file(made / "model.safetensors")


def test_an_int8_cache_and_chunks_give_the_tokens_of_one_pass(sources: dict[str, Path]) -> None:
    """Also beyond the first chunks of Llama 4, of 5 tokens."""
    for case in (SMALL, "llama4-features"):
        model = load_model(sources[case], dtype=torch.float32, device="cpu")
        model.config = replace(model.config, eos_token_ids=())
        prompt = oracle.random_tokens(17, vocabulary=VOCABULARY)
        expected = oracle.greedy(oracle.load(sources[case]), prompt, 12)
        engine = Engine(model, 40)
        engine.chunk_rows = 4
        assert list(quantkit.generate(engine, prompt[0].tolist(), max_new_tokens=12)) == expected
        rounded = Engine(model, 40, cache_dtype="int8")
        assert len(list(quantkit.generate(rounded, prompt[0].tolist(), max_new_tokens=12))) == 12


def test_long_prompts_of_chunks_are_mixed_in_parts() -> None:
    """Of more positions than a mask of all of them is made for."""
    count, chunk = attention.MAX_QUERY_ROWS + 100, attention.Chunk(700)
    heads = torch.randn(3, 1, 2, count, 8, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(count)
    attend = attention.make_causal_attention(positions, [chunk])
    found = attend(0, *heads, attention.PLAIN)
    for first in range(0, count, chunk.size):
        part = slice(first, first + chunk.size)
        alone = attention.make_causal_attention(positions[: len(positions[part])], [None])
        expected = alone(0, *heads[..., part, :], attention.PLAIN)
        torch.testing.assert_close(found[:, part], expected, rtol=0, atol=1e-5)


def _raw(case: str, **changes: Any) -> dict[str, Any]:
    kind, settings = CASES[case]
    config = oracle.transformers.AutoConfig.for_model(kind, **{**oracle.SIZES, **settings})
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    return raw


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("gemma4", "llama4"))])
def test_a_config_is_written_as_it_is_read(case: str) -> None:
    config = config_from_hf(_raw(case), "config.json")
    assert config_from_hf(config_to_hf(config), "config.json") == config


def test_heads_of_layers_without_a_window_are_read_in_both_spellings() -> None:
    older = _raw("gemma4", per_layer_config=..., global_head_dim=32, num_global_key_value_heads=4)
    config = config_from_hf(older, "config.json")
    # Transformers reads the number of heads next to shared keys and values only.
    assert (config.full_head_dim, config.full_kv_heads) == (32, None)
    config = config_from_hf({**older, "attention_k_eq_v": True}, "config.json")
    assert (config.full_head_dim, config.full_kv_heads) == (32, 4)
    newer = {"2": {"head_dim": 32, "num_key_value_heads": 4}}
    config = config_from_hf({**older, "per_layer_config": newer}, "config.json")
    assert (config.full_head_dim, config.full_kv_heads) == (32, 4)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}),
        ("gemma4", {"rope_scaling": None}),
        ("gemma4", {"num_kv_shared_layers": 1}),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 32, "intermediate_size": 7}}}),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("gemma4-small", {"num_kv_shared_layers": 5}),
        ("gemma4-small", {"vocab_size_per_layer_input": 95}),
        ("llama4", {"attention_chunk_size": None}),
        ("llama4", {"no_rope_layers": [1, 0]}),
        ("llama4", {"no_rope_layers": [1, 0, 1, 1, 1], "layer_types": ...}),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}),
    ],
)
def test_configs_that_mean_nothing_here_are_refused(case: str, changes: dict[str, Any]) -> None:
    with pytest.raises(QuantkitError) as refused:
        config_from_hf(_raw(case, **changes), "config.json")
    assert isinstance(refused.value, (CheckpointError, UnsupportedError))


def test_what_llama_4_leaves_out_is_the_default_of_transformers() -> None:
    given = _raw("llama4")
    optional = ("attention_chunk_size", "floor_scale", "attn_scale", "no_rope_layers", "moe_layers")
    kept = {key: value for key, value in given.items() if key not in (*optional, "layer_types")}
    config = config_from_hf(kept, "config.json")
    assert [layer.chunk for layer in config.layers] == [8192, 8192, 8192, None]
    assert [layer.rotary for layer in config.layers] == [True, True, True, False]
    assert all(layer.experts for layer in config.layers)
    assert config.query_scale == QueryScaleConfig(strength=0.1, floor=8192)
