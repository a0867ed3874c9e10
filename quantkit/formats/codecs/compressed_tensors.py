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
from quantkit.base.messages import Message, Option
from quantkit.base.patterns import MatchTime
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import (
    Codec,
    QuantMethod,
    Reader,
    Reason,
    Runtime,
    Schemes,
    make_unread_settings_error,
)
from quantkit.formats.codecs.compressed_floats import SmallFloats
from quantkit.formats.codecs.compressed_weights import IntQuantized, PackQuantized
from quantkit.formats.codecs.layout import MAX_COLUMNS, Claim, Claims, block_size
from quantkit.formats.codecs.layouts import FLOAT8, FP4, INT8, PACKED_CODES, SCALE, SHAPE
from quantkit.formats.codecs.targets import NO_MATCH, Targets, name_in_layers, spellings
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

# Each module is compared with the targets of each group.
_MAX_GROUPS = 64
_PACK = "pack-quantized"
_INT = "int-quantized"
_DENSE = "dense"
_MIXED = "mixed-precision"
_OF_BYTES = (_INT, "naive-quantized")
# Read as floats, see `dequantized`.
_OF_FLOATS = ("float-quantized", "naive-quantized")
_EXPERTS = r".*\.experts\.\d+\..*"
# The order of columns that a tensor states; in all others, columns are in the order of the inputs.
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
_NO_FLOAT_EMBEDDING = Reason("no reader supports an embedding in small floats", expected="int8")
_VLLM_EMBEDDING = "vLLM does not load an embedding in this form (seen in 0.32)"


