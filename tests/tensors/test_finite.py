"""Weights that quantized codes mean have to be numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.errors import NonFiniteError
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
