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
# few, since so small a model gains little from more
_SAMPLES = 32
_LENGTH = 128
_NEW_TOKENS = 40
_QUICK_NEW_TOKENS = 20
_WINDOW = 256  # tokens
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
        """Return all results; verdicts in lower case."""
        return {
            **asdict(self),
            "verdicts": {name: verdict.name.lower() for name, verdict in self.verdicts.items()},
        }

    def lines(self, width: int = WIDTH) -> list[str]:
        """Return the report as text, in lines of at most `width` columns."""

        def wrap(text: str, indent: str = "") -> str:
            return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)

        table = Table(
            f"Converted to a Hugging Face folder ({FLOATS}), and quantized from there:",
            ("model", "MB", "bits per weight", "perplexity", f"KL from {FLOATS}", "verified"),
            [
                (
                    row.name,
                    f"{row.megabytes:.2f}",
                    f"{row.bits_per_weight:.2f}",
                    f"{row.perplexity:.2f}",
                    f"{row.kl:.5f}" if row.kl else "0",
                    _VERDICTS[self.verdicts[row.name]],
                )
                for row in self.rows
            ],
        )
        environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        environment.filters["wrapped"] = wrap
        template = environment.from_string(
            Path(__file__).with_name("demo.jinja").read_text(encoding="utf-8")
        )
        text = template.render(
            report=self,
            table="\n".join(render([table], "terminal", width=width)),
            floats=FLOATS,
            prompt=PROMPT,
            indent=" " * (max(map(len, self.samples)) + 2),
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
        output: a new folder to keep the checkpoints in, there once all is done; by default they are
            temporary.
        quick: try one scheme only.
        threads: that compute; more are slower with so small a model.

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
        scratch = tempfile.TemporaryDirectory(
            prefix=f".{output.name}-", dir=output.parent, ignore_cleanup_errors=True
        )
    with use_threads(threads), scratch as folder:
        made = Path(folder) / output.name  # with the usual permissions, unlike temporary folders
        report = _run(made, quick, progress)
        with destination_errors(output):
            rename_new(made, output)
        return report


def _run(folder: Path, quick: bool, progress: Progress) -> DemoReport:
    tried = QUICK_SCHEMES if quick else SCHEMES
    paths = [folder / FLOATS, *(folder / scheme for scheme in tried)]
    steps = count()

    def step(name: str) -> None:
        progress(name, next(steps), 3 * len(paths), "steps")

    step("convert")
    convert(DEMO_MODEL, paths[0])
    for scheme, path in zip(tried, paths[1:], strict=True):
        step(f"quantize to {scheme}")
        few = (None, None) if scheme == "int8" else (_SAMPLES, _LENGTH)
        quantize(paths[0], path, scheme, samples=few[0], length=few[1])
    verdicts = {}
    for path in paths:
        step(f"verify {path.name}")
        verdicts[path.name] = verify(DEMO_MODEL, path).verdict
        if path == paths[0]:
            expected = Verdict.SAME
        else:
            expected = Verdict.WITHIN_BOUND
        if verdicts[path.name] is not expected:
            raise QuantkitError(
                f"the demo's {path.name} is {verdicts[path.name].name.lower()}",
                expected=expected.name.lower(),
            )
    rows = compare(paths[0], paths[1:], progress=in_phase(progress, "compare"))
    samples = {}
    for path in paths:
        step(f"generate with {path.name}")
        # So small a model is still quick.
        model, tokenizer = load(path, device="cpu", allow_slow=True)
        ids = tokenizer.encode(PROMPT)
        new = generate(
            model, ids, max_new_tokens=_QUICK_NEW_TOKENS if quick else _NEW_TOKENS, **_SAMPLING
        )
        samples[path.name] = tokenizer.decode([*ids, *new])
    source = replace(inspect(DEMO_MODEL), path=DEMO_MODEL.name)
    left_out = [scheme for scheme in SCHEMES if scheme not in tried]
    return DemoReport(source.lines()[:2], rows, verdicts, samples, left_out)


def compare(source: Path, checkpoints: Sequence[Path], *, progress: Progress) -> list[Row]:
    """Measure checkpoints against their source on the excerpt that ships with quantkit, in
    float32, source first.
    """
    reference, *others = (open_checkpoint(path) for path in (source, *checkpoints))
    tokenizer = load_tokenizer(source)
    windows = measures.text_windows(tokenizer.encode(excerpt()), prompt_start(tokenizer), _WINDOW)
    found = measures.compare(reference, others, windows, progress=progress)
    figures = [(found[0].reference_perplexity, 0.0, 0.0)]
    figures += [
        (one.perplexity, one.divergence.kl, one.divergence.largest_logit_difference)
        for one in found
    ]
    rows = []
    for path, checkpoint, measured in zip(
        [source, *checkpoints], [reference, *others], figures, strict=True
    ):
        size = inspect(path)
        specs = [checkpoint.info(name) for name in checkpoint.names()]
        floats = (
            sum(math.prod(spec.shape) for spec in specs if spec.scheme is None) / size.parameters
        )
        rows.append(
            Row(path.name, size.weight_bytes / 1e6, size.bits_per_weight, floats, *measured)
        )
    return rows
