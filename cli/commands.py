"""The commands that describe, check and write models: parse, call one job, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.hints import spell, spell_option
from quantkit.cli.options import BROKEN, Command, exit_codes, section
from quantkit.cli.output import mention, note, table_width
from quantkit.cli.processes import join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.doctor.findings import RUNTIMES
from quantkit.errors import RequestError
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.quantize.options import OUTPUT, SCHEMES, QuantizeOptions
from quantkit.tensors.mix import find_mix
from quantkit.tensors.scheme import SPELLINGS, QuantScheme

if TYPE_CHECKING:
    from quantkit.formats.detect import WeightKind
    from quantkit.jobs.output.estimate import Estimate
    from quantkit.jobs.output.result import ConvertResult, QuantizeResult
    from quantkit.tensors.recipe import Recipe


@click.command(cls=Command)
@click.option("--output", type=options.PATH, help="Keep the models in this new folder.")
@click.option("--quick", is_flag=True, help="Try one scheme only.")
@options.data
def demo(output: Path | None, quick: bool, data: str | None, threads: int | None) -> None:
    """Try everything on a small model that ships with quantkit.

    Converts and quantizes it, verifies and measures the results, and generates text with them. By
    default one thread computes, instead of one for each core: more are slower with so small a
    model.
    """
    from quantkit.kernels.library import compile_ahead

    # An installation from source has no compiled kernels. Compilation runs in a thread while the
    # demo imports torch and converts, so it takes less time.
    compile_ahead()
    from quantkit.evals.demo import run_demo

    outputs = Outputs(data, makes=output)
    with ProgressDisplay() as progress:
        report = run_demo(output, quick=quick, threads=threads or 1, progress=progress)
    lines = [*report.lines(table_width()), "", *_next_steps(output, report.rows[-1].name)]
    outputs.write(report.to_json(), show=lambda: outputs.say(lines))


def _next_steps(output: Path | None, quantized: str) -> list[str]:
    """List commands to try after the demo, with the paths of its models."""
    if output is None:
        folder = Path("demo")
    else:
        folder = output
    floats = shlex.quote(str(folder / "bf16"))
    last = shlex.quote(str(folder / quantized))
    commands = []
    # Without --output the demo keeps no models. This command creates those that the others name.
    if output is None:
        commands.append("quantkit demo --output demo  # keeps these models")
    commands += [
        f'quantkit generate {last} "The people"',
        f"quantkit chat {last} --template llama2  # a base model: it continues your text",
        f"quantkit eval {last} --against {floats} --window 256",
        f"quantkit bench {floats} {last}",
        "quantkit quantize YOUR_MODEL NEW_FOLDER --scheme int4-g128",
    ]
    lines = ["To try next:"]
    for command in commands:
        lines.append(f"  {command}")
    return lines


@click.command(cls=options.Command)
@click.argument("path", type=options.PATH)
@options.weights
@options.tensors_only
@options.data
def inspect(path: Path, weights: WeightKind | None, tensors_only: bool, data: str | None) -> None:
    """Describe the model in PATH, from headers alone."""
    from quantkit.jobs.inspect import inspect as job

    report_result(Outputs(data), job(path, weights=weights, tensors_only=tensors_only))


@click.command(cls=Command, epilog=exit_codes(0, BROKEN))
@click.argument("path", type=click.Path())
@click.option(
    "--for", "runtime", type=click.Choice(RUNTIMES), help="Also check what this runtime requires."
)
@click.option(
    "--tp",
    type=int,
    default=1,
    show_default=True,
    help="Degree of tensor parallelism to check for.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also read the weights, and run the model on a sample text if it is small.",
)
@click.option(
    "--against", type=click.Path(), metavar="SRC", help="Compare each linear with its float source."
)
@options.data
def doctor(data: str | None, **params: Any) -> None:
    """Check what is wrong with a model, whoever made it.

    PATH is a folder, or a file of weights. Without --deep and --against only headers are read.
    """
    from quantkit.doctor.diagnose import diagnose

    outputs = Outputs(data)
    with ProgressDisplay() as progress:
        diagnosis = diagnose(**params, progress=progress)

    def show() -> None:
        outputs.say(diagnosis.lines(table_width(), spell_option))

    outputs.write(diagnosis.to_json(), show=show)
    if diagnosis.is_broken:
        sys.exit(BROKEN)


@click.command(cls=Command, epilog=exit_codes(0, 3, 8, 10, 11))
@click.argument("a", type=options.PATH)
@click.argument("b", type=options.PATH, required=False)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 10, not 0, if the two are within the bound but not equal.",
)
@options.trust_remote_code
@options.data
def verify(
    a: Path, b: Path | None, strict: bool, trust_remote_code: bool, data: str | None
) -> None:
    """Check if two models are the same, or how far apart.

    With A alone, its files are compared with the sha256 in its manifest, and the perplexities of a
    quantized model, measured again, with those in the manifest.
    """
    if strict and b is None:
        raise RequestError("--strict requires two models")
    require_models(a, b)
    outputs = Outputs(data)

    from quantkit.quality.verify import VerifyReport
    from quantkit.quality.verify import verify as job

    with ProgressDisplay() as progress:
        settings: Any = {"trust_remote_code": trust_remote_code, "progress": progress}
        if b is None:
            report = job(a, **settings)
        else:
            report = job(a, b, **settings)
    report_result(outputs, report)
    if isinstance(report, VerifyReport) and (strict or not report.ok):
        sys.exit(report.verdict.value)


@click.command(cls=Command)
@options.src
@click.argument("dst", type=options.PATH)
@options.create_job_options(
    QuantizeOptions, only=("calibration", "text_column", "samples", "length", "seed")
)
@options.data
def imatrix(src: str, dst: Path, data: str | None, **params: Any) -> None:
    """Measure the importance of inputs for llama.cpp.

    DST is a new file for its quantizer, or for `quantkit quantize --imatrix`: GGUF if its name ends
    in .gguf, the older form if it ends in .dat.
    """
    outputs = Outputs(data)

    from quantkit.jobs.quantize.imatrix import imatrix as job

    # Options that are not on the command line get the job's own defaults.
    requested = {name: value for name, value in params.items() if value is not None}
    with ProgressDisplay() as progress:
        result = job(src, dst, **requested, progress=progress)
    report_result(outputs, result)


@click.command(cls=Command, epilog=exit_codes(0, 2, 3))
@click.argument("path", type=options.PATH)
@click.argument("name")
@click.option("--public", is_flag=True, help="Create a public repository. Default: a private one.")
@click.option(
    "--base-model",
    metavar="NAME",
    help="For the model card: name of the source on the hub, owner/name.",
)
@click.option(
    "--license",
    metavar="NAME",
    help="For the model card: licence as hubs name it, such as apache-2.0.",
)
@click.option(
    "--revision", metavar="BRANCH", help="Branch to commit to; created if it is not there."
)
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option(
    "--delete-others",
    is_flag=True,
    help="Delete all other files of the repository in the same commit.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check the model and list what would be sent; send nothing."
)
@options.data
def push(data: str | None, **params: Any) -> None:
    """Send a model to a repository on the Hugging Face hub.

    PATH is a folder or a GGUF file, NAME is owner/name. The model is checked first, as by doctor
    and with its manifest, and nothing is sent if an error is found. All files appear with one
    commit, and are compared with it. If it is interrupted, the same command continues. Log in
    before: hf auth login.
    """
    from quantkit.jobs.push.push import push as job

    outputs = Outputs(data)
    with ProgressDisplay() as progress:
        result = job(**params, on_steps=progress.expect, progress=progress)
    report_result(outputs, result)


_CONVERT = {
    "to": options.target("hf for floats, SRC's own format for quantized models"),
    "mp": click.option(
        "--mp", type=int, default=1, show_default=True, help="Number of Meta model-parallel shards."
    ),
}


@click.command(cls=Command)
@options.src
@options.dst
@options.create_job_options(ConvertOptions, _CONVERT)
@section("Output", options.data)
def convert(data: str | None, **params: Any) -> None:
    """Write a model in another format, sharding or float type.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. Without --requantize
    and --dequantize, the codes of a quantized model stay exactly the same, or the conversion fails.
    The result is read back and compared with SRC. Under torchrun, rank 0 does the work.
    """
    require_models(params["src"], makes=params["dst"])

    from quantkit.jobs.convert.convert import convert as job

    with join_group(device="cpu") as group:
        outputs = Outputs(data, makes=params["dst"])
        if not group.is_rank0:
            return
        with ProgressDisplay() as progress:
            result = job(
                **params,
                on_estimate=lambda estimate: progress.expect(estimate.steps),
                progress=progress,
            )
    _report_written(outputs, result)


@click.command(cls=Command)
@options.src
@options.dst
@options.create_job_options(QuantizeOptions)
@section(
    SCHEMES,
    click.option(
        "--recipe",
        type=options.PATH,
        metavar="FILE",
        help="JSON with a default scheme and overrides.",
    ),
)
@section(OUTPUT, options.data)
def quantize(data: str | None, **params: Any) -> None:
    """Quantize a model's linear layers to int8 or int4.

    The model in SRC is written to the new folder DST, or to a file DST.gguf. The result is compared
    with SRC before DST appears. If it differs too much, DST is not written and the exit code is 8.
    Under torchrun all processes share the calibration, and rank 0 does the rounding.
    """
    # `build_job_arguments` removes some of these options from `params`.
    reads = list_input_files(params)
    arguments = build_job_arguments(params)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.distributed.shard import require_same_checkpoint
    from quantkit.formats.detect import open_checkpoint
    from quantkit.jobs.quantize.quantize import quantize as job

    # GPTQ alone needs a calibration, whose samples the processes divide among them. Without it
    # rank 0 does all the work, on the CPU.
    shared = arguments["method"] != "rtn" and (
        arguments["method"] == "gptq" or _has_int4(arguments["scheme"])
    )
    if shared and arguments["device"] != "cpu":
        device = None
    else:
        device = "cpu"
    with join_group({**arguments, "src": None}, device) as group:
        outputs = Outputs(data, reads=reads, makes=arguments["dst"])
        if shared and group.size > 1:
            require_same_checkpoint(open_checkpoint(arguments["src"], arguments["weights"]), group)
        if shared or group.is_rank0:
            with ProgressDisplay(show=group.is_rank0) as progress:

                def begin(estimate: Estimate) -> None:
                    note(estimate.line())
                    progress.expect(estimate.steps)

                result = job(
                    **arguments, group=group, on_estimate=begin, on_note=note, progress=progress
                )
    if group.is_rank0:
        _report_written(outputs, result)


def list_input_files(params: dict[str, Any]) -> list[Any]:
    """List the files that `quantkit quantize` reads in addition to the model; None for options
    that are not given.
    """
    return [params[name] for name in ("calibration", "recipe", "certify_text")]


def _has_int4(scheme: str | QuantScheme | Recipe | None) -> bool:
    """Return whether a layer may get int4, which GPTQ solves unless another method is requested."""
    # The job chooses the schemes for a size, and of a mix, itself. Both may be int4.
    if scheme is None or isinstance(scheme, str):
        return True
    if isinstance(scheme, QuantScheme):
        return scheme.bits == 4
    schemes: list[QuantScheme | None] = [scheme.default]
    for override in scheme.overrides:
        schemes.append(override.scheme)
    # None keeps a layer's floats.
    return any(candidate is not None and candidate.bits == 4 for candidate in schemes)


def build_job_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of the command to arguments of `quantkit.quantize`. Raises
    `RequestError` unless there is one of a scheme, a recipe and a size, or if a head goes with a
    recipe.
    """
    from quantkit.tensors.recipe import Recipe

    path = params.pop("recipe")
    sources = {
        "--scheme": params["scheme"],
        "--recipe": path,
        "--target-bits": params["target_bits"],
        "--max-size": params["max_size"],
    }
    chosen = [name for name, value in sources.items() if value is not None]
    if not chosen:
        raise RequestError(
            f"no scheme is given: use --scheme {SPELLINGS}, --target-bits, --max-size or"
            " --recipe FILE"
        )
    if len(chosen) > 1:
        has_size = params["target_bits"] is not None or params["max_size"] is not None
        if has_size:
            hint = "a size chooses the schemes"
        else:
            hint = "a recipe has its own default scheme"
        raise RequestError(f"{' and '.join(chosen)} are mutually exclusive", hint=hint)
    if path is None:
        scheme = params["scheme"]
        # The job takes the name of a mix, which is not the name of one scheme.
        if scheme is not None and not find_mix(scheme):
            scheme = QuantScheme.parse(scheme)
        return {**params, "scheme": scheme}
    if params["head"] is not None:
        raise RequestError(
            "--head cannot be combined with --recipe",
            hint="add an override for lm_head to the recipe",
        )
    return {**params, "scheme": Recipe.from_json(path)}


def report_result(outputs: Outputs, result: Any) -> None:
    """Write a job's result as JSON if that was requested, and print its lines."""
    outputs.write(result.to_json(), show=lambda: outputs.say(result.lines()))


def _report_written(outputs: Outputs, result: ConvertResult | QuantizeResult) -> None:
    """Report what a command has written, with the notes on it."""
    for line in result.notes:
        note(line)
    for line in result.lines():
        mention(spell(line), err=outputs.json_on_stdout)
    outputs.write(result.to_json())
