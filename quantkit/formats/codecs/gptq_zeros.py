"""GPTQ's packed zero points: which of its two versions a folder has, inferred from the codes.

Version 1 stores ``z - 1``, version 2 stores ``z``; settings are often wrong about it. Symmetric
weights show it by their only zero point, ``2 ** (bits - 1)``. For others the codes show it: the
weights of a group have a mean near zero, so the mean code is near the zero point. If it is not, the
settings decide; for folders that quantkit wrote, always. GPTQModel makes version 1 by subtracting
from whole words, so that z = 0 borrows from the next field; adding the same value undoes it.
AutoGPTQ ORs the fields of a word, so that a -1 fills all fields above it. Sources: the packages
gptqmodel and auto_gptq.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.errors import CheckpointError
from quantkit.formats.codecs.layouts import G_IDX, QWEIGHT, QZEROS, SCALES
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch

WRITER = "quantkit"
# How many modules are sampled, evenly spread over the folder.
_MODULES = 12
# The inputs that are read of each module; more for longer groups.
_INPUTS = 512
_MAX_INPUTS = 4096
# The inputs that are unpacked at a time.
_AT_ONCE = 128
# How many offsets it takes to estimate a standard error from their spread.
_MIN_OFFSETS = 6
# A version is certain if offsets are this many standard errors from the limit between the two.
_ERRORS = 4
# Standard error of a median, times the root of the count, in median absolute deviations.
_OF_MEDIAN = 1.86
# Of the range of codes: the mean of one module's weights may differ from zero by this.
_OWN_MEAN = 1 / 512
_Offset = tuple[float, float]


@dataclass(frozen=True)
class Packed:
    """The packing of the codes of a module.

    Attributes:
        bits: of a code.
        rows, columns: of the weight [O, I].
        group_size: inputs that share a scale; I for one scale a row.
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


def make_word_of_ones(bits: int) -> int:
    """Return a word with 1 in each of its fields."""
    return 0xFFFFFFFF // ((1 << bits) - 1)


def unpack_zero_points(words: torch.Tensor, bits: int, count: int, version: int) -> torch.Tensor:
    """Unpack zero points [..., count] uint8 from words [..., W] int32."""
    if version == 1:
        # Adding to whole words undoes GPTQModel's subtraction, with its borrows.
        words = words + make_word_of_ones(bits)
    return qtensor.unpack_int32(words, bits, count)


