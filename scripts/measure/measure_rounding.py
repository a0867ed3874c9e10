r"""Measure how far rounding to nearest moves models, compared with llama.cpp's Q4_0, which has as
many bits a weight.

    python scripts/measure/measure_rounding.py PYTHON MODEL... --texts TEXT... [--scheme int4-g32] \
        [--window 256] [--windows 60]

PYTHON has llama-cpp-python. Each model, in its own float type, is rounded as `quantize --method
rtn` does, without the importance of inputs, and on scales that span the groups. llama.cpp quantizes
the same floats, from a GGUF file: with its defaults, where the embedding and the head have codes
too, and with these left in floats, as ours are. Prints a table in Markdown: KL(source || quantized)
per token in units of 1e-4 nats, all models run by quantkit, and seconds of processor time of the
whole job: `quantkit.quantize`, with its gate, or llama.cpp's process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import quantkit
from quantkit.calibration import quantizers
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.quantize import work as job
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.tensors.qtensor import QuantTensor, Solver, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import load_tokenizer, prompt_start

PEER = Path(__file__).resolve().parents[1] / "peers" / "peer_gguf_quantizer.py"


def rtn(source: Path, scheme: str, dst: Path) -> float:
    """Seconds of `quantize --method rtn`."""
    started = time.process_time()
    quantkit.quantize(source, dst, scheme, method="rtn", accept_quality_loss=True)
    return time.process_time() - started


def changed(
    module: ModuleType, name: str, by: object, source: Path, scheme: str, dst: Path
) -> float:
    """The same job with a function of a module replaced."""
    before = getattr(module, name)
    setattr(module, name, by)
    try:
        return rtn(source, scheme, dst)
    finally:
        setattr(module, name, before)


def round_plainly(
    weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, *_: object
) -> tuple[QuantTensor, str]:
    """In place of `round_to_nearest`: on scales that span the groups."""
    return quantize_rtn(weight, scheme, scale_dtype), Solver.ROUNDING


def no_importance(*_: object, **__: object) -> dict[str, Tensor]:
    """In place of `input_importance`: all errors count the same."""
    return {}


def llamacpp(python: str, file: Path, flags: Sequence[str], dst: Path) -> float:
    """Seconds of llama.cpp's quantizer."""
    before = os.times()
    subprocess.run(
        [python, PEER, "quantize", file, dst, "Q4_0", *flags], check=True, stderr=subprocess.DEVNULL
    )
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def batches(source: Path, texts: Sequence[Path], window: int, count: int) -> list[Batch]:
    """The first windows of all texts."""
    tokenizer = load_tokenizer(source)
    encoded = (tokenizer.encode(text.read_text()) for text in texts)
    return [
        Batch.from_start(text_windows(ids, prompt_start(tokenizer), window)[:count])
        for ids in encoded
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=60)
    options = parser.parse_args()
    print("| model | method | s |", " | ".join(f"KL {text.stem}" for text in options.texts), "|")
    print("|---" * (3 + len(options.texts)) + "|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            source, file = Path(name) / "source", Path(name) / "source.gguf"
            quantkit.convert(model, source)
            quantkit.convert(source, file)
            texts = batches(source, options.texts, options.window, options.windows)
            given = source, options.scheme
            methods: dict[str, tuple[str, Callable[[Path], float]]] = {
                "rtn": ("rtn", partial(rtn, *given)),
                "rtn, not weighted": (
                    "even",
                    partial(changed, job, "input_importance", no_importance, *given),
                ),
                "rtn, plain scales": (
                    "plain",
                    partial(changed, quantizers, "round_to_nearest", round_plainly, *given),
                ),
                "Q4_0": ("all.gguf", partial(llamacpp, options.python, file, ())),
                "Q4_0, linears only": (
                    "linears.gguf",
                    partial(llamacpp, options.python, file, ("--linears-only",)),
                ),
            }
            for method, (result, run) in methods.items():
                dst = Path(name) / result
                seconds = run(dst)
                found = compare_batches(open_checkpoint(source), open_checkpoint(dst), texts)
                values = " | ".join(f"{one.divergence.kl * 1e4:.2f}" for one in found)
                print(f"| {model.name} | {method} | {seconds:.1f} | {values} |", flush=True)


if __name__ == "__main__":
    main()
