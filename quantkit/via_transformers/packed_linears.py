"""Find out whether transformers takes the same linears of a GPTQ or AWQ folder for quantized as the
folder does, without the packages that multiply by them.

Sources: transformers' `AwqQuantizer`, `replace_with_awq_linear` and `replace_quantization_scales`;
optimum's `GPTQQuantizer.convert_model`, `get_layers` and `get_block_name_with_pattern`, which
transformers' `GptqHfQuantizer` calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from quantkit.base.json_values import collect_values
from quantkit.via_transformers.linears import targets

CODES = ".qweight"
"""How the names of codes end, after the module's."""
# Where optimum looks for blocks; the first that some module's name begins with counts.
_BLOCKS = (
    "transformer.h",
    "model.decoder.layers",
    "gpt_neox.layers",
    "model.layers",
    "model.language_model.layers",
    "h",
    "decoder.layers",
    "layers",
)
_TEXT_INPUTS = "input_ids"


def find_packed_linear_problem(
    model: Any, names: Collection[str], settings: Mapping[str, Any]
) -> str | None:
    """Explain which quantized weight transformers does not load, or which float weight it takes for
    a quantized one; None if there is none.

    Args:
        model: of transformers, without weights.
        names: of the tensors in the folder.
        settings: of its quantization.
    """
    from transformers.integrations.awq import AWQ_SCALES_MAPPINGS

    is_gptq = settings["quant_method"] == "gptq"
    # transformers raises an error for other models.
    if is_gptq and type(model).main_input_name != _TEXT_INPUTS:
        return f"it loads GPTQ only of models of text, not of {type(model).__name__}"
    if not is_gptq and model.config.model_type in AWQ_SCALES_MAPPINGS:
        return (
            "its AWQ models of this architecture have scales of activations, which are not stored"
        )
    if is_gptq:
        replaced = _list_gptq_linears(model, settings)
    else:
        replaced = _list_awq_linears(model, settings)
    modules = [name.removesuffix(CODES) for name in names if name.endswith(CODES)]
    parameters = targets(model, [f"{module}.weight" for module in modules])
    coded: set[str] = set()
    for module in modules:
        parameter, pattern = parameters.get(f"{module}.weight", ("", None))
        if pattern is not None:
            return f"it merges the weight of '{module}' with others, which codes do not support"
        linear = parameter.rpartition(".")[0]
        if linear not in replaced:
            return f"it has no quantized linear for '{module}'"
        coded.add(linear)
    unquantized = replaced - coded
    if unquantized:
        return f"it takes '{min(unquantized)}' for quantized"
    return None


def _list_gptq_linears(model: nn.Module, settings: Mapping[str, Any]) -> set[str]:
    """List the modules that optimum replaces by quantized linears."""
    names = [name for name, _ in model.named_modules()]
    block = None
    for candidate in _BLOCKS:
        if block is None and any(name.startswith(candidate) for name in names):
            block = candidate
    listed: list[str] = []
    for value in collect_values(settings.get("modules_in_block_to_quantize")):
        if isinstance(value, str):
            listed.append(value)
    replaced: set[str] = set()
    for name, module in model.named_modules():
        # Classes derived from a linear stay as they are.
        if block is None or type(module) is not nn.Linear or not name.startswith(block):
            continue
        if not listed or name.endswith(tuple(listed)):
            replaced.add(name)
    return replaced


def _list_awq_linears(model: Any, settings: Mapping[str, Any]) -> set[str]:
    """List the modules that transformers replaces by quantized linears."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = HfQuantizer.get_modules_to_not_convert(
        model,
        settings.get("modules_to_not_convert"),
        model._keep_in_fp32_modules,
        add_default_skips=True,
    )
    replaced: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and should_convert_module(name, skipped):
            replaced.add(name)
    return replaced
