"""Present weights that are stored otherwise as weights [O, I] of linears: experts that are one
tensor on disk as a tensor for each linear of each expert, and those of `Conv1D` transposed.
"""

from __future__ import annotations

import importlib.util
import math
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig, OpaqueTensor, Stack
from quantkit.base.late import LateFunction, LateModule
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint

# Models with a decoder here, and most others, have nothing to present otherwise.
if TYPE_CHECKING:
    from quantkit.architectures.families.opaque import may_be_linear
    from quantkit.formats.lora.conv1d import is_conv1d
    from quantkit.passes.partwise_model import set_parameter
    from quantkit.via_transformers import experts as expert_modules
    from quantkit.via_transformers.experts import Experts, experts_of
    from quantkit.via_transformers.lazy_model import convert_tensors, mapping_of
    from quantkit.via_transformers.linears import model_class, quiet, targets
else:
    expert_modules = LateModule("quantkit.via_transformers.experts")
    may_be_linear = LateFunction("quantkit.architectures.families.opaque:may_be_linear")
    is_conv1d = LateFunction("quantkit.formats.lora.conv1d:is_conv1d")
    set_parameter = LateFunction("quantkit.passes.partwise_model:set_parameter")
    experts_of = LateFunction("quantkit.via_transformers.experts:experts_of")
    convert_tensors = LateFunction("quantkit.via_transformers.lazy_model:convert_tensors")
    mapping_of = LateFunction("quantkit.via_transformers.lazy_model:mapping_of")
    model_class = LateFunction("quantkit.via_transformers.linears:model_class")
    quiet = LateFunction("quantkit.via_transformers.linears:quiet")
    targets = LateFunction("quantkit.via_transformers.linears:targets")

# A linear of an expert, or a module with one linear for each expert.
_OF_EXPERT = re.compile(r"(.+)\.\d+\.(?:(\w+)\.)?weight")
_FLOATS = ("float32", "float16", "bfloat16")


def unstack(source: StoredCheckpoint, code: Path | None = None) -> None:
    """Replace each tensor that contains all experts, or would contain them if they were floats, by
    a tensor for each linear of an expert, named by transformers' module, and each weight [I, O] of
    a `Conv1D` by its transpose, in a model that is known by its tensors. Experts stay as they are
    if transformers is not installed or does not know the model. `code` is a folder whose code is
    run to build the model; None for that of the source's config.
    """
    tensors = source.config.tensors
    if tensors is None or not isinstance(source, HFCheckpoint):
        return
    if any(tensor.stack is not None for tensor in tensors):
        return
    code = code or source.config.code
    # The class of a module in a folder's own code is known only from the model.
    transposed = [tensor for tensor in tensors if is_conv1d(tensor.module, source)]
    parts: dict[str, list[OpaqueTensor]] = {}
    # Building the model takes time, which models without experts need not spend.
    if code is not None or any(_may_have_experts(tensor) for tensor in tensors):
        model = _model(source.extra_config, code)
        if model is not None:
            parts = _parts(model, tensors) | _stacks(model, tensors)
            transposed = _find_conv1d(model, tensors)
    for tensor in transposed:
        if may_be_linear(tensor):
            parts[tensor.name] = [_transpose(tensor, is_coded=source.is_coded(tensor.name))]
    if parts:
        regrouped: list[OpaqueTensor] = []
        for tensor in tensors:
            regrouped += parts.get(tensor.name, [tensor])
        source.regroup(tuple(regrouped))


def unstack_as(result: StoredCheckpoint, config: ModelConfig) -> None:
    """Replace tensors of a result as `unstack` does, if those of its source were: `config` is the
    source's.
    """
    if any(tensor.stack is not None for tensor in config.tensors or ()):
        unstack(result, config.code)


def _may_have_experts(tensor: OpaqueTensor) -> bool:
    match = _OF_EXPERT.fullmatch(tensor.name)
    is_numbered = match is not None and match[2] is None
    return len(tensor.shape) == 3 or ".experts." in tensor.name or is_numbered


def _find_conv1d(model: Any, tensors: Sequence[OpaqueTensor]) -> list[OpaqueTensor]:
    """Find the tensors that are weights of `Conv1D` modules."""
    from transformers.pytorch_utils import Conv1D

    weights: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            weights.add(f"{name}.weight")
    if not weights:
        return []
    target_of_name = targets(model, [tensor.name for tensor in tensors])
    found: list[OpaqueTensor] = []
    for tensor in tensors:
        target, pattern = target_of_name.get(tensor.name, ("", None))
        if target in weights and pattern is None:
            found.append(tensor)
    return found


