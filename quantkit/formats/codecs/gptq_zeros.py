"""GPTQ's packed zero points: which of its two versions a folder has, told by the codes.

Version 1 stores ``z - 1``, version 2 stores ``z``; what settings say of it is often wrong. Symmetric weights tell it by
their one zero point, ``2 ** (bits - 1)``. Of others the codes tell it: the weights of a group have a mean near zero,
so codes lie around their zero point. Where they do not, the settings decide, and always in what quantkit wrote.
GPTQModel makes version 1 by subtracting from whole words, so that z = 0 borrows from the next field; adding the same
again undoes it. AutoGPTQ ORs the fields of a word, where a -1 fills all above it.
Sources: the packages gptqmodel and auto_gptq.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.codec import RawModule
from quantkit.tensors.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"
WRITER = "quantkit"
_MODULES = 12
_INPUTS = 512  # of a module; more of longer groups
_MOST_INPUTS = 4096
_AT_ONCE = 128
_ENOUGH = 6  # offsets whose spread is an error
_SURE = 4  # such errors
_OF_MEDIAN = 1.86  # standard error of a median, times the root of how many, in median absolute deviations
_OWN_MEAN = 1 / 512  # of all codes, by which the weights of one module may lie beside zero
_Offset = tuple[float, float]


@dataclass(frozen=True)
class Packed:
    """How the codes of a module lie.

    Attributes:
        bits: of a code.
        rows, columns: of the weight [O, I].
        group_size: inputs that share a scale; I where a row has one.
    """

    bits: int
    rows: int
    columns: int
    group_size: int

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def groups(self) -> int:
        return math.ceil(self.columns / self.group_size)

    @property
    def ones(self) -> int:
        """A word with 1 in each of its fields."""
        return _ones(self.bits)


def constant(raw: RawModule, packed: Packed) -> int | None:
    """The value that all stored zero points of a module have; None where they differ."""
    data = raw.read_bytes(QZEROS)
    field = data[0] & (2**packed.bits - 1) if data else 0
    if packed.rows % packed.per_word:
        return field if bool((stored_fields(raw, packed) == field).all()) else None
    word = (field * packed.ones).to_bytes(4, "little")
    return field if data == word * (len(data) // 4) else None


def zero_points(words: Tensor, bits: int, count: int, version: int) -> Tensor:
    """The zero points [..., count] uint8 that words [..., W] int32 hold."""
    from quantkit.tensors.qtensor import unpack_int32

    return unpack_int32(words + _ones(bits) if version == 1 else words, bits, count)


def _ones(bits: int) -> int:
    return 0xFFFFFFFF // ((1 << bits) - 1)


def stored_fields(raw: RawModule, packed: Packed) -> Tensor:
    """What is stored for each group and output [G, O], uint8."""
    from quantkit.tensors.qtensor import unpack_int32

    return unpack_int32(raw.read(QZEROS), packed.bits, packed.rows)


def require_whole(raw: RawModule, packed: Packed) -> bool:
    """Check that zero points of version 1 were packed without loss.

    Returns:
        Whether one borrows from the next output's, if words were subtracted from as a whole.

    Raises:
        UnsupportedError: if every -1 that was packed fills all fields above it.
    """
    import torch

    fields = stored_fields(raw, packed)
    full = fields == 2**packed.bits - 1
    if not full.any():
        return False
    padding = -packed.rows % packed.per_word
    words = torch.nn.functional.pad(full, (0, padding), value=True).view(len(full), -1, packed.per_word)
    from_first = words.cumsum(-1) > 0
    inside = torch.arange(words.shape[1] * packed.per_word).view(words.shape[1:]) < packed.rows
    followed = (from_first[..., :-1] & inside[..., 1:]).any(-1)
    destroyed = followed & (words | ~from_first).all(-1)
    if destroyed.any() and not (followed & ~destroyed).any():
        group, word = destroyed.nonzero()[0].tolist()
        raise UnsupportedError(
            f"the zero points of '{raw.name}' were destroyed when they were packed: a zero point of 0 has become -1 "
            "and filled the word, as AutoGPTQ does",
            path=raw.path, found=f"{int(destroyed.sum())} such words, the first for group {group} of output "
            f"{word * packed.per_word}", hint="quantize the float model again",
        )  # fmt: skip
    return bool(followed.any())


@dataclass(frozen=True)
class Stated:
    """What settings say of a module; a group size of None is for whole rows."""

    bits: int
    group_size: int | None
    symmetric: bool


class Version:
    """The version of all zero points of a folder."""

    def __init__(self, stated: int | None, modules: Mapping[str, Stated], writers: Collection[str] = ()) -> None:
        """
        Args:
            stated: what the settings say; None if nothing.
            modules: the folder's quantized modules.
            writers: the programs that have quantized it, as the settings name them.
        """
        self._stated = stated
        self._modules = modules
        self._writers = writers
        self._found: int | None = None
        self._borrow_told = False
        self._constants: dict[str, int | None] = {}
        self._halfway: set[str] | None = None

    def of(self, raw: RawModule) -> int:
        """1 or 2.

        Args:
            raw: any module of the folder.

        Raises:
            CheckpointError: if modules have different ones.
        """
        if self._found is None:
            self._found = self._decided(raw)
        return self._found

    def symmetric(self, raw: RawModule) -> bool:
        """Whether a module's zero points are those of a symmetric scheme: where settings say so of it, or where those
        of the whole folder are.

        Raises:
            CheckpointError: see `of`.
        """
        version = self.of(raw)
        if self._halfway is None:
            halves = {name: 2 ** (self._modules[name].bits - 1) - (version == 1) for name in self._constants}
            self._halfway = {name for name, value in self._constants.items() if value == halves[name]}
        everywhere = len(self._halfway) == len(self._constants)
        return raw.name in self._halfway and (everywhere or self._modules[raw.name].symmetric)

    def tell_borrow(self, raw: RawModule) -> None:
        """Tell the user, once, that zero points of 0 are read as GPTQModel packs them, unless it has."""
        if "gptqmodel" in self._writers or self._borrow_told:
            return
        self._borrow_told = True
        full = 2 ** self._modules[raw.name].bits - 1
        raw.note(
            f"zero points stored as {full}, the first in '{raw.name}', are read as GPTQModel packs 0, with a borrow "
            "from the next output's; if what wrote them packs each by itself, that one is 1 less, which no file tells"
        )

    def _decided(self, raw: RawModule) -> int:
        there = {}
        for name, stated in self._modules.items():
            other = raw.other(name)
            if (packed := _packed(other, stated)) is not None:
                there[name] = packed
                self._constants[name] = constant(other, packed)
        told = self._told_by_constants(raw, [name for name in there if self._modules[name].symmetric])
        if told is None:
            try:
                told = _told_by_codes(raw, there)
            except CheckpointError:
                if WRITER not in self._writers:
                    raise
        if self._stated is None:
            found = told or self._told_by_constants(raw, list(there)) or 1
            if found != 1:
                raw.note(
                    "its settings do not say of which of GPTQ's versions zero points are; they are of version "
                    f"{found}, and are read so"
                )
            return found
        if told in (None, self._stated):
            return self._stated
        assert told is not None
        lies = f"its settings say that zero points are of GPTQ's version {self._stated}, "
        if WRITER in self._writers:
            raw.note(f"{lies}and are read so, as {WRITER} wrote them, but its codes lie as with version {told}")
            return self._stated
        raw.note(f"{lies}but they are of version {told}, and are read so")
        return told

    def _told_by_constants(self, raw: RawModule, names: Collection[str]) -> int | None:
        """The version that symmetric modules tell; None if they are not all such.

        Raises:
            CheckpointError: if they tell different ones.
        """
        told: dict[int | None, str] = {}
        for name in names:
            half, value = 2 ** (self._modules[name].bits - 1), self._constants[name]
            told.setdefault(None if value is None else {half - 1: 1, half: 2}.get(value), name)
        if len(told) != 1:
            if told and None not in told:
                raise _disagree(raw, told[1], 1)
            return None
        return next(iter(told))


def _disagree(raw: RawModule, name: str, version: int) -> CheckpointError:
    return CheckpointError(
        f"the zero points of '{name}' are of another GPTQ version than others of the folder", path=raw.path,
        found=f"version {version}", expected="one version", hint="files of two models lie side by side",
    )  # fmt: skip


def _told_by_codes(raw: RawModule, modules: Mapping[str, Packed]) -> int | None:
    """The version that the codes of some modules tell together; None if they are too uncertain.

    Raises:
        CheckpointError: if most tell one, and not all the same.
    """
    sampled = list(modules)[:: math.ceil(len(modules) / _MODULES) or 1]
    offsets = [_offsets(raw.other(name), modules[name]) for name in sampled]
    own = {name: told for name, offset in zip(sampled, offsets, strict=True) if (told := _nearest(offset)) is not None}
    if len(set(own.values())) > 1 and 2 * len(own) > len(sampled):
        raise _disagree(raw, next(name for name, told in own.items() if told == 1), 1)
    return _nearest([_together(offset) for offset in zip(*offsets, strict=True)]) if offsets else None


def _together(offsets: Sequence[_Offset]) -> _Offset:
    """The middle one of several mean offsets, so that single modules of odd weights do not count, and its error."""
    means = [mean for mean, _ in offsets]
    middle = statistics.median(means)
    if len(means) < _ENOUGH:
        return middle, math.hypot(*(error for _, error in offsets)) / len(means)
    deviation = statistics.median(abs(mean - middle) for mean in means)
    return middle, _OF_MEDIAN * deviation / math.sqrt(len(means))


def _nearest(offsets: Sequence[_Offset]) -> int | None:
    """The version under which codes lie around zero points, and do not under the other; None if it is too uncertain.

    Args:
        offsets: the mean offset of codes from zero points under version 1, and under version 2.
    """
    (near, error), (far, other_error) = sorted(offsets, key=lambda offset: abs(offset[0]))
    sure = abs(near) + _SURE * error < 0.5 < abs(far) - _SURE * other_error
    return (1 if offsets[0] == (near, error) else 2) if sure else None


def _packed(raw: RawModule, stated: Stated) -> Packed | None:
    """How a module lies as its own headers tell it; None where they contradict each other."""
    found, g_idx = [raw.find(suffix) for suffix in (QWEIGHT, QZEROS, SCALES)], raw.find(G_IDX)
    shapes = [one.shape for one in found if one is not None and len(one.shape) == 2 and 0 not in one.shape]
    words_of = [one for one in (found[0], found[1], g_idx) if one is not None]
    if len(shapes) < 3 or any(one.dtype != DType.INT32 for one in words_of):
        return None
    (words, rows), zeros, scales = shapes
    columns = words * 32 // stated.bits
    if g_idx is not None:
        if len(g_idx.shape) != 1:
            return None
        columns = g_idx.shape[0]
    elif stated.group_size is not None:
        columns = min(columns, scales[0] * stated.group_size)
    packed = Packed(stated.bits, rows, columns, min(stated.group_size or columns, columns) or 1)
    fits = scales == (packed.groups, rows) and zeros == (packed.groups, math.ceil(rows / packed.per_word))
    return packed if fits and words == math.ceil(columns / packed.per_word) else None


def _offsets(raw: RawModule, packed: Packed) -> list[_Offset]:
    """By how much the codes of some inputs lie above their zero points, under version 1 and under 2, with the standard
    error of each."""
    import torch

    from quantkit.tensors.qtensor import unpack_int32
    from quantkit.tensors.tensor_slice import TensorSlice

    inputs = min(packed.columns, max(_INPUTS, min(packed.group_size, _MOST_INPUTS)))
    group = torch.arange(inputs) // packed.group_size
    if raw.find(G_IDX) is not None:
        group = raw.read(G_IDX)[:inputs].long().clamp(0, packed.groups - 1)
    elif inputs == packed.columns > packed.per_word:
        inputs -= packed.per_word  # how many codes the last word holds is not known here
    totals, counts = torch.zeros(packed.rows, packed.groups), torch.zeros(packed.groups)
    for start in range(0, inputs, _AT_ONCE):
        stop = min(start + _AT_ONCE, inputs)
        words = raw.read(QWEIGHT, TensorSlice(0, ((start // packed.per_word, -(-stop // packed.per_word)),)))
        codes = unpack_int32(words.t(), packed.bits, stop - start)
        totals.index_add_(1, group[start:stop], codes.float())
        counts.index_add_(0, group[start:stop], torch.ones(stop - start))
    there = counts > 0
    stored = stored_fields(raw, packed).t()[:, there]
    inner = (stored > 0) & (stored < 2**packed.bits - 1)  # the weights of others may be of one sign
    means, weights = totals[:, there] / counts[there], (counts[there] * inner).flatten().double()
    if not inner.any():
        return [(math.inf, math.inf)] * 2
    found = []
    for version in (1, 2):
        zeros = zero_points(raw.read(QZEROS), packed.bits, packed.rows, version).t().float()
        offsets = (means - zeros[:, there]).flatten().double()
        mean = float((offsets * weights).sum() / weights.sum())
        spread = float(((offsets - mean).square() * weights).sum() / weights.sum())
        error = math.sqrt(spread / (len(offsets) - 1)) if len(offsets) >= _ENOUGH else math.inf
        found.append((mean, max(error, 2**packed.bits * _OWN_MEAN)))
    return found
