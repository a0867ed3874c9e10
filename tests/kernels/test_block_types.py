"""The C++ kernels on llama.cpp's block types: values against the gguf package, products against
float64.
"""

from __future__ import annotations

import pytest
import torch
from block_bytes import dequantize, draw_blocks
from instruction_sets import HERE
from torch import Tensor

from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.ggml import CODED_TYPES
from quantkit.kernels.library import load_kernels
from quantkit.tensors.qtensor import QuantTensor

pytestmark = pytest.mark.cpu_kernels

KINDS = {kind: CODED_TYPES[kind] for kind in CODED_TYPES}
COLUMNS = (32, 256, 512, 576, 640, 768, 896, 4864)


def columns_of(kind: GgmlType) -> list[int]:
    return [columns for columns in COLUMNS if columns % kind.block == 0]


def measure_limit(x: Tensor, wide: Tensor, weight: QuantTensor, largest: int) -> Tensor:
    """Compute how far products [M, O] may be off when each 32 of x are rounded to integers of at
    most `largest`, and sums to float32.
    """
    blocks = x.double().unflatten(1, (-1, 32))
    steps = blocks.abs().amax(-1) / largest
    rounding = 0.5001 * steps @ wide.abs().unflatten(1, (-1, 32)).sum(-1).t()
    # Minima are subtracted after the products with codes are added up.
    minimum = weight.block_scales.offsets if weight.block_scales is not None else None
    sizes = wide.abs()
    if minimum is not None:
        group = wide.shape[1] // minimum.shape[1]
        sizes = sizes + 2 * minimum.double().abs().repeat_interleave(group, 1)
    sums = torch.finfo(torch.float32).eps * wide.shape[1] / 8 * (x.double().abs() @ sizes.t())
    return rounding + sums


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
