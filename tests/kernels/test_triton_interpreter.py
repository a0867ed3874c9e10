"""The Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("triton", minversion="3.9", reason="older interpreters fail with numpy 2.4")

pytestmark = pytest.mark.gpu_kernels
FILES = [
    ROOT / f"tests/kernels/triton_{name}.py"
    for name in ("products", "attention", "experts", "gptq", "blocks")
]


@pytest.mark.slow
def test_the_kernels_are_right_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    done = subprocess.run(
        [*command, *map(str, FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
