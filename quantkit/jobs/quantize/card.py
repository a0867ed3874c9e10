"""The model card: ``README.md`` of a quantized folder, as model hubs expect it; its text is
`model_card.md.jinja`.

Equal inputs give an equal card: it contains no time, no path and not the name of the folder. Of the
source and the calibration text it contains the last part of the path.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import describe_unread_experts
from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.base.late import LateFunction, LateModule
from quantkit.base.memory import size_text
from quantkit.base.option_fields import command_words
from quantkit.calibration.data import SELF, Calibration, is_self
from quantkit.calibration.effort import EFFORTS, SAMPLES, SEED
from quantkit.calibration.settings import GptqSettings
from quantkit.files.hub_names import PREFIX, read_origin
from quantkit.formats.authorship import CARD, read_authorship, read_front_matter
from quantkit.formats.checkpoint import Checkpoint, active_parameter_count, parameter_count
from quantkit.formats.codecs.codec import QuantMethod, Reader
from quantkit.formats.codecs.compressed_tensors import CompressedTensors, is_read_by_quantkit_only
from quantkit.formats.codecs.vllm import describe_problems
from quantkit.formats.lora.requested import parse_adapters, spell_adapters
from quantkit.jobs.output.labels import (
    file_name,
    find_base_model,
    find_model_name,
    layer_names,
)
from quantkit.jobs.output.result import growth_text
from quantkit.jobs.output.source_folder import PICTURE
from quantkit.jobs.output.target import NATIVE
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.jobs.quantize.held_schemes import vllm_problems_of
from quantkit.jobs.quantize.measured import Measured
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.plan import Plan
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.jobs.quantize.weights_only import describe_kept_recurrent
from quantkit.quality.bounds import RANDOM, scheme_bound, with_inputs
from quantkit.quality.figures import significant
from quantkit.quality.gate import CACHE_KL, FLOOR, SLACK
from quantkit.quality.gate_result import WINDOW, Gate
from quantkit.quality.positions import PositionCertificate, rise_text
from quantkit.quality.weights_only import WeightsOnly
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import KEEP
from quantkit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

    from quantkit.bit_allocation import allocation as bit_allocations
    from quantkit.calibration.documents import TextSource
    from quantkit.formats.codecs.known_models import knows_model
    from quantkit.via_transformers import linears
else:
    linears = LateModule("quantkit.via_transformers.linears")
    bit_allocations = LateModule("quantkit.bit_allocation.allocation")
    knows_model = LateFunction("quantkit.formats.codecs.known_models:knows_model")

_TEMPLATE = "model_card.md.jinja"
_RECIPE = "recipe.json"
_CAUSAL = "AutoModelForCausalLM"
# As hubs call them.
_TASKS = {
    _CAUSAL: "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
}
# Keys of the source's front matter that the card states itself, for the result.
_NOT_CARRIED = ("base_model", "base_model_relation", "tags")


def model_card_files(
    plan: Plan, format_plan: FormatPlan, drawn: Calibration | None, measured: Measured
) -> dict[str, bytes]:
    """Write the card, and its picture of schemes chosen for a size, by file name; nothing for a
    single file.
    """
    method = format_plan.target.method
    # GGUF: a single file has no folder for a card.
    if method is None:
        return {}
    source = format_plan.source
    scheme_map = format_plan.scheme_map
    allocation = format_plan.allocation
    request = plan.request
    settings = plan.solver.settings
    base = request.base_model or find_base_model(source)
    name = format_plan.output.name
    source_name = _source_name(source)
    title = " and ".join(scheme_map.counts())
    short = next(iter(scheme_map.counts()))
    if allocation is not None:
        title = f"{allocation.bits:.4g} bits per weight"
        short = f"{allocation.bits:.4g}bit"
    folder = f"{name}-{short}".replace(" ", "-")
    command, recipe = _quantize_command(
        source_name or name, folder, request.command, format_plan, settings, drawn
    )
    readers = _readers(format_plan, method, measured.loading_problem)
    text = _template().render(
        metadata=_metadata(format_plan, method, base, readers),
        name=name,
        title=title,
        base=base,
        folder=folder,
        known=find_model_name(source, request.base_model) is not None,
        source_name=source_name,
        version=__version__,
        config=source.config,
        settings=settings,
        drawn=drawn,
        allocation=allocation,
        embedding=scheme_map.embedding,
        size=size_text(measured.weight_bytes),
        picture=PICTURE,
        bits_per_weight=measured.bits_per_weight,
        significant=significant,
        small_floats=_SMALL_FLOATS,
        activations=format_plan.activations,
        kv_cache=plan.solver.kv_cache,
        adapters=request.command["lora"],
        command=command,
        recipe=recipe,
        gate=measured.quality,
        certificate=measured.certificate,
        **readers,
        **_layers(source, scheme_map),
        **_calibration(settings, drawn),
        **_quality(format_plan, measured.quality),
        **_positions(measured.certificate),
    )
    files = {CARD: text.encode()}
    if allocation is not None:
        files[PICTURE] = bit_allocations.picture(allocation).encode()
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
    format_plan: FormatPlan, method: QuantMethod, base: str | None, readers: Mapping[str, object]
) -> str:
    """Write the front matter that hubs read, in YAML."""
    from huggingface_hub import ModelCardData

    source = format_plan.source
    authorship = format_plan.output.authorship
    carried = {key: value for key, value in authorship.items() if key not in _NOT_CARRIED}
    relation: str | None = "quantized"
    # The model has no name on a hub, but perhaps the one that it was trained from.
    if base is None:
        base = authorship.get("base_model")
        relation = authorship.get("base_model_relation")
    pipeline_tag = None
    if source.config.measurable:
        pipeline_tag = _TASKS[str(readers["auto_class"])]
    # The architecture of a model known by its tensors does not tell its task; its own card may.
    if not pipeline_tag:
        pipeline_tag = read_front_matter(source.path / CARD).get("pipeline_tag")
    facts: dict[str, Any] = {
        **carried,
        "base_model": base,
        "base_model_relation": relation if base else None,
        "library_name": "transformers" if readers["in_transformers"] else None,
        "pipeline_tag": pipeline_tag,
        "tags": ["quantkit", method.name, *format_plan.scheme_map.counts()],
    }
    # ModelCardData has an order of its own for the fields that it knows.
    return ModelCardData(**facts).to_yaml(original_order=list(facts))


def _source_name(source: Checkpoint) -> str | None:
    """Name the source as the user did, without the folders above it; None if the last part of the
    path is no plain name.
    """
    hub = read_origin(source.path)
    if hub is None:
        return file_name(source.path)
    return f"{PREFIX}{hub['name']}"


def _layers(source: Checkpoint, scheme_map: SchemeMap) -> dict[str, object]:
    """List which layers have which schemes, and count the weights."""
    schemes = []
    for index, (name, count) in enumerate(scheme_map.counts().items()):
        modules = []
        for module, scheme in scheme_map.linears.items():
            if str(scheme) == name:
                modules.append(module)
        # The first scheme is the most frequent one: it applies to all layers not listed elsewhere.
        if index > 0 and source.config.runnable:
            layers = layer_names(modules, scheme_map.modules)
        else:
            layers = None
        schemes.append((scheme_map.schemes[modules[0]], count, layers))
    recurrent = describe_kept_recurrent(source.config, scheme_map.schemes)
    if recurrent:
        # In Markdown a bare asterisk begins emphasis.
        recurrent = recurrent.replace("*", r"\*")
    return {
        "weights": _count(parameter_count(source)),
        "active_weights": _count(active_parameter_count(source)),
        "schemes": schemes,
        "kept": layer_names(scheme_map.kept(), scheme_map.modules),
        "recurrent": recurrent,
    }


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.3g} billion"
    return f"{number / 1e6:.3g} million"


def _calibration(settings: GptqSettings | None, drawn: Calibration | None) -> dict[str, object]:
    """Name the calibration text, and count the samples that were dropped."""
    if settings is None or drawn is None:
        return {}
    name = "quantkit's own text"
    reason = "which the source hardly predicts"
    if is_self(settings.text):
        name = "text that the source wrote"
        reason = "in which it repeated itself"
    elif settings.text is not None:
        text_name = _text_name(settings.text, drawn)
        if text_name:
            name = f"`{text_name}`"
        else:
            name = "an unnamed text"
    dropped = sum((drawn.dropped or {}).values())
    return {"calibration": name, "dropped": dropped, "drop_reason": reason}


def _text_name(text: TextSource, drawn: Calibration) -> str | None:
    if drawn.source:
        return drawn.source
    if isinstance(text, str | Path):
        name = file_name(text)
        # The bare word has another meaning.
        return f"./{SELF}" if name == SELF else name
    return None


def _quality(format_plan: FormatPlan, gate: Gate | WeightsOnly) -> dict[str, object]:
    """Lay out the table of the gate's measurements, and list its bounds."""
    if not isinstance(gate, Gate):
        return {}
    # No second model is run for one that is only rounded and has no quantized KV cache.
    rounding = any(text.rounding_kl is not None for text in gate.texts)
    heads = [
        "text",
        "tokens",
        "source's perplexity",
        "this model's perplexity",
        "change",
        "KL",
        "maximum KL",
    ]
    if rounding:
        heads.append("KL of rounding")
    heads += ["KL, 99th percentile", "same most likely token"]
    rows = []
    for text in gate.texts:
        row = [
            text.text,
            f"{text.tokens}",
            f"{text.source_perplexity:.4g}",
            f"{text.perplexity:.4g}",
            growth_text(text.perplexity_ratio),
            f"{text.kl_estimate}",
            f"{text.kl_bound:.3g}",
        ]
        if rounding:
            row.append("" if text.rounding_kl is None else f"{text.rounding_kl:.3g}")
        row += [f"{text.kl_p99:.3g}", f"{text.top1_agreement:.1%}"]
        rows.append(row)
    bound = with_inputs(
        scheme_bound(format_plan.scheme_map.schemes.values()), format_plan.inputs.values()
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
    """Lay out the table of the loss by position."""
    if certificate is None:
        return {}
    heads = ["positions", "tokens"]
    for cache in certificate.caches:
        heads += [f"KL, {cache} cache", "same most likely token"]
    rows = []
    # One row for each bucket of positions, with the figures of all caches side by side.
    for buckets in zip(*certificate.caches.values(), strict=True):
        row = [buckets[0].name, f"{buckets[0].tokens}"]
        for bucket in buckets:
            row += [f"{bucket.estimate}", f"{bucket.top1_agreement:.1%}"]
        rows.append(row)
    changes = []
    for cache, cache_buckets in certificate.caches.items():
        changes.append(f"with the {cache} cache, {rise_text(cache_buckets)}")
    return {
        "position_heads": heads,
        "position_rows": rows,
        "changes": "; ".join(changes),
    }


def _readers(
    format_plan: FormatPlan, method: QuantMethod, loading_problem: str | None
) -> dict[str, object]:
    """List the runtimes that load the folder, and the reasons why others do not.

    Args:
        loading_problem: why transformers does not load the packed weights; None if it does, or if
            this was not tried.
    """
    source = format_plan.source
    scheme_map = format_plan.scheme_map
    config = source.config
    symmetric = all(scheme.symmetric for scheme in scheme_map.schemes.values())
    # The card gives one reason why transformers does not load the folder: the widest one.
    if loading_problem is not None:
        unread: str | None = f"the packed weights ({loading_problem})"
    elif scheme_map.embedding is not None:
        unread = "a packed embedding"
    elif not symmetric:
        unread = "packed zero points"
    else:
        unread = describe_unread_experts(config, scheme_map.schemes)
    vllm_problems = vllm_problems_of(source, scheme_map.schemes, format_plan.target)
    problem = describe_problems(vllm_problems)
    module_schemes = scheme_map.module_schemes
    without: set[Reader] = set()
    if config.tensors is not None:
        # Such folders list their quantized modules, so that floats are no exceptions.
        module_schemes = {**scheme_map.schemes}
        if not knows_model("gptqmodel", source.extra_config.get("model_type")):
            without.add("gptqmodel")
    if problem is not None:
        without.add("vllm")
    if loading_problem is not None:
        without.add("transformers")
    native = method.name == NATIVE
    readers = method.readers(module_schemes, without=without)
    here_alone = is_read_by_quantkit_only(
        method, scheme_map.module_schemes, tied=config.tied_embeddings
    )
    if here_alone:
        in_transformers = False
    elif native:
        in_transformers = unread is None
    else:
        in_transformers = "transformers" in readers
    not_on_cpu = None
    if isinstance(method, CompressedTensors):
        not_on_cpu = method.not_on_cpu(scheme_map.schemes.values())
    if config.run_by is None:
        model_class = _CAUSAL
    else:
        model_class = linears.auto_class(source.extra_config)
    return {
        "vllm_problem": problem,
        "symmetric": symmetric,
        "native": native,
        "unread": unread,
        "readers": readers,
        "read_here_alone": here_alone,
        "not_on_cpu": not_on_cpu,
        "has_int4": any(scheme.is_int4 for scheme in scheme_map.schemes.values()),
        "in_transformers": in_transformers,
        "auto_class": model_class,
    }


def describe_command(options: QuantizeOptions, source: Checkpoint) -> dict[str, object]:
    """List the options of the command on the card by name, as far as they are known before schemes
    and samples are. Equal requests give the same options: None leaves out a default value.
    """
    values = options.list_result_options()
    values["template"] = options.template and Path(options.template).name
    values["lora"] = _adapters(options)
    values["certify_text"] = options.certify_text and (file_name(options.certify_text) or "TEXT")
    license = read_authorship(source.path).get("license")
    # A value that equals what the source's own files say is the default.
    for name, default in ("base_model", find_base_model(source)), ("license", license):
        values[name] = _omit_default(values[name], default)
    return values


def _quantize_command(
    src: str,
    dst: str,
    options: Mapping[str, object],
    format_plan: FormatPlan,
    settings: GptqSettings | None,
    drawn: Calibration | None,
) -> tuple[str, str | None]:
    """Write the command that repeats the call, and the content of the recipe file that it names,
    if it needs one.

    Args:
        options: see `describe_command`.
    """
    recipe = format_plan.scheme_map.recipe
    allocation = format_plan.allocation
    values = dict(options)
    # The overrides of an allocation come first, and the command chooses them again by its size.
    if allocation is not None:
        num_chosen = len(allocation.recipe().overrides)
        recipe = Recipe(recipe.default, recipe.overrides[num_chosen:])
    values |= _scheme_options(recipe)
    if allocation is not None:
        size = allocation.target
        values |= {
            "scheme": None,
            "target_bits": size.bits,
            "max_size": size.bytes and f"{size.bytes}B",
        }
    values |= _method_options(settings, drawn, format_plan.source.config)
    values["to"] = _omit_default(format_plan.target.name, NATIVE)
    command = shlex.join(["quantkit", "quantize", src, dst, *command_words(values)])
    if "recipe" in values:
        return command, json.dumps(recipe.to_json(), indent=2)
    return command, None


def _adapters(options: QuantizeOptions) -> list[str]:
    """Name the merged adapters by their folders, with their weights."""
    adapters: list[str] = []
    for path, weight in parse_adapters(options.lora):
        name = file_name(path) or "ADAPTER"
        adapters.extend(spell_adapters({name: weight}))
    return adapters


def _scheme_options(recipe: Recipe) -> dict[str, object]:
    """Express a recipe as options: a scheme, one for the head and the embedding, and layers to
    keep; or else as a file.
    """
    remaining = list(recipe.overrides)
    named_schemes: dict[str, object] = {}
    # `build_recipe` puts the override of the head first, that of the embedding next.
    if remaining and remaining[0].pattern == CANONICAL["head"] and remaining[0].scheme is not None:
        named_schemes["head"] = remaining.pop(0).scheme
    if remaining and remaining[0].pattern == EMBEDDING:
        named_schemes["embedding"] = remaining.pop(0).scheme or KEEP
    # Options can only keep floats; other schemes by pattern need a file.
    if any(override.scheme is not None for override in remaining):
        return {"recipe": _RECIPE, **dict.fromkeys(("scheme", "head", "embedding", "keep"))}
    keep = [override.pattern for override in remaining]
    return {"scheme": recipe.default, **named_schemes, "keep": keep}


def _method_options(
    settings: GptqSettings | None, drawn: Calibration | None, config: ModelConfig
) -> dict[str, object]:
    """Express the method and its samples as options."""
    if settings is None or drawn is None:
        return {"method": "rtn"}
    if settings.text is None:
        text = None
    else:
        text = _text_name(settings.text, drawn) or "TEXT"
    length = EFFORTS[settings.effort_name].length(config)
    return {
        "method": "gptq",
        "calibration": text,
        "effort": _omit_default(settings.effort_name, "default"),
        # `effort` says the same.
        "thorough": None,
        "samples": _omit_default(settings.samples, SAMPLES),
        "length": _omit_default(settings.length, length),
        "seed": _omit_default(settings.seed, SEED),
    }


def _omit_default(value: object, default: object) -> object:
    """Replace a default value by None, which leaves the option out of the command."""
    if value == default:
        return None
    return value
