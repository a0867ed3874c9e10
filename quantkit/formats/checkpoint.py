"""The interface of readers: canonical tensors, one at a time, whatever the source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.source import SourceFile
from quantkit.formats.codecs.codec import DAMAGED_FILE, FLOAT_MODEL, Weight
from quantkit.formats.codecs.layouts import FLOAT8_TYPES as SMALL_FLOATS
from quantkit.formats.codecs.table import describe_tensor_methods
from quantkit.formats.kv_cache import KvCache
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from quantkit.architectures.families import opaque
else:
    opaque = LateModule("quantkit.architectures.families.opaque")


class Checkpoint(Protocol):
    """A model on disk, read lazily.

    ``extra_config`` has the keys of the source's config that no computation depends on, which are
    copied to outputs; ``kv_cache`` is what it says of a quantized KV cache, None if nothing;
    ``notes`` are for the user, and are not errors.
    """

    path: Path
    format: str
    config: ModelConfig
    extra_config: Mapping[str, Any]
    kv_cache: KvCache | None
    notes: list[str]

    def names(self) -> list[str]:
        """Return the canonical names in layer order."""
        ...

    def info(self, name: str) -> TensorSpec:
        """Describe shape, dtype and scheme, from headers alone."""
        ...

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        """Load one tensor, or a part of it, in canonical layout, into newly allocated memory."""
        ...

    def files(self) -> list[SourceFile]:
        """Return the files of weights and settings that were read, in the state in which they were
        opened.
        """
        ...


class CheckpointView:
    """A checkpoint that is read through another one, its source, until a subclass changes
    something.
    """

    def __init__(self, source: Checkpoint, config: ModelConfig | None = None) -> None:
        self._source = source
        self.path = source.path
        self.format = source.format
        self.config = config or source.config
        self.extra_config = source.extra_config
        self.kv_cache = source.kv_cache
        self.notes = source.notes

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorSpec:
        return self._source.info(name)

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        return self._source.load(name, part)

    def files(self) -> list[SourceFile]:
        return self._source.files()


def resolve_stored_name(checkpoint: Checkpoint, name: str) -> str:
    """Resolve a parameter to the tensor with its values: for a tied head, the embedding.

    A model that is known by its tensors only stores each of them under its own name.
    """
    config = checkpoint.config
    if name == "lm_head.weight" and config.tied_embeddings and config.runnable:
        return "model.embed_tokens.weight"
    return name


def require_runnable(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedError` for a model that is known by its tensors only."""
    if not checkpoint.config.runnable:
        raise UnsupportedError(
            "the model is known by its tensors only, so it cannot be run here",
            path=checkpoint.path,
            found=checkpoint.config.architecture,
            hint=(
                Message(
                    "inspect and verify show its tensors; eval and generate run it with ",
                    Option("backend", value="transformers"),
                    ", if transformers is installed and knows it",
                )
            ),
        )


