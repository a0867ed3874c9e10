"""The recipe that the options of `quantize` describe, and the scheme that each linear layer of a
model gets from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.families.opaque import may_change_state
from quantkit.architectures.names import CANONICAL, EMBEDDING, expert_bank
from quantkit.architectures.topology import (
    kept_unless_named,
    linear_columns,
    parameters,
    recurrent_linears,
)
from quantkit.base.arguments import as_strings
from quantkit.base.json_values import format_value
from quantkit.bit_allocation.allocation import CANDIDATES
from quantkit.errors import QualityError, RequestError
from quantkit.formats.codecs.codec import Reason, codec_of
from quantkit.formats.registry import Target
from quantkit.jobs.quantize.gguf_mix import MixRules
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.tensors.mix import mix_named
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import EMBEDDING_SCHEME, SPELLINGS, QuantScheme, Scales

_HEAD = CANONICAL["head"]
_RECURRENT = "carries a state from token to token: keeps its floats unless a recipe names it alone"
# Bits that linears may have which change a state.
_FINE = 8


def build_recipe(options: QuantizeOptions) -> Recipe:
    """Return the scheme, with overrides for head, embedding and the layers to keep.

    If schemes are to be chosen for a size, the finest one that the target holds stands for them
    until then.

    Raises:
        RequestError: for no scheme, one that does not exist, or options that contradict each other.
    """
    kept = as_strings("keep", options.keep)
    recipe = _recipe(options.scheme if options.size is None else _stand_in(options.target))
    if options.head is not None:
        if isinstance(options.scheme, Recipe):
            raise RequestError(
                "`head` does not go with a recipe", hint=f"name {_HEAD} among its overrides"
            )
        recipe = _with_override(recipe, _HEAD, options.head)
    if options.embedding is not None:
        recipe = _with_override(recipe, EMBEDDING, options.embedding)
        if (
            pattern := next((one for one in kept if Override(one, None).matches(EMBEDDING)), None)
        ) is not None:
            raise RequestError(
                "`embedding` quantizes what `keep` leaves as floats",
                found=f"{format_value(pattern)} matches '{EMBEDDING}'",
                hint=(
                    "leave `embedding` out, which keeps its floats then, or name the linear layers"
                    " alone"
                ),
            )
    return recipe.keeping(kept)


def apply_gguf_mix(options: QuantizeOptions, recipe: Recipe, config: ModelConfig) -> Recipe:
    """Return a recipe with the types of llama.cpp's mix for a model, if one was requested by its
    name: whatever else the options name comes after them. Raises `UnsupportedError` for an
    architecture that GGUF does not have.
    """
    mix = mix_named(options.scheme)
    if mix is None:
        return recipe
    own = MixRules(mix, config).recipe()
    return Recipe(own.default, (*own.overrides, *recipe.overrides))


def _recipe(scheme: str | QuantScheme | Recipe | None) -> Recipe:
    """Return a recipe with one scheme for all; raises a `RequestError` for anything that is not a
    scheme.
    """
    if isinstance(scheme, Recipe):
        return scheme
    if isinstance(scheme, QuantScheme):
        return Recipe(scheme)
    if isinstance(scheme, Path) or (
        isinstance(scheme, str) and scheme.strip().lower().endswith(".json")
    ):
        raise RequestError(
            "the scheme is the path of a file",
            found=format_value(str(scheme)),
            expected=f"{SPELLINGS}, or a Recipe",
            hint="quantkit.Recipe.from_json(path) reads one",
        )
    if not isinstance(scheme, str):  # callers without types
        raise RequestError(
            f"give a scheme: {SPELLINGS}, or a Recipe; or a size: `target_bits` or `max_size`",
            found=format_value(scheme),
        )
    mix = mix_named(scheme)
    return Recipe(QuantScheme.parse(scheme) if mix is None else mix.default)


def _with_override(recipe: Recipe, module: str, scheme: str | QuantScheme) -> Recipe:
    if isinstance(scheme, QuantScheme):
        parsed = scheme
    else:
        parsed = QuantScheme.parse(scheme)
    return Recipe(recipe.default, (*recipe.overrides, Override(module, parsed)))


def _stand_in(target: Target) -> QuantScheme:
    """Return the finest candidate that a target holds; int8 fits rows of every length."""
    assert target.codes is not None
    held = []
    for one in CANDIDATES:
        if not isinstance(codec_of(target.codes, one), Reason):
            held.append(one)
    if held:
        return held[-1]
    return CANDIDATES[-1]


@dataclass(frozen=True)
class SchemeMap:
    """A recipe applied to a model.

    Attributes:
        recipe: the recipe.
        modules: every linear module, in layer order; before them the embedding, if it gets a
            scheme.
        schemes: the scheme of each that gets one.
        misfits: the requested scheme of modules whose rows it does not divide.
        with_others: the requested scheme of experts for which it does not divide the rows of all
            experts of the layer, which runtimes have as one module.
        reasons: why modules keep their floats, where it is not because the recipe says so.
    """

    recipe: Recipe
    modules: tuple[str, ...]
    schemes: dict[str, QuantScheme]
    misfits: dict[str, QuantScheme]
    with_others: dict[str, QuantScheme] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def module_schemes(self) -> dict[str, QuantScheme | None]:
        """Return the scheme of every linear module; None of those that keep their floats."""
        return {module: self.schemes.get(module) for module in self.modules}

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        config: ModelConfig,
        embeddings: Collection[QuantScheme] = (EMBEDDING_SCHEME,),
    ) -> SchemeMap:
        """Apply a recipe. Raises `RequestError` if nothing would be quantized, a pattern matches
        nothing, an override wants what cannot be, or linears that are one module on disk would have
        several schemes.
        """
        columns = linear_columns(config)
        kept = kept_unless_named(config)
        recurrent = recurrent_linears(config)
        if not columns:
            raise RequestError(
                "nothing would be quantized: no tensor is known for the weight of a linear layer"
            )
        embedding = _embedding_scheme(recipe, config, embeddings)
        if embedding is not None:
            columns = {EMBEDDING: config.hidden_size, **columns}
            kept = kept | {EMBEDDING}
        on_disk = _names_on_disk(config, columns)
        _of_stored(recipe, config).require_matches([*columns, *on_disk.values()], _routers(config))
        stateless = columns.keys() - recurrent
        own, others = (
            {*some, *(on_disk[m] for m in some if m in on_disk)} for some in (recurrent, stateless)
        )
        # Of linears that carry a state.
        specific_overrides = recipe.select_specific_overrides(own, others)
        requested = {}
        for module in columns:
            requested[module] = (specific_overrides if module in recurrent else recipe).find_scheme(
                module, on_disk.get(module), kept
            )
        changing = (
            module for module in columns if module in recurrent and may_change_state(module)
        )
        _require_fine(
            specific_overrides, {module: requested[module] for module in changing}, on_disk
        )
        schemes = {}
        for module, scheme in requested.items():
            if scheme:
                schemes[module] = scheme.fit_to_columns(columns[module])
        with_others = _fit_together(requested, schemes, columns)
        if not schemes.keys() - {EMBEDDING}:
            raise _build_empty_error(recurrent, set(columns) - kept)
        _require_one_scheme(schemes, config)
        misfits = {}
        for module, scheme in requested.items():
            if scheme and scheme != schemes[module] and module not in with_others:
                misfits[module] = scheme
        reasons = dict.fromkeys(
            (module for module in columns if module in recurrent - schemes.keys()), _RECURRENT
        )
        return cls(recipe, tuple(columns), schemes, misfits, with_others, reasons)

    def without(self, too_far: Mapping[str, str]) -> SchemeMap:
        """Return the same, but the modules of `too_far` keep their floats, each for a reason.
        Raises `QualityError` if nothing is left to quantize.
        """
        schemes = {
            module: scheme for module, scheme in self.schemes.items() if module not in too_far
        }
        if not schemes:
            module, reason = next(iter(too_far.items()))
            raise QualityError(
                "rounding changes every linear layer too much",
                found=f"'{module}': {reason}",
                hint="choose a finer scheme",
            )
        misfits, with_others = (
            {module: scheme for module, scheme in some.items() if module not in too_far}
            for some in (self.misfits, self.with_others)
        )
        reasons = {**self.reasons, **too_far}
        return replace(
            self, schemes=schemes, misfits=misfits, with_others=with_others, reasons=reasons
        )

    @property
    def embedding(self) -> QuantScheme | None:
        """Return the embedding's scheme; None if it keeps its floats."""
        return self.schemes.get(EMBEDDING)

    @property
    def linears(self) -> dict[str, QuantScheme]:
        """Return the scheme of each linear module that gets one."""
        linears: dict[str, QuantScheme] = {}
        for module, scheme in self.schemes.items():
            if module != EMBEDDING:
                linears[module] = scheme
        return linears

    def counts(self) -> dict[str, int]:
        """Return how many linear layers have each scheme, the most frequent first."""
        return dict(Counter(map(str, self.linears.values())).most_common())

    def kept(self) -> list[str]:
        """Return the linear modules that keep their floats."""
        return [module for module in self.modules if module not in self.schemes]

    def misfit_lines(self) -> list[str]:
        """Return one line for each scheme that did not fit and the one used instead, on the layers
        that it concerns.
        """
        own = []
        for (requested, used), modules in self._by_change(self.misfits).items():
            own.append(
                f"{requested} does not divide the rows of {_layers(modules)}; {used} is used there"
            )
        with_others = []
        for (requested, used), modules in self._by_change(self.with_others).items():
            with_others.append(
                f"{requested} does not divide the rows of all experts of a layer, which runtimes"
                f" have as one module; {used} is used for {_layers(modules)}"
            )
        return own + with_others

    def _by_change(
        self, requested: Mapping[str, QuantScheme]
    ) -> dict[tuple[QuantScheme, QuantScheme], list[str]]:
        """Return the modules by the requested scheme and the one used instead."""
        changes: dict[tuple[QuantScheme, QuantScheme], list[str]] = {}
        for module, scheme in requested.items():
            changes.setdefault((scheme, self.schemes[module]), []).append(module)
        return changes

    def describe(self, records: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
        """Return what the manifest says of every linear layer; `records` hold what was found for
        each weight.
        """
        facts: dict[str, dict[str, object]] = {}
        for module, scheme in self.module_schemes.items():
            if scheme is None:
                facts[module] = {
                    "scheme": None,
                    "reason": self.reasons.get(module, "kept as float by the recipe"),
                }
                continue
            facts[module] = {"scheme": str(scheme), **records.get(f"{module}.weight", {})}
            if module in self.misfits:
                facts[module]["reason"] = f"{self.misfits[module]} does not divide the row"
            if module in self.with_others:
                facts[module]["reason"] = (
                    f"{self.with_others[module]} does not divide the rows of all experts"
                )
        return facts


def _fit_together(
    requested: Mapping[str, QuantScheme | None],
    schemes: dict[str, QuantScheme],
    columns: Mapping[str, int],
) -> dict[str, QuantScheme]:
    """Give all experts of a layer for which one scheme was requested a scheme that divides the rows
    of all.

    vLLM has gate, up and down of all experts as one module, with one scheme. Block types of GGUF
    are not concerned: llama.cpp has a type for each of these.

    Args:
        requested: the scheme of each module; None for floats.
        schemes: those that divide the rows of each module alone, which are changed.
        columns: the number of inputs of each module.

    Returns:
        The requested scheme of the modules of each layer that has another one now.
    """
    banks: dict[tuple[str, QuantScheme], list[str]] = {}
    for module, scheme in requested.items():
        bank = expert_bank(module)
        if (
            bank is not None
            and scheme is not None
            and (scheme.of_small_floats or scheme.scales is Scales.FLOATS)
        ):
            banks.setdefault((bank, scheme), []).append(module)
    changed: dict[str, QuantScheme] = {}
    for (_, scheme), modules in banks.items():
        widths = {columns[module] for module in modules}
        candidates = dict.fromkeys(schemes[module] for module in modules)
        if len(candidates) > 1:
            fitting = (
                candidate
                for candidate in candidates
                if all(candidate.fit_to_columns(width) == candidate for width in widths)
            )
            used = next(fitting, QuantScheme(8, None))
            schemes.update(dict.fromkeys(modules, used))
            changed.update(dict.fromkeys(modules, scheme))
    return changed


def _require_fine(
    recipe: Recipe, requested: Mapping[str, QuantScheme | None], on_disk: Mapping[str, str]
) -> None:
    """Raise a `RequestError` if linears that change a state would get few bits."""
    for module, scheme in requested.items():
        if scheme is not None and scheme.bits < _FINE:
            names = (module, on_disk.get(module, module))
            named = next(
                override
                for override in reversed(recipe.overrides)
                if any(map(override.matches, names))
            )
            raise RequestError(
                f"'{module}' changes a state that goes from token to token: it takes int8, or keeps"
                " its floats",
                found=f"{scheme} for {format_value(named.pattern)}",
                expected='"int8" or "keep"',
            )


def _build_empty_error(recurrent: Collection[str], other_modules: Collection[str]) -> RequestError:
    """Return the error where no linear gets a scheme."""
    if recurrent and not other_modules:
        module = min(recurrent)
        if module.count(".") > 1:
            pattern = f"*.{module.split('.')[-2]}.*"
        else:
            pattern = module
        named = f'{{"pattern": "{pattern}", "scheme": "int8"}}'
        return RequestError(
            "nothing would be quantized: all linear layers carry a state from token to token, and"
            " keep their floats",
            hint=f"a recipe that names them gives them int8: {named}",
        )
    return RequestError("the recipe keeps every linear; nothing would be quantized")


def with_head_on_disk(recipe: Recipe, config: ModelConfig) -> Recipe:
    """Return a recipe in which ``lm_head`` is the head of a model known by its tensors, if it has
    one with another name.
    """
    heads = [tensor.module for tensor in config.tensors or () if tensor.role == "head"]
    if len(heads) != 1 or heads[0] == _HEAD:
        return recipe
    renamed = (
        replace(override, pattern=heads[0]) if override.pattern == _HEAD else override
        for override in recipe.overrides
    )
    return Recipe(recipe.default, tuple(renamed))


def of_embedding(recipe: Recipe) -> Override | None:
    """Return what a recipe says of the embedding; None if nothing, so that it keeps its floats."""
    return next(
        (override for override in reversed(recipe.overrides) if override.matches(EMBEDDING)), None
    )


def _embedding_scheme(
    recipe: Recipe, config: ModelConfig, embeddings: Collection[QuantScheme]
) -> QuantScheme | None:
    """Return the scheme of the embedding; None if it keeps its floats. Raises `RequestError` if it
    does not support the requested one, or a head that is tied to it has another.
    """
    named = of_embedding(recipe)
    result = None if named is None else named.scheme
    known = config.runnable or any(tensor.role == "embedding" for tensor in config.tensors or ())
    if named is not None and result is not None and not known:
        raise RequestError(
            "the embedding of a model without a decoder here keeps its floats",
            found=format_value(named.pattern),
        )
    if named is not None and result is not None and result not in embeddings:
        raise RequestError(
            "the embedding cannot be quantized so",
            found=f"{result} for {format_value(named.pattern)}",
            expected=f"{EMBEDDING_SCHEME}, one scale for each token",
        )
    head = next(
        (override for override in reversed(recipe.overrides) if override.matches(_HEAD)), None
    )
    if (
        config.tied_embeddings
        and head is not None
        and head.scheme is not None
        and head.scheme != result
    ):
        raise RequestError(
            "lm_head is tied to the embedding"
            + (", and both are one" if result else " and keeps its floats"),
            found=f"{head.scheme} for {format_value(head.pattern)}",
            expected=str(result) if result else None,
            hint=f'`embedding="{EMBEDDING_SCHEME}"` quantizes both',
        )
    return result


def _of_stored(recipe: Recipe, config: ModelConfig) -> Recipe:
    """Return a recipe without overrides that name a tied head alone, which is the embedding."""
    if not config.tied_embeddings:
        return recipe
    others = (*linear_columns(config), EMBEDDING)
    of_head = []
    for override in recipe.overrides:
        if override.scheme is not None and override.matches(_HEAD):
            of_head.append(override)
    alone = [one for one in of_head if not any(map(one.matches, others))]
    return Recipe(
        recipe.default, tuple(override for override in recipe.overrides if override not in alone)
    )


def _names_on_disk(config: ModelConfig, modules: Collection[str]) -> dict[str, str]:
    """Return what linears are called on disk, where otherwise: users know them by these names."""
    parts = (
        (part.removesuffix(".weight"), tensor)
        for tensor in disk_tensors(config)
        for part in tensor.parts
    )
    names: dict[str, str] = {}
    for module, tensor in parts:
        if module in modules and module != tensor.module:
            names[module] = tensor.module
    return names


def _routers(config: ModelConfig) -> set[str]:
    """Return the names, canonical and on disk, of linears that are never quantized."""
    routers = set()
    for p in parameters(config):
        if p.is_linear_weight and p.linear and not p.linear.quantizable:
            routers.add(p.name)
    if routers:
        on_disk = set()
        for tensor in disk_tensors(config):
            if routers & set(tensor.parts):
                on_disk.add(tensor.name)
    else:
        on_disk = set()
    return {name.removesuffix(".weight") for name in routers | on_disk}


def _require_one_scheme(schemes: Mapping[str, QuantScheme], config: ModelConfig) -> None:
    """Raise a `RequestError` if linears that are one module on disk have several schemes."""
    for tensor in disk_tensors(config, schemes):
        if not tensor.quantizable:
            continue
        found = {}
        for part in tensor.parts:
            found[part.removesuffix(".weight")] = schemes.get(part.removesuffix(".weight"))
        if len(set(found.values())) > 1:
            given = (
                f"{module.rpartition('.')[2]} {scheme or 'kept'}"
                for module, scheme in found.items()
            )
            raise RequestError(
                f"'{tensor.module}' is one module on disk and cannot have several schemes",
                found=", ".join(given),
                hint=f"give them all one, by the pattern '*.{tensor.module.rpartition('.')[2]}'",
            )


def _layers(modules: list[str]) -> str:
    if len(modules) == 1:
        return modules[0]
    return f"{len(modules)} linears, {modules[0]} first"
