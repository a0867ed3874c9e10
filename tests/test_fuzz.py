"""Damaged checkpoints: refused in one line, or read as torch, safetensors and zipfile read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "scripts" / "fuzz.py"


def test_no_damaged_input_breaks_the_rule() -> None:
    """2,000 inputs, fifty of them whole runs; the output says how to repeat one."""
    command = [sys.executable, str(FUZZ), "--inputs", "2000", "--seed", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("2000 inputs, 50 of them whole runs")
