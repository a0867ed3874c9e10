"""Options that several commands share, with the same spelling and help, old spellings that still
work, and how help pages look: options in sections, exit codes at the end.

click's own formatter writes the sections; it cannot state which option belongs to which.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.shell_completion import CompletionItem, get_completion_class

from quantkit import errors
from quantkit.base.json_values import format_value
from quantkit.base.late import LateModule
from quantkit.base.option_fields import OTHER, IfExists, OptionInfo, find_option_fields
from quantkit.base.processors import set_threads, validate_threads
from quantkit.cli.hints import set_command, spell
from quantkit.errors import RequestError
from quantkit.kernels import BACKENDS
from quantkit.runtime.request import DRAFT_TOKENS, MAX_DRAFT_TOKENS
from quantkit.runtime.sampling_params import OPTIONS as SAMPLING_OPTIONS
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.dtypes import FLOAT_NAMES, SHORT_NAMES
from quantkit.tensors.scheme import FLOAT_SCHEMES, KEEP, SCHEMES, QuantScheme
from quantkit.via_transformers import VIAS

if TYPE_CHECKING:
    from quantkit.formats import target_names
    from quantkit.tensors import mix as mixes
else:
    target_names = LateModule("quantkit.formats.target_names")
    mixes = LateModule("quantkit.tensors.mix")

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
# Text has it instead of a hyphen while click wraps the text, so no line breaks at a hyphen.
_HYPHEN = "\N{NON-BREAKING HYPHEN}"

Decorator = Callable[[Any], Any]
"""Adds options to a command."""
_sections: dict[click.Parameter, str] = {}


def combine_options(*options: Decorator) -> Decorator:
    """Combine several options into one decorator, the first of them first in the help."""

    def decorate(command: Any) -> Any:
        # Python applies stacked decorators from the last to the first, and click expects that.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def section(title: str, *options: Decorator) -> Decorator:
    """Combine options that the help shows together, under a title."""

    def decorate(command: Any) -> Any:
        # click collects the options of a function in this list until the command is created. The
        # new ones are at its end.
        num_earlier_options = len(getattr(command, "__click_params__", ()))
        command = combine_options(*options)(command)
        for option in command.__click_params__[num_earlier_options:]:
            _sections[option] = title
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
        unbroken_rows = [(name, about.replace("-", _HYPHEN)) for name, about in rows]
        super().write_dl(unbroken_rows, col_max, col_spacing)

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
        # Options without a title go to the end. There is at least one, --help.
        untitled = groups.pop(OTHER)
        if groups:
            groups[OTHER] = untitled
        else:
            groups["Options"] = untitled
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def exit_codes(*codes: int) -> str:
    """Format the end of a help page: the meaning of these exit codes, or of all if there is no
    argument.
    """
    # click does not wrap a paragraph that begins with a backspace.
    lines = ["\b", "Exit codes:"]
    for code in codes or EXIT_CODES:
        lines.append(f"  {code:>3}  {EXIT_CODES[code]}")
    return "\n".join(lines)


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
    # click has a class for each of `SHELLS`.
    assert completion_class is not None
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
                parameter_name = "an argument"
            else:
                parameter_name = param.get_error_hint(ctx)
            raise RequestError(f"{parameter_name} is empty", expected="a path")
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


class Scheme(click.types.StringParamType):
    """The name of a scheme, checked before anything large is imported."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # A mix of schemes is for a whole model. Other options, such as --head, take one scheme.
        if param is not None and param.name == "scheme":
            mix = mixes.find_mix(value)
        else:
            mix = None
        if param is not None and param.name == "embedding" and value == KEEP:
            return value
        if mix is None:
            return str(QuantScheme.parse(value))
        return mix.name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        completions: list[CompletionItem] = []
        for name in (*SCHEMES, *FLOAT_SCHEMES, *mixes.MIXES):
            if name.startswith(incomplete):
                completions.append(CompletionItem(name))
        return completions


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
        completions: list[CompletionItem] = []
        for name in self.choices:
            if name.startswith(last):
                # A shell replaces the whole word, with the formats before the last comma.
                completions.append(CompletionItem(f"{before}{comma}{name}"))
        return completions


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Leave the completion of a word that may be a file to the shell."""
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
    completions: list[CompletionItem] = []
    for path in paths:
        if path.name.startswith(last):
            completions.append(CompletionItem(f"{name}={path}"))
    return completions


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


def parse_memory(text: str) -> int:
    """Parse an amount of memory, such as ``4GB``, ``512MB``, ``2GiB``, to bytes.

    Raises `RequestError` otherwise.
    """
    return _parse_bytes(text, "amount of memory")


def parse_file_size(text: str) -> int:
    """Parse the size of a file: as `parse_memory` does, or a number of bytes.

    Raises `RequestError` otherwise.
    """
    if text.strip().isdecimal():
        text = f"{text.strip()}B"
    return _parse_bytes(text, "file size")


def _parse_bytes(text: str, quantity: str) -> int:
    """Parse a number with a unit. Raises a `RequestError` that names the quantity otherwise."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (match["unit"] or match["bytes"]):
        raise RequestError(
            f"not a valid {quantity}",
            found=format_value(text),
            expected="one such as 4GB, 512MB or 2GiB",
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
    help="Device to compute on: cpu or cuda. Default: a GPU if available.",
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
    help="Use an int8 KV cache; see docs/kernels.md for its cost.",
)
SPECULATION = "Speculative decoding"
"""The section of the two options that follow."""

