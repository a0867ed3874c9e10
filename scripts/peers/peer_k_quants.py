r"""Compare K-quants by GPTQ with llama.cpp's own, with an importance matrix from the same tokens,
both run by llama.cpp.

    .venv/bin/python scripts/peers/peer_k_quants.py PYTHON MODEL --calibration TEXT --texts \
        TEXT... [--mixes q4_k_m q5_k_m] [--seeds 0 1 2] [--samples 128] [--length 256] \
        [--windows 30]

PYTHON has llama-cpp-python and numpy. For each seed, the samples that GPTQ is calibrated on give
the mean squared inputs of each linear, with which llama.cpp quantizes a float32 file. Prints a
table in Markdown: bytes of both files, their KL from the float32 file in units of 1e-4 nats a
token, by text, and the ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import llama
from shared.processes import run_peer
from shared.tables import print_header, print_row


def quantize(source: str, file: str, kind: str, matrix: str) -> None:
    """Quantize by llama.cpp, with the importance matrix in a numpy file of names to vectors."""
    import llama_cpp

    vectors = {}
    for name, value in np.load(matrix).items():
        vectors[name.encode()] = np.ascontiguousarray(value, np.float32)
    # An entry without a name ends them.
    entries = (llama_cpp.llama_model_imatrix_data * (len(vectors) + 1))()
    for entry, (name, value) in zip(entries, vectors.items(), strict=False):
        entry.name = name
        entry.size = value.size
        entry.data = value.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    llama.silence()
    llama.quantize_file(source, file, kind, nthread=1, imatrix=imatrix)


def logits(file: str, windows: str, out: str) -> None:
    """Write log probabilities of windows [N, T], computed by llama.cpp, as a numpy file."""
    import llama_cpp

    tokens = np.load(windows)
    model = llama_cpp.Llama(
        file,
        n_ctx=tokens.shape[1],
        n_batch=tokens.shape[1],
        n_threads=2,
        logits_all=True,
        verbose=False,
    )
    log_probs = []
    for window in tokens:
        model.reset()
        model.eval(window.tolist())
        scores = np.asarray(model.scores[: len(window)], np.float64)
        log_probs.append(llama.log_softmax(scores).astype(np.float32))
    np.save(out, np.stack(log_probs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--mixes", nargs="+", default=["q4_k_m", "q5_k_m"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=30)
    options = parser.parse_args()

    import quantkit
    from quantkit.calibration.data import load_calibration
    from quantkit.calibration.importance import sum_squared_inputs
    from quantkit.formats.detect import open_checkpoint
    from quantkit.formats.folder import load_checked_tokenizer
    from quantkit.formats.gguf.names import gguf_tensors
    from quantkit.quality.measures import text_windows
    from quantkit.text.tokenizer import prompt_start

    source = open_checkpoint(options.model)
    tokenizer, _ = load_checked_tokenizer(source)
    assert tokenizer is not None
    folder = Path(tempfile.mkdtemp())
    floats = folder / "floats.gguf"
    quantkit.convert(options.model, floats, dtype="fp32", source_check=False)

    def compute_log_probs(file: Path, name: str) -> np.ndarray[Any, Any]:
        result = folder / "log-probs.npy"
        run_peer(options.python, __file__, "logits", file, folder / f"{name}.npy", result)
        return np.asarray(np.load(result), np.float64)

    texts = {}
    for text in options.texts:
        read = text.read_text(encoding="utf-8")[: 8 * options.windows * options.length]
        windows = text_windows(tokenizer.encode(read), prompt_start(tokenizer), options.length)[
            : options.windows
        ]
        np.save(folder / f"{text.stem}.npy", windows.numpy().astype(np.int32))
        texts[text.stem] = compute_log_probs(floats, text.stem)

    def measure_divergences(file: Path) -> list[float]:
        divergences = []
        for name, p in texts.items():
            q = compute_log_probs(file, name)
            divergences.append(float((np.exp(p) * (p - q)).sum(-1).mean()))
        return divergences

    titles = []
    for name in texts:
        titles += [f"{name}, ours", "llama.cpp", "ratio"]
    print_header("mix", "seed", "bytes", "llama.cpp's", *titles)
    ratios: dict[str, list[float]] = {}
    for seed in options.seeds:
        settings: dict[str, Any] = {
            "samples": options.samples,
            "length": options.length,
            "seed": seed,
        }
        tokens = load_calibration(options.calibration, tokenizer, **settings).tokens
        sums, counts = sum_squared_inputs(source, tokens)
        matrix = {
            tensor.name: (sums[module] / counts[module]).numpy()
            for tensor in gguf_tensors(source.config)
            for module in [tensor.parts[0].removesuffix(".weight")]
            if module in sums
        }
        np.savez(folder / "matrix.npz", **matrix)
        for mix in options.mixes:
            ours, theirs = folder / f"{mix}-{seed}.gguf", folder / f"{mix}-{seed}-llama.gguf"
            quantkit.quantize(
                options.model,
                ours,
                mix,
                calibration=options.calibration,
                source_check=False,
                **settings,
            )
            arguments = [floats, theirs, mix.upper(), folder / "matrix.npz"]
            run_peer(options.python, __file__, "quantize", *arguments)
            pairs = list(zip(measure_divergences(ours), measure_divergences(theirs), strict=True))
            ratios.setdefault(mix, []).extend(a / b for a, b in pairs)
            cells = []
            for a, b in pairs:
                cells += [f"{1e4 * a:.2f}", f"{1e4 * b:.2f}", f"{a / b:.2f}"]
            print_row(mix, seed, ours.stat().st_size, theirs.stat().st_size, *cells)
    print(json.dumps({mix: round(float(np.mean(found)), 3) for mix, found in ratios.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] in (["quantize"], ["logits"]):
        {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
    else:
        main()
