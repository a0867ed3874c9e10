"""The model card: ``README.md`` of a quantized folder, as model hubs expect it; its text is
`model_card.md.jinja`.

Equal inputs give an equal card: it holds no time, no path and not the name of the folder. For the
source and the calibration text it holds the last part of the path.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.disk import unread_experts
from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.base.memory import size_text
from quantkit.base.option_fields import command_words, find_option_fields
from quantkit.bit_allocation.allocation import PICTURE, picture
from quantkit.calibration.data import Calibration
from quantkit.calibration.documents import TextSource
from quantkit.calibration.effort import EFFORTS, SAMPLES, SEED
from quantkit.files.hub import PREFIX, origin
from quantkit.formats.authorship import CARD, read_authorship, read_front_matter
from quantkit.formats.checkpoint import Checkpoint, active_parameter_count, parameter_count
from quantkit.formats.codecs.codec import QuantMethod, Runtime
from quantkit.formats.codecs.compressed_tensors import CompressedTensors, read_here_alone
from quantkit.formats.codecs.vllm import describe_problems
from quantkit.formats.lora.adapter import adapter_words, parse_adapters
from quantkit.jobs.output.labels import (
    file_name,
    find_base_model,
    find_model_name,
    layer_names,
    model_name,
)
from quantkit.jobs.output.result import growth_text
from quantkit.jobs.output.target import NATIVE
from quantkit.jobs.quantize.held_schemes import vllm_problems_of
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.jobs.quantize.weights_only import kept_recurrent
from quantkit.quality.bounds import RANDOM, WINDOW, scheme_bound, with_inputs
from quantkit.quality.figures import significant
from quantkit.quality.gate import CACHE_KL, FLOOR, SLACK, Gate
from quantkit.quality.positions import CACHES, PositionCertificate, rise_text
from quantkit.quality.weights_only import WeightsOnly
from quantkit.tensors.recipe import Recipe
from quantkit.version import __version__
from quantkit.via_transformers.linears import auto_class

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = "model_card.md.jinja"
_RECIPE = "recipe.json"
_CAUSAL = "AutoModelForCausalLM"
# As hubs call them.
_TASKS = {
    _CAUSAL: "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
}
# What is said of the result itself is said anew.
_NOT_CARRIED = ("base_model", "base_model_relation", "tags")


def model_card_files(
    prepared: Prepared,
    drawn: Calibration | None,
    weight_bytes: int,
    bits_per_weight: float,
    gate: Gate | WeightsOnly,
    certificate: PositionCertificate | None,
) -> dict[str, bytes]:
    """Return the card, and its picture of schemes chosen for a size, by file name; nothing for a
    single file.
    """
    method = prepared.target.method
    if method is None:
        return {}
    source = prepared.source
    chosen = prepared.scheme_map
    allocation = prepared.allocation
    base = prepared.options.base_model or find_base_model(source)
    name = model_name(source, prepared.options.base_model)
    source_name = _source_name(source)
    title = " and ".join(chosen.counts())
    short = next(iter(chosen.counts()))
    if allocation is not None:
        title = f"{allocation.bits:.4g} bits per weight"
        short = f"{allocation.bits:.4g}bit"
    folder = f"{name}-{short}".replace(" ", "-")
    command, recipe = _quantize_command(source_name or name, folder, prepared, drawn)
    readers = _readers(prepared, method)
    text = _template().render(
        metadata=_metadata(prepared, method, base, readers),
        name=name,
        title=title,
        base=base,
        folder=folder,
        known=find_model_name(source, prepared.options.base_model) is not None,
        source_name=source_name,
        version=__version__,
        config=source.config,
        settings=prepared.settings,
        drawn=drawn,
        allocation=allocation,
        embedding=chosen.embedding,
        size=size_text(weight_bytes),
        picture=PICTURE,
        bits_per_weight=bits_per_weight,
        significant=significant,
        small_floats=_SMALL_FLOATS,
        activations=prepared.activations,
        kv_cache=prepared.options.kv_cache,
        adapters=_adapters(prepared.options),
        command=command,
        recipe=recipe,
        gate=gate,
        certificate=certificate,
        **readers,
        **_layers(prepared),
        **_calibration(prepared, drawn),
        **_quality(prepared, gate),
        **_positions(certificate),
    )
    files = {CARD: text.encode()}
    if allocation is not None:
        files[PICTURE] = picture(allocation).encode()
    return files


_SMALL_FLOATS = {
    "fp8": "8-bit floats (e4m3), one scale for each row",
    "fp8-block": "8-bit floats (e4m3), one scale for each 128 rows and as many columns",
    "mxfp4": "4-bit floats (e2m1), one power of two for each group of 32 weights",
    "nvfp4": (
        "4-bit floats (e2m1), one 8-bit float for each group of 16 weights, and a float for each"
        " matrix"
    ),
}


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(_TEMPLATE)


def _metadata(
    prepared: Prepared, method: QuantMethod, base: str | None, readers: Mapping[str, object]
) -> str:
    """Return what hubs read, in YAML."""
    from huggingface_hub import ModelCardData

    source = prepared.source
    stated = prepared.authorship
    carried = {key: value for key, value in stated.items() if key not in _NOT_CARRIED}
    relation: str | None = "quantized"
    # The model has no name on a hub, but perhaps the one that it was trained from.
    if base is None:
        base = stated.get("base_model")
        relation = stated.get("base_model_relation")
    if source.config.measurable:
        measured_task = _TASKS[str(readers["auto_class"])]
    else:
        measured_task = None
    facts: dict[str, Any] = {
        **carried,
        "base_model": base,
        "base_model_relation": relation if base else None,
        "library_name": "transformers" if readers["in_transformers"] else None,
        "pipeline_tag": measured_task or read_front_matter(source.path / CARD).get("pipeline_tag"),
        "tags": ["quantkit", method.name, *prepared.scheme_map.counts()],
    }
    return ModelCardData(**facts).to_yaml(original_order=list(facts))


def _source_name(source: Checkpoint) -> str | None:
    """Return how the source was named, without the folders that it is in; None if that is no
    plain name.
    """
    hub = origin(source.path)
    if hub is None:
        return file_name(source.path)
    return f"{PREFIX}{hub['name']}"


def _layers(prepared: Prepared) -> dict[str, object]:
    """Return which layers have which schemes, and how many weights there are."""
    source = prepared.source
    chosen = prepared.scheme_map
    schemes = []
    for index, (name, count) in enumerate(chosen.counts().items()):
        modules = []
        for module, scheme in chosen.linears.items():
            if str(scheme) == name:
                modules.append(module)
        named = index > 0 and source.config.runnable
        if named:
            layers = layer_names(modules, chosen.modules)
        else:
            layers = None
        schemes.append((chosen.schemes[modules[0]], count, layers))
    recurrent = kept_recurrent(source.config, chosen.schemes)
    return {
        "weights": _count(parameter_count(source)),
        "active_weights": _count(active_parameter_count(source)),
        "schemes": schemes,
        "kept": layer_names(chosen.kept(), chosen.modules),
        "recurrent": recurrent and recurrent.replace("*", r"\*"),
    }


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.3g} billion"
    return f"{number / 1e6:.3g} million"


def _calibration(prepared: Prepared, drawn: Calibration | None) -> dict[str, object]:
    """Return the text of the samples, by name, and how many samples were dropped."""
    if prepared.settings is None or drawn is None:
        return {}
    name = "quantkit's own text"
    if prepared.settings.text is not None:
        named = _text_name(prepared.settings.text, drawn)
        if named:
            name = f"`{named}`"
        else:
            name = "an unnamed text"
    return {"calibration": name, "dropped": sum((drawn.dropped or {}).values())}


def _text_name(text: TextSource, drawn: Calibration) -> str | None:
    return drawn.source or (file_name(text) if isinstance(text, str | Path) else None)


def _quality(prepared: Prepared, gate: Gate | WeightsOnly) -> dict[str, object]:
    """Return the table of what was lost, and the bounds."""
    if not isinstance(gate, Gate):
        return {}
    rounding = any(text.rounding_kl is not None for text in gate.texts)
    heads = [
        "text",
        "tokens",
        "source's perplexity",
        "this model's perplexity",
        "change",
        "KL",
        "maximum KL",
        *(["KL of rounding"] if rounding else []),
        "KL, 99th percentile",
        "same most likely token",
    ]
    rows = []
    for text in gate.texts:
        rows.append(
            [
                text.text,
                f"{text.tokens}",
                f"{text.source_perplexity:.4g}",
                f"{text.perplexity:.4g}",
                growth_text(text.perplexity_ratio),
                f"{text.kl_estimate}",
                f"{text.kl_bound:.3g}",
                *(
                    ["" if text.rounding_kl is None else f"{text.rounding_kl:.3g}"]
                    if rounding
                    else []
                ),
                f"{text.kl_p99:.3g}",
                f"{text.top1_agreement:.1%}",
            ]
        )
    bound = with_inputs(
        scheme_bound(prepared.scheme_map.schemes.values()), prepared.measurement_inputs.values()
    )
    return {
        "quality_heads": heads,
        "quality_rows": rows,
        "rounding": rounding,
        "highest_kl": bound.kl,
        "random_tokens": any(text.text == RANDOM for text in gate.texts),
        "window": WINDOW,
        "slack": SLACK,
        "floor": FLOOR,
        "cache_kl": CACHE_KL,
    }


def _positions(certificate: PositionCertificate | None) -> dict[str, object]:
    """Return the table of what was lost by position."""
    if certificate is None:
        return {}
    columns = (
        column for cache in CACHES for column in (f"KL, {cache} cache", "same most likely token")
    )
    rows = []
    for buckets in zip(*certificate.caches.values(), strict=True):
        rows.append(
            [
                buckets[0].name,
                f"{buckets[0].tokens}",
                *(
                    cell
                    for bucket in buckets
                    for cell in (f"{bucket.estimate}", f"{bucket.top1_agreement:.1%}")
                ),
            ]
        )
    changes = (
        f"with the {cache} cache, {rise_text(buckets)}"
        for cache, buckets in certificate.caches.items()
    )
    return {
        "position_heads": ["positions", "tokens", *columns],
        "position_rows": rows,
        "changes": "; ".join(changes),
    }


def _readers(prepared: Prepared, method: QuantMethod) -> dict[str, object]:
    """Return what loads the folder."""
    chosen = prepared.scheme_map
    config = prepared.source.config
    symmetric = all(scheme.symmetric for scheme in chosen.schemes.values())
    if symmetric:
        unread = unread_experts(config, chosen.schemes)
    else:
        unread = "packed zero points"
    if chosen.embedding is None:
        unread = unread
    else:
        unread = "a packed embedding"
    if prepared.unread is None:
        unread = unread
    else:
        unread = f"the packed weights ({prepared.unread})"
    problem = describe_problems(vllm_problems_of(prepared.source, chosen.schemes, prepared.target))
    if problem is None:
        without: set[Runtime] = set()
    else:
        without = {"vllm"}
    native = method.name == NATIVE
    readers = method.readers(chosen.module_schemes, without=without)
    here_alone = read_here_alone(method, chosen.module_schemes, tied=config.tied_embeddings)
    return {
        "vllm_problem": problem,
        "symmetric": symmetric,
        "native": native,
        "unread": unread,
        "readers": readers,
        "read_here_alone": here_alone,
        "not_on_cpu": (
            method.not_on_cpu(chosen.schemes.values())
            if isinstance(method, CompressedTensors)
            else None
        ),
        "has_int4": any(
            scheme.bits == 4 and not scheme.of_small_floats for scheme in chosen.schemes.values()
        ),
        "in_transformers": (
            not here_alone and (unread is None if native else "transformers" in readers)
        ),
        "auto_class": (
            _CAUSAL if config.run_by is None else auto_class(prepared.source.extra_config)
        ),
    }


def _quantize_command(
    src: str, dst: str, prepared: Prepared, drawn: Calibration | None
) -> tuple[str, str | None]:
    """Return the command that repeats the call, and the content of the recipe file that it names,
    if it needs one; equal calls have the same command, as options with the default value are left
    out.
    """
    options = prepared.options
    recipe = prepared.scheme_map.recipe
    result_options = [
        name for name, info in find_option_fields(QuantizeOptions).items() if info.changes_result
    ]
    values = {name: getattr(options, name) for name in result_options}
    # The recipe without what was chosen.
    if prepared.allocation is not None:
        recipe = Recipe(
            recipe.default, recipe.overrides[len(prepared.allocation.recipe().overrides) :]
        )
    values |= _scheme_options(recipe)
    if prepared.allocation is not None:
        size = prepared.allocation.target
        values |= {
            "scheme": None,
            "target_bits": size.bits,
            "max_size": size.bytes and f"{size.bytes}B",
        }
    values |= _method_options(prepared, drawn)
    values["to"] = None if prepared.target.name == NATIVE else prepared.target.name
    values["template"] = options.template and Path(options.template).name
    values["lora"] = _adapters(options)
    values["certify_text"] = options.certify_text and (file_name(options.certify_text) or "TEXT")
    license = read_authorship(prepared.source.path).get("license")
    for name, default in ("base_model", find_base_model(prepared.source)), ("license", license):
        values[name] = None if values[name] == default else values[name]
    words = ["quantkit", "quantize", src, dst, *command_words(values)]
    return shlex.join(words), json.dumps(recipe.to_json(), indent=2) if "recipe" in values else None


def _adapters(options: QuantizeOptions) -> list[str]:
    """Return the merged adapters by the names of their folders, with their weights."""
    found = (
        (file_name(path) or "ADAPTER", weight) for path, weight in parse_adapters(options.lora)
    )
    adapters: list[str] = []
    for name, weight in found:
        for word in adapter_words({name: weight}):
            adapters.append(word)
    return adapters


def _scheme_options(recipe: Recipe) -> dict[str, object]:
    """Return a recipe as options: a scheme, one for the head and the embedding, and layers to keep;
    or else a file.
    """
    kept = list(recipe.overrides)
    named = dict[str, object]()
    for name, module in (("head", CANONICAL["head"]), ("embedding", EMBEDDING)):
        if kept and kept[0].pattern == module and kept[0].scheme is not None:
            named[name] = kept.pop(0).scheme
    if any(override.scheme is not None for override in kept):
        return {"recipe": _RECIPE, **dict.fromkeys(("scheme", "head", "embedding", "keep"))}
    return {"scheme": recipe.default, **named, "keep": [override.pattern for override in kept]}


def _method_options(prepared: Prepared, drawn: Calibration | None) -> dict[str, object]:
    settings = prepared.settings
    if settings is None or drawn is None:
        return {"method": "rtn"}
    if settings.text is None:
        text = None
    else:
        text = _text_name(settings.text, drawn) or "TEXT"
    length = EFFORTS[settings.effort].length(prepared.source.config)
    return {
        "method": "gptq",
        "calibration": text,
        "effort": None if settings.effort == "default" else settings.effort,
        "thorough": None,
        "samples": None if settings.samples == SAMPLES else settings.samples,
        "length": None if settings.length == length else settings.length,
        "seed": None if settings.seed == SEED else settings.seed,
    }
