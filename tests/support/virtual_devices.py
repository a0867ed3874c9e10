"""Processes that have several virtual devices for XLA."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest

_QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
"""What makes of a program the same as else, in half the time of compiling."""


def require_torchax() -> None:
    """Without importing it: it would change torch for the other tests."""
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("torchax is not installed")


def environment(devices: int, cache: Path, **more: str) -> dict[str, str]:
    """The environment of a process that has this number of devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {_QUICK}"
    return {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "QUANTKIT_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def found_by(module: str, folders: dict[str, int], home: Path) -> dict[str, Any]:
    """What a module of this folder prints as JSON, of folders in `home` over this number of
    eight devices.
    """
    done = subprocess.run(
        forked.command(
            "-m", module, *(f"{home / name}:{count}" for name, count in folders.items())
        ),
        env=environment(8, home / "cache"),
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
