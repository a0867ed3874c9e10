"""The demo on the model that ships with the package."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from command import Capture, run

from quantkit.errors import DestinationError
from quantkit.evals.demo import SCHEMES, run_demo
from quantkit.quality.verify import Verdict


@pytest.mark.slow
def test_the_demo_measures_every_checkpoint(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "demo")
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["bf16", *SCHEMES]
    assert report.verdicts["bf16"] is Verdict.SAME
    assert rows["bf16"].kl == rows["bf16"].largest_logit_difference == 0
    # int4 costs more than int8, and larger groups more than smaller ones, in bits saved and in KL
    ranked = [rows[name] for name in ("bf16", "int8", "int4-g32", "int4-g64", "int4-g128")]
    assert [row.bits_per_weight for row in ranked] == sorted(
        (row.bits_per_weight for row in ranked), reverse=True
    )
    assert [row.kl for row in ranked] == sorted(row.kl for row in ranked)
    assert rows["int8"].perplexity == pytest.approx(rows["bf16"].perplexity, rel=0.005)
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [row["name"] for row in value["rows"]] == list(rows)
    assert value["verdicts"] == {"bf16": "same", **dict.fromkeys(SCHEMES, "within_bound")}
    assert all(sample.startswith("My fellow citizens") for sample in report.samples.values())
    assert rows["bf16"].float_share == 1
    assert rows["int8"].float_share == pytest.approx(0.4, abs=0.05)
    for width in (80, 100):
        lines = report.lines(width)
        assert max(map(len, lines)) <= width
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in rows)
        assert any(
            line.startswith("model ") and "verified" in line for line in lines
        )  # in one table, not split
        assert not any("Left out" in line for line in lines)


@pytest.mark.slow
def test_a_quick_demo_says_what_it_leaves_out_and_what_to_try(
    tmp_path: Path, capfd: Capture
) -> None:
    code, out, err = run(
        capfd, "demo", "--quick", "--output", tmp_path / "my demo", "--json", tmp_path / "found"
    )
    assert (code, err) == (0, "")
    assert "Left out by the quick demo: int8, int4-g32, int4-g128." in out
    found = json.loads((tmp_path / "found").read_text())
    assert [row["name"] for row in found["rows"]] == ["bf16", "int4-g64"] == list(found["verdicts"])
    assert sorted(path.name for path in (tmp_path / "my demo").iterdir()) == ["bf16", "int4-g64"]
    tried = [shlex.split(line) for line in out.split("To try next:")[1].splitlines() if line]
    assert [words[1] for words in tried] == ["generate", "chat", "eval", "bench", "quantize"]
    for _, command, folder, *_ in tried[:-1]:
        assert Path(folder).is_dir(), command
    assert run(capfd, *tried[0][1:], "--max-new-tokens", "2")[0] == 0


def test_the_demo_computes_on_one_thread_and_leaves_their_number_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr("quantkit.evals.demo._run", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_demo(quick=True)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("during", "name"), [("tensors", "new/demo"), ("steps", "demo")])
def test_an_interrupted_demo_leaves_nothing_and_the_next_reports_each_step(
    during: str,
    name: str,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither under its name, nor what a run could go on with: the next one begins anew."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    place = {
        "tensors": "quantkit.jobs.convert.convert._load_output_value",
        "steps": "quantkit.evals.demo.compare",
    }[during]
    with monkeypatch.context() as patched:
        patched.setattr(place, stop)
        code, _, err = run(capfd, "demo", "--quick", "--output", tmp_path / name)
    kept = "; nothing was written yet" if during == "tensors" else ""
    assert (code, err) == (130, f"quantkit: interrupted{kept}\n")
    assert list((tmp_path / name).parent.iterdir()) == []
    reported: list[tuple[str, int, int, str]] = []
    run_demo(tmp_path / name, quick=True, progress=lambda *now: reported.append(now))
    steps = [(phase, done) for phase, done, _, unit in reported if unit == "steps"]
    assert steps == [
        ("convert", 0),
        ("quantize to int4-g64", 1),
        ("verify bf16", 2),
        ("verify int4-g64", 3),
        ("generate with bf16", 4),
        ("generate with int4-g64", 5),
    ]
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == ["demo"]
    made = tmp_path / "as any other"
    made.mkdir()
    assert (tmp_path / name).stat().st_mode == made.stat().st_mode


def test_the_demo_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(DestinationError):
        run_demo(tmp_path)
