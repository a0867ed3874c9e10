"""compressed-tensors' settings: the schemes and forms of modules; `compressed_weights` has the
forms.

Source: the compressed-tensors package's `QuantizationConfig`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from quantkit.architectures.names import is_embedding
from quantkit.base.json_values import Settings, format_value
from quantkit.base.patterns import MatchTime
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import (
    Codec,
    QuantMethod,
    Reason,
    Runtime,
    Schemes,
    make_unread_settings_error,
)
from quantkit.formats.codecs.compressed_floats import SmallFloats
from quantkit.formats.codecs.compressed_weights import (
    FP4,
    INT8,
    PACKED_CODES,
    SCALE,
    SHAPE,
    IntQuantized,
    PackQuantized,
)
from quantkit.formats.codecs.layout import MAX_COLUMNS, Claim, Claims, Layout, block_size
from quantkit.formats.codecs.small_floats import FLOAT8
from quantkit.formats.codecs.targets import NO_MATCH, Targets, spellings
from quantkit.tensors.activations import Activations, InputRounding
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import (
    FLOAT_SCHEMES,
    FP8,
    MXFP4,
    NVFP4,
    SCHEMES,
    TILE,
    Codes,
    QuantScheme,
    Scales,
)

KV_CACHE_SCHEME = "kv_cache_scheme"
"""The key of the settings with the scheme of a quantized key/value cache."""

_MAX_GROUPS = 64
_PACK = "pack-quantized"
_INT = "int-quantized"
_DENSE = "dense"
_MIXED = "mixed-precision"
_OF_BYTES = (_INT, "naive-quantized")
# Read as floats, see `dequantized`.
_OF_FLOATS = ("float-quantized", "naive-quantized")
_EXPERTS = r".*\.experts\.\d+\..*"
# an order that a tensor states; in all others, columns are in the order of the inputs
_BY_INDEX = "group"
_FP4_SCHEMES = {SmallFloats(scheme).form: scheme for scheme in (MXFP4, NVFP4)}
_STRATEGIES = ("group", "channel", "tensor")
_ORDERS = ("weight", "static", _BY_INDEX)
_LAYOUTS = {
    _PACK: PACKED_CODES,
    _INT: INT8,
    "float-quantized": FLOAT8,
    "nvfp4-pack-quantized": FP4,
    "mxfp4-pack-quantized": FP4,
}
_INT8 = QuantScheme(8, None)
_GROUPED_BY = {Scales.TILES: "block", Scales.NESTED: "tensor_group"}
_SMALL_FLOAT_SCALES = (Scales.TILES, Scales.POWERS, Scales.NESTED)
_SCALE_TYPES = {Scales.POWERS: "torch.uint8", Scales.NESTED: "torch.float8_e4m3fn"}
_NO_FLOAT_EMBEDDING = Reason("no reader has an embedding in small floats", expected="int8")
_VLLM_EMBEDDING = "vLLM does not load an embedding in this form (seen in 0.32)"


class CompressedTensors(QuantMethod):
    """``quant_method: compressed-tensors``: groups of modules, each of one scheme; integer weights
    of 4 or 8 bits, in groups, per channel or per tensor, without transforms, are read as codes.

    Attributes:
        activations: to which readers round the inputs of linears; None is what each scheme has by
            default.
    """

    name = "compressed-tensors"
    layouts: tuple[Layout, ...] = (FP4, PACKED_CODES, INT8, FLOAT8)
    schemes = tuple(SCHEMES.values())
    scales = frozenset({Scales.FLOATS, *_SMALL_FLOAT_SCALES})
    codes = frozenset(Codes)
    runtimes: tuple[Runtime, ...] = ("vllm", "transformers")

    def __init__(self, activations: Activations | None = None) -> None:
        self.activations = activations

    def inputs(self, scheme: QuantScheme) -> InputRounding | None:
        """Return how readers round the inputs of linears in a scheme; None if they stay floats."""
        return InputRounding.of(self.activations or Activations.of(scheme)[0], scheme)

    def claims(
        self,
        settings: Settings,
        modules: Iterable[str],
        coded: Collection[str],
        spelled: Callable[[str], list[str]] = spellings,
    ) -> Claims:
        """As `QuantMethod.claims`; `spelled` returns the names that a module may have in
        settings.
        """
        groups = read_config_groups(settings)
        modules = list(modules)
        matches = _matches(settings, groups, modules, spelled)
        stated = {name: group_claim(group, settings) for name, group in groups.items()}
        targets = dict.fromkeys(
            name for group in groups.values() for name in group.strings("targets")
        )
        found = dict[str, Claim]()
        conflicts = {}
        for module, names in matches:
            if (claim := stated[names[0]]) is not None:
                found[module] = claim
                if any(stated[name] != claim for name in names):
                    conflicts[module] = " and ".join(names)
        known = {name for module in modules for name in spelled(module)}
        known |= _of_readers(targets, modules)
        unmatched = (
            target
            for target in targets
            if "." in target and not target.startswith("re:") and target not in known
        )
        return Claims(found, True, tuple(unmatched), conflicts)

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        """Two groups that match a module equally closely must have the same scheme."""
        if settings.values.get("transform_config"):
            raise make_unread_settings_error(settings, "transforms are not supported")
        groups = read_config_groups(settings)
        matches = _matches(settings, groups, modules, lambda module: [module])
        codecs = {name: _codec(group, settings) for name, group in groups.items()}
        result: dict[str, Codec] = {}
        for module, names in matches:
            codec = codecs[names[0]]
            if any(codecs[name] != codec for name in names):
                schemes = (
                    (name, "floats" if (one := codecs[name]) is None else one.scheme)
                    for name in names
                )
                raise CheckpointError(
                    f"{settings.name} gives '{module}' two schemes",
                    path=settings.path,
                    found=" and ".join(f"{scheme} in '{name}'" for name, scheme in schemes),
                )
            if codec is not None:
                result[module] = codec
        return result

    def write_settings(
        self, schemes: Schemes, modules: Mapping[str, int], *, every: bool = True
    ) -> dict[str, Any]:
        return _build_settings(schemes, modules, self, every=every)

    def form(self, scheme: QuantScheme) -> str:
        """Return the format of linears in a scheme."""
        if scheme.of_small_floats:
            return SmallFloats(scheme).form
        if scheme == _INT8 and self.activations is Activations.INT8:
            return _INT
        return _PACK

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        if scheme.of_small_floats and scheme not in FLOAT_SCHEMES.values():
            return Reason(
                "no reader has such groups of small floats",
                scheme.group_size,
                ", ".join(FLOAT_SCHEMES),
            )
        if (
            self.activations is not None
            and not embedding
            and self.activations not in Activations.of(scheme)
        ):
            return _not_multiplied(scheme, self.activations)
        if scheme.of_small_floats:
            if embedding:
                return _NO_FLOAT_EMBEDDING
            return SmallFloats(scheme)
        if self.form(scheme) == _INT:
            return IntQuantized(scheme)
        return PackQuantized(scheme)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Runtime] = ()
    ) -> str:
        found = [scheme for scheme in schemes.values() if scheme is not None]
        if "vllm" in without:
            vllm = []
        else:
            vllm = [f"vLLM{' on GPUs' if self.not_on_cpu(found) else ''}"]
        if has_embedding(schemes):
            vllm = [f"{one} (not tried)" for one in vllm]
            return "; ".join([", ".join(vllm), "transformers 5.23 reads no packed embedding"])
        if not all(scheme.symmetric for scheme in found):
            readers = ", ".join(["compressed-tensors' own decompressor", *vllm])
            return f"{readers}; transformers refuses packed zero points (seen in 5.23)"
        if "transformers" in without:
            transformers = []
        else:
            transformers = ["transformers with compressed-tensors"]
        return ", ".join([*transformers, *vllm])

    def not_on_cpu(self, schemes: Iterable[QuantScheme]) -> str | None:
        """Return the weights for which vLLM has no kernel on CPUs, as tried with 0.32; None if it
        has some for all.
        """
        for scheme in schemes:
            activations = self.activations or Activations.of(scheme)[0]
            fp8 = Activations.FP8
            if scheme.of_small_floats and (scheme, activations) != (FP8, fp8):
                if activations in Activations.of(scheme)[:1]:
                    return f"{scheme}"
                return f"{scheme} with such inputs"
            if scheme.bits == 8 and not scheme.of_small_floats and activations is Activations.NONE:
                return "8-bit weights alone"
            if scheme.bits == 4 and activations is fp8:
                return "int4 with inputs in fp8"
        return None

    def unread_embedding(self, *, tied: bool, here_alone: bool = False) -> str:
        """Return a note on the readers that do not load a quantized embedding, as tried; if `tied`,
        it is the head too; with `here_alone`, no form that others load can be written.
        """
        if here_alone:
            if tied:
                vllm = "vLLM 0.32"
            else:
                vllm = "vLLM 0.32 on CPUs"
            return (
                f"transformers does not load a packed embedding (seen in 5.23), nor does {vllm};"
                " quantkit does"
            )
        if tied:
            return (
                "no other reader of compressed-tensors loads a quantized embedding that is the head"
                " too (seen in transformers 5.23, vLLM 0.32); quantkit does, and so do llama.cpp"
                " and mlx-lm theirs (`to`)"
            )
        if self.form(_INT8) == _INT:
            return _VLLM_EMBEDDING
        return (
            "transformers does not load a packed embedding (seen in 5.23), nor does vLLM 0.32 on"
            " CPUs; quantkit"
            f' does, and transformers that of `to="{_INT}"`'
        )


class Int8Activations(CompressedTensors):
    """compressed-tensors' ``int-quantized``: int8 per row, multiplied by activations that are
    rounded to int8 for each token. Only written: such folders state `CompressedTensors` as their
    method.
    """

    name = _INT
    layouts = ()
    schemes = (_INT8,)
    scales = frozenset({Scales.FLOATS})
    codes = frozenset({Codes.INTEGERS})
    runtimes = ()  # ``quant_method`` has another name

    def __init__(self) -> None:
        super().__init__(Activations.INT8)

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        if scheme == _INT8:
            return IntQuantized(scheme)
        return Reason("its readers multiply int8 per row alone", found=scheme, expected=_INT8)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Runtime] = ()
    ) -> str:
        in_vllm = "vllm" not in without and not has_embedding(schemes)
        if "transformers" in without:
            transformers = []
        else:
            transformers = ["transformers with compressed-tensors"]
        return ", ".join([*transformers, *(["vLLM"] if in_vllm else [])])


def has_embedding(schemes: Mapping[str, QuantScheme | None]) -> bool:
    """Return whether an embedding is among the modules that have a scheme."""
    return any(scheme is not None and is_embedding(module) for module, scheme in schemes.items())


def read_here_alone(
    method: QuantMethod, schemes: Mapping[str, QuantScheme | None], *, tied: bool
) -> bool:
    """Return whether no other reader of compressed-tensors loads a folder, as tried: its embedding
    is quantized, and the head is tied to it.
    """
    return tied and isinstance(method, CompressedTensors) and has_embedding(schemes)


def _of_readers(targets: Collection[str], modules: Iterable[str]) -> set[str]:
    """Return the names in settings that readers may have for modules: they differ from those on
    disk, which are targets too, in what comes before the layers.
    """
    tails = {_in_layers(module) for module in modules if module in targets}
    return {target for target in targets if _in_layers(target) in tails}


def _in_layers(module: str) -> str:
    """Return the name of a module from the layers on; all of it outside of them."""
    at = module.rfind("layers.", 0, module.rfind("."))
    return module if at < 0 else module[at:]


def _not_multiplied(scheme: QuantScheme, activations: Activations) -> Reason:
    able = []
    for one in (*SCHEMES.values(), *FLOAT_SCHEMES.values()):
        if activations in Activations.of(one):
            able.append(one)
    own = " or ".join(Activations.of(scheme))
    problem = f"no runtime multiplies it by activations in {activations} (by {own})"
    return Reason(problem, scheme, f"for activations in {activations}: {', '.join(map(str, able))}")


def _build_settings(
    schemes: Schemes, modules: Iterable[str], method: CompressedTensors, *, every: bool
) -> dict[str, Any]:
    """Return a single scheme for the linears of decoder blocks has the target ``Linear``. Otherwise
    groups list their modules: compressed-tensors warns of targets that follow ``Linear``, older
    vLLM prefers the class to the names that q, k and v have before it fuses them, and vLLM's output
    head is no ``Linear``. Experts with one scheme are targeted by a pattern: transformers looks for
    it, and vLLM has other names for experts. Linears without a scheme are listed under ``ignore``.
    An embedding has a separate group, without activations to round, and is targeted by its class,
    because vLLM's Llama has no name for it.
    """
    experts = {module for module in modules if re.fullmatch(_EXPERTS, module)}
    same = len({schemes.get(module) for module in experts}) == 1
    by_scheme: dict[QuantScheme, dict[str, None]] = {}
    embedding = {module: scheme for module, scheme in schemes.items() if is_embedding(module)}
    for module, scheme in schemes.items():
        if module not in embedding:
            if same and module in experts:
                target = f"re:{_EXPERTS}"
            else:
                target = module
            by_scheme.setdefault(scheme, {})[target] = None
    of_class = every and len(by_scheme) == 1 and "lm_head" not in schemes
    ordered = sorted(by_scheme.items(), key=lambda item: -len(item[1]))
    targets = [
        (
            method.form(scheme),
            scheme,
            ["Linear"] if of_class else list(named),
            method.inputs(scheme),
        )
        for scheme, named in ordered
    ]
    targets += [(method.form(scheme), scheme, ["Embedding"], None) for scheme in embedding.values()]
    forms = list(dict.fromkeys(form for form, *_ in targets))
    return {
        "quant_method": "compressed-tensors",
        "format": _MIXED if len(forms) > 1 else forms[0] if forms else _DENSE,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": _group(*group) for index, group in enumerate(targets)},
        "ignore": [module for module in modules if module not in schemes],
        KV_CACHE_SCHEME: None,
    }


def _group(
    form: str, scheme: QuantScheme, targets: list[str], inputs: InputRounding | None
) -> dict[str, Any]:
    if scheme.group_size is None:
        grouped = "channel"
    else:
        grouped = _GROUPED_BY.get(scheme.scales, "group")
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.of_small_floats else "int",
        "symmetric": scheme.symmetric,
        "strategy": grouped,
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    if scheme.scales is Scales.TILES:
        weights |= {"group_size": None, "block_structure": [TILE, TILE]}
    if (scale_type := _SCALE_TYPES.get(scheme.scales)) is not None:
        weights |= {"scale_dtype": scale_type, "zp_dtype": scale_type}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if inputs is None else _build_input_settings(inputs),
        "output_activations": None,
        "format": form,
    }


def _build_input_settings(inputs: InputRounding) -> dict[str, Any]:
    """Return what settings say of rounded inputs, with scales that are found when a model runs."""
    by_token = {
        "num_bits": 8,
        "type": inputs.type,
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    if inputs.group_size is None:
        return by_token
    return {**by_token, "strategy": "group", "group_size": inputs.group_size}


def read_weight_shapes(
    stored: Mapping[str, StoredTensor], files: Mapping[str, TensorFile], raw: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of quantized modules, from their tensors; none for a folder
    in another method.

    Args:
        stored, files: a folder's tensors, and their files.
        raw: its config.json.
    """
    settings = raw.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != CompressedTensors.name:
        return {}
    result: dict[str, tuple[int, ...]] = {}
    for name in stored:
        module, _, leaf = name.rpartition(".")
        shape = stored.get(f"{module}.{SHAPE}")
        if (
            leaf == PACKED_CODES.codes
            and shape is not None
            and (shape.dtype, shape.shape) == (DType.INT64, (2,))
        ):
            rows, columns = struct.unpack("<qq", files[shape.name].read_bytes(shape.name))
            if 0 < rows <= MAX_COLUMNS and 0 < columns <= MAX_COLUMNS:
                result[module] = rows, columns
        elif (
            leaf == FP4.codes
            and stored[name].dtype == DType.UINT8
            and f"{module}.{SCALE}" in stored
        ):
            result[module] = stored[name].shape[0], 2 * stored[name].shape[-1]
        elif (
            leaf == INT8.codes
            and stored[name].dtype == DType.INT8
            and f"{module}.{SCALE}" in stored
        ):
            result[module] = stored[name].shape
    return result


