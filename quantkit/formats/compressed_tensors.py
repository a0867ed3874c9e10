"""The compressed-tensors ``pack-quantized`` layout: what quantized folders hold on disk.

Per linear: ``weight_packed`` int32 [O, ceil(I * bits / 32)], ``weight_scale`` [O, G],
``weight_shape`` int64 [2] and, if asymmetric, ``weight_zero_point`` packed along the
outputs, int32 [ceil(O * bits / 32), G]. Codes are unsigned, least significant bits first.
Source: the compressed-tensors package's pack-quantized compressor.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.tensor_file import StoredTensor
from quantkit.part import Part
from quantkit.qtensor import QuantTensor, pack_int32, unpack_int32
from quantkit.scheme import QuantScheme

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
_NO_MATCH = 3


def quantization_config(schemes: Mapping[str, QuantScheme], linears: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for modules with their schemes.

    The most frequent scheme targets every ``Linear``; the others name their modules;
    linears without a scheme are listed under ``ignore``.
    """
    ranked = [scheme for scheme, _ in Counter(schemes.values()).most_common()]
    groups = {}
    for index, scheme in enumerate(ranked):
        targets = ["Linear"] if index == 0 else [m for m, s in schemes.items() if s == scheme]
        groups[f"group_{index}"] = {
            "targets": targets,
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
        "ignore": [module for module in linears if module not in schemes],
        "kv_cache_scheme": None,
    }


def stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, scheme: QuantScheme) -> list[StoredTensor]:
    """What a quantized ``MODULE.weight`` of this shape occupies on disk, in order."""
    module = name.removesuffix("weight")
    rows, columns = shape
    groups = scheme.groups(columns)
    tensors = [
        StoredTensor(module + PACKED, torch.int32, (rows, math.ceil(columns * scheme.bits / 32))),
        StoredTensor(module + SCALE, dtype, (rows, groups)),
        StoredTensor(module + SHAPE, torch.int64, (2,)),
    ]
    if not scheme.symmetric:
        packed = math.ceil(rows * scheme.bits / 32)
        tensors.append(StoredTensor(module + ZERO, torch.int32, (packed, groups)))
    return tensors


def encode(value: QuantTensor) -> list[Tensor]:
    """The tensors of `stored`, in its order."""
    bits = value.scheme.bits
    tensors = [pack_int32(value.codes, bits), value.scale.contiguous(), torch.tensor(value.shape)]
    if value.zero is not None:
        tensors.append(pack_int32(value.zero.t(), bits).t().contiguous())
    return tensors


def decode(
    scheme: QuantScheme, shape: tuple[int, int], get: Callable[[str, Part | None], Tensor], part: Part | None = None
) -> QuantTensor:
    """Read a module's tensors back, or only a part of its rows or columns.

    Args:
        get: gives the tensor of a suffix above, or a part of it.

    Raises:
        RequestError: see `QuantTensor.columns`.
    """
    rows, columns = shape
    zero = None
    if not scheme.symmetric:
        zero = unpack_int32(get(ZERO, None).t(), scheme.bits, rows).t().contiguous()
    if part is None or part.axis == 0:
        zero = zero if zero is None or part is None else part.of(zero)
        codes = unpack_int32(get(PACKED, part), scheme.bits, columns)
        return QuantTensor(codes, get(SCALE, part), zero, scheme)
    (start, stop), per_word = part.ranges[0], 32 // scheme.bits
    unit = scheme.group_size or per_word  # groups are whole words
    first, last = start // unit * unit, min(-(-stop // unit) * unit, columns)
    words = get(PACKED, Part(1, ((first // per_word, -(-last // per_word)),)))
    scale = get(SCALE, None)
    if scheme.group_size is not None:
        scale = scale[:, first // unit : last // unit]
        zero = None if zero is None else zero[:, first // unit : last // unit]
    codes = unpack_int32(words, scheme.bits, last - first)
    return QuantTensor(codes, scale, zero, scheme).columns(start - first, stop - first)


def read_schemes(raw: Mapping[str, Any], modules: Iterable[str], path: object) -> dict[str, QuantScheme]:
    """The scheme of every module in `modules` that the config quantizes.

    Raises:
        UnsupportedError: for another method or format, quantized activations or KV cache,
            and other than integer weights of 4 or 8 bits, grouped or per channel.
        CheckpointError: if the config lacks a key or matches a module twice over.
    """
    where = str(path)
    method = raw.get("quant_method")
    if method != "compressed-tensors":
        named = f"{method} {raw.get('bits', '')}".strip() if method else "an unnamed scheme"
        raise UnsupportedError(
            "the source is quantized already in a scheme quantkit does not read", path=where, found=named,
            expected="compressed-tensors pack-quantized", hint="start from the float model",
        )  # fmt: skip
    if raw.get("kv_cache_scheme"):
        raise UnsupportedError("a quantized KV cache is not supported", path=where)
    try:
        groups = [
            (group["targets"], _scheme(group, group.get("format") or raw.get("format"), where))
            for group in raw["config_groups"].values()
        ]
        ignored = list(raw.get("ignore") or [])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"quantization_config is incomplete: {error!r}", path=where) from error
    found: dict[str, QuantScheme] = {}
    for module in modules:
        if any(_rank(module, target) < _NO_MATCH for target in ignored):
            continue
        ranked = [(_rank(module, target), scheme) for targets, scheme in groups for target in targets]
        closest = min((rank for rank, _ in ranked), default=_NO_MATCH)
        if closest < _NO_MATCH:
            found[module] = next(scheme for rank, scheme in ranked if rank == closest)
    return found


def _scheme(group: Mapping[str, Any], layout: str | None, where: str) -> QuantScheme:
    weights = group["weights"]
    if layout != "pack-quantized":
        raise UnsupportedError("this compressed-tensors format is not read", path=where, found=layout,
                               expected="pack-quantized")  # fmt: skip
    if group.get("input_activations") or group.get("output_activations"):
        raise UnsupportedError("quantized activations are not supported", path=where)
    if weights.get("actorder") == "group":
        raise UnsupportedError("act-order with a group index per column is not supported", path=where)
    strategy, bits, kind = weights["strategy"], weights["num_bits"], weights.get("type", "int")
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel") or weights.get("dynamic"):
        raise UnsupportedError(
            "this compressed-tensors scheme is not read", path=where, found=f"{kind}{bits} per {strategy}",
            expected="int4 or int8, per group or channel",
        )  # fmt: skip
    group_size = weights["group_size"] if strategy == "group" else None
    return QuantScheme(bits, group_size, bool(weights.get("symmetric", True)))


def _rank(module: str, target: str) -> int:
    """How closely a target names a module: 0 by name, 1 by pattern, 2 by class."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else _NO_MATCH
    if target == module:
        return 0
    return 2 if target == "Linear" else _NO_MATCH
