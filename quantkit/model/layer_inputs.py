"""Embeddings for each layer, as in Gemma 4: every token has a small vector for each layer, which
the layer adds to its hidden states through a gate.

B batch, T new positions, D hidden size, L layers, P size of the vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.kernels.backend import apply_gate
from quantkit.model.norms import hidden_norm, rms_norm


class LayerInputs(nn.Module):
    """Computes the vectors of all layers: half of each from an embedding of its own, half from the
    token's usual embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.layer_inputs is not None
        self.size = config.layer_inputs.size
        width = config.num_layers * self.size
        self.embedding = nn.Embedding(config.layer_inputs.vocab_size, width)
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.norm = rms_norm(config, self.size)

    def forward(self, tokens: Tensor, x: Tensor) -> list[Tensor]:
        """Compute the vectors [B, T, P] of each layer for tokens [B, T] with embeddings x
        [B, T, D].
        """
        return self.combine(self.embedding(tokens).to(x.dtype), x)

    def combine(self, rows: Tensor, x: Tensor) -> list[Tensor]:
        """Compute the vectors [B, T, P] of each layer from rows [B, T, L * P] of the embedding, in
        the dtype of x, and x [B, T, D].
        """
        # Rounded to the dtype first, as the multiplier of other embeddings.
        multiplier = torch.tensor(math.sqrt(self.size), dtype=x.dtype).item()
        embedded = torch.unflatten(rows * multiplier, -1, (-1, self.size))
        projected = self.projection(x) * x.shape[-1] ** -0.5
        normed = self.norm(torch.unflatten(projected, -1, (-1, self.size)))
        return list(((normed + embedded) * 2**-0.5).unbind(-2))


class LayerInput(nn.Module):
    """What a layer adds to its hidden states for its vectors: a gate computed from the former."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.layer_inputs is not None
        self._activation = config.activation
        size = config.layer_inputs.size
        self.gate = nn.Linear(config.hidden_size, size, bias=False)
        self.projection = nn.Linear(size, config.hidden_size, bias=False)
        self.norm = hidden_norm(config)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Compute the output [B, T, D] for hidden states [B, T, D] and vectors [B, T, P]."""
        out: Tensor = self.norm(
            self.projection(apply_gate(self.gate(x), vectors, self._activation, None))
        )
        return out
