"""The modules of vLLM: which linears on disk each of them holds, and by which name vLLM looks for
its settings.

vLLM fuses q, k and v, and gate and up; all experts of a layer are one module; and some modules have
other names than on disk. `vllm_modules.toml` has what differs from these rules for a `model_type`,
as `scripts/peers/peer_vllm_modules.py` found it in vLLM 0.32. Its names have ``*`` for a number,
and ``+`` for one that counts on from the number of layers.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from quantkit.architectures.names import expert_bank

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The linears that vLLM fuses, by the last part of the name of the fused one."""
_FUSED_BY_PART = {part: fused for fused, parts in FUSED.items() for part in parts}
# Whole parts of a name alone: the 2 of `w2` is no number of a layer.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NUMBER_OR_SIGN = re.compile(r"(?<![^.])(?:\d+|[*+])(?![^.])")
# Python refuses to parse numbers of thousands of digits.
_MAX_DIGITS = 9
_LAYER = re.compile(r".*?\blayers\.(\d{1,9})\.")


@dataclass(frozen=True)
class VllmModule:
    """A linear of vLLM, or all experts of a layer.

    Attributes:
        name: by which vLLM looks for its settings.
        parts: the linears on disk that it holds.
        shards: the names that vLLM looks for if it does not find settings for `name`: those of its
            parts.
        is_experts: whether it is all experts of a layer.
        is_float: whether vLLM never quantizes it.
    """

    name: str
    parts: tuple[str, ...]
    shards: tuple[str, ...] = ()
    is_experts: bool = False
    is_float: bool = False


@dataclass(frozen=True)
class VllmNames:
    """How vLLM names the linears of an architecture.

    Attributes:
        mapped: how beginnings of names in settings are replaced before they are compared with those
            of modules.
        modules: the beginnings of the names of modules, where they are not those in settings.
        unlisted: the names of fused linears for whose parts vLLM does not look.
        listed: other fused linears, and the names of their parts.
        floats: linears, by their names on disk, that vLLM never quantizes.
    """

    mapped: Mapping[str, str]
    modules: Mapping[str, str]
    unlisted: frozenset[str]
    listed: Mapping[str, tuple[str, ...]]
    floats: frozenset[str]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> VllmNames:
        """Look up the names of the architecture of a config.json."""
        return cls.of_table(_table().get(str(raw.get("model_type")), {}))

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> VllmNames:
        """Read the names from the rows of a `model_type` in the table."""
        listed = {fused: tuple(parts) for fused, parts in table.get("listed", {}).items()}
        return cls(
            mapped=table.get("mapped", {}),
            modules=table.get("modules", {}),
            unlisted=frozenset(table.get("unlisted", ())),
            listed=listed,
            floats=frozenset(table.get("floats", ())),
        )

    def map_setting(self, name: str) -> str:
        """Map a name in settings to the one that vLLM compares; patterns and classes stay as they
        are.
        """
        if "." not in name or name.startswith("re:"):
            return name
        template = _template(name)
        return _fill(_replace_beginning(template, self.mapped) or template, name)

    def group(self, linears: Iterable[str]) -> list[VllmModule]:
        """Group linears on disk to the modules of vLLM, in the order of the linears."""
        ordered = dict.fromkeys(linears)
        layers = 0
        for name in ordered:
            match = _LAYER.match(name)
            if match is not None:
                layers = max(layers, int(match[1]) + 1)
        parts_by_name: dict[str, list[str]] = {}
        for linear in ordered:
            parts_by_name.setdefault(self._name(linear, ordered, layers), []).append(linear)
        return [self._module(name, tuple(parts)) for name, parts in parts_by_name.items()]

    def _module(self, name: str, parts: tuple[str, ...]) -> VllmModule:
        is_experts = any(expert_bank(part) is not None for part in parts)
        is_float = any(_template(part) in self.floats for part in parts)
        return VllmModule(name, parts, self._shards(name), is_experts=is_experts, is_float=is_float)

    def _name(self, linear: str, linears: Mapping[str, None], layers: int) -> str:
        """Determine the name of the module that contains a linear; a name that the table has whole
        keeps its last part.
        """
        template = _template(linear)
        if template in self.modules:
            return _fill(self.modules[template], linear, layers)
        # Modules have the names in settings unless the table says otherwise.
        replaced = (
            _replace_beginning(template, self.modules)
            or _replace_beginning(template, self.mapped)
            or template
        )
        name = _fill(replaced, linear, layers)
        bank = expert_bank(name)
        if bank is not None:
            return bank
        parent, _, last = name.rpartition(".")
        fused = _FUSED_BY_PART.get(last)
        if fused is None:
            return name
        # A linear without a sibling, such as an `up_proj` without a gate, is not fused.
        directory = linear.removesuffix(last)
        for part in FUSED[fused]:
            if part != last and f"{directory}{part}" in linears:
                return f"{parent}.{fused}" if parent else fused
        return name

    def _shards(self, name: str) -> tuple[str, ...]:
        parent, joint, last = name.rpartition(".")
        parts = self.listed.get(last, FUSED.get(last, ()))
        if last in self.unlisted or _template(name) in self.unlisted:
            return ()
        return tuple(f"{parent}{joint}{part}" for part in parts)


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Load what differs for each `model_type`."""
    text = files(__package__).joinpath("vllm_modules.toml").read_text("utf-8")
    return tomllib.loads(text)


def _template(name: str) -> str:
    return _NUMBER.sub("*", name)


def _replace_beginning(template: str, replacements: Mapping[str, str]) -> str | None:
    """Replace the longest beginning of a template that has a replacement; None if none has one."""
    beginning = template
    while beginning:
        if beginning in replacements:
            return replacements[beginning] + template[len(beginning) :]
        beginning = beginning.rpartition(".")[0]
    if "" in replacements:
        return f"{replacements['']}.{template}"
    return None


def _fill(template: str, name: str, layers: int = 0) -> str:
    """Fill a template with the numbers of a name; those in place of ``+`` count on from the number
    of layers.

    A name may have these signs too, as globs in settings do; they stay.
    """
    numbers = iter(_NUMBER_OR_SIGN.findall(name))
    parts: list[str] = []
    for sign in template.split("."):
        part = next(numbers) if sign in ("*", "+") else sign
        if sign == "+" and part.isdecimal() and len(part) <= _MAX_DIGITS:
            part = str(layers + int(part))
        parts.append(part)
    return ".".join(parts)
