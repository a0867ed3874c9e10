"""MXFP4, the 4-bit floats of gpt-oss's experts: read only, as floats.

``T_blocks`` uint8 [..., O, I / 32, 16] holds two codes e2m1 a byte, the low half first, ``T_scales`` uint8
[..., O, I / 32] the exponents of two of each 32 of them, plus 127. In float folders of these models ``T`` is
[E, I, O]: inputs come before outputs.
Sources: OCP Microscaling Formats 1.0, transformers' mxfp4.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.layout import Layout
from quantkit.tensors.dtypes import DType
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
MXFP4 = Layout("MXFP4", BLOCKS, (SCALES,), bits=4, joint="")
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_BYTES = 16  # of the codes that share a scale
_CHUNK = 1 << 14  # scales at a time


class Mxfp4Weight:
    """Stacked experts in MXFP4, read as floats [E, I, O]."""

    kind = "MXFP4"

    def __init__(
        self, blocks: StoredTensor, scales: StoredTensor, homes: tuple[TensorFile, TensorFile], dtype: DType
    ) -> None:
        """
        Args:
            homes: the files that hold the codes and the scales.
            dtype: of the floats.

        Raises:
            UnsupportedError: if they do not fit together.
        """
        if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES or scales.shape != blocks.shape[:-1]:
            raise _misshapen(blocks, scales, homes[0].path)
        experts, rows, groups, _ = blocks.shape
        name = blocks.name.removesuffix(BLOCKS)
        self.tensor = StoredTensor(name, dtype, (experts, groups * 2 * _BYTES, rows))
        self.parts = (blocks, scales)
        self._homes = homes

    def read(self, part: TensorSlice | None) -> Tensor:
        """The floats, or a part of them; only the experts of the part are read."""
        of_experts = part if part is not None and part.axis == 0 else None
        blocks = self._homes[0].read(self.parts[0].name, of_experts)
        scales = self._homes[1].read(self.parts[1].name, of_experts)
        shape = (len(blocks), *self.tensor.shape[1:])
        out = self.tensor.dtype.empty(shape)
        for expert, target in enumerate(out):
            target.copy_(dequantize(blocks[expert], scales[expert], self.tensor.dtype).t())
        return out if part is of_experts or part is None else part.of(out).contiguous()


def dequantize(blocks: Tensor, scales: Tensor, dtype: DType) -> Tensor:
    """Codes [..., O, I / 32, 16] and exponents [..., O, I / 32] as floats [..., O, I]."""
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    codes, exponents = blocks.reshape(-1, _BYTES), scales.reshape(-1)
    out = dtype.empty((len(codes), 2 * _BYTES))
    for start in range(0, len(codes), _CHUNK):
        chunk = codes[start : start + _CHUNK]
        halves = torch.stack((chunk & 0xF, chunk >> 4), dim=-1).flatten(-2).int()
        powers = (exponents[start : start + _CHUNK].float() - _BIAS).exp2()
        out[start : start + _CHUNK] = values[halves] * powers.unsqueeze(-1)
    return out.view(*blocks.shape[:-2], -1)


def _misshapen(blocks: StoredTensor, scales: StoredTensor, path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"the scales of '{blocks.name}' do not fit it", path=path, found=f"{list(scales.shape)}",
        expected=f"[experts, rows, groups] of {list(blocks.shape)}, each group of {_BYTES} bytes",
    )  # fmt: skip
