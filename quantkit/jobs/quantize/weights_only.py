"""Quantize a model that cannot be run: linears that rounding changes too much keep their floats."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from quantkit.architectures.config import ModelConfig, OpaqueTensor
from quantkit.architectures.families.opaque import HEADS, ROUTERS, is_extra_layer, is_table
from quantkit.architectures.topology import Parameter, parameters, recurrent_linears
from quantkit.base.progress import Progress
from quantkit.calibration.quantizers import RtnQuantizer, TensorBlock
from quantkit.formats.checkpoint import Checkpoint, count_text
from quantkit.quality.bounds import ROUNDING_BOUNDS
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

_Tensor = TypeVar("_Tensor", OpaqueTensor, OpaqueTensor | Parameter)

_PARTS = {"tower": "linears of parts for pictures or sound", "head": "output heads"}
# A name with "expert" or "experts" in one of its parts.
_EXPERTS = re.compile(r"(.*\.)?[^.]*experts?[^.]*(\..*)?")
# Groups of other matrices with a smaller share of the parameters are not worth a mention.
_SMALL_SHARE = 0.005
# Names that a note lists. The reason for recurrent linears concerns each of their kinds, so that
# more of them are listed.
_NAMED = 4
_NAMED_RECURRENT = 12


def describe_kept_parts(
    config: ModelConfig, raw: Mapping[str, Any], quantized: Collection[str]
) -> list[str]:
    """Describe which large parts of a model known by its tensors only are not rounded, in a few
    words for people.

    Args:
        raw: its config.json.
        quantized: the linear modules that are rounded.
    """
    parts: dict[str, list[OpaqueTensor]] = {}
    for tensor in config.tensors or ():
        if tensor.module in quantized:
            continue
        part_name = _name_part(tensor, raw)
        if part_name is not None:
            parts.setdefault(part_name, []).append(tensor)
    total = _parameters(config.tensors or ())
    lines = []
    for part, tensors in parts.items():
        groups: dict[str, list[OpaqueTensor]] = {}
        count = 0
        size = 0
        for name, group in _by_shared_name(tensors).items():
            group_size = _parameters(group)
            if part == _OTHERS and group_size < _SMALL_SHARE * total:
                continue
            groups[name] = group
            count += len(group)
            size += group_size
        if count:
            lines.append(
                f"{part}: {count_text(size)} parameters in {count} tensor{'s' * (count > 1)}"
                f" ({_list_names(groups, _NAMED)}), {size / total:.1%} of the parameters"
            )
    return lines


def describe_kept_recurrent(config: ModelConfig, quantized: Collection[str]) -> str | None:
    """Describe which linears that carry a state are not among the `quantized` modules, and why, in
    a sentence for people; None if all are quantized.
    """
    modules = recurrent_linears(config) - set(quantized)
    tensors: Sequence[OpaqueTensor | Parameter] = config.tensors or parameters(config)
    kept = []
    for tensor in tensors:
        if tensor.module in modules and tensor.name.endswith(".weight"):
            kept.append(tensor)
    if not kept:
        return None
    share = _parameters(kept) / _parameters(tensors)
    several = len(kept) > 1
    return (
        f"{len(kept)} linear{'s' * several} of linear attention, state spaces or short convolutions"
        f" stay{'s' * (not several)} unquantized"
        f" ({_list_names(_by_shared_name(kept), _NAMED_RECURRENT)}; {share:.1%} of the parameters),"
        " because errors there accumulate from token to token"
    )


def _by_shared_name(tensors: Iterable[_Tensor]) -> dict[str, list[_Tensor]]:
    """Group tensors by their names; those of all layers and experts are one group."""
    groups: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        # Numbers between dots count layers and experts.
        shared_name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
        groups.setdefault(shared_name, []).append(tensor)
    return groups


def _list_names(groups: Mapping[str, Iterable[OpaqueTensor | Parameter]], limit: int) -> str:
    """List the names of groups, the largest group first."""
    names = sorted(groups, key=lambda name: -_parameters(groups[name]))
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def _parameters(tensors: Iterable[OpaqueTensor | Parameter]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


_OTHERS = "other matrices"


def _name_part(tensor: OpaqueTensor, raw: Mapping[str, Any]) -> str | None:
    """Name the part that a tensor without rounding belongs to, in words; None for one that is
    rounded, or that is no matrix of floats in a layer of the model.
    """
    if tensor.role in _PARTS:
        return _PARTS[tensor.role]
    if is_extra_layer(tensor.name, raw):
        return "further layers for prediction"
    last = tensor.module.rpartition(".")[2]
    # Recurrent linears have a note of their own.
    if tensor.role in ("linear", "recurrent"):
        return None
    # Routers and heads keep their floats in every model.
    if last in ROUTERS or (tensor.role == "float" and last in HEADS):
        return None
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or is_table(tensor.name):
        return None
    if len(tensor.shape) > 2 and _EXPERTS.fullmatch(tensor.name):
        return "stacked experts"
    return _OTHERS


def find_modules_out_of_bounds(
    source: Checkpoint,
    schemes: Mapping[str, QuantScheme],
    *,
    allow_nonfinite: bool,
    progress: Progress,
) -> dict[str, str]:
    """Round every weight once, before anything is written, and find those that lose more than
    `ROUNDING_BOUNDS`.

    Args:
        schemes: by module.

    Returns:
        Why these modules should keep their floats.

    Raises:
        NonFiniteError: if a weight holds NaN or Inf.
    """
    scale_dtype = DType(source.config.dtype)
    quantizer = RtnQuantizer(source, allow_nonfinite=allow_nonfinite)
    too_far = {}
    for index, (module, scheme) in enumerate(schemes.items()):
        progress("rounding errors", index, len(schemes), "weights")
        spec = TensorSpec(
            f"{module}.weight", source.info(f"{module}.weight").shape, scale_dtype, scheme
        )
        for _, _, record in quantizer.solve(TensorBlock(None, (spec,))):
            assert record is not None
            error = float(str(record["relative_error"]))
            bound = ROUNDING_BOUNDS[f"int{scheme.bits}"]
            # NaN exceeds the bound too.
            if not error <= bound:
                too_far[module] = (
                    f"rounding to {scheme} changes it by {error:.3g} of its norm, more than"
                    f" {bound:g}"
                )
    progress("rounding errors", len(schemes), len(schemes), "weights")
    return too_far


def note_out_of_bounds(source: Checkpoint, reasons: Mapping[str, str]) -> str:
    """Write a note on modules that keep their floats, with the reason of the first one."""
    module, reason = next(iter(reasons.items()))
    further_text = ""
    if len(reasons) > 1:
        further_text = f", and so do {len(reasons) - 1} more"
    return f"{source.path}: '{module}' stays unquantized: {reason}{further_text}"
