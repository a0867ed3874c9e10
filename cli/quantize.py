"""``quantkit quantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.calibration.effort import ACTIVATION_MEMORY, MAX_LENGTH, SAMPLES, SEED
from quantkit.cli import options
from quantkit.cli.commands import finish
from quantkit.cli.files import Outputs
from quantkit.cli.help import Command
from quantkit.cli.output import note
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.tensors.scheme import SPELLINGS, QuantScheme

if TYPE_CHECKING:
    from quantkit.jobs.estimate import Estimate
    from quantkit.tensors.recipe import Recipe


@click.command(cls=Command)
@options.writing
@options.target("compressed-tensors", quantized=True)
@options.split_max_size
@click.option("--scheme", type=options.Scheme(), help=f"{SPELLINGS}; int4 with zero points: int4-g128-asym.")
@click.option(
    "--head", type=options.Scheme(), metavar="SCHEME", help="Of the output head too, which keeps its floats by default."
)
@click.option(
    "--embedding", type=options.Scheme(), metavar="int8",
    help="Of the embedding, a scale for each token; where the head is tied to it, of both.",
)  # fmt: skip
@click.option(
    "--target-bits", type=float, metavar="BITS",
    help="Instead of a scheme: choose each layer's for so many bits a weight of the linear layers, such as 4.5.",
)  # fmt: skip
@click.option(
    "--max-size", type=options.file_size, metavar="SIZE",
    help="The same for the files of weights together, such as 5GB.",
)  # fmt: skip
@click.option("--recipe", type=options.PATH, metavar="FILE", help="JSON with a default scheme and overrides.")
@click.option("--plan", type=options.PATH, hidden=True, help="The old name of --recipe.")
@click.option(
    "--method",
    type=click.Choice(["rtn", "gptq"]),
    help="Rounding or GPTQ; by default GPTQ for int4, rounding for int8.",
)
@click.option(
    "--calibration", shell_complete=options.complete_files,
    help="Text for GPTQ instead of the packaged one: a file, or a hub dataset owner/name:config:split.",
)  # fmt: skip
@click.option("--samples", type=int, help=f"Calibration samples; {SAMPLES} by default.")
@click.option("--length", type=int, help=f"Tokens in each; the model's context by default, {MAX_LENGTH} at most.")
@click.option("--seed", type=int, help=f"Of the samples' places in the text; {SEED} by default.")
@click.option("--thorough", is_flag=True, help="Slower GPTQ, closer to the source.")
@click.option(
    "--activation-memory",
    type=options.memory,
    metavar="AMOUNT",
    help=f"Calibration activations held in memory, {ACTIVATION_MEMORY / 1e9:g}GB by default; more go to DST's disk.",
)
@options.device
@click.option("--accept-quality-loss", is_flag=True, help="Keep a result that is too far from its source.")
@click.option(
    "--certify-positions", type=int, metavar="TOKENS",
    help="Also measure KL by position, to so many tokens of a context, with a float and an int8 cache.",
)  # fmt: skip
@click.option(
    "--certify-text", type=options.PATH, metavar="FILE",
    help="The text for that, UTF-8; some 5,000 tokens that come with quantkit by default.",
)  # fmt: skip
@click.option("--keep", multiple=True, metavar="PATTERN", help="Layers to keep as floats, a glob; repeatable.")
@click.option("--base-model", metavar="NAME", help="Of SRC on a hub, owner/name, for the model card.")
@click.option(
    "--license", metavar="ID", help="For the model card, as hubs spell it: apache-2.0, ...; SRC's by default."
)
@options.template
@click.option("--strict", is_flag=True, help="Fail if a layer's shape does not fit the scheme.")
def quantize(data: str | None, **given: Any) -> None:
    """Quantize a model's linear layers to int8 or int4.

    The model in SRC goes to the new folder DST, or to a file DST.gguf. It is held against SRC before it gets its name;
    one that is too far from it exits with 8. Under torchrun all processes share the calibration; the first one does
    the rounding.
    """
    reads = given["calibration"], given["recipe"], given["plan"], given["certify_text"]
    arguments = job_arguments(given)
    require_models(arguments["src"], makes=arguments["dst"])

    from quantkit.distributed.shard import require_same_checkpoint
    from quantkit.formats.detect import open_checkpoint
    from quantkit.jobs.quantize import quantize as job

    shared = arguments["method"] != "rtn" and (arguments["method"] == "gptq" or _has_int4(arguments["scheme"]))
    device = None if shared and arguments["device"] != "cpu" else "cpu"
    with together({**arguments, "src": None}, device) as group:
        outputs = Outputs(data, reads=reads, makes=arguments["dst"])
        if shared and group.size > 1:
            require_same_checkpoint(open_checkpoint(arguments["src"], arguments["weights"]), group)
        if shared or group.is_rank0:
            with ProgressDisplay(show=group.is_rank0) as progress:
                made = job(**arguments, group=group, on_estimate=_tell, progress=progress)
    if group.is_rank0:
        finish(made, outputs)


def _has_int4(scheme: QuantScheme | Recipe | None) -> bool:
    """Whether some layer may get int4, which GPTQ solves unless another method is named; schemes that are chosen for
    a size may be int4."""
    if scheme is None:
        return True
    asked = [scheme] if isinstance(scheme, QuantScheme) else [scheme.default, *(one.scheme for one in scheme.overrides)]
    return any(one is not None and one.bits == 4 for one in asked)


def _tell(estimate: Estimate) -> None:
    note(estimate.line())


def job_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What the command's options are called in `quantkit.quantize`.

    Raises:
        RequestError: unless either a scheme or a recipe is given, or if a head goes with a recipe.
    """
    from quantkit.tensors.recipe import Recipe

    scheme, path, head, old = (given.pop(name) for name in ("scheme", "recipe", "head", "plan"))
    if old is not None:
        note("--plan is called --recipe now; the old name goes with the next release")
        if path is not None:
            raise RequestError("--plan is the old name of --recipe; give one of them")
        path = old
    sized = [f"--{name.replace('_', '-')}" for name in ("target_bits", "max_size") if given[name] is not None]
    if scheme is None and path is None and not sized:
        raise RequestError(f"give a scheme: --scheme {SPELLINGS}; or --target-bits, --max-size or --recipe FILE")
    chosen = [*(["--scheme"] if scheme is not None else []), *(["--recipe"] if path is not None else []), *sized]
    if len(chosen) > 1:
        hint = "a size chooses the schemes" if sized else "a recipe's default is its scheme"
        raise RequestError(f"{' and '.join(chosen)} exclude each other", hint=hint)
    if path is not None:
        if head is not None:
            raise RequestError("--head does not go with --recipe", hint="a recipe names lm_head among its overrides")
        return {**given, "scheme": Recipe.from_json(path)}
    return {**given, "scheme": None if scheme is None else QuantScheme.parse(scheme), "head": head}
