"""Assign a scheme to each linear of a source in a format: apply the recipe, refuse what the format
cannot represent, and write notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.architectures.disk import describe_unread_experts
from quantkit.architectures.families import FAMILIES
from quantkit.architectures.names import EMBEDDING
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.codecs.vllm import VllmProblem, describe_problems
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.containers.hf import HuggingFace
from quantkit.formats.registry import Target
from quantkit.jobs.output.target import (
    NATIVE,
    require_names,
)
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.tensors.dtypes import DType
from quantkit.tensors.recipe import Recipe
from quantkit.tensors.scheme import QuantScheme

# MXFP4 and NVFP4.
_FP4_BITS = 4


def assign_schemes(
    source: StoredCheckpoint, recipe: Recipe, dst: Path, target: Target, *, strict: bool = False
) -> tuple[SchemeMap, list[str]]:
    """Apply a recipe to a source, and write notes on what readers do not support.

    Raises `RequestError` or `UnsupportedError` as `quantize` does.
    """
    assert target.codes is not None
    if source.config.tensors is not None:
        _require_decoder(source, target)
    require_names(source, target)
    scheme_map = SchemeMap.of(recipe, source.config, target.codes.embeddings)
    misfits = scheme_map.misfit_lines()
    if misfits and strict:
        raise RequestError(
            Message(
                f"schemes do not fit: {'; '.join(misfits)}, and ",
                Option("strict", value=True),
                " was requested",
            ),
            path=source.path,
            hint=Message(
                "choose a smaller group size, or leave ", Option("strict", value=True), " out"
            ),
        )
    notes = [f"{source.path}: {line}" for line in misfits]
    _require_supported(scheme_map.schemes, target, source)
    native = target.name == NATIVE
    symmetric = all(scheme.symmetric for scheme in scheme_map.schemes.values())
    if native and not symmetric:
        notes.append(
            f"{dst}: transformers does not load zero points in this format (seen in 5.23); quantkit"
            " does"
        )
    if native:
        unread = describe_unread_experts(source.config, scheme_map.schemes)
        if unread:
            notes.append(
                f"{dst}: transformers does not load {unread} correctly (seen in 5.23);"
                " quantkit does"
            )
    small_floats = set()
    for scheme in scheme_map.schemes.values():
        if scheme.of_small_floats and scheme.bits == _FP4_BITS:
            small_floats.add(str(scheme))
    small = sorted(small_floats)
    # A bfloat16 model needs no note: transformers loads it in its own type.
    if small and native and source.config.dtype != DType.BFLOAT16:
        # This `dtype` is an argument of transformers.
        notes.append(
            f"{dst}: {' and '.join(small)}: transformers only decodes it to bfloat16 (seen in"
            " 5.23); load it with dtype=torch.bfloat16"
        )
    problem = describe_problems(vllm_problems_of(source, scheme_map.schemes, target))
    if problem:
        notes.append(f"{dst}: {problem}")
    if scheme_map.embedding is not None and isinstance(target.method, CompressedTensors):
        tied = source.config.tied_embeddings
        here_alone = source.config.run_by is not None
        problem = target.method.unread_embedding(tied=tied, here_alone=here_alone)
        notes.append(Message(f"{dst}: ", problem))
    return scheme_map, notes


def vllm_problems_of(
    source: StoredCheckpoint, schemes: Mapping[str, QuantScheme], target: Target
) -> list[VllmProblem]:
    """List what vLLM could not load of a folder with these schemes, given by module; nothing for
    formats that it does not read.
    """
    if not isinstance(target.container, HuggingFace):
        return []
    return target.container.vllm_problems(source, schemes, target.method)


def _require_decoder(source: Checkpoint, target: Target) -> None:
    """Raise an `UnsupportedError` if a format without names of its own needs a decoder here."""
    if target.method is None:
        if source.config.architecture in FAMILIES:
            raise UnsupportedError(
                f"{target.name} is only written of models that quantkit runs itself",
                path=source.path,
                found=source.config.run_by,
                hint=Message(Option("via", value="own"), " runs this one"),
            )
        # The names of its tensors in such a file are not known.
        target.container.parameters(source.config, ())


def _require_supported(
    schemes: Mapping[str, QuantScheme], target: Target, source: Checkpoint
) -> None:
    """Raise an `UnsupportedError` if a format does not support one of the schemes, given by module,
    or the shape of a module.
    """
    assert target.codes is not None
    path = source.path
    for module, scheme in schemes.items():
        embedding = module == EMBEDDING
        codec = choose_codec(target.codes, scheme, embedding=embedding)
        if not isinstance(codec, Reason):
            # A codec may have block sizes that divide some shapes only.
            misfit = codec.misfit(source.info(f"{module}.weight").shape)
            if misfit:
                raise UnsupportedError(
                    f"{target.name} cannot store '{module}' in {scheme}: {misfit.problem}",
                    path=path,
                    found=misfit.found,
                    expected=misfit.expected,
                    hint=Message(
                        "choose another scheme, or ", Option("keep"), " the linear unquantized"
                    ),
                )
            continue
        reason = codec
        if embedding:
            raise UnsupportedError(
                f"{target.name} does not support an {scheme} embedding: {reason.problem}",
                path=path,
                found=f"{scheme} for '{module}'",
                expected=reason.expected,
                hint=Message("leave ", Option("embedding"), " out"),
            )
        raise UnsupportedError(
            f"{target.name} does not support {scheme}: {reason.problem}",
            path=path,
            found=f"{scheme} for '{module}'",
            expected=reason.expected or ", ".join(map(str, target.codes.schemes)),
            hint=Message("choose another scheme, or ", Option("keep"), " the linear unquantized"),
        )
