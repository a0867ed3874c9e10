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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def quantize(source: str, file: str, kind: str, matrix: str) -> None:
    """By llama.cpp, with the importance matrix in a numpy file of names to vectors."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, message, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    held = {
        name.encode(): np.ascontiguousarray(value, np.float32)
        for name, value in np.load(matrix).items()
    }
    entries = (llama_cpp.llama_model_imatrix_data * (len(held) + 1))()
    for entry, (name, value) in zip(entries, held.items(), strict=False):
        entry.name, entry.size = name, value.size
        entry.data = value.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    if llama_cpp.llama_model_quantize(source.encode(), file.encode(), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp could not make {file}")


def logits(file: str, windows: str, out: str) -> None:
    """Log probabilities of windows [N, T], computed by llama.cpp, in a numpy file."""
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
    found = []
    for window in tokens:
        model.reset()
        model.eval(window.tolist())
        scores = np.asarray(model.scores[: len(window)], np.float64)
        shifted = scores - scores.max(-1, keepdims=True)
        found.append((shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32))
    np.save(out, np.stack(found))


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

    def peer(*words: object) -> None:
        subprocess.run([options.python, __file__, *map(str, words)], check=True)

    texts = {}
    for text in options.texts:
        read = text.read_text(encoding="utf-8")[: 8 * options.windows * options.length]
        windows = text_windows(tokenizer.encode(read), prompt_start(tokenizer), options.length)[
            : options.windows
        ]
        np.save(folder / f"{text.stem}.npy", windows.numpy().astype(np.int32))
        peer("logits", floats, folder / f"{text.stem}.npy", folder / f"{text.stem}-floats.npy")
        texts[text.stem] = np.load(folder / f"{text.stem}-floats.npy").astype(np.float64)

    def divergences(file: Path) -> list[float]:
        found = []
        for name, p in texts.items():
            peer("logits", file, folder / f"{name}.npy", folder / "q.npy")
            q = np.load(folder / "q.npy").astype(np.float64)
            found.append(float((np.exp(p) * (p - q)).sum(-1).mean()))
        return found

    print(
        "| mix | seed | bytes | llama.cpp's |"
        f" {' | '.join(f'{name}, ours | llama.cpp | ratio' for name in texts)} |"
    )
    print("|---|---|---|---|" + "---|---|---|" * len(texts), flush=True)
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
            peer("quantize", floats, theirs, mix.upper(), folder / "matrix.npz")
            pairs = list(zip(divergences(ours), divergences(theirs), strict=True))
            ratios.setdefault(mix, []).extend(a / b for a, b in pairs)
            shown = " | ".join(f"{1e4 * a:.2f} | {1e4 * b:.2f} | {a / b:.2f}" for a, b in pairs)
            print(
                f"| {mix} | {seed} | {ours.stat().st_size} | {theirs.stat().st_size} | {shown} |",
                flush=True,
            )
    print(json.dumps({mix: round(float(np.mean(found)), 3) for mix, found in ratios.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] in (["quantize"], ["logits"]):
        {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
    else:
        main()
