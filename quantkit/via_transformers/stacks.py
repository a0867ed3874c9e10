"""Present experts that are one tensor on disk as a tensor for each linear of each expert."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import OpaqueTensor, Stack
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.passes.partwise_model import set_parameter
from quantkit.via_transformers.experts import experts_of
from quantkit.via_transformers.lazy_model import mapping_of, merge_into_parameter
from quantkit.via_transformers.linears import model_class, quiet, targets

_OF_EXPERT = re.compile(r"(.+)\.\d+\.(?:gate|up|down)_proj\.weight")
_FLOATS = ("float32", "float16", "bfloat16")
_LINEARS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""The linears of an expert, by the parameter of transformers that contains them."""


def unstack(source: StoredCheckpoint, code: Path | None = None) -> None:
    """Replace each tensor that contains all experts, or would contain them if they were floats, by
    a tensor for each linear of an expert, named by transformers' module, in a model that is known
    by its tensors. Does nothing if transformers is not installed or does not know the model. `code`
    is a folder whose code is run to build the model; None for that of the source's config.
    """
    tensors = source.config.tensors
    if tensors is None or not isinstance(source, HFCheckpoint):
        return
    if any(tensor.stack is not None for tensor in tensors):
        return
    # Building the model takes time, which models without experts need not spend.
    if not any(len(tensor.shape) == 3 or ".experts." in tensor.name for tensor in tensors):
        return
    model = _model(source.extra_config, code or source.config.code)
    if model is None:
        return
    parts = _parts(model, tensors) | _stacks(model, tensors)
    if parts:
        regrouped: list[OpaqueTensor] = []
        for tensor in tensors:
            regrouped += parts.get(tensor.name, [tensor])
        source.regroup(tuple(regrouped))


def _model(raw: Mapping[str, Any], code: Path | None) -> Any:
    """Build the model of a config.json without weights; None if transformers cannot build it, which
    other functions report.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        with quiet():
            cls, config = model_class(raw, code)
            with torch.device("meta"):
                return cls(config)
    # The code of a model, given any config, can raise anything.
    except Exception:
        return None


def _parts(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Find the linears in each tensor that contains all experts, by its name."""
    mapping = mapping_of(model)
    names_on_disk = {tensor.name for tensor in tensors}
    linears_of_tensor: dict[str, list[OpaqueTensor]] = {}
    for tensor in tensors:
        if len(tensor.shape) != 3 or tensor.dtype not in _FLOATS:
            continue
        for target, pattern in targets(model, [tensor.name], mapping).values():
            if not _holds_experts(model, target):
                continue
            # The elements of one expert are numbered, and the numbers are converted as
            # transformers' loader would: so they show where the elements go.
            expert_shape = tensor.shape[1:]
            numbers = torch.arange(math.prod(expert_shape), dtype=torch.int32)
            numbers = numbers.view(1, *expert_shape)
            with _one_expert(model, target) as parameter:
                if pattern is not None:
                    operand = {tensor.name: (pattern, numbers)}
                    numbers = _try_to_convert(merge_into_parameter, model, mapping, target, operand)
            if numbers is not None and numbers.shape[1:] == parameter.shape[1:]:
                linears = list(_split(model, tensor, target, numbers[0]))
                if linears and names_on_disk.isdisjoint(linear.name for linear in linears):
                    linears_of_tensor[tensor.name] = linears
    return linears_of_tensor


