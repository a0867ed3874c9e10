"""Training on several processes: as one process trains, and its state can be continued on
another mesh.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import forked
import oracle
import partial
import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.data.files import EXCERPT

TEXT = (
    "--calibration",
    EXCERPT,
    "--samples",
    16,
    "--length",
    32,
    "--epochs",
    2,
    "--no-source-check",
)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a KV head on both": ("llama", {"num_key_value_heads": 1}, "int4-g32"),
    "groups on both": ("llama", {"intermediate_size": 192}, "int4-g64"),
    "minima of zero points": ("qwen3", {"tie_word_embeddings": True}, "int4-g32-asym"),
    "norms after branches": ("gemma2", {}, "int4-g32"),
    "norms over all heads": ("olmo2", {}, "int4-g32"),
    "experts, some without tokens": (
        "qwen3_moe",
        {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "int4-g32",
    ),
}
TRAIN = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from quantkit.passes.activation_store import ActivationStore
from quantkit.distributed.group import join_processes
from quantkit.distributed.mesh import Mesh
from quantkit.formats.detect import open_checkpoint
from quantkit.base.progress import silent
from quantkit.training.trained import TrainedCheckpoint, TrainedNames
from quantkit.training.blockwise import float_states
from quantkit.training.decoder import make_decoder_engine
from quantkit.training.optimizer import Schedule
from quantkit.training.training import Samples, Training
folder, out, shape = Path(sys.argv[1]), Path(sys.argv[2]), tuple(map(int, sys.argv[3].split("x")))
with join_processes("cpu") as group:
    mesh, store = Mesh.of(group, shape), ActivationStore(out / f"scratch-{group.rank}", 1 << 30)
    for case in sorted(one.name for one in folder.iterdir()):
        floats, int4 = open_checkpoint(folder / case / "floats"), open_checkpoint(folder / case / "int4")
        model = TrainedCheckpoint(int4, TrainedNames.of(int4, norms=True, codes=False), store, 1 << 30)
        tokens = torch.randint(3, 60, (12, 7), generator=torch.Generator().manual_seed(0))
        samples = Samples(tokens, ActivationStore(out / f"targets-{group.rank}", 1 << 30), 4)
        samples.compute_targets(float_states(floats, 4, mesh), silent)
        engine = make_decoder_engine(model, floats, samples, Schedule(4 * samples.steps), torch.device("cpu"), mesh)
        training = Training(model, samples, engine, epochs=4, seed=0)
        state = training.run(evaluated=lambda state: None, stepped=lambda state: None)
        curve = [[one.held_back, one.training] for one in state.curve]
        (out / f"{case}-{group.rank}.json").write_text(json.dumps(curve))
        save_file(model.factors, out / f"{case}-{group.rank}.safetensors")
"""  # noqa: E501


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for case, (kind, sizes, scheme) in CASES.items():
        source = oracle.save(
            oracle.make(kind, num_hidden_layers=2, **sizes), folder / case / "floats"
        )
        quantkit.quantize(
            source,
            folder / case / "int4",
            scheme,
            method="rtn",
            accept_quality_loss=True,
            source_check=False,
        )
    return folder


def trained(models: Path, out: Path, mesh: str) -> Path:
    out.mkdir()
    processes = int(mesh[0]) * int(mesh[2])
    for done in forked.group(processes, TRAIN, models, out, mesh):
        assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(models, tmp_path_factory.mktemp("alone") / "out", "1x1")


@pytest.fixture(scope="module")
def together(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(models, tmp_path_factory.mktemp("together") / "out", "2x2")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(case: str, alone: Path, together: Path) -> None:
    """Eight steps of 4 samples; each process ends with the same factors, to the bit."""
    expected, found = (
        json.loads((one / f"{case}-0.json").read_text()) for one in (alone, together)
    )
    flat = [
        [value for point in curve for value in point if value is not None]
        for curve in (expected, found)
    ]
    assert flat[1] == pytest.approx(flat[0], rel=1e-4)
    assert flat[0][-2] < flat[0][0]  # it learns
    factors, *others = (load_file(one) for one in sorted(together.glob(f"{case}-*.safetensors")))
    assert all(
        torch.equal(value, other[name]) for other in others for name, value in factors.items()
    )
    for name, value in load_file(alone / f"{case}-0.safetensors").items():
        apart = (factors[name] - value).abs().flatten()
        # Adam divides a gradient near zero by its own size, so a few factors may differ by steps.
        assert apart.quantile(0.999) < 2e-3, name
        assert apart.mean() < 2e-5, name


@pytest.mark.slow
def test_a_state_is_continued_on_another_mesh(int4: Path, floats: Path, tmp_path: Path) -> None:
    """After the process that keeps it was killed; the other one ends with the code for that."""
    command = [
        str(argument) for argument in ("refine", int4, tmp_path / "dst", "--against", floats, *TEXT)
    ]
    killed, other = forked.group(2, partial.STOPPED_TRAINING + forked.COMMAND, *command)
    assert (killed.returncode, other.returncode) == (-signal.SIGKILL, 9)
    first, second = forked.group(2, forked.COMMAND, *command)
    assert first.returncode == second.returncode == 6
    assert (first.stderr + second.stderr).count("--resume") == 1
    done = forked.group(2, forked.COMMAND, *command, "--mesh", "2x1", "--resume")
    assert [process.returncode for process in done] == [0, 0], done[0].stderr
    assert "KL" in done[0].stdout
    assert not done[1].stdout
    quantkit.refine(
        int4,
        tmp_path / "alone",
        against=floats,
        calibration=EXCERPT,
        samples=16,
        length=32,
        epochs=2,
        source_check=False,
    )
    curves = [
        [
            entry["held_back"]
            for entry in json.loads((tmp_path / name / "quantkit.json").read_text())["refined"][
                "curve"
            ]
        ]
        for name in ("dst", "alone")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)  # scales in bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "dst"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--mesh", "2x2"], ["(found 2x2 for 2)"]),
        (["--mesh", "2"], ["--mesh", "(found '2', expected DxM"]),
        (["--mesh", "2x1", "--samples", "2"], ["(found 2"]),
        (["--train-codes"], ["--train-codes", "(found 2 processes)"]),
    ],
)
def test_what_a_mesh_cannot_do_is_refused(
    options: list[str], names: list[str], int4: Path, floats: Path, tmp_path: Path
) -> None:
    command = [
        str(argument) for argument in ("refine", int4, tmp_path / "dst", "--against", floats, *TEXT)
    ]
    first, second = forked.group(2, forked.COMMAND, *command, *options)
    assert {first.returncode, second.returncode} == {2}
    assert all(name in first.stderr + second.stderr for name in names)
    assert not list(tmp_path.iterdir())
