"""The numbers in a folder or file: each tensor in pieces, with its role in a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.doctor.folder import Folder
from quantkit.doctor.view import View
from quantkit.files.gguf_io import GgufHeader
from quantkit.files.gguf_types import GgufTensor
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.compressed_weights import PACKED_CODES
from quantkit.formats.codecs.float8 import TYPES as FLOAT8
from quantkit.formats.codecs.gptq_linear import GPTQ
from quantkit.formats.codecs.layout import Layout
from quantkit.formats.codecs.table import LAYOUTS
from quantkit.tensors.dtypes import FLOATS, DType

_OPAQUE = {one for one in DType if one.startswith(("bits", "q", "float4")) or one == DType.COMPLEX32}
_PIECE = 1 << 22  # bytes
_SCALES = {"weight_global_scale", *(suffix for layout in LAYOUTS for suffix in layout.scales)}
_CODES = {layout.codes for layout in LAYOUTS}
_GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_GGUF_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
}  # fmt: skip
"""Offsets of the float16 scales in a block."""


@dataclass(frozen=True)
class Part:
    """A tensor, or the scales in its blocks.

    Attributes:
        kind: ``weight`` of a linear in floats, ``codes`` or ``scale`` of one that is quantized, ``embedding`` (and
            head), ``norm``, or ``other``.
        read: its values, a few rows at a time.
        signed_matters: whether some readers misread negative ones.
    """

    name: str
    kind: str
    read: Callable[[], Iterator[Tensor]]
    signed_matters: bool = False


def parts(folder: Folder, view: View | None) -> list[Part]:
    """All tensors of a folder or file."""
    if folder.kind == "gguf":
        return [part for header in folder.headers.values() for part in _of_gguf(header)]
    quantized: dict[str, tuple[str, Layout | None]] = {}
    for coded in view.coded.values() if view is not None else ():
        for suffix, tensor in coded.tensors.items():
            kind = "scale" if suffix in _SCALES else "codes" if suffix in _CODES else "other"
            quantized[tensor.name] = kind, coded.layout
    offset = view is None or view.config is None or view.config.norm_offset != 0
    found = []
    for name, tensor in folder.stored.items():
        if tensor.dtype in _OPAQUE:
            continue
        kind, layout = quantized.get(name, (_kind(name, tensor, offset), None))
        if kind == "scale" and tensor.dtype not in (*FLOATS, *FLOAT8):
            kind = "other"  # exponents
        read = partial(_pieces, folder.homes[name], name)
        found.append(Part(name, kind, read, layout in (PACKED_CODES, GPTQ)))
    return found


def _kind(name: str, tensor: StoredTensor, offset: bool) -> str:
    """The kind of a tensor that is no part of a quantized weight.

    Args:
        offset: whether norms may be stored as differences from 1.
    """
    if "norm" in name and name.endswith(".weight") and len(tensor.shape) == 1:
        return "other" if offset else "norm"
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or name.endswith("bias"):
        return "other"
    last = name.removesuffix(".weight").rpartition(".")[2]
    return "embedding" if "emb" in last or last in ("lm_head", "output", "wte", "wpe") else "weight"


def _pieces(file: TensorFile, name: str) -> Iterator[Tensor]:
    if not file.tensors[name].shape:
        yield _compared(file.read(name))
        return
    for part in file.row_parts(name):
        piece = file.read(name, part)
        yield piece.float() if piece.dtype in {one.torch for one in FLOAT8} else _compared(piece)


def _compared(piece: Tensor) -> Tensor:
    """The same numbers in a type that torch can compare."""
    if piece.is_complex():
        return torch.view_as_real(piece)
    if piece.dtype == torch.bool:
        return piece.byte()
    same = {torch.uint32: torch.int32, torch.uint16: torch.int16, torch.uint64: torch.int64}
    return piece.view(same[piece.dtype]) if piece.dtype in same else piece


def _of_gguf(header: GgufHeader) -> Iterator[Part]:
    for name, tensor in header.tensors.items():
        norm = "norm" in name
        table = name in ("token_embd.weight", "output.weight") or len(tensor.shape) < 2
        kind = "norm" if norm else "embedding" if table and len(tensor.shape) > 1 else "other" if table else "weight"
        if str(tensor.type) in _GGUF_FLOATS:
            yield Part(name, kind, partial(_gguf_floats, header, tensor))
        else:
            yield Part(name, "codes" if kind == "weight" else kind, partial(_gguf_bytes, header, tensor))
            for place in _GGUF_SCALES.get(str(tensor.type), ()):
                # blocks of zeros, as in the padded rows of an embedding, have the scale 0
                scale = "scale" if kind == "weight" else "other"
                yield Part(f"{name} (scales)", scale, partial(_gguf_scales, header, tensor, place))


def _gguf_bytes(header: GgufHeader, tensor: GgufTensor) -> Iterator[Tensor]:
    """Rows of bytes [N, row_bytes]."""
    rows, size = math.prod(tensor.shape[:-1]), tensor.type.row_bytes(tensor.shape[-1])
    step = max(1, _PIECE // max(1, size))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        data = bytearray(header.source.read(tensor.offset + start * size, count * size))
        yield torch.frombuffer(data, dtype=torch.uint8).view(count, size)


def _gguf_floats(header: GgufHeader, tensor: GgufTensor) -> Iterator[Tensor]:
    for piece in _gguf_bytes(header, tensor):
        yield piece.view(_GGUF_FLOATS[str(tensor.type)])


def _gguf_scales(header: GgufHeader, tensor: GgufTensor, place: int) -> Iterator[Tensor]:
    for piece in _gguf_bytes(header, tensor):
        blocks = piece.view(len(piece), -1, tensor.type.block_bytes)
        yield blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1)