def _find_constant(raw: RawModule, packed: Packed) -> int | None:
    """Find the value of all stored zero points of a module; None if they differ."""
    data = raw.read_bytes(QZEROS)
    field = data[0] & (2**packed.bits - 1) if data else 0
    if packed.rows % packed.per_word:
        # The unused fields of the last word may have any value.
        is_constant = bool((_read_stored_zeros(raw, packed) == field).all())
    else:
        word = (field * make_word_of_ones(packed.bits)).to_bytes(4, "little")
        is_constant = data == word * (len(data) // 4)
    return field if is_constant else None


def _read_stored_zeros(raw: RawModule, packed: Packed) -> torch.Tensor:
    """Read the stored value for each group and output [G, O], uint8."""
    # Version 2 stores zero points as they are.
    return unpack_zero_points(raw.read(QZEROS), packed.bits, packed.rows, 2)


def _has_borrowed_zeros(raw: RawModule, packed: Packed) -> bool:
    """Check whether a zero point borrows from the next output's; see `Version.require_whole`."""
    # A zero point of 0 minus 1 has all bits set.
    full = _read_stored_zeros(raw, packed) == 2**packed.bits - 1
    if not full.any():
        return False
    padding = -packed.rows % packed.per_word
    padded = torch.nn.functional.pad(full, (0, padding), value=True)
    words = padded.view(len(full), -1, packed.per_word)
    # In each word, the fields from the first full one on.
    from_first = words.cumsum(-1) > 0
    inside = torch.arange(words.shape[1] * packed.per_word).view(words.shape[1:]) < packed.rows
    # Words in which an output follows a full field: others show nothing.
    followed = (from_first[..., :-1] & inside[..., 1:]).any(-1)
    destroyed = followed & (words | ~from_first).all(-1)
    # Only if all such words are full was -1 ORed into them; by chance some may be.
    if destroyed.any() and not (followed & ~destroyed).any():
        group, word = destroyed.nonzero()[0].tolist()
        raise raw.make_unsupported_error(
            f"the zero points of '{raw.name}' were destroyed when they were packed: a zero point of"
            " 0 became -1 and overwrote the word, as AutoGPTQ does",
            f"{int(destroyed.sum())} such words, the first for group {group} of output"
            f" {word * packed.per_word}",
            hint="quantize the float model again",
        )
    return bool(followed.any())


class Stated(NamedTuple):
    """What settings state of a module; a group size of None is for whole rows."""

    bits: int
    group_size: int | None
    symmetric: bool


class Version:
    """The version of all zero points of a folder."""

    def __init__(
        self,
        config_version: int | None,
        modules: Mapping[str, Stated],
        writers: Collection[str] = (),
    ) -> None:
        """
        Args:
            stated: by the settings; None if they do not.
            modules: the folder's quantized modules.
            writers: the programs that quantized it, as the settings list them.
        """
        self._config_version = config_version
        self._modules = modules
        self._writers = writers
        self._version: int | None = None
        self._borrow_noted = False
        self._constants: dict[str, int | None] = {}
        self._halfway: set[str] | None = None

    def of(self, raw: RawModule) -> int:
        """Determine the version, 1 or 2, from any module of the folder; different ones raise
        `CheckpointError`.
        """
        if self._version is None:
            self._version = self._determine_version(raw)
        return self._version

    def symmetric(self, raw: RawModule) -> bool:
        """Check whether a module's zero points are those of a symmetric scheme, if the settings say
        so or all modules are symmetric.
        """
        version = self.of(raw)
        if self._halfway is None:
            self._halfway = set()
            for name, value in self._constants.items():
                half = 2 ** (self._modules[name].bits - 1)
                if value == half - (version == 1):
                    self._halfway.add(name)
        everywhere = len(self._halfway) == len(self._constants)
        return raw.name in self._halfway and (everywhere or self._modules[raw.name].symmetric)

    def require_whole(self, raw: RawModule, packed: Packed) -> None:
        """Check that zero points of version 1 were packed without loss. A note says, once, if some
        of 0 are read as GPTQModel packs them, unless GPTQModel wrote them.

        Raises:
            UnsupportedError: if every -1 that was packed fills all fields above it.
        """
        borrows = self.of(raw) == 1 and _has_borrowed_zeros(raw, packed)
        if not borrows or "gptqmodel" in self._writers or self._borrow_noted:
            return
        self._borrow_noted = True
        raw.note(
            f"zero points stored as {2**packed.bits - 1}, the first in '{raw.name}', are read as"
            " GPTQModel packs 0, with a borrow from the next output; if the writer packs each"
            " separately, it is 1 less, which cannot be detected"
        )

    def _determine_version(self, raw: RawModule) -> int:
        packings: dict[str, Packed] = {}
        for name, module in self._modules.items():
            other = raw.other(name)
            packed = _infer_packing(other, module)
            # Modules whose tensors contradict each other are reported when they are read.
            if packed is not None:
                packings[name] = packed
                self._constants[name] = _find_constant(other, packed)
        symmetric_names = [name for name in packings if self._modules[name].symmetric]
        inferred = self._of_constants(raw, symmetric_names)
        if inferred is None:
            try:
                inferred = _of_codes(raw, packings)
            except CheckpointError:
                # The settings that quantkit writes are right, whatever the codes look like.
                if WRITER not in self._writers:
                    raise
        if self._config_version is None:
            # If nothing shows the version, it is the first.
            result = inferred or self._of_constants(raw, list(packings)) or 1
            if result != 1:
                unknown = "its settings do not state the GPTQ version of the zero points"
                raw.note(f"{unknown}; they have version {result}, and are read as such")
            return result
        if inferred in (None, self._config_version):
            return self._config_version
        assert inferred is not None
        lies = f"its settings say that zero points have GPTQ version {self._config_version}, "
        if WRITER in self._writers:
            raw.note(
                f"{lies}and are read as such, as {WRITER} wrote them, but the weights fit version"
                f" {inferred}"
            )
            return self._config_version
        raw.note(f"{lies}but they have version {inferred}, and are read as such")
        return inferred

    def _of_constants(self, raw: RawModule, names: Collection[str]) -> int | None:
        """Infer the version from symmetric modules; None if not all are symmetric."""
        # The first module of each version, for errors.
        versions: dict[int | None, str] = {}
        for name in names:
            half = 2 ** (self._modules[name].bits - 1)
            value = self._constants[name]
            version = None
            if value == half - 1:
                version = 1
            elif value == half:
                version = 2
            versions.setdefault(version, name)
        if len(versions) != 1:
            if versions and None not in versions:
                raise _disagree(raw, versions[1])
            return None
        return next(iter(versions))


def _disagree(raw: RawModule, name: str) -> CheckpointError:
    problem = f"the zero points of '{name}' have a different GPTQ version than others in the folder"
    return raw.make_damage_error(
        problem, "version 1", "one version", "the folder has files of two models"
    )


def _of_codes(raw: RawModule, modules: Mapping[str, Packed]) -> int | None:
    """Infer the version that the codes of some modules show together; None if it is too uncertain.
    If most modules show one, and not all the same, it raises `CheckpointError`.
    """
    step = math.ceil(len(modules) / _MODULES) or 1
    sampled = list(modules)[::step]
    offsets = [_measure_offsets(raw.other(name), modules[name]) for name in sampled]
    certain: dict[str, int] = {}
    for name, module_offsets in zip(sampled, offsets, strict=True):
        version = _choose_version(module_offsets)
        if version is not None:
            certain[name] = version
    if len(set(certain.values())) > 1 and 2 * len(certain) > len(sampled):
        for name, version in certain.items():
            if version == 1:
                raise _disagree(raw, name)
    if not offsets:
        return None
    # Modules that are too uncertain one by one may be certain together.
    combined: list[_Offset] = []
    for version_offsets in zip(*offsets, strict=True):
        combined.append(_combine_offsets(version_offsets))
    return _choose_version(combined)


def _combine_offsets(offsets: Sequence[_Offset]) -> _Offset:
    """Compute the median of mean offsets, which single unusual modules do not change, and its
    error.
    """
    means: list[float] = []
    errors: list[float] = []
    for mean, error in offsets:
        means.append(mean)
        errors.append(error)
    middle = statistics.median(means)
    if len(means) < _MIN_OFFSETS:
        # Too few for their spread to be known: use the error of a mean of independent values.
        return middle, math.hypot(*errors) / len(means)
    deviation = statistics.median(abs(mean - middle) for mean in means)
    return middle, _OF_MEDIAN * deviation / math.sqrt(len(means))


def _choose_version(offsets: Sequence[_Offset]) -> int | None:
    """Choose the version for which codes are near zero points, if they are not for the other; None
    if it is too uncertain, by the mean offset of codes from zero points with version 1, and with
    version 2.
    """
    (near, near_error), (far, far_error) = sorted(offsets, key=lambda offset: abs(offset[0]))
    # The offsets of the versions differ by 1, so the limit between them is one half.
    if not abs(near) + _ERRORS * near_error < 0.5 < abs(far) - _ERRORS * far_error:
        return None
    if offsets[0] == (near, near_error):
        return 1
    return 2


def _infer_packing(raw: RawModule, module_settings: Stated) -> Packed | None:
    """Infer the packing of a module from its headers; None if they contradict each other."""
    g_idx = raw.find(G_IDX)
    shapes: list[tuple[int, ...]] = []
    for suffix in (QWEIGHT, QZEROS, SCALES):
        tensor = raw.find(suffix)
        if tensor is None or len(tensor.shape) != 2 or 0 in tensor.shape:
            return None
        if suffix != SCALES and tensor.dtype != DType.INT32:
            return None
        shapes.append(tensor.shape)
    if g_idx is not None and g_idx.dtype != DType.INT32:
        return None
    (words, rows), zeros, scales = shapes
    # The last word may be partly filled; the group of each input, or the groups, tell how far.
    columns = words * 32 // module_settings.bits
    if g_idx is not None:
        if len(g_idx.shape) != 1:
            return None
        columns = g_idx.shape[0]
    elif module_settings.group_size is not None:
        columns = min(columns, scales[0] * module_settings.group_size)
    group_size = min(module_settings.group_size or columns, columns) or 1
    packed = Packed(module_settings.bits, rows, columns, group_size)
    expected_zeros = (packed.groups, math.ceil(rows / packed.per_word))
    if scales != (packed.groups, rows) or zeros != expected_zeros:
        return None
    if words != math.ceil(columns / packed.per_word):
        return None
    return packed


def _measure_offsets(raw: RawModule, packed: Packed) -> list[_Offset]:
    """Measure the mean of codes minus zero points for some inputs, with version 1 and with 2, and
    its standard error.
    """
    from quantkit.tensors.tensor_slice import TensorSlice

    inputs = min(packed.columns, max(_INPUTS, min(packed.group_size, _MAX_INPUTS)))
    group = torch.arange(inputs) // packed.group_size
    if raw.find(G_IDX) is not None:
        group = raw.read(G_IDX)[:inputs].long().clamp(0, packed.groups - 1)
    elif inputs == packed.columns > packed.per_word:
        # The number of codes in the last word is not known here.
        inputs -= packed.per_word
    totals = torch.zeros(packed.rows, packed.groups)
    counts = torch.zeros(packed.groups)
    for start in range(0, inputs, _AT_ONCE):
        stop = min(start + _AT_ONCE, inputs)
        bounds = (start // packed.per_word, -(-stop // packed.per_word))
        words = raw.read(QWEIGHT, TensorSlice(0, (bounds,)))
        codes = qtensor.unpack_int32(words.t(), packed.bits, stop - start)
        totals.index_add_(1, group[start:stop], codes.float())
        counts.index_add_(0, group[start:stop], torch.ones(stop - start))
    # Groups of which an input was read.
    sampled = counts > 0
    stored = _read_stored_zeros(raw, packed).t()[:, sampled]
    # Groups with a zero point at either end may have weights of one sign, whose mean is not zero.
    inner = (stored > 0) & (stored < 2**packed.bits - 1)
    means = totals[:, sampled] / counts[sampled]
    weights = (counts[sampled] * inner).flatten().double()
    if not inner.any():
        return [(math.inf, math.inf)] * 2
    result = []
    for version in (1, 2):
        zeros = unpack_zero_points(raw.read(QZEROS), packed.bits, packed.rows, version).t().float()
        offsets = (means - zeros[:, sampled]).flatten().double()
        mean = float((offsets * weights).sum() / weights.sum())
        spread = float(((offsets - mean).square() * weights).sum() / weights.sum())
        if len(offsets) >= _MIN_OFFSETS:
            error = math.sqrt(spread / (len(offsets) - 1))
        else:
            error = math.inf
        # However many weights were read, their true mean need not be zero.
        result.append((mean, max(error, 2**packed.bits * _OWN_MEAN)))
    return result
