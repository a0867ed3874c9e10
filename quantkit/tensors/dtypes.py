"""The types of stored numbers, by name: what headers say of a tensor is known without torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from quantkit.base.json_values import shown
from quantkit.errors import RequestError
from quantkit.tensors.late import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as TorchDType


class DType(StrEnum):
    """The type of a tensor's elements, by torch's name for it, which is also config.json's.
    `itemsize` is the bytes of an element, or of the several that share one.
    """

    itemsize: int

    FLOAT32 = "float32", 4
    FLOAT16 = "float16", 2
    BFLOAT16 = "bfloat16", 2
    FLOAT64 = "float64", 8
    FLOAT8_E4M3FN, FLOAT8_E4M3FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
    FLOAT8_E5M2, FLOAT8_E5M2FNUZ, FLOAT8_E8M0FNU = (
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2"
    BOOL = "bool"
    INT64, INT32, INT16 = ("int64", 8), ("int32", 4), ("int16", 2)
    INT8, INT7, INT6, INT5, INT4, INT3, INT2, INT1 = (
        "int8",
        "int7",
        "int6",
        "int5",
        "int4",
        "int3",
        "int2",
        "int1",
    )
    UINT64, UINT32, UINT16 = ("uint64", 8), ("uint32", 4), ("uint16", 2)
    UINT8, UINT7, UINT6, UINT5 = "uint8", "uint7", "uint6", "uint5"
    UINT4, UINT3, UINT2, UINT1 = "uint4", "uint3", "uint2", "uint1"
    BITS16 = "bits16", 2
    BITS8, BITS4X2, BITS2X4, BITS1X8 = "bits8", "bits4x2", "bits2x4", "bits1x8"
    QINT32 = "qint32", 4
    QINT8, QUINT8, QUINT4X2, QUINT2X4 = "qint8", "quint8", "quint4x2", "quint2x4"
    COMPLEX128, COMPLEX64 = ("complex128", 16), ("complex64", 8)
    COMPLEX32, BCOMPLEX32 = ("complex32", 4), ("bcomplex32", 4)

    def __new__(cls, name: str, itemsize: int = 1) -> DType:
        member = str.__new__(cls, name)
        member._value_ = name
        member.itemsize = itemsize
        return member

    @classmethod
    def of(cls, dtype: TorchDType) -> DType:
        """What torch calls a type, by its name."""
        return cls(str(dtype).removeprefix("torch."))

    @property
    def torch(self) -> TorchDType:
        """Torch's own."""
        dtype: TorchDType = getattr(torch, self.value)
        return dtype

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A tensor to be filled."""
        return torch.empty(shape, dtype=self.torch)


FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""What models are kept in and compute in."""

STORED_FLOATS = (*FLOATS, DType.FLOAT64)
"""What floats are stored in: merge tools and numpy write float64, which is read as the model's
dtype.
"""

SHORT_NAMES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}
FLOAT_NAMES = SHORT_NAMES | {dtype.value: dtype for dtype in reversed(FLOATS)}
"""A model's float type, by every name that a user may give it."""
FloatName = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]


def float_name(dtype: FloatName | TorchDType | None) -> DType | None:
    """A model's float type, given by a name such as ``bf16`` or ``BFloat16``, or as torch's own;
    None stays None.

    Raises:
        RequestError: for anything else.
    """
    if dtype is None:
        return None
    found = FLOAT_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise RequestError(
            "unknown float type", found=shown(dtype), expected=", ".join(FLOAT_NAMES)
        )
    return found
