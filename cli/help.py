"""How help pages look: options in groups, exit codes at the end; and completion in shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class, shell_complete

from quantkit.errors import (
    CheckpointError,
    DestinationError,
    GroupError,
    NonFiniteError,
    QualityError,
    QuantkitError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.runtime.sampling_params import OPTIONS

COMPLETION = "_QUANTKIT_COMPLETE"
"""The variable through which a shell asks for completions."""

SHELLS = ("bash", "zsh", "fish")

BROKEN = 12
"""Of `quantkit doctor` where something would break."""

EXIT_CODES: dict[int, str] = {
    0: "done",
    QuantkitError.exit_code: "a bug in quantkit",
    RequestError.exit_code: "a request that makes no sense",
    CheckpointError.exit_code: "the source is damaged or incomplete",
    UnsupportedError.exit_code: "the source is of a kind that is not supported",
    DestinationError.exit_code: "the destination cannot be written",
    ResumeError.exit_code: "an interrupted or running job is in the way",
    NonFiniteError.exit_code: "weights or logits are NaN or Inf",
    QualityError.exit_code: "the result is too far from its source",
    GroupError.exit_code: "processes of one job differ, or one is lost",
    10: "verify: within the bound of the scheme",
    11: "verify: different",
    BROKEN: "doctor: something would break",
    130: "Ctrl-C",
    143: "ended by SIGTERM",
}

_CHECKS = "Checks"
_OUTPUT = "Output"
_SCHEMES = "Schemes"
_CALIBRATION = "Calibration, with --method gptq"
_RUN = "How it runs"

SAMPLING_NAMES = tuple(option.name for option in OPTIONS if option.type is not None)
"""The sampling options of ``generate`` and ``chat``."""

_SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "convert": {
        "Target": ("to", "dtype", "mp", "split_max_size", "template"),
        "Quantized models": ("dequantize", "requantize"),
        _CHECKS: ("source_check", "allow_nonfinite"),
        _OUTPUT: ("resume", "data"),
    },
    "quantize": {
        _SCHEMES: ("scheme", "target_bits", "max_size", "head", "embedding", "recipe", "keep", "strict"),
        "Method": ("method",),
        _CALIBRATION: ("calibration", "samples", "length", "seed", "thorough", "activation_memory", "device"),
        _CHECKS: ("source_check", "allow_nonfinite", "accept_quality_loss", "certify_positions", "certify_text"),
        "Model card": ("base_model", "license"),
        _OUTPUT: ("to", "split_max_size", "template", "resume", "data"),
    },
    "eval": {
        "What is measured": (
            "texts",
            "against",
            "window",
            "positions",
            "position_windows",
            "cache_logits",
            "tasks",
            "task_data",
            "speed",
        ),
        _RUN: ("device",),
        _OUTPUT: ("table", "report", "data", "plot"),
    },
    "generate": {
        "Prompt": ("prompt", "prompt_file", "truncate"),
        "A file of prompts": ("prompts", "output", "resume", "batch", "template", "echo", "logprobs"),
        "Sampling": (
            "max_new_tokens",
            "stop",
            "n",
            *SAMPLING_NAMES,
            "logit_bias",
        ),
        "Speculative decoding": ("draft", "draft_tokens"),
        _RUN: ("dtype", "backend", "device", "compiled", "warmup", "int8_cache", "tp", "multi_host", "stats"),
    },
    "chat": {
        "Conversation": ("template", "system", "context"),
        "Sampling": (
            "max_new_tokens",
            *SAMPLING_NAMES,
            "stop",
        ),
        _RUN: ("dtype", "backend", "device", "compiled", "int8_cache"),
    },
    "bench": {
        "Random weights": ("synthetic", "quantized", "head"),
        "What is measured": ("prompt_lengths", "batches", "contexts", "runs", "price_per_hour"),
        _RUN: ("threads", "backend", "compiled", "device", "int8_cache"),
        _OUTPUT: ("table", "data", "plot"),
    },
}
"""Options of commands by title, in order; all others stand at the end."""


class Command(click.Command):
    """A command whose help shows options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = _SECTIONS.get(self.name or "", {})
        titles = {name: title for title, names in sections.items() for name in names}
        others = "Other options" if sections else "Options"
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in (*sections, others)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[titles.get(parameter.name or "", others)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def exit_codes(*codes: int) -> str:
    """The end of a help page: what exit codes mean.

    Args:
        codes: the ones to tell of; all without any.
    """
    chosen = codes or EXIT_CODES
    return "\n".join(["\b", "Exit codes:", *(f"  {code:>3}  {EXIT_CODES[code]}" for code in chosen)])


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
    chosen = get_completion_class(shell)
    assert chosen is not None  # `SHELLS` are click's own
    click.echo(chosen(root, {}, "quantkit", COMPLETION).source())


def complete(group: click.Group, instruction: str) -> int:
    """Answer a shell that asks what may follow; the exit code."""
    return shell_complete(group, {}, "quantkit", COMPLETION, instruction)
