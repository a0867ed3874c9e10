"""Which slices a process has of a model: together they are the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.architectures.config import ExpertsConfig, LayerConfig, ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import linear_columns
from quantkit.distributed.shard import CheckpointShard
from quantkit.distributed.split import split_model
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


LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}


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
def test_the_kv_heads_of_a_process(heads: int, kv_heads: int, size: int, rank: int, expected: list[int]) -> None:
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
def test_the_feed_forward_width_goes_by_whole_groups(scheme: str | None, size: int, widths: set[int]) -> None:
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
    with pytest.raises(RequestError, match=r"attention heads .*expected one of 1, 2, 4, 8\)"):
        split_model(config, {}, 0, 3)
    with pytest.raises(RequestError, match="vocabulary"):
        split_model(replace(config, vocab_size=9), {}, 0, 8)
    with pytest.raises(RequestError, match="feed-forward width"):
        split_model(config, _schemes(config, "int4-g32"), 0, 8)


def test_experts_are_refused() -> None:
    config = _config()
    experts = replace(config, layers=(LayerConfig(experts=True),), experts=ExpertsConfig(count=4, size=32, per_token=2))
    with pytest.raises(UnsupportedError, match=r"cannot share this architecture \(found tensor 'model.layers.0.mlp"):
        split_model(experts, {}, 0, 2)


def test_norms_over_all_heads_are_refused_where_processes_divide_the_heads() -> None:
    config = replace(_config(), qk_norm="width")
    split_model(config, {}, 0, 1)
    with pytest.raises(UnsupportedError, match=r"cannot share this architecture \(found norms over all heads"):
        split_model(config, {}, 0, 2)


def _shards(folder: Path, size: int) -> list[CheckpointShard]:
    whole = open_checkpoint(folder)
    return [CheckpointShard(whole, split_model(whole.config, schemes(whole), rank, size)) for rank in range(size)]


def _dense(value: Tensor | QuantTensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.dequantize()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32", "int4-g32-asym"])
def test_the_slices_are_the_checkpoint(scheme: str | None, size: int, tmp_path: Path) -> None:
    """The vocabulary of 97 is no multiple of anything; a head is half a group, a fourth at 8 processes."""
    changes = {"attention_bias": True, "mlp_bias": True, "vocab_size": 97, "intermediate_size": 256}
    folder = oracle.save(oracle.make("llama", **changes), tmp_path / "model")
    if scheme is not None:
        quantkit.quantize(folder, tmp_path / "quantized", scheme, accept_quality_loss=True)
        folder = tmp_path / "quantized"
    whole, shards = open_checkpoint(folder), _shards(folder, size)
    for name in whole.names():
        expected, parts = _dense(whole.load(name)), [shard.load(name) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            info = shard.info(name)
            assert tuple(part.shape) == info.shape
            assert (part.scheme if isinstance(part, QuantTensor) else None) == info.scheme
            last = part.shape[0]
            for rows in (TensorSlice(0, ((0, 5),)), TensorSlice(0, ((7, last),)), TensorSlice(0, ((last - 1, last),))):
                assert torch.equal(_dense(shard.load(name, rows)), _dense(rows.of_weight(part))), (name, rows)
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
        assert KVCache(config, 1, 5, torch.float32, "cpu").keys[0].shape == (1, heads, 5, 8)
        assert config.vocab_size == oracle.VOCABULARY
