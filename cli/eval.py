"""The command that measures models."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.processes import together
from quantkit.cli.progress import bar

_PATH = click.Path(path_type=Path)


@click.command("eval")
@click.argument("paths", type=_PATH, nargs=-1, required=True)
@click.option("--text", "texts", type=_PATH, multiple=True, help="Text to measure on, UTF-8; repeatable.")
@click.option("--tasks", default="", help="Tasks of lm-evaluation-harness, separated by commas.")
@click.option("--task-data", type=_PATH, help="Folder with data of tasks: TASK.jsonl, .json, .parquet or .txt.")
@click.option("--against", type=_PATH, help="The model that the others are held against.")
@click.option("--window", type=int, help="Tokens in a window; see docs/evals.md for the defaults.")
@click.option("--cache-logits", type=_PATH, help="Folder that keeps what the reference's logits follow from.")
@click.option("--speed", is_flag=True, help="Measure decoding as well.")
@click.option("--report", type=_PATH, help="Write the report, in Markdown.")
@click.option("--json", "data", type=_PATH, help="Write all figures, in JSON.")
@click.option("--plot", type=_PATH, help="Draw perplexity by bits per weight, and the worst layers, as PNG.")
def evaluate(
    paths: tuple[Path, ...], texts: tuple[Path, ...], tasks: str, task_data: Path | None, against: Path | None,
    window: int | None, cache_logits: Path | None, speed: bool, report: Path | None, data: Path | None,
    plot: Path | None,
) -> None:  # fmt: skip
    """Measure the models in PATHS side by side: perplexity, distance from a reference, tasks, speed.

    Under torchrun all processes share each model.
    """
    from quantkit.evals.evaluate import evaluate as job
    from quantkit.evals.outputs import Outputs
    from quantkit.evals.report import tables

    measures = {"tasks": tasks, "window": window, "speed": speed}
    with together(measures, "cpu") as group, bar("eval", unit="step", show=group.first) as progress:
        outputs = Outputs(report, data, plot)
        found = job(
            paths, texts=texts, tasks=[name.strip() for name in tasks.split(",") if name.strip()], task_data=task_data,
            against=against, window=window, cache_logits=cache_logits, speed=speed, group=group, progress=progress,
        )  # fmt: skip
        if group.first:
            click.echo("\n".join([*tables(found), *found.notes]))
            outputs.write(found)
