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
import sys
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
from quantkit.jobs.quantize import work as job
from quantkit.tensors.qtensor import QuantTensor, Solver, quantize_rtn
from quantkit.tensors.scheme import QuantScheme

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import PEERS, run_and_measure
from shared.tables import print_header, print_row
from shared.texts import cut_batches, format_kls, format_titles, measure_kls


def round_source(source: Path, scheme: str, dst: Path) -> float:
    """Quantize as `quantize --method rtn` does, and return the seconds of processor time."""
    started = time.process_time()
    quantkit.quantize(source, dst, scheme, method="rtn", accept_quality_loss=True)
    return time.process_time() - started


def round_with(
    module: ModuleType, name: str, function: object, source: Path, scheme: str, dst: Path
) -> float:
    """Do the same with a function of a module replaced."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        return round_source(source, scheme, dst)
    finally:
        setattr(module, name, original)


def round_plainly(
    weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, *_: object
) -> tuple[QuantTensor, str]:
    """Round on scales that span the groups, in place of `round_to_nearest`."""
    return quantize_rtn(weight, scheme, scale_dtype), Solver.ROUNDING


def ignore_importance(*_: object, **__: object) -> dict[str, Tensor]:
    """Let all errors count the same, in place of `input_importance`."""
    return {}


def quantize_by_llamacpp(python: str, file: Path, flags: Sequence[str], dst: Path) -> float:
    """Quantize by llama.cpp, and return the seconds of processor time of its process."""
    script = PEERS / "peer_gguf_quantizer.py"
    return run_and_measure([python, script, "quantize", file, dst, "Q4_0", *flags]).processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=60)
    options = parser.parse_args()
    print_header("model", "method", "s", *format_titles(options.texts))
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            measure_model(model, Path(folder), options)


def measure_model(model: Path, folder: Path, options: argparse.Namespace) -> None:
    """Quantize a model in each way and print a row for each."""
    source = folder / "source"
    file = folder / "source.gguf"
    quantkit.convert(model, source)
    quantkit.convert(source, file)
    batches = cut_batches(source, options.texts, options.window, options.windows)
    python = options.python
    evenly = partial(round_with, job, "input_importance", ignore_importance)
    plainly = partial(round_with, quantizers, "round_to_nearest", round_plainly)
    methods: dict[str, tuple[str, Callable[[Path], float]]] = {
        "rtn": ("rtn", partial(round_source, source, options.scheme)),
        "rtn, not weighted": ("even", partial(evenly, source, options.scheme)),
        "rtn, plain scales": ("plain", partial(plainly, source, options.scheme)),
        "Q4_0": ("all.gguf", partial(quantize_by_llamacpp, python, file, ())),
        "Q4_0, linears only": (
            "linears.gguf",
            partial(quantize_by_llamacpp, python, file, ("--linears-only",)),
        ),
    }
    for method, (name, quantize) in methods.items():
        seconds = quantize(folder / name)
        kls = measure_kls(source, folder / name, batches)
        print_row(model.name, method, f"{seconds:.1f}", *format_kls(kls))


if __name__ == "__main__":
    main()