draft = click.option(
    "--draft",
    type=PATH,
    metavar="MODEL",
    help="Draft model for speculative decoding: smaller, with the same vocabulary.",
)
draft_tokens = click.option(
    "--draft-tokens",
    type=int,
    help=(
        "Maximum number of speculative tokens per step, from the draft model or from the text so"
        f" far; 0 to {MAX_DRAFT_TOKENS}. Default: {DRAFT_TOKENS} on CPUs or with a draft model."
    ),
)
via = click.option(
    "--backend",
    type=click.Choice(VIAS),
    metavar=f"[{'|'.join(VIAS)}]",
    help=(
        "Code that runs the models. Default: quantkit's own for known families, else transformers."
    ),
)
allow_slow = click.option(
    "--allow-slow",
    is_flag=True,
    help=(
        "Run quantized linears without a kernel here on the slow reference backend, instead of"
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
    help="Format of printed tables.",
)
trust_remote_code = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Let transformers run the code in the model's folder. Read that code first.",
)
tensors_only = click.option(
    "--tensors-only", is_flag=True, help="Accept any architecture, without running the model."
)


def target(default: str, *, quantized: bool = False) -> Decorator:
    """Create the option for the format of the output, with `quantized` only for quantized models;
    `default` is in words.
    """
    names = [
        name
        for name in target_names.TARGET_NAMES
        if not (quantized and name in target_names.FLOAT_TARGETS)
    ]
    about = f"{', '.join(names)}. Default: {default}; gguf if DST ends in .gguf."
    if not quantized:
        return click.option("--to", type=click.Choice(names), metavar="FORMAT", help=about)
    about += " Several, such as gptq,awq: DST gets a folder for each."
    return click.option("--to", type=Formats(names), metavar="FORMAT[,FORMAT]", help=about)


def api_key(about: str) -> Decorator:
    """Create the option for the key of a server; `about` is its help."""
    return click.option(
        "--api-key", envvar="QUANTKIT_API_KEY", show_envvar=True, metavar="KEY", help=about
    )


def max_new_tokens(default: int | None, about: str = "") -> Decorator:
    """Create the option for the length of what is generated; `about` is added to its help."""
    return click.option(
        "--max-new-tokens",
        type=int,
        default=default,
        show_default=default is not None,
        help=f"Maximum number of tokens to generate{about}.",
    )


SAMPLING_NAMES = tuple(option.name for option in SAMPLING_OPTIONS if option.type is not None)


def _create_sampling_options() -> Decorator:
    """Create the options of `SAMPLING_NAMES`, with the types and help of the runtime's list."""
    decorators: list[Decorator] = []
    for option in SAMPLING_OPTIONS:
        # Options without a type are not common to `generate` and `chat`, such as --logit-bias.
        if option.type is not None:
            spelling = f"--{option.name.replace('_', '-')}"
            decorators.append(click.option(spelling, type=option.type, help=option.help))
    return combine_options(*decorators)


_sampling = _create_sampling_options()
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
        type=parse_file_size,
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
        help="skip: succeed if DST already is what this command would write.",
    ),
    "allow_nonfinite": click.option(
        "--allow-nonfinite",
        is_flag=True,
        help="Write NaN, Inf and overflowing values unchanged, instead of failing.",
    ),
    "source_check": click.option(
        "--source-check/--no-source-check",
        default=True,
        help="Check first that SRC predicts a sample text. Default: yes, if SRC has a tokenizer.",
    ),
}
_KINDS: dict[type | str, dict[str, Any]] = {
    "scheme": {"type": Scheme()},
    "size": {"type": parse_file_size},
    "memory": {"type": parse_memory},
    "path": {"type": PATH},
    "file": {"shell_complete": complete_files},
    "patterns": {"multiple": True},
    "adapters": {"multiple": True, "shell_complete": complete_files},
    bool: {"is_flag": True},
}


