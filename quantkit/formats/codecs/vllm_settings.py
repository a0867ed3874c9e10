"""What vLLM refuses in the settings of a folder, whichever linears they are for.

Source: vLLM 0.32's `AutoGPTQConfig`, `AutoAWQConfig`, `CompressedTensorsConfig` and their helpers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_REQUIRED = {
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
}
"""By the method the keys without which vLLM stops; of those in one tuple it needs any."""
# How many key or value numbers may share a scale: those of a layer, or of a head.
_CACHE_STRATEGIES = ("tensor", "attn_head")


def iter_refused_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each reason for which vLLM refuses some settings: the doctor's rule, and what was
    found.
    """
    method = str(settings.get("quant_method")).lower()
    for keys in _REQUIRED.get(method, ()):
        if not any(key in settings for key in keys):
            yield "vllm-settings", f"no value for '{keys[-1]}'"
    if method == "gptq":
        place = _act_order(settings)
        if place is not None:
            yield "gptq-order", f"groups in the order of activations: {place}"
    if method == "compressed-tensors":
        sparsity = settings.get("sparsity_config")
        cache = settings.get("kv_cache_scheme")
        if isinstance(sparsity, Mapping) and sparsity.get("targets"):
            yield "vllm-settings", "'sparsity_config', which vLLM has dropped"
        if isinstance(cache, Mapping) and not _is_read_cache(cache):
            yield "vllm-settings", "'kv_cache_scheme' other than symmetric fp8 per tensor or head"


def _act_order(settings: Mapping[str, Any]) -> str | None:
    """Find where settings of GPTQ state groups in the order of activations; None if nowhere. vLLM
    does not look at ``static_groups``, nor at whether a pattern matches anything.
    """
    base_order = settings.get("desc_act")
    base_size = settings.get("group_size")
    # With one scale a row, the order of the inputs has no effect.
    if base_order and base_size != -1:
        return "desc_act is true"
    patterns = settings.get("dynamic")
    if not isinstance(patterns, Mapping):
        return None
    for pattern, values in patterns.items():
        if pattern.startswith("-:") or not isinstance(values, Mapping):
            continue
        if values.get("desc_act", base_order) and values.get("group_size", base_size) != -1:
            return f"desc_act is true by the pattern {pattern!r:.60}"
    return None


def _is_read_cache(scheme: Mapping[str, Any]) -> bool:
    is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return is_fp8 and scheme.get("strategy") in _CACHE_STRATEGIES and bool(scheme.get("symmetric"))
