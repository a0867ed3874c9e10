"""Print how much rounding to nearest loses of normally distributed weights, by scheme, and the
bound of 2 bits that follows from it.

    python scripts/measure/measure_normal_errors.py [--rows 1024] [--columns 4096]

The error is relative (Frobenius norms), on scales that span the groups.
`quantkit/quality/bounds.py` and `docs/errors.md` derive bounds from these figures. Prints a table
in Markdown, then the bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from quantkit.quality.bounds import BOUNDS
from quantkit.tensors.qtensor import quantize_rtn, relative_error
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row

SCHEMES = (
    "int8",
    "q6_k",
    "fp8",
    "q5_k",
    "q4_k",
    "iq4_xs",
    "nvfp4",
    "int4-g128",
    "mxfp4",
    "q3_k",
    "q2_k",
)


def extrapolate(errors: dict[str, float]) -> float:
    """Continue the bounds on KL of 4 and 3 bits to 2 bits, by the errors of schemes of these bits,
    on logarithmic scales.
    """
    slope = math.log(BOUNDS["int3"].kl / BOUNDS["int4"].kl) / math.log(
        errors["q3_k"] / errors["int4-g128"]
    )
    return BOUNDS["int3"].kl * (errors["q2_k"] / errors["q3_k"]) ** slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(options.rows, options.columns, generator=generator)
    errors: dict[str, float] = {}
    print_header("scheme", "error")
    for name in SCHEMES:
        rounded = quantize_rtn(weight, QuantScheme.parse(name), torch.float16)
        errors[name] = relative_error(rounded, weight)
        print_row(name, f"{errors[name]:.2%}")
    print(f"\nThe bound on KL of 2 bits: {extrapolate(errors):.2f}")


if __name__ == "__main__":
    main()
