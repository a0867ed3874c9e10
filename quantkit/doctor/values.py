"""Rules about the numbers themselves: NaN, tensors that were never written, weights out of line
with other layers.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.architectures.names import is_embedding
from quantkit.base.progress import Progress
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import Folder
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.files.gguf_io import GgufHeader
from quantkit.files.gguf_types import GgufTensor
from quantkit.files.tensor_file import StoredTensor, TensorFile, same_tensor
from quantkit.formats.codecs.layout import Layout
from quantkit.formats.codecs.layouts import FLOAT8_TYPES as FLOAT8
from quantkit.formats.codecs.layouts import G_IDX, GPTQ, PACKED_CODES
from quantkit.formats.codecs.table import LAYOUTS
from quantkit.tensors.dtypes import FLOATS, DType

# Multiples of the median of the same scales in all layers.
_ABSURD = 1000.0
# Fewer scales may be equal by chance.
_MIN_SCALES = 16
# The part of the rows, 1/8 at the end, that is checked for zeros.
_TAIL = 8
_NUMBER = re.compile(r"\d+")
# Two numbers are those of an expert, and sizes of experts vary.
_LAYER = re.compile(r"(\D*)\.(\d+)\.(\D*)")
# To compare one with the others.
_MIN_LAYERS = 8
# Layers at each end vary: by a factor of 2.5 in sound models.
_ENDS = 2
_FACTOR = math.log2(1.7)
# A role varies if more than 1/12 of its layers are halfway out of line.
_VARIED = 12
# Types whose numbers torch can neither compare nor convert.
_OPAQUE = {dtype for dtype in DType if re.fullmatch(r"(bits|q|float4).*|.*complex32", dtype)}
# Bytes of a GGUF tensor that are in memory at a time.
_PIECE = 1 << 22
_SCALES = {"weight_global_scale"}.union(*(layout.scales for layout in LAYOUTS))
_CODES = {layout.codes for layout in LAYOUTS}
_GGUF_FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_GGUF_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Offsets of the float16 scales in a block."""


class _Facts:
    """Statistics of a tensor, gathered piece by piece."""

    def __init__(self) -> None:
        self.count = self.bad = self.zeros = self.negative = self.rows = self.zero_tail = 0
        self.low = math.inf
        self.high = -math.inf
        self.squares = 0.0
        self.largest: float | None = None

    def add(self, piece: Tensor) -> None:
        """Include the next rows [N, ...]."""
        if piece.dim():
            rows = piece.reshape(piece.shape[0], -1)
        else:
            rows = piece.reshape(1, 1)
        floats = rows.is_floating_point()
        wide = rows.float() if floats else rows
        if floats:
            finite = torch.isfinite(wide)
            self.bad += int((~finite).sum())
            # One NaN would hide all other values in sums and extremes.
            wide = torch.where(finite, wide, torch.zeros((), dtype=wide.dtype))
        self.count += wide.numel()
        self.zeros += int((wide == 0).sum())
        if floats:
            self.negative += int((wide < 0).sum())
        self.low = min(self.low, wide.min().item())
        self.high = max(self.high, wide.max().item())
        empty = (wide == 0).all(-1)
        filled = torch.nonzero(~empty)
        # An interrupted write leaves zeros at the end, which may extend over several pieces.
        if len(filled) == 0:
            self.zero_tail += len(empty)
        else:
            self.zero_tail = len(empty) - 1 - int(filled[-1])
        self.rows += len(empty)
        if floats:
            self.largest = max(self.largest or 0.0, wide.abs().max().item())
            # Squares of large float32 values overflow, and sums of many lose digits.
            self.squares += torch.linalg.vector_norm(wide, dtype=torch.float64).item() ** 2

    @property
    def all_equal(self) -> bool:
        return self.low == self.high


def check(folder: Folder, view: View | None, progress: Progress) -> list[Finding]:
    """Check the numbers of all tensors of a folder or file."""
    result: list[Finding] = []
    scales: dict[str, list[tuple[str, float]]] = {}
    sizes: dict[str, float] = {}
    listed = _list_parts(folder, view)
    for index, part in enumerate(listed):
        progress("weights", index, len(listed), "tensors")
        facts = _Facts()
        try:
            for piece in part.read():
                if piece.numel():
                    facts.add(piece)
        except CheckpointError as error:
            result.append(finding("nan", part.name, f"cannot be read: {error.problem}"))
            continue
        result += _check_part(part, facts)
        if part.kind == "scale" and facts.largest is not None:
            scales.setdefault(_NUMBER.sub("*", part.name), []).append((part.name, facts.largest))
        if part.kind in ("weight", "scale") and facts.count:
            sizes.setdefault(part.name, math.sqrt(facts.squares / facts.count))
    progress("weights", len(listed), len(listed), "tensors")
    # Damaged scales of one layer stand out only against those of all layers.
    for layers in scales.values():
        usual = statistics.median(largest for _, largest in layers)
        for name, largest in layers:
            if len(layers) > 1 and usual > 0 and largest > _ABSURD * usual:
                message = f"up to {largest:g}; in other layers up to {usual:g}"
                result.append(finding("absurd-scale", name, message))
    result += unusual_norms(sizes)
    if view is None:
        return result
    return [*result, *_check_tied_head(view), *_check_column_order(view)]


