"""GGUF's blocks: the same codes and scales both ways, byte for byte, or a reason."""

from __future__ import annotations

import itertools
import struct

import gguf
import numpy as np
import pytest
import torch
from case_names import case
from error_parts import raises
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.codecs.ggml import (
    BLOCK_TYPES,
    CODED_TYPES,
    Q4_0,
    Q8_0,
    BlockType,
    GgmlBlocks,
    block_type,
)
from quantkit.formats.codecs.table import METHODS
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import GGUF_SCHEMES, QuantScheme, Scales

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def weight(
    scheme: QuantScheme, rows: int, columns: int, dtype: torch.dtype = torch.float16
) -> QuantTensor:
    """Codes of the whole range, scales of both signs, subnormal and zero among them."""
    codes = torch.randint(scheme.levels, (rows, columns), dtype=torch.uint8)
    scale = torch.randn(rows, scheme.groups(columns)).mul(0.01).to(torch.bfloat16).half()
    scale.view(-1)[:3] = torch.tensor([-0.0, 2.0**-24, -(2.0**-17)])[: scale.numel()]
    zero = None if scheme.symmetric else torch.full(scale.shape, 3, dtype=torch.uint8)
    return QuantTensor(codes, scale.to(dtype), zero, scheme)


def blocks(kind: BlockType, value: QuantTensor) -> Tensor:
    found = kind.encode(value)
    assert isinstance(found, Tensor)
    return found


def by_hand(kind: BlockType, value: QuantTensor) -> bytes:
    """The bytes of a weight, block by block, as the layout is told."""
    found = b""
    size = value.shape[1] // value.scale.shape[1]
    for row, scales in zip(value.codes.tolist(), value.scale.tolist(), strict=True):
        for start in range(0, len(row), 32):
            found += struct.pack("<e", scales[start // size])
            codes = row[start : start + 32]
            if kind is Q8_0:
                found += struct.pack("<32b", *(code - 128 for code in codes))
            else:
                found += bytes(codes[j] + 16 * codes[j + 16] for j in range(16))
    return found


def test_codes_and_scales_stay_what_they_are() -> None:
    for bits, size, dtype in itertools.product((4, 8), (32, 64, 96, 128, None), FLOATS):
        with case(bits, size, dtype):
            _require_kept(QuantScheme(bits, size), dtype)


def _require_kept(scheme: QuantScheme, dtype: torch.dtype) -> None:
    kind = block_type(scheme)
    value = weight(scheme, 7, 384, dtype)
    raw = blocks(kind, value)

    assert bytes(raw.numpy()) == by_hand(kind, value)
    assert raw.shape == (7, kind.type.row_bytes(384))
    back = kind.decode(raw)
    assert back.scheme == QuantScheme(scheme.bits, 32)
    assert back.codes.equal(value.codes)
    assert back.scale.equal(value.scale.half().repeat_interleave(12 // value.scale.shape[1], -1))
    assert back.scale.view(torch.int16)[0, 0] == value.scale.half().view(torch.int16)[0, 0], (
        "the sign of a zero"
    )
    assert back.dequantize().equal(value.dequantize())
    assert blocks(kind, back).equal(raw)


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_the_owner_reads_the_same_weights(kind: BlockType) -> None:
    value = weight(QuantScheme(kind.scheme.bits, 64), 5, 192)

    theirs = gguf.quants.dequantize(
        blocks(kind, value).numpy(), gguf.GGMLQuantizationType[kind.type.name]
    )

    assert np.array_equal(theirs, value.dequantize().numpy())


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_what_the_owner_quantized_keeps_every_byte(kind: BlockType) -> None:
    theirs = gguf.quants.quantize(
        np.random.default_rng(0).standard_normal((6, 160)).astype(np.float32),
        gguf.GGMLQuantizationType[kind.type.name],
    )
    raw = torch.from_numpy(theirs)

    value = kind.decode(raw)

    assert blocks(kind, value).equal(raw)
    assert np.array_equal(
        value.dequantize().numpy(),
        gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind.type.name]),
    )
    assert kind is Q8_0 or bool((value.scale < 0).any()), "its scales have both signs"


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (Q4_0, weight(QuantScheme(4, 48), 2, 96), "int4-g48"),
        (Q4_0, weight(QuantScheme(4, 16), 2, 96), "int4-g16"),
        (Q4_0, weight(QuantScheme(4, 64, False), 2, 128), "int4-g64-asym"),
        (Q8_0, weight(QuantScheme(8, None), 2, 80), "80 columns"),
        (Q4_0, weight(QuantScheme(8, 32), 2, 96), "int8-g32"),
    ],
)
def test_other_schemes_have_a_reason(kind: BlockType, value: QuantTensor, found: str) -> None:
    reason = kind.encode(value)

    assert isinstance(reason, Reason)
    assert str(reason.found) == found


