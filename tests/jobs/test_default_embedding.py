"""The embedding and the head of a small model are quantized by default, and by no other option."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
from command import Capture, run
from config_cases import config_keys

import quantkit
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize import default_embedding
from quantkit.jobs.quantize.default_embedding import VocabularyShare
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme

_HEAD = CANONICAL["head"]
# Of Llama 3.1 8B and Llama 3.2 1B, with their published numbers of parameters.
_LLAMA_8B = (
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    8_030_261_248,
)
_LLAMA_1B = (
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    1_235_814_400,
)


def _share(sizes: dict[str, Any], bits: int) -> VocabularyShare:
    keys = config_keys("llama", **{**sizes, "head_dim": sizes.get("head_dim", 128)})
    config = config_from_hf({**keys, "torch_dtype": "bfloat16"}, "config.json")
    return VocabularyShare.of(config, bits)


def test_shares_are_those_of_published_models() -> None:
    sizes, parameters = _LLAMA_8B
    matrix = sizes["vocab_size"] * sizes["hidden_size"]
    untied = _share(sizes, 4)
    assert untied.weights == 2 * matrix
    assert untied.of_weights == pytest.approx(2 * matrix / parameters)
    # The norms are not read as codes: 65 vectors.
    linear_bits = 4 * (parameters - 2 * matrix - 65 * sizes["hidden_size"])
    assert untied.of_reads == pytest.approx(16 * matrix / (16 * matrix + linear_bits))
    assert not untied.is_large
    sizes, parameters = _LLAMA_1B
    matrix = sizes["vocab_size"] * sizes["hidden_size"]
    tied = _share(sizes, 8)
    assert tied.weights == matrix
    assert tied.of_weights == pytest.approx(matrix / parameters)
    assert tied.is_large
    assert not _share({**sizes, "vocab_size": 2000}, 8).is_large


def test_of_experts_those_of_one_token_are_read() -> None:
    keys = config_keys("mixtral", num_local_experts=8, num_experts_per_tok=2)
    config = config_from_hf({**keys, "torch_dtype": "bfloat16"}, "config.json")
    dense = VocabularyShare.of(config, 4)
    all_read = config_from_hf(
        {**keys, "num_experts_per_tok": 8, "torch_dtype": "bfloat16"}, "config.json"
    )
    assert dense.of_weights == VocabularyShare.of(all_read, 4).of_weights
    assert dense.of_reads > 1.5 * VocabularyShare.of(all_read, 4).of_reads


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "tied": oracle.save(oracle.make("llama", tie_word_embeddings=True), folder / "tied"),
        "untied": oracle.save(oracle.make("llama"), folder / "untied"),
    }


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this size get it too."""
    monkeypatch.setattr(default_embedding, "_MIN_WEIGHTS", 1)
    monkeypatch.setattr(default_embedding, "_LARGE_SHARE", 0.05)


def _quantize(source: Path, dst: Path, scheme: Any = "int4-g32", **options: Any) -> Any:
    options = {"method": "rtn", "accept_quality_loss": True, "source_check": False, **options}
    return quantkit.quantize(source, dst, scheme, **options)


def _schemes(path: Path) -> dict[str, QuantScheme | None]:
    checkpoint = open_checkpoint(path)
    found = {}
    for module in (EMBEDDING, _HEAD):
        name = f"{module}.weight"
        if name in checkpoint.names():
            value = checkpoint.load(name)
            found[module] = value.scheme if isinstance(value, QuantTensor) else None
    return found


_INT8 = QuantScheme.parse("int8")


@pytest.mark.usefixtures("small_counts")
def test_it_is_what_the_option_requests(sources: dict[str, Path], tmp_path: Path) -> None:
    default = _quantize(sources["tied"], tmp_path / "a")
    named = _quantize(sources["tied"], tmp_path / "b", embedding="int8")
    assert (default.path / "model.safetensors").read_bytes() == (
        named.path / "model.safetensors"
    ).read_bytes()
    assert _schemes(default.path) == {EMBEDDING: _INT8}
    assert default.embedding == "int8"
    assert any('embedding="keep"' in str(note) for note in default.notes)


@pytest.mark.usefixtures("small_counts")
def test_a_separate_head_gets_it_too(sources: dict[str, Path], tmp_path: Path) -> None:
    default = _quantize(sources["untied"], tmp_path / "a")
    assert _schemes(default.path) == {EMBEDDING: _INT8, _HEAD: _INT8}
    named = _quantize(sources["untied"], tmp_path / "b", head="int4-g32")
    assert _schemes(named.path) == {EMBEDDING: _INT8, _HEAD: QuantScheme.parse("int4-g32")}
    kept = _quantize(sources["untied"], tmp_path / "c", keep="lm_head")
    assert _schemes(kept.path) == {EMBEDDING: _INT8, _HEAD: None}


@pytest.mark.usefixtures("small_counts")
def test_a_separate_head_does_not_count_in_an_average_that_was_requested(
    tmp_path: Path,
) -> None:
    """With 8 bits in the head, no choice for the other linears has an average this low."""
    assert not open_checkpoint(DEMO_MODEL).config.tied_embeddings
    options = {"scheme": None, "target_bits": 4.6, "samples": 2, "length": 32, "method": None}
    result = _quantize(DEMO_MODEL, tmp_path / "dst", **options)
    assert _schemes(result.path) == {EMBEDDING: None, _HEAD: None}


@pytest.mark.usefixtures("small_counts")
@pytest.mark.parametrize(
    "options",
    [
        {"embedding": "keep"},
        {"keep": "model.embed_tokens"},
        {"scheme": Recipe(QuantScheme.parse("int4-g32"))},
        {"scheme": "fp8"},
        {"scheme": "int8", "activations": "int8"},
        {"to": "gptq"},
        {"to": "compressed-tensors"},
    ],
    ids=str,
)
def test_floats_stay(options: dict[str, Any], sources: dict[str, Path], tmp_path: Path) -> None:
    result = _quantize(sources["tied"], tmp_path / "dst", **options)
    assert _schemes(result.path) == {EMBEDDING: None}
    assert result.embedding is None


def test_a_few_weights_stay_floats(sources: dict[str, Path], tmp_path: Path) -> None:
    assert _schemes(_quantize(sources["tied"], tmp_path / "dst").path) == {EMBEDDING: None}


@pytest.mark.usefixtures("small_counts")
def test_each_format_gets_what_it_holds(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    forms = ["gptq", "compressed-tensors", "gguf"]
    result = _quantize(tiny_model("llama"), tmp_path / "all", to=forms)
    assert _schemes(result.path / "gptq") == {EMBEDDING: None, _HEAD: None}
    # Who names this format uses other readers, which do not load a quantized embedding.
    assert _schemes(result.path / "compressed-tensors") == {EMBEDDING: None, _HEAD: None}
    (file,) = (result.path / "gguf").glob("*.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"


@pytest.mark.usefixtures("small_counts")
@pytest.mark.parametrize("embedding", [None, "keep"])
def test_the_card_repeats_it(
    embedding: str | None, sources: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    first = _quantize(sources["tied"], tmp_path / "first", embedding=embedding)
    match = re.search(r"```\n(quantkit quantize .*)\n```", (first.path / "README.md").read_text())
    assert match is not None
    words = shlex.split(match[1])[1:]
    words[1:3] = [str(sources["tied"]), str(tmp_path / "second")]
    code, _, _ = run(capsys, *words, "--no-source-check")
    assert code == 0
    weights = [folder / "model.safetensors" for folder in (first.path, tmp_path / "second")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_another_word_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        _quantize(sources["tied"], tmp_path / "dst", embedding="keeps")
