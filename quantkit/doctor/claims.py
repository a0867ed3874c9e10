"""What a config says of each linear: in which scheme its weight is quantized, or that it is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.formats.codecs.targets import NO_MATCH, Deadline, Targets
from quantkit.json_values import shown

_FORMATS = {
    "pack-quantized": "packed", "int-quantized": "int8", "float-quantized": "float8", "nvfp4-pack-quantized": "fp4",
    "mxfp4-pack-quantized": "fp4",
}  # fmt: skip
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "modules_in_block_to_skip", "llm_int8_skip_modules")
_UNNAMED = ("load_in_4bit", "load_in_8bit", "quant_algo", "producer", "quantization")
"""Keys of those that do not say what they are called, and are known."""
_FLOAT8_METHODS = ("fp8", "fbgemm_fp8")
_HEADS = ("lm_head", "embed_out", "output")
_MLX_KEYS = {"group_size", "bits", "mode", "quant_method", "linear_class", "quantize_activations"}


@dataclass(frozen=True)
class Claim:
    """How a config says that a weight is quantized.

    Attributes:
        kind: of codes, as `modules.KIND_NAMES` has them; None for one that is not known here.
        bits: of a code; None where it is not said.
        group: inputs that share a scale; None for a row, or a block.
        symmetric: whether there are no zero points; None where it is not said.
        order: of columns: ``group`` where a tensor says the group of each.
        activations: whether these are quantized too.
        block: rows and columns that share a scale, where these are blocks.
    """

    kind: str | None
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    order: str | None = None
    activations: bool = False
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Claims:
    """What a config says of all linears.

    Attributes:
        modules: of those that it calls quantized.
        certain: whether it says so of each; else the tensors decide.
        unmatched: names in it that are no module's.
        conflicts: modules that it gives two schemes, and which.
        problems: why its settings make no sense.
    """

    modules: Mapping[str, Claim] = field(default_factory=dict)
    certain: bool = False
    unmatched: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_claims(
    settings: Mapping[str, Any] | None, method: str | None, linears: Collection[str], coded: Collection[str], path: str
) -> Claims:  # fmt: skip
    """What a folder's settings say.

    Args:
        settings, method: see `Folder`.
        linears: modules that may be quantized.
        coded: modules whose weights lie as codes.
        path: what errors name.
    """
    if settings is None or method is None:
        return Claims(certain=True)
    modules = list(dict.fromkeys([*linears, *coded]))
    try:
        if method == "compressed-tensors":
            return _compressed_tensors(settings, modules, path)
        if method in ("gptq", "awq"):
            return _by_rows(settings, method, modules, coded, Deadline(path))
        if method == "mlx":
            return _mlx(settings, coded)
        if method in _FLOAT8_METHODS:
            skipped = _Skipped(settings)
            block = _block(settings.get("weight_block_size"))
            claim = Claim("float8", 8, symmetric=True, activations=True, block=block)
            return Claims({one: claim for one in modules if not skipped(one) and not _is_head(one)}, certain=True)
        stated = settings.get("quant_method")
        if not isinstance(stated, str) and not any(settings.get(key) for key in _UNNAMED):
            return Claims(problems=(f"quant_method is {shown(stated)}",))
    except (CheckpointError, ValueError, TypeError, AttributeError, LookupError) as error:
        problem = error.problem if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return Claims(problems=(f"{problem}"[:300],))
    return Claims()


def spellings(module: str) -> list[str]:
    """A module's name as configs may have it: with and without what stands before the layers."""
    found = [module]
    for before, after in (("model.", ""), ("language_model.model.", "model.language_model."), ("", "model.")):
        if module.startswith(before):
            found.append(after + module.removeprefix(before))
    if module.startswith("model.language_model."):
        found.append("language_model.model." + module.removeprefix("model.language_model."))
    return found


def _compressed_tensors(settings: Mapping[str, Any], modules: Iterable[str], path: str) -> Claims:
    deadline = Deadline(path)
    ignored = Targets(_texts(settings.get("ignore")), deadline)
    groups = []
    named: dict[str, None] = {}
    for name, group in settings["config_groups"].items():
        targets = _texts(group["targets"])
        named |= dict.fromkeys(one for one in targets if "." in one and not one.startswith("re:"))
        groups.append((name, Targets(targets, deadline), _claim(group, settings)))
    found: dict[str, Claim] = {}
    conflicts = {}
    known: set[str] = set()
    for module in modules:
        names = spellings(module)
        known |= set(names)
        if min(ignored.closeness(one) for one in names) < NO_MATCH:
            continue
        ranked = [(min(targets.closeness(one) for one in names), name, claim) for name, targets, claim in groups]
        closest = min((rank for rank, _, _ in ranked), default=NO_MATCH)
        chosen = [(name, claim) for rank, name, claim in ranked if rank == closest]
        if closest < NO_MATCH and chosen[0][1] is not None:
            found[module] = chosen[0][1]
            if any(claim != chosen[0][1] for _, claim in chosen):
                conflicts[module] = " and ".join(name for name, _ in chosen)
    return Claims(found, True, tuple(one for one in named if one not in known), conflicts)


