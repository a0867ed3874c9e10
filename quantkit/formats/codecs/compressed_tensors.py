"""compressed-tensors' settings: which modules are in which scheme and form; `compressed_weights` has the forms.

Source: the compressed-tensors package's `QuantizationConfig`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.architectures.names import is_embedding
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.claims import bits_in, block_in, group_size_in, names_in, spellings
from quantkit.formats.codecs.codec import Codec, QuantMethod, Reason, Runtime
from quantkit.formats.codecs.compressed_weights import (
    FP4,
    INT8,
    PACKED,
    PACKED_CODES,
    PLAIN,
    SCALE,
    SHAPE,
    IntQuantized,
    PackQuantized,
)
from quantkit.formats.codecs.float8 import FLOAT8
from quantkit.formats.codecs.layout import Claim, Claims, Layout
from quantkit.formats.codecs.targets import NO_MATCH, Deadline, Targets
from quantkit.json_values import Settings, shown
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import SCHEMES, QuantScheme

KV_CACHE_SCHEME = "kv_cache_scheme"
"""The key of the settings under which the scheme of a quantized key/value cache lies."""

_MOST_GROUPS = 64
_MAX_COLUMNS = 2**24
_PACK, _INT, _DENSE = "pack-quantized", "int-quantized", "dense"
_OF_BYTES = (_INT, "naive-quantized")
_OF_FLOATS = ("float-quantized", "naive-quantized")  # read as floats, see `dequantized`
_EXPERTS = r".*\.experts\.\d+\..*"
_BY_INDEX = "group"  # an order of columns that is told; in others what is stored lies in the order of the inputs
_STRATEGIES = ("group", "channel", "tensor")
_ORDERS = ("weight", "static", _BY_INDEX)
_LAYOUTS = {
    _PACK: PACKED_CODES, _INT: INT8, "float-quantized": FLOAT8,
    "nvfp4-pack-quantized": FP4, "mxfp4-pack-quantized": FP4,
}  # fmt: skip
_INT8 = QuantScheme(8, None)
_VLLM_EMBEDDING = "vLLM does not load an embedding in this form (seen in 0.32)"
_TO_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensors(QuantMethod):
    """``quant_method: compressed-tensors``: groups of modules, each of one scheme."""

    name = "compressed-tensors"
    layouts: tuple[Layout, ...] = (FP4, PACKED_CODES, INT8, FLOAT8)
    schemes = tuple(SCHEMES.values())
    runtimes: tuple[Runtime, ...] = ("vllm", "transformers")

    def claims(
        self, settings: Mapping[str, Any], modules: Iterable[str], coded: Collection[str], path: str
    ) -> Claims:  # fmt: skip
        deadline = Deadline(path)
        ignored = Targets(names_in(settings.get("ignore")), deadline)
        groups = []
        named: dict[str, None] = {}
        for name, group in settings["config_groups"].items():
            targets = names_in(group["targets"])
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

    def read_settings(self, settings: Settings, modules: Iterable[str], stored: Collection[str]) -> dict[str, Codec]:
        """
        Raises:
            UnsupportedError: for another format, transforms, and other than integer weights of 4 or 8 bits, grouped,
                per channel or per tensor.
            CheckpointError: if the settings lack a key, a value is of the wrong type, a pattern is invalid or
                takes too long, or two groups that name a module alike give it different schemes.
        """
        if settings.values.get("transform_config"):
            raise UnsupportedError("transforms are not supported", path=settings.path)
        deadline = Deadline(settings.path)
        groups = _groups(settings, deadline)
        ignored = Targets(settings.texts("ignore") if settings.has("ignore") else [], deadline)
        found: dict[str, Codec] = {}
        for module in modules:
            if ignored.closeness(module) < NO_MATCH:
                continue
            ranked = [(group.targets.closeness(module), group) for group in groups]
            closest = min((rank for rank, _ in ranked), default=NO_MATCH)
            if closest < NO_MATCH:
                codec = _agreed(module, [group for rank, group in ranked if rank == closest], settings)
                if codec is not None:
                    found[module] = codec
        return found

    def write_settings(
        self, schemes: Mapping[str, QuantScheme], modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        return _written(schemes, modules, _PACK, None, every=every)

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        return PackQuantized(scheme)

    def readers(self, schemes: Mapping[str, QuantScheme | None]) -> str:
        found = [scheme for scheme in schemes.values() if scheme is not None]
        if has_embedding(schemes):
            return "by its source vLLM on GPUs, not tried; transformers 5.23 reads no packed embedding"
        vllm = ", vLLM" if all(scheme.bits == 4 for scheme in found) else ""
        if all(scheme.symmetric for scheme in found):
            return f"transformers with compressed-tensors{vllm}"
        return f"compressed-tensors' own decompressor{vllm}; transformers refuses packed zero points (seen in 5.23)"

    def unread_embedding(self, *, tied: bool) -> str:
        """A note on the readers that do not load a quantized embedding, as tried.

        Args:
            tied: whether it is the head too.
        """
        if tied:
            return (
                "no other reader of compressed-tensors loads a quantized embedding that is the head too (seen in"
                " transformers 5.23, vLLM 0.32); quantkit does, and so do llama.cpp and mlx-lm theirs (`to`)"
            )
        return (
            "transformers does not load a packed embedding (seen in 5.23), nor does vLLM 0.32 on CPUs; quantkit"
            f' does, and transformers that of `to="{_INT}"`'
        )


class Int8Activations(CompressedTensors):
    """compressed-tensors' ``int-quantized``: int8 per row, multiplied by activations that are rounded to int8 token by
    token. Only written: what has this form names `CompressedTensors` as its method."""

    name = _INT
    layouts = ()
    schemes = (_INT8,)
    runtimes = ()  # ``quant_method`` has another name

    def write_settings(
        self, schemes: Mapping[str, QuantScheme], modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        return _written(schemes, modules, _INT, _TO_INT8, every=every)

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        if scheme == _INT8:
            return IntQuantized(scheme)
        return Reason("its readers multiply int8 per row alone", found=scheme, expected=_INT8)

    def unread_embedding(self, *, tied: bool) -> str:
        return super().unread_embedding(tied=tied) if tied else _VLLM_EMBEDDING

    def readers(self, schemes: Mapping[str, QuantScheme | None]) -> str:
        return "transformers with compressed-tensors" + ("" if has_embedding(schemes) else ", vLLM")


def has_embedding(schemes: Mapping[str, QuantScheme | None]) -> bool:
    """Whether an embedding is among the modules that have a scheme."""
    return any(scheme is not None and is_embedding(module) for module, scheme in schemes.items())


def read_here_alone(method: QuantMethod, schemes: Mapping[str, QuantScheme | None], *, tied: bool) -> bool:
    """Whether no other reader of compressed-tensors loads a folder, as tried: its embedding has codes, and the head is
    tied to it."""
    return tied and isinstance(method, CompressedTensors) and has_embedding(schemes)


def _written(
    schemes: Mapping[str, QuantScheme], modules: Iterable[str], form: str, activations: Mapping[str, Any] | None, *,
    every: bool,
) -> dict[str, Any]:  # fmt: skip
    """One scheme for linears of decoder blocks targets every ``Linear``. Otherwise each names its modules:
    compressed-tensors warns of targets that come behind ``Linear``, older vLLM puts the class before the names
    that q, k and v have before it fuses them, and vLLM's output head is no ``Linear``. Experts that are all alike
    are named by a pattern: transformers looks for it, and vLLM gives them names of its own. Linears without a
    scheme are listed under ``ignore``. An embedding is a group of its own, without activations to round, and named by
    its class: vLLM's Llama gives it no name."""
    modules = list(modules)
    experts = {module for module in modules if re.fullmatch(_EXPERTS, module)}
    alike = len({schemes.get(module) for module in experts}) == 1
    by_scheme: dict[QuantScheme, dict[str, None]] = {}
    embedding = {module: scheme for module, scheme in schemes.items() if is_embedding(module)}
    for module, scheme in schemes.items():
        if module in embedding:
            continue
        target = f"re:{_EXPERTS}" if alike and module in experts else module
        by_scheme.setdefault(scheme, {})[target] = None
    of_class = every and len(by_scheme) == 1 and "lm_head" not in schemes
    ordered = sorted(by_scheme.items(), key=lambda item: -len(item[1]))
    groups = [
        _group(scheme, ["Linear"] if of_class else list(named), form, activations) for scheme, named in ordered
    ]  # fmt: skip
    groups += [_group(scheme, ["Embedding"], form, None) for scheme in embedding.values()]
    return {
        "quant_method": "compressed-tensors",
        "format": form if schemes else _DENSE,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": [module for module in modules if module not in schemes],
        KV_CACHE_SCHEME: None,
    }


