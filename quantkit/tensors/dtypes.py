"""The types of stored numbers, by name: what headers say of a tensor is known without torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from quantkit.base.json_values import format_value
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

    FLOAT32 = ("float32", 4)
    FLOAT16 = ("float16", 2)
    BFLOAT16 = ("bfloat16", 2)
    FLOAT64 = ("float64", 8)
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2"
    BOOL = "bool"
    INT64 = ("int64", 8)
    INT32 = ("int32", 4)
    INT16 = ("int16", 2)
    INT8 = "int8"
    INT7 = "int7"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    INT1 = "int1"
    UINT64 = ("uint64", 8)
    UINT32 = ("uint32", 4)
    UINT16 = ("uint16", 2)
    UINT8 = "uint8"
    UINT7 = "uint7"
    UINT6 = "uint6"
    UINT5 = "uint5"
    UINT4 = "uint4"
    UINT3 = "uint3"
    UINT2 = "uint2"
    UINT1 = "uint1"
    BITS16 = ("bits16", 2)
    BITS8 = "bits8"
    BITS4X2 = "bits4x2"
    BITS2X4 = "bits2x4"
    BITS1X8 = "bits1x8"
    QINT32 = ("qint32", 4)
    QINT8 = "qint8"
    QUINT8 = "quint8"
    QUINT4X2 = "quint4x2"
    QUINT2X4 = "quint2x4"
    COMPLEX128 = ("complex128", 16)
    COMPLEX64 = ("complex64", 8)
    COMPLEX32 = ("complex32", 4)
    BCOMPLEX32 = ("bcomplex32", 4)

    def __new__(cls, name: str, itemsize: int = 1) -> DType:
        # `str.__new__` would take the size as an encoding.
        member = str.__new__(cls, name)
        member._value_ = name
        member.itemsize = itemsize
        return member

    @classmethod
    def of(cls, dtype: TorchDType) -> DType:
        """Return torch's type by its name."""
        return cls(str(dtype).removeprefix("torch."))

    @property
    def torch(self) -> TorchDType:
        """Return torch's type."""
        dtype: TorchDType = getattr(torch, self.value)
        return dtype

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Allocate a tensor whose values are not initialized."""
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
    """Parse a model's float type, given by a name such as ``bf16`` or ``BFloat16``, or as torch's
    type; None stays None.

    Raises:
        RequestError: for anything else.
    """
    if dtype is None:
        return None
    # The text of torch's type is compared, so that torch need not be imported.
    parsed = FLOAT_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if parsed is None:
        raise RequestError(
            "unknown float type", found=format_value(dtype), expected=", ".join(FLOAT_NAMES)
        )
    return parsed
