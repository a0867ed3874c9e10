"""Calibrated scales of the KV cache of models that transformers runs: what transformers' cache
holds, and what transformers makes of them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from partial import contents
from safetensors.torch import load_file
from tiny_architectures import ARCHITECTURES, make
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

import quantkit
from quantkit.base.progress import silent
from quantkit.calibration import gptq_quantizer
from quantkit.calibration.cache_scales import scale_tokens, scales_of
from quantkit.calibration.importance import sample_tokens
from quantkit.distributed.group import SINGLE
from quantkit.doctor.diagnose import diagnose
from quantkit.errors import QualityError, UnsupportedError
from quantkit.formats.kv_scales import FP8
from quantkit.jobs.output.writer import Writer
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.model.layerwise import Batch
from quantkit.runtime.by_transformers import TransformersModel
from quantkit.text.tokenizer import load_tokenizer
from quantkit.via_transformers.forward import final_hidden, final_logits, open_to_run

Tiny = Callable[[str], Path]
# Short convolutions, and attention that caches keys and values in the second of two layers.
HYBRID = "lfm2"
GPTQ: dict[str, Any] = {"method": "gptq", "samples": 8, "length": 48}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "gptq": GPTQ,
    # With quantkit's decoder.
    "own": {"method": "rtn", "via": "own"},
    "own-gptq": {**GPTQ, "via": "own"},
}


def _quantize(source: Path, dst: Path, method: str = "rtn", **options: Any) -> Any:
    settings: dict[str, Any] = {
        "kv_cache": "fp8",
        "via": "transformers",
        "source_check": False,
        "accept_quality_loss": True,
    }
    return quantkit.quantize(source, dst, "int4-g32", **(settings | METHODS[method] | options))


def _read_scales(folder: Path) -> dict[str, Tensor]:
    scales: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("k_scale", "v_scale")):
            scales[name] = tensor
    return scales


def _draw_samples(source: Path, method: str) -> Tensor:
    """The samples that scales are calibrated on."""
    if "gptq" not in method:
        checkpoint = open_to_run(source, via="transformers")
        return sample_tokens(checkpoint, load_tokenizer(source), *scale_tokens(checkpoint))
    options = QuantizeOptions(source, source / "unused", "int4-g32", via="transformers", **GPTQ)
    plan = prepare(options)
    settings = plan.solver.settings
    assert settings is not None
    return settings.draw(plan.formats.source, group=SINGLE, progress=silent).tokens


@pytest.fixture(scope="module")
def quantized(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The hybrid model, by method."""
    folder = tmp_path_factory.mktemp("kv")
    return {method: _quantize(tiny_model(HYBRID), folder / method, method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_scales_are_those_of_what_the_cache_of_transformers_holds(
    method: str, quantized: dict[str, Any], tiny_model: Tiny, tmp_path: Path
) -> None:
    made = quantized[method].path
    plain = quantkit.convert(
        made, tmp_path / "plain", dequantize=True, tensors_only=True, source_check=False
    ).path
    assert not _read_scales(plain)
    model = oracle.load(plain)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(_draw_samples(tiny_model(HYBRID), method), past_key_values=cache)
    scales = _read_scales(made)
    assert set(scales) == {f"model.layers.1.self_attn.{part}_scale" for part in "kv"}
    for part, states in (("k", cache.layers[1].keys), ("v", cache.layers[1].values)):
        scale = scales[f"model.layers.1.self_attn.{part}_scale"]
        assert (scale.shape, scale.dtype) == ((1,), torch.float32)
        assert scale.item() == pytest.approx(states.abs().max().item() / 448, rel=1e-4)


@pytest.mark.parametrize("kind", [HYBRID, pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_transformers_rounds_keys_and_values_as_the_gate_does(
    kind: str, quantized: dict[str, Any], tiny_model: Tiny, tmp_path: Path
) -> None:
    if kind == HYBRID:
        folder = quantized["rtn"].path
    else:
        folder = _quantize(tiny_model(kind), tmp_path / kind).path
    with warnings.catch_warnings(action="ignore"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    tokens = oracle.random_tokens(40, vocabulary=model.config.vocab_size)
    with torch.no_grad():
        expected = model(tokens).logits[0]
    checkpoint = open_to_run(folder, via="transformers")
    rounded = _compute_logits(checkpoint, tokens)
    prompt = tokens[0].tolist()
    new = TransformersModel(checkpoint).generate(prompt, max_new_tokens=1, temperature=0)
    assert list(new) == [int(expected[-1].argmax())]
    checkpoint = open_to_run(folder, via="transformers")
    checkpoint.kv_cache = None
    assert (rounded - expected).abs().max() < 1e-4
    assert (_compute_logits(checkpoint, tokens) - expected).abs().max() > 1e-3


def _compute_logits(checkpoint: Any, tokens: Tensor) -> Tensor:
    (hidden,) = final_hidden(checkpoint, [Batch.from_start(tokens)])
    (logits,) = final_logits(checkpoint, [hidden[0]])
    return logits


def test_scales_of_an_image_text_model_have_its_names_on_disk(
    tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    made = _quantize(tiny_image_text_model("gemma3"), tmp_path / "made", "gptq").path
    scales = _read_scales(made)
    # transformers' own name is ``model.language_model.layers.N``, and towers have none.
    assert set(scales) == {
        f"language_model.model.layers.{layer}.self_attn.{part}_scale"
        for layer in (0, 1)
        for part in "kv"
    }
    with warnings.catch_warnings(action="ignore"):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    state = model.state_dict()
    for name, scale in scales.items():
        module = name.replace("language_model.model.", "model.language_model.")
        assert torch.equal(state[module], scale)


def test_the_result_says_so_wherever_it_is_described(quantized: dict[str, Any]) -> None:
    made = quantized["gptq"]
    assert made.kv_cache == made.manifest["kv_cache"] == "fp8"
    assert quantkit.inspect(made.path).kv_cache == {"scheme": FP8, "layers": 1}
    findings = diagnose(made.path, runtime="vllm").findings
    assert not [finding for finding in findings if finding.rule.name.startswith("kv-")]


def _compute_broken_scales(*arguments: Any) -> dict[str, Tensor]:
    return {name: scale / 100 for name, scale in scales_of(*arguments).items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_that_breaks_the_model_does_not_pass_the_gate(
    method: str,
    quantized: dict[str, Any],
    tiny_model: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert quantized[method].quality.problem() is None
    monkeypatch.setattr(gptq_quantizer, "scales_of", _compute_broken_scales)
    monkeypatch.setattr("quantkit.calibration.cache_scales.scales_of", _compute_broken_scales)
    with pytest.raises(QualityError):
        _quantize(tiny_model(HYBRID), tmp_path / "broken", method, accept_quality_loss=False)


def test_an_interrupted_run_gets_the_same_bytes(
    quantized: dict[str, Any],
    tiny_model: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_safe_point = Writer.record_safe_point
    count = itertools.count(1)

    def stop_after_a_block(self: Writer) -> None:
        record_safe_point(self)
        # First after the embedding, then after each block.
        if next(count) == 2:
            raise KeyboardInterrupt

    dst = tmp_path / "gptq"
    monkeypatch.setattr(Writer, "record_safe_point", stop_after_a_block)
    with pytest.raises(KeyboardInterrupt):
        _quantize(tiny_model(HYBRID), dst, "gptq")
    monkeypatch.undo()
    _quantize(tiny_model(HYBRID), dst, "gptq", resume=True)
    assert contents(dst) == contents(quantized["gptq"].path)


REFUSED = {
    "deepseek_v3": "latent vectors",
    "gpt_neox": "the cache of none of its modules",
    "mamba": "the cache of none of its modules",
    "opt": "'num_key_value_heads'",
    "gemma4_text": "'head_dim'",
    "zamba2": "do not know a scale by the name",
    "bart": "'num_key_value_heads'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_whose_scales_readers_would_not_use_are_refused_by_name(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _quantize(tiny_model(kind), tmp_path / "made")
    assert REFUSED[kind] in caught.value.problem
    assert caught.value.found == kind
    assert not list(tmp_path.iterdir())


def test_layers_that_share_keys_and_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {
        **ARCHITECTURES["gemma3n_text"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
    monkeypatch.setitem(ARCHITECTURES, "gemma3n_text", shared)
    make("gemma3n_text", tmp_path / "source")
    with pytest.raises(UnsupportedError) as caught:
        _quantize(tmp_path / "source", tmp_path / "made")
    assert "'model.layers.2.self_attn'" in caught.value.problem
