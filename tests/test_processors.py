"""The number of threads, with an option, the environment, a CPU quota, or none of them; and what
a processor is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.base import processors
from quantkit.base.processors import (
    cpu_features,
    physical_cores,
    processor_name,
    quota_threads,
    set_threads,
    validate_threads,
)
from quantkit.errors import RequestError

_SET = """
import sys
from quantkit.base import processors
processors.cpu_quota, processors.physical_cores = lambda: {quota}, lambda: 64
processors.set_threads({count})
assert "torch" not in sys.modules
import torch
print(torch.get_num_threads())
"""
_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "quota", "environment", "expected"),
    [
        (None, 1.0, {}, 1),
        (None, 0.5, {}, 1),
        (3, None, {}, 3),
        (5, 1.0, {}, 5),
        (3, None, {"OMP_NUM_THREADS": "1"}, 3),
        (3, None, {"MKL_NUM_THREADS": "1"}, 3),
        (None, 3.0, {"OMP_NUM_THREADS": "1"}, 1),
        (None, 3.0, {"MKL_NUM_THREADS": "1"}, 1),
    ],
)
def test_torch_computes_on_this_number_of_threads_once_imported(
    count: int | None, quota: float | None, environment: dict[str, str], expected: int
) -> None:
    """Also on more than there are cores."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    program = _SET.format(count=count, quota=quota)
    out = subprocess.check_output(
        [sys.executable, "-c", program], env=inherited | environment, text=True, cwd="/"
    )
    assert int(out) == expected


def test_a_torch_that_is_imported_changes_its_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC"):
        monkeypatch.setenv(name, "")  # restored at the end
    before = torch.get_num_threads()
    try:
        set_threads(2)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, None), (0.5, 1), (1.0, 1), (1.5, 2), (3.0, 3), (3.5, None), (4.0, None), (9.0, None)],
)
def test_a_quota_below_the_cores_limits_threads(
    quota: float | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "cpu_quota", lambda: quota)
    monkeypatch.setattr(processors, "physical_cores", lambda: 4)
    assert quota_threads() == expected


def test_hyper_threads_of_a_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        siblings = tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list"
        siblings.write_text(f"{number % 4},{number % 4 + 4}\n")
    for usable, cores in ((range(8), 4), ((0, 4), 1), ((0, 1, 4), 2), ((0, 9), 2)):
        monkeypatch.setattr(processors, "logical_processors", lambda usable=usable: list(usable))
        assert physical_cores(tmp_path) == cores


@pytest.mark.parametrize("count", [0, -1, 10**10])
def test_numbers_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(RequestError, match=r"`threads` is out of range.*expected 1 to \d+"):
        validate_threads(count)


def test_as_many_threads_as_processors_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert validate_threads(256) == 256
    monkeypatch.setattr(os, "cpu_count", lambda: 512)
    assert validate_threads(512) == 512


def test_a_processor_is_described_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    info = tmp_path / "cpuinfo"
    info.write_text(
        "model\t\t: 1\nmodel name\t: EPYC\nflags\t: fpu avx2 avx512f\n\nmodel name\t: B\nflags\t:"
        " fma\n"
    )
    assert cpu_features(info) == {"avx2", "avx512f"}
    assert processor_name(info) == "EPYC"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_features(info) == cpu_features(tmp_path / "none") == frozenset()
    assert processor_name(info) == (platform.processor() or "x86_64")