def _claim(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Claim | None:
    """What a group of compressed-tensors says; None where its weights are not quantized."""
    weights = group.get("weights")
    if weights is None:
        return None
    stated = group.get("format") or settings.get("format")
    kind = _FORMATS.get(str(stated))
    if kind is None and stated == "naive-quantized":
        kind = "float8" if weights.get("type") == "float" else "int8"
    size = weights.get("group_size") if weights.get("strategy") in ("group", "tensor_group", None) else None
    return Claim(
        kind, _bits(weights.get("num_bits")), _group(size), weights.get("symmetric", True) is not False,
        str(weights["actorder"]) if weights.get("actorder") else None, bool(group.get("input_activations")),
        _block(weights.get("block_structure")),
    )  # fmt: skip


def _by_rows(
    settings: Mapping[str, Any], method: str, modules: Iterable[str], coded: Collection[str], deadline: Deadline
) -> Claims:  # fmt: skip
    """GPTQ and AWQ: one scheme for all linears but the head, with exceptions."""
    bits = _bits(settings.get("bits", settings.get("w_bit", 4)))
    group = _group(settings.get("group_size", settings.get("q_group_size", 128)))
    symmetric = settings.get("sym", True) if method == "gptq" else not settings.get("zero_point", True)
    order = "group" if settings.get("desc_act") and not settings.get("static_groups") else None
    base = Claim(method, bits, group, symmetric is not False, order)
    skipped, head = _Skipped(settings), bool(settings.get("lm_head"))
    overrides = [
        (pattern, Targets([f"re:{pattern.removeprefix('+:').removeprefix('-:')}"], deadline), changes)
        for pattern, changes in (settings.get("dynamic") or {}).items()
    ]
    found = {}
    for module in modules:
        if skipped(module) or (_is_head(module) and not head and module not in coded):
            continue
        claim: Claim | None = base
        for pattern, targets, changes in overrides:
            if targets.closeness(module) < NO_MATCH:
                claim = None if pattern.startswith("-:") or changes is False else _overridden(base, changes)
                break
        if claim is not None:
            found[module] = claim
    return Claims(found, True)


def _overridden(base: Claim, changes: Mapping[str, Any]) -> Claim:
    bits, group = changes.get("bits", base.bits), changes.get("group_size", base.group)
    return Claim(base.kind, _bits(bits), _group(group), changes.get("sym", base.symmetric), base.order)


def _mlx(settings: Mapping[str, Any], coded: Collection[str]) -> Claims:
    """MLX: the tensors decide, and paths may have a scheme of their own."""
    own = {key: value for key, value in settings.items() if key not in _MLX_KEYS}
    found = {}
    for module in coded:
        stated = own.get(module, settings)
        if isinstance(stated, Mapping):
            kind = "mlx" if stated.get("mode", "affine") == "affine" else None
            found[module] = Claim(kind, _bits(stated.get("bits")), _group(stated.get("group_size")), False)
    missing = tuple(key for key, value in own.items() if isinstance(value, Mapping) and key not in coded)
    return Claims(found, True, missing)


class _Skipped:
    """The modules that settings leave in floats: by their names, or a part of them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._names = [one for key in _SKIPPED for one in _texts(settings.get(key))]

    def __call__(self, module: str) -> bool:
        return any(name in module for name in self._names)


def _is_head(module: str) -> bool:
    return module.rpartition(".")[2] in _HEADS


def _texts(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"a list of names is {shown(value)}")
    return value


def _bits(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= 16):
        raise ValueError(f"the bits of a code are {shown(value)}")
    return value


def _block(value: object) -> tuple[int, int] | None:
    """Rows and columns of a block."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise ValueError(f"the size of a block is {shown(value)}")
    return value[0], value[1]


def _group(value: object) -> int | None:
    """A group's size, where -1 and null are all of a row."""
    if value in (None, -1, 0):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"the size of a group is {shown(value)}")
    return value
