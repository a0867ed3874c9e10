"""Run torch modules as JAX functions. Only this file uses torchax, so that it can be replaced.

After this file is imported, `torch.compile` no longer works in the process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Packet = torch._ops.OpOverloadPacket


@contextlib.contextmanager
def _absent_overloads() -> Iterator[None]:
    """Replace overloads of operators that torch 2.13 no longer has, but torchax 0.0.13 names, by
    unique objects.
    """
    strict = _Packet.__getattr__

    def lenient(packet: Any, name: str) -> Any:
        try:
            return strict(packet, name)
        except AttributeError:
            # Private names are Python's and torch's own probes, which need the error.
            if name.startswith("_"):
                raise
            # torchax registers its function under this key, which no operator uses.
            return object()

    _Packet.__getattr__ = lenient  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Packet.__getattr__ = strict  # type: ignore[method-assign]


with _absent_overloads():
    import torchax
    from torchax import interop


@functools.cache
def _environment() -> Any:
    """Return torchax's environment, made at the first call because it starts JAX's devices."""
    with _absent_overloads():
        return torchax.default_env()


def apply(function: Callable[..., Any], *tensors: Any) -> Any:
    """Apply a JAX function to the arrays of tensors, within `run`; returns tensors."""
    return interop.call_jax(function, *tensors)


def run(
    module: nn.Module, state: Mapping[str, jax.Array], function: Callable[..., Any], *arrays: Any
) -> Any:
    """Call a function that uses a torch module on JAX arrays; `jax.jit` can trace this.

    Args:
        state: the module's parameters and buffers, by name.
        function: called with the arrays as torch tensors; its results are converted to arrays.
    """

    def inside(*tensors: Any) -> Any:
        # Not `functional_call`: the function may call any methods of the module, in any order.
        tensors_by_name = interop.torch_view(dict(state))
        with torch.nn.utils.stateless._reparametrize_module(module, tensors_by_name):
            return function(*tensors)

    _environment()
    return interop.call_torch(inside, *arrays)


def attend_by(attention: Callable[..., jax.Array]) -> None:
    """Replace torch's attention by a JAX function of queries [B, H, T, Dh], keys and values [B, K,
    S, Dh], a mask, [T, S] or [B, 1, T, S], or None for each position up to its own, and a factor of
    scores, or None for one over the root of Dh.
    """

    def attend(
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # The decoder uses nothing else.
        if dropout_p or is_causal == (attn_mask is not None):
            raise NotImplementedError("attention must be causal or have a mask")
        return apply(functools.partial(attention, scale=scale), queries, keys, values, attn_mask)

    _environment().override_op_definition(F.scaled_dot_product_attention, attend)
