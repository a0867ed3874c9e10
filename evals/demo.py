"""The whole job on the small model that ships with quantkit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import DestinationError, QuantkitError
from quantkit.evals.table import Row, compare, format_rows
from quantkit.jobs.convert import convert
from quantkit.jobs.inspect import inspect
from quantkit.jobs.load import load
from quantkit.jobs.quantize import quantize
from quantkit.progress import Progress, silent
from quantkit.quality.verify import Verdict, verify
from quantkit.runtime.generate import generate

SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128")
PROMPT = "My fellow citizens, the state of the Union"
_NEW_TOKENS = 40
_SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}


@dataclass(frozen=True)
class DemoReport:
    """What the demo made and measured."""

    source: list[str]
    rows: list[Row]
    verdicts: dict[str, Verdict]
    samples: dict[str, str]

    def lines(self) -> list[str]:
        """The report for people."""
        verdicts = ", ".join(
            f"{name} {verdict.name.lower().replace('_', ' ')}" for name, verdict in self.verdicts.items()
        )
        samples = [f"{name:<12}{' '.join(text.split())}" for name, text in self.samples.items()]
        return [*self.source, "", *format_rows(self.rows), "", f"verified against the source: {verdicts}", "", *samples]


def run_demo(output: Path | None = None, *, progress: Progress = silent) -> DemoReport:
    """Convert the demo model from Meta shards, quantize, verify, measure and generate.

    Args:
        output: a new folder to keep the checkpoints in; by default they are temporary.

    Raises:
        QuantkitError: if a step fails, or a checkpoint is not what it should be.
    """
    if output is not None:
        if output.exists():
            raise DestinationError("exists already; nothing is overwritten", path=output)
        return _run(output, progress)
    with tempfile.TemporaryDirectory(prefix="quantkit-demo-") as folder:
        return _run(Path(folder), progress)


def _run(folder: Path, progress: Progress) -> DemoReport:
    steps = len(SCHEMES) + 1
    progress(0, steps, "convert")
    paths = [folder / "bf16", *(folder / scheme for scheme in SCHEMES)]
    convert(DEMO_MODEL, paths[0])
    for index, scheme in enumerate(SCHEMES, 1):
        progress(index, steps, f"quantize to {scheme}")
        quantize(paths[0], paths[index], scheme)
    verdicts = {path.name: verify(DEMO_MODEL, path).verdict for path in paths}
    expected = {path.name: Verdict.WITHIN_BOUND for path in paths} | {"bf16": Verdict.SAME}
    if wrong := [name for name in verdicts if verdicts[name] != expected[name]]:
        raise QuantkitError(
            f"the demo's {wrong[0]} is {verdicts[wrong[0]].name.lower()}", expected=expected[wrong[0]].name.lower()
        )
    rows = compare(paths[0], paths[1:], excerpt(), progress=progress)
    samples = {}
    for path in paths:
        model, tokenizer = load(path)
        ids = tokenizer.encode(PROMPT)
        samples[path.name] = tokenizer.decode([*ids, *generate(model, ids, max_new_tokens=_NEW_TOKENS, **_SAMPLING)])
    source = replace(inspect(DEMO_MODEL), path=DEMO_MODEL.name)
    return DemoReport(source.lines()[:2], rows, verdicts, samples)
