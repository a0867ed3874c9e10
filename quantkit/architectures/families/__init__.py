"""The families that quantkit supports, found automatically, and config.json: reading, writing,
ignored settings.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.rope import FULL, SLIDING
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import UnsupportedError

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
_THETA = "rope_theta"
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
_NEW = "rope_parameters"
_OLD = "rope_scaling"


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its ``model_type``."""
    modules = []
    for module in pkgutil.iter_modules(__path__):
        modules.append(importlib.import_module(f"{__name__}.{module.name}"))
    return {
        family.model_type: family
        for module in modules
        for family in getattr(module, "FAMILIES", ())
    }


def is_known_family(raw: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face ``config.json`` names a family that the decoder runs, or none
    at all.
    """
    kind = raw.get("model_type")
    if isinstance(kind, str):
        family = families().get(kind)
    else:
        family = None
    return not isinstance(kind, str) or (family is not None and family.runs)


def config_from_hf(raw: Mapping[str, Any], path: object) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture, activation or setting that is not supported.
    """
    settings = Settings(raw, path)
    kind = settings.string(
        "model_type", hint="this looks like Meta's params.json" if "dim" in raw else None
    )
    family = families().get(kind)
    if family is None or not family.runs:
        supported = sorted(name for name, known in families().items() if known.runs)
        raise UnsupportedError(
            "architecture is not supported",
            path=settings.path,
            found=kind,
            expected=", ".join(supported),
            hint=(
                "quantize, verify and eval have it run by transformers, if `pip install"
                " 'quantkit[transformers]'` was done, and so has generate with"
                ' `backend="transformers"`; or `tensors_only=True` of quantize and convert takes'
                " its tensors as they are"
            ),
        )
    return family.read(settings)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a Hugging Face ``config.json`` that say all of `config`."""
    family = families()[config.architecture]
    ends = config.eos_token_ids
    return {
        "architectures": [family.class_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS.get(config.activation, "silu"),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
        **config.rope.to_hf(config.head_dim),
        **family.write(config),
    }


def list_ignored_rope_settings(raw: Mapping[str, Any]) -> list[str]:
    """Return one line for each rotary setting of a config.json that transformers 5 ignores in
    favour of another value.

    Readers differ in their order of precedence: what one ignores another uses. Values of the wrong
    type are ignored here; the reader of `raw` refuses them.
    """
    new = _object(raw, _NEW)
    old = _object(raw, _OLD)
    family = families().get(str(raw.get("model_type")))
    if not {FULL, SLIDING}.isdisjoint(new) or (
        family is not None and "windowed_theta" in family.options
    ):
        return list(_by_layer(raw, new, old))
    used, name = (old, _OLD) if old else (new, _NEW)
    lines = list(_compare_type_spellings(used, name))
    for key in (_THETA, _PARTIAL):
        lines += _report_difference(raw.get(key), key, used.get(key), f"{name}.{key}")
    lines += _report_difference(
        used.get(_ORIGINAL), f"{name}.{_ORIGINAL}", raw.get(_ORIGINAL), _ORIGINAL
    )
    if old and new:
        stated = {
            _THETA: raw.get(_THETA),
            _PARTIAL: raw.get(_PARTIAL),
            "rope_type": old.get("type"),
            **old,
        }
        lines += _find_overridden_settings(new, _NEW, stated)
    return lines


def _by_layer(
    raw: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any]
) -> Iterator[str]:
    full = _object(new, FULL)
    sliding = _object(new, SLIDING)
    places = {FULL: f"{_NEW}.{FULL}", SLIDING: f"{_NEW}.{SLIDING}"}
    merged = {**full, **old}
    yield from _find_overridden_settings(
        {key: value for key, value in full.items() if key in old}, places[FULL], old
    )
    for settings, name, base in (
        (merged, places[FULL], _THETA),
        (sliding, places[SLIDING], "rope_local_base_freq"),
    ):
        yield from _compare_type_spellings(settings, name)
        yield from _report_difference(raw.get(base), base, settings.get(_THETA), f"{name}.{_THETA}")
        if settings.get("rope_type", settings.get("type")) in _WITH_ORIGINAL:
            own = settings.get(_ORIGINAL)
            if own is not None:
                used = f"{name}.{_ORIGINAL}"
            else:
                used = "max_position_embeddings"
            yield from _report_difference(
                raw.get(_ORIGINAL),
                _ORIGINAL,
                raw.get("max_position_embeddings") if own is None else own,
                used,
            )


def _compare_type_spellings(settings: Mapping[str, Any], name: str) -> Iterator[str]:
    yield from _report_difference(
        settings.get("type"), f"{name}.type", settings.get("rope_type"), f"{name}.rope_type"
    )


def _find_overridden_settings(
    settings: Mapping[str, Any], name: str, by: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings that ``rope_scaling`` states differently, or not at all."""
    for key, value in settings.items():
        if value is not None and by.get(key) != value and key != "type":
            if by.get(key) is not None:
                found = f"states {format_value(by[key])}"
            else:
                found = "is used and does not have it"
            yield f"{name}.{key} {format_value(value)} is ignored: {_OLD} {found}"


def _report_difference(ignored: Any, ignored_key: str, used: Any, used_key: str) -> Iterator[str]:
    if ignored is not None and used is not None and ignored != used:
        yield (
            f"{ignored_key} {format_value(ignored)} is ignored: {used_key} is {format_value(used)}"
        )


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if isinstance(value, dict):
        return value
    return {}
