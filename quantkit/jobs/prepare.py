"""What must hold before a checkpoint is quantized, checked from headers alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import unread_experts
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import Parameter, input_groups, layer_kinds, parameters, sizes
from quantkit.arguments import as_path, as_texts
from quantkit.calibration.quantizers import TensorBlock
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, read_as_floats, require_calibratable, schemes
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.container import Output, StoredCheckpoint
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import carried_templates, checked_tokenizer, left_behind
from quantkit.formats.output.staging import require_name, require_new_names
from quantkit.formats.registry import Target
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.jobs.settings import GptqSettings, Method, MethodOptions
from quantkit.jobs.target import NATIVE
from quantkit.jobs.weights_only import kept_parts, kept_recurrent
from quantkit.json_values import shown
from quantkit.model.transformers_linears import with_linears
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import ROUNDING
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import SPELLINGS, QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A source of floats, and what is to become of it.

    Attributes:
        linears_by: what tells the linear layers of a model known by its tensors only; None of others.
        settings: of GPTQ; None for rounding.
        notes: for the user.
    """

    source: StoredCheckpoint
    scheme_map: SchemeMap
    tokenizer: Tokenizer | None
    linears_by: str | None
    settings: GptqSettings | None
    notes: list[str]

    @property
    def method(self) -> Method:
        return "rtn" if self.settings is None else "gptq"


def prepare(
    src: str | Path, dst: Path, scheme: str | QuantScheme | Recipe | None, *, embedding: str | QuantScheme | None,
    keep: str | Iterable[str], strict: bool, weights: WeightKind | None, tensors_only: bool, method: MethodOptions,
    target: Target,
) -> Prepared:  # fmt: skip
    """Open a source of floats, assign the schemes and settle the method.

    Args:
        method: what is said of it.
        target: as what the result is written.

    Raises:
        QuantkitError: as `quantize` does.
    """
    require_name(dst)
    kept, recipe = as_texts("keep", keep), _recipe(scheme, embedding)
    _require_not_kept(kept, embedding)
    source = open_checkpoint(as_path("src", src), weights, tensors_only=tensors_only)
    require_new_names(source.path, dst)
    if method.method == "gptq" and not method.sized:
        require_calibratable(source)
    tokenizer, notes = checked_tokenizer(source)
    if already := schemes(source):
        raise UnsupportedError(
            "the source is quantized already", path=source.path, found=str(next(iter(already.values()))),
            hint="start from the float model",
        )  # fmt: skip
    for name, stored_as in read_as_floats(source).items():
        raise UnsupportedError(
            f"the source is quantized already: tensor '{name}'", path=source.path, found=stored_as,
            hint="start from the float model, or convert it with `dequantize=True` first",
        )  # fmt: skip
    if tensors_only and target.name != NATIVE:
        raise RequestError(f'`tensors_only=True` does not go with `to="{target.name}"`', expected=f'`to="{NATIVE}"`')
    linears_by = None
    if not source.config.runnable:
        source.config, linears_by, more = with_linears(source.config, source.extra_config, source.path)
        notes += [*more, *left_behind(source)]
    scheme_map, more = _assigned(source, recipe.keeping(kept), dst, target, strict=strict)
    if not source.config.runnable:
        if recurrent := kept_recurrent(source.config, scheme_map.schemes):
            notes.append(f"{source.path}: {recurrent}; a recipe that names them alone may give them int8")
        if left := kept_parts(source.config, source.extra_config, scheme_map.schemes):
            notes.append(f"{source.path}: kept as they are: {'; '.join(left)}")
    settings = method.settings(scheme_map.schemes.values(), source, tokenizer)
    return Prepared(source, scheme_map, tokenizer, linears_by, settings, [*notes, *more])


def reassigned(prepared: Prepared, recipe: Recipe, dst: Path, target: Target) -> Prepared:
    """The same source with other schemes.

    Raises:
        RequestError, UnsupportedError: as `quantize` does.
    """
    _, before = _assigned(prepared.source, prepared.scheme_map.recipe, dst, target)
    scheme_map, more = _assigned(prepared.source, recipe, dst, target)
    others = [note for note in prepared.notes if note not in before]
    return replace(prepared, scheme_map=scheme_map, notes=[*others, *more])


