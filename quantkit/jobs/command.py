"""The command that does what a call of `quantize` did, for whoever wants to do it again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.bit_allocation.allocation import SizeTarget
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import SAMPLES, SEED
from quantkit.jobs.settings import GptqSettings
from quantkit.tensors.recipe import Recipe

_PLAIN = re.compile(r"\w[\w.+-]*", re.ASCII)
_RECIPE = "recipe.json"


def quantize_command(
    src: str, dst: str, recipe: Recipe, settings: GptqSettings | None, drawn: Calibration | None,
    options: Mapping[str, object], size: SizeTarget | None = None,
) -> tuple[str, str | None]:  # fmt: skip
    """A command line, and the content of the recipe that it names, if it needs one.

    Args:
        src, dst: names for the folders.
        settings, drawn: of GPTQ, and what was drawn of its text; None for rounding, which is named too.
        options: more arguments that were given, by name; None and False are as by default.
        size: that the schemes were chosen for; the recipe then says what was asked for besides.
    """
    chosen = _scheme_options(recipe)
    if size is not None:
        chosen |= {"scheme": None, "target-bits": size.bits, "max-size": size.bytes and f"{size.bytes}B"}
    given = {**chosen, **_gptq_options(settings, drawn), **options}
    words = ["quantkit", "quantize", src, dst]
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [word for one in value for word in (option, one)]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return shlex.join(words), json.dumps(recipe.to_json(), indent=2) if "recipe" in chosen else None


def file_name(path: str | Path) -> str | None:
    """The last part of a path, where it reads as a name."""
    name = Path(path).absolute().name
    return name if _PLAIN.fullmatch(name) else None


def _scheme_options(recipe: Recipe) -> dict[str, object]:
    """A recipe as options: a scheme, one for the head and the embedding, and layers to keep; or else a file."""
    kept, named = list(recipe.overrides), dict[str, object]()
    for name, module in (("head", CANONICAL["head"]), ("embedding", EMBEDDING)):
        if kept and kept[0].pattern == module and kept[0].scheme is not None:
            named[name] = kept.pop(0).scheme
    if any(override.scheme is not None for override in kept):
        return {"recipe": _RECIPE}
    return {"scheme": recipe.default, **named, "keep": [override.pattern for override in kept]}


def _gptq_options(settings: GptqSettings | None, drawn: Calibration | None) -> dict[str, object]:
    if settings is None or drawn is None:
        return {"method": "rtn"}
    text = None if settings.text is None else drawn.source or file_name(settings.text) or "TEXT"
    return {
        "method": "gptq",
        "calibration": text,
        "samples": None if settings.samples == SAMPLES else settings.samples,
        "length": settings.length,
        "seed": None if settings.seed == SEED else settings.seed,
        "thorough": settings.thorough,
    }