def create_job_options(
    job_options: type,
    overrides: Mapping[str, Decorator] | None = None,
    *,
    only: Collection[str] = (),
) -> Decorator:
    """Create the options of a command, from the fields of its job's options, or `only` from some
    of them. `overrides` replace the shared options for fields without a help text.
    """
    shared = {**_SHARED, **(overrides or {})}
    decorators: list[Decorator] = []
    for name, info in find_option_fields(job_options).items():
        if only and name not in only:
            continue
        # A field without a help text is an option that several commands share under this name.
        if info.help is None:
            decorator = shared[name]
        else:
            decorator = _create_field_option(name, info, info.help)
        decorators.append(section(spell(info.section), decorator))
    return combine_options(*decorators)


def _create_field_option(name: str, info: OptionInfo, about: str) -> Decorator:
    """Create the option for a field of a job's options; `about` is its help."""
    if info.choices:
        kind: dict[str, Any] = {"type": click.Choice(info.choices)}
    else:
        kind = _KINDS.get(info.kind, {"type": info.kind})
    return click.option(
        f"--{name.replace('_', '-')}", metavar=info.metavar, help=spell(about), **kind
    )


def sampling(max_tokens: int, about: str) -> Decorator:
    """Create the options for how tokens are sampled and what ends them. The values of those that
    are not on the command line are None.
    """
    return combine_options(max_new_tokens(max_tokens, about), _sampling, _SHARED["stop"])


def split_sampling(params: Mapping[str, Any]) -> tuple[SamplingOptions, dict[str, Any]]:
    """Split the arguments of a command with `sampling` into the requested sampling options, not
    checked yet, and the other arguments.
    """
    requested: Any = {}
    for name in SAMPLING_NAMES:
        if params[name] is not None:
            requested[name] = params[name]
    options: SamplingOptions = requested
    other_params = {name: value for name, value in params.items() if name not in SAMPLING_NAMES}
    return options, other_params


def validate_sampling_options(params: Mapping[str, Any]) -> SamplingOptions:
    """Select the sampling options among the arguments of a command with `sampling`, and check
    them, without torch. Raises `RequestError` for a value out of its range.
    """
    requested, _ = split_sampling(params)
    # For its checks. Options that are not requested stay unset, so a model's own defaults apply.
    SamplingParams(**requested)
    return requested


def parse_token_bias(text: str) -> tuple[int, float]:
    """Parse a token and the number that is added to its logits: ``1234=-100``.

    Raises `RequestError` otherwise.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(
            "not a valid token bias",
            found=format_value(text),
            expected="ID=NUMBER, such as 1234=-100",
        ) from None


def backend(*extra_backends: str, extra_help: str = "") -> Decorator:
    """Create the option for kernels, with `extra_backends` as further choices; `extra_help` is
    added to its help.
    """
    about = f"Kernels of quantized linears: {', '.join(BACKENDS)}; see docs/kernels.md."
    return click.option(
        "--backend",
        type=click.Choice([*BACKENDS, *extra_backends]),
        metavar="NAME",
        help=about + extra_help,
    )


def accept_threads(command: click.Command) -> click.Command:
    """Add the option for the number of threads to a command, at the end of its options.

    A function with a parameter `threads` gets the number.
    """
    # The callback below sets the threads of this process for all commands. `demo` also needs the
    # number itself, as its default is one thread, and `bench` for the processes it starts.
    takes_threads = "threads" in inspect.signature(command.callback or command).parameters
    option = click.Option(
        ["--threads"],
        type=int,
        metavar="N",
        expose_value=takes_threads,
        callback=_set_threads,
        help="Number of CPU threads. Default: one for each core that the command may use.",
    )
    # A page without sections has one list, and a section of one option would split it.
    if any(parameter in _sections for parameter in command.params):
        _sections[option] = RUN
    command.params.append(option)
    return command


def _set_threads(context: click.Context, option: click.Parameter, count: int | None) -> int | None:
    """Set the number of threads before the command imports torch."""
    if count is None:
        set_threads(None)
    else:
        set_threads(validate_threads(count))
    return count


def plot(subject: str) -> Decorator:
    """Create the option for a picture of something."""
    return click.option("--plot", type=PATH, help=f"Draw {subject}: a .png, .pdf or .svg file.")