def _assigned(
    source: StoredCheckpoint, recipe: Recipe, dst: Path, target: Target, *, strict: bool = False
) -> tuple[SchemeMap, list[str]]:
    """A recipe applied to a source, and notes on it.

    Raises:
        RequestError, UnsupportedError: as `quantize` does.
    """
    scheme_map = SchemeMap.of(recipe, source.config)
    misfits = scheme_map.misfit_lines()
    if misfits and strict:
        raise RequestError(
            f"schemes do not fit: {'; '.join(misfits)}, unless `strict=True` is asked for", path=source.path,
            hint="choose a smaller group size, or leave `strict=True` out",
        )  # fmt: skip
    notes = [f"{source.path}: {line}" for line in misfits]
    _require_held(scheme_map.schemes, target, source.path)
    native = target.name == NATIVE
    if native and not all(scheme.symmetric for scheme in scheme_map.schemes.values()):
        notes.append(f"{dst}: transformers does not load zero points in this format (seen in 5.23); quantkit does")
    if native and (unread := unread_experts(source.config, scheme_map.schemes)):
        notes.append(f"{dst}: transformers does not load {unread} right (seen in 5.23); quantkit does")
    if target.method is not None and scheme_map.embedding is not None:
        notes += [f"{dst}: {line}" for line in _unread_embedding(source.config, target.name)]
    return scheme_map, notes


def _unread_embedding(config: ModelConfig, name: str) -> list[str]:
    """Which readers of a target do not load a quantized embedding, as tried."""
    if name in (NATIVE, "int-quantized") and config.tied_embeddings:
        return [
            "no other reader of compressed-tensors loads a quantized embedding that is the head too (seen in"
            " transformers 5.23, vLLM 0.32); quantkit does, and so do llama.cpp and mlx-lm theirs (`to`)"
        ]
    if name == NATIVE:
        return [
            "transformers does not load a packed embedding (seen in 5.23), nor does vLLM 0.32 on CPUs; quantkit"
            ' does, and transformers that of `to="int-quantized"`'
        ]
    return ["vLLM does not load an embedding in this form (seen in 0.32)"] if name == "int-quantized" else []


def _require_held(schemes: Mapping[str, QuantScheme], target: Target, path: Path) -> None:
    """
    Raises:
        UnsupportedError: if a format has no place for one of the schemes, given by module.
    """
    assert target.codes is not None
    for module, scheme in schemes.items():
        embedding = module == EMBEDDING
        reason = target.codes.codec(scheme, embedding=embedding)
        if isinstance(reason, Reason) and embedding:
            raise UnsupportedError(
                f"{target.name} has no place for an {scheme} embedding: {reason.problem}", path=path,
                found=f"{scheme} for '{module}'", expected=reason.expected, hint="leave `embedding` out",
            )  # fmt: skip
        if isinstance(reason, Reason):
            raise UnsupportedError(
                f"{target.name} does not hold {scheme}: {reason.problem}", path=path, found=f"{scheme} for '{module}'",
                expected=reason.expected or ", ".join(map(str, target.codes.schemes)),
                hint="choose another scheme, or `keep` the layer as floats",
            )  # fmt: skip


def tensor_blocks(source: Checkpoint, schemes: Mapping[str, QuantScheme], target: Target) -> list[TensorBlock]:
    """The tensors of the output in order, scales in the target's type or else the source's.

    Args:
        schemes: by module.
    """
    assert target.codes is not None
    scale_dtype = target.codes.scale_dtype or DType(source.config.dtype)

    def spec(parameter: Parameter) -> TensorSpec:
        name, shape = parameter.name, parameter.shape
        if parameter.leaf == "weight" and parameter.module in schemes:
            return TensorSpec(name, shape, scale_dtype, schemes[parameter.module])
        return TensorSpec(name, shape, source.info(name).dtype)

    ordered = target.container.parameters(source.config, schemes, target.method)
    by_layer = itertools.groupby(ordered, key=lambda parameter: parameter.layer)
    return [TensorBlock(layer, tuple(map(spec, block))) for layer, block in by_layer]


