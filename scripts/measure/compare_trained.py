r"""Compare GPTQ through transformers with rounding and with llm-compressor, on a model that
`train_tiny.py` made.

    python scripts/measure/compare_trained.py MODEL CALIBRATION TEXT... --peer PYTHON [--seeds 3] \
        [--schemes int4-g64,int4-g32]

Prints a table in Markdown: KL(source || quantized) per token in units of 1e-4, measured by
transformers on 60 windows of 256 tokens of every text; the seconds and the peak memory of the whole
process. All have the same 128 samples of 256 tokens, and quantize the same linears. PYTHON is an
interpreter that has llm-compressor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure_accuracy import PEER, SAMPLES, WINDOW, windows
from measure_architectures import load, log_probs
from safetensors.torch import save_file

from quantkit.calibration.data import load_calibration
from quantkit.text.tokenizer import load_tokenizer

_KEPT = "re:.*linear_attn.*"  # what quantkit leaves as it is

# A process that is small itself, as what it starts begins with its memory; prints the peak in
# kilobytes.
_MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=sys.stderr, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schemes", default="int4-g64,int4-g32")
    options = parser.parse_args()
    texts = [windows(options.model, text) for text in options.texts]
    references = [log_probs(load(options.model), text) for text in texts]
    print(f"| scheme | method | seed | {' | '.join(one.stem for one in options.texts)} | s | MB |")
    print("|---|---|---|" + "---|" * (len(texts) + 2))
    for scheme in options.schemes.split(","):
        for seed in range(options.seeds):
            for method in ("rtn", "gptq", "default", "imatrix_mse"):
                if method != "rtn" or not seed:
                    with tempfile.TemporaryDirectory() as folder:
                        took = _run(options, Path(folder), scheme, method, seed)
                        kls = [
                            _kl(
                                reference,
                                log_probs(load(Path(folder, "out"), dequantize=True), text),
                            )
                            for reference, text in zip(references, texts, strict=True)
                        ]
                    print(
                        f"| {scheme} | {method} | {seed} |"
                        f" {' | '.join(f'{1e4 * kl:.3g}' for kl in kls)} | {took} |",
                        flush=True,
                    )


def _run(options: argparse.Namespace, folder: Path, scheme: str, method: str, seed: int) -> str:
    """Quantize to `out` in a folder, in a separate process; the seconds and the peak memory."""
    tokens = folder / "tokens.safetensors"
    drawn = load_calibration(
        options.calibration,
        load_tokenizer(options.model),
        samples=SAMPLES,
        length=WINDOW,
        seed=seed,
    )
    save_file({"tokens": drawn.tokens}, tokens)
    out = folder / "out"
    command = [
        options.peer,
        PEER,
        options.model,
        tokens,
        out,
        "--scheme",
        scheme,
        "--recipe",
        method,
        "--ignore",
        _KEPT,
    ]
    if method in ("rtn", "gptq"):
        command = [
            sys.executable,
            "-m",
            "quantkit.cli",
            "quantize",
            options.model,
            out,
            "--scheme",
            scheme,
            "--via",
            "transformers",
            "--method",
            method,
            "--accept-quality-loss",
        ]
        if method == "gptq":
            command += [
                "--calibration",
                options.calibration,
                "--samples",
                str(SAMPLES),
                "--length",
                str(WINDOW),
                "--seed",
                str(seed),
            ]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *map(str, command)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{method} failed: {done.stderr[-500:]}")
    return f"{time.monotonic() - began:.1f} | {int(done.stdout.splitlines()[-1]) / 1000:.0f}"


def _kl(reference: torch.Tensor, own: torch.Tensor) -> float:
    return float((reference.exp() * (reference - own)).sum(-1).mean())


if __name__ == "__main__":
    main()
