"""Experts that one tensor holds on disk, as a tensor for each linear of each expert."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
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
from quantkit.via_transformers.lazy_model import mapping_of, merged
from quantkit.via_transformers.linears import model_class, quiet, targets

_OF_EXPERT = re.compile(r"(.+)\.\d+\.(?:gate|up|down)_proj\.weight")
_FLOATS = ("float32", "float16", "bfloat16")
_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""The linears of an expert, by the parameter of transformers that holds them."""


def unstack(source: StoredCheckpoint, code: Path | None = None) -> None:
    """Let a model that is known by its tensors have one for each linear of an expert, named by transformers' module,
    where one on disk holds all experts, or would hold them if they were floats. Does nothing if transformers is not
    there or does not know the model. `code` is a folder whose code is run for it; None for that of the source's config.
    """
    tensors = source.config.tensors
    if tensors is None or not isinstance(source, HFCheckpoint) or any(one.stack is not None for one in tensors):
        return
    if not any(len(one.shape) == 3 or ".experts." in one.name for one in tensors):
        return
    if (model := _model(source.extra_config, code or source.config.code)) is not None:
        parts = _parts(model, tensors) | _stacks(model, tensors)
        if parts:
            source.regroup(tuple(chain.from_iterable(parts.get(one.name, [one]) for one in tensors)))


def _model(raw: Mapping[str, Any], code: Path | None) -> Any:
    """The model of a config.json without weights; None if transformers cannot build it, which others report."""
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
    """The linears in each tensor that holds all experts, by its name."""
    mapping = mapping_of(model)
    found: dict[str, list[OpaqueTensor]] = {}
    for tensor in tensors:
        if len(tensor.shape) == 3 and tensor.dtype in _FLOATS:
            for target, pattern in targets(model, [tensor.name], mapping).values():
                parts = list(_split(model, mapping, tensor, target, pattern))
                found |= {tensor.name: parts} if parts else {}
    return found


def _stacks(model: Any, tensors: Sequence[OpaqueTensor]) -> dict[str, list[OpaqueTensor]]:
    """Linears of experts that are separate tensors, by name, with their places in the one that transformers loads; none
    where it merges them."""
    there = {tensor.name: tensor for tensor in tensors}
    modules = dict.fromkeys(match[1] for name in there if (match := _OF_EXPERT.fullmatch(name)))
    wholes = targets(model, [f"{module}.{leaf}" for module in modules for leaf in _LINEARS])
    found: dict[str, list[OpaqueTensor]] = {}
    for name, (target, _) in wholes.items():
        whole = OpaqueTensor(name, tuple(model.get_parameter(target).shape), "float32")
        parts = [(there.get(part.name), part) for part in _split(model, (), whole, target, None)]
        own = [replace(one, stack=part.stack) for one, part in parts if one is not None and one.shape == part.shape]
        if own and len(own) == len(parts) and not targets(model, [own[0].name]):
            found |= {one.name: [one] for one in own}
    return found


def _split(
    model: Any, mapping: Sequence[Any], tensor: OpaqueTensor, target: str, pattern: str | None
) -> Iterator[OpaqueTensor]:
    """The linears of all experts in a tensor that becomes, or is part of, a parameter of transformers; none if it holds
    no experts, or they do not lie in rows or columns."""
    module, _, leaf = target.rpartition(".")
    experts = experts_of(model.get_submodule(module))
    if experts is None or experts.has_bias or leaf not in _LINEARS:
        return
    count, *matrix = tensor.shape
    numbers = torch.arange(matrix[0] * matrix[1], dtype=torch.int32).view(1, *matrix)
    if pattern is not None:
        try:
            numbers = merged(model, mapping, target, {tensor.name: (pattern, numbers)})
        except Exception:  # of the code of a converter
            return
    if numbers.shape[1:] != model.get_parameter(target).shape[1:]:
        return
    weight, linears = (numbers[0].t() if experts.is_transposed else numbers[0]), _LINEARS[leaf]
    rows = weight.chunk(len(linears)) if experts.is_concatenated else _alternate(weight, len(linears))
    places = [_place(own, matrix[1]) for own in rows]
    named = _experts_in(tensor.name) or module
    for expert in range(count):
        for linear, own, place in zip(linears, rows, places, strict=True):
            if place is None:
                return
            stack = Stack(tensor.name, tensor.shape, expert, *place)
            alias = None if named == module else f"{module}.{expert}.{linear}"
            name = f"{named}.{expert}.{linear}.weight"
            yield replace(tensor, name=name, shape=tuple(own.shape), stack=stack, alias=alias)


def _alternate(weight: Tensor, count: int) -> list[Tensor]:
    return [weight[index::count] for index in range(count)]


def _place(numbers: Tensor, width: int) -> tuple[int, int, bool] | None:
    """The first row of a weight [O, I] in a matrix of this width, the distance between rows, and whether rows are
    columns there; from the numbers of its elements there. None if it is none of this."""
    rows, columns = numbers // width, numbers % width
    for at, along, transposed in ((rows, columns, False), (columns, rows, True)):
        order = at[:, 0]
        first, step = int(order[0]), int(order[1] - order[0]) if len(order) > 1 else 1
        expected = torch.arange(len(order), dtype=at.dtype) * step + first
        whole = torch.arange(numbers.shape[1], dtype=along.dtype)
        if step > 0 and bool((at == expected.unsqueeze(1)).all()) and bool((along == whole).all()):
            return first, step, transposed
    return None


def _experts_in(name: str) -> str:
    """The module of experts that the name of a tensor states; empty if it does not."""
    parts = name.split(".")
    return ".".join(parts[: max((index + 1 for index, part in enumerate(parts) if "experts" in part), default=0)])
