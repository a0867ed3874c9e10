"""Calibrated scales of a KV cache: what transformers' cache holds, and what it makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import quantkit
from quantkit.base.messages import Option
from quantkit.base.progress import silent
from quantkit.calibration import gptq_quantizer
from quantkit.calibration.cache_scales import scale_tokens, scales_of
from quantkit.calibration.importance import sample_tokens
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.distributed.group import SINGLE
from quantkit.errors import NonFiniteError, QualityError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import prepare
from quantkit.quality.verify import verify
from quantkit.tensors.dtypes import DType
from quantkit.text.tokenizer import load_tokenizer

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
SIZES = {"num_hidden_layers": 2, "vocab_size": load_tokenizer(DEMO_MODEL).vocab_size}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
}
GPTQ: dict[str, Any] = {"method": "gptq", "calibration": EXCERPT, "samples": 8, "length": 48}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn": ("int8", {}),
    "weighted": ("int4-g32", {"method": "rtn"}),
    "gptq": ("int4-g32", GPTQ),
    # No linear of a block is solved.
    "gptq of the head": ("int4-g32", {**GPTQ, "keep": "*layers*", "head": "int4-g32"}),
}


def _source(family: str, folder: Path) -> Path:
    oracle.save(oracle.make(family, **SIZES, **FAMILIES[family]), folder)
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


def _made(source: Path, dst: Path, method: str = "rtn", **options: Any) -> Any:
    scheme, own = METHODS[method]
    options = (
        {"kv_cache": "fp8", "accept_quality_loss": True, "source_check": False} | own | options
    )
    return quantkit.quantize(source, dst, scheme, **options)


def _tokens(source: Path, method: str) -> Tensor:
    """The samples that scales are calibrated on."""
    if METHODS[method][1].get("method") != "gptq":
        checkpoint = open_checkpoint(source)
        return sample_tokens(checkpoint, load_tokenizer(source), *scale_tokens(checkpoint))
    plan = prepare(QuantizeOptions(source, source.parent / "unused", "int4-g32", **GPTQ))
    settings = plan.solver.settings
    assert settings is not None
    return settings.draw(plan.formats.source, group=SINGLE, progress=silent).tokens


def _scales(folder: Path) -> dict[str, Tensor]:
    return {
        name: one
        for name, one in load_file(folder / "model.safetensors").items()
        if name.endswith(("k_scale", "v_scale"))
    }


class Recording(DynamicCache):
    """Remembers the largest key and value that each layer has put in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.largest: dict[tuple[int, str], float] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        self.largest |= {
            (layer, "k"): keys.abs().max().item(),
            (layer, "v"): values.abs().max().item(),
        }
        return super().update(keys, values, layer, *args, **options)


CASES = [
    *((family, "rtn") for family in FAMILIES),
    ("llama", "weighted"),
    ("llama", "gptq"),
    ("gemma3_text", "gptq"),
    ("qwen3", "gptq of the head"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "method"), CASES)
def test_scales_are_those_of_what_the_cache_of_transformers_holds(
    family: str, method: str, tmp_path: Path
) -> None:
    source = _source(family, tmp_path / "source")
    made = _made(source, tmp_path / "made", method)
    plain = quantkit.convert(
        made.path, tmp_path / "plain", dequantize=True, source_check=False
    ).path
    assert not _scales(plain)
    model, found = oracle.load(plain), _scales(made.path)
    cache = Recording(config=model.config)
    with torch.no_grad():
        model(_tokens(source, method), past_key_values=cache)
    for (layer, part), largest in cache.largest.items():
        scale = found.pop(f"model.layers.{layer}.self_attn.{part}_scale")
        assert (scale.shape, scale.dtype) == ((1,), torch.float32)
        assert scale.item() == pytest.approx(largest / 448, rel=1e-4)
    assert not found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _source("qwen2", tmp_path_factory.mktemp("qwen2") / "source")  # which has biases of keys


@pytest.fixture(scope="module")
def made(source: Path) -> Any:
    return _made(source, source.parent / "made")


def test_a_folder_runs_as_transformers_runs_it(made: Any, tmp_path: Path) -> None:
    settings = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"] == SCHEME
    assert QuantizationConfig.model_validate(settings).kv_cache_scheme is not None
    theirs = AutoModelForCausalLM.from_pretrained(made.path)
    state = theirs.state_dict()
    assert all(torch.equal(state[name], scale) for name, scale in _scales(made.path).items())
    tokens = oracle.random_tokens(40, 2, SIZES["vocab_size"])
    plain = quantkit.convert(
        made.path, tmp_path / "plain", dequantize=True, source_check=False
    ).path
    model, _ = quantkit.load(made.path, device="cpu")
    with torch.inference_mode():
        expected, found = theirs(tokens).logits, model(tokens)
        without = oracle.load(plain)(tokens).logits
    error, effect = ((one - expected).abs().mean().item() for one in (found, without))
    assert error < 0.05 * effect


