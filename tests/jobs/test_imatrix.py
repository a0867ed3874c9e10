"""Importance matrices in both of llama.cpp's forms: written, read, and what they change."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle
import pytest
import torch
from command import Capture, run
from gguf_config_cases import DELTA
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibration.importance import importance_of
from quantkit.errors import CheckpointError, DestinationError, NonFiniteError, RequestError
from quantkit.files.imatrix_io import read_imatrix
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize.imatrix import importance_from
from quantkit.text.tokenizer import load_tokenizer

TEXT: dict[str, Any] = {
    "calibration": ["A whole book of words, and of other words. " * 200],
    "samples": 4,
    "length": 32,
}
RTN: dict[str, Any] = {"method": "rtn", "source_check": False}


@pytest.fixture(scope="module")
def matrices(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("matrices")
    return {
        kind: quantkit.imatrix(demo_model, folder / f"matrix.{kind}", **TEXT).path
        for kind in ("gguf", "dat")
    }


def by_hand(data: bytes) -> dict[str, tuple[int, np.ndarray[Any, Any]]]:
    """The entries of a ``.dat`` file."""
    (count,), position, found = struct.unpack_from("<i", data), 4, {}
    for _ in range(count):
        (size,) = struct.unpack_from("<i", data, position)
        name = data[position + 4 : position + 4 + size].decode()
        chunks, values = struct.unpack_from("<2i", data, position + 4 + size)
        position += 12 + size
        found[name] = chunks, np.frombuffer(data, np.float32, values, position)
        position += 4 * values
    (chunks, size) = struct.unpack_from("<2i", data, position)
    assert (chunks, len(data)) == (4, position + 8 + size)
    return found


def test_both_forms_hold_the_mean_squares_that_transformers_has(
    matrices: dict[str, Path], demo_model: Path, tmp_path: Path
) -> None:
    """Of the inputs of the first block's linears, whose inputs depend on few kernels."""
    from transformers import AutoModelForCausalLM

    from quantkit.calibration.data import load_calibration
    from quantkit.text.tokenizer import load_tokenizer

    quantkit.convert(demo_model, tmp_path / "hf", to="hf", dtype="fp32", source_check=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.__setitem__(name, inputs[0])
            )
    tokens = load_calibration(
        TEXT["calibration"], load_tokenizer(demo_model), samples=4, length=32, seed=0
    ).tokens
    with torch.no_grad():
        model(tokens)
    expected = {
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.3.attn_output": "model.layers.3.self_attn.o_proj",
        "output": "lm_head",
    }
    fields = {tensor.name: tensor.data for tensor in gguf.GGUFReader(matrices["gguf"]).tensors}
    older = by_hand(matrices["dat"].read_bytes())
    for name, module_name in expected.items():
        means = seen[module_name].flatten(0, -2).square().mean(0).numpy()
        sums, counts = fields[f"{name}.weight.in_sum2"], fields[f"{name}.weight.counts"]
        assert (counts.shape, float(counts.item())) == ((1, 1), 128)
        assert np.allclose(sums[0] / 128, means, rtol=1e-4, atol=1e-7)
        chunks, values = older[f"{name}.weight"]
        assert chunks == 4
        assert np.allclose(values / 4, means, rtol=1e-4, atol=1e-7)
    metadata = {
        key: field.contents() for key, field in gguf.GGUFReader(matrices["gguf"]).fields.items()
    }
    assert metadata["general.type"] == "imatrix"
    assert (metadata["imatrix.chunk_count"], metadata["imatrix.chunk_size"]) == (4, 32)
    assert metadata["imatrix.datasets"] == ["text"]


