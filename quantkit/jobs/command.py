"""The command that repeats a call of `quantize`, for the model card."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import SAMPLES, SEED
from quantkit.jobs.labels import file_name
from quantkit.jobs.option_fields import declared
from quantkit.jobs.prepare import Prepared
from quantkit.jobs.quantize_options import QuantizeOptions
from quantkit.jobs.target import NATIVE
from quantkit.tensors.recipe import Recipe

_RECIPE = "recipe.json"


def quantize_command(src: str, dst: str, prepared: Prepared, drawn: Calibration | None) -> tuple[str, str | None]:
    """A command line, and the content of the recipe that it names, if it needs one.

    Args:
        src, dst: names for the folders.
        drawn: the calibration samples; None for rounding.
    """
    options, recipe = prepared.options, prepared.scheme_map.recipe
    result_options = [name for name, info in declared(QuantizeOptions).items() if info.changes_result]
    values = {name: getattr(options, name) for name in result_options}
    if prepared.allocation is not None:  # the recipe without what was chosen
        recipe = Recipe(recipe.default, recipe.overrides[len(prepared.allocation.recipe().overrides) :])
    values |= _schemes(recipe)
    if prepared.allocation is not None:
        size = prepared.allocation.target
        values |= {"scheme": None, "target_bits": size.bits, "max_size": size.bytes and f"{size.bytes}B"}
    values |= _method(prepared, drawn)
    values["to"] = None if prepared.target.name == NATIVE else prepared.target.name
    values["template"] = options.template and Path(options.template).name
    values["certify_text"] = options.certify_text and (file_name(options.certify_text) or "TEXT")
    words = ["quantkit", "quantize", src, dst]
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [word for one in value for word in (option, one)]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return shlex.join(words), json.dumps(recipe.to_json(), indent=2) if "recipe" in values else None


def _schemes(recipe: Recipe) -> dict[str, object]:
    """A recipe as options: a scheme, one for the head and the embedding, and layers to keep; or else a file."""
    kept, named = list(recipe.overrides), dict[str, object]()
    for name, module in (("head", CANONICAL["head"]), ("embedding", EMBEDDING)):
        if kept and kept[0].pattern == module and kept[0].scheme is not None:
            named[name] = kept.pop(0).scheme
    if any(override.scheme is not None for override in kept):
        return {"recipe": _RECIPE, **dict.fromkeys(("scheme", "head", "embedding", "keep"))}
    return {"scheme": recipe.default, **named, "keep": [override.pattern for override in kept]}


def _method(prepared: Prepared, drawn: Calibration | None) -> dict[str, object]:
    settings = prepared.settings
    if settings is None or drawn is None:
        return {"method": "rtn"}
    text = None if settings.text is None else drawn.source or file_name(settings.text) or "TEXT"
    return {
        "method": "gptq", "calibration": text, "samples": None if settings.samples == SAMPLES else settings.samples,
        "seed": None if settings.seed == SEED else settings.seed,
    }  # fmt: skip
