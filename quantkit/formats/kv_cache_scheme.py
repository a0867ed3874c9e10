"""The scheme of a quantized key/value cache, as the settings of a quantization state it.

It is ``kv_cache_scheme``: an object, or ``static`` in AutoFP8's; Model Optimizer's ``kv_cache_quant_algo`` is a name.
Sources: compressed-tensors' `QuantizationArgs`, vLLM's `BaseKVCacheMethod`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.formats.codecs.compressed_tensors import KV_CACHE_SCHEME
from quantkit.json_values import Settings, shown

_ALGORITHM = "kv_cache_quant_algo"
_BY_NAME = ("static", "dynamic")
_BITS: Mapping[str, tuple[int, ...]] = {"int": tuple(range(1, 33)), "float": (4, 6, 8)}
_TENSOR, _ATTN_HEAD, _TOKEN, _BLOCK = "tensor", "attn_head", "token", "block"
_GROUPED = ("group", "tensor_group")
_STRATEGIES = (_TENSOR, "channel", *_GROUPED, _BLOCK, _TOKEN, _ATTN_HEAD)
_DYNAMIC_STRATEGIES = (_TOKEN, _TENSOR, *_GROUPED)
_LOCAL = "local"


def stated_scheme(settings: Settings | None) -> Mapping[str, Any] | None:
    """The scheme of the cache as settings of a quantization state it; None if they state none.

    Raises:
        CheckpointError: for a value that is neither an object nor a known name, and for an object that
            compressed-tensors does not accept, naming the key.
    """
    value, named = (None if settings is None else settings.values.get(key) for key in (KV_CACHE_SCHEME, _ALGORITHM))
    path = None if settings is None else settings.path
    if isinstance(value, Mapping):
        if (refused := _refused(value)) is not None:
            key, expected = refused
            raise CheckpointError(
                f"compressed-tensors does not accept {KV_CACHE_SCHEME}.{key}", path=path, found=shown(value.get(key)),
                expected=expected,
            )  # fmt: skip
        return value or None
    if value in _BY_NAME and isinstance(value, str):
        return {"num_bits": 8, "type": "float", "dynamic": value == "dynamic"}
    wrong = value if value is not None else None if isinstance(named, str) else named
    if wrong is not None:
        raise CheckpointError(
            "the scheme of the KV cache is not known", path=path, found=shown(wrong),
            expected=f"an object under {KV_CACHE_SCHEME}, or {' or '.join(_BY_NAME)}",
        )  # fmt: skip
    if named == "FP8":
        return {"num_bits": 8, "type": "float", "dynamic": False}
    return {"type": named} if named else None


def states_scheme(settings: Settings) -> bool:
    """Whether settings of a quantization say anything of the cache."""
    return settings.has(KV_CACHE_SCHEME) or settings.has(_ALGORITHM)


def scheme_text(scheme: Mapping[str, Any] | None) -> str:
    """A scheme for people."""
    if scheme is None:
        return "no scheme stated"
    bits, strategy = scheme.get("num_bits", ""), scheme.get("strategy")
    kind = "dynamic" if scheme.get("dynamic") else "static"
    return f"{scheme.get('type', 'int')}{bits}{f' per {strategy}' if strategy else ''}, {kind}"[:80]


def needs_zero_points(scheme: Mapping[str, Any] | None) -> bool:
    """Whether readers take zero points from the folder."""
    return scheme is not None and not scheme.get("symmetric", True) and not scheme.get("dynamic")


def expected_elements(scheme: Mapping[str, Any] | None, num_heads: int) -> int | None:
    """How many elements a scale or zero point has; None if the scheme does not determine it.

    Args:
        num_heads: of the keys and values, or of the queries, that it scales; 0 if unknown.
    """
    if scheme is None or scheme.get("dynamic") or str(scheme.get("type", "int")).lower() not in _BITS:
        return None
    return {_TENSOR: 1, _ATTN_HEAD: num_heads or None}.get(_strategy(scheme) or "")


def _strategy(scheme: Mapping[str, Any]) -> str | None:
    """The strategy, as stated or from the group size; None if it is unknown."""
    named, size = scheme.get("strategy"), scheme.get("group_size")
    if named is None:
        return _TENSOR if size is None else "group" if size > 0 else "channel" if size == -1 else None
    return named.lower() if isinstance(named, str) and named.lower() in _STRATEGIES else None


def _refused(scheme: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key with a value that `QuantizationArgs` does not accept, and what it accepts; None if there is none.

    Values are of JSON's own types: numbers and booleans in quotes are refused.
    """
    kind, bits, size = scheme.get("type", "int"), scheme.get("num_bits", 8), scheme.get("group_size")
    allowed = _BITS.get(kind.lower(), ()) if isinstance(kind, str) else ()
    if not allowed:
        return "type", " or ".join(_BITS)
    if type(bits) is not int or bits not in allowed:
        return "num_bits", f"an integer from 1 to {allowed[-1]}" if len(allowed) > 3 else "4, 6 or 8"
    if not isinstance(scheme.get("symmetric", True), bool):
        return "symmetric", "true or false"
    if size is not None and (type(size) is not int or size < -1):
        return "group_size", "a positive integer, or -1 for channels"
    if (strategy := _strategy(scheme)) is None:
        return "strategy", ", ".join(_STRATEGIES)
    if (size is not None and size > 0) != (strategy in _GROUPED):
        return "group_size", f"a positive integer for {' and '.join(_GROUPED)}, and for no other strategy"
    if (scheme.get("block_structure") is not None) != (strategy == _BLOCK):
        return "block_structure", f"rows and columns for {_BLOCK}, and for no other strategy"
    return _refused_dynamic(scheme.get("dynamic", False), strategy)


def _refused_dynamic(dynamic: object, strategy: str) -> tuple[str, str] | None:
    local = isinstance(dynamic, str) and dynamic.lower() == _LOCAL
    if not (local or isinstance(dynamic, bool)):
        return "dynamic", f"true, false or {_LOCAL}"
    if local and strategy != "tensor_group":
        return "dynamic", f"true or false for {strategy}"
    if dynamic and strategy not in _DYNAMIC_STRATEGIES:
        return "dynamic", f"false for {strategy}"
    return ("dynamic", f"true for {strategy}") if strategy == _TOKEN and not dynamic else None
