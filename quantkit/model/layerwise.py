"""Run a checkpoint layer by layer, its weights read from disk as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import Block, RMSNorm, Step
from quantkit.model.linear import float32_linear
from quantkit.model.load import BLOCK_PREFIX, fill, meta_init
from quantkit.model.rope import Rotary
from quantkit.model.tensor_parallel import TensorParallel
from quantkit.progress import Progress, silent


@dataclass(frozen=True)
class Batch:
    """Token sequences [B, T] at rising positions [T]."""

    tokens: Tensor
    positions: Tensor

    @classmethod
    def from_start(cls, tokens: Tensor) -> Batch:
        """Sequences at positions 0, 1, 2, ..."""
        return cls(tokens, torch.arange(tokens.shape[1]))


@torch.inference_mode()
def layerwise_hidden(
    checkpoint: Checkpoint, batches: Sequence[Batch], *, group: ProcessGroup = SINGLE, progress: Progress = silent
) -> list[Tensor]:
    """Hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU.

    Args:
        group: the processes that share the model; each calls this alike and gets the same.

    Raises:
        RequestError: if so many processes cannot share the model.
    """
    tp = TensorParallel(checkpoint, group)
    checkpoint, config = tp.checkpoint, tp.checkpoint.config
    embedding = _tensor(checkpoint, "model.embed_tokens.weight")
    states = [tp.embed(batch.tokens, embedding).float() for batch in batches]
    del embedding
    rotary = Rotary(config)
    steps = [Step(rotary(batch.positions), causal_attention(batch.positions, config.windows)) for batch in batches]
    for layer in range(config.num_layers):
        progress(layer, config.num_layers, f"layer {layer}")
        block = offloaded_block(checkpoint, layer)
        tp.connect(block, BLOCK_PREFIX.format(layer))
        for index, state in enumerate(states):
            states[index] = block(state, steps[index])
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight = nn.Parameter(_tensor(checkpoint, "model.norm.weight").float(), requires_grad=False)
    progress(config.num_layers, config.num_layers, "")
    for index, state in enumerate(states):
        states[index] = norm(state)
    return states


@torch.inference_mode()
def head_logits(checkpoint: Checkpoint, hidden: Tensor, *, group: ProcessGroup = SINGLE) -> Tensor:
    """Logits [N, V] of hidden states [N, D], in float32; `group` as in `layerwise_hidden`."""
    tp = TensorParallel(checkpoint, group)
    tied = checkpoint.config.tied_embeddings
    head = tp.checkpoint.load("model.embed_tokens.weight" if tied else "lm_head.weight")
    logits = float32_linear(hidden, head)
    del head  # the largest tensor of a model, and where two models are compared there are two
    return tp.gather_logits(logits)


class OffloadedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32; the weight stays on disk and is read at every call."""

    def __init__(self, checkpoint: Checkpoint, name: str, bias: bool) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._name = name
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] float32 to [..., O] float32."""
        weight = self._checkpoint.load(self._name + ".weight")
        out = float32_linear(x, weight)
        if self._bias:
            bias = self._checkpoint.load(self._name + ".bias")
            assert isinstance(bias, Tensor)
            out += bias
        return out


def offloaded_block(checkpoint: Checkpoint, layer: int) -> Block:
    """One decoder layer on the CPU in float32, its linears offloaded; only the norms are in memory."""
    with meta_init():
        block = Block(checkpoint.config, layer)
    prefix = BLOCK_PREFIX.format(layer)
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            linear = OffloadedLinear(checkpoint, prefix + name, module.bias is not None)
            setattr(block.get_submodule(parent), child, linear)
        elif "weight" in module._parameters:
            fill(module, checkpoint, f"{prefix}{name}.", torch.device("cpu"), torch.float32, None)
    return block.eval()


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.load(name)
    assert isinstance(value, Tensor)
    return value
