"""`evaluate` of models that transformers runs: the same figures as transformers' own, and what
is refused.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from torch import Tensor

import quantkit
from quantkit.data.files import excerpt
from quantkit.errors import RequestError, UnsupportedError
from quantkit.evals.models import open_models
from quantkit.quality.measures import text_windows
from quantkit.text.tokenizer import load_tokenizer, prompt_start

TEXT = {"speech": [excerpt()[:2500]]}
RUN_BY = f"run by transformers {importlib.metadata.version('transformers')}"


def _log_probabilities(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = oracle.load(folder)(input_ids=tokens).logits.log_softmax(-1)
    return found


@pytest.mark.slow
def test_perplexity_and_kl_are_those_of_transformers(hybrid: Path, hybrid_int4: Path) -> None:
    ids = load_tokenizer(hybrid).encode(TEXT["speech"][0], specials=True)
    windows = text_windows(ids, [], 64)
    p, q = (_log_probabilities(folder, windows) for folder in (hybrid, hybrid_int4))
    loss = -q[:, :-1].gather(-1, windows[:, 1:, None]).mean().item()
    found = quantkit.evaluate(hybrid_int4, against=hybrid, texts=TEXT, window=64)
    measured = found.rows[1].texts["speech"]
    assert measured.token_perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert measured.divergence is not None
    assert measured.divergence.kl == pytest.approx(
        (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3
    )
    assert [f"{row.name}: {RUN_BY}" for row in found.rows] == found.notes[:2]
    assert "transformers" in found.versions


@pytest.mark.slow
def test_a_known_family_has_the_same_figures_both_ways(demo_model: Path, tmp_path: Path) -> None:
    folder = quantkit.convert(demo_model, tmp_path / "hf").path
    alone = [
        quantkit.evaluate(folder, texts=TEXT, window=64, backend=way)
        for way in ("own", "transformers", None)
    ]
    rows = [one.rows[0].texts["speech"] for one in alone]
    assert rows[1].token_perplexity == pytest.approx(rows[0].token_perplexity, rel=1e-4)
    assert rows[1].documents.word_perplexity == pytest.approx(
        rows[0].documents.word_perplexity, rel=1e-4
    )
    assert [f"hf: {RUN_BY}" in one.notes for one in alone] == [False, True, False]
    other, kept = (
        quantkit.convert(demo_model, tmp_path / "fp32", dtype="fp32").path,
        tmp_path / "kept",
    )
    for count, way in enumerate(
        ("own", "transformers"), 1
    ):  # states of one are never used for the other
        quantkit.evaluate(
            other, against=folder, texts=TEXT, window=64, backend=way, cache_logits=kept
        )
        assert len(list(kept.iterdir())) == count


@pytest.mark.slow
def test_states_of_the_reference_are_kept(hybrid: Path, hybrid_int4: Path, tmp_path: Path) -> None:
    given = {"against": hybrid, "texts": TEXT, "window": 64}
    usual = quantkit.evaluate(hybrid_int4, **given)
    for _ in range(2):
        found = quantkit.evaluate(hybrid_int4, **given, cache_logits=tmp_path / "cache")
        assert found.rows == usual.rows
        assert len(list((tmp_path / "cache").iterdir())) == 1


def test_what_needs_our_decoder_is_refused_by_name(
    hybrid: Path, hybrid_int4: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "eval", hybrid_int4, "--against", hybrid, "--speed")
    assert code == 2
    assert f"--speed requires a model that quantkit runs itself (found {RUN_BY})" in err


@pytest.mark.slow
def test_divergence_by_position_is_that_of_transformers(hybrid: Path, hybrid_int4: Path) -> None:
    tokenizer = load_tokenizer(hybrid)
    ids = tokenizer.encode(TEXT["speech"][0])
    windows = text_windows(ids, prompt_start(tokenizer), 200)[:2]
    p, q = (_log_probabilities(folder, windows) for folder in (hybrid, hybrid_int4))
    expected = (p.exp() * (p - q)).sum(-1)
    measured = quantkit.evaluate(
        hybrid_int4, against=hybrid, texts=TEXT, window=64, positions=200, position_windows=2
    )
    # transformers has no cache of int8 rows.
    assert list(measured.rows[1].texts["speech"].positions) == ["float"]
    buckets = measured.rows[1].texts["speech"].positions["float"]
    assert (buckets[0].start, buckets[-1].stop) == (0, 200)
    for bucket in buckets:
        kl = expected[:, bucket.start : bucket.stop].mean().item()
        assert bucket.kl == pytest.approx(kl, rel=1e-3)
    lines = "\n".join(measured.lines())
    assert buckets[0].name in lines
    assert "int8 cache" not in lines
    assert buckets[0].name in measured.to_html()


def test_several_processes_are_refused(hybrid: Path) -> None:
    group: Any = SimpleNamespace(size=2)
    with pytest.raises(
        RequestError, match="several processes cannot share a model that transformers runs"
    ):
        open_models([hybrid], None, None, group)


@pytest.mark.slow
def test_a_page_shows_where_the_two_differ(
    hybrid: Path, hybrid_int4: Path, tmp_path: Path, capfd: Capture
) -> None:
    given = (
        "--against",
        hybrid,
        "--window",
        "64",
        "--report",
        tmp_path / "page.html",
        "--json",
        tmp_path / "out.json",
    )
    assert run(capfd, "eval", hybrid_int4, *given)[0] == 0
    assert RUN_BY in (tmp_path / "page.html").read_text()
    assert "transformers" in json.loads((tmp_path / "out.json").read_text())["versions"]


def test_a_backend_that_is_named_is_the_one_that_runs(
    hybrid: Path, hybrid_int4: Path, demo_model: Path
) -> None:
    for folder in (hybrid, hybrid_int4):
        with pytest.raises(UnsupportedError, match=r'backend="transformers"'):
            quantkit.evaluate(folder, texts=TEXT, backend="own")
    with pytest.raises(
        RequestError, match="only Hugging Face folders can be read by their tensors"
    ):
        quantkit.evaluate(demo_model, texts=TEXT, backend="transformers")
    with pytest.raises(RequestError, match="unknown value of `backend`"):
        quantkit.evaluate(hybrid, texts=TEXT, backend="xla")  # type: ignore[arg-type]
