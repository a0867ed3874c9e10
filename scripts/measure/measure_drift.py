r"""Measure what following the float model brings, by the samples on which it is followed.

    python scripts/measure/measure_drift.py MODEL CALIBRATION TEXT... [--strides 1,4,8,16,32] \
        [--seeds 3] [--fixed-damping 0.1]

Prints a table in Markdown: KL(source || quantized) per token in units of 1e-4, the mean over the
seeds, for int4-g128 with 128 samples of 256 tokens; the float model takes every n-th sample,
finally none. `--fixed-damping`: the Hessian that drift is divided by is damped by that, however
many tokens show the drift. Everything is in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.calibration import effort, group_solver
from quantkit.calibration.effort import Effort
from quantkit.tensors.products import BFLOAT16_SETTING

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row
from shared.texts import (
    SAMPLES,
    WINDOW,
    add_text_arguments,
    cut_batches,
    format_kls,
    format_titles,
    measure_kls,
)


class Followed(Effort):
    """As it is said, whatever the samples; a stride of 0 follows nothing."""

    def for_samples(self, config: ModelConfig, shape: Sequence[int]) -> Effort:
        return self

    def follows(self, index: int, batches: int) -> bool:
        return self.stride > 0 and index % self.stride == 0

    def followed(self, batches: int) -> int:
        return sum(self.follows(index, batches) for index in range(batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument("--strides", default="1,4,8,16,32")
    parser.add_argument("--fixed-damping", type=float)
    options = parser.parse_args()
    os.environ[BFLOAT16_SETTING] = "0"
    effort._BATCH_TOKENS = WINDOW  # a sample at a time, so that any share can be followed
    if options.fixed_damping is not None:
        group_solver.drift_damping = lambda inputs, tokens: options.fixed_damping
    print_header("tokens followed", *format_titles(options.texts))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = folder / "source"
        quantkit.convert(options.model, source, dtype="fp32")
        batches = cut_batches(source, options.texts)
        for stride in [*map(int, options.strides.split(",")), 0]:
            effort.EFFORTS["default"] = Followed(effort.EFFORTS["default"].tokens_per_input, stride)
            rows = []
            for seed in range(options.seeds):
                dst = folder / f"{stride}-{seed}"
                quantkit.quantize(
                    source,
                    dst,
                    "int4-g128",
                    embedding="keep",
                    method="gptq",
                    calibration=options.calibration,
                    samples=SAMPLES,
                    length=WINDOW,
                    seed=seed,
                    accept_quality_loss=True,
                )
                rows.append(measure_kls(source, dst, batches))
            means = [statistics.mean(kls) for kls in zip(*rows, strict=True)]
            tokens = -(-SAMPLES // stride) * WINDOW if stride else "none"
            print_row(tokens, *format_kls(means))


if __name__ == "__main__":
    main()