def _stacks(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Find the linears of experts that are separate tensors, by name, with their places in the
    tensor that transformers would save; none if it saves them separately.
    """
    tensor_of_name = {tensor.name: tensor for tensor in tensors}
    # Names that parameters of all experts would have on disk, without duplicates.
    stack_names: dict[str, None] = {}
    for name in tensor_of_name:
        match = _OF_EXPERT.fullmatch(name)
        if match is not None:
            for leaf in _LINEARS:
                stack_names[f"{match[1]}.{leaf}"] = None
    linears_of_name: dict[str, list[OpaqueTensor]] = {}
    for target, _ in targets(model, stack_names).values():
        if not _holds_experts(model, target):
            continue
        saved = _find_saved_tensor(model, target)
        if saved is None:
            continue
        saved_tensor, numbers = saved
        parts = list(_split(model, saved_tensor, target, numbers))
        linears: list[OpaqueTensor] = []
        for part in parts:
            tensor = tensor_of_name.get(part.name)
            if tensor is not None and tensor.shape == part.shape:
                linears.append(replace(tensor, stack=part.stack))
        # All linears must be on disk. A name that the model has by itself is not stacked.
        if linears and len(linears) == len(parts) and not targets(model, [linears[0].name]):
            for linear in linears:
                linears_of_name[linear.name] = [linear]
    return linears_of_name


def _holds_experts(model: Any, target: str) -> bool:
    """Check that a parameter of transformers contains the weights of all experts of a module, which
    can be run one by one.
    """
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    return experts is not None and not experts.has_bias and leaf in _LINEARS


def _find_saved_tensor(model: Any, target: str) -> tuple[OpaqueTensor, Tensor] | None:
    """Find the tensor on disk that transformers makes of a parameter of all experts, and the place
    in it of each element of one expert, in the parameter's shape; None if it makes several.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with _one_expert(model, target) as parameter:
        expert_shape = parameter.shape[1:]
        numbers = torch.arange(math.prod(expert_shape), dtype=torch.int32).view(1, *expert_shape)
        saved = _try_to_convert(revert_weight_conversion, model, {target: numbers})
    if saved is None or len(saved) != 1:
        return None
    ((name, saved_numbers),) = saved.items()
    if saved_numbers.dim() != 3 or saved_numbers.numel() != numbers.numel():
        return None
    # `saved_numbers` has the element of the parameter at each place on disk; this is its inverse.
    places = torch.empty_like(numbers.flatten())
    places[saved_numbers.flatten().long()] = numbers.flatten()
    shape = int(parameter.shape[0]), *map(int, saved_numbers.shape[1:])
    return OpaqueTensor(name, shape, "float32"), places.view(expert_shape)


@contextmanager
def _one_expert(model: Any, target: str) -> Iterator[Tensor]:
    """Reduce a parameter of all experts to one expert while converters run, because they look at
    its shape.
    """
    parameter: Tensor = model.get_parameter(target)
    set_parameter(model, target, parameter[:1])
    try:
        yield parameter
    finally:
        set_parameter(model, target, parameter)


def _try_to_convert(convert: Callable[..., Any], *operands: Any) -> Any:
    try:
        return convert(*operands)
    # A converter may refuse the numbers in any way.
    except Exception:
        return None


def _split(
    model: Any, tensor: OpaqueTensor, target: str, numbers: Tensor
) -> Iterator[OpaqueTensor]:
    """Yield the linears of all experts in a tensor; none if they are not rows or columns of it.

    Args:
        target: the parameter of all experts that the tensor becomes in transformers.
        numbers: the places in the tensor, for one expert, of the parameter's elements.
    """
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    assert experts is not None
    if experts.is_transposed:
        weight = numbers.t()
    else:
        weight = numbers
    linears = _LINEARS[leaf]
    rows: Sequence[Tensor]
    if experts.is_concatenated:
        rows = weight.chunk(len(linears))
    else:
        rows = _alternate(weight, len(linears))
    places = [_place(row, tensor.shape[2]) for row in rows]
    # Names on disk may differ from transformers', which are then the aliases.
    module_on_disk = _experts_in(tensor.name) or module
    for expert in range(tensor.shape[0]):
        for linear, row, place in zip(linears, rows, places, strict=True):
            if place is None:
                return
            stack = Stack(tensor.name, tensor.shape, expert, *place, experts.are_apart)
            if module_on_disk == module:
                alias = None
            else:
                alias = f"{module}.{expert}.{linear}"
            name = f"{module_on_disk}.{expert}.{linear}.weight"
            yield replace(tensor, name=name, shape=tuple(row.shape), stack=stack, alias=alias)


def _alternate(weight: Tensor, count: int) -> list[Tensor]:
    return [weight[index::count] for index in range(count)]


def _place(numbers: Tensor, width: int) -> tuple[int, int, bool] | None:
    """Locate a weight [O, I] in a matrix of this width, from the numbers of its elements there: its
    first row, the distance between rows, and whether its rows are columns there. None if it has no
    such place.
    """
    rows = numbers // width
    columns = numbers % width
    for outer, inner, transposed in ((rows, columns, False), (columns, rows, True)):
        order = outer[:, 0]
        first = int(order[0])
        if len(order) > 1:
            step = int(order[1] - order[0])
        else:
            step = 1
        expected_outer = torch.arange(len(order), dtype=outer.dtype) * step + first
        # A row of the weight must be a complete row, or column, of the matrix, in order.
        expected_inner = torch.arange(numbers.shape[1], dtype=inner.dtype)
        if step <= 0 or not bool((outer == expected_outer.unsqueeze(1)).all()):
            continue
        if bool((inner == expected_inner).all()):
            return first, step, transposed
    return None


def _experts_in(name: str) -> str:
    """Find the module of experts in the name of a tensor; empty if it has none."""
    parts = name.split(".")
    # Up to the last part of the name that mentions experts.
    while parts and "experts" not in parts[-1]:
        parts.pop()
    return ".".join(parts)
