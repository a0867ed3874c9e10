"""Models that transformers runs, quantized to a size, and certified for long contexts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from partial import contents

import quantkit
from quantkit.bit_allocation.allocation import Measure
from quantkit.bit_allocation.fit import Fit
from quantkit.data.files import gate_texts
from quantkit.errors import RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.output.writer import Writer
from quantkit.jobs.quantize.existing import parse_allocation
from quantkit.quality.position_divergence import position_windows
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import load_tokenizer, prompt_start

Tiny = Callable[[str], Path]
SAMPLES: dict[str, Any] = {"samples": 8, "length": 64, "source_check": False}
BITS = 5.5


def _quantize(source: Path, dst: Path, **options: Any) -> quantkit.QuantizeResult:
    return quantkit.quantize(source, dst, via="transformers", **(SAMPLES | options))


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[[str], Path]) -> Path:
    """A model with shared experts, which `via` lets transformers run."""
    return tiny_model("qwen3_next")


@pytest.fixture(scope="module")
def fitted(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> quantkit.QuantizeResult:
    return _quantize(hybrid, tmp_path_factory.mktemp("fit") / "bits", target_bits=BITS)


def test_the_bits_are_what_was_requested(fitted: quantkit.QuantizeResult) -> None:
    allocation = fitted.allocation
    assert allocation is not None
    written = open_checkpoint(fitted.path, tensors_only=True)
    bits = weights = 0
    schemes: dict[str, str] = {}
    for module, reported in fitted.manifest["modules"].items():
        if reported["scheme"] is None:
            # Those that stay floats by default do not count.
            assert "linear_attn" in module or module == "lm_head"
            continue
        rows, columns = written.info(f"{module}.weight").shape
        scheme = QuantScheme.parse(reported["scheme"])
        weights += rows * columns
        bits += rows * (columns * scheme.bits + 32 * scheme.groups(columns))
        schemes[module] = reported["scheme"]
    assert BITS - 0.5 < bits / weights <= BITS
    assert allocation.bits == pytest.approx(bits / weights, abs=1e-6)
    assert allocation.weight_bytes == (fitted.path / "model.safetensors").stat().st_size
    assert allocation.measure == "KL"
    assert fitted.manifest["bit_allocation"] == allocation.to_json()
    measures: tuple[Measure, ...] = ("KL", "relative error")
    for measure in measures:
        measured = replace(allocation, measure=measure)
        assert parse_allocation(measured.to_json(), measured.target) == measured
    assert len(set(schemes.values())) > 1
    for layer in (0, 1):
        bank = f"model.layers.{layer}.mlp.experts."
        assert len({scheme for name, scheme in schemes.items() if name.startswith(bank)}) == 1


def test_files_of_weights_are_at_most_so_large(tiny_model: Tiny, tmp_path: Path) -> None:
    floats = (tiny_model("lfm2") / "model.safetensors").stat().st_size
    maximum = floats * 7 // 8
    made = _quantize(tiny_model("lfm2"), tmp_path / "made", max_size=maximum)
    assert made.allocation is not None
    size = (made.path / "model.safetensors").stat().st_size
    assert made.allocation.weight_bytes == size
    assert maximum - 20_000 < size <= maximum
    oracle.load(made.path)


def test_a_better_choice_has_a_smaller_loss(tiny_model: Tiny, tmp_path: Path) -> None:
    """Of two sizes, the larger one is estimated, and measured, to lose less."""
    losses: list[float] = []
    divergences: list[float] = []
    for bits in (4.5, 8.5):
        made = _quantize(tiny_model("lfm2"), tmp_path / str(bits), target_bits=bits)
        assert made.allocation is not None
        losses.append(made.allocation.loss)
        divergences.append(made.manifest["quality"]["texts"][0]["kl"])
    assert losses[1] < losses[0]
    assert divergences[1] < divergences[0]


def test_an_interrupted_run_keeps_its_choice_and_gets_the_same_bytes(
    hybrid: Path,
    fitted: quantkit.QuantizeResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_safe_point = Writer.record_safe_point
    count = itertools.count(1)

    def stop_after_a_block(self: Writer) -> None:
        record_safe_point(self)
        if next(count) == 2:
            raise KeyboardInterrupt

    def refuse_choice(*_: Any, **__: Any) -> None:
        raise AssertionError("the choice is made again")

    dst = tmp_path / "bits"
    monkeypatch.setattr(Writer, "record_safe_point", stop_after_a_block)
    with pytest.raises(KeyboardInterrupt):
        _quantize(hybrid, dst, target_bits=BITS)
    monkeypatch.undo()
    monkeypatch.setattr(Fit, "choose_allocation", refuse_choice)
    _quantize(hybrid, dst, target_bits=BITS, resume=True)
    assert contents(dst) == contents(fitted.path)


def test_linears_that_cannot_be_solved_do_not_count(tiny_model: Tiny, tmp_path: Path) -> None:
    made = _quantize(tiny_model("bart"), tmp_path / "made", target_bits=6)
    assert made.allocation is not None
    assert 5 < made.allocation.bits <= 6
    left = [module for module, one in made.manifest["modules"].items() if one["scheme"] is None]
    assert all("encoder_attn" in module or module == "lm_head" for module in left)
    assert len([module for module in left if "encoder_attn" in module]) == 8


def test_a_size_that_no_choice_has_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        _quantize(tiny_model("lfm2"), tmp_path / "made", target_bits=2)
    assert not list(tmp_path.iterdir())


def test_the_certificate_is_the_divergence_of_what_transformers_computes(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    source = tiny_model("lfm2")
    made = _quantize(
        source,
        tmp_path / "made",
        scheme="int4-g32",
        method="rtn",
        samples=None,
        length=None,
        certify_positions=300,
        accept_quality_loss=True,
    )
    certificate = made.positions
    assert certificate is not None
    assert set(certificate.caches) == {"float"}
    assert quantkit.inspect(made.path).positions == certificate
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode("\n\n".join(gate_texts().values()))
    windows, _ = position_windows("", ids, prompt_start(tokenizer), 300, 320)
    assert windows.shape == (certificate.windows, certificate.length)
    before = oracle.logits(oracle.load(source), windows).log_softmax(-1)
    after = oracle.logits(oracle.load(made.path), windows).log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    for bucket in certificate.caches["float"]:
        expected = kl[:, bucket.start : bucket.stop].mean().item()
        assert bucket.kl == pytest.approx(expected, rel=1e-3)
    assert torch.isfinite(kl).all()
