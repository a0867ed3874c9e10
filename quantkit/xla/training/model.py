"""The decoder over a mesh: torch's modules, with linears that are multiplied in JAX.

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
from quantkit.model.decoder import Block, Step, final_logits, rms_norm, scale_embeddings
from quantkit.model.load import BLOCK_PREFIX, meta_init
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
_LOGITS = 1 << 24  # of a device at a time

Arrays = Mapping[str, Any]
"""The arrays of a model by name. Those of layers are named by their segment and within a block,
such as ``0.mlp.up_proj.codes``, and their first axis is the segment's layers; all others have the
model's names.
"""


def segments(config: ModelConfig, schemes: Mapping[str, QuantScheme]) -> list[range]:
    """Equal layers one after the other, which one program runs in a loop."""

    def kind(layer: int) -> Any:
        prefix = BLOCK_PREFIX.format(layer)
        own = {}
        for name, scheme in schemes.items():
            if name.startswith(prefix):
                own[name.removeprefix(prefix)] = scheme
        return config.layers[layer], own

    result: list[range] = []
    for layer in range(config.num_layers):
        if result and kind(layer) == kind(result[-1].start):
            result[-1] = range(result[-1].start, layer + 1)
        else:
            result.append(range(layer, layer + 1))
    return result


class _RotaryBlock(nn.Module):
    """A block with the angles of positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.block, self.rotary, self._windows = (
            Block(config, layer),
            Rotary(config),
            config.windows,
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D], at positions [T]."""
        result: Tensor = self.block(
            x, Step(self.rotary(positions), make_causal_attention(positions, self._windows))
        )
        return result


class MeshDecoder:
    """A model over a mesh; it has no weights, its methods are given them.

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
        self.config, self.mesh, self.segments = config, mesh, segments(config, schemes)
        found = parameters(config)
        self._vocabulary = Weight(mesh, parameter_spec(found[0]), dtype)
        with meta_init():
            self._norm = rms_norm(config)
            self._blocks = [_RotaryBlock(config, one.start) for one in self.segments]
        for block, segment in zip(self._blocks, self.segments, strict=True):
            for one in found:
                if one.layer == segment.start and one.is_linear_weight and one.linear is not None:
                    weight = Weight(mesh, parameter_spec(one), dtype, _units(config, one))
                    linear = MeshLinear(weight, schemes.get(one.module), one.linear.bias)
                    block.block.set_submodule(
                        one.module.removeprefix(BLOCK_PREFIX.format(one.layer)), linear
                    )

    def hidden(self, arrays: Arrays, tokens: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] float32 after the final norm, for tokens [B, T]."""
        x = self._embed_tokens(
            arrays[EMBEDDING], self.mesh.constrain(tokens, self.mesh.samples, None)
        )
        positions = jnp.arange(tokens.shape[1])
        rotary = {name: value for name, value in arrays.items() if name.startswith(ROTARY)}
        for index, block in enumerate(self._blocks):
            prefix = f"{index}."
            own = {}
            for name, value in arrays.items():
                if name.startswith(prefix):
                    own[f"block.{name.removeprefix(prefix)}"] = value
            x, _ = lax.scan(partial(self._layer, block, rotary, positions), x, own)
        normed: jax.Array = run(self._norm, {"weight": arrays[NORM]}, self._norm, x)
        return normed

    def logits(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """[B, T, V] float32, of hidden states [B, T, D] and a head [V, D] as it is used."""
        products = self._vocabulary.forward(hidden, head).astype(jnp.float32)
        result: jax.Array = run(
            nn.Module(), {}, partial(final_logits, config=self.config), products
        )
        return result

    def divergence(
        self, hidden: jax.Array, head: jax.Array, target: jax.Array, target_head: jax.Array
    ) -> jax.Array:
        """Return the sum over tokens of KL(target || hidden) for each sample, [B] float32, in nats,
        of hidden states [B, T, D] and their heads [V, D]; the logits of some tokens are in memory
        at a time.
        """

        head, target_head = (self._vocabulary.gather_weight(one) for one in (head, target_head))

        def of_some(
            total: jax.Array, state_pair: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            own, expected = state_pair
            log_q = jax.nn.log_softmax(self.logits(own, head))
            log_p = jax.nn.log_softmax(self.logits(expected, target_head))
            return total + (jnp.exp(log_p) * (log_p - log_q)).sum((1, 2)), None

        batch, length, width = hidden.shape
        rows = -(-batch // self.mesh.sample_shards) * -(-head.shape[0] // self.mesh.size(MODEL))
        count = next(
            n
            for n in range(1, length + 1)
            if length % n == 0 and rows * (length // n) <= max(_LOGITS, rows)
        )
        split = []
        for one in (hidden, target):
            split.append(jnp.moveaxis(one.reshape(batch, count, -1, width), 1, 0))
        total, _ = lax.scan(jax.checkpoint(of_some), jnp.zeros(batch, jnp.float32), tuple(split))
        return total

    def _layer(
        self,
        block: nn.Module,
        rotary: Arrays,
        positions: jax.Array,
        x: jax.Array,
        layer_arrays: Arrays,
    ) -> tuple[jax.Array, None]:
        """Return one round of the loop over a segment's layers; it is computed again for its
        gradients.
        """

        def layer(x: jax.Array, layer_arrays: Arrays) -> jax.Array:
            out: jax.Array = run(block, {**layer_arrays, **rotary}, block, x, positions)
            return self.mesh.constrain(out, self.mesh.samples, None, MODEL)

        return jax.checkpoint(layer)(x, layer_arrays), None

    def _embed_tokens(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        weight = self.mesh.constrain(weight, *self._vocabulary.spec_without_data)
        rows = jnp.take(weight, tokens, axis=0).astype(jnp.float32)
        rows = self.mesh.constrain(rows, self.mesh.samples, None, MODEL)
        multiplied = partial(scale_embeddings, multiplier=self.config.embedding_multiplier)
        result: jax.Array = run(nn.Module(), {}, multiplied, rows)
        return result


def _units(config: ModelConfig, weight: Parameter) -> int | None:
    """See `Weight`."""
    return {"query": config.num_heads, "kv": config.num_kv_heads}.get(weight.dims[0])
