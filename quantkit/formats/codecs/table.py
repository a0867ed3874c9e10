"""The table of codecs: every method of quantization that folders name in config.json, and what
it leaves on disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.awq import Awq
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import CompressedTensors, Int8Activations
from quantkit.formats.codecs.dequantized import METHODS as READ_AS_FLOATS
from quantkit.formats.codecs.gptq import AutoRound, Gptq
from quantkit.formats.codecs.layout import Description
from quantkit.formats.codecs.mlx import Mlx
from quantkit.formats.codecs.small_floats import TYPES as FLOAT8
from quantkit.formats.codecs.torchao import TorchAo
from quantkit.tensors.dtypes import DType

NATIVE = CompressedTensors()
"""The method that is written where none is requested."""

METHODS: dict[str, QuantMethod] = {
    method.name: method
    for method in (
        NATIVE,
        Int8Activations(),
        Gptq(),
        Awq(),
        Mlx(),
        TorchAo(),
        AutoRound(),
        *READ_AS_FLOATS,
    )
}
"""By ``quant_method`` in config.json."""

SETTINGS_FILES = {
    method.settings_file: method.name for method in METHODS.values() if method.settings_file
}
"""The files that hold settings if config.json does not, and the method that they mean unless
they name one.
"""

_WEIGHT = "weight"
LAYOUTS = tuple(dict.fromkeys(layout for method in METHODS.values() for layout in method.layouts))
_SUFFIXES = {suffix for layout in LAYOUTS for suffix in layout.suffixes}
_MAX_PARTS = max(suffix.count(".") for suffix in _SUFFIXES) + 1
_GLUED = tuple(suffix for layout in LAYOUTS if not layout.joint for suffix in layout.suffixes)
_PREFIXES = tuple(prefix for layout in LAYOUTS for prefix in layout.prefixes)
# What tensors with these suffixes hold.
_IN_BYTES = (DType.UINT8, DType.INT8)
_CODE_TYPES = {
    dtype for layout in LAYOUTS if layout.codes == _WEIGHT for dtype in layout.code_types
}
_AMBIGUOUS = {
    "weight",
    "scales",
    "biases",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "_blocks",
    "_scales",
}
"""Suffixes that alone do not make a tensor part of a quantized weight."""
_NOT_READ = {"W_q": "HQQ"}


def describe_modules(
    stored: Mapping[str, StoredTensor], method: QuantMethod | None, *, has_method: bool
) -> dict[str, Description]:
    """Return what lies on disk for each module whose weight is stored as codes.

    Args:
        stored: the tensors of a folder.
        method: by which the folder is quantized, if it is one of `METHODS`.
        named: whether the folder names any method: only then scales without codes belong to a
            quantized weight.
    """
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, suffix = _split(name)
        if suffix in _GLUED and tensor.dtype not in _IN_BYTES:
            continue
        if suffix not in ("", _WEIGHT):
            tensors.setdefault(module, {})[suffix] = tensor
        elif suffix == _WEIGHT and tensor.dtype in _CODE_TYPES and len(tensor.shape) > 1:
            tensors.setdefault(module, {})
        elif tensor.dtype in FLOAT8 and len(tensor.shape) > 2:  # of all experts
            tensors.setdefault(name, {})[_WEIGHT] = tensor
    stated = () if method is None else method.layouts
    candidates = sorted(LAYOUTS, key=lambda layout: (layout not in stated, layout.codes == _WEIGHT))
    result = {}
    for module, own in tensors.items():
        if (
            weight := stored.get(f"{module}.{_WEIGHT}")
        ) is not None and weight.dtype in _CODE_TYPES:
            own[_WEIGHT] = weight
        layout = next(
            (
                candidate
                for candidate in candidates
                if candidate.matches(own) and (candidate in stated or candidate.is_evident(own))
            ),
            None,
        )
        if layout is None and len(stated) == 1 and stated[0].suffixes & set(own):
            layout = stated[0]
        if layout is not None or has_method:
            result[module] = Description(module, layout, own)
    return result


def describe_tensor_methods(name: str) -> str | None:
    """Return the methods of quantization to which a tensor of such a name belongs, for messages;
    None if to none.
    """
    _, suffix = _split(name)
    methods = []
    for method in METHODS.values():
        if any(suffix in layout.suffixes for layout in method.layouts):
            methods.append(method.name)
    if suffix and suffix not in _AMBIGUOUS and methods:
        return " or ".join(methods)
    return _NOT_READ.get(name.rpartition(".")[2])


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and the suffix of its layout; an empty suffix if no layout has
    such a tensor.
    """
    parts = name.split(".")
    for count in range(_MAX_PARTS, 0, -1):
        suffix = ".".join(parts[-count:])
        known = (suffix in _SUFFIXES and suffix not in _GLUED) or suffix.startswith(_PREFIXES)
        if known and len(parts) > count:
            return ".".join(parts[:-count]), suffix
    glued = next((suffix for suffix in _GLUED if name.endswith(suffix)), "")
    return name.removesuffix(glued), glued
