"""Divergence by position: the buckets, the int8 cache, long attention in pieces, the certificate
of `quantize`.
"""

from __future__ import annotations

import csv
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

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.data.files import excerpt
from quantkit.errors import RequestError
from quantkit.evals.evaluate import evaluate
from quantkit.evals.report import build_sheet, build_tables, render_markdown
from quantkit.evals.table import render
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.output.writer import Writer
from quantkit.model import attention
from quantkit.model.attention import ScoreSettings, make_causal_attention
from quantkit.model.load import load_model
from quantkit.quality.measures import compare
from quantkit.quality.position_divergence import divergence_by_position
from quantkit.quality.positions import (
    PositionCertificate,
    PositionDivergence,
    position_edges,
    rise,
    rise_text,
)
from quantkit.runtime.engine import Engine
from quantkit.text.tokenizer import load_tokenizer


def _with_window(config: ModelConfig) -> ModelConfig:
    return replace(config, layers=tuple(replace(layer, window=256) for layer in config.layers))


def _buckets(*figures: tuple[float, float | None]) -> list[PositionDivergence]:
    return [
        PositionDivergence(128 * at, 128 * (at + 1), 128, *one, 1.0)
        for at, one in enumerate(figures)
    ]


def _short(path: Path, letters: int) -> Path:
    """A file with the first letters of a text, some three a token."""
    path.write_text(excerpt()[:letters])
    return path


def test_buckets_double_and_the_last_is_cut() -> None:
    assert position_edges(1000) == [0, 128, 256, 512, 1000]
    assert position_edges(32768)[-3:] == [8192, 16384, 32768]
    assert position_edges(100) == [0, 100]


@pytest.mark.parametrize(
    ("length", "last"), [(515, 256), (767, 256), (768, 512), (131, 0), (192, 128), (1030, 512)]
)
def test_a_few_last_tokens_are_no_bucket(length: int, last: int) -> None:
    assert position_edges(length)[-2:] == [last, length]


@pytest.mark.parametrize(
    ("tokens", "kl", "error", "beyond"),
    [
        (128, 0.021, 0.01, True),
        (100, 0.021, 0.01, False),
        (100, 0.041, 0.01, True),
        (128, 0.02, None, False),
        (20, 0.021, None, True),
        (20, math.nan, None, True),
    ],
)
def test_few_tokens_stop_a_model_only_where_they_are_clear(
    tokens: int, kl: float, error: float | None, beyond: bool
) -> None:
    sound = PositionDivergence(
        start=0, stop=128, tokens=128, kl=0.001, kl_error=0.0001, top1_agreement=1.0
    )
    buckets = [
        sound,
        PositionDivergence(
            start=128, stop=128 + tokens, tokens=tokens, kl=kl, kl_error=error, top1_agreement=1.0
        ),
    ]
    certificate = PositionCertificate(
        text="text",
        sha256="0",
        asked=256,
        length=256,
        windows=1,
        kl_bound=0.02,
        caches={"float": buckets, "int8": buckets},
    )
    assert (certificate.problem() is not None) == beyond


def test_no_divergence_at_first_is_no_lack_of_positions() -> None:
    assert rise_text(_buckets((0.0, 0.0), (0.01, 0.001))) == "that at 0-127 is 0"


