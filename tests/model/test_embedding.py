"""An int8 embedding: quantized, written and read in each format, and run from its codes; the
head tied to it or not.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import list_options, raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibration import quantizers
from quantkit.data.files import DEMO_MODEL
from quantkit.distributed.shard import CheckpointShard, split_model
from quantkit.errors import (
    NonFiniteError,
    QualityError,
    QuantkitError,
    RequestError,
    UnsupportedError,
)
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels.dispatch import BACKENDS
from quantkit.model.layerwise import Batch, head_logits, layerwise_hidden
from quantkit.model.linear import QuantEmbedding
from quantkit.model.load import load_model
from quantkit.quality.bounds import worst_row
from quantkit.quality.verify import Verdict, verify
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import SCHEMES, QuantScheme

pytestmark = pytest.mark.cpu_kernels

EMBEDDING = "model.embed_tokens"
WEIGHT = f"{EMBEDDING}.weight"
KINDS = ("tied", "untied")
INT8 = SCHEMES["int8"]
TOKENS = [1, 7, 30, 4, 55, 18, 9, 77]


GIVEN: dict[str, Any] = {"method": "rtn", "accept_quality_loss": True, "source_check": False}


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with a tokenizer."""
    folder = tmp_path_factory.mktemp("worded") / "model"
    oracle.save(
        oracle.make("llama", tie_word_embeddings=True, num_hidden_layers=1, vocab_size=4096).half(),
        folder,
    )
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of either kind the source; it quantized with an int8 embedding; and what that means: the same
    codes in the linears, and floats in the embedding (and a tied head).
    """
    home = tmp_path_factory.mktemp("embedding")
    with pytest.MonkeyPatch.context() as patch:
        # Importance depends on the embedding.
        patch.setattr("quantkit.calibration.importance.input_importance", lambda *_, **__: {})
        for kind in KINDS:
            small = {"num_hidden_layers": 1, "eos_token_id": None}
            oracle.save(
                oracle.make("llama", tie_word_embeddings=kind == "tied", **small).half(),
                home / kind,
            )
            quantkit.quantize(
                home / kind, home / f"{kind}-int8", "int4-g32", embedding="int8", **GIVEN
            )
            means = oracle.copy(home / kind, home / f"{kind}-floats")
            tensors = load_file(means / "model.safetensors")
            tensors[WEIGHT] = quantize_rtn(tensors[WEIGHT], INT8, torch.float16).dequantize()
            save_file(tensors, means / "model.safetensors", {"format": "pt"})
            quantkit.quantize(means, home / f"{kind}-means", "int4-g32", **GIVEN)
    return home


def _codes(folder: Path) -> QuantTensor:
    value = open_checkpoint(folder).load(WEIGHT)
    assert isinstance(value, QuantTensor)
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_written_as_compressed_tensors_writes_it(kind: str, folders: Path) -> None:
    folder = folders / f"{kind}-int8"
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    linears, embedding = settings["config_groups"].values()
    assert (linears["targets"], embedding["targets"]) == (["Linear"], ["Embedding"])
    assert (embedding["weights"]["num_bits"], embedding["weights"]["strategy"]) == (8, "channel")
    assert (embedding["format"], embedding["input_activations"]) == ("pack-quantized", None)
    assert settings["ignore"] == ["lm_head"]
    stored = {
        name
        for name in load_file(folder / "model.safetensors")
        if name.startswith((EMBEDDING, "lm_head"))
    }
    assert stored - {"lm_head.weight"} == {
        f"{WEIGHT}_{leaf}" for leaf in ("packed", "scale", "shape")
    }
    floats = open_checkpoint(folders / kind).load(WEIGHT)
    assert isinstance(floats, torch.Tensor)
    assert torch.equal(_codes(folder).codes, quantize_rtn(floats, INT8, torch.float16).codes)
    made = json.loads((folder / "quantkit.json").read_text())
    assert made["modules"][EMBEDDING]["scheme"] == "int8"
    assert verify(folders / kind, folder).verdict is Verdict.WITHIN_BOUND


def test_it_may_be_named_too(folders: Path, tmp_path: Path) -> None:
    folder = oracle.copy(folders / "untied-int8", tmp_path / "theirs")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_1"]["targets"] = [EMBEDDING]
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    assert schemes(open_checkpoint(folder)) == schemes(open_checkpoint(folders / "untied-int8"))


@pytest.mark.parametrize("backend", ["reference", "cpu-exact"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_runs_as_the_floats_that_it_means(kind: str, backend: str, folders: Path) -> None:
    model = load_model(folders / f"{kind}-int8", device="cpu", dtype=torch.float32, backend=backend)
    expected = load_model(
        folders / f"{kind}-means", device="cpu", dtype=torch.float32, backend=backend
    )
    embedding = model.model.embed_tokens
    assert isinstance(embedding, QuantEmbedding)
    assert (embedding.head is model.lm_head) == (kind == "tied")  # one memory
    assert torch.equal(
        model.model.embed(torch.tensor([TOKENS])), expected.model.embed(torch.tensor([TOKENS]))
    )
    positions = torch.arange(len(TOKENS))
    found, right = (one(torch.tensor([TOKENS]), positions) for one in (model, expected))
    assert torch.allclose(found, right, atol=1e-3 * right.abs().max().item(), rtol=0)
    continued = [
        list(quantkit.generate(one, TOKENS, max_new_tokens=8)) for one in (model, expected)
    ]
    assert continued[0] == continued[1]
    held = {
        name: sum(b.nbytes for b in (*one.parameters(), *one.buffers()))
        for name, one in (("int8", model), ("floats", expected))
    }
    assert held["floats"] - held["int8"] > 2.9 * model.config.vocab_size * model.config.hidden_size


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_it_is_the_same(kind: str, folders: Path) -> None:
    found = []
    for name in ("int8", "means"):
        checkpoint = open_checkpoint(folders / f"{kind}-{name}")
        (hidden,) = layerwise_hidden(checkpoint, [Batch.from_start(torch.tensor([TOKENS]))])
        found.append(head_logits(checkpoint, [hidden[0]])[0])
    assert torch.equal(*found)


def test_kernels_give_back_the_rows_that_they_packed() -> None:
    schemes = (INT8, QuantScheme(8, 32), QuantScheme(4, 32), QuantScheme(4, 64, False))
    scale_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for scheme, scale_dtype in itertools.product(schemes, scale_dtypes):
        columns = 200 if scheme.group_size is None else 192
        weight = quantize_rtn(
            torch.randn(53, columns, generator=torch.Generator().manual_seed(0)),
            scheme,
            scale_dtype,
        )
        index = torch.tensor([52, 0, 17, 17, 31])
        served = 0
        for backend in BACKENDS:
            if backend.explain_unsupported(scheme, torch.device("cpu"), torch.float32) is None:
                rows = backend.dequantize_rows(backend.prepare(weight), scheme, columns, index)
                case = scheme, scale_dtype, backend.name
                assert torch.equal(rows, weight.dequantize()[index]), case
                served += 1
        assert served >= 3, (scheme, scale_dtype)


def test_rows_of_words_come_back() -> None:
    words = pytest.importorskip("quantkit.kernels.triton_words")
    for bits in (4, 8):
        codes = torch.randint(2**bits, (5, 200), generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        )
        assert torch.equal(words.unpack(words.pack(codes, bits), bits)[:, :200], codes)


def test_rows_that_a_kernel_gets_wrong_are_kept_twice(
    folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = type(BACKENDS[-1])
    monkeypatch.setattr(backend, "dequantize_rows", lambda *_: torch.zeros(64, 64))
    with caplog.at_level(logging.WARNING):
        model = load_model(
            folders / "tied-int8", device="cpu", dtype=torch.float32, backend="reference"
        )
    assert "its codes are held twice" in caplog.text
    rows = model.model.embed(torch.tensor(TOKENS))
    assert torch.equal(rows, _codes(folders / "tied-int8").dequantize()[TOKENS])


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_has_its_rows(kind: str, folders: Path) -> None:
    source = open_checkpoint(folders / f"{kind}-int8")
    whole = _codes(folders / f"{kind}-int8")
    shards = [
        CheckpointShard(source, split_model(source.config, schemes(source), rank, 2))
        for rank in range(2)
    ]
    rows = [shard.load(WEIGHT) for shard in shards]
    assert all(isinstance(one, QuantTensor) for one in rows)
    assert torch.equal(
        torch.cat([one.codes for one in rows if isinstance(one, QuantTensor)]), whole.codes
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_to_mlx_and_back(kind: str, folders: Path, tmp_path: Path) -> None:
    source = folders / f"{kind}-int8"
    quantkit.convert(source, tmp_path / "mlx", to="mlx", source_check=False)
    assert open_checkpoint(tmp_path / "mlx").info(WEIGHT).scheme == INT8
    quantkit.convert(
        tmp_path / "mlx", tmp_path / "back", to="compressed-tensors", source_check=False
    )
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_it_goes_to_gguf_and_comes_back_as_floats_which_more_readers_take(
    worded: Path, tmp_path: Path
) -> None:
    source, there, back = tmp_path / "int8", tmp_path / "model.gguf", tmp_path / "back"
    quantkit.quantize(worded, source, "int4-g32", embedding="int8", **GIVEN)
    quantkit.convert(source, there, source_check=False)
    stored, codes = open_checkpoint(there).load(WEIGHT), _codes(source)
    assert isinstance(stored, QuantTensor)
    assert str(stored.scheme) == "int8-g32"
    assert torch.equal(stored.codes, codes.codes)
    assert torch.equal(stored.scale, codes.scale.expand(-1, 2))
    result = quantkit.convert(there, back, to="compressed-tensors", source_check=False)
    assert any("float32" in note for note in result.notes)
    floats = open_checkpoint(back).load(WEIGHT)
    assert isinstance(floats, torch.Tensor)
    assert torch.equal(floats, codes.dequantize())


def test_a_format_without_a_place_for_it_gets_the_same_numbers(
    folders: Path, tmp_path: Path
) -> None:
    result = quantkit.convert(
        folders / "tied-int8", tmp_path / "gptq", to="gptq", source_check=False
    )
    assert any("float32" in note for note in result.notes)
    floats = open_checkpoint(tmp_path / "gptq").load(WEIGHT)
    assert isinstance(floats, torch.Tensor)
    assert torch.equal(floats, _codes(folders / "tied-int8").dequantize())


def test_transformers_loads_the_plain_form_where_the_head_is_apart(
    folders: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    result = quantkit.quantize(
        folders / "untied",
        folder,
        "int8",
        to="int-quantized",
        embedding="int8",
        keep="model.layers.*.mlp.*",
        **GIVEN,
    )
    assert any("vLLM" in note for note in result.notes)
    theirs = oracle.load(folder)
    tokens = torch.tensor([TOKENS])
    with torch.inference_mode():
        theirs(tokens)  # decompresses
        rows = theirs.model.embed_tokens(tokens)
    assert torch.equal(rows[0], _codes(folder).dequantize()[TOKENS])


@pytest.mark.parametrize("to", [None, "int-quantized"])
def test_a_tied_one_says_that_no_other_reader_takes_it(
    to: Any, folders: Path, tmp_path: Path
) -> None:
    planned = quantkit.plan.quantize(
        folders / "tied", tmp_path / "made", "int8", to=to, embedding="int8", method="rtn"
    )
    assert any("compressed-tensors" in note for note in planned.notes)
    assert open_checkpoint(folders / "tied-int8").readers() == "quantkit"


def test_commands_and_recipes_name_it(folders: Path, tmp_path: Path, capfd: Capture) -> None:
    options = [
        "--method",
        "rtn",
        "--no-source-check",
        "--accept-quality-loss",
        "--scheme",
        "int4-g32",
    ]
    code, out, err = run(
        capfd,
        "quantize",
        folders / "tied",
        tmp_path / "a",
        *options,
        "--embedding",
        "int8",
        "--head",
        "int8",
    )
    assert code == 0, err
    assert "int4-g32, embedding int8, " in out
    readme = (tmp_path / "a" / "README.md").read_text()
    assert "| embedding | 8-bit" in readme
    assert "--embedding int8" in readme
    recipe = {"default": "int4-g32", "overrides": [{"pattern": EMBEDDING, "scheme": "int8"}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    options[-2:] = ["--recipe", str(tmp_path / "recipe.json")]
    code, out, err = run(capfd, "quantize", folders / "tied", tmp_path / "b", *options)
    assert code == 0, err
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("kind", "recipe", "settings", "error_type", "parts"),
    [
        (
            "tied",
            Recipe(INT8),
            {"embedding": "int4-g32"},
            RequestError,
            {"found": "int4-g32 for 'model.embed_tokens'"},
        ),
        (
            "tied",
            Recipe(INT8, (Override("model.*", SCHEMES["int4-g32"]),)),
            {},
            RequestError,
            {"found": "int4-g32 for 'model.*'"},
        ),
        (
            "tied",
            Recipe(INT8, (Override("lm_head", INT8),)),
            {},
            RequestError,
            {"found": "int8 for 'lm_head'", "options": ["embedding"]},
        ),
        (
            "tied",
            Recipe(INT8, (Override("lm_head", SCHEMES["int4-g32"]),)),
            {"embedding": "int8"},
            RequestError,
            {"found": "int4-g32 for 'lm_head'", "expected": "int8"},
        ),
        (
            "untied",
            Recipe(INT8),
            {"embedding": "int8", "to": "gptq"},
            UnsupportedError,
            {"found": "int8 for 'model.embed_tokens'", "options": ["embedding"]},
        ),
        (
            "untied",
            Recipe(SCHEMES["int4-g32-asym"]),
            {"embedding": "int8", "to": "awq"},
            UnsupportedError,
            {"found": "int8 for 'model.embed_tokens'", "options": ["embedding"]},
        ),
        (
            "untied",
            Recipe(INT8),
            {"embedding": "int8", "keep": "model.layers.*"},
            RequestError,
            {},
        ),
        (
            "untied",
            Recipe(INT8),
            {"embedding": "int8", "keep": "*embed*"},
            RequestError,
            {"found": "'*embed*' matches 'model.embed_tokens'", "options": ["keep"]},
        ),
    ],
)
def test_what_cannot_be_is_refused(
    kind: str,
    recipe: Recipe,
    settings: dict[str, Any],
    error_type: type[QuantkitError],
    parts: dict[str, Any],
    folders: Path,
    tmp_path: Path,
) -> None:
    with raises(error_type, **parts):
        quantkit.quantize(folders / kind, tmp_path / "made", recipe, method="rtn", **settings)


@pytest.mark.parametrize("rows", [slice(4000, 4001), slice(None)], ids=["one rare row", "all"])
def test_the_gate_catches_a_broken_one(
    rows: slice, worded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weight: torch.Tensor, scheme: QuantScheme, *rest: Any) -> tuple[QuantTensor, str]:
        quantized, solver = round_to_nearest(weight, scheme, *rest)
        if scheme == INT8:
            quantized.codes[rows] = quantized.codes[rows].flip(1)
        return quantized, solver

    monkeypatch.setattr(quantizers, "round_to_nearest", broken)
    with raises(QualityError, "model.embed_tokens", options=["accept_quality_loss"]):
        quantkit.quantize(
            worded,
            tmp_path / "made",
            "int4-g32",
            embedding="int8",
            method="rtn",
            source_check=False,
        )


def test_what_has_no_codes_says_how_it_is_left_as_it_is(folders: Path, tmp_path: Path) -> None:
    source = oracle.copy(folders / "untied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[WEIGHT][-1, 3] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with raises(NonFiniteError, options=["allow_nonfinite"]) as caught:
        quantkit.quantize(
            source, tmp_path / "made", "int8", embedding="int8", allow_nonfinite=True, **GIVEN
        )
    assert "keep" not in list_options(caught.value.message)


def test_rows_of_large_values_are_measured() -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight[1] *= 1e38
    error, bound = worst_row(quantize_rtn(weight, INT8, torch.bfloat16), weight)
    assert 0 < error < bound
