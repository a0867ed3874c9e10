"""How compressed-tensors stores one linear in small floats: ``float-quantized``,
``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized``.

``float-quantized``: ``weight`` float8_e4m3fn [O, I] and ``weight_scale``, a float for each row [O,
1] or for each tile [ceil(O / 128), ceil(I / 128)]; ``w = weight * weight_scale``. The others:
``weight_packed`` uint8 [O, I / 2], two codes e2m1 a byte, the low half first, and ``weight_scale``
[O, G]: of MXFP4 uint8, exponents of two plus 127, of NVFP4 float8_e4m3fn, which are divided by
``weight_global_scale`` float32 [1]. Source: the compressed-tensors package's compressors.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import GroupedCodec, Reason, Weight
from quantkit.formats.codecs.layout import Layout, Shape
from quantkit.formats.codecs.layouts import FLOAT8, FP4, GLOBAL_SCALE, PACKED, PLAIN, SCALE
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.codecs.small_floats import (
    decode_exponents,
    encode_exponents,
    unpack_halves,
)
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import FP8, FP8_BLOCK, TILE, Codes, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

UNEQUAL_TILES = Reason(
    "the rows of a tile have several scales: its tensor on disk joins or reorders rows"
)


@dataclass(frozen=True)
class SmallFloats(GroupedCodec):
    """The three forms, by scheme."""

    scheme: QuantScheme

    @property
    def layout(self) -> Layout:
        """Return the layout of its tensors."""
        if self.scheme.codes is Codes.E2M1:
            return FP4
        return FLOAT8

    @property
    def form(self) -> str:
        """Return ``format`` of the settings."""
        if self.scheme.scales is Scales.POWERS:
            return "mxfp4-pack-quantized"
        if self.scheme.scales is Scales.NESTED:
            return "nvfp4-pack-quantized"
        return "float-quantized"

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        if shape[1] % self.scheme.unit:
            return Reason(f"{self.scheme.unit} does not divide its row", f"{shape[1]} columns")
        return None

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        codes = raw.find(self.layout.codes)
        scale = raw.find(SCALE)
        if codes is None or scale is None:
            raise raw.make_damage_error(
                f"the config quantizes '{raw.name}', but its quantized weights or scales are"
                " missing"
            )
        # If the tensors differ from the architecture, they decide the shape.
        rows, columns = codes.shape if len(codes.shape) == len(expected.shape) else expected.shape
        if self.scheme.codes is Codes.E2M1:
            # Two codes share a byte.
            columns *= 2
        shape = (rows, columns)
        if shape[1] % self.scheme.unit:
            raise raw.make_unsupported_error(
                f"group size of '{raw.name}' does not divide its row", self.scheme
            )
        # The scales of MXFP4 and NVFP4 have a fixed type, which says nothing of the model's floats.
        if self.scheme.scales in (Scales.POWERS, Scales.NESTED):
            dtype = expected.dtype
        else:
            dtype = scale.dtype
        return TensorSpec(expected.name, shape, dtype, self.scheme)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        rows, columns = spec.shape
        module = spec.name.removesuffix(".weight")
        groups = self.scheme.groups(columns)
        parts: list[tuple[str, DType, Shape]]
        if self.scheme.codes is Codes.E4M3:
            if self.scheme.scales is Scales.TILES:
                scale_rows = -(-rows // TILE)
            else:
                scale_rows = rows
            parts = [
                (PLAIN, DType.FLOAT8_E4M3FN, (rows, columns)),
                (SCALE, spec.dtype, (scale_rows, groups)),
            ]
        elif self.scheme.scales is Scales.POWERS:
            parts = [
                (PACKED, DType.UINT8, (rows, columns // 2)),
                (SCALE, DType.UINT8, (rows, groups)),
            ]
        else:
            parts = [
                (PACKED, DType.UINT8, (rows, columns // 2)),
                (SCALE, DType.FLOAT8_E4M3FN, (rows, groups)),
                (GLOBAL_SCALE, DType.FLOAT32, (1,)),
            ]
        result: list[StoredTensor] = []
        for suffix, dtype, shape in parts:
            result.append(StoredTensor(f"{module}.{suffix}", dtype, shape))
        return result

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self.list_stored_tensors(spec)

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        return self.scheme.unit

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        start, stop = columns
        scheme = self.scheme
        per_byte = 8 // scheme.bits
        part = self.columns_slice(
            rows, start // per_byte, stop // per_byte, spec.shape[1] // per_byte
        )
        codes = raw.read(self.layout.codes, part)
        if scheme.codes is Codes.E2M1:
            codes = unpack_halves(codes)
        scale = self.row_scales(raw.read(SCALE), spec.shape[0])
        if rows is not None:
            scale = rows.of(scale)
        if scheme.group_size is not None:
            scale = scale[:, start // scheme.group_size : stop // scheme.group_size].contiguous()
        outer = None
        if scheme.scales is Scales.NESTED:
            # `QuantTensor` repeats the global scale for each row, so that rows can be split and
            # joined.
            outer = raw.read(GLOBAL_SCALE).reshape(1, 1).expand(len(codes), 1).contiguous()
        return qtensor.QuantTensor(codes.view(torch.uint8), scale, None, scheme, outer=outer)

    def row_scales(self, stored: torch.Tensor, rows: int) -> torch.Tensor:
        """Convert stored scales to those [O, G] of rows, as `QuantTensor` has them."""
        if self.scheme.scales is Scales.POWERS:
            return decode_exponents(stored)
        if self.scheme.scales is Scales.NESTED:
            # float16 represents every e4m3 number.
            return stored.half()
        if self.scheme.scales is Scales.TILES:
            return stored.repeat_interleave(TILE, 0)[:rows]
        return stored

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        scale = value.scale
        scheme = self.scheme
        if scheme.codes is Codes.E4M3:
            if scheme.scales is Scales.TILES:
                # One scale is stored for the rows of a tile, so they must agree.
                scale = scale[::TILE].contiguous()
                if not torch.equal(self.row_scales(scale, len(value.scale)), value.scale):
                    return UNEQUAL_TILES
            return [value.codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous()]
        packed = value.codes[:, 0::2] | (value.codes[:, 1::2] << 4)
        if value.outer is None:
            return [packed, encode_exponents(scale)]
        if not (value.outer == value.outer[:1]).all():
            return Reason("its rows have several global scales: its tensor on disk joins weights")
        return [packed, scale.to(torch.float8_e4m3fn), value.outer[0].clone()]


def float8_codes(weight: StoredTensor, scale: StoredTensor) -> SmallFloats | None:
    """Choose the codec of a weight in float8 and its scales; None for kinds that are not written
    here.
    """
    if weight.dtype != DType.FLOAT8_E4M3FN or scale.dtype not in FLOATS or len(weight.shape) != 2:
        return None
    for codec in (SmallFloats(FP8), SmallFloats(FP8_BLOCK)):
        if codec.misfit(weight.shape) is not None:
            continue
        spec = TensorSpec(weight.name, weight.shape, scale.dtype, codec.scheme)
        if codec.list_stored_tensors(spec) == [weight, scale]:
            return codec
    return None