def _transpose(tensor: OpaqueTensor, *, is_coded: bool) -> OpaqueTensor:
    """Describe the weight [O, I] of a `Conv1D`. Floats are stored as [I, O], codes as [O, I]."""
    if is_coded:
        shape = tensor.shape
    else:
        shape = tensor.shape[::-1]
    stack = Stack(tensor.name, shape[::-1], expert=None, transposed=True)
    return replace(tensor, shape=shape, stack=stack)


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
    floats = [tensor for tensor in tensors if tensor.dtype in _FLOATS]
    places = targets(model, [tensor.name for tensor in floats], mapping)
    # Tensors on disk, by the parameter of all experts that they become.
    tensors_of_target: dict[str, list[OpaqueTensor]] = defaultdict(list)
    for tensor in floats:
        target = places.get(tensor.name, ("", None))[0]
        if target and _holds_experts(model, target):
            tensors_of_target[target].append(tensor)
    linears_of_tensor: dict[str, list[OpaqueTensor]] = {}
    for target, stored in tensors_of_target.items():
        experts = _describe_experts(model, target)
        # Each must contain all experts.
        dimensions = 2 if experts.is_flat else 3
        if any(len(tensor.shape) != dimensions for tensor in stored):
            continue
        # The elements of one expert are numbered, and the numbers are converted as transformers'
        # loader would: so they show where the elements go.
        pattern = places[stored[0].name][1]
        numbers_of_name = _number_one_expert(stored, experts)
        numbers: Tensor | None = None
        with _one_expert(model, target) as parameter:
            if pattern is None:
                numbers = numbers_of_name[stored[0].name]
            else:
                operands: dict[str, tuple[str | None, Tensor]] = {}
                for name, value in numbers_of_name.items():
                    operands[name] = (places[name][1], value)
                converted = _try_to_convert(convert_tensors, model, mapping, target, operands)
                if converted is not None:
                    numbers = converted[target]
        if numbers is None or numbers.shape[1:] != experts.split(parameter).shape[1:]:
            continue
        linears = list(_split(model, stored, target, numbers[0]))
        if linears and names_on_disk.isdisjoint(linear.name for linear in linears):
            for tensor in stored:
                linears_of_tensor[tensor.name] = _select_in(linears, tensor.name)
    return linears_of_tensor


def _select_in(linears: Sequence[OpaqueTensor], name: str) -> list[OpaqueTensor]:
    """Select the linears in a tensor on disk."""
    selected: list[OpaqueTensor] = []
    for linear in linears:
        if linear.stack is not None and linear.stack.name == name:
            selected.append(linear)
    return selected


def _number_one_expert(tensors: Sequence[OpaqueTensor], experts: Experts) -> dict[str, Tensor]:
    """Number the elements of one expert in tensors [1, ...] like those on disk, through all
    tensors.
    """
    numbers: dict[str, Tensor] = {}
    first = 0
    for tensor in tensors:
        shape = _expert_shape(tensor, experts)
        stop = first + math.prod(shape)
        numbers[tensor.name] = torch.arange(first, stop, dtype=torch.int32).view(1, *shape)
        first = stop
    return numbers


def _expert_shape(tensor: OpaqueTensor, experts: Experts) -> tuple[int, int]:
    """Compute the shape of the matrix of one expert in a tensor of all."""
    *_, rows, columns = tensor.shape
    if experts.is_flat:
        rows //= experts.count
    return rows, columns


