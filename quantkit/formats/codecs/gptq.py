"""The settings of GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it, and transformers and vLLM
read it.

The tensors decide which modules are quantized; see `gptq_linear` for the layout of one. AutoRound
has a separate ``quant_method`` for layouts of GPTQ and AWQ, with other keys. Source: the package
auto_round, its export_to_autoround and inference.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.base.patterns import MatchTime
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import (
    FLOAT_MODEL,
    NO_EMBEDDING,
    Codec,
    QuantMethod,
    Reader,
    Reason,
    Schemes,
    make_unread_settings_error,
)
from quantkit.formats.codecs.gptq_linear import SUFFIXES, GptqLinear
from quantkit.formats.codecs.gptq_zeros import WRITER, Stated, Version
from quantkit.formats.codecs.layout import Claim, Claims, Layout
from quantkit.formats.codecs.layouts import G_IDX, GPTQ, QWEIGHT, QZEROS, SCALES
from quantkit.formats.codecs.targets import (
    BY_PATTERN,
    Targets,
    is_head,
    name_in_layers,
    select_unskipped,
)
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import SCHEMES, QuantScheme
from quantkit.version import __version__

# The version of zero points in each format; `gptq_p` differs from `gptq_v2` only for 3 bits and
# others that are not read.
_FORMATS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}
# The group sizes that gptqmodel reads.
_READ_SIZES = {None, 16, 32, 64, 128, 256, 512, 1024}
# Each module is compared with each pattern. Names are looked up instead, since there may be one for
# each module.
_MAX_PATTERNS = 4096
_OLD_KEYS = (("w_bit", "bits"), ("q_group_size", "group_size"))
"""Keys of early AWQ, and the same ones since."""
_PACKINGS = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
"""Methods and layouts by AutoRound's names."""
_AS_GPTQ = "export the model with the format auto_round:auto_gptq"
# AutoRound states 16 bits for modules that stay floats.
_FLOAT_BITS = 16
# Matches what only patterns of modules have, not names.
_PATTERN = re.compile(r"\.\*|[][^$|()?+\\]")


