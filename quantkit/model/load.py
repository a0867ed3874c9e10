"""Fill the decoder, built on the meta device, from a checkpoint; strictly."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.decoder import Decoder
from quantkit.model.device import usable_device
from quantkit.model.qlinear import QuantLinear
from quantkit.model.rope import Rotary
from quantkit.qtensor import QuantTensor

BLOCK_PREFIX = "model.layers.{}."


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Decoder:
    """A decoder ready to run, in eval mode.

    Args:
        source: a checkpoint or its folder.
        device: where it runs.
        dtype: of activations and float weights; None is the checkpoint's own.
        backend: the kernel backend by name; None chooses.

    Raises:
        CheckpointError, UnsupportedError, RequestError: as opening, `usable_device` and dispatch do.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, (str, Path)) else source
    device = usable_device(device)
    dtype = dtype or FLOAT_DTYPES[checkpoint.config.dtype]
    with torch.device("meta"):
        model = Decoder(checkpoint.config)
    fill(model, checkpoint, "", device, dtype, backend)
    model.rotary = Rotary(checkpoint.config).to(device)
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
    for name in names:
        owner_name, _, leaf = name[len(prefix) :].rpartition(".")
        owner = module.get_submodule(owner_name)
        value = checkpoint.load(name)
        if isinstance(value, QuantTensor):
            _set_quantized(module, owner_name, value, checkpoint, name, device, dtype, backend)
        elif not (isinstance(owner, QuantLinear) and leaf == "bias"):
            setattr(owner, leaf, _parameter(value, device, dtype))


def _set_quantized(
    module: nn.Module, owner_name: str, value: QuantTensor, checkpoint: Checkpoint, name: str,
    device: torch.device, dtype: torch.dtype, backend: str | None,
) -> None:  # fmt: skip
    """Put a `QuantLinear`, bias included, in the place of the float linear."""
    bias_name = name.removesuffix("weight") + "bias"
    bias = checkpoint.load(bias_name) if bias_name in checkpoint.names() else None
    assert bias is None or isinstance(bias, Tensor)
    parent_name, _, child = owner_name.rpartition(".")
    setattr(module.get_submodule(parent_name), child, QuantLinear(value, bias, device, dtype, backend))


def _parameter(value: Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An own copy: views of the file would keep it mapped."""
    return nn.Parameter(value.to(device=device, dtype=dtype, copy=True), requires_grad=False)
