"""What configs of families with mixtures of experts say alike."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, ExpertsConfig, ModelConfig
from quantkit.architectures.families.family import layer_count
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, shown

_COUNTS = ("num_experts", "num_local_experts")  # transformers 5 saves some families' under the second name


def read_experts(settings: Settings, size_key: str = "intermediate_size", **features: Any) -> ExpertsConfig:
    """A mixture of experts as most families spell it.

    Args:
        size_key: of the width of one expert.
        features: further fields of `ExpertsConfig`.
    """
    return ExpertsConfig(
        count=_count(settings),
        size=settings.whole(size_key, 1, MAX_WIDTH),
        per_token=settings.whole("num_experts_per_tok", 1, MAX_EXPERTS),
        **features,
    )


def sparse_layers(settings: Settings) -> list[bool]:
    """Whether each layer has experts: every so many, but for those that ``mlp_only_layers`` lists."""
    step_key, dense_key = "decoder_sparse_step", "mlp_only_layers"
    step = settings.whole(step_key, 1, MAX_LAYERS) if settings.has(step_key) else 1
    dense = settings.values[dense_key] if settings.has(dense_key) else []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        settings.wrong_type(dense_key, "a list of layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layer_count(settings))]


def written_sparse_layers(config: ModelConfig) -> dict[str, Any]:
    """The keys that `sparse_layers` reads."""
    dense = [number for number, layer in enumerate(config.layers) if not layer.experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def experts_of(config: ModelConfig) -> ExpertsConfig:
    """The experts of a model that has them."""
    assert config.experts is not None
    return config.experts


def _count(settings: Settings) -> int:
    keys = [key for key in _COUNTS if settings.has(key)] or [settings.need(_COUNTS[0])]
    found = {key: settings.whole(key, 1, MAX_EXPERTS) for key in keys}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{' and '.join(keys)} disagree",
            path=settings.path,
            found=shown(list(found.values())),
            expected="one count",
        )
    return next(iter(found.values()))
