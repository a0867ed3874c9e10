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
import sys
import tempfile
from pathlib import Path

from measure_architectures import load, log_probs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import PEERS, QUANTKIT, Cost, run_and_measure
from shared.tables import print_header, print_row
from shared.texts import SAMPLES, WINDOW, add_text_arguments, average_kl, cut_windows, save_samples

_KEPT = "re:.*linear_attn.*"  # what quantkit leaves as it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--schemes", default="int4-g64,int4-g32")
    options = parser.parse_args()
    texts = [cut_windows(options.model, text) for text in options.texts]
    references = [log_probs(load(options.model), text) for text in texts]
    titles = [text.stem for text in options.texts]
    print_header("scheme", "method", "seed", *titles, "s", "MB")
    for scheme in options.schemes.split(","):
        for seed in range(options.seeds):
            for method in ("rtn", "gptq", "default", "imatrix_mse"):
                if method == "rtn" and seed:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    cost = quantize(options, Path(folder), scheme, method, seed)
                    model = load(Path(folder) / "out", dequantize=True)
                kls = []
                for reference, text in zip(references, texts, strict=True):
                    kls.append(average_kl(reference, log_probs(model, text)))
                print_row(
                    scheme,
                    method,
                    seed,
                    *(f"{1e4 * kl:.3g}" for kl in kls),
                    f"{cost.seconds:.1f}",
                    f"{cost.memory / 1e6:.0f}",
                )


def quantize(
    options: argparse.Namespace, folder: Path, scheme: str, method: str, seed: int
) -> Cost:
    """Quantize to `out` in a folder, in a separate process, and return what it took."""
    out = folder / "out"
    command: list[object] = [*QUANTKIT, "quantize", options.model, out, "--scheme", scheme]
    command += ["--via", "transformers", "--method", method, "--accept-quality-loss"]
    if method == "gptq":
        command += ["--calibration", options.calibration, "--samples", SAMPLES]
        command += ["--length", WINDOW, "--seed", seed]
    elif method != "rtn":
        tokens = folder / "tokens.safetensors"
        save_samples(tokens, options.model, options.calibration, seed=seed)
        command = [options.peer, PEERS / "peer_llmcompressor.py", options.model, tokens, out]
        command += ["--scheme", scheme, "--recipe", method, "--ignore", _KEPT]
    return run_and_measure(command)


if __name__ == "__main__":
    main()
