"""Read the ``quantization_config`` of compressed-tensors: which modules are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.targets import NO_MATCH, Deadline, Targets
from quantkit.json_values import Settings, shown
from quantkit.tensors.scheme import QuantScheme

_KEY = "quantization_config"
_MOST_GROUPS = 64
_MOST_COLUMNS = 2**24
_PLAIN_ORDERS = ("weight", "static")  # of columns; what is stored lies in the order of the inputs


@dataclass(frozen=True)
class _Group:
    name: str
    targets: Targets
    scheme: QuantScheme


def read_schemes(raw: Mapping[str, Any], modules: Iterable[str], path: object) -> dict[str, QuantScheme]:
    """The scheme of every module in `modules` that the config quantizes.

    Raises:
        UnsupportedError: for another method or format, quantized activations or KV cache, transforms,
            and other than integer weights of 4 or 8 bits, grouped or per channel.
        CheckpointError: if the config lacks a key, a value is of the wrong type, a pattern is invalid or
            takes too long, or two groups that name a module alike give it different schemes.
    """
    settings = Settings(raw, path, _KEY)
    where = settings.path
    method = settings.text("quant_method") if settings.has("quant_method") else None
    if method != "compressed-tensors":
        bits = shown(raw["bits"]) if settings.has("bits") else ""
        raise UnsupportedError(
            "the source is quantized already in a scheme quantkit does not read", path=where,
            found=f"{method} {bits}".strip() if method else "an unnamed scheme",
            expected="compressed-tensors pack-quantized", hint="start from the float model",
        )  # fmt: skip
    for key, what in (("kv_cache_scheme", "a quantized KV cache is"), ("transform_config", "transforms are")):
        if raw.get(key):
            raise UnsupportedError(f"{what} not supported", path=where)
    deadline = Deadline(where)
    groups = _groups(settings, deadline)
    ignored = Targets(settings.texts("ignore") if settings.has("ignore") else [], deadline)
    found: dict[str, QuantScheme] = {}
    for module in modules:
        if ignored.closeness(module) < NO_MATCH:
            continue
        ranked = [(group.targets.closeness(module), group) for group in groups]
        closest = min((rank for rank, _ in ranked), default=NO_MATCH)
        if closest < NO_MATCH:
            found[module] = _agreed(module, [group for rank, group in ranked if rank == closest], where)
    return found


def _agreed(module: str, groups: list[_Group], where: str) -> QuantScheme:
    """The scheme that groups give a module which they name alike."""
    first = groups[0]
    for other in groups[1:]:
        if other.scheme != first.scheme:
            raise CheckpointError(
                f"{_KEY} gives '{module}' two schemes", path=where,
                found=f"{first.scheme} in '{first.name}' and {other.scheme} in '{other.name}'",
            )  # fmt: skip
    return first.scheme


def _groups(settings: Settings, deadline: Deadline) -> list[_Group]:
    named = settings.inside("config_groups")
    if len(named.values) > _MOST_GROUPS:
        raise CheckpointError(
            f"{_KEY} has too many groups", path=settings.path, found=len(named.values),
            expected=f"at most {_MOST_GROUPS}",
        )  # fmt: skip
    groups = []
    for name in named.values:
        group = named.inside(name)
        layout = group if group.has("format") else settings
        if (found := layout.text("format") if layout.has("format") else None) != "pack-quantized":
            raise UnsupportedError(
                "this compressed-tensors format is not read", path=settings.path, found=found,
                expected="pack-quantized",
            )  # fmt: skip
        if group.values.get("input_activations") or group.values.get("output_activations"):
            raise UnsupportedError("quantized activations are not supported", path=settings.path)
        groups.append(_Group(name, Targets(group.texts("targets"), deadline), _scheme(group.inside("weights"))))
    return groups


def _scheme(weights: Settings) -> QuantScheme:
    where = weights.path
    order = weights.values.get("actorder")
    if order and order not in _PLAIN_ORDERS:
        raise UnsupportedError(
            "act-order with a group index per column is not supported", path=where, found=shown(order)
        )
    strategy, bits = weights.text("strategy"), weights.whole("num_bits", 1, 64)
    kind = weights.text("type") if weights.has("type") else "int"
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel") or weights.values.get("dynamic"):
        raise UnsupportedError(
            "this compressed-tensors scheme is not read", path=where, found=f"{kind}{bits} per {strategy}",
            expected="int4 or int8, per group or channel",
        )  # fmt: skip
    group_size = weights.whole("group_size", 1, _MOST_COLUMNS) if strategy == "group" else None
    if group_size is not None and group_size % 8:
        raise UnsupportedError("group size is not supported", path=where, found=group_size, expected="a multiple of 8")
    return QuantScheme(bits, group_size, weights.flag("symmetric", True))
