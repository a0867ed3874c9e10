"""Run a checkpoint block by block, its weights read from disk as they are needed.

Batches go through a block packed: their tokens lie one after the other, [1, N, D], so that each
weight is read once for all. Figures keep the bits that a batch gets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.kv_scales import layer_scales
from quantkit.model.attention import Scores, make_causal_attention
from quantkit.model.cache_rounding import CacheMaxima, Fp8Rounding
from quantkit.model.decoder import Block, Step, final_logits, rms_norm, scale_embeddings
from quantkit.model.linear import float32_linears
from quantkit.model.load import BLOCK_PREFIX, float_parameter, meta_init
from quantkit.model.rope import Rotary
from quantkit.model.rounded_inputs import as_multiplied
from quantkit.model.tensor_parallel import TensorParallel

TOKENS_THROUGH_A_BLOCK = 2048
"""Packed at most, unless one batch has more."""

Observe = Callable[[str, Tensor], None]
"""Called with the name of a linear and its inputs, [1, N, I] or [N, I]."""


@dataclass(frozen=True)
class Batch:
    """Token sequences [B, T] at rising positions [T]."""

    tokens: Tensor
    positions: Tensor

    @classmethod
    def from_start(cls, tokens: Tensor) -> Batch:
        """Sequences at positions 0, 1, 2, ..."""
        return cls(tokens, torch.arange(tokens.shape[1]))


class _Pack:
    """Batches one after the other: tokens [1, N], each of which attends only to its own
    sequence.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        config: ModelConfig,
        rotary: Rotary,
        cache_dtype: torch.dtype | None,
    ) -> None:
        self.tokens = torch.cat([batch.tokens.flatten() for batch in batches]).unsqueeze(0)
        self.lengths = [batch.tokens.numel() for batch in batches]
        self._shapes = [batch.tokens.shape for batch in batches]
        self._attends = [
            make_causal_attention(batch.positions, config.windows, cache_dtype) for batch in batches
        ]
        positions = []
        for batch, shape in zip(batches, self._shapes, strict=True):
            positions.append(batch.positions.repeat(shape[0]))
        lengths = [position.amax() + 1 for position in positions]
        reach = []
        for length, position in zip(lengths, positions, strict=True):
            reach.append(length.expand(len(position)))
        self.step = Step(rotary(torch.cat(positions), torch.cat(reach)), self._attend)

    def _attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> Tensor:
        """Return an `Attend` for B = 1 and T = N."""
        # Each [B, T, H, Dh]
        by_batch = (self.split(heads.transpose(1, 2)) for heads in (queries, keys, values))
        own = []
        for parts in zip(*by_batch, strict=True):
            own.append([heads.transpose(1, 2) for heads in parts])
        mixed = []
        for attend, (q, k, v) in zip(self._attends, own, strict=True):
            mixed.append(attend(layer, q, k, v, scores))
        return torch.cat([one.flatten(0, 1) for one in mixed]).unsqueeze(0)

    def split(self, states: Tensor) -> list[Tensor]:
        """States [1, N, D] by batch, each [B, T, D]."""
        pieces = torch.split(states[0], self.lengths)
        result: list[Tensor] = []
        for piece, shape in zip(pieces, self._shapes, strict=True):
            result.append(torch.unflatten(piece, 0, shape))
        return result


@torch.inference_mode()
def layerwise_hidden(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    *,
    cache_dtype: torch.dtype | None = None,
    group: ProcessGroup = SINGLE,
    observe: Observe | None = None,
    maxima: Sequence[CacheMaxima] | None = None,
    progress: Progress = silent,
) -> list[Tensor]:
    """Hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU.

    Args:
        cache_dtype: keys and values are rounded as in a cache of this type; None leaves them as
            they are.
        group: the processes that share the model; each makes the same call and gets the same
            result.
        observe: called with the inputs of each linear, batch after batch.
        maxima: those of each layer, to be raised to the keys and values of a model whose cache is
            not quantized.

    Raises:
        RequestError: if this number of processes cannot share the model.
        CheckpointError: for scales of a quantized cache that are not positive, or do not fit its
            scheme.
    """
    tp = TensorParallel(checkpoint, group)
    checkpoint = tp.checkpoint
    config = tp.checkpoint.config
    rotary = Rotary(config)
    packs = [_Pack(some, config, rotary, cache_dtype) for some in _group_batches(batches)]
    scales = layer_scales(checkpoint)
    embedding = checkpoint.load("model.embed_tokens.weight")
    states = [
        scale_embeddings(tp.embed(pack.tokens, embedding).float(), config.embedding_multiplier)
        for pack in packs
    ]
    del embedding
    for layer in range(config.num_layers):
        progress("layers", layer, config.num_layers, "layers")
        for index, pack in enumerate(packs):
            block = build_offloaded_block(checkpoint, layer, pack.lengths, observe)
            if scales is not None:
                block.self_attn.as_cached = Fp8Rounding(scales[layer], "cpu")
            elif maxima is not None:
                block.self_attn.as_cached = maxima[layer]
            tp.connect(block, BLOCK_PREFIX.format(layer))
            states[index] = _through(block, states[index], pack.step)
    norm = rms_norm(config)
    norm.weight = _float32(checkpoint, "model.norm.weight")
    progress("layers", config.num_layers, config.num_layers, "layers")
    for index, state in enumerate(states):
        states[index] = norm(state)
    return [own for pack, state in zip(packs, states, strict=True) for own in pack.split(state)]


