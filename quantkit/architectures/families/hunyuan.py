"""Hunyuan, dense (Tencent): norms of each head's queries and keys, after their rotation.

Its description is the code of transformers.
"""

from __future__ import annotations

import struct

from quantkit.architectures.config import Limits
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family, GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import DEFAULT_THETA, MAX_THETA, MIN_THETA
from quantkit.base.json_values import Settings, shorten_float32

_ALPHA = "alpha"
# Far beyond what is published, 1000.
_ALPHAS = (1e-3, 1e6)
_THETA = "rope_theta"
_ROTARY = ("rope_scaling", "rope_parameters")


def _prepare(settings: Settings) -> Settings:
    """Replace dynamic scaling with a fixed ``alpha``, which only changes the rotary base, by that
    base. The other settings of such a scaling have no effect.
    """
    for key in _ROTARY:
        # transformers reads the first one that is not empty.
        if settings.values.get(key):
            rotary = settings.inside(key)
            break
    else:
        return settings
    kind = rotary.values.get("rope_type", rotary.values.get("type"))
    if kind != "dynamic" or _ALPHA not in rotary.values:
        return settings
    values = dict(settings.values)
    if not rotary.values[_ALPHA]:
        # Null and 0 are none: dynamic scaling as in other families.
        values[key] = {name: value for name, value in rotary.values.items() if name != _ALPHA}
        return Settings(values, settings.path)
    alpha = rotary.number(_ALPHA, *_ALPHAS)
    # A head of two dimensions has no exponent.
    size = settings.integer("head_dim", 4, Limits.heads)
    theta = DEFAULT_THETA
    for source in (settings, rotary):
        if source.has(_THETA):
            theta = source.number(_THETA, MIN_THETA, MAX_THETA)
    # The base of NTK-aware scaling, rounded to what all formats can store.
    scaled_theta = theta * alpha ** (size / (size - 2))
    (stored_theta,) = struct.unpack("<f", struct.pack("<f", scaled_theta))
    values["rope_parameters"] = {_THETA: shorten_float32(stored_theta)}
    values["rope_scaling"] = None
    return Settings(values, settings.path)


HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    (keys.ATTENTION_BIAS,),
    options={
        "head_dim_required": True,
        "kv_heads_required": False,
        "qk_norm": "head",
        "qk_norm_after_rotary": True,
    },
    prepare=_prepare,
    names={
        "attention.q_norm": BLOCK + "self_attn.query_layernorm",
        "attention.k_norm": BLOCK + "self_attn.key_layernorm",
    },
    gguf=GgufArchitecture("hunyuan-dense"),
)
