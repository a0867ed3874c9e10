"""MLX's affine codes, which mlx-lm reads and writes, and groups with an offset in floats in other
formats.

Per module: ``weight`` uint32 [O, I * bits / 32], least significant bits first, ``scales`` and
``biases`` [O, I / G] in one float type; ``w = scale * code + bias``. All experts of a layer are one
module [E, O, ...]. Where every offset is an integer multiple of its scale, they are codes with zero
points; otherwise they are read as floats, or as codes with minima where the same format is written
again. Source: mlx's documentation of ``mlx.core.quantize``; mlx-lm's ``load_model`` for the
settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import (
    FLOAT_MODEL,
    GroupedCodec,
    QuantMethod,
    RawModule,
    Reason,
    Runtime,
    Schemes,
    Weight,
    make_unread_settings_error,
)
from quantkit.formats.codecs.layout import MAX_COLUMNS, Claim, Claims, Layout, Shape, Shapes, words
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_CODES = "weight"
_SCALES = "scales"
_BIASES = "biases"
_LEAVES = (_CODES, _SCALES, _BIASES)
_AFFINE = "affine"
_CHUNK = 1 << 17  # scales at a time
_KEYS = {"group_size", "bits", "mode", "quant_method", "linear_class", "quantize_activations"}
"""Of the settings that are not names of modules."""
_GROUP_SIZES = (128, 64, 32)  # that MLX supports
_BITS = (2, 3, 4, 5, 6, 8)
_READ_BITS = (4, 8)  # as codes
_EXACT_OFFSETS = {
    DType.FLOAT16: (DType.FLOAT32,),
    DType.BFLOAT16: (DType.FLOAT32,),
    DType.FLOAT32: (DType.FLOAT16, DType.FLOAT32),
}
"""The types through which scales go so that float32 has each offset: 24 bits hold 11 of a scale
times 8 of a zero point.
"""


def _shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {
        _CODES: [(rows, words(columns, bits))],
        _SCALES: [(rows, groups)],
        _BIASES: [(rows, groups)],
    }


MLX = Layout(
    "codes of MLX",
    _CODES,
    (_SCALES,),
    code_types=(DType.UINT32,),
    floats=(_SCALES, _BIASES),
    shapes=_shapes,
)


@dataclass(frozen=True)
class Affine(GroupedCodec):
    """Codes packed into words, with a scale and an offset for each group.

    Attributes:
        scheme: of weights that are written; None for weights that are read, whose tensors decide.
        bits, group_size: as the settings state them for a module by its name; None if the tensors
            decide, as in mlx-lm.
        minima: whether weights with offsets that are no multiples of their scales are codes with
            minima, not floats.
    """

    scheme: QuantScheme | None = None
    bits: int | None = None
    group_size: int | None = None
    minima: bool = False

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        bits, group_size = self._layout(raw, expected.shape)
        if bits in _READ_BITS:
            scheme = scheme_of(raw, _SCALES, _BIASES, bits, group_size)
        else:
            scheme = None
        if scheme is None and self.minima and bits in _READ_BITS:
            scheme = QuantScheme(bits, group_size, False, Scales.BLOCKS)
        scales = raw.find(_SCALES)
        if scheme is not None and scales is not None:
            return TensorSpec(expected.name, expected.shape, scales.dtype, scheme)
        if bits in _READ_BITS:
            stored_as = "MLX with float offsets"
        else:
            stored_as = f"MLX with {bits} bits"
        return TensorSpec(expected.name, expected.shape, expected.dtype, stored_as=stored_as)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        assert spec.scheme is not None, "floats have no codec"
        module = spec.name.removesuffix(_CODES)
        *rows, columns = spec.shape
        group_size = _choose_group_size(spec.scheme, columns)
        if isinstance(group_size, Reason):
            raise group_size.error(spec.name, Mlx.name)
        groups = (*rows, columns // group_size)
        return [
            StoredTensor(module + _CODES, DType.UINT32, (*rows, columns * spec.scheme.bits // 32)),
            StoredTensor(module + _SCALES, spec.dtype, groups),
            StoredTensor(module + _BIASES, spec.dtype, groups),
        ]

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return [found for leaf in _LEAVES if (found := raw.find(leaf)) is not None]

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        scheme = spec.scheme
        group_size = self._layout(raw, spec.shape)[1]
        # Of whole words and groups.
        return math.lcm(32, group_size if scheme is None else scheme.group_size or 32)

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        """Codes are [O, I], also those of one of several experts."""
        (first, last), count, scheme = columns, spec.shape[-1], spec.scheme
        bits, size = self._layout(raw, spec.shape)
        packed = raw.read(
            _CODES,
            self.columns_slice(rows, first * bits // 32, words(last, bits), words(count, bits)),
        )
        groups = self.columns_slice(rows, first // size, -(-last // size), count // size)
        scale = raw.read(_SCALES, groups).flatten(0, -2)
        codes = _unpack_codes(packed.flatten(0, -2), bits, last - first)
        if scheme is None:
            floats = affine(codes, scale, raw.read(_BIASES, groups).flatten(0, -2), spec.dtype)
            return floats.view(*packed.shape[:-1], -1)
        if scheme.scales is Scales.BLOCKS:
            minimum = raw.read(_BIASES, groups).flatten(0, -2).neg()
            return qtensor.QuantTensor(codes, scale, None, scheme, minimum)
        if scheme.group_size is None:
            repeats = scale.shape[1]
        else:
            repeats = scheme.group_size // size
        zero = None
        if not scheme.symmetric:
            zero = zero_points(scale, raw.read(_BIASES, groups).flatten(0, -2), bits)
            if zero is None:
                raise raw.make_damage_error(
                    f"the offsets of '{raw.name}' have changed since it was opened"
                )
            zero = zero[:, ::repeats].contiguous()
        return qtensor.QuantTensor(codes, scale[:, ::repeats].contiguous(), zero, scheme)

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        assert self.scheme is not None, "what is written has a scheme"
        group_size = _choose_group_size(self.scheme, shape[-1])
        if isinstance(group_size, Reason):
            return group_size
        return None

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        scheme = value.scheme
        columns = value.shape[1]
        group_size = _choose_group_size(scheme, columns)
        if isinstance(group_size, Reason):
            return group_size
        scale = value.scale
        if value.minimum is None:
            offset = _exact_offsets(value)
        else:
            offset = value.minimum.neg()
        if isinstance(offset, Reason):
            return offset
        repeats = columns // group_size // scale.shape[1]
        groups = []
        for one in (scale, offset):
            groups.append(one.repeat_interleave(repeats, 1) if repeats > 1 else one.contiguous())
        return [qtensor.pack_int32(value.codes, scheme.bits).view(torch.uint32), *groups]

    def _layout(self, raw: RawModule, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bits and group size of a module with a weight of a shape, from its tensors, which are
        checked.
        """
        found = {leaf: raw.find(leaf) for leaf in _LEAVES}
        if missing := [leaf for leaf, tensor in found.items() if tensor is None]:
            expected = " and ".join(_LEAVES[1:]) + " along with the codes of MLX"
            raise raw.make_damage_error(
                f"tensor '{raw.name}.{missing[0]}' is missing", expected=expected
            )
        codes, scales, biases = (tensor for tensor in found.values() if tensor is not None)
        *rows, columns = shape
        groups, width = ((one.shape or (0,))[-1] for one in (scales, codes))
        fitting = (
            codes.shape == (*rows, width)
            and scales.shape == biases.shape == (*rows, groups)
            and codes.dtype == DType.UINT32
            and scales.dtype in FLOATS
            and biases.dtype == scales.dtype
            and groups > 0
            and not columns % (8 * groups)
            and width * 32 in [columns * bits for bits in _BITS]
        )
        if not fitting:
            raise raw.make_damage_error(
                f"the tensors of '{raw.name}' do not fit together as MLX's",
                ", ".join(f"{one.dtype} {list(one.shape)}" for one in (codes, scales, biases)),
                f"codes, scales and biases of {list(shape)}",
            )
        layout = width * 32 // columns, columns // groups
        stated = self.bits or layout[0], self.group_size or layout[1]
        if layout != stated:
            found_layout, stated_layout = (
                f"{bits} bits in groups of {size}" for bits, size in (layout, stated)
            )
            raise raw.make_damage_error(
                f"the tensors of '{raw.name}' disagree with the config", found_layout, stated_layout
            )
        return layout


