"""One table of bounds, one set of windows: what the gate lets through is never called different."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError, QualityError
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.bounds import BOUNDS, TIMES_ROUNDING, weight_bound
from quantkit.quality.gate import run_gate
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.qtensor import quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme, Scales


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and itself in an int4 that costs it far more than rounding costs a trained one."""
    folder = tmp_path_factory.mktemp("rough")
    model = oracle.make("llama", hidden_size=128, intermediate_size=256)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(1.7)
    source = oracle.save(model, folder / "source")
    quantkit.quantize(source, folder / "int4", "int4-g128", method="rtn", accept_quality_loss=True)
    return source, folder / "int4"


def _kl(folder: Path) -> float:
    texts = json.loads((folder / "quantkit.json").read_text())["quality"]["texts"]
    return max(text["kl"] for text in texts)


def test_a_pair_that_just_passes_the_gate_is_within_its_bound(
    rough: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, result = rough
    kl = _kl(result)
    assert kl > 0.11  # beyond what `verify` once allowed int4
    monkeypatch.setitem(
        BOUNDS, "int4", replace(BOUNDS["int4"], kl=1.0001 * kl, perplexity_ratio=10.0)
    )
    quantkit.quantize(source, tmp_path / "out", "int4-g128", method="rtn")
    for pair in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        report = verify(*pair)
        assert report.verdict is Verdict.WITHIN_BOUND
        assert report.probes["random tokens"].divergence.kl == pytest.approx(kl, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["kl", "perplexity_ratio"])
def test_what_the_gate_stops_is_different(
    figure: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", method="rtn")
    assert verify(demo_model, tmp_path / "out").verdict is Verdict.WITHIN_BOUND
    tight = {"kl": 1e-4, "perplexity_ratio": 0.99}[figure]
    monkeypatch.setitem(BOUNDS, "int4", replace(BOUNDS["int4"], **{figure: tight}))
    with pytest.raises(QualityError):
        quantkit.quantize(demo_model, tmp_path / "other", "int4-g64", method="rtn")
    report = verify(demo_model, tmp_path / "out")
    assert report.verdict is Verdict.DIFFERENT
    assert not all(probe.within for probe in report.probes.values())


def test_verify_measures_on_the_texts_of_the_gate(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int8")
    probes = verify(demo_model, tmp_path / "out").probes
    for text in json.loads((tmp_path / "out" / "quantkit.json").read_text())["quality"]["texts"]:
        probe = probes[text["text"]]
        assert probe.divergence.tokens == text["tokens"]
        assert probe.divergence.kl == pytest.approx(text["kl"], rel=1e-3)
        ratio = text["perplexity"] / text["source_perplexity"]
        assert probe.perplexity_ratio == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    "scheme", ["int8", "int4-g32", "int4-g128-asym", "q3_k", "q4_k", "q5_0", "q6_k", "nvfp4"]
)
def test_a_weight_may_lose_three_times_what_rounding_loses(scheme: str) -> None:
    weight = torch.randn(16, 512) * 0.01
    weight[:, 0] = 0.3  # outliers, which make rounding lose more
    quantized = quantize_rtn(weight, QuantScheme.parse(scheme), torch.float16)
    error = relative_error(quantized, weight)
    assert weight_bound(quantized, weight, quantized.scheme) == pytest.approx(
        max(2**-8, TIMES_ROUNDING * error)
    )
    assert (
        TIMES_ROUNDING / 2 * error
        < weight_bound(quantized, quantized, quantized.scheme)
        < 2 * TIMES_ROUNDING * error
    )


def test_a_weight_may_compensate_a_scheme_that_does_not_divide_its_rows() -> None:
    """Its bound is that of as few bits, in groups that divide its rows; one bit more would lose
    half as much.
    """
    coarse_schemes = ("q3_k", "q4_k", "q5_k", "int4-g128", "mxfp4", "nvfp4")
    for coarse, columns in itertools.product(coarse_schemes, (24, 32, 40, 96, 576)):
        weight = torch.randn(16, columns)
        scheme = QuantScheme.parse(coarse)
        quantized = quantize_rtn(weight, QuantScheme(8, None), torch.float16)
        finer_scheme = QuantScheme(scheme.bits + 1, 8, scales=Scales.BLOCKS)
        finer = quantize_rtn(weight, finer_scheme, torch.float16)
        bound = weight_bound(quantized, weight, scheme)
        assert bound > TIMES_ROUNDING * relative_error(finer, weight), (coarse, columns)


def test_the_bound_of_fp8_follows_from_its_rounding() -> None:
    """On logarithmic scales it lies between the bounds of 6 and 5 bits where the errors lie."""
    weight = torch.randn(64, 4096)

    def error(scheme: str) -> float:
        return relative_error(
            quantize_rtn(weight, QuantScheme.parse(scheme), torch.float16), weight
        )

    share = math.log(error("fp8") / error("q6_k")) / math.log(error("q5_k") / error("q6_k"))
    expected = BOUNDS["int6"].kl * (BOUNDS["int5"].kl / BOUNDS["int6"].kl) ** share
    assert BOUNDS["fp8"].kl == pytest.approx(expected, rel=0.1)
    assert error("fp8-block") == pytest.approx(error("fp8"), rel=0.02)
    for scheme in ("mxfp4", "nvfp4"):
        assert error("int4-g32") * 0.95 < error(scheme) < error("int4-g128") * 1.05
    rounded = InputRounding("float").round_inputs(weight)
    assert ((rounded - weight).norm() / weight.norm()).item() == pytest.approx(
        error("fp8"), rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "activations", "expected"),
    [
        ("fp8", "none", 0.06),
        ("fp8", "fp8", 0.12),
        ("fp8-block", "fp8", 0.12),
        ("int8", "none", 0.02),
        ("int8", "int8", 0.04),
        ("mxfp4", "none", 0.25),
        ("mxfp4", "fp8", 0.31),
        ("nvfp4", "none", 0.25),
    ],
)
def test_rounded_inputs_add_to_the_bound_of_the_weights(
    scheme: str, activations: str, expected: float, demo_model: Path, tmp_path: Path
) -> None:
    """The gate, the model card and `verify` have the same bounds."""
    result = quantkit.quantize(
        demo_model,
        tmp_path / "out",
        scheme,
        method="rtn",
        activations=activations,
        accept_quality_loss=True,
    )
    assert [text.kl_bound for text in result.quality.texts] == pytest.approx([expected] * 2)
    assert result.quality.perplexity_ratio_bound == pytest.approx(1 + expected)
    assert f" {expected:g} " in (tmp_path / "out" / "README.md").read_text()
    bound = verify(demo_model, tmp_path / "out").bound
    assert (bound.kl, bound.perplexity_ratio) == pytest.approx((expected, 1 + expected))


@pytest.mark.slow
def test_swapped_scales_are_a_difference(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "q", "int4-g32", method="rtn")
    other = oracle.copy(tmp_path / "q", tmp_path / "swapped")
    tensors = load_file(other / "model.safetensors")
    for layer in range(4):
        gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight_scale" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for first in (demo_model, tmp_path / "q"):
        assert verify(first, other).verdict is Verdict.DIFFERENT


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "wider"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_between_float_types_every_element_counts(
    dtype: str, wider: str, demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "a", dtype=dtype)
    quantkit.convert(demo_model, tmp_path / "b", dtype=wider)
    for pair in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")):
        assert verify(*pair).verdict in (Verdict.SAME, Verdict.WITHIN_BOUND)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["lm_head.weight"][1900, 3] += 2**-6 * tensors["lm_head.weight"][1900, 3]
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    report = verify(tmp_path / "a", tmp_path / "b")
    assert report.verdict is Verdict.DIFFERENT
    assert [tensor.name for tensor in report.differing] == ["lm_head.weight"]


@pytest.mark.slow
def test_a_layer_that_changed_more_than_its_scheme_explains_stops_the_gate(
    demo_model: Path, tmp_path: Path
) -> None:
    name = "model.layers.2.self_attn.v_proj"
    quantkit.quantize(demo_model, tmp_path / "out", "int8")
    source, result = open_checkpoint(demo_model), open_checkpoint(tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "quantkit.json").read_text())["modules"]
    records = {f"{module}.weight": facts for module, facts in modules.items()}
    assert run_gate(source, result, records).problem() is None
    records[f"{name}.weight"] |= {"relative_error": 1.4, "solver": "gptq"}
    problem = run_gate(source, result, records).problem()
    assert problem is not None
    assert name in problem[0]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"eos_token_id": 7}, "2 against 7"),
        ({"bos_token_id": 7}, "1 against 7"),
        ({"max_position_embeddings": 4096}, "max_context 64 against 4096"),
    ],
)
def test_what_a_config_says_of_texts_is_part_of_a_model(
    changes: dict[str, int], difference: str, tmp_path: Path, capfd: Capture
) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "a")
    other = oracle.copy(source, tmp_path / "b")
    (other / "generation_config.json").unlink()
    oracle.edit_json(other / "config.json", **changes)
    code, out, _ = run(capfd, "verify", source, other)
    assert code == 11
    assert difference in out


