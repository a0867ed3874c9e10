"""Experts that one tensor holds on disk, as a tensor for each linear of each expert."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import OpaqueTensor, Stack
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.via_transformers.experts import experts_of
from quantkit.via_transformers.lazy_model import mapping_of, merge_into_parameter, set_parameter
from quantkit.via_transformers.linears import model_class, quiet, targets

_OF_EXPERT = re.compile(r"(.+)\.\d+\.(?:gate|up|down)_proj\.weight")
_FLOATS = ("float32", "float16", "bfloat16")
_LINEARS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""The linears of an expert, by the parameter of transformers that holds them."""


def unstack(source: StoredCheckpoint, code: Path | None = None) -> None:
    """Let a model that is known by its tensors have one for each linear of an expert, named by
    transformers' module, where one on disk holds all experts, or would hold them if they were
    floats. Does nothing if transformers is not there or does not know the model. `code` is a folder
    whose code is run for it; None for that of the source's config.
    """
    tensors = source.config.tensors
    if (
        tensors is None
        or not isinstance(source, HFCheckpoint)
        or any(tensor.stack is not None for tensor in tensors)
    ):
        return
    if not any(len(tensor.shape) == 3 or ".experts." in tensor.name for tensor in tensors):
        return
    if (model := _model(source.extra_config, code or source.config.code)) is not None:
        parts = _parts(model, tensors) | _stacks(model, tensors)
        if parts:
            source.regroup(
                tuple(chain.from_iterable(parts.get(tensor.name, [tensor]) for tensor in tensors))
            )


def _model(raw: Mapping[str, Any], code: Path | None) -> Any:
    """Return the model of a config.json without weights; None if transformers cannot build it,
    which others report.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        with quiet():
            cls, config = model_class(raw, code)
            with torch.device("meta"):
                return cls(config)
    except Exception:  # of the code of any model, given any config
        return None


def _parts(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Return the linears in each tensor that holds all experts, by its name."""
    mapping = mapping_of(model)
    there = {tensor.name for tensor in tensors}
    result: dict[str, list[OpaqueTensor]] = {}
    for tensor in tensors:
        if len(tensor.shape) == 3 and tensor.dtype in _FLOATS:
            for target, pattern in targets(model, [tensor.name], mapping).values():
                if not _holds_experts(model, target):
                    continue
                numbers = torch.arange(math.prod(tensor.shape[1:]), dtype=torch.int32).view(
                    1, *tensor.shape[1:]
                )
                with _one_expert(model, target) as whole:
                    if pattern is not None:
                        numbers = _try_to_convert(
                            merge_into_parameter,
                            model,
                            mapping,
                            target,
                            {tensor.name: (pattern, numbers)},
                        )
                if numbers is not None and numbers.shape[1:] == whole.shape[1:]:
                    parts = list(_split(model, tensor, target, numbers[0]))
                    if parts and there.isdisjoint(part.name for part in parts):
                        result[tensor.name] = parts
    return result


