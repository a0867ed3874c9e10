"""Build the decoder on the meta device and fill it from a checkpoint. Each parameter must have its
tensor and each tensor its parameter.

Linears with the same inputs are fused: one product of many rows is faster than several of few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantkit.architectures.topology import group_fused_linears
from quantkit.base.late import LateModule
from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels.backend import REFERENCE, Backend
from quantkit.model.decoder import Block, Decoder
from quantkit.model.device import free_bytes, resolve_device
from quantkit.model.linear import (
    QuantEmbedding,
    QuantLinear,
    StackedWeights,
    StoredWeight,
    join_linears,
    stack_weights,
)
from quantkit.model.mixers.attention import Attention
from quantkit.model.run_memory import (
    RunMemory,
    count_cache_bytes_per_token,
    count_state_bytes,
    count_weight_bytes,
)
from quantkit.tensors.dtypes import DType
from quantkit.tensors.huge_pages import WeightMemory
from quantkit.tensors.qtensor import QuantTensor, concatenate_if_uniform
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

# Calibration reads weights with this module, and runs no kernels of quantized linears.
if TYPE_CHECKING:
    from quantkit.distributed import shard
    from quantkit.formats import kv_scales
    from quantkit.kernels import dispatch
    from quantkit.model import cache_rounding, install_kernels, stored_codes, tensor_parallel
else:
    cache_rounding = LateModule("quantkit.model.cache_rounding")
    shard = LateModule("quantkit.distributed.shard")
    kv_scales = LateModule("quantkit.formats.kv_scales")
    tensor_parallel = LateModule("quantkit.model.tensor_parallel")
    dispatch = LateModule("quantkit.kernels.dispatch")
    install_kernels = LateModule("quantkit.model.install_kernels")
    stored_codes = LateModule("quantkit.model.stored_codes")

_log = logging.getLogger(__name__)

# Bytes of a float tensor that are converted at a time: a large tensor is never in memory twice.
COPY_BYTES = 1 << 24
BLOCK_PREFIX = "model.layers.{}."


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    allow_slow: bool = False,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> Decoder:
    """Load a decoder ready to run, in eval mode.

    Args:
        source: a checkpoint or its folder.
        device: where it runs; None is the group's or, alone, a GPU if there is one.
        dtype: of activations and float weights; None is the checkpoint's own.
        backend, allow_slow: the kernel backends that may be used, see `list_allowed_backends`.
        group: the processes that share the model; each makes the same call, here and of the model.
        progress: called for each tensor.

    Raises:
        CheckpointError, UnsupportedError, RequestError: as opening, `resolve_device` and
            `require_kernels` do.
        RequestError: if the weights do not fit in the free memory.
        GroupError, RequestError: as `require_shareable` does.
    """
    if isinstance(source, (str, Path)):
        floats_as = None if dtype is None else DType.of(dtype)
        source = open_checkpoint(source, text_part=True, floats_as=floats_as)
    setup = _set_up(source, device, dtype, backend, allow_slow=allow_slow, group=group)
    tp = setup.tp
    device = setup.device
    dtype = setup.dtype
    allowed = setup.allowed
    require_kernels(tp.checkpoint, device, dtype, allowed)
    setup.measure(None).require_fit(free_bytes(device), source.path)
    with meta_init():
        model = Decoder(tp.checkpoint.config)
    # Reading a header and a tokenizer leaves the allocator with free memory: 220 MB for the 262,144
    # tokens of Gemma. Weights have memory of their own, and would be in addition to it.
    malloc_trim()
    model.group = group
    # On a CPU, the kernels multiply several weights in one call, and read them as they are stored.
    # torch's larger product is a little slower in float32.
    fuse_floats = device.type != "cpu" or (
        dtype != torch.float32 and dispatch.offer_kernels_for_floats(device, dtype, allowed) is None
    )
    fill_parameters(
        model,
        tp.checkpoint,
        "",
        device,
        dtype,
        allowed,
        progress,
        fuse_floats=fuse_floats,
        fuse_experts=True,
        memory=WeightMemory() if device.type == "cpu" else None,
    )
    model.rotary.to(device)
    tp.connect(model, "")
    scales = kv_scales.layer_scales(source)
    if scales is None and source.kv_cache is not None:
        _log.warning("%s: %s", source.path, source.kv_cache.note(run_here=True))
    for layer, scale in enumerate(scales or ()):
        block = model.model.layers[layer]
        assert isinstance(block, Block)
        # Another layer's keys and values are rounded already.
        if isinstance(block.mixer, Attention) and block.mixer.source is None:
            block.mixer.as_cached = cache_rounding.Fp8Rounding(scale, device)
    # Before the vocabulary is connected, because self-tests run on the process's own embedding and
    # head.
    install_kernels.install_kernels(model, allowed)
    # The self-tests leave free memory too.
    malloc_trim()
    tp.connect_vocabulary(model)
    return model.eval()


@dataclass(frozen=True)
class _SetUp:
    """How a checkpoint will be run.

    Attributes:
        tp: the part of this process, with its checkpoint, which is read as it is run.
        device: where it runs.
        dtype: of activations and float weights.
        allowed: the kernel backends that may be used.
    """

    tp: tensor_parallel.TensorParallel
    device: torch.device
    dtype: torch.dtype
    allowed: Sequence[Backend]

    def measure(self, cache_dtype: torch.dtype | None) -> RunMemory:
        """State what this process takes, with a cache in a dtype; None is that of activations."""
        checkpoint = self.tp.checkpoint

        def count_codes(spec: TensorSpec) -> int:
            assert spec.scheme is not None
            scale_dtype = spec.dtype.torch
            try:
                backend = dispatch.select_backend(
                    spec.scheme, self.device, self.dtype, scale_dtype, self.allowed
                )
            except RequestError:
                # `require_kernels` reports it, unless it is an embedding, which needs none.
                backend = REFERENCE
            return backend.count_bytes(spec)

        return RunMemory(
            count_weight_bytes(
                map(checkpoint.info, checkpoint.names()), DType.of(self.dtype), count_codes
            ),
            count_cache_bytes_per_token(checkpoint.config, DType.of(cache_dtype or self.dtype)),
            count_state_bytes(checkpoint.config),
        )


def _set_up(
    checkpoint: Checkpoint,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    backend: str | None,
    *,
    allow_slow: bool,
    group: ProcessGroup,
) -> _SetUp:
    """Resolve the arguments of `load_model`, before any weight is read."""
    allowed = dispatch.list_allowed_backends(backend, allow_slow=allow_slow)
    device = resolve_device(group.device if device is None else device)
    dtype = dtype or choose_default_dtype(checkpoint)
    shard.require_shareable(checkpoint, group)
    # Processes that share a model cut rows within blocks, as only floats can be.
    if group.size == 1:
        # The reference does not count, because it is slower than products of floats.
        kernels = [backend for backend in allowed if backend is not REFERENCE]

        def runs(spec: TensorSpec) -> bool:
            assert spec.scheme is not None
            try:
                # Its self-tests run once for each scheme.
                dispatch.select_backend(spec.scheme, device, dtype, spec.dtype.torch, kernels)
            except RequestError:
                return False
            return True

        checkpoint = stored_codes.keep_runnable_codes(checkpoint, runs)
    tp = tensor_parallel.TensorParallel(checkpoint, group)
    return _SetUp(tp=tp, device=device, dtype=dtype, allowed=allowed)


def measure_run_memory(
    checkpoint: Checkpoint,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    allow_slow: bool = False,
    group: ProcessGroup = SINGLE,
    cache_dtype: torch.dtype | None = None,
) -> RunMemory:
    """State what a model will take to run, of this process's part; no weight is read.

    Args:
        checkpoint, device, dtype, backend, allow_slow, group: as for `load_model`.
        cache_dtype: of keys and values; None is that of activations.

    Raises:
        RequestError, GroupError: for a device or a backend that there is not, and for processes
            that cannot share the model.
    """
    setup = _set_up(checkpoint, device, dtype, backend, allow_slow=allow_slow, group=group)
    return setup.measure(cache_dtype)


def choose_default_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Choose the dtype that a model runs in by default: the checkpoint's."""
    return DType(checkpoint.config.dtype).torch


