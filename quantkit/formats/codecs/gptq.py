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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.base.patterns import MatchTime
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.codec import (
    FLOAT_MODEL,
    NO_EMBEDDING,
    Codec,
    QuantMethod,
    Reason,
    Runtime,
    Schemes,
    make_unread_settings_error,
)
from quantkit.formats.codecs.gptq_linear import GPTQ, SUFFIXES, GptqLinear
from quantkit.formats.codecs.gptq_zeros import QWEIGHT, WRITER, Stated, Version
from quantkit.formats.codecs.layout import Claim, Claims, Layout
from quantkit.formats.codecs.targets import BY_PATTERN, Targets, is_head, not_skipped
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import SCHEMES, QuantScheme
from quantkit.version import __version__

# The last differs only for 3 bits and others.
_FORMATS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}
_READ_SIZES = {None, 16, 32, 64, 128, 256, 512, 1024}  # by gptqmodel
# that are compared with each module; names are looked up, there may be one for each module
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
_FLOAT_BITS = 16
# What only patterns of modules have, not names.
_PATTERN = re.compile(r"\.\*|[][^$|()?+\\]")


class Gptq(QuantMethod):
    """``quant_method: gptq``: one scheme for all modules, and patterns of others; 4 and 8 bits in
    GPTQ's own layout, without adapters, are read.
    """

    name = "gptq"
    layouts = (GPTQ,)
    settings_file = "quantize_config.json"
    schemes = tuple(SCHEMES.values())
    scale_dtype = DType.FLOAT16
    runtimes = ("vllm", "transformers", "mlx")

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        return claims_by_rows(
            settings, GPTQ, settings.values.get("sym", True) is not False, modules, coded
        )

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        version = _read_zero_point_version(settings)
        base = _linear(
            Claim(GPTQ, symmetric=settings.flag("sym", True)), settings, ("bits", "group_size")
        )
        overrides = Overrides(settings, base)
        read = [claim and _linear(claim, own) for claim, own in overrides.claims]
        found: dict[str, Claim] = {}
        for module in find_quantized_modules(modules, stored, settings):
            place = overrides.find(module)
            claim = base if place is None else read[place]
            claim = claim or (base if stored else None)
            if claim is not None and (
                stored or module != "lm_head" or settings.flag("lm_head", False)
            ):
                found[module] = claim
        stated = {
            module: Stated(one.bits or 0, one.group_size, bool(one.symmetric))
            for module, one in found.items()
        }
        decided = Version(version, stated, writers(settings.values))
        return {name: GptqLinear(*one, decided) for name, one in stated.items()}

    def write_settings(
        self, schemes: Schemes, modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        """Return the most common bits and group size apply to the folder; other modules, and
        linears without a scheme, are listed under ``dynamic``. A folder has one version of zero
        points, so schemes are all symmetric, or none.
        """
        (common, _), *others = Counter(schemes.values()).most_common()
        if other := next(
            (scheme for scheme, _ in others if scheme.symmetric != common.symmetric), None
        ):
            problem = "GPTQ has symmetric schemes or asymmetric ones in a folder, not both"
            raise UnsupportedError(problem, found=f"{common} and {other}")
        dynamic: dict[str, dict[str, int]] = {}
        for module in modules:
            scheme = schemes.get(module)
            name = re.escape(module)
            if scheme is None and module != "lm_head":
                dynamic[f"-:^{name}$"] = {}
            elif scheme is not None and scheme != common:
                dynamic[f"+:^{name}$"] = {
                    "bits": scheme.bits,
                    "group_size": scheme.group_size or -1,
                }
        settings = {
            "quant_method": self.name,
            "bits": common.bits,
            "group_size": common.group_size or -1,
            "sym": common.symmetric,
            "desc_act": False,
            "checkpoint_format": "gptq" if common.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": "lm_head" in schemes,
            "meta": {"quantizer": [f"{WRITER}:{__version__}"]},
        }
        return settings | ({"dynamic": dynamic} if dynamic else {})

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        return {self.settings_file: json.dumps(settings, indent=2).encode() + b"\n"}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> GptqLinear | Reason:
        if embedding:
            return NO_EMBEDDING
        return GptqLinear(scheme.bits, scheme.group_size, scheme.symmetric)

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Runtime] = ()
    ) -> str:
        """transformers calls gptqmodel with one scheme for all linears except the head, and ignores
        ``dynamic``; vLLM 0.32 has kernels for symmetric weights in order, on CPUs only for 4 bits.
        """
        found = [scheme for scheme in schemes.values() if scheme is not None]
        if not {scheme.group_size for scheme in found} <= _READ_SIZES:
            return "what reads GPTQ in such groups"
        readers = ["gptqmodel"]
        blocks = {scheme for module, scheme in schemes.items() if module != "lm_head"}
        if len(blocks) == 1 and schemes.get("lm_head") is None and "transformers" not in without:
            readers.append("transformers with gptqmodel")
        if found and "vllm" not in without and all(scheme.symmetric for scheme in found):
            readers.append("vLLM" if all(scheme.bits == 4 for scheme in found) else "vLLM on GPUs")
        return ", ".join(readers)


