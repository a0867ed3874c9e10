"""Which slices a process has of a model: together they are the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from torch import Tensor

import quantkit
from quantkit.architectures.config import (
    ExpertsConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
)
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import linear_columns
from quantkit.distributed.shard import CheckpointShard, split_model
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.model.cache import KVCache
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice


def _config(**changes: Any) -> ModelConfig:
    own = {"model_type": "llama", "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None}
    return config_from_hf({**oracle.SIZES, **own, **changes}, "config.json")


LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def _schemes(config: ModelConfig, scheme: str) -> dict[str, QuantScheme]:
    return Recipe(QuantScheme.parse(scheme)).assign(linear_columns(config))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rank", "expected"),
    [
        (8, 2, 2, 1, [1]),
        (8, 2, 4, 1, [0]),  # a KV head on two processes
        (8, 2, 8, 5, [1]),
        (12, 4, 6, 0, [0]),  # two queries of one
        (12, 4, 6, 1, [0, 1]),  # one query of each
        (6, 3, 2, 0, [0, 0, 1]),  # no equal numbers: one for each query
        (64, 8, 16, 15, [7]),
    ],
)
def test_the_kv_heads_of_a_process(
    heads: int, kv_heads: int, size: int, rank: int, expected: list[int]
) -> None:
    config = _config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads)
    found = split_model(config, {}, rank, size)
    rows = [row for start, stop in found.ranges["kv"] for row in range(start, stop)]
    assert rows == [head * 8 + row for head in expected for row in range(8)]
    assert (found.config.num_heads, found.config.num_kv_heads) == (heads // size, len(expected))


@pytest.mark.parametrize(
    ("scheme", "size", "widths"),
    [
        (None, 8, {1376}),
        ("int8", 8, {1376}),
        ("int4-g128", 2, {43 * 128}),
        ("int4-g128", 4, {21 * 128, 22 * 128}),  # 86 groups
        ("int4-g128", 32, {2 * 128, 3 * 128}),
    ],
)
def test_the_feed_forward_width_goes_by_whole_groups(
    scheme: str | None, size: int, widths: set[int]
) -> None:
    config = _config(**LLAMA_7B)
    schemes = {} if scheme is None else _schemes(config, scheme)
    found = [split_model(config, schemes, rank, size) for rank in range(size)]
    assert {one.config.intermediate_size for one in found} == widths
    stops = [one.ranges["intermediate"][0] for one in found]
    assert [start for start, _ in stops] == [0, *(stop for _, stop in stops[:-1])]
    assert stops[-1][1] == 11008


def test_groups_are_halved_where_whole_ones_go_too_unevenly() -> None:
    config = _config(intermediate_size=384, hidden_size=256)
    schemes = _schemes(config, "int4-g128")
    for size, group in ((1, 128), (2, 64), (4, 32)):  # of three groups one process would have two
        found = [split_model(config, schemes, rank, size) for rank in range(size)]
        assert {one.config.intermediate_size for one in found} == {384 // size}
        down = schemes["model.layers.0.mlp.down_proj"]
        assert {down.cut(*one.ranges["intermediate"][0]).group_size for one in found} == {group}


def test_too_many_processes_are_refused() -> None:
    config = _config()
    with raises(RequestError, found="3 processes, 8 heads", expected="one of 1, 2, 4, 8"):
        split_model(config, {}, 0, 3)
    with raises(RequestError, found=8, expected=9):
        split_model(replace(config, vocab_size=9), {}, 0, 8)
    with raises(RequestError, found=8, expected="at most 3: 96 in groups of 32"):
        split_model(config, _schemes(config, "int4-g32"), 0, 8)


def _with_experts(size: int = 768, **changes: Any) -> ModelConfig:
    experts = ExpertsConfig(count=2, size=size, per_token=1, **changes)
    return replace(_config(), layers=(LayerConfig(experts=True),), experts=experts)


def test_every_expert_is_split_by_whole_groups() -> None:
    config = _with_experts(shared_size=256)
    for scheme, size, widths, shared in (
        (None, 4, [192] * 4, 64),
        ("int4-g128", 4, [192] * 4, 64),  # six groups and two: halved
        ("int4-g128", 2, [384] * 2, 128),
        ("int4-g32", 8, [96] * 8, 32),
    ):
        schemes = {} if scheme is None else _schemes(config, scheme)
        found = [split_model(config, schemes, rank, size) for rank in range(size)]
        experts = [one.config.experts for one in found]
        assert [one.size for one in experts if one] == widths
        assert {one.shared_size for one in experts if one} == {shared}
        assert [one.ranges["expert_intermediate"][0][1] for one in found][-1] == 768
        assert {one.config.intermediate_size for one in found} == {96}  # of no layer


def test_too_many_processes_for_experts_are_refused() -> None:
    config = _with_experts(64)
    with raises(RequestError, "expert", found=4, expected="at most 2: 64 in groups of 32"):
        split_model(config, _schemes(config, "int4-g32"), 0, 4)
    shared = _with_experts(shared_size=64)
    with raises(RequestError, "shared", found=4, expected="at most 2: 64 in groups of 32"):
        split_model(shared, _schemes(shared, "int4-g32"), 0, 4)


def test_latent_attention_is_refused() -> None:
    latent = LatentAttentionConfig(query_rank=None, kv_rank=8, rope_dim=4, plain_dim=8, value_dim=8)
    with raises(UnsupportedError, "'model.layers.0.self_attn.o_proj.weight'"):
        split_model(replace(_config(), latent_attention=latent), {}, 0, 2)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_of_experts_and_sinks_are_the_checkpoint(
    kind: str, size: int, tmp_path: Path
) -> None:
    experts = {
        "num_experts": 3,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    }
    widths = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "head_dim": 8}
    folder = oracle.save(
        oracle.make(kind, **experts, **(widths if kind != "olmoe" else {})), tmp_path / "model"
    )
    whole, shards = open_checkpoint(folder), _shards(folder, size)
    for name in whole.names():
        expected, parts = _dense(whole.load(name)), [_dense(shard.load(name)) for shard in shards]
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            found = torch.stack(parts).sum(0)
        elif (
            "layernorm" in name
            or "mlp.gate." in name
            or "shared_expert_gate" in name
            or name == "model.norm.weight"
        ):
            assert all(torch.equal(part, expected) for part in parts), name
            continue
        else:
            found = torch.cat(
                parts, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            )
        assert torch.equal(found, expected), name


def test_a_kv_head_on_several_processes_counts_once() -> None:
    config = _config(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    assert [split_model(config, {}, rank, 2).kv_shares for rank in range(2)] == [
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    ]
    assert split_model(_config(num_key_value_heads=2), {}, 3, 4).kv_shares == (0.5,)
    assert split_model(_config(num_key_value_heads=4), {}, 1, 2).kv_shares == (1, 1)


def _shards(folder: Path, size: int) -> list[CheckpointShard]:
    whole = open_checkpoint(folder)
    return [
        CheckpointShard(whole, split_model(whole.config, schemes(whole), rank, size))
        for rank in range(size)
    ]


def _dense(value: Tensor | QuantTensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.dequantize()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32", "int4-g32-asym"])
def test_the_slices_are_the_checkpoint(scheme: str | None, size: int, tmp_path: Path) -> None:
    """The vocabulary of 97 is no multiple of anything; a head is half a group, a fourth at 8
    processes.
    """
    changes = {"attention_bias": True, "mlp_bias": True, "vocab_size": 97, "intermediate_size": 256}
    folder = oracle.save(oracle.make("llama", **changes), tmp_path / "model")
    if scheme is not None:
        quantkit.quantize(
            folder, tmp_path / "quantized", scheme, method="rtn", accept_quality_loss=True
        )
        folder = tmp_path / "quantized"
    whole, shards = open_checkpoint(folder), _shards(folder, size)
    for name in whole.names():
        expected, parts = _dense(whole.load(name)), [shard.load(name) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            info = shard.info(name)
            assert tuple(part.shape) == info.shape
            assert (part.scheme if isinstance(part, QuantTensor) else None) == info.scheme
            last = part.shape[0]
            for rows in (
                TensorSlice(0, ((0, 5),)),
                TensorSlice(0, ((7, last),)),
                TensorSlice(0, ((last - 1, last),)),
            ):
                assert torch.equal(_dense(shard.load(name, rows)), _dense(rows.of_weight(part))), (
                    name,
                    rows,
                )
        dense = [_dense(part) for part in parts]
        if "k_proj" in name or "v_proj" in name:  # two KV heads
            dense = dense[:: size // 2]
        if "embed_tokens" in name or name == "lm_head.weight":
            found = torch.cat(dense)
            assert not found[97:].any()
            found = found[:97]
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            found = torch.stack(dense).sum(0)
            assert torch.equal(dense[0], expected)
        elif "norm" in name:
            found = dense[-1]
        else:
            found = torch.cat(dense, 1 if "o_proj" in name or "down_proj" in name else 0)
        assert torch.equal(found, expected), name


def test_the_cache_holds_the_own_kv_heads_only(tmp_path: Path) -> None:
    folder = oracle.save(oracle.make("llama", num_key_value_heads=4), tmp_path / "model")
    for size, heads in ((2, 2), (4, 1), (8, 1)):
        config = _shards(folder, size)[-1].config
        cache = KVCache(config, 1, 5, torch.float32, "cpu")
        assert cache.rows(0).keys.rows.shape == (1, heads, 5, 8)
        assert config.vocab_size == oracle.VOCABULARY
