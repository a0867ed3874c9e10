"""Quantized models in one format after another: exact and proven so, or refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle
import pytest
import torch
from command import Capture, run
from quantized_folders import quantized
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import (
    NonFiniteError,
    NotRepresentableError,
    QuantkitError,
    RequestError,
    UnsupportedError,
)
from quantkit.formats.checkpoint import schemes
from quantkit.formats.codecs.gptq_linear import GptqLinear
from quantkit.formats.containers.layout import ShardedEncoder
from quantkit.formats.containers.meta_encoder import MetaEncoder
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.model.column_kernels import select_column_kernels
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.quality.verify import Verdict, verify
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import load_tokenizer

CT = "compressed-tensors"
DOWN = "model.layers.1.mlp.down_proj"
STOPPED = ("whole", "stopped")
INT4 = QuantScheme(4, 32)
UNCHECKED: Any = {"accept_quality_loss": True, "source_check": False}  # of random weights
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = oracle.make("llama", vocab_size=load_tokenizer(DEMO_MODEL).vocab_size, **SIZES).to(
        torch.bfloat16
    )
    folder = oracle.save(model, tmp_path_factory.mktemp("floats") / "m")
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def folders(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in compressed-tensors as quantkit lays them out, every third of their scales
    negative.
    """
    made, base = {}, tmp_path_factory.mktemp("quantized")
    for scheme in ("int4-g32", "int4-g64", "int4-g128", "int4-g64-asym", "int8"):
        source = quantized(floats, base / f"{scheme}-source", QuantScheme.parse(scheme))
        made[scheme] = quantkit.convert(source, base / scheme, source_check=False).path
    return made


