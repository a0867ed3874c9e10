"""Stage 6 of `gpu_day.sh`: GPTQ on the GPU against the CPU.

    python scripts/measure/gpu_gptq.py [--out FILE.json] [--rows 256] [--layers 2]

Solves the linears of a block of Llama-2-7B's shape, some rows of each on the CPU too, and whole
layers on the GPU with its kernels and without: the share of equal codes, the output errors, seconds
and memory. Then quantizes TinyLlama-1.1B's shape, a few layers on both, and all 22 on the GPU.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import gpu_setup as gpu
import torch
from synthetic_checkpoint import write

import quantkit
from quantkit.model.column_kernels import make_gpu_kernels, select_column_kernels
from quantkit.solver import gptq
from quantkit.solver.columns import TORCH
from quantkit.tensors.scheme import QuantScheme

LINEARS = {"q": (4096, 4096), "o": (4096, 4096), "gate": (11008, 4096), "down": (4096, 11008)}
TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 200


def solve(name: str, shape: tuple[int, int], rows: int, results: gpu.Results) -> None:
    """One linear on the GPU, and its first rows on both."""
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(shape, generator=generator) * 0.02
    inputs = torch.randn(2 * shape[1], shape[1], generator=generator) * torch.rand(
        shape[1], generator=generator
    )
    hessian = (inputs.to(gpu.DEVICE).T @ inputs.to(gpu.DEVICE)).cpu()
    scheme = QuantScheme.parse("int4-g128" if shape[1] % 128 == 0 else "int4-g32")
    kernels, cpu = (
        make_gpu_kernels() if gpu.DRY else select_column_kernels(gpu.DEVICE),
        torch.device("cpu"),
    )
    cases = {
        "cpu": (cpu, weight[:rows], select_column_kernels(cpu)),
        "GPU": (gpu.DEVICE, weight[:rows], kernels),
        "whole": (gpu.DEVICE, weight, kernels),
        "whole_without_kernels": (gpu.DEVICE, weight, TORCH),
    }
    codes, result = {}, {}
    for case, (device, part, of_device) in cases.items():
        placed, summed = part.to(device), hessian.to(device)
        gpu.reset_memory()
        gpu.synchronize()
        started = time.perf_counter()
        solved, report = gptq.solve(
            placed, gptq.Damped.of_(summed.clone()), scheme, torch.bfloat16, kernels=of_device
        )
        gpu.synchronize()
        result |= {
            f"seconds_{case}": time.perf_counter() - started,
            f"peak_{case}": gpu.peak_memory(),
        }
        result[f"error_{case}"] = report.output_error
        codes[case] = solved.codes.cpu()
    for one, other in (("cpu", "GPU"), ("whole", "whole_without_kernels")):
        result[f"equal_codes_{one}_{other}"] = (codes[one] == codes[other]).double().mean().item()
    results.add(linear=name, shape=list(shape), rows=rows, kernels=kernels is not TORCH, **result)


def quantize(layers: int, device: str, results: gpu.Results) -> None:
    """TinyLlama's shape through the whole job."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        dst = Path(folder) / "dst"
        text = Path(folder) / "text.txt"
        text.write_text(TEXT)
        dim, hidden, scheme = (64, 64, "int4-g32") if gpu.DRY else (2048, 5632, "int4-g128")
        write(src, dim=dim, hidden=hidden, layers=layers, shards=1)
        gpu.reset_memory()
        started = time.perf_counter()
        quantkit.quantize(
            src,
            dst,
            scheme,
            embedding="keep",
            method="gptq",
            calibration=text,
            samples=2 if gpu.DRY else 16,
            length=16 if gpu.DRY else 512,
            device=device,
            accept_quality_loss=True,
            source_check=False,
        )
        results.add(
            layers=layers,
            device=device,
            seconds=time.perf_counter() - started,
            peak=gpu.peak_memory(),
        )


def main() -> None:
    given = gpu.options(__doc__.splitlines()[0], rows=256, layers=1 if gpu.DRY else 2)
    results = gpu.Results(given.out)
    linears = {"down": (32, 64)} if gpu.DRY else LINEARS
    for name, shape in linears.items():
        if not gpu.spent(given.seconds / 2):
            results.attempt(
                name, lambda name=name, shape=shape: solve(name, shape, given.rows, results)
            )
    device = str(gpu.DEVICE)
    for layers, where in ((given.layers, "cpu"), (given.layers, device), (22, device))[
        : 1 if gpu.DRY else None
    ]:
        if gpu.spent(given.seconds):
            results.add(left_out=f"{layers} layers on {where}: time is up")
        else:
            results.attempt(
                f"{layers} layers on {where}", lambda n=layers, at=where: quantize(n, at, results)
            )
    gpu.end(results)


if __name__ == "__main__":
    main()
