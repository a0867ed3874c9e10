"""Which modules carry a state from token to token, by the names of their tensors: linear attention, state spaces and
short convolutions.

What is rounded there adds up in the state: models with 4 bits in it were published that write garbage
(openvinotoolkit/nncf#4217, huggingface/optimum-intel#1722).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

_MARKS = frozenset(
    {
        "A_log", "dt_bias", "in_proj_ba", "in_proj_qkvz",  # Mamba, gated delta nets
        "time_decay", "x_r", "recurrent_param", "rglru",  # RWKV, RG-LRU
        "learnable_ttt_lr_weight", "short_filter",  # TTT, Hyena
        "igate_preact", "fgate_preact",  # xLSTM
        "slope_rate", "output_gate", "g_norm", "g_norm_swish_gate", "gk_proj",  # lightning attention and its like
    }
)  # fmt: skip
"""Tensors and modules that lie in such modules, and in no others."""
_NAMES = frozenset(
    {
        "linear_attn", "linear_attention", "mamba", "mamba2", "ssm", "delta_net", "mlstm_layer", "slstm_layer",
        "retention",
    }
)  # fmt: skip
"""What such modules are called within a layer, where their marks lie in files that are not there."""

_SHORT = 4  # inputs of a convolution over tokens; those over sound have more
_SHORT_FILTERS = frozenset(shape for size in range(1, _SHORT + 1) for shape in ((1, size), (size, 1)))
"""Of one channel each, as torch and MLX lay them out."""


def recurrent_modules(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The names of all modules that carry a state.

    Args:
        shapes: of all tensors of a model, by name, however they lie.
    """
    return frozenset(module for name, shape in shapes.items() for module in _modules(name, shape) if module)


def is_within(module: str, modules: Set[str]) -> bool:
    """Whether a module is one of some, or lies in one."""
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return bool(module)


def _modules(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Those that one tensor tells of."""
    parts = name.split(".")
    for index in range(max(0, len(parts) - 2), len(parts)):  # itself, and the module that it lies in
        if parts[index] in _MARKS:
            yield ".".join(parts[:index])
    for index, part in enumerate(parts):
        if part in _NAMES and any(map(str.isdecimal, parts[:index])):
            yield ".".join(parts[: index + 1])
    short = len(shape) == 3 and shape[1:] in _SHORT_FILTERS and parts[-1] == "weight"
    if short and len(parts) > 2 and "conv" in parts[-2]:
        *layer, own = parts[:-2]
        if any(map(str.isdecimal, layer)) and not own.isdecimal():
            yield ".".join(parts[:-2])
