"""The importance of inputs: what transformers' linears get, and what rounding with it gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from test_calibrated_experts import _saved
from torch import Tensor

import quantkit
from quantkit.architectures.topology import linear_columns
from quantkit.calibration import importance
from quantkit.calibration.importance import input_importance
from quantkit.errors import ResumeError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.model.layerwise import Batch
from quantkit.quality.gate import RtnBaseline
from quantkit.quality.measures import compare_batches
from quantkit.solver.columns import TORCH
from quantkit.solver.rounding import quantize_searched
from quantkit.tensors.qtensor import Solver, quantize_rtn
from quantkit.tensors.scheme import SCHEMES


def _uneven(folder: Path, **changes: Any) -> Path:
    """A model whose norms pass on a few large states, as trained ones do."""
    model = oracle.make("llama", vocab_size=2048, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[::16] *= 20
    return oracle.save(model, folder)


def _expected(inputs: Tensor) -> Tensor:
    rows = inputs.flatten(0, -2)
    squares = rows.square().mean(0)
    return (squares / squares.mean()).clamp(min=0.1) ** (len(rows) / (len(rows) + 32))


def test_it_is_the_mean_square_of_what_transformers_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _uneven(tmp_path / "model")
    source, model, seen = open_checkpoint(folder), oracle.load(folder), dict[str, Tensor]()
    found = input_importance(source, None)
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    for name, linear in linears.items():
        linear.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))
    with torch.no_grad():
        model(importance._tokens(source, None))
    assert found.keys() == linears.keys() == {*linear_columns(source.config), "lm_head"}
    for name, own in found.items():
        assert torch.allclose(own, _expected(seen[name]), rtol=1e-3), name
    assert found["model.layers.1.mlp.up_proj"].max() > 3


def test_the_sample_is_text_where_there_is_a_tokenizer(demo_model: Path) -> None:
    source = open_checkpoint(demo_model)
    tokenizer, _ = checked_tokenizer(source)
    assert tokenizer is not None
    tokens = importance._tokens(source, tokenizer)
    assert tokens.shape == importance.importance_tokens(source)
    assert all(row[0] == tokenizer.bos_id for row in tokens.tolist())
    assert len(tokenizer.decode(tokens[0, 1:].tolist())) > 2 * tokens.shape[1]
    assert not torch.equal(importance._tokens(source, None), tokens)


def test_an_expert_without_tokens_has_none(tmp_path: Path) -> None:
    source = open_checkpoint(_saved("mixtral", tmp_path / "source"))
    missing = set(linear_columns(source.config)) - input_importance(source, None).keys()
    assert missing
    assert all(".experts." in name for name in missing)


def test_the_fewer_tokens_there_are_the_more_even_it_is() -> None:
    squares = torch.tensor([0.5, 1.0, 4.5])
    few, many = (importance._weights(count * squares, count) for count in (1, 10**6))
    assert torch.allclose(many, squares / 2, rtol=1e-3)
    assert few.max() / few.min() < 1.1


def test_a_linear_whose_inputs_are_not_finite_has_none(tmp_path: Path) -> None:
    model = oracle.make("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    found = input_importance(open_checkpoint(oracle.save(model, tmp_path / "model")), None)
    assert {name.split(".")[2] for name in found} == {"0"}
    assert "model.layers.0.mlp.down_proj" in found


def _kl(source: Checkpoint, other: Checkpoint) -> float:
    batch = Batch.from_start(oracle.random_tokens(40, batch=8, vocabulary=2048))
    return compare_batches(source, other, [batch])[0].divergence.kl


def test_rounding_with_it_is_closer_to_the_source(tmp_path: Path) -> None:
    source = _uneven(tmp_path / "source")
    quantkit.quantize(source, tmp_path / "rtn", "int4-g32", method="rtn", source_check=False, accept_quality_loss=True)
    made, floats = json.loads((tmp_path / "rtn" / "quantkit.json").read_text()), open_checkpoint(source)
    assert {one["solver"] for one in made["modules"].values() if one["scheme"]} == {Solver.WEIGHTED}
    result = open_checkpoint(tmp_path / "rtn")
    assert _kl(floats, result) < 0.8 * _kl(floats, RtnBaseline(floats, schemes(result), importance={}))


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64-asym"])
def test_what_is_important_has_smaller_errors(name: str) -> None:
    weight, scheme = torch.randn(64, 128), SCHEMES[name]
    weights = torch.rand(128) ** 4 + 0.01
    made = [
        quantize_searched(weight, scheme, torch.float16, TORCH, weights),
        quantize_searched(weight, scheme, torch.float16),
        quantize_rtn(weight, scheme, torch.float16),
    ]
    errors = ((one.dequantize() - weight).square() * weights for one in made)
    weighted, even, spanning = (error.view(64, -1, scheme.group_size or 128).sum(-1) for error in errors)
    assert (weighted <= spanning * (1 + 1e-5)).all()
    assert weighted.sum() < 0.9 * even.sum()


def test_an_interrupted_run_resumes_only_where_sums_are_the_same(tmp_path: Path, demo_model: Path) -> None:
    def stop(phase: str, done: int, *_: object) -> None:
        if phase == "quantize" and done:
            raise KeyboardInterrupt

    arguments: Any = {"method": "rtn", "source_check": False}
    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", progress=stop, **arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ResumeError, match="number of threads"):
            quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", resume=True, **arguments)
    finally:
        torch.set_num_threads(threads)
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", resume=True, **arguments)
    quantkit.quantize(demo_model, tmp_path / "whole", "int4-g32", **arguments)
    first, second = (
        folder.joinpath("model.safetensors").read_bytes() for folder in (tmp_path / "out", tmp_path / "whole")
    )
    assert first == second