@pytest.mark.parametrize(
    ("last", "reported"),
    [
        (0.02, "2.00 ± 0.22 times that at 0-127: it rises"),
        (0.011, "no clear change"),
        (0.005, "falls"),
    ],
)
def test_a_rise_is_reported_where_the_errors_bear_it(last: float, reported: str) -> None:
    assert reported in rise_text(_buckets((0.01, 0.001), (last, 0.001)))
    assert rise(_buckets((0.01, 0.001))) is None


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize(
    "scores",
    [ScoreSettings(), ScoreSettings(softcap=3.0, scale=0.3), ScoreSettings(sinks=torch.ones(4))],
)
def test_pieces_of_attention_are_the_whole(
    window: int | None, scores: ScoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, (keys, values) = torch.randn(2, 4, 150, 16), torch.randn(2, 2, 2, 150, 16)
    positions = torch.arange(150) * 3  # which only have to rise
    whole = make_causal_attention(positions, [window])(0, queries, keys, values, scores)
    monkeypatch.setattr(attention, "MAX_QUERY_ROWS", 64)
    monkeypatch.setattr(attention, "SCORES_BYTES", 2 * 2 * 150 * 4 * 11)
    masks: list[torch.Size] = []
    mixed = attention._mix_values

    def seen(*arguments: Any) -> torch.Tensor:
        masks.append(arguments[1].shape[2] if arguments[3] is None else arguments[3].numel())
        return mixed(*arguments)

    monkeypatch.setattr(attention, "_mix_values", seen)
    for each in (positions, positions.expand(2, -1)):
        pieces = make_causal_attention(each, [window])(0, queries, keys, values, scores)
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)
    assert max(masks) < 2 * 150 * 25  # no mask of all by all


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_the_buckets_are_the_divergence_and_the_int8_cache_that_of_the_engine(
    kind: str, tmp_path: Path
) -> None:
    changes = {"sliding_window": 32} if kind == "gemma2" else {}
    original = oracle.make(kind, max_position_embeddings=256, num_hidden_layers=2, **changes)
    folder = oracle.save(original, tmp_path / "model")
    reference, other = open_checkpoint(folder), open_checkpoint(folder)
    other.config = replace(other.config, rope=replace(other.config.rope, theta=5000.0))
    windows = oracle.random_tokens(200, batch=2)
    (divergence,) = divergence_by_position(reference, [other], windows)
    whole = compare(reference, [other], windows)[0].divergence
    buckets = divergence["float"]
    assert [(bucket.start, bucket.stop, bucket.tokens) for bucket in buckets] == [
        (0, 128, 256),
        (128, 200, 144),
    ]
    kl = sum(bucket.tokens * bucket.kl for bucket in buckets) / 400
    assert kl == pytest.approx(whole.kl, rel=1e-5)
    agreement = sum(bucket.tokens * bucket.top1_agreement for bucket in buckets) / 400
    assert agreement == pytest.approx(whole.top1_agreement)

    model = load_model(folder, dtype=torch.float32, backend="reference")
    engine = Engine(model, 200, cache_dtype=torch.int8)
    tokens = windows[0]
    rounded = torch.cat(
        [engine.step(tokens[at : at + 1], [0], [at], [0]) for at in range(200)]
    ).log_softmax(-1)
    with torch.inference_mode():
        exact = model(tokens.unsqueeze(0), torch.arange(200))[0].log_softmax(-1)
    token_kl = (exact.exp() * (exact - rounded)).sum(-1)
    (divergence,) = divergence_by_position(reference, [reference], windows[:1])
    assert all(bucket.kl == 0 for bucket in divergence["float"])
    for bucket in divergence["int8"]:
        expected = token_kl[bucket.start : bucket.stop].mean().item()
        assert bucket.kl == pytest.approx(expected, abs=1e-5)
        assert bucket.kl > 1e-5


@pytest.mark.slow
def test_what_is_broken_far_on_is_seen_there(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    text = _short(tmp_path / "speech.txt", 8000)
    quantkit.convert(demo_model, tmp_path / "late")
    rope = {"rope_type": "linear", "factor": 1.1, "rope_theta": 10000.0}
    oracle.edit_json(tmp_path / "late" / "config.json", rope_scaling=rope, rope_parameters=rope)
    settings = {
        "texts": text,
        "against": demo_model,
        "window": 128,
        "positions": 1000,
        "position_windows": 9,
    }
    result = evaluate(tmp_path / "late", **settings)
    (note,) = result.notes
    assert "'speech'" in note
    buckets = result.rows[1].texts["speech"].positions["float"]
    assert result.rows[0].texts["speech"].positions == {}
    ids = load_tokenizer(demo_model).encode(text.read_text())
    assert [bucket.tokens for bucket in buckets] == [
        count * (len(ids) // 999) for count in (128, 128, 256, 488)
    ]
    assert buckets[0].kl < 0.05 < 0.2 < buckets[-1].kl
    shown = render(build_tables(result), "terminal")
    assert [line.split()[1] for line in shown if line.startswith("late")][-5:-1] == [
        bucket.name for bucket in buckets
    ]
    assert str(rise(buckets)) in shown[-1]
    report = render_markdown(result)
    assert all(bucket.name in report for bucket in buckets)
    (row,) = [
        row
        for row in csv.DictReader(render([build_sheet(result)], "csv"))
        if row["model"] == "late"
    ]
    assert float(row["kl_512_999_float"]) == pytest.approx(buckets[-1].kl, rel=0.1)
    assert float(row["top1_0_127_int8"]) <= 1
    assert result.to_json()["rows"][1]["texts"]["speech"]["positions"]["int8"][0]["start"] == 0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"positions": 1}, {"argument": "positions", "found": 1}),
        (
            {"positions": 256, "position_windows": 0},
            {"argument": "position_windows", "found": 0},
        ),
        ({"position_windows": 2}, {"options": ["positions", "position_windows"]}),
        ({"positions": "far"}, {"argument": "positions", "found": "'far'"}),
        ({"positions": 256, "against": None}, {}),
    ],
)
def test_what_cannot_be_measured_by_position_is_refused(
    settings: dict[str, Any], parts: dict[str, Any], demo_model: Path
) -> None:
    with raises(RequestError, **parts):
        evaluate(demo_model, **{"against": demo_model, **settings})


