"""Render chat templates, as a program in a process that `template_process` starts with Jinja and
nothing else.

Requests are marshalled on stdin, answers are lines of JSON on stdout. A template sees what
`transformers` documents for chat templates.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import marshal
import random
import sys
import time
from collections.abc import Callable
from typing import Any

# The folder of Jinja: the program runs without site-packages, so that it starts sooner.
sys.path += sys.argv[2:]

import jinja2.debug  # noqa: F401 (otherwise imported on an error, when memory may be short)
from jinja2 import Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The default date in Llama's templates.
_FIXED_DATE = datetime.datetime(2024, 7, 26)
_MAX_REASON = 4096


class _Refusal(Exception):
    """The template calls `raise_exception`."""


class _UnknownToken(Exception):
    """The template prints a special token that no file of the model spells."""


class _Unknown(Undefined):
    """A special token without a spelling: undefined in conditions, and an error if it is
    printed.
    """

    def __str__(self) -> str:
        raise _UnknownToken(self._undefined_name)


class _Generation(Extension):
    """``{% generation %}`` marks the text that a model is trained on; it is rendered as any
    other text.
    """

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    # The settings with which transformers compiles templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _answer(compiled: Callable[[str], Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = compiled(request["source"])
        # Only the syntax is to be checked.
        if "variables" not in request:
            return {}
        # Jinja's own choices use this generator.
        random.seed(0 if request["repeatable"] else None)
        unknown = {name: _Unknown(name=name) for name in request["unknown"]}
        if request["repeatable"]:
            now = _FIXED_DATE
        else:
            now = datetime.datetime.now()
        # The length is limited while the text is made, before it fills the memory.
        pieces: list[str] = []
        length = 0
        for piece in template.generate(
            {"strftime_now": now.strftime, **unknown, **request["variables"]}
        ):
            pieces.append(piece)
            length += len(piece)
            if length > request["max_length"]:
                return {"error": "length", "reason": ""}
        return {"text": "".join(pieces)}
    except _Refusal as refusal:
        return {"error": "refusal", "reason": str(refusal)[:_MAX_REASON] or "without a reason"}
    except _UnknownToken as error:
        return {"error": "token", "reason": str(error)}
    except MemoryError:
        return {"error": "memory", "reason": ""}
    # Jinja, Python's compiler behind it, and whatever a template calls raise many types.
    except Exception as error:
        # The text of a syntax error contains the line of the generated code.
        if isinstance(error, SyntaxError):
            reason = error.msg
        else:
            reason = str(error)
        return {
            "error": "failure",
            "reason": reason[:_MAX_REASON] or f"it raises {type(error).__name__}",
        }


def _limit(seconds: float | None = None) -> None:
    """Limit the memory of this process, and forbid it to start processes or write files; or limit
    its time from now on.

    On a system without limits the parent's timer ends it.
    """
    try:
        import resource
    except ImportError:
        # Windows has no such limits.
        return
    if seconds is not None:
        limits = {resource.RLIMIT_CPU: int(time.process_time() + seconds) + 1}
    else:
        limits = {resource.RLIMIT_AS: int(sys.argv[1])}
        limits |= dict.fromkeys(
            (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC), 0
        )
    for limit, value in limits.items():
        # Some systems refuse a limit, such as macOS. The hard limit stays, so that the next request
        # can raise the limit of CPU time.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def main() -> None:
    """Answer requests until stdin ends."""
    compiled = functools.lru_cache(maxsize=16)(_environment().from_string)
    _limit()
    with contextlib.suppress(EOFError):
        while True:
            request = marshal.load(sys.stdin.buffer)
            _limit(request["seconds"])
            begun = time.process_time()
            answer = _answer(compiled, request)
            answer["seconds"] = time.process_time() - begun
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
