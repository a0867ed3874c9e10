"""Which device has what: put together again, the parts are the model. No JAX."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from error_parts import raises
from schemes import any_scheme
from torch import Tensor

from quantkit.architectures.config import ExpertsConfig, LayerConfig, ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import RequestError, UnsupportedError
from quantkit.evals.synthetic import synthetic
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.split import DeviceSplit, require_trainable

SCHEMES = ["int8", "int4-g32", "int4-g128", "int4-g128-asym", "int8-g64-asym"]


def _config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
    }
    config = replace(synthetic("llama-160m", None).config, layers=(LayerConfig(),))
    return replace(config, **{**sizes, "vocab_size": 99, **changes})


def _parameter(config: ModelConfig, child: str) -> Parameter:
    return next(
        parameter for parameter in parameters(config) if parameter.name.endswith(child + ".weight")
    )


def _weight(split: DeviceSplit, parameter: Parameter, value: object, rank: int) -> Tensor:
    """What a device's leaves mean, [O, I]."""
    leaves = {
        leaf.name.rpartition(".")[2]: leaf.value for leaf in split.leaves(parameter, value, rank)
    }  # type: ignore[arg-type]
    if "weight" in leaves:
        return leaves["weight"]
    zero = leaves["zero"].float().unsqueeze(-1) if "zero" in leaves else 0
    weight = (leaves["codes"].float() - zero) * leaves["scale"].float().unsqueeze(
        -1
    )  # [G, O, I / G]
    return weight.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("child", ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"])
def test_the_parts_make_up_the_weight(child: str) -> None:
    for scheme, devices in itertools.product((None, *SCHEMES), (1, 2, 4, 8)):
        config = _config()
        parameter = _parameter(config, child)
        weight = torch.randn(parameter.shape)
        value, schemes = weight, {}
        if scheme is not None:
            schemes = {parameter.module: any_scheme(scheme).fit_to_columns(parameter.shape[1])}
            value = quantize_rtn(weight, schemes[parameter.module], torch.float16)
            weight = value.dequantize()
        split = DeviceSplit(config, schemes, devices)
        parts = [_weight(split, parameter, value, rank) for rank in range(devices)]
        case = scheme, devices
        assert len({part.shape for part in parts}) == 1, case
        if child == "k_proj" and devices == 8:  # each head twice
            for first, second in zip(parts[::2], parts[1::2], strict=True):
                assert torch.equal(first, second), case
            parts = parts[::2]
        axis = 1 if child in ("o_proj", "down_proj") else 0
        whole = torch.cat(parts, dim=axis)
        assert torch.equal(whole.narrow(axis, 0, weight.shape[axis]), weight), case
        padding = whole.shape[axis] - weight.shape[axis]
        assert not whole.narrow(axis, weight.shape[axis], padding).any(), case


@pytest.mark.parametrize(
    ("devices", "group", "expected"),
    [
        (8, 128, (128, 11264)),
        (16, 128, (64, 11264)),
        (16, 32, (32, 11264)),
        (8, 64, (64, 11264)),
        (4, 64, (64, 11008)),
    ],
)
def test_groups_that_do_not_divide_are_padded_or_cut(
    devices: int, group: int, expected: tuple[int, int]
) -> None:
    config = _config(intermediate_size=11008, num_heads=16, num_kv_heads=16)
    scheme = QuantScheme(4, group)
    parameter = _parameter(config, "down_proj")
    split = DeviceSplit(config, {parameter.module: scheme}, devices)
    shards = split.shards(parameter)
    assert (shards.group, shards.count * devices) == expected
    assert split.shards(_parameter(config, "gate_proj")).count == shards.count


def test_biases_of_sums_are_whole_and_the_others_divided() -> None:
    config = replace(_config(), qkv_bias=True, output_bias=True, mlp_bias=True)
    split = DeviceSplit(config, {}, 4)
    axes = {
        parameter.name.split(".")[-2]: split.shards(parameter).axis
        for parameter in parameters(config)
        if parameter.leaf == "bias"
    }
    assert axes == {
        "q_proj": 0,
        "k_proj": 0,
        "v_proj": 0,
        "o_proj": None,
        "gate_proj": 0,
        "up_proj": 0,
        "down_proj": None,
    }


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices"), [(8, 4, 3), (12, 4, 6), (8, 8, 16), (8, 4, 0)]
)
def test_heads_that_can_not_be_divided_are_refused(heads: int, kv_heads: int, devices: int) -> None:
    with raises(RequestError, found=f"{devices} devices"):
        DeviceSplit(_config(num_heads=heads, num_kv_heads=kv_heads), {}, devices)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clip_qkv": 5.0, "sinks": True}, "clip qkv, sinks"),
        ({"qk_norm": "width"}, "qk norm"),
        ({"experts": ExpertsConfig(2, 8, 1), "layers": (LayerConfig(experts=True),)}, "experts"),
    ],
)
def test_features_that_programs_do_not_have_are_refused(
    changes: dict[str, Any], named: str
) -> None:
    with raises(UnsupportedError, "llama", found=named):
        DeviceSplit(_config(**changes), {}, 1)


def test_columns_between_heads_are_not_padded() -> None:
    config = _config(
        num_heads=40, num_kv_heads=40, head_dim=104
    )  # 520 columns a device: 65 groups of 8
    weight = _parameter(config, "o_proj")
    shards = DeviceSplit(config, {weight.module: QuantScheme(4, 32)}, 8).shards(weight)
    assert (shards.count, shards.group) == (520, 8)


@pytest.mark.parametrize(
    ("scheme", "found"),
    [("q6_k", "q6_k"), ("q4_1", "float offsets of groups"), ("mxfp4", "mxfp4")],
)
def test_a_weight_that_is_no_integer_codes_with_scales_is_not_trained(
    scheme: str, found: str
) -> None:
    """Among others that are: as codes it would mean another weight."""
    model = synthetic("llama-160m", "int4-g128")
    require_trainable(model)
    name = "model.layers.1.mlp.up_proj"
    mixed = replace(model, schemes={**model.schemes, name: QuantScheme.parse(scheme)})
    with raises(UnsupportedError, f"'{name}.weight'", found=found):
        require_trainable(mixed)
    head = replace(model, schemes={**model.schemes, "lm_head": QuantScheme.parse(scheme)})
    require_trainable(head)  # it is read as floats
