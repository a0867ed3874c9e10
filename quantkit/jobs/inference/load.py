"""A model and its tokenizer, ready to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from quantkit.base.arguments import as_integer, as_path, as_string, require_flags, require_instance
from quantkit.base.late import LateModule
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, require_runnable
from quantkit.formats.detect import WeightKind, open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.kernels import BackendName
from quantkit.kernels.dispatch import require_backend
from quantkit.model.decoder import Decoder
from quantkit.model.device import free_bytes, resolve_device, to_torch_dtype
from quantkit.model.load import load_model, measure_run_memory
from quantkit.model.run_memory import RunMemory
from quantkit.runtime.generation_config import end_tokens
from quantkit.tensors.dtypes import DType, FloatName, float_name
from quantkit.text.tokenizer import Tokenizer, load_tokenizer
from quantkit.xla import require_packages

# Drafts and models without a decoder need these.
if TYPE_CHECKING:
    from quantkit.runtime.by_transformers import TransformersModel
    from quantkit.text import compare
    from quantkit.via_transformers import forward as transformers_forward
    from quantkit.xla.engine import XlaModel
else:
    compare = LateModule("quantkit.text.compare")
    transformers_forward = LateModule("quantkit.via_transformers.forward")


class Placement(TypedDict, total=False):
    """Arguments of `load` that say where and how a model runs."""

    device: str | torch.device | None
    dtype: FloatName | torch.dtype | None
    backend: BackendName | None
    allow_slow: bool
    tp: ProcessGroup
    progress: Progress | None


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: FloatName | torch.dtype | None = None,
    backend: BackendName | None = None,
    allow_slow: bool = False,
    weights: WeightKind | None = None,
    tp: ProcessGroup = SINGLE,
    progress: Progress | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Open a checkpoint, quantized or not, with its tokenizer.

    Args:
        path: a Meta or Hugging Face folder, or a GGUF file.
        device: where the model runs, as torch spells it: ``cpu``, ``cuda``, ``cuda:1``; None is
            that of `tp` or, alone, a GPU if there is one.
        dtype: of activations and float weights: ``bf16``, ``fp16``, ``fp32``, or torch's; None is
            the checkpoint's own.
        backend: the kernels of quantized layers: ``cpu-exact``, ``cpu-fast``, ``triton`` or
            ``reference``; None chooses the first of these that supports a layer, except
            ``reference``, which is slow. ``cpu-fast`` is faster than ``cpu-exact``, but less
            exact.
        allow_slow: run layers that no kernels serve on ``reference``, with a warning, instead of
            failing.
        weights: picks one of several sets of weights in the folder: ``meta``, ``safetensors``,
            ``bin``, ``gpt-fast``, ``gpt-fast-int8`` or ``gguf``.
        tp: the processes that share the model, from
            `quantkit.distributed.group.join_until_exit`; each calls this, and then the model in the
            same way.
        progress: called for each tensor; None reports nothing.

    Returns:
        The model and its tokenizer, for `quantkit.generate` and `quantkit.stream`. Both can be
        called: ``tokenizer(text)`` returns token ids, and ``model(ids)`` their logits, [T, V] for
        ids [T] and [B, T, V] for ids [B, T] at positions 0 to T - 1.

    Raises:
        CheckpointError: if the folder is damaged, or has no tokenizer.
        UnsupportedError: if it is of a kind that is not read.
        RequestError: for a device, float type or backend that there is not, or if no kernels serve
            it there.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4", dtype="bf16")
        >>> model(tokenizer("My fellow citizens")).argmax(-1)
    """
    # Arguments are checked before the folder is opened, so that a wrong one is reported at once.
    require_flags(allow_slow=allow_slow)
    if backend is not None:
        require_backend(as_string("backend", backend))
    require_instance("tp", tp, ProcessGroup, "a ProcessGroup")
    checkpoint, tokenizer = open_with_tokenizer(as_path("path", path), weights, dtype)
    model = load_opened(
        checkpoint,
        device=device,
        dtype=dtype,
        backend=backend,
        allow_slow=allow_slow,
        tp=tp,
        progress=progress,
    )
    return model, tokenizer


def open_with_tokenizer(
    path: Path, weights: WeightKind | None, dtype: FloatName | torch.dtype | None
) -> tuple[Checkpoint, Tokenizer]:
    """Open a checkpoint that a decoder here runs, and its tokenizer, before any weight is read.

    Raises the errors of `open_runnable_checkpoint`, `CheckpointError` if there is no tokenizer or
    it does not go with the embedding, and `RequestError` for an unknown float type.
    """
    checkpoint = open_runnable_checkpoint(path, weights, float_name(dtype))
    tokenizer, _ = load_checked_tokenizer(checkpoint)
    # None if the folder has no tokenizer: loading it again raises the error that says so.
    return checkpoint, tokenizer or load_tokenizer(path)


def load_opened(
    checkpoint: Checkpoint,
    *,
    device: str | torch.device | None = None,
    dtype: FloatName | torch.dtype | None = None,
    backend: BackendName | None = None,
    allow_slow: bool = False,
    tp: ProcessGroup = SINGLE,
    progress: Progress | None = None,
) -> Decoder:
    """Load the weights of an open checkpoint; arguments and errors as of `load`."""
    return load_model(
        checkpoint,
        device=device,
        dtype=to_torch_dtype(dtype),
        backend=backend,
        allow_slow=allow_slow,
        group=tp,
        progress=skip_repeated_reports(progress),
    )


