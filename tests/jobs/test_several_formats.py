"""`to` with several formats: one solution, a folder for each format with the bytes of a run in
it alone, one rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
from command import Capture, run
from partial import contents, partial

import quantkit
from quantkit.calibration.settings import GptqSettings
from quantkit.doctor.diagnose import diagnose
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    QualityError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

FORMATS = ("compressed-tensors", "gptq", "awq", "gguf")
JOBS: dict[str, dict[str, Any]] = {
    "rtn": {"scheme": "int4-g32", "method": "rtn", "head": "int4-g32"},
    "gptq": {"scheme": "int4-g32", "samples": 8, "length": 64, "keep": "*.1.*"},
}
TWO_GROUP_SIZES = Recipe(
    QuantScheme.parse("int4-g32"), (Override("*.1.mlp.*", QuantScheme.parse("int4-g64")),)
)
CHILD = """
import json, os, signal, sys
import torch
import quantkit
from quantkit.jobs.output import writer as output
output.SAFE_POINT_BYTES = 50_000
torch.set_num_threads(1)  # sums of floats depend on it
src, dst, wanted, share, formats, job = sys.argv[1:]

def progress(phase, done, total, unit):
    if phase == wanted and float(share) * total <= done < total:
        os.kill(os.getpid(), signal.SIGKILL)

