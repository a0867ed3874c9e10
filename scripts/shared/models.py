"""Models of random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import quantkit
from quantkit.evals.synthetic import synthetic
from quantkit.formats.container import Output
from quantkit.formats.registry import HF
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme


def make_tinyllama(models: Path, scheme: str, head: str | None) -> Path:
    """Return a quantized folder of TinyLlama's shape, as `quantkit quantize` writes it.

    It and its source are made in `models` if they are not there.

    Args:
        models: the folder of both.
        scheme: of the linears.
        head: the scheme of the head; None for floats.
    """
    source = models / "floats"
    folder = models / (scheme if head is None else f"{scheme}-head-{head}")
    if not source.exists():
        _write_floats(source)
    if not folder.exists():
        overrides = ()
        if head is not None:
            overrides = (quantkit.Override("lm_head", QuantScheme.parse(head)),)
        recipe = quantkit.Recipe(QuantScheme.parse(scheme), overrides)
        quantkit.quantize(
            source, folder, recipe, method="rtn", accept_quality_loss=True, source_check=False
        )
    return folder


def _write_floats(folder: Path) -> None:
    checkpoint = synthetic("tinyllama-1.1b", None)
    names = checkpoint.names()
    tensors = [checkpoint.info(name) for name in names]
    folder.mkdir(parents=True)
    files = HF.side_files(Output(checkpoint, checkpoint.config, tensors, 1 << 40))
    for name, content in files.items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    save_file({name: checkpoint.load(name) for name in names}, folder / "model.safetensors")  # type: ignore[misc]


def make_random_weight(
    scheme: QuantScheme,
    rows: int,
    columns: int,
    device: torch.device,
    *,
    scale: float = 0.01,
    generator: torch.Generator | None = None,
) -> QuantTensor:
    """Return a symmetric weight [rows, columns] of random codes, all scales the same."""
    codes = torch.randint(
        scheme.levels, (rows, columns), dtype=torch.uint8, device=device, generator=generator
    )
    shape = rows, scheme.groups(columns)
    scales = torch.full(shape, scale, dtype=torch.bfloat16, device=device)
    return QuantTensor(codes, scales, None, scheme)
