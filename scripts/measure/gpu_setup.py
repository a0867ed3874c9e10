"""What the scripts of `gpu_day.sh` share: the GPU or, in a dry run, the CPU that stands for it;
sizes; results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.topology import linear_columns
from quantkit.base.memory import malloc_trim, peak_bytes
from quantkit.evals.synthetic import SyntheticCheckpoint, synthetic
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.models import make_random_weight

DRY = os.environ.get("GPU_DAY_DRY_RUN") == "1"
"""Everything runs once, on a CPU and in tiny sizes; times mean nothing."""

DEVICE = torch.device("cpu" if DRY else "cuda")
_STARTED = time.monotonic()


@dataclass
class GpuCheckpoint(SyntheticCheckpoint):
    """Random weights that are made on the GPU; the same ones each time there."""

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        parameter = self._entries[name]
        scheme = self._scheme(parameter)
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        whole: Tensor | QuantTensor
        if len(parameter.shape) == 1:
            whole = torch.ones(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
        elif scheme is None:
            whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
            whole.normal_(0, 0.02, generator=generator)
        else:
            whole = make_random_weight(
                scheme,
                *parameter.shape,
                DEVICE,
                scale=0.08 / scheme.levels,
                generator=generator,
            )
        return whole if part is None else part.of_weight(whole)


def checkpoint(shape: str, scheme: str | None, head: str | None, layers: int) -> GpuCheckpoint:
    """Random weights in a named shape, with some of its layers; the head stays floats if it has
    no scheme.
    """
    whole = synthetic(shape, scheme, head or ("int8" if scheme else None))
    config = replace(whole.config, layers=whole.config.layers[:layers])
    if DRY:
        config = replace(
            config,
            hidden_size=128,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=64,
        )
    kept = {
        module: one for module, one in whole.schemes.items() if module in linear_columns(config)
    }
    if head is None:
        kept.pop("lm_head", None)
    return GpuCheckpoint(whole.path, config, kept)


def options(description: str, **defaults: Any) -> argparse.Namespace:
    """``--out`` and ``--seconds``, and an option for each default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="a JSON file that is written after each result")
    parser.add_argument(
        "--seconds", type=float, default=500, help="after which nothing new is begun"
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    return parser.parse_args()


def spent(seconds: float) -> bool:
    """Whether `seconds` have passed since the script began."""
    return time.monotonic() - _STARTED > seconds


class Results:
    """Results that are printed and kept in a file as they come, so that none is lost when time
    is up.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        said = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print(f"[{time.monotonic() - _STARTED:5.0f} s] " + ", ".join(said), flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.rows, indent=1))

    def attempt(self, name: str, call: Callable[[], object]) -> bool:
        """Call, and keep what it raises as a result; whether it raised nothing."""
        try:
            call()
        except Exception as error:  # the other measurements go on
            self.add(
                failed=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
            return False
        return True


def end(results: Results) -> None:
    """
    Raises:
        SystemExit: with 1 if anything failed.
    """
    if any("failed" in row for row in results.rows):
        raise SystemExit(1)


def reset_memory() -> None:
    """Count memory at its peak anew."""
    malloc_trim()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> float:
    """Bytes at the peak, of the GPU or in a dry run of the process."""
    return float(torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else peak_bytes())


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def wall_seconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, after one that warms up but in a dry run."""
    if not DRY:
        call()
    synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - started) / repeats
