"""Build the recipe that the options of `quantize` describe, and apply it to the linear layers of a
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import disk_tensors
from quantkit.architectures.families.opaque import may_change_state
from quantkit.architectures.names import CANONICAL, EMBEDDING, expert_bank
from quantkit.architectures.topology import (
    collect_default_floats,
    linear_columns,
    parameters,
    recurrent_linears,
)
from quantkit.base.arguments import as_strings
from quantkit.base.json_values import format_value
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.bit_allocation.size_target import CANDIDATES
from quantkit.errors import QualityError, RequestError
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.registry import Target
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.tensors.mix import find_mix
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import EMBEDDING_SCHEME, KEEP, SPELLINGS, QuantScheme, Scales

if TYPE_CHECKING:
    from quantkit.jobs.quantize import gguf_mix
else:
    gguf_mix = LateModule("quantkit.jobs.quantize.gguf_mix")

_HEAD = CANONICAL["head"]
_RECURRENT = (
    "carries a state from token to token: stays unquantized unless a recipe names it explicitly"
)
# Linears that change a state need at least so many bits: their errors add up from token to token.
_FINE = 8


def build_recipe(options: QuantizeOptions) -> Recipe:
    """Build a recipe of the scheme, with overrides for head, embedding and the layers to keep.

    If schemes are to be chosen for a size, the finest one that the target supports is their
    placeholder until then.

    Raises:
        RequestError: for no scheme, one that does not exist, or options that contradict each other.
    """
    kept = as_strings("keep", options.keep)
    if options.size is None:
        recipe = _recipe(options.scheme)
    else:
        recipe = _recipe(_choose_placeholder_scheme(options.target))
    if options.head is not None:
        if isinstance(options.scheme, Recipe):
            raise RequestError(
                Message(Option("head"), " cannot be combined with a recipe"),
                hint=f"add an override for {_HEAD} to the recipe",
            )
        recipe = Recipe(recipe.default, (*recipe.overrides, _parse_override(_HEAD, options.head)))
    if options.embedding is not None:
        if options.embedding == KEEP:
            # Named, so that it is not quantized by default.
            embedding_override = Override(EMBEDDING, None)
        else:
            embedding_override = _parse_override(EMBEDDING, options.embedding)
        recipe = Recipe(recipe.default, (*recipe.overrides, embedding_override))
        for pattern in kept:
            if Override(pattern, None).matches(EMBEDDING):
                raise RequestError(
                    Message(
                        Option("embedding"),
                        " quantizes a module that ",
                        Option("keep"),
                        " leaves unquantized",
                    ),
                    found=f"{format_value(pattern)} matches '{EMBEDDING}'",
                    hint=(
                        Message(
                            "leave ",
                            Option("embedding"),
                            " out to keep it unquantized, or use a pattern that only matches"
                            " linears",
                        )
                    ),
                )
    # Of several overrides the last one counts, so that `keep` comes after all others.
    return recipe.keeping(kept)


def apply_gguf_mix(options: QuantizeOptions, recipe: Recipe, config: ModelConfig) -> Recipe:
    """Add the types of llama.cpp's mix for a model to a recipe, if one was requested by its name;
    the overrides of other options come after them. Raises `UnsupportedError` for an architecture
    that GGUF does not have.
    """
    mix = find_mix(options.scheme)
    if mix is None:
        return recipe
    mix_recipe = gguf_mix.MixRules(mix, config).recipe()
    return Recipe(mix_recipe.default, (*mix_recipe.overrides, *recipe.overrides))


def _recipe(scheme: str | QuantScheme | Recipe | None) -> Recipe:
    """Build a recipe with one scheme for all linears. Raises `RequestError` for anything that is
    not a scheme.
    """
    if isinstance(scheme, Recipe):
        return scheme
    if isinstance(scheme, QuantScheme):
        return Recipe(scheme)
    has_json_name = isinstance(scheme, str) and scheme.strip().lower().endswith(".json")
    if isinstance(scheme, Path) or has_json_name:
        raise RequestError(
            "the scheme is the path of a file",
            found=format_value(str(scheme)),
            expected=f"{SPELLINGS}, or a Recipe",
            hint="quantkit.Recipe.from_json(path) reads a recipe",
        )
    # Callers without a type checker may pass anything.
    if not isinstance(scheme, str):
        raise RequestError(
            Message(
                f"expected a scheme ({SPELLINGS}, or a Recipe) or a size: ",
                Option("target_bits"),
                " or ",
                Option("max_size"),
            ),
            found=format_value(scheme),
        )
    mix = find_mix(scheme)
    # `apply_gguf_mix` adds the overrides of a mix once the model is open.
    if mix is not None:
        return Recipe(mix.default)
    return Recipe(QuantScheme.parse(scheme))


def _parse_override(module: str, scheme: str | QuantScheme) -> Override:
    if isinstance(scheme, QuantScheme):
        return Override(module, scheme)
    return Override(module, QuantScheme.parse(scheme))


def _choose_placeholder_scheme(target: Target) -> QuantScheme:
    """Choose the finest candidate that a target supports; int8 fits rows of every length."""
    assert target.codes is not None
    finest = CANDIDATES[-1]
    # From the finest candidate, the last one, to coarser ones.
    for candidate in reversed(CANDIDATES):
        if not isinstance(choose_codec(target.codes, candidate), Reason):
            finest = candidate
            break
    return finest


@dataclass(frozen=True)
class SchemeMap:
    """A recipe applied to a model.

    Attributes:
        recipe: the recipe.
        modules: every linear module, in layer order; before them the embedding, if it gets a
            scheme.
        schemes: the scheme of each that gets one.
        misfits: the requested scheme of modules whose rows it does not divide.
        bank_misfits: the requested scheme of experts that got another one because it does not
            divide the rows of every expert of their layer (runtimes load these as one module).
        reasons: why modules keep their floats, where it is not because the recipe says so.
    """

    recipe: Recipe
    modules: tuple[str, ...]
    schemes: dict[str, QuantScheme]
    misfits: dict[str, QuantScheme]
    bank_misfits: dict[str, QuantScheme] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def module_schemes(self) -> dict[str, QuantScheme | None]:
        """List the scheme of every linear module; None for those that keep their floats."""
        return {module: self.schemes.get(module) for module in self.modules}

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        config: ModelConfig,
        embedding_schemes: Collection[QuantScheme] = (EMBEDDING_SCHEME,),
    ) -> SchemeMap:
        """Apply a recipe. Raises `RequestError` if nothing would be quantized, a pattern matches
        nothing, an override cannot be applied, or linears that are one module on disk would have
        several schemes.
        """
        columns = linear_columns(config)
        kept = collect_default_floats(config)
        recurrent = recurrent_linears(config)
        if not columns:
            raise RequestError("nothing would be quantized: no weight of a linear layer was found")
        embedding = _embedding_scheme(recipe, config, embedding_schemes)
        if embedding is not None:
            columns = {EMBEDDING: config.hidden_size, **columns}
            kept = kept | {EMBEDDING}
        on_disk = _names_on_disk(config, columns)
        _drop_tied_head_overrides(recipe, config, embedding).require_matches(
            # The embedding may be named also where it keeps its floats.
            [*columns, EMBEDDING, *on_disk.values()],
            _routers(config),
        )
        recurrent_names = _add_disk_names(recurrent, on_disk)
        other_names = _add_disk_names(columns.keys() - recurrent, on_disk)
        # Linears that carry a state keep their floats unless an override names them alone: a
        # pattern such as "*" is hardly meant for them.
        specific_overrides = recipe.select_specific_overrides(recurrent_names, other_names)
        requested: dict[str, QuantScheme | None] = {}
        changing: dict[str, QuantScheme | None] = {}
        for module in columns:
            is_recurrent = module in recurrent
            applied_recipe = specific_overrides if is_recurrent else recipe
            requested[module] = applied_recipe.find_scheme(module, on_disk.get(module), kept)
            if is_recurrent and may_change_state(module):
                changing[module] = requested[module]
        _require_fine(specific_overrides, changing, on_disk)
        schemes = {}
        for module, scheme in requested.items():
            if scheme:
                schemes[module] = scheme.fit_to_columns(columns[module])
        bank_misfits = _fit_together(requested, schemes, columns)
        if not schemes.keys() - {EMBEDDING}:
            raise _build_empty_error(recurrent, set(columns) - kept)
        _require_one_scheme(schemes, config)
        misfits = {}
        for module, scheme in requested.items():
            if scheme and scheme != schemes[module] and module not in bank_misfits:
                misfits[module] = scheme
        reasons = {}
        for module in columns:
            if module in recurrent and module not in schemes:
                reasons[module] = _RECURRENT
        return cls(recipe, tuple(columns), schemes, misfits, bank_misfits, reasons)

    def without(self, too_far: Mapping[str, str]) -> SchemeMap:
        """Let the modules of `too_far` keep their floats, each for a reason. Raises `QualityError`
        if nothing remains to quantize.
        """
        schemes = _leave_out(self.schemes, too_far)
        if not schemes:
            module, reason = next(iter(too_far.items()))
            raise QualityError(
                "rounding changes every linear layer too much",
                found=f"'{module}': {reason}",
                hint="choose a finer scheme",
            )
        return replace(
            self,
            schemes=schemes,
            misfits=_leave_out(self.misfits, too_far),
            bank_misfits=_leave_out(self.bank_misfits, too_far),
            reasons={**self.reasons, **too_far},
        )

    @property
    def embedding(self) -> QuantScheme | None:
        """Return the embedding's scheme; None if it keeps its floats."""
        return self.schemes.get(EMBEDDING)

    @property
    def linears(self) -> dict[str, QuantScheme]:
        """List the scheme of each linear module that gets one."""
        linears: dict[str, QuantScheme] = {}
        for module, scheme in self.schemes.items():
            if module != EMBEDDING:
                linears[module] = scheme
        return linears

    def counts(self) -> dict[str, int]:
        """Count the linear layers of each scheme, the most frequent scheme first."""
        return dict(Counter(map(str, self.linears.values())).most_common())

    def kept(self) -> list[str]:
        """List the linear modules that keep their floats."""
        return [module for module in self.modules if module not in self.schemes]

    def misfit_lines(self) -> list[str]:
        """Write one line for each scheme that did not fit and the one used instead, on the layers
        that it concerns.
        """
        lines = []
        for (requested, used), modules in self._by_change(self.misfits).items():
            lines.append(
                f"{requested} does not divide the rows of {_layers(modules)}; {used} is used there"
            )
        for (requested, used), modules in self._by_change(self.bank_misfits).items():
            lines.append(
                f"{requested} does not divide the rows of all experts of a layer, which runtimes"
                f" have as one module; {used} is used for {_layers(modules)}"
            )
        return lines

    def _by_change(
        self, requested: Mapping[str, QuantScheme]
    ) -> dict[tuple[QuantScheme, QuantScheme], list[str]]:
        """Group modules by the requested scheme and the one used instead."""
        changes: dict[tuple[QuantScheme, QuantScheme], list[str]] = {}
        for module, scheme in requested.items():
            changes.setdefault((scheme, self.schemes[module]), []).append(module)
        return changes

    def describe(self, records: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
        """Write the manifest's entries on every linear layer, with the `records` of each weight."""
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
            if module in self.bank_misfits:
                facts[module]["reason"] = (
                    f"{self.bank_misfits[module]} does not divide the rows of all experts"
                )
        return facts


def _add_disk_names(modules: Collection[str], on_disk: Mapping[str, str]) -> set[str]:
    """Add the names that modules have on disk, as users know them by these too."""
    names = set(modules)
    for module in modules:
        if module in on_disk:
            names.add(on_disk[module])
    return names


def _leave_out(
    schemes: Mapping[str, QuantScheme], modules: Collection[str]
) -> dict[str, QuantScheme]:
    """Copy the schemes without those of some modules."""
    return {module: scheme for module, scheme in schemes.items() if module not in modules}


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
        The requested scheme of the modules of each layer whose scheme was changed.
    """
    banks: dict[tuple[str, QuantScheme], list[str]] = {}
    for module, scheme in requested.items():
        bank = expert_bank(module)
        if bank is None or scheme is None:
            continue
        # Block types of GGUF have scales in integers.
        if scheme.of_small_floats or scheme.scales is Scales.FLOATS:
            banks.setdefault((bank, scheme), []).append(module)
    changed: dict[str, QuantScheme] = {}
    for (_, scheme), modules in banks.items():
        widths = {columns[module] for module in modules}
        candidates = dict.fromkeys(schemes[module] for module in modules)
        if len(candidates) > 1:
            # One scale for each row fits every width.
            used = QuantScheme(8, None)
            for candidate in candidates:
                if all(candidate.fit_to_columns(width) == candidate for width in widths):
                    used = candidate
                    break
            schemes.update(dict.fromkeys(modules, used))
            changed.update(dict.fromkeys(modules, scheme))
    return changed


def _require_fine(
    recipe: Recipe, requested: Mapping[str, QuantScheme | None], on_disk: Mapping[str, str]
) -> None:
    """Raise a `RequestError` if linears that change a state would get few bits."""
    for module, scheme in requested.items():
        if scheme is not None and scheme.bits < _FINE:
            override = _find_last_override(recipe, module, on_disk.get(module, module))
            # Only an override gives such a linear a scheme.
            assert override is not None
            raise RequestError(
                f"'{module}' changes a state that is passed from token to token: it can only"
                " be int8 or unquantized",
                found=f"{scheme} for {format_value(override.pattern)}",
                expected='"int8" or "keep"',
            )


def _find_last_override(recipe: Recipe, *names: str) -> Override | None:
    """Find the override that counts for a module with these names: the last one that matches."""
    for override in reversed(recipe.overrides):
        if any(override.matches(name) for name in names):
            return override
    return None


def _build_empty_error(recurrent: Collection[str], other_modules: Collection[str]) -> RequestError:
    """Build the error for a recipe by which no linear gets a scheme."""
    if recurrent and not other_modules:
        module = min(recurrent)
        if module.count(".") > 1:
            pattern = f"*.{module.split('.')[-2]}.*"
        else:
            pattern = module
        example = f'{{"pattern": "{pattern}", "scheme": "int8"}}'
        return RequestError(
            "nothing would be quantized: all linear layers carry a state from token to token, and"
            " stay unquantized",
            hint=f"a recipe that names them can quantize them to int8: {example}",
        )
    return RequestError("nothing would be quantized: the recipe keeps every linear unquantized")


def with_head_on_disk(recipe: Recipe, config: ModelConfig) -> Recipe:
    """Rename ``lm_head`` in a recipe to the head of a model known by its tensors, if it has one
    with another name.
    """
    heads = [tensor.module for tensor in config.tensors or () if tensor.role == "head"]
    # With several heads it is unknown which one the name means.
    if len(heads) != 1 or heads[0] == _HEAD:
        return recipe
    overrides = []
    for override in recipe.overrides:
        if override.pattern == _HEAD:
            overrides.append(replace(override, pattern=heads[0]))
        else:
            overrides.append(override)
    return Recipe(recipe.default, tuple(overrides))


def find_embedding_override(recipe: Recipe) -> Override | None:
    """Find the override of the embedding; None if there is none."""
    return _find_last_override(recipe, EMBEDDING)


def find_head_override(recipe: Recipe) -> Override | None:
    """Find the override of the head; None if there is none."""
    return _find_last_override(recipe, _HEAD)


def _embedding_scheme(
    recipe: Recipe, config: ModelConfig, embedding_schemes: Collection[QuantScheme]
) -> QuantScheme | None:
    """Find the scheme of the embedding; None if it keeps its floats. Raises `RequestError` if it
    does not support the requested one, or a head that is tied to it has another.
    """
    override = find_embedding_override(recipe)
    scheme = None if override is None else override.scheme
    # The embedding of a model known by its tensors may have any name.
    has_role = any(tensor.role == "embedding" for tensor in config.tensors or ())
    is_identified = config.runnable or has_role
    if override is not None and scheme is not None and not is_identified:
        raise RequestError(
            "the embedding of a model that quantkit does not run itself cannot be quantized",
            found=format_value(override.pattern),
        )
    if override is not None and scheme is not None and scheme not in embedding_schemes:
        raise RequestError(
            "the embedding does not support this scheme",
            found=f"{scheme} for {format_value(override.pattern)}",
            expected=f"{EMBEDDING_SCHEME}, one scale for each token",
        )
    head = find_head_override(recipe)
    if (
        config.tied_embeddings
        and head is not None
        and head.scheme is not None
        and head.scheme != scheme
    ):
        if scheme:
            state = ", so both need the same scheme"
        else:
            state = ", which stays unquantized"
        raise RequestError(
            f"lm_head is tied to the embedding{state}",
            found=f"{head.scheme} for {format_value(head.pattern)}",
            expected=str(scheme) if scheme else None,
            hint=Message(Option("embedding", value=str(EMBEDDING_SCHEME)), " quantizes both"),
        )
    return scheme


def _drop_tied_head_overrides(
    recipe: Recipe, config: ModelConfig, embedding: QuantScheme | None
) -> Recipe:
    """Drop the overrides that name a tied head alone, which is the embedding and has its scheme;
    but not those that keep its floats if that scheme quantizes it.
    """
    if not config.tied_embeddings:
        return recipe
    # A tied head is no module of its own, so that its name would count as a pattern without match.
    other_modules = (*linear_columns(config), EMBEDDING)
    overrides = []
    for override in recipe.overrides:
        contradicts_embedding = override.scheme is None and embedding is not None
        names_head_alone = override.matches(_HEAD) and not any(
            override.matches(module) for module in other_modules
        )
        if contradicts_embedding or not names_head_alone:
            overrides.append(override)
    return Recipe(recipe.default, tuple(overrides))


def _names_on_disk(config: ModelConfig, modules: Collection[str]) -> dict[str, str]:
    """Map linears to their names on disk, where these differ: users know them by these names."""
    names: dict[str, str] = {}
    for tensor in disk_tensors(config):
        for part in tensor.parts:
            module = part.removesuffix(".weight")
            if module in modules and module != tensor.module:
                names[module] = tensor.module
    return names


def _routers(config: ModelConfig) -> set[str]:
    """List the names, canonical and on disk, of linears that are never quantized."""
    routers = set()
    for parameter in parameters(config):
        if parameter.is_linear_weight and parameter.linear and not parameter.linear.quantizable:
            routers.add(parameter.name)
    on_disk = set()
    if routers:
        for tensor in disk_tensors(config):
            if routers & set(tensor.parts):
                on_disk.add(tensor.name)
    return {name.removesuffix(".weight") for name in routers | on_disk}


def _require_one_scheme(schemes: Mapping[str, QuantScheme], config: ModelConfig) -> None:
    """Raise a `RequestError` if linears that are one module on disk have several schemes."""
    for tensor in disk_tensors(config, schemes):
        if not tensor.quantizable:
            continue
        scheme_by_module = {}
        for part in tensor.parts:
            module = part.removesuffix(".weight")
            scheme_by_module[module] = schemes.get(module)
        if len(set(scheme_by_module.values())) > 1:
            described = []
            for module, scheme in scheme_by_module.items():
                described.append(f"{module.rpartition('.')[2]} {scheme or 'kept'}")
            raise RequestError(
                f"'{tensor.module}' is one module on disk and cannot have several schemes",
                found=", ".join(described),
                hint=(
                    "use one scheme for all, with the pattern"
                    f" '*.{tensor.module.rpartition('.')[2]}'"
                ),
            )


def _layers(modules: list[str]) -> str:
    if len(modules) == 1:
        return modules[0]
    return f"{len(modules)} linears, {modules[0]} first"
