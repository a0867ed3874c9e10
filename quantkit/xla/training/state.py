"""Select the trained arrays, and copy the values of a training to devices and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Select the scales and norms that are trained."""
    weights = set(names.weights)
    norms = set(names.norms)
    result: list[Leaf] = []
    for leaf in leaves(quantized):
        # The layers of a segment are trained together, so its first tensor decides.
        if leaf.tensors[0] in norms or (leaf.kind == "scale" and leaf.tensors[0] in weights):
            result.append(leaf)
    return result


def rates(quantized: Checkpoint, trained: Iterable[Leaf]) -> dict[str, float]:
    """Compute the largest step of each array's factors."""
    config: ModelConfig = quantized.config
    result: dict[str, float] = {}
    for leaf in trained:
        result[leaf.key] = tensor_rate(config, quantized.info(leaf.tensors[0]).scheme)
    return result


def abstract_trained(trained: Iterable[Leaf], mesh: DeviceMesh) -> Trained:
    """Describe the arrays of `put` without values."""
    arrays: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf in trained:
        arrays[leaf.key] = mesh.abstract(leaf.shape, jnp.float32, leaf.spec)
    return Trained(arrays, dict(arrays), dict(arrays))


def put(
    trained: Iterable[Leaf],
    mesh: DeviceMesh,
    factors: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> Trained:
    """Copy factors and moments, by the names of tensors, to the devices."""

    def put_leaf(leaf: Leaf, values: Mapping[str, Tensor], end: str) -> jax.Array:
        parts = [values[name + end].numpy() for name in leaf.tensors]
        # One tensor for each layer of a segment; the first axis is absent outside the layers.
        stacked = np.stack(parts).reshape(leaf.shape)
        return jax.device_put(stacked, mesh.sharding(leaf.spec, leaf.shape))

    result = Trained({}, {}, {})
    for leaf in trained:
        result.factors[leaf.key] = put_leaf(leaf, factors, "")
        result.first[leaf.key] = put_leaf(leaf, moments, FIRST)
        result.second[leaf.key] = put_leaf(leaf, moments, SECOND)
    return result


def fetch(
    trained: Iterable[Leaf],
    values: Trained,
    factors: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    """Copy factors and moments from the devices into the tensors."""
    for leaf in trained:
        for arrays, targets, end in (
            (values.factors, factors, ""),
            (values.first, moments, FIRST),
            (values.second, moments, SECOND),
        ):
            layers: Any = np.asarray(arrays[leaf.key]).reshape(len(leaf.tensors), -1)
            for name, layer in zip(leaf.tensors, layers, strict=True):
                target = targets[name + end]
                # A copy, because arrays of JAX are read-only.
                target.copy_(torch.from_numpy(layer.copy()).view_as(target))