def require_calibratable(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedError` for a model that no samples can be sent through."""
    if not checkpoint.config.measurable:
        raise UnsupportedError(
            "the model is known by its tensors only, so it cannot be calibrated",
            path=checkpoint.path,
            found=checkpoint.config.architecture,
            expected=Message(Option("method", value="rtn")),
        )


def schemes(checkpoint: Checkpoint) -> dict[str, QuantScheme]:
    """Collect the scheme of every quantized module."""
    module_schemes: dict[str, QuantScheme] = {}
    for name in checkpoint.names():
        scheme = checkpoint.info(name).scheme
        if scheme is not None:
            module_schemes[name.removesuffix(".weight")] = scheme
    return module_schemes


def list_uncarried_weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Collect the weights that are stored as codes but read as floats, with the kind of the
    codes.
    """
    storage_kinds: dict[str, str] = {}
    for name in checkpoint.names():
        stored_as = checkpoint.info(name).stored_as
        if stored_as is not None:
            storage_kinds[name] = stored_as
    return storage_kinds


def parameter_count(checkpoint: Checkpoint) -> int:
    """Count the weights of a model, as if all were floats; tied ones are counted once."""
    return sum(math.prod(checkpoint.info(name).shape) for name in checkpoint.names())


def count_text(count: int) -> str:
    """Format a number of parameters: ``1.24B``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def active_parameter_count(checkpoint: Checkpoint) -> int:
    """Count the weights that one token uses: of experts only those to which it is routed."""
    experts = checkpoint.config.experts
    if experts is None:
        return parameter_count(checkpoint)
    shared_count = 0
    routed_count = 0
    for parameter in parameters(checkpoint.config):
        if parameter.expert is None:
            shared_count += math.prod(parameter.shape)
        else:
            routed_count += math.prod(parameter.shape)
    return shared_count + routed_count * experts.per_token // experts.count


def require_tensors(
    specs: Mapping[str, TensorSpec], expected: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Check that the tensors are exactly those expected, in these shapes, and floats unless they
    have a scheme.

    Raises:
        CheckpointError: naming the first tensor that is missing, unexpected or misshapen.
        UnsupportedError: if unexpected tensors belong to a quantization scheme, or a weight is not
            stored as floats.
    """
    # Unexpected tensors come first: their names may show a quantization scheme, which explains the
    # missing ones.
    unexpected = [name for name in specs if name not in expected]
    if unexpected:
        raise_unexpected(unexpected, path)
    missing = [name for name in expected if name not in specs]
    if missing:
        raise CheckpointError(
            f"tensor '{missing[0]}' is missing",
            path=path,
            found=f"{len(expected) - len(missing)} of {len(expected)} tensors",
            hint="a weight file is missing or the config belongs to another model",
        )
    for name, shape in expected.items():
        if specs[name].shape != shape:
            problem = f"tensor '{name}' has the wrong shape"
            shapes = (list(specs[name].shape), list(shape))
            raise CheckpointError(problem, path=path, found=shapes[0], expected=shapes[1])
        if specs[name].dtype not in FLOATS:
            raise UnsupportedError(
                f"tensor '{name}' is not stored in a float type",
                path=path,
                found=specs[name].dtype,
                hint="the source is quantized already in a scheme that its config does not name",
            )


def raise_unexpected(names: Iterable[str], path: Path) -> None:
    """Refuse tensors that the architecture does not have, naming their quantization scheme if it is
    known.

    Raises:
        CheckpointError: always, unless the names show a quantization scheme.
        UnsupportedError: if they do.
    """
    listed = sorted(names)
    for name in listed:
        # PEFT names the tensors of an adapter this way.
        if ".lora_" in name or name.startswith("base_model.model."):
            raise make_lora_adapter_error(path, f"'{name}'")
        scheme = describe_tensor_methods(name)
        if scheme is not None:
            problem = f"the source is quantized already ({scheme})"
            raise UnsupportedError(problem, path=path, found=f"'{name}'", hint=FLOAT_MODEL)
    problem = f"unexpected tensor '{listed[0]}'"
    if len(listed) > 1:
        problem += f" and {len(listed) - 1} more"
    hint = None
    for name in listed:
        # DeepSeek's and GLM's multi-token prediction layers merge two inputs with `eh_proj`.
        if opaque.is_extra_layer(name, {}) or name.endswith(".eh_proj.weight"):
            hint = Message(
                "to copy multi-token prediction layers, add ",
                Option("tensors_only", value=True),
                " or ",
                Option("via", value="transformers"),
            )
            break
    raise CheckpointError(
        problem, path=path, expected="only tensors of the architecture", hint=hint
    )


def make_lora_adapter_error(path: Path, found: str) -> UnsupportedError:
    """Build the error for an adapter that was given instead of a model."""
    hint = Message(
        "merge it into its base with ", Option("lora", job=""), " of convert or quantize"
    )
    return UnsupportedError("is a LoRA adapter, not a model", path=path, found=found, hint=hint)


def require_unquantized(
    specs: Mapping[str, TensorSpec], path: Path, *, method: str | None, floats: bool
) -> None:
    """Check that no tensor of a model that is known by its tensors only is a part of a quantized
    weight.

    Args:
        specs: the tensors that are copied, and the weights that are read as floats.
        method: of the quantization, as the config states it; None if it does not.
        floats: whether it quantizes to small floats, so that none may be without scales.

    Raises:
        CheckpointError: naming the first codes without scales, or scales without codes, if a method
            is stated.
        UnsupportedError: if none is.
    """
    for name, spec in specs.items():
        scheme = describe_tensor_methods(name) or _scheme_of_pair(name, spec, specs, floats)
        if method is None and scheme is not None:
            problem = (
                f"the source is quantized already ({scheme}), in a scheme that its config does not"
                " name"
            )
            raise UnsupportedError(problem, path=path, found=f"'{name}'", hint=FLOAT_MODEL)
        if scheme is not None:
            raise CheckpointError(
                f"tensor '{name}' does not belong to a weight in a supported scheme",
                path=path,
                found=f"{spec.dtype} {list(spec.shape)}",
                expected=f"quantized weights and scales of {method}, each once",
                hint="the folder is damaged or was written by another tool; download it again",
            )
        is_mxfp4_part = spec.dtype == DType.UINT8 and name.endswith(("_blocks", "_scales"))
        if floats and (is_mxfp4_part or spec.dtype in SMALL_FLOATS):
            raise CheckpointError(
                f"tensor '{name}' lacks its quantized weight or its scales",
                path=path,
                found=f"{spec.dtype} {list(spec.shape)} alone",
                expected=f"quantized weights and scales of {method}",
                hint=DAMAGED_FILE,
            )


def _scheme_of_pair(
    name: str, spec: TensorSpec, specs: Mapping[str, TensorSpec], floats: bool
) -> str | None:
    """Recognize the scheme of scales by the tensor that they scale, which may contain floats too if
    `floats` is set; None for other tensors.
    """
    # DeepSeek names the scales of FP8 blocks this way.
    if name.endswith("_scale_inv"):
        return "FP8"
    if name.endswith("_scale"):
        codes = specs.get(name.removesuffix("_scale"))
        if codes is None:
            return None
        # A model may have a learned scale of a vector, which is not a quantized weight.
        if len(codes.shape) > 1 and (floats or codes.dtype.itemsize == 1):
            return "FP8"
        return None
    # gpt-oss stores MXFP4 as `NAME_blocks` and `NAME_scales`, both uint8.
    if name.endswith("_scales") and spec.dtype == DType.UINT8:
        blocks_name = name.removesuffix("scales") + "blocks"
        if blocks_name in specs:
            return "MXFP4"
    return None
