"""The compressed-tensors ``pack-quantized`` layout: what quantized folders hold on disk.

Per linear: ``weight_packed`` int32 [O, ceil(I * bits / 32)], ``weight_scale`` [O, G],
``weight_shape`` int64 [2] and, if asymmetric, ``weight_zero_point`` packed along the
outputs, int32 [ceil(O * bits / 32), G]. Codes are unsigned, least significant bits first.
Source: the compressed-tensors package's pack-quantized compressor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.formats.files.tensor_file import StoredTensor
from quantkit.tensors.qtensor import QuantTensor, pack_int32, unpack_int32
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"


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
    scheme: QuantScheme,
    shape: tuple[int, int],
    get: Callable[[str, TensorSlice | None], Tensor],
    part: TensorSlice | None = None,
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
    words = get(PACKED, TensorSlice(1, ((first // per_word, -(-last // per_word)),)))
    scale = get(SCALE, None)
    if scheme.group_size is not None:
        scale = scale[:, first // unit : last // unit]
        zero = None if zero is None else zero[:, first // unit : last // unit]
    codes = unpack_int32(words, scheme.bits, last - first)
    return QuantTensor(codes, scale, zero, scheme).columns(start - first, stop - first)
