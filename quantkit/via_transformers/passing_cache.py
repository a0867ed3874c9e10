"""Caches of transformers that keep nothing: calibration and training run whole samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

PassCache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Sees keys and values before they are cached, and returns those to cache."""

# The argument of models that make a cache whatever `use_cache` is, such as XLM.
_ALWAYS_CACHED = "cache"


def make_cache(config: Any, pass_cache: PassCache) -> Any:
    """Make an empty cache of transformers that keeps nothing, and passes keys and values on."""
    from transformers import DynamicCache

    class PassingCache(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            return pass_cache(key_states, value_states)

    return PassingCache(config=config)


def leave_out_cache(model: Any) -> None:
    """Let a model that makes a cache for each call, whatever `use_cache` is, keep nothing in it.

    A block that is called again for its gradients would otherwise find its own keys in the cache.
    """
    body: nn.Module = model.base_model
    if _ALWAYS_CACHED not in inspect.signature(body.forward).parameters:
        return

    def give_cache(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs.get(_ALWAYS_CACHED) is not None:
            return None
        cache = make_cache(model.config, lambda keys, values: (keys, values))
        return args, {**kwargs, _ALWAYS_CACHED: cache}

    body.register_forward_pre_hook(give_cache, with_kwargs=True)
