"""The whole job on the small model that ships with quantkit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import CheckpointError, DestinationError, QuantkitError
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.jobs.convert import convert
from quantkit.jobs.inspect import inspect
from quantkit.jobs.load import load
from quantkit.jobs.quantize import quantize
from quantkit.progress import Progress, in_phase, silent
from quantkit.quality import measures
from quantkit.quality.verify import Verdict, verify
from quantkit.runtime.generate import generate
from quantkit.text.tokenizer import load_tokenizer

SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128")
PROMPT = "My fellow citizens, the state of the Union"
_NEW_TOKENS = 40
_SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}


@dataclass(frozen=True)
class Row:
    """One checkpoint of a table.

    Attributes:
        megabytes: of its tensors on disk, 10**6 bytes.
        bits_per_weight: of the tensors, over all parameters.
        perplexity: per token, over windows of `compare`'s length.
        kl: mean per token of KL(source || this), in nats.
        largest_logit_difference: to the source.
    """

    name: str
    megabytes: float
    bits_per_weight: float
    perplexity: float
    kl: float
    largest_logit_difference: float


@dataclass(frozen=True)
class DemoReport:
    """What the demo made and measured."""

    source: list[str]
    rows: list[Row]
    verdicts: dict[str, Verdict]
    samples: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "rows": [asdict(row) for row in self.rows],
            "verdicts": {name: verdict.name.lower() for name, verdict in self.verdicts.items()},
            "samples": self.samples,
        }

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
    progress("convert", 0, steps, "steps")
    paths = [folder / "bf16", *(folder / scheme for scheme in SCHEMES)]
    convert(DEMO_MODEL, paths[0])
    for index, scheme in enumerate(SCHEMES, 1):
        progress(f"quantize to {scheme}", index, steps, "steps")
        quantize(paths[0], paths[index], scheme)
    verdicts = {path.name: verify(DEMO_MODEL, path).verdict for path in paths}
    expected = {path.name: Verdict.WITHIN_BOUND for path in paths} | {"bf16": Verdict.SAME}
    if wrong := [name for name in verdicts if verdicts[name] != expected[name]]:
        raise QuantkitError(
            f"the demo's {wrong[0]} is {verdicts[wrong[0]].name.lower()}", expected=expected[wrong[0]].name.lower()
        )
    rows = compare(paths[0], paths[1:], excerpt(), progress=in_phase(progress, "compare"))
    samples = {}
    for path in paths:
        model, tokenizer = load(path, device="cpu")
        ids = tokenizer.encode(PROMPT)
        samples[path.name] = tokenizer.decode([*ids, *generate(model, ids, max_new_tokens=_NEW_TOKENS, **_SAMPLING)])
    source = replace(inspect(DEMO_MODEL), path=DEMO_MODEL.name)
    return DemoReport(source.lines()[:2], rows, verdicts, samples)


def compare(
    source: Path, checkpoints: Sequence[Path], text: str, *, window: int = 256, progress: Progress = silent
) -> list[Row]:
    """Measure checkpoints against their source on one text, in float32, source first.

    Raises:
        CheckpointError: if the text is too short for one prediction.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    reference = open_checkpoint(source)
    tokenizer = checked_tokenizer(reference)[0] or load_tokenizer(source)
    windows = measures.text_windows(tokenizer.encode(text), tokenizer.bos_id, window)
    if windows.shape[0] == 0 or windows.shape[1] < 2:
        raise CheckpointError("the text is too short to measure on", path=source)
    others = [open_checkpoint(path) for path in checkpoints]
    found = measures.compare(reference, others, windows, progress=progress)
    rows = [_row(source, found[0].reference_perplexity, 0.0, 0.0)]
    for path, one in zip(checkpoints, found, strict=True):
        rows.append(_row(path, one.perplexity, one.divergence.kl, one.divergence.largest_logit_difference))
    return rows


def format_rows(rows: Sequence[Row]) -> list[str]:
    """The table as aligned text."""
    lines = [f"{'checkpoint':<12}{'MB':>8}{'bits/weight':>13}{'perplexity':>12}{'KL':>10}{'max logit diff':>16}"]
    for row in rows:
        lines.append(
            f"{row.name:<12}{row.megabytes:>8.2f}{row.bits_per_weight:>13.2f}{row.perplexity:>12.3f}"
            f"{row.kl:>10.5f}{row.largest_logit_difference:>16.4f}"
        )
    return lines


def _row(path: Path, perplexity: float, kl: float, largest: float) -> Row:
    size = inspect(path)
    return Row(path.name, size.weight_bytes / 1e6, size.bits_per_weight, perplexity, kl, largest)
