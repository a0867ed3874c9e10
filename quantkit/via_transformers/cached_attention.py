"""The keys and values that a model of transformers caches: which modules cache some, and what sees
or changes them on their way into the cache.

Modules are found as compressed-tensors finds those whose cache it quantizes, see its
`is_cached_attention_module`, and get what it gives them too: a cache in place of the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from quantkit.base.messages import Message, Option
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.kv_cache import Place, cache_tensors
from quantkit.formats.kv_scales import attention_scales, scale_names
from quantkit.model.cache_rounding import Fp8Rounding
from quantkit.passes.cache_recorder import CacheRecorder
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.passing_cache import PassCache, make_cache

_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj")
# Of latent attention: it expands the vectors that are cached to keys and values.
_LATENT_PROJECTION = "kv_b_proj"
_NUM_KV_HEADS = "num_key_value_heads"
# The argument that a forward pass takes its cache by.
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value")


def find_cached_attention(lazy: LazyModel) -> dict[str, str]:
    """Find the modules of a model that cache keys and values: the module of transformers by its
    name on disk, in the order of the model. Those without a name of their own on disk are missing.
    """
    # By module, the names on disk that its tensors suggest.
    prefixes: dict[str, set[str]] = {module: set() for module in _iter_cached_attention(lazy)}
    for name, (target, pattern) in lazy.targets.items():
        # A pattern means that the loader merges or splits the tensor, and renames it for that.
        if pattern is not None:
            continue
        module, _, _ = target.rpartition(".")
        while module and module not in prefixes:
            module, _, _ = module.rpartition(".")
        leaf = target.removeprefix(module)
        if module and name.endswith(leaf):
            prefixes[module].add(name.removesuffix(leaf))
    attention: dict[str, str] = {}
    for module, names in prefixes.items():
        if len(names) == 1:
            attention[names.pop()] = module
    return attention


def plan_cached_attention(source: Checkpoint, lazy: LazyModel) -> tuple[str, ...]:
    """List the modules on disk that get scales of their keys and values.

    Raises:
        UnsupportedError: if readers would not use such scales as they are calibrated: for latent
            attention, for layers that share keys and values, for attention that compressed-tensors
            does not quantize the cache of, and for attention to images or sound.
    """
    attention = find_cached_attention(lazy)
    reason = _explain_no_scales(source, lazy, attention)
    if reason is not None:
        raise UnsupportedError(
            f"scales of a KV cache cannot be calibrated for this model: {reason}",
            path=source.path,
            found=source.config.architecture,
            hint=Message("leave ", Option("kv_cache"), " out"),
        )
    return tuple(attention)


def _explain_no_scales(
    source: Checkpoint, lazy: LazyModel, attention: Mapping[str, str]
) -> str | None:
    """Explain why a model gets no scales for its attention, given by name on disk; None if it
    gets some.
    """
    for module, submodule in lazy.model.named_modules():
        if hasattr(submodule, _LATENT_PROJECTION):
            return f"'{module}' caches latent vectors instead of keys and values (MLA)"
        # vLLM reads what another layer has cached by the scale of the reading layer.
        if getattr(submodule, "is_kv_shared_layer", False):
            return f"'{module}' reads the keys and values of another layer"
    modules = set(_iter_cached_attention(lazy))
    if not modules:
        return "compressed-tensors quantizes the cache of none of its modules"
    missing_size = _find_missing_size(lazy.model.config.get_text_config(decoder=True))
    if missing_size is not None:
        return f"compressed-tensors requires one '{missing_size}' in its config"
    nameless = modules.difference(attention.values())
    if nameless:
        return f"the tensors of '{min(nameless)}' have other names on disk"
    towers: list[str] = []
    for tensor in source.config.tensors or ():
        if tensor.role == "tower":
            towers.append(tensor.module)
    names: list[str] = []
    for name in attention:
        if any(tower.startswith(f"{name}.") for tower in towers):
            return f"compressed-tensors quantizes '{name}' too, which no text reaches"
        names.extend(scale_names(name))
    entries = cache_tensors(names)
    places: set[Place] = set()
    for name in names:
        if name not in entries:
            return f"readers do not know a scale by the name '{name}'"
        if not places.isdisjoint(entries[name].places):
            return f"'{name}' has the number of another layer"
        places.update(entries[name].places)
    return None


def _find_missing_size(text_config: Any) -> str | None:
    """Find a size of heads that compressed-tensors reads when it loads a model with scales, and
    that a config of transformers lacks or has for each layer; None if there is none.
    """
    # It computes the other sizes where they are missing.
    if not hasattr(text_config, _NUM_KV_HEADS):
        return _NUM_KV_HEADS
    for size in (_NUM_KV_HEADS, "num_attention_heads", "head_dim"):
        try:
            getattr(text_config, size, None)
        # A config raises an error of its own for a size that differs between layers.
        except Exception:
            return size
    return None


@contextmanager
def recording_cache(lazy: LazyModel, recorder: CacheRecorder) -> Iterator[None]:
    """Record what all modules that cache keys and values put into their cache within this
    context.
    """
    names: dict[str, str] = {}
    for name, module in find_cached_attention(lazy).items():
        names[module] = name

    def choose(module: str) -> PassCache | None:
        if not recorder.active or module not in names:
            return None
        return partial(recorder.record, names[module])

    with _passing_cache(lazy, choose):
        yield


@contextmanager
def rounding_cache(checkpoint: Checkpoint, lazy: LazyModel) -> Iterator[None]:
    """Round the keys and values of a model within this context as the checkpoint's quantized cache
    stores them; does nothing if it has none that is run.

    Raises:
        CheckpointError: see `KvCache.require_sound`.
    """
    # Most models have none, and need no search for their modules.
    if checkpoint.kv_cache is None:
        yield
        return
    modules = find_cached_attention(lazy)
    scales = attention_scales(checkpoint, modules)
    if scales is None:
        yield
        return
    roundings: dict[str, Fp8Rounding] = {}
    for name, module in modules.items():
        roundings[module] = Fp8Rounding(scales[name], lazy.device)
    with _passing_cache(lazy, roundings.get):
        yield


@contextmanager
def _passing_cache(lazy: LazyModel, choose: Callable[[str], PassCache | None]) -> Iterator[None]:
    """Let what `choose` returns for a module see its keys and values."""
    handles: list[Any] = []

    def hook_module(module: str, submodule: nn.Module) -> None:
        argument = _find_cache_argument(submodule)
        assert argument is not None

        def give_cache(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            pass_cache = choose(module)
            if pass_cache is None:
                return None
            cache = make_cache(lazy.model.config, pass_cache)
            return args, {**kwargs, argument: cache}

        handles.append(submodule.register_forward_pre_hook(give_cache, with_kwargs=True))

    for module in _iter_cached_attention(lazy):
        hook_module(module, lazy.model.get_submodule(module))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _iter_cached_attention(lazy: LazyModel) -> Iterator[str]:
    """Yield the modules of transformers that cache keys and values."""
    for module, submodule in lazy.model.named_modules():
        if _find_cache_argument(submodule) is None or hasattr(submodule, _LATENT_PROJECTION):
            continue
        if any(hasattr(submodule, projection) for projection in _PROJECTIONS):
            yield module


def _find_cache_argument(module: nn.Module) -> str | None:
    """Find the argument by which an attention takes a cache; None for other modules."""
    if "attention" not in type(module).__name__.lower():
        return None
    try:
        parameters = inspect.signature(module.forward).parameters
    # Of a function that is not written in Python.
    except (TypeError, ValueError):
        return None
    for argument in _CACHE_ARGUMENTS:
        if argument in parameters:
            return argument
    return None
