"""The keys of config.json that only some families have, each declared once for reading and
writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.architectures.config import ExpertsConfig, Limits, ModelConfig
from quantkit.architectures.rope import FULL, SLIDING
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError

# Of transformers, if the key is absent; null means none.
DEFAULT_WINDOW = 4096
# Transformers 5 writes some families' under the second name.
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
)
_MAX_MULTIPLIER = 1e6


@dataclass(frozen=True)
class Keys:
    """One or several keys of config.json that belong together.

    Attributes:
        read: the arguments of `read_config` that they determine.
        write: the keys, from a config.
    """

    read: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


def flag(key: str, *fields: str, default: bool = False) -> Keys:
    """Declare a boolean that determines some fields of `ModelConfig`, which are equal."""
    return Keys(
        lambda settings: dict.fromkeys(fields, settings.flag(key, default)),
        lambda config: {key: getattr(config, fields[-1])},
    )


def number(
    key: str,
    field: str,
    low: float,
    high: float,
    default: float | None,
    *,
    null: float | None,
    inverse: bool = False,
) -> Keys:
    """Declare a number that determines a field of `ModelConfig`.

    Args:
        default: if the key is absent.
        null: if its value is null.
        inverse: whether the field is the inverse of the key's number.
    """

    def read(settings: Settings) -> dict[str, Any]:
        if key in settings.values:
            value = null
        else:
            value = default
        if settings.has(key):
            value = settings.number(key, low, high)
        if inverse and value:
            value = 1 / value
        return {field: value}

    def write(config: ModelConfig) -> dict[str, Any]:
        value = getattr(config, field)
        if inverse:
            value = 1 / value
        return {key: value}

    return Keys(read, write)


PARTIAL_ROTARY = Keys(
    write=lambda config: {
        "partial_rotary_factor": (config.rope.rotary_dim or config.head_dim) / config.head_dim
    }
)
"""The rotated part of a head, written also if it is all of it."""
ATTENTION_BIAS = flag("attention_bias", "qkv_bias", "output_bias")
MLP_BIAS = flag("mlp_bias", "mlp_bias")


def experts(
    count_key: str = "num_experts",
    size_key: str | None = None,
    shared_key: str | None = None,
    norm_key: str | None = None,
    normalized: bool = False,
    **features: Any,
) -> Keys:
    """Declare the keys of a mixture of experts.

    Args:
        count_key: the key to write for the number of experts.
        size_key: of the width of an expert; None for ``intermediate_size``.
        shared_key: of the width of all shared experts, if there are any.
        norm_key: of `ExpertsConfig.normalized`, if it is not always true.
        normalized: transformers' default, if that key is absent.
        features: further fields of `ExpertsConfig`.
    """

    def read(settings: Settings) -> dict[str, Any]:
        count_keys = [key for key in _EXPERT_COUNTS if settings.has(key)]
        if not count_keys:
            settings.need(_EXPERT_COUNTS[0])
        # A file may have both names: readers use different ones, so the numbers must agree.
        counts = [settings.integer(key, 1, Limits.experts) for key in count_keys]
        if len(set(counts)) > 1:
            problem = f"{' and '.join(count_keys)} disagree"
            raise CheckpointError(
                problem, path=settings.path, found=format_value(counts), expected="one count"
            )
        size = settings.integer(size_key or "intermediate_size", 1, Limits.width)
        per_token = settings.integer("num_experts_per_tok", 1, Limits.experts)
        shared_size = 0
        if shared_key:
            shared_size = settings.integer(shared_key, 1, Limits.width)
        is_normalized = True
        if norm_key:
            is_normalized = settings.flag(norm_key, normalized)
        experts_config = ExpertsConfig(
            count=counts[0],
            size=size,
            per_token=per_token,
            shared_size=shared_size,
            normalized=is_normalized,
            **features,
        )
        return {"experts": experts_config}

    def write(config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        values: dict[str, Any] = {
            count_key: config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
        }
        if size_key is not None:
            values[size_key] = config.experts.size
        if shared_key is not None:
            values[shared_key] = config.experts.shared_size
        if norm_key is not None:
            values[norm_key] = config.experts.normalized
        return values

    return Keys(read, write)


def _read_sparse(settings: Settings) -> dict[str, Any]:
    """Read which layers have experts: every n-th one, except for those in ``mlp_only_layers``."""
    step_key = "decoder_sparse_step"
    dense_key = "mlp_only_layers"
    if settings.has(step_key):
        step = settings.integer(step_key, 1, Limits.layers)
    else:
        step = 1
    if settings.has(dense_key):
        dense = settings.values[dense_key]
    else:
        dense = []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        settings.wrong_type(dense_key, "a list of layers")
    sparse = []
    for layer in range(layer_count(settings)):
        sparse.append(layer not in dense and (layer + 1) % step == 0)
    return {"sparse": sparse}


def _write_sparse(config: ModelConfig) -> dict[str, Any]:
    """Write a list of the layers without experts, which expresses any step as well."""
    dense = [number for number, layer in enumerate(config.layers) if not layer.experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


SPARSE_LAYERS = Keys(_read_sparse, _write_sparse)


def one_window(default: int | None) -> Keys:
    """Declare a window that all layers have, if there is one; `default` if the key is absent."""
    return Keys(
        lambda settings: {"windows": [sliding_window(settings, default)] * layer_count(settings)},
        lambda config: {"sliding_window": only_window(config)},
    )


def windows_by_kind(interval: int, key: str | None = None, default: int = DEFAULT_WINDOW) -> Keys:
    """Declare windows in the layers that ``layer_types`` lists; without it, in all but every
    `interval`-th layer.

    `key` states another interval. `default` is the width if its key is absent, and is written if no
    layer has a window.
    """

    def read(settings: Settings) -> dict[str, Any]:
        count = layer_count(settings)
        if key is not None and settings.has(key):
            step = settings.integer(key, 1, Limits.layers)
        else:
            step = interval
        types = layer_types(settings, count)
        windowed = [kind == SLIDING for kind in types]
        if not types:
            windowed = [(layer + 1) % step != 0 for layer in range(count)]
        window = sliding_window(settings, default)
        return {"windows": windows_of(settings, windowed, window)}

    def write(config: ModelConfig) -> dict[str, Any]:
        return {
            "sliding_window": only_window(config) or default,
            "layer_types": write_layer_types(config),
        }

    return Keys(read, write)


def make_switched_window_keys(
    read: Callable[[Settings], Sequence[int | None]],
    write_extra_keys: Callable[[ModelConfig], dict[str, Any]],
) -> Keys:
    """Declare windows that ``use_sliding_window`` enables: `read` returns that of each layer,
    `write_extra_keys` further keys to write.
    """

    def write(config: ModelConfig) -> dict[str, Any]:
        window = only_window(config)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            **write_extra_keys(config),
        }

    return Keys(lambda settings: {"windows": read(settings)}, write)


def windows_of(
    settings: Settings, windowed: Sequence[bool], window: int | None
) -> list[int | None]:
    """Give some layers a window; raises `CheckpointError` if some layers have one, and `window` is
    None.
    """
    if window is None and any(windowed):
        raise CheckpointError(
            "some layers use a sliding window, but sliding_window is not set", path=settings.path
        )
    windows: list[int | None] = []
    for has_window in windowed:
        windows.append(window if has_window else None)
    return windows


def optional_number(settings: Settings, key: str) -> float | None:
    """Read a multiplier or soft cap; absent, null and 0 are None."""
    if settings.has(key):
        return settings.number(key, 0, _MAX_MULTIPLIER) or None
    return None


def layer_count(settings: Settings) -> int:
    """Read the number of layers."""
    return settings.integer("num_hidden_layers", 1, Limits.layers)


def layer_types(settings: Settings, layers: int) -> list[str]:
    """Read the kind of attention of each layer; empty if the file does not state it. Raises
    `CheckpointError` if the kinds are unknown, or their number is wrong.
    """
    key = "layer_types"
    if not settings.has(key):
        return []
    types = settings.strings(key)
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(types),
            expected=f"{FULL} or {SLIDING} for each of {layers}",
        )
    return types


def write_layer_types(config: ModelConfig) -> list[str]:
    """Write the value of the key ``layer_types``."""
    types: list[str] = []
    for window in config.windows:
        types.append(FULL if window is None else SLIDING)
    return types


def sliding_window(settings: Settings, default: int | None = DEFAULT_WINDOW) -> int | None:
    """Read the window of a config's sliding layers; None if there is none."""
    if "sliding_window" not in settings.values:
        return default
    if settings.has("sliding_window"):
        return settings.integer("sliding_window", 1, Limits.context)
    return None


def only_window(config: ModelConfig) -> int | None:
    """Find the window of the layers that have one; a family has only one."""
    for window in config.windows:
        if window is not None:
            return window
    return None


def _write_layer_ropes(config: ModelConfig) -> dict[str, Any]:
    """Write ``rope_parameters`` of both kinds of layers, which transformers expects even if a model
    has only one kind.
    """
    parameters = {}
    for kind, rope in ((FULL, config.rope), (SLIDING, config.window_rope or config.rope)):
        parameters[kind] = rope.to_hf(config.head_dim)["rope_parameters"]
    return {"rope_parameters": parameters}


LAYER_ROPES = Keys(write=_write_layer_ropes)
