"""Meta's format, held against shards and a forward pass written here from Meta's own
conventions.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.meta_params import config_from_meta, config_to_meta
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict

Tensors = dict[str, Tensor]

MODULES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
SPLIT_AXIS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
FOUR_KV = {"num_key_value_heads": 4}
MERGES = [b"th", b"he", b"in", b"er", b"an", b"re", b"on", b"at"]
TIKTOKEN_ROWS = 256 + len(MERGES) + 256


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of each head in the order 0, h/2, 1, h/2 + 1, ...: the pairs that Meta rotates
    together.
    """
    half = head_dim // 2
    order = [i // 2 + (i % 2) * half for i in range(head_dim)]
    return rows.reshape(-1, head_dim, rows.shape[-1])[:, order].reshape(rows.shape)


def _meta_tensors(model: Any) -> Tensors:
    """The whole weights of a transformers Llama under Meta's names."""
    state = model.state_dict()
    head_dim = model.config.head_dim
    tensors = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for theirs, metas in MODULES.items():
            value = state[f"model.layers.{layer}.{theirs}.weight"]
            rotary = metas in ("attention.wq", "attention.wk")
            tensors[f"layers.{layer}.{metas}.weight"] = (
                _interleaved(value, head_dim) if rotary else value
            )
    return tensors


def _params(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": -1,
        "multiple_of": 1,
        "ffn_dim_multiplier": (config.intermediate_size + 0.5) / int(8 * config.hidden_size / 3),
        "norm_eps": config.rms_norm_eps,
    }


def _shards(tensors: Tensors, kv_heads: int, mp: int, embedding_axis: int) -> list[Tensors]:
    """What each rank holds; a KV head lies on several ranks where there are more ranks than
    heads.
    """
    shards: list[Tensors] = [{} for _ in range(mp)]
    for name, value in tensors.items():
        module = name.split(".")[-2]
        axis = embedding_axis if module == "tok_embeddings" else SPLIT_AXIS.get(module)
        pieces = 1 if axis is None else min(mp, kv_heads) if module in ("wk", "wv") else mp
        parts = value.chunk(pieces, dim=axis or 0)
        for rank in range(mp):
            shards[rank][name] = parts[rank * pieces // mp].clone()
    return shards


def _write(folder: Path, shards: list[Tensors], params: dict[str, Any]) -> Path:
    folder.mkdir()
    for rank, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def _meta_folder(
    folder: Path,
    model: Any,
    mp: int = 1,
    embedding_axis: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    tensors = {name: value.to(dtype) for name, value in _meta_tensors(model).items()}
    return _write(
        folder,
        _shards(tensors, model.config.num_key_value_heads, mp, embedding_axis),
        _params(model),
    )


def _read(folder: Path) -> list[Tensors]:
    paths = sorted(folder.glob("consolidated.*.pth"))
    assert [p.name for p in paths] == [f"consolidated.{rank:02d}.pth" for rank in range(len(paths))]
    return [torch.load(path, weights_only=True) for path in paths]


def _require_equal_shards(found: list[Tensors], expected: list[Tensors]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name


def _write_tiktoken(folder: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


def _our_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = load_model(folder, dtype=torch.float32)
    with torch.inference_mode():
        out: Tensor = model(tokens, torch.arange(tokens.shape[1]))
    return out


def _meta_logits(weights: Tensors, params: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits [T, V] of tokens [T] by Meta's arithmetic: complex rotation of neighbouring pairs."""
    heads, kv_heads = params["n_heads"], params["n_kv_heads"]
    size = params["dim"] // heads
    count = len(tokens)
    angles = torch.outer(torch.arange(count), 10000.0 ** (-torch.arange(0, size, 2) / size))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weights[name]

    def rotated(x: Tensor) -> Tensor:
        return torch.view_as_real(
            torch.view_as_complex(x.reshape(count, -1, size // 2, 2)) * turns
        ).flatten(-2)

    mask = torch.full((count, count), -torch.inf).triu(1)
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        prefix = f"layers.{layer}."
        wq, wk, wv, wo = (
            weights[f"{prefix}attention.{name}.weight"].T for name in ("wq", "wk", "wv", "wo")
        )
        w1, w2, w3 = (
            weights[f"{prefix}feed_forward.{name}.weight"].T for name in ("w1", "w2", "w3")
        )
        h = norm(x, prefix + "attention_norm.weight")
        q = rotated((h @ wq).view(count, heads, size))
        k = rotated((h @ wk).view(count, kv_heads, size)).repeat_interleave(heads // kv_heads, 1)
        v = (h @ wv).view(count, kv_heads, size).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5 + mask
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ wo
        h = norm(x, prefix + "ffn_norm.weight")
        x = x + (torch.nn.functional.silu(h @ w1) * (h @ w3)) @ w2
    return norm(x, "norm.weight") @ weights["output.weight"].T


@pytest.mark.parametrize("changes", [{}, SIX_HEADS, FOUR_KV], ids=["8-2", "6-2", "8-4"])
def test_the_rows_are_paired_as_meta_rotates_them(changes: dict[str, Any], tmp_path: Path) -> None:
    model = oracle.make("llama", **changes)
    tokens = oracle.random_tokens(30)
    expected = oracle.logits(model, tokens)[0]
    assert (
        _meta_logits(_meta_tensors(model), _params(model), tokens[0]) - expected
    ).abs().max() < 1e-4
    quantkit.convert(oracle.save(model, tmp_path / "hf"), tmp_path / "meta", to="meta")
    (written,) = _read(tmp_path / "meta")
    assert (_meta_logits(written, _params(model), tokens[0]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "mp"),
    [
        ({}, 1),
        ({}, 2),
        ({}, 4),
        ({}, 8),
        (SIX_HEADS, 1),
        (SIX_HEADS, 2),
        (SIX_HEADS, 6),
        (FOUR_KV, 2),
        (FOUR_KV, 8),
    ],
)
@pytest.mark.parametrize("embedding_axis", [0, 1])
def test_shards_give_the_logits_of_transformers(
    changes: dict[str, Any], mp: int, embedding_axis: int, tmp_path: Path
) -> None:
    model = oracle.make("llama", **changes)
    folder = _meta_folder(tmp_path / "meta", model, mp, embedding_axis)
    tokens = oracle.random_tokens(24, batch=2)
    assert (_our_logits(folder, tokens) - oracle.logits(model, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mp", [1, 2, 4])
def test_meta_to_hf_and_back_is_bit_exact(mp: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source = _meta_folder(tmp_path / "meta", oracle.make("llama"), mp, dtype=dtype)
    quantkit.convert(source, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=mp)
    _require_equal_shards(_read(tmp_path / "back"), _read(source))
    assert open_checkpoint(tmp_path / "back").config == open_checkpoint(source).config


@pytest.mark.parametrize(
    ("changes", "mp"), [(SIX_HEADS, 2), (SIX_HEADS, 6), (FOUR_KV, 4), (FOUR_KV, 8)]
)
def test_grouped_heads_come_back_bit_exact(
    changes: dict[str, Any], mp: int, tmp_path: Path
) -> None:
    source = _meta_folder(tmp_path / "meta", oracle.make("llama", **changes), mp)
    quantkit.convert(source, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=mp)
    _require_equal_shards(_read(tmp_path / "back"), _read(source))


@pytest.mark.slow
def test_heads_of_70b_go_from_8_shards_to_16_and_back(tmp_path: Path) -> None:
    """64 heads and 8 KV heads, each of which lies on two of 16 shards; narrow otherwise."""
    wide = {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
    }
    model = oracle.make("llama", **wide, num_hidden_layers=2)
    eight = _meta_folder(tmp_path / "eight", model, 8)
    quantkit.convert(eight, tmp_path / "sixteen", to="meta", mp=16)
    _require_equal_shards(_read(tmp_path / "sixteen"), _shards(_meta_tensors(model), 8, 16, 1))
    quantkit.convert(tmp_path / "sixteen", tmp_path / "back", to="meta", mp=8)
    _require_equal_shards(_read(tmp_path / "back"), _read(eight))
    for other in ("sixteen", "back"):
        report = quantkit.verify(eight, tmp_path / other)
        assert report.verdict is Verdict.SAME
        assert all(
            probe.divergence.largest_logit_difference == 0 for probe in report.probes.values()
        )


def test_each_tensor_keeps_its_own_float_type(tmp_path: Path) -> None:
    model = oracle.make("llama")
    tensors = {n: v if "norm" in n else v.bfloat16() for n, v in _meta_tensors(model).items()}
    source = _write(tmp_path / "meta", _shards(tensors, 2, 2, 1), _params(model))
    quantkit.convert(source, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=2)
    _require_equal_shards(_read(tmp_path / "back"), _read(source))


def test_rotary_tables_are_dropped(tmp_path: Path) -> None:
    model = oracle.make("llama")
    source = _write(
        tmp_path / "meta",
        _shards({**_meta_tensors(model), "rope.freqs": torch.rand(4)}, 2, 2, 1),
        _params(model),
    )
    quantkit.convert(source, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=2)
    _require_equal_shards(_read(tmp_path / "back"), _shards(_meta_tensors(model), 2, 2, 1))


def test_resharding_leaves_the_hf_folder_byte_for_byte_the_same(tmp_path: Path) -> None:
    quantkit.convert(_meta_folder(tmp_path / "two", oracle.make("llama"), 2), tmp_path / "first")
    quantkit.convert(tmp_path / "first", tmp_path / "four", to="meta", mp=4)
    quantkit.convert(tmp_path / "four", tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_meta_shards_are_resharded_directly(tmp_path: Path) -> None:
    model = oracle.make("llama")
    source = _meta_folder(tmp_path / "two", model, 2)
    quantkit.convert(source, tmp_path / "eight", to="meta", mp=8)
    _require_equal_shards(_read(tmp_path / "eight"), _shards(_meta_tensors(model), 2, 8, 1))


@pytest.mark.parametrize("mp", [1, 2])
def test_the_hf_folder_gives_transformers_the_original_logits(mp: int, tmp_path: Path) -> None:
    model = oracle.make("llama")
    quantkit.convert(_meta_folder(tmp_path / "meta", model, mp), tmp_path / "hf")
    tokens = oracle.random_tokens(24, batch=2)
    loaded = oracle.load(tmp_path / "hf")
    torch.testing.assert_close(
        oracle.logits(loaded, tokens), oracle.logits(model, tokens), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("mp", "embedding_axis"), [(1, 0), (2, 0), (2, 1), (4, 1)])
def test_a_doubled_output_is_tied_in_hf_and_doubled_again_in_meta(
    mp: int, embedding_axis: int, tmp_path: Path
) -> None:
    model = oracle.make("llama", tie_word_embeddings=True, vocab_size=TIKTOKEN_ROWS)
    source = _meta_folder(tmp_path / "meta", model, mp, embedding_axis)
    if embedding_axis == 0:
        _write_tiktoken(source)
    quantkit.convert(source, tmp_path / "hf", source_check=False)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "hf").names()
    tokens = oracle.random_tokens(16)
    loaded = oracle.load(tmp_path / "hf")
    torch.testing.assert_close(
        oracle.logits(loaded, tokens), oracle.logits(model, tokens), rtol=0, atol=1e-5
    )
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=mp, source_check=False)
    _require_equal_shards(_read(tmp_path / "back"), _read(source))


@pytest.mark.parametrize("row", [0, -1], ids=["first-row", "last-row"])
def test_an_output_that_differs_in_one_row_is_not_tied(row: int, tmp_path: Path) -> None:
    model = oracle.make("llama", tie_word_embeddings=True)
    tensors = {name: value.clone() for name, value in _meta_tensors(model).items()}
    tensors["output.weight"][row] += 1
    source = _write(tmp_path / "meta", _shards(tensors, 2, 2, 1), _params(model))
    quantkit.convert(source, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=2)
    assert not open_checkpoint(tmp_path / "hf").config.tied_embeddings
    _require_equal_shards(_read(tmp_path / "back"), _read(source))


def test_the_embedding_is_split_by_rows_for_a_tiktoken_vocabulary(tmp_path: Path) -> None:
    model = oracle.make("llama", vocab_size=TIKTOKEN_ROWS)
    source = _meta_folder(tmp_path / "meta", model, 2, embedding_axis=0)
    _write_tiktoken(source)
    quantkit.convert(source, tmp_path / "hf", source_check=False)
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=2, source_check=False)
    _require_equal_shards(_read(tmp_path / "back"), _read(source))
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (
        source / "tokenizer.model"
    ).read_bytes()


def test_the_embedding_is_split_by_rows_for_a_byte_level_tokenizer_json(tmp_path: Path) -> None:
    source = _meta_folder(
        tmp_path / "meta", oracle.make("llama", vocab_size=TIKTOKEN_ROWS), 2, embedding_axis=0
    )
    _write_tiktoken(source)
    quantkit.convert(source, tmp_path / "hf", source_check=False)
    (tmp_path / "hf" / "tokenizer.model").unlink()
    notes = quantkit.convert(
        tmp_path / "hf", tmp_path / "back", to="meta", mp=2, source_check=False
    ).notes
    _require_equal_shards(_read(tmp_path / "back"), _read(source))
    assert any("tokenizer.model" in note for note in notes)


def test_the_embedding_is_split_by_columns_for_a_sentencepiece_vocabulary(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "hf")
    quantkit.convert(tmp_path / "hf", tmp_path / "back", to="meta", mp=2)
    expected = _read(demo_model)
    for shard in expected:
        shard.pop("rope.freqs", None)
    _require_equal_shards(_read(tmp_path / "back"), expected)
    rows, columns = _read(tmp_path / "back")[0]["tok_embeddings.weight"].shape
    assert (rows, columns) == (2048, 64)


def _llama(**changes: Any) -> ModelConfig:
    """A Llama without a tokenizer, as quantkit reads it from a Hugging Face config."""
    own = {"model_type": "llama", "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None}
    return config_from_hf({**oracle.SIZES, **own, **changes}, "config.json")


def _meta_hidden(params: dict[str, Any]) -> int:
    """The feed-forward width that Meta's code makes of params.json."""
    hidden = int(2 * (4 * params["dim"]) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple_of: int = params["multiple_of"]
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _from_params(params: dict[str, Any], config: ModelConfig) -> ModelConfig:
    return config_from_meta(
        json.loads(json.dumps(params)),
        "params.json",
        vocab_size=config.vocab_size,
        intermediate_size=_meta_hidden(params),
        tied_embeddings=False,
        dtype=config.dtype,
    )


@settings(deadline=None)
@given(st.integers(1, 2048), st.integers(1, 70000))
def test_params_json_gives_back_any_feed_forward_width(pairs: int, hidden: int) -> None:
    config = _llama(hidden_size=16 * pairs, intermediate_size=hidden)
    assert _from_params(config_to_meta(config), config) == config


@pytest.mark.parametrize(
    ("dim", "hidden", "published"),
    [
        (4096, 11008, (256, None)),
        (5120, 13824, (256, None)),
        (8192, 22016, (256, None)),
        (4096, 14336, (1024, 1.3)),
        (8192, 28672, (4096, 1.3)),
        (2048, 8192, (256, 1.5)),
        (3072, 8192, (256, 1.0)),
    ],
)
def test_params_json_gives_the_widths_of_published_models(
    dim: int, hidden: int, published: tuple[int, float | None]
) -> None:
    multiple_of, multiplier = published
    assert (
        _meta_hidden({"dim": dim, "multiple_of": multiple_of, "ffn_dim_multiplier": multiplier})
        == hidden
    )
    assert _meta_hidden(config_to_meta(_llama(hidden_size=dim, intermediate_size=hidden))) == hidden


SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("factor", [None, 8.0, 32.0, 16.0])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
def test_rope_settings_come_back_from_params_json(
    theta: float, factor: float | None, tmp_path: Path
) -> None:
    rope = {"rope_type": "default"} if factor is None else {**SCALED, "factor": factor}
    model = oracle.make("llama", rope_parameters={**rope, "rope_theta": theta})
    quantkit.convert(oracle.save(model, tmp_path / "hf"), tmp_path / "meta", to="meta", mp=2)
    written = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert written["rope_theta"] == theta
    assert written.get("use_scaled_rope", False) is (factor is not None)
    assert written.get("rope_scaling_factor") == factor
    source, back = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "meta")
    assert source.config.differences(back.config) == []
    assert back.notes == []


@pytest.mark.parametrize(
    ("theta", "scaled", "context"),
    [(10000.0, False, 4096), (500000.0, False, 8192), (500000.0, True, 131072)],
)
def test_params_json_leaves_out_what_the_reference_code_passes_itself(
    theta: float, scaled: bool, context: int
) -> None:
    rope = {**SCALED, "factor": 8.0} if scaled else {"rope_type": "default"}
    config = _llama(rope_parameters={**rope, "rope_theta": theta}, max_position_embeddings=context)
    params = config_to_meta(config)
    assert not {"max_seq_len", "max_batch_size"} & set(params)
    assert _from_params(params, config).max_context == context


@pytest.mark.parametrize(
    ("heads", "dim", "factor"), [(8, 64, 32.0), (2, 3072, 32.0), (2, 4096, 8.0)]
)
def test_a_rope_factor_that_params_json_leaves_out_is_assumed_and_said(
    heads: int, dim: int, factor: float, tmp_path: Path
) -> None:
    model = oracle.make(
        "llama",
        hidden_size=dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
    )
    params = {**_params(model), "head_dim": 8, "use_scaled_rope": True, "rope_theta": 500000.0}
    folder = _write(tmp_path / "meta", _shards(_meta_tensors(model), heads, 1, 1), params)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.rope.factor == factor
    (note,) = checkpoint.notes
    assert "params.json" in note
    assert f"rope_scaling_factor; {factor:g} " in note
    assert note in quantkit.convert(folder, tmp_path / "hf").notes


@pytest.mark.parametrize(
    ("kind", "changes", "lost"),
    [
        ("llama", {"attention_bias": True}, "biases"),
        ("llama", {"mlp_bias": True}, "biases"),
        ("llama", {"head_dim": 16}, "a head size"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "linear rope",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    **SCALED,
                    "factor": 8.0,
                    "high_freq_factor": 3.0,
                    "rope_theta": 1e4,
                }
            },
            "llama3",
        ),
        ("mistral", {"sliding_window": 7}, "sliding-window"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "rotary positions"),
        ("qwen2", {}, "biases"),
        ("qwen3", {}, "q/k norms"),
        ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}, "partial rotary"),
        ("granite", {}, "scale"),
        ("ministral3", {"pad_token_id": 0}, "scaled by position"),
    ],
)
def test_a_model_that_metas_format_has_no_words_for_is_refused(
    kind: str, changes: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    model = oracle.make(kind, **changes)
    with raises(UnsupportedError, lost):
        quantkit.convert(oracle.save(model, tmp_path / "hf"), tmp_path / "meta", to="meta")
    assert not (tmp_path / "meta").exists()


@pytest.mark.parametrize("stated", [-1, None, oracle.SIZES["vocab_size"]])
@pytest.mark.parametrize("embedding_axis", [0, 1])
def test_the_vocabulary_is_that_of_the_embedding(
    stated: int | None, embedding_axis: int, tmp_path: Path
) -> None:
    folder = _meta_folder(tmp_path / "meta", oracle.make("llama"), 2, embedding_axis)
    oracle.edit_json(folder / "params.json", vocab_size=stated)
    assert open_checkpoint(folder).config.vocab_size == oracle.SIZES["vocab_size"]


def test_a_vocabulary_that_contradicts_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = _meta_folder(tmp_path / "meta", oracle.make("llama"), 2)
    oracle.edit_json(folder / "params.json", vocab_size=97)
    with raises(CheckpointError, "vocab_size", path=folder / "params.json", found=97, expected=96):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "mp", "found"),
    [
        ({}, 3, 8),
        ({}, 16, 8),
        ({}, 0, 8),
        ({}, -1, 8),
        ({"vocab_size": 97}, 2, 97),
        ({"intermediate_size": 90}, 4, 90),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, 4, 6),
    ],
)
def test_shards_that_do_not_divide_the_model_are_refused(
    changes: dict[str, Any], mp: int, found: int, tmp_path: Path
) -> None:
    source = oracle.save(oracle.make("llama", **changes), tmp_path / "hf")
    with raises(RequestError, f"{mp} ", found=found):
        quantkit.convert(source, tmp_path / "meta", to="meta", mp=mp)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("change", ["renamed", "added", "removed"])
def test_shards_with_different_tensors_are_refused(change: str, tmp_path: Path) -> None:
    model = oracle.make("llama")
    shards = _shards(_meta_tensors(model), 2, 2, 1)
    name = "layers.1.attention.wo.weight"
    if change == "added":
        shards[1]["extra"] = torch.zeros(1)
    else:
        value = shards[1].pop(name)
        if change == "renamed":
            shards[1]["layers.3.attention.wo.weight"] = value
    folder = _write(tmp_path / "meta", shards, _params(model))
    path = folder / "consolidated.01.pth"
    with raises(CheckpointError, "consolidated.00.pth", path=path):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.attention.wk.weight",
        "layers.0.attention.wv.weight",
        "layers.1.ffn_norm.weight",
        "norm.weight",
    ],
)
def test_copies_that_differ_among_shards_are_refused(name: str, tmp_path: Path) -> None:
    model = oracle.make("llama")
    shards = _shards(_meta_tensors(model), 2, 4, 1)
    shards[3][name].view(-1)[-1] += 1
    folder = _write(tmp_path / "meta", shards, _params(model))
    with raises(CheckpointError, f"'{name}'", path=folder):
        quantkit.convert(folder, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


def test_shards_of_different_float_types_are_refused(tmp_path: Path) -> None:
    model = oracle.make("llama")
    shards = _shards(_meta_tensors(model), 2, 2, 1)
    name = "layers.1.attention.wq.weight"
    shards[0][name] = shards[0][name].bfloat16()
    folder = _write(tmp_path / "meta", shards, _params(model))
    path = folder / "consolidated.01.pth"
    with raises(CheckpointError, f"'{name}'", "float32", "bfloat16", path=path):
        quantkit.convert(folder, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


@pytest.mark.parametrize(
    ("tied", "name", "axis"),
    [
        (False, "layers.1.attention.wo.weight", 1),
        (False, "output.weight", 1),
        (True, "output.weight", 0),
        (True, "output.weight", 1),
        (True, "tok_embeddings.weight", 0),
    ],
)
def test_a_shard_with_a_smaller_tensor_is_refused(
    tied: bool, name: str, axis: int, tmp_path: Path
) -> None:
    model = oracle.make("llama", tie_word_embeddings=tied)
    shards = _shards(_meta_tensors(model), 2, 2, 1)
    shards[1][name] = shards[1][name].narrow(axis, 0, 8).clone()
    folder = _write(tmp_path / "meta", shards, _params(model))
    path = folder / "consolidated.01.pth"
    with raises(CheckpointError, f"'{name}'", "consolidated.00.pth", path=path):
        open_checkpoint(folder)


@pytest.mark.parametrize("mp", [1, 2])
@pytest.mark.parametrize("stated", [1, 2, 8])
def test_kv_heads_that_contradict_the_weights_are_refused(
    stated: int, mp: int, tmp_path: Path
) -> None:
    folder = _meta_folder(tmp_path / "meta", oracle.make("llama", num_key_value_heads=4), mp)
    oracle.edit_json(folder / "params.json", n_kv_heads=stated)
    with pytest.raises(CheckpointError, match=r"k_proj|wk"):
        open_checkpoint(folder)


def test_params_json_without_kv_heads_means_one_for_each_head(tmp_path: Path) -> None:
    model = oracle.make("llama", num_key_value_heads=8)
    folder = _meta_folder(tmp_path / "meta", model, 2)
    oracle.edit_json(folder / "params.json", n_kv_heads=None)
    tokens = oracle.random_tokens(24)
    assert (_our_logits(folder, tokens) - oracle.logits(model, tokens)).abs().max() < 1e-4
