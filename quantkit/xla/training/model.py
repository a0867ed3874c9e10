"""The decoder over a mesh: torch's modules, with linears that are computed in JAX.

B samples, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.model.attention import make_causal_attention
from quantkit.model.decoder import Block, final_logits, scale_embeddings
from quantkit.model.load import BLOCK_PREFIX, meta_init
from quantkit.model.mixers.mixer import Step
from quantkit.model.norms import rms_norm
from quantkit.model.rope import Rotary
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.bridge import attend_by, run
from quantkit.xla.model import attention
from quantkit.xla.split import require_served
from quantkit.xla.training.partitions import MODEL, DeviceMesh, parameter_spec
from quantkit.xla.training.products import MeshLinear, Weight

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
ROTARY = "rotary."
# The number of logits that a device computes at a time.
_LOGITS = 1 << 24

Arrays = Mapping[str, Any]
"""The arrays of a model by name. Names of arrays in layers consist of the segment and the name in a
block, such as ``0.mlp.up_proj.codes``, and their first axis is the segment's layers. All other
arrays have the model's names.
"""


def segments(config: ModelConfig, schemes: Mapping[str, QuantScheme]) -> list[range]:
    """Divide the layers into runs of equal layers, which one program runs in a loop."""

    def kind(layer: int) -> Any:
        prefix = BLOCK_PREFIX.format(layer)
        layer_schemes: dict[str, QuantScheme] = {}
        for name, scheme in schemes.items():
            if name.startswith(prefix):
                layer_schemes[name.removeprefix(prefix)] = scheme
        return config.layers[layer], layer_schemes

    result: list[range] = []
    for layer in range(config.num_layers):
        if result and kind(layer) == kind(result[-1].start):
            result[-1] = range(result[-1].start, layer + 1)
        else:
            result.append(range(layer, layer + 1))
    return result


class _RotaryBlock(nn.Module):
    """A block that computes the angles of positions itself, so that a loop can run it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.block = Block(config, layer)
        self.rotary = Rotary(config)
        self._windows = config.windows

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Run the block on hidden states [B, T, D] at positions [T]."""
        step = Step(self.rotary(positions), make_causal_attention(positions, self._windows))
        result: Tensor = self.block(x, step)
        return result


class MeshDecoder:
    """A model over a mesh without weights, which are arguments of its methods.

    Attributes:
        segments: see `segments`.
    """

    def __init__(
        self,
        config: ModelConfig,
        schemes: Mapping[str, QuantScheme],
        mesh: DeviceMesh,
        dtype: Any = jnp.float32,
    ) -> None:
        """
        Args:
            dtype: see `Weight`.

        Raises:
            UnsupportedError: for a model with features that XLA does not serve.
        """
        require_served(config)
        attend_by(attention)
        self.config = config
        self.mesh = mesh
        self.segments = segments(config, schemes)
        all_parameters = parameters(config)
        # The first parameter is the embedding; the head is sharded like it.
        self._vocabulary = Weight(mesh, parameter_spec(all_parameters[0]), dtype)
        with meta_init():
            self._norm = rms_norm(config)
            self._blocks = [_RotaryBlock(config, segment.start) for segment in self.segments]
        for block, segment in zip(self._blocks, self.segments, strict=True):
            prefix = BLOCK_PREFIX.format(segment.start)
            for parameter in all_parameters:
                if parameter.layer != segment.start or not parameter.is_linear_weight:
                    continue
                if parameter.linear is None:
                    continue
                units = _units(config, parameter)
                weight = Weight(mesh, parameter_spec(parameter), dtype, units)
                linear = MeshLinear(weight, schemes.get(parameter.module), parameter.linear.bias)
                block.block.set_submodule(parameter.module.removeprefix(prefix), linear)

    def hidden(self, arrays: Arrays, tokens: jax.Array) -> jax.Array:
        """Compute hidden states [B, T, D] float32 after the final norm, for tokens [B, T]."""
        tokens = self.mesh.constrain(tokens, self.mesh.samples, None)
        x = self._embed_tokens(arrays[EMBEDDING], tokens)
        positions = jnp.arange(tokens.shape[1])
        rotary = {name: value for name, value in arrays.items() if name.startswith(ROTARY)}
        for index, block in enumerate(self._blocks):
            prefix = f"{index}."
            segment_arrays: dict[str, Any] = {}
            for name, value in arrays.items():
                if name.startswith(prefix):
                    segment_arrays[f"block.{name.removeprefix(prefix)}"] = value
            # A loop over the first axis of these arrays, so that equal layers are compiled once.
            x, _ = lax.scan(partial(self._layer, block, rotary, positions), x, segment_arrays)
        normed: jax.Array = run(self._norm, {"weight": arrays[NORM]}, self._norm, x)
        return normed

    def logits(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Compute float32 logits [B, T, V] of hidden states [B, T, D] and a head [V, D]."""
        products = self._vocabulary.forward(hidden, head).astype(jnp.float32)
        # An empty module: the function has no weights.
        function = partial(final_logits, config=self.config)
        result: jax.Array = run(nn.Module(), {}, function, products)
        return result

    def divergence(
        self, hidden: jax.Array, head: jax.Array, target: jax.Array, target_head: jax.Array
    ) -> jax.Array:
        """Sum KL(target || hidden) over the tokens of each sample, [B] float32, in nats, from
        hidden states [B, T, D] and their heads [V, D]. Only the logits of one chunk of tokens are
        in memory at a time.
        """
        # Outside the loop, which would gather them for each chunk.
        head = self._vocabulary.gather_weight(head)
        target_head = self._vocabulary.gather_weight(target_head)

        def add_chunk(
            total: jax.Array, state_pair: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            actual, expected = state_pair
            log_q = jax.nn.log_softmax(self.logits(actual, head))
            log_p = jax.nn.log_softmax(self.logits(expected, target_head))
            return total + (jnp.exp(log_p) * (log_p - log_q)).sum((1, 2)), None

        batch, length, width = hidden.shape
        rows = -(-batch // self.mesh.sample_shards) * -(-head.shape[0] // self.mesh.size(MODEL))
        # The fewest equal chunks whose logits are few enough, or one token each.
        count = 1
        while length % count or rows * (length // count) > max(_LOGITS, rows):
            count += 1
        chunks = (
            jnp.moveaxis(hidden.reshape(batch, count, -1, width), 1, 0),
            jnp.moveaxis(target.reshape(batch, count, -1, width), 1, 0),
        )
        # With `checkpoint`, the backward pass computes the logits of a chunk again instead of
        # storing them.
        total, _ = lax.scan(jax.checkpoint(add_chunk), jnp.zeros(batch, jnp.float32), chunks)
        return total

    def _layer(
        self,
        block: nn.Module,
        rotary: Arrays,
        positions: jax.Array,
        x: jax.Array,
        layer_arrays: Arrays,
    ) -> tuple[jax.Array, None]:
        """Run one layer of a segment's loop; the backward pass computes it again."""

        def layer(x: jax.Array, layer_arrays: Arrays) -> jax.Array:
            out: jax.Array = run(block, {**layer_arrays, **rotary}, block, x, positions)
            return self.mesh.constrain(out, self.mesh.samples, None, MODEL)

        return jax.checkpoint(layer)(x, layer_arrays), None

    def _embed_tokens(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        # Gathered along data, so that each device looks up the tokens of its own samples.
        weight = self.mesh.constrain(weight, *self._vocabulary.spec_without_data)
        rows = jnp.take(weight, tokens, axis=0).astype(jnp.float32)
        rows = self.mesh.constrain(rows, self.mesh.samples, None, MODEL)
        multiplied = partial(scale_embeddings, multiplier=self.config.embedding_multiplier)
        result: jax.Array = run(nn.Module(), {}, multiplied, rows)
        return result


def _units(config: ModelConfig, weight: Parameter) -> int | None:
    """Return the number of heads of a weight's outputs, see `Weight`; None if it has no heads."""
    return {"query": config.num_heads, "kv": config.num_kv_heads}.get(weight.dims[0])
