"""The commands that measure models: ``eval`` what they predict, ``bench`` how fast they run."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.help import Command
from quantkit.cli.output import columns, note, warn
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.evals.names import named, short_names
from quantkit.json_values import shown
from quantkit.quality.positions import TOKENS

if TYPE_CHECKING:
    from quantkit.evals.table import Style


@click.command("eval", cls=Command)
@click.argument("models", metavar="[NAME=]PATH...", nargs=-1, required=True, shell_complete=options.complete_named)
@click.option("--text", "texts", type=options.PATH, multiple=True, help="Text to measure on, UTF-8; repeatable.")
@click.option("--tasks", default="", help="Tasks of lm-evaluation-harness, separated by commas.")
@click.option("--task-data", type=options.PATH, help="Folder with data of tasks: TASK.jsonl, .json, .parquet or .txt.")
@click.option(
    "--against", metavar="[NAME=]PATH", shell_complete=options.complete_named,
    help="The model that the others are held against.",
)  # fmt: skip
@click.option("--window", type=int, help="Tokens in a window; see docs/evals.md for the defaults.")
@click.option(
    "--positions", type=int, metavar="TOKENS",
    help="Divergence by position too, up to so many tokens of a context, with a float and an int8 cache.",
)  # fmt: skip
@click.option(
    "--position-windows", type=int, metavar="N",
    help=f"Windows of --positions tokens in each text; as many as hold {TOKENS} tokens by default.",
)  # fmt: skip
@click.option("--cache-logits", type=options.PATH, help="Folder that keeps what the reference's logits follow from.")
@click.option("--speed", is_flag=True, help="Measure decoding as well.")
@options.device
@options.table
@options.report
@options.data
@options.plot("KL or perplexity by bits per weight, and the worst layers")
def evaluate(
    models: tuple[str, ...], texts: tuple[Path, ...], tasks: str, task_data: Path | None, against: str | None,
    window: int | None, positions: int | None, position_windows: int | None, cache_logits: Path | None, speed: bool,
    device: str | None, table: Style, report: Path | None, data: str | None, plot: Path | None,
) -> None:  # fmt: skip
    """Measure models: perplexity, divergence, tasks, speed.

    The models in PATHs are put side by side, under the NAMEs given. Perplexity and divergence are always computed in
    float32 on the CPU; tasks and speed on --device. Under torchrun all processes share
    each model, on CPUs.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:  # which the job looks at first
        require_models(*(path for _, path in named([*models, *([against] if against else [])])))

    from quantkit.evals.evaluate import evaluate as job
    from quantkit.evals.plot import picture
    from quantkit.evals.report import markdown, sheet, tables
    from quantkit.evals.table import render

    asked = {"tasks": tasks, "window": window, "speed": speed, "device": device}
    with together({**asked, "positions": [positions, position_windows]}, "cpu") as group:
        outputs = Outputs(data, report=report, plot=plot, reads=texts)
        with ProgressDisplay(show=group.is_rank0) as progress:
            found = job(
                models, texts=texts, tasks=names, task_data=task_data, against=against, window=window,
                positions=positions, position_windows=position_windows, cache_logits=cache_logits, speed=speed,
                details=outputs.wants_page, device=device, group=group, progress=progress,
            )  # fmt: skip
        if group.is_rank0:

            def tell() -> None:
                outputs.say(render([sheet(found)] if table == "csv" else tables(found), table, width=columns()))
                for line in found.notes:
                    note(line)

            report_of = found.to_html if outputs.wants_page else partial(markdown, found)
            outputs.write(found.to_json(), report=report_of, picture=partial(picture, found), tell=tell)


@click.command(cls=Command)
@click.argument("models", metavar="[[NAME=]PATH]...", nargs=-1, shell_complete=options.complete_named)
@click.option("--synthetic", metavar="SHAPE", help="Random weights of a named shape instead, such as tinyllama-1.1b.")
@click.option(
    "--scheme", "quantized", type=options.Scheme(), multiple=True,
    help="Of the random weights; repeatable; floats without.",
)  # fmt: skip
@click.option(
    "--head", type=options.Scheme(), metavar="SCHEME", help="Of the random weights' output head; int8 by default."
)
@click.option("--prompt-lengths", default="16,128,512", show_default=True, help="Tokens of prefill.")
@click.option("--batch", "batches", default="1,4,8", show_default=True, help="Sequences decoded at once.")
@click.option("--contexts", help="Lengths of context to decode at as well, each --batch; such as 1024,2048,4096.")
@click.option(
    "--price-per-hour", type=float, metavar="PRICE",
    help="What an hour of the machine costs, in any currency, to tell the cost of a thousand tokens.",
)  # fmt: skip
@click.option("--threads", type=int, help="That compute; torch's own number by default.")
@click.option("--runs", type=int, default=5, show_default=True, help="Of each measurement, after one to warm up.")
@options.int8_cache
@options.backend()
@options.compiled
@options.device
@options.table
@options.data
@options.plot("decoding and prefill")
def bench(
    models: tuple[str, ...], synthetic: str | None, quantized: tuple[str, ...], head: str | None, prompt_lengths: str,
    batches: str, contexts: str | None, price_per_hour: float | None, threads: int | None, runs: int, int8_cache: bool,
    backend: str | None, compiled: bool | None, device: str | None, table: Style, data: str | None, plot: Path | None,
) -> None:  # fmt: skip
    """Time models: prefill, decoding, loading, memory, cost.

    The models in PATHs are put side by side, each in a process of its own, under the NAMEs given. Under
    torchrun all processes share one model; the figures are the first process's.
    """
    if bool(models) == (synthetic is not None):
        raise RequestError("give folders, or --synthetic and a shape")
    if quantized and synthetic is None:
        raise RequestError("--scheme goes with --synthetic", hint="a folder has schemes of its own")
    if head is not None and not quantized:
        raise RequestError("--head goes with --scheme")
    lengths, sizes = _numbers(prompt_lengths), _numbers(batches)
    long_contexts = () if contexts is None else _numbers(contexts)
    given = named(models)
    require_models(*(path for _, path in given))

    from quantkit.evals import bench_report
    from quantkit.evals.bench import BenchModel, BenchOptions
    from quantkit.evals.bench import bench as job
    from quantkit.evals.bench_plot import picture
    from quantkit.evals.table import render

    short = short_names([path for _, path in given])
    sources = [BenchModel(path, name=name or end) for (name, path), end in zip(given, short, strict=True)]
    if synthetic is not None:
        sources = [BenchModel(shape=synthetic, scheme=scheme, head=head) for scheme in quantized or (None,)]
    requested = BenchOptions(
        lengths, sizes, long_contexts, price_per_hour, threads, runs, int8_cache, backend, compiled, device
    )
    with together(asdict(requested), device) as group:
        outputs = Outputs(data, plot=plot)
        with ProgressDisplay(show=group.is_rank0) as progress:
            found = job(sources, requested, group=group, progress=progress)
        if group.is_rank0:
            warnings, notes = bench_report.warnings(found), bench_report.notes(found)
            below = [""] if (warnings or notes) and table == "terminal" else []
            tables = [bench_report.sheet(found)] if table == "csv" else bench_report.tables(found)

            def tell() -> None:
                outputs.say([*render(tables, table, width=columns()), *below])
                for line in warnings:
                    warn(line)
                for line in notes:
                    note(line)

            outputs.write([one.to_json() for one in found], picture=partial(picture, found), tell=tell)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError("expected numbers separated by commas", found=shown(text)) from error
