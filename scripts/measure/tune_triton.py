r"""Find the fastest tile configs of the Triton kernels on the GPU at hand and write them into the
package.

    python scripts/measure/tune_triton.py [--schemes int8,int4-g128] \
        [--models llama-2-7b,llama-3.1-8b] [--tokens 1,16] [--output FILE.json] [--seconds 500] \
        [--dry-run]

Every candidate is timed with a cold cache for every linear shape of the models, q/k/v and gate/up
joined, and every number of tokens: the fewest tokens first, of all schemes and shapes. What is
found replaces what kernels/triton_configs.json, or the file named, has for this GPU, these schemes,
shapes and numbers of tokens; the rest of the file stays. Each is written as it is found, and
nothing new is begun after --seconds. A dry run takes a tiny shape through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from pathlib import Path

from quantkit.kernels.triton_tiles import SHIPPED_FILE, TOKENS, gpu_spec, save_configs
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))

SHAPES = {
    "llama-2-7b": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
}
"""[O, I] of qkv, out, gate and up, down, head."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="int8,int4-g32,int4-g64,int4-g128")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--output", type=Path, default=SHIPPED_FILE)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    shapes = sorted({shape for model in options.models.split(",") for shape in SHAPES[model]})
    if options.dry_run:
        shapes, options.tokens = [(48, 128)], "1"

    import torch

    from quantkit.kernels.triton_backend import TritonBackend
    from quantkit.kernels.triton_tune import tune
    from shared.models import make_random_weight

    device = torch.device("cpu" if options.dry_run else "cuda")
    for tokens, text, (rows, columns) in itertools.product(
        map(int, options.tokens.split(",")), options.schemes.split(","), shapes
    ):
        if time.monotonic() - started > options.seconds:
            print(f"time is up before {text}, {rows}x{columns}, {tokens} tokens", flush=True)
            return
        scheme = QuantScheme.parse(text)
        weight = make_random_weight(scheme, rows, columns, device)
        prepared = TritonBackend().prepare(weight)
        found = tune(prepared, text, columns, [tokens])
        save_configs(options.output, gpu_spec(device), text, rows, columns, found)


if __name__ == "__main__":
    main()
