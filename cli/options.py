"""Options that several commands share, with the same spelling and help, old spellings that still
work, and how help pages look: options in sections, exit codes at the end.

click's own formatter writes the sections; it cannot state which option belongs to which.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem, get_completion_class

from quantkit import errors
from quantkit.base.json_values import format_value
from quantkit.base.option_fields import OTHER, IfExists, OptionInfo, find_option_fields
from quantkit.base.processors import set_threads, validate_threads
from quantkit.cli.hints import set_command, spell
from quantkit.cli.output import note
from quantkit.errors import RequestError
from quantkit.formats.registry import targets
from quantkit.kernels import BACKENDS
from quantkit.runtime.request import DRAFT_TOKENS, MAX_DRAFT_TOKENS
from quantkit.runtime.sampling_params import OPTIONS as SAMPLING_OPTIONS
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.dtypes import FLOAT_NAMES, SHORT_NAMES
from quantkit.tensors.mix import MIXES, mix_named
from quantkit.tensors.scheme import FLOAT_SCHEMES, SCHEMES, QuantScheme
from quantkit.via_transformers import VIAS

COMPLETION = "_QUANTKIT_COMPLETE"
"""The environment variable with which a shell requests completions."""

SHELLS = ("bash", "zsh", "fish")

BROKEN = 12
"""The exit code of `quantkit doctor` if something would break."""

EXIT_CODES: dict[int, str] = {
    0: "success",
    errors.QuantkitError.exit_code: "a bug in quantkit",
    errors.RequestError.exit_code: "an invalid request",
    errors.CheckpointError.exit_code: "the source is damaged or incomplete",
    errors.UnsupportedError.exit_code: "the source is of a kind that is not supported",
    errors.DestinationError.exit_code: "the destination cannot be written",
    errors.ResumeError.exit_code: "an interrupted or running job uses the destination",
    errors.NonFiniteError.exit_code: "weights or logits are NaN or Inf",
    errors.QualityError.exit_code: "the result is too far from its source",
    errors.GroupError.exit_code: "processes of one job differ, or one is lost",
    10: "verify --strict: within the bound of the scheme, not equal",
    11: "verify: different",
    BROKEN: "doctor: the model would break",
    130: "Ctrl-C",
    143: "SIGTERM",
}

RUN = "How it runs"
_HYPHEN = "\N{NON-BREAKING HYPHEN}"

Decorator = Callable[[Any], Any]
"""Adds options to a command."""
_sections: dict[click.Parameter, str] = {}


def in_order(*options: Decorator) -> Decorator:
    """Several options as one, the first of them first in the help."""
    return lambda command: functools.reduce(
        lambda made, option: option(made), reversed(options), command
    )


def section(title: str, *options: Decorator) -> Decorator:
    """Options that stand together in the help, under a title."""

    def decorate(command: Any) -> Any:
        before = len(getattr(command, "__click_params__", ()))
        command = in_order(*options)(command)
        _sections.update(dict.fromkeys(command.__click_params__[before:], title))
        return command

    return decorate


class _Formatter(click.HelpFormatter):
    """Breaks lines between words only, and not at hyphens: while text is wrapped, these are of the
    kind that does not break.
    """

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        super().write_dl(
            [(name, about.replace("-", _HYPHEN)) for name, about in rows], col_max, col_spacing
        )

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class Context(click.Context):
    """A context whose help is wrapped between words."""

    formatter_class = _Formatter

    def __init__(self, command: click.Command, *arguments: Any, **settings: Any) -> None:
        super().__init__(command, *arguments, **settings)
        set_command(command)


class Command(click.Command):
    """A command whose help shows options in sections; those without a title stand at the end."""

    context_class = Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(_sections.get(parameter, OTHER), []).append(record)
        # --help is one of them.
        others = groups.pop(OTHER)
        groups[OTHER if groups else "Options"] = others
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def exit_codes(*codes: int) -> str:
    """Return the end of a help page: the meaning of these exit codes, or of all if none are
    given.
    """
    chosen = codes or EXIT_CODES
    return "\n".join(
        ["\b", "Exit codes:", *(f"  {code:>3}  {EXIT_CODES[code]}" for code in chosen)]
    )


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes quantkit in a shell.

    \b
    bash: eval "$(quantkit completion bash)" in ~/.bashrc
    zsh:  eval "$(quantkit completion zsh)" in ~/.zshrc
    fish: quantkit completion fish > ~/.config/fish/completions/quantkit.fish
    """
    root = context.find_root().command
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # `SHELLS` are click's own
    click.echo(completion_class(root, {}, "quantkit", COMPLETION).source())


