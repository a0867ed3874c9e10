"""The table of codecs: every method of quantization that folders name in config.json, and its
tensors on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from quantkit.base.late import LateTable, import_attribute
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.float_methods import BITSANDBYTES, MODEL_OPTIMIZER
from quantkit.formats.codecs.float_methods import METHODS as READ_AS_FLOATS
from quantkit.formats.codecs.layout import Description, Layout
from quantkit.formats.codecs.layouts import (
    AWQ,
    EIGHT_BITS,
    FLOAT8,
    FLOAT8_TYPES,
    FOUR_BITS,
    FP4,
    GPTQ,
    INT8,
    MLX,
    MXFP4,
    PACKED_CODES,
    TORCHAO,
)
from quantkit.tensors.dtypes import DType


class _LateMethods(LateTable[QuantMethod]):
    """The methods by name; the codecs of each are imported when it is first looked up."""

    def load(self, place: str) -> QuantMethod:
        method_class: type[QuantMethod] = import_attribute(f"{__package__}.{place}")
        return method_class()


METHODS = _LateMethods(
    {
        "compressed-tensors": "compressed_tensors:CompressedTensors",
        "int-quantized": "compressed_tensors:Int8Activations",
        "gptq": "gptq:Gptq",
        "awq": "awq:Awq",
        "mlx": "mlx:Mlx",
        "torchao": "torchao:TorchAo",
        "auto-round": "gptq:AutoRound",
    }
)
"""By ``quant_method`` in config.json."""
METHODS.update((method.name, method) for method in READ_AS_FLOATS)

NATIVE = METHODS["compressed-tensors"]
"""The method that is written where none is requested."""

LAYOUTS_BY_METHOD: dict[str, tuple[Layout, ...]] = {
    "compressed-tensors": (FP4, PACKED_CODES, INT8, FLOAT8),
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "mlx": (MLX,),
    "torchao": (TORCHAO,),
    BITSANDBYTES: (FOUR_BITS, EIGHT_BITS),
    "fbgemm_fp8": (FLOAT8,),
    "fp8": (FLOAT8,),
    MODEL_OPTIMIZER: (FLOAT8,),
    "mxfp4": (MXFP4,),
}
"""The layouts in which each method stores the weights of modules, by name of the method; several
methods share layouts.
"""

SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": MODEL_OPTIMIZER,
}
"""The files that hold settings if config.json does not, and the method that they mean unless
they name one.
"""

_WEIGHT = "weight"


def _collect_suffixes(layouts: Iterable[Layout]) -> set[str]:
    suffixes: set[str] = set()
    for layout in layouts:
        suffixes |= layout.suffixes
    return suffixes


def _collect_prefixes(layouts: Iterable[Layout]) -> tuple[str, ...]:
    prefixes: list[str] = []
    for layout in layouts:
        prefixes += layout.prefixes
    return tuple(prefixes)


def _collect_code_types(layouts: Iterable[Layout]) -> set[DType]:
    dtypes: set[DType] = set()
    for layout in layouts:
        if layout.codes == _WEIGHT:
            dtypes.update(layout.code_types)
    return dtypes


# Each layout once, in the order of the methods.
LAYOUTS = tuple(dict.fromkeys(chain.from_iterable(LAYOUTS_BY_METHOD.values())))
_SUFFIXES = _collect_suffixes(LAYOUTS)
_MAX_PARTS = max(suffix.count(".") for suffix in _SUFFIXES) + 1
# Suffixes that follow the name of a module without a dot.
_GLUED = tuple(_collect_suffixes(layout for layout in LAYOUTS if not layout.joint))
_PREFIXES = _collect_prefixes(LAYOUTS)
# The types of tensors with such suffixes; others with names that end so are no codes.
_IN_BYTES = (DType.UINT8, DType.INT8)
# The types of codes that have the name of a weight in floats.
_CODE_TYPES = _collect_code_types(LAYOUTS)
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
    """Describe the tensors on disk of each module whose weight is stored as codes.

    Args:
        stored: the tensors of a folder.
        method: by which the folder is quantized, if it is one of `METHODS`.
        has_method: whether the folder names any method: only then scales without codes belong to a
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
        elif tensor.dtype in FLOAT8_TYPES and len(tensor.shape) > 2:
            # The experts of a layer in one tensor, which has the name of the module.
            tensors.setdefault(name, {})[_WEIGHT] = tensor
    method_layouts: tuple[Layout, ...] = ()
    if method is not None:
        method_layouts = LAYOUTS_BY_METHOD.get(method.name, ())
    # Layouts of the folder's method come first, and codes with a name of their own before those
    # that are named like floats.
    candidates = sorted(
        LAYOUTS, key=lambda layout: (layout not in method_layouts, layout.codes == _WEIGHT)
    )
    result: dict[str, Description] = {}
    for module, module_tensors in tensors.items():
        weight = stored.get(f"{module}.{_WEIGHT}")
        if weight is not None and weight.dtype in _CODE_TYPES:
            module_tensors[_WEIGHT] = weight
        layout = _find_layout(module_tensors, candidates, method_layouts)
        if layout is not None or has_method:
            result[module] = Description(module, layout, module_tensors)
    return result


def _find_layout(
    tensors: Mapping[str, StoredTensor],
    candidates: Sequence[Layout],
    method_layouts: Sequence[Layout],
) -> Layout | None:
    """Find the first candidate that matches the tensors of a module; None if none does."""
    for candidate in candidates:
        # Other methods use the suffixes of some layouts too: unless the config names the method,
        # the tensors must show the layout.
        is_possible = candidate.matches(tensors)
        if is_possible and (candidate in method_layouts or candidate.is_evident(tensors)):
            return candidate
    # Codes are missing; the method leaves no doubt which they would be.
    if len(method_layouts) == 1 and method_layouts[0].suffixes & set(tensors):
        return method_layouts[0]
    return None


def describe_tensor_methods(name: str) -> str | None:
    """Name the methods of quantization to which a tensor of such a name belongs, for messages;
    None if to none.
    """
    _, suffix = _split(name)
    methods: list[str] = []
    for method, layouts in LAYOUTS_BY_METHOD.items():
        if any(suffix in layout.suffixes for layout in layouts):
            methods.append(method)
    if suffix and suffix not in _AMBIGUOUS and methods:
        return " or ".join(methods)
    return _NOT_READ.get(name.rpartition(".")[2])


def _split(name: str) -> tuple[str, str]:
    """Split the name of a tensor into its module and the suffix of its layout; an empty suffix if
    no layout has such a tensor.
    """
    parts = name.split(".")
    # Suffixes may have dots; the longest one that is known decides.
    for count in range(_MAX_PARTS, 0, -1):
        suffix = ".".join(parts[-count:])
        has_layout = (suffix in _SUFFIXES and suffix not in _GLUED) or suffix.startswith(_PREFIXES)
        if has_layout and len(parts) > count:
            return ".".join(parts[:-count]), suffix
    for suffix in _GLUED:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""
