"""Run a checkpoint block by block, reading its weights from disk when they are needed.

Batches run through a block packed: the tokens of all batches are concatenated, [1, N, D], so that
each weight is read once for all of them. The results have the same bits as if each batch ran alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.kv_scales import layer_scales
from quantkit.model.attention import Attend, ScoreSettings, make_causal_attention
from quantkit.model.cache_rounding import CacheMaxima, Fp8Rounding
from quantkit.model.decoder import Block, final_logits, scale_embeddings
from quantkit.model.layer_inputs import LayerInputs
from quantkit.model.linear import embedding_rows, float32_linears
from quantkit.model.load import BLOCK_PREFIX, float_parameter, meta_init
from quantkit.model.mixers.attention import Attention
from quantkit.model.mixers.mixer import Recurrence, Step, scan_from_start
from quantkit.model.norms import hidden_norm
from quantkit.model.rope import Rotary
from quantkit.model.rounded_inputs import round_inputs
from quantkit.model.spans import list_spans
from quantkit.model.tensor_parallel import TensorParallel

TOKENS_THROUGH_A_BLOCK = 2048
"""The maximum number of packed tokens, unless one batch has more."""

Observe = Callable[[str, Tensor], None]
"""Called with the name of a linear and its inputs, [1, N, I] or [N, I]."""


@dataclass(frozen=True)
class Batch:
    """Token sequences [B, T] at rising positions [T]."""

    tokens: Tensor
    positions: Tensor

    @classmethod
    def from_start(cls, tokens: Tensor) -> Batch:
        """Make a batch of sequences at positions 0, 1, 2, ..."""
        return cls(tokens, torch.arange(tokens.shape[1]))


class _Pack:
    """Concatenated batches: tokens [1, N], each of which attends only to its own sequence."""

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
        self._attends: list[Attend] = []
        positions: list[Tensor] = []
        # Some rotary scalings depend on the length, so each token has that of its own sequence.
        lengths: list[Tensor] = []
        for batch in batches:
            self._attends.append(
                make_causal_attention(batch.positions, list_spans(config), cache_dtype)
            )
            batch_positions = batch.positions.repeat(batch.tokens.shape[0])
            positions.append(batch_positions)
            lengths.append((batch_positions.amax() + 1).expand(len(batch_positions)))
        angles = rotary(torch.cat(positions), torch.cat(lengths))
        self.step = Step(angles, self._attend, self._scan)

    def _attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: ScoreSettings
    ) -> Tensor:
        """Apply attention to each batch separately: an `Attend` for B = 1 and T = N."""
        # By batch, each [B, T, H, Dh].
        batch_queries = self.split(queries.transpose(1, 2))
        batch_keys = self.split(keys.transpose(1, 2))
        batch_values = self.split(values.transpose(1, 2))
        mixed: list[Tensor] = []
        for attend, q, k, v in zip(
            self._attends, batch_queries, batch_keys, batch_values, strict=True
        ):
            attended = attend(
                layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scores
            )
            mixed.append(attended.flatten(0, 1))
        return torch.cat(mixed).unsqueeze(0)

    def _scan(self, layer: int, recurrence: Recurrence, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run a recurrence over each batch separately: a `Scan` for B = 1 and T = N."""
        outputs: list[Tensor] = []
        for batch_inputs in zip(*map(self.split, inputs), strict=True):
            outputs.append(scan_from_start(layer, recurrence, batch_inputs).flatten(0, 1))
        return torch.cat(outputs).unsqueeze(0)

    def split(self, states: Tensor) -> list[Tensor]:
        """Split states [1, N, D] by batch, each [B, T, D]."""
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
    """Compute hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU.

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
    packs = [_Pack(packed, config, rotary, cache_dtype) for packed in _group_batches(batches)]
    scales = layer_scales(checkpoint)
    embedding = checkpoint.load("model.embed_tokens.weight")
    states: list[Tensor] = []
    for pack in packs:
        embedded = tp.embed(pack.tokens, embedding).float()
        states.append(scale_embeddings(embedded, config.embedding_multiplier))
    # Often the largest weight; the blocks do not need it.
    del embedding
    if config.layer_inputs is not None:
        _add_layer_inputs(checkpoint, packs, states)
    for layer in range(config.num_layers):
        progress("layers", layer, config.num_layers, "layers")
        for index, pack in enumerate(packs):
            # An offloaded block is made for the sequence lengths of one pack, and has no weights in
            # memory but norms.
            block = build_offloaded_block(checkpoint, layer, pack.lengths, observe)
            # Another layer's keys and values are rounded already.
            if isinstance(block.mixer, Attention) and block.mixer.source is None:
                if scales is not None:
                    block.mixer.as_cached = Fp8Rounding(scales[layer], "cpu")
                elif maxima is not None:
                    block.mixer.as_cached = maxima[layer]
            tp.connect(block, BLOCK_PREFIX.format(layer))
            states[index] = _run_block(block, states[index], pack.step)
    norm = hidden_norm(config)
    norm.weight = _float32(checkpoint, "model.norm.weight")
    progress("layers", config.num_layers, config.num_layers, "layers")
    for index, state in enumerate(states):
        states[index] = norm(state)
    batch_states: list[Tensor] = []
    for pack, state in zip(packs, states, strict=True):
        batch_states.extend(pack.split(state))
    return batch_states


def _add_layer_inputs(
    checkpoint: Checkpoint, packs: Sequence[_Pack], states: Sequence[Tensor]
) -> None:
    """Compute the vectors of each layer for all packs, whose embedded tokens are `states`."""
    config = checkpoint.config
    with meta_init():
        module = LayerInputs(config)
    module.projection.weight = _float32(checkpoint, "model.layer_inputs.projection.weight")
    module.norm.weight = _float32(checkpoint, "model.layer_inputs.norm.weight")
    embedding = checkpoint.load("model.layer_inputs.embedding.weight")
    for pack, state in zip(packs, states, strict=True):
        rows = embedding_rows(pack.tokens, embedding).float()
        pack.step = replace(pack.step, layer_inputs=module.combine(rows, state))


def _run_block(block: Block, states: Tensor, step: Step) -> Tensor:
    """Run a block on hidden states [1, N, D]. The feed-forward, whose inner width is several times
    D, processes at most `TOKENS_THROUGH_A_BLOCK` of them at a time.
    """
    mixed = states
    if "mixer" in block.branches:
        mixed = block.finish("mixer", states, block.inner("mixer", states, step))
    if "mlp" in block.branches:
        sources = block.choose_feed_forward_input(states, mixed)
        outputs: list[Tensor] = []
        for piece, source in zip(
            torch.split(mixed, TOKENS_THROUGH_A_BLOCK, dim=1),
            torch.split(sources, TOKENS_THROUGH_A_BLOCK, dim=1),
            strict=True,
        ):
            outputs.append(block.finish("mlp", piece, block.inner("mlp", source, step)))
        mixed = torch.cat(outputs, dim=1)
    return block.complete(mixed, step)


@torch.inference_mode()
def head_logits(
    checkpoint: Checkpoint, hidden: Sequence[Tensor], *, group: ProcessGroup = SINGLE
) -> list[Tensor]:
    """Compute logits [N, V] of several hidden states [N, D], in float32. The head is read once, and
    converted to float32 in pieces. The processes of a group share it as in `layerwise_hidden`.
    """
    tp = TensorParallel(checkpoint, group)
    head = tp.checkpoint.load(resolve_stored_name(tp.checkpoint, "lm_head.weight"))
    inputs = [round_inputs(checkpoint, "lm_head", states) for states in hidden]
    logits = float32_linears(inputs, head)
    # Often the largest weight. A caller that compares two models would otherwise have two of them
    # in memory.
    del head
    return [final_logits(tp.gather_logits(logit), checkpoint.config) for logit in logits]


def _group_batches(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Yield the batches in order, in groups of as many as can be packed."""
    group: list[Batch] = []
    group_tokens = 0
    for batch in batches:
        batch_tokens = batch.tokens.numel()
        if group and group_tokens + batch_tokens > TOKENS_THROUGH_A_BLOCK:
            yield group
            group = []
            group_tokens = 0
        group.append(batch)
        group_tokens += batch_tokens
    if group:
        yield group


class OffloadedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32; every call reads the weight, in chunks of rows.

    The tokens of concatenated sequences are multiplied sequence by sequence, because the bits of a
    matrix product depend on its size. Tokens routed to an expert, [N, I], and pieces of the packed
    tokens are multiplied together.
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
        """Multiply [1, N, I] or [N, I] float32 to as many rows of O."""
        if self._observe is not None:
            self._observe(self._name, x)
        x = round_inputs(self._checkpoint, self._name, x)
        weight = self._checkpoint.load(self._name + ".weight")
        parts: Sequence[Tensor] = [x]
        if x.dim() == 3 and x.shape[1] == sum(self._lengths):
            parts = torch.split(x, self._lengths, dim=1)
        out = torch.cat(float32_linears(parts, weight), dim=-2)
        if self._bias:
            out += _float32(self._checkpoint, self._name + ".bias")
        return out


def build_offloaded_block(
    checkpoint: Checkpoint, layer: int, lengths: Sequence[int], observe: Observe | None = None
) -> Block:
    """Build one decoder layer on the CPU in float32 with only its norms in memory. Its input
    [1, N, D] contains sequences of these lengths, concatenated; their sum is N.
    """
    with meta_init():
        block = Block(checkpoint.config, layer)
    prefix = BLOCK_PREFIX.format(layer)
    # A list, because the loop replaces modules.
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            bias = module.bias is not None
            block.set_submodule(
                name, OffloadedLinear(checkpoint, prefix + name, bias, lengths, observe)
            )
        else:
            # The block itself has the name "".
            module_prefix = f"{prefix}{name}." if name else prefix
            for parameter_name, parameter in module._parameters.items():
                if parameter is not None:
                    stored = _float32(checkpoint, module_prefix + parameter_name)
                    setattr(module, parameter_name, stored)
    return block.eval()


def _float32(checkpoint: Checkpoint, name: str) -> nn.Parameter:
    return float_parameter(checkpoint, name, torch.device("cpu"), torch.float32)
