r"""Measure how far quantized models are from their source, on texts the calibration has not seen.

    python scripts/measure/measure_accuracy.py MODEL CALIBRATION TEXT... [--seeds 3] \
        [--schemes int4-g128,...] [--samples 128] [--peer PYTHON] \
        [--autoround PYTHON [--iterations 200,1000]] [--refine] [--methods METHOD...]

Prints a table in Markdown: KL(source || quantized) per token in units of 1e-4, over 60 windows of
256 tokens of every text, for rounding and for GPTQ with samples of 256 tokens; with `--refine` also
for what `quantkit refine` makes of both of GPTQ's results, with scales and norms trained, and with
codes too. The model is held in float32, scales included. PYTHON is an interpreter that has
llm-compressor; its GPTQ is then run on the same tokens in between. Seconds are of the whole of
`quantize`, with the share of the solver (streams and GPTQ) in parentheses; of llm-compressor's
`oneshot`, without loading and saving. The other PYTHON has auto-round, which is run on the tokens
of seed 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

import quantkit
from quantkit.calibration.data import load_calibration
from quantkit.calibration.quantizers import GptqQuantizer
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.quality.measures import compare_batches, text_windows
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import load_tokenizer, prompt_start

WINDOW, WINDOWS, SAMPLES = 256, 60, 128
PEER = Path(__file__).resolve().parents[1] / "peers" / "peer_llmcompressor.py"
AUTOROUND = Path(__file__).resolve().parents[1] / "peers" / "peer_autoround.py"


def windows(model: Path, text: Path) -> Tensor:
    """The first windows of the text."""
    tokenizer = load_tokenizer(model)
    return text_windows(tokenizer.encode(text.read_text()), prompt_start(tokenizer), WINDOW)[
        :WINDOWS
    ]


class Runs:
    """The ways to quantize one model, each giving a folder and what to print of its time."""

    def __init__(
        self, source: Path, calibration: Path, folder: Path, peer: str | None, samples: int
    ) -> None:
        self.source = source
        self.calibration = calibration
        self.folder = folder
        self.peer = peer
        self.samples = samples

    def rtn(self, scheme: str, seed: int) -> tuple[Path, str]:
        started = time.monotonic()
        dst = self._dst("rtn", scheme, seed)
        quantkit.quantize(self.source, dst, scheme, method="rtn", accept_quality_loss=True)
        return dst, f"{time.monotonic() - started:.1f}"

    def gptq(self, scheme: str, seed: int, *, thorough: bool = False) -> tuple[Path, str]:
        inside = 0.0
        solve = GptqQuantizer.solve

        def timed(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal inside
            before = time.monotonic()
            result = solve(*arguments, **options)
            inside += time.monotonic() - before
            return result

        GptqQuantizer.solve = timed  # type: ignore[method-assign]
        started = time.monotonic()
        dst = self._dst(f"gptq{thorough}", scheme, seed)
        try:
            quantkit.quantize(
                self.source,
                dst,
                scheme,
                method="gptq",
                calibration=self.calibration,
                samples=self.samples,
                length=WINDOW,
                seed=seed,
                thorough=thorough,
            )
        finally:
            GptqQuantizer.solve = solve  # type: ignore[method-assign]
        return dst, f"{time.monotonic() - started:.1f} ({inside:.1f})"

    def thorough(self, scheme: str, seed: int) -> tuple[Path, str]:
        return self.gptq(scheme, seed, thorough=True)

    def refined(self, start: str, scheme: str, seed: int, *, codes: bool) -> tuple[Path, str]:
        """The result of `gptq` or `thorough`, which has been made, refined."""
        dst = self._dst(f"{start}-refined{codes}", scheme, seed)
        before = self._dst("gptq" + str(start == "thorough"), scheme, seed)
        made = quantkit.refine(
            before,
            dst,
            against=self.source,
            calibration=self.calibration,
            samples=self.samples,
            length=WINDOW,
            seed=seed,
            train_norms=True,
            train_codes=codes,
        )
        return dst, f"+ {made.seconds:.1f}"

    def peer_default(self, scheme: str, seed: int) -> tuple[Path, str]:
        return self._peer(scheme, seed, "default")

    def peer_imatrix_mse(self, scheme: str, seed: int) -> tuple[Path, str]:
        return self._peer(scheme, seed, "imatrix_mse")

    def _peer(self, scheme: str, seed: int, recipe: str) -> tuple[Path, str]:
        dst = self._dst(recipe, scheme, seed)
        command = [
            self.peer,
            PEER,
            self.source,
            self._tokens(seed),
            dst,
            "--scheme",
            scheme,
            "--recipe",
            recipe,
        ]
        return dst, _reported_seconds(command)

    def autoround(self, python: str, iterations: int, scheme: str, seed: int) -> tuple[Path, str]:
        dst, size = (
            self._dst(f"autoround{iterations}", scheme, seed),
            QuantScheme.parse(scheme).group_size,
        )
        command = [
            python,
            AUTOROUND,
            "tune",
            self.source,
            dst,
            self._tokens(seed),
            "--iterations",
            iterations,
        ]
        return dst, _reported_seconds([*command, "--group-size", size])

    def _tokens(self, seed: int) -> Path:
        """A file of the samples that quantkit draws."""
        tokens = self.folder / f"tokens-{seed}.safetensors"
        if not tokens.exists():
            drawn = load_calibration(
                self.calibration,
                load_tokenizer(self.source),
                samples=self.samples,
                length=WINDOW,
                seed=seed,
            )
            save_file({"tokens": drawn.tokens}, tokens)
        return tokens

    def _dst(self, name: str, scheme: str, seed: int) -> Path:
        return self.folder / f"{scheme}-{name}-{seed}"


def _reported_seconds(command: list[object]) -> str:
    """The seconds in the last line of a peer's script."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return f"{json.loads(done.stdout.splitlines()[-1])['seconds']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schemes", default="int4-g128,int4-g64,int4-g32")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--autoround", metavar="PYTHON")
    parser.add_argument("--iterations", default="200,1000")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="names in the table; default: all"
    )
    options = parser.parse_args()
    print(
        "| scheme | method | seed | s |",
        " | ".join(f"KL {text.stem}" for text in options.texts),
        "|",
    )
    print("|---" * (4 + len(options.texts)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        quantkit.convert(options.model, source, dtype="fp32")
        batches = [Batch.from_start(windows(source, text)) for text in options.texts]
        runs = Runs(source, options.calibration, Path(folder), options.peer, options.samples)
        methods: dict[str, Callable[[str, int], tuple[Path, str]]] = {
            "gptq": runs.gptq,
            "gptq, thorough": runs.thorough,
        }
        for start in ("gptq", "thorough") if options.refine else ():
            methods[f"{start}, refined"] = partial(runs.refined, start, codes=False)
            methods[f"{start}, refined with codes"] = partial(runs.refined, start, codes=True)
        if options.peer is not None:
            methods["llm-compressor, imatrix_mse"] = runs.peer_imatrix_mse
            methods["llm-compressor, default"] = runs.peer_default
        once: dict[str, Callable[[str, int], tuple[Path, str]]] = {"rtn": runs.rtn}
        if options.autoround is not None:
            for count in map(int, options.iterations.split(",")):
                once[f"AutoRound, {count} iterations"] = partial(
                    runs.autoround, options.autoround, count
                )
        for scheme in options.schemes.split(","):
            for seed in range(options.seeds):
                for name, run in {**({} if seed else once), **methods}.items():
                    if options.methods is not None and name not in options.methods:
                        continue
                    dst, seconds = run(scheme, seed)
                    found = compare_batches(open_checkpoint(source), open_checkpoint(dst), batches)
                    values = " | ".join(f"{one.divergence.kl * 1e4:.2f}" for one in found)
                    print(f"| {scheme} | {name} | {seed} | {seconds} | {values} |", flush=True)


if __name__ == "__main__":
    main()
