"""Stage 1 of `gpu_day.sh`: what the GPU and its machine are, and the ceilings that everything else
is compared with.

    python scripts/measure/gpu_environment.py [--out FILE.json]

Versions and packages; bytes a second of a copy and of a sum that only reads, the gap between empty
kernels, bfloat16 products of one token with and without inductor's coordinate descent, and of many.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import gpu_setup as gpu
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import find_versions

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "pytest",
    "hypothesis",
    "safetensors",
    "tokenizers",
    "torchao",
    "transformers",
)


def main() -> None:
    given = gpu.options(__doc__.splitlines()[0])
    results = gpu.Results(given.out)
    results.add(python=platform.python_version(), **find_versions(PACKAGES))
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.draw"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        results.add(smi=subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if gpu.DEVICE.type == "cuda":
        found = torch.cuda.get_device_properties(gpu.DEVICE)
        results.add(
            gpu=found.name,
            processors=found.multi_processor_count,
            memory=found.total_memory,
            capability=f"{found.major}.{found.minor}",
            cuda=torch.version.cuda,
        )
    size = 1 << (16 if gpu.DRY else 30)
    source = torch.ones(size // 4, device=gpu.DEVICE)
    target = torch.empty_like(source)
    results.attempt(
        "copy",
        lambda: results.add(
            copy_bytes_a_second=2 * size / gpu.wall_seconds(lambda: target.copy_(source), 20)
        ),
    )
    results.attempt(
        "sum",
        lambda: results.add(sum_bytes_a_second=size / gpu.wall_seconds(lambda: source.sum(), 20)),
    )
    if gpu.DEVICE.type == "cuda":
        results.attempt(
            "empty kernels",
            lambda: results.add(us_between_empty_kernels=1e6 * measure_empty_kernels()),
        )
    rows, columns = (64, 64) if gpu.DRY else (12288, 4096)
    weights = [
        torch.randn(rows, columns, device=gpu.DEVICE).bfloat16() for _ in range(1 if gpu.DRY else 4)
    ]
    for tokens in (1, 16) if gpu.DRY else (1, 16, 4096):
        x = torch.randn(tokens, columns, device=gpu.DEVICE).bfloat16()

        def products(x: torch.Tensor = x) -> None:
            for weight in weights:
                F.linear(x, weight)

        seconds = gpu.wall_seconds(products, 2 if gpu.DRY else 20) / len(weights)
        results.add(
            tokens=tokens,
            product=f"{rows} x {columns}",
            us=seconds * 1e6,
            bytes_a_second=weights[0].nbytes / seconds,
            tflops=2 * tokens * rows * columns / seconds / 1e12,
        )
    if gpu.DEVICE.type == "cuda":
        for descent in (False, True):
            results.attempt(
                f"coordinate descent {descent}",
                lambda descent=descent: time_compiled(results, descent, weights),
            )
    gpu.end(results)


def measure_empty_kernels(count: int = 200) -> float:
    """Return the seconds from one kernel that does next to nothing to the next one, in a CUDA
    graph.
    """
    from quantkit.kernels.triton_tune import seconds_each

    value = torch.zeros(1, device="cuda")
    return seconds_each([lambda: value.add_(1)] * count)


def time_compiled(results: gpu.Results, descent: bool, weights: list[torch.Tensor]) -> None:
    """Time bfloat16 at one token, as inductor multiplies it."""
    from quantkit.kernels.triton_tune import seconds_each

    torch._dynamo.reset()
    linear = torch.compile(
        lambda x, weight: F.linear(x, weight),
        options={"coordinate_descent_tuning": descent},
        dynamic=False,
    )
    x = torch.randn(1, weights[0].shape[1], device="cuda").bfloat16()
    linear(x, weights[0])
    seconds = seconds_each([partial(linear, x, weight) for weight in weights])
    results.add(
        compiled=True,
        coordinate_descent=descent,
        tokens=1,
        us=seconds * 1e6,
        bytes_a_second=weights[0].nbytes / seconds,
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
