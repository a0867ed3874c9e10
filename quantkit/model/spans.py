"""What attention sees in each layer of a model."""

from __future__ import annotations

from quantkit.architectures.config import ModelConfig
from quantkit.model.attention import Chunk, Span


def list_spans(config: ModelConfig) -> list[Span]:
    """List what a query sees in each layer: a window, its chunk, or all positions."""
    spans: list[Span] = []
    for layer in config.layers:
        if layer.chunk is None:
            spans.append(layer.window)
        else:
            spans.append(Chunk(layer.chunk))
    return spans
