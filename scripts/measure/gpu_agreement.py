"""Stage 2 of `gpu_day.sh`: one small quantized model says the same on the CPU and on the GPU.

    python scripts/measure/gpu_agreement.py [--out FILE.json] [--tokens 48]

The packaged model, rounded to each scheme, continues a prompt greedily on the CPU and on the GPU,
in float32, eager and compiled: the same text, and logits within a thousandth. In bfloat16, whose
rounding may turn a close choice, the logits are to agree within 3 %. Ends with exit code 1 if any
does not.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import gpu_setup as gpu
import torch

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.runtime.engine import Engine

PROMPT = "It was the best of times, it was the"
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Largest distance of logits, as a share of their norm."""


def logits(model: quantkit.model.decoder.Decoder, tokens: list[int]) -> torch.Tensor:
    """Of the last token, through a cache: the others at once, then the last."""
    engine = Engine(model, len(tokens), compiled=False)
    device, last = model.device, len(tokens) - 1
    engine.step(torch.tensor(tokens[:-1], device=device), [0] * last, range(last), [])
    return engine.step(torch.tensor(tokens[-1:], device=device), [0], [last], [0]).float().cpu()


def main() -> int:
    given = gpu.options(
        __doc__.splitlines()[0], tokens=1 if gpu.DRY else 48, schemes="int8,int4-g32,int4-g128"
    )
    results = gpu.Results(given.out)
    kinds = list(itertools.product((torch.float32, torch.bfloat16), (False, True)))
    kinds = [(torch.bfloat16, False)] if gpu.DRY else kinds
    wrong = 0
    for scheme in given.schemes.split(",")[: 1 if gpu.DRY else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / scheme
            quantkit.quantize(DEMO_MODEL, path, scheme, method="rtn", accept_quality_loss=True)
            model, tokenizer = quantkit.load(
                path, device="cpu", dtype=torch.float32, backend="reference"
            )
            prompt = tokenizer.encode(PROMPT)[: 3 if gpu.DRY else None]
            said = list(quantkit.generate(model, prompt, max_new_tokens=given.tokens))
            right = logits(model, prompt + said)
            for dtype, compiled in kinds:
                model, _ = quantkit.load(path, device=gpu.DEVICE, dtype=dtype, backend="triton")
                engine = Engine(model, len(prompt) + given.tokens, compiled=compiled)
                found = list(quantkit.generate(engine, prompt, max_new_tokens=given.tokens))
                off = ((logits(model, prompt + said) - right).norm() / right.norm()).item()
                same = found == said
                fine = off < BOUNDS[dtype] and (same or dtype == torch.bfloat16)
                wrong += not fine
                results.add(
                    scheme=scheme,
                    dtype=str(dtype),
                    compiled=compiled,
                    same_text=same,
                    logits_off=off,
                    ok=fine,
                )
    print("all agree" if not wrong else f"{wrong} DIFFER", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
