"""What the CPU kernels are stated to take is what they take."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels.cpu import CPU_EXACT
from quantkit.kernels.cpu_layout import count_packed_bytes, explain_unsupported_scheme
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import FLOAT_SCHEMES, GGUF_SCHEMES, MXFP4, SCHEMES, QuantScheme
from quantkit.tensors.spec import TensorSpec

_CPU = torch.device("cpu")


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), *GGUF_SCHEMES.values(), MXFP4], ids=str)
def test_stated_bytes_are_those_of_the_packed_weight(scheme: QuantScheme) -> None:
    assert CPU_EXACT.explain_unsupported(scheme, _CPU, torch.float32) is None
    # Rows and columns that fill no band and no block, where the scheme allows it.
    for rows, columns in ((16, 256), (37, 768), (5, 96 if scheme.group_size is None else 512)):
        for dtype in (DType.FLOAT16, DType.FLOAT32):
            # The scales of blocks are float16.
            if dtype is DType.FLOAT32 and str(scheme).startswith(("q", "iq")):
                continue
            weight = quantize_rtn(torch.randn(rows, columns), scheme, dtype.torch)
            spec = TensorSpec("weight", (rows, columns), dtype, scheme)
            packed = CPU_EXACT.prepare(weight)["packed"]
            assert count_packed_bytes(spec) == packed.numel(), (rows, columns, dtype)


def test_small_floats_and_short_groups_are_not_supported() -> None:
    for scheme in (*FLOAT_SCHEMES.values(), QuantScheme(4, 24)):
        if scheme != MXFP4:
            assert explain_unsupported_scheme(scheme) is not None
