"""The target format of a job: the requested one, or the one that follows from the source."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.architectures.families import FAMILIES
from quantkit.base.arguments import as_integer, as_string, as_strings
from quantkit.base.late import LateFunction
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import list_uncarried_weights, schemes
from quantkit.formats.codecs.compressed_tensors import CompressedTensors, Int8Activations
from quantkit.formats.codecs.table import NATIVE as native
from quantkit.formats.container import Container, StoredCheckpoint
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.kv_scales import attention_name
from quantkit.formats.registry import GGUF, HF, Target, find_target, target, targets

if TYPE_CHECKING:
    from quantkit.via_transformers.forward import passage_of
else:
    # Its module imports torch.
    passage_of = LateFunction("quantkit.via_transformers.forward:passage_of")

NATIVE = native.name
"""The target of quantized models by default."""
SHARD_BYTES = 2 << 30
"""Largest safetensors file written by default, unless one tensor is larger."""
_WITH_KV_CACHE = (CompressedTensors.name, Int8Activations.name, HF.name)
"""Targets that can store the scheme and scales of a KV cache."""


def choose_target(
    to: str | None, dst: Path, *, dequantize: bool = False, requantize: bool = False
) -> Target | None:
    """Find the requested target, by name or by the suffix of the destination; None if it follows
    from the source. Raises `RequestError` for an unknown name, and for requests that contradict
    each other.
    """
    if dequantize and requantize:
        raise RequestError(
            Message(
                Option("dequantize", value=True),
                " and ",
                Option("requantize", value=True),
                " are mutually exclusive",
            )
        )
    if to is None:
        result = None
    else:
        result = target(as_string("to", to))
    if dst.suffix.lower() == f".{GGUF.name}":
        if result is not None and result.name != GGUF.name:
            raise RequestError(
                Message(
                    "the destination is named as a GGUF file, and ",
                    Option("to", value=result.name),
                    " requests a folder",
                ),
                found=str(dst),
                hint=Message("choose a name without .gguf, or leave ", Option("to"), " out"),
            )
        result = target(GGUF.name)
    if result is None:
        return None
    if dequantize and not result.floats:
        able = [candidate.name for candidate in targets().values() if candidate.floats]
        raise RequestError(
            Message(
                Option("dequantize", value=True),
                " cannot be combined with ",
                Option("to", value=result.name),
            ),
            expected=", ".join(able),
        )
    if requantize and result.codes is None:
        raise RequestError(
            Message(
                Option("requantize", value=True),
                " cannot be combined with ",
                Option("to", value=result.name),
            ),
            expected=", ".join(_list_code_targets()),
        )
    return result


def _list_code_targets() -> list[str]:
    """List the names of the targets that hold codes."""
    return [candidate.name for candidate in targets().values() if candidate.codes is not None]


def choose_default_target(source: StoredCheckpoint, *, dequantize: bool) -> Target:
    """Choose the default target of a source: floats become Hugging Face folders. Codes keep their
    format if quantkit writes it, and else become compressed-tensors.
    """
    if dequantize or not (schemes(source) or list_uncarried_weights(source)):
        return target(HF.name)
    source_target = find_target(source.method or "")
    if source_target is not None and source_target.method is not None:
        return source_target
    return target(NATIVE)


def choose_quantized_target(to: str | None, dst: Path) -> Target:
    """Choose the format in which a model is quantized.

    Raises `RequestError` for what holds floats only; see also `choose_target`.
    """
    result = choose_target(to, dst) or target(NATIVE)
    if result.codes is None:
        able = ", ".join(_list_code_targets())
        raise RequestError(
            Message(Option("to", value=result.name), " cannot store quantized weights"),
            expected=able,
        )
    return result


def choose_quantized_targets(to: str | Iterable[str] | None, dst: Path) -> list[Target]:
    """Choose the formats in which a model is quantized, in the order of `targets`, if one or
    several are requested. Raises `RequestError` for none and for one that is named twice; see also
    `choose_quantized_target`.
    """
    if to is None:
        names: list[str | None] = [None]
    else:
        names = [*as_strings("to", to)]
    if not names:
        raise RequestError(Message(Option("to"), " is empty"), expected="one or more formats")
    for name in names:
        if name and names.count(name) > 1:
            raise RequestError(Message(Option("to"), " names a format twice"), found=name)
    chosen = [choose_quantized_target(name, dst) for name in names]
    if len(chosen) == 1:
        return chosen
    # A fixed order: the same formats give the same output, however they are listed.
    order = list(targets())
    return sorted(chosen, key=lambda candidate: order.index(candidate.name))


def choose_shard_bytes(requested: int | None, container: Container) -> int:
    """Choose the bytes of the largest file of weights. Raises `RequestError` for a size that no
    file can have, or a container whose files are not split by size.
    """
    if requested is None:
        if container.unsplit_by_default:
            return sys.maxsize
        return SHARD_BYTES
    size = as_integer("split_max_size", requested)
    if size <= 0:
        raise RequestError(Message(Option("split_max_size"), " must be positive"), found=size)
    if container.model_parallel:
        raise RequestError(
            Message(
                Option("split_max_size"),
                " cannot be combined with ",
                Option("to", value=container.name),
            ),
            hint=Message(Option("mp"), " sets the number of files"),
        )
    return size


def choose_kv_cache(
    source: StoredCheckpoint, target: Target, dst: Path, *, dequantize: bool, allow_nonfinite: bool
) -> tuple[KvCache | None, list[str]]:
    """Decide whether a conversion writes the settings of its source's quantized key/value cache
    again, as they are; also return notes for the user. Raises `NonFiniteError` or
    `CheckpointError`: see `KvCache.require_sound`.
    """
    cache = source.kv_cache
    can_hold = not dequantize and target.name in _WITH_KV_CACHE
    if cache is None or not cache.rewritable or not can_hold:
        return None, note_dropped_cache(source, dst)
    cache.require_sound(allow_nonfinite=allow_nonfinite)
    return cache, [f"{dst}: the scheme and scales of the KV cache are copied"]


def note_dropped_cache(source: StoredCheckpoint, dst: Path, *, again: bool = False) -> list[str]:
    """Write a note where an output says nothing of its source's quantized key/value cache, or has
    it calibrated `again`.
    """
    if source.kv_cache is None:
        return []
    if again:
        return [f"{dst}: the scales of the KV cache are calibrated again"]
    return [
        f"{dst}: the scheme and scales of the KV cache are dropped: readers use an"
        " unquantized cache"
    ]


def require_holds_kv_cache(target: Target, dst: Path) -> None:
    """Raise an `UnsupportedError` if scales of a quantized key/value cache have no place in a
    format of codes.
    """
    if target.name not in _WITH_KV_CACHE:
        # A folder of floats holds such scales too, but is no format for quantized models.
        able = ", ".join(name for name in _WITH_KV_CACHE if name != HF.name)
        raise UnsupportedError(
            f"{target.name} cannot store the scales of a KV cache",
            path=dst,
            expected=able,
            hint=Message("leave ", Option("kv_cache"), " out"),
        )


def require_names(source: StoredCheckpoint, target: Target) -> None:
    """Raise an `UnsupportedError` if a format's readers do not know a model by the names of its
    tensors.
    """
    config = source.config
    if target.method is None:
        return
    # mlx-lm gives experts and state spaces other names, and renames only unquantized weights.
    model_type: object = config.architecture
    if config.tensors is not None:
        model_type = source.extra_config.get("model_type")
    elif FAMILIES[config.architecture].in_mlx:
        return
    reason = target.method.explain_unread_model(model_type)
    if reason is not None:
        raise UnsupportedError(
            f"{target.name} does not support this architecture: {reason.problem}",
            path=source.path,
            found=reason.found,
            expected=reason.expected,
            hint=Message("write another format: ", Option("to", value=NATIVE)),
        )


def list_cached_attention(source: StoredCheckpoint) -> tuple[str, ...]:
    """List the attention modules of a model on disk that get scales of their keys and values.

    Raises:
        UnsupportedError: if such scales cannot be calibrated and checked for the model.
    """
    config = source.config
    if config.run_by is not None:
        # Imports transformers, which is optional.
        from quantkit.via_transformers.cached_attention import plan_cached_attention

        return plan_cached_attention(source, passage_of(source).partwise)
    # Latent attention caches one vector for all heads, and not keys and values.
    if config.runnable and config.latent_attention is None:
        return tuple(attention_name(layer) for layer in config.caching_layers)
    if config.runnable:
        reason = "it caches latent vectors instead of keys and values (MLA)"
    else:
        reason = "only its tensors are known"
    raise UnsupportedError(
        f"scales of a KV cache cannot be calibrated for this model: {reason}",
        path=source.path,
        found=config.architecture,
        hint=Message("leave ", Option("kv_cache"), " out"),
    )
