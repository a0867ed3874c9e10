"""`quantkit eval` from the command line."""

from __future__ import annotations

import csv
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import oracle
import pytest
from command import Capture, run

from quantkit.data.files import excerpt


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "speech.txt"
    path.write_text(excerpt()[:2500])
    return path


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network; a download would fail the test."""

    def refused(*_: object, **__: object) -> None:
        raise urllib.error.URLError(OSError("Name or service not known"))

    monkeypatch.setattr(urllib.request, "urlopen", refused)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_the_table_is_printed_and_the_files_are_written(
    demo_model: Path, text: Path, tmp_path: Path, capfd: Capture
) -> None:
    pytest.importorskip("matplotlib")
    assert run(capfd, "quantize", demo_model, tmp_path / "q", "--scheme", "int8")[0] == 0
    outputs = {option: tmp_path / f"out{option}" for option in ("--report", "--json", "--plot")}
    given = ["eval", tmp_path / "q", "--text", text, "--against", demo_model, "--window", "128"]
    cached = ["--cache-logits", tmp_path / "cache"]
    code, out, err = run(
        capfd, *given, *cached, *(part for pair in outputs.items() for part in pair)
    )
    assert (code, err) == (0, "")
    first, second = out.strip().split("\n\n")
    assert re.match(r"On speech \(\d+ tokens\); token ppl in windows of 128\.\n", first)
    assert [line.split()[0] for line in first.splitlines()[1:]] == [
        "model",
        "-------",
        "mini-en",
        "q",
    ]
    assert [line.split()[0] for line in second.splitlines()[-3:]] == ["model", "-----", "q"]
    assert re.match(r"Against mini-en, on speech \(\d+ tokens\) in windows of 128: ", second)
    assert "±" in second.splitlines()[-1]
    assert "|" not in first
    assert json.loads(outputs["--json"].read_text())["reference"] == "mini-en"
    assert outputs["--plot"].read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    again = run(capfd, *given, *cached)
    assert again == (0, out, "")
    code, printed, err = run(capfd, *given, *cached, "--table", "markdown")
    assert (code, err) == (0, "")
    assert printed.strip() in outputs["--report"].read_text()


@pytest.mark.slow
def test_tables_for_papers_and_programs_have_stdout_alone(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    given = ["eval", f"a_b={demo_model}", "--window", "64", "--tasks", ""]
    code, out, err = run(capfd, *given, "--table", "latex")
    assert code == 0
    assert out.startswith(
        "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\n\\caption{On excerpt ("
    )
    assert "\n\\begin{tabular}{lrrrrr}\n" in out
    assert "\na\\_b & " in out
    assert err.startswith("quantkit: note: No text was given")
    code, out, _ = run(capfd, *given, "--table", "csv")
    (row,) = csv.DictReader(out.splitlines())
    assert (row["model"], row["text"]) == ("a_b", "excerpt")
    code, out, err = run(capfd, *given, "--table", "csv", "--json", "-")
    assert json.loads(out)["rows"][0]["name"] == "a_b"
    assert err.startswith("model,text,")


@pytest.mark.slow
def test_a_misspelt_task_is_reported_as_such_before_anything_else(
    tmp_path: Path, capfd: Capture
) -> None:
    """Before the model is looked for, and before the hub is."""
    pytest.importorskip("lm_eval")
    code, out, err = run(capfd, "eval", tmp_path / "none", "--tasks", "hellaswag,winogrand")
    assert (code, out) == (2, "")
    assert err.startswith(
        "quantkit: error: unknown task (found winogrand); did you mean winogrande"
    )
    code, _, err = run(capfd, "eval", tmp_path / "none", "--tasks", "xyzzy!")
    assert code == 2
    assert (
        err
        == "quantkit: error: unknown task (found xyzzy!); python -m lm_eval ls tasks lists all of"
        " them\n"
    )


def test_trequests_without_data_or_network_are_one_line_at_once(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    pytest.importorskip("lm_eval")
    code, out, err = run(
        capfd, "eval", demo_model, "--tasks", "hellaswag,winogrande", "--task-data", tmp_path
    )
    assert (code, out) == (2, "")
    assert (
        err == "quantkit: error: the data of task 'hellaswag' is not local, and the hub is"
        " unreachable;"
        " put it in a file hellaswag.jsonl, in the folder of --task-data\n"
    )


def test_without_the_harness_the_way_to_it_is_reported(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, err = run(capfd, "eval", demo_model, "--tasks", "hellaswag")
    assert (code, out) == (2, "")
    assert (
        err == "quantkit: error: lm_eval is not installed; pip install '.[evals]', from quantkit's"
        " folder\n"
    )


@pytest.mark.parametrize("output", [("--plot", "out.png"), ("--report", "out.html")])
def test_without_matplotlib_the_way_to_it_is_reported_before_the_work(
    output: tuple[str, str],
    demo_model: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    option, name = output
    code, _, err = run(capfd, "eval", demo_model, option, tmp_path / name)
    assert (code, err) == (
        2,
        (
            "quantkit: error: matplotlib is not installed; pip install '.[plot]', from quantkit's"
            " folder\n"
        ),
    )


def test_a_damaged_matplotlib_is_reported_before_the_work(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, _, err = run(capfd, "bench", demo_model, "--plot", tmp_path / "out.png")
    assert code == 2
    assert err.startswith(
        "quantkit: error: matplotlib cannot be imported (found ModuleNotFoundError: import of"
    )


@pytest.mark.parametrize("tasks", [[], ["--tasks", "winogrande", "--against"]])
def test_a_picture_of_nothing_is_refused_before_the_work(
    tasks: list[str],
    demo_model: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "quantkit.evals.evaluate.open_models", lambda *_: pytest.fail("the work began")
    )
    models = [demo_model, *tasks, *([oracle.copy(demo_model, tmp_path / "same")] if tasks else [])]
    code, _, err = run(capfd, "eval", *models, "--plot", tmp_path / "out.png")
    assert (code, err) == (
        2,
        (
            "quantkit: error: nothing to draw (expected two models and a text, or up to 3 models"
            " that quantkit quantized by one method)\n"
        ),
    )


def test_local_data_are_requested_a_task(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "winogrande.jsonl").write_text(
        "\n".join(
            json.dumps(
                {
                    "sentence": f"The _ of the {thing}.",
                    "option1": "people",
                    "option2": "horse",
                    "answer": "1",
                }
            )
            for thing in ("world", "country", "union")
        )
    )
    code, out, err = run(
        capfd, "eval", demo_model, "--tasks", "winogrande", "--task-data", tmp_path
    )
    assert (code, err) == (0, "")
    title, head, _, row = out.splitlines()
    assert title == "Tasks: ± is one standard error over the questions."
    assert head.endswith("  winogrande acc")
    assert re.split("  +", row)[-1] in ("0", "0.3 ± 0.3", "0.7 ± 0.3", "1.00")


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_a_report_never_replaces_a_file_of_a_model(
    command: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    assert run(capfd, "convert", demo_model, tmp_path / "m")[0] == 0
    config = tmp_path / "m" / "config.json"
    before = config.read_bytes()
    code, _, err = run(capfd, command, tmp_path / "m", "--json", config)
    assert code == 5
    assert "is part of a model folder" in err
    assert config.read_bytes() == before