class _Path(click.Path):
    """A path; an empty string, such as a variable that is not set, would mean the current
    folder.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            if param is None or ctx is None:
                what = "an argument"
            else:
                what = param.get_error_hint(ctx)
            raise RequestError(f"{what} is empty", expected="a path")
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


class Scheme(click.types.StringParamType):
    """The name of a scheme, checked before anything large is imported."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and param.name == "scheme":
            mix = mix_named(value)
        else:
            mix = None
        if mix is None:
            return str(QuantScheme.parse(value))
        return mix.name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        result: list[CompletionItem] = []
        for name in (*SCHEMES, *FLOAT_SCHEMES, *MIXES):
            if name.startswith(incomplete):
                result.append(CompletionItem(name))
        return result


class Formats(click.Choice[str]):
    """One format, or several with commas between them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = []
        for name in value.split(","):
            names.append(super().convert(name.strip(), param, ctx))
        if len(names) == 1:
            return names[0]
        return names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        result: list[CompletionItem] = []
        for name in self.choices:
            if name.startswith(last):
                result.append(CompletionItem(f"{before}{comma}{name}"))
        return result


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete what may be a file."""
    return [CompletionItem(incomplete, type="file")]


def complete_named(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete ``NAME=PATH``; bash splits such a word itself."""
    name, equals, start = incomplete.partition("=")
    if not equals:
        return complete_files(ctx, param, incomplete)
    folder, last = os.path.split(start)
    try:
        paths = sorted(Path(folder).iterdir())
    except OSError:
        return []
    result: list[CompletionItem] = []
    for path in paths:
        if path.name.startswith(last):
            result.append(CompletionItem(f"{name}={path}"))
    return result


_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_AMOUNT = re.compile(
    r"(?P<number>\d+(\.\d*)?|\.\d+) *(?P<unit>[KMGT]I?)?(?P<bytes>B)?", re.ASCII | re.IGNORECASE
)


def memory(text: str) -> int:
    """Parse an amount of memory, such as ``4GB``, ``512MB``, ``2GiB``, to bytes.

    Raises `RequestError` otherwise.
    """
    if _AMOUNT.fullmatch(text.strip()) and text.strip()[-1] in "0123456789.":
        note(
            f"amounts of memory have units now: {text.strip()}GB; without one it goes with the next"
            " release"
        )
        text += "G"
    return _parse_bytes(text, "amount of memory")


def file_size(text: str) -> int:
    """Parse the size of a file: as `memory` does, or a number of bytes.

    Raises `RequestError` otherwise.
    """
    return _parse_bytes(f"{text.strip()}B" if text.strip().isdecimal() else text, "size of a file")


def _parse_bytes(text: str, quantity: str) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (match["unit"] or match["bytes"]):
        raise RequestError(
            f"no {quantity}", found=format_value(text), expected="one such as 4GB, 512MB or 2GiB"
        )
    return int(float(match["number"]) * _UNITS[(match["unit"] or "").upper()])


src = click.argument("src", type=PATH)
dst = click.argument("dst", type=PATH)
weights = click.option(
    "--weights",
    type=click.Choice(["meta", "safetensors", "bin", "gguf", "gpt-fast", "gpt-fast-int8"]),
    metavar="KIND",
    help=(
        "Which weights to read if a folder has several: meta, safetensors, bin, gguf, gpt-fast,"
        " gpt-fast-int8."
    ),
)
device = click.option(
    "--device",
    metavar="DEVICE",
    help="Where to compute: cpu or cuda. Default: a GPU if there is one.",
)
dtype = click.option(
    "--dtype",
    type=click.Choice(list(FLOAT_NAMES)),
    metavar=f"[{'|'.join(SHORT_NAMES)}]",
    help="Float type. Default: the model's own.",
)
compiled = click.option(
    "--compile/--eager",
    "compiled",
    default=None,
    help="Run through torch.compile or not. Default: on GPUs only.",
)
int8_cache = click.option(
    "--int8-cache",
    is_flag=True,
    help="Keep keys and values in 8 bits; see docs/kernels.md for the cost.",
)
SPECULATION = "Speculative decoding"
"""The section of the two options that follow."""

draft = click.option(
    "--draft",
    type=PATH,
    metavar="MODEL",
    help="A smaller model with the same tokens, which proposes what comes next.",
)
draft_tokens = click.option(
    "--draft-tokens",
    type=int,
    help=(
        "Tokens proposed at a time at most, by the draft or from the text so far; 0 to"
        f" {MAX_DRAFT_TOKENS}. Default: {DRAFT_TOKENS} where that is exact: on CPUs, or with a"
        " draft."
    ),
)
via = click.option(
    "--backend",
    type=click.Choice(VIAS),
    metavar=f"[{'|'.join(VIAS)}]",
    help="What runs the models. Default: own code where it knows the family, else transformers.",
)
allow_slow = click.option(
    "--allow-slow",
    is_flag=True,
    help=(
        "Run quantized linears that have no kernels here on the slow reference backend, instead of"
        " failing."
    ),
)
data = click.option(
    "--json",
    "data",
    metavar="PATH",
    shell_complete=complete_files,
    help="Write all results as JSON to this file; - is stdout.",
)
report = click.option(
    "--report", type=PATH, help="Write a report: Markdown, or a page if the name ends in .html."
)
table = click.option(
    "--table",
    type=click.Choice(["terminal", "markdown", "latex", "csv"]),
    default="terminal",
    show_default=True,
    help="How tables are printed.",
)
trust_remote_code = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run the code in the model's folder, with transformers. Read it first.",
)
tensors_only = click.option(
    "--tensors-only", is_flag=True, help="Accept any architecture, without running the model."
)


def target(default: str, *, quantized: bool = False) -> Decorator:
    """Return the option for the format of the output, with `quantized` only for quantized models;
    `default` is in words.
    """
    names = []
    for name, one in targets().items():
        if one.codes is not None or not quantized:
            names.append(name)
    about = f"{', '.join(names)}. Default: {default}; gguf if DST ends in .gguf."
    if not quantized:
        return click.option("--to", type=click.Choice(names), metavar="FORMAT", help=about)
    about += " Several, such as gptq,awq: DST gets a folder for each."
    return click.option("--to", type=Formats(names), metavar="FORMAT[,FORMAT]", help=about)


def api_key(about: str) -> Decorator:
    """Return the option for the key of a server; `about` is its help."""
    return click.option(
        "--api-key", envvar="QUANTKIT_API_KEY", show_envvar=True, metavar="KEY", help=about
    )


def max_new_tokens(default: int | None, about: str = "") -> Decorator:
    """Return the option for the length of what is generated; `about` is added to its help."""
    return click.option(
        "--max-new-tokens",
        type=int,
        default=default,
        show_default=default is not None,
        help=f"Maximum number of tokens to generate{about}.",
    )


SAMPLING_NAMES = tuple(option.name for option in SAMPLING_OPTIONS if option.type is not None)
_sampling = in_order(
    *(
        click.option(f"--{one.name.replace('_', '-')}", type=one.type, help=one.help)
        for one in SAMPLING_OPTIONS
        if one.type is not None
    )
)
_SHARED: dict[str, Decorator] = {
    "sampling_options": _sampling,
    "to": target("compressed-tensors", quantized=True),
    "device": device,
    "weights": weights,
    "dtype": dtype,
    "tensors_only": tensors_only,
    "int8_cache": int8_cache,
    "compiled": compiled,
    "allow_slow": allow_slow,
    "trust_remote_code": trust_remote_code,
    "draft": draft,
    "draft_tokens": draft_tokens,
    "stop": click.option(
        "--stop", metavar="TEXT", multiple=True, help="Stop before this text; repeatable."
    ),
    "template": click.option(
        "--template",
        metavar="NAME",
        shell_complete=complete_files,
        help="Chat template to write: llama2, llama3 or a file *.jinja. Default: SRC's own.",
    ),
    "split_max_size": click.option(
        "--split-max-size",
        type=file_size,
        metavar="AMOUNT",
        help="Maximum size of a weight file, such as 2GB. Default: 2GiB, and one file for GGUF.",
    ),
    "resume": click.option(
        "--resume", is_flag=True, help="Continue an interrupted run of the same command."
    ),
    "if_exists": click.option(
        "--if-exists",
        type=click.Choice(get_args(IfExists)),
        default="fail",
        show_default=True,
        help="skip: accept a DST that this command would write again.",
    ),
    "allow_nonfinite": click.option(
        "--allow-nonfinite",
        is_flag=True,
        help="Write NaN, Inf and floats that overflow as they are.",
    ),
    "source_check": click.option(
        "--source-check/--no-source-check",
        default=True,
        help="Check first that SRC predicts a sample text. Default: yes, if SRC has a tokenizer.",
    ),
}
_KINDS: dict[type | str, dict[str, Any]] = {
    "scheme": {"type": Scheme()},
    "size": {"type": file_size},
    "memory": {"type": memory},
    "path": {"type": PATH},
    "file": {"shell_complete": complete_files},
    "patterns": {"multiple": True},
    "adapters": {"multiple": True, "shell_complete": complete_files},
    bool: {"is_flag": True},
}


def of_job(
    job_options: type,
    overrides: Mapping[str, Decorator] | None = None,
    *,
    only: Collection[str] = (),
) -> Decorator:
    """Return the options of a command, from the fields of its job's options, or `only` from some of
    them. `own` ones replace the shared ones for fields without a help text.
    """
    shared = {**_SHARED, **(overrides or {})}
    made = (
        section(
            spell(info.section),
            shared[name] if info.help is None else _of_field(name, info, info.help),
        )
        for name, info in find_option_fields(job_options).items()
        if not only or name in only
    )
    return in_order(*made)


def _of_field(name: str, info: OptionInfo, about: str) -> Decorator:
    if info.choices:
        kind: dict[str, Any] = {"type": click.Choice(info.choices)}
    else:
        kind = _KINDS.get(info.kind, {"type": info.kind})
    return click.option(
        f"--{name.replace('_', '-')}", metavar=info.metavar, help=spell(about), **kind
    )


def sampling(max_tokens: int, about: str) -> Decorator:
    """Return the options for how tokens are sampled and what ends them; None where one is not
    given.
    """
    return in_order(max_new_tokens(max_tokens, about), _sampling, _SHARED["stop"])


def split_sampling(params: Mapping[str, Any]) -> tuple[SamplingOptions, dict[str, Any]]:
    """Return the sampling options among the arguments of a command with `sampling`, not checked
    yet; and the other ones.
    """
    requested: Any = {}
    for name in SAMPLING_NAMES:
        if params[name] is not None:
            requested[name] = params[name]
    options: SamplingOptions = requested
    return options, {name: value for name, value in params.items() if name not in SAMPLING_NAMES}


def validate_sampling_options(params: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling options among the arguments of a command with `sampling`; checked,
    without torch. Raises `RequestError` for a value out of its range.
    """
    requested, _ = split_sampling(params)
    SamplingParams(**requested)
    return requested


def token_bias(text: str) -> tuple[int, float]:
    """Parse what is added to the logits of a token: ``1234=-100``.

    Raises `RequestError` otherwise.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(
            "no bias of a token", found=format_value(text), expected="ID=NUMBER, such as 1234=-100"
        ) from None


def backend(*extra_backends: str, extra_help: str = "") -> Decorator:
    """Return the option for kernels, with `others` as further choices; `more` is added to its
    help.
    """
    about = f"Kernels of quantized linears: {', '.join(BACKENDS)}; see docs/kernels.md."
    return click.option(
        "--backend",
        type=click.Choice([*BACKENDS, *extra_backends]),
        metavar="NAME",
        help=about + extra_help,
    )


def add_threads(*commands: click.Command) -> None:
    """Add the option for the number of threads to commands.

    A function with a parameter `threads` gets the number.
    """
    for command in commands:
        used = "threads" in inspect.signature(command.callback or command).parameters
        option = click.Option(
            ["--threads"],
            type=int,
            metavar="N",
            expose_value=used,
            callback=_set_threads,
            help="Number of CPU threads. Default: one for each core that the command may use.",
        )
        if any(parameter in _sections for parameter in command.params):
            _sections[option] = RUN
        command.params.append(option)


def _set_threads(context: click.Context, option: click.Parameter, count: int | None) -> int | None:
    set_threads(None if count is None else validate_threads(count))
    return count


def plot(subject: str) -> Decorator:
    """Return the option for a picture of something."""
    return click.option("--plot", type=PATH, help=f"Draw {subject}: a .png, .pdf or .svg file.")


class BareJson(Command):
    """Accepts ``--json`` without a path for ``--json -``, the old spelling."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--json" in args:
            place = args.index("--json")
        else:
            place = None
        if place is None:
            return super().parse_args(ctx, args)
        follows = args[place + 1 : place + 2]
        if follows and (follows == ["-"] or not follows[0].startswith("-")):
            try:
                return super().parse_args(ctx, list(args))
            except click.MissingParameter:
                # The model's path was parsed as that of --json.
                ctx.params.clear()
        note("--json takes a path now, and - for stdout; without one it goes with the next release")
        return super().parse_args(ctx, [*args[:place], "--json=-", *args[place + 1 :]])
