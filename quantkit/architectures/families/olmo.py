"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.families.family import EXPERT_KEYS, WINDOWED_BASE, Family, GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS, LAYER_ROPES, Keys, experts, number, windows_by_kind
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import MAX_THETA, MIN_THETA, SLIDING
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

# OLMo 2 (2501.00656): norms after attention and feed-forward, and of queries and keys over all heads.
_OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", (ATTENTION_BIAS,),
    options={"kv_heads_required": False, "norms": "after", "qk_norm": "width"},
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
    },
    gguf=GgufArchitecture(
        "olmo2", keys=(WINDOWED_BASE,), window_period=4, tied=False, full_width=True, one_rotary_base=True
    ),
)  # fmt: skip

# OLMo 3 (2512.13961): OLMo 2 with windows in three of four layers, whose rotary positions are not scaled.
_THETA = 500000.0
_WINDOWS = windows_by_kind(4)


def _read(settings: Settings) -> dict[str, Any]:
    """The windows of layers; raises `UnsupportedError` for a rotary base that some readers use for all layers, and
    transformers for those without a window."""
    found = _WINDOWS.read(settings)
    kinds = settings.inside("rope_parameters") if settings.has("rope_parameters") else settings
    stated = kinds.has(SLIDING) and kinds.inside(SLIDING).has("rope_theta")
    ambiguous = any(found["windows"]) and settings.has("rope_theta") and not stated
    if ambiguous and settings.number("rope_theta", MIN_THETA, MAX_THETA) != _THETA:
        raise UnsupportedError(
            "readers differ on the rotary base of layers with a window", path=settings.path,
            found=f"rope_theta {settings.values['rope_theta']}", expected="rope_parameters by kind of layer",
        )  # fmt: skip
    return found


_OLMO3 = replace(
    _OLMO2, model_type="olmo3", class_name="Olmo3ForCausalLM",
    keys=(*_OLMO2.keys, LAYER_ROPES, Keys(_read, _WINDOWS.write)),
    options={**_OLMO2.options, "default_theta": _THETA, "windowed_theta": ("rope_theta", _THETA)},
    gguf_mark="sliding_window",
)  # fmt: skip

# OLMoE (2409.02060): many small experts, norms over all queries and all keys of a token, clipped projections.
_OLMOE = Family(
    "olmoe", "OlmoeForCausalLM",
    (ATTENTION_BIAS, number("clip_qkv", "clip_qkv", 1e-6, 1e6, None, null=None), experts(norm_key="norm_topk_prob")),
    options={"kv_heads_required": False, "qk_norm": "width"},
    gguf=GgufArchitecture(
        "olmoe", keys=EXPERT_KEYS[:2], normalized=False, tied=False, full_width=True,
        refused={"fewer KV heads than heads": lambda config: config.num_kv_heads != config.num_heads},
    ),
)  # fmt: skip

FAMILIES = (_OLMO2, _OLMO3, _OLMOE)
