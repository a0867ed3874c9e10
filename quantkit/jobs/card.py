"""The model card: ``README.md`` of a quantized folder, as model hubs expect it.

Equal inputs give an equal card: it tells no time, no path, and not what the folder is called; of the source and of the
calibration text it tells the last part of their paths.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import unread_experts
from quantkit.arguments import as_text
from quantkit.bit_allocation.allocation import Allocation
from quantkit.bit_allocation.picture import NAME as PICTURE
from quantkit.calibration.data import Calibration
from quantkit.errors import RequestError
from quantkit.files.gguf_types import GGUF
from quantkit.files.hub import origin
from quantkit.formats.checkpoint import Checkpoint, active_parameter_count, parameter_count
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import read_here_alone
from quantkit.jobs.certificate import card_section
from quantkit.jobs.command import file_name, quantize_command
from quantkit.jobs.result import growth_text
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.jobs.settings import GptqSettings
from quantkit.json_values import read_json, shown
from quantkit.memory import size_text
from quantkit.quality.bounds import BOUNDS, coarser
from quantkit.quality.figures import significant
from quantkit.quality.gate import FLOOR, SLACK, Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly
from quantkit.quality.windows import RANDOM, WINDOW
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.version import __version__

NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language", "datasets")
_NATIVE = "compressed-tensors"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LICENSE = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}", re.ASCII)
_NAMED_LAYERS = 8
_WIDTH = 120


@dataclass(frozen=True)
class Labels:
    """What a user says of the model for its card.

    Attributes:
        base_model: the source's name on a hub.
        license: as hubs spell it, such as ``apache-2.0``.
    """

    base_model: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            RequestError: if one is no name or licence that a hub could know.
        """
        for value, pattern, option, expected in (
            (self.base_model, _HUB_NAME, "base_model", "owner/name"),
            (self.license, _LICENSE, "license", "apache-2.0, llama3.1, other, ..."),
        ):
            if value is not None and not pattern.fullmatch(as_text(option, value)):
                raise RequestError(f"`{option}` is none that a hub knows", found=shown(value), expected=expected)


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


def model_card(
    source: Checkpoint, made: Made, gate: Gate | WeightsOnly, certificate: PositionCertificate | None = None
) -> bytes:
    """The card's bytes.

    Args:
        source: what was quantized.
        made: what became of it.
        gate: what the result lost; of a model that cannot be run, what became of its tensors.
        certificate: what it lost by position, where that was asked for.
    """
    base = made.labels.base_model or base_model(source)
    name = model_name(source, base)
    schemes = made.scheme_map.counts()
    told, short = " and ".join(schemes), next(iter(schemes))
    if made.allocation is not None:
        told, short = f"{made.allocation.bits:.4g} bits a weight", f"{made.allocation.bits:.4g}bit"
    folder = f"{name}-{short}"
    lines = [
        "---", yaml.safe_dump(_head(source, made, base), sort_keys=False, allow_unicode=True).strip(), "---", "",
        f"# {name}, {told}", "",
        f"{_linked(base) or name}, quantized by quantkit {__version__}.", "",
        *_facts(source, made), "",
        *([] if made.allocation is None else _choice(made.allocation)),
        *(_quality(gate, made) if isinstance(gate, Gate) else ["## Quality", "", *_wrapped(f"{gate.line()}.")]), "",
        *([] if certificate is None else [*card_section(certificate), ""]),
        *_use(source.config, made.method, made.scheme_map, folder), "",
        *_command(made, name, folder, runnable=source.config.runnable),
    ]  # fmt: skip
    return ("\n".join(lines) + "\n").encode()


def model_name(source: Checkpoint, base: str | None = None) -> str:
    """What people call a model.

    Args:
        base: its name on a hub; None takes what `base_model` finds.
    """
    base = base or base_model(source)
    path = source.path.with_suffix("") if source.path.suffix == GGUF else source.path
    return base.rpartition("/")[2] if base else file_name(path) or source.config.architecture


def base_model(source: Checkpoint) -> str | None:
    """The source's name on a hub, where its config, or its place in the hub's cache, tells one."""
    config = source.path / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    if isinstance(named, str) and "/" in named and _HUB_NAME.fullmatch(named):
        return named
    cached = origin(source.path)
    return None if cached is None else cached["name"]


