"""Convert, quantize, verify and run Llama-family language models.

Folders go in and come out, as Meta or Hugging Face publish them. quantkit never gives out a broken
model: what is wrong is raised, as one of the kinds of `QuantkitError` in `quantkit.errors`.

Make and check models:

    inspect          say what lies in a folder, from headers alone
    convert          write a model in another format, sharding or float type
    quantize         write a model with linear layers in int8 or int4
    refine           train a quantized model's scales against its float model
    apply_delta      write a quantized model with what `refine` changed
    plan.convert     say what `convert` would take: memory, disk and time
    plan.quantize    say what `quantize` would take
    plan.refine      say what `refine` would take
    plan.generate    say what generation takes of each chip of a TPU slice
    verify           say whether two models are the same, or how far apart
    diagnose         say what is wrong with anybody's folder, and what a runtime would mind
    push             send a model to a repository of a model hub, checked and compared
    evaluate         measure models: perplexity, divergence, tasks, speed
    bench            measure the speed of models: prefill, decoding, loading, memory

Run them:

    load             a model and its tokenizer
    stream           continue a prompt, piece of text by piece of text
    generate         continue a prompt, token id by token id
    generate_batch   continue many prompts, several at a time
    generate_file    continue the prompts in a file, into a file
    Llama            the interface of Meta's own code, for scripts that use it
    open_checkpoint  the tensors of a folder, one at a time

Talk with instruct models:

    ChatSession        a conversation, answer by answer
    chat_format        chat templates: messages to token ids
    sampling_defaults  how its makers advise to draw tokens

All take paths as `str` or `Path`, float types as "bf16", "bfloat16" or torch's, and memory in
bytes. Jobs report to a `Progress`. Their results, such as a `VerifyReport`, have `to_json()`, which
returns all of it as plain values, and most has `lines()` for people; `help(quantkit.VerifyReport)`
says what it holds.

    >>> import quantkit
    >>> quantkit.quantize("model", "model-int4", "int4-g128")
    >>> model, tokenizer = quantkit.load("model-int4")
    >>> for piece in quantkit.stream(model, tokenizer, "My fellow citizens"):
    ...     print(piece, end="", flush=True)
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _read_stub() -> tuple[dict[str, str], list[str]]:
    """Read the public names from the stub beside this file.

    Returns:
        The module of each name, and the names that ``help`` shows in full.
    """
    homes: dict[str, str] = {}
    shown: list[str] = []
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                homes[alias.name] = str(statement.module)
        elif isinstance(statement, ast.Assign):
            shown = ast.literal_eval(statement.value)
    return homes, shown


_HOMES, __all__ = _read_stub()


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
    owner = importlib.import_module(_HOMES[name])
    # `errors` and `plan` are modules of a package.
    if hasattr(owner, "__path__"):
        return importlib.import_module(f"{_HOMES[name]}.{name}")
    return getattr(owner, name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
