"""AWQ in its GEMM layout, as AutoAWQ, AutoRound and GPTQModel write it, and transformers, vLLM and
SGLang read it.

Per linear [O, I], of 4-bit codes: ``qweight`` int32 [I, O / 8] and ``qzeros`` int32 [G, O / 8],
both packed along the outputs; ``scales`` [G, O] float16. Field i of word c, counted from the least
significant, is that of output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. Zero points are stored as they
are; all 8 are those of a symmetric scheme. Source: the package autoawq, WQLinear_GEMM.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import (
    NO_EMBEDDING,
    GroupedCodec,
    QuantMethod,
    Reader,
    Reason,
    Schemes,
    exact_scale,
    make_unread_settings_error,
)
from quantkit.formats.codecs.gptq import (
    claims_by_rows,
    find_quantized_modules,
    iter_packed_modules,
)
from quantkit.formats.codecs.gptq_linear import read_outputs, require_tensors, scales_dtype
from quantkit.formats.codecs.layout import MAX_COLUMNS, Claims
from quantkit.formats.codecs.layouts import AWQ, QWEIGHT, QZEROS, SCALES
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import SCHEMES, QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_BITS = 4
_PER_WORD = 8
# The output in each field of a word, least significant first: fields i and i + 4, which are 16 bits
# apart, have adjacent outputs.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The inverse permutation: the field of each output.
_FIELDS = tuple(sorted(range(_PER_WORD), key=_ORDER.__getitem__))
# Two zero points of 8, the middle code, in a byte.
_LEVELS_OF_8 = b"\x88"
# The group sizes that gptqmodel reads.
_READ_SIZES = {None, 16, 32, 64, 128}


@dataclass(frozen=True)
class AwqLinear(GroupedCodec):
    """4-bit codes packed along the outputs.

    Attributes:
        scheme: as the settings say; of what is read, the zero points decide whether it is
            symmetric.
    """

    scheme: QuantScheme

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        require_tensors(raw, expected)
        if reason := self.misfit(expected.shape):
            problem = f"'{raw.name}' is quantized, but {reason.problem}"
            raise raw.make_unsupported_error(problem, reason.found, reason.expected)
        scales = scales_dtype(raw)
        for part in self.parts(raw, expected):
            raw.require(part, f"{self.scheme} of AWQ")
        zeros = raw.read_bytes(QZEROS)
        # Settings that call a weight asymmetric may come with zero points of 8 alone; such a weight
        # converts to formats without zero points.
        symmetric = zeros == _LEVELS_OF_8 * len(zeros)
        scheme = QuantScheme(_BITS, self.scheme.group_size, symmetric)
        return TensorSpec(expected.name, expected.shape, scales, scheme)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, DType.FLOAT16)

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, scales_dtype(raw))

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        return self.scheme.group_size or 1

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> qtensor.QuantTensor:
        assert spec.scheme is not None, "all of AWQ has a scheme"
        size = spec.scheme.group_size
        if size is None:
            groups = (0, 1)
        else:
            groups = (columns[0] // size, columns[1] // size)
        scale = read_outputs(raw, SCALES, rows, groups)
        codes = read_outputs(raw, QWEIGHT, rows, columns, _PER_WORD, _unpack_codes)
        if spec.scheme.symmetric:
            zero = None
        else:
            zero = read_outputs(raw, QZEROS, rows, groups, _PER_WORD, _unpack_codes)
        return qtensor.QuantTensor(codes, scale, zero, spec.scheme)

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        rows, columns = shape
        if rows % _PER_WORD:
            return Reason(
                "its outputs do not fill whole words",
                found=rows,
                expected=f"a multiple of {_PER_WORD}",
            )
        if self.scheme.group_size is not None and columns % self.scheme.group_size:
            return Reason(
                "the group size does not divide its row",
                found=f"{columns} columns",
                expected=self.scheme,
            )
        return None

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        rows, columns = value.shape
        if reason := self.misfit(value.shape):
            return reason
        scale = exact_scale(value.scale, DType.FLOAT16)
        if isinstance(scale, Reason):
            return scale
        groups = self.scheme.groups(columns)
        if value.zero is not None:
            zero = value.zero.t()
        else:
            # AWQ has no form without `qzeros`, so a symmetric scheme is written with the middle
            # code as its zero point.
            zero = torch.full((groups, rows), 8, dtype=torch.uint8)
        return [_pack_codes(value.codes.t()), _pack_codes(zero), scale.t().contiguous()]

    def _tensors(self, spec: TensorSpec, scales: DType) -> list[StoredTensor]:
        dtypes = {QWEIGHT: DType.INT32, QZEROS: DType.INT32, SCALES: scales}
        return AWQ.list_stored_tensors(spec, _BITS, self.scheme.group_size, dtypes)


class Awq(QuantMethod):
    """``quant_method: awq``: one group size for all modules that are quantized; 4 bits in the
    GEMM layout are read.
    """

    name = "awq"
    schemes = tuple(scheme for scheme in SCHEMES.values() if scheme.bits == 4)
    scale_dtype = DType.FLOAT16
    runtimes = ("vllm", "transformers", "mlx")

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        return claims_by_rows(
            settings, AWQ, not settings.values.get("zero_point", True), modules, coded
        )

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, AwqLinear]:
        for key in ("version", "format", "checkpoint_format"):
            if settings.has(key) and settings.string(key).lower() != "gemm":
                raise make_unread_settings_error(
                    settings,
                    "this AWQ layout is not supported",
                    format_value(settings.values[key]),
                    "gemm",
                )
        # `w_bit` and `q_group_size` are the keys of early AWQ.
        bits_key = "w_bit" if settings.has("w_bit") else "bits"
        size_key = "q_group_size" if settings.has("q_group_size") else "group_size"
        bits = settings.integer(bits_key, 1, 32)
        if bits != _BITS:
            raise make_unread_settings_error(
                settings, "this bit width of AWQ is not supported", bits, _BITS
            )
        size = settings.integer(size_key, -1, MAX_COLUMNS)
        if size > 0 and size % 8:
            raise make_unread_settings_error(
                settings, "group size is not supported", size, "a multiple of 8"
            )
        group_size = size if size > 0 else None
        symmetric = not settings.flag("zero_point", True)
        codec = AwqLinear(QuantScheme(_BITS, group_size, symmetric))
        if settings.has("modules_to_not_convert"):
            float_names = settings.strings("modules_to_not_convert")
        else:
            float_names = []
        if not settings.flag("lm_head", False):
            float_names += ["lm_head"]
        quantized_modules = find_quantized_modules(modules, stored, settings)
        result: dict[str, AwqLinear] = {}
        for module in quantized_modules:
            # Tensors on disk decide; names in the settings count only if no tensors are known.
            if stored or not any(name in module for name in float_names):
                result[module] = codec
        return result

    def read_weight_shapes(
        self,
        settings: Settings,
        stored: Mapping[str, StoredTensor],
        files: Mapping[str, TensorFile],
    ) -> dict[str, tuple[int, ...]]:
        result: dict[str, tuple[int, ...]] = {}
        for module, tensors in iter_packed_modules(stored):
            result[module] = tensors[SCALES].shape[1], tensors[QWEIGHT].shape[0]
        return result

    def write_settings(
        self, schemes: Schemes, modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        """List linears without a scheme under ``modules_to_not_convert``, which readers take for
        parts of names, and for gptqmodel, which does not look there, under ``dynamic``.
        """
        sizes = sorted({scheme.group_size or -1 for scheme in schemes.values()})
        if len(sizes) > 1:
            smallest = min(size for size in sizes if size > 0)
            raise UnsupportedError(
                "AWQ supports only one group size per folder",
                found=" and ".join(map(str, sizes)),
                # The smallest size fits wherever a larger one does.
                hint=Message(
                    f"quantize all linears with groups of {smallest}, or write ",
                    Option("to", value="gptq"),
                    ", which has a size for each linear",
                ),
            )
        floats = [module for module in modules if module not in schemes]
        for module in floats:
            for quantized_module in schemes:
                if module in quantized_module:
                    why = f"because its name contains that of '{module}', which is unquantized"
                    raise UnsupportedError(
                        f"AWQ's readers treat '{quantized_module}' as unquantized, {why}"
                    )
        dynamic: dict[str, Any] = {}
        for module in floats:
            # The head has a key of its own, ``lm_head``.
            if module != "lm_head":
                dynamic[f"-:^{re.escape(module)}$"] = {}
        settings: dict[str, Any] = {
            "quant_method": self.name,
            "bits": _BITS,
            "group_size": sizes[0],
            # Also for symmetric schemes, whose zero points are all 8: `qzeros` are always written.
            "zero_point": True,
            "version": "gemm",
            "lm_head": "lm_head" in schemes,
            "modules_to_not_convert": floats or None,
        }
        if dynamic:
            settings["dynamic"] = dynamic
        return settings

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> AwqLinear | Reason:
        if embedding:
            return NO_EMBEDDING
        if scheme.bits != _BITS:
            return Reason("its bit width is not supported", found=scheme, expected="4 bits")
        return AwqLinear(scheme)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        sizes = set()
        for scheme in schemes.values():
            # Modules of floats add None, which any reader accepts.
            sizes.add(None if scheme is None else scheme.group_size)
        if not sizes <= _READ_SIZES:
            return "readers that support this group size of AWQ"
        readers: list[str] = []
        if "gptqmodel" not in without:
            readers.append("gptqmodel")
        if schemes.get("lm_head") is None and "transformers" not in without:
            readers.append("transformers with gptqmodel")
        if "vllm" not in without:
            readers.append("vLLM")
        return ", ".join(readers)


def _unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [N, O / 8] to codes [N, O]."""
    count = words.shape[1] * _PER_WORD
    fields = qtensor.unpack_int32(words, _BITS, count).view(len(words), -1, _PER_WORD)
    return fields[..., list(_FIELDS)].view(len(words), count)


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [N, O] into words [N, O / 8]."""
    fields = codes.reshape(len(codes), -1, _PER_WORD)[..., list(_ORDER)]
    return qtensor.pack_int32(fields.flatten(1), _BITS)
