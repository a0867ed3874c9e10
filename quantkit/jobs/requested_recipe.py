"""The recipe that the options of `quantize` describe."""

from __future__ import annotations

from pathlib import Path

from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.arguments import as_strings
from quantkit.bit_allocation.fit import CANDIDATES
from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.registry import Target
from quantkit.jobs.quantize_options import QuantizeOptions
from quantkit.json_values import shown
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import SPELLINGS, QuantScheme

_HEAD = CANONICAL["head"]


def requested_recipe(options: QuantizeOptions) -> Recipe:
    """The scheme, with overrides for head, embedding and the layers to keep.

    If schemes are to be chosen for a size, the finest one that the target holds stands for them until then.

    Raises:
        RequestError: for no scheme, one that does not exist, or options that contradict each other.
    """
    kept = as_strings("keep", options.keep)
    recipe = _recipe(options.scheme if options.size is None else _stand_in(options.target))
    if options.head is not None:
        if isinstance(options.scheme, Recipe):
            raise RequestError("`head` does not go with a recipe", hint=f"name {_HEAD} among its overrides")
        recipe = _with_override(recipe, _HEAD, options.head)
    if options.embedding is not None:
        recipe = _with_override(recipe, EMBEDDING, options.embedding)
        if (pattern := next((one for one in kept if Override(one, None).matches(EMBEDDING)), None)) is not None:
            raise RequestError(
                "`embedding` quantizes what `keep` leaves as floats", found=f"{shown(pattern)} matches '{EMBEDDING}'",
                hint="leave `embedding` out, which keeps its floats then, or name the linear layers alone",
            )  # fmt: skip
    return recipe.keeping(kept)


def _recipe(scheme: str | QuantScheme | Recipe | None) -> Recipe:
    """
    Raises:
        RequestError: if it is none of the three, or the name of no scheme.
    """
    if isinstance(scheme, Recipe):
        return scheme
    if isinstance(scheme, QuantScheme):
        return Recipe(scheme)
    if isinstance(scheme, Path) or (isinstance(scheme, str) and scheme.strip().lower().endswith(".json")):
        raise RequestError(
            "the scheme is the path of a file", found=shown(str(scheme)), expected=f"{SPELLINGS}, or a Recipe",
            hint="quantkit.Recipe.from_json(path) reads one",
        )  # fmt: skip
    if not isinstance(scheme, str):  # callers without types
        raise RequestError(
            f"give a scheme: {SPELLINGS}, or a Recipe; or a size: `target_bits` or `max_size`", found=shown(scheme)
        )
    return Recipe(QuantScheme.parse(scheme))


def _with_override(recipe: Recipe, module: str, scheme: str | QuantScheme) -> Recipe:
    parsed = scheme if isinstance(scheme, QuantScheme) else QuantScheme.parse(scheme)
    return Recipe(recipe.default, (*recipe.overrides, Override(module, parsed)))


def _stand_in(target: Target) -> QuantScheme:
    """The finest candidate that a target holds; int8 fits rows of every length."""
    assert target.codes is not None
    held = [one for one in CANDIDATES if not isinstance(target.codes.codec(one), Reason)]
    return held[-1] if held else CANDIDATES[-1]
