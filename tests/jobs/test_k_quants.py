"""GGUF's K-quants: llama.cpp's mixes, rounded and solved, with the types that it gives each
tensor; sizes to fit.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle
import pytest
from command import Capture, run
from config_cases import config_keys
from gguf_config_cases import CASES
from partial import interrupted
from vocabularies import train

import quantkit
from quantkit.architectures.families import config_from_hf
from quantkit.errors import RequestError, UnsupportedError
from quantkit.files.gguf_types import FILE_TYPES
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.formats.gguf.container import Gguf
from quantkit.jobs.convert import conversion
from quantkit.jobs.quantize import default_embedding
from quantkit.jobs.quantize.gguf_mix import MixRules
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.dtypes import DType
from quantkit.tensors.mix import MIXES
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

LAYERS = 2
GPTQ: dict[str, Any] = {
    "samples": 8,
    "length": 32,
    "source_check": False,
    "accept_quality_loss": True,
}
RTN: dict[str, Any] = {"method": "rtn", "source_check": False, "accept_quality_loss": True}
SIZES = {"vocab_size": 400, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
MORE_BITS = {
    2: (1,),
    8: (0, 3, 6, 7),
}  # the first and last eighth of layers, and every third of those between


def make(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A random model whose widths 256 divides, with a tokenizer."""
    model = oracle.make(kind, **{**SIZES, "num_hidden_layers": LAYERS, **changes})
    oracle.save(model, folder)
    return Path(
        shutil.copy(train(folder.with_name(f"{folder.name}-text")) / "tokenizer.model", folder)
    ).parent


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def solved(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by GPTQ."""
    return quantkit.quantize(
        wide, tmp_path_factory.mktemp("solved") / "q4.gguf", "Q4_K_M", **GPTQ
    ).path


def types(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.slow
def test_each_tensor_has_the_type_that_llama_cpp_gives_it(solved: Path) -> None:
    found = types(solved)
    assert found["token_embd.weight"] == "Q4_K"
    assert found["output.weight"] == "Q6_K"
    for layer in range(LAYERS):
        expected = "Q6_K" if layer in MORE_BITS[LAYERS] else "Q4_K"
        own = {
            name.split(".", 2)[2]: kind
            for name, kind in found.items()
            if name.startswith(f"blk.{layer}.")
        }
        assert own["attn_v.weight"] == own["ffn_down.weight"] == expected, layer
        others = [
            own[f"{name}.weight"]
            for name in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate")
        ]
        assert others == ["Q4_K"] * 5
    assert (
        gguf.GGUFReader(solved).fields["general.file_type"].contents()
        == gguf.LlamaFileType.MOSTLY_Q4_K_M
    )


@pytest.mark.parametrize("layers", MORE_BITS)
def test_some_layers_have_more_bits(layers: int, wide: Path) -> None:
    config = open_checkpoint(wide).config
    config = dataclasses.replace(config, layers=config.layers[:1] * layers)
    found = {
        one.pattern
        for one in MixRules(MIXES["q5_k_m"], config).recipe().overrides
        if str(one.scheme) == "q6_k"
    }
    own = [
        f"model.layers.{n}.{name}"
        for n in MORE_BITS[layers]
        for name in ("self_attn.v_proj", "mlp.down_proj")
    ]
    assert found == {*own, "lm_head"}


@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-next"])
def test_mixes_do_not_name_delta_rules(case: str) -> None:
    """They keep their floats, as with other schemes, though `attn_qkv` has more bits in mixes."""
    kind, changes = CASES[case]
    config = config_from_hf(config_keys(kind, **changes), "config.json")
    recipe = MixRules(MIXES["q5_k_m"], config).recipe()
    assert not [one.pattern for one in recipe.overrides if "linear_attn" in one.pattern]
    assert [one.pattern for one in recipe.overrides if "down_proj" in one.pattern]


def test_the_file_holds_what_was_solved(solved: Path, wide: Path) -> None:
    """Read by the gguf package, as codes and as floats."""
    coded, floats = (
        with_codes(open_checkpoint(solved)),
        open_checkpoint(solved, floats_as=DType.FLOAT32),
    )
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(solved).tensors}
    stored = theirs["blk.1.ffn_up.weight"]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    name = "model.layers.1.mlp.up_proj.weight"
    value = coded.load(name)
    assert isinstance(value, QuantTensor)
    assert np.array_equal(value.dequantize().numpy(), expected)
    assert np.array_equal(floats.load(name).numpy(), expected)
    assert str(schemes(coded)["model.layers.1.mlp.up_proj"]) == "q4_k"
    assert not schemes(floats), "without kernels they are floats"
    assert verify(solved).is_same
    report = verify(solved, wide)
    assert report.verdict is Verdict.WITHIN_BOUND, report.lines()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q2_k", {"attn_v": "Q3_K", "attn_output": "Q3_K", "ffn_down": "Q3_K", "ffn_up": "Q2_K"}),
        ("iq4_xs", {"attn_v": "IQ4_XS", "ffn_down": "IQ4_XS", "output": "Q6_K"}),
        ("iq4_nl", {"attn_v": "IQ4_NL", "ffn_down": "IQ4_NL", "output": "Q6_K"}),
        ("q3_k_m", {"attn_v": "Q5_K", "attn_output": "Q4_K", "ffn_down": "Q4_K", "ffn_up": "Q3_K"}),
        ("q3_k_l", {"attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_down": "Q5_K", "ffn_up": "Q3_K"}),
        ("q4_k_s", {"attn_v": "Q5_K", "attn_output": "Q4_K", "ffn_down": "Q4_K", "ffn_up": "Q4_K"}),
        ("q5_k", {"attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_down": "Q5_K", "ffn_up": "Q5_K"}),
        ("q6_k", {"attn_v": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}),
        ("q8_0", {"attn_v": "Q8_0", "token_embd": "Q8_0", "output": "Q8_0"}),
        ("q5_1", {"attn_v": "Q5_1", "token_embd": "Q5_1", "output": "Q6_K"}),
    ],
)
def test_mixes(name: str, expected: dict[str, str], wide: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(wide, tmp_path / "made.gguf", name, **RTN)
    found = types(made.path)
    first = {key: found.get(f"blk.0.{key}.weight", found.get(f"{key}.weight")) for key in expected}
    assert first == expected
    assert made.embedding is not None


@pytest.mark.slow
def test_widths_that_256_does_not_divide(tmp_path: Path, capfd: Capture) -> None:
    """The types that llama.cpp takes instead, which is said."""
    source = make(
        tmp_path / "narrow",
        hidden_size=96,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
    )
    code, _, err = run(
        capfd,
        "quantize",
        source,
        tmp_path / "made.gguf",
        "--scheme",
        "q4_k_m",
        "--method",
        "rtn",
        "--accept-quality-loss",
        "--no-source-check",
    )
    assert code == 0, err
    found = types(tmp_path / "made.gguf")
    assert found["blk.0.ffn_up.weight"] == "Q5_0"
    assert found["blk.1.ffn_down.weight"] == "Q6_K"
    assert found["token_embd.weight"] == "Q5_0"
    assert found["output.weight"] == found["blk.1.attn_v.weight"] == "Q8_0"
    assert "q4_k does not divide the rows of" in err
    assert "q5_0 is used there" in err
    assert "int8-g32 is used there" in err


def test_an_embedding_that_no_block_divides_stays_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_embedding, "_MIN_WEIGHTS", 1)
    monkeypatch.setattr(default_embedding, "_LARGE_SHARE", 0.01)
    source = make(
        tmp_path / "narrow",
        hidden_size=48,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
    )
    made = quantkit.quantize(source, tmp_path / "made.gguf", "q4_k_m", **RTN)
    assert made.embedding is None
    assert types(made.path)["blk.0.ffn_down.weight"] == "Q4_K"


@pytest.mark.parametrize("width", [32, 96])
def test_gptq_solves_rows_that_256_does_not_divide(width: int, tmp_path: Path) -> None:
    """Rows of one block and of several, next to rows of 256: the gate, `verify` and `doctor`
    know the types of both.
    """
    floats = make(tmp_path / "narrow", hidden_size=width)
    source = quantkit.convert(floats, tmp_path / "bf16", dtype="bf16", source_check=False).path
    file = quantkit.quantize(source, tmp_path / "solved.gguf", "q4_k_m", **GPTQ).path
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {
        stored["blk.0.ffn_up.weight"].tensor_type.name,
        stored["blk.1.ffn_down.weight"].tensor_type.name,
    } == {"Q5_0", "Q6_K"}
    codes = with_codes(open_checkpoint(file))
    for name, tensor in (
        ("mlp.up_proj", "ffn_up"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.down_proj", "ffn_down"),
    ):
        weight = codes.load(f"model.layers.1.{name}.weight")
        assert isinstance(weight, QuantTensor)
        theirs = stored[f"blk.1.{tensor}.weight"]
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(weight.dequantize().numpy(), expected)
    report = verify(source, file)
    assert not report.problems
    assert all(one.within for one in report.differing), report.lines()
    assert not quantkit.diagnose(file, against=source).is_broken


@pytest.mark.slow
@pytest.mark.parametrize("width", [96, 256])
def test_two_files_are_compared_by_the_steps_of_their_blocks(width: int, tmp_path: Path) -> None:
    """Files of one model in two mixes, without a manifest, as they are downloaded."""
    source = make(tmp_path / "source", hidden_size=width)
    files = []
    for name in ("q4_k_m", "q5_k_m"):
        made = quantkit.quantize(source, tmp_path / f"{name}.gguf", name, **RTN)
        (tmp_path / f"only-{name}").mkdir()
        files.append(Path(shutil.copy(made.path, tmp_path / f"only-{name}")))
    report = verify(*files)
    weights = [one for one in report.differing if one.name.endswith("proj.weight")]
    assert weights
    for one in weights:
        assert one.relative_error <= one.bound < 0.5, one


def test_a_tied_head_decides_the_type_of_the_embedding(tmp_path: Path) -> None:
    source = make(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=1)
    made = quantkit.quantize(source, tmp_path / "made.gguf", "q4_k_m", keep="*.o_proj", **RTN)
    found = types(made.path)
    assert found["token_embd.weight"] == "Q6_K"
    assert "output.weight" not in found
    assert found["blk.0.attn_output.weight"] == "F32", "`keep` comes after the mix"


@pytest.mark.slow
def test_eight_experts_as_llama_cpp_has_them(tmp_path: Path) -> None:
    source = make(tmp_path / "experts", "mixtral", num_local_experts=8, num_hidden_layers=1)
    recipe = MixRules(MIXES["q4_k_m"], open_checkpoint(source).config).recipe()
    assert len(recipe.overrides) < 8, "all experts by one pattern"
    found = types(quantkit.quantize(source, tmp_path / "made.gguf", "q4_k_m", **RTN).path)
    assert found["blk.0.attn_k.weight"] == found["blk.0.attn_v.weight"] == "Q8_0"
    assert found["blk.0.attn_output.weight"] == "Q5_K"
    assert found["blk.0.ffn_down_exps.weight"] == "Q6_K"
    assert found["blk.0.ffn_up_exps.weight"] == "Q4_K"


def test_only_gguf_holds_them(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="q4_k_m is a mix of GGUF's types") as caught:
        quantkit.quantize(wide, tmp_path / "made", "q4_k_m")
    assert caught.value.hint is not None
    assert ".gguf" in caught.value.hint
    for target in ("compressed-tensors", "gptq", "awq", "mlx"):
        with pytest.raises(UnsupportedError, match="its scales are those of GGUF's blocks"):
            quantkit.quantize(wide, tmp_path / "made", QuantScheme.parse("q4_k"), to=target, **RTN)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_size_is_filled_with_k_quants(wide: Path, tmp_path: Path) -> None:
    source = quantkit.convert(wide, tmp_path / "bf16", dtype="bf16", source_check=False).path
    made = quantkit.quantize(source, tmp_path / "made.gguf", target_bits=4.6, **GPTQ)
    assert made.allocation is not None
    assert made.allocation.bits <= 4.6
    offered = {scheme for unit in made.allocation.units for scheme in unit.losses}
    assert offered == {"q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "int8"}
    for unit in made.allocation.units:
        losses = [unit.losses[scheme] for scheme in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")]
        assert losses == sorted(losses, reverse=True), "more bits lose less"
    assert set(made.schemes) > {"q4_k"}, "some have more bits, some fewer"


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(
    solved: Path, wide: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "q4.gguf"
    options = {name: value for name, value in GPTQ.items() if name != "source_check"}
    interrupted(functools.partial(quantkit.quantize, scheme="q4_k_m", **options), wide, dst)
    quantkit.quantize(wide, dst, "q4_k_m", resume=True, **GPTQ)
    assert dst.read_bytes() == solved.read_bytes()


def test_notes_of_the_container_are_kept(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gguf, "notes", lambda *_: ["a note on the file"])
    assert (
        "a note on the file"
        in quantkit.quantize(wide, tmp_path / "made.gguf", "q4_k_m", **RTN).notes
    )


def test_a_fused_projection_is_one_of_values(tmp_path: Path) -> None:
    """As in llama.cpp, whose rules for attn_v are those for attn_qkv."""
    config = open_checkpoint(oracle.save(oracle.make("phi3", **SIZES), tmp_path / "phi3")).config
    config = dataclasses.replace(config, layers=config.layers[:1] * 8)
    overrides = {
        one.pattern: str(one.scheme) for one in MixRules(MIXES["q4_k_m"], config).recipe().overrides
    }
    for part in "qkv":
        found = {n for n in range(8) if f"model.layers.{n}.self_attn.{part}_proj" in overrides}
        assert found == set(MORE_BITS[8])
    assert {overrides[f"model.layers.{n}.self_attn.q_proj"] for n in MORE_BITS[8]} == {"q6_k"}


def test_rows_that_32_does_not_divide_keep_their_floats(tmp_path: Path) -> None:
    source = make(tmp_path / "odd", hidden_size=264, intermediate_size=256)
    found = types(quantkit.quantize(source, tmp_path / "made.gguf", "q4_k_m", **RTN).path)
    assert found["blk.0.ffn_down.weight"] == "Q4_K"
    assert {
        found[name] for name in ("token_embd.weight", "output.weight", "blk.0.attn_q.weight")
    } == {"F32"}


@pytest.mark.slow
def test_a_file_is_split_with_its_codes(wide: Path, tmp_path: Path) -> None:
    """Converted to GGUF, K-quants stay what they are; `verify` compares their scales of scales
    too.
    """
    file, parts = tmp_path / "made.gguf", tmp_path / "parts.gguf"
    quantkit.quantize(wide, file, "q4_k_m", **RTN)
    made = quantkit.convert(file, parts, split_max_size=300_000, source_check=False)
    assert made.exact is not None
    first = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}
    later = [
        tensor for part in tmp_path.glob("parts-*.gguf") for tensor in gguf.GGUFReader(part).tensors
    ]
    assert {tensor.name: tensor.data.tobytes() for tensor in later} == first
    assert verify(file, parts).verdict is Verdict.SAME
    value = with_codes(open_checkpoint(file)).load("model.layers.0.mlp.up_proj.weight")
    assert isinstance(value, QuantTensor)
    assert value.outer is not None
    assert not equal_as_numbers(value, dataclasses.replace(value, outer=value.outer * 2))


@pytest.fixture(scope="module")
def mixed(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model as Q4_K_M, with the types that llama.cpp takes for its narrow rows."""
    return quantkit.quantize(
        demo_model, tmp_path_factory.mktemp("mixed") / "a.gguf", "q4_k_m", method="rtn"
    ).path


@pytest.mark.slow
def test_inspect_names_a_file_as_llama_cpp_does(solved: Path, mixed: Path, tmp_path: Path) -> None:
    assert quantkit.inspect(solved).format == "gguf (Q4_K_M)"
    assert "Q4_K" not in types(mixed).values()
    assert quantkit.inspect(mixed).format == "gguf (Q4_K_M)"
    names = {
        int(kind): kind.name.partition("_")[2]
        for kind in gguf.LlamaFileType
        if kind.name != "GUESSED"
    }
    assert names == FILE_TYPES


@pytest.mark.slow
def test_the_ways_to_convert_a_file_are_named_from_its_headers_and_work(
    mixed: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            conversion, "check_side_files", lambda *_, **__: pytest.fail("the tokenizer is read")
        )
        code, _, err = run(capfd, "convert", mixed, tmp_path / "out")
    assert code == 4
    hint = err[err.rindex(";") :]
    ways = re.findall(r"--(?:to \w+|\w+)", hint)
    assert ways == ["--to gguf", "--dequantize", "--requantize"]
    for index, way in enumerate(ways):
        code, _, err = run(capfd, "convert", mixed, tmp_path / f"{index}", *way.split())
        assert code == 0, err
    assert verify(mixed, tmp_path / "0").is_same
    assert not schemes(open_checkpoint(tmp_path / "1"))
