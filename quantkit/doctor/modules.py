"""The modules of a folder as its tensors tell them: which weights lie as codes, in what kind, with what beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.float8 import TYPES as FLOAT8
from quantkit.tensors.dtypes import DType

Shape = tuple[int, ...]

_BESIDE = (
    "weight_packed", "weight_scale_inv", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "qweight", "qzeros", "scales", "g_idx", "biases", "SCB", "weight_format",
)  # fmt: skip
_LEAF = re.compile(
    rf"(?P<module>.+?)(?:\.(?P<leaf>{'|'.join(_BESIDE)}"
    r"|weight\.(?:nested_)?(?:absmax|quant_map)|weight\.quant_state\.\w+)|(?P<stacked>_blocks|_scales|_qdata))"
)
_OF_ACTIVATIONS = re.compile(
    r"(.+)\.(input_scale|input_scale_ub|activation_scale|output_scale|input_zero_point|output_zero_point"
    r"|input_global_scale|[qkv]_scale|kv_scale|k_zero_point|v_zero_point)"
)
_STATE = "weight.quant_state."
_CODE_TYPES = {DType.UINT32: "mlx", DType.INT8: "int8", DType.UINT8: "nf4", **dict.fromkeys(FLOAT8, "float8")}

KIND_NAMES = {
    "packed": "packed integers of compressed-tensors", "fp4": "packed small floats of compressed-tensors",
    "gptq": "codes of GPTQ", "awq": "codes of AWQ", "mlx": "codes of MLX", "int8": "int8", "float8": "FP8",
    "nf4": "4-bit codes of bitsandbytes", "bnb-int8": "int8 of bitsandbytes", "mxfp4": "MXFP4", "torchao": "torchao",
}  # fmt: skip
"""Kinds of codes, for people."""


@dataclass(frozen=True)
class Coded:
    """A module whose weight lies as codes, or what is left of one.

    Attributes:
        kind: of codes, as in `KIND_NAMES`; empty where only scales are left.
        leaves: its tensors, by what their names have after the module's.
    """

    module: str
    kind: str
    leaves: Mapping[str, StoredTensor]

    @property
    def bits(self) -> int | None:
        """Bits of a code, where the tensors tell them."""
        if self.kind in ("gptq", "awq", "packed", "mlx"):
            return self._bits_by_shapes()
        return {"int8": 8, "float8": 8, "nf4": 4, "bnb-int8": 8, "mxfp4": 4, "fp4": 4}.get(self.kind)

    @property
    def scale(self) -> StoredTensor | None:
        """The tensor of its scales."""
        names = ("weight_scale", "weight_scale_inv", "scales", "SCB", "weight.absmax", "_scales")
        return next((self.leaves[name] for name in names if name in self.leaves), None)

    @property
    def codes(self) -> StoredTensor | None:
        """The tensor of its codes."""
        names = ("weight_packed", "qweight", "weight", "_blocks", "_qdata")
        return next((self.leaves[name] for name in names if name in self.leaves), None)

    @property
    def signature(self) -> tuple[object, ...]:
        """What has to be equal where modules become one: kind, bits, how scales are laid out, zero points."""
        scale = self.scale
        matrix = scale is not None and len(scale.shape) > 1
        groups = scale.shape[0 if self.kind in ("gptq", "awq") else -1] if scale is not None and matrix else 0
        zeros = "weight_zero_point" in self.leaves
        return self.kind, self.bits, groups, zeros

    @property
    def scheme(self) -> str:
        """Its signature, for people."""
        bits, groups = self.bits, self.signature[2]
        told = [KIND_NAMES.get(self.kind, "scales alone")]
        told += [f"{bits} bits"] if bits else []
        told += [f"{groups} scale{'s' if groups != 1 else ''} a row"] if groups else []
        return ", ".join(told)

    def _bits_by_shapes(self) -> int | None:
        """Bits of packed codes: from the widths of what is packed and of what is not."""
        scale, codes, zeros = self.scale, self.codes, self.leaves.get("qzeros")
        if scale is None or codes is None or len(scale.shape) < 2 or len(codes.shape) < 2:
            return None
        if self.kind in ("gptq", "awq"):
            packed = codes.shape[-1] if self.kind == "awq" else zeros.shape[-1] if zeros and zeros.shape else 0
            return _whole(32 * packed, scale.shape[-1])
        return None


def coded_modules(stored: Mapping[str, StoredTensor], method: str | None) -> dict[str, Coded]:
    """The modules whose weights lie as codes.

    Args:
        method: of the folder's quantization; only where there is one are scales without codes taken for such.
    """
    leaves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if (match := _LEAF.fullmatch(name)) is not None:
            leaf = match["leaf"] or match["stacked"]
            if match["stacked"] is None or tensor.dtype in (DType.UINT8, DType.INT8):
                leaves.setdefault(match["module"], {})[leaf] = tensor
        elif name.endswith(".weight") and tensor.dtype in _CODE_TYPES and len(tensor.shape) > 1:
            leaves.setdefault(name.removesuffix(".weight"), {})
        elif tensor.dtype in FLOAT8 and len(tensor.shape) > 2:
            leaves.setdefault(name, {})[""] = tensor
    found = {}
    for module, own in leaves.items():
        if (weight := stored.get(f"{module}.weight")) is not None and weight.dtype in _CODE_TYPES:
            own["weight"] = weight
        kind = _kind(own, method)
        if kind or (method is not None and weight is None) or (method is not None and weight is not None and own):
            found[module] = Coded(module, kind, own)
    return found


def is_scale_of_activations(name: str) -> bool:
    """Whether a tensor belongs to quantized activations or a quantized cache."""
    return _OF_ACTIVATIONS.fullmatch(name) is not None


def missing_leaves(coded: Coded, *, symmetric: bool | None) -> list[str]:
    """What a module lacks of the tensors of its kind.

    Args:
        symmetric: as the config says; None where it does not.
    """
    needed = {
        "packed": ["weight_packed", "weight_scale", "weight_shape"], "fp4": ["weight_packed", "weight_scale"],
        "gptq": ["qweight", "qzeros", "scales"], "awq": ["qweight", "qzeros", "scales"], "mlx": ["weight", "scales"],
        "int8": ["weight"], "nf4": ["weight", "weight.absmax", "weight.quant_map"],
        "bnb-int8": ["weight", "SCB"], "mxfp4": ["_blocks", "_scales"], "": ["weight"],
    }.get(coded.kind, [])  # fmt: skip
    found = [leaf for leaf in needed if leaf not in coded.leaves]
    if coded.kind == "packed" and symmetric is False and "weight_zero_point" not in coded.leaves:
        found.append("weight_zero_point")
    if coded.kind in ("float8", "int8") and coded.scale is None:
        found.append("weight_scale")
    if coded.kind == "nf4" and not any(leaf.startswith(_STATE) for leaf in coded.leaves):
        found.append(f"{_STATE}bitsandbytes__nf4")
    return found


def expected_shapes(
    coded: Coded, shape: Shape, bits: int | None, group: int | None, block: tuple[int, int] | None
) -> dict[str, list[Shape]]:  # fmt: skip
    """The shapes that the tensors of a weight [O, I] may have; nothing for kinds whose layout is not known here.

    Args:
        bits: of a code, as the config says.
        group: inputs that share a scale; None for all of a row.
        block: rows and columns that do.
    """
    if len(shape) != 2 or bits is None or not 0 < bits <= 8:
        return {}
    rows, columns = shape
    groups = 1 if group is None else math.ceil(columns / group)
    of_tensor: list[Shape] = [(1,), ()] if group is None else []
    if coded.kind == "packed":
        # unpacked before version 0.9
        zeros = [(_words(rows, bits), groups), (rows, groups), *of_tensor]
        return {
            "weight_packed": [(rows, _words(columns, bits))], "weight_scale": [(rows, groups), *of_tensor],
            "weight_shape": [(2,)],
            "weight_zero_point": zeros, "weight_g_idx": [(columns,)],
        }  # fmt: skip
    if coded.kind == "gptq":
        return {
            "qweight": [(_words(columns, bits), rows)], "qzeros": [(groups, _words(rows, bits))],
            "scales": [(groups, rows)], "g_idx": [(columns,)],
        }  # fmt: skip
    if coded.kind == "awq":
        packed = _words(rows, bits)
        return {"qweight": [(columns, packed)], "qzeros": [(groups, packed)], "scales": [(groups, rows)]}
    if coded.kind == "mlx":
        return {
            "weight": [(rows, _words(columns, bits))], "scales": [(rows, groups)], "biases": [(rows, groups)],
        }  # fmt: skip
    if coded.kind == "float8":
        blocks = [(rows, 1), (rows,), *of_tensor] if block is None else []
        blocks += [] if block is None else [(math.ceil(rows / block[0]), math.ceil(columns / block[1]))]
        return {"weight": [shape], "weight_scale_inv": blocks, "weight_scale": blocks}
    if coded.kind == "int8":
        return {"weight": [shape], "weight_scale": [(rows, groups), *of_tensor, *([(rows,)] if of_tensor else [])]}
    return {}


def stored_shape(coded: Coded) -> Shape | None:
    """The shape of a weight whose codes are one by one; None of packed ones."""
    one_by_one = coded.kind in ("int8", "float8", "bnb-int8")
    return coded.codes.shape if one_by_one and coded.codes is not None else None


def _kind(own: Mapping[str, StoredTensor], method: str | None) -> str:
    if (packed := own.get("weight_packed")) is not None:
        return "fp4" if packed.dtype == DType.UINT8 else "packed"
    if (codes := own.get("qweight")) is not None:
        return "awq" if method == "awq" or (method is None and _is_awq(codes, own.get("qzeros"))) else "gptq"
    if "_qdata" in own:
        return "torchao"
    if "_blocks" in own or "_scales" in own:
        return "mxfp4"
    weight = own.get("weight") or own.get("")
    if weight is None:
        return ""
    kind = _CODE_TYPES[weight.dtype]
    if kind == "int8":
        return "bnb-int8" if "SCB" in own or method == "bitsandbytes" else "int8"
    return kind


def _is_awq(codes: StoredTensor, zeros: StoredTensor | None) -> bool:
    """Codes that are packed along the outputs are as wide as their zero points."""
    return zeros is not None and codes.shape[-1:] == zeros.shape[-1:]


def _words(count: int, bits: int) -> int:
    return math.ceil(count * bits / 32)


def _whole(part: int, whole: int) -> int | None:
    return part // whole if whole and part and part % whole == 0 else None