def require_kernels(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, allowed: Sequence[Backend]
) -> None:
    """Raise a `RequestError` with the checkpoint's path if none of the allowed backends supports
    one of its quantized linears; before any weight is read.
    """
    # An embedding needs no kernel, unless it is also the head.
    lookup_only = None if checkpoint.config.tied_embeddings else "model.embed_tokens.weight"
    # A dict keeps the order, so that the error is always about the same tensor.
    cases: dict[tuple[QuantScheme, torch.dtype], None] = {}
    for name in checkpoint.names():
        if name == lookup_only:
            continue
        spec = checkpoint.info(name)
        if spec.scheme is not None:
            cases[spec.scheme, spec.dtype.torch] = None
    try:
        for scheme, scale_dtype in cases:
            dispatch.select_backend(scheme, device, dtype, scale_dtype, allowed)
    except RequestError as error:
        raise RequestError(
            error.problem,
            path=checkpoint.path,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        ) from error


@contextmanager
def meta_init() -> Iterator[None]:
    """Make the parameters of modules on the meta device within the context: they use no memory and
    are filled later.
    """
    with torch.device("meta"), _Uninitialised():
        yield


def fill_parameters(
    module: nn.Module,
    checkpoint: Checkpoint,
    prefix: str,
    device: torch.device,
    dtype: torch.dtype,
    allowed: Sequence[Backend],
    progress: Progress = silent,
    *,
    fuse_floats: bool = False,
    fuse_experts: bool = False,
    memory: WeightMemory | None = None,
) -> None:
    """Fill every parameter of `module` with the checkpoint's tensor of its name after `prefix`.
    Quantized linears with the same inputs are fused, and float linears as well with `fuse_floats`
    or, in mixtures of experts, with `fuse_experts`. Float weights on a CPU are placed in `memory`;
    without it, they may be the checkpoint's own.
    """
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    parameters = {prefix + name for name, _ in module.named_parameters()}
    if parameters != set(names):
        raise RuntimeError(
            f"the decoder and the checkpoint differ in {sorted(parameters ^ set(names))[:3]}"
        )
    # For the first linear of each group that may be fused: the name of the fused linear, and the
    # names of the group.
    groups: dict[str, tuple[str, list[str]]] = {}
    for layer in range(checkpoint.config.num_layers):
        block = BLOCK_PREFIX.format(layer)
        for fused, modules in group_fused_linears(checkpoint.config, layer).items():
            sources = [block + module_name for module_name in modules]
            groups[sources[0]] = block + fused, sources
    done: set[str] = set()
    info = checkpoint.info
    for index, name in enumerate(names):
        progress("load", index, len(names), "tensors")
        owner = name.rpartition(".")[0]
        if owner in done:
            continue
        parent, _, leaf = name.removeprefix(prefix).rpartition(".")
        fused, sources = groups.get(owner, (owner, [owner]))
        is_routed = fuse_experts and ".experts." in owner
        is_shared = fuse_experts and ".shared_experts." in owner
        # `stack_experts` copies these: in the memory of others, their pages would not be freed.
        placed_in = None if is_routed else memory
        if info(name).scheme is not None:
            value = _load_quantized(checkpoint, name, device)
            if isinstance(module.get_submodule(parent), nn.Embedding):
                _install_embedding(module, parent, value, device, dtype, allowed)
            else:
                linear, fused, sources = _fuse_quantized(
                    checkpoint,
                    value,
                    sources,
                    fused,
                    parameters=parameters,
                    device=device,
                    dtype=dtype,
                    allowed=allowed,
                )
                _replace(module, prefix, sources, fused, linear)
                done.update(sources)
                del linear
            # The backend has its own copy in its layout. Return this one to the system before the
            # next weight is loaded.
            del value
            malloc_trim()
        elif (
            (fuse_floats or is_routed or is_shared)
            and fused != owner
            and _are_floats(checkpoint, sources)
        ):
            # The first linear of the group takes the rows of the others.
            fused_linear = module.get_submodule(sources[0].removeprefix(prefix))
            for parameter_name, _ in list(fused_linear.named_parameters()):
                tensor_names = [f"{source}.{parameter_name}" for source in sources]
                stacked = _stack_float_rows(checkpoint, tensor_names, device, dtype, placed_in)
                setattr(fused_linear, parameter_name, stacked)
            assert isinstance(fused_linear, nn.Linear)
            fused_linear.out_features = len(fused_linear.weight)
            _replace(module, prefix, sources, fused, fused_linear)
            done.update(sources)
        else:
            parameter = float_parameter(checkpoint, name, device, dtype, placed_in)
            setattr(module.get_submodule(parent), leaf, parameter)
            if placed_in is not None and parameter.dim() == 2:
                # Of what was read in parts, the allocator would keep some in its heap.
                malloc_trim()


