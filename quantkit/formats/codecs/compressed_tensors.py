"""compressed-tensors' ``pack-quantized``: what quantkit writes, and vLLM and transformers read.

Per linear: ``weight_packed`` int32 [O, ceil(I * bits / 32)], ``weight_scale`` [O, G],
``weight_shape`` int64 [2] and, if asymmetric, ``weight_zero_point`` packed along the
outputs, int32 [ceil(O * bits / 32), G]. Codes are unsigned, least significant bits first.
Source: the compressed-tensors package's pack-quantized compressor.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.codec import Codec, RawModule
from quantkit.formats.codecs.targets import NO_MATCH, Deadline, Targets
from quantkit.formats.files.tensor_file import StoredTensor, TensorFile
from quantkit.json_values import Settings, shown
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import SCHEMES, QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.qtensor import QuantTensor

_PACKED, _SCALE, _SHAPE, _ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
_MOST_GROUPS = 64
_MOST_COLUMNS = 2**24
_OF_FLOATS = ("float-quantized", "naive-quantized")  # read as floats, see `dequantized`
_EXPERTS = r".*\.experts\.\d+\..*"
_PLAIN_ORDERS = ("weight", "static")  # of columns; what is stored lies in the order of the inputs


@dataclass(frozen=True)
class PackQuantized:
    """Codes packed into words."""

    scheme: QuantScheme

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        packed, scale = raw.find(_PACKED), raw.find(_SCALE)
        if packed is None or scale is None:
            raise CheckpointError(
                f"the config quantizes '{raw.name}', but its packed weight or scale is missing", path=raw.path
            )
        (rows, columns), found = expected.shape, packed.shape
        if columns % (self.scheme.group_size or 1):
            raise UnsupportedError(
                f"group size of '{raw.name}' does not divide its row", path=raw.path, found=self.scheme
            )
        return TensorSpec(expected.name, (found[0] if found else rows, columns), scale.dtype, self.scheme)

    def stored(self, spec: TensorSpec) -> list[StoredTensor]:
        module = spec.name.removesuffix("weight")
        rows, columns = spec.shape
        bits, groups = self.scheme.bits, self.scheme.groups(columns)
        tensors = [
            StoredTensor(module + _PACKED, DType.INT32, (rows, math.ceil(columns * bits / 32))),
            StoredTensor(module + _SCALE, spec.dtype, (rows, groups)),
            StoredTensor(module + _SHAPE, DType.INT64, (2,)),
        ]
        if not self.scheme.symmetric:
            tensors.append(StoredTensor(module + _ZERO, DType.INT32, (math.ceil(rows * bits / 32), groups)))
        return tensors

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self.stored(spec)

    def decode(self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None) -> QuantTensor:
        from quantkit.tensors.qtensor import QuantTensor, unpack_int32

        rows, columns = spec.shape
        scheme, bits = self.scheme, self.scheme.bits
        if (shape := raw.read(_SHAPE).tolist()) != [rows, columns]:
            raise CheckpointError(
                f"tensor '{raw.name}.{_SHAPE}' disagrees with the config", path=raw.path, found=shape,
                expected=[rows, columns],
            )  # fmt: skip
        zero = None
        if not scheme.symmetric:
            zero = unpack_int32(raw.read(_ZERO).t(), bits, rows).t().contiguous()
        if part is None or part.axis == 0:
            zero = zero if zero is None or part is None else part.of(zero)
            codes = unpack_int32(raw.read(_PACKED, part), bits, columns)
            return QuantTensor(codes, raw.read(_SCALE, part), zero, scheme)
        (start, stop), per_word = part.ranges[0], 32 // bits
        unit = scheme.group_size or per_word  # groups are whole words
        first, last = start // unit * unit, min(-(-stop // unit) * unit, columns)
        words = raw.read(_PACKED, TensorSlice(1, ((first // per_word, -(-last // per_word)),)))
        scale = raw.read(_SCALE)
        if scheme.group_size is not None:
            scale = scale[:, first // unit : last // unit]
            zero = None if zero is None else zero[:, first // unit : last // unit]
        codes = unpack_int32(words, bits, last - first)
        return QuantTensor(codes, scale, zero, scheme).columns(start - first, stop - first)

    def encode(self, value: QuantTensor) -> list[Tensor]:
        import torch

        from quantkit.tensors.qtensor import pack_int32

        bits = value.scheme.bits
        tensors = [pack_int32(value.codes, bits), value.scale.contiguous(), torch.tensor(value.shape)]
        if value.zero is not None:
            tensors.append(pack_int32(value.zero.t(), bits).t().contiguous())
        return tensors


class CompressedTensors:
    """``quant_method: compressed-tensors``: groups of modules, each of one scheme."""

    name = "compressed-tensors"
    schemes = tuple(SCHEMES.values())
    scale_dtype: DType | None = None
    keys: tuple[str, ...] = ("quantization_config",)

    def read_settings(self, settings: Settings, modules: Iterable[str], stored: Collection[str]) -> dict[str, Codec]:
        """
        Raises:
            UnsupportedError: for another format, quantized activations or KV cache, transforms, and other than
                integer weights of 4 or 8 bits, grouped or per channel.
            CheckpointError: if the settings lack a key, a value is of the wrong type, a pattern is invalid or
                takes too long, or two groups that name a module alike give it different schemes.
        """
        for key, what in (("kv_cache_scheme", "a quantized KV cache is"), ("transform_config", "transforms are")):
            if settings.values.get(key):
                raise UnsupportedError(f"{what} not supported", path=settings.path)
        deadline = Deadline(settings.path)
        groups = _groups(settings, deadline)
        ignored = Targets(settings.texts("ignore") if settings.has("ignore") else [], deadline)
        found: dict[str, Codec] = {}
        for module in modules:
            if ignored.closeness(module) < NO_MATCH:
                continue
            ranked = [(group.targets.closeness(module), group) for group in groups]
            closest = min((rank for rank, _ in ranked), default=NO_MATCH)
            if closest < NO_MATCH:
                codec = _agreed(module, [group for rank, group in ranked if rank == closest], settings)
                if codec is not None:
                    found[module] = codec
        return found

    def write_settings(
        self, schemes: Mapping[str, QuantScheme], modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        """One scheme for linears of decoder blocks targets every ``Linear``. Otherwise each names its modules:
        compressed-tensors warns of targets that come behind ``Linear``, older vLLM puts the class before the names
        that q, k and v have before it fuses them, and vLLM's output head is no ``Linear``. Experts that are all alike
        are named by a pattern: transformers looks for it, and vLLM gives them names of its own. Linears without a
        scheme are listed under ``ignore``."""
        modules = list(modules)
        experts = {module for module in modules if re.fullmatch(_EXPERTS, module)}
        alike = len({schemes.get(module) for module in experts}) == 1
        by_scheme: dict[QuantScheme, dict[str, None]] = {}
        for module, scheme in schemes.items():
            target = f"re:{_EXPERTS}" if alike and module in experts else module
            by_scheme.setdefault(scheme, {})[target] = None
        of_class = every and len(by_scheme) == 1 and "lm_head" not in schemes
        groups = {}
        for index, (scheme, named) in enumerate(sorted(by_scheme.items(), key=lambda item: -len(item[1]))):
            groups[f"group_{index}"] = {
                "targets": ["Linear"] if of_class else list(named),
                "weights": {
                    "num_bits": scheme.bits,
                    "type": "int",
                    "symmetric": scheme.symmetric,
                    "strategy": "channel" if scheme.group_size is None else "group",
                    "group_size": scheme.group_size,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [module for module in modules if module not in schemes],
            "kv_cache_scheme": None,
        }

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        return {}

    def codec(self, scheme: QuantScheme) -> PackQuantized:
        return PackQuantized(scheme)

    def readers(self, schemes: Iterable[QuantScheme | None]) -> str:
        found = [scheme for scheme in schemes if scheme is not None]
        vllm = ", vLLM" if all(scheme.bits == 4 for scheme in found) else ""
        if all(scheme.symmetric for scheme in found):
            return f"transformers with compressed-tensors{vllm}"
        return f"compressed-tensors' own decompressor{vllm}; transformers refuses packed zero points (seen in 5.23)"


def packed_shapes(
    stored: Mapping[str, StoredTensor], files: Mapping[str, TensorFile], raw: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """The shapes of the weights of packed modules, as their own tensors tell them; none of a folder in another method.

    Args:
        stored, files: a folder's tensors, and where they lie.
        raw: its config.json.
    """
    settings = raw.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != CompressedTensors.name:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name in stored:
        module, _, leaf = name.rpartition(".")
        told = stored.get(f"{module}.{_SHAPE}")
        if leaf == _PACKED and told is not None and (told.dtype, told.shape) == (DType.INT64, (2,)):
            rows, columns = struct.unpack("<qq", files[told.name].read_bytes(told.name))
            if 0 < rows <= _MOST_COLUMNS and 0 < columns <= _MOST_COLUMNS:
                found[module] = rows, columns
    return found


@dataclass(frozen=True)
class _Group:
    """Some modules; without a codec they are read as floats."""

    name: str
    targets: Targets
    codec: PackQuantized | None

    def __str__(self) -> str:
        return f"{'floats' if self.codec is None else self.codec.scheme} in '{self.name}'"


def _agreed(module: str, groups: list[_Group], settings: Settings) -> Codec | None:
    """What groups give a module which they name alike."""
    first = groups[0]
    for other in groups[1:]:
        if other.codec != first.codec:
            raise CheckpointError(
                f"{settings.name} gives '{module}' two schemes", path=settings.path, found=f"{first} and {other}"
            )
    return first.codec


def _groups(settings: Settings, deadline: Deadline) -> list[_Group]:
    named = settings.inside("config_groups")
    if len(named.values) > _MOST_GROUPS:
        raise CheckpointError(
            f"{settings.name} has too many groups", path=settings.path, found=len(named.values),
            expected=f"at most {_MOST_GROUPS}",
        )  # fmt: skip
    groups = []
    for name in named.values:
        group = named.inside(name)
        layout = group if group.has("format") else settings
        found = layout.text("format") if layout.has("format") else None
        targets = Targets(group.texts("targets"), deadline)
        if found in _OF_FLOATS and group.inside("weights").values.get("type") == "float":
            groups.append(_Group(name, targets, None))
            continue
        if found != "pack-quantized":
            raise UnsupportedError(
                "this compressed-tensors format is not read", path=settings.path, found=found,
                expected="pack-quantized, or float-quantized",
            )  # fmt: skip
        if group.values.get("input_activations") or group.values.get("output_activations"):
            raise UnsupportedError("quantized activations are not supported", path=settings.path)
        groups.append(_Group(name, targets, PackQuantized(_scheme(group.inside("weights")))))
    return groups


def _scheme(weights: Settings) -> QuantScheme:
    where = weights.path
    order = weights.values.get("actorder")
    if order and order not in _PLAIN_ORDERS:
        raise UnsupportedError(
            "act-order with a group index per column is not supported", path=where, found=shown(order)
        )
    strategy, bits = weights.text("strategy"), weights.whole("num_bits", 1, 64)
    kind = weights.text("type") if weights.has("type") else "int"
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel") or weights.values.get("dynamic"):
        raise UnsupportedError(
            "this compressed-tensors scheme is not read", path=where, found=f"{kind}{bits} per {strategy}",
            expected="int4 or int8, per group or channel",
        )  # fmt: skip
    group_size = weights.whole("group_size", 1, _MOST_COLUMNS) if strategy == "group" else None
    if group_size is not None and group_size % 8:
        raise UnsupportedError("group size is not supported", path=where, found=group_size, expected="a multiple of 8")
    return QuantScheme(bits, group_size, weights.flag("symmetric", True))
