"""Several processes share one calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from solved_streams import record_hessians, solve_streams
from stored_codes import codes

import quantkit
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.data.files import excerpt
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.kv_scales import layer_scales
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(excerpt()[5000:])
    return path


@pytest.mark.slow
def test_three_processes_make_what_one_makes(demo_model: Path, text: Path, tmp_path: Path) -> None:
    options = [
        "--scheme",
        "int4-g64",
        "--method",
        "gptq",
        "--samples",
        "50",
        "--length",
        "128",
        "--kv-cache",
        "fp8",
    ]
    done = forked.group(
        3,
        forked.COMMAND,
        "quantize",
        demo_model,
        tmp_path / "three",
        "--calibration",
        text,
        *options,
    )
    assert [one.returncode for one in done] == [0] * 3, done[0].stderr
    assert "".join(one.stdout for one in done).count("wrote") == 1
    assert not list((tmp_path / "three").glob(".*"))
    given: dict[str, Any] = {"calibration": text, "samples": 50, "length": 128, "kv_cache": "fp8"}
    quantkit.quantize(demo_model, tmp_path / "one", "int4-g64", method="gptq", **given)
    one, three = codes(tmp_path / "one"), codes(tmp_path / "three")
    # later layers see what rounding of sums made of earlier ones
    first = "model.layers.0.self_attn.q_proj"
    assert (one[first].codes != three[first].codes).float().mean() < 0.01
    figures = [
        json.loads((tmp_path / name / "quantkit.json").read_text())["quality"]
        for name in ("one", "three")
    ]
    assert figures[1]["passed"]
    for single, shared in zip(*(figure["texts"] for figure in figures), strict=True):
        assert shared["kl"] == pytest.approx(single["kl"], rel=0.2)
    assert quantkit.load(tmp_path / "three")
    found = [layer_scales(open_checkpoint(tmp_path / name)) for name in ("one", "three")]
    assert found[0]
    assert found[1]
    assert found[1][0] == pytest.approx(found[0][0], rel=0.01)


@pytest.mark.slow
def test_the_hessian_is_that_of_all_samples(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process adds up is what two add up together."""
    tokens = torch.randint(3, 2000, (6, 1024), generator=torch.Generator().manual_seed(0))
    source = open_checkpoint(demo_model)
    seen = record_hessians(monkeypatch)
    schemes = {"model.layers.0.mlp.down_proj": QuantScheme.parse("int8")}
    for part in (tokens, tokens[:2], tokens[2:]):
        solve_streams(source, part, schemes)
    whole, first, second = seen
    torch.testing.assert_close(first + second, whole, rtol=1e-4, atol=1e-2)
    assert torch.equal(whole, whole.t())


@pytest.mark.parametrize("elsewhere", [True, False], ids=["unpaired elsewhere", "alone"])
def test_all_processes_add_up_the_same_whatever_they_saw(elsewhere: bool) -> None:
    calls = 0

    class Counted(ProcessGroup):
        def sum_(self, value: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            if value.shape == (
                2,
            ):  # how many have seen unpaired inputs, and how many inputs in pairs
                value += torch.tensor([int(elsewhere), 7])

    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    for paired in (0, 20, 32):
        statistics = HessianAccumulator(8, 8, torch.device("cpu"))
        if paired:
            statistics.add_pair(inputs[:paired], inputs[:paired])
        assert statistics.unpaired is None  # held only once it is needed
        if paired < 32:
            statistics.add(inputs[paired:])
        calls = 0
        hessian, pairs, drift, count = statistics.release(Counted())
        assert count == paired + 7
        torch.testing.assert_close(pairs, inputs[:paired].t() @ inputs[:paired])
        torch.testing.assert_close(drift, pairs)
        if paired == 32 and not elsewhere:
            assert hessian is None
            assert calls == 3
        else:
            assert hessian is not None
            assert calls == 4
            assert hessian.data_ptr() != pairs.data_ptr()  # the solver damps both in place
            torch.testing.assert_close(hessian, inputs.t() @ inputs)
