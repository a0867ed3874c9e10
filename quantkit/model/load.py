"""Fill the decoder, built on the meta device, from a checkpoint; strictly."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.distributed.shard import require_shareable
from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.memory import give_back
from quantkit.model.decoder import Decoder
from quantkit.model.device import usable_device
from quantkit.model.fused_projections import Place, place
from quantkit.model.install_kernels import install_kernels
from quantkit.model.meta_init import meta_init
from quantkit.model.qlinear import QuantLinear
from quantkit.model.tensor_parallel import TensorParallel
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_AT_ONCE = 1 << 25  # bytes
BLOCK_PREFIX = "model.layers.{}."


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    group: ProcessGroup = SINGLE,
) -> Decoder:
    """A decoder ready to run, in eval mode.

    Args:
        source: a checkpoint or its folder.
        device: where it runs.
        dtype: of activations and float weights; None is the checkpoint's own.
        backend: the kernel backend by name; None chooses.
        group: the processes that share the model; each calls this, and then the model, alike.

    Raises:
        CheckpointError, UnsupportedError, RequestError: as opening, `usable_device` and dispatch do.
        GroupError, RequestError: as `require_shareable` does.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, (str, Path)) else source
    device = usable_device(device)
    dtype = dtype or FLOAT_DTYPES[checkpoint.config.dtype]
    require_shareable(checkpoint, group)
    tp = TensorParallel(checkpoint, group)
    with meta_init():
        model = Decoder(tp.checkpoint.config)
    model.group = group
    fill(model, tp.checkpoint, "", device, dtype, backend)
    model.rotary.to(device)
    tp.connect(model, "")
    install_kernels(model)  # they are tried on the process's own embedding and head
    tp.connect_vocabulary(model)
    return model.eval()


def fill(
    module: nn.Module, checkpoint: Checkpoint, prefix: str, device: torch.device, dtype: torch.dtype,
    backend: str | None,
) -> None:  # fmt: skip
    """Give every parameter below `module` the checkpoint's tensor of its name under `prefix`."""
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    parameters = {prefix + name for name, _ in module.named_parameters()}
    if parameters != set(names):
        raise RuntimeError(f"the decoder and the checkpoint differ in {sorted(parameters ^ set(names))[:3]}")
    done: set[str] = set()
    for name in names:
        owner, _, leaf = name[len(prefix) :].rpartition(".")
        if owner in done:
            continue
        info = checkpoint.info(name)
        if info.scheme is None:
            setattr(module.get_submodule(owner), leaf, _loaded(checkpoint, name, info, device, dtype))
        else:
            value = checkpoint.load(name)
            assert isinstance(value, QuantTensor)
            placed = place(checkpoint, prefix, owner, value)
            _set_quantized(module, placed, QuantLinear(placed.weight, placed.bias, device, dtype, backend))
            done.update(placed.owners)
            del value, placed
            give_back()


def _set_quantized(module: nn.Module, placed: Place, linear: QuantLinear) -> None:
    """Put a quantized linear in the place of float ones."""
    for name in placed.owners:
        parent, _, child = name.rpartition(".")
        delattr(module.get_submodule(parent), child)
    parent, _, child = placed.module.rpartition(".")
    setattr(module.get_submodule(parent), child, linear)


def _loaded(
    checkpoint: Checkpoint, name: str, info: TensorSpec, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:  # fmt: skip
    """A float tensor on its device in its dtype; where a large one must be copied, some heads' rows at a time."""
    if info.dtype == dtype and device.type == "cpu":
        return nn.Parameter(_floats(checkpoint.load(name)), requires_grad=False)
    copy = torch.empty(info.shape, device=device, dtype=dtype)
    head = checkpoint.config.head_dim
    step = max(head, _AT_ONCE // max(1, copy[:1].nbytes) // head * head)
    for start in range(0, info.shape[0], step):
        ranges = ((start, min(start + step, info.shape[0])),)
        copy[start : start + step] = _floats(
            checkpoint.load(name, TensorSlice(0, ranges) if step < info.shape[0] else None)
        )
    return nn.Parameter(copy, requires_grad=False)


def _floats(value: Tensor | QuantTensor) -> Tensor:
    assert isinstance(value, Tensor)
    return value
