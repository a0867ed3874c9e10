"""Converts, quantizes, verifies, measures and runs the small model that ships with quantkit."""

from __future__ import annotations

import math
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from quantkit.base.progress import Progress, in_phase, silent
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import DestinationError, QuantkitError
from quantkit.evals.table import WIDTH, Table, render
from quantkit.evals.timing import use_threads
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.destination import destination_errors, is_there, rename_new
from quantkit.jobs.convert.convert import convert
from quantkit.jobs.inference.load import load
from quantkit.jobs.inspect import inspect
from quantkit.jobs.quantize.quantize import quantize
from quantkit.quality import measures
from quantkit.quality.verify import Verdict, verify
from quantkit.runtime.generate import generate
from quantkit.text.tokenizer import load_tokenizer, prompt_start

FLOATS = "bf16"
SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128")
QUICK_SCHEMES = ("int4-g64",)
PROMPT = "My fellow citizens, the state of the Union"
# Few samples and short ones: so small a model gains little from more.
_SAMPLES = 32
_LENGTH = 128
_NEW_TOKENS = 40
_QUICK_NEW_TOKENS = 20
# tokens
_WINDOW = 256
_SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
_VERDICTS = {Verdict.SAME: "the same, bit by bit", Verdict.WITHIN_BOUND: "within its bound"}


