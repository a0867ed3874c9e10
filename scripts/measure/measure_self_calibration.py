r"""Measure GPTQ calibrated on the included text, on text of the model itself, and on half of each.

    python scripts/measure/measure_self_calibration.py MODEL TEXT... [--scheme int4-g128] \
        [--samples 32] [--length 256] [--seeds 3] [--windows 24] [--noise 0.02]

Quantizes MODEL, a folder of floats, with each, and prints a table in Markdown: seconds of the
draw, seconds of the job, and KL(source || quantized) per token in units of 1e-4 over the first
windows of every file TEXT, as mean over the seeds and largest distance from it. A last column has
the same KL on text that the model writes with a seed of its own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibration.data import Calibration
from quantkit.calibration.settings import GptqSettings, make_gptq_settings
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.model.layerwise import Batch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row
from shared.texts import WINDOW, cut_batches, format_titles, measure_kls

# A seed that no calibration here has.
_SEED_OF_TEXT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="move the weights off the grid of the file they come from, by this part of their size",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.noise:
            model = _add_noise(model, Path(folder) / "source", options.noise)
        batches = cut_batches(model, options.texts, WINDOW, options.windows)
        unseen = _draw(model, "self", options.windows, WINDOW, _SEED_OF_TEXT)
        batches.append(Batch.from_start(unseen.tokens))
        print_header("calibration", "draw s", "job s", *format_titles(options.texts), "KL own text")
        rows: dict[str, list[list[float]]] = {"included": [], "self": [], "half of each": []}
        for seed in range(options.seeds):
            for name, measured in rows.items():
                began = time.monotonic()
                drawn = _draw(model, name, options.samples, options.length, seed)
                drawn_after = time.monotonic() - began
                dst = Path(folder) / "quantized"
                with patch.object(GptqSettings, "draw", lambda *_, drawn=drawn, **__: drawn):
                    quantkit.quantize(
                        model,
                        dst,
                        options.scheme,
                        embedding="keep",
                        source_check=False,
                        accept_quality_loss=True,
                    )
                seconds = time.monotonic() - began
                kls = measure_kls(model, dst, batches)
                measured.append([drawn_after, seconds, *kls])
                print(f"{name}, seed {seed}:", *(f"{kl:.2f}" for kl in kls), file=sys.stderr)
                shutil.rmtree(dst)
        for name, measured in rows.items():
            print_row(name, *_summarize(measured))


def _draw(model: Path, name: str, samples: int, length: int, seed: int) -> Calibration:
    """Draw samples of the included text, of the model, or half of each."""
    if name == "half of each":
        included = _draw(model, "included", samples - samples // 2, length, seed)
        written = _draw(model, "self", samples // 2, length, seed)
        return replace(included, tokens=torch.cat([included.tokens, written.tokens]))
    source = open_checkpoint(model)
    settings = make_gptq_settings(
        load_checked_tokenizer(source)[0],
        source,
        calibration="self" if name == "self" else None,
        text_column=None,
        samples=samples,
        length=length,
        seed=seed,
        activation_memory=None,
        device=torch.device("cpu"),
    )
    return settings.draw(source)


def _add_noise(model: Path, folder: Path, size: float) -> Path:
    """Copy a folder, with noise of this relative size on its matrices; return the copy."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor.float() * (1 + size * noise)).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _summarize(measured: Sequence[Sequence[float]]) -> list[str]:
    """Format the mean of each column over the seeds: seconds, and KL with its spread."""
    cells: list[str] = []
    for index, column in enumerate(zip(*measured, strict=True)):
        mean = sum(column) / len(column)
        if index < 2:
            cells.append(f"{mean:.0f}")
            continue
        spread = max(abs(value - mean) for value in column)
        cells.append(f"{mean:.1f} ± {spread:.1f}")
    return cells


if __name__ == "__main__":
    main()
