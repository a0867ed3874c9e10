"""Which arrays are trained, and how the values of a training are put on devices and fetched from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.formats.checkpoint import Checkpoint
from quantkit.training.optimizer import FIRST, SECOND, tensor_rate
from quantkit.training.trained import TrainedNames
from quantkit.xla.training.arrays import Leaf, leaves
from quantkit.xla.training.partitions import DeviceMesh
from quantkit.xla.training.program import Trained


def select_trained_leaves(quantized: Checkpoint, names: TrainedNames) -> list[Leaf]:
    """Return the scales and norms that are trained."""
    weights = set(names.weights)
    norms = set(names.norms)
    result: list[Leaf] = []
    for leaf in leaves(quantized):
        if leaf.tensors[0] in norms or (leaf.kind == "scale" and leaf.tensors[0] in weights):
            result.append(leaf)
    return result


def rates(quantized: Checkpoint, trained: Iterable[Leaf]) -> dict[str, float]:
    """Return the largest step of each array's factors."""
    config: ModelConfig = quantized.config
    result: dict[str, float] = {}
    for leaf in trained:
        result[leaf.key] = tensor_rate(config, quantized.info(leaf.tensors[0]).scheme)
    return result


def abstract_trained(trained: Iterable[Leaf], mesh: DeviceMesh) -> Trained:
    """Return what `put` gives, without values."""
    one = {leaf.key: mesh.abstract(leaf.shape, jnp.float32, leaf.spec) for leaf in trained}
    return Trained(one, dict(one), dict(one))


def put(
    trained: Iterable[Leaf],
    mesh: DeviceMesh,
    factors: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> Trained:
    """Factors and moments by the names of tensors, on the devices."""

    def put_leaf(leaf: Leaf, value: Callable[[str], Tensor]) -> jax.Array:
        found = np.stack([value(name).numpy() for name in leaf.tensors]).reshape(leaf.shape)
        return jax.device_put(found, mesh.sharding(leaf.spec, leaf.shape))

    result = Trained({}, {}, {})
    for leaf in trained:
        result.factors[leaf.key] = put_leaf(leaf, lambda name: factors[name])
        result.first[leaf.key] = put_leaf(leaf, lambda name: moments[name + FIRST])
        result.second[leaf.key] = put_leaf(leaf, lambda name: moments[name + SECOND])
    return result


def fetch(
    trained: Iterable[Leaf],
    values: Trained,
    factors: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    """Give factors and moments the values that are on the devices."""
    for leaf in trained:
        for array, kept, end in (
            (values.factors, factors, ""),
            (values.first, moments, FIRST),
            (values.second, moments, SECOND),
        ):
            found: Any = np.asarray(array[leaf.key]).reshape(len(leaf.tensors), -1)
            for name, own in zip(leaf.tensors, found, strict=True):
                kept[name + end].copy_(torch.from_numpy(own.copy()).view_as(kept[name + end]))
