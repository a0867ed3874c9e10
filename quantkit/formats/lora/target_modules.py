"""Which modules of its base a LoRA adapter changes: PEFT's `check_target_module_exists`, setting
by setting.
"""

from __future__ import annotations

from quantkit.base.json_values import Settings, format_value
from quantkit.base.patterns import MatchTime, Pattern
from quantkit.errors import CheckpointError

_ALL_LINEAR = "all-linear"
_MAX_LAYERS = 1 << 20
_ANY_NUMBERED_PARENT = r".*?\.[^.]*\.(?P<index>\d+)\."
"""The first number in a name that two parts precede: PEFT finds no layer in ``h.0.attn``."""


class TargetModules:
    """The settings that select modules: ``target_modules``, ``exclude_modules``,
    ``layers_to_transform``, ``layers_pattern`` and ``modules_to_save``.

    Attributes:
        listed: the last parts of the names of all targets, if the adapter lists them; None if it
            has a pattern.
        is_partial: whether settings exclude some of the modules that are listed.
    """

    def __init__(self, settings: Settings, match_time: MatchTime) -> None:
        """Read the settings of an adapter.

        Raises:
            CheckpointError: for values of the wrong type, invalid patterns, and settings that PEFT
                does not combine.
        """
        self._targets = _read_names(settings, "target_modules", match_time)
        # PEFT's word for every linear but the head; no pattern, although it is one string.
        if settings.values.get("target_modules") == _ALL_LINEAR:
            self._targets = None
        self._excluded = _read_names(settings, "exclude_modules", match_time)
        self._saved = _read_saved(settings, match_time)
        self._layers = _read_layers(settings)
        self._layer_patterns = _read_layer_patterns(settings, match_time)
        self.listed = self._targets if isinstance(self._targets, list) else None
        self.is_partial = bool(self._excluded) or self._layers is not None
        has_one_expression = isinstance(settings.values.get("target_modules"), str)
        for key in ("layers_to_transform", "layers_pattern"):
            if settings.has(key) and has_one_expression:
                raise CheckpointError(
                    f"'{key}' is combined with one expression for 'target_modules', which PEFT"
                    " refuses",
                    path=settings.path,
                    found=format_value(settings.values[key]),
                    expected="a list of 'target_modules'",
                )

    def find_exclusion(self, module: str) -> str | None:
        """Find the setting by which an adapter leaves a module as it is; None if it changes
        the module.
        """
        # The order is PEFT's, so that the setting named in an error is the one that decides there.
        if self._excluded is not None and _matches(self._excluded, module):
            return "exclude_modules"
        if any(pattern.match(module) for pattern in self._saved):
            return "modules_to_save"
        if self._targets is not None and not _matches(self._targets, module):
            return "target_modules"
        # PEFT does not look for the layer of a module that is listed by its whole name.
        if self._layers is None or module in (self.listed or ()):
            return None
        if self._find_layer(module) in self._layers:
            return None
        return "layers_to_transform"

    def _find_layer(self, module: str) -> int | None:
        """Read the number of a module's layer from its name; the first pattern that matches
        decides.
        """
        for pattern in self._layer_patterns:
            match = pattern.match(module)
            if match is not None:
                return int(match["index"])
        return None


def _matches(names: list[str] | Pattern, module: str) -> bool:
    # PEFT compares a list with the end of a name, and an expression with all of it.
    if isinstance(names, Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _read_names(settings: Settings, key: str, match_time: MatchTime) -> list[str] | Pattern | None:
    """Read the last parts of names, or one pattern of whole names; None if there are none."""
    value = settings.values.get(key)
    # An empty list excludes nothing. As targets it selects nothing, while None stands for any.
    if value is None or (key == "exclude_modules" and not value):
        return None
    if isinstance(value, str):
        return Pattern(value, key=f"'{key}'", match_time=match_time)
    return settings.strings(key)


def _read_saved(settings: Settings, match_time: MatchTime) -> list[Pattern]:
    """Read the modules that are saved as a whole; their names are patterns in PEFT, too."""
    key = "modules_to_save"
    if settings.has(key):
        names = settings.strings(key)
    else:
        names = []
    # An unescaped name matches itself, and everything inside it.
    prefix = r"(^|.*\.)"
    suffix = r"($|\..*)"
    patterns: list[Pattern] = []
    for name in names:
        pattern = Pattern(name, key=f"'{key}'", match_time=match_time, prefix=prefix, suffix=suffix)
        patterns.append(pattern)
    return patterns


def _read_layers(settings: Settings) -> set[int] | None:
    """Read the numbers of the layers that are changed; None for all layers."""
    key = "layers_to_transform"
    value = settings.values.get(key)
    # PEFT changes all layers if the list is empty, but only layer 0 if the value is 0.
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        return {settings.integer(key, 0, _MAX_LAYERS)}
    return set(settings.integers(key, 0, _MAX_LAYERS))


def _read_layer_patterns(settings: Settings, match_time: MatchTime) -> list[Pattern]:
    """Read what precedes the number of a layer, such as ``layers``; by default, any name."""
    key = "layers_pattern"
    value = settings.values.get(key)
    if not value:
        return [Pattern(_ANY_NUMBERED_PARENT, key=f"'{key}'", match_time=match_time)]
    if isinstance(value, str):
        names = [value]
    else:
        names = settings.strings(key)
    # The prefix is lazy so that the first number counts: a later one can be that of an expert.
    layer_patterns: list[Pattern] = []
    for name in names:
        layer_patterns.append(
            Pattern(
                name,
                key=f"'{key}'",
                match_time=match_time,
                prefix=r"(?:^|.*?\.)",
                suffix=r"\.(?P<index>\d+)\.",
            )
        )
    return layer_patterns
