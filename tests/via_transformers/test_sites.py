"""Where the rows of linears on disk are in the parameters that transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import core_model_loading as loading

from quantkit.formats.detect import open_checkpoint
from quantkit.passes.site import Site, gather_weights
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import REORDERED, find_sites

Tiny = Callable[[str], Path]
_EXPERTS = "model.layers.0.block_sparse_moe.experts"


def _opened(folder: Path) -> tuple[LazyModel, dict[str, Tensor]]:
    """A model, and the matrices in its blocks by their modules on disk."""
    lazy, tensors = (
        LazyModel(open_checkpoint(folder, tensors_only=True)),
        load_file(folder / "model.safetensors"),
    )
    found = {
        name
        for name in tensors
        if name.endswith(".weight") and "layers." in name and tensors[name].dim() == 2
    }
    return lazy, {
        name.removesuffix(".weight"): tensors[name] for name in found & lazy.targets.keys()
    }


def _require_found(
    sites: list[Site], parameters: Callable[[str], Tensor], linears: dict[str, Tensor]
) -> None:
    """Each row of each linear has one place, and is there."""
    rows = {name: list[int]() for name in linears}
    for site in sites:
        weight = site.of(parameters(site.parameter))
        for linear, rows_here, rows_of_linear in site.parts():
            expected = linears[linear][rows_of_linear]
            assert torch.equal(weight[rows_here], expected), (site, linear)
            rows[linear] += range(rows_of_linear.start, rows_of_linear.stop)
        assert site.rows[-1][2] == len(weight)
    for name, weight in linears.items():
        assert sorted(rows[name]) == list(range(len(weight))), name
    gathered = gather_weights(sites, linears, parameters)
    assert gathered.keys() == linears.keys()
    for name, weight in gathered.items():
        assert torch.equal(weight, linears[name]), name


@pytest.mark.parametrize(
    "kind", ["llama", "mixtral", "deepseek_v3", "jamba", "nemotron_h", "deepseek_v4"]
)
def test_rows_are_where_transformers_has_them(kind: str, tiny_model: Tiny) -> None:
    lazy, linears = _opened(tiny_model(kind))
    sites, reasons = find_sites(lazy, linears)
    assert not reasons
    _require_found(sites, oracle.load(tiny_model(kind)).get_parameter, linears)


def _merged(
    folder: Path, *operations: loading.ConversionOps
) -> tuple[LazyModel, dict[str, Tensor]]:
    """A mixture whose experts are merged in another way, and its linears that are."""
    lazy, linears = _opened(folder)
    patterns = [".experts.*.w1.weight", ".experts.*.w3.weight"]
    made: Any = loading.WeightConverter(
        patterns, ".experts.gate_up_proj", [loading.MergeModulelist(0), *operations]
    )
    lazy._mapping = [
        made,
        *(one for one in lazy._mapping if getattr(one, "source_patterns", 0) != patterns),
    ]
    return lazy, {
        name: linears[name]
        for e in range(4)
        for name in (f"{_EXPERTS}.{e}.w1", f"{_EXPERTS}.{e}.w3")
    }


def test_rows_of_transposed_experts_are_columns(tiny_model: Tiny) -> None:
    lazy, linears = _merged(tiny_model("mixtral"), loading.Concatenate(1), loading.Transpose(1, 2))
    sites, reasons = find_sites(lazy, linears)
    assert not reasons
    both = [
        torch.cat([linears[f"{_EXPERTS}.{e}.w1"], linears[f"{_EXPERTS}.{e}.w3"]]) for e in range(4)
    ]
    stacked = torch.stack([one.t() for one in both])
    _require_found(sites, {"model.layers.0.mlp.experts.gate_up_proj": stacked}.__getitem__, linears)
    sites[0].of(stacked)[:] = 7
    assert stacked[0].eq(7).all()  # it was not copied


class _Exchanged(loading.ConversionOps):
    """Exchanges two rows of each expert."""

    def convert(
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> dict[str, Any]:
        (made,) = input_dict.values()
        return {target_patterns[0]: made[:, [0, 2, 1, *range(3, made.shape[1])]]}


@pytest.mark.parametrize("operation", [loading.Interleave(1), _Exchanged()])
def test_rows_in_another_order_have_no_place(
    operation: loading.ConversionOps, tiny_model: Tiny
) -> None:
    lazy, linears = _merged(tiny_model("mixtral"), loading.Concatenate(1), operation)
    query = "model.layers.0.self_attn.q_proj"
    sites, reasons = find_sites(lazy, [*linears, query])
    assert [site.parameter for site in sites] == [f"{query}.weight"]
    assert reasons == dict.fromkeys(linears, REORDERED)


def test_a_linear_that_is_split_has_a_site_in_each_parameter(tiny_model: Tiny) -> None:
    lazy, linears = _opened(tiny_model("hrm_text"))
    split: dict[str, Tensor] = {}
    for name, (_, pattern) in lazy.targets.items():
        if pattern is not None:
            module = name.removesuffix(".weight")
            split[module] = linears[module]
    sites, reasons = find_sites(lazy, split)
    assert not reasons
    assert len(sites) > len(split) > 0
    _require_found(sites, oracle.load(tiny_model("hrm_text")).get_parameter, split)


def test_a_linear_with_a_reordered_part_has_no_place(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, _ = _opened(tiny_model("hrm_text"))
    split = [name for name, (_, pattern) in lazy.targets.items() if pattern is not None]
    convert = lazy.convert_tensors

    def exchange_rows(target: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = convert(target, tensors)
        last = list(parameters)[-1]
        parameters[last] = parameters[last].flip(0)
        return parameters

    monkeypatch.setattr(lazy, "convert_tensors", exchange_rows)
    module = split[0].removesuffix(".weight")
    _, reasons = find_sites(lazy, [module])
    assert reasons == {module: REORDERED}