class Mlx(QuantMethod):
    """Settings without a ``quant_method``, under ``quantization``: bits, group size and mode of all
    modules that have scales, and by their names those of some.
    """

    name = "mlx"
    layouts = (MLX,)
    keys: tuple[str, ...] = ("quantization", "quantization_config")
    joins_experts = True
    runtimes = ("mlx",)
    schemes = tuple(QuantScheme(bits, size) for bits in _READ_BITS for size in (32, 64, 128))

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        """Return the tensors decide; settings give some modules a scheme by their names."""
        own = {key: value for key, value in settings.values.items() if key not in _KEYS}
        found = {}
        for module in coded:
            if isinstance(own.get(module, {}), Mapping):
                if module in own:
                    stated = settings.inside(module)
                else:
                    stated = settings
                if stated.values.get("mode", _AFFINE) == _AFFINE:
                    layout = MLX
                else:
                    layout = None
                found[module] = Claim(layout, symmetric=False).apply_settings(stated)
        missing = (
            key for key, value in own.items() if isinstance(value, Mapping) and key not in coded
        )
        return Claims(found, certain=True, unmatched=tuple(missing))

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Affine]:
        _require_affine(settings)
        settings.integer("bits", 1, 32)
        settings.integer("group_size", 1, MAX_COLUMNS)
        result: dict[str, Affine] = {}
        for module in modules:
            own = settings.values.get(module)
            quantized = f"{module}.{_SCALES}" in stored
            if isinstance(own, dict):
                named = settings.inside(module)
                _require_affine(named)
                if named.has("bits"):
                    bits = named.integer("bits", 1, 32)
                else:
                    bits = None
                if named.has("group_size"):
                    size = named.integer("group_size", 1, MAX_COLUMNS)
                else:
                    size = None
                codec = Affine(None, bits, size)
            elif own is None or isinstance(own, bool):
                codec = Affine()
            else:
                settings.wrong_type(module, "an object, true or false")
            if own is not None and stored and quantized != bool(own):
                raise CheckpointError(
                    f"{settings.name} says that '{module}' is {'' if own else 'not '}quantized",
                    path=settings.path,
                    found=f"a tensor '{module}.{_SCALES}'" if quantized else "no scales",
                )
            if quantized:
                result[module] = codec
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf == _SCALES and module not in result and f"{module}.{_BIASES}" in stored:
                problem = (
                    f"'{module}' is quantized by MLX, and is no module of an architecture that is"
                    " read so"
                )
                raise make_unread_settings_error(settings, problem, f"'{name}'", hint=FLOAT_MODEL)
        return result

    def write_settings(
        self, schemes: Schemes, modules: Mapping[str, int], *, every: bool = True
    ) -> dict[str, Any]:
        """Return the layout of most modules comes first; other modules are listed by name."""
        layouts = {}
        for module, scheme in schemes.items():
            group_size = _choose_group_size(scheme, modules[module])
            if isinstance(group_size, Reason):
                raise group_size.error(f"{module}.weight", self.name)
            layouts[module] = {"group_size": group_size, "bits": scheme.bits, "mode": _AFFINE}
        counted = Counter(tuple(layout.items()) for layout in layouts.values())
        usual = dict(counted.most_common(1)[0][0])
        return usual | {module: layout for module, layout in layouts.items() if layout != usual}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Affine | Reason:
        if scheme.group_size is not None and isinstance(
            none := _choose_group_size(scheme, 0), Reason
        ):
            return none
        minima = scheme.scales is Scales.BLOCKS and not scheme.symmetric
        if (
            scheme.bits not in _READ_BITS
            or not (minima or scheme.scales is Scales.FLOATS)
            or scheme.of_small_floats
        ):
            return Reason(
                "MLX has no such codes and scales",
                found=scheme,
                expected=", ".join(map(str, self.schemes)),
            )
        return Affine(scheme)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Runtime] = ()
    ) -> str:
        return "mlx-lm"