def _head(source: Checkpoint, made: Made, base: str | None) -> dict[str, Any]:
    """What hubs read, in YAML."""
    before = _front_matter(source.path / NAME)
    carried = {key: before[key] for key in _CARRIED if key in before}
    if made.labels.license is not None and made.labels.license != carried.get("license"):
        carried = {"license": made.labels.license} | {k: v for k, v in carried.items() if not k.startswith("license")}
    schemes = made.scheme_map.schemes
    loads = all(one.symmetric for one in schemes.values()) and made.scheme_map.embedding is None
    loads = loads and unread_experts(source.config, schemes) is None
    loads = loads if made.method.name == _NATIVE else "transformers" in made.method.readers(made.scheme_map.assigned)
    loads = loads and not read_here_alone(made.method, made.scheme_map.assigned, tied=source.config.tied_embeddings)
    tag = {key: before[key] for key in ("pipeline_tag",) if key in before}
    tag = {"pipeline_tag": "text-generation"} if source.config.runnable else tag
    return {
        **carried,
        **({"base_model": base, "base_model_relation": "quantized"} if base else {}),
        **({"library_name": "transformers"} if loads else {}),
        **tag,
        "tags": ["quantkit", made.method.name, *made.scheme_map.counts()],
    }


def _facts(source: Checkpoint, made: Made) -> list[str]:
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
    rows["method"] = _method(made)
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]


def _choice(found: Allocation) -> list[str]:
    """How the schemes were chosen for a size."""
    head, *rows = found.table()
    told = (
        f"They were chosen to lose least within {found.target}. The linear layers have {found.bits:.4g} bits a weight,"
        f" and the files of weights {found.weight_bytes} bytes. From the calibration samples a KL of"
        f" {significant(found.kl)} was estimated; the last column tells each layer's share."
    )
    return [
        "## Schemes", "", *_wrapped(told), "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), "",
        f"![Schemes by layer]({PICTURE})", "",
    ]  # fmt: skip


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


def _quality(gate: Gate, made: Made) -> list[str]:
    """The table of what was lost, and what its columns mean."""
    highest = coarser(BOUNDS[f"int{scheme.bits}"] for scheme in made.scheme_map.schemes.values()).kl
    bound = f"is {highest:g} for its bits"
    beside_rounding = any(one.rounding_kl is not None for one in gate.texts)
    if beside_rounding:
        bound += (
            f", or {100 * (SLACK - 1):.2g} % above the KL of rounding to nearest in the same schemes where that is less"
            f" (but never below {FLOOR:g})"
        )
    measured_on = "texts that come with it and are not for calibration"
    if any(one.text == RANDOM for one in gate.texts):
        measured_on = "random tokens, for want of a tokenizer"
    heads = [
        "text", "tokens", "source's perplexity", "this model's perplexity", "change of it", "KL", "most KL allowed",
        *(["KL of rounding"] if beside_rounding else []), "KL, 99th percentile", "same likeliest token",
    ]  # fmt: skip
    rows = [
        [
            one.text, f"{one.tokens}", f"{one.source_perplexity:.4g}", f"{one.perplexity:.4g}",
            growth_text(one.perplexity_ratio), f"{one.kl_estimate}", f"{one.kl_bound:.3g}",
            *(["" if one.rounding_kl is None else f"{one.rounding_kl:.3g}"] if beside_rounding else []),
            f"{one.kl_p99:.3g}", f"{one.top1_agreement:.1%}",
        ]
        for one in gate.texts
    ]  # fmt: skip
    lines = [
        "## Quality", "",
        *_wrapped(
            f"Measured by quantkit against the source, in float32, on {measured_on}, in windows of {WINDOW} tokens:"
        ), "",
        *(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), "",
        *_wrapped(
            "Perplexity is per token, and so is KL, the mean of KL(source ‖ this model) in nats; ± is one"
            f" standard error. The most KL allowed, this model's bound, {bound}. Unless told to, quantkit finishes no"
            f" model beyond its bound, nor one with more than {gate.perplexity_ratio_bound:g} times its source's"
            " perplexity."
        ),
    ]  # fmt: skip
    problem = gate.problem()
    return lines if problem is None else [*lines, "", f"**Not within its bound: {problem[0]}; {problem[1]}.**"]


