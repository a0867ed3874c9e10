"""The layouts of weights: the tensors of a module and their shapes; and descriptions of modules on
disk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantkit.base.json_values import Settings
from quantkit.files.tensor_file import StoredTensor
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.spec import TensorSpec

if TYPE_CHECKING:
    pass

Shape = tuple[int, ...]
Shapes = Mapping[str, list[Shape]]
"""The shapes that each tensor of a module may have, by suffix; the first is the one that is
written.
"""

# Types that never hold floats. UINT8 is not among them: bytes may be the exponents of scales.
_INTEGERS = (
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.UINT32,
)
# Shapes are checked for codes of up to these bits.
_MAX_SHAPED_BITS = 8
MAX_BITS = 16
"""Bits of a code that settings may state."""
# A generous limit of the sizes in settings, which bounds what is computed from them.
MAX_COLUMNS = 2**24


@dataclass(frozen=True, eq=False)
class Layout:
    """The tensors of one module in a format, by their suffixes: what their names have after the
    module's.

    Attributes:
        title: of the layout, for messages.
        codes: the suffix of the codes.
        scales: the suffixes that scales may have.
        also: other tensors that a module must have: for each the suffixes that it may have.
        if_asymmetric: the suffixes of tensors that a module must have if it has zero points.
        code_types: in which codes are stored; empty if any.
        bits: of a code; None if `packed_outputs` or the config says it.
        packed_outputs: the suffix of a tensor whose words pack the outputs; empty if there is none.
        zeros: the suffix of packed zero points; empty if there are none.
        others: the suffixes of further tensors that a module may have.
        prefixes: with which the suffixes of still others begin.
        excluded: a suffix that only modules in another layout with such codes have.
        joint: what joins the name of a module and a suffix.
        floats, integers: the suffixes of tensors that must hold floats, or integers.
        shapes: the shapes of the tensors of a weight.
        unpacked: whether codes are stored one by one, in the shape of the weight.
        is_evident: whether tensors with such codes are in this layout, if the config does not say
            so.
    """

    title: str
    codes: str
    scales: tuple[str, ...] = ()
    also: tuple[tuple[str, ...], ...] = ()
    if_asymmetric: tuple[str, ...] = ()
    code_types: Collection[DType] = ()
    bits: int | None = None
    packed_outputs: str = ""
    zeros: str = ""
    optional_suffixes: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    excluded: str = ""
    joint: str = "."
    floats: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    shapes: Callable[[int, int, int, int | None, Shape | None], Shapes] = lambda *sizes: {}
    unpacked: bool = False
    is_evident: Callable[[Mapping[str, StoredTensor]], bool] = lambda tensors: True

    @functools.cached_property
    def suffixes(self) -> set[str]:
        """Collect the suffixes that its tensors may have."""
        suffixes = {
            self.codes,
            *self.scales,
            *self.floats,
            *self.integers,
            *self.optional_suffixes,
        }
        for alternatives in self.also:
            suffixes.update(alternatives)
        return suffixes

    def matches(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """Check that tensors, by suffix, have its codes; scales are enough if no other layout has
        scales of that name.
        """
        codes = tensors.get(self.codes)
        if codes is None:
            # Only layouts that append suffixes without a dot have names that no other layout has.
            return not self.joint and any(suffix in tensors for suffix in self.scales)
        if self.excluded in tensors:
            return False
        return not self.code_types or codes.dtype in self.code_types

    def list_stored_tensors(
        self, spec: TensorSpec, bits: int, group_size: int | None, dtypes: Mapping[str, DType]
    ) -> list[StoredTensor]:
        """List the tensors of a weight [O, I] as they are written, in the order of their suffixes
        in `dtypes`.
        """
        rows, columns = spec.shape
        module = spec.name.removesuffix(".weight")
        shapes = self.shapes(rows, columns, bits, group_size, None)
        result: list[StoredTensor] = []
        for suffix, dtype in dtypes.items():
            # The first shape is the one that is written; the others are only read.
            result.append(StoredTensor(f"{module}.{suffix}", dtype, shapes[suffix][0]))
        return result


@dataclass(frozen=True)
class Claim:
    """How a config says that a weight is quantized.

    Attributes:
        layout: of its tensors; None for one that is not known here.
        bits: of a code; None if the config does not say.
        group_size: inputs that share a scale; None for a row, or a block.
        symmetric: whether there are no zero points; None if the config does not say.
        by_index: whether a tensor says the group of each column.
        activations: whether these are quantized too.
        block: rows and columns that share a scale, if scales are per block.
    """

    layout: Layout | None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    by_index: bool = False
    activations: bool = False
    block: tuple[int, int] | None = None

    def apply_settings(
        self, settings: Settings, bits_key: str = "bits", size_key: str = "group_size"
    ) -> Claim:
        """Replace the bits and the group size by those that settings state, if they do; -1 and 0
        stand for a row.
        """
        bits = self.bits
        if settings.has(bits_key):
            bits = settings.integer(bits_key, 1, MAX_BITS)
        size = self.group_size
        if settings.has(size_key):
            size = settings.integer(size_key, -1, MAX_COLUMNS)
        if size is not None and size <= 0:
            size = None
        return replace(self, bits=bits, group_size=size)


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Read the rows and columns that share a scale from settings; None if they do not state them.
    Anything but a list of two positive integers raises `CheckpointError`.
    """
    if not settings.has(key):
        return None
    if isinstance(settings.values[key], list):
        sizes = settings.values[key]
    else:
        sizes = []
    # JSON's true and false are ints in Python, hence `type`.
    is_pair = len(sizes) == 2 and all(type(size) is int for size in sizes)
    if not is_pair or min(sizes) <= 0 or max(sizes) > MAX_COLUMNS:
        settings.wrong_type(key, "rows and columns of a block")
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class Claims:
    """What a config says of all linears.

    Attributes:
        modules: the claim for each module that the config calls quantized.
        certain: whether the config decides for each module; otherwise the tensors do.
        unmatched: names in the config that match no module.
        conflicts: modules to which the config gives two schemes, and which groups do.
        problems: why the settings make no sense.
    """

    modules: Mapping[str, Claim] = field(default_factory=dict)
    certain: bool = False
    unmatched: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """The tensors on disk of one quantized module, from headers.

    Attributes:
        layout: of its codes; None if only scales are there.
        tensors: by suffix.
    """

    module: str
    layout: Layout | None
    tensors: Mapping[str, StoredTensor]

    @property
    def title(self) -> str:
        """Return its layout for messages."""
        if self.layout is not None:
            return self.layout.title
        return "scales alone"

    @property
    def scale(self) -> StoredTensor | None:
        """Return the tensor of its scales."""
        if self.layout is None:
            return None
        for suffix in self.layout.scales:
            if suffix in self.tensors:
                return self.tensors[suffix]
        return None

    @property
    def codes(self) -> StoredTensor | None:
        """Return the tensor of its codes."""
        if self.layout is None:
            return None
        return self.tensors.get(self.layout.codes)

    @property
    def plain_code_shape(self) -> Shape | None:
        """Return the shape of a weight whose codes are stored one by one; None of packed ones."""
        codes = self.codes
        if codes is not None and self.layout is not None and self.layout.unpacked:
            return codes.shape
        return None

    @property
    def bits(self) -> int | None:
        """Derive the bits of a code, if the tensors show them."""
        if self.layout is None:
            return None
        if not self.layout.packed_outputs:
            return self.layout.bits
        shapes: list[Shape] = []
        for part in (self.codes, self.scale, self.tensors.get(self.layout.packed_outputs)):
            if part is None or len(part.shape) < 2:
                return None
            shapes.append(part.shape)
        # Scales have a column for each output, and the words of 32 bits pack these.
        outputs = shapes[1][-1]
        packed_bits = 32 * shapes[2][-1]
        if outputs and packed_bits and packed_bits % outputs == 0:
            return packed_bits // outputs
        return None

    @property
    def signature(self) -> tuple[object, ...]:
        """Derive what must be equal where modules are fused: layout, bits, number of groups, zero
        points.
        """
        scale = self.scale
        # Layouts that pack the outputs (GPTQ, AWQ) have scales [G, O], others [O, G].
        by_inputs = self.layout is not None and bool(self.layout.packed_outputs)
        if scale is None or len(scale.shape) < 2:
            groups = 0
        else:
            groups = scale.shape[0 if by_inputs else -1]
        return self.title, self.bits, groups, "weight_zero_point" in self.tensors

    @property
    def scheme(self) -> str:
        """Return its signature for messages."""
        bits, groups = self.signature[1:3]
        text = self.title
        if bits:
            text += f", {bits} bits"
        if groups:
            text += f", {groups} scale{'s' if groups != 1 else ''} a row"
        return text

    @property
    def foreign(self) -> list[str]:
        """List the suffixes of tensors that other layouts have, and its own does not."""
        if self.layout is None:
            return []
        layout_suffixes = self.layout.suffixes
        prefixes = self.layout.prefixes
        result: list[str] = []
        for suffix in self.tensors:
            if suffix not in layout_suffixes and not suffix.startswith(prefixes):
                result.append(suffix)
        return result

    def tensor_name(self, suffix: str) -> str:
        """Return the whole name of a tensor, whether or not it exists."""
        if self.layout is None:
            return f"{self.module}.{suffix}"
        return f"{self.module}{self.layout.joint}{suffix}"

    def missing(self, claim: Claim | None) -> list[str]:
        """List the suffixes of tensors that the layout needs and the module lacks."""
        if self.layout is None:
            # Scales are there and codes are not: the config may say under which suffix to expect
            # them.
            if claim is None or claim.layout is None:
                return ["weight"]
            return [claim.layout.codes]
        required = [(self.layout.codes,), self.layout.scales, *self.layout.also]
        if claim is not None and claim.symmetric is False:
            required += [(name,) for name in self.layout.if_asymmetric]
        result: list[str] = []
        for alternatives in required:
            if alternatives and not any(name in self.tensors for name in alternatives):
                result.append(alternatives[0])
        return result

    def wrong_types(self, layouts: Iterable[Layout]) -> Iterator[tuple[str, str]]:
        """Yield the suffixes of tensors of integers that should be floats, or the reverse, and
        what they should be, in any of the layouts that are known.
        """
        if self.layout is None or not self.layout.floats:
            return
        integers: set[str] = set()
        floats: set[str] = set()
        for layout in layouts:
            integers.update(layout.integers)
            floats.update(layout.floats)
        for suffix, tensor in self.tensors.items():
            if suffix in integers and tensor.dtype in FLOATS:
                yield suffix, "integers"
            elif suffix in floats and tensor.dtype in _INTEGERS:
                yield suffix, "floats"

    def wrong_shapes(self, shape: Shape, claim: Claim) -> Iterator[tuple[str, Shape]]:
        """Yield the suffixes of tensors whose shape is not that of a weight [O, I], and the shape
        that they should have.
        """
        if self.layout is None or claim.bits is None or claim.bits > _MAX_SHAPED_BITS:
            return
        rows, columns = shape
        expected = self.layout.shapes(rows, columns, claim.bits, claim.group_size, claim.block)
        for suffix, shapes in expected.items():
            if suffix in self.tensors and self.tensors[suffix].shape not in shapes:
                yield suffix, shapes[0]


def count_words(count: int, bits: int) -> int:
    """Count the words of 32 bits that codes fill."""
    return math.ceil(count * bits / 32)
