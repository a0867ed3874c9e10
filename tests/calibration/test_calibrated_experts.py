"""GPTQ for mixtures of experts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch
from error_parts import raises
from partial import contents
from safetensors.torch import load_file, save_file
from saved_experts import NEVER, STARVED, save_experts
from solved_streams import CPU, record_hessians, solve_streams
from stored_codes import codes
from torch import Tensor

import quantkit
from quantkit.calibration import group_solver
from quantkit.calibration.effort import EFFORTS, Effort, activation_bytes
from quantkit.data.files import excerpt
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.model.attention import make_causal_attention
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.layerwise import Batch
from quantkit.model.load import load_model
from quantkit.model.mixers.mixer import Step
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Passage
from quantkit.quality.gate import RtnBaseline
from quantkit.quality.measures import compare_batches
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.scheme import QuantScheme


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts("mixtral", tmp_path_factory.mktemp("mixtral") / "model")


SAMPLES, LENGTH = 24, 40
TOKENS = SAMPLES * LENGTH


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(excerpt()[:11000])
    return path


def _quantize(
    src: Path, dst: Path, text: Path, scheme: Any = "int4-g32", **options: Any
) -> quantkit.QuantizeResult:
    settings = {
        "samples": SAMPLES,
        "length": LENGTH,
        "source_check": False,
        "accept_quality_loss": True,
        **options,
    }
    return quantkit.quantize(src, dst, scheme, method="gptq", calibration=text, **settings)


@pytest.fixture(scope="module")
def made(
    model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> quantkit.QuantizeResult:
    return _quantize(model, tmp_path_factory.mktemp("made") / "out", text)


def _kl(source: Checkpoint, other: Checkpoint) -> float:
    batch = Batch.from_start(oracle.random_tokens(LENGTH, batch=8, vocabulary=2048))
    return compare_batches(source, other, [batch])[0].divergence.kl


def _expert(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe-dense-layer", "gpt-oss"])
def test_gptq_is_closer_to_the_source_than_rounding(case: str, text: Path, tmp_path: Path) -> None:
    source = save_experts(case, tmp_path / "source")
    made = _quantize(source, tmp_path / "gptq", text, "int4-g32")
    floats, solved = open_checkpoint(source), open_checkpoint(tmp_path / "gptq")
    assert _kl(floats, solved) < 0.8 * _kl(
        floats, RtnBaseline(floats, schemes(solved), searched=True)
    )
    assert quantkit.verify(source, tmp_path / "gptq").ok
    assert quantkit.verify(tmp_path / "gptq").ok
    assert not made.quality.distorted


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe-dense-layer", "olmoe-clip", "gpt-oss"])
def test_samples_pass_through_the_models_own_layers(case: str, tmp_path: Path) -> None:
    source = open_checkpoint(save_experts(case, tmp_path / "source"))
    tokens = oracle.random_tokens(LENGTH, batch=SAMPLES, vocabulary=2048)
    decoder = oracle.ours(source)
    passage = Passage(DecoderParts(source, LENGTH, CPU), source.path)
    with torch.inference_mode():
        expected = decoder.hidden(tokens, torch.arange(LENGTH))
    first, second = passage.compute_hidden_states([tokens[:10], tokens[10:]])
    torch.testing.assert_close(torch.cat([first, second]), expected)


def test_a_hessian_is_of_the_tokens_that_are_sent_to_the_expert_by_their_shares(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(model)
    tokens = oracle.random_tokens(LENGTH, batch=SAMPLES, vocabulary=2048)
    seen = record_hessians(monkeypatch)
    schemes = {_expert(0, expert, "down_proj"): QuantScheme.parse("int8") for expert in (1, NEVER)}
    solve_streams(source, tokens, schemes)
    decoder, positions = load_model(source, dtype=torch.float32, device="cpu"), torch.arange(LENGTH)
    step = Step(decoder.rotary(positions), make_causal_attention(positions, decoder.config.windows))
    block: Any = decoder.model.layers[0]
    with torch.inference_mode():
        x = decoder.model.embed(tokens)
        x = block.finish("mixer", x, block.inner("mixer", x, step))
        states = block.inner("mlp", x, step).flatten(0, 1)
        shares, chosen = block.mlp.route(states)
        rows = (chosen == 1).any(1)
        weights = (shares * (chosen == 1)).sum(1)[rows]
        sent = block.mlp.experts[1].inner(states[rows]) * weights.unsqueeze(1)
        everyone = block.mlp.experts[NEVER].inner(states)
    torch.testing.assert_close(seen[0], sent.t() @ sent, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen[1], everyone.t() @ everyone, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_manifest_reports_which_tokens_calibrated_an_expert(
    made: quantkit.QuantizeResult,
) -> None:
    records = made.manifest["modules"]
    for layer in range(3):
        counts = [records[_expert(layer, expert, "up_proj")] for expert in range(6)]
        assert counts[NEVER]["tokens_from"] == "all"
        assert counts[NEVER]["tokens"] == TOKENS
        assert counts[NEVER]["routed_tokens"] == 0
        sent = [one.get("routed_tokens", one["tokens"]) for one in counts]
        assert sum(sent) == 2 * TOKENS
        assert all(
            (one["tokens_from"] == "all") == (count < 2 * 64)
            for one, count in zip(counts, sent, strict=True)
        )
        assert all(one["solver"] == "gptq" for one in counts)
        assert "tokens" not in records[f"model.layers.{layer}.self_attn.q_proj"]
    starved = records[_expert(0, STARVED, "up_proj")]
    assert 0 < starved["routed_tokens"] < 2 * 64


def test_starved_experts_are_reported_in_one_line(made: quantkit.QuantizeResult) -> None:
    (line,) = [note for note in made.notes if "experts" in note]
    experts = [
        [
            made.manifest["modules"][_expert(layer, expert, part)]
            for part in ("gate_proj", "down_proj")
        ]
        for layer in range(3)
        for expert in range(6)
    ]
    starved = [own for own in experts if any(one["tokens_from"] == "all" for one in own)]
    never = [own for own in starved if any(one.get("routed_tokens") == 0 for one in own)]
    assert 3 <= len(never) < len(starved) < 18
    assert (
        line
        == f"{len(starved)} of 18 experts were sent too few calibration tokens, {len(never)} of"
        " them none: all tokens calibrated them"
    )


@pytest.mark.slow
def test_experts_that_change_too_much_on_their_own_tokens_are_calibrated_on_all(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        group_solver, "drift_damping", lambda inputs, tokens: 0.1
    )  # few tokens are believed much
    source = save_experts("gpt-oss-square", tmp_path / "source", num_local_experts=16)
    made = _quantize(source, tmp_path / "made", text, accept_quality_loss=False)
    assert quantkit.verify(source, made.path).ok
    records = made.manifest["modules"]
    again = [one for one in records.values() if "tokens_reason" in one]
    assert again
    for one in again:
        assert (one["solver"], one["tokens_from"], one["tokens"]) == ("gptq", "all", TOKENS)
        assert one["routed_tokens"] >= 2 * 64
        assert re.fullmatch(
            r".* [\d.]+ .*, expected at most [\d.]+",
            one["tokens_reason"],
        )
    (line,) = [note for note in made.notes if "calibration tokens" in note]
    experts = {
        name.rpartition(".")[0] for name, one in records.items() if one.get("tokens_from") == "all"
    }
    assert line.startswith(f"{len(experts)} of 48 experts ")
    assert "rounded" not in line

    def interrupt(*now: Any) -> None:
        if now == ("quantize", 59, 156, "linears"):  # the first expert of block 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _quantize(source, tmp_path / "resumed", text, accept_quality_loss=False, progress=interrupt)
    _quantize(source, tmp_path / "resumed", text, accept_quality_loss=False, resume=True)
    assert contents(tmp_path / "resumed") == contents(made.path)


@pytest.mark.slow
def test_experts_that_change_too_much_on_any_tokens_are_rounded(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_solver, "weight_bound", lambda *given: 0.0)
    made = _quantize(model, tmp_path / "out", text)
    rounded = [made.manifest["modules"][_expert(0, expert, "up_proj")] for expert in range(6)]
    assert {(one["solver"], one["tokens_from"]) for one in rounded} == {
        ("round-to-nearest, searched scales", "all")
    }
    tries = [one["tokens_reason"].count("changed by") for one in rounded]
    assert tries == [1 if one["routed_tokens"] < 2 * 64 else 2 for one in rounded]
    assert set(tries) == {1, 2}
    weight = open_checkpoint(model).load(_expert(0, 0, "up_proj.weight"))
    assert isinstance(weight, Tensor)
    found = codes(made.path)[_expert(0, 0, "up_proj")]
    expected, _ = round_to_nearest(weight, found.scheme, found.scale.dtype, select_column_kernels)
    assert torch.equal(found.codes, expected.codes)
    (line,) = [note for note in made.notes if "calibration tokens" in note]
    assert " 54 of their linears " in line
    assert not made.quality.fallbacks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("expert", [0, NEVER])
@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_nan_in_an_expert_is_refused_by_name(
    expert: int, part: str, model: Path, text: Path, tmp_path: Path
) -> None:
    source = oracle.copy(model, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    stacked = {"gate_proj": "w1", "down_proj": "w2"}
    name = f"model.layers.1.block_sparse_moe.experts.{expert}.{stacked[part]}.weight"
    weights[name][3, 5] = torch.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    for allowed in (False, True):
        with raises(NonFiniteError, f"experts.{expert}.{part}.weight'", found="1 of 6144"):
            _quantize(source, tmp_path / "out", text, allow_nonfinite=allowed)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_disk_and_resumed_runs_give_equal_bytes(
    made: quantkit.QuantizeResult, model: Path, text: Path, tmp_path: Path
) -> None:
    expected = contents(made.path)
    _quantize(model, tmp_path / "disk", text, activation_memory=0)
    assert contents(tmp_path / "disk") == expected
    for name, stop in (
        ("within", ("quantize", 32, 66, "linears")),
        ("between", ("quantize", 47, 66, "linears")),
    ):

        def interrupt(*now: Any, stop: Any = stop) -> None:
            if now == stop:
                raise KeyboardInterrupt

        reported: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            _quantize(model, tmp_path / name, text, progress=interrupt)
        _quantize(
            model,
            tmp_path / name,
            text,
            resume=True,
            progress=lambda *now, reported=reported: reported.append(now),
        )
        assert contents(tmp_path / name) == expected
        assert any(phase == "calibrate" and unit == "linears" for phase, _, _, unit in reported)


@pytest.mark.slow
def test_experts_have_schemes_of_their_own(model: Path, text: Path, tmp_path: Path) -> None:
    int4 = quantkit.Override("*.experts.*", QuantScheme.parse("int4-g32"))
    kept = quantkit.Override("*.layers.1.*.experts.2.*", None)
    recipe = quantkit.Recipe(QuantScheme.parse("int8"), (int4, kept))
    made = _quantize(model, tmp_path / "out", text, recipe)
    records = made.manifest["modules"]
    assert records["model.layers.1.self_attn.q_proj"]["scheme"] == "int8"
    assert records[_expert(1, 0, "up_proj")]["scheme"] == "int4-g32"
    assert records[_expert(1, 2, "up_proj")]["scheme"] is None


@pytest.mark.parametrize("effort", [EFFORTS["default"], EFFORTS["thorough"]])
def test_stopped_samples_hold_what_was_reckoned(
    effort: Effort, model: Path, demo_model: Path
) -> None:
    for path, modules in (
        (model, [_expert(0, expert, "down_proj") for expert in range(6)]),
        (demo_model, [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]),
    ):
        source = open_checkpoint(path)
        tokens = oracle.random_tokens(512, batch=64, vocabulary=2048)
        store = ActivationStore()
        schemes = dict.fromkeys(modules, QuantScheme.parse("int8"))
        solve_streams(source, tokens, schemes, effort=effort, store=store)
        streams = replace(effort, gradient_tokens=0)
        reckoned, *_ = activation_bytes(source.config, tokens.shape, streams, 10**9)
        assert store.peak_bytes == pytest.approx(reckoned, rel=0.1), path


@pytest.mark.slow
def test_two_processes_decide_the_same_way_and_make_what_one_makes(
    model: Path, text: Path, tmp_path: Path
) -> None:
    kept = "*.self_attn.*"  # so that the first router sees the same states in both
    _quantize(model, tmp_path / "one", text, keep=kept)
    first, second = forked.group(
        2,
        "from quantkit.cli.main import main; main()",
        "quantize",
        model,
        tmp_path / "two",
        "--scheme",
        "int4-g32",
        "--method",
        "gptq",
        "--calibration",
        text,
        "--samples",
        str(SAMPLES),
        "--length",
        str(LENGTH),
        "--keep",
        kept,
        "--no-source-check",
        "--accept-quality-loss",
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    made = [
        json.loads((tmp_path / name / "quantkit.json").read_text())["modules"]
        for name in ("one", "two")
    ]
    both = codes(tmp_path / "one"), codes(tmp_path / "two")
    for module in (
        _expert(0, expert, part) for expert in range(6) for part in ("gate_proj", "down_proj")
    ):
        alone, shared = (
            [each[module].get(key) for key in ("tokens", "tokens_from", "routed_tokens")]
            for each in made
        )
        assert alone == shared
        one, two = (each[module].codes for each in both)
        assert (one != two).float().mean() < (0.01 if module.endswith("gate_proj") else 0.05)
    first, second = (open_checkpoint(tmp_path / name) for name in ("one", "two"))
    reference = open_checkpoint(model)
    assert _kl(reference, second) == pytest.approx(_kl(reference, first), rel=0.2)


def test_inputs_of_shared_experts_count_by_their_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(save_experts("qwen2-moe-dense-layer", tmp_path / "source"))
    layer = next(index for index, one in enumerate(source.config.layers) if one.experts)
    tokens = oracle.random_tokens(LENGTH, batch=SAMPLES, vocabulary=2048)
    seen = record_hessians(monkeypatch)
    module = f"model.layers.{layer}.mlp.shared_experts.down_proj"
    solve_streams(source, tokens, {module: QuantScheme.parse("int8")})
    # By its modules, which have hooks.
    decoder = oracle.ours(source)
    mlp: Any = decoder.model.layers[layer].mlp
    states: list[Tensor] = []
    mlp.shared_experts.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.inference_mode():
        decoder(tokens)
        rows = states[0].flatten(0, -2)
        inner = mlp.shared_experts.inner(rows) * torch.sigmoid(mlp.shared_expert_gate(rows))
    torch.testing.assert_close(seen[0], inner.t() @ inner, rtol=1e-3, atol=1e-3)
