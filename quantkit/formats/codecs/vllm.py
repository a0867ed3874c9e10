"""What vLLM cannot load of a folder's linears, and what settings must also name so that it does.

vLLM looks for settings by the names that its modules have (`vllm_modules`), not by those of the
linears on disk. Here its lookup is repeated, and compared with what the settings say of the linears
that a module holds. Source: vLLM 0.32's `CompressedTensorsConfig`, `AutoGPTQConfig`,
`AutoAWQConfig` and their helpers; `scripts/measure/measure_vllm.py` compares the result with its
loader.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.architectures.config import OpaqueTensor
from quantkit.architectures.families.opaque import ROUTERS, is_table, possible_linears
from quantkit.architectures.names import expert_bank, is_embedding
from quantkit.base.json_values import Settings, collect_values
from quantkit.base.late import LateModule
from quantkit.base.patterns import MatchTime, Pattern
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import (
    CompressedTensors,
    group_claim,
    read_config_groups,
)
from quantkit.formats.codecs.layout import Claim
from quantkit.formats.codecs.layouts import AWQ, GPTQ, PLAIN
from quantkit.formats.codecs.targets import is_head
from quantkit.formats.codecs.vllm_modules import FUSED, VllmModule, VllmNames
from quantkit.formats.codecs.vllm_settings import iter_refused_settings

if TYPE_CHECKING:
    from quantkit.formats.codecs import gptq
else:
    gptq = LateModule("quantkit.formats.codecs.gptq")

Shape = tuple[int, ...]
# vLLM pads the vocabulary to a multiple of this. It adds rows, but the outputs of GPTQ and AWQ are
# columns.
_HEAD_ROWS = 64
# Methods by name: their codecs are not imported for folders of other methods.
_GPTQ = "gptq"
_AWQ = "awq"
_UNREAD = {
    "bloom": ("query_key_value", "quantized, but vLLM's BLOOM reorders its rows when it loads it"),
    "gpt_oss": (
        "experts",
        (
            "no codes of OpenAI's MXFP4, which are all that vLLM's gpt-oss loads next to quantized"
            " linears"
        ),
    ),
}
"""By `model_type` the modules that vLLM's own loader of a model does not take, and why not."""
_QUANTIZED_ROUTERS = frozenset({"k2_horizon", "lfm2_moe", "qwen3_moe", "qwen3_vl_moe"})
"""The model types whose routers vLLM quantizes if settings do not name them."""
_PLACES = {part: place for parts in FUSED.values() for place, part in enumerate(parts)}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class _Split:
    """Stands for the settings of a fused module whose parts have different ones; equal to no
    claim.
    """


_SPLIT = _Split()


class _Unnamed:
    """Stands for the settings of a linear that no target names, as None does for those of a
    linear of floats.
    """


_UNNAMED = _Unnamed()
_Found = Claim | None | _Split
"""What vLLM finds for a module: a claim, None for floats, or `_SPLIT`, for which it raises an
error.
"""


@dataclass(frozen=True)
class VllmProblem:
    """Why vLLM does not load a module.

    Attributes:
        rule: the doctor's rule: ``fused-schemes``, ``expert-schemes``, ``vllm-names``,
            ``vllm-loader``, ``vllm-tiles``, ``vllm-head``, ``vllm-settings`` or ``gptq-order``.
        where: the module by vLLM's name, or the settings.
        what: what was found.
    """

    rule: str
    location: str
    description: str