def _use(config: ModelConfig, method: QuantMethod, scheme_map: SchemeMap, folder: str) -> list[str]:
    """How to load it, in what can."""
    schemes = scheme_map.schemes
    if not config.runnable:
        return _use_of_tensors(schemes, folder)
    if method.name == _NATIVE:
        return _use_of_native(config, schemes, folder, embedding=scheme_map.embedding is not None)
    readers = f"quantkit {__version__} loads it; so should {method.readers(scheme_map.assigned)}."
    if read_here_alone(method, scheme_map.assigned, tied=config.tied_embeddings):
        readers = f"quantkit {__version__} loads it; no other reader was found that does."
    python = ["```python", "import quantkit", "", f'model, tokenizer = quantkit.load("{folder}")', "```"]
    return ["## Use", "", *_wrapped(readers), "", *python]


def _use_of_native(
    config: ModelConfig, schemes: Mapping[str, QuantScheme], folder: str, *, embedding: bool
) -> list[str]:  # fmt: skip
    """How to load it, in what can; as tried."""
    unread = "packed zero points" if any(not one.symmetric for one in schemes.values()) else None
    unread = "a packed embedding" if embedding else unread or unread_experts(config, schemes)
    no_int8, dense = all(one.bits == 4 for one in schemes.values()), config.experts is None
    transformers = "yes" if unread is None else f"no: it does not load {unread}"
    vllm = "yes" if dense else "not tried with experts"
    vllm = (
        vllm
        if no_int8
        else f"no: it has no CPU kernel for {'packed embeddings' if embedding else '8-bit weights alone'}"
    )
    lines = [
        "## Use", "", "| | tried |", "|---|---|",
        f"| quantkit {__version__} | yes |",
        f"| transformers 5.23 with compressed-tensors 0.20 | {transformers} |",
        f"| vLLM 0.32 on a CPU with AVX-512 | {vllm} |", "",
        "```python", "import quantkit", "", f'model, tokenizer = quantkit.load("{folder}")', "```",
    ]  # fmt: skip
    if unread is None:
        lines += [
            "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")', "```",
        ]  # fmt: skip
    if no_int8 and dense:
        lines += ["", "```", f"vllm serve {folder}", "```"]
        if unread is None:
            lines += [
                "", "Scales may be negative: leave vLLM's option of 8-bit activations under Marlin off"
                " (vllm-project/vllm#48905).",
            ]  # fmt: skip
    return lines


def _use_of_tensors(schemes: Mapping[str, QuantScheme], folder: str) -> list[str]:
    """How to load what was not run."""
    readers, loading = "such as transformers or vLLM", " Loading was not tried; transformers may need"
    loading += " `quantization_config=CompressedTensorsConfig(dequantize=True)`."
    if not all(scheme.symmetric for scheme in schemes.values()):
        readers, loading = "with packed zero points", " Loading was not tried."
    told = (
        "The model was taken by its tensors only: quantkit does not run it. Load it in what runs its source and reads"
        f" compressed-tensors, {readers}, and try it before it is used: no logits were compared.{loading}"
    )
    return ["## Use", "", *_wrapped(told), "", "```", f"quantkit inspect {folder}", "```"]


def _command(made: Made, name: str, folder: str, *, runnable: bool) -> list[str]:
    options = {**made.options, **asdict(made.labels)}
    asked = made.scheme_map.recipe
    if made.allocation is not None:
        asked = Recipe(asked.default, asked.overrides[len(made.allocation.recipe().overrides) :])
    command, recipe = quantize_command(
        name, folder, asked, made.settings, made.drawn, options,
        None if made.allocation is None else made.allocation.target,
    )  # fmt: skip
    lines = ["## How it was made", "", "```", command, "```"]
    if recipe is not None:
        lines += ["", "with this recipe:", "", "```json", recipe, "```"]
    checks = (
        "`quantkit.json` holds the sha256 of each file here and of the source, the scheme of each layer and the figures"
        f" above. `quantkit verify {folder}` checks them"
        + (" and measures the perplexities again." if runnable else f"; with `{name}` it measures the errors again.")
    )
    return [*lines, "", *_wrapped(checks)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _linked(base: str | None) -> str | None:
    return f"[{base}](https://huggingface.co/{base})" if base and "/" in base else base


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


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML head of a card; empty if there is none."""
    try:
        found = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
        head = None if found is None else yaml.safe_load(found[1])
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # ValueError: a date that is none
        return {}
    return head if isinstance(head, dict) else {}