def _load_quantized(
    checkpoint: Checkpoint, name: str, device: torch.device
) -> QuantTensor | StoredWeight:
    """Load a quantized weight; on a CPU, so that its rows are read later, in chunks."""
    spec = checkpoint.info(name)
    rows, columns = spec.shape
    assert spec.scheme is not None

    def load_rows(part: TensorSlice | None) -> QuantTensor:
        value = checkpoint.load(name, part)
        assert isinstance(value, QuantTensor)
        return value

    # A GPU's backends would have to concatenate the chunks in its memory.
    if device.type != "cpu":
        return load_rows(None)
    return StoredWeight(
        shape=(rows, columns),
        scheme=spec.scheme,
        scale_dtype=spec.dtype.torch,
        load=load_rows,
        # See `_stack_float_rows`.
        unit=checkpoint.config.head_dim,
    )


def _are_floats(checkpoint: Checkpoint, modules: Sequence[str]) -> bool:
    """Return whether the weights of all these linears are floats."""
    return all(checkpoint.info(f"{module}.weight").scheme is None for module in modules)


def _install_embedding(
    model: nn.Module,
    name: str,
    weight: QuantTensor | StoredWeight,
    device: torch.device,
    dtype: torch.dtype,
    allowed: Sequence[Backend],
) -> None:
    """Install a quantized embedding, and the head if it is tied to the embedding."""
    head = None
    if isinstance(model, Decoder) and model.lm_head is None:
        head = model.lm_head = QuantLinear(weight, None, device, dtype, allowed)
    elif weight.scheme.bits < 8 or weight.scheme.scales is not Scales.FLOATS:
        # Packed like a head, although it is none: unpacked, codes of few bits take a byte each.
        # Without kernels for the scheme they do, since a table of rows needs none.
        with suppress(RequestError):
            head = QuantLinear(weight, None, device, dtype, allowed)
    model.set_submodule(name, QuantEmbedding(weight, device, dtype, head))


