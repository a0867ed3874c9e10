"""The table of types is torch's, known without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quantkit.tensors.dtypes import FLOAT_NAMES, FLOATS, DType

TORCH = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def test_every_type_of_torch_has_its_name_and_size() -> None:
    assert {DType.of(dtype) for dtype in TORCH} == {
        dtype for dtype in DType if hasattr(torch, dtype)
    }
    for dtype in TORCH:
        assert (DType.of(dtype).torch, DType.of(dtype).itemsize) == (dtype, dtype.itemsize)


def test_a_type_is_its_name() -> None:
    assert f"{DType.BFLOAT16} {DType('bfloat16')}" == "bfloat16 bfloat16"
    assert {DType.BFLOAT16: 1} == {"bfloat16": 1}
    with pytest.raises(ValueError, match="float7"):
        DType("float7")


def test_a_models_float_types_have_short_names_and_long_ones() -> None:
    assert set(FLOAT_NAMES.values()) == set(FLOATS)
    assert FLOAT_NAMES["bf16"] is FLOAT_NAMES["bfloat16"] is DType.BFLOAT16


def test_the_table_does_without_torch() -> None:
    code = "import sys, quantkit.tensors.dtypes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
