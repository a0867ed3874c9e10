"""GPTQ's packed zero points: which of its two versions a folder has, told by the zero points themselves.

Version 1 stores ``z - 1``, version 2 stores ``z``; what settings say of it is often wrong. Symmetric weights tell it by
their one zero point, ``2 ** (bits - 1)``. Of others the codes tell it: the weights of a group have a mean near zero,
so codes lie around their zero point. GPTQModel makes version 1 by subtracting from whole words, so that z = 0 borrows
from the next field; adding the same again undoes it. AutoGPTQ ORs the fields of a word, where a -1 fills all above it.
Sources: the packages gptqmodel and auto_gptq.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.codec import RawModule

if TYPE_CHECKING:
    from torch import Tensor

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"
_MODULES = 12
_INPUTS = 512
_ENOUGH = 6  # modules whose spread is an error
_SURE = 4  # such errors
_OWN_MEAN = 1 / 512  # of all codes, by which the weights of one module may lie beside zero


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


def require_whole(raw: RawModule, packed: Packed) -> None:
    """Check that zero points of version 1 were packed without loss.

    Raises:
        UnsupportedError: if every -1 that was packed fills all fields above it.
    """
    import torch

    fields = stored_fields(raw, packed)
    full = fields == 2**packed.bits - 1
    if not full.any():
        return
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


class Version:
    """The version of all zero points of a folder."""

    def __init__(self, stated: int, modules: Mapping[str, tuple[int, int | None]]) -> None:
        """
        Args:
            stated: what the settings say.
            modules: the folder's quantized modules, by name their bits and group size, None for whole rows.
        """
        self._stated = stated
        self._modules = modules
        self._found: int | None = None

    def of(self, raw: RawModule) -> int:
        """1 or 2.

        Args:
            raw: any module of the folder.

        Raises:
            CheckpointError: if modules have different ones.
        """
        if self._found is None:
            self._found = self._decided(raw)
            if self._found != self._stated:
                raw.note(
                    f"its settings say that zero points are of GPTQ's version {self._stated}, but they are of version "
                    f"{self._found}, and are read so"
                )
        return self._found

    def require(self, raw: RawModule, version: int) -> None:
        """Hold a module's own version against the folder's.

        Raises:
            CheckpointError: if they differ.
        """
        if self.of(raw) != version:
            raise _disagree(raw, raw.name, version)

    def _decided(self, raw: RawModule) -> int:
        step = math.ceil(len(self._modules) / _MODULES)
        told: dict[int, str] = {}
        offsets, errors = [], []
        for name in list(self._modules)[::step]:
            other = raw.other(name)
            packed = _packed(other, *self._modules[name])
            if packed is None:
                continue
            version = told_by(constant(other, packed), packed.bits)
            if version is None:
                offset, error = _mean_offset(other, packed)
                offsets.append(offset)
                errors.append(max(error, 2**packed.bits * _OWN_MEAN))
                version = _nearest(offset, errors[-1])
            if version is not None:
                told.setdefault(version, name)
        if len(told) > 1:
            raise _disagree(raw, told[1], 1)
        if told:
            return next(iter(told))
        if len(offsets) < _ENOUGH:
            return self._stated
        offset = sum(offsets) / len(offsets)
        return _nearest(offset, math.dist(offsets, [offset] * len(offsets)) / (len(offsets) - 1)) or self._stated


def _disagree(raw: RawModule, name: str, version: int) -> CheckpointError:
    return CheckpointError(
        f"the zero points of '{name}' are of another GPTQ version than others of the folder", path=raw.path,
        found=f"version {version}", expected="one version", hint="files of two models lie side by side",
    )  # fmt: skip


def _nearest(offset: float, error: float) -> int | None:
    """The version that a mean offset of codes from stored zero points tells; None if it is too uncertain."""
    nearest = round(offset)
    return 2 - nearest if nearest in (0, 1) and abs(offset - nearest) + _SURE * error < 0.5 else None


def told_by(value: int | None, bits: int) -> int | None:
    """The version that the one stored zero point of a module tells; None if none does."""
    half = 2 ** (bits - 1)
    return {half - 1: 1, half: 2}.get(value) if value is not None else None


def _packed(raw: RawModule, bits: int, group_size: int | None) -> Packed | None:
    """How a module lies as its own headers tell it; None where they contradict each other."""
    found = [raw.find(suffix) for suffix in (QWEIGHT, QZEROS, SCALES)]
    shapes = [one.shape for one in found if one is not None and len(one.shape) == 2 and 0 not in one.shape]
    if len(shapes) < 3:
        return None
    (words, rows), zeros, scales = shapes
    columns = words * 32 // bits
    packed = Packed(bits, rows, columns, min(group_size or columns, columns))
    fits = scales == (packed.groups, rows) and zeros == (packed.groups, math.ceil(rows / packed.per_word))
    return packed if fits else None


def _mean_offset(raw: RawModule, packed: Packed) -> tuple[float, float]:
    """By how much the codes of some inputs lie above what is stored as their zero points, and its standard error."""
    import torch

    from quantkit.tensors.qtensor import unpack_int32
    from quantkit.tensors.tensor_slice import TensorSlice

    inputs = min(packed.columns, max(_INPUTS, packed.group_size)) // packed.per_word * packed.per_word
    words = raw.read(QWEIGHT, TensorSlice(0, ((0, max(1, inputs // packed.per_word)),)))
    codes = unpack_int32(words.t(), packed.bits, inputs)
    group = torch.arange(inputs) // packed.group_size
    if raw.find(G_IDX) is not None:
        group = raw.read(G_IDX)[:inputs].long().clamp(0, packed.groups - 1)
    zeros = stored_fields(raw, packed).t().float()
    totals = torch.zeros(packed.rows, packed.groups).index_add_(1, group, codes.float())
    counts = torch.zeros(packed.groups).index_add_(0, group, torch.ones(inputs))
    there = counts > 0
    offsets = (totals[:, there] / counts[there] - zeros[:, there]).flatten().double()
    weights = counts[there].expand(packed.rows, -1).flatten().double()
    mean = float((offsets * weights).sum() / weights.sum())
    spread = float(((offsets - mean).square() * weights).sum() / weights.sum())
    return mean, math.sqrt(spread / len(offsets))
