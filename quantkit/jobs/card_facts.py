"""The first table of a model card: size, schemes of the layers, method."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.bit_allocation.allocation import Allocation
from quantkit.calibration.data import Calibration
from quantkit.formats.checkpoint import Checkpoint, active_parameter_count, parameter_count
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.jobs.command import file_name
from quantkit.jobs.labels import Labels
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.jobs.settings import GptqSettings
from quantkit.jobs.weights_only import kept_recurrent
from quantkit.memory import size_text
from quantkit.tensors.scheme import QuantScheme

_NAMED_LAYERS = 8


@dataclass(frozen=True)
class Made:
    """What a card tells of, besides its source and quality.

    Attributes:
        scheme_map: which layers have which schemes.
        method: what they are written in.
        weight_bytes, bits_per_weight: as in `QuantizeResult`.
        settings, drawn: of GPTQ, and what it was calibrated on; None for rounding.
        options: more arguments of `quantize` that were given, for the command.
        labels: what the user says of the model.
        allocation: how the schemes were chosen for a size; None where they were given.
    """

    scheme_map: SchemeMap
    method: QuantMethod
    weight_bytes: int
    bits_per_weight: float
    settings: GptqSettings | None
    drawn: Calibration | None
    options: Mapping[str, object]
    labels: Labels
    allocation: Allocation | None = None


def facts(source: Checkpoint, made: Made) -> list[str]:
    chosen, count = made.scheme_map, parameter_count(source)
    rows = {
        "size": f"{size_text(made.weight_bytes)}: {_many(count)} weights of {made.bits_per_weight:.2f} bits on average"
    }
    if (experts := source.config.experts) is not None:
        met = _many(active_parameter_count(source))
        rows["experts"] = f"{experts.count} in a layer, {experts.per_token} for a token, which meets {met} weights"
    for index, (text, layer_count) in enumerate(chosen.counts().items()):
        layers = [module for module, scheme in chosen.linears.items() if str(scheme) == text]
        where = "" if index == 0 or not source.config.runnable else f": {_layers(layers, chosen.modules)}"
        rows[text] = f"{_told(chosen.schemes[layers[0]])}; {layer_count} linear layer{'s' * (layer_count > 1)}{where}"
    also_head = ", which is the output head too" if source.config.tied_embeddings else ""
    always = "norms" if source.config.experts is None else "norms, routers"
    if chosen.embedding is None:
        always = f"embedding, {always}"
    else:
        rows["embedding"] = f"{_told(chosen.embedding)}, rounded to nearest{also_head}"
    always = " and ".join(always.rsplit(", ", 1))
    kept = [always, *([_layers(floats, chosen.modules)] if (floats := chosen.kept()) else [])]
    kept = kept if source.config.runnable else ["all other tensors"]
    rows["kept as floats"] = f"{'; '.join(kept)}{'' if chosen.embedding else also_head} ({source.config.dtype})"
    if recurrent := kept_recurrent(source.config, chosen.schemes):
        rows["kept as floats"] += "; " + recurrent.replace("*", r"\*")
    rows["method"] = _method(made)
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]


def _many(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _told(scheme: QuantScheme) -> str:
    scale = "row" if scheme.group_size is None else f"group of {scheme.group_size} weights"
    return f"{scheme.bits}-bit integers, one scale{'' if scheme.symmetric else ' and zero point'} for each {scale}"


def _method(made: Made) -> str:
    if made.settings is None or made.drawn is None:
        return "each weight rounded to nearest; no calibration text"
    samples, length = made.drawn.tokens.shape
    way = ", the thorough way," if made.settings.thorough else ""
    name = "quantkit's own text" if made.settings.text is None else "a text"
    if made.settings.text is not None and (named := made.drawn.source or file_name(made.settings.text)):
        name = f"`{named}`"
    text = f"{name} (sha256 {made.drawn.sha256[:12]})"
    drawn = f"{samples} samples of {length} tokens of {text}, at random places (seed {made.drawn.seed})"
    dropped = sum((made.drawn.dropped or {}).values())
    left = f"; {dropped} others, which the source hardly predicts, were dropped" if dropped else ""
    return f"GPTQ{way} calibrated on {drawn}{left}"


def _layers(modules: Iterable[str], every: Iterable[str]) -> str:
    """Modules for people: whole layers by their numbers, others by their names, with the layers that have them.

    Args:
        modules: to tell of.
        every: all that there are.
    """
    every_in_layers = _by_layer(every)
    in_layers = {
        layer: _all_experts_together(names, every_in_layers[layer]) for layer, names in _by_layer(modules).items()
    }
    whole = [
        layer for layer, names in in_layers.items()
        if layer and names == _all_experts_together(every_in_layers[layer], every_in_layers[layer])
    ]  # fmt: skip
    parts = [f"all of layer{_few(whole)}"] if whole else []
    found_in: dict[str, list[str]] = {}
    for layer, names in in_layers.items():
        for name in names if layer not in whole else ():
            found_in.setdefault(name, []).append(layer)
    together: dict[str, list[str]] = {}
    for name, layers in found_in.items():
        together.setdefault(f" of layer{_few(layers)}" if layers[0] else "", []).append(f"`{name}`")
    return "; ".join([*parts, *(", ".join(names) + where for where, names in together.items())])


def _all_experts_together(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """The names in a layer, those of one linear of all experts as one."""

    def numberless(name: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)

    own, alike = Counter(map(numberless, names)), Counter(map(numberless, every))
    found = (numberless(name) if own[numberless(name)] == alike[numberless(name)] else name for name in names)
    return list(dict.fromkeys(found))


def _by_layer(modules: Iterable[str]) -> dict[str, list[str]]:
    """The names of modules in each layer, by its number; those of no layer under an empty one."""
    names: dict[str, list[str]] = {}
    for module in modules:
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        names.setdefault(found[1] if found else "", []).append(found[2] if found else module)
    return names


def _few(numbers: Sequence[str]) -> str:
    if len(numbers) > _NAMED_LAYERS:
        return f"s {numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"
    return f"s {', '.join(numbers[:-1])} and {numbers[-1]}" if numbers[1:] else f" {numbers[0]}"