def test_a_certificate_is_in_the_manifest_and_the_model_card(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = tmp_path / "int8"
    requested = [
        "quantize",
        demo_model,
        dst,
        "--scheme",
        "int8",
        "--method",
        "rtn",
        "--certify-positions",
        "600",
    ]
    code, out, _ = run(capfd, "plan", *requested)
    assert code == 0
    plain = quantkit.plan.quantize(demo_model, dst, "int8", method="rtn")
    long = quantkit.plan.quantize(demo_model, dst, "int8", method="rtn", certify_positions=4096)
    assert long.seconds > plain.seconds
    assert long.phase == "the certificate"
    code, out, _ = run(capfd, *requested, "--certify-text", _short(tmp_path / "speech.txt", 4500))
    assert code == 0
    assert "int8 cache" in out
    certificate = json.loads((dst / "quantkit.json").read_text())["positions"]
    assert certificate["passed"]
    assert (certificate["asked"], certificate["length"], certificate["windows"]) == (600, 600, 2)
    assert [bucket["stop"] for bucket in certificate["caches"]["int8"]] == [128, 256, 600]
    readme = (dst / "README.md").read_text()
    assert "--certify-positions 600 --certify-text speech.txt" in readme
    assert "| 256-599 | " in readme
    inspected = quantkit.inspect(dst)
    assert inspected.positions is not None
    assert [line for line in inspected.lines() if "float cache" in line]


@pytest.mark.slow
def test_a_certificate_stops_what_is_broken_far_on(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_back: Callable[[Writer, str], StoredCheckpoint] = Writer.read_back

    def broken(self: Writer, folder: str) -> StoredCheckpoint:
        result = read_back(self, folder)
        result.config = _with_window(result.config)  # as long as the gate's
        return result

    monkeypatch.setattr(Writer, "read_back", broken)
    dst = tmp_path / "int8"
    text = _short(tmp_path / "speech.txt", 4500)
    requested = [
        "quantize",
        demo_model,
        dst,
        "--scheme",
        "int8",
        "--certify-positions",
        "600",
        "--certify-text",
        text,
    ]
    code, _, err = run(capfd, *requested)
    assert code == 8
    assert "256-599" in err
    assert not dst.exists()
    code, out, err = run(capfd, *requested, "--resume", "--accept-quality-loss")
    assert code == 0
    assert "256-599" in err
    certificate = quantkit.inspect(dst).positions
    assert certificate is not None
    problem = certificate.problem()
    assert problem is not None
    assert problem[0] in out
    assert problem[0] in run(capfd, "inspect", dst)[1]
    code, out, _ = run(capfd, "verify", demo_model, dst)
    assert code == 8
    assert out.splitlines()[-1].startswith("verdict: BEYOND")
    report = quantkit.verify(dst, dst)
    assert not report.ok
    assert not report.is_same
    assert problem[0] in (dst / "README.md").read_text()
    code, _, err = run(capfd, "verify", dst)
    assert code == 8
    assert str(dst) in err


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"certify_text": "text.txt"}, {"options": ["certify_text", "certify_positions"]}),
        ({"certify_positions": 1}, {"argument": "certify_positions", "found": 1}),
        (
            {"certify_positions": 512, "certify_text": "nowhere.txt"},
            {"path": Path("nowhere.txt")},
        ),
    ],
)
def test_a_certificate_that_makes_no_sense_is_refused(
    settings: dict[str, Any], parts: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    with raises(RequestError, **parts):
        quantkit.quantize(demo_model, tmp_path / "dst", "int8", method="rtn", **settings)
    assert not list(tmp_path.iterdir())
