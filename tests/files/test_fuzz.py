"""Damaged checkpoints: refused in one line, or read as torch, safetensors and zipfile read them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import gguf_files
import oracle as oracle_models
import pytest
import torch
from case_names import case
from paths import ROOT
from safetensors.torch import save
from schemes import any_scheme
from torch import Tensor

from fuzzing import oracle
from fuzzing.bases import CONFIG, Base
from fuzzing.inputs import WHOLE_EVERY, Inputs
from quantkit.files.gguf_io import build_header
from quantkit.files.gguf_types import GgmlType, GgufTensor
from quantkit.formats.codecs.compressed_tensors import PackQuantized
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.gguf.config import build_metadata
from quantkit.formats.registry import HF
from quantkit.solver.columns import TORCH
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_no_damaged_input_breaks_the_rule() -> None:
    """600 inputs, fifteen of them whole runs; ``--only NUMBER`` repeats one."""
    command = [
        sys.executable,
        str(ROOT / "scripts/release/fuzz.py"),
        "--inputs",
        "600",
        "--seed",
        "0",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("600 inputs, 15 of them whole runs")


def test_an_input_depends_on_its_number_alone() -> None:
    files = {
        "src/config.json": json.dumps({**CONFIG, "vocab_size": 8}).encode(),
        "src/model.safetensors": save({"model.norm.weight": torch.randn(64)}),
        "src/model.gguf": build_header(
            {"a": "b", "c": ["d", "e"], "f": 0.5}, [GgufTensor("g", GgmlType.F32, (8,))]
        ),
        "dst.partial/.quantkit-journal.jsonl": (
            b'{"fingerprint": {"job": "convert"}}\n{"tensors": 3}\n'
        ),
    }
    files["src/model.gguf"] += bytes(32)
    inputs = Inputs(0, [Base("tiny", files, ("convert-hf",))])
    forwards = [inputs.make(number) for number in range(400)]
    backwards = [inputs.make(number) for number in reversed(range(400))]
    assert forwards == backwards[::-1]
    assert sum(damaged.job != "light" for damaged in forwards) == 400 / WHOLE_EVERY
    assert all(damaged.mutations for damaged in forwards)
    # The remaining inputs swapped bytes with equal ones.
    assert sum(damaged.files != files for damaged in forwards) > 360
    kinds = {damaged.kind for damaged in forwards}
    assert kinds == {"config.json", "safetensors", "gguf", "journal"}
    assert len({damaged.mutations[0] for damaged in forwards}) > 300
    gguf_inputs = Inputs(0, [Base("tiny", files, ("convert-hf",))], "gguf")
    paths = {gguf_inputs.make(number).path for number in range(100)}
    assert paths == {"src/model.gguf"}


def test_the_independent_reading_of_gguf_is_ours(tmp_path: Path) -> None:
    source = HF.open(
        oracle_models.save(oracle_models.make("llama"), tmp_path / "hf"), "safetensors"
    )
    quantized = {
        "": gguf.GGMLQuantizationType.Q5_1,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_0,
    }
    tensors = gguf_files.tensors_of(oracle_models.load(tmp_path / "hf"))
    metadata = build_metadata(source.config)
    gguf_files.write(tmp_path / "model.gguf", metadata, tensors, quantized)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    values = {name: checkpoint.load(name) for name in checkpoint.names()}
    floats = {
        name: value.dequantize() if isinstance(value, QuantTensor) else value
        for name, value in values.items()
    }
    assert oracle.same(floats, oracle.read(tmp_path)) is None


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    weights = {"model.norm.weight": torch.randn(64), "lm_head.weight": torch.randn(8, 64)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    return tmp_path


def _rewrite(path: Path, suffix: str, content: bytes) -> None:
    """Give one record of a zip another content, with the right CRC."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, content if name.endswith(suffix) else data)


def test_the_independent_reading_refuses_a_short_record(stored: Path) -> None:
    assert set(oracle.read(stored)) == {"model.norm.weight", "lm_head.weight"}
    _rewrite(stored / "pytorch_model.bin", "/data/1", bytes(100))
    with pytest.raises(RuntimeError):
        oracle.read(stored)


def test_the_independent_reading_knows_a_wrong_crc(stored: Path) -> None:
    path = stored / "pytorch_model.bin"
    data = bytearray(path.read_bytes())
    data[data.index(torch.load(path)["lm_head.weight"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(zipfile.BadZipFile, match="/data/"):
        oracle.read(stored)
    oracle.read(stored, checksums=False)


def test_one_bit_is_a_difference() -> None:
    weight = torch.randn(4, 4)
    other = weight.clone()
    other.view(torch.uint8)[3, 3] ^= 1
    assert oracle.same({"a": weight}, {"a": weight.clone()}) is None
    assert "tensor a" in str(oracle.same({"a": weight}, {"a": other}))
    assert "tensor a" in str(oracle.same({"a": weight}, {}))


def test_a_rounding_passes_and_another_weight_and_scales_that_clip_too_much_do_not() -> None:
    for text in ("int8", "int8-asym", "int4-g32", "int4-g32-asym"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with case(text, dtype):
                _require_rounding_is_judged(text, dtype)


def _require_rounding_is_judged(text: str, dtype: torch.dtype) -> None:
    source = torch.randn(16, 64).to(dtype)
    value, _ = round_to_nearest(source, any_scheme(text), dtype, lambda _: TORCH)
    quantized = compressed_tensors(value)
    assert torch.equal(oracle.dequantized(quantized)["a.weight"], value.dequantize())
    assert oracle.rounded(quantized, {"a.weight": source}) is None
    moved = source.clone()
    moved[3, 5] += 2 * value.scale[3].max()
    assert "step" in str(oracle.rounded(quantized, {"a.weight": moved}))
    scale, groups = value.scale / 2, value.scale.shape[1]
    steps = (source.float().view(16, groups, -1) / scale.float().unsqueeze(-1)).round().view(16, 64)
    zero = (
        value.scheme.levels // 2
        if value.zero is None
        else value.zero.repeat_interleave(64 // groups, 1)
    )
    codes = (steps + zero).clamp(0, value.scheme.levels - 1).to(torch.uint8)
    clipping = compressed_tensors(QuantTensor(codes, scale, value.zero, value.scheme))
    assert "group" in str(oracle.rounded(clipping, {"a.weight": source}))


def compressed_tensors(value: QuantTensor) -> dict[str, Tensor]:
    """A weight `a`, as stored."""
    codec = PackQuantized(value.scheme)
    spec = TensorSpec("a.weight", value.shape, DType.of(value.scale.dtype), value.scheme)
    return dict(
        zip(
            (tensor.name for tensor in codec.list_stored_tensors(spec)),
            codec.encode(value),
            strict=True,
        )
    )