def planned_output(
    prepared: Prepared, blocks: Iterable[TensorBlock], target: Target, template: str | None, shard_bytes: int,
    name: str, dst: Path,
) -> Output:  # fmt: skip
    """What is to be written.

    Raises:
        RequestError, CheckpointError: see `carried_templates`.
    """
    source, tensors = prepared.source, [spec for block in blocks for spec in block.tensors]
    templates = carried_templates(source, prepared.tokenizer, template)
    return Output(
        source, source.config, tensors, shard_bytes, prepared.tokenizer, method=target.method, templates=templates,
        name=name, dst=dst,
    )  # fmt: skip


def _require_not_kept(kept: Iterable[str], embedding: object) -> None:
    """
    Raises:
        RequestError: if an embedding is to be quantized, and to keep its floats.
    """
    own = None if embedding is None else next((one for one in kept if Override(one, None).matches(EMBEDDING)), None)
    if own is not None:
        raise RequestError(
            "`embedding` quantizes what `keep` leaves as floats", found=f"{shown(own)} matches '{EMBEDDING}'",
            hint="leave `embedding` out, which keeps its floats then, or name the linear layers alone",
        )  # fmt: skip


def _recipe(scheme: str | QuantScheme | Recipe | None, embedding: str | QuantScheme | None) -> Recipe:
    """What was asked for, as a recipe.

    Args:
        embedding: the scheme of the embedding; None is what the recipe says.

    Raises:
        RequestError: if it is none of the three, or a name of no scheme.
    """
    if embedding is not None:
        recipe = _recipe(scheme, None)
        found = embedding if isinstance(embedding, QuantScheme) else QuantScheme.parse(embedding)
        return Recipe(recipe.default, (*recipe.overrides, Override(EMBEDDING, found)))
    if isinstance(scheme, Recipe):
        return scheme
    if isinstance(scheme, QuantScheme):
        return Recipe(scheme)
    if isinstance(scheme, Path) or (isinstance(scheme, str) and scheme.strip().lower().endswith(".json")):
        raise RequestError(
            "the scheme is the path of a file", found=shown(str(scheme)), expected=f"{SPELLINGS}, or a Recipe",
            hint="quantkit.Recipe.from_json(path) reads one",
        )  # fmt: skip
    if not isinstance(scheme, str):  # callers without types
        raise RequestError(
            f"give a scheme: {SPELLINGS}, or a Recipe; or a size: `target_bits` or `max_size`", found=shown(scheme)
        )
    return Recipe(QuantScheme.parse(scheme))


def too_few_tokens(shape: Sequence[int], config: ModelConfig) -> list[str]:
    """A note where samples of a shape [N, T] cannot give a Hessian full rank."""
    counts = sizes(config)
    groups = (group for layer in layer_kinds(config) for group in input_groups(config, layer))
    tokens, width = math.prod(shape), max(counts[group.linears[0].dims[1]] for group in groups)
    if tokens >= width:
        return []
    return [f"{tokens} calibration tokens are fewer than the widest layer's {width} inputs; give more `samples`"]


def starved_experts(records: Mapping[str, Mapping[str, object]], config: ModelConfig) -> list[str]:
    """A note where experts were sent too few calibration tokens.

    Args:
        records: what was found for tensors, by name.
    """
    found: dict[tuple[int | None, int], list[Mapping[str, object]]] = {}
    experts = set()
    for parameter in parameters(config):
        if parameter.expert is not None:
            experts.add((parameter.layer, parameter.expert))
            record = records.get(parameter.name, {})
            if record.get("tokens_from") == "all":
                found.setdefault((parameter.layer, parameter.expert), []).append(record)
    if not found:
        return []
    never = sum(any(record["routed_tokens"] == 0 for record in own) for own in found.values())
    none = f", {never} of them none" if never else ""
    rounded = sum(record["solver"] == ROUNDING for own in found.values() for record in own)
    last = f", and {rounded} of their layers {'was' if rounded == 1 else 'were'} rounded to nearest" if rounded else ""
    return [
        f"{len(found)} of {len(experts)} experts were sent too few calibration tokens{none}: "
        f"all tokens calibrated them{last}"
    ]