def test_new_tokens_are_those_after_the_whole_text(made: Any) -> None:
    """Every cache of the runtime holds what the model without one sees."""
    model, _ = quantkit.load(made.path, device="cpu")
    prompt = oracle.random_tokens(20, vocabulary=SIZES["vocab_size"])[0].tolist()
    new = list(quantkit.generate(model, prompt, max_new_tokens=12, temperature=0))
    for count in range(len(new)):
        assert model([*prompt, *new[:count]])[-1].argmax().item() == new[count]


def test_the_result_says_so_wherever_it_is_described(made: Any, capfd: Capture) -> None:
    assert ", KV cache fp8, " in made.lines()[0]
    assert made.kv_cache == made.manifest["kv_cache"] == "fp8"
    assert "| KV cache | float8" in (made.path / "README.md").read_text()
    assert "--kv-cache fp8" in (made.path / "README.md").read_text()
    assert quantkit.inspect(made.path).kv_cache == {
        "scheme": SCHEME,
        "layers": SIZES["num_hidden_layers"],
    }
    code, out, _ = run(capfd, "doctor", made.path, "--for", "vllm")
    assert "KV cache" not in out
    assert code == 0


def test_the_plan_names_the_cache_and_its_step(source: Path, tmp_path: Path) -> None:
    found = quantkit.plan.quantize(source, tmp_path / "made", "int8", kv_cache="fp8")
    assert "KV cache: fp8" in found.lines()
    assert found.steps["scales of the KV cache"] > 0
    # The gate also runs the result with floats in its cache.
    plain = quantkit.plan.quantize(source, tmp_path / "made", "int8")
    assert found.steps["gate"] > plain.steps["gate"]


def test_the_same_call_gives_the_same_bytes(source: Path, made: Any, tmp_path: Path) -> None:
    again = _made(source, tmp_path / "again")
    assert again.manifest["files"] == made.manifest["files"] | {
        "README.md": again.manifest["files"]["README.md"]  # which has the name of the folder
    }


def _broken(*_: Any) -> dict[str, Tensor]:
    return {name: one / 100 for name, one in scales_of(*_).items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_that_breaks_the_model_does_not_pass_the_gate(
    method: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _made(source, tmp_path / "sound", method).quality.problem() is None
    monkeypatch.setattr(gptq_quantizer, "scales_of", _broken)
    monkeypatch.setattr("quantkit.calibration.cache_scales.scales_of", _broken)
    with pytest.raises(QualityError, match="too far from its source") as raised:
        _made(source, tmp_path / "broken", method, accept_quality_loss=False)
    hint = raised.value.message
    options = [part for part in hint.parts if isinstance(part, Option)]
    other_method = "rtn" if method == "gptq" else "gptq"
    assert {option.value for option in options if option.name == "method"} == {other_method}


def test_verify_measures_a_model_with_its_cache(source: Path, made: Any, tmp_path: Path) -> None:
    damaged = oracle.copy(made.path, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    save_file(
        {k: v / 100 if k.endswith("k_scale") else v for k, v in tensors.items()},
        damaged / "model.safetensors",
        {"format": "pt"},
    )
    (damaged / "quantkit.json").unlink()
    assert verify(source, made.path).ok
    assert not verify(source, damaged).ok


REFUSED: dict[str, tuple[list[str], int, str]] = {
    **{
        to: (["--to", to], 4, f"{to} cannot store the scales of a KV cache")
        for to in ("gptq", "awq", "mlx", "gguf")
    },
    "by its tensors": (["--tensors-only"], 4, "only its tensors are known"),
    "unknown": (["--kv-cache", "int8"], 2, "'int8' is not 'fp8'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_have_scales_is_refused_before_anything_is_calibrated(
    what: str, source: Path, tmp_path: Path, capfd: Capture
) -> None:
    options, expected, problem = REFUSED[what]
    code, _, err = run(
        capfd,
        "quantize",
        source,
        tmp_path / "made",
        "--scheme",
        "int8",
        "--kv-cache",
        "fp8",
        *options,
    )
    assert (code, list(tmp_path.iterdir())) == (expected, [])
    assert problem in err


def test_keys_of_zeros_have_a_scale_of_one_and_tiny_ones_none_of_zero(tmp_path: Path) -> None:
    found = scales_of(
        "model.layers.3.self_attn", torch.tensor([0.0, 1e-9]), DType.FLOAT16, tmp_path
    )
    k, v = (found[f"model.layers.3.self_attn.{part}_scale"] for part in "kv")
    assert (k.item(), v.dtype) == (1.0, torch.float16)
    assert v.item() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_keys_without_a_scale_are_an_error(value: float, tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteError,
        match=r"values of 'model.layers.0.self_attn' are NaN, Inf or too large for a scale",
    ):
        scales_of("model.layers.0.self_attn", torch.tensor([1.0, value]), DType.FLOAT16, tmp_path)
