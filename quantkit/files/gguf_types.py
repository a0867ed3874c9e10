"""Define the parts of a GGUF file: types of tensors, types of metadata values, files of a model
that is split.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

MAGIC = b"GGUF"
"""The first bytes of a file."""
GGUF_SUFFIX = ".gguf"
"""The suffix of a model that is one file, or several, and no folder."""
STEM = "model"
"""The first part of the names of files in a folder."""
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}
"""llama.cpp's names of files by ``general.file_type`` (`llama_ftype`). Most files mix several types
of tensors, so none of their types names them.
"""


class GgmlType(StrEnum):
    """How a tensor's numbers are stored, by ggml's name for it.

    Attributes:
        code: in files.
        block: the number of elements per block; rows consist of complete blocks.
        block_bytes: the bytes of a block.
    """

    code: int
    block: int
    block_bytes: int

    F32 = "F32", 0, 1, 4
    F16 = "F16", 1, 1, 2
    Q4_0 = "Q4_0", 2, 32, 18
    Q4_1 = "Q4_1", 3, 32, 20
    Q5_0 = "Q5_0", 6, 32, 22
    Q5_1 = "Q5_1", 7, 32, 24
    Q8_0 = "Q8_0", 8, 32, 34
    Q8_1 = "Q8_1", 9, 32, 36
    Q2_K = "Q2_K", 10, 256, 84
    Q3_K = "Q3_K", 11, 256, 110
    Q4_K = "Q4_K", 12, 256, 144
    Q5_K = "Q5_K", 13, 256, 176
    Q6_K = "Q6_K", 14, 256, 210
    Q8_K = "Q8_K", 15, 256, 292
    IQ2_XXS = "IQ2_XXS", 16, 256, 66
    IQ2_XS = "IQ2_XS", 17, 256, 74
    IQ3_XXS = "IQ3_XXS", 18, 256, 98
    IQ1_S = "IQ1_S", 19, 256, 50
    IQ4_NL = "IQ4_NL", 20, 32, 18
    IQ3_S = "IQ3_S", 21, 256, 110
    IQ2_S = "IQ2_S", 22, 256, 82
    IQ4_XS = "IQ4_XS", 23, 256, 136
    I8 = "I8", 24, 1, 1
    I16 = "I16", 25, 1, 2
    I32 = "I32", 26, 1, 4
    I64 = "I64", 27, 1, 8
    F64 = "F64", 28, 1, 8
    IQ1_M = "IQ1_M", 29, 256, 56
    BF16 = "BF16", 30, 1, 2
    TQ1_0 = "TQ1_0", 34, 256, 54
    TQ2_0 = "TQ2_0", 35, 256, 66
    MXFP4 = "MXFP4", 39, 32, 17
    NVFP4 = "NVFP4", 40, 64, 36
    Q1_0 = "Q1_0", 41, 128, 18

    def __new__(cls, name: str, code: int = 0, block: int = 1, block_bytes: int = 4) -> GgmlType:
        # A member of a `StrEnum` is its name; the other numbers become attributes.
        member = str.__new__(cls, name)
        member._value_ = name
        member.code = code
        member.block = block
        member.block_bytes = block_bytes
        return member

    def row_bytes(self, columns: int) -> int:
        """Compute the bytes of a row of `columns` elements."""
        return columns // self.block * self.block_bytes


class ValueType(IntEnum):
    """The type of a metadata value, by its code in files."""

    (
        UINT8,
        INT8,
        UINT16,
        INT16,
        UINT32,
        INT32,
        FLOAT32,
        BOOL,
        STRING,
        ARRAY,
        UINT64,
        INT64,
        FLOAT64,
    ) = range(13)


@dataclass(frozen=True)
class Typed:
    """A metadata value to write as a type that does not follow from its Python type.

    Attributes:
        kind: the type of the value, or of its items if it is a list.
    """

    kind: ValueType
    value: Any


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as a header lists it.

    Attributes:
        shape: as in numpy, rows first; the last size is a multiple of the block.
        offset: of its first byte in the file.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.type.row_bytes(math.prod(self.shape))


@dataclass(frozen=True)
class Split:
    """The place of a file among those of a split model.

    Attributes:
        index: of the part, from 0.
        count: of parts.
        tensors: of the whole model.
    """

    index: int
    count: int
    tensors: int

    def metadata(self) -> dict[str, Any]:
        """Build the metadata of such a file."""
        # The types that llama.cpp's gguf-split writes.
        kinds = (ValueType.UINT16, ValueType.UINT16, ValueType.INT32)
        values = (self.index, self.count, self.tensors)
        metadata: dict[str, Any] = {}
        for key, kind, value in zip(SPLIT_KEYS, kinds, values, strict=True):
            metadata[key] = Typed(kind, value)
        return metadata


def name_part(stem: str, index: int, count: int) -> str:
    """Build the file name of part number `index`, from 0, of a model that is split."""
    # Names count parts from 1, metadata from 0.
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def parse_part_stem(name: str) -> str | None:
    """Extract the common first part of the names of a model's parts; None if `name` is not the name
    of a part.
    """
    match = _SPLIT_NAME.fullmatch(name)
    return match["stem"] if match else None


def parse_part_count(name: str) -> int:
    """Extract the number of parts of a model from the name of one; 1 for any other name."""
    match = _SPLIT_NAME.fullmatch(name)
    if match:
        return int(match["count"])
    return 1
