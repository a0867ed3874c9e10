"""Small floats as codes, compared with torch's casts and compressed-tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import generate_gparam, maybe_pad_tensor_for_block_quant
from error_parts import raises
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.kernels.dispatch import BACKENDS
from quantkit.kernels.triton_backend import TRITON
from quantkit.tensors import float_codes
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import FLOAT_SCHEMES, MXFP4, NVFP4, TILE, Codes, QuantScheme, Scales

FP4 = {"num_bits": 4, "type": "float"}
ARGS = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [TILE, TILE],
    },
    "mxfp4": {**FP4, "strategy": "group", "group_size": 32},
    "nvfp4": {**FP4, "strategy": "tensor_group", "group_size": 16},
}


def weights() -> Tensor:
    """[200, 256] bfloat16: with a row of zeros, an outlier, subnormal numbers and steps that are
    ties.
    """
    weight = torch.randn(200, 256) / 20
    weight[3] = 0
    weight[5, 7] = 3e38
    weight[6] = 1e-39
    weight[8] = torch.arange(256) % 25 / 4
    return weight.bfloat16()


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_compressed_tensors(name: str, scale_dtype: torch.dtype) -> None:
    weight = weights()
    quantized = quantize_rtn(weight, FLOAT_SCHEMES[name], scale_dtype)
    scale = quantized.scale[::TILE] if name == "fp8-block" else quantized.scale
    x = (
        maybe_pad_tensor_for_block_quant(weight.float(), (TILE, TILE))
        if name == "fp8-block"
        else weight.float()
    )
    outer = None if quantized.outer is None else quantized.outer[0]
    args = QuantizationArgs(**ARGS[name])
    expected = quantize(x=x, scale=scale.float(), zero_point=None, args=args, global_scale=outer)[
        : len(weight)
    ]
    assert torch.equal(float_codes.decode_values(quantized.codes, quantized.scheme.codes), expected)
    assert quantized.dequantize().isfinite().all()
    assert not quantized.dequantize()[3].any()


def test_every_float8_is_its_own_code() -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(
        float_codes.decode_values(codes, Codes.E4M3).nan_to_num(), values.nan_to_num()
    )
    kept = values.isfinite()
    assert torch.equal(float_codes.encode_values(values, Codes.E4M3)[kept], codes[kept])


def test_every_e2m1_is_its_own_code_and_its_gap_that_to_a_neighbour() -> None:
    codes = torch.arange(16).to(torch.uint8)
    values = float_codes.decode_values(codes, Codes.E2M1)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(float_codes.encode_values(values, Codes.E2M1), codes)
    positive = values[:8]
    above = torch.cat((positive.diff(), positive.new_full((1,), 2)))
    assert torch.equal(float_codes.compute_gaps(codes[:8], Codes.E2M1), above)
    codes = torch.arange(0x7E).to(torch.uint8)  # up to the last but one before NaN
    steps = float_codes.decode_values(torch.arange(0x7F).to(torch.uint8), Codes.E4M3).diff()
    assert torch.equal(float_codes.compute_gaps(codes, Codes.E4M3), steps)


def test_powers_of_two_follow_the_specification() -> None:
    weight = weights()
    scale = quantize_rtn(weight, MXFP4, torch.bfloat16).scale
    largest = weight.float().view(200, -1, 32).abs().amax(-1)
    for power, value in zip(scale.flatten().tolist(), largest.flatten().tolist(), strict=True):
        exponent = max(-127, math.floor(math.log2(value)) - 2) if value else 0
        assert power == 2.0**exponent


def test_the_outer_scale_is_that_of_compressed_tensors() -> None:
    weight = torch.randn(32, 64).bfloat16()
    quantized = quantize_rtn(weight, NVFP4, torch.bfloat16)
    assert quantized.outer is not None
    assert torch.equal(quantized.outer, generate_gparam(*weight.float().aminmax()).expand(32, 1))
    assert quantized.scale.max() == float_codes.LARGEST[Codes.E4M3]


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_rows_and_columns_are_those_of_the_weight(name: str) -> None:
    value = quantize_rtn(weights(), FLOAT_SCHEMES[name], torch.float32)
    whole = value.dequantize()
    assert torch.equal(value.rows(2, 9).dequantize(), whole[2:9])
    assert torch.equal(value.columns(128, 256).dequantize(), whole[:, 128:256])
    assert torch.equal(value.take(torch.tensor([7, 1])).dequantize(), whole[[7, 1]])


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_only_those_of_mxfp4_are_multiplied_and_only_on_cpus(name: str) -> None:
    supporting: set[str] = set()
    for backend in BACKENDS:
        device = torch.device("cuda" if backend is TRITON else "cpu")
        if backend.explain_unsupported(FLOAT_SCHEMES[name], device, torch.float32) is None:
            supporting.add(backend.name)
    assert supporting <= ({"cpu-exact", "cpu-fast"} if name == "mxfp4" else set())


@pytest.mark.parametrize(
    ("name", "columns", "fitted"),
    [
        ("fp8", 40, "fp8"),
        ("fp8-block", 192, "fp8"),
        ("fp8-block", 256, "fp8-block"),
        ("mxfp4", 48, "int8"),
        ("mxfp4", 64, "mxfp4"),
        ("nvfp4", 48, "nvfp4"),
        ("nvfp4", 40, "int8"),
    ],
)
def test_rows_that_groups_do_not_divide_have_another_scheme(
    name: str, columns: int, fitted: str
) -> None:
    assert str(QuantScheme.parse(name).fit_to_columns(columns)) == fitted


@pytest.mark.parametrize(
    "fields",
    [
        (4, 32, True, Scales.POWERS),
        (8, None, True, Scales.FLOATS, Codes.E2M1),
        (4, None, True, Scales.NESTED),
    ],
)
def test_scales_of_small_floats_go_with_such_codes(fields: tuple[Any, ...]) -> None:
    with raises(RequestError, expected="fp8, fp8-block, mxfp4, nvfp4"):
        QuantScheme(*fields)


def test_other_groups_of_small_floats_are_not_written() -> None:
    reason = CompressedTensors().codec(
        QuantScheme(bits=4, group_size=64, symmetric=True, scales=Scales.POWERS, codes=Codes.E2M1)
    )
    assert isinstance(reason, Reason)
    assert reason.expected == "fp8, fp8-block, mxfp4, nvfp4"


def test_an_outer_scale_goes_with_its_scheme_alone() -> None:
    value = quantize_rtn(weights(), NVFP4, torch.bfloat16)
    with pytest.raises(ValueError, match="outer"):
        QuantTensor(value.codes, value.scale, None, NVFP4)
    with pytest.raises(ValueError, match="outer"):
        QuantTensor(value.codes, value.scale[:, ::2].float(), None, MXFP4, outer=value.outer)