def _through(block: Block, states: Tensor, step: Step) -> Tensor:
    """Hidden states [1, N, D] after a block; where there are more than the usual, the feed-forward,
    whose inner width is several times D, takes some of them at a time.
    """
    attention, feed_forward = block.BRANCHES
    states = block.finish(attention, states, block.inner(attention, states, step))
    pieces = torch.split(states, TOKENS_THROUGH_A_BLOCK, dim=1)
    return torch.cat(
        [
            block.finish(feed_forward, piece, block.inner(feed_forward, piece, step))
            for piece in pieces
        ],
        dim=1,
    )


@torch.inference_mode()
def head_logits(
    checkpoint: Checkpoint, hidden: Sequence[Tensor], *, group: ProcessGroup = SINGLE
) -> list[Tensor]:
    """Logits [N, V] of each of some hidden states [N, D], in float32; the head is read once, and
    taken in pieces. The processes of a group share it as in `layerwise_hidden`.
    """
    tp = TensorParallel(checkpoint, group)
    head = tp.checkpoint.load(resolve_stored_name(tp.checkpoint, "lm_head.weight"))
    logits = float32_linears([as_multiplied(checkpoint, "lm_head", one) for one in hidden], head)
    # The largest tensor there is, and with two models at hand there are two.
    del head
    return [final_logits(tp.gather_logits(logit), checkpoint.config) for logit in logits]


def _group_batches(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Batches in order, as many together as may be packed."""
    group: list[Batch] = []
    for batch in batches:
        if (
            group
            and sum(one.tokens.numel() for one in group) + batch.tokens.numel()
            > TOKENS_THROUGH_A_BLOCK
        ):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


class OffloadedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32, the weight read at every call, some rows at a time.

    The tokens of several sequences, one after the other, are multiplied sequence by sequence: a
    matrix product's bits depend on its size. Those that are sent to an expert, [N, I], are
    multiplied together, and so is a piece of them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        bias: bool,
        lengths: Sequence[int],
        observe: Observe | None = None,
    ) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._name = name
        self._bias = bias
        self._lengths = list(lengths)
        self._observe = observe

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, I] or [N, I] float32 to as many rows of O."""
        if self._observe is not None:
            self._observe(self._name, x)
        x = as_multiplied(self._checkpoint, self._name, x)
        weight = self._checkpoint.load(self._name + ".weight")
        whole = x.dim() == 3 and x.shape[1] == sum(self._lengths)
        parts = torch.split(x, self._lengths, dim=1) if whole else [x]
        out = torch.cat(float32_linears(parts, weight), dim=-2)
        if self._bias:
            out += _float32(self._checkpoint, self._name + ".bias")
        return out


def build_offloaded_block(
    checkpoint: Checkpoint, layer: int, lengths: Sequence[int], observe: Observe | None = None
) -> Block:
    """Return one decoder layer on the CPU in float32, of which only the norms are in memory. Its
    input [1, N, D] has sequences of these lengths, one after the other; their sum is N.
    """
    with meta_init():
        block = Block(checkpoint.config, layer)
    prefix = BLOCK_PREFIX.format(layer)
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            bias = module.bias is not None
            block.set_submodule(
                name, OffloadedLinear(checkpoint, prefix + name, bias, lengths, observe)
            )
        else:
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    setattr(
                        module,
                        own,
                        _float32(checkpoint, f"{prefix}{name}.{own}" if name else prefix + own),
                    )
    return block.eval()


def _float32(checkpoint: Checkpoint, name: str) -> nn.Parameter:
    return float_parameter(checkpoint, name, torch.device("cpu"), torch.float32)
