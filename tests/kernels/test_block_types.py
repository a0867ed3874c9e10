"""The C++ kernels on llama.cpp's block types: values against the gguf package, products against
float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from block_bytes import dequantize, draw_blocks
from instruction_sets import HERE
from torch import Tensor

from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.ggml import CODED_TYPES
from quantkit.formats.codecs.ggml_blocks import LAYOUTS
from quantkit.kernels.library import load_kernels
from quantkit.kernels.triton_backend import TRITON
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme, Scales

pytestmark = pytest.mark.cpu_kernels

KINDS = {kind: CODED_TYPES[kind] for kind in CODED_TYPES}
COLUMNS = (32, 256, 512, 576, 640, 768, 896, 4864)


def columns_of(kind: GgmlType) -> list[int]:
    return [columns for columns in COLUMNS if columns % kind.block == 0]


def measure_limit(x: Tensor, wide: Tensor, weight: QuantTensor, largest: int) -> Tensor:
    """Compute how far products [M, O] may be off when each 32 of x are rounded to integers of at
    most `largest`, and sums to float32.
    """
    blocks = x.double().view(len(x), -1, 32)
    steps = blocks.abs().amax(-1) / largest
    rounding = 0.5001 * steps @ wide.abs().view(len(wide), -1, 32).sum(-1).t()
    # Minima are subtracted after the products with codes are added up.
    minimum = weight.block_scales.offsets if weight.block_scales is not None else None
    sizes = wide.abs()
    if minimum is not None:
        group = wide.shape[1] // minimum.shape[1]
        sizes = sizes + 2 * minimum.double().abs().repeat_interleave(group, 1)
    sums = torch.finfo(torch.float32).eps * wide.shape[1] / 8 * (x.double().abs() @ sizes.t())
    limit: Tensor = rounding + sums
    return limit


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_packed_rows_are_those_of_gguf_bit_for_bit(kind: GgmlType, variant: str) -> None:
    ops = load_kernels(variant)
    for columns in columns_of(kind):
        for rows in (1, 16, 37):
            blocks = draw_blocks(kind, rows, columns)
            packed = ops.pack([KINDS[kind].decode(blocks)], rows, exact=True)
            index = torch.arange(rows).flip(0)
            right = dequantize(kind, blocks)[index]
            assert torch.equal(ops.rows(packed, index, columns), right), (rows, columns)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_products_are_right(kind: GgmlType, exact: bool, variant: str) -> None:
    ops = load_kernels(variant)
    largest = 127 * 256 if exact else 127
    for columns in columns_of(kind):
        rows = 37 if columns < 1000 else 19
        blocks = draw_blocks(kind, rows, columns)
        weight = KINDS[kind].decode(blocks)
        wide = dequantize(kind, blocks).double()
        packed = ops.pack([weight], len(weight.codes), exact=exact)
        alone: list[Tensor] = []
        x = torch.randn(33, columns)
        limit = measure_limit(x, wide, weight, largest)
        for tokens in (1, 2, 3, 7, 16, 33):
            product = ops.linear(x[:tokens], packed, None, rows)
            off = (product.double() - x[:tokens].double() @ wide.t()).abs()
            assert (off <= limit[:tokens]).all(), (columns, tokens)
            alone.append(product)
        # A row's result does not depend on the others.
        for product in alone:
            assert torch.equal(product, alone[-1][: len(product)]), columns


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_minima_of_mlx_are_subtracted(bits: int, variant: str) -> None:
    """In groups of several blocks, with scales in any type of 16 bits."""
    ops = load_kernels(variant)
    for group, dtype in itertools.product((32, 64, 128), (torch.float16, torch.bfloat16)):
        rows, columns = 21, 3 * group
        scheme = QuantScheme(bits, group, False, Scales.BLOCKS)
        codes = torch.randint(scheme.levels, (rows, columns), dtype=torch.uint8)
        scales, minima = (torch.randn(2, rows, 3) / 50).to(dtype)
        weight = QuantTensor.of_blocks(codes, BlockScales(scales, minima, None, None), scheme)
        packed = ops.pack([weight], rows, exact=True)
        wide = weight.dequantize()
        assert torch.equal(ops.rows(packed, torch.arange(rows), columns), wide)
        x = torch.randn(5, columns)
        off = (ops.linear(x, packed, None, rows).double() - x.double() @ wide.double().t()).abs()
        assert (off <= measure_limit(x, wide.double(), weight, 127 * 256)).all(), (group, dtype)


def test_triton_claims_no_block_type() -> None:
    for kind, layout in LAYOUTS.items():
        reason = TRITON.explain_unsupported(layout.scheme, torch.device("cuda"), torch.bfloat16)
        assert reason is not None, kind


def test_weights_of_other_shapes_are_refused() -> None:
    ops = load_kernels()
    weight = KINDS[GgmlType.Q6_K].decode(draw_blocks(GgmlType.Q6_K, 32, 256))
    chunks = [weight.rows(0, 16), weight.rows(16, 32)]
    with pytest.raises(RuntimeError, match="48"):
        ops.pack(chunks, 48, exact=True)
    with pytest.raises(RuntimeError, match="bands"):
        ops.pack([weight.rows(0, 10), weight.rows(10, 32)], 32, exact=True)
    other = KINDS[GgmlType.Q6_K].decode(draw_blocks(GgmlType.Q6_K, 16, 512))
    joined = ops.join([ops.pack(chunks, 32, exact=True), ops.pack([other], 16, exact=True)])
    with pytest.raises(RuntimeError, match="packed here"):
        ops.linear(torch.randn(1, 256), joined, None, 48)