def test_inputs_of_delta_rules_are_in_the_order_of_files(demo_model: Path, tmp_path: Path) -> None:
    """Value heads take turns by key head there; reading puts them back."""
    vocabulary = load_tokenizer(demo_model).vocab_size
    model = oracle.make("qwen3_5_text", vocab_size=vocabulary, **DELTA)
    folder = oracle.save(model, tmp_path / "source")
    shutil.copyfile(demo_model / "tokenizer.model", folder / "tokenizer.model")
    source = open_checkpoint(folder)
    delta = source.config.gated_delta
    assert delta is not None
    assert delta.value_heads > delta.key_heads > 1
    path = quantkit.imatrix(source.path, tmp_path / "matrix.gguf", **TEXT).path
    entry = read_imatrix(path).entries["blk.0.ssm_out.weight"]
    stored = entry.means.flatten()
    found = importance_from(path, source)["model.layers.0.linear_attn.out_proj"]
    heads = stored.view(-1, delta.key_heads, delta.value_dim)
    expected = heads.swapaxes(0, 1).reshape(-1)
    assert not torch.equal(stored, expected)
    weights = importance_of(expected, entry.counts.item())
    assert weights is not None
    assert torch.equal(found, weights)


@pytest.mark.slow
def test_rounding_uses_it(matrices: dict[str, Path], demo_model: Path, tmp_path: Path) -> None:
    """Both forms give the same codes, other ones than the default, and the manifest says which
    file it was.
    """
    found = {}
    for name, file in {**matrices, "default": None}.items():
        given = {} if file is None else {"imatrix": file}
        quantkit.quantize(demo_model, tmp_path / name, "int4-g32", **RTN, **given)
        found[name] = load_file(tmp_path / name / "model.safetensors")
        recorded = json.loads((tmp_path / name / "quantkit.json").read_text()).get("imatrix")
        assert (recorded is None) == (file is None)
    name = "model.layers.0.mlp.down_proj.weight_packed"
    differ = {
        one: (found[one][name] != found["default"][name]).float().mean().item()
        for one in ("gguf", "dat")
    }
    assert all(0.01 < share < 0.9 for share in differ.values()), differ


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_a_damaged_or_foreign_file_is_an_error(
    kind: str, matrices: dict[str, Path], demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    data = matrices[kind].read_bytes()
    broken = tmp_path / f"broken.{kind}"
    for changed in (data[: len(data) // 2], b"", b"\xff" * 64):
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError):
            read_imatrix(broken)
    nan = np.frombuffer(data, np.uint8).copy()
    nan[-4096 - 64 : -4096] = 0xFF
    broken.write_bytes(nan.tobytes())
    with pytest.raises(CheckpointError, match="NaN"):
        read_imatrix(broken)
    code, _, err = run(
        capfd,
        "quantize",
        demo_model,
        tmp_path / "made",
        "--scheme",
        "int4-g32",
        "--method",
        "rtn",
        "--imatrix",
        broken,
    )
    assert code == 3, err
    assert not (tmp_path / "made").exists()
    model = tmp_path / "model.gguf"
    quantkit.convert(demo_model, model, source_check=False)
    with pytest.raises(CheckpointError, match="is not an importance matrix"):
        read_imatrix(model)


def test_it_goes_with_rounding(matrices: dict[str, Path], demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="requires"):
        quantkit.quantize(demo_model, tmp_path / "made", "int4-g32", imatrix=matrices["gguf"])
    with pytest.raises(RequestError, match="has no effect"):
        quantkit.quantize(demo_model, tmp_path / "made", "int8", imatrix=matrices["gguf"], **RTN)


def test_the_command(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    dst = tmp_path / "m.gguf"
    code, out, err = run(capfd, "imatrix", demo_model, dst, "--samples", "2", "--length", "16")
    assert code == 0, err
    assert out.startswith(f"wrote {dst}: 29 tensors, from 32 tokens of included text")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    with pytest.raises(DestinationError, match="exists already"):
        quantkit.imatrix(demo_model, dst)
    with pytest.raises(RequestError, match="format of importance matrix"):
        quantkit.imatrix(demo_model, tmp_path / "m.bin")


def test_a_model_with_nan_has_no_matrix(demo_model: Path, tmp_path: Path) -> None:
    """Nothing is written; linears before the damage have finite inputs."""
    source = quantkit.convert(demo_model, tmp_path / "hf", to="hf", source_check=False).path
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for kind in ("gguf", "dat"):
        with pytest.raises(NonFiniteError, match=r"'model\.layers\.1\.mlp\.down_proj' are NaN"):
            quantkit.imatrix(source, tmp_path / f"m.{kind}", **TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
