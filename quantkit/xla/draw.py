"""The next tokens, drawn on the device; what `quantkit.runtime.sampling` does, with other random numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LEAST_TEMPERATURE = 1e-6


def drawn(logits: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """A token for each row: [B, V] to [B], from the likeliest with `top_p` of the probability together."""
    wide = logits.astype(jnp.float32)
    scaled = (wide - wide.max(-1, keepdims=True)) / jnp.maximum(temperature, _LEAST_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[-1])
    probabilities = jax.nn.softmax(ranked, axis=-1)
    outside = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    rank = jax.random.categorical(key, jnp.where(outside, -jnp.inf, ranked), axis=-1)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