class Gptq(QuantMethod):
    """``quant_method: gptq``: one scheme for all modules, and patterns of others; 4 and 8 bits in
    GPTQ's own layout, without adapters, are read.
    """

    name = "gptq"
    schemes = tuple(SCHEMES.values())
    scale_dtype = DType.FLOAT16
    runtimes = ("vllm", "transformers", "mlx")

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        symmetric = settings.values.get("sym", True) is not False
        return claims_by_rows(settings, GPTQ, symmetric, modules, coded)

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        version = _read_zero_point_version(settings)
        base = _read_claim(
            Claim(GPTQ, symmetric=settings.flag("sym", True)), settings, ("bits", "group_size")
        )
        overrides = Overrides(settings, base)
        override_claims: list[Claim | None] = []
        for override_claim, override_settings in overrides.claims:
            # Overrides that no module matches are checked too.
            if override_claim is not None:
                override_claim = _read_claim(override_claim, override_settings)
            override_claims.append(override_claim)
        module_settings: dict[str, Stated] = {}
        for module in find_quantized_modules(modules, stored, settings):
            place = overrides.find(module)
            claim = base if place is None else override_claims[place]
            # Tensors decide which modules are quantized, even if the settings exclude one.
            if claim is None and stored:
                claim = base
            if claim is None:
                continue
            if stored or module != "lm_head" or settings.flag("lm_head", False):
                module_settings[module] = Stated(
                    claim.bits or 0, claim.group_size, bool(claim.symmetric)
                )
        # All modules share one version, which is inferred from their tensors on the first use.
        folder_version = Version(version, module_settings, writers(settings.values))
        codecs: dict[str, Codec] = {}
        for module, (bits, group_size, symmetric) in module_settings.items():
            codecs[module] = GptqLinear(bits, group_size, symmetric, folder_version)
        return codecs

    def read_weight_shapes(
        self,
        settings: Settings,
        stored: Mapping[str, StoredTensor],
        files: Mapping[str, TensorFile],
    ) -> dict[str, tuple[int, ...]]:
        result: dict[str, tuple[int, ...]] = {}
        for module, tensors in iter_packed_modules(stored):
            outputs = tensors[SCALES].shape[1]
            # The words of zero points pack the outputs.
            packed_bits = 32 * tensors[QZEROS].shape[1]
            index = stored.get(f"{module}.{G_IDX}")
            if index is not None and len(index.shape) == 1:
                result[module] = outputs, index.shape[0]
            elif outputs and packed_bits and not packed_bits % outputs:
                bits = packed_bits // outputs
                result[module] = outputs, 32 * tensors[QWEIGHT].shape[0] // bits
        return result

    def write_settings(
        self, schemes: Schemes, modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        """Build settings with the most common bits and group size for the folder; other modules,
        and linears without a scheme, are listed under ``dynamic``. A folder has one version of zero
        points, so schemes are all symmetric, or none.
        """
        ordered_schemes = [scheme for scheme, _ in Counter(schemes.values()).most_common()]
        common = ordered_schemes[0]
        for scheme in ordered_schemes:
            if scheme.symmetric != common.symmetric:
                problem = "GPTQ does not support symmetric and asymmetric schemes in one folder"
                raise UnsupportedError(problem, found=f"{common} and {scheme}")
        dynamic: dict[str, dict[str, int]] = {}
        for module in modules:
            module_scheme = schemes.get(module)
            name = re.escape(module)
            # The head has a key of its own, ``lm_head``.
            if module_scheme is None and module != "lm_head":
                dynamic[f"-:^{name}$"] = {}
            elif module_scheme is not None and module_scheme != common:
                dynamic[f"+:^{name}$"] = {
                    "bits": module_scheme.bits,
                    "group_size": module_scheme.group_size or -1,
                }
        settings: dict[str, Any] = {
            "quant_method": self.name,
            "bits": common.bits,
            "group_size": common.group_size or -1,
            "sym": common.symmetric,
            "desc_act": False,
            # All readers support version 1, which cannot store every zero point.
            "checkpoint_format": "gptq" if common.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": "lm_head" in schemes,
            "meta": {"quantizer": [f"{WRITER}:{__version__}"]},
        }
        if dynamic:
            settings["dynamic"] = dynamic
        return settings

    def list_quantized(self, modules: Iterable[str]) -> dict[str, Any]:
        """Do as `QuantMethod.list_quantized`. transformers ignores ``dynamic``, and with this list
        takes the modules of layers whose names end in its entries; vLLM takes those whose names
        contain one. Both may have other names before the layers.
        """
        names = dict.fromkeys(name_in_layers(module) for module in modules if not is_head(module))
        return {"modules_in_block_to_quantize": [list(names)]}

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        return {"quantize_config.json": json.dumps(settings, indent=2).encode() + b"\n"}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> GptqLinear | Reason:
        if embedding:
            return NO_EMBEDDING
        return GptqLinear(scheme.bits, scheme.group_size, scheme.symmetric)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        """Do as `QuantMethod.readers`. transformers calls gptqmodel with one scheme for all linears
        except the head, and ignores ``dynamic``; vLLM 0.32 has kernels for symmetric weights in
        order, on CPUs only for 4 bits.
        """
        code_schemes = [scheme for scheme in schemes.values() if scheme is not None]
        if not {scheme.group_size for scheme in code_schemes} <= _READ_SIZES:
            return "readers that support this group size of GPTQ"
        readers: list[str] = []
        if "gptqmodel" not in without:
            readers.append("gptqmodel")
        block_schemes = {scheme for module, scheme in schemes.items() if module != "lm_head"}
        is_uniform = len(block_schemes) == 1 and schemes.get("lm_head") is None
        if is_uniform and "transformers" not in without:
            readers.append("transformers with gptqmodel")
        symmetric = all(scheme.symmetric for scheme in code_schemes)
        if code_schemes and symmetric and "vllm" not in without:
            on_cpus = all(scheme.bits == 4 for scheme in code_schemes)
            readers.append("vLLM" if on_cpus else "vLLM on GPUs")
        return ", ".join(readers)


def iter_packed_modules(
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Yield the modules that have codes, scales and zero points of GPTQ or AWQ, each a matrix, and
    these tensors by suffix.
    """
    for name in stored:
        module, _, leaf = name.rpartition(".")
        if leaf != QWEIGHT:
            continue
        tensors: dict[str, StoredTensor] = {}
        for suffix in SUFFIXES:
            tensor = stored.get(f"{module}.{suffix}")
            if tensor is not None and len(tensor.shape) == 2:
                tensors[suffix] = tensor
        if len(tensors) == len(SUFFIXES):
            yield module, tensors


def find_quantized_modules(
    modules: Iterable[str], stored: Collection[str], settings: Settings
) -> list[str]:
    """Find the modules whose tensors show that they are quantized; all of them if there are no
    tensors.

    Raises:
        UnsupportedError: if their inputs are rotated at run time.
        CheckpointError: if none is quantized.
    """
    rotation = settings.values.get("rotation")
    if rotation:
        problem = "models whose activations are rotated at run time are not supported"
        hint = "quantize the float model without rotation"
        raise make_unread_settings_error(
            settings, problem, f"rotation {format_value(rotation)}", hint=hint
        )
    if not stored:
        return list(modules)
    result = []
    for module in modules:
        if any(f"{module}.{suffix}" in stored for suffix in SUFFIXES):
            result.append(module)
    # Codes may belong to modules that are not among `modules`.
    if not result and not any(name.endswith(f".{QWEIGHT}") for name in stored):
        problem = (
            f"{settings.name} names"
            f" {format_value(settings.values.get('quant_method'))}, but no tensor is"
            " quantized"
        )
        hint = f"if the model is unquantized, remove {settings.name} from the config"
        raise CheckpointError(problem, path=settings.path, hint=hint)
    return result


def claims_by_rows(
    settings: Settings,
    layout: Layout,
    symmetric: bool,
    modules: Iterable[str],
    coded: Collection[str],
) -> Claims:
    """Do as `QuantMethod.claims` for GPTQ or AWQ: one scheme for all linears except the head, with
    exceptions.
    """
    base = base_claim(settings, layout, symmetric)
    head = bool(settings.values.get("lm_head"))
    overrides = Overrides(settings, base)
    claims: dict[str, Claim] = {}
    for module in select_unskipped(modules, settings):
        if is_head(module) and not head and module not in coded:
            continue
        claim = overrides.claim(module, base)
        if claim is not None:
            claims[module] = claim
    return Claims(claims, certain=True)


def base_claim(settings: Settings, layout: Layout, symmetric: bool) -> Claim:
    """Read what settings of GPTQ or AWQ state of the modules that no pattern names."""
    # With `static_groups`, groups are of adjacent inputs whatever the order of quantization.
    by_index = bool(settings.values.get("desc_act")) and not settings.values.get("static_groups")
    bits_key, size_key = [old if settings.has(old) else new for old, new in _OLD_KEYS]
    # 4 bits in groups of 128 are assumed where a key is missing; a null says that it is not known.
    bits = None if bits_key in settings.values else 4
    size = None if size_key in settings.values else 128
    claim = Claim(layout=layout, bits=bits, group_size=size, symmetric=symmetric, by_index=by_index)
    return claim.apply_settings(settings, bits_key, size_key)


def writers(settings: Mapping[str, Any]) -> set[str]:
    """Read the programs that quantized a folder, as GPTQModel lists them, without their
    versions.
    """
    meta = settings.get("meta")
    quantizers = meta.get("quantizer") if isinstance(meta, dict) else None
    # A single program may be a string instead of a list.
    if not isinstance(quantizers, list):
        quantizers = [quantizers]
    result: set[str] = set()
    for quantizer in quantizers:
        if type(quantizer) is str:
            result.add(quantizer.split(":")[0].lower())
    return result


def _read_zero_point_version(settings: Settings) -> int | None:
    """Read the version of zero points that settings state; None if they do not."""
    problem = "this GPTQ layout is not supported"
    for key in ("checkpoint_format", "format"):
        if settings.has(key):
            layout = settings.string(key).lower()
            if layout not in _FORMATS:
                hint = "export the model with the format gptq"
                raise make_unread_settings_error(
                    settings, problem, format_value(layout), " or ".join(_FORMATS), hint
                )
            return _FORMATS[layout]
    if settings.flag("is_marlin_format", False):
        raise make_unread_settings_error(settings, problem, "marlin", "gptq")
    return None


def _read_claim(claim: Claim, settings: Settings, required: Collection[str] = ()) -> Claim:
    """Read what settings, or an override in them, state of modules, if quantkit reads it; `claim`
    is the default.
    """
    for key in required:
        settings.need(key)
    if settings.has("bits"):
        bits = settings.integer("bits", 1, 32)
        if bits not in (4, 8):
            raise make_unread_settings_error(
                settings, "bits per weight are not supported", bits, "4 or 8", FLOAT_MODEL
            )
    claim = claim.apply_settings(settings)
    if settings.has("pack_dtype"):
        words = settings.string("pack_dtype")
        if words != "int32":
            raise make_unread_settings_error(
                settings,
                "this packing type of GPTQ is not supported",
                format_value(words),
                "int32",
            )
    if settings.values.get("adapter"):
        raise make_unread_settings_error(
            settings, "adapters stored with quantized weights are not supported"
        )
    return replace(claim, symmetric=settings.flag("sym", bool(claim.symmetric)))


class Overrides:
    """The patterns of modules in ``dynamic``, of which the first that matches decides.

    Attributes:
        claims: for each pattern what holds for its modules, None if they are not quantized, and the
            settings that say so.
    """

    def __init__(self, settings: Settings, base: Claim) -> None:
        """Read the patterns of settings, where `base` holds for all other modules; raises
        `CheckpointError`.
        """
        self.claims: list[tuple[Claim | None, Settings]] = []
        # The places of patterns that are names, of which there may be one for each linear.
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, Targets]] = []
        if not settings.has("dynamic"):
            return
        dynamic = settings.inside("dynamic")
        match_time = MatchTime(settings.path)
        patterns: list[str] = []
        names: list[str | None] = []
        for key in dynamic.values:
            pattern = key.removeprefix("+:").removeprefix("-:")
            patterns.append(pattern)
            names.append(_extract_exact_name(pattern))
        if names.count(None) > _MAX_PATTERNS:
            problem = f"{dynamic.name} has too many patterns"
            expected = f"at most {_MAX_PATTERNS}"
            raise CheckpointError(
                problem, path=settings.path, found=names.count(None), expected=expected
            )
        for place, (key, value) in enumerate(dynamic.values.items()):
            pattern = patterns[place]
            name = names[place]
            if name is None:
                targets = Targets([f"re:{pattern}"], key=dynamic.name, match_time=match_time)
                self._patterns.append((place, targets))
            else:
                # The first pattern that matches decides.
                self._names.setdefault(name, place)
            if key.startswith("-:") or value is False:
                self.claims.append((None, dynamic))
            else:
                override = dynamic.inside(key)
                symmetric = override.flag("sym", base.symmetric is not False)
                claim = replace(base.apply_settings(override), symmetric=symmetric)
                self.claims.append((claim, override))

    def find(self, module: str) -> int | None:
        """Find the place of the first pattern that matches a module; None if none does."""
        name_place = self._names.get(module)
        for place, targets in self._patterns:
            if name_place is not None and name_place < place:
                break
            if targets.closeness(module) == BY_PATTERN:
                return place
        return name_place

    def claim(self, module: str, base: Claim) -> Claim | None:
        """Look up the claim for a module; None if it is not quantized."""
        place = self.find(module)
        if place is None:
            return base
        return self.claims[place][0]


def _extract_exact_name(pattern: str) -> str | None:
    """Extract the only name that a pattern matches; None if it may match several."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    # A pattern is a name if escaping what remains without backslashes gives the pattern again.
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    if re.escape(name) == pattern[1:-1]:
        return name
    return None


class AutoRound(QuantMethod):
    """``quant_method: auto-round``: read as GPTQ or AWQ; other packings, values that are not
    integers, activations of few bits, rotated weights, and several schemes in AWQ are not read.
    """

    name = "auto-round"

    def resolve(self, settings: Settings) -> tuple[str, Settings]:
        packing = settings.string("packing_format")
        if packing not in _PACKINGS:
            raise make_unread_settings_error(
                settings,
                "this packing of AutoRound is not supported",
                format_value(packing),
                ", ".join(_PACKINGS),
                _AS_GPTQ,
            )
        _require_weights_only(settings)
        if settings.values.get("rotation_config"):
            raise make_unread_settings_error(
                settings, "rotated weights of AutoRound are not supported"
            )
        method, layout = _PACKINGS[packing]
        translated: dict[str, Any] = {}
        for key in ("bits", "group_size", "sym"):
            translated[key] = settings.values.get(key)
        names: dict[str, dict[str, Any]] = {}
        patterns: dict[str, dict[str, Any]] = {}
        if settings.has("extra_config"):
            extra = settings.inside("extra_config")
        else:
            extra = Settings({}, settings.path)
        for key in extra.values:
            override = extra.inside(key)
            changes: dict[str, Any] = {}
            if override.has("bits") and override.integer("bits", 1, 32) >= _FLOAT_BITS:
                sign = "-"
            else:
                sign = "+"
                _require_weights_only(override)
                is_changed = False
                for name, default in translated.items():
                    if override.has(name):
                        changes[name] = override.values[name]
                        is_changed = is_changed or changes[name] != default
                # In settings of AWQ, one scheme applies to all modules.
                if method == "awq" and is_changed:
                    problem = "AWQ with several schemes is not supported"
                    description = f"{format_value(key)}: {format_value(changes)}"
                    raise make_unread_settings_error(
                        settings, problem, description, "one scheme", _AS_GPTQ
                    )
            if _PATTERN.search(key):
                patterns[f"{sign}:.*(?:{key})"] = changes
            else:
                names[f"{sign}:{re.escape(key)}$"] = changes
        translated["quant_method"] = method
        translated["lm_head"] = "lm_head" in extra.values
        if method == "awq":
            translated["version"] = layout
            translated["zero_point"] = not settings.flag("sym", True)
        else:
            translated["checkpoint_format"] = layout
            # The first match in ``dynamic`` decides, so names go before patterns.
            translated["dynamic"] = names | patterns
        return method, Settings(translated, settings.path, settings.name)


def _require_weights_only(settings: Settings) -> None:
    if settings.has("data_type"):
        kind = settings.string("data_type")
        if kind != "int":
            raise make_unread_settings_error(
                settings,
                "this weight type of AutoRound is not supported",
                format_value(kind),
                "int",
            )
    if settings.has("act_bits"):
        bits = settings.integer("act_bits", 1, 32)
        if bits < _FLOAT_BITS:
            problem = "quantized activations of AutoRound are not supported"
            raise make_unread_settings_error(
                settings, problem, f"{bits} bits", f"{_FLOAT_BITS} bits"
            )