@pytest.mark.parametrize("number", [1e-9, 65536.0, 1.0 + 2.0**-11])
def test_a_scale_that_float16_has_not_is_a_reason(number: float) -> None:
    value = weight(QuantScheme(4, 32), 3, 64, torch.float32)
    value.scale[1, 1] = number

    reason = Q4_0.encode(value)

    assert isinstance(reason, Reason)
    assert reason.expected == "float16 scales"
    assert reason.found == f"{value.scale[1, 1].item():.9g}"


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_held_as_such(number: float) -> None:
    """Who carries codes refuses it before, unless it is allowed."""
    value = weight(QuantScheme(4, 32), 3, 64, torch.float32)
    value.scale[1, 1] = number

    found = Q4_0.encode(value)

    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(
        Q4_0.decode(found).scale.float(), value.scale, rtol=0, atol=0, equal_nan=True
    )


BLOCK_SCHEMES = (*CODED_TYPES.keys() - BLOCK_TYPES.keys(),)


def in_blocks(kind: BlockType, rows: int = 3) -> QuantTensor:
    """Codes, integers, and float16 scales or powers of two of the whole range."""
    groups, blocks = 512 // (kind.scheme.group_size or 1), 512 // kind.type.block
    nested, asymmetric = kind.scheme.scales is Scales.SUPER_BLOCKS, not kind.scheme.symmetric
    integers = {2: (0, 16), 3: (-32, 32), 6: (-128, 128)}.get(kind.scheme.bits, (0, 64))
    if kind.type is GgmlType.IQ4_XS:
        integers = (-32, 32)

    def inner() -> Tensor:
        if nested:
            return torch.randint(*integers, (rows, groups)).half()
        if kind.scheme.scales is Scales.POWERS:
            return torch.randint(-127, 126, (rows, groups)).float().exp2()
        return torch.randn(rows, groups).half()

    def outer() -> Tensor:
        return torch.randn(rows, blocks).mul_(0.01).half()

    codes = torch.randint(kind.scheme.levels, (rows, 512), dtype=torch.uint8)
    scales = BlockScales(
        inner(),
        inner() if asymmetric else None,
        outer() if nested else None,
        outer() if nested and asymmetric else None,
    )
    return QuantTensor.of_blocks(codes, scales, kind.scheme)


@pytest.mark.parametrize("name", sorted(BLOCK_SCHEMES))
def test_k_quants_are_what_their_owner_reads(name: GgmlType) -> None:
    kind = CODED_TYPES[name]
    value = in_blocks(kind)
    raw = blocks(kind, value)
    assert raw.shape == (3, kind.type.row_bytes(512))
    theirs = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(theirs, value.dequantize().numpy())


@pytest.mark.parametrize("name", sorted(BLOCK_SCHEMES))
def test_any_bytes_of_k_quants_stay_what_they_are(name: GgmlType) -> None:
    kind = CODED_TYPES[name]
    raw = torch.randint(256, (2, kind.type.row_bytes(768)), dtype=torch.uint8)
    assert blocks(kind, kind.decode(raw)).equal(raw)
    value = kind.decode(raw)
    half = value.columns(256, 512)
    assert half.codes.equal(value.codes[:, 256:512])
    assert torch.equal(half.dequantize().nan_to_num(), value.dequantize()[:, 256:512].nan_to_num())
    assert torch.equal(
        value.rows(1, 2).dequantize().nan_to_num(), value.dequantize()[1:].nan_to_num()
    )


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_k_quants_are_not_cut(name: str) -> None:
    value = in_blocks(CODED_TYPES[GgmlType(name)])
    with raises(RequestError, name.lower(), found="128 columns"):
        value.columns(0, 128)


def test_schemes_of_other_scales_are_refused() -> None:
    names = {method.name for method in METHODS.values() if method.schemes}
    assert len(names) > 3
    for name in names:
        found = choose_codec(METHODS[name], QuantScheme.parse("q4_k"))
        assert isinstance(found, Reason), name
        assert "GGUF" in found.problem
    for scheme in GGUF_SCHEMES.values():
        assert not isinstance(choose_codec(GgmlBlocks(), scheme), Reason)
    assert isinstance(CODED_TYPES[GgmlType.Q4_K].encode(weight(QuantScheme(4, 32), 2, 256)), Reason)
    assert isinstance(Q4_0.encode(in_blocks(CODED_TYPES[GgmlType.Q4_K])), Reason)
