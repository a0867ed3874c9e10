"""Weights in small floats with scales, and in bitsandbytes' codes, which are read as floats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from quantkit.base.json_values import Settings
from quantkit.base.late import LateModule
from quantkit.errors import UnreadLayoutError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs import small_floats
from quantkit.formats.codecs.float_methods import (
    BITSANDBYTES,
    NAMES,
    iter_weight_groups,
    read_method,
)
from quantkit.formats.codecs.layout import block_size
from quantkit.formats.codecs.layouts import BLOCKS, EXPONENTS, FLOAT8_TYPES
from quantkit.formats.codecs.small_floats import DequantizedTensor, Float8Weight, Mxfp4Weight
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import torch
from quantkit.tensors.tensor_slice import TensorSlice

# One of the methods whose weights are read as floats.
if TYPE_CHECKING:
    from quantkit.formats.codecs import bitsandbytes
else:
    bitsandbytes = LateModule("quantkit.formats.codecs.bitsandbytes")

# Some formats of this method are read as floats too.
_ALSO = "compressed-tensors"
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "input_scale_ub",
    "input_zero_point",
)
_CARRIED_SCALES = (*_OF_ACTIVATIONS, "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale")


def replace_quantized_tensors(
    stored: Mapping[str, StoredTensor],
    homes: Mapping[str, TensorFile],
    settings: Settings | None,
    dtype: DType,
) -> tuple[dict[str, StoredTensor], dict[str, TensorFile], list[str]]:
    """Replace weights in small floats or bitsandbytes' codes by floats among a folder's tensors.

    Args:
        stored, homes: the tensors as they are stored, and their files.
        settings: of the folder's quantization; None if its config names none.

    Returns:
        The tensors, where they are read from, and notes for the user.

    Raises:
        UnsupportedError: if scales do not go with their tensor, or are named as DeepSeek V4's.
        CheckpointError: for settings of the wrong kind.
    """
    if settings is None:
        method = None
    else:
        method = read_method(settings)
    tensors = dict(stored)
    new_homes = dict[str, TensorFile](homes)
    if settings is None or not (method in NAMES or method == _ALSO):
        return tensors, new_homes, []
    _require_known_scales(stored, homes)
    block = _find_block_size(settings)
    skipped_scales = 0
    kinds: Counter[str] = Counter()
    for name, tensor in stored.items():
        weight: DequantizedTensor | None
        if method == BITSANDBYTES:
            weight = bitsandbytes.find_weight(name, stored, homes, dtype)
        else:
            weight = _weight(
                name, tensor, stored, homes, block, dtype, by_columns=method == "fbgemm_fp8"
            )
        leaf = name.rpartition(".")[2]
        # compressed-tensors' codecs read these codes; only the scales of their inputs are left out.
        coded = leaf == "weight_packed" or (leaf == "weight" and tensor.dtype == DType.INT8)
        if weight is None and not coded:
            continue
        if weight is None:
            weight_name = name.replace("weight_packed", "weight")
            part_names = []
        else:
            weight_name = weight.tensor.name
            part_names = [part.name for part in weight.parts]
        # Experts that are stacked in one tensor have suffixes without a dot.
        if weight_name.endswith(".weight"):
            prefix = weight_name.removesuffix("weight")
        else:
            prefix = f"{weight_name}_"
        scales = []
        for suffix in _OF_ACTIVATIONS:
            if prefix + suffix in tensors:
                scales.append(prefix + suffix)
        skipped_scales += len(scales)
        for replaced_name in (*part_names, *scales):
            del tensors[replaced_name]
            del new_homes[replaced_name]
        if weight is not None:
            tensors[weight_name] = weight.tensor
            new_homes[weight_name] = weight
            kinds[weight.kind] += 1
    # Keep the order on disk. A weight in MXFP4 takes the place of its codes, which have another
    # name.
    order = {name: place for place, name in enumerate(stored)}
    ordered = sorted(tensors, key=lambda name: order.get(name, order.get(name + BLOCKS, 0)))
    notes: list[str] = []
    for kind, count in kinds.items():
        notes.append(describe_float_weights(kind, count, dtype))
    if method in NAMES and not kinds:
        notes.append(f"the config names {method}, but no weight is quantized")
    if _rounds_activations(settings):
        notes.append("the config also quantizes activations; quantkit does not")
    if skipped_scales:
        notes.append(
            f"{skipped_scales} scales of activations are left out: activations are not quantized"
        )
    carried = [name for name in tensors if name.rpartition(".")[2] in _CARRIED_SCALES]
    if carried:
        notes.append(
            f"{len(carried)} scales of activations or caches are copied, and their use is not"
            f" stated: {carried[0]}"
        )
    return {name: tensors[name] for name in ordered}, new_homes, notes


def describe_float_weights(kind: str, count: int, dtype: DType) -> str:
    """Describe that weights in small floats are read as floats, for the user."""
    return f"{count} weights in {kind} are read as {dtype}, by their own scales"


def _find_block_size(settings: Settings) -> tuple[int, int] | None:
    """Read the first block size in the settings of a folder; all of them are checked."""
    block = block_size(settings, "weight_block_size")
    for _, weights in iter_weight_groups(settings.values):
        group_settings = Settings(weights, settings.path, settings.name)
        group_block = block_size(group_settings, "block_structure")
        block = block or group_block
    return block


def _require_known_scales(
    stored: Mapping[str, StoredTensor], homes: Mapping[str, TensorFile]
) -> None:
    """Refuse the layout that DeepSeek V4 is published in, by name.

    Its linears are FP8, and its experts two codes e2m1 in an int8; ``M.scale`` has the scales of
    ``M.weight``. Source: transformers' `Fp8Dequantize`, and its names of deepseek_v4.
    """
    for name, tensor in stored.items():
        if not name.endswith(".weight") or tensor.dtype not in (DType.INT8, *FLOAT8_TYPES):
            continue
        scale = stored.get(f"{name.removesuffix('.weight')}.scale")
        if scale is None:
            continue
        if tensor.dtype == DType.INT8:
            kind = "FP4, two values in an int8"
        else:
            kind = "FP8"
        raise UnreadLayoutError(
            "weights whose scales are named '.scale' are not read: DeepSeek V4 is published so",
            path=homes[name].path,
            found=f"'{name}' in {kind}, and '{scale.name}'",
            hint=(
                "load the model with transformers and `FineGrainedFP8Config(dequantize=True)`, save"
                " it with `save_pretrained()`, and start from that"
            ),
        )


class Float64Tensor(DequantizedTensor):
    """A tensor of float64, which is read in the dtype of the model, as transformers reads it."""

    kind = "float64"

    def __init__(self, stored: StoredTensor, homes: Mapping[str, TensorFile], dtype: DType) -> None:
        super().__init__(StoredTensor(stored.name, dtype, stored.shape), (stored,), homes)

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        return self._read(self.parts[0], part).to(self.tensor.dtype.torch)


def narrow_float64(
    names: Iterable[str],
    stored: dict[str, StoredTensor],
    homes: dict[str, TensorFile],
    dtype: DType,
) -> list[str]:
    """Replace tensors of float64 by the same in another dtype, in both mappings.

    Args:
        names: of the weights of the model; scales of codes keep their dtype.

    Returns:
        Notes for the user.
    """
    count = 0
    for name in names:
        if name in stored and stored[name].dtype == DType.FLOAT64:
            # A copy of the mapping, which is changed below: the new home reads from the old one.
            home = Float64Tensor(stored[name], dict(homes), dtype)
            stored[name] = home.tensor
            homes[name] = home
            count += 1
    if count:
        return [f"{count} tensors in float64 are read as {dtype}"]
    return []


def _weight(
    name: str,
    tensor: StoredTensor,
    stored: Mapping[str, StoredTensor],
    homes: Mapping[str, TensorFile],
    block: tuple[int, int] | None,
    dtype: DType,
    *,
    by_columns: bool,
) -> Float8Weight | Mxfp4Weight | None:
    """Combine a tensor with its scales to a weight; None if it has none.

    Args:
        by_columns: whether stacked matrices are transposed [E, I, O], with a scale for each output.
    """
    if tensor.dtype in FLOAT8_TYPES and len(tensor.shape) > 1 and 0 not in tensor.shape:
        for suffix in small_floats.SUFFIXES:
            scale = stored.get(name + suffix)
            if scale is not None:
                # Only stacked experts are transposed; other weights have a scale for each row.
                by_columns = by_columns and len(tensor.shape) > 2
                return Float8Weight(tensor, scale, homes, block, dtype, by_columns=by_columns)
    if tensor.dtype == DType.UINT8 and name.endswith(BLOCKS):
        scale = stored.get(name.removesuffix(BLOCKS) + EXPONENTS)
        if scale is not None and scale.dtype == DType.UINT8:
            return Mxfp4Weight(tensor, scale, homes, dtype)
    return None


def _rounds_activations(settings: Settings) -> bool:
    """Return whether integer weights are multiplied by quantized activations."""
    for group, weights in iter_weight_groups(settings.values):
        has_activations = group.get("input_activations") or group.get("output_activations")
        if has_activations and weights.get("type", "int") == "int":
            return True
    return False