def find_quantized_modules(
    modules: Iterable[str], stored: Collection[str], settings: Settings
) -> list[str]:
    """Return the modules whose tensors show that they are quantized; all of them if there are no
    tensors.

    Raises:
        UnsupportedError: if their inputs are rotated at run time.
        CheckpointError: if none is quantized.
    """
    if rotation := settings.values.get("rotation"):
        problem = "models whose activations are rotated at run time are not read"
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
    if not result and not any(name.endswith(f".{QWEIGHT}") for name in stored):
        problem = (
            f"{settings.name} names"
            f" {format_value(settings.values.get('quant_method'))}, and no tensor is"
            " quantized"
        )
        hint = f"if these are floats, take {settings.name} out of the config"
        raise CheckpointError(problem, path=settings.path, hint=hint)
    return result


def claims_by_rows(
    settings: Settings,
    layout: Layout,
    symmetric: bool,
    modules: Iterable[str],
    coded: Collection[str],
) -> Claims:
    """`QuantMethod.claims` of GPTQ or AWQ: one scheme for all linears except the head, with
    exceptions.
    """
    base = base_claim(settings, layout, symmetric)
    head = bool(settings.values.get("lm_head"))
    overrides = Overrides(settings, base)
    found = {}
    for module in not_skipped(modules, settings):
        if is_head(module) and not head and module not in coded:
            continue
        claim = overrides.claim(module, base)
        if claim is not None:
            found[module] = claim
    return Claims(found, certain=True)


def base_claim(settings: Settings, layout: Layout, symmetric: bool) -> Claim:
    """Return what settings of GPTQ or AWQ state of the modules that no pattern names."""
    by_index = bool(settings.values.get("desc_act")) and not settings.values.get("static_groups")
    bits_key, size_key = (old if settings.has(old) else new for old, new in _OLD_KEYS)
    bits, size = (
        None if key in settings.values else usual for key, usual in ((bits_key, 4), (size_key, 128))
    )
    return Claim(layout, bits, size, symmetric, by_index).apply_settings(
        settings, bits_key, size_key
    )


def writers(settings: Mapping[str, Any]) -> set[str]:
    """Return the programs that quantized a folder, as GPTQModel lists them, without their
    versions.
    """
    meta = settings.get("meta")
    if isinstance(meta, dict):
        found = meta.get("quantizer")
    else:
        found = None
    result: set[str] = set()
    for one in found if isinstance(found, list) else [found]:
        if type(one) is str:
            result.add(one.split(":")[0].lower())
    return result


def _read_zero_point_version(settings: Settings) -> int | None:
    """Return the version of zero points that settings state; None if they do not."""
    problem = "this layout of GPTQ is not read"
    for key in ("checkpoint_format", "format"):
        if settings.has(key):
            stated = settings.string(key).lower()
            if stated not in _FORMATS:
                hint = "export the model with the format gptq"
                raise make_unread_settings_error(
                    settings, problem, format_value(stated), " or ".join(_FORMATS), hint
                )
            return _FORMATS[stated]
    if settings.flag("is_marlin_format", False):
        raise make_unread_settings_error(settings, problem, "marlin", "gptq")
    return None