@pytest.mark.slow
def test_end_tokens_of_the_generation_settings_count(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    oracle.edit_json(other / "generation_config.json", eos_token_id=[2, 9])
    report = verify(tmp_path / "a", other)
    assert report.verdict is Verdict.DIFFERENT
    (problem,) = report.problems
    assert problem.endswith("2 against 2, 9")
    assert verify(demo_model, other).verdict is Verdict.SAME  # a Meta folder states no end tokens


@pytest.mark.slow
def test_a_missing_tokenizer_is_a_difference(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    for path in other.glob("tokenizer*"):
        path.unlink()
    for pair in ((tmp_path / "a", other), (other, tmp_path / "a")):
        report = verify(*pair)
        assert report.verdict is Verdict.DIFFERENT
        assert any(str(other) in problem for problem in report.problems)


def _retokenized(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def _swap(content: dict[str, Any]) -> None:
    """Two rare tokens of the vocabulary change places."""
    vocabulary = content["model"]["vocab"]
    rare = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[rare[0]], vocabulary[rare[1]] = vocabulary[rare[1]], vocabulary[rare[0]]


def test_every_token_is_compared(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = _retokenized(oracle.copy(tmp_path / "a", tmp_path / "b"), _swap)
    report = verify(tmp_path / "a", other)
    assert report.verdict is Verdict.DIFFERENT
    assert "tokenizer" in report.problems[0]


def test_special_tokens_are_compared(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    _retokenized(other, lambda content: content["added_tokens"].pop())
    assert verify(tmp_path / "a", other).verdict is Verdict.DIFFERENT


def test_two_tokenizers_that_disagree_do_not_become_one_of_meta(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    quantkit.convert(tmp_path / "a", tmp_path / "sound", to="meta")
    _retokenized(tmp_path / "a", _swap)
    with raises(CheckpointError, path=tmp_path / "a" / "tokenizer.model"):
        quantkit.convert(tmp_path / "a", tmp_path / "meta", to="meta")


@pytest.mark.slow
def test_a_nan_beyond_the_texts_is_a_difference_of_quantized_models_too(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.embed_tokens.weight"][1900] = torch.nan
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert verify(demo_model, tmp_path / "out").verdict is Verdict.DIFFERENT