def _stacks(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Find the linears of experts that are separate tensors, by name, with their places in the
    tensors that transformers would save; none if it saves them separately.
    """
    tensor_of_name = {tensor.name: tensor for tensor in tensors}
    # Names that parameters of all experts would have on disk, without duplicates.
    stack_names: dict[str, None] = {}
    for name in tensor_of_name:
        match = _OF_EXPERT.fullmatch(name)
        if match is not None:
            for leaf in _list_parameters_with(match[2] or ""):
                stack_names[f"{match[1]}.{leaf}"] = None
    linears_of_name: dict[str, list[OpaqueTensor]] = {}
    for target, _ in targets(model, stack_names).values():
        if not _holds_experts(model, target):
            continue
        saved = _find_saved_tensors(model, target)
        if saved is None:
            continue
        saved_tensors, numbers = saved
        parts = list(_split(model, saved_tensors, target, numbers))
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


def _list_parameters_with(linear: str) -> list[str]:
    """List the possible names of a parameter of all experts that contains a linear of each."""
    leaves: list[str] = []
    for leaf, linears in expert_modules.LINEARS_OF_PARAMETER.items():
        if linear in linears:
            leaves.append(leaf)
    return leaves


def _holds_experts(model: Any, target: str) -> bool:
    """Check that a parameter of transformers contains the weights of all experts of a module, which
    can be run one by one.
    """
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    return experts is not None and not experts.has_bias and leaf in experts.linears


def _describe_experts(model: Any, target: str) -> Experts:
    """Describe the experts in a parameter for which `_holds_experts`."""
    experts = experts_of(model.get_submodule(target.rpartition(".")[0]))
    assert experts is not None
    return experts


def _find_saved_tensors(model: Any, target: str) -> tuple[list[OpaqueTensor], Tensor] | None:
    """Find the tensors on disk that transformers makes of a parameter of all experts, and the
    numbers of its elements there, of one expert, in the parameter's shape; None if it saves experts
    separately.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts = _describe_experts(model, target)
    with _one_expert(model, target) as parameter:
        expert_shape = experts.split(parameter).shape[1:]
        numbers = torch.arange(math.prod(expert_shape), dtype=torch.int32).view(1, *expert_shape)
        operand = numbers[0] if experts.is_flat else numbers
        saved = _try_to_convert(revert_weight_conversion, model, {target: operand})
    if not saved:
        return None
    dimensions = 2 if experts.is_flat else 3
    tensors: list[OpaqueTensor] = []
    # The element of the parameter at each place on disk, tensor after tensor.
    elements: list[Tensor] = []
    shape: tuple[int, ...]
    for name, saved_numbers in saved.items():
        if saved_numbers.dim() != dimensions:
            return None
        rows, columns = saved_numbers.shape[-2:]
        if experts.is_flat:
            shape = (experts.count * rows, columns)
        else:
            shape = (experts.count, rows, columns)
        tensors.append(OpaqueTensor(name, shape, "float32"))
        elements.append(saved_numbers.flatten())
    elements_in_order = torch.cat(elements).long()
    if elements_in_order.numel() != numbers.numel():
        return None
    # The inverse: the place on disk of each element of the parameter.
    places = torch.empty_like(numbers.flatten())
    places[elements_in_order] = numbers.flatten()
    return tensors, places.view(expert_shape)


@contextmanager
def _one_expert(model: Any, target: str) -> Iterator[Tensor]:
    """Reduce a parameter of all experts to one expert while converters run, because they look at
    its shape.
    """
    parameter: Tensor = model.get_parameter(target)
    experts = _describe_experts(model, target)
    rows = len(parameter) // experts.count if experts.is_flat else 1
    set_parameter(model, target, parameter[:rows])
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
    model: Any, tensors: Sequence[OpaqueTensor], target: str, numbers: Tensor
) -> Iterator[OpaqueTensor]:
    """Yield the linears of all experts in tensors; none if they are not rows or columns of one.

    Args:
        target: the parameter of all experts that the tensors become in transformers.
        numbers: the numbers of the parameter's elements, of one expert; see `_number_one_expert`.
    """
    module, _, leaf = target.rpartition(".")
    experts = _describe_experts(model, target)
    if leaf in experts.transposed:
        weight = numbers.t()
    else:
        weight = numbers
    linears = experts.linears[leaf]
    rows_of_linears: Sequence[Tensor]
    if experts.is_concatenated:
        rows_of_linears = weight.chunk(len(linears))
    else:
        rows_of_linears = _alternate(weight, len(linears))
    first_numbers: list[int] = [0]
    for tensor in tensors:
        first_numbers.append(first_numbers[-1] + math.prod(_expert_shape(tensor, experts)))
    homes: list[tuple[OpaqueTensor, tuple[int, int, bool]]] = []
    for rows in rows_of_linears:
        index = bisect(first_numbers, int(rows.min())) - 1
        tensor = tensors[index]
        place = None
        if int(rows.max()) < first_numbers[index + 1]:
            place = _place(rows - first_numbers[index], tensor.shape[-1])
        if place is None:
            return
        homes.append((tensor, place))
    for expert in range(experts.count):
        for linear, rows, (tensor, place) in zip(linears, rows_of_linears, homes, strict=True):
            # Names on disk may differ from transformers', which are then the aliases.
            if tensor.name == target:
                module_on_disk = module
            else:
                module_on_disk = _experts_in(tensor.name) or module
            if module_on_disk == module:
                alias = None
            else:
                alias = _join_names(module, str(expert), linear)
            yield replace(
                tensor,
                name=_join_names(module_on_disk, str(expert), linear, "weight"),
                shape=tuple(rows.shape),
                stack=_make_stack(tensor, experts, expert, place),
                alias=alias,
            )


def _make_stack(
    tensor: OpaqueTensor, experts: Experts, expert: int, place: tuple[int, int, bool]
) -> Stack:
    """Describe a linear of an expert, given its place in the matrix of one expert."""
    first, step, transposed = place
    if experts.is_flat:
        rows = _expert_shape(tensor, experts)[0]
        return Stack(tensor.name, tensor.shape, None, expert * rows + first, step, transposed)
    return Stack(
        name=tensor.name,
        shape=tensor.shape,
        expert=expert,
        first=first,
        step=step,
        transposed=transposed,
        apart=experts.are_apart,
    )


def _join_names(*names: str) -> str:
    """Join the parts of a name that are not empty."""
    return ".".join(filter(None, names))


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