def _fuse_quantized(
    checkpoint: Checkpoint,
    first: QuantTensor | StoredWeight,
    modules: list[str],
    fused: str,
    *,
    parameters: Collection[str],
    device: torch.device,
    dtype: torch.dtype,
    allowed: Sequence[Backend],
) -> tuple[QuantLinear, str, list[str]]:
    """Fuse several linears, of which the first is already loaded, to one, if all are quantized and
    a backend multiplies them together. Returns the linear, its name and the linears that it
    replaces: the first one alone if they cannot be fused.
    """

    def load_biases(modules: Sequence[str]) -> Tensor | None:
        biases: list[Tensor] = []
        for module in modules:
            if f"{module}.bias" in parameters:
                biases.append(narrow_to_floats(checkpoint.load(f"{module}.bias")))
        return torch.cat(biases) if biases else None

    owner = modules[0]
    weights: list[QuantTensor | StoredWeight] = [first]
    for module in modules[1:]:
        if checkpoint.info(f"{module}.weight").scheme is None:
            break
        weights.append(_load_quantized(checkpoint, f"{module}.weight", device))
    if len(weights) == len(modules):
        stacked = _stack_quantized(weights)
        if stacked is not None:
            linear = QuantLinear(stacked, load_biases(modules), device, dtype, allowed)
            return linear, fused, modules
        parts = [QuantLinear(weight, None, device, dtype, allowed) for weight in weights]
        bias = load_biases(modules)
        if bias is not None:
            bias = bias.to(device, dtype)
        joined = join_linears(parts, bias)
        if joined is not None:
            return joined, fused, modules
    return QuantLinear(first, load_biases([owner]), device, dtype, allowed), owner, [owner]


