"""Which linears of a base are transformers' `Conv1D`, whose weights are [inputs, outputs].

PEFT follows the class of a module, and overrides ``fan_in_fan_out`` where it contradicts the class
(`dispatch_default` in `peft/tuners/lora/layer.py`). Folders do not state classes, so they are
listed here.
"""

from __future__ import annotations

from quantkit.formats.checkpoint import Checkpoint

_FAMILIES = frozenset(
    {"clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
)
CONV1D_NAMES = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""The last parts of their names."""


def is_conv1d(module: str, source: Checkpoint) -> bool:
    """Tell whether transformers makes a `Conv1D` of a module."""
    if source.extra_config.get("model_type") not in _FAMILIES:
        return False
    return module.rpartition(".")[2] in CONV1D_NAMES


def has_own_code(source: Checkpoint) -> bool:
    """Tell whether the code of a model may be in its folder, so that the classes of its
    modules are not known.
    """
    # `auto_map` names the classes that transformers loads with `trust_remote_code`.
    return not source.config.runnable and bool(source.extra_config.get("auto_map"))
