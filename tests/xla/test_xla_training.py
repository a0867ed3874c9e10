"""Training scales over meshes of virtual devices: as torch trains them, and what devices
exchange for it.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import forked
import oracle
import partial
import pytest
import torch
from virtual_devices import environment, require_torchax

import quantkit
from quantkit.data.files import EXCERPT

pytestmark = pytest.mark.xla

KV = "a KV head on all"
LAYERS = {"num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    KV: ("llama", {"num_key_value_heads": 1}, "int4-g32"),
    "groups on several": ("llama", {"intermediate_size": 192}, "int4-g64"),
    "zero points, biases, int8 embedding as head": (
        "qwen2",
        {"tie_word_embeddings": True},
        "int4-g32-asym",
    ),
    "norms after branches, windows": ("gemma2", {}, "int4-g32"),
    "int8 rows": ("llama", {}, "int8"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_torchax()
    home = tmp_path_factory.mktemp("xla-training")
    for case, (kind, sizes, scheme) in CASES.items():
        source = oracle.save(oracle.make(kind, **LAYERS, **sizes), home / "cases" / case / "floats")
        quantkit.quantize(
            source,
            home / "cases" / case / "int4",
            scheme,
            method="rtn",
            accept_quality_loss=True,
            source_check=False,
            embedding="int8" if "int8" in case else None,
        )
    other, generator = (
        oracle.make("llama", **LAYERS, **CASES[KV][1]),
        torch.Generator().manual_seed(2),
    )
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    oracle.save(other, home / "other")
    done = subprocess.run(
        forked.command("-m", "xla_training_cases", str(home)),
        env=environment(8, home / "cache"),
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (KV, "2x4"),
        (KV, "4x2"),
        ("slices", "2 slices of 2x2"),
        *((case, "2x4") for case in CASES if case != KV),
    ],
)
def test_a_mesh_trains_as_torch_does(case: str, mesh: str, found: dict[str, Any]) -> None:
    expected, own = found[case]["torch"], found[case][mesh]
    assert found[case]["steps"] == 8
    assert own["curve"] == pytest.approx(expected, rel=1e-4, abs=2e-7)
    if case != "int8 rows":  # whose KL is that of rounding errors
        assert expected[-2] < expected[0]  # it learns
    assert own["apart"] < 1e-4


@pytest.mark.slow
def test_all_weights_are_trained_as_transformers_trains_them(found: dict[str, Any]) -> None:
    expected, own = found["floats"]["transformers"], found["floats"]["mesh"]
    assert len(own) == 20
    assert own == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] / 2


@pytest.mark.parametrize("mesh", ["2x4", "4x2"])
def test_a_layer_exchanges_what_the_tables_imply(mesh: str, found: dict[str, Any]) -> None:
    """Along data the codes and scales of its seven weights, forward and backward, and gradients of
    scales; along model features of tokens.
    """
    layer = found["layer"][mesh]
    data = int(mesh[0])
    counts: Counter[Any] = Counter()
    for axis, kind, dtype, shape, count in layer:
        if axis == "data":
            what = "codes" if dtype == "s8" else "scales"
            assert what == "codes" or shape[-1] <= 512 // 32
        else:
            what = "norms" if len(shape) == 2 else "features"
            assert shape[:2] == [8 // data, 16]
            assert dtype == "f32"
        counts[axis, kind, what] += count
    assert counts == {
        ("data", "all-gather", "codes"): 7 * 2,
        ("data", "all-gather", "scales"): 7 * 2,
        ("data", "all-reduce", "scales"): 7,
        # Inputs of o, and of gate and up, twice; gradients of q, k, v and down.
        ("model", "all-gather", "features"): 2 * 2 + 4,
        # Outputs of q, k and v twice, of down once; gradients by the inputs of o, gate and up.
        ("model", "all-reduce", "features"): 3 * 2 + 1 + 3,
        ("model", "all-reduce", "norms"): 2 * 3,
    }


def test_what_a_plan_counts_is_what_devices_have(found: dict[str, Any]) -> None:
    """Of int8; CPUs keep int4 in bytes."""
    assert found["bytes"]["planned"] == pytest.approx(found["bytes"]["held"], rel=0.02)


@pytest.fixture(scope="module")
def floats(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats") / "floats"
    quantkit.convert(demo_model, folder, dtype="bf16", source_check=False)
    return folder


@pytest.fixture(scope="module")
def int4(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4") / "int4"
    quantkit.quantize(floats, folder, "int4-g32", method="rtn", source_check=False)
    return folder


@pytest.mark.slow
def test_the_command_trains_and_torch_goes_on(floats: Path, int4: Path, tmp_path: Path) -> None:
    """Killed after its first epoch over a mesh, it is continued by torch, as torch would have
    trained.
    """
    require_torchax()
    given: dict[str, Any] = {
        "calibration": EXCERPT,
        "samples": 16,
        "length": 32,
        "epochs": 2,
        "source_check": False,
    }
    options = [
        "--calibration",
        EXCERPT,
        "--samples",
        16,
        "--length",
        32,
        "--epochs",
        2,
        "--no-source-check",
    ]
    command = [
        str(one) for one in ("refine", int4, tmp_path / "dst", "--against", floats, *options)
    ]
    killed = subprocess.run(
        forked.command(
            "-c",
            partial.STOPPED_TRAINING + forked.COMMAND,
            *command,
            "--backend",
            "xla",
            "--mesh",
            "2x4",
        ),
        env=environment(8, tmp_path / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    quantkit.refine(int4, tmp_path / "dst", against=floats, resume=True, **given)
    quantkit.refine(int4, tmp_path / "torch", against=floats, **given)
    curves = [
        [
            one["held_back"]
            for one in json.loads((tmp_path / name / "quantkit.json").read_text())["refined"][
                "curve"
            ]
        ]
        for name in ("dst", "torch")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)  # scales in bfloat16


REFUSED = {
    "--train-codes": "--train-codes cannot be combined with --backend xla",
    "--device cpu": "--device cannot be combined with --backend xla, which has its own",
    "--mesh 4x4": "too few devices (found 8 of kind cpu, expected 16)",
    "--mesh 8x1": (
        "--batch is not divisible by the data-parallel size of --mesh (found 4,"
        " expected a multiple of 8)"
    ),
}
"""Options of devices, and what the message says of them."""
COMMANDS = """
import json, sys
from quantkit.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
"""
"""Run several commands, and print the exit code of each after its message."""


@pytest.mark.slow
def test_what_devices_cannot_do_is_refused(floats: Path, int4: Path, tmp_path: Path) -> None:
    require_torchax()
    command = ["refine", str(int4), str(tmp_path / "dst"), "--against", str(floats)]
    quick = ["--backend", "xla", "--no-source-check", "--samples", "16", "--length", "16"]
    commands = [[*command, *quick, *options.split()] for options in REFUSED]
    done = subprocess.run(
        forked.command("-c", COMMANDS, json.dumps(commands)),
        env=environment(8, tmp_path / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *answers, rest = done.stderr.split("\n2\n")
    assert rest == ""
    for message, answer in zip(REFUSED.values(), answers, strict=True):
        assert message in answer
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
