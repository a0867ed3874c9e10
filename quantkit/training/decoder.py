"""Train quantkit's decoder, by one process or by those of a mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView
from quantkit.model.decoder import Backbone, Block, final_logits
from quantkit.model.head_product import differentiate_logits, multiply_by_head
from quantkit.model.load import BLOCK_PREFIX, float_parameter
from quantkit.model.norms import RMSNorm, hidden_norm
from quantkit.model.tensor_parallel import ParallelLinear
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Passage
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.blockwise import (
    TOKENS_THROUGH_THE_HEAD,
    Blockwise,
    Place,
    measure_divergence,
)
from quantkit.training.optimizer import Schedule
from quantkit.training.shares import SharedBlock, Shares
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Samples

FINAL_NORM = "model.norm.weight"


def make_decoder_engine(
    model: TrainedCheckpoint,
    reference: Checkpoint,
    samples: Samples,
    schedule: Schedule,
    device: torch.device,
    mesh: Mesh = ALONE,
) -> Blockwise:
    """Make the engine that trains a model of a known family.

    Args:
        reference: the float model.

    Raises:
        RequestError: if the processes of a mesh cannot share the model.
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
    shares = Shares(model, mesh)
    decoder = SharedDecoder(shares, samples.tokens.shape[1], device)
    places: dict[str, Place] = {}
    for layer in range(model.config.num_layers):
        trained = model.names_trained.in_layer(layer)
        for name in (*trained.weights, *trained.norms):
            block = BLOCK_PREFIX.format(layer).removesuffix(".")
            places[name] = Place(block, (decoder.find_parameter(name),))
    return Blockwise(
        model,
        # Returning each block's memory costs 10 % of the time for a model of 7 M parameters.
        Passage(decoder, model.path, returns_memory=False),
        places,
        DecoderHead(shares, model, reference, device),
        shares=shares,
        samples=samples,
        schedule=schedule,
    )


class SharedDecoder(DecoderParts):
    """This process's share of the decoder's embedding and blocks, in float32; see `PartwiseModel`.
    A block is one part.
    """

    def __init__(self, shares: Shares, length: int, device: torch.device) -> None:
        self._shares = shares
        # Embeddings do not change, so they stay in memory as they are stored.
        self._embedding = _SharedEmbedding(shares)
        super().__init__(_Float32(shares.model.checkpoint), length, device)
        # The parameters have their names of before.
        shares.model.connect(self.model, "")

    def find_parameter(self, name: str) -> str:
        """Find the name that a parameter has here, given its name in the checkpoint."""
        owner, _, leaf = name.rpartition(".")
        if isinstance(self.model.get_submodule(owner), ParallelLinear):
            return f"{owner}.shard.{leaf}"
        return name

    def _make_backbone(self, config: ModelConfig) -> Backbone:
        backbone = Backbone(config)
        backbone.embed_tokens = self._embedding  # type: ignore[assignment]
        for layer in range(config.num_layers):
            backbone.layers[layer] = SharedBlock(config, layer, self._shares)
        # `DecoderHead` applies the norm.
        backbone.norm = nn.Identity()  # type: ignore[assignment]
        return backbone

    def _divide_block(self, layer: int, block: Block) -> None:
        """Do nothing: gradients go back through complete blocks."""

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        super()._set(self.find_parameter(name), parameter)


class _SharedEmbedding(nn.Module):
    """The embedding, of which each process has some rows."""

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self._model = shares.model
        self._rows = shares.model.checkpoint.load("model.embed_tokens.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        return self._model.embed(tokens.cpu(), self._rows).to(tokens.device)


class DecoderHead:
    """The final norm and this process's rows of the output heads of two decoders; a `Head`."""

    def __init__(
        self,
        shares: Shares,
        model: TrainedCheckpoint,
        reference: Checkpoint,
        device: torch.device,
    ) -> None:
        self._shares = shares
        self._checkpoint = shares.model.checkpoint
        self._config = self._checkpoint.config
        self._device = device
        self._trains_norm = FINAL_NORM in model.factors
        self._model_head = _floats(shares.head_of(model))
        self._reference_head = _floats(shares.head_of(reference))

    @torch.no_grad()
    def measure(self, states: list[Tensor], targets: Tensor) -> float:
        normed = self._load_norm()(torch.cat(states).to(self._device))
        return self._sum_divergence(normed.flatten(0, 1), targets.flatten(0, 1), None)

    def differentiate(
        self, states: list[Tensor], targets: Tensor, count: int
    ) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        norm = self._load_norm()
        norm.requires_grad_(self._trains_norm)
        joined = torch.cat(states).requires_grad_()
        normed = norm(joined)
        # `_sum_divergence` computes the gradient itself, for some rows at a time, because the
        # logits of all tokens would need much memory.
        gradient = torch.empty_like(normed).flatten(0, 1)
        total = self._sum_divergence(normed.detach().flatten(0, 1), targets.flatten(0, 1), gradient)
        normed.backward(gradient.view_as(normed).div_(count))
        assert joined.grad is not None
        head_gradients: dict[str, Tensor] = {}
        if norm.weight.grad is not None:
            head_gradients[FINAL_NORM] = norm.weight.grad
        return (
            total,
            list(torch.split(joined.grad, [len(batch) for batch in states])),
            head_gradients,
        )

    def _load_norm(self) -> RMSNorm:
        norm = hidden_norm(self._config)
        norm.weight = float_parameter(self._checkpoint, FINAL_NORM, self._device, torch.float32)
        return norm

    def _sum_divergence(self, hidden: Tensor, targets: Tensor, gradient: Tensor | None) -> float:
        """Sum KL over rows [N, D], and write its gradient by the rows to `gradient`, if given."""
        total = 0.0
        for start in range(0, len(hidden), TOKENS_THROUGH_THE_HEAD):
            rows = slice(start, start + TOKENS_THROUGH_THE_HEAD)
            logits = self._compute_logits(hidden[rows], self._model_head)
            expected = self._compute_logits(targets[rows].to(self._device), self._reference_head)
            divergence, by_logits = measure_divergence(logits, expected)
            total += divergence
            if gradient is not None:
                slice_logits = self._shares.model.slice_local_logits
                # Each process has some rows of the head, and adds its part of the gradient.
                local_gradient = differentiate_logits(
                    slice_logits(by_logits), slice_logits(logits), self._model_head, self._config
                )
                gradient[rows] = self._shares.model.add_up(local_gradient)
        return total

    def _compute_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        local_logits = multiply_by_head(hidden, head)
        return final_logits(self._shares.model.gather_logits(local_logits), self._config)


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