def _require_affine(settings: Settings) -> None:
    if settings.has("mode"):
        mode = settings.string("mode")
    else:
        mode = _AFFINE
    if mode != _AFFINE:
        problem = f"{settings.name} names a mode of MLX that is not read"
        raise make_unread_settings_error(
            settings, problem, format_value(mode), _AFFINE, FLOAT_MODEL
        )


def _choose_group_size(scheme: QuantScheme, columns: int) -> int | Reason:
    """Return the largest group size of MLX that divides a scheme's groups, or its rows."""
    size = scheme.group_size or columns
    for group_size in _GROUP_SIZES:
        if not size % group_size:
            return group_size
    return Reason(
        "MLX has no groups that divide it",
        found=f"{scheme} of {size} columns",
        expected="32, 64 or 128",
    )


def _exact_offsets(value: qtensor.QuantTensor) -> torch.Tensor | Reason:
    """Return the offsets [O, G] of a weight with zero points, in the type of its scales, which must
    hold them exactly.
    """
    scale = value.scale
    if value.zero is None:
        zero = torch.tensor(value.scheme.levels // 2)
    else:
        zero = value.zero
    offset = (scale.double() * -zero.double()).to(scale.dtype)
    rounded = (offset.double() != scale.double() * -zero.double()) | ~offset.isfinite()
    # Which an offset cannot express.
    lost = ~scale.isfinite() | ((scale == 0) & (zero != value.scheme.levels // 2))
    if (wrong := rounded | lost).any():
        step, point = (one.expand(scale.shape)[wrong][0].item() for one in (scale, zero))
        dtype = DType.of(scale.dtype)
        expected = "an offset that is exact in the type of the scales"
        problem = f"{dtype} does not hold the offset of a group"
        found = f"-{point} steps of {step:g}"
        return Reason(problem, found, expected, () if lost.any() else _EXACT_OFFSETS[dtype])
    return offset


def _unpack_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes [R, C] uint8 of words [R, W] uint32: a stream of bits, the least significant first."""
    words = words.view(torch.int32)
    if bits in (4, 8):
        return qtensor.unpack_int32(words, bits, count)
    codes = torch.empty(len(words), count, dtype=torch.uint8)
    weights = (1 << torch.arange(bits)).to(torch.uint8)
    for start, stop in qtensor.row_chunks(len(words), count):
        data = words[start:stop].contiguous().view(torch.uint8)
        stream = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        groups = stream.flatten(1)[:, : count * bits].view(stop - start, count, bits)
        codes[start:stop] = (groups * weights).sum(-1, dtype=torch.uint8)
    return codes


def zero_points(
    scale: torch.Tensor, offset: torch.Tensor, bits: int, origin: int = 0
) -> torch.Tensor | None:
    """Return the zero points, uint8 in the shape of the scales; None if a group has none.

    A group whose scale and offset are zero gets the middle code.

    Args:
        scale, offset: of each group, in one float type.
        origin: the code whose weight is the offset.
    """
    steps = scale.double()
    offset = offset.double()
    zero = torch.where(steps == 0, 1 << (bits - 1), origin - (offset / steps).round())
    whole = (
        (zero >= 0) & (zero < 1 << bits) & (steps * (origin - zero) == offset) & steps.isfinite()
    )
    whole |= (steps == 0) & (offset == 0)
    if bool(whole.all()):
        return zero.to(torch.uint8)
    return None


def scheme_of(
    raw: RawModule, scales: str, offsets: str, bits: int, group_size: int, origin: int = 0
) -> QuantScheme | None:
    """Return the scheme of codes with such groups; None if some offset is not an integer multiple
    of its scale.

    Codes of 8 bits with equal groups in each row are int8 per row, which such formats store in
    groups.

    Args:
        scales, offsets: the suffixes of tensors [..., G].
        bits, origin: see `zero_points`.
    """
    stored = raw.find(scales)
    assert stored is not None, "its shape was checked"
    symmetric = True
    by_row = bits == 8
    for rows in qtensor.row_chunks(stored.shape[0], math.prod(stored.shape[1:]), _CHUNK):
        scale, offset = (raw.read(suffix, TensorSlice(0, (rows,))) for suffix in (scales, offsets))
        zero = zero_points(scale, offset, bits, origin)
        if zero is None:
            return None
        symmetric = symmetric and bool((zero == 1 << (bits - 1)).all())
        by_row = by_row and all(bool((one == one[..., :1]).all()) for one in (scale, zero))
    return QuantScheme(bits, None if by_row else group_size, symmetric)


def affine(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, dtype: DType, origin: int = 0
) -> torch.Tensor:
    """Return the weights [R, C] of such groups, in float32 and then rounded once.

    Args:
        codes: [R, C] uint8.
        scale, offset: [R, G].
        dtype: of the weights.
        origin: see `zero_points`.
    """
    out = dtype.empty(codes.shape)
    for start, stop in qtensor.row_chunks(*codes.shape):
        steps, base = (groups[start:stop].float().unsqueeze(-1) for groups in (scale, offset))
        values = codes[start:stop].reshape(stop - start, scale.shape[1], -1).float().sub_(origin)
        out[start:stop] = values.mul_(steps).add_(base).flatten(1)
    return out
