"""Checkpoints of random weights in which every tensor shows."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.evals.synthetic import SyntheticCheckpoint
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice


class RandomVectors(SyntheticCheckpoint):
    """As the checkpoint it is made like, with norms, biases, sinks and corrections that differ."""

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        weight = self.draw(name)
        return weight if part is None else part.of_weight(weight)

    def draw(self, name: str) -> Tensor | QuantTensor:
        """Draw a whole tensor."""
        weight = super().load(name)
        if isinstance(weight, QuantTensor) or weight.dim() != 1:
            return weight
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return weight + torch.randn(weight.shape, generator=generator).to(weight.dtype) / 4


class RandomWeights(RandomVectors):
    """The same with quantized weights that are larger."""

    def draw(self, name: str) -> Tensor | QuantTensor:
        weight = super().draw(name)
        if isinstance(weight, QuantTensor):
            return replace(weight, scale=weight.scale * 8)
        return weight
