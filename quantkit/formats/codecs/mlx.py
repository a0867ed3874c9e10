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
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import (
    FLOAT_MODEL,
    GroupedCodec,
    QuantMethod,
    Reader,
    Reason,
    Schemes,
    Weight,
    make_unread_settings_error,
)
from quantkit.formats.codecs.known_models import knows_model, list_models
from quantkit.formats.codecs.layout import (
    MAX_COLUMNS,
    Claim,
    Claims,
    count_words,
)
from quantkit.formats.codecs.layouts import BIASES, MLX, PLAIN, SCALES
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_LEAVES = (PLAIN, SCALES, BIASES)
_AFFINE = "affine"
# Scales that are checked at a time.
_CHUNK = 1 << 17
_KEYS = {"group_size", "bits", "mode", "quant_method", "linear_class", "quantize_activations"}
"""Of the settings that are not names of modules."""
# What MLX supports.
_GROUP_SIZES = (128, 64, 32)
_BITS = (2, 3, 4, 5, 6, 8)
# Weights in other bits are read as floats.
_READ_BITS = (4, 8)
_EXACT_OFFSETS = {
    DType.FLOAT16: (DType.FLOAT32,),
    DType.BFLOAT16: (DType.FLOAT32,),
    DType.FLOAT32: (DType.FLOAT16, DType.FLOAT32),
}
"""The types through which scales go so that float32 has each offset: 24 bits hold 11 of a scale
times 8 of a zero point.
"""


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
        scheme = None
        if bits in _READ_BITS:
            scheme = scheme_of(raw, SCALES, BIASES, bits, group_size)
            if scheme is None and self.minima:
                scheme = QuantScheme(bits, group_size, False, Scales.BLOCKS)
        scales = raw.find(SCALES)
        if scheme is not None and scales is not None:
            return TensorSpec(expected.name, expected.shape, scales.dtype, scheme)
        if bits in _READ_BITS:
            stored_as = "MLX with float offsets"
        else:
            stored_as = f"MLX with {bits} bits"
        return TensorSpec(expected.name, expected.shape, expected.dtype, stored_as=stored_as)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        assert spec.scheme is not None, "floats have no codec"
        module = spec.name.removesuffix(PLAIN)
        *rows, columns = spec.shape
        group_size = _choose_group_size(spec.scheme, columns)
        if isinstance(group_size, Reason):
            raise group_size.error(spec.name, Mlx.name)
        groups = (*rows, columns // group_size)
        return [
            StoredTensor(module + PLAIN, DType.UINT32, (*rows, columns * spec.scheme.bits // 32)),
            StoredTensor(module + SCALES, spec.dtype, groups),
            StoredTensor(module + BIASES, spec.dtype, groups),
        ]

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        tensors: list[StoredTensor] = []
        for leaf in _LEAVES:
            tensor = raw.find(leaf)
            if tensor is not None:
                tensors.append(tensor)
        return tensors

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        scheme = spec.scheme
        group_size = self._layout(raw, spec.shape)[1]
        if scheme is not None:
            group_size = scheme.group_size or 32
        # 32 codes of any bits fill whole words.
        return math.lcm(32, group_size)

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        """Read codes as [O, I], also those of one of several experts."""
        first, last = columns
        count = spec.shape[-1]
        scheme = spec.scheme
        bits, size = self._layout(raw, spec.shape)
        part = self.columns_slice(
            rows, first * bits // 32, count_words(last, bits), count_words(count, bits)
        )
        packed = raw.read(PLAIN, part)
        groups = self.columns_slice(rows, first // size, -(-last // size), count // size)
        scale = raw.read(SCALES, groups).flatten(0, -2)
        codes = _unpack_codes(packed.flatten(0, -2), bits, last - first)
        if scheme is None:
            floats = affine(codes, scale, raw.read(BIASES, groups).flatten(0, -2), spec.dtype)
            return floats.view(*packed.shape[:-1], -1)
        if scheme.scales is Scales.BLOCKS:
            minimum = raw.read(BIASES, groups).flatten(0, -2).neg()
            return qtensor.QuantTensor(codes, scale, None, scheme, minimum)
        # A scheme per row, or with longer groups, is stored in groups with equal scales.
        if scheme.group_size is None:
            repeats = scale.shape[1]
        else:
            repeats = scheme.group_size // size
        zero = None
        if not scheme.symmetric:
            zero = zero_points(scale, raw.read(BIASES, groups).flatten(0, -2), bits)
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
        # MLX has no groups longer than 128: the scale of a longer one is repeated.
        repeats = columns // group_size // scale.shape[1]
        groups = []
        for values in (scale, offset):
            if repeats > 1:
                groups.append(values.repeat_interleave(repeats, 1))
            else:
                groups.append(values.contiguous())
        return [qtensor.pack_int32(value.codes, scheme.bits).view(torch.uint32), *groups]

    def _layout(self, raw: RawModule, shape: tuple[int, ...]) -> tuple[int, int]:
        """Derive bits and group size of a module with a weight of a shape from its tensors, which
        are checked.
        """
        tensors: list[StoredTensor] = []
        for leaf in _LEAVES:
            tensor = raw.find(leaf)
            if tensor is None:
                expected = " and ".join(_LEAVES[1:]) + " along with MLX's quantized weights"
                raise raw.make_damage_error(
                    f"tensor '{raw.name}.{leaf}' is missing", expected=expected
                )
            tensors.append(tensor)
        codes, scales, biases = tensors
        *rows, columns = shape
        groups = scales.shape[-1] if scales.shape else 0
        width = codes.shape[-1] if codes.shape else 0
        shapes_fit = codes.shape == (*rows, width) and scales.shape == biases.shape == (
            *rows,
            groups,
        )
        dtypes_fit = (
            codes.dtype == DType.UINT32 and scales.dtype in FLOATS and biases.dtype == scales.dtype
        )
        # Group sizes are multiples of 8, as in all schemes.
        sizes_fit = (
            groups > 0
            and not columns % (8 * groups)
            and width * 32 in [columns * bits for bits in _BITS]
        )
        if not (shapes_fit and dtypes_fit and sizes_fit):
            descriptions = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors]
            raise raw.make_damage_error(
                f"the tensors of '{raw.name}' do not have matching MLX shapes and types",
                ", ".join(descriptions),
                f"quantized weights, scales and biases for {list(shape)}",
            )
        bits = width * 32 // columns
        group_size = columns // groups
        expected_bits = self.bits or bits
        expected_size = self.group_size or group_size
        if (bits, group_size) != (expected_bits, expected_size):
            raise raw.make_damage_error(
                f"the tensors of '{raw.name}' disagree with the config",
                f"{bits} bits in groups of {group_size}",
                f"{expected_bits} bits in groups of {expected_size}",
            )
        return bits, group_size


class Mlx(QuantMethod):
    """Settings without a ``quant_method``, under ``quantization``: bits, group size and mode of all
    modules that have scales, and by their names those of some.
    """

    name = "mlx"
    keys: tuple[str, ...] = ("quantization", "quantization_config")
    joins_experts = True
    runtimes = ("mlx",)
    schemes = tuple(QuantScheme(bits, size) for bits in _READ_BITS for size in (32, 64, 128))
    # Other programs make the minima that are carried.
    carried_scales = frozenset({Scales.BLOCKS})

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        """Do as `QuantMethod.claims`: tensors decide which modules are quantized; settings give
        some modules a scheme by their names.
        """
        by_module = {key: value for key, value in settings.values.items() if key not in _KEYS}
        claims: dict[str, Claim] = {}
        for module in coded:
            # A boolean says whether a module is quantized, which its tensors decide.
            if not isinstance(by_module.get(module, {}), Mapping):
                continue
            module_settings = settings.inside(module) if module in by_module else settings
            if module_settings.values.get("mode", _AFFINE) == _AFFINE:
                layout = MLX
            else:
                layout = None
            claims[module] = Claim(layout, symmetric=False).apply_settings(module_settings)
        unmatched: list[str] = []
        for key, value in by_module.items():
            if isinstance(value, Mapping) and key not in coded:
                unmatched.append(key)
        return Claims(claims, certain=True, unmatched=tuple(unmatched))

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Affine]:
        _require_affine(settings)
        settings.integer("bits", 1, 32)
        settings.integer("group_size", 1, MAX_COLUMNS)
        result: dict[str, Affine] = {}
        for module in modules:
            value = settings.values.get(module)
            quantized = f"{module}.{SCALES}" in stored
            if isinstance(value, dict):
                codec = _read_module_codec(settings.inside(module))
            elif value is None or isinstance(value, bool):
                codec = Affine()
            else:
                settings.wrong_type(module, "an object, true or false")
            if value is not None and stored and quantized != bool(value):
                raise CheckpointError(
                    f"{settings.name} says that '{module}' is {'' if value else 'not '}quantized",
                    path=settings.path,
                    found=f"a tensor '{module}.{SCALES}'" if quantized else "no scales",
                )
            if quantized:
                result[module] = codec
        # Codes of modules that the architecture does not have would be left unread.
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf == SCALES and module not in result and f"{module}.{BIASES}" in stored:
                problem = (
                    f"'{module}' is quantized by MLX, but is not a module of a supported"
                    " architecture"
                )
                raise make_unread_settings_error(settings, problem, f"'{name}'", hint=FLOAT_MODEL)
        return result

    def read_weight_shapes(
        self,
        settings: Settings,
        stored: Mapping[str, StoredTensor],
        files: Mapping[str, TensorFile],
    ) -> dict[str, tuple[int, ...]]:
        result: dict[str, tuple[int, ...]] = {}
        for name, codes in stored.items():
            module, _, leaf = name.rpartition(".")
            has_scales = f"{module}.{SCALES}" in stored and f"{module}.{BIASES}" in stored
            is_matrix = codes.dtype == DType.UINT32 and len(codes.shape) == 2
            if leaf != PLAIN or not has_scales or not is_matrix:
                continue
            if isinstance(settings.values.get(module), Mapping):
                module_settings = settings.inside(module)
            else:
                module_settings = settings
            if not module_settings.has("bits"):
                module_settings = settings
            bits = module_settings.integer("bits", 1, 32)
            result[module] = codes.shape[0], codes.shape[1] * 32 // bits
        return result

    def write_settings(
        self, schemes: Schemes, modules: Mapping[str, int], *, every: bool = True
    ) -> dict[str, Any]:
        """Build settings with the layout of most modules; other modules are listed by name."""
        layouts: dict[str, dict[str, Any]] = {}
        for module, scheme in schemes.items():
            group_size = _choose_group_size(scheme, modules[module])
            if isinstance(group_size, Reason):
                raise group_size.error(f"{module}.weight", self.name)
            layouts[module] = {"group_size": group_size, "bits": scheme.bits, "mode": _AFFINE}
        # Tuples, because dicts cannot be counted.
        counts = Counter(tuple(layout.items()) for layout in layouts.values())
        usual = dict(counts.most_common(1)[0][0])
        exceptions = {module: layout for module, layout in layouts.items() if layout != usual}
        return usual | exceptions

    def explain_unread_model(self, model_type: object) -> Reason | None:
        """Do as `QuantMethod.explain_unread_model`. mlx-lm renames, splits and scales the weights
        of many models when it loads them, in ways that it does not have for quantized weights.
        """
        if knows_model("mlx-lm", model_type):
            return None
        return Reason(
            "mlx-lm is not known to load its quantized weights by the names that they have on disk",
            found=format_value(model_type),
            expected=", ".join(list_models("mlx-lm")),
        )

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Affine | Reason:
        # Whether whole rows can be divided into groups depends on the row; see `misfit`.
        if scheme.group_size is not None:
            group_size = _choose_group_size(scheme, 0)
            if isinstance(group_size, Reason):
                return group_size
        has_minima = scheme.scales is Scales.BLOCKS and not scheme.symmetric
        has_scales = has_minima or scheme.scales is Scales.FLOATS
        if scheme.bits not in _READ_BITS or not has_scales or scheme.of_small_floats:
            return Reason(
                "MLX does not support this scheme",
                found=scheme,
                expected=", ".join(map(str, self.schemes)),
            )
        return Affine(scheme)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        return "mlx-lm"


def _read_module_codec(settings: Settings) -> Affine:
    """Read what settings state of one module by its name; the tensors decide the rest."""
    _require_affine(settings)
    bits = settings.integer("bits", 1, 32) if settings.has("bits") else None
    size = None
    if settings.has("group_size"):
        size = settings.integer("group_size", 1, MAX_COLUMNS)
    return Affine(None, bits, size)


def _require_affine(settings: Settings) -> None:
    mode = settings.string("mode") if settings.has("mode") else _AFFINE
    if mode != _AFFINE:
        problem = f"{settings.name} names an MLX mode that is not supported"
        raise make_unread_settings_error(
            settings, problem, format_value(mode), _AFFINE, FLOAT_MODEL
        )


def _choose_group_size(scheme: QuantScheme, columns: int) -> int | Reason:
    """Choose the largest group size of MLX that divides a scheme's groups, or its rows."""
    size = scheme.group_size or columns
    for group_size in _GROUP_SIZES:
        if not size % group_size:
            return group_size
    return Reason(
        "no group size of MLX divides it",
        found=f"{scheme} of {size} columns",
        expected="32, 64 or 128",
    )


def _exact_offsets(value: qtensor.QuantTensor) -> torch.Tensor | Reason:
    """Compute the offsets [O, G] of a weight with zero points, in the type of its scales, which
    must represent them exactly.
    """
    scale = value.scale
    if value.zero is None:
        zero = torch.tensor(value.scheme.levels // 2)
    else:
        zero = value.zero
    # float64 has every product of a scale and a zero point.
    exact = scale.double() * -zero.double()
    offset = exact.to(scale.dtype)
    rounded = (offset.double() != exact) | ~offset.isfinite()
    # An offset cannot express these zero points in any type: scales of 0 leave no trace of them.
    lost = ~scale.isfinite() | ((scale == 0) & (zero != value.scheme.levels // 2))
    wrong = rounded | lost
    if not wrong.any():
        return offset
    step = scale[wrong][0].item()
    point = zero.expand(scale.shape)[wrong][0].item()
    dtype = DType.of(scale.dtype)
    return Reason(
        f"{dtype} cannot represent the offset of a group",
        f"-{point} steps of {step:g}",
        "an offset that is exact in the type of the scales",
        () if lost.any() else _EXACT_OFFSETS[dtype],
    )


def _unpack_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack words [R, W] uint32, a stream of bits, the least significant first, to codes [R, C]
    uint8.
    """
    words = words.view(torch.int32)
    if bits in (4, 8):
        return qtensor.unpack_int32(words, bits, count)
    codes = torch.empty(len(words), count, dtype=torch.uint8)
    weights = (1 << torch.arange(bits)).to(torch.uint8)
    # Codes of other bits cross the ends of words. A byte for each bit takes much memory, hence a
    # few rows at a time.
    for start, stop in qtensor.row_chunks(len(words), count):
        data = words[start:stop].contiguous().view(torch.uint8)
        stream = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        groups = stream.flatten(1)[:, : count * bits].view(stop - start, count, bits)
        codes[start:stop] = (groups * weights).sum(-1, dtype=torch.uint8)
    return codes


def zero_points(
    scale: torch.Tensor, offset: torch.Tensor, bits: int, origin: int = 0
) -> torch.Tensor | None:
    """Compute the zero points, uint8 in the shape of the scales; None if a group has none.

    A group whose scale and offset are zero gets the middle code.

    Args:
        scale, offset: of each group, in one float type.
        origin: the code whose weight is the offset.
    """
    steps = scale.double()
    offset = offset.double()
    zero = torch.where(steps == 0, 1 << (bits - 1), origin - (offset / steps).round())
    in_range = (zero >= 0) & (zero < 1 << bits)
    is_exact = (steps * (origin - zero) == offset) & steps.isfinite()
    has_zero_point = (in_range & is_exact) | ((steps == 0) & (offset == 0))
    if bool(has_zero_point.all()):
        return zero.to(torch.uint8)
    return None


def scheme_of(
    raw: RawModule, scales: str, offsets: str, bits: int, group_size: int, origin: int = 0
) -> QuantScheme | None:
    """Find the scheme of codes with such groups; None if some offset is not an integer multiple of
    its scale.

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
        part = TensorSlice(0, (rows,))
        scale = raw.read(scales, part)
        offset = raw.read(offsets, part)
        zero = zero_points(scale, offset, bits, origin)
        if zero is None:
            return None
        symmetric = symmetric and bool((zero == 1 << (bits - 1)).all())
        by_row = by_row and _has_equal_columns(scale) and _has_equal_columns(zero)
    return QuantScheme(bits, None if by_row else group_size, symmetric)


def _has_equal_columns(values: torch.Tensor) -> bool:
    return bool((values == values[..., :1]).all())


def affine(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, dtype: DType, origin: int = 0
) -> torch.Tensor:
    """Dequantize weights [R, C] of such groups, in float32, and round once.

    Args:
        codes: [R, C] uint8.
        scale, offset: [R, G].
        dtype: of the weights.
        origin: see `zero_points`.
    """
    out = dtype.empty(codes.shape)
    for start, stop in qtensor.row_chunks(*codes.shape):
        steps = scale[start:stop].float().unsqueeze(-1)
        base = offset[start:stop].float().unsqueeze(-1)
        values = codes[start:stop].reshape(stop - start, scale.shape[1], -1).float().sub_(origin)
        out[start:stop] = values.mul_(steps).add_(base).flatten(1)
    return out