class CompressedTensors(QuantMethod):
    """``quant_method: compressed-tensors``: groups of modules, each of one scheme; integer weights
    of 4 or 8 bits, in groups, per channel or per tensor, without transforms, are read as codes.

    Attributes:
        activations: to which readers round the inputs of linears; None is what each scheme has by
            default.
    """

    name = "compressed-tensors"
    schemes = tuple(SCHEMES.values())
    scales = frozenset({Scales.FLOATS, *_SMALL_FLOAT_SCALES})
    codes = frozenset(Codes)
    runtimes: tuple[Runtime, ...] = ("vllm", "transformers")

    def __init__(self, activations: Activations | None = None) -> None:
        self.activations = activations

    def inputs(self, scheme: QuantScheme) -> InputRounding | None:
        """Determine how readers round the inputs of linears in a scheme; None if they stay
        floats.
        """
        return InputRounding.of(self.activations or Activations.of(scheme)[0], scheme)

    def claims(
        self,
        settings: Settings,
        modules: Iterable[str],
        coded: Collection[str],
        spelled: Callable[[str], list[str]] = spellings,
    ) -> Claims:
        """Do as `QuantMethod.claims`; `spelled` returns the names that a module may have in
        settings.
        """
        groups = read_config_groups(settings)
        modules = list(modules)
        matches = _matches(settings, groups, modules, spelled)
        claims_by_group: dict[str, Claim | None] = {}
        for name, group in groups.items():
            claims_by_group[name] = group_claim(group, settings)
        # A dict is a set that keeps the order, which messages follow.
        targets: dict[str, None] = {}
        for group in groups.values():
            targets |= dict.fromkeys(group.strings("targets"))
        claims: dict[str, Claim] = {}
        conflicts: dict[str, str] = {}
        for module, names in matches:
            claim = claims_by_group[names[0]]
            if claim is not None:
                claims[module] = claim
                if any(claims_by_group[name] != claim for name in names):
                    conflicts[module] = " and ".join(names)
        module_names: set[str] = set()
        for module in modules:
            module_names.update(spelled(module))
        module_names |= _of_readers(targets, modules)
        unmatched: list[str] = []
        for target in targets:
            # Targets without a dot may be classes, such as ``Linear``.
            is_name = "." in target and not target.startswith("re:")
            if is_name and target not in module_names:
                unmatched.append(target)
        return Claims(claims, True, tuple(unmatched), conflicts)

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        """Do as `QuantMethod.read_settings`; two groups that match a module equally closely must
        have the same scheme.
        """
        if settings.values.get("transform_config"):
            raise make_unread_settings_error(settings, "transforms are not supported")
        groups = read_config_groups(settings)
        matches = _matches(settings, groups, modules, lambda module: [module])
        codecs: dict[str, PackQuantized | IntQuantized | SmallFloats | None] = {}
        for name, group in groups.items():
            codecs[name] = _codec(group, settings)
        result: dict[str, Codec] = {}
        for module, names in matches:
            codec = codecs[names[0]]
            if any(codecs[name] != codec for name in names):
                descriptions = [_describe_group(name, codecs[name]) for name in names]
                raise CheckpointError(
                    f"{settings.name} assigns two schemes to '{module}'",
                    path=settings.path,
                    found=" and ".join(descriptions),
                )
            if codec is not None:
                result[module] = codec
        return result

    def read_weight_shapes(
        self,
        settings: Settings,
        stored: Mapping[str, StoredTensor],
        files: Mapping[str, TensorFile],
    ) -> dict[str, tuple[int, ...]]:
        result: dict[str, tuple[int, ...]] = {}
        for name, tensor in stored.items():
            module, _, leaf = name.rpartition(".")
            shape = stored.get(f"{module}.{SHAPE}")
            has_scale = f"{module}.{SCALE}" in stored
            # `weight_packed` is the leaf of words of integers, which come with a shape, and of
            # pairs of small floats, which do not.
            has_shape = shape is not None and (shape.dtype, shape.shape) == (DType.INT64, (2,))
            if leaf == PACKED_CODES.codes and shape is not None and has_shape:
                rows, columns = struct.unpack("<qq", files[shape.name].read_bytes(shape.name))
                if 0 < rows <= MAX_COLUMNS and 0 < columns <= MAX_COLUMNS:
                    result[module] = rows, columns
            elif leaf == FP4.codes and tensor.dtype == DType.UINT8 and has_scale:
                result[module] = tensor.shape[0], 2 * tensor.shape[-1]
            elif leaf == INT8.codes and tensor.dtype == DType.INT8 and has_scale:
                result[module] = tensor.shape
        return result

    def write_settings(
        self, schemes: Schemes, modules: Mapping[str, int], *, every: bool = True
    ) -> dict[str, Any]:
        return _build_settings(schemes, modules, self, every=every)

    def form(self, scheme: QuantScheme) -> str:
        """Choose the format of linears in a scheme."""
        if scheme.of_small_floats:
            return SmallFloats(scheme).form
        if scheme == _INT8 and self.activations is Activations.INT8:
            return _INT
        return _PACK

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        if scheme.of_small_floats and scheme not in FLOAT_SCHEMES.values():
            return Reason(
                "no reader supports small floats with this group size",
                scheme.group_size,
                ", ".join(FLOAT_SCHEMES),
            )
        if (
            self.activations is not None
            and not embedding
            and self.activations not in Activations.of(scheme)
        ):
            return _explain_activations(scheme, self.activations)
        if scheme.of_small_floats:
            if embedding:
                return _NO_FLOAT_EMBEDDING
            return SmallFloats(scheme)
        if self.form(scheme) == _INT:
            return IntQuantized(scheme)
        return PackQuantized(scheme)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        code_schemes = [scheme for scheme in schemes.values() if scheme is not None]
        vllm: list[str] = []
        if "vllm" not in without:
            vllm.append("vLLM on GPUs" if self.not_on_cpu(code_schemes) else "vLLM")
        if has_embedding(schemes):
            vllm = [f"{name} (not tried)" for name in vllm]
            return "; ".join(
                [", ".join(vllm), "transformers 5.23 does not load a packed embedding"]
            )
        if not all(scheme.symmetric for scheme in code_schemes):
            readers = ", ".join(["compressed-tensors' own decompressor", *vllm])
            return f"{readers}; transformers refuses packed zero points (seen in 5.23)"
        transformers: list[str] = []
        if "transformers" not in without:
            transformers.append("transformers with compressed-tensors")
        return ", ".join([*transformers, *vllm])

    def not_on_cpu(self, schemes: Iterable[QuantScheme]) -> str | None:
        """Describe the weights for which vLLM has no kernel on CPUs, as tried with 0.32; None if it
        has some for all.
        """
        for scheme in schemes:
            activations = self.activations or Activations.of(scheme)[0]
            fp8 = Activations.FP8
            if scheme.of_small_floats and (scheme, activations) != (FP8, fp8):
                if activations in Activations.of(scheme)[:1]:
                    return f"{scheme}"
                return f"{scheme} with these activations"
            # For inputs of floats vLLM has no kernel of 8-bit weights on CPUs.
            if scheme.bits == 8 and not scheme.of_small_floats and activations is Activations.NONE:
                return "8-bit weights without quantized activations"
            if scheme.bits == 4 and activations is fp8:
                return "int4 with fp8 activations"
        return None

    def unread_embedding(self, *, tied: bool, here_alone: bool = False) -> str:
        """Write a note on the readers that do not load a quantized embedding, as tried; if `tied`,
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
            return Message(
                "no other reader of compressed-tensors loads a quantized embedding that is also the"
                " head (seen in transformers 5.23, vLLM 0.32); quantkit does; llama.cpp and mlx-lm"
                " load one in their own formats (",
                Option("to"),
                ")",
            )
        if self.form(_INT8) == _INT:
            return _VLLM_EMBEDDING
        return Message(
            "transformers does not load a packed embedding (seen in 5.23), nor does vLLM 0.32 on"
            " CPUs; quantkit does; transformers loads it with ",
            Option("to", value=_INT),
        )


class Int8Activations(CompressedTensors):
    """compressed-tensors' ``int-quantized``: int8 per row, multiplied by activations that are
    rounded to int8 for each token. Only written: such folders state `CompressedTensors` as their
    method.
    """

    name = _INT
    schemes = (_INT8,)
    scales = frozenset({Scales.FLOATS})
    codes = frozenset({Codes.INTEGERS})
    # `quant_method` of such folders is that of `CompressedTensors`, which lists the runtimes.
    runtimes = ()

    def __init__(self) -> None:
        super().__init__(Activations.INT8)

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        if scheme == _INT8:
            return IntQuantized(scheme)
        return Reason("its readers support only int8 per row", found=scheme, expected=_INT8)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        readers: list[str] = []
        if "transformers" not in without:
            readers.append("transformers with compressed-tensors")
        # vLLM fails to read the settings of an embedding in this form.
        if "vllm" not in without and not has_embedding(schemes):
            readers.append("vLLM")
        return ", ".join(readers)


def has_embedding(schemes: Mapping[str, QuantScheme | None]) -> bool:
    """Return whether an embedding is among the modules that have a scheme."""
    return any(scheme is not None and is_embedding(module) for module, scheme in schemes.items())


def is_read_by_quantkit_only(
    method: QuantMethod, schemes: Mapping[str, QuantScheme | None], *, tied: bool
) -> bool:
    """Return whether quantkit is the only reader that loads a folder of compressed-tensors, as
    tried: its embedding is quantized, and the head is tied to it.
    """
    return tied and isinstance(method, CompressedTensors) and has_embedding(schemes)


def _describe_group(name: str, codec: PackQuantized | IntQuantized | SmallFloats | None) -> str:
    """Describe the scheme of a group for an error."""
    scheme = "floats" if codec is None else codec.scheme
    return f"{scheme} in '{name}'"


def _of_readers(targets: Collection[str], modules: Iterable[str]) -> set[str]:
    """Find the names in settings that readers may have for modules: they differ from those on
    disk, which are targets too, in what comes before the layers.
    """
    tails = {name_in_layers(module) for module in modules if module in targets}
    return {target for target in targets if name_in_layers(target) in tails}


def _explain_activations(scheme: QuantScheme, activations: Activations) -> Reason:
    able: list[str] = []
    for candidate in (*SCHEMES.values(), *FLOAT_SCHEMES.values()):
        if activations in Activations.of(candidate):
            able.append(str(candidate))
    possible = " or ".join(Activations.of(scheme))
    problem = f"no runtime multiplies it by {activations} activations (supported: {possible})"
    return Reason(problem, scheme, f"for {activations} activations: {', '.join(able)}")


def _build_settings(
    schemes: Schemes, modules: Iterable[str], method: CompressedTensors, *, every: bool
) -> dict[str, Any]:
    """Build settings in which a single scheme of the linears of decoder blocks has the target
    ``Linear``. Otherwise groups list their modules: compressed-tensors warns of targets that follow
    ``Linear``, older vLLM prefers the class to the names that q, k and v have before it fuses them,
    and vLLM's output head is no ``Linear``. Experts with one scheme are targeted by a pattern:
    transformers looks for it, and vLLM has other names for experts. Linears without a scheme are
    listed under ``ignore``. An embedding has a separate group, without activations to round, and is
    targeted by its class, because vLLM's Llama has no name for it.
    """
    experts = {module for module in modules if re.fullmatch(_EXPERTS, module)}
    expert_schemes = {schemes.get(module) for module in experts}
    # The targets of each scheme, in the order of the modules.
    targets_by_scheme: dict[QuantScheme, dict[str, None]] = {}
    embedding_schemes: list[QuantScheme] = []
    for module, scheme in schemes.items():
        if is_embedding(module):
            embedding_schemes.append(scheme)
            continue
        if len(expert_schemes) == 1 and module in experts:
            target = f"re:{_EXPERTS}"
        else:
            target = module
        targets_by_scheme.setdefault(scheme, {})[target] = None
    of_class = every and len(targets_by_scheme) == 1 and "lm_head" not in schemes
    groups: list[dict[str, Any]] = []
    # The scheme with the most targets comes first.
    for scheme, targets in sorted(targets_by_scheme.items(), key=lambda item: -len(item[1])):
        group_targets = ["Linear"] if of_class else list(targets)
        groups.append(_group(method.form(scheme), scheme, group_targets, method.inputs(scheme)))
    for scheme in embedding_schemes:
        groups.append(_group(method.form(scheme), scheme, ["Embedding"], None))
    forms = {group["format"] for group in groups}
    if len(forms) > 1:
        form = _MIXED
    elif forms:
        form = forms.pop()
    else:
        form = _DENSE
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
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
    scale_type = _SCALE_TYPES.get(scheme.scales)
    if scale_type is not None:
        weights |= {"scale_dtype": scale_type, "zp_dtype": scale_type}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if inputs is None else _build_input_settings(inputs),
        "output_activations": None,
        "format": form,
    }


def _build_input_settings(inputs: InputRounding) -> dict[str, Any]:
    """Build the settings of rounded inputs, with scales that are found when a model runs."""
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


def read_config_groups(settings: Settings) -> dict[str, Settings]:
    """Read the groups by name."""
    groups = settings.inside("config_groups")
    count = len(groups.values)
    if count > _MAX_GROUPS:
        problem = f"{settings.name} has too many groups"
        expected = f"at most {_MAX_GROUPS}"
        raise CheckpointError(problem, path=settings.path, found=count, expected=expected)
    return {name: groups.inside(name) for name in groups.values}


def _matches(
    settings: Settings,
    groups: Mapping[str, Settings],
    modules: Iterable[str],
    spelled: Callable[[str], list[str]],
) -> list[tuple[str, list[str]]]:
    """Match the modules that are not ignored with the names of the groups whose targets fit each
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
        # A name is closer than a pattern, and a pattern than a class; see `targets`.
        ranks: dict[str, int] = {}
        for name, target in targets.items():
            ranks[name] = min(map(target.closeness, names))
        closest = min(ranks.values(), default=NO_MATCH)
        if closest == NO_MATCH:
            continue
        closest_groups: list[str] = []
        for name, rank in ranks.items():
            if rank == closest:
                closest_groups.append(name)
        result.append((module, closest_groups))
    return result


