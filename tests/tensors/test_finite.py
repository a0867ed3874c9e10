"""Weights that quantized codes mean have to be numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from block_bytes import draw_blocks
from error_parts import raises

from quantkit.errors import NonFiniteError
from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.ggml import CODED_TYPES
from quantkit.tensors.finite import require_finite_codes
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme


def _with_scale(scheme: str, scale: float) -> QuantTensor:
    """Quantize ones, which get the scheme's largest code, and replace the scales."""
    quantized = quantize_rtn(torch.ones(128, 128), QuantScheme.parse(scheme), torch.float32)
    return replace(quantized, scale=torch.full_like(quantized.scale, scale))


@pytest.mark.parametrize(("scheme", "largest"), [("fp8", 448), ("int8", 127)])
def test_weights_beyond_float32_are_found(scheme: str, largest: int) -> None:
    limit = torch.finfo(torch.float32).max / largest
    require_finite_codes(_with_scale(scheme, limit / 1.01), "weight", Path("model"), False)
    overflowing = _with_scale(scheme, limit * 1.01)
    assert not torch.isfinite(overflowing.dequantize()).all()
    with pytest.raises(NonFiniteError) as failed:
        require_finite_codes(overflowing, "weight", Path("model"), False)
    assert failed.value.path == Path("model")
    require_finite_codes(overflowing, "weight", Path("model"), True)


@pytest.mark.parametrize("kind", CODED_TYPES, ids=lambda kind: kind.value)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_number_of_a_block_that_is_not_finite_is_refused(kind: GgmlType, wrong: float) -> None:
    """Also an outer scale or a minimum, which other scales in the block do not show."""
    weight = CODED_TYPES[kind].decode(draw_blocks(kind, 3, 512))
    require_finite_codes(weight, "weight", Path("model"), False)
    fields = ["scale", "minimum", "outer", "outer_minimum"]
    if weight.outer is not None:
        # The inner ones are integers in the file.
        fields = fields[2:]
    for name in fields:
        stored = getattr(weight, name)
        if stored is None:
            continue
        changed = stored.clone()
        changed[1, 0] = wrong
        with raises(NonFiniteError, found=f"1 of {_count_stored(weight)}"):
            require_finite_codes(replace(weight, **{name: changed}), "w", Path("model"), False)
        require_finite_codes(replace(weight, **{name: changed}), "w", Path("model"), True)


def _count_stored(weight: QuantTensor) -> int:
    stored = (weight.scale, weight.minimum, weight.outer, weight.outer_minimum)
    return sum(field.numel() for field in stored if field is not None)