@dataclass(frozen=True)
class Linears:
    """The linears of a folder, and what its settings say of them.

    Attributes:
        method: of quantization.
        settings: of the method.
        shapes: the shape [O, I] of each linear on disk, quantized or not; None if it is not known.
        coded: those whose weights are stored as codes.
        names: how vLLM names them.
        model_type: of the model.
    """

    method: QuantMethod
    settings: Settings
    shapes: Mapping[str, Shape | None]
    coded: Collection[str]
    names: VllmNames
    model_type: str

    @classmethod
    def of(
        cls,
        method: QuantMethod,
        settings: Mapping[str, Any] | Settings,
        shapes: Mapping[str, Shape | None],
        coded: Collection[str],
        raw: Mapping[str, Any],
    ) -> Linears:
        """Describe the linears of a model with the config.json `raw`; embeddings are left out."""
        if not isinstance(settings, Settings):
            settings = Settings(settings, "config.json", "quantization_config")
        linear_shapes: dict[str, Shape | None] = {}
        for module, shape in shapes.items():
            if not is_embedding(module):
                linear_shapes[module] = shape
        return cls(
            method=method,
            settings=settings,
            shapes=linear_shapes,
            coded=coded,
            names=VllmNames.of(raw),
            model_type=str(raw.get("model_type")),
        )

    def compare(self) -> Iterator[tuple[VllmModule, list[Claim | None], _Found]]:
        """Yield each module of vLLM, what the settings say of its parts, and what vLLM finds for
        it; nothing for a method whose lookup is not known here.
        """
        lookup = _lookup(self)
        if lookup is None:
            return
        # Settings of GPTQ and AWQ need not name what is stored as floats. In others, no reader but
        # vLLM quantizes routers: whatever the settings state, they mean floats.
        only_coded = self.method.name in (_GPTQ, _AWQ)
        claims: dict[str, Claim] = {}
        all_claims = self.method.claims(self.settings, self.shapes, self.coded).modules
        for part, claim in all_claims.items():
            if part in self.coded or not (only_coded or _is_router(part)):
                claims[part] = claim
        for module in self.names.group(self.shapes):
            vllm_claim = None if module.is_float else lookup.find(module)
            yield module, [claims.get(part) for part in module.parts], vllm_claim


def vllm_problems(linears: Linears) -> list[VllmProblem]:
    """List what vLLM refuses in settings and, if these can be read, what it cannot load of some
    linears.

    Other checks report settings that cannot be read.
    """
    settings = linears.settings
    problems: list[VllmProblem] = []
    for rule, description in iter_refused_settings(settings.values):
        problems.append(VllmProblem(rule, settings.name, description))
    module_problems: list[VllmProblem] = []
    try:
        for module, part_claims, vllm_claim in linears.compare():
            problem = _find_problem(linears, module, part_claims, vllm_claim)
            if problem is not None:
                module_problems.append(problem)
    except CheckpointError:
        return problems
    return problems + module_problems


def describe_problems(problems: Sequence[VllmProblem]) -> str | None:
    """Say in a few words what vLLM does not load; None if there are no problems."""
    if not problems:
        return None
    first = problems[0]
    text = f"vLLM 0.32 does not load it: '{first.location}' has {first.description}"
    further_count = len(problems) - 1
    if further_count:
        text += f", and {further_count} more"
    return text


def find_linear_shapes(
    stored: Mapping[str, StoredTensor], coded: Mapping[str, Shape | None], model_type: str
) -> dict[str, Shape | None]:
    """Find the shapes of all modules of a folder that vLLM may build as quantized linears.

    Tables are not among them, nor most routers: settings need not name them, and vLLM does not
    quantize them.

    Args:
        stored: all tensors.
        coded: the shapes of the weights that are stored as codes, by module; None if they are not
            known.
        model_type: of the model.
    """
    shapes: dict[str, Shape | None] = {}
    has_float_routers = model_type not in _QUANTIZED_ROUTERS
    for name, tensor in stored.items():
        if is_table(name) or (has_float_routers and _is_router(name)):
            continue
        modules = possible_linears(OpaqueTensor(name, tensor.shape, str(tensor.dtype)))
        # Stacked experts may be stored with inputs or outputs first.
        shape = tensor.shape if len(tensor.shape) <= 2 else None
        shapes |= dict.fromkeys(modules, shape)
    return {**shapes, **coded}


def _is_router(name: str) -> bool:
    """Return whether a module or tensor is a router, or in one."""
    return not ROUTERS.isdisjoint(name.split("."))


