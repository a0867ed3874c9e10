"""`quantkit plan DIR --target SLICE`: what the compiler for the real slice says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Capture, run
from error_parts import raises

from quantkit.architectures.topology import linear_columns
from quantkit.errors import RequestError
from quantkit.evals.synthetic import open_shape_checkpoint
from quantkit.formats.checkpoint import schemes
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.tensors.scheme import QuantScheme

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def _plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("torchax") is None:
        pytest.skip("libtpu or torchax is not installed")
    command = [sys.executable, "-m", "quantkit.cli", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_slice_is_compiled_for(folder: Path) -> None:
    done = _plan(
        folder, "--target", "v5e-4", "--batch", "2", "--scheme", "int4-g128", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["chips"], found["batch"], found["context"]) == (4, 2, 512)
    step, prompt = found["phases"]
    for phase in (step, prompt):
        assert phase["collectives"] == {"all-reduce": 2 * 2 + 1, "all-gather": 1}
        assert phase["total"] > phase["arguments"] + phase["temporaries"]
    # Codes of half a byte and scales of two; an int8 head; KV heads 2 become 4; keys and values of
    # 2 x 512 positions.
    weights = 2 * (2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 2048)
    held = weights * (1 / 2 + 2 / 128) + 1024 * 1024 * (1 + 2) + 2 * 2 * 4 * 2 * 512 * 128 * 2
    assert step["arguments"] == pytest.approx(held / 4, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "named"),  # 2 layers x 2 x 512 x 128 x 2 bytes of cache for each text
    [(100000, "48.84 GiB"), (32200, "Ran out of memory")],
)
def test_what_does_not_fit_is_an_error(batch: int, named: str, folder: Path) -> None:
    done = _plan("generate", folder, "--target", "v5e-4", "--batch", str(batch))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("quantkit: error: ")]
    assert "v5e-4" in line
    assert named in line


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--target", "v5e-5"], "v5e-5"),
        (["--target", "v9-8"], "v9-8"),
        (["--target", "v5e-16"], "16 devices"),
        (["--target", "v5e-8", "--context", "513"], "1 and 513"),
    ],
)
def test_slices_that_do_not_serve_are_refused(options: list[str], found: str, folder: Path) -> None:
    done = _plan(folder, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "quantkit: error: " in done.stderr
    assert f"(found {found}" in done.stderr


def test_a_model_can_be_its_config_alone(folder: Path, demo_model: Path) -> None:
    assert schemes(open_shape_checkpoint(folder, None)) == {}
    assert set(schemes(open_shape_checkpoint(folder, "int4-g64")).values()) == {
        QuantScheme(4, 64),
        QuantScheme(8, None),
    }
    layer_schemes = {"model.layers.1.mlp.up_proj": QuantScheme(4, 32)}
    settings = CompressedTensors().write_settings(
        layer_schemes, linear_columns(open_shape_checkpoint(folder, None).config)
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    assert schemes(open_shape_checkpoint(folder, None)) == layer_schemes
    assert open_shape_checkpoint("llama-2-70b", "int8").config.num_heads == 64
    with raises(RequestError, path=demo_model, found="scheme int8"):
        open_shape_checkpoint(demo_model, "int8")


def test_a_folder_needs_no_name_of_a_command(folder: Path, capfd: Capture) -> None:
    code, _, errors = run(capfd, "plan", folder)
    assert code == 2
    assert "Missing option '--target'" in errors


def test_training_is_compiled_for_meshes_of_a_slice(folder: Path) -> None:
    done = _plan(
        "refine",
        folder,
        "--target",
        "v5e-4",
        "--length",
        "128",
        "--scheme",
        "int4-g128",
        "--json",
        "-",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["chips"], found["batch"], found["length"], found["refused"]) == (4, 4, 128, {})
    assert [one["mesh"] for one in found["meshes"]] == ["4x1", "2x2"]
    bits = 2 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 2048) * 4
    for one in found["meshes"]:
        assert one["total"] > one["arguments"] + one["temporaries"]
        assert bits / 8 / 4 < one["arguments"] < bits / 8
        assert 0 < one["utilization"] <= 3 / 4  # a quarter is computed again
    data, both = (
        {(sent["kind"], sent["axis"]) for sent in one["exchanges"]} for one in found["meshes"]
    )
    assert {axis for _, axis in data} <= {"data", "none"}
    assert {("all-gather", "data"), ("reduce-scatter", "model")} <= both


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--target", "2xv5e-3"], "(found 2xv5e-3"),
        (["--target", "v5e-4", "--mesh", "2x4"], "(found 2x4, expected 4 chips)"),
        (["--target", "v5e-4", "--mesh", "4x1", "--batch", "6"], "(found 6, "),
    ],
)
def test_what_training_cannot_be_divided_into_is_refused(
    options: list[str], parts: str, folder: Path
) -> None:
    done = _plan("refine", folder, *options, "--scheme", "int4-g128")
    assert (done.returncode, done.stdout) == (2, "")
    assert parts in done.stderr


@pytest.mark.parametrize(
    ("options", "named_options"),
    [
        ([], ["--against", "--target"]),
        (["--against", "floats", "--scheme", "int4-g128"], ["--scheme", "--target"]),
        (["--target", "v5e-4"], ["--scheme"]),
        (["--target", "v5e-4", "--epochs", "2"], ["--epochs", "--target"]),
        (["--target", "v5e-4", "--no-source-check"], ["--source-check", "--target"]),
    ],
)
def test_options_of_a_slice_and_of_a_run_exclude_each_other(
    options: list[str], named_options: list[str], folder: Path, capfd: Capture
) -> None:
    code, _, errors = run(capfd, "plan", "refine", folder, *options)
    assert code == 2
    assert all(option in errors for option in named_options)


def test_this_machine_is_not_planned_for_xla(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    code, _, errors = run(
        capfd,
        "plan",
        "refine",
        demo_model,
        tmp_path / "dst",
        "--against",
        demo_model,
        "--backend",
        "xla",
    )
    assert code == 2
    assert "--target" in errors
