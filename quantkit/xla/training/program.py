"""The programs of training over a mesh: a step of Adam on the factors of scales and norms, and the
loss alone.

A step has B samples of T tokens. Factors, their moments and gradients lie as the scales do; XLA
finds where all other arrays lie from the inputs, the weights and the outputs of linears.
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
    """What training changes: factors and the running means of `adam`, by the name of the array."""

    factors: Any
    first: Any
    second: Any


class Pace(NamedTuple):
    """What a step's size follows from, as numbers: see `Schedule.share` and `corrections`."""

    share: Any
    first: Any
    second: Any


class TrainingPrograms:
    """Compiled at the first call for each shape.

    Attributes:
        step: (held, trained, tokens [B, T], targets [B, T, D], pace) to the new trained values,
            which take the old ones' memory, and the mean KL of a token. `held` is the model's
            arrays, the float model's head among them.
        losses: (held, factors, tokens, targets) to the sum of KL of each sample, [B].
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
            return (
                divergence(self._decoder, {**arrays, **values}, tokens, targets).sum() / tokens.size
            )

        loss, gradients = jax.value_and_grad(mean)(values)
        new = Trained({}, {}, {})
        for name, rate in self._rates.items():
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
        return divergence(
            self._decoder, {**arrays, **self._values(arrays, factors)}, tokens, targets
        )

    def _values(self, arrays: Arrays, factors: Arrays) -> dict[str, jax.Array]:
        """Scales and norms as they are with factors, rounded as they are stored, in float32."""
        offset = self._decoder.config.norm_offset
        result = {}
        for name, factor in factors.items():
            start = arrays[name].astype(jnp.float32)
            if name.endswith(_SCALE):
                value = _round_to_dtype(start * (1 + factor), arrays[name].dtype)
                usable = jnp.isfinite(value) & ((value != 0) | (start == 0))
                result[name] = jnp.where(usable, value, start)
            else:
                result[name] = _round_to_dtype(
                    (start + offset) * (1 + factor) - offset, arrays[name].dtype
                )
        return result


def divergence(
    decoder: MeshDecoder, arrays: Arrays, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return the sum of KL(float model || model) over the tokens of each sample, [B], given the
    float model's hidden states after its final norm, [B, T, D].
    """
    head = arrays.get(HEAD, arrays[EMBEDDING])
    targets = decoder.mesh.constrain(targets, decoder.mesh.samples, None, MODEL)
    return decoder.divergence(
        decoder.hidden(arrays, tokens), head, targets, arrays.get(TARGET_HEAD, head)
    )


def hidden_program(decoder: MeshDecoder) -> Any:
    """Compiles for each shape: (arrays, tokens [B, T]) to hidden states [B, T, D] after the
    final norm.
    """
    return jax.jit(decoder.hidden)


def _round_to_dtype(value: jax.Array, dtype: Any) -> jax.Array:
    """Float32 rounded to a type; XLA would leave out two conversions one after the other."""
    result: jax.Array = lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)
    return result
