"""`requantize` where only the type of the scales does not fit: codes and zero points stay,
scales are cast.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gguf
import oracle
import pytest
import torch
from command import Capture, run
from quantized_folders import quantized
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import NotRepresentableError, UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.qtensor import QuantTensor, cast_scales
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import load_tokenizer

Q = "model.layers.0.self_attn.q_proj"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


def _floats(folder: Path, **sizes: int) -> Path:
    vocabulary = load_tokenizer(DEMO_MODEL).vocab_size
    oracle.save(
        oracle.make("llama", vocab_size=vocabulary, **{**SIZES, **sizes}).to(torch.bfloat16), folder
    )
    shutil.copyfile(DEMO_MODEL / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _floats(tmp_path_factory.mktemp("floats") / "m")


def _source(floats: Path, folder: Path, scheme: str, dtype: str) -> Path:
    """A model with scales of a type; one of each weight lies between two subnormal numbers of
    float16.
    """
    quantized(floats, folder, QuantScheme.parse(scheme), DTYPES[dtype])
    tensors = load_file(folder / "model.safetensors")
    for name, scale in tensors.items():
        if name.endswith("weight_scale"):
            scale[5, 0] = 175 * 2.0**-25
            tensors[name.replace("_scale", "_packed")][
                5
            ] = -0x6F6F6F70  # few steps of it: 0x90 in each byte
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _unpacked(words: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Fields [N, M] of words [N, W], from the least significant bits."""
    wide = words.view(torch.int32).long() & 0xFFFFFFFF
    fields = torch.stack(
        [wide >> (bits * place) & (2**bits - 1) for place in order or range(32 // bits)], -1
    )
    return fields.flatten(1)


def _stored(
    folder: Path, module: str, to: str, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [O, I], zero points and scales [O, G] as they lie in a folder, by the formats'
    descriptions.
    """
    one = {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(f"{module}.")
    }
    if to == "mlx":
        scale = one["scales"]
        return (
            _unpacked(one["weight"], bits),
            (-one["biases"].double() / scale.double()).long(),
            scale,
        )
    if to == "awq":
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        return (
            _unpacked(one["qweight"], 4, order).t(),
            _unpacked(one["qzeros"], 4, order).t(),
            one["scales"].t(),
        )
    version = json.loads((folder / "config.json").read_text())["quantization_config"][
        "checkpoint_format"
    ]
    zero = _unpacked(one["qzeros"], bits).t() + (version == "gptq")
    return _unpacked(one["qweight"].t().contiguous(), bits), zero, one["scales"].t()


CAST = [
    (scheme, dtype, to)
    for scheme, formats in {
        "int4-g64": ("gptq", "awq"),
        "int8": ("gptq",),
        "int4-g64-asym": ("gptq", "awq", "mlx"),
    }.items()
    for dtype in DTYPES
    for to in formats
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("scheme", "dtype", "to"), CAST, ids=str)
def test_codes_and_zero_points_stay_bit_for_bit(
    scheme: str, dtype: str, to: str, floats: Path, tmp_path: Path
) -> None:
    source = _source(floats, tmp_path / "source", scheme, dtype)
    before = open_checkpoint(source)
    with pytest.raises(
        NotRepresentableError, match=rf"as {to}: .*; `requantize=True` casts scales"
    ):
        quantkit.convert(source, tmp_path / "out", to=to, source_check=False)  # type: ignore[arg-type]
    made = quantkit.convert(source, tmp_path / "out", to=to, requantize=True, source_check=False)  # type: ignore[arg-type]
    count = len(schemes(before))
    for module in schemes(before):
        value = before.load(f"{module}.weight")
        assert isinstance(value, QuantTensor)
        codes, zero, scale = _stored(tmp_path / "out", module, to, value.scheme.bits)
        middle = torch.full_like(value.scale, value.scheme.levels // 2, dtype=torch.uint8)
        assert torch.equal(codes, value.codes.long()), module
        assert torch.equal(zero, (middle if value.zero is None else value.zero).long()), module
        rounded = value.scale.half() if to != "mlx" or dtype == "fp32" else value.scale
        assert torch.equal(scale, rounded.float() if to == "mlx" else rounded), module
    assert made.exact is not None
    assert made.rounded == 0
    lossless = to == "mlx" and dtype == "bf16"  # float32 has each scale
    assert made.exact.scales_cast == (0 if lossless else count)
    assert (made.exact.tensors, made.exact.equal) == (count, count if lossless else 0)
    reported = made.lines()[0]
    assert (
        "all 7 quantized tensors equal"
        if lossless
        else "7 in codes and zero points, with scales cast"
    ) in reported
    assert "KL" in reported
    assert "rounded anew" not in reported
    assert any(f"{count} of {count} quantized tensors are kept" in note for note in made.notes)
    assert made.manifest["exact"].get("scales_cast", 0) == made.exact.scales_cast
    assert {record["solver"] for record in made.manifest["modules"].values()} == {"scales cast"}
    assert made.quality is not None
    assert all(text.kl < 1e-5 for text in made.quality.texts)
    assert verify(source, tmp_path / "out").verdict is (
        Verdict.SAME if lossless else Verdict.WITHIN_BOUND
    )
    line = verify(tmp_path / "out").lines()[1]
    assert line == f"when it was made it was compared with its source: {made.exact.line()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["int4-g64", "int8"])
def test_gguf_has_the_codes_too_as_its_own_library_reads_them(
    scheme: str, dtype: str, floats: Path, tmp_path: Path
) -> None:
    source = _source(floats, tmp_path / "source", scheme, dtype)
    made = quantkit.convert(source, tmp_path / "out.gguf", requantize=True, source_check=False)
    assert made.exact is not None
    assert made.exact.scales_cast == made.exact.tensors == 7
    value = open_checkpoint(source).load("model.layers.0.mlp.down_proj.weight")
    assert isinstance(value, QuantTensor)
    expected = QuantTensor(value.codes, value.scale.half(), None, value.scheme).dequantize()
    (tensor,) = [
        one
        for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors
        if one.name == "blk.0.ffn_down.weight"
    ]
    assert torch.equal(torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)), expected)


@pytest.mark.parametrize(
    "wrong", [1e6, 2e-9, 3e-8], ids=["overflows", "vanishes", "loses its meaning"]
)
def test_a_scale_that_no_cast_keeps_has_its_weight_alone_rounded_anew(
    wrong: float, floats: Path, tmp_path: Path, capfd: Capture
) -> None:
    source = quantized(floats, tmp_path / "source", QuantScheme(4, 64), torch.float32)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{Q}.weight_scale"][3, 1] = wrong
    tensors[f"{Q}.weight_packed"][3, 8:] = 0x77777777  # a step below zero
    if wrong > 1:
        tensors[f"{Q}.weight_packed"][
            3, 8:
        ] = -0x77777778  # all zeros, but that float16 has no such scale
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code, out, err = run(
        capfd,
        "convert",
        source,
        tmp_path / "out",
        "--to",
        "gptq",
        "--requantize",
        "--no-source-check",
    )
    assert code == 0, err
    assert "1 of 7 quantized tensors cannot be stored exactly as gptq and are requantized" in err
    assert "6 of 7 quantized tensors are kept, except that their scales are cast to float16" in err
    assert (
        "0 of 6 quantized tensors equal as numbers, 6 in codes and zero points, with scales cast, 1"
        " rounded" in out
    )
    made = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    solvers = {module: record["solver"] for module, record in made["modules"].items()}
    assert solvers.pop(Q) == "round-to-nearest, searched scales"
    assert set(solvers.values()) == {"scales cast"}
    assert torch.isfinite(load_file(tmp_path / "out" / "model.safetensors")[f"{Q}.scales"]).all()


def test_no_weight_moves_by_more_than_half_a_step() -> None:
    codes = torch.full((1, 8), 8, dtype=torch.uint8)

    def cast(scale: float, code: int = 15) -> QuantTensor | None:
        codes[0, 0] = code
        return cast_scales(
            QuantTensor(codes, torch.tensor([[scale]]), None, QuantScheme(4, None)), torch.float16
        )

    minimum = 2.0**-24  # of float16
    for scale, kept in (
        (1.0001, True),
        (65519.0, True),
        (65520.0, False),
        (1e6, False),
        (2.0**-25, False),
    ):
        assert (cast(scale) is not None) == kept, scale
    assert cast(7.5 * minimum) is not None  # 7 steps move by 3.5 of 7.5 halves at most
    assert cast(6.4 * minimum) is not None
    assert cast(6.5 * minimum) is None  # by 7 times a half of 6.5
    assert cast(6.5 * minimum, code=14) is not None
    assert cast(2.0**-30, code=8) is not None  # all weights are zeros
    assert cast(float("nan")) is not None


def test_what_requantizing_cannot_do_does_not_advise_it(floats: Path, tmp_path: Path) -> None:
    narrow = _floats(tmp_path / "narrow", intermediate_size=66)  # outputs that fill no whole words
    source = quantized(narrow, tmp_path / "source", QuantScheme(8, None))
    name = re.escape("model.layers.0.mlp.gate_proj.weight")
    for job in (quantkit.convert, quantkit.plan.convert):
        with pytest.raises(
            NotRepresentableError,
            match=rf"'{name}' .* as gptq: its outputs do not fill .*`requantize=True` requantizes",
        ):
            job(source, tmp_path / "out", to="gptq", source_check=False)
        with pytest.raises(
            UnsupportedError, match=rf"'{name}' cannot be quantized for gptq \(found 66 x 128"
        ) as failed:
            job(source, tmp_path / "out", to="gptq", requantize=True, source_check=False)
        assert "requantize" not in str(failed.value)
    assert {path.name for path in tmp_path.iterdir()} == {"narrow", "source"}


def test_codes_of_four_bits_become_eight_where_only_these_fill_words(tmp_path: Path) -> None:
    narrow = _floats(tmp_path / "narrow", intermediate_size=68)  # a multiple of 4, not of 8
    source = quantized(narrow, tmp_path / "source", QuantScheme(4, None))
    made = quantkit.convert(
        source, tmp_path / "out", to="gptq", requantize=True, source_check=False
    )
    found = schemes(open_checkpoint(made.path))
    assert str(found["model.layers.0.mlp.gate_proj"]) == "int8"
    assert found[Q].bits == 4


def test_scales_that_the_models_type_has_but_their_offsets_not_stay_as_they_are(
    floats: Path, tmp_path: Path
) -> None:
    """Of scales in float32 that bfloat16 has, float32 has the offsets for MLX, and bfloat16 has
    not.
    """
    source = quantized(floats, tmp_path / "source", QuantScheme(4, 64, False))
    tensors = load_file(source / "model.safetensors")
    tensors = {
        name: one.float() if name.endswith("weight_scale") else one for name, one in tensors.items()
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    made = quantkit.convert(source, tmp_path / "out", to="mlx", source_check=False)
    assert made.exact is not None
    assert made.exact.equal == made.exact.tensors == 7