def read_config_groups(settings: Settings) -> dict[str, Settings]:
    """Return the groups by name."""
    named = settings.inside("config_groups")
    if len(named.values) > _MAX_GROUPS:
        problem = f"{settings.name} has too many groups"
        expected = f"at most {_MAX_GROUPS}"
        raise CheckpointError(
            problem, path=settings.path, found=len(named.values), expected=expected
        )
    return {name: named.inside(name) for name in named.values}


def _matches(
    settings: Settings,
    groups: Mapping[str, Settings],
    modules: Iterable[str],
    spelled: Callable[[str], list[str]],
) -> list[tuple[str, list[str]]]:
    """Return the modules that are not ignored, and the names of the groups whose targets match each
    of them most closely.

    Args:
        spelled: the names that a module may have in settings.
    """
    match_time = MatchTime(settings.path)
    targets = {}
    for name, group in groups.items():
        targets[name] = Targets(
            group.strings("targets"), key=f"{group.name}.targets", match_time=match_time
        )
    if settings.has("ignore"):
        ignored_names = settings.strings("ignore")
    else:
        ignored_names = []
    ignored = Targets(ignored_names, key=f"{settings.name}.ignore", match_time=match_time)
    result = []
    for module in modules:
        names = spelled(module)
        if min(map(ignored.closeness, names)) < NO_MATCH:
            continue
        ranks = {name: min(map(target.closeness, names)) for name, target in targets.items()}
        closest = min(ranks.values(), default=NO_MATCH)
        if closest < NO_MATCH:
            result.append((module, [name for name, rank in ranks.items() if rank == closest]))
    return result


