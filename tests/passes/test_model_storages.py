"""Which memory belongs to a model, of which only some parts are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.passes.model_storages import ModelStorages

PARTS = 20


class _Layer(nn.Module):
    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
        self.cache = None


def _make(loaded: set[str]) -> tuple[nn.ModuleList, ModelStorages]:
    layers = nn.ModuleList(_Layer() for _ in range(PARTS))
    return layers, ModelStorages(layers, lambda name: name or None, loaded)


def _id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def test_parameters_of_loaded_parts_and_all_buffers_and_attributes_are_the_models() -> None:
    loaded = set[str]()
    layers: Any
    layers, storages = _make(loaded)
    layers.total = torch.ones(2)
    layers[0].weight = nn.Parameter(torch.ones(3), requires_grad=False)
    loaded.add("0")
    layers[0].cache = torch.ones(4)
    layers[0].register_buffer("table", torch.ones(5))
    expected = {layers.total, layers[0].weight, layers[0].cache, layers[0].table}
    assert storages.collect() >= {_id(tensor) for tensor in expected}
    # The code of a part may store tensors while it runs, and they stay when its weights are freed.
    loaded.remove("0")
    storages.leave_part("0")
    loaded.add("1")
    assert storages.collect() >= {_id(layers[0].cache), _id(layers[0].table)}


def test_attributes_that_were_there_before_belong_to_the_model() -> None:
    layers: Any = nn.ModuleList(_Layer() for _ in range(2))
    layers[1].register_buffer("table", torch.ones(5))
    storages = ModelStorages(layers, lambda name: name or None, {"0"})
    assert _id(layers[1].table) in storages.collect()


def test_modules_of_parts_that_are_not_loaded_are_not_visited() -> None:
    layers, storages = _make({"0"})
    visited = list[int]()

    class _Watched(dict[str, Any]):
        def values(self) -> Any:
            visited.append(id(self))
            return super().values()

    for layer in layers:
        layer._buffers = _Watched(layer._buffers)
    storages.collect()
    assert visited == [id(layers[0]._buffers)]