def _find_problem(
    linears: Linears, module: VllmModule, part_claims: Sequence[Claim | None], vllm_claim: _Found
) -> VllmProblem | None:
    claim = part_claims[0]
    for part, part_claim in zip(module.parts, part_claims, strict=True):
        if part_claim != claim:
            rule = "expert-schemes" if module.is_experts else "fused-schemes"
            first = f"{_last_part(module.parts[0])}: {_describe(claim)}"
            second = f"{_last_part(part)}: {_describe(part_claim)}"
            return VllmProblem(rule, module.name, f"{first}; {second}")
    if vllm_claim != claim:
        if isinstance(vllm_claim, _Split):
            by_settings = "different things"
        else:
            by_settings = _describe(vllm_claim)
        description = (
            f"{_describe(claim)}; vLLM looks for settings of this name, and finds {by_settings}"
        )
        return VllmProblem("vllm-names", module.name, description)
    # vLLM's gpt-oss refuses experts of floats too, next to quantized linears.
    unread_name, reason = _UNREAD.get(linears.model_type, (None, ""))
    if unread_name == _last_part(module.name) and (claim is not None or module.is_experts):
        return VllmProblem("vllm-loader", module.name, reason)
    if claim is None:
        return None
    if linears.model_type == "gpt2" and claim.layout is not None and claim.layout.codes == PLAIN:
        reason = "its codes in a tensor named 'weight', which vLLM's GPT-2 transposes"
        return VllmProblem("vllm-loader", module.name, reason)
    # In the order in which vLLM joins the parts.
    rows: list[int] = []
    for part in sorted(module.parts, key=_fused_place):
        shape = linears.shapes.get(part)
        if shape is None or len(shape) != 2:
            return None
        rows.append(shape[0])
    if claim.block is not None and not module.is_experts:
        # Tiles of a fused weight run across its parts: all but the last must end with a tile.
        tile_rows = claim.block[0]
        if any(count % tile_rows for count in rows[:-1]):
            sizes = " and ".join(map(str, rows))
            return VllmProblem("vllm-tiles", module.name, f"{sizes} rows, in tiles of {tile_rows}")
    if is_head(module.name) and claim.layout in (GPTQ, AWQ) and rows[0] % _HEAD_ROWS:
        return VllmProblem("vllm-head", module.name, f"{rows[0]} rows")
    return None


def name_for_vllm(settings: dict[str, Any], linears: Linears) -> None:
    """Add to settings the names of vLLM's modules for which it would not find what the settings
    say of their parts.
    """
    modules: list[str] = []
    unnamed_modules: dict[Claim | None, list[str]] = {}
    for module, part_claims, vllm_claim in linears.compare():
        modules.append(module.name)
        part_claim = part_claims[0]
        is_uniform = all(claim == part_claim for claim in part_claims)
        # In GPTQ, patterns say how modules are quantized, not whether; see `_GptqLookup`.
        is_float_in_gptq = linears.method.name == _GPTQ and vllm_claim in (None, _SPLIT)
        can_be_named = not module.is_float and not is_float_in_gptq
        if is_uniform and vllm_claim != part_claim and can_be_named:
            unnamed_modules.setdefault(part_claim, []).append(module.name)
    for claim, names in unnamed_modules.items():
        patterns = _patterns(names, modules)
        if isinstance(linears.method, CompressedTensors):
            # vLLM looks for the linears of an expert, not for all experts as a whole.
            targets: list[str] = []
            for pattern in patterns:
                expert_pattern = pattern.replace("experts$", r"experts\..*")
                targets.append(f"re:{expert_pattern}")
            _add_to_groups(settings, linears.settings, claim, targets)
        elif linears.method.name == _GPTQ:
            sign = "-"
            values = {}
            if claim is not None:
                sign = "+"
                values = {"bits": claim.bits, "group_size": claim.group_size or -1}
            keys = [f"{sign}:{pattern}" for pattern in patterns]
            settings["dynamic"] = settings.get("dynamic", {}) | dict.fromkeys(keys, values)
        elif claim is None and settings.get("modules_to_not_convert") is not None:
            # AWQ's readers look for parts of names, so a name must not occur in that of a
            # quantized linear.
            float_names: list[str] = []
            for name in names:
                if not any(name in coded for coded in linears.coded):
                    float_names.append(name)
            settings["modules_to_not_convert"] = [*settings["modules_to_not_convert"], *float_names]


