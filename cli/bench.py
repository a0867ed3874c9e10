"""The command that times models."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.processes import together
from quantkit.cli.progress import bar
from quantkit.errors import RequestError
from quantkit.json_values import shown

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("paths", type=_PATH, nargs=-1)
@click.option("--synthetic", metavar="SHAPE", help="Random weights of a named shape instead, such as tinyllama-1.1b.")
@click.option("--scheme", "quantized", multiple=True, help="Of the random weights; repeatable; floats without.")
@click.option("--head", metavar="SCHEME", help="Of the random weights' output head; int8 by default.")
@click.option("--prompt-lengths", default="16,128,512", show_default=True, help="Tokens of prefill.")
@click.option("--batch", "batches", default="1,4,8", show_default=True, help="Sequences decoded at once.")
@click.option("--threads", type=int, help="That compute; torch's own number by default.")
@click.option("--runs", type=int, default=5, show_default=True, help="Of each measurement, after one to warm up.")
@click.option("--backend", help="Of quantized layers: cpu-exact, cpu-fast, triton or reference.")
@click.option("--compile/--eager", "compiled", default=None, help="Through torch.compile; by default on GPUs only.")
@click.option("--device", help="Where models run: cpu or cuda; a GPU if there is one.")
@click.option("--json", "data", type=_PATH, help="Write all figures, in JSON.")
@click.option("--plot", type=_PATH, help="Draw decoding and prefill, as PNG.")
def bench(
    paths: tuple[Path, ...], synthetic: str | None, quantized: tuple[str, ...], head: str | None, prompt_lengths: str,
    batches: str, threads: int | None, runs: int, backend: str | None, compiled: bool | None, device: str | None,
    data: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Time the models in PATHS: prefill, decoding, loading, memory.

    Under torchrun all processes share one model; the figures are the first process's.
    """
    from quantkit.evals.bench import Job, slower_than_floats
    from quantkit.evals.bench import bench as job
    from quantkit.evals.bench_report import require_outputs, table, write

    if bool(paths) == (synthetic is not None):
        raise RequestError("give folders, or --synthetic and a shape")
    if quantized and synthetic is None:
        raise RequestError("--scheme goes with --synthetic", hint="a folder has schemes of its own")
    if head is not None and not quantized:
        raise RequestError("--head goes with --scheme")
    rest = (_numbers(prompt_lengths), _numbers(batches), threads, runs, backend, compiled, device)
    jobs = [Job(path, None, None, None, *rest) for path in paths]
    if synthetic is not None:
        jobs = [Job(None, synthetic, scheme, head, *rest) for scheme in quantized or (None,)]
    with together({"measures": rest}, device) as group, bar("bench", unit="model", show=group.first) as progress:
        require_outputs(data, plot)
        found = job(jobs, group=group, progress=progress)
        if group.first:
            click.echo("\n".join(table(found)))
            for line in slower_than_floats(found):
                click.echo(f"quantkit: warning: {line}", err=True)
            write(found, data, plot)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError("expected numbers separated by commas", found=shown(text)) from error