def group_claim(group: Settings, settings: Settings) -> Claim | None:
    """Read what a group states; None if its weights are not quantized."""
    if not group.has("weights"):
        return None
    weights = group.inside("weights")
    # In mixed precision, groups have a format of their own.
    form = group.values.get("format") or settings.values.get("format")
    layout = _LAYOUTS.get(str(form))
    if layout is None and form == "naive-quantized":
        # This format has one-byte codes of either type.
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
    # With other strategies a group size has no effect; no settings have an empty key.
    has_groups = weights.values.get("strategy") in ("group", "tensor_group", None)
    size_key = "group_size" if has_groups else ""
    return base.apply_settings(weights, "num_bits", size_key)


def _codec(
    group: Settings, settings: Settings
) -> PackQuantized | IntQuantized | SmallFloats | None:
    """Choose the codec of a group's modules; None if they are read as floats."""
    form = None
    for level in (group, settings):
        if level.has("format"):
            form = level.string("format")
            break
    weights = group.inside("weights")
    if form in _OF_FLOATS and weights.values.get("type") == "float":
        return None
    if form in _FP4_SCHEMES:
        return _fp4(weights, _FP4_SCHEMES[form])
    if form != _PACK and form not in _OF_BYTES:
        expected = ", ".join((_PACK, *dict.fromkeys((*_OF_BYTES, *_OF_FLOATS)), *_FP4_SCHEMES))
        raise make_unread_settings_error(
            settings, "this compressed-tensors format is not supported", form, expected
        )
    codec = PackQuantized if form == _PACK else IntQuantized
    scheme = _scheme(weights)
    has_one_scale = _strategy(weights) == "tensor"
    by_index = weights.values.get("actorder") == _BY_INDEX
    return codec(scheme, has_one_scale, by_index)


