r"""Damaged checkpoints through quantkit: every one must be refused in one line, or read as others
read it.

    python scripts/release/fuzz.py [--inputs 2000] [--first 0] [--seed 0] [--processes 2] \
        [--seconds 10]
    python scripts/release/fuzz.py --only 12345
    python scripts/release/fuzz.py --kind gguf --inputs 20000

Each input is a sound folder (made on the spot, see `fuzzing.bases`) with one to three mutations of
one of its files. It depends on the seed and its number alone; ``--only`` repeats one, says what was
mutated and keeps its folder. Of forty inputs, 39 go through `inspect` and the opener, with every
tensor loaded and a text tokenized; one goes through a whole `convert`, `quantize`, `verify` or
resumed run. Inputs run in forked workers under a watchdog: one may take ten seconds and 1 GB, and a
worker that dies or hangs is a finding.

The sound folders go through the same first, and must pass.

The rule. A command ends in a documented exit code other than 1. If it fails, stderr holds one line
of error, progress and notes aside, which names the source or the destination, and DST is not there.
If it succeeds, the weights are those that torch.load without mmap, safetensors' own reader or
gguf's find in the damaged source: to the bit after an opener or `convert` (of GGUF, whose norms are
float32, as numbers), within half a step after `quantize`; and `verify DST` agrees. Nothing in a
pickle is run, and no file outside DST is changed.

Of a zip, zipfile must say as well that the headers of the pickle and of the tensors' records fit
its directory and, after a whole run, that their CRC are right, unless all are 0 (torch's CRC
switched off); an opener need not know a CRC. Where a reader refuses a source that quantkit took,
nobody vouches for its bytes. The weights must then be those of the sound folder, to the bit: the
damage lies where it touches no weight, and the case is counted as "readers refused, weights
intact". If they are not, it is a finding.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from fuzzing.bases import in_a_child, read_bases, write_bases
from fuzzing.inputs import Inputs
from fuzzing.trial import Outcome
from fuzzing.workers import Workers, describe

_SHARED = Path("/dev/shm")
"""Where files need no disk: a whole run waits for it many times."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="Number of the first input.")
    parser.add_argument("--only", type=int, help="Repeat one input, and keep its folder.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kind", help="The only kind of file to mutate: gguf, safetensors, zip, config.json, ..."
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="That an input may take.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(
        tempfile.mkdtemp(
            prefix="fuzz-", dir=_SHARED if _SHARED.is_dir() and _free(_SHARED) else None
        )
    )
    keep = options.only is not None
    try:
        in_a_child(write_bases, folder / "bases")
        inputs = Inputs(options.seed, read_bases(folder / "bases"), options.kind)
        numbers = range(options.first, options.first + options.inputs)
        if keep:
            numbers = range(options.only, options.only + 1)
            print("\n".join(describe(inputs.make(options.only))))
        started = time.monotonic()
        workers = Workers(inputs, folder, options.processes, options.seconds)
        outcomes = [] if keep else _run(workers, inputs.sound)
        outcomes += _run(workers, numbers)
        print("\n".join(_report(outcomes, inputs, time.monotonic() - started)))
        if keep:
            print(f"  {outcomes[0]}\n  kept in {folder}/worker-0")
        return int(any(outcome.findings for outcome in outcomes))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _free(folder: Path) -> bool:
    """Whether there is room for the bases and the workers' folders."""
    return shutil.disk_usage(folder).free > 1 << 28


def _run(workers: Workers, numbers: range) -> list[Outcome]:
    found = []
    try:
        with tqdm(total=len(numbers), unit="input", disable=not sys.stderr.isatty()) as bar:
            for outcome in workers.outcomes(numbers):
                found.append(outcome)
                bar.update()
    finally:
        workers.stop()
    return sorted(found, key=lambda outcome: outcome.number)


def _report(outcomes: list[Outcome], inputs: Inputs, seconds: float) -> list[str]:
    """Counts of exit codes by kind of file and by command, then the findings grouped by what
    happened.
    """
    mutated = [outcome for outcome in outcomes if outcome.kind != "sound"]
    whole = sum(outcome.job != "light" for outcome in mutated)
    lines = [
        f"{len(mutated)} inputs, {whole} of them whole runs, in {seconds:.0f} s:"
        f" {len(mutated) / seconds:.0f}/s"
    ]
    for title, key in (("kind of file", lambda o: o.kind), ("command", lambda o: o.job)):
        counts: dict[str, Counter[str]] = {}
        for outcome in mutated:
            code = str(next(iter(outcome.codes.values()))) if outcome.codes else "died"
            counts.setdefault(key(outcome), Counter())[code] += 1
        codes = sorted(
            {code for counter in counts.values() for code in counter}, key=lambda c: (len(c), c)
        )
        lines.append(
            f"{title:24s}" + "".join(f"{'exit ' + c if c.isdigit() else c:>9s}" for c in codes)
        )
        lines += [
            f"{name:24s}" + "".join(f"{counts[name][c]:9d}" for c in codes)
            for name in sorted(counts)
        ]
    refused = [outcome for outcome in outcomes if outcome.refused and not outcome.findings]
    lines.append(f"readers refused, weights intact: {len(refused)}")
    groups: dict[str, list[tuple[Outcome, str]]] = {}
    for outcome in outcomes:
        for finding in outcome.findings:
            groups.setdefault(_cause(outcome, finding), []).append((outcome, finding))
    lines.append(
        f"findings: {sum(bool(o.findings) for o in outcomes)} inputs of {len(groups)} kinds"
    )
    for members in sorted(groups.values(), key=len, reverse=True):
        outcome, finding = members[0]
        numbers = ", ".join(str(o.number) for o, _ in members[:5])
        kinds = ", ".join(sorted({o.kind for o, _ in members}))
        lines += [f"- {len(members)} x {finding[:300]}", f"    {kinds}; inputs {numbers}"]
        lines += [f"    {what}" for what in inputs.make(outcome.number).mutations]
    return lines


def _cause(outcome: Outcome, finding: str) -> str:
    """What findings of one cause have in common: numbers, names and quoted parts left out."""
    short = re.sub(r"'[^']*'|\"[^\"]*\"|\S*[/\\]\S*|tensor \S+|-?\d[\d.e+-]*", "#", finding)
    return f"{outcome.job == 'light'} {short[:90]}"


if __name__ == "__main__":
    sys.exit(main())
