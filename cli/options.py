"""Options that several commands share, spelled and told alike, and old spellings that still work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantkit.cli.help import SAMPLING_NAMES, Command
from quantkit.cli.output import note
from quantkit.errors import RequestError
from quantkit.json_values import shown
from quantkit.kernels.registry import BACKENDS
from quantkit.runtime.sampling_params import OPTIONS as SAMPLING_OPTIONS
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.dtypes import FLOAT_NAMES, SHORT_NAMES
from quantkit.tensors.scheme import SCHEMES, QuantScheme

Function = Callable[..., Any]
PATH = click.Path(path_type=Path)
TARGETS = ("compressed-tensors", "int-quantized", "gptq", "awq", "mlx", "gguf", "hf", "meta")


class Scheme(click.types.StringParamType):
    """The name of a scheme, told to be none before anything large is imported."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(QuantScheme.parse(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in SCHEMES if name.startswith(incomplete)]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion of what is a file, or something else besides."""
    return [CompletionItem(incomplete, type="file")]


def complete_named(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion of ``NAME=PATH``; bash takes such a word apart itself."""
    name, equals, start = incomplete.partition("=")
    if not equals:
        return complete_files(ctx, param, incomplete)
    folder, last = os.path.split(start)
    try:
        found = sorted(Path(folder).iterdir())
    except OSError:
        return []
    return [CompletionItem(f"{name}={path}") for path in found if path.name.startswith(last)]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+) *(?P<unit>[KMGT]I?)?(?P<bytes>B)?", re.ASCII | re.IGNORECASE)


def memory(text: str) -> int:
    """The type of options that are amounts of memory: ``4GB``, ``512MB``, ``2GiB``; in bytes.

    Raises:
        RequestError: for anything else.
    """
    if _AMOUNT.fullmatch(text.strip()) and text.strip()[-1] in "0123456789.":
        note(f"amounts of memory have units now: {text.strip()}GB; without one it goes with the next release")
        text += "G"
    return _bytes(text, "amount of memory")


def file_size(text: str) -> int:
    """The type of options that are sizes of files, in the same spellings, or a number of bytes.

    Raises:
        RequestError: for anything else.
    """
    return _bytes(f"{text.strip()}B" if text.strip().isdecimal() else text, "size of a file")


def _bytes(text: str, what: str) -> int:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not (found["unit"] or found["bytes"]):
        raise RequestError(f"no {what}", found=shown(text), expected="one such as 4GB, 512MB or 2GiB")
    return int(float(found["number"]) * _UNITS[(found["unit"] or "").upper()])


src = click.argument("src", type=PATH)
dst = click.argument("dst", type=PATH)
weights = click.option(
    "--weights", type=click.Choice(["meta", "safetensors", "bin", "gguf", "gpt-fast", "gpt-fast-int8"]), metavar="KIND",
    help="Which weights to read where a folder holds several: meta, safetensors, bin, gguf or gpt-fast.",
)  # fmt: skip
device = click.option("--device", metavar="DEVICE", help="Where to compute: cpu or cuda; a GPU if there is one.")
dtype = click.option(
    "--dtype", type=click.Choice(list(FLOAT_NAMES)), metavar=f"[{'|'.join(SHORT_NAMES)}]",
    help="Float type; the model's own by default.",
)  # fmt: skip
compiled = click.option(
    "--compile/--eager", "compiled", default=None, help="Through torch.compile or not; by default on GPUs only."
)
int8_cache = click.option(
    "--int8-cache", is_flag=True, help="Keep keys and values in 8 bits; see docs/kernels.md for the cost."
)
template = click.option(
    "--template", metavar="NAME", shell_complete=complete_files,
    help="Chat template to write: llama2, llama3 or a file *.jinja; SRC's own by default.",
)  # fmt: skip
split_max_size = click.option(
    "--split-max-size", type=file_size, metavar="AMOUNT",
    help="Largest file of weights, such as 2GB; 2GiB by default, and one file in GGUF.",
)  # fmt: skip
data = click.option(
    "--json", "data", metavar="PATH", shell_complete=complete_files,
    help="Write everything found as JSON; - is stdout.",
)  # fmt: skip
report = click.option("--report", type=PATH, help="Write the report: Markdown, or a page as .html.")
table = click.option(
    "--table", type=click.Choice(["terminal", "markdown", "latex", "csv"]), default="terminal", show_default=True,
    help="How tables are printed.",
)  # fmt: skip

tensors_only = click.option(
    "--tensors-only", is_flag=True, help="Take the tensors as they are, of whatever architecture."
)
_RESUME = click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
_NONFINITE = click.option("--allow-nonfinite", is_flag=True, help="Write NaN, Inf and overflowing floats as they are.")
_SOURCE_CHECK = click.option(
    "--source-check/--no-source-check", default=True,
    help="Whether to see first that SRC predicts a text at all; by default, where it has a tokenizer.",
)  # fmt: skip

_SAMPLING = (
    *(
        click.option(f"--{option.name.replace('_', '-')}", type=option.type, help=option.help)
        for option in SAMPLING_OPTIONS if option.type is not None
    ),
    click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; may be given several times."),
)  # fmt: skip


def target(default: str, *, quantized: bool = False) -> Callable[[Function], Function]:
    """The option for what a model is written as.

    Args:
        default: in words.
        quantized: whether it goes for quantized models only.
    """
    names = [name for name in TARGETS if not quantized or name not in ("hf", "meta")]
    about = f"{', '.join(names)}; by default {default}, and gguf where DST ends in .gguf."
    return click.option("--to", type=click.Choice(names), metavar="FORMAT", help=about)


def writing(command: Function) -> Function:
    """The arguments and options that all commands which write a checkpoint have."""
    for option in (data, _SOURCE_CHECK, _NONFINITE, _RESUME, tensors_only, weights, dst, src):
        command = option(command)
    return command


def sampling(max_new_tokens: int | None, about: str = "") -> Callable[[Function], Function]:
    """The options that say how tokens are drawn and what ends them; None where nothing is said.

    Args:
        max_new_tokens: by default.
        about: for the help of that option.
    """
    most = click.option(
        "--max-new-tokens", type=int, default=max_new_tokens, show_default=max_new_tokens is not None,
        help=f"Tokens to generate at most{about}.",
    )  # fmt: skip

    def decorated(command: Function) -> Function:
        for option in reversed((most, *_SAMPLING)):
            command = option(command)
        return command

    return decorated


def split_sampling(given: Mapping[str, Any]) -> tuple[SamplingOptions, dict[str, Any]]:
    """The sampling options among the arguments of a command with `sampling`, not checked yet; and the other ones."""
    requested: Any = {name: given[name] for name in SAMPLING_NAMES if given[name] is not None}
    options: SamplingOptions = requested
    return options, {name: value for name, value in given.items() if name not in SAMPLING_NAMES}


def requested_sampling(given: Mapping[str, Any]) -> SamplingOptions:
    """The sampling options among the arguments of a command with `sampling`; checked, without torch.

    Raises:
        RequestError: for a value out of its range.
    """
    requested, _ = split_sampling(given)
    SamplingParams(**requested)
    return requested


def token_bias(text: str) -> tuple[int, float]:
    """The type of options that add to the logits of a token: ``1234=-100``.

    Raises:
        RequestError: for anything else.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError("no bias of a token", found=shown(text), expected="ID=NUMBER, such as 1234=-100") from None


def backend(*others: str, more: str = "") -> Callable[[Function], Function]:
    """The option for kernels.

    Args:
        others: what it may be besides.
        more: for its help.
    """
    about = f"Kernels of quantized layers: {', '.join(BACKENDS)}; see docs/kernels.md."
    return click.option("--backend", type=click.Choice([*BACKENDS, *others]), metavar="NAME", help=about + more)


def plot(what: str) -> Callable[[Function], Function]:
    """The option for a picture of something."""
    return click.option("--plot", type=PATH, help=f"Draw {what}: a .png, .pdf or .svg file.")


class BareJson(Command):
    """Takes ``--json`` without a path for ``--json -``, as it was spelled once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--json") if "--json" in args else None
        if place is None:
            return super().parse_args(ctx, args)
        follows = args[place + 1 : place + 2]
        if follows and (follows == ["-"] or not follows[0].startswith("-")):
            try:
                return super().parse_args(ctx, list(args))
            except click.MissingParameter:  # its path was taken for that of --json
                ctx.params.clear()
        note("--json takes a path now, and - for stdout; without one it goes with the next release")
        return super().parse_args(ctx, [*args[:place], "--json=-", *args[place + 1 :]])
