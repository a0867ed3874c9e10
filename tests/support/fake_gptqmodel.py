"""Stand-ins for gptqmodel and optimum, which transformers calls to load GPTQ and AWQ folders: its
own loader runs, with linears that multiply by the weights that the words of a folder stand for.

Sources: optimum 2.3's `GPTQQuantizer.convert_model`, `get_layers` and
`get_block_name_with_pattern`; the packings of GPTQ and AWQ, which `gptq_words` writes.
"""

from __future__ import annotations

import importlib.metadata
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.quantizers import quantizer_awq, quantizer_gptq

# Where optimum looks for blocks, in this order.
BLOCKS = (
    "transformer.h",
    "model.decoder.layers",
    "gpt_neox.layers",
    "model.layers",
    "model.language_model.layers",
    "h",
    "decoder.layers",
    "layers",
)
# The output in each field of a word of AWQ, least significant first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def fields_of(words: Tensor, bits: int = 4) -> Tensor:
    """Split words [N, W] into their fields [N, W * 32 / bits], least significant first."""
    shifts = torch.arange(0, 32, bits)
    fields = (words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.flatten(1)


def gptq_floats(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor) -> Tensor:
    """Compute the weight [O, I] of a GPTQ module of version 1 in 4 bits."""
    codes = fields_of(qweight.t())
    zeros = fields_of(qzeros) + 1
    groups = g_idx.long()
    return scales.float()[groups].t() * (codes - zeros[groups].t())


def awq_floats(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Compute the weight [O, I] of an AWQ module in 4 bits."""
    codes, zeros = (_in_order(fields_of(words)) for words in (qweight, qzeros))
    size = len(qweight) // len(scales)
    groups = torch.arange(len(qweight)) // size
    return (scales.float()[groups] * (codes - zeros[groups])).t()


def _in_order(fields: Tensor) -> Tensor:
    ordered = torch.empty_like(fields.view(len(fields), -1, 8))
    ordered[..., list(AWQ_ORDER)] = fields.view(len(fields), -1, 8)
    return ordered.flatten(1)


class PackedLinear(nn.Module):
    """A linear with the tensors of GPTQ or AWQ."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group_size: int,
        bias: bool,
        *,
        is_gptq: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        groups, words = in_features // group_size, out_features // 8
        shapes = {
            "qweight": (in_features // 8, out_features) if is_gptq else (in_features, words),
            "qzeros": (groups, words),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(groups, out_features, dtype=torch.float16))
        if is_gptq:
            self.register_buffer("g_idx", torch.zeros(in_features, dtype=torch.int32))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.is_gptq = is_gptq

    def forward(self, x: Tensor) -> Tensor:
        tensors: list[Any] = [self.qweight, self.qzeros, self.scales]
        if self.is_gptq:
            weight = gptq_floats(*tensors, self.g_idx)  # type: ignore[arg-type]
        else:
            weight = awq_floats(*tensors)
        return nn.functional.linear(x, weight, self.bias)  # type: ignore[arg-type]


class GPTQQuantizer:
    """optimum's, as far as transformers uses it to load a folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> GPTQQuantizer:
        return cls(settings)

    def convert_model(self, model: nn.Module, **_: Any) -> nn.Module:
        names = [name for name, _ in model.named_modules()]
        block = next(one for one in BLOCKS if any(name.startswith(one) for name in names))
        listed = self.settings["modules_in_block_to_quantize"]
        kept = None if listed is None else [name for group in listed for name in group]
        for name, module in list(model.named_modules()):
            if type(module) is not nn.Linear or not name.startswith(block):
                continue
            if kept is None or any(name.endswith(one) for one in kept):
                linear = PackedLinear(
                    module.in_features,
                    module.out_features,
                    self.settings["group_size"],
                    module.bias is not None,
                    is_gptq=True,
                )
                model.set_submodule(name, linear)
        return model

    def post_init_model(self, model: nn.Module) -> nn.Module:
        return model


def install(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find the stand-ins."""
    modules = {
        "gptqmodel": {},
        "gptqmodel.quantization": {"METHOD": SimpleNamespace(AWQ="awq", GPTQ="gptq")},
        "gptqmodel.quantization.awq": {},
        "gptqmodel.quantization.awq.modules": {},
        "gptqmodel.quantization.awq.modules.act": {"ScaledActivation": nn.Module},
        "gptqmodel.utils": {},
        "gptqmodel.utils.importer": {
            "hf_select_quant_linear_v2": lambda **_: partial(PackedLinear, is_gptq=False)
        },
        "gptqmodel.utils.model": {"hf_gptqmodel_post_init": lambda model, **_: model},
        "optimum": {},
        "optimum.gptq": {"GPTQQuantizer": GPTQQuantizer},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        for key, value in values.items():
            setattr(module, key, value)
        patch.setitem(sys.modules, name, module)
    for quantizer in (quantizer_gptq, quantizer_awq):
        patch.setattr(quantizer, "is_gptqmodel_available", lambda: True)
    patch.setattr(quantizer_gptq, "is_optimum_available", lambda: True)
    version = importlib.metadata.version

    def stated_version(name: str) -> str:
        return "99" if name in ("gptqmodel", "optimum") else version(name)

    patch.setattr(importlib.metadata, "version", stated_version)