def group_claim(group: Settings, settings: Settings) -> Claim | None:
    """Return what a group states; None if its weights are not quantized."""
    if not group.has("weights"):
        return None
    weights = group.inside("weights")
    stated = group.values.get("format") or settings.values.get("format")
    layout = _LAYOUTS.get(str(stated))
    if layout is None and stated == "naive-quantized":
        if weights.values.get("type") == "float":
            layout = FLOAT8
        else:
            layout = INT8
    base = Claim(
        layout,
        symmetric=weights.values.get("symmetric", True) is not False,
        by_index=weights.values.get("actorder") == _BY_INDEX,
        activations=bool(group.values.get("input_activations")),
        block=block_size(weights, "block_structure"),
    )
    grouped = weights.values.get("strategy") in ("group", "tensor_group", None)
    return base.apply_settings(weights, "num_bits", "group_size" if grouped else "")


def _codec(
    group: Settings, settings: Settings
) -> PackQuantized | IntQuantized | SmallFloats | None:
    """Return the codec of a group's modules; None if they are read as floats."""
    if group.has("format"):
        layout = group
    else:
        layout = settings
    if layout.has("format"):
        found = layout.string("format")
    else:
        found = None
    weights = group.inside("weights")
    if found in _OF_FLOATS and weights.values.get("type") == "float":
        return None
    if found in _FP4_SCHEMES:
        return _fp4(weights, _FP4_SCHEMES[found])
    if found != _PACK and found not in _OF_BYTES:
        expected = ", ".join((_PACK, *dict.fromkeys((*_OF_BYTES, *_OF_FLOATS)), *_FP4_SCHEMES))
        raise make_unread_settings_error(
            settings, "this compressed-tensors format is not read", found, expected
        )
    form = PackQuantized if found == _PACK else IntQuantized
    return form(
        _scheme(weights),
        _strategy(weights) == "tensor",
        weights.values.get("actorder") == _BY_INDEX,
    )


