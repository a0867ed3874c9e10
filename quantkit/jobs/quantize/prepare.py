"""Prepare a quantization before anything is written: check headers, and assign a scheme to each
layer.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import as_path, as_strings
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import command_words
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.authorship import read_authorship
from quantkit.formats.checkpoint import list_uncarried_weights, require_calibratable, schemes
from quantkit.formats.container import Output, StoredCheckpoint, describe_format
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import select_templates
from quantkit.formats.kv_scales import build_fp8_cache
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import Target
from quantkit.jobs.output.labels import model_name
from quantkit.jobs.output.source_folder import (
    check_side_files,
    note_left_behind,
    require_causal_model,
)
from quantkit.jobs.output.target import (
    NATIVE,
    choose_shard_bytes,
    list_cached_attention,
    note_dropped_cache,
    require_holds_kv_cache,
)
from quantkit.jobs.quantize.card import describe_command
from quantkit.jobs.quantize.certificate import prepare_certified_text
from quantkit.jobs.quantize.default_embedding import choose_embedding
from quantkit.jobs.quantize.formats import FormatPlan, Formats, prefix_errors
from quantkit.jobs.quantize.held_schemes import assign_schemes
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.plan import Checks, Plan, Request, SolverPlan
from quantkit.jobs.quantize.scheme_map import (
    SchemeMap,
    apply_gguf_mix,
    build_recipe,
    find_embedding_override,
    with_head_on_disk,
)
from quantkit.jobs.quantize.settings import gptq_settings
from quantkit.jobs.quantize.weights_only import describe_kept_parts, describe_kept_recurrent
from quantkit.tensors.mix import find_mix
from quantkit.tensors.recipe import Recipe
from quantkit.text.tokenizer import Tokenizer
from quantkit.via_transformers.forward import open_to_run, passage_of
from quantkit.via_transformers.stacks import unstack

# Adapters, quantized sources and models without a decoder need these.
if TYPE_CHECKING:
    from quantkit.formats import dequantized_checkpoint
    from quantkit.jobs.convert import adapters
    from quantkit.via_transformers import linears, own_code
else:
    dequantized_checkpoint = LateModule("quantkit.formats.dequantized_checkpoint")
    adapters = LateModule("quantkit.jobs.convert.adapters")
    linears = LateModule("quantkit.via_transformers.linears")
    own_code = LateModule("quantkit.via_transformers.own_code")


def prepare(options: QuantizeOptions) -> Plan:
    """Make the whole plan of a quantization, with every check that needs no weights.

    Raises:
        QuantkitError: as `quantize` does.
    """
    dst = as_path("dst", options.dst)
    target = options.target
    require_name(dst)
    if options.kv_cache is not None:
        require_holds_kv_cache(target, dst)
    # Checks that need less come first: options, then config.json, then headers of weights.
    recipe = build_recipe(options)
    require_causal_model(as_path("src", options.src))
    source = _open_source(options)
    require_new_names(source.path, dst)
    if options.method == "gptq" and options.size is None:
        require_calibratable(source)
    tokenizer, notes = check_side_files(source, template=options.template)
    notes += note_left_behind(source, target.container, dst, has_card=target.method is not None)
    linears_by: str | None = None
    # First, because adapters may name linears as transformers does.
    if not source.config.runnable:
        source.config, linears_by, linear_notes = linears.with_linears(
            source.config, source.extra_config, source.path
        )
        notes += linear_notes
    recorded: dict[str, object] = {}
    if options.lora:
        source = adapters.merge_adapters(
            source,
            options.lora,
            dequantize=options.dequantize,
            allow_nonfinite=options.allow_nonfinite,
        )
        recorded = adapters.describe_adapters(source)
    if linears_by is not None:
        recorded |= {"tensors_only": True, "linears_by": linears_by}
    source, float_notes = _as_floats(source, options)
    notes += float_notes
    if options.tensors_only and target.name != NATIVE:
        raise RequestError(
            Message(
                Option("tensors_only", value=True),
                " cannot be combined with ",
                Option("to", value=target.name),
            ),
            expected=Message(Option("to", value=NATIVE)),
        )
    if options.kv_cache is not None:
        # Raises an error for models that have none which can be calibrated.
        list_cached_attention(source)
    embedding_override = find_embedding_override(recipe)
    # Only a model that is built tells which tensor is its embedding.
    if (
        source.config.run_by is not None
        and embedding_override is not None
        and embedding_override.scheme is not None
    ):
        from quantkit.via_transformers.embedding import with_embedding

        source.config = with_embedding(source.config, passage_of(source).partwise, source.path)
    recipe = apply_gguf_mix(options, with_head_on_disk(recipe, source.config), source.config)
    first_recipe, embedding_notes = choose_embedding(recipe, options, source, target)
    notes += embedding_notes
    scheme_map, scheme_notes = assign_schemes(
        source, first_recipe, dst, target, strict=options.strict
    )
    notes += _note_how_it_runs(source, scheme_map, trusts_code=options.trust_remote_code)
    notes += note_dropped_cache(source, dst, again=options.kv_cache is not None)
    # The weights are measured, and calibrated, with floats in the cache.
    source.kv_cache = None
    settings = gptq_settings(options, scheme_map.schemes.values(), source, tokenizer)
    certified = prepare_certified_text(
        options.certify_positions, options.certify_text, source, tokenizer
    )
    if certified is not None:
        notes += certified.notes
    imatrix = None
    if options.imatrix is not None:
        imatrix = as_path("imatrix", options.imatrix)
    solver = SolverPlan(
        settings=settings,
        allow_nonfinite=options.allow_nonfinite,
        imatrix=imatrix,
        kv_cache=options.kv_cache,
    )
    if imatrix is not None and not solver.is_weighted(source.config, scheme_map):
        raise RequestError(
            Message(
                Option("imatrix"),
                " has no effect: it only applies to schemes of fewer than 8 bits, in models"
                " that can be run",
            ),
            path=source.path,
        )
    # Last: the encoders of formats need the final config and tokenizer.
    return Plan(
        formats=_plan_formats(options, source, tokenizer, recipe, scheme_map, scheme_notes),
        solver=solver,
        checks=Checks(
            source_check=options.source_check,
            certified=certified,
            accept_quality_loss=options.accept_quality_loss,
        ),
        request=Request(
            recorded={**recorded, **_record_options(options)},
            command=describe_command(options, source),
            base_model=options.base_model,
        ),
        notes=notes,
    )


def _note_how_it_runs(
    source: StoredCheckpoint, scheme_map: SchemeMap, *, trusts_code: bool
) -> list[str]:
    """Write notes on what runs the model; of one that quantkit does not run, also on what keeps its
    floats.
    """
    notes: list[str] = []
    if source.config.run_by is not None:
        notes.append(f"{source.path}: run by {source.config.run_by}")
    if trusts_code and source.config.code is None:
        if source.config.run_by is not None:
            why = "config.json names no code"
        else:
            why = "quantkit runs the model itself"
        notes.append(
            Message(
                f"{source.path}: ",
                Option("trust_remote_code", value=True),
                f" has no effect: {why}",
            )
        )
    recurrent = describe_kept_recurrent(source.config, scheme_map.schemes)
    if recurrent:
        notes.append(
            f"{source.path}: {recurrent}; a recipe that names them explicitly can"
            " quantize them to int8"
        )
    if not source.config.runnable:
        parts = describe_kept_parts(source.config, source.extra_config, scheme_map.schemes)
        if parts:
            notes.append(f"{source.path}: not quantized: {'; '.join(parts)}")
    return notes


def _plan_formats(
    options: QuantizeOptions,
    source: StoredCheckpoint,
    tokenizer: Tokenizer | None,
    recipe: Recipe,
    scheme_map: SchemeMap,
    notes: list[str],
) -> Formats:
    """Plan the requested formats: several have a folder each.

    Args:
        recipe: the requested schemes, to which a format may add the embedding's.
        scheme_map: the schemes in the first format.
        notes: on these schemes.

    Raises:
        UnsupportedError: if a format does not support a scheme.
    """
    dst = as_path("dst", options.dst)
    if len(options.targets) == 1:
        plan = _plan_format(options, source, tokenizer, options.target, dst, scheme_map, notes)
        return Formats(dst, {"": plan})
    by_folder = {}
    # Formats differ in the schemes that they support, so that each has its own map and notes.
    for target in options.targets:
        folder = dst / target.name
        with prefix_errors(target.name):
            target_recipe, _ = choose_embedding(recipe, options, source, target)
            target_map, target_notes = assign_schemes(source, target_recipe, folder, target)
            if options.kv_cache is not None:
                require_holds_kv_cache(target, folder)
            by_folder[target.name] = _plan_format(
                options, source, tokenizer, target, folder, target_map, target_notes
            )
    return Formats(dst, by_folder)


def _plan_format(
    options: QuantizeOptions,
    source: StoredCheckpoint,
    tokenizer: Tokenizer | None,
    target: Target,
    dst: Path,
    scheme_map: SchemeMap,
    notes: list[str],
) -> FormatPlan:
    """Plan the output in one format. Raises `RequestError` or `CheckpointError` as
    `choose_shard_bytes` and `select_templates` do.
    """
    kv_cache = None
    if options.kv_cache is not None:
        kv_cache = build_fp8_cache(source.config, dst, list_cached_attention(source))
    output = Output(
        source=source,
        config=source.config,
        planned=(),
        shard_bytes=choose_shard_bytes(options.split_max_size, target.container),
        tokenizer=tokenizer,
        method=target.method,
        templates=select_templates(source, tokenizer, options.template),
        name=model_name(source, options.base_model),
        authorship=_override_authorship(source, options),
        dst=dst,
        kv_cache=kv_cache,
        mix=find_mix(options.scheme),
    )
    return FormatPlan.of(source, target, scheme_map, output, notes)


def _override_authorship(source: StoredCheckpoint, options: QuantizeOptions) -> dict[str, Any]:
    """Collect who made the model and under which licence, from the source's files; options
    override them.
    """
    authorship = read_authorship(source.path)
    license = options.license
    base = options.base_model
    if license is not None and license != authorship.get("license"):
        relicensed: dict[str, Any] = {"license": license}
        # A name or a link of the source's licence would contradict the new one.
        for key, value in authorship.items():
            if not key.startswith("license"):
                relicensed[key] = value
        authorship = relicensed
    if base is not None and base != authorship.get("base_model"):
        authorship = {**authorship, "base_model": base, "base_model_relation": "quantized"}
    return authorship


def _record_options(options: QuantizeOptions) -> dict[str, object]:
    """Collect the manifest's entries on options that determine the bytes of the weights, apart from
    those of schemes and solver.
    """
    recorded: dict[str, object] = {}
    if options.dequantize:
        recorded["dequantize"] = True
    if options.split_max_size is not None:
        recorded["split_max_size"] = options.split_max_size
    if options.template is not None:
        recorded["template"] = Path(options.template).name
    return recorded


def _open_source(options: QuantizeOptions) -> StoredCheckpoint:
    """Open the source, to be run by quantkit's decoder or else by transformers.

    Raises `QuantkitError` as `quantize` does.
    """
    path = as_path("src", options.src)
    weights = options.weights
    if options.tensors_only:
        source = open_checkpoint(path, weights, tensors_only=True)
        unstack(source)
        return source
    source = open_to_run(path, weights, options.via, trust_remote_code=options.trust_remote_code)
    # A user who trusts the code expects that it runs: another result would mislead.
    if options.trust_remote_code and source.config.runnable:
        file = own_code.find_code_file(source.path)
        if file is not None:
            raise RequestError(
                "the folder's code is not used, because quantkit runs this model itself",
                path=source.path,
                found=file,
                hint=Message(
                    Option("via", value="transformers"),
                    " runs it; or omit ",
                    Option("trust_remote_code"),
                ),
            )
    if source.config.run_by is not None:
        options.require_run_by_transformers()
    return source


def _as_floats(
    source: StoredCheckpoint, options: QuantizeOptions
) -> tuple[StoredCheckpoint, list[str]]:
    """Wrap a quantized source so that its weights are floats, with a note. Raises an
    `UnsupportedError` if it is quantized, and not to be dequantized.
    """
    if not (schemes(source) or list_uncarried_weights(source)):
        return source, []
    source_format = describe_format(source)
    if not options.dequantize:
        # The hint repeats the user's command, with the option that makes it work.
        values = options.list_result_options()
        values["keep"] = as_strings("keep", options.keep)
        # A command line has no spelling for Python objects.
        if isinstance(options.scheme, Recipe):
            values |= {"scheme": None, "recipe": "FILE"}
        if not isinstance(options.calibration, str | Path | None):
            values["calibration"] = "FILE"
        if not isinstance(options.to, str | None):
            values["to"] = ",".join(options.to)
        words = ["quantkit", "quantize", str(options.src), str(options.dst), *command_words(values)]
        raise UnsupportedError(
            "the source is already quantized",
            path=source.path,
            found=source_format,
            hint=(
                Message(
                    f"start from the float model, or dequantize this one: {shlex.join(words)} ",
                    Option("dequantize", value=True),
                )
            ),
        )
    note = (
        f"{source.path}: the source is already quantized ({source_format}); its weights are read as"
        f" {source.config.dtype}, and rounded again"
    )
    return dequantized_checkpoint.DequantizedCheckpoint(source), [note]