quantkit.quantize(src, dst, to=formats.split(","), source_check=False, progress=progress, **json.loads(job))
"""  # noqa: E501


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.jobs.output.writer.SAFE_POINT_BYTES", 50_000)


@pytest.fixture(scope="module")
def source(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return quantkit.convert(
        tiny_model("llama"), folder / "llama", dtype="bf16", source_check=False
    ).path


@pytest.fixture(scope="module")
def alone(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, bytes]]]:
    """What runs in one format write, by job and format."""
    folder = tmp_path_factory.mktemp("alone")
    made: dict[str, dict[str, dict[str, bytes]]] = {}
    for job, options in JOBS.items():
        for name in FORMATS:
            dst = folder / job / name
            quantkit.quantize(source, dst, to=name, source_check=False, **options)  # type: ignore[arg-type]
            made.setdefault(job, {})[name] = contents(dst)
    return made


def _several(source: Path, dst: Path, job: str = "rtn", **options: Any) -> quantkit.QuantizeResult:
    return quantkit.quantize(
        source, dst, **{"to": FORMATS, "source_check": False, **JOBS[job], **options}
    )


def _by_format(dst: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: contents(path) for path in dst.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_each_format_has_the_bytes_of_a_run_in_it_alone(
    job: str, source: Path, alone: dict[str, dict[str, dict[str, bytes]]], tmp_path: Path
) -> None:
    made = _several(
        source, tmp_path / "out", job, to=reversed(FORMATS)
    )  # an iterator, in another order
    assert _by_format(tmp_path / "out") == alone[job]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (made.path, list(made.formats)) == (tmp_path / "out", list(FORMATS))
    for name, one in made.formats.items():
        assert one.manifest == json.loads(alone[job][name]["quantkit.json"])
        assert one.path == tmp_path / "out" / name
        assert not diagnose(one.path).is_broken
    *lines, last = made.lines()
    assert all(any(str(tmp_path / "out" / name) in line for line in lines) for name in FORMATS)
    assert last.startswith(f"wrote {tmp_path / 'out'}: 4 formats, ")
    again = _several(source, tmp_path / "out", job, if_exists="skip")
    assert again.skipped
    assert [one.manifest for one in again.formats.values()] == [
        one.manifest for one in made.formats.values()
    ]


@pytest.mark.slow
def test_experts_that_formats_order_differently(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source, formats = tiny_model("mixtral"), ("compressed-tensors", "mlx", "gguf")
    options: dict[str, Any] = {"method": "rtn", "source_check": False}
    quantkit.quantize(source, tmp_path / "out", "int8", to=formats, **options)
    for name in formats:
        quantkit.quantize(source, tmp_path / name, "int8", to=name, **options)
        assert contents(tmp_path / "out" / name) == contents(tmp_path / name)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("job", "phase", "share"),
    [("rtn", "quantize", 0.5), ("gptq", "quantize", 0.4), ("gptq", "gate of awq", 0.0)],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    job: str,
    phase: str,
    share: float,
    source: Path,
    alone: dict[str, dict[str, dict[str, bytes]]],
    tmp_path: Path,
) -> None:
    dst = tmp_path / "out"
    child = forked.python(
        CHILD, source, dst, phase, str(share), ",".join(FORMATS), json.dumps(JOBS[job])
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not dst.exists()
    for path in partial(dst), partial(dst) / "gptq":
        with pytest.raises(
            CheckpointError,
            match="is the partial output of an unfinished run of quantize, not a model",
        ):
            quantkit.inspect(path)
    with pytest.raises(ResumeError, match="different inputs or options"):
        _several(source, dst, job, to=FORMATS[1:], resume=True)
    _several(source, dst, job, resume=True)
    assert _by_format(dst) == alone[job]
    assert not partial(dst).exists()


@pytest.mark.slow
def test_a_layer_that_only_some_formats_have_is_solved_again(
    source: Path,
    alone: dict[str, dict[str, dict[str, bytes]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantkit.jobs.output.writer import Writer

    checkpoint, count = Writer.record_safe_point, 0

    def stop(writer: Writer) -> None:
        nonlocal count
        checkpoint(writer)
        count += 1
        if count == 6:  # the embeddings of four formats, and the first layer of two
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quantkit.jobs.output.writer.SAFE_POINT_BYTES", 1 << 30)
        patched.setattr(Writer, "record_safe_point", stop)
        with pytest.raises(KeyboardInterrupt):
            _several(source, tmp_path / "out", "gptq")
    _several(source, tmp_path / "out", "gptq", resume=True)
    assert _by_format(tmp_path / "out") == alone["gptq"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scheme": "int8", "method": "gptq"}, "awq does not support int8"),
        ({"scheme": "int4-g32-asym"}, "gguf does not support int4-g32-asym"),
        ({"embedding": "int8"}, "gptq does not support an int8 embedding"),
        ({"scheme": TWO_GROUP_SIZES, "keep": ()}, "awq: .*group"),
    ],
)
def test_what_a_format_cannot_hold_is_found_before_anything_is_solved(
    options: dict[str, Any],
    named: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GptqSettings, "draw", _not_reached)
    with pytest.raises(UnsupportedError, match=named):
        _several(source, tmp_path / "out", "gptq", **options)
    assert not any(tmp_path.iterdir())


def test_shapes_and_files_that_a_format_cannot_hold_are_found_before_anything_is_solved(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(GptqSettings, "draw", _not_reached)
    odd = oracle.save(oracle.make("llama", intermediate_size=36).bfloat16(), tmp_path / "odd")
    for to in ("awq", ["awq", "gptq"]):
        with pytest.raises(
            UnsupportedError, match=r"(awq|gptq) cannot store 'model.layers.0.mlp.gate_proj'"
        ):
            quantkit.quantize(odd, tmp_path / "out", "int4-g32", to=to)  # type: ignore[arg-type]
    bare = shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    code, _, err = run(
        capfd, "quantize", bare, tmp_path / "out", "--scheme", "int8", "--to", "gptq,gguf"
    )
    assert code == 4
    assert "gguf: the source has no tokenizer" in err
    assert {path.name for path in tmp_path.iterdir()} == {"odd", "bare"}


def _not_reached(*_: object, **__: object) -> Any:
    raise AssertionError("samples were drawn")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"to": ("gptq", "gptq")}, "`to` names a format twice .*gptq"),
        ({"to": ("gptq", "exl2")}, "unknown target format .*exl2"),
        ({"to": ("gptq", "hf")}, '`to="hf"` cannot store quantized weights'),
        ({"to": ()}, "`to` is empty"),
        ({"to": 3}, "`to` is of the wrong type"),
        ({"to": ("gptq", 3)}, "`to` is of the wrong type"),
        ({"to": ("gptq", "awq"), "dst": "out.gguf"}, "the destination is named as a GGUF file"),
        (
            {"to": ("gptq", "awq"), "scheme": None, "target_bits": 4.5},
            "`target_bits` requires a single format",
        ),
        (
            {"to": ("gptq", "awq"), "scheme": None, "max_size": 10**6},
            "`max_size` requires a single format",
        ),
        (
            {"to": ("compressed-tensors", "awq"), "tensors_only": True},
            "`tensors_only=True` requires",
        ),
    ],
)
def test_requests_that_make_no_sense(
    options: dict[str, Any], expected: str, source: Path, tmp_path: Path
) -> None:
    dst = tmp_path / options.pop("dst", "out")
    with pytest.raises(RequestError, match=expected):
        quantkit.quantize(source, dst, **{"scheme": "int4-g32", **options})


def test_a_list_of_one_format_is_that_format(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "rtn", "source_check": False}
    assert quantkit.quantize(source, tmp_path / "out", "int8", to=["gptq"], **options).formats == {}
    assert (tmp_path / "out" / "quantize_config.json").is_file()


@pytest.mark.slow
def test_the_plan_counts_all_formats(source: Path, tmp_path: Path) -> None:
    plans = {
        to: quantkit.plan.quantize(source, tmp_path / "out", "int4-g32", to=to)
        for to in (*FORMATS, FORMATS)
    }
    whole = plans.pop(FORMATS)
    assert whole.disk_bytes == sum(one.disk_bytes for one in plans.values())
    assert [step for step in whole.steps if "gate" in step] == [
        f"gate of {name}" for name in FORMATS
    ]
    assert whole.seconds < sum(one.seconds for one in plans.values())


@pytest.mark.slow
def test_another_set_of_formats_is_another_result(
    source: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst, options = (
        tmp_path / "out",
        ("--scheme", "int8", "--no-source-check", "--if-exists", "skip"),
    )
    assert run(capfd, "quantize", source, dst, *options, "--to", "gptq,mlx")[0] == 0
    for to in ("gptq", "gptq,mlx,gguf", "gptq,gguf"):
        code, _, err = run(capfd, "quantize", source, dst, *options, "--to", to)
        assert code == 5, err
    code, out, _ = run(capfd, "quantize", source, dst, *options, "--to", "mlx,gptq")
    assert (code, out.splitlines()[-1].partition(":")[0]) == (
        0,
        f"{dst} exists already, from the same inputs and options",
    )
    for command in (
        ("verify", dst),
        ("inspect", dst),
        ("generate", dst, "--prompt", "x"),
        ("doctor", dst),
    ):
        code, out, err = run(capfd, *command)
        assert code in (3, 12)
        assert re.search("gptq, .*mlx", out + err)
    assert run(capfd, "verify", dst / "gptq", source)[0] == 0


@pytest.mark.slow
def test_a_result_that_is_too_far_from_its_source_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.quality.gate.SLACK", 0.0)
    monkeypatch.setattr("quantkit.quality.gate.FLOOR", 0.0)
    monkeypatch.setattr("quantkit.quality.gate.scheme_bound", _no_loss)
    with pytest.raises(QualityError) as caught:
        _several(source, tmp_path / "out")
    assert caught.value.path == tmp_path / "out" / FORMATS[0]
    assert not (tmp_path / "out").exists()
    phases = set()
    made = _several(
        source,
        tmp_path / "out",
        resume=True,
        accept_quality_loss=True,
        progress=lambda phase, *_: phases.add(phase),
    )
    assert sum("accepted" in note for note in made.notes) == len(FORMATS)
    # All tensors are written: the resumed run only measures.
    assert f"gate of {FORMATS[0]}" in phases
    assert "quantize" not in phases


def _no_loss(schemes: Any) -> Any:
    from quantkit.quality.bounds import Bound

    return Bound(0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["link", "file", "strange", "folder"])
def test_nothing_else_gets_into_the_folders_of_formats(
    change: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()

    def disturb(phase: str, done: int, total: int, unit: str) -> None:
        folder = partial(dst) / "gptq"
        if phase != "gate of gptq" or done:
            return
        if change == "strange":
            (folder / "strange").write_text("not part of it")
        elif change == "folder":
            (folder / "strange").mkdir(exist_ok=True)
        elif not other.joinpath("gptq").exists():
            os.rename(folder, other / "gptq")
            if change == "link":
                folder.symlink_to(other / "gptq")
            else:
                folder.write_text("")

    with pytest.raises((DestinationError, ResumeError)):
        _several(source, dst, progress=disturb)
    assert not dst.exists()
