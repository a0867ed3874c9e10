"""Compile the programs of training over a mesh: a step of Adam on the factors of scales and norms,
and the loss alone.

A step has B samples of T tokens. Factors, their moments and gradients are sharded like the scales.
XLA chooses the sharding of all other arrays from the inputs, the weights and the outputs of
linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from quantkit.training.optimizer import adam
from quantkit.xla.training.model import EMBEDDING, Arrays, MeshDecoder
from quantkit.xla.training.partitions import MODEL

HEAD = "lm_head.weight"
TARGET_HEAD = "float model's head"
_SCALE = ".scale"


class Trained(NamedTuple):
    """The trained values: factors and the running means of `adam`, by the name of the array."""

    factors: Any
    first: Any
    second: Any


class Pace(NamedTuple):
    """The numbers that determine the size of a step, see `Schedule.share` and `corrections`."""

    share: Any
    first: Any
    second: Any


class TrainingPrograms:
    """The programs, compiled at the first call for each shape.

    Attributes:
        step: (arrays, trained, tokens [B, T], targets [B, T, D], pace) to the new trained values,
            which reuse the memory of the old ones, and the mean KL of a token. `arrays` are those
            of the model, with the float model's head.
        losses: (arrays, factors, tokens, targets) to the sum of KL of each sample, [B].
    """

    def __init__(self, decoder: MeshDecoder, rates: Mapping[str, float]) -> None:
        """
        Args:
            rates: the largest step of each array's factors.
        """
        self._decoder = decoder
        self._rates = rates
        self.step = jax.jit(self._step, donate_argnums=(1,))
        self.losses = jax.jit(self._losses)

    def _step(
        self, arrays: Arrays, trained: Trained, tokens: jax.Array, targets: jax.Array, pace: Pace
    ) -> tuple[Trained, jax.Array]:
        values = self._values(arrays, trained.factors)

        def mean(values: Arrays) -> jax.Array:
            sums = divergence(self._decoder, {**arrays, **values}, tokens, targets)
            return sums.sum() / tokens.size

        # The gradients are by the rounded values: rounding is passed straight through.
        loss, gradients = jax.value_and_grad(mean)(values)
        new = Trained({}, {}, {})
        for name, rate in self._rates.items():
            # By the chain rule, the gradient by a factor is that by the value times this unit.
            if name.endswith(_SCALE):
                unit = arrays[name]
            else:
                unit = values[name] + self._decoder.config.norm_offset
            gradient = gradients[name] * unit.astype(jnp.float32)
            new.first[name], new.second[name], change = adam(
                trained.first[name], trained.second[name], gradient, (pace.first, pace.second)
            )
            new.factors[name] = trained.factors[name] - rate * pace.share * change
        return new, loss

    def _losses(
        self, arrays: Arrays, factors: Arrays, tokens: jax.Array, targets: jax.Array
    ) -> jax.Array:
        values = self._values(arrays, factors)
        return divergence(self._decoder, {**arrays, **values}, tokens, targets)

    def _values(self, arrays: Arrays, factors: Arrays) -> dict[str, jax.Array]:
        """Multiply scales and norms by their factors, rounded to their stored dtype, in float32."""
        offset = self._decoder.config.norm_offset
        result: dict[str, jax.Array] = {}
        for name, factor in factors.items():
            start = arrays[name].astype(jnp.float32)
            if name.endswith(_SCALE):
                value = _round_to_dtype(start * (1 + factor), arrays[name].dtype)
                # A scale that overflows, or becomes zero, keeps its start.
                usable = jnp.isfinite(value) & ((value != 0) | (start == 0))
                result[name] = jnp.where(usable, value, start)
            else:
                value = (start + offset) * (1 + factor) - offset
                result[name] = _round_to_dtype(value, arrays[name].dtype)
        return result


def divergence(
    decoder: MeshDecoder, arrays: Arrays, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Sum KL(float model || model) over the tokens of each sample, [B], from the float model's
    hidden states after its final norm, [B, T, D].
    """
    # With tied embeddings, there is no separate head.
    head = arrays.get(HEAD, arrays[EMBEDDING])
    targets = decoder.mesh.constrain(targets, decoder.mesh.samples, None, MODEL)
    hidden = decoder.hidden(arrays, tokens)
    return decoder.divergence(hidden, head, targets, arrays.get(TARGET_HEAD, head))


def hidden_program(decoder: MeshDecoder) -> Any:
    """Make the program, compiled for each shape, of hidden states [B, T, D] after the final norm
    from (arrays, tokens [B, T]).
    """
    return jax.jit(decoder.hidden)


def _round_to_dtype(value: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 to a dtype, and convert back."""
    # Without the barrier, XLA would remove both conversions.
    result: jax.Array = lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)
    return result
