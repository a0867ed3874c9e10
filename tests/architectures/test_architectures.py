"""Our decoder against transformers, architecture by architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from rows import together

import quantkit
from quantkit.errors import NonFiniteError
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}
_GLM = {"head_dim": 16, "pad_token_id": 0}
_SCALED_QUERIES = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
    "llama_4_scaling_beta": 0.5,
}
_MINISTRAL = {
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": {
        **ROPES["yarn"],
        **_SCALED_QUERIES,
        "rope_type": "yarn",
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_PHI = {"pad_token_id": 0}
_LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 26,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.5, 2.9, 4.5, 7.3],
    },
}
_GEMMA = {"head_dim": 16, "pad_token_id": 0}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2}
_MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN2_MOE = {**_MOE, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
_QWEN3_MOE = {**_MOE, "moe_intermediate_size": 48, "head_dim": 16}
_OLMOE = {**_MOE, "num_key_value_heads": 8}
_GPT_OSS = {**_MIXTRAL, "head_dim": 16, "sliding_window": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-odd-groups": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "glm-whole": (
        "glm",
        {**_GLM, "rope_parameters": {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True},
    ),
    "glm-bare": ("glm", {**_GLM, "attention_bias": False}),
    "glm": ("glm", _GLM),
    "glm4-whole": (
        "glm4",
        {**_GLM, "rope_parameters": {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True},
    ),
    "glm4-bare": ("glm4", {**_GLM, "attention_bias": False}),
    "glm4": ("glm4", _GLM),
    "granite": ("granite", {}),
    "granite-multipliers": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.7,
            "logits_scaling": 0.3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": ("ministral3", {**_MINISTRAL, "tie_word_embeddings": True}),
    "ministral3-default": ("ministral3", {**_MINISTRAL, "rope_parameters": _SCALED_QUERIES}),
    "ministral3-window": ("ministral3", {**_MINISTRAL, "sliding_window": 7}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "phi3": ("phi3", _PHI),
    "phi3-window": ("phi3", {**_PHI, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {**_PHI, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("phi3", {**_PHI, **_LONGROPE}),
    "phi3-longrope-partial-window": (
        "phi3",
        {
            **_PHI,
            **_LONGROPE,
            "partial_rotary_factor": 0.5,
            "hidden_size": 128,
            "sliding_window": 7,
        },
    ),
    "gemma": ("gemma", _GEMMA),
    "gemma-bias": ("gemma", {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", {**_GEMMA, "sliding_window": 7}),
    "gemma2-bare": (
        "gemma2",
        {
            **_GEMMA,
            "layer_types": ["full_attention"] * 3,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma2-features": (
        "gemma2",
        {
            **_GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window": 7, "num_hidden_layers": 7}),
    "gemma3-features": (
        "gemma3_text",
        {
            **_GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha": ("olmo2", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3-features": (
        "olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 5e5,
                    "attention_factor": 1.1,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral-window": ("mixtral", {**_MIXTRAL, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", _QWEN2_MOE),
    "qwen2-moe-normalized": (
        "qwen2_moe",
        {**_QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2-moe-dense-layer": (
        "qwen2_moe",
        {**_QWEN2_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen2-moe-step-window": (
        "qwen2_moe",
        {**_QWEN2_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE),
    "qwen3-moe-normalized": (
        "qwen3_moe",
        {**_QWEN3_MOE, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3-moe-dense-layer": (
        "qwen3_moe",
        {**_QWEN3_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3-moe-step-window": (
        "qwen3_moe",
        {**_QWEN3_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("olmoe", _OLMOE),
    "olmoe-bias": ("olmoe", {**_OLMOE, "attention_bias": True, "tie_word_embeddings": True}),
    "olmoe-clip": (
        "olmoe",
        {
            **_OLMOE,
            "clip_qkv": 0.5,
            "norm_topk_prob": True,
            "num_key_value_heads": 2,
            "attention_bias": True,
        },
    ),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gpt-oss-square": ("gpt_oss", {**_GPT_OSS, "intermediate_size": 64, "attention_bias": False}),
    "gpt-oss-full": (
        "gpt_oss",
        {
            **_GPT_OSS,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {**ROPES["yarn"], "truncate": False},
        },
    ),
    "gpt-oss-limits": (
        "gpt_oss",
        {**_GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "num_hidden_layers": 2},
    ),
}


FULLEST = list({kind: case for case, (kind, _) in CASES.items()}.values())
"""The last case of each family, which has most of its features."""
DENSE = [case for case in FULLEST if not {"num_experts", "num_local_experts"} & set(CASES[case][1])]


def _endless(folder: Path) -> Decoder:
    """The model in a folder, with no end tokens; some families have some where a config says
    none.
    """
    model = load_model(folder, dtype=torch.float32)
    model.config = replace(model.config, eos_token_ids=())
    return model


def _require_parity(model: Any, folder: Path, length: int = 40) -> None:
    ours = load_model(oracle.save(model, folder), dtype=torch.float32)
    tokens = oracle.random_tokens(length, batch=2)
    with torch.inference_mode():
        found = ours(tokens, torch.arange(length))
    expected = oracle.logits(model, tokens)
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # a model whose logits vary, or equality would say little


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    _require_parity(oracle.make(kind, **changes), tmp_path / "model")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [20, 90], ids=["within", "past-context"])
def test_rope_scaling_equals_that_of_transformers(rope: str, length: int, tmp_path: Path) -> None:
    model = oracle.make("llama", rope_parameters=dict(ROPES[rope]), max_position_embeddings=64)
    _require_parity(model, tmp_path / "model", length)


@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_through_the_cache_equals_that_of_transformers(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    model = oracle.make(kind, **changes)
    ours = _endless(oracle.save(model, tmp_path / "model"))
    prompt = oracle.random_tokens(9)
    found = list(quantkit.generate(ours, prompt[0].tolist(), max_new_tokens=20))
    assert found == oracle.greedy(model, prompt, 20)


@pytest.mark.parametrize("case", FULLEST)
def test_sequences_of_all_lengths_in_slots_are_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    model = oracle.make(kind, **changes)
    ours = _endless(oracle.save(model, tmp_path / "model"))
    rows = oracle.random_tokens(23, batch=5)
    prompts = [row[:length].tolist() for row, length in zip(rows, (1, 9, 23, 4, 16), strict=True)]
    requests = [Request(prompt, 14, logprobs=0) for prompt in prompts]
    for index, found in enumerate(together(Engine(ours, 40, slots=3), requests)):
        text = torch.tensor([[*prompts[index], *found.token_ids]])
        assert found.token_ids == oracle.greedy(model, text[:, :-14], 14)
        assert found.logprobs is not None
        for place, reported in enumerate(found.logprobs.tokens, text.shape[1] - 14):
            expected = oracle.logits(model, text[:, :place])[0, -1].log_softmax(-1)[text[0, place]]
            assert reported == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3"])
def test_multiplied_embeddings_are_rounded_as_by_transformers(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **changes).to(dtype), tmp_path / "model")
    tokens = oracle.random_tokens(20)
    with torch.inference_mode():
        theirs = oracle.load(folder, dtype).model.embed_tokens(tokens)
        assert torch.equal(load_model(folder).model.embed(tokens), theirs)


def test_hidden_states_beyond_float16_end_in_one_line(tmp_path: Path) -> None:
    large = oracle.make("gemma2", **CASES["gemma2"][1])
    with torch.no_grad():
        for layer in large.model.layers:
            layer.post_attention_layernorm.weight.fill_(3e4)
    folder = oracle.save(large.half(), tmp_path / "model")
    assert (
        not oracle.logits(oracle.load(folder, torch.float16), oracle.random_tokens(5))
        .isfinite()
        .any()
    )
    with pytest.raises(NonFiniteError, match=r"too large for float16: .*bf16"):
        next(quantkit.generate(load_model(folder), [3, 4], max_new_tokens=2))
    assert next(
        quantkit.generate(load_model(folder, dtype=torch.bfloat16), [3, 4], max_new_tokens=2)
    )


def test_cached_steps_give_the_logits_of_one_pass(tmp_path: Path) -> None:
    from quantkit.model.cache import KVCache

    model = load_model(oracle.save(oracle.make("llama"), tmp_path / "model"), dtype=torch.float32)
    tokens = oracle.random_tokens(12, batch=2)
    cache = KVCache(model.config, 2, 20, torch.float32, "cpu")
    with torch.inference_mode():
        whole = model(tokens, torch.arange(12))
        steps = [model(tokens[:, :5], torch.arange(5), cache)]
        steps += [model(tokens[:, t : t + 1], torch.tensor([t]), cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [*DENSE, "dynamic"])
def test_prefill_and_decode_are_one_graph_each(case: str, tmp_path: Path) -> None:
    from quantkit.model.cache import KVCache

    rope = {"rope_parameters": dict(ROPES["dynamic"])} if case == "dynamic" else {}
    kind, changes = CASES.get(case, ("llama", rope))
    layers = {} if "layer_types" in changes else {"num_hidden_layers": 2}
    folder = oracle.save(oracle.make(kind, **changes, **layers), tmp_path / "model")
    quantkit.quantize(folder, tmp_path / "int4", "int4-g32", method="rtn", accept_quality_loss=True)
    for path in (folder, tmp_path / "int4"):
        model = load_model(path, dtype=torch.float32)
        cache, eager_cache = (KVCache(model.config, 1, 16, torch.float32, "cpu") for _ in range(2))
        step = torch.compile(model, fullgraph=True, backend="eager")
        tokens = oracle.random_tokens(9)
        with torch.inference_mode():
            for part, positions in (
                (tokens[:, :8], torch.arange(8)),
                (tokens[:, 8:], torch.tensor([8])),
            ):
                found, expected = step(part, positions, cache), model(part, positions, eager_cache)
                # Over a longer cache torch rounds attention otherwise, which kernels that round
                # their inputs enlarge.
                bound = {"rtol": 0.0, "atol": 1e-3} if path.name == "int4" else {}
                torch.testing.assert_close(found, expected, **bound)
    torch.compiler.reset()
