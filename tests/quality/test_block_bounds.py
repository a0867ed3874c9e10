"""Weights in block types that are read and run, but not solved for: rounded to nearest, for the
bounds that other weights are compared with.
"""

from __future__ import annotations

import pytest
import torch

from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.ggml_blocks import LAYOUTS
from quantkit.kernels.backend import REFERENCE
from quantkit.quality.bounds import weight_bound, worst_row
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn, relative_error
from quantkit.tensors.scheme import TABLE, Codes, Scales
from quantkit.training.trained import has_trained_scales

KINDS = [GgmlType.Q2_K, GgmlType.IQ4_NL, GgmlType.IQ4_XS]


def _round(kind: GgmlType) -> tuple[torch.Tensor, QuantTensor]:
    """Draw a weight [8, 512], and round it to blocks of a type."""
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    return weight, quantize_rtn(weight, LAYOUTS[kind].scheme, torch.float16)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_codes_are_the_nearest_of_their_scales(kind: GgmlType) -> None:
    weight, rounded = _round(kind)
    numbers = TABLE if rounded.scheme.codes is Codes.TABLE else range(rounded.scheme.levels)
    scales = rounded.block_scales
    assert scales is not None
    values = scales.steps.unsqueeze(-1) * torch.tensor(numbers)
    if scales.offsets is not None:
        values = values - scales.offsets.unsqueeze(-1)
    grouped = weight.view(*scales.steps.shape, -1, 1)
    smallest = (grouped - values.unsqueeze(2)).abs().amin(-1).view_as(weight)
    errors = (rounded.dequantize() - weight).abs()
    torch.testing.assert_close(errors, smallest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_scales_fit_into_the_bytes_of_a_block(kind: GgmlType) -> None:
    _, rounded = _round(kind)
    layout = LAYOUTS[kind]
    scales = rounded.block_scales
    assert scales is not None

    def by_block(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.reshape(rounded.codes.numel() // kind.block, -1)

    scale = by_block(scales.scale)
    assert scale is not None
    blocks = BlockScales(
        scale, by_block(scales.minimum), by_block(scales.outer), by_block(scales.outer_minimum)
    )
    codes = rounded.codes.reshape(-1, kind.block)
    codes_read, scales_read = layout.unpack(layout.pack(codes, blocks))
    assert torch.equal(codes_read, codes)
    assert torch.equal(scales_read.steps, blocks.steps)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_another_weight_exceeds_the_bound(kind: GgmlType) -> None:
    weight, rounded = _round(kind)
    error, bound = worst_row(rounded, weight)
    assert error < bound
    damaged = QuantTensor.of_blocks(
        rounded.codes.roll(1, 1),
        BlockScales(rounded.scale, rounded.minimum, rounded.outer, rounded.outer_minimum),
        rounded.scheme,
    )
    error, bound = worst_row(damaged, weight)
    assert error > bound
    assert relative_error(damaged, weight) > weight_bound(rounded, weight, rounded.scheme)
    # Both quantized: by the distance of their numbers.
    assert weight_bound(rounded, rounded, rounded.scheme) > relative_error(rounded, weight)


def test_numbers_of_a_table_are_not_trained_as_integers() -> None:
    schemes = [layout.scheme for layout in LAYOUTS.values()]
    trained = [scheme for scheme in schemes if has_trained_scales(scheme)]
    assert all(scheme.codes is Codes.INTEGERS for scheme in trained)
    assert any(scheme.scales is Scales.BLOCKS for scheme in trained)


@pytest.mark.parametrize("kind", list(LAYOUTS), ids=lambda kind: kind.name)
def test_the_reference_multiplies_all_that_a_weight_has(kind: GgmlType) -> None:
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    scheme = LAYOUTS[kind].scheme
    rounded = quantize_rtn(weight, scheme, torch.float16)
    prepared = REFERENCE.prepare(rounded)
    x = torch.randn(3, 512)
    product = REFERENCE.linear(x, prepared, scheme, 8, None)
    torch.testing.assert_close(product, x @ rounded.dequantize().t())
    rows = REFERENCE.dequantize_rows(prepared, scheme, 512, torch.tensor([5, 2]))
    assert torch.equal(rows, rounded.dequantize()[[5, 2]])