def _linear(claim: Claim, settings: Settings, required: Collection[str] = ()) -> Claim:
    """Return what settings, or an override in them, state of modules, if quantkit reads it; `claim`
    is the default.
    """
    for key in required:
        settings.need(key)
    if settings.has("bits") and (bits := settings.integer("bits", 1, 32)) not in (4, 8):
        raise make_unread_settings_error(
            settings, "bits per weight are not supported", bits, "4 or 8", FLOAT_MODEL
        )
    claim = claim.apply_settings(settings)
    if settings.has("pack_dtype") and (words := settings.string("pack_dtype")) != "int32":
        raise make_unread_settings_error(
            settings,
            "codes are packed into other words than are read",
            format_value(words),
            "int32",
        )
    if settings.values.get("adapter"):
        raise make_unread_settings_error(settings, "adapters next to codes are not read")
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
        # Of patterns that are names: there may be one for each linear.
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, Targets]] = []
        if not settings.has("dynamic"):
            return
        dynamic = settings.inside("dynamic")
        match_time = MatchTime(settings.path)
        patterns = [key.removeprefix("+:").removeprefix("-:") for key in dynamic.values]
        names = [_extract_exact_name(pattern) for pattern in patterns]
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
                self._patterns.append(
                    (place, Targets([f"re:{pattern}"], key=dynamic.name, match_time=match_time))
                )
            else:
                self._names.setdefault(name, place)
            if key.startswith("-:") or value is False:
                self.claims.append((None, dynamic))
            else:
                own = dynamic.inside(key)
                symmetric = own.flag("sym", base.symmetric is not False)
                self.claims.append((replace(base.apply_settings(own), symmetric=symmetric), own))

    def find(self, module: str) -> int | None:
        """Return the place of the first pattern that matches a module; None if none does."""
        named = self._names.get(module)
        for place, targets in self._patterns:
            if named is not None and named < place:
                break
            if targets.closeness(module) == BY_PATTERN:
                return place
        return named

    def claim(self, module: str, base: Claim) -> Claim | None:
        """Return what holds for a module; None if it is not quantized."""
        place = self.find(module)
        if place is None:
            return base
        return self.claims[place][0]


def _extract_exact_name(pattern: str) -> str | None:
    """Return the only name that a pattern matches; None if it may match several."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
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
                "this packing of AutoRound is not read",
                format_value(packing),
                ", ".join(_PACKINGS),
                _AS_GPTQ,
            )
        _require_weights_only(settings)
        if settings.values.get("rotation_config"):
            raise make_unread_settings_error(settings, "rotated weights of AutoRound are not read")
        method, layout = _PACKINGS[packing]
        said = {key: settings.values.get(key) for key in ("bits", "group_size", "sym")}
        names = dict[str, dict[str, Any]]()
        patterns = dict[str, dict[str, Any]]()
        if settings.has("extra_config"):
            extra = settings.inside("extra_config")
        else:
            extra = Settings({}, settings.path)
        for key in extra.values:
            one = extra.inside(key)
            if one.has("bits") and one.integer("bits", 1, 32) >= _FLOAT_BITS:
                own = {}
                sign = "-"
            else:
                _require_weights_only(one)
                own = {name: one.values[name] for name in said if one.has(name)}
                sign = "+"
                if method == "awq" and any(own[name] != said[name] for name in own):
                    problem = "AWQ of several schemes is not read"
                    found = f"{format_value(key)}: {format_value(own)}"
                    raise make_unread_settings_error(
                        settings, problem, found, "one scheme", _AS_GPTQ
                    )
            if _PATTERN.search(key):
                patterns[f"{sign}:.*(?:{key})"] = own
            else:
                names[f"{sign}:{re.escape(key)}$"] = own
        said |= {"quant_method": method, "lm_head": "lm_head" in extra.values}
        if method == "awq":
            said |= {"version": layout, "zero_point": not settings.flag("sym", True)}
        else:
            said |= {"checkpoint_format": layout, "dynamic": names | patterns}
        return method, Settings(said, settings.path, settings.name)


def _require_weights_only(settings: Settings) -> None:
    if settings.has("data_type") and (kind := settings.string("data_type")) != "int":
        raise make_unread_settings_error(
            settings,
            "AutoRound's weights are of a type that is not read",
            format_value(kind),
            "int",
        )
    if settings.has("act_bits") and (bits := settings.integer("act_bits", 1, 32)) < _FLOAT_BITS:
        problem = "AutoRound's activations of few bits are not read"
        raise make_unread_settings_error(settings, problem, f"{bits} bits", f"{_FLOAT_BITS} bits")