def _stack_quantized(
    weights: Sequence[QuantTensor | StoredWeight],
) -> QuantTensor | StackedWeights | None:
    """Stack the rows of weights, which are all stored or all read; None where they differ in scheme
    or dtype of the scales. Stored ones are not read yet, if they can be packed in chunks.
    """
    stored: list[StoredWeight] = []
    read: list[QuantTensor] = []
    for weight in weights:
        if isinstance(weight, StoredWeight):
            stored.append(weight)
        else:
            read.append(weight)
    if stored:
        stacked = stack_weights(stored)
        if stacked is not None:
            return stacked
        read = [weight.load(None) for weight in stored]
    return concatenate_if_uniform(read)


def _replace(
    module: nn.Module, prefix: str, sources: Sequence[str], name: str, linear: nn.Module
) -> None:
    """Replace linears by the one that has their rows; all are in the same submodule."""
    parent = module.get_submodule(name.removeprefix(prefix).rpartition(".")[0])
    for source in sources:
        delattr(parent, source.rpartition(".")[2])
    setattr(parent, name.rpartition(".")[2], linear)


def float_parameter(
    checkpoint: Checkpoint,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    memory: WeightMemory | None = None,
) -> nn.Parameter:
    """Load a float tensor to a device in a dtype. If it must be converted or moved, also to
    `memory`, it is copied in chunks of complete heads' rows.
    """
    info = checkpoint.info(name)
    if memory is not None and len(info.shape) == 2:
        return _stack_float_rows(checkpoint, [name], device, dtype, memory)
    # The loaded tensor is already the parameter: no copy.
    if info.dtype.torch == dtype and device.type == "cpu":
        return nn.Parameter(narrow_to_floats(checkpoint.load(name)), requires_grad=False)
    return _stack_float_rows(checkpoint, [name], device, dtype)


def _stack_float_rows(
    checkpoint: Checkpoint,
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    memory: WeightMemory | None = None,
) -> nn.Parameter:
    """Concatenate the rows of float tensors, copying them in chunks of complete heads' rows."""
    shapes = [checkpoint.info(name).shape for name in names]
    rows = [shape[0] for shape in shapes]
    shape = sum(rows), *shapes[0][1:]
    if memory is None:
        stacked = torch.empty(shape, device=device, dtype=dtype)
    else:
        stacked = memory.empty(shape, dtype)
    # Checkpoints with interleaved rotary rows reorder them within heads (Meta's, GGUF), so a slice
    # must contain complete heads.
    head_dim = checkpoint.config.head_dim
    step = max(head_dim, COPY_BYTES // max(1, stacked[:1].nbytes) // head_dim * head_dim)
    for name, target in zip(names, torch.split(stacked, rows), strict=True):
        for start in range(0, len(target), step):
            if step < len(target):
                part = TensorSlice(0, ((start, min(start + step, len(target))),))
            else:
                part = None
            target[start : start + step] = narrow_to_floats(checkpoint.load(name, part))
    return nn.Parameter(stacked, requires_grad=False)


def narrow_to_floats(value: Tensor | QuantTensor) -> Tensor:
    """Narrow the type of a tensor that the checkpoint stores as floats."""
    assert isinstance(value, Tensor)
    return value


class _Uninitialised(TorchFunctionMode):
    """Skips initialisation, which has no effect on the meta device, but makes torch load its
    compiler (70 MB).
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if getattr(function, "__module__", None) == "torch.nn.init":
            if "tensor" in options:
                return options["tensor"]
            return args[0]
        return function(*args, **options)