def _add_to_groups(
    settings: dict[str, Any],
    source_settings: Settings,
    claim: Claim | None,
    patterns: Iterable[str],
) -> None:
    if claim is None:
        settings["ignore"] = [*settings["ignore"], *patterns]
        return
    for name, group in read_config_groups(source_settings).items():
        if group_claim(group, source_settings) == claim:
            settings["config_groups"][name]["targets"] += patterns
            return


def _patterns(names: Collection[str], modules: Iterable[str]) -> list[str]:
    """Build patterns that match some modules alone: one for those that differ in their numbers, if
    it matches no others.

    Args:
        names: of the modules to match.
        modules: the names of all modules.
    """
    other_templates = {_NUMBER.sub("*", name) for name in set(modules).difference(names)}
    patterns: dict[str, None] = {}
    for name in names:
        template = _NUMBER.sub("*", name)
        if template in other_templates:
            pattern = re.escape(name)
        else:
            pattern = re.escape(template).replace(r"\*", r"\d+")
        patterns[f"^{pattern}$"] = None
    return list(patterns)


class _Listed:
    """Names and patterns in settings, as vLLM compares them with a name."""

    def __init__(
        self, listed: Iterable[str], linears: Linears, match_time: MatchTime, key: str
    ) -> None:
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        for entry in listed:
            if entry.startswith("re:"):
                self._patterns.append(
                    Pattern(entry.removeprefix("re:"), key=key, match_time=match_time)
                )
            else:
                self._names.add(linears.names.map_setting(entry))

    def matches(self, name: str) -> bool:
        return name in self._names or any(pattern.match(name) for pattern in self._patterns)


class _CompressedTensorsLookup:
    """vLLM's lookup in settings of compressed-tensors: what is ignored, then the first target."""

    def __init__(self, linears: Linears) -> None:
        settings = linears.settings
        match_time = MatchTime(settings.path)
        ignored = settings.strings("ignore") if settings.has("ignore") else []
        self._ignored = _Listed(ignored, linears, match_time, "ignore")
        self._groups: list[tuple[_Listed, Claim | None]] = []
        self._of_class: _Found = None
        # In reverse, so that the first group with the class decides.
        for group in reversed(read_config_groups(settings).values()):
            targets = group.strings("targets")
            claim = group_claim(group, settings)
            self._groups.insert(0, (_Listed(targets, linears, match_time, "targets"), claim))
            if "Linear" in targets:
                self._of_class = claim

    def find(self, module: VllmModule) -> _Found:
        if module.is_experts:
            claims = [self._find(name, (), self._of_class) for name in _first_expert(module)]
            if all(claim == claims[0] for claim in claims):
                return claims[0]
            return _SPLIT
        # vLLM's output head is no `Linear`.
        of_class = None if is_head(module.name) else self._of_class
        return self._find(module.name, module.shards, of_class)

    def _find(self, name: str, shards: Sequence[str], of_class: _Found) -> _Found:
        if self._ignored.matches(name):
            return None
        ignored = [self._ignored.matches(shard) for shard in shards]
        if any(ignored):
            return None if all(ignored) else _SPLIT
        claim = self._find_target(name)
        if not isinstance(claim, _Unnamed):
            return claim
        claims: list[Claim | None] = []
        for shard in shards:
            shard_claim = self._find_target(shard)
            if not isinstance(shard_claim, _Unnamed):
                claims.append(shard_claim)
        if claims and len(claims) == len(shards):
            # vLLM takes the first, and does not compare it with those of the other shards.
            return claims[0]
        return of_class

    def _find_target(self, name: str) -> Claim | _Unnamed | None:
        """Find the claim of the first group that names a linear."""
        for group, claim in self._groups:
            if group.matches(name):
                return claim
        return _UNNAMED


