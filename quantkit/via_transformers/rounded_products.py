"""Round the inputs of products of a model that transformers runs, as runtimes do that multiply
weights and inputs in a short type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantkit.errors import UnsupportedError
from quantkit.tensors.activations import InputRounding
from quantkit.via_transformers.experts import RoundedRows, round_expert_inputs
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites


def round_product_inputs(lazy: LazyModel, inputs: Mapping[str, InputRounding]) -> None:
    """Let a model round the inputs of some linears, given by their modules on disk.

    Raises:
        UnsupportedError: if linears in one weight have inputs that are rounded differently.
    """
    sites = find_sites(lazy, inputs)[0]
    for site in sites:
        module: nn.Module = lazy.model.get_submodule(site.module)
        if site.expert is not None:
            rows: list[RoundedRows] = []
            for linear, start, stop in site.rows:
                rows.append((start, stop, inputs.get(linear)))
            round_expert_inputs(module, site.leaf, site.expert, rows)
            continue
        linears = [linear for linear, _, _ in site.rows]
        first = inputs.get(linears[0])
        for linear in linears[1:]:
            if inputs.get(linear) != first:
                raise UnsupportedError(
                    "the inputs of linears that transformers merges must be rounded alike",
                    found=f"'{linears[0]}' and '{linear}'",
                    hint="give them the same scheme",
                )
        if first is not None:
            _round_module_inputs(module, first)


def _round_module_inputs(module: nn.Module, rounding: InputRounding) -> None:
    def round_first(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (rounding.round_inputs(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: rounding.round_inputs(kwargs[name])}

    module.register_forward_pre_hook(round_first, with_kwargs=True)