def _fp4(weights: Settings, scheme: QuantScheme) -> SmallFloats:
    """Return the codec of weights in e2m1, which have no other form than that of a scheme."""
    stated = [weights.values.get(key) for key in ("num_bits", "type", "group_size")]
    expected = [scheme.bits, "float", scheme.group_size]
    if stated != expected or _strategy(weights) != _GROUPED_BY.get(scheme.scales, "group"):
        raise make_unread_settings_error(
            weights,
            "this compressed-tensors scheme is not read",
            format_value(stated),
            format_value(expected),
        )
    return SmallFloats(scheme)


def _strategy(weights: Settings) -> str:
    """Return the weights that share a scale; by default, this follows from the group size, as in
    compressed-tensors.
    """
    if weights.has("strategy"):
        return weights.string("strategy")
    if not weights.has("group_size"):
        return "tensor"
    if weights.integer("group_size", -1, MAX_COLUMNS) == -1:
        return "channel"
    return "group"


def _scheme(weights: Settings) -> QuantScheme:
    order = weights.values.get("actorder")
    if order and order not in _ORDERS:
        raise make_unread_settings_error(
            weights, "this order of columns is not read", format_value(order)
        )
    strategy = _strategy(weights)
    bits = weights.integer("num_bits", 1, 64)
    if weights.has("type"):
        kind = weights.string("type")
    else:
        kind = "int"
    if (
        kind != "int"
        or bits not in (4, 8)
        or strategy not in _STRATEGIES
        or weights.values.get("dynamic")
    ):
        raise make_unread_settings_error(
            weights,
            "this compressed-tensors scheme is not read",
            f"{kind}{bits} per {strategy}",
            "int4 or int8, per group, channel or tensor",
        )
    if strategy == "group":
        group_size = weights.integer("group_size", 1, MAX_COLUMNS)
    else:
        group_size = None
    if group_size is not None and group_size % 8:
        raise make_unread_settings_error(
            weights, "group size is not supported", group_size, "a multiple of 8"
        )
    return QuantScheme(bits, group_size, weights.flag("symmetric", True))
