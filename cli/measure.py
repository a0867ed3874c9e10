"""The commands that measure models: ``eval`` what they predict, ``bench`` how fast they run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.base.json_values import format_value
from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import RUN, Command, section
from quantkit.cli.output import note, table_width, warn
from quantkit.cli.processes import join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.evals.table import parse_named_paths
from quantkit.quality.positions import TOKENS

if TYPE_CHECKING:
    from quantkit.evals.table import Style

_MEASURED = "What is measured"
# Options that must be the same in all processes. Paths may differ.
_SHARED = (
    "text_column",
    "tasks",
    "window",
    "speed",
    "backend",
    "trust_remote_code",
    "device",
    "allow_slow",
)


@options.accept_threads
@click.command("eval", cls=Command)
@click.argument(
    "models",
    metavar="[NAME=]PATH...",
    nargs=-1,
    required=True,
    shell_complete=options.complete_named,
)
@section(
    _MEASURED,
    click.option(
        "--text",
        "texts",
        type=options.PATH,
        multiple=True,
        help=(
            "Text to measure on: plain UTF-8, JSON lines or Parquet; repeatable. Default, without"
            " --tasks: a small included text."
        ),
    ),
    click.option(
        "--text-column",
        metavar="NAME",
        help=(
            "Column or key of the texts. Default: text, messages, conversations, or the only column"
            " of strings."
        ),
    ),
    click.option(
        "--tasks", default="", help="Tasks of lm-evaluation-harness, separated by commas."
    ),
    click.option(
        "--task-data",
        type=options.PATH,
        help="Folder with data of tasks: TASK.jsonl, .json, .parquet or .txt.",
    ),
    click.option(
        "--against",
        metavar="[NAME=]PATH",
        shell_complete=options.complete_named,
        help="The reference model, with which the others are compared.",
    ),
    click.option("--window", type=int, help="Window size in tokens. Default: see docs/evals.md."),
    click.option(
        "--positions",
        type=int,
        metavar="TOKENS",
        help=(
            "Also measure divergence by position, up to this many tokens, with a float and an int8"
            " cache."
        ),
    ),
    click.option(
        "--position-windows",
        type=int,
        metavar="N",
        help=(
            f"Number of --positions windows in each text. Default: as many as fit in {TOKENS}"
            " tokens."
        ),
    ),
    click.option(
        "--cache-logits",
        type=options.PATH,
        help="Folder that keeps the reference's results for later runs.",
    ),
    click.option("--speed", is_flag=True, help="Also measure the speed of decoding."),
)
@section(RUN, options.via, options.trust_remote_code, options.device, options.allow_slow)
@section(
    "Output",
    options.table,
    options.report,
    options.data,
    options.plot("KL or perplexity by bits per weight, and the worst layers"),
)
def evaluate(
    models: tuple[str, ...],
    table: Style,
    report: Path | None,
    data: str | None,
    plot: Path | None,
    **params: Any,
) -> None:
    """Measure models: perplexity, divergence, tasks, speed.

    Prints one table for all models, with the given NAMEs. Perplexity and divergence are always
    computed in float32 on the CPU; tasks and speed on --device. Under torchrun all processes share
    each model, on CPUs.
    """
    texts = params["texts"]
    against = params["against"]
    common_options = {name: params[name] for name in _SHARED}
    common_options["positions"] = [params["positions"], params["position_windows"]]
    tasks = []
    for task in params["tasks"].split(","):
        if task.strip():
            tasks.append(task.strip())
    params["tasks"] = tasks
    named_paths = list(models)
    if against:
        named_paths.append(against)
    folders = [path for _, path in parse_named_paths(named_paths)]
    # With tasks the job checks those first, and then the models.
    if not tasks:
        require_models(*folders)

    from quantkit.evals.evaluate import evaluate as job
    from quantkit.evals.plot import picture, require_drawable
    from quantkit.evals.report import build_sheet, build_tables, render_markdown
    from quantkit.evals.table import render

    # Perplexity and divergence are computed on the CPU, so processes communicate there.
    with join_group(common_options, "cpu") as group:
        outputs = Outputs(data, report=report, plot=plot, reads=texts)
        # There may be too little to draw, which must not be an error only after hours of work.
        is_single_model = against is None and len(models) == 1
        has_tasks_only = tasks and not texts
        if plot is not None and (is_single_model or has_tasks_only):
            require_drawable(folders)
        with ProgressDisplay(show=group.is_rank0) as progress:
            report_data = job(
                models, **params, details=outputs.wants_page, group=group, progress=progress
            )
        if group.is_rank0:

            def show() -> None:
                # Programs read CSV, so it is one sheet with all values.
                if table == "csv":
                    tables = [build_sheet(report_data)]
                else:
                    tables = build_tables(report_data)
                lines = render(tables, table, width=table_width())
                outputs.say(lines, wrap=False)
                for line in report_data.notes:
                    note(line)

            if outputs.wants_page:
                report_of = report_data.to_html
            else:
                report_of = partial(render_markdown, report_data)
            outputs.write(
                report_data.to_json(),
                report=report_of,
                picture=partial(picture, report_data),
                show=show,
            )


@options.accept_threads
@click.command(cls=Command)
@click.argument(
    "models", metavar="[[NAME=]PATH]...", nargs=-1, shell_complete=options.complete_named
)
@section(
    "Random weights",
    click.option(
        "--synthetic",
        metavar="SHAPE",
        help="Instead of PATH: random weights in a named shape, such as tinyllama-1.1b.",
    ),
    click.option(
        "--scheme",
        "quantized",
        type=options.Scheme(),
        multiple=True,
        help="Scheme of the random weights; repeatable. Default: unquantized.",
    ),
    click.option(
        "--head",
        type=options.Scheme(),
        metavar="SCHEME",
        help="Scheme of the random weights' output head. Default: int8.",
    ),
)
@section(
    _MEASURED,
    click.option(
        "--prompt-lengths",
        default="16,128,512",
        show_default=True,
        help="Prefill lengths, in tokens.",
    ),
    click.option(
        "--batch",
        "batches",
        default="1,4,8",
        show_default=True,
        help="Batch sizes for decoding.",
    ),
    click.option(
        "--contexts",
        help="Also decode at these context lengths, for each --batch, such as 1024,2048,4096.",
    ),
    click.option(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="Price of an hour of the machine, in any currency, for the cost of a thousand tokens.",
    ),
    click.option(
        "--runs",
        type=int,
        default=5,
        show_default=True,
        help="Runs of each measurement, after a warm-up run.",
    ),
)
@section(
    RUN, options.int8_cache, options.backend(), options.allow_slow, options.compiled, options.device
)
@section("Output", options.table, options.data, options.plot("decoding and prefill"))
def bench(
    models: tuple[str, ...],
    synthetic: str | None,
    quantized: tuple[str, ...],
    head: str | None,
    table: Style,
    data: str | None,
    plot: Path | None,
    threads: int | None,
    **params: Any,
) -> None:
    """Time models: prefill, decoding, loading, memory, cost.

    Prints one table for all models, with the given NAMEs; each model runs in a separate process.
    Under torchrun all processes share one model, and the figures are those of rank 0.
    """
    if bool(models) == (synthetic is not None):
        raise RequestError("expected either model folders or --synthetic SHAPE")
    if quantized and synthetic is None:
        raise RequestError(
            "--scheme requires --synthetic", hint="a model folder defines its own schemes"
        )
    if head is not None and not quantized:
        raise RequestError("--head requires --scheme")
    params["threads"] = threads
    for name in ("prompt_lengths", "batches", "contexts"):
        if params[name] is None:
            params[name] = ()
        else:
            params[name] = _parse_numbers(params[name])
    folders = [path for _, path in parse_named_paths(models)]
    require_models(*folders)

    from quantkit.evals import bench_report
    from quantkit.evals.bench import BenchModel
    from quantkit.evals.bench import bench as job
    from quantkit.evals.bench_report import picture
    from quantkit.evals.table import render

    # Without --scheme there is one model of random weights, with floats.
    random_models = []
    for scheme in quantized or (None,):
        random_models.append(BenchModel(shape=synthetic, scheme=scheme, head=head))
    with join_group(params, params["device"]) as group:
        outputs = Outputs(data, plot=plot)
        with ProgressDisplay(show=group.is_rank0) as progress:
            result = job(
                models if synthetic is None else random_models,
                **params,
                group=group,
                progress=progress,
            )
        if group.is_rank0:
            warnings = bench_report.list_warnings(result)
            notes = bench_report.list_notes(result)
            # An empty line separates the table from the notes below it.
            if (warnings or notes) and table == "terminal":
                below = [""]
            else:
                below = []
            if table == "csv":
                tables = [bench_report.build_sheet(result)]
            else:
                tables = bench_report.build_tables(result)

            def show() -> None:
                outputs.say([*render(tables, table, width=table_width()), *below], wrap=False)
                for line in warnings:
                    warn(line)
                for line in notes:
                    note(line)

            outputs.write(result.to_json(), picture=partial(picture, result), show=show)


def _parse_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas. Raises `RequestError` otherwise."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(
            "expected numbers separated by commas", found=format_value(text)
        ) from error