def _change(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: change(name, tensor) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def _manifest(folder: Path) -> Any:
    return json.loads((folder / "quantkit.json").read_text())


EXACT = [
    ("int4-g32", "gptq"),
    ("int4-g64", "gptq"),
    ("int4-g128", "gptq"),
    ("int4-g64-asym", "gptq"),
    ("int8", "gptq"),
    ("int4-g32", "awq"),
    ("int4-g128", "awq"),
    ("int4-g64-asym", "awq"),
    ("int4-g32", "mlx"),
    ("int4-g64", "mlx"),
    ("int4-g128", "mlx"),
    ("int8", "mlx"),
    ("int8", "int-quantized"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("scheme", "to"), EXACT, ids=str)
def test_what_goes_to_another_format_comes_back_to_the_same_bytes(
    scheme: str, to: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[scheme]
    there = quantkit.convert(source, tmp_path / "there", to=to, source_check=False)
    assert there.exact is not None
    count = len(schemes(open_checkpoint(source)))
    assert (there.exact.tensors, there.exact.equal) == (count, count)
    assert f"all {count} quantized tensors equal as numbers" in there.lines()[0]
    assert _manifest(tmp_path / "there")["exact"] == {"tensors": count, "equal": count, "floats": 7}
    kept = quantkit.convert(
        tmp_path / "there", tmp_path / "kept", source_check=False
    )  # as it lies there
    assert open_checkpoint(kept.path).method == open_checkpoint(there.path).method == to
    quantkit.convert(tmp_path / "kept", tmp_path / "back", to=CT, source_check=False)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    assert verify(tmp_path / "there").ok
    if scheme not in ("int4-g64", "int8"):
        return
    found = verify(source, tmp_path / "there")
    assert found.verdict is Verdict.SAME
    assert found.lines()[:2] == [
        f"formats: {CT} ({scheme}) and {to} ({scheme})",
        (
            f"tensors: {found.tensors} of {found.tensors} equal, {count} of them compared on their"
            " codes"
        ),
    ]


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g64", "int4-g128", "int8"])
def test_blocks_of_gguf_are_the_same_numbers(
    scheme: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source, file = folders[scheme], tmp_path / "there.gguf"
    there = quantkit.convert(source, file, source_check=False)
    assert there.exact is not None
    assert there.exact.equal == 14
    in_blocks = f"{scheme.partition('-')[0]}-g32"
    assert set(map(str, schemes(open_checkpoint(file)).values())) == {in_blocks}
    assert json.loads((tmp_path / "there.gguf.quantkit.json").read_text())["exact"]["tensors"] == 14
    assert verify(source, file).verdict is Verdict.SAME
    assert (
        verify(file).lines()[1]
        == "when it was made it was compared with its source: all 14 quantized tensors equal as"
        " numbers"
    )
    back = quantkit.convert(file, tmp_path / "back", source_check=False)
    assert open_checkpoint(back.path).method == CT
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("_scale"):
            tensor = tensor.repeat_interleave(after[name].shape[1] // tensor.shape[1], 1)
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


REFUSED = [
    ("int4-g64-asym", "gguf", "it has zero points", True, False),
    ("int8", "awq", "its bit width is not supported", True, False),
    ("int4-g32", "int-quantized", "its readers support only int8 per row", True, False),
    ("int4-g64-asym", "mlx", "bfloat16 cannot represent", False, True),
]


NONFINITE = {
    "NaN": (math.nan, "contains 3 scales that are NaN or Inf .*found 3 of "),
    "Inf": (-math.inf, "contains 3 scales that are NaN or Inf .*found 3 of "),
    "overflow": (3e38, r"contains \d+ values that overflow float32 when dequantized .*of 32768"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", NONFINITE)
@pytest.mark.parametrize("scheme", ["int4-g64", "int8"])
def test_scales_that_are_no_numbers_are_not_carried(
    scheme: str, what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source, (wrong, problem) = tmp_path / "source", NONFINITE[what]
    oracle.copy(folders[scheme], source)
    (source / "quantkit.json").unlink()

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == f"{DOWN}.weight_scale":
            tensor.view(-1)[[1, 5, 8]] = wrong
        return tensor

    _change(source, change)
    ways: list[dict[str, Any]] = [{"to": to} for to in (CT, "gptq", "mlx", "gguf")]
    for options in [*ways, {"to": "mlx", "requantize": True}]:
        with pytest.raises(
            NonFiniteError, match=rf"tensor '{re.escape(DOWN)}\.weight' {problem}"
        ) as failed:
            quantkit.convert(source, tmp_path / "out", source_check=False, **options)
        assert failed.value.exit_code == 7
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
    if what != "overflow":
        made = quantkit.convert(
            source, tmp_path / "out", to="gptq", source_check=False, allow_nonfinite=True
        )
        assert made.exact is not None
        assert made.exact.equal == made.exact.tensors == 14


@pytest.mark.parametrize(("scheme", "to", "reason", "headers_state", "by_scales"), REFUSED, ids=str)
def test_what_cannot_be_held_exactly_is_refused_by_the_first_tensors_name(
    scheme: str,
    to: str,
    reason: str,
    headers_state: bool,
    by_scales: bool,
    folders: dict[str, Path],
    tmp_path: Path,
    capfd: Capture,
) -> None:
    for words in (("convert",), *([("plan", "convert")] if headers_state else [])):
        code, _, err = run(
            capfd, *words, folders[scheme], tmp_path / "out", "--to", to, "--no-source-check"
        )
        assert code == 4, err
        assert (
            f"tensor 'model.layers.0.self_attn.q_proj.weight' cannot be held exactly as {to}:"
            f" {reason}" in err
        )
        assert ("--requantize casts scales" in err) == by_scales
        assert ("--requantize requantizes it" in err) != by_scales
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_small_floats_are_not_blocks_of_gguf(
    scheme: str, floats: Path, tmp_path: Path, capfd: Capture
) -> None:
    source = quantkit.quantize(floats, tmp_path / "source", scheme, method="rtn", **UNCHECKED).path
    file = tmp_path / "out.gguf"
    for words in (("convert",), ("plan", "convert")):
        code, _, err = run(capfd, *words, source, file, "--no-source-check")
        assert code == 4
        assert "q_proj.weight' cannot be held exactly as gguf" in err
        assert "--requantize" in err
    with pytest.raises(NotRepresentableError):
        quantkit.convert(source, file, source_check=False)
    assert not file.exists()
    result = quantkit.convert(source, file, requantize=True, source_check=False)
    assert (result.rounded, result.exact and result.exact.tensors) == (14, 0)
    expected = {"fp8": "int8-g32", "nvfp4": "int4-g32"}[scheme]
    assert set(map(str, schemes(open_checkpoint(file)).values())) == {expected}


def test_mxfp4_is_carried_between_folders_and_gguf(floats: Path, tmp_path: Path) -> None:
    source = quantkit.quantize(floats, tmp_path / "source", "mxfp4", method="rtn", **UNCHECKED).path
    to_file = quantkit.convert(source, tmp_path / "out.gguf", source_check=False)
    assert (to_file.rounded, to_file.exact and to_file.exact.tensors) == (0, 14)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(to_file.path).tensors}
    down = stored["blk.1.ffn_down.weight"]
    assert down.tensor_type is gguf.GGMLQuantizationType.MXFP4
    weight = with_codes(open_checkpoint(source)).load(f"{DOWN}.weight")
    assert isinstance(weight, QuantTensor)
    theirs = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(theirs, weight.dequantize().numpy())
    # A file made at once is the same; as floats both mean the same.
    made = quantkit.quantize(floats, tmp_path / "made.gguf", "mxfp4", method="rtn", **UNCHECKED)
    assert verify(made.path).is_same
    assert verify(to_file.path, made.path).verdict is Verdict.SAME
    for model in (source, to_file.path):
        folder = quantkit.convert(
            model, tmp_path / f"{model.stem}-floats", dequantize=True, source_check=False
        ).path
        assert verify(tmp_path / "source-floats", folder).verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("scheme", "options", "cast"),
    [
        (None, {}, 0),
        (None, {"dtype": "fp16", "to": "meta"}, 21),
        ("int8", {"dequantize": True}, 14),
    ],
)
def test_floats_are_compared_with_the_source(
    scheme: str | None,
    options: dict[str, Any],
    cast: int,
    floats: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = floats if scheme is None else folders[scheme]
    result = quantkit.convert(source, tmp_path / "whole", source_check=False, **options)
    assert (result.exact.tensors, result.exact.floats, result.exact.cast) == (0, 21 - cast, cast)
    assert _manifest(tmp_path / "whole")["exact"].get("cast", 0) == cast
    encoder_type = MetaEncoder if options.get("to") == "meta" else ShardedEncoder
    encode = encoder_type.encode

    def damage(self: Any, index: int, value: torch.Tensor) -> Any:
        if self.planned[index].name == f"{DOWN}.weight":
            value = value.clone()
            value[3, 5] += 1
        return encode(self, index, value)

    monkeypatch.setattr(encoder_type, "encode", damage)
    with pytest.raises(QuantkitError, match=rf"{DOWN}\.weight' differs from the source"):
        quantkit.convert(source, tmp_path / "damaged", source_check=False, **options)
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_norms_that_gguf_stores_as_float32_are_rounded_to_the_requested_type(
    scheme: str | None, floats: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = oracle.copy(floats if scheme is None else folders[scheme], tmp_path / "float32")
    generator = torch.Generator().manual_seed(0)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "norm" in name:
            return 1 + torch.rand(tensor.shape, generator=generator)
        return tensor

    _change(folder, change)
    options: Any = {"dtype": "bf16", "dequantize": scheme is not None}
    result = quantkit.convert(folder, tmp_path / "bf16.gguf", source_check=False, **options)
    assert result.exact.cast >= 5


@pytest.fixture
def steep(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A model of which one scale is beyond float16."""
    folder = oracle.copy(folders["int4-g64"], tmp_path / "steep")

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == f"{DOWN}.weight_scale":
            tensor[3, 1] = 2.0**-30
        return tensor

    _change(folder, change)
    return folder


def test_a_scale_that_the_target_has_not_is_refused_and_leaves_nothing(
    steep: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"'{DOWN}\.weight' cannot be held exactly as gptq: a scale is not"
    ):
        quantkit.convert(steep, tmp_path / "out", to="gptq", source_check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["steep"]


def test_only_what_must_be_is_rounded_anew_and_the_result_is_held_against_its_source(
    steep: Path, tmp_path: Path, capfd: Capture
) -> None:
    requested = "--to", "gptq", "--requantize", "--no-source-check"
    code, out, err = run(capfd, "convert", steep, tmp_path / "out", *requested)
    assert code == 0, err
    assert (
        "1 of 14 quantized tensors cannot be stored exactly as gptq and are requantized to int4-g64"
        f" ('{DOWN}" in err
    )
    assert "all 13 quantized tensors equal as numbers, 1 rounded anew, KL" in out
    made = _manifest(tmp_path / "out")
    assert made["exact"]["equal"] == 13
    assert made["quality"]["passed"] is True
    solvers = {module: record["solver"] for module, record in made["modules"].items()}
    assert solvers.pop(DOWN) == "round-to-nearest, searched scales"
    assert set(solvers.values()) == {"carried"}
    assert 0 < made["modules"][DOWN]["relative_error"] < 0.2
    assert verify(tmp_path / "out").ok
    assert verify(steep, tmp_path / "out").verdict is Verdict.WITHIN_BOUND


def test_leave_to_round_anew_changes_nothing_where_all_is_exact(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    made = quantkit.convert(
        folders["int8"], tmp_path / "out", to="gptq", requantize=True, source_check=False
    )
    assert any("`requantize=True` was not needed" in note for note in made.notes)
    assert made.exact is not None
    assert (made.exact.tensors, made.rounded, made.quality) == (14, 0, None)


def test_integers_whose_codes_are_not_carried_become_floats_or_codes_only_where_requested(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source, name = tmp_path / "source", f"{DOWN}.weight"
    quantkit.convert(folders["int4-g64"], source, to="gptq", source_check=False)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{DOWN}.g_idx"] = (torch.randperm(256) // 64).to(torch.int32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    before = open_checkpoint(source)
    stored_as = before.info(name).stored_as
    assert stored_as is not None
    with pytest.raises(
        UnsupportedError,
        match=rf"'{re.escape(name)}' cannot be .*found {stored_as}.*requantize",
    ):
        quantkit.convert(source, tmp_path / "out", to=CT, source_check=False)
    with pytest.raises(UnsupportedError, match=r"already quantized \(found gptq \(int4-g64"):
        quantkit.quantize(source, tmp_path / "out", "int8")
    made = quantkit.convert(source, tmp_path / "out", to=CT, requantize=True, source_check=False)
    assert made.exact is not None
    assert (made.exact.equal, made.rounded) == (13, 1)
    assert str(open_checkpoint(made.path).info(name).scheme) == "int4-g32"
    quantkit.convert(source, tmp_path / "floats", dequantize=True, source_check=False)
    assert torch.equal(open_checkpoint(tmp_path / "floats").load(name), before.load(name))  # type: ignore[arg-type]


def test_a_result_that_is_not_its_source_is_a_failure_that_resume_checks_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = GptqLinear.decode

    def decoded(self: GptqLinear, *rest: Any, **options: Any) -> Any:
        value = decode(self, *rest, **options)
        value.codes[5, 7] ^= 1
        return value

    with monkeypatch.context() as patch:
        patch.setattr(GptqLinear, "decode", decoded)
        for resume in (False, True):
            with pytest.raises(
                QuantkitError, match=r"q_proj\.weight' differs from the source"
            ) as failed:
                quantkit.convert(
                    folders["int4-g64"],
                    tmp_path / "out",
                    to="gptq",
                    source_check=False,
                    resume=resume,
                )
            assert failed.value.exit_code == 1
            assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert quantkit.convert(
        folders["int4-g64"], tmp_path / "out", to="gptq", source_check=False, resume=True
    ).exact


@pytest.mark.parametrize("kind", ["act-order", "fp8", "bitsandbytes"])
def test_what_is_read_as_floats_is_rounded_once(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Of a model in bfloat16 float32 has more than bfloat16's numbers, and float16 other ones."""
    source, name = tmp_path / "source", f"{DOWN}.weight"
    expected = _read_as_floats(kind, folders["int4-g64"], source)
    before = open_checkpoint(source).load(name)
    assert isinstance(before, torch.Tensor)
    assert torch.equal(before, expected.bfloat16())
    assert not torch.equal(before.float(), expected)
    for dtype in ("fp32", "fp16"):
        made = quantkit.convert(
            source, tmp_path / dtype, dequantize=True, dtype=dtype, source_check=False
        )  # type: ignore[arg-type]
        found = load_file(made.path / "model.safetensors")[name]
        assert torch.equal(found, expected.to(found.dtype))
    model, _ = quantkit.load(source, dtype="fp32", device="cpu")
    assert torch.equal(model.get_parameter(name), expected)
    if kind == "act-order":
        codes = quantkit.convert(
            source, tmp_path / "codes", to=CT, requantize=True, source_check=False
        )
        value, rounded = (
            open_checkpoint(codes.path).load(name),
            round_to_nearest(expected, INT4, torch.bfloat16, select_column_kernels)[0],
        )
        assert isinstance(value, QuantTensor)
        assert equal_as_numbers(value, rounded)
        assert not equal_as_numbers(
            value, round_to_nearest(before, INT4, torch.bfloat16, select_column_kernels)[0]
        )


def _read_as_floats(kind: str, codes: Path, folder: Path) -> torch.Tensor:
    """Make a folder whose `DOWN` has no codes here; what that means, in float32."""
    generator = torch.Generator().manual_seed(5)
    if kind == "act-order":
        quantkit.convert(codes, folder, to="gptq", source_check=False)
        tensors, order = (
            load_file(folder / "model.safetensors"),
            torch.randperm(256, generator=generator) // 64,
        )
        tensors[f"{DOWN}.g_idx"] = order.to(torch.int32)
        value = open_checkpoint(codes).load(f"{DOWN}.weight")
        assert isinstance(value, QuantTensor)
        expected = (value.codes.float() - 8) * value.scale.float()[:, order]
    else:
        quantkit.convert(codes, folder, dequantize=True, source_check=False)
        tensors = load_file(folder / "model.safetensors")
        weight = tensors[f"{DOWN}.weight"].float()
        if kind == "fp8":
            settings: dict[str, Any] = {"quant_method": "fp8"}
            scale = torch.rand(len(weight), 1, generator=generator) / 448
            tensors[f"{DOWN}.weight"] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{DOWN}.weight_scale"] = scale
            expected = tensors[f"{DOWN}.weight"].float() * scale
        else:
            settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
            scale = torch.rand(len(weight), generator=generator)
            tensors[f"{DOWN}.weight"] = torch.randint(
                -127, 128, weight.shape, generator=generator, dtype=torch.int8
            )
            tensors[f"{DOWN}.SCB"] = scale
            expected = tensors[f"{DOWN}.weight"].float() * scale.unsqueeze(1) * (1 / 127)
        oracle.edit_json(folder / "config.json", quantization_config=settings)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return expected


@pytest.mark.parametrize("scheme", ["int4-g64-asym", "int8"])
def test_dequantized_weights_are_rounded_once(
    scheme: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[scheme]
    quantkit.convert(source, tmp_path / "own", dequantize=True, source_check=False)
    quantkit.convert(
        source, tmp_path / "wide", to="meta", dequantize=True, dtype="fp32", source_check=False
    )
    before, own, wide = (
        open_checkpoint(path) for path in (source, tmp_path / "own", tmp_path / "wide")
    )
    assert schemes(own) == schemes(wide) == {}
    for module in schemes(before):
        value = before.load(f"{module}.weight")
        assert isinstance(value, QuantTensor)
        assert torch.equal(wide.load(f"{module}.weight"), value.dequantize())  # type: ignore[arg-type]
        assert torch.equal(own.load(f"{module}.weight"), value.dequantize().bfloat16())  # type: ignore[arg-type]
    assert verify(source, tmp_path / "wide").differing == []


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("int8", {"to": "hf"}, "to be written as an unquantized model .* `dequantize=True`"),
    ("int8", {"to": "meta"}, "to be written as an unquantized model"),
    (
        "int8",
        {"to": "gptq", "dequantize": True},
        '`dequantize=True` cannot be combined with `to="gptq"`',
    ),
    (
        "int8",
        {"to": "hf", "requantize": True},
        '`requantize=True` cannot be combined with `to="hf"`',
    ),
    ("int8", {"dequantize": True, "requantize": True}, "are mutually exclusive"),
    ("int8", {"to": "gptq", "dtype": "fp16"}, "must be dequantized to be written as another dtype"),
    (
        "int8",
        {"to": "meta", "dequantize": True, "split_max_size": 1000},
        "`mp` sets the number of files",
    ),
    ("int8", {"split_max_size": 0}, "`split_max_size` must be positive"),
    ("floats", {"to": "awq"}, '`to="awq"` requires .* an unquantized model'),
    ("floats", {"requantize": True}, "`requantize=True` requires .* an unquantized model"),
]


@pytest.mark.parametrize(("source", "options", "words"), WRONG, ids=str)
def test_what_contradicts_itself_is_refused(
    source: str,
    options: dict[str, Any],
    words: str,
    floats: Path,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    path = floats if source == "floats" else folders[source]
    for job in (quantkit.convert, quantkit.plan.convert):
        with pytest.raises((RequestError, UnsupportedError), match=words):
            job(path, tmp_path / "out", source_check=False, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_models_are_quantized_into_any_format(
    to: str, floats: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    made = quantkit.quantize(floats, tmp_path / "out", "int4-g64", method="rtn", to=to, **UNCHECKED)
    result = open_checkpoint(tmp_path / "out")
    assert result.method == to
    assert set(map(str, schemes(result).values())) == {"int4-g64"}
    assert f"--to {to}" in (tmp_path / "out" / "README.md").read_text()
    assert {str(result.info(f"{module}.weight").dtype) for module in schemes(result)} == {
        "float16"
    }  # not bfloat16
    assert made.manifest["to"] == to
    assert all(one.rounding_kl is None for one in made.quality.texts)  # it is its own baseline


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "scheme"), [("gptq", "int4-g64-asym"), ("gguf", "int4-g64")], ids=str
)
def test_an_interrupted_solver_reads_back_what_it_has_written(
    to: str, scheme: str, floats: Path, tmp_path: Path
) -> None:
    requested: Any = {
        "to": to,
        "method": "gptq",
        "calibration": EXCERPT,
        "samples": 8,
        "length": 64,
        **UNCHECKED,
    }
    quantkit.quantize(floats, tmp_path / "whole", scheme, **requested)

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if phase == "quantize" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(floats, tmp_path / "stopped", scheme, progress=stop, **requested)
    quantkit.quantize(floats, tmp_path / "stopped", scheme, resume=True, **requested)
    whole, stopped = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in STOPPED
    )
    assert whole == stopped


def test_a_scheme_that_a_format_has_not_is_refused_before_any_work(
    floats: Path, tmp_path: Path
) -> None:
    for job in (quantkit.quantize, quantkit.plan.quantize):
        with pytest.raises(
            UnsupportedError, match=r"awq does not support int8: .* for 'model\.layers\.0\."
        ):
            job(floats, tmp_path / "out", "int8", to="awq")
        with pytest.raises(RequestError, match='`to="hf"` cannot store quantized weights'):
            job(floats, tmp_path / "out", "int8", to="hf")
    assert not list(tmp_path.iterdir())


def test_files_are_as_large_as_requested(
    folders: dict[str, Path], floats: Path, tmp_path: Path
) -> None:
    quantkit.convert(folders["int8"], tmp_path / "cut", split_max_size=60_000, source_check=False)
    quantkit.quantize(floats, tmp_path / "made", "int8", split_max_size=60_000, **UNCHECKED)
    for name in ("cut", "made"):
        sizes = [path.stat().st_size for path in (tmp_path / name).glob("model-*.safetensors")]
        assert len(sizes) > 3
        assert sum(size > 62_000 for size in sizes) == 2  # embedding and head, alone


def _weight(
    scheme: QuantScheme, rows: int = 5, columns: int = 128, dtype: torch.dtype = torch.float16
) -> QuantTensor:
    groups = scheme.groups(columns)
    zero = (
        None
        if scheme.symmetric
        else torch.randint(scheme.levels, (rows, groups), dtype=torch.uint8)
    )
    codes = torch.randint(scheme.levels, (rows, columns), dtype=torch.uint8)
    return QuantTensor(codes, torch.randn(rows, groups).to(dtype), zero, scheme)


def _in_groups(value: QuantTensor, size: int) -> QuantTensor:
    times = value.shape[1] // value.scale.shape[1] // size
    zero = None if value.zero is None else value.zero.repeat_interleave(times, 1)
    scheme = QuantScheme(value.scheme.bits, size, value.scheme.symmetric)
    return QuantTensor(value.codes, value.scale.repeat_interleave(times, 1), zero, scheme)


@pytest.mark.parametrize("group_size", [None, 128, 64, 32, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_equal_as_numbers_in_whatever_groups_and_types(
    bits: int, symmetric: bool, group_size: int | None
) -> None:
    value = _weight(QuantScheme(bits, group_size, symmetric))
    wide = QuantTensor(value.codes, value.scale.float(), value.zero, value.scheme)
    assert equal_as_numbers(value, wide)
    assert equal_as_numbers(wide, _in_groups(value, 8))
    middle = torch.full_like(value.scale, value.scheme.levels // 2, dtype=torch.uint8)
    if symmetric:
        reported = QuantTensor(
            value.codes, value.scale, middle, QuantScheme(bits, group_size, False)
        )
        assert equal_as_numbers(value, reported)
    value.scale[0, 0] = 0.0
    negative = QuantTensor(value.codes.clone(), value.scale.clone(), value.zero, value.scheme)
    negative.scale[0, 0] = -0.0
    negative.codes[0, 0] ^= 1  # of a group that is all zeros
    assert equal_as_numbers(value, negative)
    for damage in ("codes", "scale", "zero"):
        other = _damaged(value, damage)
        assert other is None or not equal_as_numbers(value, other), damage


def _damaged(value: QuantTensor, what: str) -> QuantTensor | None:
    parts = {"codes": value.codes.clone(), "scale": value.scale.float(), "zero": value.zero}
    if what == "zero":
        if value.zero is None:
            return None
        parts["zero"] = value.zero.clone()
    last = parts[what]
    assert last is not None
    if what == "scale":
        last[-1, -1] = torch.nextafter(last[-1, -1], torch.tensor(9.0))
    else:
        last[-1, -1] ^= 1
    return QuantTensor(parts["codes"], parts["scale"], parts["zero"], value.scheme)  # type: ignore[arg-type]
