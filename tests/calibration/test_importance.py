"""The importance of inputs: what transformers' linears get, and what rounding with it gains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file
from saved_experts import save_experts
from torch import Tensor

import quantkit
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.topology import linear_columns
from quantkit.calibration import importance
from quantkit.calibration.importance import importance_tokens, input_importance, sample_tokens
from quantkit.errors import ResumeError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.model.layerwise import Batch
from quantkit.quality.gate import RtnBaseline
from quantkit.quality.measures import compare_batches
from quantkit.solver.columns import TORCH
from quantkit.solver.rounding import quantize_searched
from quantkit.tensors.qtensor import Solver, quantize_rtn
from quantkit.tensors.scheme import SCHEMES
from quantkit.text.tokenizer import Tokenizer
from quantkit.via_transformers import VIAS
from quantkit.via_transformers.forward import passage_of

Tiny = Callable[[str], Path]


def _sample(source: Checkpoint, tokenizer: Tokenizer | None = None) -> Tensor:
    """The tokens that the inputs are observed on."""
    return sample_tokens(source, tokenizer, *importance_tokens(source))


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


def test_it_is_the_mean_square_of_what_transformers_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _uneven(tmp_path / "model")
    source, model, seen = open_checkpoint(folder), oracle.load(folder), dict[str, Tensor]()
    found = input_importance(source, None)
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    for name, linear in linears.items():
        linear.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0]})
        )
    with torch.no_grad():
        model(_sample(source))
    assert found.keys() == linears.keys() == {*linear_columns(source.config), "lm_head"}
    for name, own in found.items():
        assert torch.allclose(own, _expected(seen[name]), rtol=1e-3), name
    assert found["model.layers.1.mlp.up_proj"].max() > 3


def test_the_sample_is_text_where_there_is_a_tokenizer(demo_model: Path) -> None:
    source = open_checkpoint(demo_model)
    tokenizer, _ = load_checked_tokenizer(source)
    assert tokenizer is not None
    tokens = _sample(source, tokenizer)
    assert tokens.shape == importance_tokens(source)
    assert all(row[0] == tokenizer.bos_id for row in tokens.tolist())
    assert len(tokenizer.decode(tokens[0, 1:].tolist())) > 2 * tokens.shape[1]
    assert not torch.equal(_sample(source), tokens)


def test_an_expert_without_tokens_has_none(tmp_path: Path) -> None:
    source = open_checkpoint(save_experts("mixtral", tmp_path / "source"))
    missing = set(linear_columns(source.config)) - input_importance(source, None).keys()
    assert missing
    assert all(".experts." in name for name in missing)


def test_the_fewer_tokens_there_are_the_more_even_it_is() -> None:
    squares = torch.tensor([0.5, 1.0, 4.5])
    few, many = (importance.importance_of(count * squares, count) for count in (1, 10**6))
    assert torch.allclose(many, squares / 2, rtol=1e-3)
    assert few.max() / few.min() < 1.1


def test_a_linear_whose_inputs_are_not_finite_has_none(tmp_path: Path) -> None:
    model = oracle.make("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    found = input_importance(open_checkpoint(oracle.save(model, tmp_path / "model")), None)
    assert {name.split(".")[2] for name in found} == {"0"}
    assert "model.layers.0.mlp.down_proj" in found


def _for_transformers(folder: Path, dst: Path) -> Checkpoint:
    """A model as `quantize` opens it for transformers to run: its linears are known."""
    options = QuantizeOptions(folder, dst, "int4-g32", method="rtn", via="transformers")
    return prepare(options).formats.source


def _by_canonical_name(own: Checkpoint, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was found for linears on disk, each of which is one linear."""
    names = {
        tensor.module: tensor.parts[0].removesuffix(".weight")
        for tensor in disk_tensors(own.config)
    }
    return {names[module]: value for module, value in found.items()}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "qwen3_moe"])