class _GptqLookup:
    """vLLM's lookup in settings of GPTQ: a list of parts of names, or the tensors, say which
    linears are quantized, patterns how.
    """

    def __init__(self, linears: Linears) -> None:
        settings = linears.settings
        self._base = gptq.base_claim(settings, GPTQ, settings.values.get("sym", True) is not False)
        self._overrides = gptq.Overrides(settings, self._base)
        self._coded = {linears.names.map_setting(module) for module in linears.coded}
        self._listed: list[str] = []
        # The list may be nested.
        for name in collect_values(settings.values.get("modules_in_block_to_quantize")):
            if isinstance(name, str):
                self._listed.append(linears.names.map_setting(name))
        self._head = bool(settings.values.get("lm_head"))

    def find(self, module: VllmModule) -> _Found:
        if not module.is_experts:
            names = module.shards or (module.name,)
            coded = [self._is_coded(name) for name in names]
            if not all(coded):
                # vLLM refuses to fuse quantized linears with others.
                return _SPLIT if any(coded) else None
            if is_head(module.name) and not self._head:
                return None
        return self._overrides.claim(module.name, self._base)

    def _is_coded(self, name: str) -> bool:
        if self._listed:
            return any(part in name for part in self._listed)
        return name in self._coded


class _AwqLookup:
    """vLLM's lookup in settings of AWQ: modules that have one of the listed names in theirs are
    floats.
    """

    def __init__(self, linears: Linears) -> None:
        settings = linears.settings
        key = "modules_to_not_convert"
        floats = settings.strings(key) if settings.has(key) else []
        # Without a list, the tensors decide.
        if not floats:
            floats = [module for module in linears.shapes if module not in linears.coded]
        self._floats = [linears.names.map_setting(name) for name in floats]
        self._base = gptq.base_claim(settings, AWQ, not settings.values.get("zero_point", True))
        self._head = bool(settings.values.get("lm_head"))

    def find(self, module: VllmModule) -> _Found:
        if is_head(module.name) and not self._head:
            return None
        if self._is_float(module.name):
            return None
        if module.is_experts:
            return self._base
        floats = [self._is_float(shard) for shard in module.shards]
        if any(floats):
            return None if all(floats) else _SPLIT
        return self._base

    def _is_float(self, name: str) -> bool:
        return any(listed in name for listed in self._floats)


def _lookup(linears: Linears) -> _CompressedTensorsLookup | _GptqLookup | _AwqLookup | None:
    if isinstance(linears.method, CompressedTensors):
        return _CompressedTensorsLookup(linears)
    if linears.method.name == _GPTQ:
        return _GptqLookup(linears)
    if linears.method.name == _AWQ:
        return _AwqLookup(linears)
    return None


def _fused_place(part: str) -> int:
    """Return the place of a linear among those that it is fused with."""
    return _PLACES.get(_last_part(part), 0)


def _first_expert(module: VllmModule) -> list[str]:
    """List the names of the linears of the first expert of a layer, by which vLLM looks for
    settings of all.
    """
    names_in_bank: list[str] = []
    for part in module.parts:
        bank = expert_bank(part)
        if bank is not None:
            names_in_bank.append(part.removeprefix(f"{bank}."))
    first_expert = names_in_bank[0].partition(".")[0]
    result: list[str] = []
    for name in names_in_bank:
        if name.partition(".")[0] == first_expert:
            result.append(f"{module.name}.{name}")
    return result


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _describe(claim: Claim | None) -> str:
    if claim is None:
        return "floats"
    if claim.bits is None:
        bits = "codes"
    else:
        bits = f"{claim.bits} bits"
    if claim.block is not None:
        return f"{bits} in tiles of {claim.block[0]} x {claim.block[1]}"
    if claim.group_size is not None:
        return f"{bits} in groups of {claim.group_size}"
    return f"{bits} per row"