def measure_opened(
    checkpoint: Checkpoint,
    *,
    length: int,
    slots: int = 1,
    int8_cache: bool = False,
    **placement: Unpack[Placement],
) -> RunMemory:
    """State what an open checkpoint will take to run, before its weights are read.

    Args:
        length, slots: tokens of a sequence, and sequences at the same time.
        int8_cache: whether keys and values are kept in int8.
        placement: as for `load_opened`.

    Raises:
        RequestError: if weights and cache exceed the free memory; and as `load` does.
    """
    device = resolve_device(_choose_device(placement))
    memory = measure_run_memory(
        checkpoint,
        device=device,
        dtype=to_torch_dtype(placement.get("dtype")),
        backend=placement.get("backend"),
        allow_slow=placement.get("allow_slow", False),
        group=placement.get("tp", SINGLE),
        cache_dtype=torch.int8 if int8_cache else None,
    )
    # Longer requests are refused with an error of their own.
    length = min(length, checkpoint.config.max_positions)
    memory.require_fit(free_bytes(device), checkpoint.path, length=length, slots=slots)
    return memory


def _choose_device(placement: Placement) -> str | torch.device | None:
    device = placement.get("device")
    if device is None:
        return placement.get("tp", SINGLE).device
    return device


def load_draft(path: str | Path, tokenizer: Tokenizer, **placement: Unpack[Placement]) -> Decoder:
    """Load a smaller model that proposes tokens for another one, whose tokenizer is given. Raises
    as `load`, and `RequestError` if the two encode texts in different ways.
    """
    draft, draft_tokenizer = load(path, **placement)
    # Drafts are token ids, which must mean the same to both models.
    difference = compare.sample_difference(tokenizer, draft_tokenizer)
    if difference is not None:
        raise RequestError(
            "the draft model has a different vocabulary",
            path=as_path("path", path),
            found=difference,
        )
    return draft


def load_xla(
    path: str | Path,
    *,
    devices: int | None = None,
    dtype: FloatName | torch.dtype | None = None,
    weights: WeightKind | None = None,
    multi_host: bool = False,
    progress: Progress | None = None,
) -> tuple[XlaModel, Tokenizer]:
    """Open a checkpoint as `load` does, for the devices that JAX finds; the process can't
    `torch.compile` from then on.

    Args:
        path, dtype, weights: as for `load`.
        devices: that share the model; None takes all.
        multi_host: whether other processes, each with this call, have devices as well.
        progress: called for each tensor; None reports nothing.

    Returns:
        The model, which has its own `generate` and works with `quantkit.generate_batch`, and its
        tokenizer.

    Raises:
        QuantkitError: of the kind that says what is wrong.
    """
    require_flags(multi_host=multi_host)
    path = as_path("path", path)
    progress = skip_repeated_reports(progress)
    if devices is not None:
        devices = as_integer("devices", devices)
    # Before the import, which would fail without JAX and not say how to install it.
    require_packages()
    from quantkit.xla.engine import load_on_devices

    checkpoint = open_runnable_checkpoint(path, weights, float_name(dtype))
    tokenizer, _ = load_checked_tokenizer(checkpoint)
    model = load_on_devices(
        checkpoint,
        devices=devices,
        dtype=to_torch_dtype(dtype),
        multi_host=multi_host,
        progress=progress,
    )
    return model, tokenizer or load_tokenizer(path)


def load_by_transformers(
    path: str | Path,
    *,
    weights: WeightKind | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> tuple[TransformersModel, Tokenizer]:
    """Open a checkpoint as `load` does, for a model that transformers runs, whether there is a
    decoder here or not.

    Args:
        path, weights: as for `load`.
        trust_remote_code: run the code in the folder that config.json's ``auto_map`` names.
        progress: called for each part of the model; None reports nothing.

    Returns:
        The model, which has its own `generate`, and its tokenizer.

    Raises:
        QuantkitError: of the kind that says what is wrong.
    """
    from quantkit.runtime.by_transformers import TransformersModel

    require_flags(trust_remote_code=trust_remote_code)
    checkpoint = transformers_forward.open_to_run(
        as_path("path", path), weights, "transformers", trust_remote_code=trust_remote_code
    )
    tokenizer = load_checked_tokenizer(checkpoint)[0] or load_tokenizer(checkpoint.path)
    return TransformersModel(checkpoint, progress=skip_repeated_reports(progress)), tokenizer


def open_runnable_checkpoint(
    path: Path, weights: WeightKind | None, floats_as: DType | None
) -> Checkpoint:
    """Open a checkpoint that a decoder here runs, and let its config name all end tokens.

    Args:
        floats_as: see `Container.open`.

    Raises:
        CheckpointError, UnsupportedError: as `open_checkpoint`; or for a damaged
            generation_config.json.
    """
    checkpoint: Checkpoint = open_checkpoint(path, weights, text_part=True, floats_as=floats_as)
    require_runnable(checkpoint)
    # Chat models often name further end tokens, such as that of a turn, only in
    # generation_config.json.
    checkpoint.config = replace(
        checkpoint.config, eos_token_ids=end_tokens(path, checkpoint.config)
    )
    return checkpoint