def _fp4(weights: Settings, scheme: QuantScheme) -> SmallFloats:
    """Choose the codec of weights in e2m1, which have no other form than that of a scheme."""
    values = [weights.values.get(key) for key in ("num_bits", "type", "group_size")]
    expected = [scheme.bits, "float", scheme.group_size]
    if values != expected or _strategy(weights) != _GROUPED_BY.get(scheme.scales, "group"):
        raise make_unread_settings_error(
            weights,
            "this compressed-tensors scheme is not supported",
            format_value(values),
            format_value(expected),
        )
    return SmallFloats(scheme)


def _strategy(weights: Settings) -> str:
    """Read which weights share a scale; by default, this follows from the group size, as in
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
            weights, "this column order is not supported", format_value(order)
        )
    strategy = _strategy(weights)
    bits = weights.integer("num_bits", 1, 64)
    if weights.has("type"):
        kind = weights.string("type")
    else:
        kind = "int"
    is_read = kind == "int" and bits in (4, 8) and strategy in _STRATEGIES
    if not is_read or weights.values.get("dynamic"):
        raise make_unread_settings_error(
            weights,
            "this compressed-tensors scheme is not supported",
            f"{kind}{bits} per {strategy}",
            "int4 or int8, per group, channel or tensor",
        )
    if strategy == "group":
        group_size = weights.integer("group_size", 1, MAX_COLUMNS)
    else:
        group_size = None
    # Packed codes are read by groups, which must fill whole words: 8 codes of 4 bits.
    if group_size is not None and group_size % 8:
        raise make_unread_settings_error(
            weights, "group size is not supported", group_size, "a multiple of 8"
        )
    return QuantScheme(bits, group_size, weights.flag("symmetric", True))
