"""Find the fastest tile configs of the Triton kernels on the card at hand and write them into the package.

    python scripts/tune_triton.py [--schemes int8,int4-g128] [--models llama-2-7b,llama-3.1-8b] [--tokens 1,16]

Every candidate is timed with a cold cache for every linear shape of the models, q/k/v and gate/up joined, and
every number of tokens. What is found replaces what kernels/triton_configs.json has for this card, these schemes,
shapes and numbers of tokens; the rest of the file stays.
"""

from __future__ import annotations

import argparse
import logging

from quantkit.kernels.triton_tiles import SHIPPED_FILE, TOKENS, card_of, save_configs
from quantkit.tensors.scheme import QuantScheme

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
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    shapes = sorted({shape for model in options.models.split(",") for shape in SHAPES[model]})

    import torch

    from quantkit.kernels.triton_backend import TritonBackend
    from quantkit.kernels.triton_tune import tune
    from quantkit.tensors.qtensor import QuantTensor

    device = torch.device("cuda")
    for text in options.schemes.split(","):
        scheme = QuantScheme.parse(text)
        for rows, columns in shapes:
            codes = torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8, device=device)
            scale = torch.full((rows, scheme.groups(columns)), 0.01, dtype=torch.bfloat16, device=device)
            prepared = TritonBackend().prepare(QuantTensor(codes, scale, None, scheme))
            for tokens in map(int, options.tokens.split(",")):
                found = tune(prepared, text, columns, [tokens])
                save_configs(SHIPPED_FILE, card_of(device), text, rows, columns, found)


if __name__ == "__main__":
    main()
