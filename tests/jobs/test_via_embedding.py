"""The embedding and the head of models that transformers runs, quantized: as for models with an
own decoder.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.architectures.names import EMBEDDING
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import EMBEDDING_SCHEME

Tiny = Callable[[str], Path]
Made = Callable[..., quantkit.QuantizeResult]
WEIGHT = f"{EMBEDDING}.weight"
UNREAD = "transformers does not load a packed embedding (seen in 5.23), nor does vLLM 0.32"


@pytest.fixture(scope="module")
def sources(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a separate head, and one whose head is the embedding."""
    tied = oracle.copy(tiny_model("llama"), tmp_path_factory.mktemp("source") / "tied")
    weights = load_file(tied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    oracle.edit_json(tied / "config.json", tie_word_embeddings=True)
    return {"tied": tied, **{kind: tiny_model(kind) for kind in ("llama", "qwen3_next")}}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Quantizes one of the sources, and its embedding to int8; with the same options once."""
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def quantized(name: str, method: str, via: str, **options: Any) -> quantkit.QuantizeResult:
        samples = {"samples": 16, "length": 64} if method == "gptq" else {}
        given: dict[str, Any] = {"source_check": False, "embedding": "int8", **samples, **options}
        dst = folder / "-".join([name, method, via, *options])
        return quantkit.quantize(sources[name], dst, "int4-g32", method=method, via=via, **given)

    return lambda name, method="rtn", via="transformers", **options: quantized(
        name, method, via, **options
    )


def _embedding(folder: Path) -> QuantTensor:
    found = open_checkpoint(folder, tensors_only=True).load(WEIGHT)
    assert isinstance(found, QuantTensor)
    return found


def _floats(source: Checkpoint, name: str) -> Tensor:
    found = source.load(name)
    return found.dequantize() if isinstance(found, QuantTensor) else found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_it_is_rounded_and_measured_as_by_the_own_decoder(name: str, made: Made) -> None:
    own, other = (made(name, via=via) for via in ("own", "transformers"))
    one, two = (load_file(result.path / "model.safetensors") for result in (own, other))
    assert one.keys() == two.keys()
    parts = [name for name in one if name.startswith(EMBEDDING)]
    assert len(parts) == 3
    assert all(torch.equal(one[name], two[name]) for name in parts)
    kls = ([text["kl"] for text in result.manifest["quality"]["texts"]] for result in (own, other))
    assert next(kls) == pytest.approx(next(kls), rel=0.01)
    assert own.embedding == other.embedding == "int8"
    assert own.manifest["modules"][EMBEDDING] == other.manifest["modules"][EMBEDDING]
    groups = [
        json.loads((result.path / "config.json").read_text())["quantization_config"]
        for result in (own, other)
    ]
    assert [list(group["config_groups"].values())[-1]["targets"] for group in groups] == [
        ["Embedding"]
    ] * 2
    assert EMBEDDING not in groups[1]["ignore"]
    on_cpus = "" if name == "tied" else " on CPUs"
    assert any(note.endswith(f"{UNREAD}{on_cpus}; quantkit does") for note in other.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "qwen3_next"])
def test_gptq_leaves_it_rounded_and_all_that_reads_the_result_reads_it(
    name: str, made: Made, sources: dict[str, Path], tmp_path: Path
) -> None:
    result = made(name, "gptq")
    source = _floats(open_checkpoint(sources[name], tensors_only=True), WEIGHT)
    expected, found = quantize_rtn(source, EMBEDDING_SCHEME, source.dtype), _embedding(result.path)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    report = quantkit.verify(result.path, sources[name])
    assert report.ok
    assert quantkit.verify(result.path).ok
    floats = quantkit.convert(result.path, tmp_path / "floats", dequantize=True, tensors_only=True)
    model = oracle.load(floats.path)
    assert torch.equal(model.get_input_embeddings().weight, expected.dequantize())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (
        name == "tied"
    )


@pytest.mark.slow
def test_a_head_is_solved_last_whatever_its_name(
    made: Made, tiny_model: Tiny, tmp_path: Path
) -> None:
    records = made("qwen3_next", "gptq", head="int8").manifest["modules"]
    assert [records[name]["scheme"] for name in (EMBEDDING, "lm_head")] == ["int8", "int8"]
    assert [records[name]["solver"] for name in (EMBEDDING, "lm_head")] == [
        "round-to-nearest",
        "gptq",
    ]
    given: dict[str, Any] = {
        "method": "rtn",
        "via": "transformers",
        "source_check": False,
        "head": "int8",
    }
    other = quantkit.quantize(tiny_model("gpt_neox"), tmp_path / "neox", "int4-g32", **given)
    assert other.manifest["modules"]["embed_out"]["scheme"] == "int8"


def test_a_tied_head_has_the_embeddings_scheme(
    made: Made, sources: dict[str, Path], tmp_path: Path
) -> None:
    assert made("tied", head="int8").schemes == made("tied").schemes
    given: dict[str, Any] = {
        "method": "rtn",
        "via": "transformers",
        "source_check": False,
        "head": "int8",
    }
    with pytest.raises(
        RequestError, match=r"lm_head is tied to the embedding.*`embedding=\"int8\"` quantizes both"
    ):
        quantkit.quantize(sources["tied"], tmp_path / "dst", "int4-g32", **given)
    assert not list(tmp_path.iterdir())


def _refused(source: Path, dst: Path, message: str, **options: Any) -> None:
    given = {"method": "rtn", "via": "transformers", "embedding": "int8", **options}
    with pytest.raises(RequestError, match=message) as caught:
        quantkit.quantize(source, dst, "int4-g32", **given)
    assert caught.value.exit_code == 2
    assert not dst.exists()


def test_what_does_not_fit_is_refused_by_name(
    sources: dict[str, Path], tiny_model: Tiny, tmp_path: Path
) -> None:
    dst, keeps = tmp_path / "dst", "embedding of this model cannot be quantized"
    expected = rf"expected one matrix, '{WEIGHT}'\); leave `embedding` out"
    _refused(
        tiny_model("gpt_neox"), dst, rf"{keeps} \(found 'gpt_neox.embed_in.weight', {expected}"
    )
    copied = oracle.copy(tiny_model("llama"), tmp_path / "copied")
    oracle.edit_json(copied / "config.json", tie_word_embeddings=True)
    _refused(
        copied, dst, rf"{keeps} \(found lm_head.weight and {WEIGHT}, which are one in the model"
    )
    _refused(sources["llama"], dst, "does not support this scheme", embedding="int4-g32")
    _refused(
        sources["llama"],
        dst,
        "that quantkit does not run itself cannot be quantized",
        tensors_only=True,
        via=None,
    )
