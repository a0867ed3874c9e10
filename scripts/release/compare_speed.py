r"""Time decoding and prefill of two versions of quantkit in turn, both loaded: a few steps of one,
then of the other.

    python scripts/release/compare_speed.py OLD_PYTHON NEW_PYTHON [--shape tinyllama-1.1b] \
        [--scheme int4-g128]

Prints the median and the quartiles of the ratios of wall time, new over old, below 1 where the new
one is faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile

_WORKER = """
import dataclasses, sys, time, torch
from quantkit.evals.synthetic import synthetic
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
model = load_model(synthetic(sys.argv[1], sys.argv[2], None), device="cpu")
model.config = dataclasses.replace(model.config, eos_token_ids=())
prompt = torch.randint(2000, (128,), generator=torch.Generator().manual_seed(0)).tolist()
print("ready", flush=True)
for line in sys.stdin:
    tokens = generate(Engine(model, 256), prompt, max_new_tokens=9)
    started = time.perf_counter()
    next(tokens)
    if line.strip() == "decode":
        started = time.perf_counter()
        list(tokens)
    print(time.perf_counter() - started, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # not where a checkout is
        workers = [
            subprocess.Popen(
                [python, "-c", _WORKER, options.shape, options.scheme],
                cwd=folder,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for python in (options.old, options.new)
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        for kind in ("decode", "prefill"):
            ratios = []
            for index in range(options.rounds):
                order = workers if index % 2 else workers[::-1]
                seconds = {id(worker): _request(worker, kind) for worker in order}
                ratios.append(seconds[id(workers[1])] / seconds[id(workers[0])])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{kind}: new over old {middle:.3f}, quartiles {low:.3f} to {high:.3f},"
                f" {len(ratios)} pairs"
            )
        for worker in workers:
            worker.kill()


def _request(worker: subprocess.Popen[str], kind: str) -> float:
    """Seconds of one measure."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(kind + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


if __name__ == "__main__":
    main()