def _check_part(part: _Part, facts: _Facts) -> Iterator[Finding]:
    if facts.count == 0:
        return
    if facts.bad:
        yield finding("nan", part.name, f"{facts.bad} of {facts.count} values are NaN or infinite")
        return
    if part.kind in ("weight", "codes", "embedding") and facts.count > 1 and facts.all_equal:
        yield finding("never-written", part.name, f"all {facts.count} values are {facts.low:g}")
    elif part.kind in ("scale", "norm") and facts.zeros == facts.count:
        yield finding("never-written", part.name, f"all {facts.count} values are 0")
    elif (
        part.kind in ("weight", "codes")
        and facts.zero_tail >= max(1, facts.rows // _TAIL)
        and facts.rows >= _TAIL
    ):
        yield finding(
            "partly-written", part.name, f"the last {facts.zero_tail} of {facts.rows} rows are 0"
        )
    if part.kind != "scale" or facts.zeros == facts.count:
        return
    if facts.all_equal and facts.count >= _MIN_SCALES:
        yield finding("equal-scales", part.name, f"all {facts.count} are {facts.low:g}")
    elif 2 * facts.zeros > facts.count:
        yield finding("zero-scales", part.name, f"{facts.zeros} of {facts.count} are 0")
    if facts.negative and part.signed_matters:
        yield finding(
            "negative-scales", part.name, f"{facts.negative} of {facts.count} are below 0"
        )


def unusual_norms(sizes: Mapping[str, float]) -> Iterator[Finding]:
    """Find layers whose weight is out of line with the median of the two layers on each side, given
    the root mean squares of weights, or of their scales, by name.
    """
    roles: dict[tuple[str, str], dict[int, str]] = {}
    for name, size in sizes.items():
        match = _LAYER.fullmatch(name)
        # A size of 0 has no logarithm, and other rules report it.
        if match is not None and size > 0 and math.isfinite(size):
            roles.setdefault((match[1], match[3]), {})[int(match[2])] = name
    for layers in roles.values():
        if len(layers) < _MIN_LAYERS:
            continue
        names = [layers[layer] for layer in sorted(layers)]
        # Factors are symmetric on a logarithmic scale.
        logs = [math.log2(sizes[name]) for name in names]
        usual_logs: dict[int, float] = {}
        distances: dict[int, float] = {}
        for layer in range(_ENDS, len(names) - _ENDS):
            neighbors = [*logs[layer - _ENDS : layer], *logs[layer + 1 : layer + _ENDS + 1]]
            usual_logs[layer] = statistics.median(neighbors)
            distances[layer] = abs(logs[layer] - usual_logs[layer])
        varied_count = sum(distance > _FACTOR / 2 for distance in distances.values())
        if varied_count > max(1, len(names) // _VARIED):
            continue
        for layer, distance in distances.items():
            if distance > _FACTOR:
                message = (
                    f"root mean square {2 ** logs[layer]:.3g}; {2 ** usual_logs[layer]:.3g} in the"
                    " layers around it"
                )
                yield finding("unusual-norm", names[layer], message)


def _check_tied_head(view: View) -> Iterator[Finding]:
    config = view.config
    homes = view.folder.homes
    if config is None or not config.tied_embeddings or "lm_head.weight" not in homes:
        return
    embeddings = [name for name in homes if is_embedding(name.removesuffix(".weight"))]
    # A quantized head differs from its embedding by rounding.
    if not embeddings or "lm_head" in view.coded:
        return
    embedding = embeddings[0]
    if not same_tensor(homes["lm_head.weight"], "lm_head.weight", homes[embedding], embedding):
        yield finding("tied-head", "lm_head.weight", f"differs from {embedding}")


def _check_column_order(view: View) -> Iterator[Finding]:
    """Find groups of columns that are not adjacent although the settings do not say so."""
    for module, coded in view.coded.items():
        claim = view.claims.modules.get(module)
        index = coded.tensors.get(G_IDX)
        if index is None or claim is None or claim.by_index or len(index.shape) != 1:
            continue
        order = view.folder.homes[index.name].read(index.name)
        # Without a group size, each row is one group.
        rising = torch.arange(len(order)) // (claim.group_size or max(len(order), 1))
        # Zeros mean adjacent columns too.
        if order.any() and not torch.equal(order.long(), rising):
            yield finding(
                "column-order",
                index.name,
                "desc_act is false, and g_idx is no rising count of groups",
            )


@dataclass(frozen=True)
class _Part:
    """A tensor, or the scales in its blocks; `read` returns its values, a few rows at a time.

    Attributes:
        kind: ``weight`` of a linear in floats, ``codes`` or ``scale`` of one that is quantized,
            ``embedding`` (and head), ``norm``, or ``other``.
        signed_matters: whether some readers misread negative values.
    """

    name: str
    kind: str
    read: Callable[[], Iterator[Tensor]]
    signed_matters: bool = False


def _list_parts(folder: Folder, view: View | None) -> list[_Part]:
    """List all tensors of a folder or file."""
    if folder.kind == "gguf":
        parts: list[_Part] = []
        for header in folder.headers.values():
            parts.extend(_of_gguf(header))
        return parts
    quantized: dict[str, tuple[str, Layout | None]] = {}
    if view is not None:
        for coded in view.coded.values():
            for suffix, tensor in coded.tensors.items():
                quantized[tensor.name] = _coded_kind(suffix), coded.layout
    # Without a config, any norm may be stored less 1, as Gemma's are.
    offset = view is None or view.config is None or view.config.norm_offset != 0
    result = []
    for name, tensor in folder.stored.items():
        if tensor.dtype in _OPAQUE:
            continue
        kind, layout = quantized.get(name, (_infer_kind(name, tensor, offset), None))
        # Scales as integers are exponents, of which any value is valid.
        if kind == "scale" and tensor.dtype not in (*FLOATS, *FLOAT8):
            kind = "other"
        read = partial(_read_pieces, folder.homes[name], name)
        result.append(_Part(name, kind, read, layout in (PACKED_CODES, GPTQ)))
    return result


def _coded_kind(suffix: str) -> str:
    if suffix in _SCALES:
        return "scale"
    if suffix in _CODES:
        return "codes"
    return "other"


def _infer_kind(name: str, tensor: StoredTensor, offset: bool) -> str:
    """Infer the kind of a tensor that is not part of a quantized weight; with `offset`, norms may
    be stored less 1.
    """
    # A norm of zeros is valid if the model adds 1 to it.
    if "norm" in name and name.endswith(".weight") and len(tensor.shape) == 1:
        return "other" if offset else "norm"
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or name.endswith("bias"):
        return "other"
    last = name.removesuffix(".weight").rpartition(".")[2]
    if "emb" in last or last in ("lm_head", "output", "wte", "wpe"):
        return "embedding"
    return "weight"


def _read_pieces(file: TensorFile, name: str) -> Iterator[Tensor]:
    if not file.tensors[name].shape:
        yield _to_comparable(file.read(name))
        return
    for part in file.row_parts(name):
        piece = file.read(name, part)
        # torch has no comparisons of float8.
        if piece.dtype in {dtype.torch for dtype in FLOAT8}:
            yield piece.float()
        else:
            yield _to_comparable(piece)


def _to_comparable(piece: Tensor) -> Tensor:
    """View the numbers in a type that torch can compare."""
    if piece.is_complex():
        return torch.view_as_real(piece)
    if piece.dtype == torch.bool:
        return piece.byte()
    # Signed types of the same size keep what rules ask of codes: which are 0, and which are equal.
    signed = {torch.uint32: torch.int32, torch.uint16: torch.int16, torch.uint64: torch.int64}
    if piece.dtype in signed:
        return piece.view(signed[piece.dtype])
    return piece


def _of_gguf(header: GgufHeader) -> Iterator[_Part]:
    for name, tensor in header.tensors.items():
        if "norm" in name:
            kind = "norm"
        elif len(tensor.shape) <= 1:
            kind = "other"
        elif name in ("token_embd.weight", "output.weight"):
            kind = "embedding"
        else:
            kind = "weight"
        is_weight = kind == "weight"
        type_name = str(tensor.type)
        if is_weight and type_name not in _GGUF_FLOATS:
            kind = "codes"
        yield _Part(name, kind, partial(_gguf_pieces, header, tensor))
        for place in _GGUF_SCALES.get(type_name, ()):
            # Blocks of zeros, as in the padded rows of an embedding, have the scale 0.
            read = partial(_gguf_pieces, header, tensor, place)
            yield _Part(f"{name} (scales)", "scale" if is_weight else "other", read)


def _gguf_pieces(
    header: GgufHeader, tensor: GgufTensor, place: int | None = None
) -> Iterator[Tensor]:
    """Read rows of floats or of blocks' bytes; with `place`, the float16 scales at this offset in
    each block.
    """
    rows = math.prod(tensor.shape[:-1])
    size = tensor.type.row_bytes(tensor.shape[-1])
    step = max(1, _PIECE // max(1, size))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        data = bytearray(header.source.read(tensor.offset + start * size, count * size))
        piece = torch.frombuffer(data, dtype=torch.uint8).view(count, size)
        if place is None:
            yield piece.view(_GGUF_FLOATS.get(str(tensor.type), torch.uint8))
        else:
            blocks = piece.view(count, -1, tensor.type.block_bytes)
            yield blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1)