def _group(
    scheme: QuantScheme, targets: list[str], form: str, activations: Mapping[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    return {
        "targets": targets,
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group_size is None else "group",
            "group_size": scheme.group_size,
            "dynamic": False,
        },
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }


def packed_shapes(
    stored: Mapping[str, StoredTensor], files: Mapping[str, TensorFile], raw: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """The shapes of the weights of quantized modules, as their own tensors tell them; none of a folder in another
    method.

    Args:
        stored, files: a folder's tensors, and where they lie.
        raw: its config.json.
    """
    settings = raw.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != CompressedTensors.name:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name in stored:
        module, _, leaf = name.rpartition(".")
        told = stored.get(f"{module}.{SHAPE}")
        if leaf == PACKED and told is not None and (told.dtype, told.shape) == (DType.INT64, (2,)):
            rows, columns = struct.unpack("<qq", files[told.name].read_bytes(told.name))
            if 0 < rows <= _MAX_COLUMNS and 0 < columns <= _MAX_COLUMNS:
                found[module] = rows, columns
        elif leaf == PLAIN and stored[name].dtype == DType.INT8 and f"{module}.{SCALE}" in stored:
            found[module] = stored[name].shape
    return found


def _claim(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Claim | None:
    """What a group states; None if its weights are not quantized."""
    weights = group.get("weights")
    if weights is None:
        return None
    stated = group.get("format") or settings.get("format")
    layout = _LAYOUTS.get(str(stated))
    if layout is None and stated == "naive-quantized":
        layout = FLOAT8 if weights.get("type") == "float" else INT8
    size = weights.get("group_size") if weights.get("strategy") in ("group", "tensor_group", None) else None
    return Claim(
        layout, bits_in(weights.get("num_bits")), group_size_in(size), weights.get("symmetric", True) is not False,
        weights.get("actorder") == _BY_INDEX, bool(group.get("input_activations")),
        block_in(weights.get("block_structure")),
    )  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """Some modules; without a codec they are read as floats."""

    name: str
    targets: Targets
    codec: PackQuantized | IntQuantized | None

    def __str__(self) -> str:
        return f"{'floats' if self.codec is None else self.codec.scheme} in '{self.name}'"


def _agreed(module: str, groups: list[_Group], settings: Settings) -> Codec | None:
    """What groups give a module which they name alike."""
    first = groups[0]
    for other in groups[1:]:
        if other.codec != first.codec:
            raise CheckpointError(
                f"{settings.name} gives '{module}' two schemes", path=settings.path, found=f"{first} and {other}"
            )
    return first.codec


def _groups(settings: Settings, deadline: Deadline) -> list[_Group]:
    named = settings.inside("config_groups")
    if len(named.values) > _MOST_GROUPS:
        raise CheckpointError(
            f"{settings.name} has too many groups", path=settings.path, found=len(named.values),
            expected=f"at most {_MOST_GROUPS}",
        )  # fmt: skip
    groups = []
    for name in named.values:
        group = named.inside(name)
        layout = group if group.has("format") else settings
        found = layout.text("format") if layout.has("format") else None
        targets = Targets(group.texts("targets"), deadline)
        if found in _OF_FLOATS and group.inside("weights").values.get("type") == "float":
            groups.append(_Group(name, targets, None))
            continue
        if found != _PACK and found not in _OF_BYTES:
            raise UnsupportedError(
                "this compressed-tensors format is not read", path=settings.path, found=found,
                expected=", ".join((_PACK, *dict.fromkeys((*_OF_BYTES, *_OF_FLOATS)))),
            )  # fmt: skip
        weights, form = group.inside("weights"), PackQuantized if found == _PACK else IntQuantized
        scheme, by_index = _scheme(weights), weights.values.get("actorder") == _BY_INDEX
        groups.append(_Group(name, targets, form(scheme, _strategy(weights) == "tensor", by_index)))
    return groups


def _strategy(weights: Settings) -> str:
    """What shares a scale; where nothing is said, compressed-tensors takes it from the group size."""
    if weights.has("strategy"):
        return weights.text("strategy")
    if not weights.has("group_size"):
        return "tensor"
    return "channel" if weights.whole("group_size", -1, _MAX_COLUMNS) == -1 else "group"


def _scheme(weights: Settings) -> QuantScheme:
    where = weights.path
    order = weights.values.get("actorder")
    if order and order not in _ORDERS:
        raise UnsupportedError("this order of columns is not read", path=where, found=shown(order))
    strategy, bits = _strategy(weights), weights.whole("num_bits", 1, 64)
    kind = weights.text("type") if weights.has("type") else "int"
    if kind != "int" or bits not in (4, 8) or strategy not in _STRATEGIES or weights.values.get("dynamic"):
        raise UnsupportedError(
            "this compressed-tensors scheme is not read", path=where, found=f"{kind}{bits} per {strategy}",
            expected="int4 or int8, per group, channel or tensor",
        )  # fmt: skip
    group_size = weights.whole("group_size", 1, _MAX_COLUMNS) if strategy == "group" else None
    if group_size is not None and group_size % 8:
        raise UnsupportedError("group size is not supported", path=where, found=group_size, expected="a multiple of 8")
    return QuantScheme(bits, group_size, weights.flag("symmetric", True))
