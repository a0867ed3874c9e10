"""Checks of a finished output that raise: the output is kept, and another run repeats the check
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Capture, run
from partial import partial

import quantkit
from quantkit.errors import (
    CheckpointError,
    GroupError,
    NonFiniteError,
    QuantkitError,
    RequestError,
    UnsupportedError,
)
from quantkit.formats.output.staging import find_kept_note
from quantkit.jobs.output.writer import Writer

Job = Callable[..., Any]

ERRORS = [
    RequestError,
    CheckpointError,
    NonFiniteError,
    UnsupportedError,
    QuantkitError,
    RuntimeError,
]
GPTQ = {
    "method": "gptq",
    "samples": 8,
    "length": 64,
    "accept_quality_loss": True,
    "source_check": False,
}


def solve(src: Path, dst: Path, **options: Any) -> Any:
    return quantkit.quantize(src, dst, "int4-g32", **GPTQ, **options)


def solve_in_two_formats(src: Path, dst: Path, **options: Any) -> Any:
    return quantkit.quantize(src, dst, "int4-g32", to=["gptq", "awq"], **GPTQ, **options)


def solve_certified(src: Path, dst: Path, **options: Any) -> Any:
    return quantkit.quantize(src, dst, "int8", certify_positions=128, **GPTQ, **options)


def transcode(src: Path, dst: Path, **options: Any) -> Any:
    return quantkit.convert(src, dst, to="compressed-tensors", source_check=False, **options)


@pytest.fixture(scope="module")
def rounded(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dst = tmp_path_factory.mktemp("rounded") / "int4"
    return quantkit.quantize(
        demo_model, dst, "int4-g32", method="rtn", to="gptq", source_check=False
    ).path


CHECKS = {
    "gate": (solve, "quantkit.jobs.quantize.verification.run_gate"),
    "reading back": (solve, "quantkit.jobs.output.writer.open_finished_or_not"),
    "gate of two formats": (solve_in_two_formats, "quantkit.jobs.quantize.verification.run_gate"),
    "certificate": (solve_certified, "quantkit.quality.position_divergence.divergence_by_position"),
    "exact comparison": (transcode, "quantkit.jobs.convert.convert.require_exact"),
}
CASES = [("gate", error) for error in ERRORS]
CASES += [(name, RequestError) for name in CHECKS if name != "gate"]


def raiser(error: type[BaseException]) -> Callable[..., Any]:
    def check(*_: object, **__: object) -> Any:
        raise error("the check cannot be done")

    return check


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), CASES)
def test_a_check_that_raises_deletes_nothing_and_is_repeated_alone(
    name: str,
    error: type[Exception],
    demo_model: Path,
    rounded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, check = CHECKS[name]
    source, dst = rounded if job is transcode else demo_model, tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(check, raiser(error))
        with pytest.raises(error) as caught:
            job(source, dst)
    assert find_kept_note(caught.value) == f"{partial(dst)} is kept: add `resume=True`"
    assert not dst.exists()
    monkeypatch.setattr(Writer, "put", raiser(AssertionError))
    assert job(source, dst, resume=True).path == dst
    assert not partial(dst).exists()


def test_the_command_reports_what_is_kept(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.jobs.quantize.verification.run_gate", raiser(RequestError))
    code, _, err = run(
        capfd,
        "quantize",
        demo_model,
        tmp_path / "out",
        "--scheme",
        "int8",
        "--method",
        "rtn",
        "--no-source-check",
    )
    assert code == RequestError.exit_code
    assert f"{tmp_path / 'out.partial'} is kept: add --resume" in err


@pytest.mark.slow
def test_the_work_of_a_lost_process_is_kept(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only errors of the source would occur again."""
    put = Writer.put

    def lose_a_process(self: Writer, name: str, value: Any, record: Any = None) -> None:
        put(self, name, value, record)
        raise GroupError("a process was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "put", lose_a_process)
        with pytest.raises(GroupError):
            solve(demo_model, tmp_path / "out")
    assert partial(tmp_path / "out").is_dir()
    assert solve(demo_model, tmp_path / "out", resume=True).path.is_dir()
