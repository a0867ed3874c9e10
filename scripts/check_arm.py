"""Run the tests of the CPU kernels on ARM under emulation: NEON, its dot products, and plain C++.

    python scripts/check_arm.py [--compiler "clang++ --target=aarch64-linux-gnu"]

The kernels are cross-compiled without torch (`check_arm.cpp`) and run in qemu's user mode; the tests of
test_cpu_kernels.py and test_block_kernels.py in tests/kernels that are about products and attention send them their
operands. This says whether ARM kernels are right, not how fast they are. Debian has what it takes in the packages
g++-aarch64-linux-gnu and qemu-user-static. Exits with a status other than 0 if anything is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.kernels import build

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "native": ("neon-dotprod", ["-march=armv8.2-a+dotprod"], "neoverse-n1"),
    "neon": ("neon", ["-march=armv8-a"], "cortex-a72"),
    "portable": ("portable", ["-march=armv8-a", "-DQUANTKIT_PORTABLE"], "cortex-a72"),
}
"""Name in the tests: instruction set, compiler flags, emulated processor."""
TESTS = (
    "all_instruction_sets", "not_finite", "largest_codes", "any_magnitude", "exact_mode", "attention_over",
    "float_rows", "half_floats", "number_of_threads", "attention_scores", "capped_scores", "a_sink_far",
    "capped_attention",
)  # fmt: skip
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Emulated:
    """The operators of one target, in an emulated process."""

    def __init__(self, target: str, compiler: list[str], folder: Path) -> None:
        expected, flags, processor = TARGETS[target]
        program = folder / target
        sources = [f"-I{ROOT / 'kernels' / 'csrc'}", str(Path(__file__).with_suffix(".cpp"))]
        own = [flag for flag in build._FLAGS if flag not in ("-fPIC", "-shared")]
        subprocess.run([*compiler, *own, *flags, "-static", *sources, "-o", str(program)], check=True)
        self._process = subprocess.Popen(
            ["qemu-aarch64-static", "-cpu", processor, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        found = self._from.readline().decode().strip()
        if found != expected:
            sys.exit(f"{target}: expected the kernels for {expected}, found {found or 'none'}")

    def _call(self, request: str, operands: list[Tensor], reply: Tensor) -> Tensor:
        """Send a request with its operands; `reply` with what comes back in it."""
        name, _, numbers = request.partition(" ")
        self._to.write(f"{name} {torch.get_num_threads()} {numbers}\n".encode())
        for operand in operands:
            self._to.write(_bytes(operand))
        self._to.flush()
        found = bytearray(self._from.read(reply.nbytes))
        if len(found) != reply.nbytes:
            raise RuntimeError(f"the emulated process ended with status {self._process.wait()}")
        return torch.frombuffer(found, dtype=reply.dtype).reshape(reply.shape)

    def pack(
        self, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, exact: bool
    ) -> tuple[str, list[Tensor]]:
        """The operands as they are: the process packs them where it multiplies."""
        (rows, columns), groups = codes.shape, scale.shape[1]
        layout = rows, columns, columns // groups, bits, int(zero is not None), int(exact), _TYPES[scale.dtype]
        return " ".join(map(str, layout)), [codes, scale] if zero is None else [codes, scale, zero]

    def linear(self, x: Tensor, packed: tuple[str, list[Tensor]], bias: None, rows: int) -> Tensor:
        layout, operands = packed
        request = f"linear {layout} {_TYPES[x.dtype]} {len(x)}"
        return self._call(request, [*operands, x], x.new_empty(len(x), rows))

    def cached_attention(
        self, queries: Tensor, keys: Tensor, key_scales: None, values: Tensor, value_scales: None, positions: Tensor,
        slots: Tensor | None, window: int, scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        batch, heads, tokens, size = queries.shape
        shape = batch, heads, keys.shape[1], tokens, keys.shape[2], size, window
        types = _TYPES[queries.dtype], _TYPES[keys.dtype]
        scores = int(sinks is not None), scale, softcap or 0
        request = f"cached_attention {' '.join(map(str, (*shape, *types, len(keys), *scores)))}"
        slots = torch.arange(batch) if slots is None else slots
        positions = positions.expand(batch, tokens)
        reply = queries.new_empty(batch, tokens, heads * size)
        operands = [queries, keys, values, positions, slots, *([] if sinks is None else [sinks])]
        return self._call(request, operands, reply)

    def float_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        request = f"float_linear {len(weight)} {x.shape[-1]} {tokens} {_TYPES[weight.dtype]} {_TYPES[x.dtype]}"
        return self._call(request, [weight, x], x.new_empty(*x.shape[:-1], len(weight)))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", type=shlex.split, default="aarch64-linux-gnu-g++")
    compiler = parser.parse_args().compiler
    with tempfile.TemporaryDirectory() as folder:
        operators = {target: Emulated(target, compiler, Path(folder)) for target in TARGETS}
        build.VARIANTS.clear()
        build.VARIANTS.update(dict.fromkeys(TARGETS, ()))
        build.load_kernels = operators.__getitem__
        files = [str(ROOT / "tests" / "kernels" / name) for name in ("test_cpu_kernels.py", "test_block_kernels.py")]
        sys.exit(pytest.main([*files, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-k", " or ".join(TESTS)]))


if __name__ == "__main__":
    main()
