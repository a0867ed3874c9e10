"""Recipes: which quantization scheme each linear layer of a model is to get."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.base.arguments import as_path, as_string, as_strings, require_instance, wrong_type
from quantkit.base.json_values import Settings, format_value, parse_object
from quantkit.errors import QuantkitError, RequestError
from quantkit.tensors.scheme import QuantScheme

_HEADS = frozenset({"lm_head"})


@dataclass(frozen=True)
class Override:
    """A glob on module names and the scheme of the modules it matches (``None``: keep as float).

    Raises:
        RequestError: for values of other types.
    """

    pattern: str
    scheme: QuantScheme | None

    def __post_init__(self) -> None:
        as_string("pattern", self.pattern)
        if self.scheme is not None:
            _require_scheme("scheme", self.scheme)

    def matches(self, module: str) -> bool:
        return fnmatch.fnmatchcase(module, self.pattern)


@dataclass(frozen=True)
class Recipe:
    """A default scheme for all decoder linears and per-layer overrides, later ones winning.

    ``lm_head`` keeps its floats unless an override names it, as do a few others of models known by
    their tensors only; linear attention and state spaces have to be named by a pattern that matches
    nothing else.

    Raises:
        RequestError: for values of other types.

    Example:
        >>> int8 = quantkit.QuantScheme.parse("int8")
        >>> first = quantkit.Override("model.layers.0.*", None)
        >>> head = quantkit.Override("lm_head", int8)
        >>> recipe = quantkit.Recipe(quantkit.QuantScheme.parse("int4-g128"), (first, head))
        >>> quantkit.quantize("model", "model-int4", recipe)
    """

    default: QuantScheme
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        _require_scheme("default", self.default)
        if not isinstance(self.overrides, list | tuple):
            raise wrong_type("overrides", self.overrides, "several of quantkit.Override")
        for override in self.overrides:
            require_instance("overrides", override, Override, "several of quantkit.Override")
        object.__setattr__(self, "overrides", tuple(self.overrides))

    @classmethod
    def from_json(cls, path: str | Path) -> Recipe:
        """Read ``{"default": "int4-g128", "overrides": [{"pattern": ..., "scheme": ...}]}``.

        A scheme of ``"keep"`` leaves the layers in floating point.

        Raises:
            RequestError: if the file is missing, is no such JSON, or names unknown keys.
        """
        path = as_path("path", path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the recipe: {error}", path=path) from error
        try:
            settings = Settings(parse_object(text, path), path)
            _require_keys(settings, {"default"}, {"overrides"})
            default = settings.string("default")
            overrides = []
            for entry in settings.objects("overrides"):
                _require_keys(entry, {"pattern", "scheme"})
                overrides.append((entry.string("pattern"), entry.string("scheme")))
        except QuantkitError as error:
            expected = (
                '{"default": SCHEME, "overrides": [{"pattern": GLOB, "scheme": SCHEME or "keep"}]}'
            )
            raise RequestError(
                f"is not a quantization recipe: {error.problem}",
                path=path,
                found=error.found,
                expected=error.expected or expected,
            ) from error
        default_scheme = _scheme(default, path)
        parsed_overrides = []
        for pattern, scheme_name in overrides:
            scheme = None if scheme_name == "keep" else _scheme(scheme_name, path)
            parsed_overrides.append(Override(pattern, scheme))
        return cls(default_scheme, tuple(parsed_overrides))

    def to_json(self) -> dict[str, Any]:
        """Write the JSON form that `from_json` reads."""
        overrides = []
        for override in self.overrides:
            scheme = "keep" if override.scheme is None else str(override.scheme)
            overrides.append({"pattern": override.pattern, "scheme": scheme})
        return {"default": str(self.default), "overrides": overrides}

    def keeping(self, patterns: Iterable[str]) -> Recipe:
        """Copy this recipe with more layers kept as floats."""
        # At the end, because later overrides win.
        added = [Override(pattern, None) for pattern in as_strings("patterns", patterns)]
        return Recipe(self.default, (*self.overrides, *added))

    def find_scheme(
        self, module: str, on_disk: str | None = None, kept: Collection[str] = _HEADS
    ) -> QuantScheme | None:
        """Find the scheme that the recipe requests for a module, whatever its shape.

        Args:
            on_disk: its name on disk, if that differs; patterns match either name.
            kept: the modules that keep their floats unless an override names them.
        """
        for override in reversed(self.overrides):
            if override.matches(module) or (on_disk is not None and override.matches(on_disk)):
                return override.scheme
        if module in kept:
            return None
        return self.default

    def select_specific_overrides(
        self, modules: Collection[str], other_modules: Collection[str]
    ) -> Recipe:
        """Reduce this recipe to modules that have to be named alone, given all names of them and of
        the others: to the overrides that keep floats, and those that match some of them and none of
        the others. A pattern that matches everything names nothing.
        """

        def is_specific(override: Override) -> bool:
            has_name = bool(override.pattern.strip("*?."))
            if not has_name or any(map(override.matches, other_modules)):
                return False
            return any(map(override.matches, modules))

        specific = []
        for override in self.overrides:
            if override.scheme is None or is_specific(override):
                specific.append(override)
        return Recipe(self.default, tuple(specific))

    def assign(self, columns: Mapping[str, int]) -> dict[str, QuantScheme]:
        """Choose the scheme of every module that gets one, fitted to its columns.

        Args:
            columns: every linear module by name with its number of inputs.

        Raises:
            RequestError: if an override matches no module.
        """
        self.require_matches(columns)
        schemes = {}
        for module, count in columns.items():
            requested = self.find_scheme(module)
            if requested is not None:
                schemes[module] = requested.fit_to_columns(count)
        return schemes

    def require_matches(self, names: Collection[str], routers: Collection[str] = ()) -> None:
        """Require that each override matches something.

        Args:
            names: the names of all linear modules, including those on disk.
            routers: the names of linears that never get a scheme; a pattern may keep them.

        Raises:
            RequestError: if one matches no module, or requests a scheme for routers alone.
        """
        for override in self.overrides:
            if any(map(override.matches, names)):
                continue
            pattern = format_value(override.pattern)
            matches_router = any(map(override.matches, routers))
            if matches_router and override.scheme is not None:
                raise RequestError(
                    "routers and gates of shared experts are not quantized", found=pattern
                )
            if not matches_router:
                expected = "a glob such as 'model.layers.0.*' or '*.down_proj'"
                raise RequestError(
                    "pattern matches no linear layer", found=pattern, expected=expected
                )


def _require_scheme(name: str, scheme: object) -> None:
    if not isinstance(scheme, QuantScheme):
        raise wrong_type(name, scheme, 'a QuantScheme, such as QuantScheme.parse("int8")')


def _scheme(name: str, path: str | Path) -> QuantScheme:
    """Parse a scheme of a file, and name the file in errors."""
    try:
        return QuantScheme.parse(name)
    except RequestError as error:
        raise RequestError(
            error.problem, path=path, found=error.found, expected=error.expected
        ) from error


def _require_keys(settings: Settings, needed: set[str], optional: Collection[str] = ()) -> None:
    keys = set(settings.values)
    if needed - keys or keys - needed.union(optional):
        raise RequestError("unknown or missing keys", found=format_value(sorted(keys)))