def _stacks(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Linears of experts that are separate tensors, by name, with their places in the one that
    transformers would save; none where it saves them apart.
    """
    there = {tensor.name: tensor for tensor in tensors}
    modules = dict.fromkeys(match[1] for name in there if (match := _OF_EXPERT.fullmatch(name)))
    wholes = targets(model, [f"{module}.{leaf}" for module in modules for leaf in _LINEARS])
    result: dict[str, list[OpaqueTensor]] = {}
    for target, _ in wholes.values():
        if (
            not _holds_experts(model, target)
            or (saved := _find_saved_tensor(model, target)) is None
        ):
            continue
        whole, numbers = saved
        parts = []
        for part in _split(model, whole, target, numbers):
            parts.append((there.get(part.name), part))
        own = []
        for one, part in parts:
            if one is not None and one.shape == part.shape:
                own.append(replace(one, stack=part.stack))
        if own and len(own) == len(parts) and not targets(model, [own[0].name]):
            result |= {one.name: [one] for one in own}
    return result


def _holds_experts(model: Any, target: str) -> bool:
    """Return whether a parameter of transformers holds weights of all experts of a module that can
    be run one by one.
    """
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    return experts is not None and not experts.has_bias and leaf in _LINEARS


def _find_saved_tensor(model: Any, target: str) -> tuple[OpaqueTensor, Tensor] | None:
    """Return the tensor on disk that transformers makes of a parameter of all experts, and which
    numbers of it one expert has, in the parameter's shape; None if it makes several.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with _one_expert(model, target) as whole:
        numbers = torch.arange(math.prod(whole.shape[1:]), dtype=torch.int32).view(
            1, *whole.shape[1:]
        )
        saved = _try_to_convert(revert_weight_conversion, model, {target: numbers})
    if saved is None or len(saved) != 1:
        return None
    ((name, one),) = saved.items()
    if one.dim() != 3 or one.numel() != numbers.numel():
        return None
    places = torch.empty_like(numbers.flatten())
    places[one.flatten().long()] = numbers.flatten()
    shape = int(whole.shape[0]), *map(int, one.shape[1:])
    return OpaqueTensor(name, shape, "float32"), places.view(whole.shape[1:])


@contextmanager
def _one_expert(model: Any, target: str) -> Iterator[Tensor]:
    """The context in which a parameter of all experts is that of one, as converters look at its
    shape.
    """
    whole: Tensor = model.get_parameter(target)
    set_parameter(model, target, whole[:1])
    try:
        yield whole
    finally:
        set_parameter(model, target, whole)


def _try_to_convert(convert: Callable[..., Any], *operands: Any) -> Any:
    try:
        return convert(*operands)
    except Exception:  # of the code of any converter
        return None


def _split(
    model: Any, tensor: OpaqueTensor, target: str, numbers: Tensor
) -> Iterator[OpaqueTensor]:
    """Yield the linears of all experts in a tensor; none if they do not lie in rows or columns.

    Args:
        target: the parameter of transformers that it becomes, which holds experts.
        numbers: those in the tensor, for one expert, of the parameter's elements.
    """
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    assert experts is not None
    if experts.is_transposed:
        weight = numbers.t()
    else:
        weight = numbers
    linears = _LINEARS[leaf]
    rows = (
        weight.chunk(len(linears)) if experts.is_concatenated else _alternate(weight, len(linears))
    )
    places = [_place(row, tensor.shape[2]) for row in rows]
    named = _experts_in(tensor.name) or module
    for expert in range(tensor.shape[0]):
        for linear, row, place in zip(linears, rows, places, strict=True):
            if place is None:
                return
            stack = Stack(tensor.name, tensor.shape, expert, *place, experts.are_apart)
            if named == module:
                alias = None
            else:
                alias = f"{module}.{expert}.{linear}"
            name = f"{named}.{expert}.{linear}.weight"
            yield replace(tensor, name=name, shape=tuple(row.shape), stack=stack, alias=alias)


def _alternate(weight: Tensor, count: int) -> list[Tensor]:
    return [weight[index::count] for index in range(count)]


def _place(numbers: Tensor, width: int) -> tuple[int, int, bool] | None:
    """Return the first row of a weight [O, I] in a matrix of this width, the distance between rows,
    and whether rows are columns there; from the numbers of its elements there. None if it is none
    of this.
    """
    rows = numbers // width
    columns = numbers % width
    for at, along, transposed in ((rows, columns, False), (columns, rows, True)):
        order = at[:, 0]
        first = int(order[0])
        if len(order) > 1:
            step = int(order[1] - order[0])
        else:
            step = 1
        expected = torch.arange(len(order), dtype=at.dtype) * step + first
        whole = torch.arange(numbers.shape[1], dtype=along.dtype)
        if step > 0 and bool((at == expected.unsqueeze(1)).all()) and bool((along == whole).all()):
            return first, step, transposed
    return None


def _experts_in(name: str) -> str:
    """Return the module of experts that the name of a tensor states; empty if it does not."""
    parts = name.split(".")
    return ".".join(
        parts[
            : max((index + 1 for index, part in enumerate(parts) if "experts" in part), default=0)
        ]
    )
