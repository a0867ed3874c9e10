"""The loss of a model on samples, and its gradients, block by block: one block's weights are in
memory at a time.

A forward pass keeps the inputs of every block; the backward pass computes each block again (three
times the work of a forward pass, all in float32), and hands the gradients of its weights over
before it goes on. Of several processes each computes with its share of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.calibration.effort import batch_samples
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.model.decoder import Block, final_logits, scale_embeddings
from quantkit.model.head_product import differentiate_logits, multiply_by_head
from quantkit.model.load import BLOCK_PREFIX, fill_parameters, float_parameter, meta_init
from quantkit.model.norms import RMSNorm, hidden_norm
from quantkit.model.samples import make_sample_step
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.shares import SharedBlock, Shares, get_local_parameter

TOKENS_THROUGH_THE_HEAD = 256

Gradients = Callable[[str, Tensor | None], None]
"""Receives the name of a tensor, and the gradient by the values of this process's part of it,
float32 on the device of the pass; None if no token reached it, as may happen to an expert.
"""


class Passes:
    """Runs a model whose weights may change between two calls, on samples of one length."""

    def __init__(
        self,
        model: Checkpoint,
        reference: Checkpoint,
        length: int,
        device: torch.device,
        shares: Shares,
    ) -> None:
        """
        Args:
            reference: the model whose logits are the target.
            length: the tokens of each sample.

        Raises:
            UnsupportedError: for a model whose layers pass more than hidden states to later ones.
        """
        config = model.config
        if config.layer_inputs is not None or any(layer.shares_kv for layer in config.layers):
            # Gradients would have to go from layers to earlier ones past the hidden states.
            raise UnsupportedError(
                "training a model with embeddings for each layer, or shared keys and values, is not"
                " supported",
                path=model.path,
                found=config.architecture,
            )
        self._model = shares.model.checkpoint
        self._device = device
        self._shares = shares
        self._config = self._model.config
        self._step = make_sample_step(self._config, length, device)
        self._together = batch_samples(model.config, length)
        self._embedding = self._model.load("model.embed_tokens.weight")
        self._heads = [_floats(shares.head_of(model)), _floats(shares.head_of(reference))]

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> float:
        """Sum KL(reference || model) over tokens [B, T], in nats, given the reference's hidden
        states after its final norm, [B, T, D].
        """
        states = self._embed_tokens(tokens)
        for layer in range(self._config.num_layers):
            block = self._block(layer)
            states = [block(state, self._step) for state in states]
        normed = self._norm()(torch.cat(states)).flatten(0, 1)
        return self._divergence(normed, targets.flatten(0, 1), None)

    def gradients(
        self,
        tokens: Tensor,
        targets: Tensor,
        trained: Sequence[Sequence[str]],
        receive: Gradients,
        count: int,
    ) -> float:
        """Sum KL(reference || model) over tokens [B, T], divided by a count of tokens, and pass its
        gradients to `receive`, layer by layer from the last one; a layer's weights may then change.

        Args:
            targets: as in `loss`.
            trained: the names of tensors whose gradients are computed, by layer; last those without
                a layer.
            count: of all tokens of a step, those of other processes too.
        """
        states = self._embed_tokens(tokens)
        inputs: list[list[Tensor]] = []
        # Without autograd's graph, which would keep every block's weights and activations.
        with torch.no_grad():
            for layer in range(self._config.num_layers):
                block = self._block(layer)
                inputs.append(states)
                states = [block(state, self._step) for state in states]
        norm = self._norm()
        norm.weight.requires_grad_("model.norm.weight" in trained[-1])
        last = torch.cat(states).requires_grad_()
        normed = norm(last)
        # `_divergence` computes the gradient itself, for some rows at a time, because the logits of
        # all tokens would need much memory.
        gradient = torch.empty_like(normed).flatten(0, 1)
        total = self._divergence(normed.detach().flatten(0, 1), targets.flatten(0, 1), gradient)
        normed.backward(gradient.view_as(normed).div_(count))
        assert last.grad is not None
        if norm.weight.grad is not None:
            receive("model.norm.weight", norm.weight.grad)
        gradients = list(torch.split(last.grad, self._together))
        # Blocks before the first trained tensor need no gradients.
        lowest = self._config.num_layers
        for layer, names in enumerate(trained[:-1]):
            if names:
                lowest = layer
                break
        for layer in reversed(range(lowest, self._config.num_layers)):
            gradients = self._backward(
                layer, inputs.pop(), gradients, trained[layer], receive, is_last=layer == lowest
            )
        return total / count

    def _backward(
        self,
        layer: int,
        inputs: list[Tensor],
        gradients: list[Tensor],
        trained: Sequence[str],
        receive: Gradients,
        *,
        is_last: bool,
    ) -> list[Tensor]:
        """Compute the gradients by a block's inputs, given those by its outputs; none for the last
        block of the pass.
        """
        block = self._block(layer)
        prefix = BLOCK_PREFIX.format(layer)
        parameters: dict[str, torch.nn.Parameter] = {}
        for name in trained:
            parameters[name] = get_local_parameter(block, name.removeprefix(prefix))
        for parameter in parameters.values():
            parameter.requires_grad_()
        input_gradients: list[Tensor] = []
        for states, gradient in zip(inputs, gradients, strict=True):
            states.requires_grad_(not is_last)
            block(states, self._step).backward(gradient)
            if states.grad is not None:
                input_gradients.append(states.grad)
        # After all samples, because the gradients by parameters add up.
        for name, parameter in parameters.items():
            receive(name, parameter.grad)
        return input_gradients

    def _embed_tokens(self, tokens: Tensor) -> list[Tensor]:
        """Compute the first block's inputs, float32, some samples at a time."""
        multiplier = self._config.embedding_multiplier
        states: list[Tensor] = []
        for batch in torch.split(tokens, self._together):
            rows = self._shares.model.embed(batch, rows=self._embedding)
            states.append(scale_embeddings(rows.float().to(self._device), multiplier))
        return states

    def _block(self, layer: int) -> Block:
        with meta_init():
            block = SharedBlock(self._config, layer, self._shares)
        prefix = BLOCK_PREFIX.format(layer)
        fill_parameters(block, _Float32(self._model), prefix, self._device, torch.float32, ())
        self._shares.model.connect(block, prefix)
        return block.eval()

    def _norm(self) -> RMSNorm:
        norm = hidden_norm(self._config)
        norm.weight = float_parameter(self._model, "model.norm.weight", self._device, torch.float32)
        return norm

    def _divergence(self, hidden: Tensor, targets: Tensor, gradient: Tensor | None) -> float:
        """Sum KL over rows [N, D], and write its gradient by the rows to `gradient`, if given."""
        model_head, reference_head = self._heads
        total = 0.0
        for start in range(0, len(hidden), TOKENS_THROUGH_THE_HEAD):
            rows = slice(start, start + TOKENS_THROUGH_THE_HEAD)
            logits = self._logits(hidden[rows].to(self._device), model_head)
            expected = self._logits(targets[rows].to(self._device), reference_head)
            divergence, by_logits = measure_divergence(logits, expected)
            total += divergence
            if gradient is not None:
                slice_logits = self._shares.model.slice_local_logits
                # Each process has some rows of the head, and adds its part of the gradient.
                local_gradient = differentiate_logits(
                    slice_logits(by_logits), slice_logits(logits), model_head, self._config
                )
                gradient[rows] = self._shares.model.add_up(local_gradient)
        return total

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        local_logits = multiply_by_head(hidden, head)
        return final_logits(self._shares.model.gather_logits(local_logits), self._config)


def measure_divergence(logits: Tensor, expected: Tensor) -> tuple[float, Tensor]:
    """Sum KL(p || q) over tokens, in nats, for logits [N, V] of q and the expected logits of p.

    Returns:
        The sum, and its gradient by the logits of q.
    """
    log_q = logits.log_softmax(-1)
    log_p = expected.log_softmax(-1)
    p = log_p.exp()
    # Added in float64: the KL of an accurate model is tiny, and its terms have both signs.
    total = (p * (log_p - log_q)).sum(-1, dtype=torch.float64).sum().item()
    return total, log_q.exp_().sub_(p)


class _Float32(CheckpointView):
    """A checkpoint whose weights are all read as float32."""

    def info(self, name: str) -> TensorSpec:
        return TensorSpec(name, self._source.info(name).shape, DType.FLOAT32)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor:
        return _floats(self._source.load(name, part)).float()


def _floats(value: Tensor | QuantTensor) -> Tensor:
    if isinstance(value, QuantTensor):
        return value.dequantize()
    return value