@dataclass(frozen=True)
class Row:
    """One checkpoint of a table.

    Attributes:
        megabytes: of its tensors on disk, 10**6 bytes.
        bits_per_weight: of the tensors, over all parameters.
        float_share: of the parameters, those that are not quantized.
        perplexity: per token, over windows of 256 tokens.
        kl: mean per token of KL(source || this), in nats.
        largest_logit_difference: to the source.
    """

    name: str
    megabytes: float
    bits_per_weight: float
    float_share: float
    perplexity: float
    kl: float
    largest_logit_difference: float


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo.

    Attributes:
        source: a description of the model that ships with quantkit.
        rows: one per checkpoint, the source's floats first.
        verdicts: of each, compared with the source.
        samples: the prompt and each model's continuation.
        left_out: schemes that a quick demo omits.
    """

    source: list[str]
    rows: list[Row]
    verdicts: dict[str, Verdict]
    samples: dict[str, str]
    left_out: list[str]

    def to_json(self) -> dict[str, Any]:
        """Collect all results, with verdicts in lower case."""
        verdicts = {}
        for name, verdict in self.verdicts.items():
            verdicts[name] = verdict.name.lower()
        return {**asdict(self), "verdicts": verdicts}

    def lines(self, width: int = WIDTH) -> list[str]:
        """Write the report as text, in lines of at most `width` columns."""

        def wrap(text: str, indent: str = "") -> str:
            return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)

        table_rows: list[tuple[str, ...]] = []
        for row in self.rows:
            cells = (
                row.name,
                f"{row.megabytes:.2f}",
                f"{row.bits_per_weight:.2f}",
                f"{row.perplexity:.2f}",
                # The floats' KL from themselves is exactly 0, not a rounded figure.
                f"{row.kl:.5f}" if row.kl else "0",
                _VERDICTS[self.verdicts[row.name]],
            )
            table_rows.append(cells)
        table = Table(
            f"Converted to a Hugging Face folder ({FLOATS}), and quantized from there:",
            ("model", "MB", "bits per weight", "perplexity", f"KL from {FLOATS}", "verified"),
            table_rows,
        )
        environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        environment.filters["wrapped"] = wrap
        template = environment.from_string(
            Path(__file__).with_name("demo.jinja").read_text(encoding="utf-8")
        )
        # Samples begin in one column, two spaces after the longest name.
        indent = " " * (max(map(len, self.samples)) + 2)
        text = template.render(
            report=self,
            table="\n".join(render([table], "terminal", width=width)),
            floats=FLOATS,
            prompt=PROMPT,
            indent=indent,
        )
        return text.rstrip("\n").split("\n")


def run_demo(
    output: Path | None = None,
    *,
    quick: bool = False,
    threads: int = 1,
    progress: Progress = silent,
) -> DemoReport:
    """Convert the demo model from Meta shards, quantize, verify, measure and generate.

    Args:
        output: a new folder to keep the checkpoints in, which appears once all is done; by default
            they are temporary.
        quick: try one scheme only.
        threads: the number of threads that compute; more are slower with so small a model.

    Raises:
        QuantkitError: if a step fails, or a checkpoint is not what it should be.
    """
    if output is None:
        with tempfile.TemporaryDirectory(prefix="quantkit-demo-") as folder, use_threads(threads):
            return _run(Path(folder), quick, progress)
    with destination_errors(output):
        if is_there(output):
            raise DestinationError("exists already; nothing is overwritten", path=output)
        output.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder as the output, because a rename cannot cross file systems.
        scratch = tempfile.TemporaryDirectory(
            prefix=f".{output.name}-", dir=output.parent, ignore_cleanup_errors=True
        )
    with use_threads(threads), scratch as folder:
        # A temporary folder is private to its user; a folder within it has the usual permissions.
        finished_folder = Path(folder) / output.name
        report = _run(finished_folder, quick, progress)
        with destination_errors(output):
            rename_new(finished_folder, output)
        return report


def _run(folder: Path, quick: bool, progress: Progress) -> DemoReport:
    if quick:
        schemes: Sequence[str] = QUICK_SCHEMES
        max_new_tokens = _QUICK_NEW_TOKENS
    else:
        schemes = SCHEMES
        max_new_tokens = _NEW_TOKENS
    source_path = folder / FLOATS
    quantized_paths = [folder / scheme for scheme in schemes]
    paths = [source_path, *quantized_paths]
    steps = count()

    def step(name: str) -> None:
        progress(name, next(steps), 3 * len(paths), "steps")

    step("convert")
    convert(DEMO_MODEL, source_path)
    for scheme, path in zip(schemes, quantized_paths, strict=True):
        step(f"quantize to {scheme}")
        if scheme == "int8":
            # int8 rounds each weight, without calibration samples.
            quantize(source_path, path, scheme)
        else:
            quantize(source_path, path, scheme, samples=_SAMPLES, length=_LENGTH)
    verdicts = {}
    for path in paths:
        step(f"verify {path.name}")
        verdict = verify(DEMO_MODEL, path).verdict
        # Conversion copies the tensors bit by bit; quantization has a bound for its loss.
        if path == source_path:
            expected = Verdict.SAME
        else:
            expected = Verdict.WITHIN_BOUND
        if verdict is not expected:
            raise QuantkitError(
                f"the demo's {path.name} is {verdict.name.lower()}",
                expected=expected.name.lower(),
            )
        verdicts[path.name] = verdict
    rows = compare(source_path, quantized_paths, progress=in_phase(progress, "compare"))
    samples = {}
    for path in paths:
        step(f"generate with {path.name}")
        # So small a model is quick without kernels too, on machines that have none for its layers.
        model, tokenizer = load(path, device="cpu", allow_slow=True)
        ids = tokenizer.encode(PROMPT)
        new_ids = generate(model, ids, max_new_tokens=max_new_tokens, **_SAMPLING)
        # Decoded together, because a tokenizer can drop the white space that begins a text.
        samples[path.name] = tokenizer.decode([*ids, *new_ids])
    # Only the name: the folder of the installation does not interest a reader.
    source = replace(inspect(DEMO_MODEL), path=DEMO_MODEL.name)
    left_out = [scheme for scheme in SCHEMES if scheme not in schemes]
    return DemoReport(
        source=source.lines()[:2], rows=rows, verdicts=verdicts, samples=samples, left_out=left_out
    )


def compare(source: Path, checkpoints: Sequence[Path], *, progress: Progress) -> list[Row]:
    """Measure checkpoints against their source on the excerpt that ships with quantkit, in
    float32, source first.
    """
    reference = open_checkpoint(source)
    quantized = [open_checkpoint(path) for path in checkpoints]
    tokenizer = load_tokenizer(source)
    windows = measures.text_windows(tokenizer.encode(excerpt()), prompt_start(tokenizer), _WINDOW)
    comparisons = measures.compare(reference, quantized, windows, progress=progress)
    # The reference's perplexity is the same in all comparisons; its divergence from itself is 0.
    figures = [(comparisons[0].reference_perplexity, 0.0, 0.0)]
    for comparison in comparisons:
        divergence = comparison.divergence
        figures.append((comparison.perplexity, divergence.kl, divergence.largest_logit_difference))
    rows = []
    for path, checkpoint, figures_of_model in zip(
        [source, *checkpoints], [reference, *quantized], figures, strict=True
    ):
        size = inspect(path)
        float_parameters = 0
        for name in checkpoint.names():
            spec = checkpoint.info(name)
            if spec.scheme is None:
                float_parameters += math.prod(spec.shape)
        row = Row(
            path.name,
            size.weight_bytes / 1e6,
            size.bits_per_weight,
            float_parameters / size.parameters,
            *figures_of_model,
        )
        rows.append(row)
    return rows