def test_it_is_the_same_where_transformers_runs_the_model(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    own, other = (
        open_checkpoint(tiny_model(kind)),
        _for_transformers(tiny_model(kind), tmp_path / "dst"),
    )
    tokenizer, _ = load_checked_tokenizer(own)
    expected = input_importance(own, tokenizer)
    found = _by_canonical_name(own, input_importance(other, tokenizer))
    others = {name for name in expected if name.endswith(".mlp.gate")}  # routers
    others |= {"lm_head"} if own.config.tied_embeddings else set()
    assert found.keys() == expected.keys() - others
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_rounding_gives_the_same_codes_where_transformers_runs_the_model(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    own, other = (
        quantkit.quantize(
            tiny_model(kind), tmp_path / via, "int4-g32", method="rtn", via=via, source_check=False
        )
        for via in VIAS
    )
    one, two = (load_file(result.path / "model.safetensors") for result in (own, other))
    assert one.keys() == two.keys()
    packed = [name for name in one if name.endswith("_packed")]
    assert packed
    differing = [name for name in packed if not torch.equal(one[name], two[name])]
    assert len(differing) <= len(packed) // 10
    weighted = [
        module
        for module, record in other.manifest["modules"].items()
        if record.get("solver") == Solver.WEIGHTED
    ]
    assert len(weighted) == len(packed)
    assert [text["rounding_kl"] for text in other.manifest["quality"]["texts"]] == [
        None,
        None,
    ]  # its own baseline
    kls = ([text["kl"] for text in result.manifest["quality"]["texts"]] for result in (own, other))
    assert next(kls) == pytest.approx(next(kls), rel=0.01)


@pytest.mark.slow
def test_uses_of_a_linear_are_summed_and_one_without_any_has_none(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """Of HRM, a pass runs the same layers several times; of Bart, a decoder without encoder
    skips its attention.
    """
    source, seen = (
        _for_transformers(tiny_model("hrm_text"), tmp_path / "dst"),
        dict[str, list[Tensor]](),
    )
    model = oracle.load(tiny_model("hrm_text"))
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: (
                seen.setdefault(name, []).append(inputs[0].flatten(0, -2)) if inputs else None
            )
        )
    oracle.logits(model, _sample(source))
    found = input_importance(source, None)
    targets = passage_of(source).partwise.targets
    uses = {name: seen[targets[f"{name}.weight"][0].removesuffix(".weight")] for name in found}
    assert max(map(len, uses.values())) > 1
    for name, inputs in uses.items():
        torch.testing.assert_close(found[name], _expected(torch.cat(inputs)), rtol=1e-3, atol=0)
    bart = _for_transformers(tiny_model("bart"), tmp_path / "bart")
    missing = set(linear_columns(bart.config)) - input_importance(bart, None).keys()
    assert missing
    assert all("encoder_attn" in name for name in missing)


def test_samples_go_on_to_the_head_only_for_its_own(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _for_transformers(tiny_model("llama"), tmp_path / "dst")
    head, inner = "lm_head", "model.layers.0.mlp.down_proj"
    loaded, load = list[str](), source.load

    def watched(name: str) -> Any:
        loaded.append(name)
        return load(name)

    monkeypatch.setattr(source, "load", watched)
    assert input_importance(source, None, linears=[inner]).keys() == {inner}
    assert f"{head}.weight" not in loaded
    assert input_importance(source, None, linears=[inner, head]).keys() == {inner, head}
    assert f"{head}.weight" in loaded


def test_a_plan_has_the_step(tiny_model: Tiny, tmp_path: Path) -> None:
    steps = quantkit.plan.quantize(
        tiny_model("qwen3_next"), tmp_path / "dst", "int4-g32", method="rtn"
    ).steps
    assert list(steps) == ["check of the source", importance.IMPORTANCE, "quantize", "gate"]
    assert steps[importance.IMPORTANCE] > 0


def _kl(source: Checkpoint, other: Checkpoint) -> float:
    batch = Batch.from_start(oracle.random_tokens(40, batch=8, vocabulary=2048))
    return compare_batches(source, other, [batch])[0].divergence.kl


def test_rounding_with_it_is_closer_to_the_source(tmp_path: Path) -> None:
    source = _uneven(tmp_path / "source")
    quantkit.quantize(
        source,
        tmp_path / "rtn",
        "int4-g32",
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    made, floats = (
        json.loads((tmp_path / "rtn" / "quantkit.json").read_text()),
        open_checkpoint(source),
    )
    assert {one["solver"] for one in made["modules"].values() if one["scheme"]} == {Solver.WEIGHTED}
    result = open_checkpoint(tmp_path / "rtn")
    assert _kl(floats, result) < 0.8 * _kl(
        floats, RtnBaseline(floats, schemes(result), searched=True)
    )


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
    weighted, even, spanning = (
        error.view(64, -1, scheme.group_size or 128).sum(-1) for error in errors
    )
    assert (weighted <= spanning * (1 + 1e-5)).all()
    assert weighted.sum() < 0.9 * even.sum()


@pytest.mark.slow
def test_an_interrupted_run_resumes_only_where_sums_are_the_same(
    tmp_path: Path, demo_model: Path
) -> None:
    def stop(phase: str, done: int, *_: object) -> None:
        if phase == "quantize" and done:
            raise KeyboardInterrupt

    arguments: Any = {"method": "rtn", "source_check": False}
    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", progress=stop, **arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with raises(ResumeError, found="changed number of threads"):
            quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", resume=True, **arguments)
    finally:
        torch.set_num_threads(threads)
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", resume=True, **arguments)
    quantkit.quantize(demo_model, tmp_path / "whole", "int4-g32", **arguments)
    first, second = (
        folder.joinpath("model.safetensors").read_bytes()
        for folder in (tmp_path / "out", tmp_path / "whole")
    )
    assert first == second
