"""The mixers of decoder layers: what moves information from token to token. To add one, add a
row.
"""

from __future__ import annotations

from quantkit.architectures.config import ModelConfig
from quantkit.base.late import LateTable
from quantkit.model.mixers.mixer import Mixer

MIXERS: LateTable[type[Mixer]] = LateTable(
    {
        "attention": f"{__name__}.attention:Attention",
        "gated_delta": f"{__name__}.gated_delta:GatedDelta",
        "mamba2": f"{__name__}.mamba2:Mamba2",
        "short_conv": f"{__name__}.short_conv:ShortConv",
    }
)
"""By `LayerConfig.mixer`."""


def make_mixer(config: ModelConfig, layer: int) -> Mixer:
    """Make the mixer that a layer's config names."""
    return MIXERS[config.layers[layer].mixer](config, layer)
